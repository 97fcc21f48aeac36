"""What the machines did, over an hour, a day and a month: time by kind of work, tokens, memory, use of devices.

A row has the sums of one period, server and base model. An observation is added to the rows of all three levels in one
transaction, so the totals of every level are equal as far as it reaches back. A row is changed by the server that it
names alone. Each level has at most `Level.max_periods` rows of a server and base model; older ones are deleted by the
next observation of any server.

Time and tokens of work are spread evenly over the seconds before their observation that the work took, at least over
those since the last observation: a step of a minute is noticed at its end, and fills that minute.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tinsmith.db.database import Database
from tinsmith.db.schema import MACHINE_HISTORY

MAX_SPREAD_S = 900.0
"""The longest time over which observed work is spread."""

MACHINE = ""
"""In place of a base model: the row of the machine itself."""


@dataclass(frozen=True, slots=True)
class Level:
    """`step_s` is the length of a period, `span_s` the time that is kept."""

    step_s: int
    span_s: int

    @property
    def max_periods(self) -> int:
        """The periods that overlap the span."""
        return self.span_s // self.step_s + 1


LEVELS: Mapping[str, Level] = {
    "hour": Level(10, 3600),
    "day": Level(60, 86400),
    "month": Level(900, 30 * 86400),
}


@dataclass(slots=True)
class MachineWork:
    """Sums over a time, of one base model or, under `MACHINE`, of the machine; `_s` are seconds.

    `engine_s` is the time of all engines together, and `loading_s` also that of saving. `tenants` maps a tenant to its
    trained and sampled tokens.
    """

    observed_s: float = 0.0
    engine_s: float = 0.0
    training_s: float = 0.0
    sampling_s: float = 0.0
    loading_s: float = 0.0
    trained_tokens: float = 0.0
    sampled_tokens: float = 0.0
    memory_byte_s: float = 0.0
    budget_byte_s: float = 0.0
    device_s: float = 0.0
    device_busy_s: float = 0.0
    tenants: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, other: MachineWork) -> None:
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for tenant_id, (trained, sampled) in other.tenants.items():
            before = self.tenants.get(tenant_id, (0.0, 0.0))
            self.tenants[tenant_id] = before[0] + trained, before[1] + sampled

    @property
    def idle_s(self) -> float:
        return max(0.0, self.engine_s - self.training_s - self.sampling_s - self.loading_s)


SUMS = tuple(entry.name for entry in fields(MachineWork) if entry.name != "tenants")
_COLUMNS = [MACHINE_HISTORY.c[name] for name in (*SUMS, "tenants")]


@dataclass(frozen=True, slots=True)
class Period:
    """The work of one base model, or of the machine, on all servers in one period of a level."""

    began_at: float
    base_model: str
    totals: MachineWork


class MachineHistory:
    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, holder: str, at: float, observations: Mapping[str, MachineWork]) -> None:
        """Add the work of each base model since the last observation of this server, up to the moment `at`."""
        with self._db.write() as connection:
            for level in LEVELS.values():
                for base_model, observation in observations.items():
                    for began_at, part in _split(observation, at, level.step_s).items():
                        _add_to_row(connection, (level.step_s, began_at, holder, base_model), part)
                is_old = MACHINE_HISTORY.c.began_at <= at - level.span_s - level.step_s
                connection.execute(MACHINE_HISTORY.delete().where(MACHINE_HISTORY.c.step_s == level.step_s, is_old))

    def list_periods(self, level: Level, at: float) -> list[Period]:
        """The periods of a level up to a moment, oldest first, with the servers' work together. They work at the same
        time, so a period was observed for as long as the server that was up longest.
        """
        since = at - level.span_s - level.step_s
        query = sa.select(MACHINE_HISTORY.c.began_at, MACHINE_HISTORY.c.base_model, *_COLUMNS)
        query = query.where(MACHINE_HISTORY.c.step_s == level.step_s, MACHINE_HISTORY.c.began_at > since)
        totals_by_period: dict[tuple[float, str], MachineWork] = defaultdict(MachineWork)
        for began_at, base_model, *values in self._db.rows(query):
            observation, total = _work_of(values), totals_by_period[began_at, base_model]
            observed_s = max(total.observed_s, observation.observed_s)
            total.add(observation)
            total.observed_s = observed_s
        return [Period(*key, totals) for key, totals in sorted(totals_by_period.items())]


def _work_of(values: Sequence[object]) -> MachineWork:
    *sums, tenants = values
    assert isinstance(tenants, Mapping)
    pairs = {str(tenant_id): (float(trained), float(sampled)) for tenant_id, (trained, sampled) in tenants.items()}
    return MachineWork(**dict(zip(SUMS, sums, strict=True)), tenants=pairs)  # type: ignore[arg-type]


def _add_to_row(connection: Connection, key: tuple[int, float, str, str], part: MachineWork) -> None:
    names = ("step_s", "began_at", "holder", "base_model")
    is_row = sa.and_(*(MACHINE_HISTORY.c[name] == value for name, value in zip(names, key, strict=True)))
    row = connection.execute(sa.select(*_COLUMNS).where(is_row)).first()
    total = MachineWork() if row is None else _work_of(tuple(row))
    total.add(part)
    values = {name: getattr(total, name) for name in SUMS} | {"tenants": total.tenants}
    if row is None:
        connection.execute(MACHINE_HISTORY.insert().values(**dict(zip(names, key, strict=True)), **values))
    else:
        connection.execute(MACHINE_HISTORY.update().where(is_row).values(**values))


def _split(observation: MachineWork, at: float, step_s: int) -> dict[float, MachineWork]:
    """The parts of an observation that ended at `at`, by the beginnings of their periods."""
    parts: dict[float, MachineWork] = defaultdict(MachineWork)
    engines = max(1.0, observation.engine_s / observation.observed_s if observation.observed_s else 1.0)
    spans = {
        "training": max(observation.observed_s, observation.training_s / engines),
        "sampling": max(observation.observed_s, observation.sampling_s / engines),
        "loading": max(observation.observed_s, observation.loading_s / engines),
    }
    names = {
        "training": ("training_s", "trained_tokens"),
        "sampling": ("sampling_s", "sampled_tokens"),
        "loading": ("loading_s",),
    }
    names["observed"] = tuple(set(SUMS) - {name for group in names.values() for name in group})
    for kind, sums in names.items():
        span_s = min(MAX_SPREAD_S, spans.get(kind, observation.observed_s))
        for began_at, share in _share_out(at - span_s, at, step_s):
            part = parts[began_at]
            for name in sums:
                setattr(part, name, getattr(part, name) + share * getattr(observation, name))
            for tenant_id, (trained, sampled) in observation.tenants.items():
                before = part.tenants.get(tenant_id, (0.0, 0.0))
                of_training, of_sampling = share * (kind == "training"), share * (kind == "sampling")
                if of_training * trained or of_sampling * sampled:
                    part.tenants[tenant_id] = before[0] + of_training * trained, before[1] + of_sampling * sampled
    return parts


def _share_out(start: float, end: float, step_s: int) -> Iterator[tuple[float, float]]:
    """The beginnings of the periods that a time overlaps, each with its share of the time."""
    if end <= start:
        yield math.floor(end / step_s) * float(step_s), 1.0
        return
    began_at = math.floor(start / step_s) * float(step_s)
    while began_at < end:
        overlap_s = min(end, began_at + step_s) - max(start, began_at)
        if overlap_s > 0:
            yield began_at, overlap_s / (end - start)
        began_at += step_s
