"""Operations: what stands where a function would, when the service itself is to answer a bulk job's rows.

An operation is a frozen dataclass below `Operation`, known by a name in `OPERATION_REGISTRY`; its fields are JSON, and
no code of a user is part of it. `Dataset.map(Sample(...), ...)` sends one, `Dataset.map([Sample(...), Grade(...)])`
several, each of which gets the rows that the one before it made. To the rest of a bulk job a row that was answered is
like one that a function returned: batches, leases, retries, halving, errors, parts, resuming and progress are the same.

Where what runs:
- A worker's child (`runtime.py`) reads and writes the rows, as for functions, and calls `Operation.answer` for every
  row of a batch, together. It renders prompts, reads answers and grades them. It loads no weights and no torch, and can
  be killed at any time.
- What needs the service is asked for: `RowService.ask(verb, payload)`, of which `sample` and `text` are made. The
  question goes up the stream of the attempt (`worker.py`), is answered by the server's model gateway (for the job's
  tenant, and for jobs of operations only), and the answer comes back. The server parses no rows.

Invariants:
- A question is named by (job, row, step, key, payload). Asked again, by another attempt or after a restart, it is the
  same question: what was answered is not worked out again (`tinsmith.batch.coordinator.model_gateway`). So an
  operation asks with a key of its own for everything that it wants to have done twice, and makes its payload of the
  row and its own fields alone.
- What `answer` raises fails its row and no other one.
- Randomness is a function of the operation's seed and the row's index (`base.row_seed`): how rows were batched
  and which of them were tried twice is not seen in the results.

To add one: a module with the class, `@OPERATION_REGISTRY.type_register(name=...)`, and the name in `MODULES` below. To
add a verb: `ModelGateway.register(verb, handler)` where the server is wired.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from tinsmith.batch.formats.registry import Registry
from tinsmith.batch.operations.base import Operation
from tinsmith.errors import UserError

TYPE = "operations"
VERSION = "1.0"
MAX_STEPS = 16
MODULES = {
    "grade": "tinsmith.batch.operations.grade",
    "openai_request": "tinsmith.batch.operations.openai_request",
    "rollout": "tinsmith.batch.operations.rollout",
    "sample": "tinsmith.batch.operations.sample",
}
OPERATION_REGISTRY: Registry[Operation] = Registry("operation", MODULES)


def payload_of(steps: Sequence[Operation]) -> str:
    """What travels in place of a function's source (`JobSpec.batch_serialized_fn`). Raises UserError."""
    _check_steps(steps)
    made = [{"operation": step.name, **asdict(step)} for step in steps]
    try:
        text = json.dumps({"type": TYPE, "version": VERSION, "steps": made}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"the fields of an operation must be JSON: {error}") from None
    return base64.b64encode(text.encode()).decode()


def steps_of(payload: str) -> list[Operation] | None:
    """The operations of a payload; None if it is a function's. Runs nothing of it. Raises UserError."""
    try:
        data = json.loads(base64.b64decode(payload, validate=True))
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or data.get("type") != TYPE:
        return None
    given = data.get("steps")
    if not isinstance(given, list):
        raise UserError(f"the steps of the operations are {given!r}; they must be a list")
    steps = [_step(each) for each in given]
    _check_steps(steps)
    return steps


def _step(given: object) -> Operation:
    if not isinstance(given, dict) or not isinstance(given.get("operation"), str):
        raise UserError("each step must be an object that names its 'operation'")
    values: dict[str, Any] = {name: value for name, value in given.items() if name != "operation"}
    cls = OPERATION_REGISTRY.find(given["operation"])
    known = sorted(each.name for each in fields(cls))  # type: ignore[arg-type]
    if unknown := sorted(set(values) - set(known)):
        raise UserError(f"{given['operation']} has no field {unknown}; it has {known}")
    try:
        return cls(**values)
    except TypeError as error:
        raise UserError(f"{given['operation']}: {error}") from None


def _check_steps(steps: Sequence[Operation]) -> None:
    if not 1 <= len(steps) <= MAX_STEPS:
        raise UserError(f"there are {len(steps)} operations; there must be 1 to {MAX_STEPS}")
    for step in steps:
        step.check()
