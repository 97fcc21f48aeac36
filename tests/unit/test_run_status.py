"""What a run is doing: running, idle, finished, failed or diverged."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith.store.curves import SERVER, Point
from tinsmith.store.run_status import RUNNING_S, RunStatus, run_status, run_tags

NOW = 10_000.0


def describe(
    newest: dict[str, float | None] | None = None, *, busy: bool = False, step: int = 5, **columns: object
) -> RunStatus:
    run: dict[str, Any] = {
        "state": "ready", "reason": None, "created_at": NOW - 1000, "last_request_at": NOW - 100,
        "session_state": "active", "session_reason": None, "finish_type": None, "session_ended_at": None, **columns,
    }  # fmt: skip
    return run_status(run, None if newest is None else Point(SERVER, step, newest, NOW), busy, NOW)


@pytest.mark.parametrize(
    ("columns", "busy", "status"),
    [
        ({"last_request_at": NOW - RUNNING_S / 2}, False, ("running", None, 1000)),
        ({}, True, ("running", None, 1000)),
        ({"state": "creating"}, False, ("running", None, 1000)),
        ({}, False, ("idle", None, 900)),
        (
            {"session_state": "finished", "finish_type": "success", "session_reason": "finished: success",
             "session_ended_at": NOW - 50, "last_request_at": NOW - 51},
            True,
            ("finished", None, 950),
        ),
        (
            {"session_state": "finished", "finish_type": "interrupted", "session_reason": "finished: interrupted"},
            False,
            ("finished", "finished: interrupted", 900),
        ),
        (
            {"session_state": "expired", "session_reason": "no heartbeat for 300 s", "session_ended_at": NOW},
            False,
            ("finished", "no heartbeat for 300 s", 1000),
        ),
        ({"state": "unloaded", "reason": "unloaded by its client"}, False, ("finished", "unloaded by its client", 900)),
        ({"state": "copied", "session_state": None}, False, ("finished", None, 900)),
        ({"state": "failed", "reason": "no room"}, True, ("failed", "no room", 900)),
        (
            {"session_state": "finished", "finish_type": "errored", "session_reason": "finished: errored: KeyError"},
            False,
            ("failed", "finished: errored: KeyError", 900),
        ),
    ],
)  # fmt: skip
def test_a_run_has_the_status_of_its_model_and_its_client(
    columns: dict[str, Any], busy: bool, status: tuple[str, str | None, float]
) -> None:
    assert tuple(describe(busy=busy, **columns)) == status


@pytest.mark.parametrize(
    ("newest", "step", "reason"),
    [
        ({"loss_per_token": None, "grad_norm": 1.0}, 1, "loss_per_token is not finite at step 1"),
        ({"loss_per_datum": None, "grad_norm": 1.0}, 5, "loss_per_datum is not finite at step 5"),
        ({"loss_per_token": 2.0, "grad_norm": None}, 5, "grad_norm is not finite at step 5"),
        (
            {"loss_per_token": 812.5, "grad_norm": 0.0},
            5,
            "the gradient is 0 at step 5, with a loss of 812.5: no token can be learned any more",
        ),
        ({"loss_per_token": 812.5, "grad_norm": 0.0}, 1, None),
        ({"loss_per_token": 0.0, "grad_norm": 0.0}, 5, None),
        ({"loss_per_token": 2.0, "grad_norm": 1e-9}, 5, None),
        ({"grad_norm": 0.0}, 5, None),
        ({"loss_per_token": 2.0, "reward": None, "grad_norm": 3.0}, 5, None),
        ({}, 5, None),
    ],
)
def test_a_run_that_diverged_never_looks_like_a_success(
    newest: dict[str, float | None], step: int, reason: str | None
) -> None:
    for columns in ({}, {"session_state": "finished", "finish_type": "success"}):
        status = describe(newest, step=step, **columns)
        assert (status.name == "diverged", status.reason) == (reason is not None, reason)


@pytest.mark.parametrize(
    ("metadata", "tags"),
    [
        (None, []),
        ({}, []),
        ({"tags": ""}, []),
        ({"tags": "a,b"}, ["a", "b"]),
        ({"tags": " a , b ,a"}, ["a", "b"]),
        ({"tags": ["a", "b"]}, ["a", "b"]),
        ({"tags": '["a", "b"]'}, ["a", "b"]),
        ({"tags": "[draft], b"}, ["[draft]", "b"]),
        ({"tags": "7"}, ["7"]),
        ({"tags": 7}, ["7"]),
    ],
)
def test_tags_are_a_list_its_json_or_a_text_with_commas(metadata: dict[str, Any] | None, tags: list[str]) -> None:
    assert run_tags(metadata) == tags
