"""Checks of a model before it is served; test_families.py has whole models that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedConfig, Qwen3Config

from support import tiny_models
from tinsmith.backends.torch.attention import AttentionProbe, Window
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.servable import check_config, check_layers, raise_settings_errors
from tinsmith.base_models import read_shape
from tinsmith.errors import SettingsError
from tinsmith.plan import memory
from tinsmith.plan.architecture import read_directory, read_stored_dtype
from tinsmith.types import ModelShape

SHAPE = ModelShape("tiny/x", "/nowhere", 300, 256, "XForCausalLM")
WINDOWS = MistralConfig(**tiny_models._COMMON, sliding_window=6)
MIXED = Qwen3Config(
    **tiny_models._COMMON,
    use_sliding_window=True,
    sliding_window=6,
    layer_types=["sliding_attention", "full_attention"],
)


@pytest.mark.parametrize(
    ("config", "windows", "message"),
    [
        (WINDOWS, {0: [Window(6)], 1: [Window(6)]}, None),
        (MIXED, {0: [Window(6)], 1: [None]}, None),
        (WINDOWS, {0: [Window(6)], 1: [None]}, "layer 1 attends to a window of None, and its configuration says 6"),
        (MIXED, {0: [Window(6)], 1: [Window(6)]}, "layer 1 attends to a window of 6, and its configuration says None"),
        (MIXED, {0: [Window(7)], 1: [None]}, "layer 0 attends to a window of 7, and its configuration says 6"),
        (WINDOWS, {0: [Window(6)]}, "layer 1 does not attend through our attention"),
        (WINDOWS, {0: [Window(6), Window(6)], 1: [Window(6)]}, "layer 0 attends 2 times"),
    ],
)
def test_each_layer_attends_once_to_the_window_of_its_configuration(
    config: PreTrainedConfig, windows: dict[int, list[Window | None]], message: str | None
) -> None:
    if message is None:
        check_layers("X", config, windows)
        return
    with pytest.raises(SettingsError, match=message):
        check_layers("X", config, windows)


def test_the_probe_records_attention_options() -> None:
    probe = AttentionProbe()
    rows = torch.zeros(3, 4, 8)
    out = probe.attend(2, rows, rows, torch.zeros(3, 4, 5), scale=1.0, window=Window(6))
    probe.attend(2, rows, rows, rows, scale=1.0)
    assert out.shape == (3, 4, 5) and probe.windows == {2: [Window(6), None]}


def test_errors_of_a_model_refuse_it_and_want_of_memory_does_not() -> None:
    with (
        pytest.raises(SettingsError, match=r"tiny/x \(XForCausalLM\) cannot be served: KeyError: 'tinsmith'"),
        raise_settings_errors(SHAPE),
    ):
        raise KeyError("tinsmith")
    with pytest.raises(SettingsError, match=r"^as it is$"), raise_settings_errors(SHAPE):
        raise SettingsError("as it is")
    with pytest.raises(MemoryError), raise_settings_errors(SHAPE):
        raise MemoryError


LONG = {"rope_type": "longrope", "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("kind", "unchanged"), [(LONG, 64), ({"rope_type": "dynamic", "factor": 2.0}, 256), ({"rope_type": "yarn"}, None)]
)
def test_rope_that_depends_on_the_length_is_served_where_it_does_not(
    kind: dict[str, object], unchanged: int | None
) -> None:
    config = Qwen3Config(**tiny_models._COMMON)
    config.rope_parameters = {**kind, "rope_theta": 10000.0}
    check_config(config, unchanged or 10_000)
    if unchanged is not None:
        with pytest.raises(SettingsError, match=f"changes for sequences of more than {unchanged} tokens"):
            check_config(config, unchanged + 1)


@pytest.mark.parametrize("text", [{"rope_parameters": LONG}, {"rope_scaling": LONG | {"rope_type": "longrope"}}])
def test_the_context_of_longrope_is_its_original_length(text: dict[str, object], tmp_path: Path) -> None:
    sizes = {"vocab_size": 300, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(sizes | text))
    assert read_shape("x", tmp_path).max_context_length == 64
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert read_shape("x", tmp_path).max_context_length == 256


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"model_type": "gpt_bigcode", "n_positions": 128}, 128),
        ({"model_type": "deepseek_v32", "max_position_embeddings": 163_840, "index_topk": 1024}, 1024),
        ({"model_type": "glm_moe_dsa", "max_position_embeddings": 163_840}, 2048),
        ({"model_type": "deepseek_v32", "max_position_embeddings": 512}, 512),
    ],
)
def test_the_longest_sequence_of_other_families(config: dict[str, object], context: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300, **config}))
    assert read_shape("x", tmp_path).max_context_length == context


@pytest.mark.parametrize(
    ("dtype", "stored", "bfloat16_cpu", "expected"),
    [
        ("auto", torch.bfloat16, True, torch.bfloat16),
        ("auto", torch.bfloat16, False, torch.float32),
        ("auto", torch.float32, True, torch.float32),
        ("float32", torch.bfloat16, True, torch.float32),
        ("bfloat16", torch.float32, False, torch.bfloat16),
    ],
)
def test_a_cpu_keeps_the_dtype_of_the_checkpoint_if_it_can_multiply_it(
    dtype: str,
    stored: torch.dtype,
    bfloat16_cpu: bool,
    expected: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "cpu_multiplies_bfloat16", lambda: bfloat16_cpu)
    shape = tiny_models.make(tmp_path, seed=1)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=stored).save_pretrained(tmp_path)
    base = BaseModel.load(shape, device="cpu", dtype=dtype)
    assert base.dtype == expected
    planned = memory.choose_dtype(dtype, cuda=False, stored=read_directory(tmp_path).stored_dtype)
    assert getattr(torch, planned) == expected, "the plan counts with the dtype that the backend loads"


def test_the_dtype_of_a_checkpoint_is_found_in_all_forms_of_a_configuration() -> None:
    assert read_stored_dtype({"torch_dtype": "bfloat16"}) == "bfloat16"
    assert read_stored_dtype({"text_config": {"dtype": "float16"}}) == "float16"
    assert read_stored_dtype({"dtype": "float32", "text_config": {"dtype": "bfloat16"}}) == "float32"
    assert read_stored_dtype({"model_type": "qwen3"}) == ""
