"""The benchmarks still run: each script once, with minimal sizes, on a server with the fake backend. Tests check that
figures exist, not their values. The scripts run in this process, so that the SDK and torch are loaded once.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.live import LiveServer, serving

pytestmark = pytest.mark.extended

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODEL = "bench/tiny"
Run = Callable[..., str]


@pytest.fixture(scope="module", autouse=True)
def benchmarks_can_be_imported() -> Iterator[None]:
    """Make the benchmarks importable for this file's tests only."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))
    for path in BENCHMARKS.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The fake backend with the shape of the benchmarks' model."""
    directory = tmp_path_factory.mktemp("bench")
    model = importlib.import_module("models").make("tiny", directory / "tiny")
    with serving(directory / "data", "--backend", "fake", "--model", f"{MODEL}={model}") as live:
        yield live


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a script's `main` with flags; return its output."""

    def call(name: str, *flags: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
        importlib.import_module(name).main()
        return capsys.readouterr().out

    return call


def at(server: LiveServer) -> tuple[str, ...]:
    return ("--url", server.url, "--model", MODEL)


@pytest.fixture
def few_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    latency = importlib.import_module("latency")
    monkeypatch.setattr(latency, "AT_ONCE", 2)
    monkeypatch.setattr(latency, "FLOOD_CLIENTS", 2)


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one thread, since several take minutes on a busy machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")


@pytest.mark.usefixtures("few_clients")
def test_latency(server: LiveServer, run: Run, tmp_path: Path) -> None:
    printed = run("latency", *at(server), "--runs", "1", "--json", str(tmp_path / "found.json"))
    rows = json.loads((tmp_path / "found.json").read_text())[MODEL]
    assert len(rows) == 9
    for name, row in rows.items():
        assert name in printed
        assert 0 <= row["min_ms"] <= row["p50_ms"] <= row["max_ms"]
        assert row["max_ms"] > 0 or name == "what a new shape takes more"
    assert rows["forward, one datum"]["client_cpu_ms"] > 0


@pytest.mark.usefixtures("few_clients")
def test_latency_of_a_server_of_its_own(run: Run, tmp_path: Path) -> None:
    flags = ("--sizes", "fake", "--rows", "forward", "--runs", "1", "--starts", "2")
    printed = run("latency", *flags, "--json", str(tmp_path / "found"))
    rows = json.loads((tmp_path / "found").read_text())["fake"]
    assert rows["futures, 2 clients"]["futures_per_s"] > 0
    assert rows["cold start to the first forward"]["runs"] == 2
    assert rows["cold start to the first forward"]["min_ms"] > 0
    assert rows["peak memory"].keys() == {"server_mib", "engine_mib"}
    assert min(rows["peak memory"].values()) > 10
    assert "a second" in printed


@pytest.mark.usefixtures("few_clients")
def test_latency_of_the_client_alone(run: Run, tmp_path: Path) -> None:
    flags = ("--sizes", "canned", "--runs", "1", "--json", str(tmp_path / "found"))
    printed = run("latency", *flags)
    rows = json.loads((tmp_path / "found").read_text())["canned"]
    assert len(rows) == 3
    for name, row in rows.items():
        assert name in printed
        assert row["min_ms"] > 0 and row["client_cpu_ms"] > 0


def test_steps(server: LiveServer, run: Run, tmp_path: Path) -> None:
    printed = run("steps", *at(server), "--clients", "1", "2", "--runs", "1", "--json", str(tmp_path / "found.json"))
    rows = json.loads((tmp_path / "found.json").read_text())
    assert rows.keys() == {f"{MODEL}, 1 client", f"{MODEL}, 2 clients"}
    assert rows[f"{MODEL}, 2 clients"]["steps"] == 2
    for name, row in rows.items():
        assert name in printed
        assert row["sampled_tokens_per_s"] > 0
        assert row["publish_ms"] + row["sample_ms"] + row["forward_backward_ms"] <= row["most_step_ms"]


def test_steps_in_turns_with_another_server(server: LiveServer, run: Run, tmp_path: Path) -> None:
    flags = (
        "--sizes",
        "tiny",
        "--prompts",
        "2",
        "--group",
        "3",
        "--runs",
        "1",
        "--beside",
        f"fake={server.url}={MODEL}",
    )
    run("steps", *flags, "--json", str(tmp_path / "found"))
    rows = json.loads((tmp_path / "found").read_text())
    assert rows.keys() == {"tiny, tinsmith", "tiny, tinsmith, overlapped", "tiny, fake"}
    ours, overlapped, fake = rows.values()
    assert ours["times_ours"]["median"] == 1.0 and "sample_ms" not in overlapped
    for row in (ours, fake):
        shares = [row[f"{phase}_share"] for phase in ("publish", "sample", "forward_backward", "optim_step")]
        assert min(shares) > 0 and sum(shares) == pytest.approx(1.0)
    assert fake["times_ours"]["median"] == pytest.approx(fake["step_ms"]["median"] / ours["step_ms"]["median"])

    printed = run("steps", *flags, "--client-python", str(tmp_path / "python"))
    assert "fake: " in printed and "cannot be run" in printed and "tiny, tinsmith, overlapped" in printed


def test_ceilings(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings = importlib.import_module("ceilings")
    for name, small in (("SIZE", 64), ("NUM_WEIGHTS", 2), ("ARRAY_BYTES", 1 << 16)):
        monkeypatch.setattr(ceilings, name, small)
    run("ceilings", "--runs", "1", "--json", str(tmp_path / "found.json"))
    rows = json.loads((tmp_path / "found.json").read_text())
    assert {"float32, plain, 64 rows, GFLOP/s", "bfloat16, plain, 1 row, GB/s", "triad, GB/s"} <= rows.keys()
    assert min(rows.values()) > 0


def test_training(server: LiveServer, run: Run) -> None:
    assert MODEL in run("training", *at(server), "--works", "0", "--runs", "1")


def test_sampling(server: LiveServer, run: Run) -> None:
    assert MODEL in run("sampling", *at(server), "--at-once", "2", "--adapters", "1", "--runs", "1")


def test_every_script_can_be_started() -> None:
    """All imports of each script work, also those of other scripts."""
    for path in BENCHMARKS.glob("*.py"):
        importlib.import_module(path.stem)


def test_the_suite_says_what_failed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = importlib.import_module("suite")
    (tmp_path / "good.py").write_text("import sys; print('found 42'); open(sys.argv[-1], 'w').write('{}')")
    (tmp_path / "bad.py").write_text("import sys; print('halfway'); sys.exit(3)")
    (tmp_path / "slow.py").write_text("import time; print('begun', flush=True); time.sleep(600)")
    parts = (
        suite.Part("bad", "Bad", "--all", ""),
        suite.Part("slow", "Slow", "", "", limit_s=2),
        suite.Part("absent", "Absent", "", ""),
        suite.Part("good", "Good", "--runs 5", "--runs 1"),
        suite.Part("long", "Long", "", None),
    )
    monkeypatch.setattr(suite, "HERE", tmp_path)
    monkeypatch.setattr(suite, "PARTS", parts)
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as exit_info:
        run("suite", "--quick", "--out", str(out))
    assert exit_info.value.code == 1
    page = (out / "index.md").read_text()
    assert "found 42" in page and "halfway" in page and "begun" in page
    assert "python benchmarks/good.py --runs 1`" in page
    assert re.findall(r"Not whole: (.*)\.", page) == [
        "it ended with status 3",
        "it took more than 2 s",
        "there is no such script in this version",
    ]
    assert "Long" not in page
    assert (out / "good.json").read_text() == "{}"
    with pytest.raises(SystemExit) as exit_info:
        run("suite", "--quick", "--only", "good", "--out", str(out))
    assert exit_info.value.code == 0
    parts = json.loads((out / "suite.json").read_text())["parts"]
    assert {name: bool(part["failure"]) for name, part in parts.items()} == {
        "bad": True,
        "slow": True,
        "absent": True,
        "good": False,
    }
    assert "- bad: `python benchmarks/bad.py` (not whole: it ended with status 3)" in (out / "targets.md").read_text()


def test_the_suite_asks_for_flags_that_the_scripts_have() -> None:
    for part in importlib.import_module("suite").PARTS:
        text = (BENCHMARKS / part.script).read_text()
        for flag in re.findall(r"--[a-z-]+", f"{part.full} {part.quick or ''} --json"):
            assert f'"{flag}"' in text, f"{part.script} has no {flag}"


@pytest.mark.usefixtures("one_thread")
def test_training_beside_peft(run: Run, tmp_path: Path) -> None:
    """Runs a server, a child that computes the step alone and one with PEFT in turns."""
    flags = ("--sizes", "tiny", "--dtypes", "float32", "--works", "2", "--runs", "1")
    printed = run("training", *flags, "--json", str(tmp_path / "training.json"))
    rows = {row["what"]: row for row in json.loads((tmp_path / "training.json").read_text())}
    service, step, peft, products = (
        rows.pop(f"{name} float32") for name in ("service", "step alone", "PEFT", "products")
    )
    assert not rows
    assert "of the step alone" in printed
    (ours,), (step_alone,), (theirs,) = service["seconds"], step["seconds"], peft["seconds"]
    assert service["of_peft"]["PEFT float32"]["median"] == pytest.approx(theirs / ours)
    assert service["of_step_alone"]["median"] == pytest.approx(step_alone / ours)
    assert step["of_products"]["median"] == pytest.approx(products["seconds"][0] / step_alone)
    assert service["memory_of_peft"]["PEFT float32"] == pytest.approx(service["peak_mib"] / peft["peak_mib"])


@pytest.mark.usefixtures("one_thread")
def test_sampling_beside_transformers(run: Run, tmp_path: Path) -> None:
    flags = ("--sizes", "tiny", "--dtypes", "float32", "--at-once", "2", "--adapters", "1", "--runs", "1")
    run("sampling", *flags, "--llama", "/no/such/python", "--json", str(tmp_path / "sampling.json"))
    rows = {row["what"]: row for row in json.loads((tmp_path / "sampling.json").read_text())}
    ours, theirs = rows["service float32, 1 LoRA"], rows["transformers float32"]
    assert ours["of"]["transformers float32"]["median"] == pytest.approx(theirs["seconds"][0] / ours["seconds"][0])
    assert rows["alone float32, 1 LoRA"]["tokens_per_s"]["median"] > 0
    assert rows["publish and first token after it, float32"]["ms"]["least"] > 0
    assert rows["plain loop float32, 1 LoRA"]["tokens_per_s"]["median"] > 0
    assert "failed" in rows["llama.cpp bfloat16, 0 LoRA"]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("load", ["prompts", "groups"])
def test_sampling_of_other_loads(run: Run, tmp_path: Path, load: str) -> None:
    """All engines answer the same number of tokens, in the same turns."""
    flags = ("--sizes", "tiny", "--dtypes", "bfloat16", "--load", load, "--at-once", "2", "--adapters", "1")
    run("sampling", *flags, "--runs", "1", "--json", str(tmp_path / "sampling.json"))
    rows = {row["what"]: row for row in json.loads((tmp_path / "sampling.json").read_text()) if "at_once" in row}
    tokens = 2 * 64 * (8 if load == "groups" else 1)
    assert len(rows) == 4
    for row in rows.values():
        assert row["load"] == load
        assert row["tokens_per_s"]["median"] == pytest.approx(tokens / row["seconds"][0])


def test_where_the_time_of_a_request_goes(run: Run) -> None:
    printed = run("profiling", "forward", "--fake", "--runs", "3", "--warm-ups", "1")
    assert re.search(r"client [\d.]+, server [\d.]+, engine [\d.]+; together", printed)
    laid_out = re.findall(r"^ *([\d.]+) +([\d.]+) +(server|engine): (\S+)$", printed, re.MULTILINE)
    assert {("engine", "wait"), ("engine", "run"), ("engine", "settle"), ("server", "retrieve_future")} <= {
        (process, name) for _, _, process, name in laid_out
    }
    assert [float(begins) for begins, *_ in laid_out] == sorted(float(begins) for begins, *_ in laid_out)


@pytest.mark.parametrize(
    "flags",
    [
        ("packed", "--work", "2"),
        ("decode", "--at-once", "3", "--adapters", "2"),
        ("prompts", "--at-once", "9"),
    ],
)
def test_where_the_time_of_a_step_goes(run: Run, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]) -> None:
    monkeypatch.setattr(importlib.import_module("profiling"), "PROFILED", 2)
    printed = run("profiling", *flags, "--size", "tiny", "--inside")
    assert re.search(r"(?m)^2 steps: [\d.]+ ms each", printed)
    shares = [float(share) for share in re.findall(r"^ *([\d.]+)% .* [\w:]+$", printed, re.MULTILINE)]
    assert shares == sorted(shares, reverse=True) and 50 < sum(shares) <= 100.5
    assert re.search(r"(samplers|torch)/\w+\.py", printed)
