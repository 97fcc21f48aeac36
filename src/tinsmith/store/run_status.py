"""What a training run is doing, for people: its status, why, how long it has taken, and its tags.

| status | meaning |
|---|---|
| diverged | its newest optimizer step has a loss or gradient that is not finite, or a loss without any gradient |
| failed | its model failed, or its client reported an error |
| finished | its client is done or silent, or its model was unloaded |
| running | requests wait or are computed, or the last one came within `RUNNING_S` |
| idle | its client is there, and asks for nothing |

The first that applies counts, so a run that diverged never looks like a success. In reinforcement learning, groups of
equal rewards have a gradient of 0 and a loss of 0, and are no divergence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tinsmith.store.curves import Point

RUNNING_S = 60.0
LOSSES = ("loss_per_token", "loss_per_datum")
UNLOADED = ("unloaded", "copied")
SESSION_ENDED = ("finished", "expired")


class RunStatus(NamedTuple):
    name: str
    reason: str | None
    duration_s: float
    """From its creation to now, or to its end."""


def run_status(run: Mapping[str, Any], newest: Point | None, is_busy: bool, at: float) -> RunStatus:
    """The status of a run at a moment. `newest` is its last optimizer step, `is_busy` whether requests wait.

    `run` has columns of its model, and of its session as `session_state`, `finish_type`, `session_reason` and
    `session_ended_at`.
    """
    ended_at = max(run["session_ended_at"] or 0.0, run["last_request_at"])
    duration_s = max(0.0, ended_at - run["created_at"])
    if reason := describe_divergence(newest):
        return RunStatus("diverged", reason, duration_s)
    if run["state"] == "failed":
        return RunStatus("failed", run["reason"], duration_s)
    if run["finish_type"] == "errored":
        return RunStatus("failed", run["session_reason"], duration_s)
    if run["session_state"] in SESSION_ENDED:
        return RunStatus("finished", None if run["finish_type"] == "success" else run["session_reason"], duration_s)
    if run["state"] in UNLOADED:
        return RunStatus("finished", run["reason"], duration_s)
    if is_busy or run["state"] == "creating" or at - run["last_request_at"] < RUNNING_S:
        return RunStatus("running", None, max(0.0, at - run["created_at"]))
    return RunStatus("idle", None, duration_s)


def describe_divergence(newest: Point | None) -> str | None:
    """Why a run has diverged, by its newest optimizer step; None if it has not. Values that are not finite are None."""
    if newest is None:
        return None
    metrics = newest.metrics
    for name in (*LOSSES, "grad_norm"):
        if name in metrics and metrics[name] is None:
            return f"{name} is not finite at step {newest.step}"
    loss = next((metrics[name] for name in LOSSES if name in metrics), None)
    if loss and metrics.get("grad_norm") == 0.0 and newest.step > 1:
        return f"the gradient is 0 at step {newest.step}, with a loss of {loss:.4g}: no token can be learned any more"
    return None


def run_tags(metadata: Mapping[str, Any] | None) -> list[str]:
    """The tags in a run's metadata: a list, its JSON, or a text separated by commas."""
    tags = (metadata or {}).get("tags") or []
    if isinstance(tags, str):
        try:
            parsed = json.loads(tags)
        except ValueError:
            parsed = None
        tags = parsed if isinstance(parsed, list) else tags.split(",")
    if not isinstance(tags, list):
        tags = [tags]
    return list(dict.fromkeys(text for tag in tags if (text := str(tag).strip())))
