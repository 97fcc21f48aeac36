"""Sampling: sampling sessions, each with a fixed weight version, and samples."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import orjson
from structlog.contextvars import bind_contextvars

from tinsmith.api.declaration import operation
from tinsmith.api.openapi import COUNT, TEXT, fields
from tinsmith.api.request import Call, Draft, JsonObject
from tinsmith.api.submission import accept
from tinsmith.cluster.sample_admission import make_request
from tinsmith.errors import TooManyRequestsError, UserError
from tinsmith.store.checkpoints import parse_sampler_path
from tinsmith.store.sampling_sessions import NewSamplingSession, SamplingSession
from tinsmith.wire.fields import Body, Position, Text
from tinsmith.wire.sampling import AsampleRequest, SampleNumber, sample_of


class SamplePlace(Body):
    """Where a sample belongs: a number in a sampling session, or weights."""

    sampling_session_id: Text | None = None
    seq_id: SampleNumber | None = None
    base_model: Text | None = None
    model_path: Text | None = None


@operation(
    "POST",
    "/asample",
    "Sample",
    body=AsampleRequest,
    example={
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_session_id": "{sampling_session_id}",
        "seq_id": 5,
        "num_samples": 2,
        "sampling_params": {"max_tokens": 4},
    },
    late=True,
)
def asample(call: Call, draft: Draft[AsampleRequest]) -> JsonObject:
    """Sample in a sampling session. Without one, the sample is in the tenant's implicit session of the named weights,
    where it gets the next number, so that a repeated request is another sample.
    """
    services, sample_place = call.services, draft.read_required(SamplePlace)
    if sample_place.sampling_session_id is None:
        call, draft, sampling_session, seq_id = _in_implicit_session(call, draft, sample_place)
    else:
        if sample_place.seq_id is None:
            raise UserError("seq_id is missing; send the sample's number in its sampling session")
        sampling_session, seq_id = _active_session(call, sample_place.sampling_session_id), sample_place.seq_id
    request_id = f"{sampling_session.sampling_session_id}:{seq_id}"
    bind_contextvars(request_id=request_id)
    new, sequence_ids, refusal = make_request(sampling_session, request_id, seq_id, call.body), [], None
    try:
        shape = services.bases.get(sampling_session.base_model)
        sample = sample_of(draft.read(), request_id, sampling_session.version_id, shape.vision)
        new = services.sample_admission.admit(new, sample, shape, inflight=sampling_session.is_inflight)
        sequence_ids = [f"{request_id}:{index}" for index in range(sample.num_samples)]
    except TooManyRequestsError:
        raise  # nothing is stored; the client retries
    except UserError as error:
        refusal = error
    return {"request_id": accept(services, new, refusal), "sample_sequence_ids": sequence_ids}


def _active_session(call: Call, sampling_session_id: str) -> SamplingSession:
    """Raises NotFoundError, or GoneError if its session has ended."""
    sampling_session = call.services.sampling_sessions.get(call.tenant_id, sampling_session_id)
    call.services.sessions.require_active(call.tenant_id, sampling_session.session_id)
    return sampling_session


def _in_implicit_session(
    call: Call, draft: Draft[AsampleRequest], sample_place: SamplePlace
) -> tuple[Call, Draft[AsampleRequest], SamplingSession, int]:
    """The request as one of the tenant's implicit session, with its sampling session and its number there."""
    if sample_place.base_model is None and sample_place.model_path is None:
        raise UserError(
            "sampling_session_id is missing; send it with seq_id, or name weights: base_model or model_path"
        )
    base_model, model_path = _find_weights(call, sample_place.base_model, sample_place.model_path)
    sample_id = call.services.implicit_sessions.next_sample(call.tenant_id, base_model, model_path)
    values = {name: value for name, value in draft.values.items() if name not in SamplePlace.model_fields}
    values |= {"sampling_session_id": sample_id.sampling_session.sampling_session_id, "seq_id": sample_id.seq_id}
    call = replace(call, body=orjson.dumps(values))
    return call, replace(draft, values=values), sample_id.sampling_session, sample_id.seq_id


class CreateSamplingSessionRequest(Body):
    session_id: Text
    sampling_session_seq_id: Position
    base_model: Text | None = None
    model_path: Text | None = None


@operation(
    "POST",
    "/create_sampling_session",
    "Create a sampling session with fixed weights",
    body=CreateSamplingSessionRequest,
    answer=fields({"sampling_session_id": TEXT}),
    errors=(404, 410, 501),
    example={"session_id": "{session_id}", "sampling_session_seq_id": 5, "base_model": "{base_model}"},
)
def create_sampling_session(call: Call, request: CreateSamplingSessionRequest) -> JsonObject:
    services = call.services
    session = services.sessions.require_active(call.tenant_id, request.session_id)
    sampler_seq_id = request.sampling_session_seq_id
    base_model, model_path = _find_weights(call, request.base_model, request.model_path)
    new = NewSamplingSession(
        sampling_session_id=f"{session.session_id}:sample:{sampler_seq_id}",
        session_id=session.session_id,
        tenant_id=call.tenant_id,
        base_model=base_model,
        model_path=model_path,
        version_id=model_path,
    )
    return {"type": "create_sampling_session", "sampling_session_id": services.sampling_sessions.create(new)}


def _find_weights(call: Call, base_model: str | None, model_path: str | None) -> tuple[str, str | None]:
    """The base model and the full path of the weights to sample from; checkpoints of all kinds hold the same adapter.
    Raises UserError.
    """
    if model_path is not None:
        checkpoint = call.services.checkpoints.get(call.tenant_id, parse_sampler_path(model_path))
        if base_model is not None and base_model != checkpoint.base_model:
            raise UserError(
                f"base_model is {base_model!r}, but {model_path!r} was trained on {checkpoint.base_model!r}"
            )
        base_model, model_path = checkpoint.base_model, checkpoint.ref.path
    elif base_model is None:
        raise UserError("base_model and model_path are both missing; send one of them")
    call.services.bases.get(base_model)
    return base_model, model_path


@operation("GET", "/samplers/{sampling_session_id}", "Describe a sampling session", answer=fields({"base_model": TEXT}))
def get_sampler(call: Call) -> JsonObject:
    sampling_session = call.services.sampling_sessions.get(call.tenant_id, call.path["sampling_session_id"])
    return {
        "sampler_id": sampling_session.sampling_session_id,
        "base_model": sampling_session.base_model,
        "model_path": sampling_session.model_path,
    }


class JoinSamplingSessionRequest(Body):
    sampling_session_id: Text


@operation(
    "POST",
    "/join_sampling_session",
    "Add a client to a sampling session",
    body=JoinSamplingSessionRequest,
    answer=fields({"client_counter": COUNT}),
    errors=(404, 410, 501),
)
def join_sampling_session(call: Call, request: JoinSamplingSessionRequest) -> JsonObject:
    client_counter = call.services.sampling_sessions.join(call.tenant_id, request.sampling_session_id)
    return {"type": "join_sampling_session", "client_counter": client_counter}


_for_samples_of_session = partial(operation, "POST", answer=fields({"session_id": TEXT, "sampling": TEXT}))


@_for_samples_of_session("/sessions/{session_id}/pause_sampling", "Pause a session's samples", errors=(404, 410))
def pause_sampling(call: Call) -> JsonObject:
    """Engines pause within about a second: samples that they have begun keep their tokens, and none begins."""
    call.services.sessions.pause_sampling(call.tenant_id, call.path["session_id"])
    return {"session_id": call.path["session_id"], "sampling": "paused"}


@_for_samples_of_session("/sessions/{session_id}/continue_sampling", "Continue a session's samples", errors=(404, 410))
def continue_sampling(call: Call) -> JsonObject:
    call.services.sessions.continue_sampling(call.tenant_id, call.path["session_id"])
    return {"session_id": call.path["session_id"], "sampling": "running"}
