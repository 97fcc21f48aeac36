"""The janitor: sessions it closes, models it unloads, files it deletes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import pytest
import sqlalchemy as sa
from prometheus_client.parser import text_string_to_metric_families

from support.http_harness import Harness
from tinsmith.api.services import Services
from tinsmith.cluster.engines import Engines
from tinsmith.db.database import Database, now
from tinsmith.db.schema import AUDIT, CHECKPOINTS, CUSTOM_LOSSES, FUTURES, MODELS, SEQUENCES, SESSIONS
from tinsmith.errors import NotFoundError
from tinsmith.runtime.clocks import WatchedClock
from tinsmith.server import janitor as janitor_module
from tinsmith.server.janitor import UNREFERENCED_AGE_S, Janitor
from tinsmith.storage.directories import Directories
from tinsmith.store import custom_losses, recorded_sequences
from tinsmith.store.checkpoints import CheckpointRef, NewCheckpoint, completion
from tinsmith.store.custom_losses import NewCustomLoss
from tinsmith.store.futures import NewFuture, Settlement
from tinsmith.store.models import NewModel
from tinsmith.store.sampling_sessions import NewSamplingSession
from tinsmith.store.sessions import NewSession
from tinsmith.store.usage import HOUR_S, Usage
from tinsmith.types import LoraSpec

TENANT = "t"


@dataclass
class Parts:
    """What a sweep works on."""

    db: Database
    services: Services
    engines: Engines
    versions: Directories
    snapshots: Directories


@pytest.fixture
def parts(harness: Harness, tmp_path: Path) -> Parts:
    db = harness.services.futures._db
    directories = (Directories(tmp_path / name) for name in ("versions", "snapshots"))
    return Parts(db, harness.services, Engines(db, "here"), *directories)


def janitor_of(parts: Parts, clock: WatchedClock | None = None, **settings: float) -> Janitor:
    services = replace(parts.services, settings=parts.services.settings.model_copy(update=settings))
    return Janitor(services, parts.engines, parts.versions, parts.snapshots, clock=clock)


def silent_session(parts: Parts, silent_s: float = 400.0) -> str:
    session_id = parts.services.sessions.open(TENANT, NewSession()).session_id
    parts.services.models.create(NewModel(f"{session_id}:train:0", session_id, TENANT, "base", LoraSpec(4)))
    with parts.db.write() as connection:
        update = SESSIONS.update().where(SESSIONS.c.session_id == session_id)
        connection.execute(update.values(last_heartbeat_at=now() - silent_s))
    return session_id


def unloads(parts: Parts) -> list[str]:
    with parts.db.read() as connection:
        return list(connection.scalars(sa.select(FUTURES.c.request_id).where(FUTURES.c.kind == "unload_model")))


def test_a_silent_session_is_closed_and_its_models_are_told_to_unload_once(parts: Parts, tmp_path: Path) -> None:
    silent, lively = silent_session(parts), silent_session(parts, silent_s=1.0)
    janitor = janitor_of(parts)
    for _ in range(3):
        janitor.sweep()
    assert parts.services.sessions.get(TENANT, silent).state == "expired"
    assert parts.services.sessions.get(TENANT, lively).state == "active"
    assert unloads(parts) == [f"{silent}:train:0:unload"]


def test_a_heartbeat_between_looking_and_closing_keeps_the_session(parts: Parts) -> None:
    session_id = silent_session(parts)
    (silent,) = parts.services.sessions.list_silent(300.0)
    parts.services.sessions.heartbeat(TENANT, session_id)
    assert not parts.services.sessions.close(silent.session_id, "no heartbeat", timeout_s=300.0)
    assert parts.services.sessions.get(TENANT, session_id).state == "active"


def test_models_of_a_session_whose_closing_was_cut_short_are_unloaded_by_the_next_sweep(
    parts: Parts, tmp_path: Path
) -> None:
    session_id = silent_session(parts)
    assert parts.services.sessions.close(session_id, "no heartbeat", timeout_s=300.0)  # and then the server died
    janitor_of(parts).sweep()
    assert unloads(parts) == [f"{session_id}:train:0:unload"]


def test_a_negative_timeout_closes_no_session(parts: Parts, tmp_path: Path) -> None:
    session_id = silent_session(parts)
    janitor_of(parts, session_timeout_s=-1.0).sweep()
    assert parts.services.sessions.get(TENANT, session_id).state == "active"


def test_a_negative_sweep_interval_closes_nothing_and_everything_else_is_swept(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = silent_session(parts)
    ref = CheckpointRef(f"{session_id}:train:0", "weights", "old")
    directory, num_bytes = parts.services.checkpoints.files.write(lambda target: None)
    with parts.db.write() as connection:
        for statement in completion(NewCheckpoint(ref, TENANT, "base", LoraSpec(4)), directory, num_bytes):
            connection.execute(statement)
        connection.execute(CHECKPOINTS.update().values(expires_at=now() - 60))
    monkeypatch.setattr(janitor_module, "SWEEP_S", 0.001)
    janitor = janitor_of(parts, session_sweep_s=-1.0)

    async def run() -> None:
        sweeping = asyncio.create_task(janitor.run())
        async with asyncio.timeout(60):
            while parts.services.checkpoints.files.path(directory).exists():
                assert not sweeping.done()
                await asyncio.sleep(0.005)
        sweeping.cancel()

    asyncio.run(run())
    assert parts.services.sessions.get(TENANT, session_id).state == "active"


def test_files_of_ephemeral_versions_go_with_their_session(parts: Parts, tmp_path: Path) -> None:
    directory_by_session: dict[str, str] = {}
    for session_id in (silent_session(parts), silent_session(parts, silent_s=1.0)):
        version_id = f"{session_id}:sample:0"
        parts.services.sampling_sessions.create(
            NewSamplingSession(version_id, session_id, TENANT, "base", version_id=version_id)
        )
        directory, _ = parts.versions.write(lambda target: None)
        parts.services.sampling_sessions.record_files(version_id, directory)
        directory_by_session[session_id] = directory
    janitor_of(parts).sweep()
    closed, lively = directory_by_session.values()
    assert not parts.versions.path(closed).exists()
    assert parts.versions.path(lively).exists()


def test_a_sweep_that_fails_does_not_end_the_sweeps(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    janitor = janitor_of(parts, session_sweep_s=0.001)
    sweeps: list[int] = []

    def sweep() -> None:
        sweeps.append(1)
        raise [sa.exc.OperationalError("", None, Exception("database is locked")), OSError(5, "I/O")][len(sweeps) % 2]

    monkeypatch.setattr(janitor, "sweep", sweep)

    async def run() -> None:
        sweeping = asyncio.create_task(janitor.run())
        while len(sweeps) < 4:
            assert not sweeping.done()
            await asyncio.sleep(0.005)
        sweeping.cancel()

    asyncio.run(run())


def test_a_checkpoints_directory_without_a_row_is_deleted_by_the_first_sweep_that_finds_it_old(
    parts: Parts, tmp_path: Path
) -> None:
    old, fresh = (parts.services.checkpoints.files.write(lambda target: None)[0] for _ in range(2))
    directory = parts.services.checkpoints.files.path(old)
    for path in (*directory.iterdir(), directory):
        os.utime(path, (now() - UNREFERENCED_AGE_S - 60,) * 2)
    janitor = janitor_of(parts)
    janitor.sweep()
    assert [path.name for path in parts.services.checkpoints.files.path("").iterdir()] == [fresh]


def test_an_engines_directory_without_a_row_is_deleted_once_it_is_old(parts: Parts, tmp_path: Path) -> None:
    session_id = silent_session(parts, silent_s=1.0)
    model_id, version_id = f"{session_id}:train:0", f"{session_id}:sample:0"
    parts.services.sampling_sessions.create(
        NewSamplingSession(version_id, session_id, TENANT, "base", version_id=version_id)
    )
    expected: dict[str, set[str]] = {}
    for name, root in (("versions", parts.versions), ("snapshots", parts.snapshots)):
        *referenced, unnamed, fresh = (root.write(lambda target: None)[0] for _ in range(4))
        if name == "versions":
            parts.services.sampling_sessions.record_files(version_id, referenced.pop())
            parts.services.sampling_sessions.record_files(version_id, referenced[0])
        else:
            for seq_id, directory in enumerate(referenced):
                parts.services.models.record_snapshot(model_id, seq_id, directory)
        for path in (*root.path(unnamed).parent.glob("*/*"), *root.path(unnamed).parent.glob("*")):
            if fresh not in str(path):
                os.utime(path, (now() - UNREFERENCED_AGE_S - 60,) * 2)
        expected[name] = {*referenced, fresh}
    janitor_of(parts).sweep()
    for name, names in expected.items():
        assert {path.name for path in (tmp_path / name).iterdir()} == names


def test_a_closed_sessions_usage_outlives_its_results(parts: Parts, tmp_path: Path) -> None:
    session_id = silent_session(parts)
    fields = {"tenant_id": TENANT, "session_id": session_id, "base_model": "base", "kind": "forward", "num_tokens": 7}
    request_id = parts.services.futures.submit(NewFuture("r", body=b"", **fields))  # type: ignore[arg-type]
    parts.services.futures.settle([Settlement(request_id, b"")], {})
    janitor = janitor_of(parts, result_grace_s=0.0)
    for _ in range(2):
        janitor.sweep()
        this_hour = now() // HOUR_S * HOUR_S
        rows = Usage(parts.db).rows(TENANT, this_hour - HOUR_S, this_hour + HOUR_S)
        assert [(row.type, row.quantity) for row in rows] == [("training", 7)]
    with pytest.raises(NotFoundError):
        parts.services.futures.outcome(TENANT, request_id)


def test_the_janitors_actions_are_in_the_audit_log_once(parts: Parts, tmp_path: Path) -> None:
    session_id = silent_session(parts)
    finished = silent_session(parts)
    parts.services.sessions.finish(TENANT, finished, "success")
    new = NewCheckpoint(CheckpointRef("m", "weights", "old"), TENANT, "base", LoraSpec(4), ttl_s=-1.0)
    with parts.db.write() as connection:
        for statement in completion(new, "no-such-directory", 7):
            connection.execute(statement)
        connection.execute(
            AUDIT.insert().values(tenant_id=TENANT, event="old", details={}, created_at=now() - 2 * 86400)
        )
    janitor = janitor_of(parts, audit_retention_days=1.0)
    for _ in range(2):
        janitor.sweep()
    entries = parts.services.audit.entries(TENANT, "all", 0.0, now() + 1)
    events = ("session_expired", "checkpoint_expired")
    assert [(entry.event, entry.details) for entry in entries if entry.event in events] == [
        ("session_expired", {"session_id": session_id, "reason": "no heartbeat for 300 s"}),
        ("checkpoint_expired", {"tinker_path": "tinker://m/weights/old"}),
    ]


def test_recorded_sequences_and_custom_losses_go_when_their_time_is_over(parts: Parts, tmp_path: Path) -> None:
    session_id = silent_session(parts)
    with parts.db.write() as connection:
        connection.execute(custom_losses.insertion(NewCustomLoss("l", session_id, TENANT, "l", b"{}")))
        connection.execute(recorded_sequences.insertion(session_id, "r", 1, [1]))
    janitor_of(parts).sweep()
    assert parts.services.custom_losses.get(session_id, "l") == b"{}"
    with parts.db.write() as connection:
        connection.execute(SEQUENCES.update().values(valid_until=1.0))
        connection.execute(SESSIONS.update().values(closed_at=1.0))
    janitor_of(parts).sweep()
    assert parts.services.custom_losses.get(session_id, "l") == b"{}", "its model is not unloaded yet"
    with parts.db.write() as connection:
        connection.execute(MODELS.update().values(state="unloaded"))
        connection.execute(FUTURES.update().values(state="done", settled_at=1.0))
    janitor_of(parts).sweep()
    with parts.db.read() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(SEQUENCES)) == 0
        assert connection.scalar(sa.select(sa.func.count()).select_from(CUSTOM_LOSSES)) == 0


PART_NAMES = (
    *("clock", "sessions", "models", "samples", "versions", "results", "custom_losses", "sequences", "checkpoints"),
    *("files", "kept_samples", "responses", "exchanges", "engines", "checkpoint_directories", "file_directories"),
    *("version_directories", "snapshot_directories", "audit"),
)


@pytest.mark.extended
def test_a_part_that_raises_keeps_no_other_part_from_running(parts: Parts) -> None:
    for broken, error in zip(PART_NAMES[::4], cycle((OSError("no disk"), ValueError("any other"))), strict=False):
        janitor = janitor_of(parts)
        assert [part.name for part in janitor.parts] == list(PART_NAMES)
        runs: list[str] = []

        def stand_in(name: str, fails: Exception | None, runs: list[str] = runs) -> Callable[[], None]:
            def work() -> None:
                runs.append(name)
                if fails is not None:
                    raise fails

            return work

        for part in janitor.parts:
            part.run, part.period_s = stand_in(part.name, error if part.name == broken else None), 0.0
        for _ in range(3):
            janitor.sweep()
        expected = {name: 1 if name == broken else 3 for name in PART_NAMES}
        assert {name: runs.count(name) for name in PART_NAMES} == expected, "the broken part waits for its back-off"


def test_the_pauses_of_a_broken_part_grow_and_its_failures_are_counted(parts: Parts) -> None:
    janitor = janitor_of(parts)
    broken, sound = janitor.parts[3], janitor.parts[4]

    def fail() -> None:
        raise OSError("no disk")

    broken.run = fail
    pauses = []
    for _ in range(3):
        broken.next_at = 0.0
        janitor.sweep()
        pauses.append(broken.next_at - time.monotonic())
    assert pauses[0] < pauses[1] < pauses[2]
    values = {
        (
            sample.name.removeprefix("tinsmith_janitor_"),
            sample.labels["part"],
            sample.labels.get("outcome"),
        ): sample.value
        for family in text_string_to_metric_families(parts.services.meters.text().decode())
        for sample in family.samples
        if sample.labels.get("part")
    }
    assert values["runs_total", broken.name, "failed"] == values["runs_total", sound.name, "ok"] == 3
    assert ("last_success_seconds", broken.name, None) not in values
    assert values["last_success_seconds", sound.name, None] == pytest.approx(now(), abs=60)
    assert 0 < values["seconds_total", sound.name, None] < 60
    broken.run, broken.next_at = lambda: None, 0.0
    janitor.sweep()
    assert broken.next_at <= time.monotonic(), "after a success it runs with every sweep again"


def test_a_part_with_a_period_runs_once_in_it_and_again_after_an_error(parts: Parts) -> None:
    janitor = janitor_of(parts)
    (part,) = [part for part in janitor.parts if part.name == "file_directories"]
    assert part.period_s == 3600.0
    runs: list[int] = []
    part.run = lambda: runs.append(1)
    for _ in range(2):
        janitor.sweep()
    assert len(runs) == 1 and part.next_at > time.monotonic() + 3000


def test_a_stopped_janitor_ends_after_its_current_part(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor_module, "SWEEP_S", 0.001)
    janitor = janitor_of(parts, session_sweep_s=-1.0)
    started, release, runs = threading.Event(), threading.Event(), list[str]()

    def wait() -> None:
        started.set()
        release.wait(20)

    janitor.parts[0].run = wait
    janitor.parts[1].run = lambda: runs.append("later")

    async def stop() -> float:
        with ThreadPoolExecutor(1) as threads:
            task = asyncio.create_task(janitor.run(threads))
            await asyncio.to_thread(started.wait, 20)
            began = time.monotonic()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            took_s = time.monotonic() - began
            release.set()
        return took_s

    assert asyncio.run(stop()) < 2.0
    assert runs == [], "no part begins after the stop"
