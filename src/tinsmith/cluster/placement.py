"""Where an engine that is started on demand fits: a decision on values, without processes and databases.

A slot is a GPU, or the host if it has none. A layout says how many slots an engine takes and how many bytes of each.
`decide` prefers layouts in the order of the list and the emptiest slots. If none fits, idle engines end, those first
that have been idle longest, and no more than needed; if that is not enough, the reason says what runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tinsmith.runtime.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """`degrees` are by the names of their settings, `num_bytes` those of each slot."""

    num_slots: int
    num_bytes: int
    degrees: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Survey:
    """The layouts of a base model, and the bytes of each slot: those that are free, or, with `is_budget`, those that
    all engines on demand may take. Without slots, memory is unlimited.
    """

    layouts: Sequence[EngineLayout]
    slots: Sequence[int]
    is_budget: bool = False
    has_gpus: bool = False


@dataclass(frozen=True, slots=True)
class PlacedEngine:
    """An engine on demand that runs: `use` says by whom it is used; empty if it may end."""

    base_model: str
    slots: Sequence[int]
    num_bytes: int
    is_ready: bool
    idle_s: float
    use: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    layout: EngineLayout
    slots: Sequence[int]
    has_gpus: bool = False


@dataclass(frozen=True, slots=True)
class MakeRoom:
    """The base models whose engines must end first."""

    base_models: Sequence[str]


@dataclass(frozen=True, slots=True)
class Full:
    reason: str


def decide(base_model: str, survey: Survey, engines: Sequence[PlacedEngine]) -> Start | MakeRoom | Full:
    """Whether an engine can start, which others must end first, or why it cannot."""
    if not survey.slots:
        return Start(survey.layouts[0], ())
    # What is measured as free does not contain the memory that ready engines have.
    occupants = [engine for engine in engines if survey.is_budget or not engine.is_ready]
    free = _add(survey.slots, occupants, -1)
    if placed := _place(survey.layouts, free):
        return replace(placed, has_gpus=survey.has_gpus)
    idle = sorted((engine for engine in engines if not engine.use), key=lambda engine: -engine.idle_s)
    ending: list[PlacedEngine] = []
    for engine in idle:
        ending.append(engine)
        if _place(survey.layouts, _add(free, ending, +1)):
            break
    else:
        return Full(_explain(base_model, survey, free, engines))
    for engine in list(ending):
        remaining = [other for other in ending if other is not engine]
        if _place(survey.layouts, _add(free, remaining, +1)):
            ending = remaining
    return MakeRoom([engine.base_model for engine in ending])


def _add(slots: Sequence[int], engines: Iterable[PlacedEngine], sign: int) -> list[int]:
    """The bytes of the slots with those of the engines added, or taken away."""
    sums = list(slots)
    for engine in engines:
        for slot in engine.slots:
            sums[slot] += sign * engine.num_bytes
    return sums


def _place(layouts: Sequence[EngineLayout], free: Sequence[int]) -> Start | None:
    emptiest = sorted(range(len(free)), key=lambda slot: -free[slot])
    for layout in layouts:
        slots = emptiest[: layout.num_slots]
        if len(slots) == layout.num_slots and all(free[slot] >= layout.num_bytes for slot in slots):
            return Start(layout, tuple(sorted(slots)))
    return None


def _explain(base_model: str, survey: Survey, free: Sequence[int], engines: Sequence[PlacedEngine]) -> str:
    noun = "of a GPU" if survey.has_gpus else "of memory"
    needs = " or ".join(
        f"{format_bytes(layout.num_bytes)} {noun}"
        if layout.num_slots == 1
        else f"{format_bytes(layout.num_bytes)} of each of {layout.num_slots} GPUs"
        for layout in survey.layouts
    )
    room = ", ".join(format_bytes(max(0, num_bytes)) for num_bytes in free)
    reason = f"base model {base_model!r} cannot be loaded now: it needs {needs}, and {room} is free"
    if not engines:
        return f"{reason}; no engine on demand runs that could make room"
    running = ", ".join(
        f"{engine.base_model!r} with {format_bytes(engine.num_bytes)} ({engine.use or 'idle'})" for engine in engines
    )
    used = [engine.base_model for engine in engines if engine.use]
    if not used or not _place(survey.layouts, _add(free, engines, +1)):
        return f"{reason}; on demand {running}, and it would not fit without them"
    return f"{reason}; on demand {running}; it can be loaded when {' or '.join(map(repr, used))} is idle"
