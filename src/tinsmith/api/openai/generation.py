"""Sampling for clients that wait for the response on one connection: a plan becomes futures, whose results become the
response.

Such a request takes the same path as asample: admission, quotas, durable futures, usage. Every coroutine of this module
may be cancelled at any point, and then cancels its samples. `serve_request` serves one non-streaming request without
HTTP; the routes use the same functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import TypeVar

import orjson

from tinsmith.api.errors import anthropic_text
from tinsmith.api.ignored_fields import build_header
from tinsmith.api.openai.weights import ServedWeights, find_weights, resolve_model_name
from tinsmith.api.request import Call, JsonObject, capture_session, new_ignored, read_body, report_ignored, run
from tinsmith.api.routes.futures import read_outcome
from tinsmith.api.services import Services
from tinsmith.batch.openai import MESSAGES
from tinsmith.chat.chats import ChatRequest, CompletionRequest
from tinsmith.chat.generation_request import ContextLengthError, GenerationPlan, ModelTarget
from tinsmith.chat.harmony import new_choice
from tinsmith.chat.messages import CountRequest, MessageAnswer, MessageRequest, anthropic_error
from tinsmith.chat.responses import ResponseAnswer, ResponseRequest, refuse_in_batch
from tinsmith.chat.results import ChatAnswer, ClientAnswer, CompletionAnswer, openai_error, read_sequence
from tinsmith.chat.splicing import digest_answer
from tinsmith.chat.tokenizer import ModelTokenizer
from tinsmith.chat.tokens import GenerateRequest
from tinsmith.cluster.sample_admission import make_request
from tinsmith.errors import (
    EngineFailedError,
    NotFoundError,
    NotSupportedError,
    RequestError,
    StoppingError,
    TinsmithError,
    UserError,
    not_supported,
)
from tinsmith.store.futures import FutureOutcome
from tinsmith.store.server_sessions import SampleId
from tinsmith.types import ModelShape, Sample, SampleResult
from tinsmith.wire.bodies import JSON_TYPE, decode
from tinsmith.wire.fields import IgnoredFields, read_object, validate
from tinsmith.wire.sampling import read_sample, read_sample_result, sample_body

T = TypeVar("T")
BATCH_AGENT = "tinsmith batch"
"""The user agent of lines of batch files."""

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
RequestType = (
    type[ChatRequest] | type[CompletionRequest] | type[MessageRequest] | type[CountRequest] | type[GenerateRequest]
)
REQUEST_TYPES: Mapping[str, tuple[RequestType, type[ClientAnswer]]] = {
    CHAT: (ChatRequest, ChatAnswer),
    COMPLETIONS: (CompletionRequest, CompletionAnswer),
    MESSAGES: (MessageRequest, MessageAnswer),
}
OnSubmitted = Callable[[list[SampleId]], None] | None
"""Called on a worker thread with the samples of a request, before it waits for their results."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A valid request of a tenant: the weights to sample from, and its plan. `capture` is the session that records the
    exchange, and `ignored` names the request's fields without effect.
    """

    services: Services
    tenant_id: str
    weights: ServedWeights
    tokenizer: ModelTokenizer
    plan: GenerationPlan
    capture: str | None = None
    ignored: tuple[str, ...] = ()

    @property
    def headers(self) -> Mapping[str, str]:
        return build_header(self.ignored)


async def serve_request(
    services: Services, tenant_id: str, endpoint: str, body: Mapping[str, object]
) -> tuple[int, JsonObject]:
    """Serve a request as the route `endpoint`, one of REQUEST_TYPES or RESPONSES, does. Returns status and JSON body.

    An invalid request does not raise. It returns OpenAI's error body, {"error": {message, type, param, code}}, or that
    of Anthropic's messages. 429 means that a quota is exhausted, 5xx that the request may be retried. Cancelling the
    call cancels the samples. `stream` is refused.
    """
    try:
        if endpoint not in (*REQUEST_TYPES, RESPONSES):
            raise NotFoundError(
                f"endpoint is {endpoint!r}; use one of {', '.join(map(repr, (*REQUEST_TYPES, RESPONSES)))}"
            )
        if body.get("stream"):
            raise not_supported("stream", "a line of a file has one response; leave it out")
        if endpoint == RESPONSES:
            return 200, await _serve_response(services, tenant_id, body)
        kind, answer_kind = REQUEST_TYPES[endpoint]
        prepared = await run(prepare, services, tenant_id, body, kind, new_ignored(services))
        report_ignored(services, tenant_id, BATCH_AGENT, prepared.ignored)
        results = await sample_all(prepared)
        return 200, await run(answer_kind(prepared.plan, prepared.tokenizer).build_response, results)
    except TinsmithError as error:
        status = HTTPStatus.BAD_REQUEST if isinstance(error, NotSupportedError) else error.status
        if endpoint == MESSAGES:
            return status, anthropic_error(anthropic_text(str(error), status, error), status)
        return status, {"error": openai_error(str(error), status, error)}


async def _serve_response(services: Services, tenant_id: str, body: Mapping[str, object]) -> JsonObject:
    """Serve a response that is not stored."""
    ignored = new_ignored(services)
    request = validate(ResponseRequest, body, ignored)
    refuse_in_batch(request)
    request = request.model_copy(update={"store": False})
    prepared = await run(prepare_plan, services, tenant_id, request.model, request.plan, ignored)
    report_ignored(services, tenant_id, BATCH_AGENT, prepared.ignored)
    results = await sample_all(prepared)
    return await run(ResponseAnswer(request, prepared.plan, prepared.tokenizer).build_response, results)


async def read_request(call: Call, kind: RequestType) -> Prepared:
    """Read and validate a request."""
    capture = capture_session(call.request)
    return await read_and_prepare(
        call, lambda values: prepare(call.services, call.tenant_id, values, kind, call.ignored, capture)
    )


async def read_and_prepare(call: Call, make: Callable[[JsonObject], T]) -> T:
    """Read a body and call `make` with it on a worker thread. Reports the fields that it ignored."""
    body, encoding = await read_body(call.request, (JSON_TYPE,)), call.headers.get("content-encoding")

    def work() -> T:
        return make(read_object(decode(body, encoding, call.services.settings.max_body_bytes)))

    result = await run(work)
    report_ignored(call.services, call.tenant_id, call.headers.get("user-agent", ""), call.ignored.names)
    return result


def prepare(
    services: Services,
    tenant_id: str,
    values: Mapping[str, object],
    kind: RequestType,
    ignored: IgnoredFields,
    capture: str | None = None,
) -> Prepared:
    """Validate a request, on a worker thread: reads the database and runs the tokenizer. Raises UserError."""
    request = validate(kind, values, ignored)
    make_plan: Callable[[ModelTokenizer], GenerationPlan] = request.plan
    if capture is not None and isinstance(request, ChatRequest | CountRequest):
        make_plan = partial(request.plan, find_recording=partial(services.exchanges.find_answered, tenant_id, capture))
    return prepare_plan(services, tenant_id, request.model, make_plan, ignored, capture)


def prepare_plan(
    services: Services,
    tenant_id: str,
    model: str | None,
    make_plan: Callable[[ModelTokenizer], GenerationPlan],
    ignored: IgnoredFields,
    capture: str | None = None,
) -> Prepared:
    """Plan a request that is already validated, on a worker thread. Raises UserError."""
    weights = find_weights(services, tenant_id, ModelTarget.of(resolve_model_name(services, model)))
    tokenizer = services.tokenizers.get(weights.shape)
    generation_plan = make_plan(tokenizer)
    ignored.advise(generation_plan.ignored)
    return Prepared(services, tenant_id, weights, tokenizer, generation_plan, capture, ignored.names)


# Samples.


async def sample_all(prepared: Prepared, on_submitted: OnSubmitted = None) -> list[SampleResult]:
    """Sample for every prompt, and wait for all results."""
    async with submit_samples(prepared) as sample_ids:
        if on_submitted is not None:
            await run(on_submitted, sample_ids)
        results = [await wait_for_sample(prepared.services, sample_id) for sample_id in sample_ids]
        await record(prepared, results)
        return results


async def record(prepared: Prepared, results: Sequence[SampleResult]) -> None:
    """Record the exchange of a captured request before its response is sent."""
    if prepared.capture is not None and not prepared.plan.echo_only:
        await asyncio.shield(run(_record, prepared, prepared.capture, results))


def _record(prepared: Prepared, session: str, results: Sequence[SampleResult]) -> None:
    plan = prepared.plan
    digests: list[str] | None = None
    if plan.conversation is not None:
        digests = []
        for sequence in results[0].sequences:
            choice = new_choice(plan, prepared.tokenizer, len(digests))
            read_sequence(choice, sequence)
            digests.append(digest_answer(plan.conversation, choice.take_delta()))
    exchanges = prepared.services.exchanges
    exchanges.record(prepared.tenant_id, session, plan.prompts, results, digests, plan.images)


@asynccontextmanager
async def submit_samples(prepared: Prepared) -> AsyncIterator[list[SampleId]]:
    """Submit a plan's samples. An exception inside the block cancels the pending ones."""
    services, sample_ids = prepared.services, list[SampleId]()
    try:
        submission = asyncio.create_task(run(submit_all, prepared, sample_ids))
        try:
            await asyncio.shield(submission)
        finally:
            # `sample_ids` must name every submitted sample, so that it can be cancelled.
            await asyncio.wait({submission})
        yield sample_ids
    except BaseException:
        await asyncio.shield(run(cancel_samples, services, sample_ids))
        raise
    finally:
        services.partials.forget(sample_id.request_id for sample_id in sample_ids)
        for sample_id in sample_ids:
            services.sampling_sessions.acknowledge(
                sample_id.sampling_session.sampling_session_id, [sample_id.request_id]
            )


def submit_all(prepared: Prepared, sample_ids: list[SampleId]) -> None:
    for prompt in prepared.plan.prompts:
        _submit(prepared, prompt, sample_ids)


def _submit(prepared: Prepared, prompt: Sequence[int], sample_ids: list[SampleId]) -> None:
    services, plan, weights = prepared.services, prepared.plan, prepared.weights
    params = plan.params
    if params.seed is None:
        # With a fixed seed, an engine that takes over samples the same tokens.
        params = replace(params, seed=secrets.randbits(62))
    body = sample_body(prompt, plan.num_choices, params, _logprob_fields(plan), stream=plan.stream, images=plan.images)
    sample = read_sample(orjson.dumps(body), "", weights.version_id, weights.shape.vision)
    _check_sample(sample, weights.shape, plan)
    sample_id = weights.next_sample(services, prepared.tenant_id)
    session, seq_id = sample_id.sampling_session, sample_id.seq_id
    body |= {"sampling_session_id": session.sampling_session_id, "seq_id": seq_id}
    new = make_request(session, sample_id.request_id, seq_id, orjson.dumps(body))
    new = services.sample_admission.admit(new, sample, weights.shape, inflight=weights.is_inflight)
    sample_ids.append(sample_id)
    if plan.stream:
        services.partials.expect(sample_id.request_id)
    services.futures.submit(new)


def _logprob_fields(plan: GenerationPlan) -> Mapping[str, object]:
    """Return the fields of an asample that request the logprobs of the response."""
    num_top = plan.top_logprobs
    # An echo alone draws no token that is returned, so its prompt may fill the context, as scored prompts may.
    num_top_echo = 0 if plan.echo_only and num_top is None else num_top
    counts = [count for count in (num_top_echo if plan.echo else None, plan.prompt_logprobs) if count is not None]
    prompt_fields = {"prompt_logprobs": True, "topk_prompt_logprobs": max(counts)} if counts else {}
    return prompt_fields if num_top is None else {"topk_sample_logprobs": num_top} | prompt_fields


def _check_sample(sample: Sample, shape: ModelShape, plan: GenerationPlan) -> None:
    num_prompt, max_tokens = len(sample.prompt_T), sample.params.max_tokens
    if (max_tokens or 1) > sample.max_answer_tokens(shape.max_context_length):
        raise ContextLengthError(plan.prompt_field, num_prompt, max_tokens, shape.max_context_length)
    if adjustments := sample.params.adjustments:
        max_biased_id = max((token_id for token_id, _ in adjustments.logit_bias), default=0)
        for name, token_id in (
            ("logit_bias", max_biased_id),
            ("allowed_token_ids", max(adjustments.allowed_token_ids or (0,))),
            ("reasoning", adjustments.reasoning.max_id if adjustments.reasoning else 0),
        ):
            if token_id >= shape.vocab_size:
                raise RequestError(name, f"{name} names token {token_id}; ids lie below {shape.vocab_size}")


def cancel_samples(services: Services, sample_ids: Sequence[SampleId]) -> None:
    """Cancel the pending samples."""
    for sample_id in sample_ids:
        with contextlib.suppress(NotFoundError):
            services.futures.cancel(sample_id.tenant_id, sample_id.request_id, "its client disconnected")


async def wait_for_sample(services: Services, sample_id: SampleId) -> SampleResult:
    """Wait for the result of a sample. Raises its error."""
    with services.waiters.watch(sample_id.request_id) as wake_event:
        while (outcome := await read_outcome(services, sample_id.tenant_id, sample_id.request_id)) is None:
            if services.waiters.closed:
                raise StoppingError
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(services.implicit_sessions.heartbeat_s):
                    await wake_event.wait()
            wake_event.clear()
            base_model = await run(services.futures.base_model_of, sample_id.request_id, on=services.threads.quick)
            if reason := await run(services.engines.cannot_start, base_model or "", on=services.threads.quick):
                raise EngineFailedError(reason)
            await run(
                services.implicit_sessions.keep, sample_id.tenant_id, sample_id.session_id, on=services.threads.quick
            )
    return _result_of(outcome, sample_id.request_id)


def sample_outcome(services: Services, tenant_id: str, request_id: str) -> SampleResult | None:
    """Return the result of a sample, or None while it is pending; blocks. Raises the sample's error."""
    outcome = services.futures.outcome(tenant_id, request_id)
    return None if outcome is None else _result_of(outcome, request_id)


def _result_of(outcome: FutureOutcome, request_id: str) -> SampleResult:
    if outcome.error is not None:
        raise UserError(outcome.error) if outcome.category == "user" else EngineFailedError(outcome.error)
    assert outcome.body is not None
    return read_sample_result(outcome.body, request_id)
