"""The dashboard's static files, and the JSON that only its pages read.

The files contain no data and are served without authentication. There is no build step. No file loads anything from
another origin, no inline script runs, no page can frame them, and no cookie is set. Paths are never built from input.

All data belongs to the caller, except the memory of the engines and two numbers of each step: tokens and tenants.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import PurePath
from typing import Annotated

from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinsmith import __version__
from tinsmith.api.dashboard.machine import explain_wait
from tinsmith.api.dashboard.run_filter import Values, parse_filter
from tinsmith.api.dashboard.run_table import (
    MAX_COLUMNS,
    MAX_GROUPS,
    MAX_RUNS,
    group_rows,
    list_names,
    list_values,
    sort_by_value,
    sort_groups,
    split_names,
)
from tinsmith.api.declaration import operation
from tinsmith.api.openapi import ANYTHING, LIST, TEXT, fields, listing, ref
from tinsmith.api.queries import Limit, Order, PageQuery
from tinsmith.api.request import Call, JsonObject
from tinsmith.auth.quotas import NAMES as QUOTAS
from tinsmith.errors import NotFoundError
from tinsmith.store.curves import CLIENT, Outline, Point
from tinsmith.store.overview import SORTS, Row
from tinsmith.store.recent_steps import RecentStep
from tinsmith.store.run_health import REWARDS
from tinsmith.store.run_status import run_status, run_tags
from tinsmith.wire.fields import NO_NUL, ClosedBody, iso, show, text_values, validation_error

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
    "cache-control": "no-cache",  # revalidated on each use by etag
}


@dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    media_type: str
    etag: str


@cache
def assets() -> dict[str, Asset]:
    """Return the static files by name."""
    asset_by_name: dict[str, Asset] = {}
    for file in resources.files("tinsmith.api.dashboard").joinpath("static").iterdir():
        media_type = MEDIA_TYPES.get(PurePath(file.name).suffix)
        if media_type:
            content = file.read_bytes()
            asset_by_name[file.name] = Asset(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return asset_by_name


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
    asset = assets().get(name)
    if asset is None:
        raise NotFoundError("no such file in the dashboard")
    headers = HEADERS | {"etag": asset.etag}
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, headers=headers, media_type=asset.media_type)


ROUTES = [Route("/", page, methods=["GET"]), Route("/dashboard/{file}", file, methods=["GET"])]

# Overview, search of runs, queue and recent steps.

MAX_SEARCH = 200
Search = Annotated[str, Field(max_length=MAX_SEARCH, pattern=NO_NUL)]
MAX_FILTER = 1000
MAX_NAMES_CHARS = 4096
MAX_LINKS = 100
MAX_NOTES = 4000
SESSION_COLUMNS = ("session_state", "session_reason", "finish_type", "session_ended_at")
"""Columns of a run's row that only its status is made of."""
OUTLINE_METRICS = (*REWARDS, "loss_per_token", "loss_per_datum")
"""Candidates, in order, for the one metric in the list of runs."""
OUTLINE_VALUES = 32
MAX_STEPS = 50
COUNT_BY_QUOTA = {
    "queued_requests": "waiting_requests",
    "queued_bytes": "waiting_bytes",
    "models": "loaded_runs",
    "checkpoint_bytes": "checkpoint_bytes",
    "file_bytes": "file_bytes",
    "response_bytes": "response_bytes",
}
"""The count that each quota limits. tokens_per_minute is counted in memory."""


@listing(
    "/dashboard/overview",
    "Count the caller's objects",
    answer=fields({"counts": ANYTHING, "engines": LIST, "seats": LIST}),
)
def overview(call: Call) -> JsonObject:
    memory = call.services.meters.device_memory()
    return {
        "tenant_id": call.tenant_id,
        "counts": call.services.overview.counts(call.tenant_id),
        "engines": [engine | {"memory": memory.get(str(engine["base_model"]), {})} for engine in _engines(call)],
        "seats": [
            seat | {"started_at": iso(seat["started_at"])} for seat in call.services.overview.list_seats(call.tenant_id)
        ],
    }


def _engines(call: Call) -> list[JsonObject]:
    engines: list[JsonObject] = []
    for shape in call.services.bases:
        state, reason = call.services.engines.queue_state(shape.name)
        state = "on_demand" if call.services.engines.is_unloaded(shape.name) else state
        limits = {"max_context_length": shape.max_context_length, "vocab_size": shape.vocab_size}
        engines.append({"base_model": shape.name, "state": state, "reason": reason, **limits})
    return engines


class SearchQuery(PageQuery):
    limit: Limit = 50
    search: Search = ""


class RunSearchQuery(SearchQuery):
    """Names of values, and `filter`, are those of `run_table` and `run_filter`; `columns` and `group` are lists."""

    sort: Annotated[str, Field(min_length=1, max_length=MAX_SEARCH, pattern=NO_NUL)] = "created_at"
    order: Order = "desc"
    filter: Annotated[str, Field(max_length=MAX_FILTER, pattern=NO_NUL)] = ""
    columns: Annotated[str, Field(max_length=MAX_NAMES_CHARS, pattern=NO_NUL)] = ""
    group: Annotated[str, Field(max_length=MAX_NAMES_CHARS, pattern=NO_NUL)] = ""
    outlines: bool = False
    names: bool = False

    @property
    def needs_values(self) -> bool:
        """Whether the choice or the order of the runs depends on their values, which the database cannot sort by."""
        return bool(self.filter.strip() or self.group.strip() or self.names) or self.sort not in SORTS


@listing(
    "/dashboard/runs",
    "Search runs",
    answer=fields({"runs": LIST, "cursor": ref("Cursor")}),
    query=RunSearchQuery,
    filters=("?search={model_id}",),
)
def runs(call: Call, query: RunSearchQuery) -> JsonObject:
    columns = split_names("columns", query.columns, MAX_COLUMNS)
    if query.needs_values:
        return _choose_by_value(call, query, columns)
    is_descending = query.order == "desc"
    rows, total = call.services.overview.runs(
        call.tenant_id, query.search, query.sort, is_descending, query.limit, query.offset
    )
    described = _describe_runs(call, rows)
    values = _list_values(call, described) if columns else {}
    return {
        "runs": _show_runs(call, query, described, columns, values),
        "cursor": {"offset": query.offset, "limit": query.limit, "total_count": total},
    }


def _choose_by_value(call: Call, query: RunSearchQuery, columns: Sequence[str]) -> JsonObject:
    """Filter, sort and group the newest runs. `unknown` are the names that none of them has."""
    run_filter = parse_filter(query.filter)
    group = split_names("group", query.group, MAX_GROUPS)
    is_stored_order = query.sort in SORTS
    order = (query.sort, query.order == "desc") if is_stored_order else ("created_at", True)
    rows, total = call.services.overview.runs(call.tenant_id, query.search, *order, MAX_RUNS, 0)
    described = {str(run["model_id"]): run for run in _describe_runs(call, rows)}
    values = _list_values(call, list(described.values()))
    chosen = [row for row in values.values() if run_filter.fits(row)]
    if not is_stored_order:
        chosen = sort_by_value(chosen, query.sort, query.order == "desc")
    queried_names = {*run_filter.names, *group, *(() if is_stored_order else (query.sort,))}
    answer: JsonObject = {
        "considered": len(rows),
        "of": total,
        "unknown": sorted(queried_names - {name for row in values.values() for name in row}) if rows else [],
        "runs": [],
    }
    page = slice(query.offset, query.offset + query.limit)
    groups = group_rows(chosen, group, columns) if group else []
    if group:
        ordered = groups if is_stored_order else sort_groups(groups, query.sort, query.order == "desc")
        answer["groups"] = ordered[page]
    else:
        page_runs = [described[str(row["id"])] for row in chosen[page]]
        answer["runs"] = _show_runs(call, query, page_runs, columns, values)
    if query.names:
        answer["names"] = list_names(values.values(), _list_settings(rows))
    count = len(groups) if group else len(chosen)
    return answer | {"cursor": {"offset": query.offset, "limit": query.limit, "total_count": count}}


def _list_settings(rows: Sequence[Row]) -> set[str]:
    return {str(name) for row in rows for name in row["user_metadata"] or {}}


def _list_values(call: Call, described: Sequence[JsonObject]) -> dict[str, Values]:
    """The values of each run by its id."""
    model_ids = [str(run["model_id"]) for run in described]
    logged = call.services.curves.newest(model_ids, CLIENT)
    trained = call.services.curves.newest(model_ids)
    return {
        model_id: list_values(run, logged.get(model_id), trained.get(model_id))
        for model_id, run in zip(model_ids, described, strict=True)
    }


def _show_runs(
    call: Call,
    query: RunSearchQuery,
    described: Sequence[JsonObject],
    columns: Sequence[str],
    values: Mapping[str, Values],
) -> list[JsonObject]:
    """The runs with their outlines, and with the values of `columns` if there are any."""
    outlines: dict[str, Outline] = {}
    if query.outlines:
        model_ids = [str(run["model_id"]) for run in described]
        outlines = call.services.curves.outlines(model_ids, OUTLINE_METRICS, OUTLINE_VALUES)
    entries: list[JsonObject] = []
    for run in described:
        model_id = str(run["model_id"])
        entries.append(run | {"outline": outlines.get(model_id)})
        if columns:
            entries[-1]["values"] = {name: values[model_id].get(name) for name in columns}
    return entries


@operation("GET", "/dashboard/runs/{run_id}", "One run", answer=fields({"model_id": TEXT, "metrics": ANYTHING}))
def run(call: Call) -> JsonObject:
    return _describe_runs(call, [call.services.overview.run(call.tenant_id, call.path["run_id"])])[0]


def _check_tags(tags: list[str]) -> list[str]:
    if any("," in tag or not tag.strip() or not tag.isprintable() for tag in tags):
        raise validation_error(f"is {show(tags)}; a tag is printable, not blank, and has no comma")
    return list(dict.fromkeys(tag.strip() for tag in tags))


class DescribeRunRequest(ClosedBody):
    """Absent fields stay unchanged; an empty text or list removes the value."""

    name: Annotated[str, Field(max_length=128, pattern=NO_NUL)] | None = None
    tags: (
        Annotated[list[Annotated[str, Field(max_length=32)]], Field(max_length=16), AfterValidator(_check_tags)] | None
    ) = None
    notes: Annotated[str, Field(max_length=MAX_NOTES, pattern=NO_NUL)] | None = None


@operation(
    "PUT",
    "/dashboard/runs/{run_id}",
    "Name, tag and annotate a run",
    body=DescribeRunRequest,
    answer=fields({"model_id": TEXT, "user_metadata": ANYTHING}),
    example={"name": "first try"},
)
def describe_run(call: Call, request: DescribeRunRequest) -> JsonObject:
    """Store all in the run's user_metadata: `name`, `notes`, and `tags` separated by commas."""
    tags = None if request.tags is None else ",".join(request.tags)
    changes = {"name": request.name, "tags": tags, "notes": request.notes}
    metadata = {name: value for name, value in changes.items() if value is not None}
    call.services.overview.describe(call.tenant_id, call.path["run_id"], metadata)
    return run(call)


@operation("GET", "/dashboard/runs/{run_id}/lineage", "Show the lineage of a run", answer=fields({"links": LIST}))
def lineage(call: Call) -> JsonObject:
    """Return the loads of checkpoints into this run or from it. A parent may belong to another tenant."""
    row = call.services.overview.run(call.tenant_id, call.path["run_id"])
    links = call.services.overview.lineage(call.tenant_id, row["model_id"], MAX_LINKS)
    return {
        "links": [
            {"parent": link.parent, "path": link.path, "child": link.model_id, "time": iso(link.loaded_at)}
            for link in links
        ]
    }


def _describe_runs(call: Call, rows: Sequence[Row]) -> list[JsonObject]:
    model_ids = [row["model_id"] for row in rows]
    newest = call.services.curves.newest(model_ids)
    busy, at = call.services.overview.busy_runs(call.tenant_id, model_ids), time.time()
    return [_describe_run(row, newest.get(row["model_id"]), row["model_id"] in busy, at) for row in rows]


def _describe_run(row: Row, newest: Point | None, is_busy: bool, at: float) -> JsonObject:
    status = run_status(row, newest, is_busy, at)
    columns = {name: value for name, value in row.items() if name not in SESSION_COLUMNS}
    return {
        **columns,
        "name": (row["user_metadata"] or {}).get("name") or row["display_name"],
        "tags": run_tags(row["user_metadata"]),
        "status": status.name,
        "status_reason": status.reason,
        "duration_s": status.duration_s,
        "created_at": iso(row["created_at"]),
        "last_request_at": iso(row["last_request_at"]),
        "user_metadata": text_values(row["user_metadata"]),
        "step": newest.step if newest else 0,
        "metrics": newest.metrics if newest else {},
    }


@listing(
    "/dashboard/queue", "List waiting requests and recent steps", answer=fields({"waiting": LIST, "engines": LIST})
)
def queue(call: Call) -> JsonObject:
    waiting = call.services.overview.list_waiting(call.tenant_id)
    seats = call.services.overview.list_seats(call.tenant_id)
    return {
        "now": iso(time.time()),
        "waiting": [
            row | {"oldest_at": iso(row["oldest_at"]), "why": explain_wait(call, row, waiting, seats)}
            for row in waiting
        ],
        "engines": [engine | {"steps": _steps(call, str(engine["base_model"]))} for engine in _engines(call)],
        "step_token_budget": call.services.settings.step_token_budget,
    }


def _steps(call: Call, base_model: str) -> list[JsonObject]:
    newest = call.services.recent_steps.newest(base_model, MAX_STEPS)
    return [_step(call.tenant_id, position, step) for position, step in newest]


def _step(tenant_id: str, position: int, step: RecentStep) -> JsonObject:
    own_shares = step.shares.get(tenant_id, {})
    names = ("duration_s", "num_passes", "num_optim_steps", "num_singles", "num_tokens")
    return {
        "position": position,
        "ended_at": iso(step.ended_at),
        **{name: getattr(step, name) for name in names},
        "num_tenants": len(step.shares),
        "own_tokens": sum(own_shares.values()),
        "own_runs": [{"model_id": model_id, "tokens": tokens} for model_id, tokens in own_shares.items()],
    }


@listing("/dashboard/tenant", "List keys and quotas", answer=fields({"tenant_id": TEXT, "keys": LIST, "quotas": LIST}))
def tenant(call: Call) -> JsonObject:
    """Return the caller's tenant, its keys and the usage of its quotas."""
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
            {
                "name": name,
                "limit": getattr(limits, name),
                "used": counts[COUNT_BY_QUOTA[name]] if name in COUNT_BY_QUOTA else None,
            }
            for name in QUOTAS
        ],
    }
