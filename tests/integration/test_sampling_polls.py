"""Polls of a sampling session: contents, order and timing of the answers; clients that join."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import sqlalchemy as sa
import tinker
from tinker import types
from tinker.types.future_completion import FutureFailed, FutureFinished
from tinker.types.futures_retrieve_response import FuturesRetrieveResponse
from tinker.types.join_sampling_session_response import JoinSamplingSessionResponse

from support.databases import fresh_url
from support.http_harness import ALICE, BOB, Harness, close, make_harness, sample_request
from support.live import LiveServer
from tinsmith.api.routes.futures import UNANNOUNCED_BYTES
from tinsmith.db.database import Database
from tinsmith.db.factory import open_database
from tinsmith.db.schema import FUTURES, RESULTS
from tinsmith.errors import EngineFailedError, UserError
from tinsmith.store.futures import Futures, NewFuture, Settlement
from tinsmith.store.sampling_sessions import CLONE_SIZE, MAX_COMPLETIONS, NewSamplingSession, SamplingSessions

T = TypeVar("T")

SAMPLER = "s:sample:0"


def target(sampler: str, clone: int = 0) -> dict[str, object]:
    return {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}


def poll_once(
    harness: Harness, sampler: str, cursor: int = 0, clone: int = 0, **fields: object
) -> FuturesRetrieveResponse:
    body = {"target": target(sampler, clone), "prev_cursor": cursor, "timeout": 0, **fields}
    return FuturesRetrieveResponse.model_validate(harness.ok("retrieve_futures", body))


def ids(response: FuturesRetrieveResponse) -> list[str]:
    return [completion.request_id for completion in response.completions]


def submit_sample(harness: Harness, sampler: str, seq_id: int, **changes: object) -> str:
    return harness.ok("asample", sample_request(sampler, seq_id, **changes))["request_id"]


# Contents of a poll.


def test_samples_are_listed_in_the_order_of_their_settlement_from_the_cursor_on(harness: Harness) -> None:
    sampler = harness.sampler()
    names = [submit_sample(harness, sampler, seq_id) for seq_id in range(4)]
    assert poll_once(harness, sampler) == FuturesRetrieveResponse(completions=[], cursor=0)
    harness.settle(names[2], b"twelve bytes", "proto")
    harness.fail(names[0], EngineFailedError("no"))
    refused = submit_sample(harness, sampler, 9, num_samples=0)
    first = poll_once(harness, sampler)
    assert first.completions == [
        FutureFinished(request_id=names[2], response_payload_uncompressed_size=12),
        FutureFailed(request_id=names[0]),
        FutureFailed(request_id=refused),
    ]
    assert poll_once(harness, sampler, first.cursor) == FuturesRetrieveResponse(completions=[], cursor=first.cursor)
    harness.settle(names[1])
    second = poll_once(harness, sampler, first.cursor)
    assert ids(second) == [names[1]] and second.cursor > first.cursor
    assert ids(poll_once(harness, sampler)) == [names[2], names[0], refused, names[1]], (
        "whoever lost an answer asks again"
    )


def test_each_client_of_a_session_sees_its_own_and_sessions_are_apart(harness: Harness) -> None:
    session_id = harness.session()
    sampler, other = harness.sampler(session_id, 0), harness.sampler(session_id, 1)
    last_of_first = submit_sample(harness, sampler, CLONE_SIZE - 1)
    first_of_second, far = (
        submit_sample(harness, sampler, CLONE_SIZE),
        submit_sample(harness, sampler, 2**31 * CLONE_SIZE - 1),
    )
    foreign = submit_sample(harness, other, 0)
    for request_id in (last_of_first, first_of_second, far, foreign):
        harness.settle(request_id)
    assert ids(poll_once(harness, sampler)) == [last_of_first]
    assert ids(poll_once(harness, sampler, clone=1)) == [first_of_second]
    assert ids(poll_once(harness, sampler, clone=2**31 - 1)) == [far]
    assert ids(poll_once(harness, other)) == [foreign]


def test_training_is_not_numbered(harness: Harness) -> None:
    step = harness.ok("optim_step", {"model_id": harness.model(), "seq_id": 1, "adam_params": {}})["request_id"]
    harness.settle(step)
    with harness.services.models._db.read() as connection:
        orders = set(connection.scalars(sa.select(FUTURES.c.settle_order)))
    assert orders == {None}


def test_a_long_list_comes_in_parts(tmp_path: Path, database_kind: str) -> None:
    database = open_database(fresh_url(tmp_path, database_kind))
    samplers, futures = SamplingSessions(database), Futures(database)
    samplers.create(NewSamplingSession(SAMPLER, "s", "alice", "base"))
    names = [futures.submit(new(seq_id)) for seq_id in range(MAX_COMPLETIONS + 5)]
    futures.settle([Settlement(name, b"") for name in names], {})
    first = samplers.completions(SAMPLER, 0, 0)
    later = samplers.completions(SAMPLER, 0, first[-1].settle_order)
    assert [completion.request_id for completion in first + later] == names and len(later) == 5
    database.close()


def new(seq_id: int) -> NewFuture:
    return NewFuture(f"{SAMPLER}:{seq_id}", "alice", "s", "base", "sample", b"{}", 0, None, SAMPLER, seq_id)


def test_two_writers_give_every_settlement_a_number_of_its_own_and_no_poll_misses_one(
    tmp_path: Path, database_kind: str
) -> None:
    url = fresh_url(tmp_path, database_kind)
    databases = [open_database(url) for _ in range(3)]
    samplers = SamplingSessions(databases[2])
    samplers.create(NewSamplingSession(SAMPLER, "s", "alice", "base"))
    server, engine = Futures(databases[0]), Futures(databases[1])
    settled, refused = range(0, 60), range(100, 160)
    names = [server.submit(new(seq_id)) for seq_id in settled]
    polled_ids: list[str] = []
    finished = threading.Event()

    def settle() -> None:
        for start in range(0, len(names), 3):
            engine.settle([Settlement(name, b"x") for name in reversed(names[start : start + 3])], {})

    def refuse() -> None:
        for seq_id in refused:
            server.submit(new(seq_id), UserError("no"))

    def follow() -> None:
        cursor, last_look = 0, False
        while not last_look:
            last_look = finished.is_set()
            for completion in samplers.completions(SAMPLER, 0, cursor):
                assert completion.settle_order > cursor
                cursor = completion.settle_order
                polled_ids.append(completion.request_id)

    follower = threading.Thread(target=follow)
    writers = [threading.Thread(target=settle), threading.Thread(target=refuse)]
    for thread in (follower, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    finished.set()
    follower.join()
    assert sorted(polled_ids) == sorted(names + [f"{SAMPLER}:{seq_id}" for seq_id in refused])
    for database in databases:
        database.close()


# Timing of answers.


def in_app(harness: Harness, scenario: Callable[[httpx.AsyncClient], Coroutine[Any, Any, T]]) -> T:
    async def run() -> T:
        transport = httpx.ASGITransport(app=harness.app)
        headers = {"X-API-Key": ALICE}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/api/v1/", headers=headers) as web:
            return await scenario(web)

    return asyncio.run(run())


async def start_poll(harness: Harness, poll: Coroutine[Any, Any, httpx.Response]) -> asyncio.Task[httpx.Response]:
    polling = asyncio.create_task(poll)
    while len(harness.services.waiters) == 0:
        await asyncio.sleep(0.005)
    return polling


@pytest.mark.parametrize("how", ["settled", "refused"])
def test_a_held_poll_is_woken_by_the_next_settlement(tmp_path: Path, how: str) -> None:
    harness = make_harness(tmp_path, hold_s=20)
    sampler = harness.sampler()
    request_id = f"{sampler}:0"
    if how == "settled":
        submit_sample(harness, sampler, 0)

    async def work(web: httpx.AsyncClient) -> tuple[httpx.Response, float]:
        polling = await start_poll(harness, web.post("retrieve_futures", json={"target": target(sampler)}))
        harness.services.waiters.wake(["somebody:sample:0:0", ""])
        await asyncio.sleep(0.05)
        assert not polling.done()
        started = time.monotonic()
        if how == "settled":
            await asyncio.to_thread(harness.services.futures.settle, [Settlement(request_id, b"abc")], {})
            harness.services.waiters.wake([request_id])
        else:
            await web.post("asample", json=sample_request(sampler, 0, num_samples=0))
        return await polling, time.monotonic() - started

    answer, delay_s = in_app(harness, work)
    assert [completion["request_id"] for completion in answer.json()["completions"]] == [request_id]
    assert delay_s < 15 and len(harness.services.waiters) == 0
    close(harness)


def test_a_poll_without_news_ends_with_nothing_after_its_time(tmp_path: Path) -> None:
    for hold_s, timeout, least_s in ((1.0, None, 1.0), (1.0, 100, 1.0), (30.0, 0.1, 0.1), (30.0, 0, 0)):
        directory = tmp_path / f"{timeout}"
        directory.mkdir()
        harness = make_harness(directory, hold_s=hold_s)
        started = time.monotonic()
        body = {"target": target(harness.sampler()), "prev_cursor": 7, "timeout": timeout}
        assert harness.ok("retrieve_futures", body) == {"completions": [], "cursor": 7}
        assert least_s <= time.monotonic() - started < 25
        close(harness)


def test_a_server_that_stops_answers_its_polls(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, hold_s=20)
    sampler = harness.sampler()

    async def work(web: httpx.AsyncClient) -> httpx.Response:
        polling = await start_poll(
            harness, web.post("retrieve_futures", json={"target": target(sampler), "prev_cursor": 3})
        )
        harness.services.waiters.close()
        return await asyncio.wait_for(polling, 5)

    assert in_app(harness, work).json() == {"completions": [], "cursor": 3}
    close(harness)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": None}, "target is missing"),
        ({"target": {"type": "model", "sampling_session_id": "x"}}, "target.type is 'model'"),
        ({"target": {}}, "target.sampling_session_id is missing"),
        ({"target": {"sampling_session_id": "x", "cloned_sampler_id": -1}}, "target.cloned_sampler_id is -1"),
        ({"prev_cursor": -1}, "prev_cursor is -1"),
        ({"prev_cursor": "a"}, "prev_cursor is 'a'"),
        ({"timeout": -1}, "timeout is -1"),
        ({"retrieved_request_ids": [1]}, "retrieved_request_ids[0] is 1"),
    ],
)
def test_a_wrong_poll_is_a_400_that_names_the_field(harness: Harness, changes: dict[str, object], words: str) -> None:
    answer = harness.post("retrieve_futures", {"target": target(harness.sampler())} | changes)
    assert answer.status_code == 400 and words in answer.json()["detail"]


def test_another_tenants_session_is_unknown(harness: Harness) -> None:
    sampler = harness.sampler()
    for name, key in ((sampler, BOB), ("nobody:sample:0", ALICE)):
        assert harness.post("retrieve_futures", {"target": target(name)}, key).status_code == 404
        assert harness.post("join_sampling_session", {"sampling_session_id": name}, key).status_code == 404


# Acknowledged results.


def test_acknowledged_results_are_deleted_by_the_next_sweep_and_no_others(harness: Harness) -> None:
    session_id = harness.session()
    sampler, other = harness.sampler(session_id, 0), harness.sampler(session_id, 1)
    acknowledged, unacknowledged, foreign = (
        submit_sample(harness, sampler, 0),
        submit_sample(harness, sampler, 1),
        submit_sample(harness, other, 0),
    )
    pending, failed = submit_sample(harness, sampler, 2), submit_sample(harness, sampler, 3, num_samples=0)
    for request_id in (acknowledged, unacknowledged, foreign):
        harness.settle(request_id)
    poll_once(harness, sampler, retrieved_request_ids=[acknowledged, foreign, pending, failed, "nonsense"])
    assert harness.result(acknowledged) == {}, "an answer may still be on its way"
    assert harness.services.sampling_sessions.delete_acknowledged() == 3
    assert harness.post("retrieve_future", {"request_id": acknowledged}).status_code == 410
    harness.settle(pending)
    for request_id in (unacknowledged, foreign, pending):
        assert harness.result(request_id) == {}
    assert harness.result(failed)["category"] == "user"
    with harness.services.models._db.read() as connection:
        assert acknowledged not in set(connection.scalars(sa.select(RESULTS.c.request_id)))
    assert harness.services.sampling_sessions.delete_acknowledged() == 0


# Large results.


@pytest.mark.parametrize("size", [UNANNOUNCED_BYTES, UNANNOUNCED_BYTES + 1])
def test_large_results_are_announced_only_on_request(harness: Harness, size: int) -> None:
    request_id = submit_sample(harness, harness.sampler(), 0)
    body = b"x" * size
    harness.settle(request_id, body, "proto")
    announced = harness.post("retrieve_future", {"request_id": request_id, "allow_metadata_only": True})
    if size > UNANNOUNCED_BYTES:
        assert announced.json() == {"status": "complete_metadata", "response_payload_size": size}
    else:
        assert announced.content == body
    for fields in ({"allow_metadata_only": False}, {}):
        answer = harness.post("retrieve_future", {"request_id": request_id, **fields})
        assert (answer.headers["content-type"], answer.content) == ("application/x-protobuf", body)


# Joining.


def test_clients_that_join_have_numbers_of_their_own(harness: Harness) -> None:
    session_id = harness.session()
    sampler, other = harness.sampler(session_id, 0), harness.sampler(session_id, 1)
    clone_ids = [
        JoinSamplingSessionResponse.model_validate(
            harness.ok("join_sampling_session", {"sampling_session_id": name})
        ).client_counter
        for name in (sampler, sampler, other, sampler)
    ]
    assert clone_ids == [1, 2, 1, 3]


def test_clients_that_join_at_once_have_numbers_of_their_own(tmp_path: Path, database_kind: str) -> None:
    url = fresh_url(tmp_path, database_kind)
    databases = [open_database(url) for _ in range(4)]
    SamplingSessions(databases[0]).create(NewSamplingSession(SAMPLER, "s", "alice", "base"))
    clone_ids: list[int] = []

    def join(database: Database) -> None:
        clone_ids.extend(SamplingSessions(database).join("alice", SAMPLER) for _ in range(5))

    threads = [threading.Thread(target=join, args=(database,)) for database in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(clone_ids) == list(range(1, 21))
    for database in databases:
        database.close()


# The SDK.

PROMPT = types.ModelInput.from_ints([1, 2, 3])
SHORT = types.SamplingParams(max_tokens=4, seed=1)


def with_flags(service: tinker.ServiceClient, **flags: bool) -> tinker.ServiceClient:
    """The server's flags, except for these changes."""
    config = service.holder._client_config
    service.holder._client_config = config.model_copy(update=flags)
    return service


@pytest.mark.matrix(1)
@pytest.mark.parametrize("follow", [True, False])
def test_the_sdk_reads_every_result_with_either_kind_of_poll(fake_service: tinker.ServiceClient, follow: bool) -> None:
    service = with_flags(fake_service, sample_use_retrieve_futures=follow)
    sampler = service.create_sampling_client(base_model="tinsmith/nano").result()
    futures = [sampler.sample(PROMPT, 2, SHORT) for _ in range(40)]
    wrong = sampler.sample(PROMPT, 0, SHORT)
    answers = [future.result(timeout=60) for future in futures]
    assert {len(answer.sequences) for answer in answers} == {2}
    with pytest.raises(tinker.RequestFailedError, match="num_samples"):
        wrong.result(timeout=60)
    large = sampler.sample(PROMPT, 1000, SHORT, topk_sample_logprobs=20).result(timeout=60)
    assert len(large.sequences) == 1000
    assert len({sequence.sequence_id for sequence in large.sequences}) == 1000


@pytest.mark.covers("POST /join_sampling_session", "SamplingClient.sample")
def test_an_unpickled_sampling_client_joins_and_draws_beside_the_first(
    fake_server: LiveServer, fake_service: tinker.ServiceClient
) -> None:
    sampler = fake_service.create_sampling_client(base_model="tinsmith/nano").result()
    assert fake_service.holder.get_client_config().sample_join_sampling_session
    clones = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]
    futures = [client.sample(PROMPT, 1, SHORT) for client in (sampler, *clones) for _ in range(3)]
    names = [future.result(timeout=60).sequences[0].sequence_id for future in futures]
    clone_ids = [int(name.split(":")[-2]) for name in names]
    assert sorted(clone_ids) == [clone * CLONE_SIZE + index for clone in range(3) for index in range(3)]
