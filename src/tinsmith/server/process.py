"""The process of `tinsmith serve`.

`build` creates the stores, the HTTP app, the supervisor and the janitor once and passes them down; `Server.run` runs
those that the role needs. A process that answers no clients serves only probes and Prometheus, or no HTTP. The process
never loads torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

import structlog
import uvicorn
import uvloop
from sqlalchemy.exc import SQLAlchemyError
from starlette.applications import Starlette

from tinsmith import base_models as base_models
from tinsmith.api.app import create_app, create_probe_app
from tinsmith.api.connections import Connection
from tinsmith.api.services import EngineStatus, Services
from tinsmith.auth.keys import Keys
from tinsmith.auth.quotas import NAMES as QUOTAS
from tinsmith.auth.quotas import QuotaLimits, Quotas
from tinsmith.auth.signing import Signer, load_secret
from tinsmith.auth.tenants import StoredTenants
from tinsmith.auth.tokens import Tokens
from tinsmith.base_models import Bases
from tinsmith.batch.coordinator.coordinator import Coordinator
from tinsmith.batch.coordinator.model_gateway import ModelGateway
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.openai.reconciler import Reconciler, ReconcilerParts
from tinsmith.batch.openai.rows import OpenAIBatches
from tinsmith.chat.dialects import read_tool_parsers
from tinsmith.chat.tokenizer import ModelTokenizers
from tinsmith.cluster.engine_process import EngineProcess
from tinsmith.cluster.engines import Engines, holder_of
from tinsmith.cluster.executors import DedicatedSamplers, Dispatch, Executors
from tinsmith.cluster.on_demand import OnDemandEngines
from tinsmith.cluster.ownership import EngineRouter
from tinsmith.cluster.profiles import Profiles
from tinsmith.cluster.sample_admission import SampleAdmission
from tinsmith.cluster.supervisor import Supervisor
from tinsmith.db.database import FILES_POLL_S, Database, DatabaseMovedError
from tinsmith.db.factory import open_database, open_mailbox
from tinsmith.db.postgres import PostgresTimeouts
from tinsmith.db.wakeups import (
    EVERYTHING,
    SAFETY_POLL_S,
    SERVER,
    Waiters,
    WakeUps,
    engine_mailbox,
    job_line,
    server_mailbox,
)
from tinsmith.errors import SettingsError
from tinsmith.losses import list_plugins
from tinsmith.runtime.background import Background
from tinsmith.runtime.failpoints import arm
from tinsmith.runtime.threads import SWEEPS, ThreadPools, bound_starlette_threads, num_threads
from tinsmith.server.checkpoint_jobs import CheckpointJobRunner
from tinsmith.server.janitor import Janitor
from tinsmith.server.machine_history import MachineObserver
from tinsmith.server.pending_responses import PendingResponses
from tinsmith.settings import Settings
from tinsmith.storage.buckets import check_reachable, open_directories
from tinsmith.storage.directories import claim
from tinsmith.store.audit import Audit
from tinsmith.store.checkpoint_jobs import CheckpointJobs
from tinsmith.store.checkpoints import Checkpoints
from tinsmith.store.curves import Curves
from tinsmith.store.custom_losses import CustomLosses
from tinsmith.store.database_counts import DatabaseCounts
from tinsmith.store.exchanges import Exchanges
from tinsmith.store.files import Files
from tinsmith.store.futures import Futures
from tinsmith.store.machine_history import MachineHistory
from tinsmith.store.models import Models
from tinsmith.store.overview import Overview
from tinsmith.store.recent_steps import RecentSteps
from tinsmith.store.recorded_sequences import Sequences
from tinsmith.store.responses import Responses
from tinsmith.store.sampling_sessions import SamplingSessions
from tinsmith.store.server_sessions import ImplicitSessions, ServerSessions
from tinsmith.store.sessions import Sessions
from tinsmith.store.stored_samples import StoredSamples
from tinsmith.store.usage import Usage
from tinsmith.telemetry.metrics import ServerMeters, reset_metrics_directory
from tinsmith.telemetry.timeline import Traces
from tinsmith.telemetry.tracing import open_tracing
from tinsmith.wire.token_stream import PARTIAL_MARK, Partials

PATIENCE_S = 5.0
"""How long a request waits for the database before it is answered with 503."""

OTHER_CONNECTIONS = 3
"""Connections to Postgres for threads outside of the pools, such as the main thread."""

SHUTDOWN_S = 5
"""How long requests in flight may take after a stop signal."""

OPEN_FILES = 10_240
"""The limit of open files where the kernel takes no higher one: macOS's bound for a process."""

MIN_OPEN_FILES = 4096
"""The server warns about a lower limit of open files, since each held poll is a connection, and so a file."""

log = structlog.get_logger()


class _DrainingServer(uvicorn.Server):
    """Answers held polls when it shuts down, instead of closing their connections."""

    def __init__(self, config: uvicorn.Config, waiters: Waiters, stopping: Callable[[], None]) -> None:
        super().__init__(config)
        self._waiters = waiters
        self._stopping = stopping

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping()
        self._waiters.close()
        await super().shutdown(sockets)


@dataclass(slots=True)
class Server:
    """A process that is built, and runs with `run`."""

    settings: Settings
    app: Starlette
    bases: Bases
    listener: socket.socket | None
    supervisor: Supervisor
    on_demand: OnDemandEngines
    waiters: Waiters
    on_stop: Callable[[int, int], None] | None = None
    """Called when the process begins to stop, with the numbers of held polls and of engine processes."""

    def work_counts(self) -> dict[str, float]:
        """Counts since the start: stored requests, trained and sampled tokens."""
        return self.app.state.services.meters.work_counts()

    def _stopping(self) -> None:
        if self.on_stop is not None:
            self.on_stop(len(self.waiters), len(self.supervisor.pids))

    @property
    def url(self) -> str:
        """The server's URL; empty if it serves no HTTP."""
        if self.listener is None:
            return ""
        host, port = self.listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def accepts_anyone(self) -> bool:
        """Whether any well-formed key is accepted."""
        return self.app.state.services.tenants.accepts_anyone()

    def run(self, on_ready: Callable[[str], None] | None = None) -> None:
        """Serve until SIGTERM or Ctrl-C; returns when all engines have ended. Raises SettingsError if one refuses."""
        # A signal before uvicorn handles signals must not be lost. uvicorn re-raises the signals that it handled.
        signalled = threading.Event()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, lambda _signal, _frame: signalled.set())
        raise_file_limit()
        uvloop.run(self._run(on_ready, signalled))

    async def _run(self, on_ready: Callable[[str], None] | None, signalled: threading.Event) -> None:
        must_stop = asyncio.create_task(self.supervisor.must_stop.wait())
        if self.listener is None:
            await self._run_without_listening(on_ready, must_stop, signalled)
        else:
            await self._listen(self.listener, on_ready, must_stop, signalled)
        must_stop.cancel()
        if self.supervisor.must_stop.is_set():
            raise SettingsError(self.supervisor.refusal)

    async def _run_without_listening(
        self, on_ready: Callable[[str], None] | None, must_stop: asyncio.Task[bool], signalled: threading.Event
    ) -> None:
        end = asyncio.Event()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signal_number, end.set)
        if signalled.is_set():
            end.set()
        async with self.app.router.lifespan_context(self.app):
            if on_ready:
                on_ready(self.url)
            stopping = asyncio.create_task(end.wait())
            await asyncio.wait({stopping, must_stop}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            self._stopping()

    async def _listen(
        self,
        listener: socket.socket,
        on_ready: Callable[[str], None] | None,
        must_stop: asyncio.Task[bool],
        signalled: threading.Event,
    ) -> None:
        config = uvicorn.Config(
            self.app,
            http=Connection,
            ws="none",
            loop="uvloop",
            log_level="error",  # at lower levels every malformed request would log a line
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
        server = _DrainingServer(config, self.waiters, self._stopping)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.sleep(0)  # its first step, after which uvicorn handles signals
        if signalled.is_set():
            server.should_exit = True
        if on_ready:
            on_ready(self.url)
        await asyncio.wait({serving, must_stop}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving


def pool_size(settings: Settings) -> int:
    """The limit of the server's connections to Postgres, of which threads then never wait for one: one for each thread
    of its pools, a second one for each sweep, which holds a lock, and a few for other threads.
    """
    return num_threads(settings.handler_threads, settings.transfer_threads) + SWEEPS + OTHER_CONNECTIONS


def _open_database(settings: Settings, timeouts: PostgresTimeouts) -> Database:
    url, connections = settings.resolved_database_url, pool_size(settings)
    return open_database(url, patience_s=PATIENCE_S, connections=connections, timeouts=timeouts)


def _with_engine_states(services: Services, supervisor: Supervisor, engines: Engines) -> Services:
    status = replace(
        services.engines,
        cannot_start=engines.cannot_start,
        failing=supervisor.failing,
        loading=supervisor.loading,
        is_unloaded=engines.is_unloaded,
        failures=supervisor.failures,
    )
    return replace(services, engines=status)


def build(settings: Settings, prestarted: EngineProcess | None = None) -> Server:
    """Prepare the data directory, migrate the database, and connect the parts. Raises SettingsError."""
    _log_plugins()
    data_dir = settings.resolved_data_dir
    lock = _claim_data(data_dir)
    served = _resolve_models(settings)
    timeouts = PostgresTimeouts(*settings.database_timeouts)
    database = _open_database(settings, timeouts)
    holder = holder_of(data_dir)
    engines, counts = Engines(database, holder, served.on_demand), DatabaseCounts(database, holder).counts
    meters = ServerMeters(reset_metrics_directory(data_dir), settings.metrics_tenants, counts)
    database.observe_use(meters.observe_database)
    count_failure = meters.count_background_failure
    mailbox = open_mailbox(settings.resolved_database_url, server_mailbox(data_dir), count_failure, timeouts)
    background = Background(count_failure)
    supervisor = Supervisor(
        settings, served, engines, meters.remove_engine_gauges, partial(_wake_engines, mailbox), prestarted
    )
    on_demand = OnDemandEngines(settings, served, database, engines, supervisor, partial(mailbox.wake, SERVER))
    arm(settings.failpoints, "server", data_dir, lambda: supervisor.pids)
    database.migrate()
    check_reachable(settings)
    waiters = Waiters()
    meters.watch_long_polls(waiters.__len__)
    wake = None if database.notifies else lambda *names: mailbox.wake(engine_mailbox(*names))
    engine_router = EngineRouter(database)
    futures = Futures(database, wake, meters.count_request, engine_router.for_sample)
    services = _services(settings, served, database, waiters, futures, engines, engine_router, meters)
    services = _with_engine_states(services, supervisor, engines)
    services.batch_jobs.on_change(lambda job_id: mailbox.wake(SERVER, [job_line(job_id)]))
    port = settings.listening_port
    if port is not None and services.tenants.accepts_anyone():
        _refuse_public_address(settings)
    versions, snapshots = (open_directories(settings, kind) for kind in ("versions", "snapshots"))
    janitor = Janitor(services, engines, versions, snapshots, lambda: database.try_lock("janitor"))

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(services.threads.handlers)
        bound_starlette_threads(settings.transfer_threads)
        loop.add_reader(mailbox.fileno(), lambda: _on_wake_up(waiters, services.partials, mailbox.drain()))
        background.start("database_files", partial(_watch_files, database, services.threads, supervisor))
        _start(services, supervisor, on_demand, janitor, database, engines, background)
        try:
            yield
        finally:
            await _stop(services, supervisor, on_demand, background)
            loop.remove_reader(mailbox.fileno())
            mailbox.close()
            services.threads.close()
            database.close()
            lock.close()

    app = create_app(services, lifespan) if settings.answers_clients else create_probe_app(services, lifespan)
    listener = None if port is None else _open_port(settings.host, port)
    return Server(settings, app, served, listener, supervisor, on_demand, waiters)


def _start(
    services: Services,
    supervisor: Supervisor,
    on_demand: OnDemandEngines,
    janitor: Janitor,
    database: Database,
    engines: Engines,
    background: Background,
) -> None:
    """Start the background work of this process's role."""
    supervisor.start(background)
    observer = MachineObserver(services.machine_history, services.meters, engines)
    background.start("machine_history", partial(observer.run, services.threads.sweeps))
    if services.bases.on_demand and services.settings.num_engines:
        background.start("engines_on_demand", on_demand.run)
    background.start("lost_wake_ups", partial(_poll_slowly, services))
    if services.settings.runs_bulk_jobs:
        services.coordinator.start(background)
    if services.settings.answers_clients:
        services.batch_reconciler.start(background, services.threads.sweeps)
        background.start("janitor", partial(janitor.run, services.threads.sweeps))
        responses = PendingResponses(services, lambda: database.try_lock("pending_responses"))
        background.start("pending_responses", partial(responses.run, services.threads.sweeps))
        background.start("checkpoint_jobs", CheckpointJobRunner(services).run)


async def _stop(services: Services, supervisor: Supervisor, on_demand: OnDemandEngines, background: Background) -> None:
    """Stop what `_start` started, waiting for batch workers and engines."""
    background.end()
    if services.settings.answers_clients:
        await services.batch_reconciler.stop()
    await services.coordinator.stop()
    await asyncio.gather(supervisor.stop(), on_demand.stop())
    await asyncio.to_thread(services.tracing.close)
    await background.stop()


def _services(
    settings: Settings,
    served: Bases,
    database: Database,
    waiters: Waiters,
    futures: Futures,
    engines: Engines,
    engine_router: EngineRouter,
    meters: ServerMeters,
) -> Services:
    batch_jobs, batches, samplers = BatchJobs(database), OpenAIBatches(database), SamplingSessions(database)
    sessions, checkpoints = Sessions(database), Checkpoints(database, open_directories(settings, "checkpoints"))
    files, holder = Files(database, settings.storage_location("files")), holder_of(settings.resolved_data_dir)
    signer, quotas = _open_signer(settings), _open_quotas(settings, database)
    admission = SampleAdmission(quotas, Dispatch(Executors(database)))
    server_sessions = ServerSessions(sessions, samplers, settings.session_timeout_s)
    gateway = ModelGateway(served, sessions, server_sessions, checkpoints, futures, waiters, admission)
    coordinator = Coordinator(settings, batch_jobs, holder, gateway)
    return Services(
        settings=settings,
        bases=served,
        futures=futures,
        usage=Usage(database),
        audit=Audit(database),
        traces=Traces(database),
        waiters=waiters,
        signer=signer,
        tenants=_open_tenants(settings, database, signer),
        quotas=quotas,
        custom_losses=CustomLosses(database),
        responses=Responses(database),
        exchanges=Exchanges(database),
        sequences=Sequences(database),
        sessions=sessions,
        models=Models(database),
        sampling_sessions=samplers,
        checkpoints=checkpoints,
        checkpoint_jobs=CheckpointJobs(database, holder),
        batch_jobs=batch_jobs,
        coordinator=coordinator,
        model_gateway=gateway,
        files=files,
        openai_batches=batches,
        batch_reconciler=_build_reconciler(settings, database, batches, files, coordinator),
        tokenizers=ModelTokenizers(read_tool_parsers(settings.tool_parser)),
        partials=Partials(),
        implicit_sessions=ImplicitSessions(server_sessions),
        curves=Curves(database),
        recent_steps=RecentSteps(database),
        machine_history=MachineHistory(database),
        stored_samples=StoredSamples(database),
        overview=Overview(database),
        engines=EngineStatus(engines.queue_state, engine_router.for_run),
        sample_admission=admission,
        dedicated_samplers=DedicatedSamplers(database),
        profiles=Profiles(database),
        meters=meters,
        tracing=open_tracing(settings.otlp_endpoint, "server", {"host.name": socket.gethostname()}),
        threads=ThreadPools.start(settings.handler_threads, settings.transfer_threads),
        reads_wait=database.reads_wait,
    )


def _open_signer(settings: Settings) -> Signer:
    return Signer(load_secret(settings.signing_secret.get_secret_value(), settings.resolved_data_dir))


def _open_quotas(settings: Settings, database: Database) -> Quotas:
    return Quotas(database, QuotaLimits(**{name: getattr(settings, f"quota_{name}") for name in QUOTAS}))


def _open_tenants(settings: Settings, database: Database, signer: Signer) -> StoredTenants:
    create_key = settings.create_key_command("DIRECTORY")
    return StoredTenants(Keys(database), Tokens(signer), prefixes=settings.key_prefixes, create_key=create_key)


def _build_reconciler(
    settings: Settings, database: Database, batches: OpenAIBatches, files: Files, coordinator: Coordinator
) -> Reconciler:
    batch_jobs = BatchJobs(database)
    parts = ReconcilerParts(batches, files, batch_jobs, coordinator.wake, lambda: database.try_lock("openai_batches"))
    return Reconciler(settings, parts)


def _wake_engines(mailbox: WakeUps, base_model: str) -> None:
    mailbox.wake(engine_mailbox(base_model), [EVERYTHING])


def _on_wake_up(waiters: Waiters, partials: Partials, lines: set[str]) -> None:
    tokens = {line for line in lines if line.startswith(PARTIAL_MARK)}
    if tokens:
        partials.deliver(tokens)
    request_ids = lines - tokens
    if "" in request_ids:  # wake-ups may have been missed
        waiters.wake_all()
    else:
        waiters.wake(request_ids)


async def _watch_files(database: Database, threads: ThreadPools, supervisor: Supervisor) -> None:
    """Stop the process if its database file was moved or replaced, also while it does not write."""
    while True:
        await asyncio.sleep(FILES_POLL_S)
        try:
            await asyncio.get_running_loop().run_in_executor(threads.sweeps, database.check_files)
        except DatabaseMovedError as error:
            log.critical("the database is lost; this server stops", error=str(error))
            supervisor.refuse(str(error))
            return


async def _poll_slowly(services: Services) -> None:
    """Find settled futures whose wake-up was lost, with a few queries for all held polls."""
    orders: dict[str, int | None] = {}
    while True:
        await asyncio.sleep(SAFETY_POLL_S)
        try:
            orders = await wake_missed(
                services.waiters, services.futures, services.sampling_sessions, orders, services.threads.quick
            )
        except SQLAlchemyError as error:
            log.warning("could not query settled futures; trying again", error=repr(error))


async def wake_missed(
    waiters: Waiters,
    futures: Futures,
    samplers: SamplingSessions,
    orders: Mapping[str, int | None],
    threads: Executor | None = None,
) -> dict[str, int | None]:
    """Wake the polls whose futures have settled. `orders` is the previous return value: the last settle_order of each
    sampling session with waiters.
    """
    request_ids, sampling_session_ids = waiters.list_watched()
    loop = asyncio.get_running_loop()
    settled = await loop.run_in_executor(threads, futures.filter_settled, request_ids)
    newest = await loop.run_in_executor(threads, samplers.last_orders, sampling_session_ids)
    waiters.wake(settled)
    waiters.wake_sessions(name for name, order in newest.items() if order != orders.get(name))
    return newest


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, for this process and its children; if the kernel refuses a
    hard limit of "unlimited", as macOS does, to OPEN_FILES.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (hard, max(soft, OPEN_FILES)):
        if soft == resource.RLIM_INFINITY:
            return
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
            break
        except (ValueError, OSError) as error:
            log.info("the limit of open files was not raised", limit=soft, to=limit, error=str(error))
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        log.warning("few polls can be held at once; raise the limit of open files (ulimit -n)", limit=soft)


def _log_plugins() -> None:
    """Log the installed losses. Raises SettingsError for one that cannot be used."""
    if plugins := list_plugins():
        log.info("loss plug-ins", losses={loss.name: loss.distribution for loss in plugins})


def _resolve_models(settings: Settings) -> Bases:
    """Raises SettingsError, also if engines of these settings cannot be started on demand."""
    backend, sampler = settings.backend, settings.sampler
    obstacles = {
        f"role {settings.role!r} runs no engines; dedicated samplers are for --model": settings.role == "sampler",
        f"backend {backend!r} has one plan for all devices; use torch": backend not in ("torch", "fake"),
        f"sampler {sampler!r} needs a device of its own; name the model with --model": settings.samples_elsewhere,
        f"machines is {settings.machines}, and an engine on demand runs on one": settings.machines > 1,
        f"device is {settings.device!r}; choose GPUs by CUDA_VISIBLE_DEVICES instead": ":" in settings.device,
    }
    reason = next((reason for reason, holds in obstacles.items() if holds), None)
    if settings.loads_on_demand and reason:
        raise SettingsError(f"--models-from and --allow-model load base models on demand: {reason}")
    return base_models.resolve(
        settings.models,
        vision=settings.vision,
        models_from=settings.models_from,
        allow_models=settings.allow_models,
    )


def _claim_data(data_dir: Path) -> IO[bytes]:
    """Lock the data directory: two servers on one would process each other's requests. Raises SettingsError."""
    try:
        lock = claim(data_dir / "server.lock", wait=False)
    except OSError as error:
        raise SettingsError(f"cannot write to {data_dir}: {error.strerror}; choose another --data-dir") from None
    if lock is None:
        raise SettingsError(f"another server uses {data_dir}; stop it, or choose another --data-dir")
    return lock


def _refuse_public_address(settings: Settings) -> None:
    host = settings.host
    if host == "localhost":
        return
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    raise SettingsError(
        f"host is {host!r}, but without API keys everyone who can reach it could train and read models; create a key "
        f"({settings.create_key_command()}), or use 127.0.0.1"
    )


def _open_port(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol given, the event loop sets TCP_NODELAY on connections; otherwise answers are delayed by 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
    listener.listen(2048)
    return listener
