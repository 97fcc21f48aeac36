"""Streaming: merges the token stream of an engine and the stored results into one stream of chunks.

Streamed tokens may be lost; the stored result is authoritative. Tokens missing from the stream are taken from the
result. If a result contradicts tokens that were already sent, the stream ends with an error. When a client disconnects,
its samples are cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tinsmith.api.event_stream import (
    DONE,
    KEEP_ALIVE_COMMENT,
    KEEP_ALIVE_S,
    EventStreamResponse,
    cancel_on_disconnect,
    encode_event,
)
from tinsmith.api.openai.generation import (
    OnSubmitted,
    Prepared,
    cancel_samples,
    record,
    sample_all,
    submit_samples,
    wait_for_sample,
)
from tinsmith.api.request import run
from tinsmith.chat.choices import Choice, CompletionDelta
from tinsmith.chat.harmony import new_choice
from tinsmith.chat.results import ClientAnswer, finish_reason, read_sequence
from tinsmith.errors import EngineFailedError, TinsmithError
from tinsmith.store.server_sessions import SampleId
from tinsmith.types import Partial, SampledSequence, SampleResult
from tinsmith.wire.bodies import JSON_TYPE

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """The next part of one choice; the last one has a `reason`. Without `delta` it is a keep-alive."""

    choice: Choice | None = None
    delta: CompletionDelta | None = None
    reason: str | None = None


async def stream_deltas(
    prepared: Prepared, sample_ids: Sequence[SampleId], results: list[SampleResult]
) -> AsyncIterator[StreamDelta]:
    """Yield the deltas of all choices in order of arrival. At the end `results` has the result of every prompt."""
    num_choices = prepared.plan.num_choices
    choices = [new_choice(prepared.plan, prepared.tokenizer, index) for index in range(len(sample_ids) * num_choices)]
    choices_by_request = {
        sample_id.request_id: choices[position * num_choices : (position + 1) * num_choices]
        for position, sample_id in enumerate(sample_ids)
    }
    results_by_request: dict[str, SampleResult] = {}
    with prepared.services.partials.listen(list(choices_by_request)) as queue:
        pending_results = {
            asyncio.create_task(wait_for_sample(prepared.services, sample_id)) for sample_id in sample_ids
        }
        next_partial: asyncio.Task[Partial] = asyncio.create_task(queue.get())
        try:
            while pending_results:
                finished, _ = await asyncio.wait(
                    {*pending_results, next_partial}, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not finished:
                    yield StreamDelta()
                if next_partial in finished:
                    partial = next_partial.result()
                    next_partial = asyncio.create_task(queue.get())
                    if partial.request_id not in results_by_request:
                        delta = _delta_of_partial(choices_by_request[partial.request_id], partial)
                        if delta:
                            yield delta
                for result_task in pending_results & finished:
                    result = result_task.result()
                    results_by_request[result.request_id] = result
                    for choice, sequence in zip(choices_by_request[result.request_id], result.sequences, strict=True):
                        choice.weight_version = result.weight_version
                        yield _final_delta(prepared, choice, sequence)
                pending_results -= finished
        finally:
            for task in (*pending_results, next_partial):
                task.cancel()
    results += [results_by_request[sample_id.request_id] for sample_id in sample_ids]
    await record(prepared, results)


def _delta_of_partial(choices: Sequence[Choice], partial: Partial) -> StreamDelta | None:
    choice = choices[partial.index]
    if partial.start != len(choice.token_ids):
        return None  # earlier tokens were lost; the result has them
    tops = partial.topk or [((), ())] * len(partial.tokens)
    for token_id, logprob, top in zip(partial.tokens, partial.logprobs, tops, strict=True):
        choice.push(token_id, logprob, top)
    delta = choice.take_delta()
    return StreamDelta(choice, delta) if delta else None


def _final_delta(prepared: Prepared, choice: Choice, sequence: SampledSequence) -> StreamDelta:
    num_sent = len(choice.token_ids)
    if sequence.tokens_T[:num_sent].tolist() != choice.token_ids:
        raise EngineFailedError("the engine was replaced during the response, and its tokens differ; send it again")
    read_sequence(choice, sequence, num_sent)
    delta = choice.take_delta()
    return StreamDelta(choice, delta, finish_reason(prepared.plan, choice.num_calls, sequence.stop_reason))


async def respond(
    request: Request, prepared: Prepared, answer: ClientAnswer, on_submitted: OnSubmitted = None
) -> Response:
    """Sample, and send the answer whole or as events."""
    if prepared.plan.stream:  # refuse invalid requests before the stream begins, while a status can still be sent
        async with AsyncExitStack() as stack:
            sample_ids = await stack.enter_async_context(submit_samples(prepared))
            if on_submitted is not None:
                await run(on_submitted, sample_ids)
            return EventStreamResponse(_events(prepared, sample_ids, answer), stack.pop_all(), prepared.headers)
    results = await cancel_on_disconnect(request.receive, sample_all(prepared, on_submitted))
    content = await run(lambda: orjson.dumps(answer.build_response(results)))
    return Response(content, headers=prepared.headers, media_type=JSON_TYPE)


async def _events(prepared: Prepared, sample_ids: list[SampleId], answer: ClientAnswer) -> AsyncGenerator[bytes, None]:
    results: list[SampleResult] = []
    try:
        for event in answer.start_events():
            yield encode_event(*event)
        async for stream_delta in stream_deltas(prepared, sample_ids, results):
            if stream_delta.choice is None or stream_delta.delta is None:
                yield encode_event(*answer.keep_alive) if answer.keep_alive else KEEP_ALIVE_COMMENT
                continue
            for event in answer.delta_events(stream_delta.choice, stream_delta.delta, stream_delta.reason):
                yield encode_event(*event)
        for event in await run(list, answer.end_events(results)):
            yield encode_event(*event)
        if answer.ends_with_done:
            yield DONE
    except TinsmithError as error:
        await run(cancel_samples, prepared.services, sample_ids)
        for event in await run(list, answer.error_events(error)):
            yield encode_event(*event)
