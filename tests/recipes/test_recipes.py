"""Every row of the table runs to its end, and did what its checks say."""

from __future__ import annotations

from pathlib import Path

import pytest

from live import LiveServer
from recipes.runner import run
from recipes.table import ROWS, Row

pytestmark = [pytest.mark.recipes, pytest.mark.timeout(400)]

PARAMETERS = [pytest.param(row, id=row.name, marks=[] if row.quick else [pytest.mark.slow]) for row in ROWS]


@pytest.mark.parametrize("row", PARAMETERS)
def test_a_recipe_does_what_it_is_for(recipe_server: LiveServer, workplace: Path, row: Row) -> None:
    if row.after:
        _leave_only_the_first_checkpoint(workplace / row.after)
    outcome = run(recipe_server, workplace, row.command, row.log, row.standard_input)
    for check in row.checks:
        check(outcome)


def _leave_only_the_first_checkpoint(log_path: Path) -> None:
    """As if the run had died after its first checkpoint: its last one says that there is nothing left to do."""
    if not log_path.exists():
        pytest.skip(f"continues the row {log_path.name}, which was not selected")
    checkpoints = log_path / "checkpoints.jsonl"
    checkpoints.write_text(checkpoints.read_text().splitlines(keepends=True)[0])
