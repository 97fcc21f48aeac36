"""The attempts of one job that are with its workers: given in groups, and told one by one.

A group is as many batches as a worker did in `GROUP_S` lately, so that what a batch costs beside its mapper (a request,
a transaction) is shared where batches are short, and nothing waits for anything where they are long. Two groups are
with a worker at a time. What a worker has not begun it gives back when it gets slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tinsmith.batch.coordinator.attempts import Claim, Lost
from tinsmith.batch.formats.protocols import JobSpec, Outcome, part_base
from tinsmith.batch.formats.schemas import Schema, SchemaConflictError, merged
from tinsmith.batch.worker.rpc import OperationError, RemoteWorker, SetupFailedError, Told, WorkerLostError

GROUP_S = 0.05
MAX_GROUP = 32
"""As many as a worker takes in one request."""

Report = Callable[[Sequence[tuple[Claim, Outcome | Lost]], bool], None]
"""What attempts came to, and whether that is the end of their group."""


class Pace:
    """How many batches a worker does in `GROUP_S`."""

    def __init__(self) -> None:
        self.group = 1
        self._since = 0.0

    def note(self, began: float, ended: float, batches: int) -> None:
        """A group that waited behind another one began when that one ended."""
        elapsed_s = ended - max(began, self._since)
        self._since = ended
        fitting = int(GROUP_S * batches / elapsed_s) if elapsed_s > 0 else MAX_GROUP
        self.group = max(1, min(fitting, 2 * self.group, MAX_GROUP))


class Schemas:
    """The types of the columns of each output, as far as batches are done: they are told to whoever does the next.

    Two workers that begin at the same time may be told of none, and write parts that do not go together. Then the
    later one's attempt is lost, and the next one is told."""

    def __init__(self, outputs: int) -> None:
        self._found: list[Schema | None] = [None] * outputs

    @property
    def known(self) -> list[Schema | None]:
        return self._found if any(self._found) else []

    def add(self, output: int, schema: Schema) -> None:
        """Raises SchemaConflictError."""
        self._found[output] = merged(self._found[output] or {}, schema)

    def taken(self, outcome: Outcome | Lost) -> Outcome | Lost:
        if isinstance(outcome, Lost):
            return outcome
        try:
            new = [
                found if part.schema is None else merged(found or {}, part.schema)
                for found, part in zip(self._found, outcome.parts, strict=True)
            ]
        except SchemaConflictError as error:
            return Lost(type(error).__name__, str(error), infra=False)
        self._found = new
        return outcome


class Feeder:
    def __init__(self, job_id: int, spec: JobSpec, report: Report, setup_failed: Callable[[str, bool], None]) -> None:
        self.in_flight: dict[int, RemoteWorker] = {}
        self._job_id = job_id
        self._spec = spec
        self._report = report
        self._setup_failed = setup_failed
        self._paces: dict[str, Pace] = {}
        self.schemas = Schemas(len(spec.batch_output_formats))

    def groups(self, claims: Sequence[Claim], size: int) -> list[list[Claim]]:
        """The claims as they are to be given to a worker: rows that are only to be recorded as failed each alone."""
        together = [claim for claim in claims if not self._gives_up(claim)]
        made = [together[first : first + size] for first in range(0, len(together), size)]
        return made + [[claim] for claim in claims if self._gives_up(claim)]

    def group_size(self, worker: RemoteWorker) -> int:
        return self._pace(worker).group

    def _pace(self, worker: RemoteWorker) -> Pace:
        return self._paces.setdefault(worker.worker_id, Pace())

    async def attempt(self, worker: RemoteWorker, claims: Sequence[Claim]) -> None:
        """One attempt at each of these batches. Whatever happens, each is reported."""
        left = {(claim.batch_idx, claim.attempt_id): claim for claim in claims}
        for claim in claims:
            self.in_flight[claim.batch_idx] = worker
        began = time.monotonic()
        try:
            if self._gives_up(claims[0]):
                outcome = await self._give_up(worker, claims[0])
                self._tell(left, [(key, outcome) for key in left])
            else:
                async for told in worker.feed([self._assignment(claim) for claim in claims]):
                    self._tell(left, told)
                self._pace(worker).note(began, time.monotonic(), len(claims))
        except (WorkerLostError, OperationError) as error:
            worker.infra_failures += 1
            why = Lost(type(error).__name__, str(error), infra=isinstance(error, WorkerLostError))
            self._tell(left, [(key, why) for key in left])
        except SetupFailedError as error:
            self._tell(left, [(key, Lost("SetupFailed", str(error), infra=True)) for key in left])
            self._setup_failed(str(error), error.final)
        except Exception as error:  # noqa: BLE001  an answer that is none says nothing about the batches
            worker.infra_failures += 1
            self._tell(left, [(key, Lost(type(error).__name__, str(error), infra=True)) for key in left])
        finally:
            for claim in claims:
                self.in_flight.pop(claim.batch_idx, None)

    def _tell(self, left: dict[tuple[int, int], Claim], told: Sequence[Told]) -> None:
        settled = [(left.pop(key), self.schemas.taken(outcome)) for key, outcome in told if key in left]
        self._report(settled, not left)

    def _gives_up(self, claim: Claim) -> bool:
        return claim.retry_count > self._spec.limits.max_retries and claim.span.rows == 1

    async def _give_up(self, worker: RemoteWorker, claim: Claim) -> Outcome:
        """A row that failed for the last time is only recorded."""
        told = {"error_type": claim.error_class or "Error", "error": claim.error or ""}
        return Outcome.from_dict(await worker.result_of("give_up", assignment=self._assignment(claim), **told))

    def _assignment(self, claim: Claim) -> dict[str, Any]:
        outputs = enumerate(self._spec.batch_output_path)
        return {
            "batch_idx": claim.batch_idx,
            "start_idx": claim.start_idx,
            "end_idx": claim.end_idx,
            "attempt_id": claim.attempt_id,
            "schemas": self.schemas.known,
            "part_bases": [part_base(path, self._job_id, index, claim.attempt_id) for index, path in outputs],
        }
