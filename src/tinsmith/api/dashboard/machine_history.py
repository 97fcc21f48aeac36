"""The dashboard's history of the machine: its work over an hour, a day or a month.

As in the status bar, everyone sees the machine's totals, except that sampled tokens are the caller's own. Operators see
the tokens of all tenants, and which tenant had how many. Only tenants with a label of the metrics are told apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from tinsmith.api.openapi import COUNT, LIST, fields, listing, one_of
from tinsmith.api.request import Call, JsonObject
from tinsmith.db.database import now
from tinsmith.store.machine_history import LEVELS, MACHINE, MachineWork, Period
from tinsmith.telemetry.metrics import OTHER
from tinsmith.wire.fields import Query


class HistoryQuery(Query):
    span: Annotated[Literal["hour", "day", "month"], Field(description="an hour in steps of 10 s, a day, 30 days")] = (
        "hour"
    )


@listing(
    "/dashboard/machine/history",
    "Read the machine's work over time",
    answer=fields({"span": one_of(*LEVELS), "step_s": COUNT, "base_models": LIST, "device": LIST, "tenants": LIST}),
    query=HistoryQuery,
)
def machine_history(call: Call, query: HistoryQuery) -> JsonObject:
    """Return points in the order of time. A period without observations has no point."""
    services, level, read_at = call.services, LEVELS[query.span], now()
    periods = services.machine_history.list_periods(level, read_at)
    is_operator = call.tenant_id in services.settings.operator_tenants or services.tenants.accepts_anyone()
    by_model: dict[str, list[Period]] = defaultdict(list)
    for period in periods:
        by_model[period.base_model].append(period)
    machine = by_model.pop(MACHINE, [])
    return {
        "span": query.span,
        "step_s": level.step_s,
        "since": read_at - level.span_s,
        "now": read_at,
        "is_operator": is_operator,
        "base_models": [
            _describe_base_model(base_model, of_model, call.tenant_id, is_operator)
            for base_model, of_model in sorted(by_model.items())
        ],
        "device": [
            {"began_at": period.began_at, "utilisation": period.totals.device_busy_s / period.totals.device_s}
            for period in machine
            if period.totals.device_s
        ],
        "tenants": _list_tenants(periods) if is_operator else [],
    }


def _describe_base_model(base_model: str, periods: Sequence[Period], tenant_id: str, is_operator: bool) -> JsonObject:
    """A base model's points and its total tokens; those sampled are None if they are not known in some period."""
    sampled = [_count_visible_tokens(period.totals, tenant_id, is_operator) for period in periods]
    visible = [tokens for tokens in sampled if tokens is not None]
    return {
        "base_model": base_model,
        "trained_tokens": sum(period.totals.trained_tokens for period in periods),
        "sampled_tokens": sum(visible) if len(visible) == len(sampled) else None,
        "points": [_point(period, tokens) for period, tokens in zip(periods, sampled, strict=True)],
    }


def _point(period: Period, sampled: float | None) -> JsonObject:
    """A period of a base model. Rates are per second of observation; shares are of its engines' time."""
    totals = period.totals
    observed_s = totals.observed_s or float("inf")
    busy_s = totals.training_s + totals.sampling_s + totals.loading_s
    whole_s = max(totals.engine_s, busy_s) or float("inf")  # steps may overlap, and be counted at their end
    shares = (
        ("training", totals.training_s),
        ("sampling", totals.sampling_s),
        ("loading", totals.loading_s),
        ("idle", totals.idle_s),
    )
    return {
        "began_at": period.began_at,
        "trained_tokens": totals.trained_tokens / observed_s,
        "sampled_tokens": None if sampled is None else sampled / observed_s,
        "memory_bytes": totals.memory_byte_s / observed_s or None,
        "memory_budget": totals.budget_byte_s / observed_s or None,
        **{name: seconds / whole_s for name, seconds in shares},
    }


def _count_visible_tokens(totals: MachineWork, tenant_id: str, is_operator: bool) -> float | None:
    """The sampled tokens that the caller may see; None if they are counted together with those of other tenants."""
    if is_operator:
        return totals.sampled_tokens
    if tenant_id in totals.tenants and tenant_id != OTHER:
        return totals.tenants[tenant_id][1]
    return None if OTHER in totals.tenants else 0.0


def _list_tenants(periods: Sequence[Period]) -> list[JsonObject]:
    """The tokens of each tenant in the span, with its share of both kinds; the most first."""
    total = MachineWork()
    for period in periods:
        total.add(MachineWork(tenants=period.totals.tenants))
    trained = sum(pair[0] for pair in total.tenants.values()) or float("inf")
    sampled = sum(pair[1] for pair in total.tenants.values()) or float("inf")
    rows: list[JsonObject] = [
        {
            "tenant_id": tenant_id,
            "trained_tokens": pair[0],
            "trained_share": pair[0] / trained,
            "sampled_tokens": pair[1],
            "sampled_share": pair[1] / sampled,
        }
        for tenant_id, pair in total.tenants.items()
    ]
    return sorted(rows, key=lambda row: (-sum(total.tenants[str(row["tenant_id"])]), str(row["tenant_id"])))
