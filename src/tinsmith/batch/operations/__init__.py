"""Operations: steps of a bulk job that the service itself runs, instead of a user's function.

An operation is a frozen dataclass below `RowOperation`, known by a name in `OPERATION_REGISTRY`; its fields are JSON,
and no user's code is part of it. `Dataset.map(Sample(...), ...)` sends one, `Dataset.map([Sample(...), Grade(...)])`
several, each of which gets the rows of the one before it. Batches, leases, retries, bisection, errors, parts, resuming
and progress are the same as for functions.

What runs where:
- A worker's child (`runtime.py`) reads and writes the rows and calls `RowOperation.answer` for all rows of a batch
  concurrently. It renders prompts, reads answers and grades them. It loads no weights and no torch, and can be killed
  at any time.
- Requests to the service go through `RowService.ask(verb, payload)`, on which `sample` and `text` are built. A request
  travels to the coordinator, is answered there for the job's tenant, and only for jobs that have operations
  (`coordinator.model_gateway`). The server parses no rows.

Invariants:
- A request is identified by (job, row, step, key, payload). When another attempt repeats it, or a restarted server gets
  it again, the stored answer is used. So an operation gives a key of its own to every request that must be computed
  again, and makes payloads of the row and its own fields alone.
- An exception in `answer` fails its row and no other one.
- Randomness is a function of the operation's seed and the row's index: batching and retries do not change results.

To add an operation: a module with the class, `@OPERATION_REGISTRY.type_register(name=...)`, and the name in `MODULES`.
To add a verb: `ModelGateway.register(verb, handler)` where the server is wired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeGuard

from tinsmith.batch.formats.registry import Registry, build_dataclass
from tinsmith.batch.operations.base import RowOperation
from tinsmith.batch.stages import OPERATIONS, max_batches, split
from tinsmith.batch.types import JobSpec, pack_payload, steps_in
from tinsmith.errors import UserError

TYPE = OPERATIONS
VERSION = "1.0"
MAX_STEPS = 16
ROW_KINDS = ("row", "filter", "flat")
"""Kinds of functions that are called with one row."""
MODULES = {
    "grade": "tinsmith.batch.operations.grade",
    "openai_request": "tinsmith.batch.operations.sample",
    "rollout": "tinsmith.batch.operations.rollout",
    "sample": "tinsmith.batch.operations.sample",
}
OPERATION_REGISTRY: Registry[RowOperation] = Registry("operation", MODULES)


def payload_of(steps: Sequence[RowOperation]) -> str:
    """The operations as `JobSpec.batch_serialized_fn`, in place of a function's source. Raises UserError."""
    _check_steps(steps)
    try:
        return pack_payload(describe_operations(steps))
    except (TypeError, ValueError) as error:
        raise UserError(f"the fields of an operation must be JSON: {error}") from None


def describe_operations(steps: Sequence[RowOperation]) -> dict[str, Any]:
    """The operations as a payload, or as a step of a chain."""
    return {"type": TYPE, "version": VERSION, "steps": [{"operation": step.name, **asdict(step)} for step in steps]}


def steps_of(payload: str) -> list[RowOperation] | None:
    """The operations of a payload, also of a chain of them; None if it has a function, of which nothing is run. Raises
    UserError."""
    parts = steps_in(payload)
    chain = [part for part in parts if _is_operations(part)]
    if not chain or len(chain) < len(parts):
        return None
    steps = [step for part in chain for step in operations_of(part)]
    _check_steps(steps)
    return steps


def asks_service(payload: str) -> bool:
    """Whether a payload has operations, alone or among the steps of a chain."""
    return any(_is_operations(part) for part in steps_in(payload))


def max_concurrent_batches(spec: JobSpec) -> int:
    """How many batches a worker runs at a time: more than one if a step is asynchronous, and so waits for something,
    or if there are stages. A function that loops over batches has one."""
    parts = [part for part in steps_in(spec.batch_serialized_fn) if isinstance(part, dict)]
    is_async = any(_is_operations(part) or (part.get("is_async") and part.get("kind") != "loop") for part in parts)
    stages = split(parts)
    return max(spec.max_concurrent_batches if is_async else 1, max_batches(stages) if len(stages) > 1 else 1)


def is_by_row(payload: str) -> bool:
    """Whether the result of a row is the same in any batch: all steps are functions of rows, or operations."""
    parts = steps_in(payload)
    return all(
        _is_operations(part)
        or (isinstance(part, dict) and part.get("kind") in ROW_KINDS and not (part.get("options") or {}).get("batched"))
        for part in parts
    )


def _is_operations(part: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(part, dict) and part.get("type") == TYPE


def operations_of(data: Mapping[str, Any]) -> list[RowOperation]:
    """The operations of a payload or of a step of a chain. Raises UserError."""
    steps_data = data.get("steps")
    if not isinstance(steps_data, list):
        raise UserError(f"the steps of the operations are {steps_data!r}; they must be a list")
    steps = [_build_step(step_data) for step_data in steps_data]
    _check_steps(steps)
    return steps


def _build_step(step_data: object) -> RowOperation:
    if not isinstance(step_data, dict) or not isinstance(step_data.get("operation"), str):
        raise UserError("each step must be an object that names its 'operation'")
    values: dict[str, Any] = {name: value for name, value in step_data.items() if name != "operation"}
    return build_dataclass(OPERATION_REGISTRY.find(step_data["operation"]), values, step_data["operation"])


def _check_steps(steps: Sequence[RowOperation]) -> None:
    if not 1 <= len(steps) <= MAX_STEPS:
        raise UserError(f"there are {len(steps)} operations; there must be 1 to {MAX_STEPS}")
    for step in steps:
        step.check()
