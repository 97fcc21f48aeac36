"""Model state across restarts: a model comes back, when a request names it, from a snapshot and what came after it.

A model's state is its newest snapshot plus the acknowledged operations after it, whose bodies are still stored; so is
every earlier state whose bodies are. A snapshot whose files are not what was written is passed over, and the one
before it, or the creation, is where the replay begins. Ephemeral versions that have no files are published again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import structlog

from tinsmith.backends import Backend
from tinsmith.engine.operations import Operations
from tinsmith.engine.passes import PassReader
from tinsmith.engine.snapshots import Snapshots
from tinsmith.errors import LostStateError, TinsmithError, UserError
from tinsmith.runtime.failpoints import hit
from tinsmith.storage.directories import Directories, UnreachableError
from tinsmith.store.futures import Futures
from tinsmith.store.models import Model, Models
from tinsmith.types import Pending
from tinsmith.wire.training import read_optim_step
from tinsmith.wire.weights import read_load

log = structlog.get_logger()

Between = Callable[[], None]


class Recovery:
    def __init__(
        self,
        backend: Backend,
        futures: Futures,
        models: Models,
        operations: Operations,
        directories: Directories,
        snapshots: Snapshots,
        passes: PassReader,
    ) -> None:
        self._backend = backend
        self._futures = futures
        self._models = models
        self._operations = operations
        self._directories = directories
        self._snapshots = snapshots
        self._passes = passes

    def restore(self, model: Model, between: Between | None = None) -> None:
        """Bring a model to its acknowledged state. `between` is called now and then: others need not stand still.

        Raises LostStateError if that is impossible, and leaves nothing of it in memory.
        """
        failures: list[str] = []
        for seq_id, directory in _beginnings(model):
            try:
                self._begin(model, directory)
            except UnreachableError:  # says nothing of the snapshot
                raise
            except (TinsmithError, OSError) as error:
                log.error("a snapshot cannot be used", model_id=model.model_id, seq_id=seq_id, error=str(error))
                failures.append(f"its snapshot after seq_id {seq_id}: {error}")
                continue
            try:
                num_replayed = self._replay_after(model, seq_id, between)
            except BaseException as error:
                self._backend.unload_model(model.model_id)
                self._snapshots.left(model.model_id)
                if failures and isinstance(error, LostStateError):
                    raise LostStateError(_cannot(model, [*failures, str(error)])) from error
                raise
            if failures and model.snapshot_directory:
                self._models.forget_snapshot(model.model_id, model.snapshot_directory)
            log.info("model restored", model_id=model.model_id, snapshot_seq_id=seq_id, replayed=num_replayed)
            return
        raise LostStateError(_cannot(model, failures))

    def _begin(self, model: Model, directory: str | None) -> None:
        if directory is None:
            self._backend.create_model(model.model_id, model.lora, model.optimizer_type)
            return
        with self._directories.reading(directory) as path:
            self._backend.load(model.model_id, model.lora, path, optimizer=True, optimizer_type=model.optimizer_type)

    def _replay_after(self, model: Model, seq_id: int, between: Between | None) -> int:
        replayed = self._futures.log_of(model.model_id, seq_id, model.applied_seq_id)
        # These are still to be covered: an engine that dies again and again must not replay ever more.
        changed_seq_id = model.applied_seq_id if replayed else seq_id
        self._snapshots.entered(model.model_id, covered_seq_id=seq_id, changed_seq_id=changed_seq_id)
        for request in replayed:
            body = self._futures.bodies([request.request_id]).get(request.request_id)
            if body is not None:
                self._replay(model, request, body, between)
                steps = int(request.kind == "optim_step")
                self._snapshots.count(model.model_id, steps=steps, body_bytes=len(body))
            elif request.state == "done" and request.kind != "save_weights_for_sampler":
                # What failed changed nothing (a refused optim_step did, and keeps its body), a named save neither.
                raise LostStateError(f"request {request.request_id!r} cannot be replayed: its body is gone")
            if between:
                between()
        return len(replayed)

    def _replay(self, model: Model, request: Pending, body: bytes, between: Between | None) -> None:
        hit("model.replaying")
        if request.kind == "forward_backward":
            self._replay_pass(request, body, between)
        elif request.kind == "optim_step":
            (outcome,) = self._backend.optim_step([read_optim_step(body, request.request_id)])
            _must_be_as_before(request, outcome if isinstance(outcome, UserError) else None)
        elif request.state == "done" and request.kind == "save_weights_for_sampler":
            self._operations.publish_again(model, body)
        elif request.state == "done":
            try:
                as_of = self._futures.settled_at(request.request_id)
                self._operations.load_into(model, read_load(body), as_of=as_of)
            except TinsmithError as error:
                raise LostStateError(_cannot(model, [str(error)])) from error

    def _replay_pass(self, request: Pending, body: bytes, between: Between | None) -> None:
        try:
            (outcome,) = self._backend.run_passes([self._passes.read(body, request, replayed=True)], between=between)
        except UserError as error:
            outcome = error
        _must_be_as_before(request, outcome if isinstance(outcome, UserError) else None)


def _must_be_as_before(request: Pending, error: UserError | None) -> None:
    if error is not None and request.state == "done":
        raise LostStateError(f"request {request.request_id!r} cannot be replayed: {error}") from error


def _beginnings(model: Model) -> Iterator[tuple[int, str | None]]:
    """Where a replay may begin, the shortest first: snapshots, or the creation."""
    if model.snapshot_seq_id is not None:
        yield model.snapshot_seq_id, model.snapshot_directory
    if model.previous_snapshot_seq_id is not None:
        yield model.previous_snapshot_seq_id, model.previous_snapshot_directory
    else:
        yield -1, None


def _cannot(model: Model, reasons: list[str]) -> str:
    return f"model {model.model_id!r} could not be restored: {'; '.join(reasons)}"
