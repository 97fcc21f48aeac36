"""benchmarks/gpu.py and gpu_service.py without a GPU: they measure, and write no page (`make test-benchmarks`)."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from unit.test_gpu_page import TINY

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]


def benchmark(*flags: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    # Several threads take minutes on a busy machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, str(script), *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_it_measures_without_a_gpu(tmp_path: Path) -> None:
    completed = benchmark(
        "--device", "cpu", "--sizes", "tiny", "--quick", "--runs", "1", "--json", str(tmp_path / "found.json")
    )
    assert completed.returncode == 0, completed.stderr
    figures = json.loads((tmp_path / "found.json").read_text())["tiny"]
    for row in ("training, 2 x 64, rank 16, 1 adapter", "training, 8 x 32, rank 32, 8 adapters"):
        assert all(0 < figures[row][name]["mfu"] < 1.5 for name in ("Tinsmith", "PEFT")), figures[row]
    assert figures["RL step, 2 x 4 samples"]["Tinsmith"]["tokens_per_s"] > 0
    assert figures["sampling, 2 at once, 0 adapters"].keys() == {"Tinsmith", "generate"}
    assert figures["sampling, 2 at once, 8 adapters"].keys() == {"Tinsmith"}
    assert figures["publish and first token, ms"] > 0
    assert figures["sampled logprobs from trained ones, mean"] < 0.05
    assert "| training, 8 x 32, rank 32, 8 adapters | PEFT |" in completed.stdout
    assert re.fullmatch(
        r"passed: tiny: logprobs 0\.0\d+ apart, at least \d+\.\d\d x PEFT, at least \d+\.\d\d x generate",
        completed.stdout.splitlines()[-1],
    )


def test_a_run_without_time_names_what_it_did_not_do() -> None:
    completed = benchmark("--device", "cpu", "--sizes", "tiny", "--quick", "--runs", "1", "--seconds", "0")
    assert completed.returncode == 1
    assert "- all of tiny" in completed.stdout.splitlines()
    assert completed.stdout.splitlines()[-1] == "FAILED: no model was measured; 1 rows not run"


def test_memory_that_runs_out_costs_peft_recomputation_and_then_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """And never the benchmark: a contestant that cannot run leaves, with the reason in its row."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    gpu = importlib.import_module("gpu")
    shape = (gpu.build_workload(4, 24, 4, 1), 24)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **TINY | {"vocab_size": 8192}))
    peft = gpu.Peft(model, gpu.Device("cpu"))
    peft._tokens = 4 * shape[1]
    tried: list[tuple[bool, int]] = []
    original_run = peft._run

    def run(batches: object, rows: int, optimizer: object) -> None:
        recomputes = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
        tried.append((recomputes, rows))
        if not recomputes or rows > limit:
            raise torch.OutOfMemoryError("16 GiB")
        original_run(batches, rows, optimizer)

    monkeypatch.setattr(peft, "_run", run)
    limit = 2
    peft.step(shape[0])()
    assert tried == [(False, 4), (True, 4), (True, 2)]
    limit = 0
    contestant = gpu.Contestant("PEFT", peft.step(shape[0]), 96)
    gpu.Device("cpu").run_in_turns([contestant], 3, gpu.Budget(60.0))
    assert contestant.figures(1e12) == {"failed": "OutOfMemoryError: 16 GiB"}
    base = peft.base()
    assert not any("lora" in name for name, _ in base.named_parameters())


def test_the_service_is_measured_without_a_gpu(tmp_path: Path) -> None:
    file, names = tmp_path / "figures.json", ("qwen3-30b-a3b-12l", "qwen3-30b-a3b-12l, fp8")
    script = SCRIPT.with_stem("gpu_service")
    completed = benchmark(names[0], "--small", "--quantize", "off", "fp8", "--json", str(file), script=script)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    figures = json.loads(file.read_text())
    assert figures.keys() == set(names)
    for name in names:
        assert len(figures[name]) == 1 + 2 + 8 + 1 + 1 + 1 + 1
        assert all(value > 0 for row in figures[name].values() for value in row.values()), figures[name]
        assert figures[name]["training, 8 x 16, 8 adapters"].keys() == {"tokens_per_s", "one_by_one", "first_s"}
    late = benchmark(names[0], "--small", "--seconds", "0", script=script)
    assert late.returncode == 0 and late.stdout.splitlines()[-1].endswith("not run: all of qwen3-30b-a3b-12l")
    refused = benchmark("gpt-2", "--small", script=script)
    assert refused.returncode == 2 and "unknown models: gpt-2; choose of" in refused.stderr


def test_a_page_is_of_a_gpu_only(tmp_path: Path) -> None:
    completed = benchmark("--device", "cpu", "--write", str(tmp_path / "gpu.md"))
    assert completed.returncode == 1 and "figures of a GPU" in completed.stderr
    assert not (tmp_path / "gpu.md").exists()
