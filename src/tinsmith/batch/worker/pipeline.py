"""The stages of a job on one worker: its mapper's process reads and stores batches, and starts the processes of the
stages, which map them.

A batch goes through the stages in order, and each process has one batch, or several if a function of its stage is
asynchronous. So one stage works on a batch while the next one works on the batch before. Batches in work are bounded in
number (`stages.max_batches`) and bytes. Rows stay pickled between two stages.

All processes live and die together: they are one group, and when one ends, the mapper's process leaves in the marker
only the batches that this one had, and ends in the same way. So a death is blamed, and a late batch noticed, as without
stages (`mapper_process.py`); the time of a batch does not include its waits for processes.

The GPUs of the worker are given to the processes that name `num_gpus`, and are hidden from the others.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, overload

from tinsmith.batch import operations
from tinsmith.batch.operations.runtime import Channel
from tinsmith.batch.stages import JobStage, max_batches, place_gpus
from tinsmith.batch.types import FailureCause, JobSpec, MapperStartError, Row
from tinsmith.batch.worker import adapters
from tinsmith.batch.worker.children import Child, InterpreterError, prepare_interpreter
from tinsmith.batch.worker.concurrency import AsyncStep, map_concurrently
from tinsmith.batch.worker.feed import BatchRows, ErrorReport, Feed, ReportedError
from tinsmith.batch.worker.frames import Message
from tinsmith.batch.worker.marker import Marker
from tinsmith.batch.worker.stage_feed import StagedBatch


class PackedRows(Sequence[Row]):
    """The results of a stage, which are unpickled when they are read."""

    def __init__(self, data: bytes, count: int) -> None:
        self.data = data
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return pickle.loads(self.data)[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(pickle.loads(self.data))


@dataclass(frozen=True)
class StageLauncher:
    """What the processes of stages get from the mapper's process: its log, the descriptor of its marker, the mask of
    its GPUs (None: all of the machine), and the specification as it was sent."""

    spec: Message
    log_path: Path
    marker_descriptor: int
    devices: str | None

    def masks(self, stages: Sequence[JobStage]) -> list[str | None]:
        """The mask of each process; None for that of the worker. Raises MapperStartError."""
        gpu_ranges = place_gpus(stages)
        if not any(gpu_ranges):
            return [None] * len(gpu_ranges)
        num_gpus = max(gpus.stop for gpus in gpu_ranges if gpus)
        names = [str(index) for index in range(num_gpus)] if self.devices is None else self.devices.split(",")
        if len(names) < num_gpus:
            text = f"the stages of the job need {num_gpus} GPUs on each worker, which has {self.devices or 'none'}"
            raise MapperStartError(text, FailureCause.SETUP_OF_MACHINE)
        return [",".join(names[gpus.start : gpus.stop]) for gpus in gpu_ranges]

    def launch(self, stage: JobStage, devices: str | None) -> Child:
        """Start a process of a stage. Raises MapperStartError."""
        try:
            python, environment = prepare_interpreter(stage.options, None)
        except InterpreterError as error:
            raise MapperStartError(f"{stage.name}: {error}", FailureCause.SETUP_OF_MACHINE) from error
        marker = self.marker_descriptor
        child = Child(python, self.log_path, environment=environment, parent_marker=marker, devices=devices)
        child.begin({"role": "stage", "spec": self.spec, "stage": stage.first}, self.log_path)
        return child


class StageProcess:
    """One process of a stage, and the batches that it has."""

    def __init__(self, stage: JobStage, child: Child, feed: Feed) -> None:
        self.stage = stage
        self.child = child
        self.work_s = 0.0
        self.num_batches = 0
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._answers: dict[tuple[int, int], asyncio.Future[Message]] = {}
        self._slots: dict[tuple[int, int], int] = {}
        """The slots of its batches in the marker."""
        self._is_ending = False
        threading.Thread(target=self._follow, daemon=True).start()

    async def wait_until_ready(self) -> None:
        """Wait until its functions are set up. Raises MapperStartError."""
        await self._ready

    async def map(self, batch: BatchRows) -> None:
        """Run its steps over a batch. Raises ReportedError for an error of the batch as a whole."""
        answer = self._answers[batch.key] = self._loop.create_future()
        self._slots[batch.key] = batch.slot
        began_at = time.monotonic()
        try:
            await asyncio.to_thread(self._send, batch)
            message = await answer
        finally:
            del self._answers[batch.key]
            self._slots.pop(batch.key, None)
            self.work_s += time.monotonic() - began_at
            self.num_batches += 1
        if "error" in message:
            raise ReportedError(ErrorReport(**message["error"]))
        positions, reports = pickle.loads(message["changes"])
        batch.results, batch.positions = PackedRows(message["rows"], len(positions)), positions
        for position, report in reports.items():
            batch.fail(position, ReportedError(report))

    def _send(self, batch: BatchRows) -> None:
        rows = batch.results.data if isinstance(batch.results, PackedRows) else pickle.dumps(list(batch.results), 5)
        staged = StagedBatch(batch.assignment, batch.indices, batch.positions, batch.slot, rows)
        self.child.send({"batch": pickle.dumps(staged, 5)})

    def _follow(self) -> None:
        is_ready = False
        for message in self.child.messages():
            if "start_error" in message and is_ready:
                print(f"{self.stage.name}: {message['start_error']}", file=sys.stderr, flush=True)  # noqa: T201
                self.child.kill()
                break
            is_ready = is_ready or "ready" in message
            self._slots.pop(tuple(message.get("key", ())), None)  # what it has answered is not to blame
            self._loop.call_soon_threadsafe(self._handle, message)
            if "start_error" in message:
                return
        status = self.child.process.wait()
        if not self._is_ending:
            self._die_alike(status)

    def _handle(self, message: Message) -> None:
        if "ready" in message:
            self._ready.set_result(None)
        elif "start_error" in message:
            cause = FailureCause(message.get("cause", FailureCause.SETUP))
            self._ready.set_exception(MapperStartError(f"{self.stage.name}: {message['start_error']}", cause))
        elif (answer := self._answers.get(tuple(message["key"]))) is not None and not answer.done():
            answer.set_result(message)

    def _die_alike(self, status: int) -> NoReturn:
        """End the mapper's process as this one has ended, with this one's batches alone in work."""
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        print(f"{self.stage.name}: its process {how}", file=sys.stderr, flush=True)  # noqa: T201  the job's log
        self._feed.marker.end_others(list(self._slots.values()))
        if status < 0:
            os.kill(os.getpid(), -status)
            time.sleep(1.0)  # a signal that Python handles, such as SIGINT, does not end it
        os._exit(abs(status))

    def end(self) -> None:
        """Let its functions end."""
        self._is_ending = True
        self.child.end()


def loop_of(
    stages: Sequence[JobStage], spec: JobSpec, feed: Feed, channel: Channel | None, launcher: StageLauncher
) -> Callable[[], Coroutine[Any, Any, None]]:
    """A function like that of `adapters.loop_of`, for a job with stages."""
    return partial(_run, stages, spec, feed, channel, launcher)


async def _run(
    stages: Sequence[JobStage], spec: JobSpec, feed: Feed, channel: Channel | None, launcher: StageLauncher
) -> None:
    crews: dict[int, list[StageProcess]] = {}
    try:
        await _start(stages, feed, launcher, crews)
        steps: list[AsyncStep] = []
        num_operations = 0
        for index, stage in enumerate(stages):
            if stage.has_processes:
                steps.append(_stage_step(index, crews[stage.first], spec, feed.marker))
                continue
            assert channel is not None, "a worker gives operations a channel"
            operation_steps: list[AsyncStep] = []
            for step in map(operations.operations_of, stage.steps):
                operation_steps.append(partial(adapters.operate, step, channel, num_operations))
                num_operations += len(step)
            steps.append(adapters.measure_stage(index, operation_steps))
        min_rows = max_batches(stages) * spec.batch_size  # or else large batches would not overlap
        await map_concurrently([*steps, _unpack], feed, operations.max_concurrent_batches(spec), min_rows)
    except BaseException:
        for process in chain.from_iterable(crews.values()):
            process.end()
            process.child.kill()
        raise
    await _end(crews)


async def _start(
    stages: Sequence[JobStage], feed: Feed, launcher: StageLauncher, crews: dict[int, list[StageProcess]]
) -> None:
    """Start all processes together. Raises MapperStartError."""
    masks = iter(launcher.masks(stages))
    for stage in stages:
        stage_masks = [next(masks) for _ in range(stage.num_processes)]
        if stage.has_processes:
            crews[stage.first] = []
            for mask in stage_masks:
                child = await asyncio.to_thread(launcher.launch, stage, mask)
                crews[stage.first].append(StageProcess(stage, child, feed))
    await asyncio.gather(*(process.wait_until_ready() for crew in crews.values() for process in crew))


def _stage_step(index: int, crew: Sequence[StageProcess], spec: JobSpec, marker: Marker) -> AsyncStep:
    """A step that gives batches to the processes of a stage, as many to each as it runs at a time. The time of its work
    includes the way to the process and back, and no wait for one."""
    stage, free = crew[0].stage, asyncio.Queue[StageProcess]()
    for _ in range(spec.max_concurrent_batches if stage.is_async else 1):
        for process in crew:
            free.put_nowait(process)

    async def map_batch(batch: BatchRows) -> None:
        if not batch.results:  # no rows are left
            return
        marker.begin_wait(batch.slot)
        process = await free.get()
        try:
            marker.end_wait(batch.slot, stage.first)
            with batch.measure(index):
                await process.map(batch)
        finally:
            free.put_nowait(process)

    return map_batch


async def _unpack(batch: BatchRows) -> None:
    batch.results = await asyncio.to_thread(list, batch.results)


async def _end(crews: dict[int, list[StageProcess]]) -> None:
    """Let all functions end, and print what each stage has done to the job's log."""
    for crew in crews.values():
        num_batches, work_s = sum(process.num_batches for process in crew), sum(process.work_s for process in crew)
        processes = "a process" if len(crew) == 1 else f"{len(crew)} processes"
        print(f"{crew[0].stage.name}: {num_batches} batches in {work_s:.3g} s of {processes}")  # noqa: T201
        for process in crew:
            process.end()
    for crew in crews.values():
        for process in crew:
            await asyncio.to_thread(process.child.process.wait)
