"""Ranges named after the stages of a step, and traces of an engine's steps: of the first ones, or on demand.

`stage` marks part of a step: as an NVTX range where torch has CUDA, which `nsys profile` shows, and in an open trace.
`StepTraces` writes files that torch's profiler makes and chrome://tracing or Perfetto reads. A trace covers the first
MICRO_BATCHES of a training step with the decode steps between them, an optimizer step, or up to DECODE_STEPS decode
steps that follow each other; FILES of each kind are written. Called from one thread. A trace that cannot be made ends
the profile, and never the step that it is of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path

import structlog
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tinsmith.backends import MicroBatches
from tinsmith.errors import UserError

FILES = 4
MICRO_BATCHES = 4
DECODE_STEPS = 16

TRAINING, OPTIMIZER, SAMPLING = "training", "optimizer", "sampling"

log = structlog.get_logger()


@cache
def _has_nvtx() -> bool:
    return torch.cuda.is_available()


@contextmanager
def stage(name: str) -> Iterator[None]:
    if _has_nvtx():
        torch.cuda.nvtx.range_push(name)
    try:
        if torch.autograd.profiler._is_profiler_enabled:
            with record_function(name):
                yield
        else:
            yield
    finally:
        if _has_nvtx():
            torch.cuda.nvtx.range_pop()


class StepTraces:
    """Without a directory nothing is written. A profile on demand has a directory of its own from `start` to `stop`."""

    def __init__(self, directory: Path | None) -> None:
        self._directory: Path | None = None
        self._written: dict[str, int] = dict.fromkeys((TRAINING, OPTIMIZER, SAMPLING), 0)
        self._files: list[Path] = []
        self._open: tuple[str, profile] | None = None
        self._steps_left = 0
        self._on_demand = False
        self._failure = ""
        if directory is not None:
            self._write_to(directory)

    def _write_to(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._files, self._failure = directory, [], ""
        self._written = dict.fromkeys(self._written, 0)

    @property
    def is_full(self) -> bool:
        """Whether FILES of each kind are written, or no more can be."""
        return bool(self._failure) or min(self._written.values()) >= FILES

    def start(self, directory: Path) -> None:
        """Begin a profile on demand, also after the traces of the first steps. Raises UserError during another one."""
        if self._on_demand:
            raise UserError("a profile has begun already; stop it first")
        self._end_open()
        self._write_to(directory)
        self._on_demand = True

    def stop(self) -> list[Path]:
        """End the profile on demand; returns its files. Raises UserError if one of them could not be made."""
        self._end_open()
        self._directory, self._on_demand = None, False
        if self._failure:
            raise UserError(f"a trace could not be made: {self._failure}")
        return self._files

    def training(self, micro_batches: MicroBatches) -> MicroBatches:
        """The same micro-batches, the first of them traced."""
        if self._directory is None:
            return (yield from micro_batches)
        num_batches = 0
        self._begin(TRAINING)
        try:
            with closing(micro_batches):
                while True:
                    try:
                        next(micro_batches)
                    except StopIteration as end:
                        return end.value
                    num_batches += 1
                    if num_batches == MICRO_BATCHES:
                        self._end(TRAINING)
                    yield
        finally:
            self._end(TRAINING)

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        self._begin(OPTIMIZER)
        try:
            yield
        finally:
            self._end(OPTIMIZER)

    @contextmanager
    def sampling(self, has_work: Callable[[], bool]) -> Iterator[None]:
        """A decode step. `has_work`: whether another one will follow."""
        if self._open is None:
            self._steps_left = DECODE_STEPS
            self._begin(SAMPLING)
        try:
            yield
        finally:
            self._steps_left -= 1
            if not (self._steps_left and has_work()):
                self._end(SAMPLING)

    def _begin(self, kind: str) -> None:
        self._end_open()  # decode steps, which a training or optimizer step ends
        if self._directory is None or self._written[kind] == FILES:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        recorder = profile(activities=activities, acc_events=True)
        with self._ending_on_errors():
            recorder.start()
            self._open = kind, recorder

    @contextmanager
    def _ending_on_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            self._failure, self._directory = f"{type(error).__name__}: {error}", None
            log.error("a trace could not be made; no more are tried", error=self._failure)

    def _end_open(self) -> None:
        if self._open is not None:
            self._end(self._open[0])

    def _end(self, kind: str) -> None:
        """Write the trace, if one of this kind is open."""
        if self._open is None or self._open[0] != kind:
            return
        assert self._directory is not None
        recorder, self._open = self._open[1], None
        path = self._directory / f"{kind}-{os.getpid()}-{self._written[kind]}.json.gz"
        with self._ending_on_errors():
            recorder.stop()
            try:
                recorder.export_chrome_trace(str(path))
            except BaseException:
                with suppress(OSError):
                    path.unlink()
                raise
            self._written[kind] += 1
            self._files.append(path)
            log.info("trace written", file=str(path))
