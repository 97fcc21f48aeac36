"""Answers without HTTP, lost or wrong partials, and implicit sessions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.http_harness import Harness, close, make_harness
from support.pending_requests import incoming
from tinsmith.api.openai.generation import CHAT, COMPLETIONS, prepare, serve_request, submit_samples
from tinsmith.api.openai.streaming import StreamDelta, stream_deltas
from tinsmith.api.services import Services
from tinsmith.auth.quotas import QuotaLimits
from tinsmith.base_models import Bases, nano, read_shape
from tinsmith.chat.chats import ChatRequest
from tinsmith.errors import EngineFailedError, UserError
from tinsmith.store.futures import NewFuture, Settlement
from tinsmith.store.server_sessions import SESSION_LIFETIME_S, ImplicitSessions, ServerSessions
from tinsmith.store.sessions import Sessions
from tinsmith.types import Partial, SampledSequence, SampleResult
from tinsmith.wire.fields import IgnoredFields
from tinsmith.wire.sampling import write_sample_result
from tinsmith.wire.token_stream import Partials, line_of

SHAPE = read_shape(nano.MODEL_NAME, nano.path())
BODY = {"model": nano.MODEL_NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path)
    yield replace(new_harness, services=replace(new_harness.services, bases=Bases((SHAPE,))))
    close(new_harness)


def words(text: str) -> list[int]:
    from tinsmith.chat.tokenizer import ModelTokenizer

    return ModelTokenizer(SHAPE).encode(text, special=False)


def result(*texts: str) -> SampleResult:
    sequences = [np.array(words(text), np.int32) for text in texts]
    return SampleResult(
        "r", tuple(SampledSequence(ids, np.full(len(ids), -0.5, np.float32), "length") for ids in sequences)
    )


async def pending(harness: Harness, count: int = 1) -> list[str]:
    """Wait until this many samples are pending; return them."""
    for _ in range(200):
        rows = [row for row in incoming(harness.services.futures._db, nano.MODEL_NAME) if row.state == "pending"]
        if len(rows) >= count:
            return [row.request_id for row in rows]
        await asyncio.sleep(0.01)
    raise AssertionError("nothing was submitted")


def settle(harness: Harness, request_id: str, sample_result: SampleResult) -> None:
    harness.services.futures.settle([Settlement(request_id, write_sample_result(sample_result), "proto")], {})
    harness.services.waiters.wake([request_id])


def test_an_answer_needs_no_http(harness: Harness) -> None:
    async def scenario() -> None:
        request = {"model": nano.MODEL_NAME, "prompt": ["a", "b"], "n": 2, "max_tokens": 4}
        answering = asyncio.create_task(serve_request(harness.services, "alice", COMPLETIONS, request))
        first, second = await pending(harness, 2)
        settle(harness, second, result("three", "four"))
        settle(harness, first, result("one", "two"))
        status, body = await answering
        assert status == 200
        choices = body["choices"]
        assert isinstance(choices, list)
        assert [(choice["index"], choice["text"]) for choice in choices] == list(
            enumerate(["one", "two", "three", "four"])
        )

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("endpoint", "body", "status", "code"),
    [
        (CHAT, BODY | {"model": "nobody"}, 404, "model_not_found"),
        (CHAT, BODY | {"stream": True}, 400, "unsupported_parameter"),
        (CHAT, {}, 400, None),
        (CHAT, BODY | {"max_tokens": 10**6}, 400, "context_length_exceeded"),
        ("/v1/other", BODY, 404, None),
    ],
)
def test_an_error_is_an_answer(
    harness: Harness, endpoint: str, body: dict[str, object], status: int, code: str | None
) -> None:
    answer_status, answer_body = asyncio.run(serve_request(harness.services, "alice", endpoint, body))
    assert answer_status == status
    error = answer_body["error"]
    assert isinstance(error, dict) and error["message"] and error["code"] == code


def post_refused(harness: Harness, path: str, **fields: object) -> dict[str, object]:
    body: dict[str, object] = {"model": nano.MODEL_NAME, **fields}
    headers = {"X-API-Key": "tml-alice"}
    response = harness.client.post(path, json=body, headers=headers)
    assert response.status_code == 400
    return response.json()["error"]


def test_too_long_a_prompt_is_refused_in_the_words_that_clients_match_on(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.app.state, "services", harness.services)
    context, num_words = SHAPE.max_context_length, len(words("hi"))
    chat = [{"role": "user", "content": "hi " * context}]
    error = post_refused(harness, "/v1/completions", prompt="hi", max_tokens=context)
    assert error["message"] == (
        f"This model's maximum context length is {context} tokens. However, you requested {num_words + context} tokens "
        f"({num_words} in the prompt, {context} in the completion). Please reduce the length of the prompt or of the "
        "completion (max_tokens)."
    )
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    error = post_refused(harness, "/oai/api/v1/chat/completions", messages=chat)
    assert str(error["message"]).startswith(f"This model's maximum context length is {context} tokens. However, your")
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    for path in ("/anthropic/api/v1/messages", "/v1/messages"):
        error = post_refused(harness, path, messages=BODY["messages"], max_tokens=context)
        assert str(error["message"]).startswith("input length and `max_tokens` exceed context limit: ")
        error = post_refused(harness, path, messages=chat, max_tokens=4)
        assert "prompt is too long: " in str(error["message"]) and f"> {context - 1} maximum" in str(error["message"])


def test_models_come_in_the_form_of_the_client_that_asks(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.app.state, "services", harness.services)
    key, version = {"X-API-Key": "tml-alice"}, {"anthropic-version": "2023-06-01"}
    for prefix in ("/v1", "/oai/api/v1"):
        plain = harness.client.get(f"{prefix}/models", headers=key).json()
        assert (plain["object"], plain["data"][0]["object"]) == ("list", "model")
    for prefix in ("/v1", "/oai/api/v1", "/anthropic/api/v1"):
        page = harness.client.get(f"{prefix}/models", headers=key | version).json()
        assert page["first_id"] == page["last_id"] == nano.MODEL_NAME and page["has_more"] is False
        model = harness.client.get(f"{prefix}/models/{nano.MODEL_NAME}", headers=key | version).json()
        assert model == page["data"][0]
        assert (model["type"], model["created_at"], model["max_input_tokens"]) == (
            "model", "2023-11-14T22:13:20Z", SHAPE.max_context_length
        )  # fmt: skip
    for query, words_ in (
        ("limit=0", "limit is '0'"),
        ("after_id=x", "'x'"),
        ("after_id=x&before_id=y", "one of them"),
    ):
        response = harness.client.get(f"/anthropic/api/v1/models?{query}", headers=key)
        assert response.status_code == 400 and words_ in response.json()["error"]["message"]


def test_pages_of_models_go_on_in_both_directions(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"local/{letter}" for letter in "abcde"]
    bases = Bases(tuple(replace(SHAPE, name=name) for name in names))
    monkeypatch.setattr(harness.app.state, "services", replace(harness.services, bases=bases))

    def page(query: str) -> tuple[list[str], bool]:
        body = harness.client.get(f"/anthropic/api/v1/models?{query}", headers={"X-API-Key": "tml-alice"}).json()
        return [model["id"][-1] for model in body["data"]], body["has_more"]

    assert page("limit=2") == (["a", "b"], True)
    assert page("limit=2&after_id=local/b") == (["c", "d"], True)
    assert page("limit=2&after_id=local/d") == (["e"], False)
    assert page("limit=2&before_id=local/d") == (["b", "c"], True)
    assert page("limit=2&before_id=local/b") == (["a"], False)


def test_a_missing_key_has_the_error_that_clients_expect(harness: Harness) -> None:
    wrong, none = {"Authorization": "Bearer tml-carol"}, {}
    for path, headers, words_ in (
        ("/v1/models", wrong, "Incorrect API key provided: "),
        ("/v1/models", {"Authorization": "Bearer sk-x"}, "Incorrect API key provided: "),
        ("/v1/models", none, "You didn't provide an API key"),
        ("/v1/models", {"X-API-Key": "tml-carol", "anthropic-version": "2023-06-01"}, "invalid x-api-key"),
        ("/anthropic/api/v1/models", none, "x-api-key header is required"),
    ):
        response = harness.client.get(path, headers=headers)
        assert response.status_code == 401 and response.json()["error"]["message"].startswith(words_), response.text
        assert "carol" not in response.text, "a key is never repeated"


def test_a_full_quota_is_429_and_what_was_submitted_before_it_is_cancelled(tmp_path: Path) -> None:
    limited_harness = make_harness(tmp_path, limits=QuotaLimits(queued_requests=1))
    services = replace(limited_harness.services, bases=Bases((SHAPE,)))
    request = {"model": nano.MODEL_NAME, "prompt": ["a", "b"], "max_tokens": 4}
    status, _ = asyncio.run(serve_request(services, "alice", COMPLETIONS, request))
    assert status == 429
    kinds = [row.kind for row in incoming(services.futures._db, nano.MODEL_NAME)]
    assert kinds == ["sample", "cancel"]
    close(limited_harness)


def test_a_disconnect_cancels_the_samples(harness: Harness) -> None:
    async def scenario() -> None:
        answering = asyncio.create_task(serve_request(harness.services, "alice", CHAT, BODY))
        (request_id,) = await pending(harness)
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        assert f"{request_id}:cancel" in await pending(harness, 2)

    asyncio.run(scenario())


def test_a_failed_sample_is_its_error(harness: Harness) -> None:
    async def scenario() -> list[int]:
        statuses: list[int] = []
        for error in (UserError("no"), EngineFailedError("no")):
            answering = asyncio.create_task(serve_request(harness.services, "alice", CHAT, BODY))
            request_id = (await pending(harness))[-1]
            harness.services.futures.settle([Settlement(request_id, error=error)], {})
            harness.services.waiters.wake([request_id])
            statuses.append((await answering)[0])
        return statuses

    assert asyncio.run(scenario()) == [400, 500]


# Partials.


def partials_of(request_id: str, text: str, index: int = 0) -> list[Partial]:
    return [Partial(request_id, index, at, (token,), (-0.5,)) for at, token in enumerate(words(text))]


def stream(
    harness: Harness, partials_for: Callable[[str], Sequence[Partial]], sample_result: SampleResult, **fields: object
) -> list[StreamDelta]:
    """The events of a stream whose engine sends these partials and settles with this result."""

    async def collect(services: Services) -> list[StreamDelta]:
        prepared = prepare(services, "alice", BODY | {"stream": True} | fields, ChatRequest, IgnoredFields())
        results: list[SampleResult] = []
        async with submit_samples(prepared) as sample_ids:
            deltas: list[StreamDelta] = []
            source: AsyncIterator[StreamDelta] = stream_deltas(prepared, sample_ids, results)

            async def engine() -> None:
                await asyncio.sleep(0.05)
                for partial in partials_for(sample_ids[0].request_id):
                    services.partials.deliver([line_of(partial)])
                await asyncio.sleep(0.05)
                settle(harness, sample_ids[0].request_id, sample_result)

            working = asyncio.create_task(engine())
            async for delta in source:
                deltas.append(delta)
            await working
            assert [len(delta.sequences) for delta in results] == [len(sample_result.sequences)]
            return deltas

    return asyncio.run(collect(harness.services))


def text_of(deltas: Sequence[StreamDelta], index: int = 0) -> str:
    return "".join(delta.delta.text for delta in deltas if delta.choice and delta.choice.index == index and delta.delta)


def test_partials_are_shown_as_they_come(harness: Harness) -> None:
    deltas = stream(harness, lambda name: partials_of(name, "hello there"), result("hello there"))
    assert text_of(deltas) == "hello there" and len(deltas) > 3
    assert [delta.reason for delta in deltas if delta.reason] == ["length"]


def test_partials_that_come_before_the_response_begins_are_shown(harness: Harness) -> None:
    async def scenario(services: Services) -> tuple[list[StreamDelta], dict[str, object]]:
        prepared = prepare(services, "alice", BODY | {"stream": True}, ChatRequest, IgnoredFields())
        results: list[SampleResult] = []
        async with submit_samples(prepared) as sample_ids:
            partials = partials_of(sample_ids[0].request_id, "hello there")
            services.partials.deliver([line_of(partial) for partial in partials[:2]])
            source = stream_deltas(prepared, sample_ids, results)
            first = await anext(source)
            services.partials.deliver([line_of(partial) for partial in partials[2:]])
            settle(harness, sample_ids[0].request_id, result("hello there"))
            deltas = [first, *[delta async for delta in source]]
        async with submit_samples(prepared):
            pass  # its client left before the response began
        return deltas, dict(services.partials._early)

    deltas, early = asyncio.run(scenario(harness.services))
    assert text_of(deltas) == "hello there" and len(deltas) > 3
    assert early == {}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_during_the_submission_cancels_its_samples(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    submission_began, client_left = threading.Event(), threading.Event()
    submit = harness.services.futures.submit

    def slow(new: NewFuture) -> object:
        submission_began.set()
        assert client_left.wait(15)
        return submit(new)

    monkeypatch.setattr(harness.services.futures, "submit", slow)

    async def scenario(services: Services) -> None:
        prepared = prepare(services, "alice", BODY | {"stream": stream}, ChatRequest, IgnoredFields())

        async def client() -> None:
            async with submit_samples(prepared):
                pass

        serving = asyncio.create_task(client())
        await asyncio.to_thread(submission_began.wait, 15)
        serving.cancel()
        asyncio.get_running_loop().call_later(
            0.3, client_left.set
        )  # the row comes after a cancellation that does not wait
        with pytest.raises(asyncio.CancelledError):
            await serving

    asyncio.run(scenario(harness.services))
    rows = incoming(harness.services.futures._db, nano.MODEL_NAME)
    assert [row.kind for row in rows] == ["sample", "cancel"] and harness.services.partials._early == {}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_lost_partials_come_with_the_result(harness: Harness, lost: int) -> None:
    def partials_without_one(name: str) -> list[Partial]:
        partials = partials_of(name, "hello there")
        return partials[:lost] + partials[lost + 1 :]

    deltas = stream(harness, partials_without_one, result("hello there"))
    assert text_of(deltas) == "hello there" and len(deltas) <= lost + 1


def test_several_choices_are_kept_apart(harness: Harness) -> None:
    def interleave_partials(name: str) -> list[Partial]:
        pairs = zip(partials_of(name, "one two"), partials_of(name, "six ten", 1), strict=True)
        return [partial for pair in pairs for partial in pair]

    deltas = stream(harness, interleave_partials, result("one two", "six ten"), n=2)
    assert (text_of(deltas), text_of(deltas, 1)) == ("one two", "six ten")


def test_reasoning_is_streamed(harness: Harness) -> None:
    written = "<think>\nso it is\n</think>\n\nhello there"
    deltas = stream(harness, lambda name: partials_of(name, written), result(written))
    text_deltas = [delta.delta for delta in deltas if delta.delta]
    assert (
        "".join(text_delta.reasoning for text_delta in text_deltas) == "so it is" and text_of(deltas) == "hello there"
    )
    assert sum(bool(text_delta.reasoning) for text_delta in text_deltas) > 1, "not all of it at its end"
    together = stream(harness, lambda name: partials_of(name, written), result(written), separate_reasoning=False)
    assert text_of(together) == written


def test_a_result_that_contradicts_what_was_shown_is_an_error(harness: Harness) -> None:
    with pytest.raises(EngineFailedError, match="its tokens differ"):
        stream(harness, lambda name: partials_of(name, "hello"), result("goodbye"))


def test_lines_that_are_none_of_ours_are_passed_over() -> None:
    async def scenario() -> None:
        partials = Partials()
        with partials.listen(["a"]) as queue:
            partials.deliver(["+", "+{}", "+[1]", '+["b",0,0,[1],[0.0],[]]', line_of(Partial("a", 0, 1, (2,), (0.0,)))])
            assert queue.get_nowait().tokens == (2,) and queue.empty()
        partials.deliver([line_of(Partial("a", 0, 0, (1,), (0.0,)))])
        assert queue.empty()

    asyncio.run(scenario())


# Implicit sessions.


def test_a_tenant_has_one_implicit_session_until_it_is_old_or_over(harness: Harness) -> None:
    now = [1000.0]
    services = harness.services
    server_sessions = ServerSessions(services.sessions, services.sampling_sessions, 300.0, lambda: now[0])
    implicit = ImplicitSessions(server_sessions)
    sample_ids = [implicit.next_sample("alice", nano.MODEL_NAME, path) for path in (None, None, "tinker://x/weights/y")]
    assert len({sample_id.session_id for sample_id in sample_ids}) == 1
    assert len({sample_id.request_id for sample_id in sample_ids}) == 3
    assert sample_ids[0].sampling_session == sample_ids[1].sampling_session != sample_ids[2].sampling_session
    assert implicit.next_sample("bob", nano.MODEL_NAME, None).session_id != sample_ids[0].session_id
    now[0] += SESSION_LIFETIME_S
    replaced = implicit.next_sample("alice", nano.MODEL_NAME, None)
    assert replaced.session_id != sample_ids[0].session_id
    assert services.sessions.get("alice", sample_ids[0].session_id).state == "finished"
    assert services.sessions.get("alice", replaced.session_id).tags == ["standing"]
    services.sessions.close(replaced.session_id, "silent")
    now[0] += 30
    assert implicit.next_sample("alice", nano.MODEL_NAME, None).session_id != replaced.session_id


def test_a_waiting_client_keeps_the_session_alive(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[str] = []
    monkeypatch.setattr(Sessions, "keep", lambda _self, _tenant_id, session_id: beats.append(session_id))
    now = [0.0]
    services = harness.services
    server_sessions = ServerSessions(services.sessions, services.sampling_sessions, 40.0, lambda: now[0])
    implicit = ImplicitSessions(server_sessions)
    sample_id = implicit.next_sample("alice", nano.MODEL_NAME, None)
    for _ in range(10):
        now[0] += 3
        implicit.keep("alice", sample_id.session_id)
    assert beats == [sample_id.session_id] * 2  # every ten seconds of thirty, and not the first ones
