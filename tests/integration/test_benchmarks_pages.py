"""Evaluation of the benchmarks' figures: interleaved runs, ratios, and the page of targets."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LATENCY = {"runs": 100, "min_ms": 5.0, "p50_ms": 6.0, "p95_ms": 9.0, "max_ms": 40.0}


@pytest.fixture(scope="module", autouse=True)
def benchmarks_can_be_imported() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))
    for path in BENCHMARKS.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def interleaving() -> ModuleType:
    return importlib.import_module("interleaving")


@pytest.fixture
def targets() -> ModuleType:
    return importlib.import_module("targets")


def spread(median: float, runs: int = 5) -> dict[str, float]:
    return {"median": median, "least": 0.9 * median, "most": 1.1 * median, "runs": runs}


def training(size: str, workload: str, rates: dict[str, float]) -> list[dict]:
    """Rows in training.py's format, of runs with equal times."""
    rows = []
    for row_name, rate in rates.items():
        row: dict = {
            "size": size,
            "work": workload,
            "what": row_name,
            "tokens_per_s": spread(rate),
            "seconds": [1 / rate] * 5,
        }
        row |= {"peak_mib": rate, "of_peft": {}, "memory_of_peft": {}}
        for other, theirs in rates.items():
            if other.startswith("PEFT"):
                row["of_peft"][other], row["memory_of_peft"][other] = spread(rate / theirs), rate / theirs
        for key, name in (("of_step_alone", "step alone"), ("of_products", "products")):
            if theirs := rates.get(row_name.replace("service", name)):
                row[key] = spread(rate / theirs)
        rows.append(row)
    return rows


def sampling(at_once: int, name: str, rate: float, of: dict[str, float]) -> dict:
    row = {
        "size": "m50",
        "at_once": at_once,
        "load": "short",
        "what": name,
        "tokens_per_s": spread(rate),
        "seconds": [1.0] * 5,
    }
    return row | {"of": {other: spread(ratio) for other, ratio in of.items()}}


def verdicts(page: str) -> dict[tuple[str, str, str], str]:
    """Verdicts by measure, baseline and the last column."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    return {(row[0], row[1], row[-1]): row[5].rpartition(": ")[2].strip("*") for row in rows[1:]}


def test_each_target_is_judged_by_its_figures(targets: ModuleType, tmp_path: Path) -> None:
    forward, crowd = "forward, one datum", "forward, one datum, 8 clients"
    latency = {
        "tiny": {forward: LATENCY | {"p50_ms": 3.0}, crowd: LATENCY | {"p50_ms": 13.0}},
        "canned": {forward: LATENCY | {"p50_ms": 2.0}, crowd: LATENCY | {"p50_ms": 10.0}},
    }
    (tmp_path / "latency.json").write_text(json.dumps(latency))
    publish = LATENCY | {"p50_ms": 29.0, "p95_ms": 59.0}
    rows = {"publish + first token": publish, "prefill + decode step": LATENCY | {"p50_ms": 20.0}}
    (tmp_path / "latency-m50.json").write_text(json.dumps({"m50": rows}))
    rates = {"PEFT float32": 300.0, "products bfloat16": 250.0, "step alone bfloat16": 200.0, "service bfloat16": 175.0}
    ragged = {"PEFT float32": 10.0, "products bfloat16": 100.0, "service bfloat16": 62.0}
    tenants = {"PEFT float32": 10.0, "service bfloat16": 39.0}
    rows = [*training("m50", "8 x 256, 1 client", rates), *training("m50", "1 x 32, 8 clients", tenants)]
    rows += training("m50", "ragged 16-512, 1 client", ragged)
    (tmp_path / "training-m50.json").write_text(json.dumps(rows))
    theirs = {"transformers bfloat16": 1.1, "plain loop bfloat16, 1 LoRA": 0.7}
    ours = sampling(16, "service bfloat16, 1 LoRA", 900, theirs)
    eight = sampling(16, "service bfloat16, 8 LoRA", 800, {"service bfloat16, 1 LoRA": 0.86})
    other_rows = [sampling(16, name, 300, {}) for name in theirs]
    failed = {"what": "vllm float32, 1 LoRA", "failed": "it ended with 1"}
    (tmp_path / "sampling-m50.json").write_text(json.dumps([ours, eight, *other_rows, failed]))
    page = targets.page(targets.Figures.of(tmp_path))
    verdict_by_target = {(measure, against): verdict for (measure, against, _), verdict in verdicts(page).items()}
    canned, products = "canned answers", "the packed products"
    one_after_the_other = "HF + PEFT float32, in sequence"
    expected = {
        (f"{forward}, tiny, p50", canned): "met",
        (f"{crowd}, tiny, p50", canned): "missed",
        ("forward_backward + optim_step, tiny, p50", canned): "not measured",
        ("training m50, 8 x 256, bfloat16", products): "met",
        ("training m50, 8 x 256, float32", products): "not measured",
        ("training m50, 8 x 256, bfloat16", "the step in process"): "missed",
        ("the same, share of the packed products", "that of 8 x 256"): "missed",
        ("8 tenants x 32 tokens, m50, bfloat16", one_after_the_other): "missed",
        ("8 tenants x 32 tokens, tiny, bfloat16", one_after_the_other): "not measured",
        ("engine memory, m50, 8 x 256, bfloat16", "HF + PEFT float32"): "met",
        ("sampling m50, bfloat16, 16 at once", "vLLM on a CPU"): "not measured",
        ("sampling m50, bfloat16, 16 at once", "HF generate, without LoRA"): "met",
        ("sampling m50, bfloat16, 16 at once", "a plain loop with LoRA"): "missed",
        ("8 adapters in a batch, m50, 16 at once", "1 adapter"): "met",
        ("publish + first token, m50, rank 32, p50", "a prefill and a decode step"): "met",
        ("the same, p95", "its p50"): "missed",
    }
    for key, verdict in expected.items():
        assert verdict_by_target[key] == verdict, key
    assert re.search(rf"^{list(verdict_by_target.values()).count('met')} met, ", page, re.MULTILINE)
    assert "sampling-m50: vllm float32, 1 LoRA: it ended with 1" in page
    assert "`forward --clients 8`" in page and "`forward`" not in page


def read_published_page() -> str:
    return (BENCHMARKS.parent / "docs" / "benchmarks" / "README.md").read_text()


def test_every_target_is_on_the_published_page(targets: ModuleType) -> None:
    table = read_published_page().partition(targets.BEGIN)[2].partition(targets.END)[0]
    targets_on_page = {(measure, against) for measure, against, _ in verdicts(table)}
    assert targets_on_page == {(target.measure, target.against) for target in targets.TARGETS}


def test_only_the_table_of_the_published_page_is_replaced(targets: ModuleType) -> None:
    text = read_published_page()
    replaced = targets.replace_table(text, targets.Figures())
    assert replaced.partition(targets.BEGIN)[0] == text.partition(targets.BEGIN)[0]
    assert replaced.partition(targets.END)[2] == text.partition(targets.END)[2]
    assert f"{len(targets.TARGETS)} not measured" in replaced
    with pytest.raises(ValueError, match="the page has no lines"):
        targets.replace_table("no table", targets.Figures())


def test_the_history_of_the_figures_is_tables_with_full_rows() -> None:
    history = json.loads((BENCHMARKS.parent / "docs" / "benchmarks" / "history.json").read_text())
    for table in history["tables"]:
        assert all(len(row) == len(table["columns"]) for row in table["rows"]), table["section"]


def test_profiles_are_asked_for_with_flags_that_there_are(targets: ModuleType) -> None:
    text = (BENCHMARKS / "profiling.py").read_text()
    profiling = importlib.import_module("profiling")
    for target in targets.TARGETS:
        assert target.profile, target.measure
        for flags in target.profile:
            assert flags.split()[0] in (*profiling.REQUESTS, *profiling.STEPS)
            for flag in re.findall(r"--[a-z-]+", flags):
                assert f'"{flag}"' in text


def test_runs_take_turns_and_the_first_do_not_count(interleaving: ModuleType) -> None:
    order: list[str] = []

    def run(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    def fails() -> float:
        order.append("fails")
        raise interleaving.ChildFailed("it ended with 1")

    failures: list[tuple[str, str]] = []
    runs = {"quick": lambda: run("quick", 1.0), "fails": fails, "long": lambda: run("long", 4.0)}
    seconds_by_run = interleaving.run_in_turns(runs, 2, lambda name, reason: failures.append((name, reason)))
    assert order == ["quick", "fails", "long", "quick", "quick", "long", "quick", "long"]
    assert failures == [("fails", "it ended with 1")]
    assert seconds_by_run == {"quick": [1.0, 1.0], "long": [4.0, 4.0]}


def test_ratios_are_of_runs_that_followed_each_other(interleaving: ModuleType) -> None:
    """Ratios are of interleaved runs, so a machine that slows down by half does not change them."""
    ours, theirs = [1.0, 2.0, 4.0], [3.0, 6.0, 12.0]
    assert interleaving.compute_speedup(ours, theirs) == {"median": 3.0, "least": 3.0, "most": 3.0, "runs": 3}


def test_a_child_answers_what_it_is_asked_until_it_ends(
    interleaving: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
import sys
sys.path.insert(0, sys.argv[1])
from interleaving import serve_requests
for question, answer in serve_requests():
    print("a library says something")
    if question["number"] == 3:
        sys.exit(7)
    answer({"double": 2 * question["number"]})
"""
    (tmp_path / "script.py").write_text(script)
    monkeypatch.setattr(interleaving, "__file__", str(tmp_path / "interleaving.py"))
    with interleaving.Child("script.py", str(BENCHMARKS)) as child:
        assert child.ask(number=1) == {"double": 2}
        assert child.ask(number=2) == {"double": 4}
        with pytest.raises(interleaving.ChildFailed, match="it ended with 7"):
            child.ask(number=3)
        with pytest.raises(interleaving.ChildFailed):
            child.ask(number=4)
    with pytest.raises(interleaving.ChildFailed, match="/no/such/python cannot be run"):
        interleaving.Child("script.py", python="/no/such/python")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_child_is_stopped_while_it_is_not_its_turn(
    interleaving: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
import sys
sys.path.insert(0, sys.argv[1])
from interleaving import serve_requests
for question, answer in serve_requests():
    answer({})
"""
    (tmp_path / "script.py").write_text(script)
    monkeypatch.setattr(interleaving, "__file__", str(tmp_path / "interleaving.py"))
    with interleaving.Child("script.py", str(BENCHMARKS)) as child:
        for _ in range(2):
            child.ask()
            deadline = time.monotonic() + 60
            while state_of(child.pid) != "T":
                assert time.monotonic() < deadline
                time.sleep(0.01)
