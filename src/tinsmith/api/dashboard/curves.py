"""A run's curves: what a client logs, and what there is to draw."""

from __future__ import annotations

import math

from starlette.routing import Route

from tinsmith.api.operation import Call, JsonObject, endpoint
from tinsmith.errors import UserError
from tinsmith.store.history import MOST_NAMES
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.fields import Fields, show

FIELDS = frozenset(("model_id", "step", "metrics"))
MOST_NAME_LETTERS = 64
MAX_STEP = 2**53 - 1
"""The largest that whoever draws it can tell from its neighbours."""


def log_metrics(call: Call) -> JsonObject:
    fields = call.fields()
    fields.refuse_unknown(FIELDS)
    model = call.services.models.get(call.tenant_id, fields.text("model_id"))
    step = fields.integer_or("step", None)
    if step is not None and not 0 <= step <= MAX_STEP:
        raise UserError(f"step is {step}; it must lie between 0 and {MAX_STEP}")
    metrics = _metrics(fields.fields("metrics"))
    return {"model_id": model.model_id, "step": call.services.curves.log(model.model_id, step, metrics)}


def _metrics(fields: Fields) -> dict[str, float]:
    names = list(fields.values)
    if not 0 < len(names) <= MOST_NAMES:
        raise UserError(f"metrics has {len(names)} names; log 1 to {MOST_NAMES} at a time")
    for name in names:
        if not 0 < len(name) <= MOST_NAME_LETTERS or not name.isprintable():
            raise UserError(f"metrics names {show(name)}; a name has 1 to {MOST_NAME_LETTERS} printable characters")
    return {name: fields.number(name) for name in names}


def metrics(call: Call) -> JsonObject:
    """The points, all of them or those that are new since a cursor; some may come twice."""
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


ROUTES = [
    Route("/log_metrics", endpoint(log_metrics, JSON_TYPE), methods=["POST"]),
    Route("/training_runs/{run_id}/metrics", endpoint(metrics), methods=["GET"]),
]
