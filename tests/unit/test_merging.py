"""Merging and rewriting adapters: equal logits in transformers and PEFT, or a refusal that names what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from support import peft_adapters, tiny_models
from tinsmith.errors import UserError
from tinsmith.exchange import merging
from tinsmith.types import LORA_ALPHA, LoraSpec, ModelShape
from tinsmith.wire.adapter_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    check_fits,
    group_of,
    optimizer_type,
    read_adapter,
)

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS = {
    "two linears": {},
    "every linear": {"target_modules": ALL, "lora_alpha": 3},
    "unembedding": {"target_modules": ["q_proj", "lm_head"], "r": 3},
    "rslora": {"use_rslora": True, "r": 9, "lora_alpha": 16},
    "patterns": {
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7},
        "alpha_pattern": {"v_proj": 5, r"layers\.0\..*down_proj": 64},
    },
    "some layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
}


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with tied and untied embeddings."""
    directory = tmp_path_factory.mktemp(request.param)
    tiny_models.make(directory, request.param)
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    tiny_models.make(directory, "llama")
    return directory


@pytest.fixture(scope="module")
def adapter_template(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peft_adapters.make(llama, tmp_path_factory.mktemp("made") / "adapter")


@pytest.fixture
def adapter(adapter_template: Path, tmp_path: Path) -> Path:
    """A fresh copy of an adapter."""
    return Path(shutil.copytree(adapter_template, tmp_path / "adapter"))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_merged_model_computes_what_peft_does(base: Path, tmp_path: Path, name: str) -> None:
    adapter = peft_adapters.make(base, tmp_path / "adapter", **SETTINGS[name])
    merged = merging.merge(base, adapter, tmp_path / "merged")
    theirs = peft_adapters.logits(base, adapter)
    close(peft_adapters.logits(merged.path), theirs)
    assert not torch.allclose(peft_adapters.logits(base), theirs, atol=1e-2)
    assert AutoTokenizer.from_pretrained(merged.path).encode("abc") == AutoTokenizer.from_pretrained(base).encode("abc")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_rewritten_adapter_computes_the_same_at_our_alpha(base: Path, tmp_path: Path, name: str) -> None:
    adapter = peft_adapters.make(base, tmp_path / "adapter", **SETTINGS[name])
    description = merging.rewrite(adapter, tmp_path / "rewritten", lambda: base)
    config = json.loads((tmp_path / "rewritten" / "adapter_config.json").read_text())
    assert (config["lora_alpha"], config["use_rslora"]) == (LORA_ALPHA, False)
    assert {linear.rank for linear in description.linears.values()} == {description.rank} == {config["r"]}
    close(peft_adapters.logits(base, tmp_path / "rewritten"), peft_adapters.logits(base, adapter))


def test_ranks_that_were_missing_have_no_effect_and_can_learn(base: Path, tmp_path: Path) -> None:
    adapter = peft_adapters.make(base, tmp_path / "adapter", rank_pattern={"q_proj": 2})
    merging.rewrite(adapter, tmp_path / "rewritten", lambda: base)
    tensors = load_file(tmp_path / "rewritten" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    assert tensors[f"{name}.lora_A.weight"][2:].abs().min() > 0  # so that B has a gradient
    assert tensors[f"{name}.lora_B.weight"][:, 2:].count_nonzero() == 0


def test_a_large_model_is_written_in_shards(llama: Path, adapter: Path, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    merged = merging.merge(
        llama,
        adapter,
        tmp_path / "merged",
        shard_bytes=100_000,
        progress=lambda num_done, of: progress.append((num_done, of)),
    )
    written = sorted((tmp_path / "merged").glob("model-*.safetensors"))
    assert merged.shards == len(written) > 2
    assert max(path.stat().st_size for path in written) < 120_000
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in written}
    close(peft_adapters.logits(merged.path), peft_adapters.logits(llama, adapter))
    assert progress[-1][0] == progress[-1][1] == len(index["weight_map"])
    again = merging.merge(merged.path, adapter, tmp_path / "twice")
    assert again.shards == 1  # shards are read as well
    assert not torch.allclose(peft_adapters.logits(again.path), peft_adapters.logits(merged.path), atol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)]
)
def test_weights_are_merged_in_float32_and_rounded_once(
    llama: Path, adapter: Path, tmp_path: Path, dtype: str, expected: torch.dtype
) -> None:
    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    merged = merging.merge(tmp_path / "half", adapter, tmp_path / "merged", dtype=dtype)
    assert f"torch.{merged.dtype}" == str(expected)
    assert AutoModelForCausalLM.from_pretrained(merged.path, dtype="auto").dtype == expected
    (before,), (after,) = ([*path.glob("*.safetensors")] for path in (tmp_path / "half", merged.path))
    name, key = "model.layers.0.self_attn.q_proj", "base_model.model.model.layers.0.self_attn.q_proj"
    low = load_file(adapter / "adapter_model.safetensors")
    update = low[f"{key}.lora_B.weight"].double() @ low[f"{key}.lora_A.weight"].double() * 2
    exact = load_file(before)[f"{name}.weight"].double() + update
    weight = load_file(after)[f"{name}.weight"].double()
    assert (weight - exact).abs().max() <= (exact.to(expected).double() - exact).abs().max() + 1e-6


def test_weights_that_the_base_keeps_in_another_format_stay_in_it(llama: Path, adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "base")
    (file,) = (tmp_path / "base").glob("*.safetensors")
    tensors = {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in load_file(file).items()} | {
        "counts": torch.arange(3)
    }
    save_file(tensors, file, metadata={"format": "pt"})
    merging.merge(tmp_path / "base", adapter, tmp_path / "merged", dtype="float16")
    merged_tensors = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for name, tensor in merged_tensors.items() if "norm" in name} == {torch.float32}
    assert merged_tensors["counts"].tolist() == [0, 1, 2]
    assert merged_tensors["model.embed_tokens.weight"].dtype == torch.float16


def test_the_embedding_stays_where_the_unembedding_was_shared(tmp_path: Path) -> None:
    tiny_models.make(tmp_path / "base", "qwen3")
    adapter = peft_adapters.make(tmp_path / "base", tmp_path / "adapter", target_modules=["lm_head"])
    merging.merge(tmp_path / "base", adapter, tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False
    merged_tensors = load_file(tmp_path / "merged" / "model.safetensors")
    (file,) = (tmp_path / "base").glob("*.safetensors")
    embedding = load_file(file)["model.embed_tokens.weight"]
    assert torch.equal(merged_tensors["model.embed_tokens.weight"], embedding)
    assert not torch.equal(merged_tensors["lm_head.weight"], embedding)


def test_an_unembedding_that_was_trained_in_full_is_refused(llama: Path, tmp_path: Path) -> None:
    """PEFT saves the base's weights beside an adapter of it; changes of the base would be lost."""
    adapter = peft_adapters.make(llama, tmp_path / "adapter", target_modules=["lm_head"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    (copy,) = [name for name in tensors if "lora" not in name]
    with pytest.raises(UserError, match="a copy of the base's weights; `tinsmith checkpoints import`"):
        read_adapter(adapter, plain=True)
    tensors[copy][0, 0] += 1
    save_file(tensors, adapter / "adapter_model.safetensors")
    for refused in (merging.merge, lambda base, source, target: merging.rewrite(source, target, lambda: base)):
        with pytest.raises(UserError, match="which differs from the base model's"):
            refused(llama, adapter, tmp_path / "out")


def edit_config(adapter: Path, **values: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


REFUSED = {
    "dora": ({"use_dora": True}, "sets 'use_dora'"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "sets 'modules_to_save'"),
    "a bias": ({"bias": "all"}, "bias is 'all'"),
    "its bias": ({"lora_bias": True}, "sets 'lora_bias'"),
    "experts": ({"target_parameters": ["x"]}, "sets 'target_parameters'"),
    "transposed": ({"fan_in_fan_out": True}, "sets 'fan_in_fan_out'"),
    "what nobody knows yet": ({"use_tomorrow": 1}, "sets 'use_tomorrow'"),
    "a changed base": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    "another method": ({"peft_type": "IA3"}, "does not describe a LoRA adapter"),
    "no number": ({"r": True}, "both must be numbers"),
    "another rank": ({"r": 5}, "has rank 4, and adapter_config.json says 5"),
    "no alpha": ({"lora_alpha": 0}, "alpha must be positive"),
    "an alpha that no float holds": ({"lora_alpha": 10**400}, "alpha must be positive"),
    "no alpha of a pattern": ({"alpha_pattern": {"q_proj": -1}}, r"alpha_pattern\['q_proj'\] is -1"),
    "a strange pattern": ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern must be an object of numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_merges_are_refused_by_name(llama: Path, adapter: Path, tmp_path: Path, case: str) -> None:
    values, words = REFUSED[case]
    edit_config(adapter, **values)
    with pytest.raises(UserError, match=words):
        merging.rewrite(adapter, tmp_path / "out", lambda: llama)
    with pytest.raises(UserError, match=words):
        merging.merge(llama, adapter, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]


TENSORS = {
    "an embedding's": (
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 3)},
        "which is not a LoRA matrix",
    ),
    "half a pair": ({"base_model.model.x.lora_A.weight": torch.ones(2, 3)}, "x must have lora_A"),
    "of two ranks": (
        {"base_model.model.x.lora_A.weight": torch.ones(2, 3), "base_model.model.x.lora_B.weight": torch.ones(3, 1)},
        "x must have lora_A",
    ),
    "integers": ({"base_model.model.x.lora_A.weight": torch.ones(2, 3, dtype=torch.int8)}, "is I8"),
    "nothing": ({}, "holds no adapter"),
    "two adapters": (
        {
            "x.lora_A.one.weight": torch.ones(2, 3),
            "x.lora_A.two.weight": torch.ones(2, 3),
        },
        "holds x twice",
    ),
    "three dimensions": ({"x.lora_A.weight": torch.ones(2, 3, 4)}, "which is not a LoRA matrix"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_no_lora_are_refused_by_name(adapter: Path, case: str) -> None:
    tensors, words = TENSORS[case]
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match=words):
        read_adapter(adapter)


def test_files_that_are_no_adapter_are_refused(adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    valid_bytes = weights.read_bytes()
    for content in (valid_bytes[:-8], valid_bytes + b"x", b"", b"\xff" * 100):
        weights.write_bytes(content)
        with pytest.raises(UserError, match=r"adapter_model.safetensors (is not a complete|has a header of)"):
            read_adapter(adapter)
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(UserError, match=r"there is no adapter_model.safetensors, only adapter_model.bin"):
        read_adapter(adapter)
    (adapter / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="is not JSON"):
        read_adapter(adapter)


def test_an_adapter_of_another_base_is_refused(llama: Path, tmp_path: Path) -> None:
    tiny_models.make(tmp_path / "wider", "llama", hidden_size=32)
    tiny_models.make(tmp_path / "deeper", "llama", num_hidden_layers=3)
    for other, words in (("wider", "of the base is F32"), ("deeper", "the base's files hold no")):
        adapter = peft_adapters.make(tmp_path / other, tmp_path / f"{other}-adapter")
        with pytest.raises(UserError, match=words):
            merging.merge(llama, adapter, tmp_path / "merged")
        with pytest.raises(UserError, match="and the base model has"):
            check_fits(read_adapter(adapter), llama)
    assert not (tmp_path / "merged").exists()
    check_fits(read_adapter(peft_adapters.make(llama, tmp_path / "own", target_modules=["lm_head"])), llama)


def test_a_base_that_is_none_is_refused(llama: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a model's directory"):
        merging.merge(adapter, adapter, tmp_path / "merged")
    shutil.copytree(llama, tmp_path / "quantised")
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config | {"quantization_config": {"bits": 4}}))
    with pytest.raises(UserError, match="is quantised"):
        merging.merge(tmp_path / "quantised", adapter, tmp_path / "merged")
    with pytest.raises(UserError, match="exists already"):
        merging.merge(llama, adapter, tmp_path / "quantised")
    with pytest.raises(UserError, match="dtype is 'int8'"):
        merging.merge(llama, adapter, tmp_path / "merged", dtype="int8")


def test_numbers_that_are_not_finite_are_refused(llama: Path, adapter: Path, tmp_path: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("inf")
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match="not finite"):
        merging.rewrite(adapter, tmp_path / "rewritten", lambda: llama)
    with pytest.raises(UserError, match="not all finite"):
        merging.merge(llama, adapter, tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_engines_refuse_what_the_server_refuses_with_the_same_sentence(
    llama: Path, adapter: Path, tmp_path: Path
) -> None:
    from tinsmith.backends.torch import TorchBackend

    backend = TorchBackend(ModelShape("tiny", str(llama), tiny_models.VOCAB, 256, "x"), device="cpu")
    edits: list[Callable[[Path], object]] = [
        partial(edit_config, **REFUSED[case][0])
        for case in REFUSED.keys() - {"experts"}  # which checkpoints have
    ]
    edits += [partial(edit_config, rank_pattern={"q_proj": 2}), lambda files: (files / CONFIG_FILE).write_text("{")]
    for name in TENSORS.keys() - {"three dimensions"}:  # which Tinker's exports have
        edits.append(lambda files, name=name: save_file(TENSORS[name][0], files / WEIGHTS_FILE))
    edits += [lambda files: (files / WEIGHTS_FILE).write_bytes(b"x"), lambda files: (files / WEIGHTS_FILE).unlink()]
    for index, edit in enumerate(edits):
        files = tmp_path / str(index)
        shutil.copytree(adapter, files)
        edit(files)
        with pytest.raises(UserError) as at_server:
            read_adapter(files, plain=True)
        with pytest.raises(UserError) as at_engine:
            backend.load_version("v", files)
        assert str(at_server.value) == str(at_engine.value)


def test_experts_of_our_own_checkpoints_come_back_and_are_not_merged(tmp_path: Path) -> None:
    from tinsmith.backends.torch import TorchBackend

    shape = tiny_models.make(tmp_path / "base", "gpt_oss")
    backend = TorchBackend(shape, device="cpu")
    spec = LoraSpec(4, None, True, True, False)
    backend.create_model("m", spec)
    backend.save("m", tmp_path / "adapter", optimizer=True)
    description = read_adapter(tmp_path / "adapter", plain=True)
    assert description.spec == spec and description.experts
    assert optimizer_type(tmp_path / "adapter") == "adamw"
    check_fits(description, tmp_path / "base")
    backend.load("n", description.spec, tmp_path / "adapter", optimizer=True)
    with pytest.raises(UserError, match="sets 'target_parameters'"):
        merging.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    edit_config(tmp_path / "adapter", rank_pattern={"experts.gate_up_proj": 5})
    with pytest.raises(UserError, match="sets 'target_parameters'"):
        read_adapter(tmp_path / "adapter", plain=True)


def test_groups_are_those_of_the_engines(llama: Path) -> None:
    from tinsmith.backends.torch import TorchBackend

    shape = ModelShape("tiny", str(llama), tiny_models.VOCAB, 256, "x")
    for target in TorchBackend(shape, device="cpu").base.adaptable_targets():
        assert group_of(target.name) == target.group
