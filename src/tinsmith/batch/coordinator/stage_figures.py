"""The figures of a job's stages in its status: what each is, and the rows, time and speed of its committed batches.

The sums are stored with the job, in the transaction that commits a batch, so that a retried batch counts once. Batches
that a resumed job takes over are not its work. Nothing here runs a user's code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tinsmith.batch.coordinator.rows import JobRecord
from tinsmith.batch.stages import AMOUNTS, OPERATIONS, JobStage, stages_of
from tinsmith.batch.types import JobSpec, StageWork

SUMS = ("rows_in", "rows_out", "rows_failed", "work_s")
MAX_STAGES = 256
"""Figures of later stages are not stored; no job has so many."""


def add_stage_work(stored: Sequence[Mapping[str, float]], additions: Sequence[StageWork]) -> list[dict[str, float]]:
    """The sums of each stage after more work."""
    figures = [dict(sums) for sums in stored]
    for part in additions:
        if not 0 <= part.stage < MAX_STAGES:
            continue
        while len(figures) <= part.stage:
            figures.append({"batches": 0, **dict.fromkeys(SUMS, 0)})
        sums = figures[part.stage]
        sums["batches"] += 1
        for name in SUMS:
            sums[name] += getattr(part, name)
    return figures


def outline_stages(spec: JobSpec) -> list[JobStage]:
    """The stages of a job without their functions. The only stage has the resources of the job."""
    stages = [
        replace(stage, steps=tuple({name: step.get(name) for name in ("name", "type")} for step in stage.steps))
        for stage in stages_of(spec.batch_serialized_fn)
    ]
    if len(stages) == 1:
        of_job = {name: getattr(spec, name) for name in AMOUNTS if getattr(spec, name) is not None}
        stages = [replace(stages[0], options=of_job)]
    return stages


def describe_stages(job: JobRecord, stages: Sequence[JobStage], at: float) -> list[dict[str, Any]]:
    """Each stage with its sums. `rows_per_s` are the rows that came to it per second of the job, and `busy` is the mean
    number of batches that it worked on; both are None before the job has started.
    """
    elapsed_s = None if job.started_at is None else (job.ended_at or at) - job.started_at
    stored = job.stage_figures or []
    entries: list[dict[str, Any]] = []
    for index, stage in enumerate(stages):
        sums = stored[index] if index < len(stored) else {"batches": 0, **dict.fromkeys(SUMS, 0)}
        rates = (None, None) if not elapsed_s else (sums["rows_in"] / elapsed_s, sums["work_s"] / elapsed_s)
        entries.append(
            {
                "name": stage.name,
                "device": _device_of(stage),
                "resources": {name: stage.options[name] for name in AMOUNTS if stage.options.get(name) is not None},
                "processes": stage.num_processes if stage.has_processes else 0,
                **sums,
                "rows_per_s": rates[0],
                "busy": rates[1],
            }
        )
    return entries


def _device_of(stage: JobStage) -> str:
    """What a stage computes on: `service` for operations, which wait for the engines of the server."""
    if all(step.get("type") == OPERATIONS for step in stage.steps):
        return "service"
    num_gpus = stage.options.get("num_gpus")
    return "GPU" if isinstance(num_gpus, int | float) and num_gpus > 0 else "CPU"
