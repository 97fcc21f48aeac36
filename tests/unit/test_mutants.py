"""`make mutants`: which changes it makes, and that it tells those that tests notice from those that they do not."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "mutants"

SOURCE = """
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 10


@dataclass(frozen=True)
class Box:
    size: int | None = 3


def clamp(value: int | float) -> int | float:
    def inner(value: int) -> int:
        return value + 1

    if value > LIMIT:
        return LIMIT
    return inner(value) - 1


def untested(value: int) -> int:
    return value * 2
"""

TESTS = """
from boxes.box import LIMIT, clamp


def test_a_value_is_at_most_the_limit():
    assert [clamp(value) for value in (2, 15)] == [2, LIMIT]
"""

RUN = """
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

loader = SourceFileLoader("mutants", sys.argv[1])
mutants = module_from_spec(spec_from_loader("mutants", loader))
sys.modules["mutants"] = mutants
loader.exec_module(mutants)
workspace = mutants.Workspace(Path(sys.argv[2]), Path(sys.argv[3]), "boxes")
score = mutants.score_module(workspace, mutants.Module(("box.py",), ("tests/test_box.py",)), list)
print(mutants.format_table({"box": score}))
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("mutants", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = sys.modules[loader.name] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_what_computes_nothing_is_not_changed(script: ModuleType) -> None:
    lines = {mutant.line for mutant in script.list_mutants("box.py", SOURCE)}
    texts = {SOURCE.splitlines()[line - 1].strip() for line in lines}
    assert texts == {
        "LIMIT = 10",
        "size: int | None = 3",
        "if value > LIMIT:",
        "return value + 1",
        "return inner(value) - 1",
        "return value * 2",
    }


def test_the_same_seed_chooses_the_same_mutants_of_different_places(script: ModuleType) -> None:
    mutants = script.list_mutants("box.py", SOURCE)
    chosen = script.sample_mutants(mutants, 4, "seed")
    assert chosen == script.sample_mutants(list(reversed(mutants)), 4, "seed")
    assert len({(mutant.line, mutant.column) for mutant in chosen}) == 4
    assert any(script.sample_mutants(mutants, 4, str(seed)) != chosen for seed in range(5))
    assert script.sample_mutants(mutants, None, "seed") == mutants
    assert len(script.sample_mutants(mutants, 1000, "seed")) == len({(m.line, m.column) for m in mutants})


def test_a_mutant_is_one_change_and_belongs_to_the_innermost_function(script: ModuleType) -> None:
    functions = {"return value + 1": "def inner", "if value > LIMIT:": "def clamp", "LIMIT = 10": None}
    for mutant in script.list_mutants("box.py", SOURCE):
        assert script.Mutant.parse(mutant.id) == mutant
        removed, added = script.diff_lines(SOURCE, script.apply_mutant(SOURCE, mutant))
        line = SOURCE.splitlines()[mutant.line - 1].strip()
        assert removed == f"- {line}" and added.startswith("+ ") and added[2:] != line
        if line in functions:
            first_line = script.function_of(SOURCE, mutant)
            text = None if first_line is None else SOURCE.splitlines()[first_line - 1].strip()
            assert text == functions[line] or (text or "").startswith(functions[line] or "?")


@pytest.mark.extended
def test_survivors_are_named_and_the_tree_stays_as_it_is(tmp_path: Path) -> None:
    root, copy = tmp_path / "root", tmp_path / "copy"
    copy.mkdir()
    for path, text in {"src/boxes/__init__.py": "", "src/boxes/box.py": SOURCE, "tests/test_box.py": TESTS}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    command = [sys.executable, "-c", RUN, str(SCRIPT), str(root), str(copy)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    lines = [" ".join(line.split()) for line in process.stdout.splitlines()]
    _, num_mutants, killed, survived = lines[-1].split()
    assert int(num_mutants) == int(killed) + int(survived)
    reports = {lines[index + 2]: line for index, line in enumerate(lines) if "box.py:" in line}
    assert len(reports) == int(survived)
    assert reports["+ return value + 2"].startswith("no test calls it: box.py:")
    assert reports["+ LIMIT = 11"].startswith("survived 1 tests: box.py:"), "the test reads it from the module"
    assert reports["+ size: int | None = 4"].startswith("survived 1 tests: box.py:")
    assert "+ return inner(value) + 1" not in reports and "+ if value < LIMIT:" not in reports
    assert (root / "src/boxes/box.py").read_text() == SOURCE and not list(root.rglob("__pycache__"))
