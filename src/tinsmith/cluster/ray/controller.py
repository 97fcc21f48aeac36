"""Reconciles a cluster with the wanted fleet: starts missing processes, and drains surplus or outdated ones.

The controller's state can be read back from the cluster: names of processes are unique in it, so a restarted controller
adopts them, and none is started twice. New settings replace one process of a role at a time, so refused settings cost
one process. `Controller` neither imports Ray (`Cluster` does) nor queries the database (`QueueDepths` does).

`QueueDepths` reads the work that waits for each role: tokens of training, tokens of samples, batches of bulk jobs. The
queries use indexes over unfinished work; running work counts as waiting until it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import sqlalchemy as sa
import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.cluster.ray.scaling import BATCH_WORKER, ENGINE, ROLES, SAMPLER, Depths, Fleet, Past, Role, plan_counts
from tinsmith.db.database import Database
from tinsmith.db.schema import BATCH_JOBS, FUTURES

LOST_S = 30.0
"""A process that should end but does not answer for this long is killed."""

ENDING = ("draining", "ended")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RayProcess:
    """One process and its shell in the cluster. In state `silent` the shell did not answer the last query."""

    name: str
    state: str
    fingerprint: str = ""
    node: str = ""
    pid: int | None = None
    restarts: int = 0
    detail: str = ""

    @property
    def role(self) -> str:
        return self.name.rpartition("-")[0]

    @property
    def index(self) -> int:
        return int(self.name.rpartition("-")[2])


class Cluster(Protocol):
    def seats(self) -> list[RayProcess]: ...

    def start(self, name: str, role: Role, fleet: Fleet) -> None:
        """Start a shell; does nothing if it exists."""
        ...

    def drain(self, name: str) -> None: ...

    def remove(self, name: str) -> None:
        """Remove a shell and its reservation at once."""
        ...


class Controller:
    def __init__(
        self, fleet: Fleet, cluster: Cluster, read_depths: Callable[[], Depths], clock: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._cluster = cluster
        self._read_depths = read_depths
        self._clock = clock
        self._past: Mapping[str, Past] | None = None
        self._draining_since: dict[str, float] = {}
        self._report: dict[str, Any] = {}

    def tick(self) -> None:
        """One round: read the cluster and the queues, and start or drain processes."""
        now = self._clock()
        seats = {seat.name: seat for seat in self._cluster.seats()}
        self._draining_since = {name: since for name, since in self._draining_since.items() if name in seats}
        if self._past is None:
            self._past = {
                role: Past(sum(process.role == role for process in seats.values())) for role in self._fleet.roles
            }
        depths: Depths | None = None
        try:
            depths = self._read_depths()
        except SQLAlchemyError as error:
            log.error("the queues cannot be read; the number of processes does not change", error=repr(error))
        rules = {name: role.rule for name, role in self._fleet.roles.items()}
        if depths is None:
            counts = {name: rule.clamp(self._past[name].count) for name, rule in rules.items()}
        else:
            decision = plan_counts(depths, rules, self._past, now)
            counts, self._past = decision.counts, decision.past
        for name, role in self._fleet.roles.items():
            of_role = {seat.name: seat for seat in seats.values() if seat.role == name}
            self._reconcile(name, role, counts[name], of_role, now)
        self._report = {"wanted": dict(counts), "waiting": depths}

    def _reconcile(self, name: str, role: Role, count: int, seats: Mapping[str, RayProcess], now: float) -> None:
        names = [f"{name}-{index}" for index in range(count)]
        for missing in (seat_name for seat_name in names if seat_name not in seats):
            log.info("starting", name=missing)
            self._cluster.start(missing, role, self._fleet)
        leaving = {seat_name for seat_name in seats if seat_name not in names}
        replaced = [seat_name for seat_name in names if seat_name in seats and self._is_outdated(seats[seat_name])]
        current = [seat_name for seat_name in names if seat_name not in replaced]
        if replaced and all(seat_name in seats and seats[seat_name].state == "running" for seat_name in current):
            leaving.add(replaced[0])
        for seat_name, seat in seats.items():
            if seat_name in leaving or seat.state in ENDING or seat_name in self._draining_since:
                self._drain_or_remove(seat, now)

    def _is_outdated(self, seat: RayProcess) -> bool:
        return bool(seat.fingerprint) and seat.fingerprint != self._fleet.fingerprint

    def _drain_or_remove(self, seat: RayProcess, now: float) -> None:
        since = self._draining_since.setdefault(seat.name, now)
        if seat.state == "ended" or (seat.state == "silent" and now - since > LOST_S):
            log.info("removed", name=seat.name)
            self._cluster.remove(seat.name)
            del self._draining_since[seat.name]
        elif seat.state != "draining":
            self._cluster.drain(seat.name)

    def report(self) -> dict[str, Any]:
        """The result of the last round."""
        return self._report


SAMPLED = ("sample", "cancel")
RUNNABLE = ("PENDING", "RUNNING")
"""Statuses of bulk jobs that need workers."""


class QueueDepths:
    def __init__(self, db: Database, base_models: Sequence[str], has_samplers: bool) -> None:
        """Without samplers, samples count as work of the engines."""
        self._db = db
        self._base_models = base_models
        self._sampling_role = SAMPLER if has_samplers else ENGINE

    def read(self) -> dict[str, dict[str, float]]:
        """The waiting work: role -> base model -> tokens. Batches of bulk jobs have the base model ""."""
        depths: dict[str, dict[str, float]] = {role: {} for role in ROLES}
        columns = FUTURES.c.base_model, FUTURES.c.kind
        waiting = (
            sa.select(*columns, sa.func.sum(FUTURES.c.num_tokens - FUTURES.c.shared_tokens), sa.func.count())
            .where(FUTURES.c.base_model.in_(self._base_models), FUTURES.c.state == "pending")
            .group_by(*columns)
        )
        with self._db.read() as connection:
            for base_model, kind, tokens, count in connection.execute(waiting):
                role = depths[self._sampling_role if kind in SAMPLED else ENGINE]
                # By the count, too, since optimizer steps have no tokens.
                role[base_model] = role.get(base_model, 0.0) + max(float(tokens), float(count))
            depths[BATCH_WORKER][""] = float(connection.scalar(sa.select(_batches())) or 0)
        return depths


def _batches() -> sa.ScalarSelect[int]:
    """The number of uncommitted batches; 1 for a job whose batches are not counted yet."""
    jobs = BATCH_JOBS.c
    remaining = jobs.total_batches - jobs.completed_batches
    batches = sa.case((sa.and_(jobs.sealed, remaining > 0), remaining), else_=1)
    return sa.select(sa.func.sum(batches)).where(jobs.status.in_(RUNNABLE)).scalar_subquery()
