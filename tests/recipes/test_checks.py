"""The checks of the recipes fail for wrong outcomes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.checks import Check, above, always, at, falls, first, learns_from_contrast, logs, moves, on_policy, says
from recipes.runner import Outcome
from support.live import LiveServer

GOOD: list[dict[str, float]] = [
    {"nll": 2.0, "optim/kl_sample_train_v1": 1e-7, "optim/kl_sample_train_v2": 1e-13, "optim/entropy": 1.0},
    {"nll": 1.0, "env/all/by_group/frac_mixed": 0.5, "grad_norm": 3.0},
    {"step": 3.0},
]


def outcome(tmp_path: Path, *lines: dict[str, float], output: str = "") -> Outcome:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    nobody = LiveServer("http://127.0.0.1:9", tmp_path, subprocess.Popen([sys.executable, "-c", ""]))
    nobody.process.wait()
    return Outcome(nobody, output, tmp_path / "log")


@pytest.mark.parametrize(
    "check",
    [
        logs("nll", 2),
        first("nll", 1.5, 2.5),
        always("nll", 0.5, 2.5),
        above("nll", 0),
        falls("nll"),
        moves("nll"),
        on_policy,
        learns_from_contrast,
        says("done"),
        at("log", logs("nll", 2)),
    ],
)
def test_a_check_passes_correct_outcomes(tmp_path: Path, check: Check) -> None:
    check(outcome(tmp_path, *GOOD, output="all done"))


@pytest.mark.parametrize(
    ("check", "lines"),
    [
        (logs("nll", 2), [{"nll": 1.0}]),
        (logs("nll", 1), [{"other": 1.0}]),
        (logs("nll", 1), [{"nll": float("nan")}]),
        (logs("nll", 1), [{"nll": float("inf")}]),
        (first("nll", 0, 1), [{"nll": 2.0}, {"nll": 0.5}]),
        (always("nll", 0, 1), [{"nll": 0.5}, {"nll": 2.0}]),
        (above("nll", 0), [{"nll": 1.0}, {"nll": 0.0}]),
        (falls("nll"), [{"nll": 1.0}, {"nll": 1.0}]),
        (moves("nll"), [{"nll": 1.0}, {"nll": 1.0}]),
        (on_policy, [{**GOOD[0], "optim/kl_sample_train_v1": 1e-3}]),
        (on_policy, [{**GOOD[0], "optim/kl_sample_train_v2": 1e-6}]),
        (learns_from_contrast, [{"env/all/by_group/frac_mixed": 0.5, "grad_norm": 0.0}]),
        (learns_from_contrast, [{"env/all/by_group/frac_mixed": 0.0, "grad_norm": 1.0}]),
        (learns_from_contrast, [{"env/all/by_group/frac_mixed": 0.0, "grad_norm": 0.0}]),
        (says("done"), []),
        (at("log", falls("nll")), [{"nll": 1.0}, {"nll": 2.0}]),
    ],
)
def test_a_check_fails_wrong_outcomes(tmp_path: Path, check: Check, lines: list[dict[str, float]]) -> None:
    with pytest.raises(AssertionError):
        check(outcome(tmp_path, *lines))
