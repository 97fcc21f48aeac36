"""The engine process: `python -m tinsmith.engine`, started by the supervisor.

Reads one line of JSON from standard input (`EngineSpec`) and works until SIGTERM, or until standard input closes:
when the server dies, however it dies, its engines follow. Settings come by pipe, since a command line can be read
by everyone on the machine. Exit status 3 means that the model cannot be served and a restart would not help; 4 that
this engine was taken for dead.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith import backends
from tinsmith.backends import Backend
from tinsmith.base_models import read_shape
from tinsmith.cluster.early import EARLY
from tinsmith.cluster.engines import (
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
from tinsmith.cluster.in_flight_journal import left_behind, note_path
from tinsmith.cluster.ownership import Ownership
from tinsmith.db.database import FILES_POLL_S, Database, DatabaseMovedError
from tinsmith.db.pg_notify import open_mailbox
from tinsmith.db.wakeups import WakeUps, engine_mailbox
from tinsmith.engine.external import open_backend
from tinsmith.engine.fetching import Fetcher, Places
from tinsmith.engine.fitting import check_fit
from tinsmith.engine.handing import Handing, Peering
from tinsmith.engine.loop import Engine, Nouns
from tinsmith.engine.sampler_loop import SamplerEngine
from tinsmith.engine.telemetry import Records
from tinsmith.engine.versions import SHARE_OF_ROOM
from tinsmith.errors import SettingsError
from tinsmith.runtime import failpoints
from tinsmith.runtime.background import kept_thread
from tinsmith.settings import Settings
from tinsmith.storage.directories import claim, open_directories
from tinsmith.store.checkpoints import Checkpoints
from tinsmith.store.custom_losses import CustomLosses
from tinsmith.store.futures import Futures
from tinsmith.store.models import Models
from tinsmith.store.sampling_sessions import SamplingSessions
from tinsmith.telemetry.logs import configure_logs
from tinsmith.telemetry.tracing import NoTracing, Tracing, open_tracing
from tinsmith.types import ModelShape

log = structlog.get_logger()


def main() -> int:
    early = EARLY in sys.argv
    if early:
        backends.preload()
    line = sys.stdin.readline()
    if not line:
        return 0  # the server ended before it had a use for us
    spec = json.loads(line)
    if early:
        _write_to(spec["log"])
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
    shape = read_shape(spec["name"], Path(spec["path"]))
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda _signal, _frame: stopping.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server tells us
    threading.Thread(target=_watch_parent, args=(stopping,), daemon=True).start()
    seat = Seat(shape.name, spec["kind"], spec["index"])
    # Connections of its own: a lease is renewed in the middle of the engine's transactions, too.
    leases = Database(settings.resolved_database_url, exists=True)
    engines = Engines(leases, holder_of(settings.resolved_data_dir))
    engine_id = engines.id_of(seat)
    # A predecessor whose server was killed may still be finishing its step: two engines would apply requests twice.
    lock = claim(settings.resolved_data_dir / f"{engine_id}.lock", wait=True)
    assert lock is not None
    lease = engines.take(seat, settings.engine_lease_s, left_behind(note_path(settings.resolved_data_dir, engine_id)))
    renewal = Renewal(engines, lease, settings.engine_lease_s, stopping.set)
    try:
        status = _serve(_Place(shape, seat, engines, lease, bytes.fromhex(spec["peer_key"])), settings, stopping)
    except LeaseLostError:
        status = EXIT_LEASE_LOST
    finally:
        renewal.close()
        _tell_of_another(engines, seat, lease, settings.resolved_data_dir)
        leases.close()
        lock.close()
    if renewal.lost or status == EXIT_LEASE_LOST:
        log.error("this engine was taken for dead; what it had not settled is others' now", epoch=lease.epoch)
        return EXIT_LEASE_LOST
    return status


@dataclass(frozen=True, slots=True)
class _Place:
    """What this process is among the others."""

    shape: ModelShape
    seat: Seat
    engines: Engines
    lease: Lease
    peer_key: bytes


def _serve(place: _Place, settings: Settings, stopping: threading.Event) -> int:
    shape, seat, engines = place.shape, place.seat, place.engines
    try:
        check_fit(settings, shape)
        trains = seat.kind != SAMPLER
        backend = open_backend(settings, shape, place.lease.engine_id, _options(settings), trains=trains)
        # Building the sampler now keeps its cost out of the first request.
        _ = backend.sampler
    except SettingsError as error:
        engines.release(seat, "failed", str(error))
        log.error("the model cannot be served", base_model=shape.name, error=str(error))
        return EXIT_UNUSABLE_MODEL
    # What was computed is not given up because another process holds the database.
    database = Database(settings.resolved_database_url, fence(place.lease), patience_s=math.inf, exists=True)
    engine_id = place.lease.engine_id
    mailbox = open_mailbox(settings.resolved_database_url, engine_mailbox(shape.name, engine_id))
    tracing = open_tracing(settings.otlp_endpoint, "engine", {"tinsmith.base_model": shape.name})
    ownership = Ownership(database, shape.name, engine_id, settings.rebalance_idle_s)
    nouns = open_nouns(database, settings, ownership, tracing)
    engine, close = (_engine if trains else _sampler)(place, backend, nouns, database, mailbox, settings)
    database.time_use(engine.meters.database_used)
    threading.Thread(target=_told_to_stop, args=(stopping, engine, place), daemon=True).start()
    # What was loaded stays: to look for garbage in it takes 0.1 to 0.3 s each time, while somebody waits.
    gc.freeze()
    kept_thread("database_files", partial(_watch_files, database, stopping), stopping.wait)
    engines.set_state(seat, "ready")
    log.info("engine ready", base_model=shape.name)
    try:
        engine.run(stopping.is_set)
    finally:
        close()
        mailbox.close()
        tracing.close()
        with contextlib.suppress(SQLAlchemyError):  # the supervisor releases what this engine cannot
            engines.release(seat, "stopped")
        database.close()
    return 0


def _engine(
    place: _Place, backend: Backend, nouns: Nouns, database: Database, mailbox: WakeUps, settings: Settings
) -> tuple[Engine, Callable[[], None]]:
    """An engine, and how to close what it has open."""
    directory = settings.resolved_data_dir / "handover" / place.lease.engine_id
    announce = partial(place.engines.set_state, place.seat, "ready", None)
    peering = Peering(place.peer_key, settings.peer_host, directory, announce)
    handing = Handing(Executors(database), place.shape.name, peering)
    return Engine(place.shape, backend, replace(nouns, handing=handing), mailbox, settings), handing.close


def _sampler(
    place: _Place, backend: Backend, nouns: Nouns, database: Database, mailbox: WakeUps, settings: Settings
) -> tuple[SamplerEngine, Callable[[], None]]:
    """The same for a dedicated sampler."""
    executors = Executors(database)
    places = Places(executors, nouns.samplers, nouns.checkpoints, nouns.versions, place.peer_key)
    fetcher = Fetcher(places, settings.resolved_data_dir / "handover" / place.lease.engine_id)
    budget_bytes = settings.sampler_version_bytes or int(SHARE_OF_ROOM * backend.room_bytes)
    seat = place.shape.name, place.lease.engine_id
    sampler = SamplerEngine(seat, backend, nouns, executors, mailbox, fetcher, settings, budget_bytes)
    return sampler, fetcher.close


def open_nouns(database: Database, settings: Settings, ownership: Ownership, tracing: Tracing | None = None) -> Nouns:
    return Nouns(
        futures=Futures(database),
        models=Models(database),
        samplers=SamplingSessions(database),
        checkpoints=Checkpoints(database, open_directories(settings, "checkpoints")),
        versions=open_directories(settings, "versions"),
        snapshots=open_directories(settings, "snapshots"),
        custom_losses=CustomLosses(database),
        ownership=ownership,
        records=Records(database, settings.kept_samples),
        tracing=tracing or NoTracing(),
    )


def _options(settings: Settings) -> dict[str, str]:
    if settings.backend == "fake":
        return {}
    if settings.engine_threads:
        import torch

        torch.set_num_threads(settings.engine_threads)
    deterministic = "on" if settings.deterministic else "off"
    given = {"device": settings.device, "dtype": settings.dtype, "quantize": settings.quantize}
    given |= _degrees(settings) if settings.resolved_backend == "sharded" else {}
    if settings.memory_budget:
        given["memory_budget"] = str(int(settings.memory_budget))
    if not settings.cuda_graphs:
        given["cuda_graphs"] = "off"
    return {**given, "deterministic": deterministic}


def _degrees(settings: Settings) -> dict[str, str]:
    return {
        "data_parallel": str(settings.data_parallel),
        "tensor_parallel": str(settings.tensor_parallel),
        "shard_base": "on" if settings.shard_base else "off",
        "rank_timeout_s": str(settings.rank_timeout_s),
    }


def _told_to_stop(stopping: threading.Event, engine: Engine | SamplerEngine, place: _Place) -> None:
    """A step that is longer than the patience of whoever stops us is no reason to suspect its requests. A sampler that
    finishes what it has begun gets nothing more.
    """
    stopping.wait()
    engine.pardon()
    if isinstance(engine, SamplerEngine):
        with contextlib.suppress(SQLAlchemyError):
            place.engines.set_state(place.seat, "stopping")


def _watch_files(database: Database, stopping: threading.Event) -> None:
    """An engine whose database was taken away ends: what it computes cannot be settled."""
    while not stopping.wait(FILES_POLL_S):
        try:
            database.check_files()
        except DatabaseMovedError as error:
            log.critical("the database is gone; this engine stops", error=str(error))
            stopping.set()


def _tell_of_another(engines: Engines, seat: Seat, lease: Lease, data_dir: Path) -> None:
    with contextlib.suppress(SQLAlchemyError):
        if engines.is_taken(seat, lease):
            log.error(
                "another process sits on this engine's seat: its data directory is a copy of this one; stop one of the "
                "two, remove the file from its data directory, and start it again",
                engine_id=lease.engine_id,
                file=str(data_dir / HOLDER),
            )


def _write_to(path: str) -> None:
    """Say from now on there what goes to standard output and standard error."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def _watch_parent(stopping: threading.Event) -> None:
    # Not sys.stdin: its lock would be held by this thread when the interpreter ends, which aborts the process.
    while os.read(0, 4096):
        pass
    stopping.set()


if __name__ == "__main__":
    sys.exit(main())
