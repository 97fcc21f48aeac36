"""An engine that tests run iteration by iteration, with a real database and the fake backend."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import sqlalchemy as sa

from support.databases import fresh_url
from tinsmith.backends import Capture, MicroBatches
from tinsmith.backends.fake import FakeBackend
from tinsmith.cluster.ownership import Ownership
from tinsmith.db.database import Database
from tinsmith.db.factory import open_database
from tinsmith.db.wakeups import Mailbox
from tinsmith.engine.loop import Engine, Stores
from tinsmith.engine.telemetry import Records
from tinsmith.errors import EngineFailedError, UserError
from tinsmith.settings import Settings
from tinsmith.storage.directories import Directories
from tinsmith.store.checkpoints import Checkpoints
from tinsmith.store.custom_losses import CustomLosses
from tinsmith.store.futures import FutureOutcome, Futures, NewFuture
from tinsmith.store.models import Models, NewModel
from tinsmith.store.sampling_sessions import SamplingSessions
from tinsmith.store.stored_samples import SampleLimits
from tinsmith.types import LoraSpec, ModelShape, OptimStep, Pass
from tinsmith.wire import tinker_public_pb2 as pb

BASE = "local/tiny"
ENGINE = "engine-0-tests"
SHAPE = ModelShape(name=BASE, path="/models/tiny", vocab_size=50, max_context_length=64, arch="Tiny")
OPTIM = {"adam_params": {"learning_rate": 0.5}}


class FlakyBackend(FakeBackend):
    """Raises the errors in `breaks`, by method name; records the requests of its steps."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.breaks: dict[str, Exception] = {}
        self.poison: int | None = None
        self.steps: list[list[str]] = []

    def run_passes(self, passes: Sequence[Pass]) -> MicroBatches:
        self.steps.append([pass_.request_id for pass_ in passes])
        if any(self.poison in datum.tokens_N for pass_ in passes for datum in pass_.data):
            raise EngineFailedError("the device gave up")
        return super().run_passes(passes)

    def optim_step(self, steps: Sequence[OptimStep]) -> list[dict[str, float] | UserError]:
        self.raise_planned_error("optim_step")
        return super().optim_step(steps)

    def capture(self, model_id: str) -> Capture:
        captured = super().capture(model_id)

        def write(directory: Path) -> None:
            self._write_half(directory)
            captured.write(directory)

        return Capture(captured.num_bytes, write)

    def save(self, model_id: str, directory: Path, *, optimizer: bool, stacked: bool = False) -> None:
        self._write_half(directory)
        super().save(model_id, directory, optimizer=optimizer, stacked=stacked)

    def _write_half(self, directory: Path) -> None:
        """What is left of a file where the disk is full."""
        (directory / "half-written").write_text("...")
        self.raise_planned_error("save")
        (directory / "half-written").unlink()

    def load(
        self, model_id: str, spec: LoraSpec, directory: Path, *, optimizer: bool, optimizer_type: str = "adamw"
    ) -> None:
        self.raise_planned_error("load")
        super().load(model_id, spec, directory, optimizer=optimizer, optimizer_type=optimizer_type)

    def raise_planned_error(self, method: str) -> None:
        if method in self.breaks:
            raise self.breaks[method]


class Bench:
    """One database and data directory, and the successive engines on it."""

    def __init__(self, directory: Path, sockets: Path, url: str = "") -> None:
        self.directory = directory
        self.db = self.open_database(url or fresh_url(directory))
        self.mailbox = Mailbox(sockets, "engine")
        self.server_mailbox = Mailbox(sockets, "server")
        self.futures = Futures(self.db, lambda _base, _engine_id=None: self.server_mailbox.wake("engine"))
        self.models = Models(self.db)
        self.samplers = SamplingSessions(self.db)
        self.checkpoints = Checkpoints(self.db, self.directories("checkpoints"))
        self.settings = Settings(data_dir=directory, seq_gap_s=5)
        self.restart()

    def open_database(self, url: str) -> Database:
        return open_database(url)

    def directories(self, kind: str) -> Directories:
        return Directories(self.directory / kind)

    def restart(self) -> None:
        """Replace the engine, as after a kill: its memory is lost."""
        self.backend = FlakyBackend(SHAPE)
        stores = Stores(
            self.futures,
            self.models,
            self.samplers,
            self.checkpoints,
            self.directories("versions"),
            self.directories("snapshots"),
            CustomLosses(self.db),
            Ownership(self.db, BASE, ENGINE),
            Records(self.db, SampleLimits(of_run=3, of_tenant=9)),
        )
        self.engine = Engine(SHAPE, self.backend, stores, self.mailbox, self.settings)
        self.engine._snapshots._share = 1e9  # snapshots are due as soon as they are taken
        self.engine.start()

    def close(self) -> None:
        self.mailbox.close()
        self.server_mailbox.close()
        self.db.close()

    def run_until_idle(self, count: int = 30) -> None:
        """Run iterations until there is no work, at most `count`."""
        for _ in range(count):
            busy = self.engine.run_once(0.0) or self.engine.run_once(0.0)
            self.engine.flush()
            if not busy:
                return

    def model(self, name: str = "s:train:0", tenant: str = "alice") -> str:
        new = NewModel(name, name.split(":")[0], tenant, BASE, LoraSpec(4))
        self.models.create(new)
        self.submit(name, 0, "create_model", {}, tenant=tenant)
        self.run_until_idle()
        return name

    def submit(
        self,
        model_id: str,
        seq_id: int | None,
        kind: str,
        body: dict[str, object] | bytes,
        *,
        tenant: str = "alice",
        refusal: UserError | None = None,
        num_tokens: int = 0,
    ) -> str:
        ids = {"model_id": model_id, "seq_id": seq_id or None}  # a model's creation has no sequence number
        raw = body if isinstance(body, bytes) else json.dumps(ids | body).encode()
        request_id = f"{model_id}:{'unload' if seq_id is None else seq_id}"
        session = model_id.split(":")[0]
        new = NewFuture(request_id, tenant, session, BASE, kind, raw, num_tokens, model_id=model_id, seq_id=seq_id)
        return self.futures.submit(new, refusal)

    def train(
        self,
        model_id: str,
        seq_id: int,
        tokens: Sequence[int] = (1, 2, 3),
        tenant: str = "alice",
        weights: Sequence[float] | None = None,
    ) -> str:
        """A pass over one datum; `weights` are 1 unless they are given."""
        return self._pass(model_id, seq_id, "forward_backward", tokens, tenant, weights)

    def forward(
        self,
        model_id: str,
        seq_id: int,
        tokens: Sequence[int] = (1, 2, 3),
        tenant: str = "alice",
        weights: Sequence[float] | None = None,
    ) -> str:
        return self._pass(model_id, seq_id, "forward", tokens, tenant, weights)

    def step(self, model_id: str, seq_id: int, rate: float = 0.5, tenant: str = "alice") -> str:
        return self.submit(model_id, seq_id, "optim_step", {"adam_params": {"learning_rate": rate}}, tenant=tenant)

    def _pass(
        self,
        model_id: str,
        seq_id: int,
        kind: str,
        tokens: Sequence[int],
        tenant: str,
        weights: Sequence[float] | None = None,
    ) -> str:
        message = pb.ForwardBackwardRequest(
            model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy", forward_only=kind == "forward"
        )
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
        targets = np.array(tokens, "<i8").tobytes()
        datum.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(dense=targets, dtype=pb.DTYPE_INT64))
        weight_bytes = np.array([1.0] * len(tokens) if weights is None else weights, "<f4").tobytes()
        datum.loss_fn_inputs["weights"].CopyFrom(pb.Tensor(dense=weight_bytes, dtype=pb.DTYPE_FLOAT32))
        raw = message.SerializeToString()
        return self.submit(model_id, seq_id, kind, raw, tenant=tenant, num_tokens=len(tokens))

    def publish(self, model_id: str, seq_id: int, sampler_seq_id: int, kind: str = "snapshot") -> str:
        body = {"sampling_session_seq_id": sampler_seq_id, "kind": kind}
        self.submit(model_id, seq_id, "save_weights_for_sampler", body)
        return f"{model_id.split(':')[0]}:sample:{sampler_seq_id}"

    def sample(self, sampling_session_id: str, seq_id: int = 0, tenant: str = "alice") -> str:
        body = {
            "sampling_session_id": sampling_session_id,
            "seq_id": seq_id,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 3, "seed": 1},
        }
        request_id = f"{sampling_session_id}:{seq_id}"
        session = sampling_session_id.split(":")[0]
        raw = json.dumps(body).encode()
        new = NewFuture(request_id, tenant, session, BASE, "sample", raw, 5, None, sampling_session_id, seq_id)
        return self.futures.submit(new)

    def outcome(self, request_id: str, tenant: str = "alice") -> FutureOutcome | None:
        return self.futures.outcome(tenant, request_id)

    def result(self, request_id: str, tenant: str = "alice") -> dict[str, object]:
        outcome = self.outcome(request_id, tenant)
        assert outcome is not None and outcome.error is None and outcome.body is not None, outcome
        return json.loads(outcome.body)

    def error(self, request_id: str) -> str:
        outcome = self.outcome(request_id)
        assert outcome is not None and outcome.error is not None, outcome
        return outcome.error

    def optimizer_step(self, request_id: str) -> float:
        """Take an optimizer step; return the model's step count."""
        metrics = self.result(request_id)["metrics"]
        assert isinstance(metrics, dict)
        return metrics["step"]

    def weight(self, model_id: str = "s:train:0") -> float:
        return self.backend._models[model_id].weight

    def scalar(self, query: sa.Select) -> object:
        with self.db.read() as connection:
            return connection.scalar(query)


def save_weights(bench: Bench, model: str, seq_id: int, **fields: object) -> str:
    request_id = bench.submit(model, seq_id, "save_weights", {"path": "one"} | fields)
    bench.run_until_idle()
    return request_id
