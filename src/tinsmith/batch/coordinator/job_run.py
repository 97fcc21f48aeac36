"""One bulk job that this coordinator owns, from the count of its rows to the deletion of its parts.

`JobRun`: slots of the pool call `serve` to run batches with one worker. The results of attempts and the claims of slots
are collected for one transaction at a time (`_turns`), so a batch is committed and counted and the next one claimed
together. Everything that the coordinator holds in memory may be lost at any moment: the next owner starts from the
rows. Its workers are in a `WorkerSet`.

The end of a job has this order, each step durable before the next: every batch committed; WINDING_DOWN; outputs
published from the list of winners; outputs recorded and SUCCEEDED; parts deleted; the deletion recorded.

`Dispatcher`: the attempts that are with the workers, dispatched in groups and reported one by one. A group holds as
many batches as the worker recently did in `GROUP_S`. So short batches share the cost of a request and a transaction,
and long batches wait for nothing. Two groups are with a worker at a time. A worker that gets slower gives back what it
has not begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.batch import operations
from tinsmith.batch.coordinator.attempts import Claim, Lost, Settled
from tinsmith.batch.coordinator.model_gateway import ModelGateway, RequestRouter
from tinsmith.batch.coordinator.state import TERMINAL, BatchJobs, Job, SupersededError, is_passing
from tinsmith.batch.coordinator.workers import (
    FailedError,
    OperationError,
    RemoteWorker,
    SetupFailedError,
    Told,
    WorkerLostError,
    WorkerSet,
)
from tinsmith.batch.formats.input_versions import Version
from tinsmith.batch.formats.schemas import Schema, SchemaConflictError, merged
from tinsmith.batch.pools.specs import Pool, WorkerStartError
from tinsmith.batch.types import JobSpec, Outcome, OutputInfo, part_base
from tinsmith.runtime.failpoints import hit

GROUP_S = 0.05
MAX_GROUP = 32
"""As many as a worker takes in one request."""

Report = Callable[[Sequence[tuple[Claim, Outcome | Lost]], bool], None]
"""The results of attempts, and whether they are the last of their group."""


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
    """The types of the columns of each output, as far as batches are done. Every new attempt is given them.

    Two workers that begin at the same time may be given none, and write parts that do not go together. Then the later
    attempt is lost, and the next one is given the types."""

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


class Dispatcher:
    """Dispatches attempts to workers; `report` is called once for each of them."""

    def __init__(self, job_id: int, spec: JobSpec, report: Report, setup_failed: Callable[[str, bool], None]) -> None:
        self.in_flight: dict[int, RemoteWorker] = {}
        self._job_id = job_id
        self._spec = spec
        self._report = report
        self._setup_failed = setup_failed
        self._paces: dict[str, Pace] = {}
        self.schemas = Schemas(len(spec.batch_output_formats))

    def groups(self, claims: Sequence[Claim], size: int) -> list[list[Claim]]:
        """The claims in groups for a worker; a row that is only recorded as failed is a group by itself."""
        together = [claim for claim in claims if not self._gives_up(claim)]
        made = [together[first : first + size] for first in range(0, len(together), size)]
        return made + [[claim] for claim in claims if self._gives_up(claim)]

    def group_size(self, worker: RemoteWorker) -> int:
        return self._pace(worker).group

    def _pace(self, worker: RemoteWorker) -> Pace:
        return self._paces.setdefault(worker.worker_id, Pace())

    async def attempt(self, worker: RemoteWorker, claims: Sequence[Claim]) -> None:
        """One attempt at each of these batches. Each is reported, whatever happens."""
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


IN_FLIGHT = 2
"""Groups of batches with one worker: it works on the second one while the first one is committed."""
MAX_SETUP_FAILURES = 4
"""A mapper that never started in so many tries, in two workers or more, does not start."""

T = TypeVar("T")
log = structlog.get_logger()


class JobRun:
    def __init__(
        self,
        jobs: BatchJobs,
        job: Job,
        spec: JobSpec,
        token: str,
        pool: Pool,
        on_change: Callable[[], None],
        gateway: ModelGateway | None = None,
    ) -> None:
        self.job = job
        self.pool = pool
        self.dispatching = False  # whether slots may work for it
        self._jobs = jobs
        self._token = token
        self._on_change = on_change
        self._spec = spec
        self._limits = self._spec.limits
        self._router: RequestRouter | None = None
        if gateway is not None and operations.steps_of(self._spec.batch_serialized_fn) is not None:
            self._router = RequestRouter(gateway, job.job_id, job.tenant_id, job.name)
        self._ended = asyncio.Event()  # no more batches are to be dispatched, for any reason
        self._superseded = False
        self._broken: BaseException | None = None  # what ended a helper
        self._turns_over = False
        self._failure: str | None = None
        self._settled: list[Settled] = []
        self._wants: list[tuple[str, int, asyncio.Future[list[Claim]]]] = []
        self._turn_due = asyncio.Event()
        self._nothing_until = 0.0
        self._dispatcher = Dispatcher(job.job_id, self._spec, self._reported, self._setup_failed)
        self._worker_set = WorkerSet(jobs, job.job_id, token, self._spec, pool, self._router)
        self._setup_failures = 0
        self._serving = 0

    # For the pool's slots.

    def runnable(self, now: float) -> bool:
        return self.dispatching and not self._ended.is_set() and now >= self._nothing_until

    def runnable_at(self) -> float:
        return self._nothing_until if self.dispatching and not self._ended.is_set() else float("inf")

    async def serve(self, slot: int, should_yield: Callable[[], bool]) -> None:
        """Run batches on a slot until there are none, or another job is due."""
        self._serving += 1
        worker: RemoteWorker | None = None
        try:
            worker = await self._worker_set.take(slot, self._ended)
            if worker is not None:
                await self._dispatch_while(worker, should_yield)
        except WorkerStartError as error:
            self._setup_failed(str(error), final=False)
            self._nothing_until = time.monotonic() + self._limits.backoff_s * 2**self._setup_failures
        except (WorkerLostError, SetupFailedError) as error:
            self._setup_failed(str(error), isinstance(error, SetupFailedError) and error.final)
        except SupersededError:
            self._supersede()
        except Exception as error:
            if is_passing(error):
                raise
            self._break(error)
        finally:
            self._serving -= 1
            if worker is not None:
                await (self._worker_set.end(worker) if self._superseded else self._worker_set.put_back(worker))

    async def _dispatch_while(self, worker: RemoteWorker, should_yield: Callable[[], bool]) -> None:
        dispatched: set[asyncio.Task[None]] = set()
        try:
            while True:
                room = IN_FLIGHT - len(dispatched)
                if room > 0 and not worker.useless and not self._ended.is_set() and not should_yield():
                    size = self._dispatcher.group_size(worker)
                    for group in self._dispatcher.groups(await self._claim(worker.worker_id, room * size), size):
                        dispatched.add(asyncio.create_task(self._dispatcher.attempt(worker, group)))
                if not dispatched:
                    return
                _, dispatched = await asyncio.wait(dispatched, return_when=asyncio.FIRST_COMPLETED)
                self._turn_due.set()  # here, so that a group's end and the next claim share a turn
        finally:
            for task in dispatched:
                task.cancel()

    def _reported(self, settled: Sequence[Settled], is_end: bool) -> None:
        hit("batch.reported")
        for claim, outcome in settled:
            if not isinstance(outcome, Lost):
                self._setup_failures = 0
            elif self._ended.is_set():
                continue  # it was ended on purpose: whoever goes on with the job finds the batch dispatched
            self._settled.append((claim, outcome))
        if not is_end:
            self._turn_due.set()

    def _setup_failed(self, why: str, final: bool) -> None:
        self._setup_failures += 1
        if final or self._setup_failures >= MAX_SETUP_FAILURES:
            self.fail(f"setup_failed: {why}")

    # Turns.

    async def _claim(self, worker_id: str, count: int) -> list[Claim]:
        if self._turns_over:
            return []
        answer: asyncio.Future[list[Claim]] = asyncio.get_running_loop().create_future()
        self._wants.append((worker_id, count, answer))
        self._turn_due.set()
        return await answer

    async def _turns(self) -> None:
        """One transaction after another, each with all that has come together since the last one."""
        try:
            while True:
                await self._turn_due.wait()
                await asyncio.sleep(0)  # what is ready at this moment shares the transaction
                self._turn_due.clear()
                settled, wants = self._settled, self._wants
                self._settled, self._wants = [], []
                if settled or wants:
                    await self._turn(settled, wants)
        except SupersededError:
            self._supersede()
        finally:
            self._turns_over = True
            for _, _, answer in self._wants:
                if not answer.done():
                    answer.set_result([])

    async def _turn(self, settled: list[Settled], wants: list[tuple[str, int, asyncio.Future[list[Claim]]]]) -> None:
        wanted = {} if self._ended.is_set() else {worker_id: count for worker_id, count, _ in wants}
        limits = self._limits
        claims: dict[str, list[Claim]] = {}
        try:
            turn = await self._db(
                self._jobs.turn, self.job.job_id, self._token, settled, wanted, limits.lease_s,
                limits.max_retries, limits.backoff_s,
            )  # fmt: skip
            self.job, claims = turn.job, dict(turn.claims)
            if claims:
                hit("batch.claimed")
            if settled:
                hit("batch.committed")
                self._nothing_until = 0.0
            for claim in turn.rejected:
                log.warning("a late result was refused", job_id=self.job.job_id, batch_idx=claim.batch_idx)
            if turn.failed:
                await self._check_failed()
            elif wanted and not any(claims.values()):
                wait_s = await self._db(self._jobs.next_retry_in, self.job.job_id)
                self._nothing_until = float("inf") if wait_s is None else time.monotonic() + max(wait_s, 0.01)
        except SQLAlchemyError as error:
            if not is_passing(error):
                raise
            log.error("a bulk job's rows cannot be written; trying again", job_id=self.job.job_id, exc_info=error)
            self._settled[:0] = settled
            self._turn_due.set()
            await asyncio.sleep(1)
        finally:
            for worker_id, _, answer in wants:
                if not answer.done():
                    answer.set_result(claims.get(worker_id, []))
        self._judge()
        self._on_change()

    def _judge(self) -> None:
        if self.job.failed_too_many:
            failed = self.job.rows_failed
            rows = "row" if failed == 1 else "rows"
            self.fail(f"{failed} {rows} failed, and max_failed_rows is {self.job.max_failed_rows:g}")
        elif self.job.status == "CANCELLING" or self.job.done:
            self._ended.set()

    async def _check_failed(self) -> None:
        failure = await self._db(self._jobs.failure, self.job.job_id)
        if failure:
            self.fail(failure)

    # The whole job.

    def fail(self, why: str) -> None:
        if self._failure is None:
            self._failure = why
        self._ended.set()

    async def tell_ended(self) -> None:
        """Whoever answered a job of operations, once it has ended for good."""
        if self._router is not None:
            found = await self._db(self._jobs.find, self.job.tenant_id, self.job.job_id)
            if found.status in TERMINAL:
                await self._router.gateway.ended(found.job_id, found.tenant_id, found.status)

    def cancel(self) -> None:
        """The row says so already; this saves the wait for the next look."""
        self._ended.set()

    def _supersede(self) -> None:
        self._superseded = True
        self._ended.set()

    async def run(self) -> None:
        """To the job's end, or until another coordinator has it. Cancelled, it lets go of the job."""
        helpers = [asyncio.create_task(self._help(work)) for work in (self._turns(), self._renew())]
        try:
            await self._run()
            if self._broken is not None:
                raise self._broken
        except SupersededError:
            log.warning("another coordinator has the job", job_id=self.job.job_id)
        finally:
            self._ended.set()
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await self._worker_set.end_all()
            with contextlib.suppress(SQLAlchemyError):
                await self._db(self._jobs.release, self.job.job_id, self._token)

    async def _help(self, work: Awaitable[None]) -> None:
        """Without its helpers a job stands still."""
        try:
            await work
        except Exception as error:  # noqa: BLE001  `run` raises it
            self._break(error)

    def _break(self, error: BaseException) -> None:
        """The job is let go of, for a reason that is none of its own; `run` raises it."""
        self._broken = self._broken or error
        self._ended.set()

    async def _run(self) -> None:
        job_id = self.job.job_id
        try:
            if not self.job.sealed and not self._ended.is_set() and self.job.status != "CANCELLING":
                await self._plan()
            if self.job.completed_batches:
                for output in range(len(self._spec.batch_output_formats)):
                    for schema in await self._db(self._jobs.schemas, job_id, output):
                        self._dispatcher.schemas.add(output, schema)
            await self._check_failed()  # the coordinator before this one may have known, and could not say so
            self._judge()
            if not self._ended.is_set() and await self._set_status("RUNNING"):
                self.dispatching = True
                self._on_change()
            await self._ended.wait()
            await self._stop_serving()
            if self._superseded or self._broken is not None:
                return
            self.job = await self._db(self._jobs.renew, job_id, self._token, self._limits.lease_s)
            if self.job.done and self._failure is None and self.job.status != "CANCELLING":
                await self._wind_down()
                return
            if self._failure is None and self.job.status != "CANCELLING":
                return  # the server stops
        except FailedError as error:
            self.fail(str(error))
        cancelled = self._failure is None or not await self._set_status("FAILED", await self._explained(self._failure))
        if cancelled:
            await self._set_status("CANCELLED")

    async def _explained(self, failure: str) -> str:
        """With the first failed row, where rows are why the job failed."""
        if not self.job.failed_too_many or not (found := await self._db(self._jobs.row_errors, self.job.job_id, 1)):
            return failure
        (first,) = found
        message = str(first["message"]).partition("\n")[0]
        return f"{failure}; the first is row {first['row_idx']}: {first['error_class']}: {message}"

    async def _stop_serving(self) -> None:
        """Nothing is dispatched any more; what is still in flight was ended on purpose."""
        self.dispatching = False
        self._on_change()
        if not self.job.done:
            await self._worker_set.stop_all()
        while self._serving:
            await asyncio.sleep(0.01)
            self._turn_due.set()

    async def _set_status(self, status: str, error: str | None = None) -> bool:
        moved = await self._db(self._jobs.set_status, self.job.job_id, self._token, status, error)
        log.info("bulk job", job_id=self.job.job_id, status=status, error=error)
        return moved

    async def _renew(self) -> None:
        """Keeps the lease; sees a job that is cancelled elsewhere."""
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.lease_s / 3):
                    await self._ended.wait()
            await self.look()

    async def look(self) -> None:
        try:
            in_flight = list(self._dispatcher.in_flight)
            self.job = await self._db(self._jobs.renew, self.job.job_id, self._token, self._limits.lease_s, in_flight)
            self._judge()
        except SupersededError:
            self._supersede()
        except SQLAlchemyError as error:
            log.warning("the lease of a bulk job could not be renewed", job_id=self.job.job_id, error=repr(error))

    # Operations.

    async def _operate(self, operation: Callable[[RemoteWorker], Awaitable[T]]) -> T:
        return await self._worker_set.operate(operation, with_mapper=not self.job.done)

    async def _plan(self) -> None:
        async def plan(worker: RemoteWorker) -> tuple[Sequence[int], int, Version | None]:
            starts, end = array("q"), {}
            async for message in worker.operate("plan"):
                starts.extend(span[0] for span in message.get("spans", ()))
                end = message.get("end", {})
            total = end.get("total_rows", 0)
            given = range(0, total, end["batch_size"]) if "batch_size" in end else starts
            return given, total, end.get("input_version")

        planning = asyncio.ensure_future(self._operate(plan))
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({planning, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not planning.done():
                return  # the job is cancelled
            starts, total, version = planning.result()
        finally:
            planning.cancel()
            ended.cancel()
        self.job = await self._db(self._jobs.save_batch_states, self.job.job_id, self._token, starts, total, version)
        workers = self._worker_set
        workers.spec = replace(workers.spec, input_version=version)  # for workers that start from now on

    async def _wind_down(self) -> None:
        if not await self._set_status("WINDING_DOWN"):
            await self._set_status("CANCELLED")
            return
        hit("batch.winding")
        keeping = asyncio.create_task(self._keep())
        try:
            published = await self._publish()
        finally:
            keeping.cancel()
        hit("batch.published")
        if not await self._db(self._jobs.finish, self.job.job_id, self._token, published):
            await self._set_status("CANCELLED")
            return
        log.info("bulk job", job_id=self.job.job_id, status="SUCCEEDED")
        hit("batch.recorded")
        self._on_change()
        await clean(self._jobs, self.job.job_id, self._operate)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._limits.lease_s / 3)
            await self.look()

    async def _publish(self) -> list[tuple[str, OutputInfo]]:
        formats = [str(output["format"]) for output in self._spec.batch_output_formats]
        if self._spec.batch_error_format is not None:
            formats.append(str(self._spec.batch_error_format["format"]))
        published: list[tuple[str, OutputInfo]] = []
        with tempfile.TemporaryDirectory(prefix="tinsmith-batch-") as directory:
            winners, failures = Path(directory) / "winners", Path(directory) / "failures"
            await self._db(_write_winners, self._jobs, self.job.job_id, winners)
            await self._db(_write_failures, self._jobs, self.job.job_id, failures)
            for index, kind in enumerate(formats):
                path = winners if index < len(self._spec.batch_output_formats) else failures

                async def publish(worker: RemoteWorker, index: int = index, path: Path = path) -> OutputInfo:
                    placed = await worker.place(path)
                    return OutputInfo.from_dict(await worker.result_of("publish", output_idx=index, path=placed))

                published.append((kind, await self._operate(publish)))
        return published

    async def _db(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(None, work, *args)


Operating = Callable[[Callable[[RemoteWorker], Awaitable[T]]], Awaitable[T]]


async def clean(jobs: BatchJobs, job_id: int, operating: Operating[dict[str, object]]) -> bool:
    """Delete the parts of a job and of those that it resumed. False if that fails: the job stays what it is."""
    chain = await asyncio.to_thread(jobs.chain, job_id)

    async def delete(worker: RemoteWorker) -> dict[str, object]:
        return await worker.result_of("delete", job_ids=chain)

    try:
        await operating(delete)
    except (FailedError, WorkerLostError, WorkerStartError, SupersededError) as error:
        log.warning("the parts of a bulk job could not be deleted", job_id=job_id, error=str(error))
        return False
    hit("batch.cleaned")
    await asyncio.to_thread(jobs.note_cleaned, chain)
    return True


def _write_winners(jobs: BatchJobs, job_id: int, path: Path) -> None:
    with path.open("w") as lines:
        for _, parts in jobs.winners(job_id):
            lines.write(json.dumps(parts) + "\n")


def _write_failures(jobs: BatchJobs, job_id: int, path: Path) -> None:
    with path.open("w") as lines:
        after = -1
        while errors := jobs.row_errors(job_id, 1000, after):
            after = errors[-1]["row_idx"]
            for error in errors:
                lines.write(json.dumps(error_row(error)) + "\n")


def error_row(error: dict[str, object]) -> dict[str, object]:
    """A failed row as the errors output has it."""
    details = error["details"]
    assert isinstance(details, dict)
    return {
        "idx": error["row_idx"],
        "row": details["row"],
        "error_type": error["error_class"],
        "message": error["message"],
        "traceback": details["traceback"],
        "attempts": details["attempts"],
        "worker": details["worker"],
    }
