"""The weight versions that samples use: which are in memory, which have files, how they are restored.

An ephemeral publish is a copy in memory. Its files are written in the background, before a snapshot covers the publish,
so that it can always be restored: from its files, or by replaying its model's log. The oldest versions of a model leave
memory, so that it does not grow with the length of a run: those with files at the next publish, the others when the
engine is idle. Beyond the memory budget of all versions the least recently published or sampled ones leave, so that
memory does not grow with the number of models. Versions loaded from files are evicted, the least recently used first.
An inflight version is replaced by every publish; only the newest is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from tinsmith.backends import Backend, Capture
from tinsmith.engine.transfer import VersionTransfer
from tinsmith.errors import LostStateError, TinsmithError
from tinsmith.runtime.failpoints import hit
from tinsmith.storage.directories import Directories
from tinsmith.store.checkpoints import Checkpoints, parse_path
from tinsmith.store.sampling_sessions import SamplingSession, SamplingSessions, inflight_version

VERSIONS_IN_MEMORY = 4
"""Ephemeral versions of one model that stay in memory; asynchronous RL uses the last two or three."""

MAX_VERSIONS_IN_MEMORY = 64
"""From this many on, an engine that is never idle moves the oldest to disk at a publish."""

LOADED_VERSIONS = 32
"""Most versions kept loaded from disk for sampling, evicted by least recent use; fewer if they exceed their share of
memory.
"""

log = structlog.get_logger()

VERSIONS_SHARE = 0.25
"""Ephemeral versions may use this share of the memory for models in training: a sampled version takes twice as much
again, for copies that multiply faster.
"""

RestoreModel = Callable[[str], TinsmithError | None]
"""Restores a model to its acknowledged state, including versions; returns the error if that is impossible."""


@dataclass(frozen=True, slots=True)
class PreparedVersion:
    """A version in memory, None for the base model, and the name of its weights for clients."""

    version_id: str | None
    weight_version: str


@dataclass(frozen=True, slots=True)
class CapturedVersion:
    version_id: str
    capture: Capture


class Versions:
    def __init__(
        self,
        backend: Backend,
        samplers: SamplingSessions,
        checkpoints: Checkpoints,
        directories: Directories,
        budget_bytes: int,
        transfer: VersionTransfer | None = None,
    ) -> None:
        self._backend = backend
        self._budget_bytes = VERSIONS_SHARE * budget_bytes
        self._samplers = samplers
        self._checkpoints = checkpoints
        self._directories = directories
        self._transfer = transfer
        # By model, oldest first, without inflight versions.
        self._ephemeral: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._in_memory: dict[str, tuple[str, int]] = {}  # their model and bytes, least recently used first
        self._bytes_in_memory = 0
        self._written: set[str] = set()
        self._being_written: set[str] = set()
        self._newer_inflight: set[str] = set()  # published since they were written
        self._inflight_publishes: dict[str, str] = {}  # the sampling session of each model's last one
        self._loaded: dict[str, int] = {}  # with their bytes

    def has_sampling_session(self, sampling_session_id: str) -> bool:
        """Whether a sampling session with this id exists."""
        return self._samplers.find(sampling_session_id) is not None

    def publish(self, model_id: str, version_id: str, sampling_session_id: str) -> None:
        self._backend.publish(model_id, version_id)
        hit("model.published")
        if self._transfer:
            self._transfer.offer(version_id, self._backend.capture_version)
        self._loaded.pop(version_id, None)
        if version_id == inflight_version(model_id):
            self._newer_inflight.add(version_id)
            self._inflight_publishes[model_id] = sampling_session_id
        else:
            self._forget_size(version_id)
            self._ephemeral[model_id][version_id] = None
            num_bytes = self._backend.version_bytes(version_id)
            self._in_memory[version_id] = model_id, num_bytes
            self._bytes_in_memory += num_bytes
            self._move_oldest(model_id, leave=MAX_VERSIONS_IN_MEMORY)
            self._drop_written(model_id)
            self._evict(version_id)

    def republish(self, model_id: str, version_id: str, sampling_session_id: str) -> None:
        """Publish in a replay, where a version may have survived."""
        inflight = version_id == inflight_version(model_id)
        sampler = self._samplers.find(sampling_session_id)
        if sampler is None or (not inflight and (sampler.directory or self._backend.has_version(version_id))):
            return
        self.publish(model_id, version_id, sampling_session_id)

    def forget(self, model_id: str) -> None:
        """A model is unloaded: drop its versions that are only in memory."""
        self._inflight_publishes.pop(model_id, None)
        for version_id in (*self._ephemeral.pop(model_id, ()), inflight_version(model_id)):
            self._drop(version_id)

    def prepare(self, sampler: SamplingSession, restore_model: RestoreModel) -> PreparedVersion:
        """Bring a sampling session's weights into memory. Raises UserError or LostStateError if they are gone."""
        version_id = sampler.version_id
        if version_id is None:
            return PreparedVersion(None, sampler.weight_version)
        if not self._backend.has_version(version_id):
            with self._files_of(sampler, restore_model) as directory:
                if directory is not None:
                    self._backend.load_version(version_id, directory)
                    self._loaded[version_id] = self._backend.version_bytes(version_id)
        if version_id in self._loaded:
            self._loaded[version_id] = self._loaded.pop(version_id)  # the most recently used is last
        elif version_id in self._in_memory:
            self._in_memory[version_id] = self._in_memory.pop(version_id)
        while len(self._loaded) > LOADED_VERSIONS or (
            len(self._loaded) > 1 and sum(self._loaded.values()) > self._budget_bytes
        ):
            oldest = next(iter(self._loaded))
            del self._loaded[oldest]
            self._backend.drop_version(oldest)
        return PreparedVersion(version_id, self._weight_version(sampler))

    def _weight_version(self, sampler: SamplingSession) -> str:
        if not sampler.is_inflight or sampler.model_id is None:
            return sampler.weight_version
        if sampler.model_id not in self._inflight_publishes:  # its weights were read from files
            newest = self._samplers.newest_of_version(inflight_version(sampler.model_id)) or sampler
            self._inflight_publishes[sampler.model_id] = newest.sampling_session_id
        return self._inflight_publishes[sampler.model_id]

    @contextmanager
    def _files_of(self, sampler: SamplingSession, restore_model: RestoreModel) -> Iterator[Path | None]:
        """The files of a version that is not in memory; None if restoring its model restored it."""
        if sampler.model_path is not None:
            checkpoint = self._checkpoints.get(sampler.tenant_id, parse_path(sampler.model_path))
            with self._checkpoints.reading(checkpoint) as path:
                yield path
            return
        version_id, directory = sampler.version_id or "", sampler.directory
        if sampler.model_id is not None and (directory is None or version_id == inflight_version(sampler.model_id)):
            if error := restore_model(sampler.model_id):
                raise error
            if self._backend.has_version(version_id):
                yield None
                return
            directory = self._samplers.directory_of(version_id)
        if directory is None:
            raise LostStateError(
                f"the weights of sampling session {sampler.sampling_session_id!r} are gone; publish them again, or "
                "sample from a saved checkpoint"
            )
        with self._directories.reading(directory) as path:
            yield path

    # Writing.

    def capture(self, model_id: str) -> list[CapturedVersion]:
        """Capture the model's versions without files; pass them to `write` and then to `mark_written`."""
        ids = [version_id for version_id in self._ephemeral.get(model_id, ()) if version_id not in self._written]
        if (inflight := inflight_version(model_id)) in self._newer_inflight:
            self._newer_inflight.discard(inflight)
            ids.append(inflight)
        self._being_written.update(ids)
        return [CapturedVersion(version_id, self._backend.capture_version(version_id)) for version_id in ids]

    def write(self, captured: Sequence[CapturedVersion]) -> None:
        """Thread-safe."""
        for version in captured:
            directory, _ = self._directories.write(version.capture.write)
            self._directories.discard(self._samplers.record_files(version.version_id, directory))

    def mark_written(self, model_id: str, captured: Sequence[CapturedVersion], error: Exception | None) -> None:
        """Record whether they were written."""
        ids = {version.version_id for version in captured}
        self._being_written -= ids
        inflight = inflight_version(model_id)
        if error is None:
            self._written |= ids & self._ephemeral.get(model_id, {}).keys()
        elif inflight in ids and self._backend.has_version(inflight):
            self._newer_inflight.add(inflight)

    def offload_one(self) -> bool:
        """Move one ephemeral version to disk if a model has too many in memory; False if none has."""
        for model_id, versions in self._ephemeral.items():
            if len(versions) > VERSIONS_IN_MEMORY and self._move_oldest(model_id, leave=len(versions) - 1):
                return True
        return False

    def write_all(self) -> None:
        """The engine stops: write versions without files, which spares its successor a replay."""
        for model_id in self._ephemeral:
            captured = self.capture(model_id)
            self.write(captured)
            self.mark_written(model_id, captured, None)

    def _move_oldest(self, model_id: str, *, leave: int) -> bool:
        """False if no version can be moved now."""
        versions = self._ephemeral[model_id]
        moved = False
        while len(versions) > leave and self._move(model_id, next(iter(versions))):
            moved = True
        return moved

    def _drop_written(self, model_id: str) -> None:
        """Drop older versions that have files from memory."""
        for version_id in list(self._ephemeral[model_id])[:-VERSIONS_IN_MEMORY]:
            if version_id in self._written:
                self._move(model_id, version_id)

    def _evict(self, keep: str) -> None:
        """Move the least recently used versions to disk until the rest fits into the budget."""
        for version_id, (model_id, _) in list(self._in_memory.items()):
            if self._bytes_in_memory <= self._budget_bytes:
                return
            if version_id == keep:
                continue
            try:
                self._move(model_id, version_id)
            except OSError as error:  # a full disk: the versions stay in memory
                log.error("an ephemeral version could not be moved to disk", exc_info=error)
                return

    def _move(self, model_id: str, version_id: str) -> bool:
        """Move a version to disk. False if it is being written, or if the next snapshot will write it, since this must
        not wait for uploads to remote storage.
        """
        if version_id in self._being_written or (self._directories.is_remote and version_id not in self._written):
            return False
        if version_id not in self._written:
            self.write([CapturedVersion(version_id, self._backend.capture_version(version_id))])
        del self._ephemeral[model_id][version_id]
        self._drop(version_id)
        return True

    def are_written(self, model_id: str) -> bool:
        """Whether all of a model's versions have files."""
        ids = self._ephemeral.get(model_id, {}).keys()
        return ids <= self._written and inflight_version(model_id) not in self._newer_inflight | self._being_written

    def are_being_written(self, model_id: str) -> bool:
        """Whether any of a model's versions is being written."""
        return not self._being_written.isdisjoint((*self._ephemeral.get(model_id, ()), inflight_version(model_id)))

    def poll_samplers(self) -> bool:
        """Once a second: whether published versions must be written immediately, for dedicated samplers."""
        if self._transfer is None:
            return False
        self._transfer.poll_samplers(list(self._in_memory), self._backend.capture_version)
        return self._transfer.is_wanted

    def _drop(self, version_id: str) -> None:
        if self._transfer:
            self._transfer.withdraw(version_id)
        self._backend.drop_version(version_id)
        self._written.discard(version_id)
        self._newer_inflight.discard(version_id)
        self._forget_size(version_id)

    def _forget_size(self, version_id: str) -> None:
        _, num_bytes = self._in_memory.pop(version_id, ("", 0))
        self._bytes_in_memory -= num_bytes
