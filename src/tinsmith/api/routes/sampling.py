"""Sampling: sessions over a frozen weight version, and the samples themselves."""

from __future__ import annotations

from starlette.routing import Route
from structlog.contextvars import bind_contextvars

from tinsmith.api.admission import check_position, check_sample, check_seq_id, most_tokens
from tinsmith.api.operation import Call, JsonObject, Submission, endpoint, submission
from tinsmith.errors import UserError
from tinsmith.store.checkpoints import parse_path
from tinsmith.store.futures import NewFuture
from tinsmith.store.sampling_sessions import NewSamplingSession
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.sampling import sample_of


def create_sampling_session(call: Call) -> JsonObject:
    services, fields = call.services, call.fields()
    session = services.sessions.require_active(call.tenant_id, fields.text("session_id"))
    number = check_position("sampling_session_seq_id", fields.integer("sampling_session_seq_id"))
    model_path = fields.text_or("model_path", None)
    base_model = fields.text_or("base_model", None)
    if model_path is not None:
        base_model = _base_of_checkpoint(call, model_path, base_model)
    elif base_model is None:
        raise UserError("base_model and model_path are both missing; one of them is needed")
    services.bases.get(base_model)
    new = NewSamplingSession(
        sampling_session_id=f"{session.session_id}:sample:{number}",
        session_id=session.session_id,
        tenant_id=call.tenant_id,
        base_model=base_model,
        model_path=model_path,
        version_id=model_path,
    )
    return {"type": "create_sampling_session", "sampling_session_id": services.sampling_sessions.create(new)}


def _base_of_checkpoint(call: Call, model_path: str, base_model: str | None) -> str:
    """Training checkpoints hold the same adapter as sampler checkpoints, so both will do."""
    checkpoint = call.services.checkpoints.get(call.tenant_id, parse_path(model_path, "model_path"))
    if base_model is not None and base_model != checkpoint.base_model:
        raise UserError(f"base_model is {base_model!r}, but {model_path!r} was trained on {checkpoint.base_model!r}")
    return checkpoint.base_model


def get_sampler(call: Call) -> JsonObject:
    found = call.services.sampling_sessions.get(call.tenant_id, call.path["sampling_session_id"])
    return {
        "sampler_id": found.sampling_session_id,
        "base_model": found.base_model,
        "model_path": found.model_path,
    }


def join_sampling_session(call: Call) -> JsonObject:
    joined = call.services.sampling_sessions.join(call.tenant_id, call.fields().text("sampling_session_id"))
    return {"type": "join_sampling_session", "client_counter": joined}


def asample(call: Call) -> Submission:
    services, fields = call.services, call.fields()
    sampling_session = services.sampling_sessions.get(call.tenant_id, fields.text("sampling_session_id"))
    services.sessions.require_active(call.tenant_id, sampling_session.session_id)
    seq_id = check_seq_id(fields.integer("seq_id"), first=0)
    request_id = f"{sampling_session.sampling_session_id}:{seq_id}"
    bind_contextvars(request_id=request_id)
    num_tokens, sequence_ids, sample, refusal = 0, [], None, None
    try:
        sample = sample_of(fields, request_id, sampling_session.version_id)
        shape = services.bases.get(sampling_session.base_model)
        check_sample(sample, shape)
        num_tokens = most_tokens(sample, shape)
        sequence_ids = [f"{request_id}:{index}" for index in range(sample.num_samples)]
    except UserError as error:
        refusal = error
    new = NewFuture(
        request_id=request_id,
        tenant_id=call.tenant_id,
        session_id=sampling_session.session_id,
        base_model=sampling_session.base_model,
        kind="sample",
        body=call.body,
        num_tokens=num_tokens,
        sampling_session_id=sampling_session.sampling_session_id,
        seq_id=seq_id,
        run_id=sampling_session.model_id,
    )
    if refusal is None:
        assert sample is not None
        services.quotas.admit(new)
        new = services.dispatch.assigned(new, sample, inflight=sampling_session.is_inflight)
    return Submission(new, refusal, {"sample_sequence_ids": sequence_ids})


ROUTES = [
    Route("/asample", submission(asample, JSON_TYPE), methods=["POST"]),
    Route("/create_sampling_session", endpoint(create_sampling_session, JSON_TYPE), methods=["POST"]),
    Route("/join_sampling_session", endpoint(join_sampling_session, JSON_TYPE), methods=["POST"]),
    Route("/samplers/{sampling_session_id}", endpoint(get_sampler), methods=["GET"]),
]
