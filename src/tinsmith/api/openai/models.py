"""The list of models for OpenAI's and Anthropic's clients: base models and the tenant's checkpoints.

OpenAI's paths serve both kinds of clients; one that sends `anthropic-version` gets Anthropic's format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.api.openai.generation import find_weights
from tinsmith.api.openapi import LIST, TEXT, fields, for_anthropic
from tinsmith.api.operation import MAX_PAGE, Access, Call, JsonObject, is_anthropic, json_endpoint
from tinsmith.chat.generation_request import ModelTarget
from tinsmith.errors import RequestError
from tinsmith.wire.fields import iso, show

BASE_MODEL_CREATED_AT = 1_700_000_000
"""The creation time reported for base models. Clients require one, and the server does not know it."""

DEFAULT_LIMIT = 20  # Anthropic's


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`owner` is the tenant of a checkpoint; `context` bounds the tokens of prompt and output together."""

    name: str
    owner: str
    created_at: int
    context: int


def _list_served(call: Call) -> list[ServedModel]:
    """Return the base models and the newest of the tenant's checkpoints for sampling."""
    bases = {shape.name: shape.max_context_length for shape in call.services.bases}
    models = [ServedModel(name, "tinsmith", BASE_MODEL_CREATED_AT, context) for name, context in bases.items()]
    checkpoints, _ = call.services.checkpoints.page(call.tenant_id, MAX_PAGE, 0)
    for checkpoint in checkpoints:
        if checkpoint.base_model in bases and checkpoint.ref.kind != "external_weights":
            models.append(
                ServedModel(
                    checkpoint.ref.path, call.tenant_id, int(checkpoint.created_at), bases[checkpoint.base_model]
                )
            )
    return models


def _find_served(call: Call) -> ServedModel:
    name = call.path["model"]
    target = ModelTarget.of(name)
    shape, _ = find_weights(call.services, call.tenant_id, target)
    owner = "tinsmith" if target.model_path is None else call.tenant_id
    return ServedModel(name, owner, BASE_MODEL_CREATED_AT, shape.max_context_length)


def _openai_models(call: Call) -> JsonObject:
    return {"object": "list", "data": [_openai(served) for served in _list_served(call)]}


def _openai_model(call: Call) -> JsonObject:
    return _openai(_find_served(call))


def _openai(served: ServedModel) -> JsonObject:
    """Return the model in OpenAI's form; `max_model_len` is a field of vLLM."""
    model: JsonObject = {"id": served.name, "object": "model", "created": served.created_at, "owned_by": served.owner}
    return model | {"max_model_len": served.context}


def _anthropic_models(call: Call) -> JsonObject:
    """Return a page of at most `limit` models, after `after_id` or before `before_id`."""
    models = _list_served(call)
    limit = call.page(DEFAULT_LIMIT)[0]
    if not limit:
        raise RequestError("limit", f"limit is 0; it must lie between 1 and {MAX_PAGE}")
    if "after_id" in call.query and "before_id" in call.query:
        raise RequestError("after_id", "after_id and before_id are both given; send one of them")
    if "before_id" in call.query:
        end = _index_of(models, call, "before_id")
        page, has_more = models[max(0, end - limit) : end], end > limit
    else:
        start = _index_of(models, call, "after_id") + 1 if "after_id" in call.query else 0
        page, has_more = models[start : start + limit], start + limit < len(models)
    end_ids = {"first_id": page[0].name, "last_id": page[-1].name} if page else {"first_id": None, "last_id": None}
    return {"data": [_anthropic(served) for served in page], "has_more": has_more, **end_ids}


def _index_of(models: Sequence[ServedModel], call: Call, query_name: str) -> int:
    model_id = call.query[query_name]
    index = next((index for index, served in enumerate(models) if served.name == model_id), None)
    if index is None:
        raise RequestError(query_name, f"{query_name} is {show(model_id)}, which is not a model of this list")
    return index


def _anthropic_model(call: Call) -> JsonObject:
    return _anthropic(_find_served(call))


def _anthropic(served: ServedModel) -> JsonObject:
    return {
        "type": "model",
        "id": served.name,
        "display_name": served.name,
        "created_at": iso(served.created_at),
        "lifecycle": "active",
        "max_input_tokens": served.context,
        "max_tokens": served.context,
    }


@for_anthropic("GET", "/models", "List models", answer=fields({"data": LIST}), access=Access.LISTING)
async def models(request: Request) -> Response:
    return await (_ANTHROPICS_MODELS if is_anthropic(request) else _OPENAIS_MODELS)(request)


@for_anthropic("GET", "/models/{model:path}", "Get a model", answer=fields({"id": TEXT}), errors=(404, 410))
async def model(request: Request) -> Response:
    return await (_ANTHROPICS_MODEL if is_anthropic(request) else _OPENAIS_MODEL)(request)


_OPENAIS_MODELS, _ANTHROPICS_MODELS = json_endpoint(_openai_models), json_endpoint(_anthropic_models)
_OPENAIS_MODEL, _ANTHROPICS_MODEL = json_endpoint(_openai_model), json_endpoint(_anthropic_model)
