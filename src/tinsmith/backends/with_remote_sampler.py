"""A backend whose versions are sampled by another engine: the trainer's calls go to the backend that it wraps.

`sample_elsewhere` takes any backend, and what its versions are is its own affair: it is asked for their files. Where
there is nothing to train, `VersionFiles` is all that the other engine needs. A trainer that shares a device with the
engine has it to itself during passes and steps; the engine takes it back when there is something to sample.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from tinsmith.backends import Backend, Capture, MicroBatches, run_to_end
from tinsmith.errors import SettingsError, UserError
from tinsmith.samplers.remote.client import Engine, ExternalSampler
from tinsmith.samplers.remote.sglang import SglangDialect
from tinsmith.samplers.remote.vllm import VllmDialect
from tinsmith.types import ModelShape, OptimStep, Pass

DIALECTS = {"vllm": VllmDialect, "sglang": SglangDialect}


class Sampled:
    """Everything but sampling, publishing and taking turns is the wrapped backend's."""

    def __init__(self, backend: Backend, sampler: ExternalSampler) -> None:
        self._backend = backend
        self.sampler = sampler

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def run_passes(self, passes: Sequence[Pass]) -> MicroBatches:
        self.sampler.rest()
        # It does not pause: the external engine samples by itself, or sleeps.
        yield from ()
        return run_to_end(self._backend.run_passes(passes))

    def optim_step(self, steps: Sequence[OptimStep]) -> list[dict[str, float] | UserError]:
        self.sampler.rest()
        return self._backend.optim_step(steps)

    def publish(self, model_id: str, version_id: str) -> None:
        self._backend.publish(model_id, version_id)
        self.sampler.collect(version_id)

    def load_version(self, version_id: str, directory: Path) -> None:
        self._backend.load_version(version_id, directory)
        self.sampler.collect(version_id)

    def drop_version(self, version_id: str) -> None:
        self._backend.drop_version(version_id)
        self.sampler.collect(version_id)


class VersionFiles:
    """Versions as files and nothing else: for a process that only samples. `directory` is for it alone."""

    def __init__(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        self._directory = directory
        self._versions: dict[str, Path] = {}
        self._number = 0

    def load_version(self, version_id: str, directory: Path) -> None:
        # A copy: whose files these are may delete them while the version is in use.
        copy = self._directory / str(self._number)
        self._number += 1
        shutil.copytree(directory, copy)
        self.drop_version(version_id)
        self._versions[version_id] = copy

    def has_version(self, version_id: str) -> bool:
        return version_id in self._versions

    def drop_version(self, version_id: str) -> None:
        if directory := self._versions.pop(version_id, None):
            shutil.rmtree(directory, ignore_errors=True)

    def capture_version(self, version_id: str) -> Capture:
        # Hard links, made at once: what is captured outlives its version.
        held = self._directory / f"captured-{self._number}"
        self._number += 1
        shutil.copytree(self._versions[version_id], held, copy_function=_link)
        size = sum(path.stat().st_size for path in held.iterdir())
        return Capture(size, partial(_move, held))


def sample_elsewhere(
    backend: Backend | VersionFiles, kind: str, engine: Engine, shape: ModelShape, eos_token_ids: frozenset[int]
) -> Backend:
    """`backend` with an external engine of this kind as its sampler. Raises SettingsError if that cannot be."""
    if kind not in DIALECTS:
        raise SettingsError(f"sampler {kind!r} is unknown; choose 'local', 'vllm' or 'sglang'")
    if not engine.url and not shutil.which(engine.python):
        raise SettingsError(f"sampler_python {engine.python!r} cannot be run; name an interpreter that has {kind}")
    held = cast(Backend, backend)

    def capture(version_id: str) -> Callable[[Path], None] | None:
        return held.capture_version(version_id).write if held.has_version(version_id) else None

    dialect = DIALECTS[kind](eos_token_ids, shape.vocab_size)
    return cast(Backend, Sampled(held, ExternalSampler(dialect, engine, shape, capture)))


def options_of(text: str) -> tuple[str, ...]:
    """Words of a command line. Raises SettingsError if a quote is left open."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise SettingsError(f"sampler_options {text!r} cannot be read: {error}") from None


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


def _move(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        path.rename(target / path.name)
    source.rmdir()
