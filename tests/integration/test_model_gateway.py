"""Requests of operations to the service: the owner of samples, idempotency, and cancellation."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

from support.http_harness import ALICE, BASE, BOB, Harness, close, make_harness
from support.payloads import serialize_function
from tinsmith import batch
from tinsmith.auth.quotas import QuotaLimits
from tinsmith.batch.coordinator.model_gateway import ModelGateway, RequestRouter, RowRequest
from tinsmith.batch.operations import steps_of
from tinsmith.batch.operations.runtime import Channel, ClosedError, _answer_row
from tinsmith.batch.types import Assignment
from tinsmith.errors import NotFoundError, NotSupportedError, TinsmithError, UserError
from tinsmith.store.futures import Settlement

REQUEST: dict[str, Any] = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
    "sampling_params": {"max_tokens": 3, "seed": 4},
}


def question(
    row_idx: int = 0,
    *,
    verb: str = "sample",
    model: str = BASE,
    tenant_id: str = "alice",
    **changes: Any,  # noqa: ANN401
) -> RowRequest:
    payload = {"model": model, "request": {**REQUEST, **changes.pop("request", {})}}
    fields = {"job_id": 5, "job_name": "", "key": "0", **changes}
    return RowRequest(tenant_id=tenant_id, verb=verb, row_idx=row_idx, payload=payload, **fields)


async def pending(harness: Harness, count: int) -> list[str]:
    """Wait until this many samples are pending; return their ids."""
    kinds: list[str] = []
    for _ in range(500):
        kinds = [request_id for request_id, kind in harness.kinds().items() if kind == "sample"]
        if len(kinds) == count:
            return kinds
        await asyncio.sleep(0.01)
    raise AssertionError(f"{len(kinds)} samples wait")


def settle(harness: Harness, answers: ModelGateway, request_id: str, body: bytes) -> None:
    harness.services.futures.settle([Settlement(request_id, body=body, result_type="proto")], {})
    answers.waiters.wake([request_id])


def test_the_same_question_is_one_sample(harness: Harness) -> None:
    answers = harness.services.model_gateway

    async def work() -> None:
        same_tasks = [asyncio.create_task(answers.answer(question())) for _ in range(3)]
        await pending(harness, 1)
        other_questions = [question(1), question(key="0.1"), question(request={"num_samples": 2}), question(job_id=6)]
        other_tasks = [asyncio.create_task(answers.answer(waited)) for waited in other_questions]
        for request_id in await pending(harness, 5):
            settle(harness, answers, request_id, request_id.encode())
        results = {(await waited)["result"] for waited in same_tasks}
        assert len(results) == 1
        assert len(results | {(await waited)["result"] for waited in other_tasks}) == 5
        again = ModelGateway(
            answers.bases, answers.sessions, answers.server_sessions, answers.checkpoints, answers.futures,
            answers.waiters, answers.admission,
        )  # fmt: skip
        assert {(await again.answer(question()))["result"]} == results, "a server that was started anew knows it"
        assert await pending(harness, 0) == []

    asyncio.run(work())


def test_questions_are_the_tenants_own(harness: Harness) -> None:
    answers = harness.services.model_gateway
    path = harness.checkpoint(harness.model(key=ALICE), "sampler_weights", "mine")

    async def work() -> None:
        for verb in ("sample", "model"):
            with pytest.raises(NotFoundError):
                await answers.answer(question(verb=verb, model=path, tenant_id="bob"))
        model_answer = await answers.answer(question(verb="model", model=path))
        assert model_answer["shape"]["name"] == BASE
        task = asyncio.create_task(answers.answer(question(model=path)))
        (request_id,) = await pending(harness, 1)
        settle(harness, answers, request_id, b"x")
        assert base64.b64decode((await task)["result"]) == b"x"
        assert harness.post("retrieve_future", {"request_id": request_id}, BOB).status_code == 404

    asyncio.run(work())


def test_invalid_requests_are_refused_and_not_stored(harness: Harness) -> None:
    answers = harness.services.model_gateway

    async def work() -> None:
        for bad in (
            question(request={"sampling_params": {"temperature": -1}}),
            question(request={"num_samples": 0}),
            question(request={"speed": 9}),
            question(model="no/such"),
            question(model="tinker://nothing"),
            question(key=""),
            question(key="k" * 49),
        ):
            with pytest.raises(UserError):
                await answers.answer(bad)
        with pytest.raises(NotSupportedError, match="verb is 'dance'; it must be one of"):
            await answers.answer(question(verb="dance"))
        assert await pending(harness, 0) == []

    asyncio.run(work())


def test_a_sample_that_failed_fails_its_row(harness: Harness) -> None:
    answers = harness.services.model_gateway

    async def work() -> None:
        task = asyncio.create_task(answers.answer(question()))
        (request_id,) = await pending(harness, 1)
        harness.services.futures.settle([Settlement(request_id, error=UserError("too hot"))], {})
        answers.waiters.wake([request_id])
        with pytest.raises(TinsmithError, match="too hot"):
            await task

    asyncio.run(work())


def test_a_session_that_expired_is_followed_by_another(harness: Harness) -> None:
    answers, sessions = harness.services.model_gateway, harness.services.sessions

    async def work() -> None:
        task = asyncio.create_task(answers.answer(question()))
        (request_id,) = await pending(harness, 1)
        assert sessions.close("bulk-job-5-1", "no heartbeat")
        harness.services.futures.settle([Settlement(request_id, error=UserError("cancelled"))], {})
        answers.waiters.wake([request_id])
        (second,) = await pending(harness, 1)
        assert second.startswith("bulk-job-5-2:sample:")
        settle(harness, answers, second, b"x")
        assert base64.b64decode((await task)["result"]) == b"x"

    asyncio.run(work())


def test_the_end_of_a_job_closes_its_sessions(harness: Harness) -> None:
    answers, sessions = harness.services.model_gateway, harness.services.sessions

    async def work() -> None:
        task = asyncio.create_task(answers.answer(question()))
        await pending(harness, 1)
        task.cancel()
        await answers.close_job(5, "alice", "CANCELLED")
        closed = sessions.get("alice", "bulk-job-5-1")
        assert (closed.state, closed.finish_type) == ("finished", "interrupted")
        assert closed.closed_at is not None
        await answers.close_job(77, "alice", "SUCCEEDED")  # a job without requests

    asyncio.run(work())


def test_a_quota_is_waited_for(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, limits=QuotaLimits(queued_requests=1))
    answers = harness.services.model_gateway

    async def work() -> None:
        tasks = [asyncio.create_task(answers.answer(question(index))) for index in range(2)]
        (first,) = await pending(harness, 1)
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in tasks)
        settle(harness, answers, first, b"x")
        for _ in range(300):
            if waiting := await pending(harness, 1) if harness.kinds() else []:
                settle(harness, answers, waiting[0], b"x")
                break
            await asyncio.sleep(0.02)
        assert len(await asyncio.gather(*tasks)) == 2

    asyncio.run(work())
    close(harness)


def test_a_worker_that_cannot_receive_answers_is_noticed(harness: Harness) -> None:
    """Otherwise its rows would wait for the batch's whole time limit."""

    async def fail_to_send(_answers: list[dict[str, Any]]) -> None:
        raise ConnectionError("the worker has gone")

    async def ask_once() -> None:
        router = RequestRouter(harness.services.model_gateway, 5, "alice", "")
        with pytest.raises(ConnectionError):
            async with router.serve_requests(fail_to_send, asyncio.Semaphore(8)) as take:
                take([{"number": 1, "verb": "model", "payload": {"model": BASE}}])
                for _ in range(100):
                    await asyncio.sleep(0.01)
                    take(())  # as a heartbeat does

    asyncio.run(ask_once())


def test_a_router_answers_every_question(harness: Harness) -> None:
    collected: list[dict[str, Any]] = []

    async def send(answers: list[dict[str, Any]]) -> None:
        collected.extend(answers)

    async def work() -> None:
        router = RequestRouter(harness.services.model_gateway, 5, "alice", "")
        async with router.serve_requests(send, asyncio.Semaphore(8)) as take:
            good = {"verb": "model", "payload": {"model": BASE}}
            take([{"number": 1, **good}, {"number": 2, "verb": "model", "payload": {"model": "no"}}])
            take([{"number": 3, "verb": "model", "payload": 7}, {"number": 4}])
            while len(collected) < 4:
                await asyncio.sleep(0.01)

    asyncio.run(work())
    answers = {one_answer["number"]: one_answer for one_answer in collected}
    assert answers[1]["answer"]["shape"]["name"] == BASE
    assert "'no' is not served here" in answers[2]["refused"]
    assert "not valid" in answers[3]["refused"]
    assert "not valid" in answers[4]["refused"]


def test_closing_a_channel_cancels_open_requests() -> None:
    lines_sent: list[dict[str, Any]] = []
    channel = Channel(lines_sent.append)
    assignment = Assignment(0, 0, 1, 1, ())

    async def work() -> None:
        tasks = [asyncio.create_task(channel.ask(assignment, {"verb": "x"})) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert [len(line["asks"]) for line in lines_sent] == [3], "questions of one moment share a line"
        channel.deliver_answers([{"number": 2, "answer": {"a": 1}}, {"number": 99, "answer": {}}])
        assert await tasks[1] == {"a": 1}
        channel.close()
        for task in (tasks[0], tasks[2]):
            with pytest.raises(ClosedError):
                await task
        with pytest.raises(ClosedError):
            await channel.ask(assignment, {"verb": "x"})

    asyncio.run(work())


def test_a_functions_requests_are_not_answered() -> None:
    """The server does not answer requests of its process."""

    def shout(row: dict[str, Any]) -> dict[str, Any]:
        return {"text": row["text"].upper()}

    assert steps_of(serialize_function(shout, kind="row")) is None
    assert steps_of("no payload at all") is None


def test_no_row_is_blamed_for_the_end_of_its_worker() -> None:
    channel = Channel(lambda _message: None)
    channel.close()
    assignment = Assignment(0, 0, 0, 1, ())
    with pytest.raises(ClosedError):
        asyncio.run(_answer_row([batch.Sample("m", prompt="q")], {"q": "x"}, 0, assignment, channel, 0))
    failed, _ = asyncio.run(
        _answer_row([batch.Grade(by="exact", reference="r")], {"output": "x"}, 0, assignment, channel, 0)
    )
    assert isinstance(failed, KeyError)
