"""The dashboard: its static files, and the JSON that its pages read beyond the other routes.

The files need no key, since they hold no data, and there is no build step: no file loads anything of another origin, no
inline script runs, no page can frame them, and no cookie is set. No path is made of what a client names.

Everything else is the caller's own, except two numbers of each step (its tokens, and its number of tenants) and the
memory of the engines.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import PurePath
from typing import Annotated

from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinsmith import __version__
from tinsmith.api.openapi import ANYTHING, COUNT, LIST, NUMBER, PAGE, TEXT, fields, one_of, ref
from tinsmith.api.operation import Access, Call, JsonObject, operation
from tinsmith.auth.quotas import NAMES as QUOTAS
from tinsmith.chat.texts import Text as ModelText
from tinsmith.errors import NotFoundError, NotSupportedError, UserError
from tinsmith.store.history import MOST_NAMES, KeptSample, Point, RecentStep, SampleContent
from tinsmith.store.overview import SORTS, Row
from tinsmith.wire.fields import ClosedBody, Text, iso, show, text_values, wrong

MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # revalidated each time by its etag
}


@dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    media_type: str
    etag: str


@cache
def assets() -> dict[str, Asset]:
    """The static files by name."""
    found: dict[str, Asset] = {}
    for one in resources.files("tinsmith.api.dashboard").joinpath("static").iterdir():
        media_type = MEDIA_TYPES.get(PurePath(one.name).suffix)
        if media_type:
            content = one.read_bytes()
            found[one.name] = Asset(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


async def page(request: Request) -> Response:
    if "text/html" in request.headers.get("accept", ""):
        return _asset(request, "index.html")
    base = str(request.base_url).rstrip("/")
    text = (
        f"Tinsmith {__version__}, a server of the Tinker API.\n"
        f"  tinker SDK      TINKER_BASE_URL={base}\n"
        f"  OpenAI clients  base_url={base}/v1\n"
        f"  health          {base}/healthz\n"
        f"  API document    {base}/openapi.json\n"
        f"  dashboard       {base}/ in a browser\n"
    )
    return Response(text, headers={"vary": "accept"} | HEADERS, media_type="text/plain")


async def file(request: Request) -> Response:
    return _asset(request, request.path_params["file"])


def _asset(request: Request, name: str) -> Response:
    found = assets().get(name)
    if found is None:
        raise NotFoundError("the dashboard has no such file")
    headers = HEADERS | {"etag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)


ROUTES = [Route("/", page, methods=["GET"]), Route("/dashboard/{file}", file, methods=["GET"])]

# A run's curves.

MOST_NAME_LETTERS = 64
MAX_STEP = 2**53 - 1
"""The largest integer that JavaScript represents exactly."""


def _check_names(metrics: dict[str, float]) -> dict[str, float]:
    if not 0 < len(metrics) <= MOST_NAMES:
        raise wrong(f"has {len(metrics)} names; log 1 to {MOST_NAMES} at a time")
    for name in metrics:
        if not 0 < len(name) <= MOST_NAME_LETTERS or not name.isprintable():
            raise wrong(f"has the name {show(name)}; a name has 1 to {MOST_NAME_LETTERS} printable characters")
    return metrics


class LogMetricsRequest(ClosedBody):
    model_id: Text
    metrics: Annotated[
        dict[str, float], AfterValidator(_check_names), Field(description=f"1 to {MOST_NAMES} finite numbers by name")
    ]
    step: Annotated[int, Field(ge=0, le=MAX_STEP)] | None = None


@operation(
    "POST",
    "/log_metrics",
    "Log a run's metrics",
    body=LogMetricsRequest,
    answer=fields({"model_id": TEXT, "step": COUNT}),
    example={"model_id": "{model_id}", "metrics": {"reward": 1.0}},
)
def log_metrics(call: Call, request: LogMetricsRequest) -> JsonObject:
    model = call.services.models.get(call.tenant_id, request.model_id)
    step = call.services.curves.log(model.model_id, request.step, request.metrics)
    return {"model_id": model.model_id, "step": step}


@operation(
    "GET",
    "/training_runs/{run_id}/metrics",
    "A run's metrics, step by step",
    answer=fields({"points": LIST, "cursor": NUMBER}),
    query={"after": {"type": "number", "minimum": 0}},
)
def metrics(call: Call) -> JsonObject:
    """All points, or those since a cursor, of which some may be repeated."""
    model = call.services.models.get(call.tenant_id, call.path["run_id"])
    after = _cursor(call.query.get("after", "0"))
    found = call.services.curves.points(model.model_id, after)
    return {
        "points": [
            {"source": one.source, "step": one.step, "time": one.recorded_at, "metrics": one.metrics} for one in found
        ],
        "cursor": max([after, *(one.recorded_at for one in found)]),
    }


def _cursor(text: str) -> float:
    try:
        moment = float(text)
    except ValueError:
        moment = math.nan
    if not 0 <= moment < 1e12:
        raise UserError(f"the query's after is {show(text)}; it must be the cursor of an earlier answer, or left out")
    return moment


# The overview, runs by search, the queue and the last steps.

MAX_SEARCH = 200
SHOWN_STEPS = 50
COUNTED = {
    "queued_requests": "waiting_requests",
    "queued_bytes": "waiting_bytes",
    "models": "loaded_runs",
    "checkpoint_bytes": "checkpoint_bytes",
    "file_bytes": "file_bytes",
}
"""The count that each quota limits; tokens_per_minute is counted in memory."""


@operation(
    "GET",
    "/dashboard/overview",
    "How much there is",
    answer=fields({"counts": ANYTHING, "engines": LIST, "seats": LIST}),
    access=Access.LISTING,
)
def overview(call: Call) -> JsonObject:
    memory = call.services.meters.memory()
    return {
        "tenant_id": call.tenant_id,
        "counts": call.services.overview.counts(call.tenant_id),
        "engines": [engine | {"memory": memory.get(str(engine["base_model"]), {})} for engine in _engines(call)],
        "seats": [
            seat | {"started_at": iso(seat["started_at"])} for seat in call.services.overview.seats(call.tenant_id)
        ],
    }


def _engines(call: Call) -> list[JsonObject]:
    found: list[JsonObject] = []
    for shape in call.services.bases:
        state, reason = call.services.queue_state(shape.name)
        limits = {"max_context_length": shape.max_context_length, "vocab_size": shape.vocab_size}
        found.append({"base_model": shape.name, "state": state, "reason": reason, **limits})
    return found


@operation(
    "GET",
    "/dashboard/runs",
    "Runs by search",
    answer=fields({"runs": LIST, "cursor": ref("Cursor")}),
    access=Access.LISTING,
    query={**PAGE, "search": TEXT | {"maxLength": MAX_SEARCH}, "sort": one_of(*SORTS), "order": one_of("asc", "desc")},
    filters=("?search={model_id}",),
)
def runs(call: Call) -> JsonObject:
    limit, offset = call.page(default_limit=50)
    search, sort = _search(call), call.query.get("sort", "created_at")
    order = call.query.get("order", "desc")
    if sort not in SORTS:
        raise UserError(f"the query's sort is {show(sort)}; it must be one of {', '.join(SORTS)}")
    if order not in ("asc", "desc"):
        raise UserError(f"the query's order is {show(order)}; it must be 'asc' or 'desc'")
    found, total = call.services.overview.runs(call.tenant_id, search, sort, order == "desc", limit, offset)
    newest = call.services.curves.newest([one["model_id"] for one in found])
    return {
        "runs": [_run(one, newest.get(one["model_id"])) for one in found],
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
    }


def _search(call: Call) -> str:
    search = call.query.get("search", "")
    if len(search) > MAX_SEARCH:
        raise UserError(f"the query's search has {len(search)} characters; at most {MAX_SEARCH} are looked for")
    return search


@operation("GET", "/dashboard/runs/{run_id}", "One run", answer=fields({"model_id": TEXT, "metrics": ANYTHING}))
def run(call: Call) -> JsonObject:
    found = call.services.overview.run(call.tenant_id, call.path["run_id"])
    return _run(found, call.services.curves.newest([found["model_id"]]).get(found["model_id"]))


def _run(found: Row, newest: Point | None) -> JsonObject:
    return {
        **found,
        "created_at": iso(found["created_at"]),
        "last_request_at": iso(found["last_request_at"]),
        "user_metadata": text_values(found["user_metadata"]),
        "step": newest.step if newest else 0,
        "metrics": newest.metrics if newest else {},
    }


@operation(
    "GET",
    "/dashboard/queue",
    "What waits, and the last steps",
    answer=fields({"waiting": LIST, "engines": LIST}),
    access=Access.LISTING,
)
def queue(call: Call) -> JsonObject:
    waiting = call.services.overview.waiting(call.tenant_id)
    return {
        "now": iso(time.time()),
        "waiting": [one | {"oldest_at": iso(one["oldest_at"])} for one in waiting],
        "engines": [engine | {"steps": _steps(call, str(engine["base_model"]))} for engine in _engines(call)],
        "step_token_budget": call.services.settings.step_token_budget,
    }


def _steps(call: Call, base_model: str) -> list[JsonObject]:
    found = call.services.recent_steps.newest(base_model, SHOWN_STEPS)
    return [_step(call.tenant_id, position, step) for position, step in found]


def _step(tenant_id: str, position: int, step: RecentStep) -> JsonObject:
    mine = step.shares.get(tenant_id, {})
    names = ("duration_s", "num_passes", "num_optim_steps", "num_singles", "num_tokens")
    return {
        "position": position,
        "ended_at": iso(step.ended_at),
        **{name: getattr(step, name) for name in names},
        "num_tenants": len(step.shares),
        "own_tokens": sum(mine.values()),
        "own_runs": [{"model_id": model_id, "tokens": tokens} for model_id, tokens in mine.items()],
    }


@operation(
    "GET",
    "/dashboard/tenant",
    "Keys and quotas",
    answer=fields({"tenant_id": TEXT, "keys": LIST, "quotas": LIST}),
    access=Access.LISTING,
)
def tenant(call: Call) -> JsonObject:
    """The caller's tenant, all keys of the tenant, and the use of its quotas."""
    services = call.services
    limits, counts = services.quotas.limits(call.tenant_id), services.overview.counts(call.tenant_id)
    current = services.tenants.authenticate(call.headers.get("x-api-key"))
    return {
        "tenant_id": call.tenant_id,
        "takes_any_key": services.tenants.accepts_anyone(),
        "keys": [
            {
                "key_id": key.key_id,
                "name": key.name,
                "created_at": iso(key.created_at),
                "revoked_at": None if key.revoked_at is None else iso(key.revoked_at),
                "current": key.key_id == current.key_id,
            }
            for key in services.tenants.keys_of(call.tenant_id)
        ],
        "quotas": [
            {"name": name, "limit": getattr(limits, name), "used": counts[COUNTED[name]] if name in COUNTED else None}
            for name in QUOTAS
        ],
    }


# Kept samples, token by token.

PREVIEW_TOKENS = 24


@operation(
    "GET",
    "/dashboard/samples",
    "Kept samples, newest first",
    answer=fields({"samples": LIST, "cursor": ref("Cursor")}),
    access=Access.LISTING,
    query={**PAGE, "search": TEXT | {"maxLength": MAX_SEARCH}},
    filters=("?search={model_id}:0",),
)
def samples(call: Call) -> JsonObject:
    limit, offset = call.page(default_limit=50)
    search = _search(call)
    found, total = call.services.kept_samples.page(call.tenant_id, limit, offset, search)
    return {
        "samples": [_shown(one) | _preview(_text(call, one.base_model), content) for one, content in found],
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
        "kept": call.services.settings.kept_samples,
    }


@operation(
    "GET",
    "/dashboard/samples/{request_id}",
    "A kept sample, token by token",
    answer=fields({"request_id": TEXT, "prompt": ANYTHING, "sequences": LIST}),
)
def sample(call: Call) -> JsonObject:
    found, content = call.services.kept_samples.get(call.tenant_id, call.path["request_id"])
    text = _text(call, found.base_model)
    return _shown(found) | {
        "prompt": _tokens(text, content.prompt),
        "prompt_cut": content.prompt_cut,
        "params": content.params,
        "sequences": [
            _tokens(text, one.tokens) | {"logprobs": one.logprobs, "stop_reason": one.stop_reason}
            for one in content.sequences
        ],
        "turns_before": call.services.kept_samples.turns_before(found, content),
    }


def _shown(sample: KeptSample) -> JsonObject:
    shown: JsonObject = {**asdict(sample), "created_at": iso(sample.created_at)}
    del shown["tenant_id"]
    return shown


def _preview(text: ModelText | None, content: SampleContent) -> JsonObject:
    """The end of the prompt and the beginning of the first answer."""
    answer = content.sequences[0].tokens if content.sequences else ()
    return {
        "prompt_ends": _words(text, content.prompt[-PREVIEW_TOKENS:]),
        "answer_begins": _words(text, answer[:PREVIEW_TOKENS]),
    }


def _words(text: ModelText | None, tokens: Sequence[int]) -> str | None:
    return None if text is None else text.decode(tokens)


def _text(call: Call, base_model: str) -> ModelText | None:
    """The tokenizer's text of a base model; None if it is not served or has no tokenizer here."""
    try:
        text = call.services.texts.of(call.services.bases.get(base_model))
        _ = text.tokenizer
    except (NotFoundError, NotSupportedError):
        return None
    return text


def _tokens(text: ModelText | None, tokens: Sequence[int]) -> JsonObject:
    if text is None:
        return {"tokens": tokens, "pieces": None, "text": None}
    pieces = [text.token_bytes(token).decode(errors="replace") for token in tokens]
    return {"tokens": tokens, "pieces": pieces, "text": text.tokenizer.decode(list(tokens), skip_special_tokens=False)}
