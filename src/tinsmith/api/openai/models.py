"""The list of models for OpenAI's and Anthropic's clients: base models and the tenant's checkpoints.

OpenAI's paths serve both kinds of clients; one that sends `anthropic-version` gets Anthropic's format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith.api.access import Access
from tinsmith.api.declaration import MAX_PAGE
from tinsmith.api.openai.weights import find_weights
from tinsmith.api.openapi import LIST, TEXT, fields, for_anthropic
from tinsmith.api.queries import AnthropicPageQuery
from tinsmith.api.request import Call, JsonObject, is_anthropic
from tinsmith.chat.generation_request import ModelTarget
from tinsmith.errors import RequestError
from tinsmith.wire.fields import iso, show

BASE_MODEL_CREATED_AT = 1_700_000_000
"""The creation time reported for base models. Clients require one, and the server does not know it."""


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
    weights = find_weights(call.services, call.tenant_id, ModelTarget.of(name))
    owner = "tinsmith" if weights.version_id is None else call.tenant_id
    return ServedModel(name, owner, BASE_MODEL_CREATED_AT, weights.shape.max_context_length)


def _openai(served: ServedModel) -> JsonObject:
    """Return the model in OpenAI's form; `max_model_len` is a field of vLLM."""
    model: JsonObject = {"id": served.name, "object": "model", "created": served.created_at, "owned_by": served.owner}
    return model | {"max_model_len": served.context}


def _page(models: Sequence[ServedModel], query: AnthropicPageQuery) -> tuple[Sequence[ServedModel], bool]:
    """Return a page of at most `limit` models, and whether there are more."""
    if query.before_id is not None:
        end = _index_of(models, "before_id", query.before_id)
        return models[max(0, end - query.limit) : end], end > query.limit
    start = 0 if query.after_id is None else _index_of(models, "after_id", query.after_id) + 1
    return models[start : start + query.limit], start + query.limit < len(models)


def _index_of(models: Sequence[ServedModel], name: str, model_id: str) -> int:
    index = next((index for index, served in enumerate(models) if served.name == model_id), None)
    if index is None:
        raise RequestError(name, f"{name} is {show(model_id)}, which is not a model of this list")
    return index


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


@for_anthropic(
    "GET",
    "/models",
    "List models",
    answer=fields({"data": LIST}),
    access=Access.LISTING,
    query=AnthropicPageQuery,
)
def models(call: Call, query: AnthropicPageQuery) -> JsonObject:
    """Return all models, or a page of them in Anthropic's form."""
    served = _list_served(call)
    if not is_anthropic(call.request):
        return {"object": "list", "data": [_openai(model) for model in served]}
    page, has_more = _page(served, query)
    end_ids = {"first_id": page[0].name, "last_id": page[-1].name} if page else {"first_id": None, "last_id": None}
    return {"data": [_anthropic(model) for model in page], "has_more": has_more, **end_ids}


@for_anthropic("GET", "/models/{model:path}", "Get a model", answer=fields({"id": TEXT}), errors=(404, 410))
def model(call: Call) -> JsonObject:
    served = _find_served(call)
    return _anthropic(served) if is_anthropic(call.request) else _openai(served)
