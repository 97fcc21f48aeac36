"""Assignment of samples to samplers, on both databases: visibility, reassignment after a death, and routing of
cancellations."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner, Result

from support.databases import fresh_url
from tinsmith.cli import main as cli
from tinsmith.cluster.engines import Engines, LeaseLostError, Seat, fence
from tinsmith.cluster.executors import Dispatch, Executors
from tinsmith.cluster.ownership import Ownership
from tinsmith.cluster.routing import FRESH_S
from tinsmith.db.factory import open_database
from tinsmith.db.schema import ENGINES, FUTURES
from tinsmith.errors import SettingsError
from tinsmith.store.futures import Futures, NewFuture, Settlement
from tinsmith.store.models import Models, NewModel
from tinsmith.store.sampling_sessions import NewSamplingSession, SamplingSessions
from tinsmith.types import LoraSpec, Sample, SamplingParams

BASE = "local/tiny"
SESSION = "s:sample:0"


class Rows:
    """A database with samplers of one holder."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.db = open_database(url)
        self.engines = Engines(self.db, "here")
        self.executors = Executors(self.db)
        self.futures = Futures(self.db)
        SamplingSessions(self.db).create(NewSamplingSession(SESSION, "s", "alice", BASE))

    def sampler(self, index: int, state: str = "ready") -> str:
        seat = Seat(BASE, "sampler", index)
        lease = self.engines.take(seat, 60)
        self.engines.set_state(seat, state)
        return lease.engine_id

    def sample(self, seq_id: int, executor: str | None, session: str = SESSION, tokens: int = 10) -> str:
        name = f"{session}:{seq_id}"
        new = NewFuture(name, "alice", session.partition(":")[0], BASE, "sample", b"{}", num_tokens=tokens)
        return self.futures.submit(replace(new, sampling_session_id=session, seq_id=seq_id, executor=executor))

    def owners(self) -> dict[str, str | None]:
        with self.db.read() as connection:
            query = sa.select(FUTURES.c.request_id, FUTURES.c.executor).where(FUTURES.c.state == "pending")
            return dict(connection.execute(query).all())  # type: ignore[arg-type]

    def lapse(self, engine_id: str) -> None:
        with self.db.write() as connection:
            connection.execute(ENGINES.update().where(ENGINES.c.engine_id == engine_id).values(lease_expires_at=1.0))


@pytest.fixture
def rows(tmp_path: Path, database_kind: str) -> Iterator[Rows]:
    database_rows = Rows(fresh_url(tmp_path, database_kind))
    yield database_rows
    database_rows.db.close()


def test_a_drained_sampler_keeps_its_samples_and_is_given_no_more_until_it_is_woken(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler_0, sampler_1 = rows.sampler(0), rows.sampler(1)
    rows.lapse(lapsed := rows.sampler(2))
    request_id = rows.sample(1, sampler_0)
    monkeypatch.setenv("TINSMITH_DATABASE_URL", rows.url)

    def run(*words: str) -> Result:
        return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ("samplers", *words))

    listed = {row["sampler"]: row for row in json.loads(run("list", "--json").stdout)}
    states = {name: (row["state"], row["samples"]) for name, row in listed.items()}
    assert states == {sampler_0: ("ready", 1), sampler_1: ("ready", 0), lapsed: ("silent", 0)}
    assert (
        listed[sampler_0]["base_model"] == BASE
        and listed[sampler_0]["holder"] == "here"
        and listed[sampler_0]["pid"] == os.getpid()
    )
    assert "samples that it has: 1" in run("drain", sampler_0).stdout
    assert set(rows.executors.live(BASE)) == {sampler_1} and rows.owners() == {request_id: sampler_0}
    assert "draining" in run("list").stdout
    for words, problem in (
        (("drain", sampler_0), "is draining; to drain it, it must be ready"),
        (("wake", sampler_1), "is ready; to wake it, it must be draining or sleeping or asleep"),
        (("drain", lapsed), "is silent; to drain it, it must be ready"),
        (("drain", "x"), "there is no sampler 'x'; known: "),
        (("sleep", sampler_0), "cannot sleep: it has just started"),
    ):
        refused = run(*words)
        assert isinstance(refused.exception, SettingsError) and problem in str(refused.exception)
    assert json.loads(run("wake", sampler_0, "--json").stdout)["state"] == "ready"
    assert set(rows.executors.live(BASE)) == {sampler_0, sampler_1}
    versions = [{"version": "tinker://a/weights/b", "bytes": 7}]
    report = {"engine": "vLLM", "address": "http://there:1", "cannot_sleep": "", "versions": versions}
    rows.executors.report(sampler_0, report)
    assert json.loads(run("show", sampler_0, "--json").stdout).items() >= report.items()
    assert "http://there:1" in (text := run("show", sampler_0).stdout) and "tinker://a/weights/b: 7 B" in text
    assert json.loads(run("sleep", sampler_0, "--json").stdout)["state"] == "sleeping"
    assert set(rows.executors.live(BASE)) == {sampler_1}
    assert (
        not rows.executors.change_state(sampler_0, "asleep", "ready")
        and rows.executors.state_of(sampler_0) == "sleeping"
    )
    assert json.loads(run("wake", sampler_0, "--json").stdout)["state"] == "waking"
    rows.sampler(0)  # its process starts again, and has not reported yet
    assert json.loads(run("show", sampler_0, "--json").stdout).items() >= {"engine": None, "versions": []}.items()


def test_samplers_that_are_ready_and_alive_are_candidates_with_what_waits_for_them(rows: Rows) -> None:
    sampler_0, sampler_1 = rows.sampler(0), rows.sampler(1)
    rows.sampler(2, state="loading")
    lapsed = rows.sampler(3)
    rows.lapse(lapsed)
    rows.engines.take(Seat(BASE), 60)
    rows.engines.set_state(Seat(BASE), "ready")
    rows.sample(1, sampler_0, tokens=30)
    rows.sample(2, sampler_0, tokens=12)
    rows.futures.settle([Settlement(rows.sample(3, sampler_1), body=b"{}")], {})
    assert rows.executors.live(BASE) == {sampler_0: 42, sampler_1: 0}
    assert rows.executors.live("local/other") == {}


def test_a_sampler_sees_what_it_was_given_and_nothing_else(rows: Rows) -> None:
    sampler_0, sampler_1 = rows.sampler(0), rows.sampler(1)
    request_ids = [rows.sample(seq_id, sampler_0) for seq_id in range(3)]
    theirs, nobodys = rows.sample(3, sampler_1), rows.sample(4, None)
    incoming = rows.executors.incoming(BASE, sampler_0, 0)
    assert [request.request_id for request in incoming] == request_ids
    assert [later.request_id for later in rows.executors.incoming(BASE, sampler_0, incoming[0].arrival)] == request_ids[
        1:
    ]
    assert rows.executors.pending_ids(BASE, sampler_0) == set(request_ids)
    assert [
        request.request_id for request in rows.executors.fetch_by_ids(sampler_0, [*request_ids[:1], theirs, nobodys])
    ] == request_ids[:1]
    engine = Ownership(rows.db, BASE, "engine-0")
    assert [arrival.request.request_id for arrival in engine.incoming(0)] == [nobodys], "engines leave theirs alone"


def test_a_dead_samplers_requests_move_to_the_others_and_it_settles_none(rows: Rows) -> None:
    sampler_0, sampler_1, dead = rows.sampler(0), rows.sampler(1), rows.sampler(2)
    lease = rows.engines.take(Seat(BASE, "sampler", 2), 60)
    names = [rows.sample(seq_id, dead) for seq_id in range(20)]
    assert Ownership(rows.db, BASE, sampler_0).free_expired() == [], "its lease has not expired"
    rows.lapse(dead)
    assert Ownership(rows.db, BASE, sampler_0).free_expired() == [dead]
    owners = rows.owners()
    assert sorted(owners) == sorted(names)
    assert Counter(owners.values()) == {sampler_0: 10, sampler_1: 10}
    assert {request.request_id for request in rows.executors.incoming(BASE, sampler_0, 0)} == {
        name for name, owner in owners.items() if owner == sampler_0
    }
    late = open_database(rows.url, fence(lease))
    with pytest.raises(LeaseLostError):
        Futures(late).settle([Settlement(names[0], body=b"stale")], {})
    late.close()
    assert rows.futures.outcome("alice", names[0]) is None


def test_late_assignments_to_a_freed_sampler_are_freed_again(rows: Rows) -> None:
    sampler_0, dead = rows.sampler(0), rows.sampler(1)
    rows.engines.release(Seat(BASE, "sampler", 1), "restarting")
    late = rows.sample(1, dead)  # by a server whose view was half a second old
    Ownership(rows.db, BASE, sampler_0).free_expired()
    assert rows.owners() == {late: sampler_0}


def test_without_another_sampler_the_engines_take_over(rows: Rows) -> None:
    dead = rows.sampler(0)
    name = rows.sample(1, dead)
    rows.engines.release(Seat(BASE, "sampler", 0), "stopped")
    assert rows.owners() == {name: None}
    engine = Ownership(rows.db, BASE, "engine-0")
    assert engine.claim([name]) == {name}


def test_an_engines_requests_are_not_assigned_to_samplers(rows: Rows) -> None:
    rows.sampler(0)
    lease = rows.engines.take(Seat(BASE), 60)
    name = rows.sample(1, lease.engine_id)
    rows.engines.release(Seat(BASE), "restarting")
    assert rows.owners() == {name: None}


@pytest.mark.parametrize("to_samplers", [True, False])
def test_a_sampler_reassigns_requests_that_it_has_not_begun(rows: Rows, to_samplers: bool) -> None:
    sampler_0, sampler_1 = rows.sampler(0), rows.sampler(1)
    names = [rows.sample(seq_id, sampler_0) for seq_id in range(3)]
    theirs = rows.sample(3, sampler_1)
    rows.executors.reassign(BASE, sampler_0, [*names[:2], theirs], to_samplers=to_samplers)
    expected = sampler_1 if to_samplers else None
    assert rows.owners() == {names[0]: expected, names[1]: expected, names[2]: sampler_0, theirs: sampler_1}


def test_a_cancellation_follows_its_sample(rows: Rows) -> None:
    sampler_0, sampler_1, sampler_2 = rows.sampler(0), rows.sampler(1), rows.sampler(2)
    names = [rows.sample(seq_id, sampler_0) for seq_id in range(5)]
    for name in names:
        rows.futures.cancel("alice", name, "enough")
    cancels = {name: f"{name}:cancel" for name in names}
    assert {owner for name, owner in rows.owners().items() if ":cancel" in name} == {sampler_0}
    rows.engines.release(Seat(BASE, "sampler", 0), "stopped")
    owners = rows.owners()
    for name, beginning in cancels.items():
        (cancel,) = (request for request in owners if request.startswith(beginning))
        assert owners[cancel] == owners[name] and owners[name] in (sampler_1, sampler_2)


def test_a_request_to_cancel_that_came_too_late_follows_its_sample(rows: Rows) -> None:
    sampler_0, sampler_1 = rows.sampler(0), rows.sampler(1)
    name = rows.sample(1, sampler_0)
    rows.futures.cancel("alice", name, "enough")
    (cancel,) = (request for request in rows.owners() if ":cancel" in request)
    late = Ownership(rows.db, BASE, sampler_0)
    assert not late.forward(cancel, name), "it is this one's"
    rows.executors.reassign(BASE, sampler_0, [name], to_samplers=True)
    assert late.forward(cancel, name)
    assert rows.owners() == {name: sampler_1, cancel: sampler_1}
    rows.futures.settle([Settlement(name, body=b"{}")], {})
    assert not late.forward(cancel, name)
    assert not late.forward(cancel, SESSION), "that of a whole session is sent again while any of it waits"


def test_a_session_that_is_over_is_cancelled_with_each_of_its_executors(rows: Rows) -> None:
    from tinsmith.store.sessions import NewSession, Sessions

    sessions = Sessions(rows.db)
    opened = sessions.open("alice", NewSession(), "over")
    SamplingSessions(rows.db).create(NewSamplingSession("over:sample:0", opened.session_id, "alice", BASE))
    sampler_0, sampler_1 = rows.sampler(0), rows.sampler(1)
    for seq_id, executor in enumerate([sampler_0, sampler_0, sampler_1, None]):
        rows.sample(seq_id, executor, "over:sample:0")
    sessions.close("over", "gone")
    rows.futures.cancel_of_closed_sessions()
    rows.futures.cancel_of_closed_sessions()
    cancels = [owner for name, owner in rows.owners().items() if ":cancel" in name]
    assert sorted(map(str, cancels)) == sorted(map(str, [sampler_0, sampler_1, None]))


def test_the_owner_of_a_run_is_where_its_versions_are(rows: Rows) -> None:
    lease = rows.engines.take(Seat(BASE), 60)
    Models(rows.db).create(NewModel("s:train:0", "s", "alice", BASE, LoraSpec(4), engine_id=lease.engine_id))
    assert rows.executors.owner_address("s:train:0") is None
    rows.engines.set_state(Seat(BASE), "ready", None, "10.0.0.1:99")
    assert rows.executors.owner_address("s:train:0") == "10.0.0.1:99"
    rows.lapse(lease.engine_id)
    assert rows.executors.owner_address("s:train:0") is None


def request_and_sample(seq_id: int, prompt: list[int]) -> tuple[NewFuture, Sample]:
    new = NewFuture(f"{SESSION}:{seq_id}", "alice", "s", BASE, "sample", b"{}", num_tokens=100)
    return new, Sample(new.request_id, None, np.array(prompt, np.int32), 1, SamplingParams())


def test_samples_are_given_away_before_they_are_stored(rows: Rows) -> None:
    dispatch = Dispatch(rows.executors)
    new, sample = request_and_sample(1, [1, 2, 3])
    assert dispatch.assign(new, sample).executor is None, "there is no sampler"
    sampler_0, sampler_1 = rows.sampler(0), rows.sampler(1)
    dispatch = Dispatch(rows.executors)
    chosen = {dispatch.assign(new, sample).executor for _ in range(5)}
    assert len(chosen) == 1 and chosen <= {sampler_0, sampler_1}, "the same prompt goes to the same sampler"
    spread = {dispatch.assign(*request_and_sample(n, [n])).executor for n in range(40)}
    assert spread == {sampler_0, sampler_1}
    assert dispatch.assign(new, sample, inflight=True).executor is None


def test_a_view_is_asked_for_twice_a_second_at_most_and_counts_what_was_given_out(rows: Rows, monkeypatch) -> None:
    sampler_0, sampler_1 = rows.sampler(0), rows.sampler(1)
    looks: list[str] = []
    live = rows.executors.live
    monkeypatch.setattr(rows.executors, "live", lambda base: looks.append(base) or live(base))
    clock = [100.0]
    monkeypatch.setattr("tinsmith.cluster.routing.time.monotonic", lambda: clock[0])
    dispatch = Dispatch(rows.executors)
    new, sample = request_and_sample(1, [1, 2, 3])
    counts = Counter(dispatch.assign(replace(new, num_tokens=5000), sample).executor for _ in range(10))
    assert looks == [BASE]
    assert set(counts) == {sampler_0, sampler_1}, (
        "one hot prompt does not stay with one sampler however much waits there"
    )
    clock[0] += FRESH_S
    dispatch.assign(new, sample)
    assert looks == [BASE, BASE]
