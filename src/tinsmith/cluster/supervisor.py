"""The supervisor keeps a process running on each seat of this data directory: engines and dedicated samplers.

It runs on an event loop. An engine that dies is restarted with back-off; meanwhile its runs are freed for other
engines, with its in-flight note (`in_flight_journal`). After MANY_STARTS deaths before it was ready, restarts go on,
and its row says that it cannot be started: polls for its requests fail with the reason, and the requests stay stored.
An engine that refuses its model (exit status 3) is not restarted: the reason is in its row, and `must_stop` is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.auth.signing import RANKS, Signer, load_secret
from tinsmith.base_models import Bases
from tinsmith.cluster.engine_process import EngineProcess
from tinsmith.cluster.engines import EXIT_LEASE_LOST, EXIT_UNUSABLE_MODEL, NO_START, EngineFailure, Engines, Seat
from tinsmith.cluster.in_flight_journal import journal_path, read_journal
from tinsmith.runtime.background import FIRST_PAUSE_S, STEADY_S, Background, Backoff
from tinsmith.settings import Settings
from tinsmith.types import ModelShape

STOP_S = 20.0
"""How long a stopping engine may take to finish its step before it is killed."""

MANY_DEATHS = 3
"""The health check fails after this many deaths of an engine in a row, each before STEADY_S."""

MANY_STARTS = 5
"""An engine counts as unable to start after this many deaths in a row before it was ready."""

MAX_LOG_BYTES, MAX_REASON_CHARS = 16 << 10, 300
ERROR_LINE = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Exit)(?::.*)?$")
CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@|(?<=[?&;\s])(?:password|token|secret|key)=[^&;\s]+", re.IGNORECASE)


log = structlog.get_logger()


@dataclass(slots=True)
class _Deaths:
    """The consecutive deaths on one seat."""

    count: int = 0
    starts: int = 0  # those before the engine was ready
    reason: str = ""
    last_start: float = 0.0

    @property
    def start_error(self) -> str | None:
        """The reason, for the row, if the engine cannot be started."""
        return f"{NO_START}{self.reason}; see its log" if self.starts >= MANY_STARTS else None


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start an engine that does not follow the settings alone: degrees of parallelism by the names of their
    settings, and the GPUs that it sees; empty for all.
    """

    degrees: Mapping[str, int]
    gpus: Sequence[int] = ()


class Supervisor:
    """Runs the engines of resident base models, and single processes for `on_demand`."""

    def __init__(
        self,
        settings: Settings,
        bases: Bases,
        engines: Engines,
        on_exit: Callable[[int], None] = lambda _pid: None,
        on_release: Callable[[str], None] = lambda _base_model: None,
        prestarted: EngineProcess | None = None,
    ) -> None:
        """`on_exit` is called with the pid of an engine that has ended, `on_release` with its base model."""
        self._prestarted = prestarted
        self._on_exit = on_exit
        self._on_release = on_release
        self._settings = settings
        secret = load_secret(settings.signing_secret.get_secret_value(), settings.resolved_data_dir)
        self._peer_key = Signer(secret).key("peers")  # signs requests between engines and samplers
        self._rank_key = Signer(secret).key(RANKS)
        self._bases = bases
        self._engines = engines
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.pids: set[int] = set()
        self._deaths: dict[str, _Deaths] = {}
        self.must_stop = asyncio.Event()
        self.refusal = ""

    def start(self, background: Background | None = None) -> None:
        """Start the engines. Must be called on the running event loop."""
        background = background or Background()
        self._tasks = [
            background.start("engine", partial(self._supervise, shape, seat), engine_id=self._engines.id_of(seat))
            for shape in self._bases.resident
            for seat in self._seats(shape)
        ]

    def refuse(self, reason: str) -> None:
        """Make the server stop: it waits for `must_stop`."""
        self.refusal = reason
        self.must_stop.set()

    def failing(self) -> str:
        """Why the process is unhealthy, without details, since everyone may read it; empty if it is healthy."""
        if self.must_stop.is_set():
            return "this process is stopping; see its log"
        base_models = dict.fromkeys(failure.base_model for failure in self.failures())
        return "; ".join(f"the engine of {name} ended {MANY_DEATHS} or more times in a row" for name in base_models)

    def failures(self) -> list[EngineFailure]:
        """The engines that keep dying, with the reasons, for operators."""
        at = time.monotonic()
        seats = {self._engines.id_of(seat): seat for shape in self._bases.resident for seat in self._seats(shape)}
        return [
            EngineFailure(engine_id, seats[engine_id].base_model, deaths.count, deaths.reason)
            for engine_id, deaths in self._deaths.items()
            if deaths.count >= MANY_DEATHS and at - deaths.last_start < STEADY_S
        ]

    def loading(self) -> str:
        """The engines of this process that are not ready; empty if all are. Reads the database."""
        states: list[str] = []
        for seat in (seat for shape in self._bases.resident for seat in self._seats(shape)):
            row = self._engines.find(seat)
            if row is None or row.state != "ready":
                states.append(f"{self._engines.id_of(seat)} of {seat.base_model} is {row.state if row else 'starting'}")
        return "; ".join(states)

    async def stop(self) -> None:
        """Stop all engines and wait until they have ended."""
        self._stopping.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # One engine process.

    def _seats(self, shape: ModelShape) -> list[Seat]:
        counts = {"engine": self._settings.num_engines, "sampler": self._settings.num_samplers}
        return [Seat(shape.name, kind, index) for kind, count in counts.items() for index in range(count)]

    async def _supervise(self, shape: ModelShape, seat: Seat) -> None:
        backoff = Backoff(FIRST_PAUSE_S)
        deaths = self._deaths[self._engines.id_of(seat)] = _Deaths()
        labels = {"base_model": shape.name, "engine_id": self._engines.id_of(seat)}
        while not self._stopping.is_set():
            started = deaths.last_start = time.monotonic()
            # The row may still say that the previous engine is ready.
            await self._write_row(self._engines.set_state, seat, "starting", deaths.start_error)
            try:
                code = await self.run_once(shape, seat, self._stopping)
            except OSError as error:  # out of memory, or no space for the log: temporary
                log.error("an engine could not be started", exc_info=error, **labels)
                code = -1
            if self._stopping.is_set():
                if code != 0:
                    await self.release(seat, "stopped", None)
                return
            if code == EXIT_UNUSABLE_MODEL:
                self.refuse(await self.describe_end(seat, code))
                return
            if code == EXIT_LEASE_LOST:
                continue  # it was slow, not start_error
            deaths.reason = await self.describe_end(seat, code)
            deaths.starts = 0 if await self.was_ready(seat) else deaths.starts + 1
            await self.release(seat, "restarting", deaths.start_error or deaths.reason)
            ran_s = time.monotonic() - started
            deaths.count = 1 if ran_s > STEADY_S else deaths.count + 1
            pause_s = backoff.after(ran_s)
            log.error("an engine died; restarting it", status=code, pause_s=pause_s, **labels)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    async def describe_end(self, seat: Seat, code: int) -> str:
        """Why an engine ended with this exit status: the reason that it gave, or its last error."""
        if code == EXIT_UNUSABLE_MODEL:
            row = await asyncio.to_thread(self._engines.find, seat)
            return (row.reason if row else None) or f"model {seat.base_model!r} cannot be served"
        line = last_error(self.log_path(seat))
        return f"it ended with status {code}{f' ({line})' if line else ''}"

    async def was_ready(self, seat: Seat) -> bool:
        """Whether the engine that just ended had been ready; True if the database cannot be read."""
        with contextlib.suppress(SQLAlchemyError):
            row = await asyncio.to_thread(self._engines.find, seat)
            return row is None or row.state not in ("starting", "loading")
        return True

    async def release(self, seat: Seat, state: str, reason: str | None) -> None:
        """End the epoch of an engine that has ended, and free its runs."""
        suspects = read_journal(journal_path(self._settings.resolved_data_dir, self._engines.id_of(seat)))
        await self._write_row(self._engines.release, seat, state, reason, suspects)
        self._on_release(seat.base_model)

    async def _write_row(self, write: Callable[..., None], seat: Seat, *values: str | None) -> None:
        """Write the engine's state for polls; a running engine writes its row itself."""
        with contextlib.suppress(SQLAlchemyError):
            await asyncio.to_thread(write, seat, *values)

    async def run_once(self, shape: ModelShape, seat: Seat, ending: asyncio.Event, launch: Launch | None = None) -> int:
        """Run one engine process to its end; returns its exit status. Setting `ending` stops it. Raises OSError."""
        path = self.log_path(seat)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        spec = self._spec(shape, seat, path, launch)
        prestarted = self._prestarted
        if launch:
            process = EngineProcess(self._settings, path, launch.gpus)
            process.configure(spec)
        elif prestarted and seat.kind == "engine" and prestarted.configure(spec):
            process = prestarted
        else:
            process = EngineProcess(self._settings, path)
            process.configure(spec)
        self.pids.add(process.pid)
        try:
            return await self._wait_for_exit(process, ending)
        finally:
            self.pids.discard(process.pid)
            self._on_exit(process.pid)

    def _spec(self, shape: ModelShape, seat: Seat, log_path: Path, launch: Launch | None) -> bytes:
        """The line of settings that an engine reads from standard input."""
        settings = self._settings.model_dump(mode="json", exclude={"signing_secret", "metrics_token"})  # server only
        settings["sampler_api_key"] = self._settings.sampler_api_key.get_secret_value()
        settings |= launch.degrees if launch else {}
        spec = {"name": shape.name, "path": shape.path, "kind": seat.kind, "index": seat.index, "settings": settings}
        spec |= {"peer_key": self._peer_key.hex(), "rank_key": self._rank_key.hex(), "log": str(log_path)}
        return json.dumps(spec).encode() + b"\n"

    async def _wait_for_exit(self, process: EngineProcess, ending: asyncio.Event) -> int:
        exited = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(ending.wait())
        await asyncio.wait({exited, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not exited.done():
            await _end(process, exited)
        return await exited

    def log_path(self, seat: Seat) -> Path:
        """The log file of the engines on a seat."""
        readable = "".join(letter if letter.isalnum() else "-" for letter in seat.base_model)[-40:]
        key = hashlib.sha256(seat.base_model.encode()).hexdigest()[:8]
        suffix = f"-{seat.index}" if seat.index else ""
        return self._settings.resolved_data_dir / "logs" / f"{seat.kind}-{readable}-{key}{suffix}.log"


def last_error(log_path: Path) -> str:
    """The last line of a log that names an exception, without credentials; empty if no line does."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, log_path.stat().st_size - MAX_LOG_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    error_line = next((line for line in reversed(lines) if ERROR_LINE.match(line)), "")
    return CREDENTIALS.sub("***", error_line)[:MAX_REASON_CHARS]


async def _end(process: EngineProcess, exited: asyncio.Task[int]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    exits, _ = await asyncio.wait({exited}, timeout=STOP_S)
    if not exits:
        log.error("an engine did not stop in time; killing it", pid=process.pid)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
