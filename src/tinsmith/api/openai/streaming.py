"""Streaming: merges the token stream of an engine and the stored results into one stream of chunks.

Streamed tokens may be lost; the stored result is authoritative. Tokens missing from the stream are taken from the
result. If a result contradicts tokens that were already sent, the stream ends with an error. When a client disconnects,
its samples are cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from typing import TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tinsmith.api.openai.generation import (
    Begin,
    Prepared,
    cancel_samples,
    record,
    sample_all,
    settled,
    submitted_samples,
)
from tinsmith.api.operation import run
from tinsmith.chat.choices import Choice, TextPiece
from tinsmith.chat.harmony import new_choice
from tinsmith.chat.results import ClientAnswer, Event, finish_reason, read_sequence
from tinsmith.errors import EngineFailedError, TinsmithError
from tinsmith.store.implicit_sessions import SampleId
from tinsmith.types import Partial, SampledSequence, SampleResult
from tinsmith.wire.bodies import JSON_TYPE, write_json_line

T = TypeVar("T")

KEEP_ALIVE_S = 15.0
EVENT_STREAM = "text/event-stream"
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class News:
    """A chunk of one choice; the last one has a `reason`. Without a piece it is a keep-alive."""

    choice: Choice | None = None
    piece: TextPiece | None = None
    reason: str | None = None


async def follow(prepared: Prepared, seats: Sequence[SampleId], results: list[SampleResult]) -> AsyncIterator[News]:
    """Yield the chunks of all choices in order of arrival. At the end `results` has the result of every prompt."""
    number = prepared.plan.num_choices
    choices = [new_choice(prepared.plan, prepared.text, index) for index in range(len(seats) * number)]
    of_seat = {seat.request_id: choices[at * number : (at + 1) * number] for at, seat in enumerate(seats)}
    found: dict[str, SampleResult] = {}
    with prepared.services.partials.listen(list(of_seat)) as queue:
        ends = {asyncio.create_task(settled(prepared.services, seat)) for seat in seats}
        coming: asyncio.Task[Partial] = asyncio.create_task(queue.get())
        try:
            while ends:
                done, _ = await asyncio.wait({*ends, coming}, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    yield News()
                if coming in done:
                    partial = coming.result()
                    coming = asyncio.create_task(queue.get())
                    if partial.request_id not in found:
                        news = _of_partial(of_seat[partial.request_id], partial)
                        if news:
                            yield news
                for end in ends & done:
                    result = end.result()
                    found[result.request_id] = result
                    for choice, sequence in zip(of_seat[result.request_id], result.sequences, strict=True):
                        yield _of_end(prepared, choice, sequence)
                ends -= done
        finally:
            for task in (*ends, coming):
                task.cancel()
    results += [found[seat.request_id] for seat in seats]
    await record(prepared, results)


def _of_partial(choices: Sequence[Choice], partial: Partial) -> News | None:
    choice = choices[partial.index]
    if partial.start != len(choice.token_ids):
        return None  # earlier tokens were lost; the result has them
    tops = partial.topk or [((), ())] * len(partial.tokens)
    for token_id, logprob, top in zip(partial.tokens, partial.logprobs, tops, strict=True):
        choice.push(token_id, logprob, top)
    piece = choice.piece()
    return News(choice, piece) if piece else None


def _of_end(prepared: Prepared, choice: Choice, sequence: SampledSequence) -> News:
    sent = len(choice.token_ids)
    if sequence.tokens_T[:sent].tolist() != choice.token_ids:
        raise EngineFailedError("the engine was replaced during the response, and its tokens differ; send it again")
    read_sequence(choice, sequence, sent)
    piece = choice.piece()
    return News(choice, piece, finish_reason(prepared.plan, choice.num_calls, sequence.stop_reason))


async def respond(request: Request, prepared: Prepared, answer: ClientAnswer, begin: Begin = None) -> Response:
    """Sample, and send the answer whole or as events."""
    if prepared.plan.stream:  # refuse invalid requests before the stream begins, while a status can still be sent
        async with AsyncExitStack() as stack:
            seats = await stack.enter_async_context(submitted_samples(prepared))
            if begin is not None:
                await run(begin, seats)
            return Events(_events(prepared, seats, answer), stack.pop_all(), prepared.headers)
    results = await cancel_on_disconnect(request.receive, sample_all(prepared, begin))
    content = await run(lambda: orjson.dumps(answer.whole(results)))
    return Response(content, headers=prepared.headers, media_type=JSON_TYPE)


async def _events(prepared: Prepared, seats: list[SampleId], answer: ClientAnswer) -> AsyncGenerator[bytes, None]:
    results: list[SampleResult] = []
    try:
        for event in answer.begun():
            yield _written(event)
        async for news in follow(prepared, seats, results):
            if news.choice is None or news.piece is None:
                yield _written(answer.keep_alive) if answer.keep_alive else STILL_THERE
                continue
            for event in answer.added(news.choice, news.piece, news.reason):
                yield _written(event)
        for event in await run(list, answer.ended(results)):
            yield _written(event)
        if answer.ends_with_mark:
            yield DONE
    except TinsmithError as error:
        await run(cancel_samples, prepared.services, seats)
        for event in await run(list, answer.failed(error)):
            yield _written(event)


class Events(StreamingResponse):
    """Server-sent events. If the client disconnects, the source is closed."""

    def __init__(
        self, source: AsyncGenerator[bytes, None], samples: AsyncExitStack, headers: Mapping[str, str]
    ) -> None:
        """`samples` is closed at the end, with the exception if one was raised."""
        super().__init__(source, media_type=EVENT_STREAM, headers={**HEADERS, **headers})
        self._source = source
        self._samples = samples

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            async with self._samples, aclosing(self._source):
                await cancel_on_disconnect(receive, self.stream_response(send))


async def cancel_on_disconnect(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Return the value of `work`. If the client disconnects, cancel `work` and raise ClientDisconnect."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait({working, watching})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":  # the body was read earlier
        pass


def _written(event: Event) -> bytes:
    name, content = event
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + write_json_line(content) + b"\n\n"


STILL_THERE = b": still there\n\n"
DONE = b"data: [DONE]\n\n"
