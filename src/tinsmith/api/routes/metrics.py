"""Metrics of training runs by step: clients log them, and read them back together with the server's own metrics.

A request has one point or a list of points. A value replaces the earlier value of the same run, step and name, so that
a repeated request changes nothing. A list of numbers is stored as its mean under its own name, and as quantiles under
the name with the suffixes of `QUANTILES`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tinsmith.api.declaration import operation
from tinsmith.api.openapi import COUNT, LIST, NUMBER, TEXT, fields
from tinsmith.api.request import Call, JsonObject
from tinsmith.errors import RequestError
from tinsmith.wire.fields import ClosedBody, ListOr, Number, Query, Text, show, validation_error

MAX_NAME_LENGTH = 64
MAX_NAMES = 64
"""Most names of one point."""
MAX_POINTS = 256
"""Most points of one request."""
MAX_LIST_LENGTH = 16_384
"""Most numbers of one list."""
MAX_STEP = 2**53 - 1
"""The largest integer that JavaScript represents exactly."""
QUANTILES = {":min": 0.0, ":p10": 0.1, ":p50": 0.5, ":p90": 0.9, ":max": 1.0}

Values = Annotated[Number | Annotated[list[Number], Field(min_length=1, max_length=MAX_LIST_LENGTH)], ListOr()]


def _check_names(metrics: dict[str, float | list[float]]) -> dict[str, float | list[float]]:
    if not 0 < len(metrics) <= MAX_NAMES:
        raise validation_error(f"has {len(metrics)} names; log 1 to {MAX_NAMES} at a time")
    for name, value in metrics.items():
        longest = MAX_NAME_LENGTH - (4 if isinstance(value, list) else 0)
        if not 0 < len(name) <= longest or not name.isprintable():
            raise validation_error(f"has the name {show(name)}; a name has 1 to {longest} printable characters")
    return metrics


Metrics = Annotated[
    dict[str, Values],
    AfterValidator(_check_names),
    Field(description=f"1 to {MAX_NAMES} finite numbers, or lists of them, by name"),
]


def _as_integer(value: object) -> object:
    """Accept an integer as a float: a logger that counts in floats writes step 3 as 3.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Step = Annotated[int, BeforeValidator(_as_integer), Field(ge=0, le=MAX_STEP)]


class PointBody(ClosedBody):
    step: Step | None = None
    metrics: Metrics


class LogMetricsRequest(ClosedBody):
    """Either `metrics`, with or without a step, or `points`."""

    model_id: Text
    metrics: Metrics | None = None
    step: Step | None = None
    points: Annotated[list[PointBody], Field(min_length=1, max_length=MAX_POINTS)] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> LogMetricsRequest:
        if self.metrics is None and self.points is None:
            raise RequestError("metrics", "metrics is missing: numbers by name; or send points")
        if self.points is not None and (self.metrics is not None or self.step is not None):
            raise RequestError("points", "points cannot be combined with metrics or step; put these into a point")
        return self


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
    points_by_step = [(point.step, point.metrics) for point in request.points or ()] or [
        (request.step, request.metrics or {})
    ]
    points = [(step, summarize(metrics)) for step, metrics in points_by_step]
    step = call.services.curves.log_points(model.model_id, points)
    return {"model_id": model.model_id, "step": step}


def summarize(metrics: Mapping[str, float | Sequence[float]]) -> dict[str, float]:
    """Replace each list by its mean and its quantiles (linear interpolation)."""
    values: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(value, Sequence):
            values[name] = value
            continue
        values[name] = math.fsum(value) / len(value)
        levels = np.quantile(np.array(value, np.float64), list(QUANTILES.values()))
        values |= {name + suffix: float(level) for suffix, level in zip(QUANTILES, levels, strict=True)}
    return values


class PointsQuery(Query):
    """`after` is the cursor of an earlier answer."""

    after: Annotated[float, Field(ge=0, lt=1e12)] = 0.0


@operation(
    "GET",
    "/training_runs/{run_id}/metrics",
    "Read a run's metrics by step",
    answer=fields({"points": LIST, "cursor": NUMBER}),
    query=PointsQuery,
)
def metrics(call: Call, query: PointsQuery) -> JsonObject:
    """Return all points, or those since a cursor. Points near the cursor may be repeated."""
    model = call.services.models.get(call.tenant_id, call.path["run_id"])
    points = call.services.curves.points(model.model_id, query.after)
    return {
        "points": [
            {"source": point.source, "step": point.step, "time": point.recorded_at, "metrics": point.metrics}
            for point in points
        ],
        "cursor": max([query.after, *(point.recorded_at for point in points)]),
    }
