"""Every row of the table runs to its end and passes its checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.runner import run
from recipes.table import ROWS, Row
from support.live import LiveServer

pytestmark = [pytest.mark.recipes, pytest.mark.timeout(1500, func_only=True)]

EVALUATION = Path(__file__).with_name("evaluate.py")
PARAMETERS = [pytest.param(row, id=row.name, marks=[] if row.quick else [pytest.mark.slow]) for row in ROWS]


@pytest.mark.parametrize("row", PARAMETERS)
def test_a_recipe_runs_and_passes_its_checks(recipe_server: LiveServer, workplace: Path, row: Row) -> None:
    if row.after:
        _leave_only_the_first_checkpoint(workplace / row.after)
    outcome = run(recipe_server, workplace, row.command, row.log, row.standard_input)
    for check in row.checks:
        check(outcome)


def test_evaluators_agree_and_a_benchmark_is_graded(recipe_server: LiveServer, workplace: Path) -> None:
    outcome = run(recipe_server, workplace, (str(EVALUATION),), "evaluation")
    metrics = json.loads(outcome.output.splitlines()[-1])
    assert metrics["sampler/nll"] == pytest.approx(metrics["trainer/nll"], rel=1e-4)
    assert metrics["sampler/bpb"] == pytest.approx(metrics["trainer/bpb"], rel=1e-4)
    assert 0 < metrics["trainer/nll"] < 1, "the embedded model knows sums"
    assert (metrics["eval/gsm8k/num_examples"], metrics["eval/gsm8k/num_errors"]) == (8, 0)
    assert 0 <= metrics["eval/gsm8k/score"] <= 1


def _leave_only_the_first_checkpoint(log_path: Path) -> None:
    """Simulate a run that died after its first checkpoint, since the last one would leave nothing to do."""
    if not log_path.exists():
        pytest.skip(f"continues the row {log_path.name}, which was not selected")
    checkpoints = log_path / "checkpoints.jsonl"
    checkpoints.write_text(checkpoints.read_text().splitlines(keepends=True)[0])
