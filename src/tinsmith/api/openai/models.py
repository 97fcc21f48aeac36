"""The list of models for OpenAI's and Anthropic's clients: base models and the tenant's checkpoints.

OpenAI's paths serve both kinds of clients; one that sends `anthropic-version` gets Anthropic's format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.api.openai.generation import weights_of
from tinsmith.api.openapi import LIST, TEXT, fields, for_anthropic
from tinsmith.api.operation import MAX_PAGE, Access, Call, JsonObject, is_anthropic, json_endpoint
from tinsmith.chat.generation_request import ModelTarget
from tinsmith.errors import RequestError
from tinsmith.wire.fields import iso, show

SINCE = 1_700_000_000
"""The creation time reported for base models. Clients require one, and the server does not know it."""

USUAL_PAGE = 20  # Anthropic's


@dataclass(frozen=True, slots=True)
class Served:
    """`owner` is the tenant of a checkpoint; `context` bounds the tokens of prompt and output together."""

    name: str
    owner: str
    created_at: int
    context: int


def _all(call: Call) -> list[Served]:
    """Return the base models and the newest of the tenant's checkpoints for sampling."""
    bases = {shape.name: shape.max_context_length for shape in call.services.bases}
    found = [Served(name, "tinsmith", SINCE, context) for name, context in bases.items()]
    checkpoints, _ = call.services.checkpoints.page(call.tenant_id, MAX_PAGE, 0)
    for each in checkpoints:
        if each.base_model in bases and each.ref.kind != "external_weights":
            found.append(Served(each.ref.path, call.tenant_id, int(each.created_at), bases[each.base_model]))
    return found


def _one(call: Call) -> Served:
    name = call.path["model"]
    target = ModelTarget.of(name)
    shape, _ = weights_of(call.services, call.tenant_id, target)
    owner = "tinsmith" if target.model_path is None else call.tenant_id
    return Served(name, owner, SINCE, shape.max_context_length)


def _openai_models(call: Call) -> JsonObject:
    return {"object": "list", "data": [_openai(each) for each in _all(call)]}


def _openai_model(call: Call) -> JsonObject:
    return _openai(_one(call))


def _openai(served: Served) -> JsonObject:
    """`max_model_len` is a field of vLLM."""
    model: JsonObject = {"id": served.name, "object": "model", "created": served.created_at, "owned_by": served.owner}
    return model | {"max_model_len": served.context}


def _anthropic_models(call: Call) -> JsonObject:
    """Return a page of at most `limit` models, after `after_id` or before `before_id`."""
    found = _all(call)
    limit = call.page(USUAL_PAGE)[0]
    if not limit:
        raise RequestError("limit", f"limit is 0; it must lie between 1 and {MAX_PAGE}")
    if "after_id" in call.query and "before_id" in call.query:
        raise RequestError("after_id", "after_id and before_id are both given; send one of them")
    if "before_id" in call.query:
        end = _place(found, call, "before_id")
        page, more = found[max(0, end - limit) : end], end > limit
    else:
        start = _place(found, call, "after_id") + 1 if "after_id" in call.query else 0
        page, more = found[start : start + limit], start + limit < len(found)
    ends = {"first_id": page[0].name, "last_id": page[-1].name} if page else {"first_id": None, "last_id": None}
    return {"data": [_anthropic(each) for each in page], "has_more": more, **ends}


def _place(found: Sequence[Served], call: Call, name: str) -> int:
    wanted = call.query[name]
    place = next((place for place, each in enumerate(found) if each.name == wanted), None)
    if place is None:
        raise RequestError(name, f"{name} is {show(wanted)}, which is not a model of this list")
    return place


def _anthropic_model(call: Call) -> JsonObject:
    return _anthropic(_one(call))


def _anthropic(served: Served) -> JsonObject:
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
