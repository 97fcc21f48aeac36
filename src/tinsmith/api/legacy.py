"""The JSON-only API of older clients: its routes, and the conversion of passes and results between JSON and protobuf.

The routes call those of the current API and translate the responses. Requests have no sequence numbers, so a repeated
request is a second request. Results are fetched by path as JSON, always with status 200: `{"status": "pending" |
"completed" | "failed", "result"?, "error"?}`.

A JSON pass is converted to the SDK's protobuf message before it is validated and stored; a result is converted to JSON
when it is fetched. No other module knows these formats. Shape letters: N positions of one datum.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import AfterValidator, ConfigDict, Field, ValidatorFunctionWrapHandler, WithJsonSchema, WrapValidator
from starlette.responses import Response

from tinsmith.api import response_inputs
from tinsmith.api.access import Access
from tinsmith.api.declaration import SUBMITTED, operation
from tinsmith.api.links import base_url
from tinsmith.api.openapi import ANYTHING, COUNT, NUMBER, TEXT, TEXTS, fields, integer, one_of
from tinsmith.api.queries import RunsQuery
from tinsmith.api.request import Call, Draft, JsonObject, json_response, read_json, run
from tinsmith.api.routes import models, sampling, sessions
from tinsmith.api.routes.futures import long_poll, note_poll, read_outcome
from tinsmith.base_models import tokenizer_info
from tinsmith.errors import UserError
from tinsmith.store import usage
from tinsmith.store.checkpoints import parse_sampler_path
from tinsmith.store.futures import FutureOutcome
from tinsmith.wire import tinker_public_pb2 as pb
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.fields import (
    MAX_SHOWN_CHARS,
    Body,
    OneOf,
    Query,
    SequenceNumber,
    Text,
    iso,
    json_schemas,
    show,
    validate,
    validation_error,
)
from tinsmith.wire.images import ImageBytes, image_chunk, refuse_chunk
from tinsmith.wire.json_results import CONVERSIONS, DTYPES, dump
from tinsmith.wire.sampling import MAX_NUM_SAMPLES, AsampleRequest, ModelInputBody, TensorDataBody, token_ids

# The dtypes of plain lists, as in the SDK (training_client.py). Any other input must give its dtype.
LIST_DTYPES = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
    "mask": "float32",
}


class JsonTensor(TensorDataBody):
    """A tensor. Unknown fields are ignored, as older servers did."""

    model_config = ConfigDict(extra="ignore")

    dtype: Annotated[str, OneOf(tuple(DTYPES))]


def _list_or_tensor(value: object, tensor: ValidatorFunctionWrapHandler) -> list[object] | JsonTensor:
    if not isinstance(value, list | dict):
        raise validation_error(f"is {show(value)}; it must be a list, or an object with data and dtype")
    return value if isinstance(value, list) else tensor(value)


def _number_or_text(value: object) -> float | str:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise validation_error(f"is {show(value)}; it must be a number or a string")
    return value


Config = dict[str, Annotated[Any, AfterValidator(_number_or_text), WithJsonSchema({"type": ["number", "string"]})]]


class DatumBody(Body):
    model_input: Annotated[Any, WithJsonSchema(json_schemas(ModelInputBody)["ModelInput"])]
    loss_fn_inputs: dict[str, Annotated[JsonTensor, WrapValidator(_list_or_tensor)]]


class PassBody(Body):
    data: list[DatumBody]
    loss_fn: Text
    loss_fn_config: Config = Field(default_factory=dict)


class JsonPassBody(Body):
    """A pass, either flat or nested under one of two names."""

    model_id: Text
    seq_id: SequenceNumber | None = None
    data: list[DatumBody] | None = None
    loss_fn: Text | None = None
    loss_fn_config: Config = Field(default_factory=dict)
    forward_backward_input: PassBody | None = None
    forward_input: PassBody | None = None


def pass_message(values: Mapping[str, object], *, forward_only: bool) -> pb.ForwardBackwardRequest:
    """Return a pass as a protobuf message."""
    request = validate(JsonPassBody, values)
    pass_body = request.forward_backward_input or request.forward_input or request
    if pass_body.loss_fn is None or pass_body.data is None:
        raise UserError(f"{'data' if pass_body.data is None else 'loss_fn'} is missing")
    names = {id(request.forward_backward_input): "forward_backward_input.", id(request.forward_input): "forward_input."}
    path_prefix = "" if pass_body is request else names[id(pass_body)]
    message = pb.ForwardBackwardRequest(model_id=request.model_id, loss_fn=pass_body.loss_fn, forward_only=forward_only)
    for key, value in pass_body.loss_fn_config.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config_v2[key].number = value
    for index, datum in enumerate(pass_body.data):
        datum_message, datum_path = message.data.add(), f"{path_prefix}data[{index}]"
        for chunk in prompt_chunks(datum.model_input, f"{datum_path}.model_input"):
            _write_chunk(datum_message.model_input.add(), chunk)
        for name, tensor in datum.loss_fn_inputs.items():
            tensor_path = f"{datum_path}.loss_fn_inputs.{name[:MAX_SHOWN_CHARS]}"
            _write_tensor(datum_message.loss_fn_inputs[name], name, tensor, tensor_path)
        response_inputs.complete(datum_message)
    return message


def _write_chunk(message: pb.Chunk, chunk: npt.NDArray[np.int32] | ImageBytes) -> None:
    if not isinstance(chunk, ImageBytes):
        message.encoded_text.tokens = chunk.astype("<i4").tobytes()
        return
    message.image.data, message.image.format = chunk.data, chunk.format
    if chunk.expected_tokens is not None:
        message.image.expected_tokens = chunk.expected_tokens


def prompt_chunks(value: object, path: str) -> list[npt.NDArray[np.int32] | ImageBytes]:
    """Read a prompt: token ids as a list, `tokens` or `input_ids`, or the SDK's chunks, which may be images."""
    if isinstance(value, list):
        return [token_ids(value, path)]
    if not isinstance(value, dict):
        raise UserError(f"{path} is {show(value)}; it must be a list of token ids, or an object with one")
    for name in ("tokens", "input_ids"):
        if name in value:
            return [token_ids(value[name], f"{path}.{name}")]
    chunks = value.get("chunks")
    if not isinstance(chunks, list):
        raise UserError(f"{path} has neither chunks nor tokens nor input_ids")
    chunks_read: list[npt.NDArray[np.int32] | ImageBytes] = []
    for index, chunk in enumerate(chunks):
        chunk_path = f"{path}.chunks[{index}]"
        if not isinstance(chunk, dict):
            raise UserError(f"{chunk_path} is {show(chunk)}; it must be an object")
        kind = chunk.get("type", "encoded_text")
        if kind == "encoded_text":
            chunks_read.append(token_ids(chunk.get("tokens"), f"{chunk_path}.tokens"))
        elif kind == "image":
            chunks_read.append(image_chunk(chunk, chunk_path))
        else:
            raise refuse_chunk(chunk_path, kind)
    return chunks_read


def _chunk_body(chunk: npt.NDArray[np.int32] | ImageBytes) -> dict[str, object]:
    if not isinstance(chunk, ImageBytes):
        return {"type": "encoded_text", "tokens": chunk.tolist()}
    body: dict[str, object] = {"type": "image", "data": base64.b64encode(chunk.data).decode(), "format": chunk.format}
    return body if chunk.expected_tokens is None else body | {"expected_tokens": chunk.expected_tokens}


def _write_tensor(message: pb.Tensor, name: str, tensor: JsonTensor | list[object], path: str) -> None:
    if isinstance(tensor, list):
        if name not in LIST_DTYPES:
            raise UserError(f"{path} is a plain list; give it as {{data, dtype, shape}}")
        tensor = JsonTensor(data=tensor, dtype=LIST_DTYPES[name])
    message.dtype, dtype = DTYPES[tensor.dtype]
    data = _read_numbers(tensor.data, f"{path}.data", dtype)
    shape = data.shape if tensor.shape is None else _read_flat(tensor.shape, f"{path}.shape").tolist()
    if tensor.sparse_crow_indices is not None or tensor.sparse_col_indices is not None:
        if tensor.shape is None:
            raise UserError(f"{path}.shape is missing; a sparse tensor needs it")
        message.sparse_csr.values = data.tobytes()
        message.sparse_csr.crow_indices = _read_flat(
            tensor.sparse_crow_indices, f"{path}.sparse_crow_indices"
        ).tobytes()
        message.sparse_csr.col_indices = _read_flat(tensor.sparse_col_indices, f"{path}.sparse_col_indices").tobytes()
    else:
        message.dense = data.tobytes()
    message.shape.extend(shape)


def _read_flat(value: object, path: str) -> np.ndarray:
    array = _read_numbers(value, path, np.dtype("<i8"))
    if array.ndim != 1:
        raise UserError(f"{path} is {show(value)}; it must be a flat list of integers")
    return array


def _read_numbers(value: object, path: str, dtype: np.dtype[np.generic]) -> np.ndarray:
    """Read a list of numbers; a dense array of several dimensions is a nested list."""
    if not isinstance(value, list):
        raise UserError(f"{path} is {show(value)}; it must be a list of numbers")
    if not value:
        return np.empty(0, dtype)
    try:
        array = np.array(value)
    except (ValueError, OverflowError) as error:
        raise UserError(f"{path} is not an array of numbers: {error}") from error
    if array.dtype.kind not in ("i" if dtype.kind == "i" else "iuf"):
        expected = "integers of at most 64 bits" if dtype.kind == "i" else "numbers"
        raise UserError(f"{path} is {show(value)}; it must be a list of {expected}")
    with np.errstate(over="ignore"):  # values beyond float32 become infinite, which the loss refuses
        return array.astype(dtype)


def sample_body(request: SamplesRequest, prompt: object, path: str) -> dict[str, object]:
    """Return the body of an asample for one prompt of a `sample`, without its session and sequence number."""
    chunks = [_chunk_body(chunk) for chunk in prompt_chunks(prompt, path)]
    set_fields = {
        name: value
        for name in ("num_samples", "prompt_logprobs", "topk_prompt_logprobs")
        if (value := getattr(request, name)) is not None
    }
    return set_fields | {"prompt": {"chunks": chunks}, "sampling_params": _sampling_params(request.sampling_params)}


def _sampling_params(params: Mapping[str, object]) -> Mapping[str, object]:
    """Move `stop_token_ids`, which these clients send, to `stop`, where asample expects both strings and ids."""
    values = dict(params)
    stop_token_ids = values.pop("stop_token_ids", None)
    if stop_token_ids:
        if values.get("stop"):
            raise UserError("sampling_params has both stop and stop_token_ids; give one of them")
        values["stop"] = stop_token_ids
    return values


BARE_METRICS = {"ppo_kl": "ppo_kl:mean", "pg_clipfrac": "pg_clipfrac:mean"}
"""Metrics that tinkercloud publishes without a suffix. The SDK's combination of chunks needs the suffixes."""

HOLD_S = 2.0
"""Seconds for which a fetch by path is held. These clients poll again, and some time out after five seconds."""

MAX_PROMPTS = 1024
HOUR_S = 3600
MAX_AGE_HOURS = 24 * 3650
VERSION = version("tinsmith")  # cached, since it is read from a file


HEALTH = fields({"status": one_of("healthy", "failing"), "version": TEXT, "timestamp": TEXT}, {"reason": TEXT})
BY_PATH = fields(
    {"request_id": TEXT, "status": one_of("pending", "completed", "failed")},
    {"result": ANYTHING, "error": TEXT, "category": TEXT},
)


@operation(
    "GET",
    "/health",
    "Check health and read the version",
    answer=HEALTH,
    errors=(503,),
    access=Access.PUBLIC,
    at_root=True,
)
async def health(call: Call) -> Response:
    """Report health and version without authentication."""
    version_fields: JsonObject = {"version": VERSION, "timestamp": iso(time.time())}
    if reason := call.services.engines.failing():
        return json_response({"status": "failing", "reason": reason, **version_fields}, 503)
    return json_response({"status": "healthy", **version_fields})


@operation(
    "GET POST",
    "/list_sessions",
    "List sessions, as GET /sessions",
    answer=sessions.SESSION_IDS,
    access=Access.LISTING,
    query=RunsQuery,
)
def list_sessions(call: Call, query: RunsQuery) -> JsonObject:
    return sessions.list_sessions(call, query)


# Models.


@operation(
    "POST",
    "/delete_model",
    "Unload a model and wait",
    body=models.UnloadModelRequest,
    answer=fields({"model_id": TEXT, "status": TEXT}),
    errors=(404, 410, 429, 501),
)
async def delete_model(call: Call) -> Response:
    """Unload a model and wait up to `hold_s` for it; a busy engine unloads later."""
    body = await read_json(call.request, models.UnloadModelRequest)
    unload_call = replace(call, body=body.model_dump_json().encode())
    request_id = str((await run(models.unload_model, unload_call, body))["request_id"])
    outcome = await _poll_outcome(call, request_id, call.services.settings.hold_s)
    if outcome is not None and outcome.error is not None:
        raise UserError(outcome.error)
    content: JsonObject = {
        "model_id": body.model_id,
        "status": "deleted" if outcome else "deleting",
        "message": "the model is unloaded; its checkpoints are kept and can be resumed from",
        "resources_freed": ["adapter", "optimizer"] if outcome else [],
    }
    return json_response(content)


class ModelIdQuery(Query):
    model_id: Text


@operation(
    "GET",
    "/get_tokenizer",
    "Describe a tokenizer",
    answer=fields({"vocab_size": COUNT}),
    query=ModelIdQuery,
    example="?model_id={model_id}",
)
def get_tokenizer(call: Call, query: ModelIdQuery) -> JsonObject:
    model = call.services.models.get(call.tenant_id, query.model_id)
    shape = call.services.bases.get(model.base_model)
    model_fields: JsonObject = {"vocab_size": shape.vocab_size, "hf_checkpoint": shape.name}
    return model_fields | tokenizer_info(shape)


@operation(
    "GET",
    "/get_router_address",
    "Tell where a model is sampled directly",
    answer=fields({"router_address": TEXT, "openai_base_url": TEXT, "model": TEXT}),
    query=ModelIdQuery,
    example="?model_id={model_id}",
)
def get_router_address(call: Call, query: ModelIdQuery) -> JsonObject:
    """Return the address for clients of OpenAI's protocol, and the name there of the weights that a model has published
    last.
    """
    model = call.services.models.get(call.tenant_id, query.model_id)
    return {"model_id": model.model_id, "model": f"tinker://{model.model_id}", **_router_addresses(call)}


def _router_addresses(call: Call) -> JsonObject:
    address = base_url(call.services.settings, call.scheme, call.headers)
    return {"router_address": address, "openai_base_url": f"{address}/v1"}


# Sampling.


class CreateSamplingClientRequest(Body):
    """The weights to sample from: `model_path` or `base_model`."""

    model_path: Text | None = None
    base_model: Text | None = None


@operation(
    "POST",
    "/create_sampling_client",
    "Create a sampling session",
    body=CreateSamplingClientRequest,
    answer=fields({"session_id": TEXT}),
    errors=(404, 410, 501),
    example={"model_path": "{tinker_path}"},
)
def create_sampling_client(call: Call, request: CreateSamplingClientRequest) -> JsonObject:
    """Create a sampling session inside a new session. Samples and heartbeats keep the session alive."""
    model_path, base_model = request.model_path, request.base_model
    if model_path is not None:
        call.services.checkpoints.get(call.tenant_id, parse_sampler_path(model_path))
    elif base_model is not None:
        call.services.bases.get(base_model)
    else:
        raise UserError("base_model and model_path are both missing; send one of them")
    session = sessions.create_session(call, sessions.CreateSessionRequest(display_name="create_sampling_client"))
    sampler_request = sampling.CreateSamplingSessionRequest(
        session_id=str(session["session_id"]), sampling_session_seq_id=0, base_model=base_model, model_path=model_path
    )
    sampler = sampling.create_sampling_session(call, sampler_request)
    return {
        "sampling_client_id": sampler["sampling_session_id"],
        "session_id": session["session_id"],
        "model_path": model_path,
        "base_model": base_model,
        "status": "ready",
    }


class SamplesRequest(CreateSamplingClientRequest):
    """Samples for several prompts, from an existing sampling session or from a new one."""

    prompts: Annotated[Any, WithJsonSchema({"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS})]
    sampling_client_id: Text | None = None
    sampling_session_id: Text | None = None
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    num_samples: Annotated[Any, WithJsonSchema(integer(1, MAX_NUM_SAMPLES))] = None
    prompt_logprobs: Annotated[Any, WithJsonSchema({"type": "boolean"})] = None
    topk_prompt_logprobs: Annotated[Any, WithJsonSchema(integer(0))] = None


@operation(
    "POST",
    "/sample",
    "Sample for several prompts",
    body=SamplesRequest,
    answer=fields({"request_id": TEXT, "request_ids": TEXTS, "sampling_client_id": TEXT}),
    errors=SUBMITTED,
    example={"sampling_client_id": "{sampling_session_id}", "prompts": [[1, 2]]},
)
def sample(call: Call, request: SamplesRequest) -> JsonObject:
    """Submit one asample per prompt. One request_id names all of them."""
    prompts = request.prompts
    if not isinstance(prompts, list) or not 0 < len(prompts) <= MAX_PROMPTS:
        raise UserError(f"prompts must be a list of 1 to {MAX_PROMPTS} prompts, each a list of token ids")
    bodies = [sample_body(request, prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]
    sampling_session_id = _find_or_create_sampling_session(call, request)
    # Samples have no order, so any unused number is valid.
    first_seq_id = secrets.randbelow(2**61)
    request_ids: list[object] = []
    for seq_id, body in enumerate(bodies, first_seq_id):
        body |= {"sampling_session_id": sampling_session_id, "seq_id": seq_id}
        draft = Draft(AsampleRequest, body)
        request_ids.append(sampling.asample(replace(call, body=orjson.dumps(body)), draft)["request_id"])
    request_id = request_ids[0] if len(request_ids) == 1 else f"{request_ids[0]}+{len(request_ids)}"
    return {"request_id": request_id, "request_ids": request_ids, "sampling_client_id": sampling_session_id}


def _find_or_create_sampling_session(call: Call, request: SamplesRequest) -> str:
    sampling_session_id = request.sampling_client_id or request.sampling_session_id
    if sampling_session_id is None:
        return str(create_sampling_client(call, request)["sampling_client_id"])
    sampling_session = call.services.sampling_sessions.get(call.tenant_id, sampling_session_id)
    call.services.sessions.heartbeat(call.tenant_id, sampling_session.session_id)
    return sampling_session_id


# Futures.


@operation("GET POST", "/retrieve_future/{request_id}", "Retrieve a result as JSON", answer=BY_PATH, errors=(404, 410))
async def retrieve_future(call: Call) -> Response:
    request_id = call.path["request_id"]
    outcomes: list[tuple[str, FutureOutcome]] = []
    deadline = time.monotonic() + min(HOLD_S, call.services.settings.hold_s)
    for sample_id in _split_request_id(request_id):
        outcome = await _poll_outcome(call, sample_id, max(0.0, deadline - time.monotonic()))
        if outcome is None:
            return json_response({"request_id": request_id, "status": "pending"})
        if outcome.error is not None:
            failure: JsonObject = {"status": "failed", "error": outcome.error, "category": outcome.category}
            return json_response(failure | {"request_id": request_id})
        outcomes.append((sample_id, outcome))
    results = [await run(_convert_result, call, sample_id, outcome) for sample_id, outcome in outcomes]
    result = results[0] if len(results) == 1 else _join_samples(results)
    content = {"request_id": request_id, "status": "completed", "result": result}
    return Response(await run(dump, content), media_type=JSON_TYPE)


def _split_request_id(request_id: str) -> list[str]:
    """Return the request ids behind one id. A `sample` has `{sampling_session_id}:{first seq_id}+{count}`."""
    first_id, separator, count = request_id.rpartition("+")
    owner, _, first = first_id.rpartition(":")
    if not separator or not (count.isascii() and count.isdigit() and first.isascii() and first.isdigit()):
        return [request_id]
    if len(count) > 4 or len(first) > 19 or not 0 < int(count) <= MAX_PROMPTS:
        return [request_id]
    return [f"{owner}:{int(first) + index}" for index in range(int(count))]


def _convert_result(call: Call, request_id: str, outcome: FutureOutcome) -> JsonObject:
    assert outcome.body is not None
    if outcome.result_type == "json":
        result = orjson.loads(outcome.body)
        if result.get("type") == "create_model":
            result |= {"status": "ready", "router_address": _router_addresses(call)["router_address"]}
        return result
    result = CONVERSIONS[call.services.futures.kind_of(call.tenant_id, request_id) or ""](outcome.body)
    if isinstance(metrics := result.get("metrics"), dict):
        result["metrics"] = metrics | {name: metrics[key] for name, key in BARE_METRICS.items() if key in metrics}
    return result


def _join_samples(results: Sequence[JsonObject]) -> JsonObject:
    """Join the samples of several prompts, in the order of the prompts."""
    sequence_lists = [sequences for result in results if isinstance(sequences := result["sequences"], list)]
    return {
        "type": "sample",
        "sequences": [sequence for sequences_of_prompt in sequence_lists for sequence in sequences_of_prompt],
        "results": list(results),
    }


async def _poll_outcome(call: Call, request_id: str, hold_s: float) -> FutureOutcome | None:
    async def read_result() -> FutureOutcome | None:
        return await read_outcome(call.services, call.tenant_id, request_id)

    await note_poll(call, request_id)
    return await long_poll(call.request, call.services.waiters.watch(request_id), read_result, hold_s)


class CleanupRequest(Body):
    max_age_hours: Annotated[float, Field(ge=0, le=MAX_AGE_HOURS)] = 24.0


@operation(
    "POST",
    "/cleanup_futures",
    "Delete old results",
    body=CleanupRequest,
    answer=fields({"futures_cleaned": NUMBER}),
    access=Access.LISTING,
)
def cleanup_futures(call: Call, request: CleanupRequest) -> JsonObject:
    """Delete the results of sessions that closed long enough ago. Open sessions keep theirs for recovery."""
    age_hours = request.max_age_hours
    before, services, deleted = time.time() - age_hours * HOUR_S, call.services, 0
    while closed := services.sessions.list_closed(before, tenant_id=call.tenant_id):
        deleted += services.futures.delete_of_sessions(closed, usage.fold_usage)
    message = f"deleted {deleted} settled requests of sessions that closed {age_hours:g} or more hours ago"
    return {"futures_cleaned": deleted, "cleaned_count": deleted, "message": message}
