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
from tinsmith.db.database import Database
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
        self.db = Database(url)
        self.engines = Engines(self.db, "here")
        self.executors = Executors(self.db)
        self.futures = Futures(self.db)
        SamplingSessions(self.db).create(NewSamplingSession(SESSION, "s", "alice", BASE))

    def sampler(self, index: int, state: str = "ready") -> str:
        seat = Seat(BASE, "sampler", index)
        lease = self.engines.take(seat, 60)
        self.engines.set_state(seat, state)
        return lease.engine_id

    def sample(self, number: int, executor: str | None, session: str = SESSION, tokens: int = 10) -> str:
        name = f"{session}:{number}"
        new = NewFuture(name, "alice", session.partition(":")[0], BASE, "sample", b"{}", num_tokens=tokens)
        return self.futures.submit(replace(new, sampling_session_id=session, seq_id=number, executor=executor))

    def owners(self) -> dict[str, str | None]:
        with self.db.read() as connection:
            query = sa.select(FUTURES.c.request_id, FUTURES.c.executor).where(FUTURES.c.state == "pending")
            return dict(connection.execute(query).all())  # type: ignore[arg-type]

    def lapse(self, engine_id: str) -> None:
        with self.db.write() as connection:
            connection.execute(ENGINES.update().where(ENGINES.c.engine_id == engine_id).values(lease_expires_at=1.0))


@pytest.fixture
def rows(tmp_path: Path, database_kind: str) -> Iterator[Rows]:
    made = Rows(fresh_url(tmp_path, database_kind))
    yield made
    made.db.close()


def test_a_drained_sampler_keeps_its_samples_and_is_given_no_more_until_it_is_woken(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = rows.sampler(0), rows.sampler(1)
    rows.lapse(lapsed := rows.sampler(2))
    held = rows.sample(1, one)
    monkeypatch.setenv("TINSMITH_DATABASE_URL", rows.url)

    def run(*words: str) -> Result:
        return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ("samplers", *words))

    listed = {row["sampler"]: row for row in json.loads(run("list", "--json").stdout)}
    states = {name: (row["state"], row["samples"]) for name, row in listed.items()}
    assert states == {one: ("ready", 1), two: ("ready", 0), lapsed: ("silent", 0)}
    assert listed[one]["base_model"] == BASE and listed[one]["holder"] == "here" and listed[one]["pid"] == os.getpid()
    assert "samples that it has: 1" in run("drain", one).stdout
    assert set(rows.executors.live(BASE)) == {two} and rows.owners() == {held: one}
    assert "draining" in run("list").stdout
    for words, problem in (
        (("drain", one), "is draining; to drain it, it must be ready"),
        (("wake", two), "is ready; to wake it, it must be draining or sleeping or asleep"),
        (("drain", lapsed), "is silent; to drain it, it must be ready"),
        (("drain", "x"), "there is no sampler 'x'; known: "),
        (("sleep", one), "cannot sleep: it has just started"),
    ):
        refused = run(*words)
        assert isinstance(refused.exception, SettingsError) and problem in str(refused.exception)
    assert json.loads(run("wake", one, "--json").stdout)["state"] == "ready"
    assert set(rows.executors.live(BASE)) == {one, two}
    versions = [{"version": "tinker://a/weights/b", "bytes": 7}]
    facts = {"engine": "vLLM", "address": "http://there:1", "cannot_sleep": "", "versions": versions}
    rows.executors.report(one, facts)
    assert json.loads(run("show", one, "--json").stdout).items() >= facts.items()
    assert "http://there:1" in (shown := run("show", one).stdout) and "tinker://a/weights/b: 7 bytes" in shown
    assert json.loads(run("sleep", one, "--json").stdout)["state"] == "sleeping"
    assert set(rows.executors.live(BASE)) == {two}
    assert not rows.executors.change_state(one, "asleep", "ready") and rows.executors.state_of(one) == "sleeping"
    assert json.loads(run("wake", one, "--json").stdout)["state"] == "waking"
    rows.sampler(0)  # its process starts again, and has not reported yet
    assert json.loads(run("show", one, "--json").stdout).items() >= {"engine": None, "versions": []}.items()


def test_samplers_that_are_ready_and_alive_are_candidates_with_what_waits_for_them(rows: Rows) -> None:
    one, two = rows.sampler(0), rows.sampler(1)
    rows.sampler(2, state="loading")
    lapsed = rows.sampler(3)
    rows.lapse(lapsed)
    rows.engines.take(Seat(BASE), 60)
    rows.engines.set_state(Seat(BASE), "ready")
    rows.sample(1, one, tokens=30)
    rows.sample(2, one, tokens=12)
    rows.futures.settle([Settlement(rows.sample(3, two), body=b"{}")], {})
    assert rows.executors.live(BASE) == {one: 42, two: 0}
    assert rows.executors.live("local/other") == {}


def test_a_sampler_sees_what_it_was_given_and_nothing_else(rows: Rows) -> None:
    one, two = rows.sampler(0), rows.sampler(1)
    mine = [rows.sample(number, one) for number in range(3)]
    theirs, nobodys = rows.sample(3, two), rows.sample(4, None)
    found = rows.executors.incoming(BASE, one, 0)
    assert [request.request_id for request in found] == mine
    assert [one_.request_id for one_ in rows.executors.incoming(BASE, one, found[0].arrival)] == mine[1:]
    assert rows.executors.pending_ids(BASE, one) == set(mine)
    assert [request.request_id for request in rows.executors.fetch_by_ids(one, [*mine[:1], theirs, nobodys])] == mine[
        :1
    ]
    engine = Ownership(rows.db, BASE, "engine-0")
    assert [arrival.request.request_id for arrival in engine.incoming(0)] == [nobodys], "engines leave theirs alone"


def test_a_dead_samplers_requests_move_to_the_others_and_it_settles_none(rows: Rows) -> None:
    one, two, dead = rows.sampler(0), rows.sampler(1), rows.sampler(2)
    lease = rows.engines.take(Seat(BASE, "sampler", 2), 60)
    names = [rows.sample(number, dead) for number in range(20)]
    assert Ownership(rows.db, BASE, one).free_expired() == [], "its lease has not expired"
    rows.lapse(dead)
    assert Ownership(rows.db, BASE, one).free_expired() == [dead]
    owners = rows.owners()
    assert sorted(owners) == sorted(names)
    assert Counter(owners.values()) == {one: 10, two: 10}
    assert {request.request_id for request in rows.executors.incoming(BASE, one, 0)} == {
        name for name, owner in owners.items() if owner == one
    }
    late = Database(rows.url, fence(lease))
    with pytest.raises(LeaseLostError):
        Futures(late).settle([Settlement(names[0], body=b"stale")], {})
    late.close()
    assert rows.futures.outcome("alice", names[0]) is None


def test_late_assignments_to_a_freed_sampler_are_freed_again(rows: Rows) -> None:
    one, dead = rows.sampler(0), rows.sampler(1)
    rows.engines.release(Seat(BASE, "sampler", 1), "restarting")
    late = rows.sample(1, dead)  # by a server whose view was half a second old
    Ownership(rows.db, BASE, one).free_expired()
    assert rows.owners() == {late: one}


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
    one, two = rows.sampler(0), rows.sampler(1)
    names = [rows.sample(number, one) for number in range(3)]
    theirs = rows.sample(3, two)
    rows.executors.reassign(BASE, one, [*names[:2], theirs], to_samplers=to_samplers)
    expected = two if to_samplers else None
    assert rows.owners() == {names[0]: expected, names[1]: expected, names[2]: one, theirs: two}


def test_a_cancellation_follows_its_sample(rows: Rows) -> None:
    one, two, three = rows.sampler(0), rows.sampler(1), rows.sampler(2)
    names = [rows.sample(number, one) for number in range(5)]
    for name in names:
        rows.futures.cancel("alice", name, "enough")
    cancels = {name: f"{name}:cancel" for name in names}
    assert {owner for name, owner in rows.owners().items() if ":cancel" in name} == {one}
    rows.engines.release(Seat(BASE, "sampler", 0), "stopped")
    owners = rows.owners()
    for name, beginning in cancels.items():
        (cancel,) = (request for request in owners if request.startswith(beginning))
        assert owners[cancel] == owners[name] and owners[name] in (two, three)


def test_a_request_to_cancel_that_came_too_late_follows_its_sample(rows: Rows) -> None:
    one, two = rows.sampler(0), rows.sampler(1)
    name = rows.sample(1, one)
    rows.futures.cancel("alice", name, "enough")
    (cancel,) = (request for request in rows.owners() if ":cancel" in request)
    late = Ownership(rows.db, BASE, one)
    assert not late.forward(cancel, name), "it is this one's"
    rows.executors.reassign(BASE, one, [name], to_samplers=True)
    assert late.forward(cancel, name)
    assert rows.owners() == {name: two, cancel: two}
    rows.futures.settle([Settlement(name, body=b"{}")], {})
    assert not late.forward(cancel, name)
    assert not late.forward(cancel, SESSION), "that of a whole session is sent again while any of it waits"


def test_a_session_that_is_over_is_cancelled_with_each_of_its_executors(rows: Rows) -> None:
    from tinsmith.store.sessions import NewSession, Sessions

    sessions = Sessions(rows.db)
    opened = sessions.open("alice", NewSession(), "over")
    SamplingSessions(rows.db).create(NewSamplingSession("over:sample:0", opened.session_id, "alice", BASE))
    one, two = rows.sampler(0), rows.sampler(1)
    for number, executor in enumerate([one, one, two, None]):
        rows.sample(number, executor, "over:sample:0")
    sessions.close("over", "gone")
    rows.futures.cancel_of_closed_sessions()
    rows.futures.cancel_of_closed_sessions()
    cancels = [owner for name, owner in rows.owners().items() if ":cancel" in name]
    assert sorted(map(str, cancels)) == sorted(map(str, [one, two, None]))


def test_the_owner_of_a_run_is_where_its_versions_are(rows: Rows) -> None:
    lease = rows.engines.take(Seat(BASE), 60)
    Models(rows.db).create(NewModel("s:train:0", "s", "alice", BASE, LoraSpec(4), engine_id=lease.engine_id))
    assert rows.executors.owner_address("s:train:0") is None
    rows.engines.set_state(Seat(BASE), "ready", None, "10.0.0.1:99")
    assert rows.executors.owner_address("s:train:0") == "10.0.0.1:99"
    rows.lapse(lease.engine_id)
    assert rows.executors.owner_address("s:train:0") is None


def request_and_sample(number: int, prompt: list[int]) -> tuple[NewFuture, Sample]:
    new = NewFuture(f"{SESSION}:{number}", "alice", "s", BASE, "sample", b"{}", num_tokens=100)
    return new, Sample(new.request_id, None, np.array(prompt, np.int32), 1, SamplingParams())


def test_samples_are_given_away_before_they_are_stored(rows: Rows) -> None:
    dispatch = Dispatch(rows.executors)
    new, sample = request_and_sample(1, [1, 2, 3])
    assert dispatch.assign(new, sample).executor is None, "there is no sampler"
    one, two = rows.sampler(0), rows.sampler(1)
    dispatch = Dispatch(rows.executors)
    chosen = {dispatch.assign(new, sample).executor for _ in range(5)}
    assert len(chosen) == 1 and chosen <= {one, two}, "the same prompt goes to the same sampler"
    spread = {dispatch.assign(*request_and_sample(n, [n])).executor for n in range(40)}
    assert spread == {one, two}
    assert dispatch.assign(new, sample, inflight=True).executor is None


def test_a_view_is_asked_for_twice_a_second_at_most_and_counts_what_was_given_out(rows: Rows, monkeypatch) -> None:
    one, two = rows.sampler(0), rows.sampler(1)
    looks: list[str] = []
    live = rows.executors.live
    monkeypatch.setattr(rows.executors, "live", lambda base: looks.append(base) or live(base))
    moment = [100.0]
    monkeypatch.setattr("tinsmith.cluster.routing.time.monotonic", lambda: moment[0])
    dispatch = Dispatch(rows.executors)
    new, sample = request_and_sample(1, [1, 2, 3])
    given = Counter(dispatch.assign(replace(new, num_tokens=5000), sample).executor for _ in range(10))
    assert looks == [BASE]
    assert set(given) == {one, two}, "one hot prompt does not stay with one sampler however much waits there"
    moment[0] += FRESH_S
    dispatch.assign(new, sample)
    assert looks == [BASE, BASE]
