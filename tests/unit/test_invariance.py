"""Differences by batch composition stay within the bounds of docs/numerics.md; deterministic results do not differ."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from support import tiny_models
from tinsmith.backends.torch import TorchBackend
from tinsmith.base_models import nano, read_shape
from tinsmith.types import ModelShape

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DOCUMENT = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()

torch.set_num_threads(1)

BOUNDS = {
    "float32": {"logprobs": "5e-5", "gradient": "1e-4", "weights": "1e-3", "sampled": "5e-5", "against": "1e-4"},
    "bfloat16": {"logprobs": "0.3", "gradient": "0.05", "weights": "0.05", "sampled": "0.3", "against": "0.3"},
}
"""Labels of the document."""

TITLES = {
    "logprobs": "logprobs in training",
    "gradient": "gradient of the first step, relative",
    "weights": "weights after ten steps, relative",
    "sampled": "logprobs of samples",
    "against": "logprobs of samples against training, worst",
}


@pytest.fixture(scope="module")
def invariance() -> Iterator[ModuleType]:
    """The benchmark with small sizes."""
    sys.path.insert(0, str(BENCHMARKS))
    module = importlib.import_module("invariance")
    module.LENGTHS, module.TENANTS, module.STEPS = (12, 40, 3, 24), 3, 5
    module.PROMPTS, module.PROMPT, module.NEW, module.OTHERS = 2, 24, 8, 6
    yield module
    sys.path.remove(str(BENCHMARKS))
    for path in BENCHMARKS.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("invariance"))


def rows_of(module: ModuleType, shape: ModelShape, dtype: str, deterministic: str) -> tuple[list[dict], list[dict]]:
    backend = TorchBackend(shape, device="cpu", dtype=dtype, deterministic=deterministic)
    return module.measure_training(backend, {}), module.measure_sampling(backend, {})


@pytest.mark.extended
@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_numbers_move_no_further_than_the_document_says(invariance: ModuleType, dtype: str) -> None:
    training, sampling = rows_of(invariance, read_shape(nano.MODEL_NAME, nano.path()), dtype, "off")
    bounds = {name: float(bound) for name, bound in BOUNDS[dtype].items()}
    assert {row["way"] for row in training} == {"split", "reordered", "split, beside other tenants"}
    for row in training:
        for name in ("logprobs", "gradient", "weights"):
            assert row[name] < bounds[name], row
    for row in sampling:
        assert row["logprobs"] < bounds["against" if row["way"] == "against training" else "sampled"], row
    # Without differences, the cases would not differ.
    assert max(row["gradient"] for row in training) > 0


def test_the_document_has_the_bounds() -> None:
    for name, title in TITLES.items():
        (line,) = [line for line in DOCUMENT.splitlines() if line.startswith(f"| {title} |")]
        cells = [cell.strip() for cell in line.split("|")]
        assert [cells[3], cells[5]] == [BOUNDS[dtype][name] for dtype in ("float32", "bfloat16")]


@pytest.mark.extended
@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_deterministic_numbers_do_not_move(invariance: ModuleType, small: ModelShape, dtype: str) -> None:
    training, sampling = rows_of(invariance, small, dtype, "on")
    for row in training:
        if row["way"] == "reordered":  # the order of a request's own data may matter
            assert row["logprobs"] == 0 and row["gradient"] < 1e-2
        else:
            assert row["logprobs"] == row["gradient"] == row["weights"] == 0, row
    assert all(row["logprobs"] == row["flipped"] == 0 for row in sampling if row["way"] != "against training")


def test_the_script_prints_tables_and_writes_them(
    invariance: ModuleType,
    small: ModelShape,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(invariance, "STEPS", 1)
    monkeypatch.setattr(invariance, "read_model_shape", lambda *_: small)
    monkeypatch.setattr(invariance, "PRICES", {"sample 1": invariance.PRICES["sample 1"]})
    path = tmp_path / "figures.json"
    flags = ["--models", "nano", "--dtypes", "float32", "--runs", "1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["invariance.py", *flags])
    invariance.main()
    printed = capsys.readouterr().out
    assert printed.count("| nano | float32 |") == 15
    for title in TITLES.values():
        assert f"\n| {title} | " in printed
    figures = json.loads(path.read_text())
    assert {name: len(rows) for name, rows in figures.items()} == {"training": 6, "sampling": 8, "prices": 1}
