"""`scripts/test-parts` and shards of `make test-extended`: every part runs or is named; the shards are all tests."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timedelta
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from support import shards

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS.parent / "scripts" / "test-parts"
NOW = datetime(2026, 11, 28, 16)
MAKEFILE = """
good:
	@echo "3 passed, 1 skipped in 0.10s"
bad:
	@echo "1 failed, 2 passed in 0.10s"; exit 1
empty:
	@echo "nothing"
extended:
	@echo "ran $(SHARD)"; echo "===== 2 passed in 1.00s (0:00:01) ====="
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("test_parts_script", str(SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setitem(sys.modules, loader.name, module)  # dataclasses look their module up
        loader.exec_module(module)
    return module


def run_parts(directory: Path, *arguments: str) -> tuple[int, list[str]]:
    """The status and the lines of a run of parts of MAKEFILE."""
    (directory / "Makefile").write_text(MAKEFILE)
    process = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return process.returncode, [*process.stdout.splitlines(), *process.stderr.splitlines()]


def test_all_parts_run_after_a_failure_and_one_line_counts_them(tmp_path: Path) -> None:
    status, lines = run_parts(tmp_path, "bad", "good", "extended/3")
    assert status == 1
    assert sorted(line for line in lines if line.startswith("ran")) == ["ran 1/3", "ran 2/3", "ran 3/3"]
    assert "bad: 1 failed, 2 passed, 0 s FAILED" in lines
    assert "good: 3 passed, 1 skipped, 0 s" in lines
    assert {f"extended SHARD={i}/3: 2 passed, 0 s" for i in (1, 2, 3)} <= set(lines)
    assert lines[-1].startswith("===== 1 failed, 11 passed, 1 skipped in ")


def test_parts_that_pass_are_a_success_and_a_part_without_tests_is_none(tmp_path: Path) -> None:
    assert run_parts(tmp_path, "good", "extended/2")[0] == 0
    status, lines = run_parts(tmp_path, "good", "empty")
    assert status == 1
    assert "empty: no test ran, 0 s FAILED" in lines


def test_every_part_that_does_not_run_is_named(tmp_path: Path) -> None:
    _, lines = run_parts(tmp_path, "--minutes", "0", "good", "extended/2")
    assert {line for line in lines if ": not run, 0.0 of 0 minutes had passed" in line} == {
        f"{part}: not run, 0.0 of 0 minutes had passed" for part in ("good", "extended SHARD=1/2", "extended SHARD=2/2")
    }


@pytest.mark.parametrize("name", ["extended/", "extended/0", "extended/x", "extended/2/3"])
def test_a_wrong_count_of_shards_is_refused(tmp_path: Path, name: str) -> None:
    status, lines = run_parts(tmp_path, "good", name)
    assert status == 2
    assert f"{name}: write a count of shards behind the slash, as in extended/8" in lines[-1]
    assert not [line for line in lines if "passed" in line]


def test_a_shard_starts_only_if_the_longest_so_far_would_end_in_time(script: ModuleType) -> None:
    part = script.Part("extended", "3/4")
    durations = {
        script.Part("test"): 600.0,
        script.Part("extended", "1/4"): 200.0,
        script.Part("extended", "2/4"): 300.0,
    }
    assert script.is_in_time(part, 700.0, 1000.0, durations)
    assert not script.is_in_time(part, 701.0, 1000.0, durations)
    # Before any shard has run, the longest part so far is taken as its expected length.
    assert script.is_in_time(part, 400.0, 1000.0, {script.Part("test"): 600.0})
    assert not script.is_in_time(part, 401.0, 1000.0, {script.Part("test"): 600.0})
    # A whole target has no such measure.
    assert script.is_in_time(script.Part("browser"), 1000.0, 1000.0, durations)
    assert not script.is_in_time(script.Part("browser"), 1001.0, 1000.0, durations)


@pytest.mark.parametrize("step", [timedelta(hours=1), timedelta(days=1)])
def test_within_some_runs_every_shard_is_the_first_one(script: ModuleType, step: timedelta) -> None:
    runs = [script.expand_parts(["test", "extended/8"], NOW + i * step) for i in range(8)]
    everything = {f"extended SHARD={i}/8" for i in range(1, 9)}
    assert all(str(run[0]) == "test" and set(map(str, run[1:])) == everything for run in runs)
    assert {str(run[1]) for run in runs} == everything


def test_shards_have_every_file_once_and_are_about_equally_long() -> None:
    paths = sorted(TESTS.rglob("test_*.py"))
    parts = [shards.files_of(f"{i}/8", TESTS, paths) for i in range(1, 9)]
    assert sorted(path for part in parts for path in part) == paths
    names = [[path.relative_to(TESTS).as_posix() for path in part] for part in parts]
    sums = [
        sum(shards.estimate_seconds(name, (TESTS / name).read_text()) for name in part_names) for part_names in names
    ]
    assert max(sums) < 1.1 * min(sums)


def test_files_without_extended_tests_weigh_next_to_nothing() -> None:
    assert shards.estimate_seconds("unit/test_x.py", "def test_a(): ...") == 0.1
    assert shards.estimate_seconds("unit/test_x.py", "@pytest.mark.extended\ndef test_a(): ...") == 8.0
    assert shards.estimate_seconds("e2e/test_x.py", "def test_a(): ...\nasync def test_b(): ...") == 12.0
    assert shards.estimate_seconds("e2e/test_x.py", "pytestmark = pytest.mark.smoke\ndef test_a(): ...") == 0.1
    assert (
        shards.estimate_seconds("fault/test_x.py", "pytestmark = [\n    pytest.mark.slow,\n]\ndef test_a(): ...") == 0.1
    )


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "1/0", "a/b"])
def test_a_wrong_shard_is_refused_with_the_form(shard: str) -> None:
    with pytest.raises(ValueError, match=f"--shard {shard}: write it as 2/8"):
        shards.parse(shard)


def test_every_length_that_is_stored_is_of_a_file() -> None:
    assert not [name for name in shards.SECONDS if not (TESTS / name).is_file()]


@pytest.mark.extended
def test_the_shards_of_a_directory_collect_each_of_its_tests_once() -> None:
    def collect(*arguments: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--collect-only", *arguments, str(TESTS / "fuzz")]
        process = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False, timeout=120)
        assert process.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED), process.stdout + process.stderr
        return [line for line in process.stdout.splitlines() if "::" in line]

    halves = [collect("--shard", "1/2"), collect("--shard", "2/2")]
    assert all(halves)
    assert sorted(halves[0] + halves[1]) == sorted(collect())
