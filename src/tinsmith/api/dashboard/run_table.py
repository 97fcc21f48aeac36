"""The table of runs by any value: a run's facts, settings (its user_metadata) and newest metrics under one name each.

Of equal names a fact wins over a setting, a setting over a metric that the client logged, and that over the server's.
`loss`, `lr` and `reward` mean the first of several usual names, unless a run has them. Filters, orders and groups by
value consider the newest `MAX_RUNS` runs of the search, since metrics are not indexed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import unquote

from tinsmith.api.dashboard.run_filter import Value, Values, to_number
from tinsmith.api.request import JsonObject
from tinsmith.errors import RequestError
from tinsmith.store.curves import Point
from tinsmith.store.run_health import REWARDS

MAX_RUNS = 1000
"""The newest runs that a filter, an order or a group by value considers."""
MAX_COLUMNS = 32
MAX_GROUPS = 3

FACTS = {
    "id": "model_id",
    "name": "name",
    "tag": "tags",
    "status": "status",
    "base_model": "base_model",
    "rank": "lora_rank",
    "optimizer": "optimizer_type",
    "project": "project_id",
    "state": "state",
    "step": "step",
    "duration": "duration_s",
    "created": "created_at",
    "last_request": "last_request_at",
    "session": "session_id",
}
"""The key of each fact in a run's JSON. `duration` is in seconds; times are RFC 3339 and compare as text."""
ALIASES = {
    "loss": ("loss_per_token", "loss_per_datum", "train_mean_nll"),
    "lr": ("learning_rate", "optim/lr"),
    "reward": REWARDS[1:],
    "tags": ("tag",),
}
_DESCRIBED = ("name", "tags")
"""Entries of the metadata that are facts."""


def list_values(run: JsonObject, logged: Point | None, trained: Point | None) -> Values:
    """The values of a run by name, from its JSON and the newest points of the client and of the server."""
    values: dict[str, Value] = {}
    for point in (trained, logged):
        if point is not None:
            values |= {name: value for name, value in point.metrics.items() if value is not None}
    settings = run["user_metadata"]
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            if name not in _DESCRIBED:
                setting_number = to_number(str(value))
                values[str(name)] = str(value) if setting_number is None else setting_number
    for name, key in FACTS.items():
        fact = run[key]
        if isinstance(fact, int | float | str) and fact != "":
            values[name] = fact
        elif isinstance(fact, Sequence) and not isinstance(fact, str) and fact:
            values[name] = [str(item) for item in fact]
    if logged is not None and not run["step"]:
        values["step"] = logged.step
    for name, usual_names in ALIASES.items():
        usual = next((usual for usual in usual_names if usual in values), None)
        if name not in values and usual is not None:
            values[name] = values[usual]
    return values


def split_names(field: str, text: str, max_names: int) -> list[str]:
    """Names separated by commas; a comma within a name is written %2C. Raises RequestError beyond `max_names`."""
    names = list(dict.fromkeys(unquote(part).strip() for part in text.split(",") if part.strip()))
    if len(names) > max_names:
        raise RequestError(field, f"{field} has {len(names)} names; at most {max_names} are possible")
    return names


def sort_by_value(rows: Sequence[Values], name: str, descending: bool) -> list[Values]:
    """Rows in the order of a value: numbers, then texts; rows without it come last in both directions."""
    keyed = [(_sort_key(row[name]), row) for row in rows if name in row]
    keyed.sort(key=lambda pair: pair[0], reverse=descending)
    return [row for _, row in keyed] + [row for row in rows if name not in row]


def _sort_key(value: Value) -> tuple[bool, float, str]:
    if isinstance(value, int | float):
        return False, float(value), ""
    return True, 0.0, value.casefold() if isinstance(value, str) else ", ".join(value).casefold()


def group_rows(rows: Sequence[Values], names: Sequence[str], columns: Sequence[str]) -> list[JsonObject]:
    """Groups of rows with equal values of `names`, in the order of their first rows. A group has, for each column,
    {mean, deviation, count} of the numbers, or {value, different} of other values.
    """
    members: dict[tuple[str, ...], list[Values]] = {}
    for row in rows:
        members.setdefault(tuple(_label(row.get(name)) for name in names), []).append(row)
    return [
        {
            "values": {name: group[0].get(name) for name in names},
            "run_ids": [row["id"] for row in group],
            "columns": {name: _summarise([row[name] for row in group if name in row]) for name in columns},
        }
        for group in members.values()
    ]


def _label(value: Value | None) -> str:
    return "" if value is None else repr(float(value)) if isinstance(value, int | float) else str(value)


def _summarise(values: Sequence[Value]) -> JsonObject:
    """The mean and sample standard deviation (None of one value), or the common value and how many there are."""
    numeric_values = [float(value) for value in values if isinstance(value, int | float)]
    if numeric_values and len(numeric_values) == len(values):
        deviation = statistics.stdev(numeric_values) if len(numeric_values) > 1 else None
        return {"mean": statistics.fmean(numeric_values), "deviation": deviation, "count": len(numeric_values)}
    labels = {_label(value) for value in values}
    return {"value": values[0] if len(labels) == 1 else None, "different": len(labels), "count": len(values)}


def sort_groups(groups: Sequence[JsonObject], name: str, descending: bool) -> list[JsonObject]:
    """Groups in the order of one of their values, or of the mean of a column."""
    rows: list[Values] = []
    for index, group in enumerate(groups):
        values, columns = group["values"], group["columns"]
        assert isinstance(values, Mapping) and isinstance(columns, Mapping)
        key = values.get(name)
        if key is None and isinstance(summary := columns.get(name), Mapping):
            key = summary.get("mean", summary.get("value"))
        rows.append({"index": index} | ({} if key is None else {name: key}))
    return [groups[int(str(row["index"]))] for row in sort_by_value(rows, name, descending)]


def list_names(rows: Iterable[Values], settings: Iterable[str]) -> JsonObject:
    """The names that the rows have, for a choice of columns: facts, settings, metrics."""
    present = {name for row in rows for name in row}
    known_settings = sorted({name for name in settings if name not in (*_DESCRIBED, "notes")})
    return {
        "facts": list(FACTS),
        "settings": known_settings,
        "metrics": sorted(present - set(FACTS) - set(known_settings) - {"tags", "notes"}),
    }
