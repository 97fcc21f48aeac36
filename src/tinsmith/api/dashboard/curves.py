"""A run's curves: the metrics that a client logs, and the points of the dashboard's charts.

Metrics are numbers by name at a step; `store.history` merges and thins them.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AfterValidator, Field

from tinsmith.api.openapi import COUNT, LIST, NUMBER, TEXT, fields
from tinsmith.api.operation import Call, JsonObject, operation
from tinsmith.errors import UserError
from tinsmith.store.history import MOST_NAMES
from tinsmith.wire.fields import ClosedBody, Text, show, wrong

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
    """Without a step, the metrics belong to the run's newest optimizer step."""
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
    """All points, or those since a cursor; some may come twice."""
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
