"""The engine process: `python -m tinsmith.engine`, started by the supervisor.

Reads one line of JSON from standard input (`EngineSpec`) and works until SIGTERM, or until standard input closes: when
the server dies for any reason, its engines follow. Settings come through the pipe, since every user of the machine can
read command lines. Exit status 3 means that the model cannot be served and a restart would not help; 4 that this engine
lost its lease; 5 that a fault ended it (`faults`), after which it commits what it had computed, and uses neither the
device nor its libraries any more.

`open_backend` returns the backend of a process, with its own sampler or an external engine, as the settings choose.

`choose_degrees` divides the base model over the GPUs of an engine whose settings leave that open. `check_fit` checks
the settings against the plan of the base model before any weight is loaded, for the families that the plan supports. A
model that cannot be divided, or does not fit into a GPU or a memory budget, is refused; a CPU's memory can be swapped,
so there it only warns.

`load_backend` is the only function that imports backends, and only the chosen one.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.backends import Backend
from tinsmith.base_models import eos_token_ids, read_shape
from tinsmith.cluster.engine_process import PRESTARTED
from tinsmith.cluster.engines import (
    EXIT_FAULT,
    EXIT_LEASE_LOST,
    EXIT_UNUSABLE_MODEL,
    HOLDER,
    Engines,
    Lease,
    LeaseLostError,
    Renewal,
    Seat,
    fence,
    holder_of,
)
from tinsmith.cluster.executors import SAMPLER, Executors
from tinsmith.cluster.in_flight_journal import journal_path, read_journal
from tinsmith.cluster.ownership import Ownership
from tinsmith.cluster.profiles import Profiles
from tinsmith.db.database import FILES_POLL_S, Database, DatabaseMovedError
from tinsmith.db.factory import open_database, open_mailbox
from tinsmith.db.postgres import ENGINE_CONNECTIONS, LEASE_CONNECTIONS, PostgresTimeouts
from tinsmith.db.wakeups import WakeUps, engine_mailbox
from tinsmith.engine.faults import EngineFaultError, classify
from tinsmith.engine.layouts import (
    MIN_CONTEXT,
    MIN_RANK,
    build_workload,
    find_reason_for_one_device,
    has_degrees,
    read_architecture,
    read_degrees,
)
from tinsmith.engine.loop import Engine, Stores
from tinsmith.engine.sampler_loop import SamplerEngine
from tinsmith.engine.settling import IterationFailedError
from tinsmith.engine.telemetry import Records
from tinsmith.engine.transfer import Peering, VersionFetcher, VersionSources, VersionTransfer
from tinsmith.engine.versions import VERSIONS_SHARE
from tinsmith.errors import SettingsError
from tinsmith.losses import loss_registry
from tinsmith.plan.architecture import Architecture
from tinsmith.plan.degrees import (
    Degrees,
    Plan,
    choose,
    describe_degrees,
    evaluate,
    find_machine_problem,
    find_problem,
)
from tinsmith.runtime import failpoints
from tinsmith.runtime.background import start_supervised_thread
from tinsmith.runtime.devices import choose_device, kind_of, read_memory
from tinsmith.runtime.malloc import importing
from tinsmith.runtime.sizes import format_bytes
from tinsmith.samplers import VersionHolder
from tinsmith.settings import RANK_ADDRESS_FILE, Settings
from tinsmith.settings.groups import DEGREES, ModelSettings
from tinsmith.storage.buckets import open_directories
from tinsmith.storage.directories import claim
from tinsmith.store.checkpoints import Checkpoints
from tinsmith.store.custom_losses import CustomLosses
from tinsmith.store.futures import Futures
from tinsmith.store.models import Models
from tinsmith.store.sampling_sessions import SamplingSessions
from tinsmith.store.stored_samples import SampleLimits
from tinsmith.telemetry.logs import configure_logs
from tinsmith.telemetry.tracing import Tracing, open_tracing
from tinsmith.types import ModelShape

if TYPE_CHECKING:
    from tinsmith.samplers.remote.client import RemoteEngine


def preload_torch() -> None:
    """Import the modules of the torch backend, which takes seconds."""
    with importing():
        import tinsmith.backends.torch
        import tinsmith.samplers.local.engine  # noqa: F401


def load_backend(name: str, shape: ModelShape, **options: str) -> Backend:
    """Create the backend called `name` for one base model. Options are the backend's own, as text."""
    if shape.vision is not None and name in ("full", "sharded"):
        raise SettingsError(
            f"backend {name!r} does not support images; serve {shape.name} as a text model with --no-vision"
        )
    if name == "torch":
        with importing():
            from tinsmith.backends.torch import TorchBackend

        return TorchBackend(shape, **options)
    if name == "sharded":
        with importing():
            from tinsmith.backends import distributed

        return distributed.load(shape, **options)
    if name == "full":
        with importing():
            from tinsmith.backends.full import FullBackend

        return FullBackend(shape, **options)
    if name == "fake":
        from tinsmith.backends.fake import FakeBackend

        return FakeBackend(shape, **options)
    raise SettingsError(f"backend {name!r} is unknown; choose 'torch', 'sharded', 'full' or 'fake'")


def check_device(settings: ModelSettings) -> None:
    """Raises SettingsError if the settings name a device that this machine, or its torch, lacks."""
    if settings.device != "auto" and settings.backend != "fake":
        choose_device(settings.device)


def choose_degrees(settings: Settings, shape: ModelShape, kind: str) -> Settings:
    """The settings with the degrees of parallelism that the plan chooses for the free memory of the GPUs, unless some
    are given, or the engine has not several GPUs to itself. The log has the choice and its reasons.
    """
    if has_degrees(settings):
        return settings
    if settings.backend != "torch" or kind == SAMPLER or len(free := _free_bytes(settings)) * settings.machines < 2:
        return settings
    try:
        if problem := find_reason_for_one_device(settings, shape, num_sharing=settings.num_torch_processes):
            raise SettingsError(problem)
        model = read_architecture(shape)
    except SettingsError as error:
        log.info("one device is used", devices=len(free), reason=str(error))
        return settings
    workload = build_workload(model, settings, len(free) * settings.machines, min(free), cuda=True)
    plan = choose(model, workload)
    if not plan.fits:
        plan = choose(model, replace(workload, rank=MIN_RANK, context=MIN_CONTEXT))
    layout = describe_degrees(plan.degrees)
    log.info(
        "layout chosen", layout=layout, devices=len(free), free=format_bytes(min(free)), reason=" ".join(plan.reasons)
    )
    degrees = plan.degrees
    return settings.model_copy(update=degrees.settings | {"shard_base": degrees.shard_base})


FREE_BYTES = "import torch; print(*(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())))"


def _free_bytes(settings: Settings) -> list[int]:
    """Free memory of each GPU that the engine may use. A child process asks about several, because the CUDA context
    that this takes keeps hundreds of MiB of each device.
    """
    if settings.device not in ("auto", "cuda"):
        return []
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() * settings.machines < 2:
        return []
    probe = subprocess.run([sys.executable, "-c", FREE_BYTES], capture_output=True, text=True, check=False)
    if probe.returncode:
        last_line = probe.stderr.strip().rpartition("\n")[2]
        raise SettingsError(f"the free memory of the GPUs is unknown ({last_line}); give --data-parallel")
    return [int(word) for word in probe.stdout.split()]


def check_machines(settings: Settings, kind: str) -> None:
    """Raises SettingsError if this engine cannot have ranks on several machines."""
    if settings.machines == 1:
        return
    problems = {
        "a dedicated sampler runs on one machine": kind == SAMPLER,
        "several machines are for one engine with one base model": settings.num_engines * len(settings.models) > 1,
        f"backend {settings.backend!r} runs on one machine": settings.resolved_backend != "sharded",
        find_machine_problem(read_degrees(settings), settings.machines): True,
    }
    if reason := next((reason for reason, holds in problems.items() if holds and reason), None):
        raise SettingsError(f"machines is {settings.machines}: {reason}")


def check_fit(settings: Settings, shape: ModelShape) -> None:
    """Raises SettingsError with the reason or the missing memory."""
    degrees = read_degrees(settings)
    if settings.memory_budget and settings.resolved_backend != "torch":
        raise SettingsError(
            f"memory_budget is for an engine on one device with backend 'torch'; this one has "
            f"{describe_degrees(degrees)} with backend {settings.resolved_backend!r}"
        )
    if settings.resolved_backend not in ("torch", "sharded"):
        return
    try:
        model = read_architecture(shape)
    except SettingsError as error:
        log.debug("the plan does not support this model", base_model=shape.name, reason=str(error))
        return
    if problem := find_problem(model, degrees, quantize=settings.quantize):
        raise SettingsError(f"{shape.name}: {problem}")
    plan = _plan(model, settings, degrees)
    if plan.fits:
        return
    total = format_bytes(plan.needs.total("in turns"))
    problem = (
        f"{shape.name} over {describe_degrees(degrees)} needs {total} on each device, including a base of "
        f"{format_bytes(plan.needs.base)}; it has {format_bytes(plan.workload.memory_bytes)}, "
        f"{format_bytes(plan.missing_bytes)} too little"
    )
    if plan.workload.cuda:
        raise SettingsError(f"{problem}; `tinsmith doctor {shape.path} --gpus N --memory M` plans for more devices")
    log.warning("this may not fit into the machine's memory", problem=problem)


def _plan(model: Architecture, settings: Settings, degrees: Degrees) -> Plan:
    memory_bytes, cuda = _device_memory(settings, degrees.devices // settings.machines)
    workload = build_workload(model, settings, degrees.devices, memory_bytes, cuda=cuda)
    return evaluate(model, replace(workload, rank=MIN_RANK, context=MIN_CONTEXT), degrees)


def _device_memory(settings: Settings, devices: int) -> tuple[int, bool]:
    """Memory of one device in bytes, and whether it is a GPU. That of a GPU is what is free, unless an engine with a
    sleep mode has it meanwhile.
    """
    device = choose_device(settings.device)
    free, total = read_memory(device)
    if kind_of(device).is_host:
        return total // devices, False
    return total if settings.sampler_shares_device else free, kind_of(device).has_kernels


def open_backend(settings: Settings, shape: ModelShape, engine_id: str, options: Mapping[str, str]) -> Backend:
    """Open the backend of an engine; its files in the data directory have `engine_id` in their names.

    Raises SettingsError if settings and `options`, which are the backend's, are incompatible.
    """
    _check_full(settings)
    if not settings.samples_elsewhere:
        return load_backend(settings.resolved_backend, shape, **options)
    from tinsmith.backends.with_remote_sampler import memory_directory, with_remote_sampler

    memory = None
    if not (settings.sampler_url or settings.sampler_adapters):
        memory = memory_directory(settings.resolved_data_dir, engine_id)
    engine = replace(_inference_server(settings, engine_id), memory=memory)
    backend = load_backend(settings.resolved_backend, shape, **options)
    return with_remote_sampler(backend, settings.sampler, engine, shape, eos_token_ids(shape))


def open_version_holder(
    settings: Settings, shape: ModelShape, engine_id: str, options: Mapping[str, str]
) -> VersionHolder:
    """Open what holds the versions of a dedicated sampler. With an external engine that is files, without torch."""
    _check_full(settings)
    if not settings.samples_elsewhere:
        return open_backend(settings, shape, engine_id, options)
    from tinsmith.backends.with_remote_sampler import VersionFiles, open_remote_sampler

    engine = _inference_server(settings, engine_id)
    files = VersionFiles(settings.resolved_data_dir / "sampler" / f"{engine_id}-versions")
    return open_remote_sampler(files, settings.sampler, engine, shape, eos_token_ids(shape))


def _check_full(settings: Settings) -> None:
    if settings.backend == "full":
        usual = dict.fromkeys(DEGREES, (0, 1))
        for name, values in ({"sampler": ("auto", "local"), "shard_base": (False,)} | usual).items():
            if (value := getattr(settings, name)) not in values:
                raise SettingsError(f"{name} is {value!r}, which backend 'full' does not support; leave it out")


def _inference_server(settings: Settings, engine_id: str) -> RemoteEngine:
    from tinsmith.backends.with_remote_sampler import split_options
    from tinsmith.samplers.remote.client import RemoteEngine
    from tinsmith.samplers.remote.connection import EngineAccess

    if settings.sampler_url and len(settings.models) > 1:
        raise SettingsError("sampler_url names one engine with one base model; serve only that model with it")
    root = settings.resolved_data_dir
    logs = root / "logs"
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    headers = dict(settings.sampler_headers)
    if key := settings.sampler_api_key.get_secret_value():
        headers["Authorization"] = f"Bearer {key}"
    booleans = {"true": True, "false": False}
    access = EngineAccess(
        headers, booleans.get(settings.sampler_verify, settings.sampler_verify), settings.sampler_timeout_s
    )
    return RemoteEngine(
        access=access,
        adapters_url=settings.sampler_adapters_url.rstrip("/"),
        adapters_host=settings.peer_host,
        directory=(settings.sampler_adapters or root / "sampler").expanduser().resolve() / engine_id,
        log_path=logs / f"sampler-{engine_id}.log",
        url=settings.sampler_url.rstrip("/"),
        python=settings.sampler_python or sys.executable,
        options=split_options(settings.sampler_options),
        shares_device=settings.sampler_shares_device,
        max_adapters=settings.sampler_loaded_adapters,
    )


log = structlog.get_logger()


def main() -> int:
    is_prestarted = PRESTARTED in sys.argv
    if is_prestarted:
        preload_torch()
    line = sys.stdin.readline()
    if not line:
        return 0  # the server exited before it needed this process
    spec = json.loads(line)
    if is_prestarted:
        _redirect_output(spec["log"])
    settings = Settings.model_validate(spec["settings"])
    configure_logs(settings.log_level, settings.log_format)
    structlog.contextvars.bind_contextvars(base_model=spec["name"])
    server = os.getppid()
    failpoints.arm(
        settings.failpoints,
        "engine",
        settings.resolved_data_dir,
        lambda: [server] if os.getppid() == server else [],
    )
    shape = read_shape(spec["name"], Path(spec["path"]), vision=settings.vision)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda _signal, _frame: stopping.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the server stops us
    threading.Thread(target=_watch_parent, args=(stopping,), daemon=True).start()
    seat = Seat(shape.name, spec["kind"], spec["index"])
    # Separate connections: a lease is also renewed in the middle of the engine's transactions.
    timeouts = PostgresTimeouts(*settings.database_timeouts)
    leases = open_database(
        settings.resolved_database_url, exists=True, connections=LEASE_CONNECTIONS, timeouts=timeouts
    )
    engines = Engines(leases, holder_of(settings.resolved_data_dir))
    engine_id = engines.id_of(seat)
    # A predecessor whose server was killed may still be finishing its step: two engines would apply requests twice.
    lock = claim(settings.resolved_data_dir / f"{engine_id}.lock", wait=True)
    assert lock is not None
    lease = engines.take(
        seat, settings.engine_lease_s, read_journal(journal_path(settings.resolved_data_dir, engine_id))
    )
    renewal = Renewal(engines, lease, settings.engine_lease_s, stopping.set)
    try:
        context = _EngineContext(shape, seat, engines, lease, bytes.fromhex(spec["peer_key"]), spec["rank_key"])
        status = _serve(context, settings, stopping)
    except LeaseLostError:
        status = EXIT_LEASE_LOST
    finally:
        renewal.close()
        _report_lock_conflict(engines, seat, lease, settings.resolved_data_dir)
        leases.close()
        lock.close()
    if renewal.lost or status == EXIT_LEASE_LOST:
        log.error("this engine lost its lease; its unsettled requests now belong to other engines", epoch=lease.epoch)
        return EXIT_LEASE_LOST
    return status


@dataclass(frozen=True, slots=True)
class _EngineContext:
    """The identity of this process: its base model, seat and lease, and the keys that it shares with its peers."""

    shape: ModelShape
    seat: Seat
    engines: Engines
    lease: Lease
    peer_key: bytes
    rank_key: str


def _serve(context: _EngineContext, settings: Settings, stopping: threading.Event) -> int:
    shape, seat, engines = context.shape, context.seat, context.engines
    try:
        loss_registry()
        check_device(settings)
        settings = choose_degrees(settings, shape, seat.kind)
        check_machines(settings, seat.kind)
        check_fit(settings, shape)
        arguments = settings, shape, context.lease.engine_id, _options(settings, context.rank_key)
        if seat.kind == SAMPLER:
            holder = open_version_holder(*arguments)
            start = partial(_start_sampler, context, holder)
        else:
            holder = backend = open_backend(*arguments)
            start = partial(_start_engine, context, backend)
        # Building the sampler now keeps its cost out of the first request.
        _ = holder.sampler
    except SettingsError as error:
        engines.release(seat, "failed", str(error))
        log.error("the model cannot be served", base_model=shape.name, error=str(error))
        return EXIT_UNUSABLE_MODEL
    # Computed results must not be lost because another process holds the database.
    timeouts = PostgresTimeouts(*settings.database_timeouts)
    database = open_database(
        settings.resolved_database_url,
        fence(context.lease),
        patience_s=math.inf,
        exists=True,
        connections=ENGINE_CONNECTIONS,
        timeouts=timeouts,
    )
    engine_id = context.lease.engine_id
    mailbox = open_mailbox(settings.resolved_database_url, engine_mailbox(shape.name, engine_id), timeouts=timeouts)
    tracing = open_tracing(settings.otlp_endpoint, "engine", {"tinsmith.base_model": shape.name})
    ownership = Ownership(database, shape.name, engine_id, settings.rebalance_idle_s)
    stores = open_stores(database, settings, ownership, tracing)
    engine, close = start(stores, database, mailbox, settings)
    database.observe_use(engine.meters.observe_database)
    threading.Thread(target=_prepare_stop, args=(stopping, engine, context), daemon=True).start()
    gc.freeze()  # without torch, what this process has imported is not exempt yet
    start_supervised_thread("database_files", partial(_watch_files, database, stopping), stopping.wait)
    engines.set_state(seat, "ready")
    log.info("engine ready", base_model=shape.name)
    engine.quarantine.on_fault = _limit_end
    try:
        engine.run(stopping.is_set)
    except (Exception, EngineFaultError) as error:
        if classify(error).is_fatal:
            _end_after_fault(engine, error)
        raise
    finally:
        close()
        mailbox.close()
        tracing.close()
        with contextlib.suppress(SQLAlchemyError):  # the supervisor releases what this engine cannot
            engines.release(seat, "stopped")
        database.close()
    return 0


FLUSH_S = 5.0
"""How long an engine that a fault ends commits what it had computed."""


def _limit_end(_fault: EngineFaultError) -> None:
    """End this process soon after a fault, even if its exception passes through code that waits for the device."""
    timer = threading.Timer(2 * FLUSH_S, os._exit, [EXIT_FAULT])
    timer.daemon = True
    timer.start()


def _end_after_fault(engine: Engine | SamplerEngine, error: BaseException) -> NoReturn:
    """End this process at once: handlers at exit and destructors would use the device."""
    deadline = time.monotonic() + FLUSH_S
    with contextlib.suppress(Exception, EngineFaultError, IterationFailedError, LeaseLostError):
        engine.flush_settlements(lambda: time.monotonic() > deadline)
    traceback.print_exception(error)  # the supervisor reports its last line
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAULT)


def _start_engine(
    context: _EngineContext, backend: Backend, stores: Stores, database: Database, mailbox: WakeUps, settings: Settings
) -> tuple[Engine, Callable[[], None]]:
    """Build an engine; returns it and a function that closes its resources."""
    directory = settings.resolved_data_dir / "handover" / context.lease.engine_id
    announce = partial(context.engines.set_state, context.seat, "ready", None)
    peering = Peering(context.peer_key, settings.peer_host, directory, announce)
    transfer = VersionTransfer(Executors(database), context.shape.name, peering)
    return Engine(context.shape, backend, replace(stores, transfer=transfer), mailbox, settings), transfer.close


def _start_sampler(
    context: _EngineContext,
    holder: VersionHolder,
    stores: Stores,
    database: Database,
    mailbox: WakeUps,
    settings: Settings,
) -> tuple[SamplerEngine, Callable[[], None]]:
    """Build a dedicated sampler; returns it and a function that closes its resources."""
    executors = Executors(database)
    sources = VersionSources(executors, stores.samplers, stores.checkpoints, stores.versions, context.peer_key)
    fetcher = VersionFetcher(sources, settings.resolved_data_dir / "handover" / context.lease.engine_id)
    budget_bytes = settings.sampler_version_bytes or int(VERSIONS_SHARE * holder.model_budget_bytes)
    seat = context.shape, context.lease.engine_id
    sampler = SamplerEngine(seat, holder, stores, executors, mailbox, fetcher, settings, budget_bytes)
    return sampler, fetcher.close


def open_stores(database: Database, settings: Settings, ownership: Ownership, tracing: Tracing | None = None) -> Stores:
    return Stores(
        futures=Futures(database),
        models=Models(database),
        samplers=SamplingSessions(database),
        checkpoints=Checkpoints(database, open_directories(settings, "checkpoints"), settings.keep_checkpoints),
        versions=open_directories(settings, "versions"),
        snapshots=open_directories(settings, "snapshots"),
        custom_losses=CustomLosses(database),
        ownership=ownership,
        records=Records(database, SampleLimits(settings.stored_samples_of_run, settings.stored_samples)),
        profiles=Profiles(database),
        tracing=tracing or Tracing(),
    )


def _options(settings: Settings, rank_key: str = "") -> dict[str, str]:
    if settings.backend == "fake":
        return {}
    if settings.engine_threads:
        import torch

        torch.set_num_threads(settings.engine_threads)
    if settings.profile and settings.resolved_backend == "sharded":
        raise SettingsError("profile is for an engine on one device; leave it out, or the degrees of parallelism")
    deterministic = "on" if settings.deterministic else "off"
    options = {"device": settings.device, "dtype": settings.dtype, "quantize": settings.quantize}
    options |= {**_parallel_options(settings), "rank_key": rank_key} if settings.resolved_backend == "sharded" else {}
    for name in ("memory_budget", "kv_cache_bytes", "sampler_sequences", "sampler_step_tokens"):
        if value := int(getattr(settings, name)):
            options[name] = str(value)
    if settings.profile:
        options["profile"] = str(settings.profile.expanduser().resolve())
    return {**options, "deterministic": deterministic}


def _parallel_options(settings: Settings) -> dict[str, str]:
    return {
        **{name: str(getattr(settings, name) or 1) for name in DEGREES},
        "shard_base": "on" if settings.shard_base else "off",
        "rank_timeout_s": str(settings.rank_timeout_s),
        "machines": str(settings.machines),
        "rank_address": f"{settings.peer_host}:{settings.rank_port}",
        "rank_address_file": str(settings.resolved_data_dir / RANK_ADDRESS_FILE),
    }


def _prepare_stop(stopping: threading.Event, engine: Engine | SamplerEngine, context: _EngineContext) -> None:
    """Clear the journal when this process is to stop: it may be killed in a long step, which is no request's fault. A
    sampler that finishes its samples gets no new ones.
    """
    stopping.wait()
    engine.quarantine.clear()
    if isinstance(engine, SamplerEngine):
        with contextlib.suppress(SQLAlchemyError):
            context.engines.set_state(context.seat, "stopping")


def _watch_files(database: Database, stopping: threading.Event) -> None:
    """Stop the engine if its database was removed: its results cannot be settled."""
    while not stopping.wait(FILES_POLL_S):
        try:
            database.check_files()
        except DatabaseMovedError as error:
            log.critical("the database is lost; this engine stops", error=str(error))
            stopping.set()


def _report_lock_conflict(engines: Engines, seat: Seat, lease: Lease, data_dir: Path) -> None:
    with contextlib.suppress(SQLAlchemyError):
        if engines.is_taken(seat, lease):
            log.error(
                "another process holds this engine's lock: its data directory is a copy of this one; stop one of the "
                "two, remove the file from its data directory, and start it again",
                engine_id=lease.engine_id,
                file=str(data_dir / HOLDER),
            )


def _redirect_output(path: str) -> None:
    """Redirect standard output and standard error to this file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def _watch_parent(stopping: threading.Event) -> None:
    # Not sys.stdin: this thread would hold its lock when the interpreter exits, which aborts the process.
    while os.read(0, 4096):
        pass
    stopping.set()


if __name__ == "__main__":
    sys.exit(main())
