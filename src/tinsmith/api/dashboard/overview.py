"""What the dashboard shows beyond the other routes: an overview, runs by search, the queue and what was packed.

Everything is the asking tenant's, but for two numbers of each step (how many tokens it had in all, and of how many
tenants) and the memory of the engines.
"""

from __future__ import annotations

import time

from tinsmith.api.openapi import ANYTHING, LIST, PAGE, TEXT, fields, one_of, ref
from tinsmith.api.operation import Access, Call, JsonObject, operation
from tinsmith.auth.quotas import NAMES as QUOTAS
from tinsmith.errors import UserError
from tinsmith.store.history import Point, RecentStep
from tinsmith.store.overview import SORTS, RunSummary
from tinsmith.wire.fields import iso, show, text_values

MAX_SEARCH = 200
SHOWN_STEPS = 50
COUNTED = {
    "queued_requests": "waiting_requests",
    "queued_bytes": "waiting_bytes",
    "models": "loaded_runs",
    "checkpoint_bytes": "checkpoint_bytes",
    "file_bytes": "file_bytes",
}
"""What of the counts a quota limits; the tokens of a minute are counted in memory."""


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
            {
                "base_model": seat.base_model,
                "name": seat.engine_id,
                "kind": seat.kind,
                "state": seat.state,
                "reason": seat.reason,
                "started_at": iso(seat.started_at),
                "runs": seat.runs,
                "waiting_requests": seat.waiting_requests,
            }
            for seat in call.services.overview.seats(call.tenant_id)
        ],
    }


def _engines(call: Call) -> list[JsonObject]:
    found: list[JsonObject] = []
    for shape in call.services.bases:
        state, reason = call.services.queue_state(shape.name)
        found.append(
            {
                "base_model": shape.name,
                "state": state,
                "reason": reason,
                "max_context_length": shape.max_context_length,
                "vocab_size": shape.vocab_size,
            }
        )
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
    search, sort = call.query.get("search", ""), call.query.get("sort", "created_at")
    order = call.query.get("order", "desc")
    if len(search) > MAX_SEARCH:
        raise UserError(f"the query's search has {len(search)} characters; at most {MAX_SEARCH} are looked for")
    if sort not in SORTS:
        raise UserError(f"the query's sort is {show(sort)}; it must be one of {', '.join(SORTS)}")
    if order not in ("asc", "desc"):
        raise UserError(f"the query's order is {show(order)}; it must be 'asc' or 'desc'")
    found, total = call.services.overview.runs(call.tenant_id, search, sort, order == "desc", limit, offset)
    newest = call.services.curves.newest([one.model_id for one in found])
    return {
        "runs": [_run(one, newest.get(one.model_id)) for one in found],
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
    }


@operation("GET", "/dashboard/runs/{run_id}", "One run", answer=fields({"model_id": TEXT, "metrics": ANYTHING}))
def run(call: Call) -> JsonObject:
    found = call.services.overview.run(call.tenant_id, call.path["run_id"])
    return _run(found, call.services.curves.newest([found.model_id]).get(found.model_id))


def _run(found: RunSummary, newest: Point | None) -> JsonObject:
    return {
        "model_id": found.model_id,
        "session_id": found.session_id,
        "owner": found.tenant_id,
        "base_model": found.base_model,
        "state": found.state,
        "reason": found.reason,
        "lora_rank": found.lora_rank,
        "optimizer_type": found.optimizer_type,
        "applied_seq_id": found.applied_seq_id,
        "created_at": iso(found.created_at),
        "last_request_at": iso(found.last_request_at),
        "display_name": found.display_name,
        "project_id": found.project_id,
        "user_metadata": text_values(found.user_metadata),
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
        "waiting": [
            {
                "base_model": one.base_model,
                "kind": one.kind,
                "lane": one.lane,
                "requests": one.requests,
                "tokens": one.tokens,
                "oldest_at": iso(one.oldest_at),
            }
            for one in waiting
        ],
        "engines": [engine | {"steps": _steps(call, str(engine["base_model"]))} for engine in _engines(call)],
        "step_token_budget": call.services.settings.step_token_budget,
    }


def _steps(call: Call, base_model: str) -> list[JsonObject]:
    found = call.services.recent_steps.newest(base_model, SHOWN_STEPS)
    return [_step(call.tenant_id, position, step) for position, step in found]


def _step(tenant_id: str, position: int, step: RecentStep) -> JsonObject:
    mine = step.shares.get(tenant_id, {})
    return {
        "position": position,
        "ended_at": iso(step.ended_at),
        "duration_s": step.duration_s,
        "num_passes": step.num_passes,
        "num_optim_steps": step.num_optim_steps,
        "num_singles": step.num_singles,
        "num_tokens": step.num_tokens,
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
    """Whose key this is, the keys that open the same things, and what of its quotas is used."""
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
