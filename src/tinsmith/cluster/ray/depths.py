"""How much waits for each role, read from the database: tokens of training, tokens of samples, batches of bulk jobs.

Every query is answered by an index over what is unfinished. What is being worked on still waits: it is not done.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from tinsmith.cluster.ray.fleet import BATCH_WORKER, ENGINE, ROLES, SAMPLER
from tinsmith.db.database import Database
from tinsmith.db.schema import BATCH, FUTURES

SAMPLED = ("sample", "cancel")
RUNNABLE = ("PENDING", "RUNNING")
"""Of a bulk job."""


class QueueDepths:
    def __init__(self, db: Database, base_models: Sequence[str], has_samplers: bool) -> None:
        """Without samplers, samples wait for engines."""
        self._db = db
        self._base_models = base_models
        self._sampling_role = SAMPLER if has_samplers else ENGINE

    def read(self) -> dict[str, dict[str, float]]:
        """role -> base model -> tokens; batches of bulk jobs are nobody's model's."""
        found: dict[str, dict[str, float]] = {role: {} for role in ROLES}
        columns = FUTURES.c.base_model, FUTURES.c.kind
        waiting = (
            sa.select(*columns, sa.func.sum(FUTURES.c.num_tokens), sa.func.count())
            .where(FUTURES.c.base_model.in_(self._base_models), FUTURES.c.state == "pending")
            .group_by(*columns)
        )
        with self._db.read() as connection:
            for base_model, kind, tokens, count in connection.execute(waiting):
                role = found[self._sampling_role if kind in SAMPLED else ENGINE]
                # A step of the optimizer has no tokens, and must be done all the same.
                role[base_model] = role.get(base_model, 0.0) + max(float(tokens), float(count))
            found[BATCH_WORKER][""] = float(connection.scalar(sa.select(_batches())) or 0)
        return found


def _batches() -> sa.ScalarSelect[int]:
    """That are not committed; one for a job of which nobody has counted them yet."""
    jobs = BATCH.jobs.c
    left = jobs.total_batches - jobs.completed_batches
    batches = sa.case((sa.and_(jobs.sealed, left > 0), left), else_=1)
    return sa.select(sa.func.sum(batches)).where(jobs.status.in_(RUNNABLE)).scalar_subquery()
