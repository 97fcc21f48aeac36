"""Backends and version stores whose versions an external inference engine samples.

`with_remote_sampler` wraps a training backend: it writes versions to files, which the external engine loads.
`open_remote_sampler` serves a process that does not train: its `VersionFiles` holds only files.

Where trainer and external engine share a device, one of them has its memory and the other sleeps. The engine has it
first, because it measures free memory when it starts. Before passes and optimizer steps the engine finishes its
requests and sleeps, and then the trainer wakes up. When there is work to sample, the trainer sleeps, and then the
engine wakes up. If one of the two steps fails, the memory stays free rather than used twice.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shlex
import shutil
import stat
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from tinsmith.backends import Backend, Capture, MicroBatches, run_to_end
from tinsmith.errors import EngineFailedError, SettingsError, UserError
from tinsmith.samplers.remote.client import ExternalSampler, RemoteEngine
from tinsmith.samplers.remote.sglang import SglangDialect
from tinsmith.samplers.remote.vllm import VllmDialect
from tinsmith.types import ModelShape, OptimStep, Pass

log = structlog.get_logger()

DIALECTS = {"vllm": VllmDialect, "sglang": SglangDialect}


class VersionSource(Protocol):
    """Source of the versions that the external engine loads."""

    @property
    def model_budget_bytes(self) -> int: ...
    def load_version(self, version_id: str, directory: Path) -> None: ...
    def has_version(self, version_id: str) -> bool: ...
    def drop_version(self, version_id: str) -> None: ...
    def capture_version(self, version_id: str) -> Capture: ...


class RemotelySampledVersions:
    """Versions sampled by an external engine; a `VersionHolder`."""

    def __init__(self, source: VersionSource, sampler: ExternalSampler) -> None:
        self._source = source
        self.sampler = sampler
        self.has_version = source.has_version

    @property
    def model_budget_bytes(self) -> int:
        return self._source.model_budget_bytes

    def load_version(self, version_id: str, directory: Path) -> None:
        self._source.load_version(version_id, directory)
        self.sampler.collect(version_id)

    def drop_version(self, version_id: str) -> None:
        self._source.drop_version(version_id)
        self.sampler.collect(version_id)


class RemotelySampledBackend(RemotelySampledVersions):
    """A `Backend` that takes the device from the external engine before it trains; everything else is delegated."""

    def __init__(self, backend: Backend, sampler: ExternalSampler) -> None:
        super().__init__(backend, sampler)
        self._backend = backend
        self.create_model = backend.create_model
        self.unload_model = backend.unload_model
        self.has_model = backend.has_model
        self.model_bytes = backend.model_bytes
        self.memory_use = backend.memory_use
        self.capture = backend.capture
        self.capture_version = backend.capture_version
        self.version_bytes = backend.version_bytes
        self.save = backend.save
        self.load = backend.load
        self.start_profile = backend.start_profile
        self.sleep = backend.sleep
        sampler.before_wake_up = self._release_device

    def _release_device(self) -> None:
        try:
            self._backend.sleep()
        except MemoryError as error:
            raise EngineFailedError(
                f"the host has no room for the trainer's memory while {self.sampler.name} samples: {error}"
            ) from error

    def wake_up(self) -> None:
        self.sampler.sleep()
        self._backend.wake_up()

    def run_passes(self, passes: Sequence[Pass]) -> MicroBatches:
        self.wake_up()
        # No pauses are needed: the external engine samples on its own, or sleeps.
        yield from ()
        return run_to_end(self._backend.run_passes(passes))

    def optim_step(self, steps: Sequence[OptimStep]) -> list[dict[str, float] | UserError]:
        self.wake_up()
        return self._backend.optim_step(steps)

    def publish(self, model_id: str, version_id: str) -> None:
        self._backend.publish(model_id, version_id)
        self.sampler.collect(version_id)


class VersionFiles:
    """Versions as files only, for a process that does not train. It must own `directory`."""

    def __init__(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        self._directory = directory
        self._versions: dict[str, Path] = {}
        self._num_directories = 0

    def load_version(self, version_id: str, directory: Path) -> None:
        # A copy: the owner of these files may delete them while the version is in use.
        copy = self._directory / str(self._num_directories)
        self._num_directories += 1
        shutil.copytree(directory, copy)
        self.drop_version(version_id)
        self._versions[version_id] = copy

    @property
    def model_budget_bytes(self) -> int:
        """Free space on the disk."""
        return shutil.disk_usage(self._directory.parent).free

    def has_version(self, version_id: str) -> bool:
        return version_id in self._versions

    def drop_version(self, version_id: str) -> None:
        if directory := self._versions.pop(version_id, None):
            shutil.rmtree(directory, ignore_errors=True)

    def capture_version(self, version_id: str) -> Capture:
        # Hard links, made immediately, because a capture outlives its version.
        links = self._directory / f"captured-{self._num_directories}"
        self._num_directories += 1
        shutil.copytree(self._versions[version_id], links, copy_function=os.link)
        size = sum(path.stat().st_size for path in links.iterdir())
        return Capture(size, partial(_move, links))


def with_remote_sampler(
    backend: Backend, kind: str, engine: RemoteEngine, shape: ModelShape, eos_token_ids: frozenset[int]
) -> RemotelySampledBackend:
    """`backend` with an external engine of this kind as its sampler. Raises SettingsError if that is impossible."""
    if engine.shares_device:
        backend.sleep()
    return RemotelySampledBackend(backend, _sampler(backend, kind, engine, shape, eos_token_ids))


def open_remote_sampler(
    files: VersionFiles, kind: str, engine: RemoteEngine, shape: ModelShape, eos_token_ids: frozenset[int]
) -> RemotelySampledVersions:
    """The versions in `files`, sampled by an external engine of this kind, for a process that does not train. Raises
    SettingsError if that is impossible.
    """
    return RemotelySampledVersions(files, _sampler(files, kind, engine, shape, eos_token_ids))


def _sampler(
    source: VersionSource, kind: str, engine: RemoteEngine, shape: ModelShape, eos_token_ids: frozenset[int]
) -> ExternalSampler:
    if kind not in DIALECTS:
        raise SettingsError(f"sampler {kind!r} is unknown; choose 'local', 'vllm' or 'sglang'")
    if not engine.url and not shutil.which(engine.python):
        raise SettingsError(
            f"sampler_python {engine.python!r} cannot be run; name a Python interpreter with {kind} installed"
        )

    def capture(version_id: str) -> Callable[[Path], None] | None:
        return source.capture_version(version_id).write if source.has_version(version_id) else None

    return ExternalSampler(DIALECTS[kind](eos_token_ids, shape.vocab_size), engine, shape, capture)


SHARED_MEMORY = Path("/dev/shm")
"""Linux's file system in memory."""


def memory_directory(data_dir: Path, subdirectory: str) -> Path | None:
    """A private directory in memory for adapters on their way to an engine on this machine, removed when this process
    exits; None where there is no such file system.
    """
    digest = hashlib.blake2b(str(data_dir).encode(), digest_size=8).hexdigest()
    directory = SHARED_MEMORY / f"tinsmith-{os.getuid()}-{digest}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
        # The name can be guessed, so another user may have created it.
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise OSError(f"{directory} is not a private directory of this user")
    except OSError as error:
        log.info("adapters go to the inference engine through the disk", reason=str(error))
        return None
    atexit.register(shutil.rmtree, directory / subdirectory, ignore_errors=True)
    return directory / subdirectory


def split_options(text: str) -> tuple[str, ...]:
    """The words of a command line. Raises SettingsError on an unclosed quote."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise SettingsError(f"sampler_options {text!r} cannot be read: {error}") from None


def _move(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        path.rename(target / path.name)
    source.rmdir()
