"""What needs a person: the caller's runs that diverged, failed, stalled or stopped learning, and a server's machine
whose disk or memory is nearly full. A warning has a key, which stays the same while it lasts.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tinsmith.api.openapi import LIST, fields, listing
from tinsmith.api.request import Call, JsonObject
from tinsmith.api.services import Services
from tinsmith.db.database import now
from tinsmith.runtime.host_memory import read_host_memory
from tinsmith.runtime.sizes import format_bytes
from tinsmith.store.curves import CLIENT, SERVER, Point
from tinsmith.store.overview import Row
from tinsmith.store.run_health import NUM_POINTS, list_run_warnings
from tinsmith.store.run_status import run_status

MAX_RUNS = 20
"""The runs with the latest requests, which are watched."""
WATCHED_S = 86400.0
"""A run without a request for this long is not watched."""
FULL = 0.95
"""The used share from which a disk or the memory is nearly full."""


@listing("/dashboard/warnings", "List warnings", answer=fields({"warnings": LIST}))
def warnings(call: Call) -> JsonObject:
    directory = call.services.settings.resolved_data_dir
    return {"warnings": [*list_machine_warnings(directory), *list_tenant_warnings(call.services, call.tenant_id)]}


def list_tenant_warnings(services: Services, tenant_id: str) -> list[JsonObject]:
    """The warnings of a tenant's runs: {key, kind, text, run, name}."""
    at = now()
    rows, _ = services.overview.runs(tenant_id, "", "last_request_at", True, MAX_RUNS, 0)
    watched = [row for row in rows if at - row["last_request_at"] < WATCHED_S]
    model_ids = [str(row["model_id"]) for row in watched]
    oldest_first = services.overview.list_waiting(tenant_id)
    waiting = {str(row["lane"]): float(row["oldest_at"]) for row in reversed(oldest_first)}
    busy = services.overview.busy_runs(tenant_id, model_ids)
    points = services.curves.newest_points(model_ids, NUM_POINTS)
    entries: list[JsonObject] = []
    for row in watched:
        entries += _list_run_entries(row, points, waiting, row["model_id"] in busy, at)
    return entries


def _list_run_entries(
    row: Row, points: Mapping[tuple[str, str], list[Point]], waiting: Mapping[str, float], is_busy: bool, at: float
) -> list[JsonObject]:
    model_id = str(row["model_id"])
    logged, trained = points.get((model_id, CLIENT), []), points.get((model_id, SERVER), [])
    status = run_status(row, trained[-1] if trained else None, is_busy, at)
    name = (row["user_metadata"] or {}).get("name") or row["display_name"]
    oldest_at = waiting.get(model_id)
    return [
        {"key": f"{warning.kind} {model_id}", "kind": warning.kind, "text": warning.text, "run": model_id, "name": name}
        for warning in list_run_warnings(status, logged, trained, row["last_request_at"], oldest_at, at)
        if status.name != "finished"
    ]


def list_machine_warnings(directory: Path) -> list[JsonObject]:
    """The warnings of this machine, and of the file system of a directory."""
    entries: list[JsonObject] = []
    disk = shutil.disk_usage(directory)
    if disk.total and disk.used / disk.total >= FULL:
        entries.append(_describe_full("disk", disk.free, disk.total))
    free_bytes, total_bytes = read_host_memory()
    if free_bytes / total_bytes <= 1 - FULL:
        entries.append(_describe_full("memory", free_bytes, total_bytes))
    return entries


def _describe_full(resource: str, free: int, total: int) -> JsonObject:
    kind = f"{resource} nearly full"
    text = f"{format_bytes(free)} of {format_bytes(total)} of the server's {resource} are free"
    return {"key": kind, "kind": kind, "text": text, "run": None, "name": None}
