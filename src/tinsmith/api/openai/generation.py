"""Sampling for clients that wait for the response on one connection: a plan becomes futures, whose results become the
response.

Such a request takes the same path as asample: admission, quotas, durable futures, usage. Every coroutine of this module
may be cancelled at any point, and then cancels its samples. `answer` serves one non-streaming request without HTTP; the
routes use the same functions.
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
from starlette.requests import Request

from tinsmith.api.admission import check_sample
from tinsmith.api.errors import anthropic_text
from tinsmith.api.ignored_fields import build_header
from tinsmith.api.operation import (
    JsonObject,
    Services,
    authenticate,
    capture_session,
    new_ignored,
    read_body,
    report_ignored,
    run,
)
from tinsmith.api.routes.futures import outcome_of
from tinsmith.api.routes.sampling import most_tokens
from tinsmith.batch.openai import MESSAGES
from tinsmith.chat.chats import ChatRequest, CompletionRequest
from tinsmith.chat.generation_request import ContextLengthError, GenerationPlan, ModelTarget
from tinsmith.chat.harmony import new_choice
from tinsmith.chat.messages import CountRequest, MessageAnswer, MessageRequest, anthropic_error
from tinsmith.chat.responses import ResponseAnswer, ResponseRequest, refuse_in_batch
from tinsmith.chat.results import ChatAnswer, ClientAnswer, CompletionAnswer, openai_error, read_sequence
from tinsmith.chat.splicing import answered
from tinsmith.chat.texts import Text
from tinsmith.chat.tokens import GenerateRequest
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
from tinsmith.store.checkpoints import parse_path
from tinsmith.store.futures import FutureOutcome, NewFuture
from tinsmith.store.implicit_sessions import SampleId
from tinsmith.types import ModelShape, Sample, SampleResult
from tinsmith.wire.bodies import JSON_TYPE, decode
from tinsmith.wire.fields import IgnoredFields, read_object, validate
from tinsmith.wire.sampling import read_sample, read_sample_result, sample_body

T = TypeVar("T")
BATCH_AGENT = "tinsmith batch"
"""The user agent of lines of batch files."""

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
Kind = type[ChatRequest] | type[CompletionRequest] | type[MessageRequest] | type[CountRequest] | type[GenerateRequest]
KINDS: Mapping[str, tuple[Kind, type[ClientAnswer]]] = {
    CHAT: (ChatRequest, ChatAnswer),
    COMPLETIONS: (CompletionRequest, CompletionAnswer),
    MESSAGES: (MessageRequest, MessageAnswer),
}
Begin = Callable[[list[SampleId]], None] | None
"""Called on a worker thread with the samples of a request, before it waits for their results."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A valid request of a tenant: the weights to sample from, and its plan. `capture` is the session that records the
    exchange, and `ignored` names the request's fields without effect.
    """

    services: Services
    tenant_id: str
    shape: ModelShape
    model_path: str | None
    text: Text
    plan: GenerationPlan
    capture: str | None = None
    ignored: tuple[str, ...] = ()

    @property
    def headers(self) -> Mapping[str, str]:
        return build_header(self.ignored)


async def answer(
    services: Services, tenant_id: str, endpoint: str, body: Mapping[str, object]
) -> tuple[int, JsonObject]:
    """Serve one request as the route `endpoint`, one of KINDS or RESPONSES, would. Returns its status and JSON body.

    An invalid request does not raise. It returns OpenAI's error body, {"error": {message, type, param, code}}, or that
    of Anthropic's messages. 429 means that a quota is exhausted, 5xx that the request may be retried. Cancelling the
    call cancels the samples. `stream` is refused.
    """
    try:
        if endpoint not in (*KINDS, RESPONSES):
            raise NotFoundError(f"endpoint is {endpoint!r}; use one of {', '.join(map(repr, (*KINDS, RESPONSES)))}")
        if body.get("stream"):
            raise not_supported("stream", "a line of a file has one response; leave it out")
        if endpoint == RESPONSES:
            return 200, await _response(services, tenant_id, body)
        kind, answer_kind = KINDS[endpoint]
        prepared = await run(prepare, services, tenant_id, body, kind, new_ignored(services))
        report_ignored(services, tenant_id, BATCH_AGENT, prepared.ignored)
        results = await sample_all(prepared)
        return 200, await run(answer_kind(prepared.plan, prepared.text).whole, results)
    except TinsmithError as error:
        status = HTTPStatus.BAD_REQUEST if isinstance(error, NotSupportedError) else error.status
        if endpoint == MESSAGES:
            return status, anthropic_error(anthropic_text(str(error), status, error), status)
        return status, {"error": openai_error(str(error), status, error)}


async def _response(services: Services, tenant_id: str, body: Mapping[str, object]) -> JsonObject:
    """A response that is not stored."""
    ignored = new_ignored(services)
    request = validate(ResponseRequest, body, ignored)
    refuse_in_batch(request)
    request = request.model_copy(update={"store": False})
    prepared = await run(prepare_plan, services, tenant_id, request.model, request.plan, ignored)
    report_ignored(services, tenant_id, BATCH_AGENT, prepared.ignored)
    results = await sample_all(prepared)
    return await run(ResponseAnswer(request, prepared.plan, prepared.text).whole, results)


async def read(request: Request, kind: Kind) -> Prepared:
    """Authenticate and validate a request."""

    def make(services: Services, tenant_id: str, values: JsonObject, ignored: IgnoredFields) -> Prepared:
        return prepare(services, tenant_id, values, kind, ignored, capture_session(request))

    return await read_as(request, make)


async def read_as(request: Request, make: Callable[[Services, str, JsonObject, IgnoredFields], T]) -> T:
    """Authenticate a request and call `make` with its body on a worker thread. Reports the fields that it ignored."""
    services, tenant_id = await authenticate(request)
    body, encoding = await read_body(request, JSON_TYPE), request.headers.get("content-encoding")
    ignored = new_ignored(services)

    def work() -> T:
        return make(services, tenant_id, read_object(decode(body, encoding, services.settings.max_body_bytes)), ignored)

    result = await run(work)
    report_ignored(services, tenant_id, request.headers.get("user-agent", ""), ignored.names)
    return result


def prepare(
    services: Services,
    tenant_id: str,
    values: Mapping[str, object],
    kind: Kind,
    ignored: IgnoredFields,
    capture: str | None = None,
) -> Prepared:
    """Validate a request, on a worker thread: reads the database and runs the tokenizer. Raises UserError."""
    request = validate(kind, values, ignored)
    plan: Callable[[Text], GenerationPlan] = request.plan
    if capture is not None and isinstance(request, ChatRequest | CountRequest):
        plan = partial(request.plan, recorded=partial(services.exchanges.find_answered, tenant_id, capture))
    return prepare_plan(services, tenant_id, request.model, plan, ignored, capture)


def prepare_plan(
    services: Services,
    tenant_id: str,
    model: str | None,
    plan: Callable[[Text], GenerationPlan],
    ignored: IgnoredFields,
    capture: str | None = None,
) -> Prepared:
    """Like `prepare`, for a request that is already validated."""
    shape, model_path = weights_of(services, tenant_id, ModelTarget.of(named_or_only(services, model)))
    text = services.texts.of(shape)
    planned = plan(text)
    ignored.advise(planned.ignored)
    return Prepared(services, tenant_id, shape, model_path, text, planned, capture, ignored.names)


def named_or_only(services: Services, model: str | None) -> str:
    """Return the model that a request names, or the server's only base model."""
    names = [shape.name for shape in services.bases]
    if model is None and len(names) != 1:
        raise RequestError("model", f"model is missing; this server serves {', '.join(names)}")
    return names[0] if model is None else model


def weights_of(services: Services, tenant_id: str, target: ModelTarget) -> tuple[ModelShape, str | None]:
    base_model = target.base_model
    try:
        if target.model_path is not None:
            checkpoint = services.checkpoints.get(tenant_id, parse_path(target.model_path, "model"))
            if base_model not in (None, checkpoint.base_model):
                raise RequestError(
                    "model", f"model names {base_model!r}, but its checkpoint was trained on {checkpoint.base_model!r}"
                )
            base_model = checkpoint.base_model
        return services.bases.get(base_model or ""), target.model_path
    except NotFoundError as error:
        raise ModelNotFoundError("model", str(error), "model_not_found") from error


class ModelNotFoundError(RequestError, NotFoundError):
    """The model does not exist."""


# Samples.


async def sample_all(prepared: Prepared, begin: Begin = None) -> list[SampleResult]:
    """Sample for every prompt, and wait for all results."""
    async with submitted_samples(prepared) as seats:
        if begin is not None:
            await run(begin, seats)
        results = [await settled(prepared.services, seat) for seat in seats]
        await record(prepared, results)
        return results


async def record(prepared: Prepared, results: Sequence[SampleResult]) -> None:
    """Record the exchange of a captured request before its response is sent."""
    if prepared.capture is not None and not prepared.plan.echo_only:
        await asyncio.shield(run(_record, prepared, prepared.capture, results))


def _record(prepared: Prepared, session: str, results: Sequence[SampleResult]) -> None:
    plan, version = prepared.plan, prepared.model_path or prepared.shape.name
    digests: list[str] | None = None
    if plan.conversation is not None:
        digests = []
        for sequence in results[0].sequences:
            choice = new_choice(plan, prepared.text, len(digests))
            read_sequence(choice, sequence)
            digests.append(answered(plan.conversation, choice.piece()))
    exchanges = prepared.services.exchanges
    exchanges.record(prepared.tenant_id, session, version, plan.prompts, results, digests)


@asynccontextmanager
async def submitted_samples(prepared: Prepared) -> AsyncIterator[list[SampleId]]:
    """Submit a plan's samples. An exception inside the block cancels the pending ones."""
    services, seats = prepared.services, list[SampleId]()
    try:
        submission = asyncio.create_task(run(submit_all, prepared, seats))
        try:
            await asyncio.shield(submission)
        finally:
            await asyncio.wait({submission})  # `seats` must name every submitted sample, so that it can be cancelled
        yield seats
    except BaseException:
        await asyncio.shield(run(cancel_samples, services, seats))
        raise
    finally:
        services.partials.forget(seat.request_id for seat in seats)
        for seat in seats:
            services.sampling_sessions.acknowledge(seat.sampling_session_id, [seat.request_id])


def submit_all(prepared: Prepared, seats: list[SampleId]) -> None:
    for prompt in prepared.plan.prompts:
        _submit(prepared, prompt, seats)


def _submit(prepared: Prepared, prompt: Sequence[int], seats: list[SampleId]) -> None:
    services, tenant_id, plan, shape = prepared.services, prepared.tenant_id, prepared.plan, prepared.shape
    params = plan.params
    if params.seed is None:
        # With a fixed seed, an engine that takes over samples the same tokens.
        params = replace(params, seed=secrets.randbits(62))
    body = sample_body(prompt, plan.num_choices, params, _shown(plan), stream=plan.stream, images=plan.images)
    sample = read_sample(orjson.dumps(body), "", prepared.model_path, shape.vision)
    _check(sample, shape, plan)
    seat = services.implicit_sessions.next_sample(tenant_id, shape.name, prepared.model_path)
    body |= {"sampling_session_id": seat.sampling_session_id, "seq_id": seat.seq_id}
    new = NewFuture(
        request_id=seat.request_id,
        tenant_id=tenant_id,
        session_id=seat.session_id,
        base_model=shape.name,
        kind="sample",
        body=orjson.dumps(body),
        num_tokens=most_tokens(sample, shape),
        sampling_session_id=seat.sampling_session_id,
        seq_id=seat.seq_id,
    )
    services.quotas.admit(new)
    seats.append(seat)
    if plan.stream:
        services.partials.expect(seat.request_id)
    services.futures.submit(services.dispatch.assign(new, sample))


def _shown(plan: GenerationPlan) -> Mapping[str, object]:
    """Return the fields of an asample that request the logprobs of the response."""
    top = plan.top_logprobs
    # An echo alone draws no token that is returned, so its prompt may fill the context, as scored prompts may.
    echoed = 0 if plan.echo_only and top is None else top
    counts = [count for count in (echoed if plan.echo else None, plan.prompt_logprobs) if count is not None]
    of_prompt = {"prompt_logprobs": True, "topk_prompt_logprobs": max(counts)} if counts else {}
    return of_prompt if top is None else {"topk_sample_logprobs": top} | of_prompt


def _check(sample: Sample, shape: ModelShape, plan: GenerationPlan) -> None:
    prompt, max_tokens = len(sample.prompt_T), sample.params.max_tokens
    if (max_tokens or 1) > sample.max_answer_tokens(shape.max_context_length):
        raise ContextLengthError(plan.prompt_field, prompt, max_tokens, shape.max_context_length)
    if adjustments := sample.params.adjustments:
        biased = max((token_id for token_id, _ in adjustments.logit_bias), default=0)
        for name, token_id in (
            ("logit_bias", biased),
            ("allowed_token_ids", max(adjustments.allowed_token_ids or (0,))),
        ):
            if token_id >= shape.vocab_size:
                raise RequestError(name, f"{name} names token {token_id}; ids lie below {shape.vocab_size}")
    check_sample(sample, shape)


def cancel_samples(services: Services, seats: Sequence[SampleId]) -> None:
    """Cancel the pending samples."""
    for seat in seats:
        with contextlib.suppress(NotFoundError):
            services.futures.cancel(seat.tenant_id, seat.request_id, "its client disconnected")


async def settled(services: Services, seat: SampleId) -> SampleResult:
    """Wait for the result of a sample. Raises its error."""
    with services.waiters.watch(seat.request_id) as woken:
        while (outcome := await outcome_of(services, seat.tenant_id, seat.request_id)) is None:
            if services.waiters.closed:
                raise StoppingError
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(services.implicit_sessions.heartbeat_s):
                    await woken.wait()
            woken.clear()
            base_model = await run(services.futures.base_model_of, seat.request_id, on=services.threads.quick)
            if why := await run(services.cannot_start, base_model or "", on=services.threads.quick):
                raise EngineFailedError(why)
            await run(services.implicit_sessions.keep, seat.tenant_id, seat.session_id, on=services.threads.quick)
    return _result_of(outcome, seat.request_id)


def sample_outcome(services: Services, tenant_id: str, request_id: str) -> SampleResult | None:
    """Return the result of a sample, or None while it is pending; blocks. Raises the sample's error."""
    outcome = services.futures.outcome(tenant_id, request_id)
    return None if outcome is None else _result_of(outcome, request_id)


def _result_of(outcome: FutureOutcome, request_id: str) -> SampleResult:
    if outcome.error is not None:
        raise UserError(outcome.error) if outcome.category == "user" else EngineFailedError(outcome.error)
    assert outcome.body is not None
    return read_sample_result(outcome.body, request_id)
