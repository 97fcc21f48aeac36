"""Sampling: sampling sessions, each with a fixed weight version, and samples."""

from __future__ import annotations

from functools import partial

from structlog.contextvars import bind_contextvars

from tinsmith.api.declaration import operation
from tinsmith.api.openapi import COUNT, TEXT, fields
from tinsmith.api.request import Call, Draft, JsonObject
from tinsmith.api.submission import accept
from tinsmith.cluster.sample_admission import make_request
from tinsmith.errors import TooManyRequestsError, UserError
from tinsmith.store.checkpoints import parse_path
from tinsmith.store.sampling_sessions import NewSamplingSession
from tinsmith.wire.fields import Body, Position, Text
from tinsmith.wire.sampling import AsampleRequest, SampleNumber, sample_of


class NewSample(Body):
    """The required fields of asample."""

    sampling_session_id: Text
    seq_id: SampleNumber


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
    services, ids = call.services, draft.read_required(NewSample)
    sampling_session = services.sampling_sessions.get(call.tenant_id, ids.sampling_session_id)
    services.sessions.require_active(call.tenant_id, sampling_session.session_id)
    seq_id = ids.seq_id
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
    services, model_path, base_model = call.services, request.model_path, request.base_model
    session = services.sessions.require_active(call.tenant_id, request.session_id)
    sampler_seq_id = request.sampling_session_seq_id
    if model_path is not None:
        base_model = _base_of_checkpoint(call, model_path, base_model)
    elif base_model is None:
        raise UserError("base_model and model_path are both missing; send one of them")
    services.bases.get(base_model)
    new = NewSamplingSession(
        sampling_session_id=f"{session.session_id}:sample:{sampler_seq_id}",
        session_id=session.session_id,
        tenant_id=call.tenant_id,
        base_model=base_model,
        model_path=model_path,
        version_id=model_path,
    )
    return {"type": "create_sampling_session", "sampling_session_id": services.sampling_sessions.create(new)}


def _base_of_checkpoint(call: Call, model_path: str, base_model: str | None) -> str:
    """Return the base model of a checkpoint of any kind; all kinds hold the same adapter."""
    checkpoint = call.services.checkpoints.get(call.tenant_id, parse_path(model_path, "model_path"))
    if base_model is not None and base_model != checkpoint.base_model:
        raise UserError(f"base_model is {base_model!r}, but {model_path!r} was trained on {checkpoint.base_model!r}")
    return checkpoint.base_model


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
