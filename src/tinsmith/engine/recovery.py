"""Model state across restarts: snapshots, and the replay of what came after them.

A model's state is its last snapshot (adapter, optimizer moments and step, after sequence number k) plus the
acknowledged operations after k, whose bodies are still stored. Models come back lazily, when a request names
them. A snapshot is only taken when no gradient is pending, since gradients are not saved.
"""

from __future__ import annotations

import structlog

from tinsmith.backends import Backend
from tinsmith.engine.operations import Operations
from tinsmith.engine.passes import PassReader
from tinsmith.errors import LostStateError, UserError
from tinsmith.futures import Futures
from tinsmith.models import Model
from tinsmith.ops import Pending
from tinsmith.storage import Directories
from tinsmith.wire.training import read_optim_step
from tinsmith.wire.weights import read_load

SNAPSHOT_OPTIM_STEPS = 16
"""Optimizer steps between snapshots: bounds what a restart replays."""

SNAPSHOT_BODY_BYTES = 32 * 1024 * 1024
"""Request bytes between snapshots: bounds what a model's log takes on disk."""

log = structlog.get_logger()


class Recovery:
    def __init__(
        self,
        backend: Backend,
        futures: Futures,
        operations: Operations,
        snapshots: Directories,
        passes: PassReader,
    ) -> None:
        self._backend = backend
        self._futures = futures
        self._operations = operations
        self._snapshots = snapshots
        self._passes = passes
        self._steps: dict[str, int] = {}
        self._body_bytes: dict[str, int] = {}
        self._directories: dict[str, str | None] = {}

    def restore(self, model: Model) -> None:
        """Bring a model that an earlier engine held back to its acknowledged state.

        Raises LostStateError if its checkpoint or a request body is gone.
        """
        covered = -1
        if model.snapshot_seq_id is not None and model.snapshot_directory is not None:
            covered = model.snapshot_seq_id
            directory = self._snapshots.path(model.snapshot_directory)
            self._backend.load(
                model.model_id, model.lora, directory, optimizer=True, optimizer_type=model.optimizer_type
            )
            self._directories[model.model_id] = model.snapshot_directory
        else:
            self._backend.create_model(model.model_id, model.lora, model.optimizer_type)
        replayed = self._futures.log_of(model.model_id, covered, model.applied_seq_id)
        for request in replayed:
            self._replay(model, request)
        # These are still to be covered: an engine that dies again and again must not replay ever more.
        self._steps[model.model_id] = sum(request.kind == "optim_step" for request in replayed)
        log.info("model restored", model_id=model.model_id, snapshot_seq_id=covered, replayed=len(replayed))

    def _replay(self, model: Model, request: Pending) -> None:
        body = self._futures.bodies([request.request_id]).get(request.request_id)
        if body is None and request.state == "failed":
            return  # it changed nothing; only a refused optim_step did, and keeps its body
        if body is None:
            self._backend.unload_model(model.model_id)
            raise LostStateError(f"request {request.request_id!r} cannot be replayed: its body is gone")
        if request.kind == "forward_backward":
            self._replay_pass(request, body)
            self.count(model.model_id, len(body))
        elif request.kind == "optim_step":
            self._backend.optim_step([read_optim_step(body, request.request_id)])
        elif request.state == "done":
            try:
                self._operations.load_into(model, read_load(body))
            except UserError as error:
                self._backend.unload_model(model.model_id)
                raise LostStateError(f"model {model.model_id!r} cannot be restored: {error}") from error

    def _replay_pass(self, request: Pending, body: bytes) -> None:
        assert request.model_id is not None
        try:
            (outcome,) = self._backend.run_passes([self._passes.read(body, request, replayed=True)])
        except UserError as error:
            outcome = error
        if isinstance(outcome, UserError) and request.state == "done":
            self._backend.unload_model(request.model_id)
            raise LostStateError(f"request {request.request_id!r} cannot be replayed: {outcome}") from outcome

    def count(self, model_id: str, body_bytes: int) -> None:
        """Note a request that a restart would replay."""
        self._body_bytes[model_id] = self._body_bytes.get(model_id, 0) + body_bytes

    def stepped(self, model_id: str, applied_seq_id: int) -> None:
        """After an optimizer step (no gradient pending): take a snapshot if one is due."""
        self._steps[model_id] = self._steps.get(model_id, 0) + 1
        if self._steps[model_id] >= SNAPSHOT_OPTIM_STEPS or self._body_bytes.get(model_id, 0) >= SNAPSHOT_BODY_BYTES:
            self.snapshot(model_id, applied_seq_id)

    def snapshot(self, model_id: str, applied_seq_id: int) -> None:
        """Write a model's state; what it covers needs no replay any more.

        A full disk is no reason to lose what is in memory: the log goes on standing in, and the next step tries again.
        """
        try:
            directory, _ = self._snapshots.write(lambda target: self._backend.save(model_id, target, optimizer=True))
        except Exception as error:  # what a backend raises when it cannot write is its own affair
            log.error("a snapshot could not be written", model_id=model_id, exc_info=error)
            return
        self._futures.covered(model_id, applied_seq_id, directory)
        self._snapshots.discard(self._directories.get(model_id))
        self._directories[model_id] = directory
        self._steps[model_id] = 0
        self._body_bytes[model_id] = 0

    def forget(self, model: Model) -> None:
        """A model was unloaded: its snapshot is of no more use."""
        self._snapshots.discard(model.snapshot_directory)
        self._directories.pop(model.model_id, None)
        self._steps.pop(model.model_id, None)
        self._body_bytes.pop(model.model_id, None)
