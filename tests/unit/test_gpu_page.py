"""The arithmetic of benchmarks/gpu.py: operations, time, the table, published figures and the verdict."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from tinsmith.backends.torch import TorchBackend
from tinsmith.base_models import read_shape
from tinsmith.types import LoraSpec

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "vocab_size": 512,
}


@pytest.fixture(scope="module")
def benchmarks_on_path() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))
    for path in BENCHMARKS.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture(scope="module")
def gpu_page(benchmarks_on_path: None) -> ModuleType:
    return importlib.import_module("gpu_page")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_operations_of_a_step_are_those_that_torch_counts(gpu_page: ModuleType) -> None:
    length, rank = 48, 8
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **TINY), attn_implementation="eager")
    linears = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    model = get_peft_model(model, LoraConfig(r=rank, target_modules=sorted(linears)))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None]).logits.sum().backward()
    sizes = gpu_page.Sizes.of(TINY)
    # Eager attention computes all keys; a causal one needs half of them.
    attention = 6 * TINY["num_hidden_layers"] * sizes.queries * length
    expected = length * (sizes.step_operations(length, rank) + attention)
    # The first layer's projections need no gradient of their inputs.
    first = 2 * length * sum(inputs * outputs for inputs, outputs in list(sizes.linears())[:3])
    assert counter.get_total_flops() == pytest.approx(expected - first, rel=0.02)


def test_an_8b_needs_what_its_numbers_say(gpu_page: ModuleType) -> None:
    models = importlib.import_module("models")
    sizes = gpu_page.Sizes.of(models.qwen3("qwen3-8b").to_dict())
    frozen = sum(inputs * outputs for inputs, outputs in sizes.linears())
    assert frozen == pytest.approx(7.57e9, rel=0.01)  # 8.2 billion without the embedding
    assert sizes.step_operations(4096, 16) / (4 * frozen) == pytest.approx(1.13, abs=0.02)
    for name, billions in (("qwen3-0.6b", 0.6), ("qwen3-1.7b", 1.72), ("qwen3-4b", 4.02)):  # their embeddings are tied
        model_sizes = gpu_page.Sizes.of(models.qwen3(name).to_dict())
        assert sum(inputs * outputs for inputs, outputs in model_sizes.linears()) == pytest.approx(
            billions * 1e9, rel=0.01
        )


def test_peaks_are_of_the_cards_that_bear_the_name(gpu_page: ModuleType) -> None:
    peaks = {
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H200": 989,
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA L4": 121,
        "NVIDIA L40S": 362,
        "NVIDIA GeForce RTX 4090": 165,
        "NVIDIA H100 PCIe": None,
        "NVIDIA GeForce RTX 3090": None,
        "Tesla T4": None,
    }
    assert {name: gpu_page.peak_tflops(name) for name in peaks} == peaks


def test_each_model_has_its_share_of_the_time_and_what_is_not_run_is_named(gpu_page: ModuleType) -> None:
    now = 0.0
    budget = gpu_page.Budget(100.0, clock=lambda: now)
    budget.give(1.0, 3.0)
    assert budget.left_s == 25
    assert budget.allows("quick", 20) and not budget.allows("slow", 26)
    assert budget.runs(5, 4.0) == 5 and budget.runs(5, 10.0) == 2 and budget.runs(5, 99.0) == 1
    now = 10.0
    budget.give(1.0, 2.0)  # the 15 seconds that were left are everybody's
    assert budget.left_s == 30
    now = 50.0
    assert not budget.allows("late", 0.0)
    budget.give(2.0, 0.0)
    assert budget.left_s == 50 and budget.skipped == ["slow", "late"]


def contestant(rate: float, **figures: float) -> dict[str, float]:
    return {"tokens_per_s": rate, "least": rate - 1, "most": rate + 1, "peak_mib": 2048.0, **figures}


def test_the_page_has_figures_failures_anchors_and_what_was_not_run(gpu_page: ModuleType) -> None:
    train, base, adapted = gpu_page.training(2, 4096, 16, 1), gpu_page.sampling(64, 0), gpu_page.sampling(64, 1)
    figures = {
        train: {"Tinsmith": contestant(24946, mfu=0.41), "PEFT": {"failed": "OutOfMemoryError: 2 GiB"}},
        base: {"Tinsmith": contestant(1000), "generate": contestant(500)},
        adapted: {"Tinsmith": contestant(750)},
        gpu_page.AGREEMENT: 0.0123,
    }
    page = gpu_page.page("NVIDIA H100.", {"qwen3-8b": figures}, ["qwen3-4b, training"])
    assert train == "training, 2 x 4,096, rank 16, 1 adapter"
    assert f"| {train} | 24,946 | 24,945-24,947 | 41% | 2,048 | PEFT: OutOfMemoryError: 2 GiB |" in page
    assert f"| {base} | 1,000 | 999-1,001 |  | 2,048 | generate 500 (2.00) |" in page
    assert f"- {gpu_page.AGREEMENT}: 0.0123" in page
    assert f"H100 | 12,473 | qwen3-8b, {train} | 2.00 |" in page
    assert "qwen3-8b, 64 at once | 75% |" in page
    assert "prime-rl" not in page, "there is no row beside it"
    assert "1 rows did not run: the time was up." in page.splitlines()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    widths = {line.count("|") for line in rows}
    assert widths == {5, 7}, "every row is as wide as its head"


def test_the_verdict_is_one_line_that_fails_on_wrong_numbers_and_failed_rows(gpu_page: ModuleType) -> None:
    row = {"Tinsmith": contestant(300), "PEFT": contestant(200), "generate": {"failed": "no"}}
    good = {"a": row, "b": {"Tinsmith": contestant(300), "PEFT": contestant(100)}, gpu_page.AGREEMENT: 0.01}
    report = {"ceilings": {"copy": 1.0}, "m": good}
    assert gpu_page.verdict(report) == (True, "passed: m: logprobs 0.0100 apart, at least 1.50 x PEFT")
    assert gpu_page.verdict(report, ["x", "y"])[1].endswith("; 2 rows not run")
    for bad, reason in (
        ({**good, gpu_page.AGREEMENT: 0.06}, "logprobs 0.0600 apart"),
        ({**good, gpu_page.AGREEMENT: float("nan")}, "logprobs nan apart"),
        ({"a": row}, "logprobs not compared"),
        ({**good, "c": {"Tinsmith": {"failed": "MemoryError: none"}, "PEFT": contestant(1)}}, "FAILED c: MemoryError"),
    ):
        is_good, line = gpu_page.verdict({"m": bad})
        assert not is_good and line.startswith("FAILED: m: ") and reason in line and "\n" not in line
    assert gpu_page.verdict({"ceilings": {}}) == (False, "FAILED: no model was measured")


def test_weights_that_a_device_draws_are_a_model_that_can_be_served(
    benchmarks_on_path: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = importlib.import_module("models")
    monkeypatch.setattr(models, "PART_BYTES", 100_000)
    config = AutoConfig.for_model("qwen3", **TINY, tie_word_embeddings=True, eos_token_id=0)
    models.write_random(config, models.write_random(config, tmp_path))
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    backend = TorchBackend(read_shape("bench/tiny", tmp_path), device="cpu", dtype="bfloat16")
    assert backend.base.dtype == torch.bfloat16 and backend.base.has_fused_layers
    backend.create_model("m", LoraSpec(4))
