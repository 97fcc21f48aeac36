"""The stages of a job: runs of consecutive steps with equal resources, each in processes of its own.

A step that names one of `STAGE_OPTIONS` has those that it names and no others. A step that names none shares those of
the step before it, and the first steps those of the first one that names any. If all steps share the same, the job has
one stage, and one process of each worker runs all its steps.

`concurrency` is the most processes of a step at a time, on all workers together. A job has as many workers as its
smallest one, and each worker has its part of the others. `min_concurrency` is the least, as `JobSpec` says. What a
worker needs is the sum of what its processes need. Operations need no process: they wait for the service.

Nothing here runs a user's code, and options of a wrong type count as not given: servers read stages, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.batch.markers import OF_STEPS, names_with
from tinsmith.batch.types import MAX_CONCURRENT_BATCHES, JobSpec, steps_in

OPERATIONS = "operations"
"""The type of a step of operations (`operations/`)."""
AMOUNTS = ("num_cpus", "num_gpus", "memory")
INTERPRETER = ("python", "batch_activate_env")
STAGE_OPTIONS = names_with(JobSpec, OF_STEPS)
"""The fields of a `JobSpec` that a step may have for itself, as its `stage_options`."""
MAX_PROCESSES = MAX_CONCURRENT_BATCHES
"""The most processes of a stage in one worker."""
Options = Mapping[str, Any]


@dataclass(frozen=True)
class JobStage:
    """Consecutive steps of a payload, the index of the first, and the number of their processes in each worker."""

    first: int
    steps: tuple[Mapping[str, Any], ...]
    options: Options
    num_processes: int

    @property
    def name(self) -> str:
        names = ", ".join(str(step.get("name") or step.get("type")) for step in self.steps)
        first, last = self.first + 1, self.first + len(self.steps)
        return f"step {first} ({names})" if first == last else f"steps {first} to {last} ({names})"

    @property
    def has_processes(self) -> bool:
        return self.steps[0].get("type") != OPERATIONS

    @property
    def is_async(self) -> bool:
        return any(step.get("is_async") for step in self.steps)


def stages_of(payload: str) -> list[JobStage]:
    """The stages of a payload; none for an invalid one."""
    return split([step for step in steps_in(payload) if isinstance(step, dict)])


def split(steps: Sequence[Mapping[str, Any]]) -> list[JobStage]:
    if not steps:
        return []
    named_options = [_options_of(step) for step in steps]
    shared: Options = next(filter(None, named_options), {})
    inherited = [shared := options or shared for options in named_options]
    if all(options == shared for options in inherited):
        return [JobStage(0, tuple(steps), shared, 1)]
    are_operations = [step.get("type") == OPERATIONS for step in steps]
    keys = list(zip(are_operations, inherited, strict=True))
    firsts = [index for index, key in enumerate(keys) if not index or key != keys[index - 1]]
    # Operations count where they name something themselves: they need no process of the stage before them.
    options = [named_options[first] if are_operations[first] else inherited[first] for first in firsts]
    num_workers = min(filter(None, map(_concurrency, options)), default=1)
    stages = []
    for first, end, stage_options in zip(firsts, [*firsts[1:], len(steps)], options, strict=True):
        num_processes = min(MAX_PROCESSES, (_concurrency(stage_options) or num_workers) // num_workers)
        stages.append(JobStage(first, tuple(steps[first:end]), stage_options, num_processes))
    return stages


def worker_options(stages: Sequence[JobStage]) -> dict[str, Any]:
    """The options of the whole job: what a worker needs for all its processes, the most workers, and the interpreter,
    if all stages have the same."""
    if len(stages) == 1:
        return dict(stages[0].options)
    options = [stage.options for stage in stages for _ in range(stage.num_processes)]
    total: dict[str, Any] = {name: sum(values) for name in AMOUNTS if (values := _values(options, name))}
    if "num_gpus" in total:
        num_gpus = max((gpus.stop for gpus in place_gpus(stages) if gpus), default=0)
        total["num_gpus"] = total["num_gpus"] if num_gpus <= 1 else num_gpus
    for resources in _values(options, "resources"):
        for name, amount in resources.items():
            total.setdefault("resources", {}).setdefault(name, 0)
            total["resources"][name] += amount
    if concurrencies := _values(options, "concurrency"):
        total["concurrency"] = min(concurrencies)
    minima = [
        math.ceil(least / stage.num_processes)
        for stage in stages
        if (least := _count(stage.options, "min_concurrency"))
    ]
    if minima:
        total["min_concurrency"] = max(minima)
    interpreters = [{name: stage.options.get(name) for name in INTERPRETER} for stage in stages if stage.has_processes]
    if interpreters and all(interpreter == interpreters[0] for interpreter in interpreters):
        total |= {name: value for name, value in interpreters[0].items() if value is not None}
    return total


def place_gpus(stages: Sequence[JobStage]) -> list[range]:
    """The positions of the GPUs of each process among those of its worker, in the order of stages. Parts of a GPU share
    the first one that has room; a process without GPUs has an empty range."""
    gpu_ranges: list[range] = []
    rooms: dict[int, float] = {}
    num_gpus = 0
    for amount in [stage.options.get("num_gpus") or 0 for stage in stages for _ in range(stage.num_processes)]:
        position = next((index for index, room in rooms.items() if 0 < amount <= room + 1e-9), None)
        if position is None:
            position, num_gpus = num_gpus, num_gpus + math.ceil(amount)
            if 0 < amount < 1:
                rooms[position] = 1.0
        if position in rooms:
            rooms[position] -= amount
        gpu_ranges.append(range(position, position + math.ceil(amount)))
    return gpu_ranges


def max_batches(stages: Sequence[JobStage]) -> int:
    """The most batches that are in work at a time: one for each process, and one that waits for each stage."""
    return min(MAX_CONCURRENT_BATCHES, sum(stage.num_processes for stage in stages) + len(stages))


def _options_of(step: Mapping[str, Any]) -> Options:
    options = step.get("stage_options")
    return {name: options[name] for name in STAGE_OPTIONS if name in options} if isinstance(options, dict) else {}


def _concurrency(options: Options) -> int | None:
    return _count(options, "concurrency")


def _count(options: Options, name: str) -> int | None:
    count = options.get(name)
    return count if isinstance(count, int) and count > 0 else None


def _values(options: Sequence[Options], name: str) -> list[Any]:
    return [stage_options[name] for stage_options in options if stage_options.get(name) is not None]
