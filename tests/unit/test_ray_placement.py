"""The supervision of processes on a cluster, without Ray: the shell of one process, and the controller. test_ray.py
uses Ray."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from support.databases import fresh_url
from support.raw_client import wait_until_gone
from tinsmith.cli import up
from tinsmith.cluster.ray import shell as shells
from tinsmith.cluster.ray.controller import LOST_S, Controller, QueueDepths, RayProcess
from tinsmith.cluster.ray.scaling import Depths, Fleet, Resources, Role, Rule, parse_counts, parse_resources
from tinsmith.cluster.ray.shell import Shell
from tinsmith.db.database import Database, now
from tinsmith.db.factory import open_database
from tinsmith.db.schema import BATCH_JOBS, FUTURES
from tinsmith.errors import SettingsError
from tinsmith.settings import load, portable

# Only slow machines need this long.
PATIENCE_S = 60.0


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# The shell.

PROCESS = """
    import json, os, signal, sys, threading, time
    given = json.loads(sys.stdin.readline())
    file = os.path.join(given["settings"]["data_dir"], "given.json")
    def gone():
        sys.stdin.read()
        os._exit(1)
    threading.Thread(target=gone, daemon=True).start()
    def drain(*_):
        open(file + ".drained", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, drain)
    with open(file + ".new", "w") as out:
        json.dump(given, out)
    os.rename(file + ".new", file)
    if given["settings"].get("refuse"):
        sys.stderr.write("error: no such model\\n")
        sys.exit(2)
    while True:
        time.sleep(0.05)
"""
COMMAND = (sys.executable, "-c", textwrap.dedent(PROCESS))
SECRET = "postgresql://someone:hunter2@db/tinsmith"


def shell_in(directory: Path, **settings: object) -> Shell:
    all_settings = {"data_dir": str(directory), "database_url": SECRET, **settings}
    return Shell("engine-0", "engine", "print", all_settings, b"key", lambda: "10.0.0.7", COMMAND)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Shell]:
    shell = shell_in(tmp_path)
    eventually((tmp_path / "engine-0" / "given.json").exists)
    yield shell
    shell.drain(0)
    eventually(lambda: shell.state()["state"] == "ended")


def test_a_process_is_given_its_own_settings_on_its_input_alone(running: Shell, tmp_path: Path) -> None:
    process_input = json.loads((tmp_path / "engine-0" / "given.json").read_text())
    own_settings = {"role": "engine", "data_dir": str(tmp_path / "engine-0"), **shells.ALONE, "peer_host": "10.0.0.7"}
    assert process_input == {"settings": {"database_url": SECRET, **own_settings}, "signing_key": b"key".hex()}
    pid = running.state()["pid"]
    visible_bytes = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    assert b"hunter2" not in visible_bytes and b"hunter2" not in (tmp_path / "engine-0" / "process.log").read_bytes()


def test_a_process_that_dies_is_started_again(running: Shell) -> None:
    first = running.state()
    assert first["state"] == "running" and first["restarts"] == 0
    os.kill(first["pid"], signal.SIGKILL)
    eventually(lambda: running.state()["restarts"] == 1 and running.state()["state"] == "running")
    assert running.state()["pid"] not in (None, first["pid"])


def test_a_drained_process_ends_by_itself_and_stays_away(running: Shell, tmp_path: Path) -> None:
    pid = running.state()["pid"]
    running.drain(PATIENCE_S)
    running.drain(0)  # changes nothing: it is being drained
    eventually(lambda: running.state()["state"] == "ended")
    assert (tmp_path / "engine-0" / "given.json.drained").exists()
    wait_until_gone(pid)


def test_one_that_does_not_end_is_killed_when_patience_ends(running: Shell) -> None:
    pid = running.state()["pid"]
    os.kill(pid, signal.SIGSTOP)
    running.drain(0.1)
    eventually(lambda: running.state()["state"] == "ended")
    wait_until_gone(pid)


def test_one_that_refuses_its_settings_is_not_started_again(tmp_path: Path) -> None:
    shell = shell_in(tmp_path, refuse=True)
    eventually(lambda: shell.state()["state"] == "refused")
    assert shell.state()["detail"] == "error: no such model" and shell.state()["restarts"] == 0
    shell.drain()
    eventually(lambda: shell.state()["state"] == "ended")


def test_a_process_ends_with_its_shell(tmp_path: Path) -> None:
    code = f"""
        import sys, time
        from tinsmith.cluster.ray.shell import Shell
        shell = Shell("engine-0", "engine", "", {{"data_dir": {str(tmp_path)!r}}}, b"", None, {COMMAND!r})
        while shell.state()["pid"] is None:
            time.sleep(0.01)
        print(shell.state()["pid"], flush=True)
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        pid = int(keeper.stdout.readline())
        eventually((tmp_path / "engine-0" / "given.json").exists)
        keeper.kill()
        wait_until_gone(pid)
    assert not (tmp_path / "engine-0" / "given.json.drained").exists(), "at once, and not by draining"


def test_a_process_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shells, "FIRST_PAUSE_S", 0.01)
    shell = Shell("engine-0", "engine", "", {"data_dir": str(tmp_path)}, b"", None, ("/no/such/program",))
    eventually(lambda: shell.state()["restarts"] >= 2)
    assert "/no/such/program" in shell.state()["detail"]
    shell.drain()
    eventually(lambda: shell.state()["state"] == "ended")


# The controller.


@dataclass
class FakeCluster:
    """Shells that execute their commands when `settle` is called."""

    processes: dict[str, RayProcess] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    def seats(self) -> list[RayProcess]:
        return list(self.processes.values())

    def start(self, name: str, role: Role, fleet: Fleet) -> None:
        assert name not in self.processes
        self.started.append(name)
        self.processes[name] = RayProcess(name, "running", fleet.fingerprint)

    def drain(self, name: str) -> None:
        self.processes[name] = replace(self.processes[name], state="draining")

    def remove(self, name: str) -> None:
        self.removed.append(name)
        del self.processes[name]

    def settle(self) -> None:
        ended_seats = {
            name: replace(seat, state="ended") for name, seat in self.processes.items() if seat.state == "draining"
        }
        self.processes |= ended_seats


def fleet_of(engines: Rule, settings: str = "") -> Fleet:
    return Fleet({"engine": Role(engines, Resources())}, ("base",), {"database_url": settings})


@dataclass
class Scene:
    fleet: Fleet
    cluster: FakeCluster = field(default_factory=FakeCluster)
    waiting: float = 0.0
    at: float = 0.0
    broken: bool = False

    def __post_init__(self) -> None:
        self.controller = Controller(self.fleet, self.cluster, self._depths, lambda: self.at)

    def _depths(self) -> Depths:
        if self.broken:
            raise OperationalError("SELECT", {}, Exception("gone"))
        return {"engine": {"base": self.waiting}}

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.at += 1
            self.controller.tick()

    def names(self) -> list[str]:
        return sorted(self.cluster.processes)


ONE_TO_THREE = Rule(1, 3, 100, up_after_s=2, down_after_s=5)


def test_missing_processes_are_started_and_a_queue_adds_more() -> None:
    scene = Scene(fleet_of(ONE_TO_THREE))
    scene.tick()
    assert scene.names() == ["engine-0"]
    scene.waiting = 250
    scene.tick(4)
    assert scene.names() == ["engine-0", "engine-1", "engine-2"] == scene.cluster.started
    assert scene.controller.report()["wanted"] == {"engine": 3}


def test_surplus_processes_are_drained_before_removal() -> None:
    scene = Scene(fleet_of(ONE_TO_THREE), waiting=250)
    scene.tick(5)
    scene.waiting = 0
    scene.tick(8)
    assert {name: seat.state for name, seat in scene.cluster.processes.items()} == {
        "engine-0": "running",
        "engine-1": "draining",
        "engine-2": "draining",
    }
    assert scene.cluster.removed == []
    scene.cluster.settle()
    scene.tick()
    assert scene.names() == ["engine-0"]


def test_one_that_is_wanted_again_while_it_drains_comes_back_when_it_has_ended() -> None:
    scene = Scene(fleet_of(ONE_TO_THREE), waiting=250)
    scene.tick(5)
    scene.waiting = 0
    scene.tick(8)
    scene.waiting = 250
    scene.tick(3)
    assert scene.cluster.started == ["engine-0", "engine-1", "engine-2"]
    scene.cluster.settle()
    scene.tick(2)
    assert scene.cluster.started[3:] == ["engine-1", "engine-2"]
    assert {seat.state for seat in scene.cluster.processes.values()} == {"running"}


def test_a_restarted_controller_adopts_running_processes() -> None:
    scene = Scene(fleet_of(ONE_TO_THREE), waiting=250)
    scene.tick(5)
    after = Scene(fleet_of(ONE_TO_THREE), scene.cluster, waiting=250)
    after.tick(10)
    assert scene.cluster.started == ["engine-0", "engine-1", "engine-2"] and scene.cluster.removed == []
    assert {seat.state for seat in scene.cluster.processes.values()} == {"running"}


def test_new_settings_that_are_refused_cost_one_process() -> None:
    scene = Scene(fleet_of(Rule(3, 3, 1)))
    scene.tick()
    new = Scene(fleet_of(Rule(3, 3, 1), "elsewhere"), scene.cluster)
    for _ in range(12):
        new.tick()
        scene.cluster.settle()
        first = scene.cluster.processes.get("engine-0")
        if first is not None and first.fingerprint == new.fleet.fingerprint:
            scene.cluster.processes["engine-0"] = replace(first, state="refused")
    states = {name: seat.state for name, seat in scene.cluster.processes.items()}
    assert states == {"engine-0": "refused", "engine-1": "running", "engine-2": "running"}


def test_new_settings_replace_one_process_at_a_time() -> None:
    scene = Scene(fleet_of(Rule(3, 3, 1)))
    scene.tick()
    new = Scene(fleet_of(Rule(3, 3, 1), "elsewhere"), scene.cluster)
    for _ in range(12):
        new.tick()
        assert sum(seat.state in ("draining", "ended") for seat in scene.cluster.processes.values()) <= 1
        scene.cluster.settle()
    assert {seat.fingerprint for seat in scene.cluster.processes.values()} == {new.fleet.fingerprint}
    assert len(scene.cluster.started) == 6


def test_a_database_that_cannot_be_read_changes_nothing() -> None:
    scene = Scene(fleet_of(ONE_TO_THREE), waiting=250)
    scene.tick(5)
    scene.broken = True
    scene.tick(30)
    assert len(scene.names()) == 3
    del scene.cluster.processes["engine-2"]
    scene.tick()
    assert len(scene.names()) == 3, "and what died is started again all the same"


def test_one_that_is_not_heard_of_is_left_alone_unless_it_is_to_go() -> None:
    scene = Scene(fleet_of(Rule(2, 2, 1)))
    scene.tick()
    scene.cluster.processes["engine-1"] = RayProcess("engine-1", "silent")
    scene.tick(100)
    assert scene.cluster.removed == []
    fewer = Scene(fleet_of(Rule(1, 1, 1)), scene.cluster)
    scene.cluster.drain = lambda _name: None  # type: ignore[method-assign]  nobody hears it
    fewer.tick(int(LOST_S))
    assert scene.cluster.removed == []
    fewer.tick(2)
    assert scene.cluster.removed == ["engine-1"]


# What waits.


def add_future(db: Database, index: int, kind: str, tokens: int, state: str = "pending", base: str = "a") -> None:
    row = {"request_id": f"r{index}", "tenant_id": "t", "session_id": "s", "base_model": base, "kind": kind}
    with db.write() as connection:
        connection.execute(FUTURES.insert(), {**row, "state": state, "num_tokens": tokens, "created_at": now()})


def add_job(db: Database, status: str, sealed: bool, total: int, completed: int) -> None:
    row = {"tenant_id": "t", "name": "", "pool": "local", "priority": 0, "weight": 1.0, "status": status, "spec": {}}
    counts = {"sealed": sealed, "total_batches": total, "completed_batches": completed, "max_failed_rows": 0.0}
    with db.write() as connection:
        insert = BATCH_JOBS.insert()
        connection.execute(insert, {**row, **counts, "cleaned": False, "created_at": now(), "updated_at": now()})


def test_queue_depths_are_by_role_and_base_model(db: Database) -> None:
    add_future(db, 1, "forward_backward", 100)
    add_future(db, 2, "optim_step", 0)
    add_future(db, 3, "sample", 40)
    add_future(db, 4, "sample", 1000, state="done")
    add_future(db, 5, "forward", 7, base="b")
    add_future(db, 6, "forward", 9, base="not served here")
    expected = {"engine": {"a": 101.0, "b": 7.0}, "sampler": {"a": 40.0}, "batch-worker": {"": 0.0}}
    assert QueueDepths(db, ("a", "b"), has_samplers=True).read() == expected
    without_samplers = QueueDepths(db, ("a", "b"), has_samplers=False).read()
    assert without_samplers["engine"] == {"a": 141.0, "b": 7.0} and without_samplers["sampler"] == {}


def test_batches_that_are_not_committed_wait_for_batch_workers(db: Database) -> None:
    add_job(db, "RUNNING", sealed=True, total=10, completed=4)
    add_job(db, "PENDING", sealed=False, total=0, completed=0)
    add_job(db, "SUCCEEDED", sealed=True, total=10, completed=4)
    assert QueueDepths(db, (), has_samplers=False).read()["batch-worker"] == {"": 7.0}


def test_the_queues_are_read_by_an_index(tmp_path: Path) -> None:
    with contextlib.closing(open_database(fresh_url(tmp_path, "sqlite"))) as database:
        plans: list[str] = []

        def explain(connection, cursor, statement, parameters, context, executemany) -> None:
            if statement.startswith("SELECT"):
                cursor.connection.execute("SELECT 1")
                plans.extend(
                    str(row) for row in cursor.connection.execute("EXPLAIN QUERY PLAN " + statement, parameters)
                )

        event.listen(database.engine, "before_cursor_execute", explain)
        QueueDepths(database, ("a",), has_samplers=True).read()
    assert plans and not [plan for plan in plans if "SCAN" in plan and "SCAN CONSTANT" not in plan]


# What is asked for.


@pytest.mark.parametrize(("text", "counts"), [("2", (2, 2)), ("0:4", (0, 4)), ("1:1", (1, 1))])
def test_counts_are_a_number_or_two(text: str, counts: tuple[int, int]) -> None:
    assert parse_counts("--engines", text) == counts


@pytest.mark.parametrize("text", ["", "-1", "3:2", "1:", "a", "1:2:3", "1001"])
def test_other_counts_are_refused_with_the_flag(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--engines is .*MIN:MAX"):
        parse_counts("--engines", text)


def test_resources_are_names_and_amounts() -> None:
    assert parse_resources("--engine-resource", ["big=1", "tpu=0.5"]) == {"big": 1.0, "tpu": 0.5}
    with pytest.raises(SettingsError, match="--engine-resource is 'big'"):
        parse_resources("--engine-resource", ["big"])


def test_settings_travel_with_their_secrets_and_are_not_shown() -> None:
    settings = load({"signing_secret": "s" * 32, "database_url": SECRET, "storage_dir": "s3://bucket/here"})
    fleet = Fleet({}, (), portable(settings), b"key")
    assert fleet.settings["signing_secret"] == "s" * 32 and fleet.settings["storage_dir"] == "s3://bucket/here"
    assert "hunter2" not in repr(fleet) and "sss" not in repr(fleet)
    assert load(dict(fleet.settings)).signing_secret.get_secret_value() == "s" * 32


def test_places_of_one_directory_stay_where_they_are_when_each_process_has_its_own(tmp_path: Path) -> None:
    settings = portable(load({"data_dir": tmp_path}))
    moved = load({**settings, "data_dir": tmp_path / "engine-0"})
    assert moved.resolved_database_url == f"sqlite:///{tmp_path / 'tinsmith.db'}"
    assert moved.storage_location("checkpoints") == str(tmp_path / "checkpoints")


def test_a_token_is_made_in_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    path = up._make_token(tmp_path / "new" / "data")
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert len(path.read_text()) == 64
