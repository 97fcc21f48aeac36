"""The web application on a fresh database, without a process, a socket or an engine: tests settle requests."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson
from httpx import Response
from starlette.applications import Starlette
from starlette.testclient import TestClient

from support.databases import fresh_url
from support.pending_requests import incoming
from tinsmith.api.app import create_app
from tinsmith.api.services import EngineStatus, Services
from tinsmith.auth.keys import Keys, digest_of
from tinsmith.auth.quotas import QuotaLimits, Quotas
from tinsmith.auth.signing import Signer
from tinsmith.auth.tenants import StoredTenants
from tinsmith.auth.tokens import Tokens
from tinsmith.base_models import Bases
from tinsmith.batch.coordinator.coordinator import Coordinator
from tinsmith.batch.coordinator.model_gateway import ModelGateway
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.openai.reconciler import Reconciler, ReconcilerParts
from tinsmith.batch.openai.rows import OpenAIBatches
from tinsmith.chat.tokenizer import ModelTokenizers
from tinsmith.cluster.executors import DedicatedSamplers, Dispatch, Executors
from tinsmith.cluster.profiles import Profiles
from tinsmith.cluster.sample_admission import SampleAdmission
from tinsmith.db.database import Database
from tinsmith.db.factory import open_database
from tinsmith.db.schema import KEYS
from tinsmith.db.wakeups import Waiters
from tinsmith.errors import TinsmithError
from tinsmith.runtime.threads import ThreadPools
from tinsmith.settings import Settings
from tinsmith.storage.directories import Directories
from tinsmith.store.audit import Audit
from tinsmith.store.checkpoint_jobs import CheckpointJobs
from tinsmith.store.checkpoints import CheckpointRef, Checkpoints, NewCheckpoint, completion
from tinsmith.store.curves import Curves
from tinsmith.store.custom_losses import CustomLosses
from tinsmith.store.database_counts import DatabaseCounts
from tinsmith.store.exchanges import Exchanges
from tinsmith.store.files import Files
from tinsmith.store.futures import Futures, Settlement
from tinsmith.store.machine_history import MachineHistory
from tinsmith.store.models import Models, set_state
from tinsmith.store.overview import Overview
from tinsmith.store.recent_steps import RecentSteps
from tinsmith.store.recorded_sequences import Sequences
from tinsmith.store.responses import Responses
from tinsmith.store.sampling_sessions import SamplingSessions
from tinsmith.store.server_sessions import ImplicitSessions, ServerSessions
from tinsmith.store.sessions import Sessions
from tinsmith.store.stored_samples import StoredSamples
from tinsmith.store.usage import Usage
from tinsmith.telemetry.metrics import ServerMeters
from tinsmith.telemetry.timeline import Traces
from tinsmith.telemetry.tracing import Tracing
from tinsmith.types import ModelShape, Pending
from tinsmith.wire import tinker_public_pb2 as pb
from tinsmith.wire.token_stream import Partials

BASE = "local/tiny"
SHAPES = (
    ModelShape(name=BASE, path="/models/tiny", vocab_size=50, max_context_length=16, arch="Tiny"),
    ModelShape(name="local/other", path="/models/other", vocab_size=50, max_context_length=16, arch="Tiny"),
)
MAX_BODY_BYTES = 100_000
NO_LIMITS = QuotaLimits()
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 5}
ALICE, BOB = "tml-alice", "tml-bob"


@dataclass(frozen=True, slots=True)
class Harness:
    app: Starlette
    services: Services
    client: TestClient
    woken: list[str] = field(default_factory=list)
    queue: dict[str, tuple[str, str | None]] = field(default_factory=dict)

    def post(self, path: str, body: object, key: str = ALICE) -> Response:
        return self.client.post(f"/api/v1/{path}", json=body, headers={"X-API-Key": key})  # type: ignore[return-value]

    def get(self, path: str, key: str = ALICE) -> Response:
        return self.client.get(f"/api/v1/{path}", headers={"X-API-Key": key})  # type: ignore[return-value]

    def send(self, method: str, path: str, body: object = None, key: str = ALICE) -> Response:
        headers = {"X-API-Key": key}
        return self.client.request(method, f"/api/v1/{path}", json=body, headers=headers)  # type: ignore[return-value]

    def ok(self, path: str, body: object, key: str = ALICE) -> dict:
        answer = self.post(path, body, key)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def session(self, key: str = ALICE) -> str:
        return self.ok("create_session", {"tags": [], "sdk_version": "0.38.0"}, key)["session_id"]

    def model(self, session_id: str | None = None, model_seq_id: int = 0, key: str = ALICE, **changes: object) -> str:
        """Store a model as the engine creates it."""
        session_id = session_id or self.session(key)
        body = {"session_id": session_id, "model_seq_id": model_seq_id, "base_model": BASE, **changes}
        future = self.ok("create_model", body, key)
        self.settle(future["request_id"], b'{"type":"create_model"}')
        with self.services.models._db.write() as connection:
            connection.execute(set_state(future["model_id"], "ready"))
        return future["model_id"]

    def sampler(self, session_id: str | None = None, sampler_seq_id: int = 0, key: str = ALICE) -> str:
        session_id = session_id or self.session(key)
        body = {"session_id": session_id, "sampling_session_seq_id": sampler_seq_id, "base_model": BASE}
        return self.ok("create_sampling_session", body, key)["sampling_session_id"]

    def checkpoint(self, model_id: str, kind: str = "weights", name: str = "one", **changes: object) -> str:
        """Store a checkpoint as the engine does, without files."""
        model = self.services.models.find(model_id)
        assert model is not None
        fields = {"base_model": BASE, "lora": replace(model.lora, seed=None), **changes}
        new = NewCheckpoint(CheckpointRef(model_id, kind, name), model.tenant_id, **fields)  # type: ignore[arg-type]
        with self.services.models._db.write() as connection:
            for statement in completion(new, uuid.uuid4().hex, 7):
                connection.execute(statement)
        return new.ref.path

    def save_checkpoint(
        self, model_id: str, kind: str = "weights", name: str = "one", files: Mapping[str, bytes] = FILES
    ) -> str:
        """Store a checkpoint with files."""
        model = self.services.models.find(model_id)
        assert model is not None
        checkpoints = self.services.checkpoints
        directory, size_bytes = checkpoints.files.write(lambda path: write_files(path, files))
        new = NewCheckpoint(CheckpointRef(model_id, kind, name), model.tenant_id, model.base_model, model.lora)
        with self.services.models._db.write() as connection:
            for statement in completion(new, directory, size_bytes):
                connection.execute(statement)
        return new.ref.path

    def settle(self, request_id: str, body: bytes = b"{}", result_type: str = "json") -> None:
        self._settle(Settlement(request_id, body=body, result_type=result_type))

    def fail(self, request_id: str, error: TinsmithError) -> None:
        self._settle(Settlement(request_id, error=error))

    def _settle(self, settlement: Settlement) -> None:
        self.services.futures.settle([settlement], {})
        self.services.waiters.wake([settlement.request_id])

    def pending(self) -> list[Pending]:
        """The pending requests of all base models, including refused ones, which engines skip."""
        return [row for shape in SHAPES for row in incoming(self.services.futures._db, shape.name)]

    def kinds(self) -> dict[str, str]:
        """The accepted pending requests and their kinds."""
        return {row.request_id: row.kind for row in self.pending() if row.state == "pending"}

    def read_request_body(self, request_id: str) -> bytes:
        return self.services.futures.bodies([request_id])[request_id]

    def result(self, request_id: str, key: str = ALICE) -> dict:
        answer = self.post("retrieve_future", {"request_id": request_id}, key)
        assert answer.status_code == 200, answer.text
        return answer.json()


def make_harness(
    directory: Path, *, hold_s: float = 0.05, local: bool = False, limits: QuotaLimits = NO_LIMITS, **changes: object
) -> Harness:
    """`changes` are settings; `local` is without keys."""
    database = open_database(fresh_url(directory))
    woken: list[str] = []
    queue: dict[str, tuple[str, str | None]] = {}
    if not local:
        _let_in(database, ALICE, BOB)
    signer = Signer(bytes(32))
    settings = Settings(data_dir=directory, max_body_bytes=MAX_BODY_BYTES, hold_s=hold_s, **changes)  # type: ignore[arg-type]
    checkpoints = Checkpoints(database, Directories(directory / "checkpoints"))
    server_sessions = ServerSessions(Sessions(database), SamplingSessions(database), 300.0)
    quotas = Quotas(database, limits)
    admission = SampleAdmission(quotas, Dispatch(Executors(database)))
    gateway = ModelGateway(
        Bases(SHAPES), Sessions(database), server_sessions, checkpoints, Futures(database), Waiters(), admission
    )  # fmt: skip
    files, batches = Files(database, str(directory / "files")), OpenAIBatches(database)
    meters = ServerMeters(None, 2, DatabaseCounts(database, "here").counts)
    services = Services(
        settings=settings,
        bases=Bases(SHAPES),
        sessions=Sessions(database),
        models=Models(database),
        sampling_sessions=SamplingSessions(database),
        checkpoints=Checkpoints(database, Directories(directory / "checkpoints")),
        checkpoint_jobs=CheckpointJobs(database, "here"),
        futures=Futures(database, lambda base_model, _engine_id=None: woken.append(base_model), meters.count_request),
        usage=Usage(database),
        audit=Audit(database),
        traces=Traces(database),
        waiters=Waiters(),
        signer=signer,
        tenants=StoredTenants(Keys(database), Tokens(signer), prefixes=settings.key_prefixes),
        quotas=quotas,
        custom_losses=CustomLosses(database),
        responses=Responses(database),
        exchanges=Exchanges(database),
        sequences=Sequences(database),
        batch_jobs=BatchJobs(database),
        coordinator=Coordinator(settings, BatchJobs(database), "here"),
        model_gateway=gateway,
        files=files,
        openai_batches=batches,
        batch_reconciler=Reconciler(
            settings, ReconcilerParts(batches, files, BatchJobs(database), lambda _job_id: None)
        ),
        tokenizers=ModelTokenizers(),
        partials=Partials(),
        implicit_sessions=ImplicitSessions(server_sessions),
        curves=Curves(database),
        recent_steps=RecentSteps(database),
        machine_history=MachineHistory(database),
        stored_samples=StoredSamples(database),
        overview=Overview(database),
        engines=EngineStatus(lambda base_model: queue.get(base_model, ("active", None)), lambda _base_model: None),
        sample_admission=admission,
        dedicated_samplers=DedicatedSamplers(database),
        profiles=Profiles(database),
        meters=meters,
        tracing=Tracing(),
        threads=ThreadPools.start(),
        reads_wait=database.reads_wait,
    )
    app = create_app(services)
    client = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
    return Harness(app, services, client, woken, queue)


def _let_in(database: Database, *secrets: str) -> None:
    """Create readable keys: `tml-alice` is alice's."""
    with database.write() as connection:
        for secret in secrets:
            row = {"tenant_id": secret.removeprefix("tml-"), "name": "", "digest": digest_of(secret), "created_at": 1.0}
            connection.execute(KEYS.insert(), row)


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (directory / name).write_bytes(content)


def close(harness: Harness) -> None:
    harness.client.close()
    harness.services.threads.close()
    harness.services.models._db.close()


def pass_bytes(
    model_id: str, seq_id: int, tokens: tuple[int, ...] = (1, 2, 3), *, loss_fn: str = "cross_entropy", **fields: object
) -> bytes:
    """A forward_backward request of one datum."""
    import numpy as np

    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn=loss_fn, **fields)  # type: ignore[arg-type]
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
    for name, values, dtype in (
        ("target_tokens", np.array(tokens, "<i8"), pb.DTYPE_INT64),
        ("weights", np.ones(len(tokens), "<f4"), pb.DTYPE_FLOAT32),
    ):
        datum.loss_fn_inputs[name].CopyFrom(pb.Tensor(dense=values.tobytes(), dtype=dtype))
    return message.SerializeToString()


def send_pass(
    harness: Harness, body: bytes, *, path: str = "forward_backward", key: str = ALICE, **headers: str
) -> Response:
    all_headers = {"X-API-Key": key, "Content-Type": "application/x-protobuf"}
    all_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
    return harness.client.post(f"/api/v1/{path}", content=body, headers=all_headers)  # type: ignore[return-value]


def sample_request(sampling_session_id: str, seq_id: int = 0, **changes: object) -> dict[str, object]:
    body: dict[str, object] = {
        "sampling_session_id": sampling_session_id,
        "seq_id": seq_id,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 3},
        "type": "sample",
    }
    return body | changes


def json_bytes(value: object) -> bytes:
    return orjson.dumps(value)
