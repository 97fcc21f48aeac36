"""The barriers of a model: creating, loading, saving, publishing, unloading.

Each method carries out one request on the backend and returns the settlement for the engine to write. A
UserError is an answer; any other exception is the engine's to handle. Ephemeral versions live in the backend's
memory; when the engine is idle the oldest of a model move to disk, so that memory does not grow with the length of
a run and a publish writes no file.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import orjson
import sqlalchemy as sa

from tinsmith import encryption, sampling_sessions, usage
from tinsmith.audit import entry
from tinsmith.backends import Backend
from tinsmith.checkpoints import (
    CheckpointRef,
    Checkpoints,
    NewCheckpoint,
    completion,
    failure,
    parse_path,
)
from tinsmith.crashpoints import reach
from tinsmith.errors import GoneError, LostStateError, TinsmithError, UserError
from tinsmith.futures import Settlement
from tinsmith.models import Model, Models, set_state
from tinsmith.ops import Pending
from tinsmith.sampling_sessions import NewSamplingSession, SamplingSession, SamplingSessions
from tinsmith.storage import Directories
from tinsmith.wire.weights import LoadWeights, SaveWeights, read_load, read_save

CHECKPOINT_KINDS = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}

VERSIONS_IN_MEMORY = 4
"""Ephemeral versions of one model that stay in memory; asynchronous RL uses the last two or three."""

MOST_VERSIONS_IN_MEMORY = 64
"""An engine that is never idle moves the oldest at a publish from here on."""

LOADED_VERSIONS = 32
"""Versions kept loaded from disk for sampling, least recently used first out."""


class Operations:
    def __init__(
        self,
        backend: Backend,
        models: Models,
        samplers: SamplingSessions,
        checkpoints: Checkpoints,
        versions: Directories,
    ) -> None:
        self._backend = backend
        self._models = models
        self._samplers = samplers
        self._checkpoints = checkpoints
        self._versions = versions
        self._ephemeral: defaultdict[str, deque[str]] = defaultdict(deque)
        self._loaded: dict[str, None] = {}

    def run(self, request: Pending, model: Model, body: bytes) -> Settlement:
        """Carry out one barrier of a model. Raises TinsmithError for what the client must be told."""
        operation = {
            "create_model": self._create_model,
            "load_model": self._load_weights,
            "load_weights": self._load_weights,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_weights,
            "save_weights_external": self._save_weights,
        }[request.kind]
        return operation(request, model, body)

    def failed(self, request: Pending, body: bytes, error: TinsmithError) -> Sequence[sa.Executable]:
        """What a failed barrier leaves behind in the database."""
        if request.model_id is None:
            return []
        if request.kind in ("create_model", "load_model"):
            return [set_state(request.model_id, "failed", str(error))]
        if request.kind in CHECKPOINT_KINDS and (name := read_save(body).name):
            return [failure(CheckpointRef(request.model_id, CHECKPOINT_KINDS[request.kind], name), str(error))]
        return []

    def unload(self, model_id: str) -> None:
        """Forget a model's weights and its ephemeral versions."""
        reach("model.unloading")
        self._backend.unload_model(model_id)
        for version_id in self._ephemeral.pop(model_id, ()):
            self._backend.drop_version(version_id)
        self._backend.drop_version(inflight_version(model_id))

    def prepare_version(self, sampler: SamplingSession) -> str | None:
        """Make sure that a sampling session's weights are in memory; returns their version id.

        Raises UserError or LostStateError if they cannot be had any more.
        """
        version_id = sampler.version_id
        if version_id is None:
            return None
        if not self._backend.has_version(version_id):
            self._backend.load_version(version_id, self._directory_of(sampler))
            self._loaded[version_id] = None
        if version_id in self._loaded:
            self._loaded[version_id] = self._loaded.pop(version_id)  # the most recently used is last
        while len(self._loaded) > LOADED_VERSIONS:
            oldest = next(iter(self._loaded))
            del self._loaded[oldest]
            self._backend.drop_version(oldest)
        return version_id

    def _directory_of(self, sampler: SamplingSession) -> Path:
        if sampler.model_path is not None:
            checkpoint = self._checkpoints.get(sampler.tenant_id, parse_path(sampler.model_path))
            return self._checkpoints.checked_directory(checkpoint)
        if sampler.directory is None:
            raise LostStateError(
                f"the weights of sampling session {sampler.sampling_session_id!r} are gone: its model was "
                "unloaded, or the engine died; publish them again, or sample from a saved checkpoint"
            )
        return self._versions.path(sampler.directory)

    def tidy(self) -> bool:
        """Move one ephemeral version to disk if a model has too many in memory; False if none has."""
        for model_id, versions in self._ephemeral.items():
            if len(versions) > VERSIONS_IN_MEMORY:
                self._move_oldest(model_id, leave=len(versions) - 1)
                return True
        return False

    def keep_versions(self) -> None:
        """The engine stops in good order: what lives in its memory only goes to disk, for its successor."""
        for model_id in self._ephemeral:
            self._move_oldest(model_id, leave=0)

    def _create_model(self, request: Pending, model: Model, body: bytes) -> Settlement:
        self._backend.create_model(model.model_id, model.lora, model.optimizer_type)
        reach("model.created")
        answer = {"model_id": model.model_id, "type": "create_model"}
        return _answer(request, answer, effects=[set_state(model.model_id, "ready"), _created(model)])

    def _load_weights(self, request: Pending, model: Model, body: bytes) -> Settlement:
        load = read_load(body)
        self.load_into(model, load)
        answer = {"path": load.path, "model_id": model.model_id, "type": "load_weights"}
        loaded = {"model_id": model.model_id, "tinker_path": load.path, "optimizer": load.optimizer}
        effects = [set_state(model.model_id, "ready"), entry(model.tenant_id, "checkpoint_loaded", loaded)]
        if request.kind == "load_model":
            effects.append(_created(model))
        return _answer(request, answer, effects=effects)

    def load_into(self, model: Model, load: LoadWeights) -> None:
        """Give a model a checkpoint's weights. Raises UserError if the checkpoint does not fit it."""
        checkpoint = self._checkpoints.get(model.tenant_id, parse_path(load.path), granted_by=load.granted_by)
        # Another base that the client asked for was found to hold the same weights when the model was created.
        if model.base_model not in (checkpoint.base_model, load.base_model):
            raise UserError(f"path {load.path!r} is of base model {checkpoint.base_model!r}, not {model.base_model!r}")
        if load.optimizer and checkpoint.kind != "weights":
            raise UserError(
                f"path {load.path!r} holds no optimizer state: optimizer=True needs a /weights/ checkpoint "
                "made by save_state; load it without the optimizer"
            )
        # The checkpoint decides the shape of the adapter, but a model's own rank was promised at creation.
        if checkpoint.lora_rank != model.lora_rank:
            raise UserError(f"path {load.path!r} has LoRA rank {checkpoint.lora_rank}, the model has {model.lora_rank}")
        directory = self._checkpoints.checked_directory(checkpoint)
        reach("model.loading")
        self._backend.load(
            model.model_id, model.lora, directory, optimizer=load.optimizer, optimizer_type=model.optimizer_type
        )
        reach("model.loaded")

    def _save_weights(self, request: Pending, model: Model, body: bytes) -> Settlement:
        save = read_save(body)
        if save.name is None:
            return self._publish(request, model, save)
        kind = CHECKPOINT_KINDS[request.kind]
        new = NewCheckpoint(
            ref=CheckpointRef(model.model_id, kind, save.name),
            tenant_id=model.tenant_id,
            base_model=model.base_model,
            lora=model.lora,
            optimizer_type=model.optimizer_type,
            user_metadata=save.user_metadata,
            ttl_s=save.ttl_s,
        )
        replaced = self._checkpoints.begin(new, overwrite=save.overwrite)

        def fill(directory: Path) -> None:
            self._backend.save(model.model_id, directory, optimizer=kind == "weights")
            if save.recipients:
                encryption.encrypt_files(directory, save.recipients)

        directory, size_bytes = self._checkpoints.files.write(fill)

        def clean_up() -> None:
            # What was overwritten must not be served from memory, nor fill the disk.
            self._backend.drop_version(new.ref.path)
            self._checkpoints.files.discard(replaced)

        answer: dict[str, str | int] = {"path": new.ref.path, "type": request.kind}
        if kind == "external_weights":
            answer["size_bytes"] = size_bytes
        event = "checkpoint_exported" if kind == "external_weights" else "checkpoint_saved"
        saved = {"model_id": model.model_id, "tinker_path": new.ref.path, "size_bytes": size_bytes}
        effects = [
            *completion(new, directory, size_bytes),
            *usage.added(model.tenant_id, model.session_id, model.base_model, "checkpoint", 1),
            entry(model.tenant_id, event, saved),
        ]
        return _answer(request, answer, effects, clean_up)

    def _publish(self, request: Pending, model: Model, save: SaveWeights) -> Settlement:
        if save.sampling_session_seq_id is None:
            raise UserError("sampling_session_seq_id is missing; a save without a path needs one")
        sampling_session_id = f"{model.session_id}:sample:{save.sampling_session_seq_id}"
        inflight = save.sampler_kind == "inflight"
        version_id = inflight_version(model.model_id) if inflight else sampling_session_id
        self._backend.publish(model.model_id, version_id)
        if not inflight:
            self._ephemeral[model.model_id].append(version_id)
            self._move_oldest(model.model_id, leave=MOST_VERSIONS_IN_MEMORY)
        new = NewSamplingSession(
            sampling_session_id=sampling_session_id,
            session_id=model.session_id,
            tenant_id=model.tenant_id,
            base_model=model.base_model,
            version_id=version_id,
        )
        answer = {"sampling_session_id": sampling_session_id, "type": "save_weights_for_sampler"}
        return _answer(request, answer, [sampling_sessions.insertion(new)])

    def _move_oldest(self, model_id: str, *, leave: int) -> None:
        versions = self._ephemeral[model_id]
        while len(versions) > leave:
            oldest = versions[0]
            directory, _ = self._versions.write(partial(self._backend.save_version, oldest))
            self._samplers.written(oldest, directory)
            versions.popleft()
            self._backend.drop_version(oldest)


def _created(model: Model) -> sa.Executable:
    return entry(model.tenant_id, "model_created", {"model_id": model.model_id, "base_model": model.base_model})


def inflight_version(model_id: str) -> str:
    """The one version that all inflight samplers of a model share."""
    return f"{model_id}:inflight"


def require_usable(model: Model) -> None:
    """Raise the reason why a model takes no more requests."""
    if model.state == "failed":
        raise UserError(f"model {model.model_id!r} could not be created: {model.reason}")
    if model.state == "unloaded":
        raise GoneError(f"model {model.model_id!r} was unloaded: {model.reason}")


def _answer(
    request: Pending,
    answer: Mapping[str, str | int],
    effects: Sequence[sa.Executable] = (),
    clean_up: Callable[[], None] | None = None,
) -> Settlement:
    return Settlement(request.request_id, body=orjson.dumps(answer), effects=effects, clean_up=clean_up)
