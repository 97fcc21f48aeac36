"""Connection to one external sampling engine: its health, its restarts, and requests to it.

`EngineConnection` starts a command and restarts it when it dies, or watches an address. An era is the time from one
start of the engine to its end; what the engine had loaded is lost with it. Requests raise `EngineLost` if the engine
dies while it handles them, and UserError if it refuses them. After 429 or 503 they are sent again, with growing
pauses. It lives on one event loop and does not know what a request means.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import orjson
import structlog

from tinsmith.errors import EngineFailedError, NotFoundError, SettingsError, UserError
from tinsmith.samplers.remote.dialect import Dialect, EngineCall, Json

FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 30.0
MAX_BACKOFF_S = 2.0
HEALTH_INTERVAL_S = 5.0
"""Seconds between health checks of an engine that is up."""
MAX_MISSED_CHECKS = 3
"""Failed health checks in succession after which the engine counts as dead."""
PROBE_TIMEOUT_S = 10.0
"""Timeout of health checks and of requests for the engine's properties."""
BUSY_STATUSES = (429, 503)
UNAUTHORISED_STATUSES = (401, 403)
MAX_FAILED_STARTS = 3
MAX_ADAPTERS = 32

log = structlog.get_logger()


class EngineLost(Exception):
    """The engine or its connection ended before the answer; `reached_engine`: whether it had the request."""

    def __init__(self, message: str, *, reached_engine: bool = True) -> None:
        super().__init__(message)
        self.reached_engine = reached_engine


@dataclass(frozen=True, slots=True)
class EngineAccess:
    """How requests reach an engine: `headers` with credentials; `verify`, False for an unchecked certificate or
    a file of certificates; and `timeout_s`, the seconds without a byte after which a request fails (0: no limit).
    """

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    verify: bool | str = True
    timeout_s: float = 0.0

    def client(self, url: str) -> httpx.AsyncClient:
        """Raises SettingsError if the certificates cannot be read."""
        verify: bool | ssl.SSLContext = self.verify if isinstance(self.verify, bool) else True
        if isinstance(self.verify, str):
            try:
                verify = ssl.create_default_context(cafile=self.verify)
            except (OSError, ssl.SSLError) as error:
                raise SettingsError(
                    f"sampler_verify is {self.verify!r}, which is not a file of certificates: {error}"
                ) from None
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        # By default an answer has no time limit: health checks find an engine that died.
        timeout = httpx.Timeout(self.timeout_s or None, connect=PROBE_TIMEOUT_S)
        return httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout, headers=self.headers, verify=verify)


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """The address and credentials of a running engine, or the Python interpreter and options with which to start one.

    `directory` holds the files of adapters and is emptied at start. An engine on another machine must see it under the
    same path, unless it downloads adapters from `adapters_url`, an address of this process. `memory` is preferred for
    them while it has space.
    """

    directory: Path
    log_path: Path
    memory: Path | None = None
    url: str = ""
    access: EngineAccess = field(default_factory=EngineAccess)
    adapters_url: str = ""
    adapters_host: str = "127.0.0.1"  # the address on which this process listens for downloads
    python: str = ""
    options: tuple[str, ...] = ()
    shares_device: bool = False
    max_adapters: int = MAX_ADAPTERS


class EngineConnection:
    """`learn` runs each time that the engine comes up, before requests are sent."""

    def __init__(
        self, dialect: Dialect, engine: RemoteEngine, model: str, learn: Callable[[], Awaitable[None]]
    ) -> None:
        """`model` is the directory of the base model, for an engine that is started here."""
        self._name = dialect.name
        self._dialect = dialect
        self._engine = engine
        self._learn = learn
        self.url, self._command = engine.url, list[str]()
        if not self.url:
            port = _free_port()
            self.url = f"http://127.0.0.1:{port}"
            self._command = dialect.command(engine.python, model, port, engine.options, engine.shares_device)
        self.era = 0
        self._up = asyncio.Event()
        self._check_now = asyncio.Event()
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._has_child = False
        self._num_checks = 0
        self._failed_starts = 0
        self._start_error: UserError | EngineFailedError | SettingsError | None = None
        self._client = engine.access.client(self.url)

    async def ready(self) -> int:
        """Wait until the engine is up and return its era. Raises the error that keeps it from starting."""
        while not self._up.is_set():
            if self._start_error is not None:
                raise self._start_error
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await self._up.wait()
        return self.era

    async def pause(self) -> None:
        """Leave the device to another process until `resume`: an engine that ends meanwhile is not started again, and
        one that another process started gets no requests. Returns when an engine that is starting is up or has ended.
        """
        while self._command and not self._up.is_set() and self._start_error is None:
            await asyncio.sleep(FIRST_PAUSE_S)
        self._may_start.clear()
        self._check_now.set()
        while self._has_child and not self._up.is_set():
            await asyncio.sleep(FIRST_PAUSE_S)
        while self._num_checks:  # a health check of SGLang is a request
            await asyncio.sleep(FIRST_PAUSE_S)

    def resume(self) -> None:
        self._may_start.set()
        self._check_now.set()

    def is_up(self, era: int) -> bool:
        return self.era == era and self._up.is_set()

    async def report_lost(self, era: int) -> None:
        """Check the health at once, because a request of this era lost its connection to the engine."""
        if era == self.era and not self._command:
            self._mark_down()
            self._check_now.set()
        deadline = time.monotonic() + PROBE_TIMEOUT_S
        while self.is_up(era) and time.monotonic() < deadline:  # the end of a child process is noticed soon
            self._check_now.set()
            await asyncio.sleep(FIRST_PAUSE_S)

    async def run(self) -> None:
        """Watch or restart the engine until this task is cancelled."""
        try:
            pause_s = FIRST_PAUSE_S
            while True:
                if self._command:
                    await self._may_start.wait()
                started = time.monotonic()
                try:
                    await (self._run_child() if self._command else self._watch())
                except OSError as error:
                    log.error("the sampling engine could not be started", engine=self._name, exc_info=error)
                self._mark_down()
                pause_s = FIRST_PAUSE_S if time.monotonic() - started > MAX_PAUSE_S else pause_s * 2
                pause_s = min(pause_s, MAX_PAUSE_S if self._command else 1.0)
                await asyncio.sleep(pause_s)
        finally:
            await self._client.aclose()

    async def post(self, call: EngineCall) -> Json:
        async with self._open_response(call) as response:
            return _json(await response.aread(), self._name)

    async def send_command(self, call: EngineCall) -> Json:
        """Send a command. Its answer is JSON, a sentence or empty; the last two become {}."""
        async with self._open_response(call) as response:
            text = await response.aread()
        with contextlib.suppress(EngineFailedError):
            return _json(text, self._name)
        return {}

    async def events(self, call: EngineCall) -> AsyncIterator[Json]:
        """The server-sent events of a streaming request."""
        async with self._open_response(call) as response:
            try:
                async for line in _lines(response.aiter_bytes()):
                    if line.startswith(b"data:") and (text := line.removeprefix(b"data:").strip()) != b"[DONE]":
                        yield _json(text, self._name)
            except httpx.ReadTimeout as error:
                raise self._timeout_error() from error
            except httpx.TransportError as error:
                raise EngineLost(str(error)) from error

    async def get(self, path: str) -> Json:
        try:
            response = await self._client.get(path, timeout=PROBE_TIMEOUT_S)
        except httpx.TransportError as error:
            raise EngineLost(str(error)) from error
        if response.status_code in UNAUTHORISED_STATUSES:
            raise self._credentials_error(response.status_code)
        if response.status_code != 200:
            kind = NotFoundError if response.status_code == 404 else EngineFailedError
            raise kind(f"{self._name} answers {path} with {response.status_code}")
        return _json(response.content, self._name)

    @contextlib.asynccontextmanager
    async def _open_response(self, call: EngineCall) -> AsyncIterator[httpx.Response]:
        pause_s = FIRST_PAUSE_S
        headers = {"content-type": "application/json"}
        while True:
            try:
                request = self._client.build_request(
                    "POST", call.path, content=orjson.dumps(call.body), headers=headers
                )
                response = await self._client.send(request, stream=True)
                try:
                    if response.status_code not in BUSY_STATUSES:
                        if response.status_code in UNAUTHORISED_STATUSES:
                            raise self._credentials_error(response.status_code)
                        if response.status_code >= 300:
                            text = await response.aread()
                            if response.status_code >= 500 and not await self.is_healthy():
                                raise EngineLost(f"it answers {response.status_code}, and is not healthy any more")
                            raise _status_error(response.status_code, text, self._name)
                        yield response
                        return
                    retry_after = response.headers.get("retry-after", "")
                finally:
                    await response.aclose()
            except httpx.ReadTimeout as error:
                raise self._timeout_error() from error
            except httpx.TransportError as error:
                reached_engine = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                raise EngineLost(f"{type(error).__name__}: {error}", reached_engine=reached_engine) from error
            if self._command and not self._up.is_set():
                raise EngineLost("it is not healthy", reached_engine=False)
            pause_s = min(pause_s * 2, MAX_BACKOFF_S)
            retry_after_s = float(retry_after) if retry_after.isdigit() else 0.0
            await asyncio.sleep(max(pause_s * random.uniform(0.5, 1.0), retry_after_s))

    def _credentials_error(self, status: int) -> SettingsError:
        return SettingsError(
            f"{self._name} at {self.url} answers {status}: it refuses the credentials in sampler_api_key and "
            "sampler_headers"
        )

    def _timeout_error(self) -> EngineFailedError:
        return EngineFailedError(
            f"{self._name} sent nothing for {self._engine.access.timeout_s:g} s (sampler_timeout_s)"
        )

    async def _run_child(self) -> None:
        self._has_child = True
        process_guard = [sys.executable, str(Path(__file__).with_name("process_guard.py"))]
        with self._engine.log_path.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *process_guard,
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=self._engine.directory,  # a directory in which `python -m` finds no module by accident
            )
        exited = asyncio.create_task(process.wait())
        watching = asyncio.create_task(self._watch())
        was_up = False
        try:
            await asyncio.wait({exited, watching}, return_when=asyncio.FIRST_COMPLETED)
            was_up = self._up.is_set()
            log.error(
                "the sampling engine ended",
                engine=self._name,
                status=process.returncode,
                log=str(self._engine.log_path),
            )
        finally:
            self._mark_down()
            watching.cancel()
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(exited)
            self._has_child = False
        if not was_up and self._start_error is None:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                self._start_error = EngineFailedError(
                    f"{self._name} ends before it is up; its log is {self._engine.log_path}"
                )

    async def _watch(self) -> None:
        """Wait until the engine is up, and then until it is down."""
        misses = 0
        while True:
            if not (self._may_start.is_set() or self._up.is_set()) and self._command:
                return
            healthy = await self.is_healthy()
            if healthy and not self._up.is_set() and self._may_start.is_set():
                await self._come_up()
            misses = 0 if healthy else misses + 1
            if self._up.is_set() and misses >= MAX_MISSED_CHECKS:
                log.error("the sampling engine does not answer", engine=self._name)
                return
            pause_s = HEALTH_INTERVAL_S if healthy and self._up.is_set() else 0.2
            self._check_now.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._check_now.wait()

    async def _come_up(self) -> None:
        try:
            await self._learn()
        except SettingsError as error:
            self._start_error = error
            log.error("the sampling engine cannot be used", engine=self._name, error=str(error))
            return
        except (EngineLost, EngineFailedError, UserError) as error:
            log.warning("the sampling engine is not ready", engine=self._name, error=str(error))
            return
        self._start_error, self._failed_starts = None, 0
        self.era += 1
        self._up.set()
        log.info("the sampling engine is up", engine=self._name, url=self.url)

    async def is_healthy(self) -> bool:
        is_awake = self._may_start.is_set()
        path = self._dialect.health if is_awake else self._dialect.health_asleep
        self._num_checks += 1
        try:
            status = (await self._client.get(path, timeout=PROBE_TIMEOUT_S)).status_code
        except httpx.TransportError:
            return False
        finally:
            self._num_checks -= 1
        # `learn` reports wrong credentials; an older version may not know the path for an engine that is asleep.
        return status in (200, *UNAUTHORISED_STATUSES) or (status == 404 and not is_awake)

    def _mark_down(self) -> None:
        self._up.clear()


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Split a stream at its line ends, and not at those of Unicode, which JSON may contain."""
    unfinished = b""
    async for chunk in chunks:
        *lines, unfinished = (unfinished + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
    if unfinished:
        yield unfinished


def _json(text: bytes, name: str) -> Json:
    try:
        document = orjson.loads(text) if text.strip() else {}
    except ValueError as error:
        raise EngineFailedError(f"{name} answered with something other than JSON: {text[:80]!r}") from error
    return document if isinstance(document, dict) else {"answer": document}


def _status_error(status: int, text: bytes, name: str) -> Exception:
    """The error for a status of 300 or more: a wrong request below 500, a failed engine otherwise."""
    message = text[:2000].decode(errors="replace")
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        document = orjson.loads(text)
        detail = document.get("error", document)
        message = str((detail.get("message") if isinstance(detail, dict) else detail) or message)
    if status == 404:
        return NotFoundError(f"{name} answers: {message}")
    return (UserError if status < 500 else EngineFailedError)(f"{name} answers {status}: {message}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
