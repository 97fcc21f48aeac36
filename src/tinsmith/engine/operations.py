"""The barriers of a model: creating, loading, saving, publishing, unloading.

Each method executes one request on the backend and returns the settlement for the engine to write, or an `Upload` that
must end first. A UserError is an answer; the engine handles any other exception. A publish writes no file (see
`versions`).

With remote storage (`Directories.is_remote`), making files durable takes as long as the network does. The engine's
thread makes the files of a save or a load and other threads upload them; meanwhile the model's lane is held, so that
its requests stay in order, and all other models train. The request is settled when its files are durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import orjson
import sqlalchemy as sa

from tinsmith.backends import Backend
from tinsmith.engine.versions import Versions
from tinsmith.errors import TinsmithError, UserError
from tinsmith.runtime.failpoints import hit
from tinsmith.storage import encryption
from tinsmith.store import sampling_sessions, usage
from tinsmith.store.audit import entry
from tinsmith.store.checkpoints import CheckpointRef, Checkpoints, NewCheckpoint, completion, failure, parse_path
from tinsmith.store.futures import Settlement
from tinsmith.store.models import Model, set_alpha, set_state
from tinsmith.store.sampling_sessions import NewSamplingSession, inflight_version
from tinsmith.types import Pending
from tinsmith.wire.weights import LoadWeights, SaveRequest, read_load, read_parallelism, read_save

THREADS = 4

POLL_S = 0.02
"""How often an idle engine checks for finished uploads."""


@dataclass(frozen=True, slots=True)
class Upload:
    """`run` runs on any thread and returns the directory and its bytes; `build_settlement` runs on the
    engine's.
    """

    run: Callable[[], tuple[str, int]]
    build_settlement: Callable[[str, int], Settlement]


@dataclass(frozen=True, slots=True)
class RunningUpload:
    request: Pending
    body: bytes
    upload: Upload
    future: Future[tuple[str, int]]

    def settlement(self) -> Settlement:
        """Raises the upload's exception."""
        return self.upload.build_settlement(*self.future.result())


class Uploads:
    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: list[RunningUpload] = []

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, request: Pending, body: bytes, upload: Upload) -> None:
        self._pool = self._pool or ThreadPoolExecutor(THREADS, thread_name_prefix="upload")
        self._running.append(RunningUpload(request, body, upload, self._pool.submit(upload.run)))

    def take_finished(self) -> Iterator[RunningUpload]:
        """Uploads that ended since the last call."""
        for upload in [running for running in self._running if running.future.done()]:
            self._running.remove(upload)
            yield upload

    def wait(self) -> None:
        """Wait until all have ended."""
        wait_for([upload.future for upload in self._running])


CHECKPOINT_KINDS = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}


class Operations:
    def __init__(
        self,
        backend: Backend,
        checkpoints: Checkpoints,
        versions: Versions,
        degrees: Mapping[str, int],
    ) -> None:
        """`degrees` are the engine's degrees of parallelism, by the names of their settings."""
        self._degrees = degrees
        self._backend = backend
        self._checkpoints = checkpoints
        self._versions = versions

    def run(self, request: Pending, model: Model, body: bytes) -> Settlement | Upload:
        """Execute one barrier of a model. Raises TinsmithError, which is the answer."""
        operation = {
            "create_model": self._create_model,
            "load_model": self._load_weights,
            "load_weights": self._load_weights,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_weights,
            "save_weights_external": self._save_weights,
        }[request.kind]
        return operation(request, model, body)

    def failure_effects(self, request: Pending, body: bytes, error: TinsmithError) -> Sequence[sa.Executable]:
        """The database effects of a failed barrier."""
        if request.model_id is None:
            return []
        if request.kind in ("create_model", "load_model"):
            return [set_state(request.model_id, "failed", str(error))]
        if request.kind in CHECKPOINT_KINDS and (name := read_save(body).path):
            return [failure(CheckpointRef(request.model_id, CHECKPOINT_KINDS[request.kind], name), str(error))]
        return []

    def unload(self, model_id: str) -> None:
        """Drop a model's weights and its ephemeral versions."""
        hit("model.unloading")
        self._backend.unload_model(model_id)
        self._versions.forget(model_id)

    def _create_model(self, request: Pending, model: Model, body: bytes) -> Settlement:
        read_parallelism(body).check(self._degrees)
        self._backend.create_model(model.model_id, model.lora, model.optimizer_type)
        hit("model.created")
        answer = {"model_id": model.model_id, "type": "create_model"}
        return _answer(request, answer, effects=[set_state(model.model_id, "ready"), _creation_entry(model)])

    def _load_weights(self, request: Pending, model: Model, body: bytes) -> Settlement:
        load = read_load(body)
        alpha = self.load_into(model, load, is_late=(request.seq_id or 0) > 1)
        answer = {"path": load.path, "model_id": model.model_id, "type": "load_weights"}
        details = {"model_id": model.model_id, "tinker_path": load.path, "optimizer": load.optimizer}
        effects = [set_state(model.model_id, "ready"), entry(model.tenant_id, "checkpoint_loaded", details)]
        if alpha != model.lora_alpha:
            effects.append(set_alpha(model.model_id, alpha))
        if request.kind == "load_model":
            effects.append(_creation_entry(model))
        return _answer(request, answer, effects=effects)

    def load_into(self, model: Model, load: LoadWeights, *, as_of: float | None = None, is_late: bool = False) -> float:
        """Replace a model's weights, alpha, optimizer state and gradient by those of a checkpoint; return the alpha.

        Raises UserError, and changes nothing, if the checkpoint does not fit, or is newer than `as_of`: a replay must
        not load a checkpoint that overwrote the loaded one. A late load keeps the alpha, with which a replay repeats
        the requests before it.
        """
        checkpoint = self._checkpoints.get(model.tenant_id, parse_path(load.path), granted_by=load.granted_by)
        if as_of is not None and checkpoint.created_at > as_of:
            raise UserError(f"path {load.path!r} was overwritten after it had been loaded")
        # If the client named another base, it was found to have the same weights when the model was created.
        if model.base_model not in (checkpoint.base_model, load.base_model):
            raise UserError(f"path {load.path!r} is of base model {checkpoint.base_model!r}, not {model.base_model!r}")
        if load.optimizer and checkpoint.kind != "weights":
            raise UserError(
                f"path {load.path!r} holds no optimizer state: optimizer=True needs a /weights/ checkpoint "
                "made by save_state; load it without the optimizer"
            )
        # The checkpoint determines the adapter's shape, but a model's own rank was promised at creation.
        if checkpoint.lora_rank != model.lora_rank:
            raise UserError(f"path {load.path!r} has LoRA rank {checkpoint.lora_rank}, the model has {model.lora_rank}")
        if is_late and checkpoint.lora_alpha != model.lora_alpha:
            raise UserError(
                f"path {load.path!r} has alpha {checkpoint.lora_alpha:g}, the model has {model.lora_alpha:g}, which "
                "only its first request can change; create a model from the checkpoint instead"
            )
        with self._checkpoints.reading(checkpoint) as directory:
            hit("model.loading")
            spec = replace(model.lora, alpha=checkpoint.lora_alpha)
            self._backend.load(
                model.model_id, spec, directory, optimizer=load.optimizer, optimizer_type=model.optimizer_type
            )
        hit("model.loaded")
        return checkpoint.lora_alpha

    def _save_weights(self, request: Pending, model: Model, body: bytes) -> Settlement | Upload:
        save = read_save(body)
        if save.path is None:
            return self._publish(request, model, save)
        kind = CHECKPOINT_KINDS[request.kind]
        new = NewCheckpoint(
            ref=CheckpointRef(model.model_id, kind, save.path),
            tenant_id=model.tenant_id,
            base_model=model.base_model,
            lora=model.lora,
            optimizer_type=model.optimizer_type,
            user_metadata=save.user_metadata,
            ttl_s=save.ttl_seconds,
            keep_last=self._checkpoints.keep_last if save.keep_last is None else save.keep_last,
        )
        replaced = self._checkpoints.begin(new, overwrite=save.overwrite)

        def fill(directory: Path) -> None:
            export = kind == "external_weights"
            self._backend.save(model.model_id, directory, optimizer=kind == "weights", stacked=export)
            if save.age_encryption_recipients:
                encryption.encrypt_files(directory, save.age_encryption_recipients)

        files = self._checkpoints.files
        staged = files.stage(fill)

        def clean_up() -> None:
            # An overwritten checkpoint must not be served from memory, nor fill the disk.
            self._backend.drop_version(new.ref.path)
            files.discard(replaced)

        def build_settlement(directory: str, size_bytes: int) -> Settlement:
            answer: dict[str, str | int] = {"path": new.ref.path, "type": request.kind}
            if kind == "external_weights":
                answer["size_bytes"] = size_bytes
            event = "checkpoint_exported" if kind == "external_weights" else "checkpoint_saved"
            details = {"model_id": model.model_id, "tinker_path": new.ref.path, "size_bytes": size_bytes}
            effects = [
                *completion(new, directory, size_bytes),
                *usage.usage_increments(model.tenant_id, model.session_id, model.base_model, "checkpoint", 1),
                entry(model.tenant_id, event, details),
            ]
            return _answer(request, answer, effects, clean_up)

        if files.is_remote:
            return Upload(partial(files.place, staged), build_settlement)
        return build_settlement(*files.place(staged))

    def _publish(self, request: Pending, model: Model, save: SaveRequest) -> Settlement:
        if save.sampling_session_seq_id is None:
            raise UserError("sampling_session_seq_id is missing; a save without a path needs one")
        sampling_session_id, version_id = _publish_ids(model, save)
        if self._versions.has_sampling_session(sampling_session_id):
            # Its clients rely on its weights, and its row would refuse a second one.
            raise UserError(
                f"sampling_session_seq_id {save.sampling_session_seq_id} is in use: sampling session "
                f"{sampling_session_id!r} exists; use the next number"
            )
        self._versions.publish(model.model_id, version_id, sampling_session_id)
        new = NewSamplingSession(
            sampling_session_id=sampling_session_id,
            session_id=model.session_id,
            tenant_id=model.tenant_id,
            base_model=model.base_model,
            version_id=version_id,
            model_id=model.model_id,
        )
        answer = {"sampling_session_id": sampling_session_id, "type": "save_weights_for_sampler"}
        effects = [sampling_sessions.insertion(new)]
        # A replay publishes it again if it has no files.
        return Settlement(request.request_id, body=orjson.dumps(answer), effects=effects, keep_body=True)

    def publish_again(self, model: Model, body: bytes) -> None:
        """Publish in a replay."""
        save = read_save(body)
        sampling_session_id, version_id = _publish_ids(model, save)
        self._versions.republish(model.model_id, version_id, sampling_session_id)


def _publish_ids(model: Model, save: SaveRequest) -> tuple[str, str]:
    """The sampling session and the version of an ephemeral publish."""
    sampling_session_id = f"{model.session_id}:sample:{save.sampling_session_seq_id}"
    inflight = save.kind == "inflight"
    return sampling_session_id, inflight_version(model.model_id) if inflight else sampling_session_id


def _creation_entry(model: Model) -> sa.Executable:
    return entry(model.tenant_id, "model_created", {"model_id": model.model_id, "base_model": model.base_model})


def _answer(
    request: Pending,
    answer: Mapping[str, str | int],
    effects: Sequence[sa.Executable] = (),
    clean_up: Callable[[], None] | None = None,
) -> Settlement:
    return Settlement(request.request_id, body=orjson.dumps(answer), effects=effects, clean_up=clean_up)
