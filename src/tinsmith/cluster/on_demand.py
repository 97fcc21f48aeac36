"""Engines of base models on demand: one starts at a base model's first request and ends when it has been idle.

Requests wait in the durable queue, so a restarted server finds them and starts their engines. One process of a database
does this (`try_lock`); another takes over when it ends. `placement.decide` says where an engine fits; `survey_layouts`
asks a child process what it needs. Idle engines end to make room: without waiting requests, and without loaded models
that were used within `idle_minutes`. The runs of an ended engine are in files and continue with the next one.

An engine that ends before it was ready is started again; after LOAD_ATTEMPTS, or if it refused its model or has no
room, its waiting requests are settled with the reason, as if they had been refused when they came. The next request
tries again. Requests to unload start no engine: they are settled here.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson
import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.base_models import Bases, download_weights
from tinsmith.cluster.engines import EXIT_LEASE_LOST, EXIT_UNUSABLE_MODEL, Engines, Seat
from tinsmith.cluster.ownership import Ownership
from tinsmith.cluster.placement import EngineLayout, Full, MakeRoom, PlacedEngine, Start, Survey, decide
from tinsmith.cluster.supervisor import Launch, Supervisor
from tinsmith.db.database import Database
from tinsmith.db.statements import Effects
from tinsmith.errors import EngineFailedError, SettingsError, TinsmithError, UserError
from tinsmith.runtime.background import FIRST_PAUSE_S, Backoff, within
from tinsmith.runtime.host_memory import read_host_memory
from tinsmith.settings import Settings
from tinsmith.settings.environment import engine_environment
from tinsmith.store.audit import entry
from tinsmith.store.futures import Futures, Settlement, WaitingKind, deletion
from tinsmith.store.models import Models, log_deletion, set_state, unload_statement
from tinsmith.types import ModelShape, Pending
from tinsmith.wire.weights import read_parallelism

POLL_S = 0.5
"""How often the queue is searched for base models without an engine. Loading one takes longer."""

LOCK_POLL_S = 5.0
"""How often a process tries to become the one that starts engines."""

LOAD_ATTEMPTS = 3
"""Requests are settled with the reason after this many ends of an engine before it was ready."""

SURVEY_S = 300.0
"""How long the child process that plans a base model may take."""

CREATIONS = ("create_model", "load_model")
QUIET_KINDS = ("unload_model", "cancel")
"""Kinds of requests that start no engine."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Run:
    """An engine on demand of this process. Times are monotonic."""

    shape: ModelShape
    placed: Start
    used_at: float
    newest_arrival: int
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    is_ready: bool = False
    has_requests: bool = True
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Failures:
    """Ends in a row of a base model's engines before they were ready, and when the next may start."""

    count: int = 0
    next_at: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE_S))


class OnDemandEngines:
    def __init__(
        self,
        settings: Settings,
        bases: Bases,
        database: Database,
        engines: Engines,
        supervisor: Supervisor,
        wake: Callable[[Sequence[str]], None],
    ) -> None:
        """`wake` wakes the polls of settled requests."""
        self._settings = settings
        self._bases = bases
        self._database = database
        self._engines = engines
        self._supervisor = supervisor
        self._wake = wake
        self._futures = Futures(database)
        self._models = Models(database)
        self._idle_s = 60.0 * settings.idle_minutes
        self._runs: dict[str, _Run] = {}
        self._failures: dict[str, _Failures] = {}
        self._surveys: dict[tuple[str, tuple[tuple[str, int], ...]], Survey] = {}
        self._stopping = asyncio.Event()

    def describe_loading(self) -> str:
        """The base models that this process loads at the moment."""
        return ", ".join(name for name, run in self._runs.items() if not (run.is_ready or run.ending.is_set()))

    async def run(self) -> None:
        """Start and end engines until `stop`."""
        while not self._stopping.is_set():
            with self._lock() as is_first:
                while is_first and not self._stopping.is_set():
                    try:
                        await self.tick()
                    except SQLAlchemyError as error:
                        log.warning("the queue could not be read; trying again", error=repr(error))
                    await within(POLL_S, self._stopping.wait())
            await within(LOCK_POLL_S, self._stopping.wait())

    def _lock(self) -> AbstractContextManager[bool]:
        return self._database.try_lock("engines_on_demand")

    async def stop(self) -> None:
        """End all engines and wait until they have ended."""
        self._stopping.set()
        runs = list(self._runs.values())
        for run in runs:
            run.ending.set()
        await asyncio.gather(*(run.task for run in runs if run.task), return_exceptions=True)

    async def tick(self) -> None:
        """End idle engines, and start those of base models with waiting requests, oldest request first."""
        waiting = await asyncio.to_thread(self._futures.list_waiting, self._bases.on_demand)
        calling = [row for row in waiting if row.kind not in QUIET_KINDS]
        callers = {row.base_model for row in calling}
        for name, run in list(self._runs.items()):
            await self._note_use(run, has_requests=name in callers)
            if run.is_ready and not run.has_requests and self._idle_time(run) >= self._idle_s:
                log.info("an engine on demand is idle and ends", base_model=name)
                run.ending.set()
        for name in {row.base_model for row in waiting} - callers - self._runs.keys():
            if not await asyncio.to_thread(self._engines.has_other, Seat(name)):
                await asyncio.to_thread(self._settle_quiet, name)
        for name in dict.fromkeys(row.base_model for row in sorted(calling, key=_by_arrival)):
            if name not in self._runs and self._failures_of(name).next_at <= time.monotonic():
                await self._start(self._bases.get(name))

    async def _note_use(self, run: _Run, *, has_requests: bool) -> None:
        seat = Seat(run.shape.name)
        newest = await asyncio.to_thread(self._futures.newest_arrival, seat.base_model)
        row = await asyncio.to_thread(self._engines.find, seat)
        is_ready = row is not None and row.state == "ready"
        if has_requests or newest > run.newest_arrival or is_ready != run.is_ready:
            run.used_at = time.monotonic()
        run.newest_arrival, run.has_requests, run.is_ready = newest, has_requests, is_ready
        if is_ready:
            self._failures.pop(seat.base_model, None)

    def _idle_time(self, run: _Run) -> float:
        return time.monotonic() - run.used_at

    def _failures_of(self, name: str) -> _Failures:
        return self._failures.setdefault(name, _Failures())

    # Starting.

    async def _start(self, shape: ModelShape) -> None:
        """Start an engine where it fits, after idle ones have made room, or settle its requests with the reason."""
        if await asyncio.to_thread(self._engines.has_other, Seat(shape.name)):
            return
        await asyncio.to_thread(self._engines.announce, Seat(shape.name))
        try:
            placed = await self._find_place(shape)
        except SettingsError as error:
            await self._refuse(shape, UserError(str(error)))
            return
        if isinstance(placed, Full):
            await self._refuse(shape, EngineFailedError(placed.reason))
            return
        if self._stopping.is_set():
            return
        log.info("a base model is loaded on demand", base_model=shape.name, slots=placed.slots)
        newest = await asyncio.to_thread(self._futures.newest_arrival, shape.name)
        run = self._runs[shape.name] = _Run(shape, placed, time.monotonic(), newest)
        run.task = asyncio.create_task(self._keep(run), name=f"engine of {shape.name}")

    async def _find_place(self, shape: ModelShape) -> Start | Full:
        requested_degrees = await asyncio.to_thread(self._read_requested_degrees, shape.name)
        while True:
            survey = await self._survey(shape, requested_degrees)
            engines = [await self._describe(run) for run in self._runs.values()]
            decision = decide(shape.name, survey, engines)
            if not isinstance(decision, MakeRoom) or self._stopping.is_set():
                return Full("this server is stopping") if isinstance(decision, MakeRoom) else decision
            runs = [self._runs[name] for name in decision.base_models]
            log.info("idle engines end to make room", base_model=shape.name, ending=list(decision.base_models))
            for run in runs:
                run.ending.set()
            await asyncio.gather(*(run.task for run in runs if run.task), return_exceptions=True)

    async def _survey(self, shape: ModelShape, requested_degrees: dict[str, int]) -> Survey:
        """Plan a base model once, which takes seconds; only the free memory of GPUs needs the child process again."""
        key = shape.name, tuple(sorted(requested_degrees.items()))
        survey = self._surveys.get(key)
        if survey is None or (survey.has_gpus and not survey.is_budget):
            survey = self._surveys[key] = await survey_layouts(self._settings, shape, requested_degrees)
        elif not survey.is_budget:
            return replace(survey, slots=[read_host_memory()[0]])
        return survey

    def _read_requested_degrees(self, name: str) -> dict[str, int]:
        """The degrees of parallelism of the oldest waiting creation that asks for any."""
        for request in self._futures.list_pending(name, CREATIONS):
            body = self._futures.bodies([request.request_id]).get(request.request_id, b"{}")
            if degrees := read_parallelism(body).degrees:
                return degrees
        return {}

    async def _describe(self, run: _Run) -> PlacedEngine:
        """How the engine is used now. One with loaded models counts as used until it has been idle long enough."""
        name = run.shape.name
        await self._note_use(run, has_requests=bool(await asyncio.to_thread(self._futures.list_waiting, [name])))
        loaded = await asyncio.to_thread(self._models.count_loaded, name)
        idle_s = self._idle_time(run)
        use = ""
        if not run.is_ready:
            use = "it is loading"
        elif run.has_requests:
            use = "it has requests"
        elif loaded and idle_s < self._idle_s:
            use = f"{loaded} loaded models, used {idle_s:.0f} s ago"
        return PlacedEngine(name, run.placed.slots, run.placed.layout.num_bytes, run.is_ready, idle_s, use)

    # A running engine.

    async def _keep(self, run: _Run) -> None:
        """Run one engine process to its end, and settle its waiting requests if it cannot be loaded."""
        shape, seat = run.shape, Seat(run.shape.name)
        launch = Launch(run.placed.layout.degrees, run.placed.slots if run.placed.has_gpus else ())
        try:
            if hub_id := self._bases.hub_ids.get(shape.name):
                await asyncio.to_thread(download_weights, shape, hub_id)
            code = await self._supervisor.run_once(shape, seat, run.ending, launch)
            reason = await self._supervisor.describe_end(seat, code)
        except (SettingsError, OSError) as error:
            code, reason = EXIT_UNUSABLE_MODEL, str(error)
        try:
            await self._note_end(run, code, reason)
        finally:
            del self._runs[shape.name]

    async def _note_end(self, run: _Run, code: int, reason: str) -> None:
        shape, seat = run.shape, Seat(run.shape.name)
        if run.ending.is_set() or code in (0, EXIT_LEASE_LOST):
            if code != 0:
                await self._supervisor.release(seat, "stopped", None)
            return
        failures = self._failures_of(shape.name)
        is_refused = code == EXIT_UNUSABLE_MODEL
        failures.count = 0 if await self._supervisor.was_ready(seat) and not is_refused else failures.count + 1
        failures.next_at = time.monotonic() + failures.backoff.after()
        log.error("an engine on demand ended", base_model=shape.name, status=code, reason=reason)
        if is_refused or failures.count >= LOAD_ATTEMPTS:
            await self._supervisor.release(seat, "failed", reason)
            await self._refuse(shape, EngineFailedError(f"base model {shape.name!r} could not be loaded: {reason}"))
        else:
            waiting = await asyncio.to_thread(self._futures.list_waiting, [shape.name])
            has_requests = any(row.kind not in QUIET_KINDS for row in waiting)
            await self._supervisor.release(seat, "restarting" if has_requests else "stopped", reason)

    # Requests that no engine answers.

    async def _refuse(self, shape: ModelShape, error: TinsmithError) -> None:
        """Settle a base model's waiting requests with an error."""
        log.error("a base model cannot be loaded", base_model=shape.name, reason=str(error))
        self._failures.pop(shape.name, None)
        await asyncio.to_thread(self._engines.set_state, Seat(shape.name), "failed", str(error))
        await asyncio.to_thread(self._settle_refused, shape.name, error)

    def _settle_refused(self, name: str, error: TinsmithError) -> None:
        ids = Ownership(self._database, name, self._engines.id_of(Seat(name))).pending_ids()
        requests = [row for row in self._futures.list_pending(name) if row.request_id in ids]
        settlements = [
            Settlement(request.request_id, error=error, effects=_failure_effects(request, error))
            for request in requests
            if request.kind not in QUIET_KINDS
        ]
        self._futures.settle(settlements, {}, error_state="refused")
        self._settle_quiet(name)
        self._wake([settlement.request_id for settlement in settlements])

    def _settle_quiet(self, name: str) -> None:
        """Settle the requests that start no engine: models are unloaded, and there is nothing to cancel."""
        settlements: list[Settlement] = []
        for request in self._futures.list_pending(name, QUIET_KINDS):
            settlement = self._unload(request) if request.kind == "unload_model" else _forget(request)
            settlements.append(settlement)
        self._futures.settle(settlements, {})
        self._wake([settlement.request_id for settlement in settlements])

    def _unload(self, request: Pending) -> Settlement:
        """The settlement of an unloading without an engine. The janitor deletes the model's snapshots."""
        assert request.model_id is not None
        body = self._futures.bodies([request.request_id]).get(request.request_id, b"{}")
        reason = str(orjson.loads(body).get("reason") or "the client unloaded it")
        answer = {"model_id": request.model_id, "type": "unload_model", "status": "unloaded"}
        effects = [
            unload_statement(request.model_id, reason),
            log_deletion(request.model_id),
            entry(request.tenant_id, "model_unloaded", {"model_id": request.model_id, "reason": reason}),
        ]
        return Settlement(request.request_id, body=orjson.dumps(answer), effects=effects)


def _by_arrival(row: WaitingKind) -> int:
    return row.arrival


def _failure_effects(request: Pending, error: TinsmithError) -> Effects:
    if request.kind in CREATIONS and request.model_id is not None:
        return [set_state(request.model_id, "failed", str(error))]
    return []


def _forget(request: Pending) -> Settlement:
    return Settlement(request.request_id, effects=[deletion(request.request_id)])


async def survey_layouts(settings: Settings, shape: ModelShape, requested_degrees: dict[str, int]) -> Survey:
    """What a base model needs and what this machine has. Raises SettingsError if it cannot be planned.

    The backend `fake` computes nothing: its models take the bytes of their files, of `on_demand_bytes` if it is set.
    """
    budget = int(settings.on_demand_bytes)
    if settings.backend == "fake":
        num_bytes = sum(file.stat().st_size for file in Path(shape.path).glob("*.safetensors"))
        return Survey([EngineLayout(1, num_bytes, requested_degrees)], [budget] if budget else [], is_budget=True)
    values = settings.model_dump(mode="json", exclude={"signing_secret", "metrics_token", "sampler_api_key"})
    spec = {"name": shape.name, "path": shape.path, "settings": values, "degrees": requested_degrees}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tinsmith.engine.layouts"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=engine_environment(),
    )
    try:
        outputs = await within(SURVEY_S, process.communicate(json.dumps(spec).encode() + b"\n"))
    finally:
        if process.returncode is None:
            process.kill()
    if outputs is None:
        raise SettingsError(f"base model {shape.name!r} was not planned within {SURVEY_S:.0f} s")
    if process.returncode:
        last_line = outputs[1].decode(errors="replace").strip().rpartition("\n")[2]
        raise SettingsError(f"base model {shape.name!r} could not be planned: {last_line}")
    answer = json.loads(outputs[0].decode().strip().rpartition("\n")[2])
    if "error" in answer:
        raise SettingsError(answer["error"])
    layouts = [EngineLayout(**layout) for layout in answer["layouts"]]
    slots = [budget] * len(answer["slots"]) if budget else answer["slots"]
    return Survey(layouts, slots, is_budget=bool(budget), has_gpus=answer["has_gpus"])
