"""Fused layers in training have the modules' hidden states and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config

from support import tiny_models
from tinsmith.backends.torch import lora, transformer
from tinsmith.backends.torch.adapters import Adapter, initialise, layout_for
from tinsmith.backends.torch.attention import PackedCausal
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.routing import Routing
from tinsmith.types import LoraSpec, ModelShape

torch.set_num_threads(1)

LENGTHS = [3, 17, 1, 20, 6, 6, 6, 6]


def loaded(directory: Path, arch: str, dtype: str = "float32") -> BaseModel:
    if arch in ("mistral", "qwen2"):
        made = MistralConfig(**tiny_models._COMMON, sliding_window=6) if arch == "mistral" else None
        config = made or Qwen2Config(**tiny_models._COMMON, tie_word_embeddings=False)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
        model.save_pretrained(directory)
        tiny_models.tokenizer().save_pretrained(directory)
        shape = ModelShape(f"tiny/{arch}", str(directory), tiny_models.VOCAB, 256, type(model).__name__)
    else:
        shape = tiny_models.make(directory, arch)
    return BaseModel.load(shape, device="cpu", dtype=dtype)


def adapter(base: BaseModel, seed: int, rank: int, *, attn: bool = True, mlp: bool = True) -> Adapter:
    spec = LoraSpec(rank=rank, seed=seed, train_attn=attn, train_mlp=mlp, train_unembed=False)
    layout = layout_for(spec, base.adaptable())
    flat_P = initialise(layout, seed, base.device)
    generator = torch.Generator().manual_seed(seed)
    for _, b_Or in layout.views(flat_P).values():
        b_Or.normal_(0, 0.1, generator=generator)
    return Adapter(spec, layout, flat_P, base.dtype)


def mixed(base: BaseModel) -> list[Adapter | None]:
    """Long segments and short ones, every subset of linears, and four of one layout and length, which are batched."""
    return [
        adapter(base, 1, 8),
        adapter(base, 2, 4, mlp=False),
        None,
        adapter(base, 3, 16, attn=False),
        *(adapter(base, seed, 8) for seed in range(4, 8)),
    ]


def trained(base: BaseModel, adapters: list[Adapter | None], *, written: bool = True) -> list[Tensor]:
    """Hidden states, then each adapter's gradient, of one forward and backward."""
    own = base._fused
    assert own is not None
    tokens_T = torch.randint(0, tiny_models.VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions_T = torch.cat([torch.arange(n) for n in LENGTHS])
    given = {id(a): a for a in adapters if a is not None}
    buffers = [a.open_gradients() for a in given.values()]
    base._fused = own if written else None
    try:
        hidden_TD = base.hidden(tokens_T, positions_T, PackedCausal(LENGTHS), Routing.of(adapters, LENGTHS))
    finally:
        base._fused = own
    assert hidden_TD.grad_fn is not None and ("RMSNorm" in type(hidden_TD.grad_fn).__name__) is written
    grad_TD = torch.randn(hidden_TD.shape, generator=torch.Generator().manual_seed(1)).to(hidden_TD)
    hidden_TD.backward(grad_TD)
    for a in given.values():
        a.close_gradients()
    return [hidden_TD.detach(), *buffers]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("arch", ["qwen3", "llama", "mistral", "qwen2"])
def test_hidden_states_and_gradients_are_the_modules_own(tmp_path: Path, arch: str) -> None:
    base = loaded(tmp_path, arch)
    adapters = mixed(base)
    ours, modules = trained(base, adapters), trained(base, adapters, written=False)
    assert len(ours) == len(modules) == 8
    for found, expected in zip(ours, modules, strict=True):
        assert float(expected.norm()) > 0 and relative(found, expected) < 2e-5


def test_in_bfloat16_they_differ_by_rounding(tmp_path: Path) -> None:
    base = loaded(tmp_path, "qwen3", "bfloat16")
    adapters = mixed(base)
    for found, expected in zip(trained(base, adapters), trained(base, adapters, written=False), strict=True):
        assert relative(found.float(), expected.float()) < 0.06


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_segments_in_one_batch_get_what_each_gets_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    base = loaded(tmp_path, "qwen3", dtype)
    adapters = mixed(base)
    batched = []
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda *given: batched.append(1) or stack(*given))
    together = trained(base, adapters)
    assert batched
    batched.clear()
    monkeypatch.setattr(lora, "BATCHED_ROWS", 0)
    alone = trained(base, adapters)
    assert not batched
    for found, expected in zip(together, alone, strict=True):
        assert relative(found, expected) < (1e-5 if dtype == "float32" else 0.03)


def test_non_finite_values_stay_in_their_rows_in_a_batch(tmp_path: Path) -> None:
    base = loaded(tmp_path, "qwen3")
    adapters = mixed(base)
    before = trained(base, adapters)
    sick = adapters[5]
    assert sick is not None
    sick.flat_P.fill_(float("nan"))
    after = trained(base, adapters)
    start = sum(LENGTHS[:5])
    rows = torch.ones(sum(LENGTHS), dtype=torch.bool)
    rows[start : start + LENGTHS[5]] = False
    assert torch.equal(after[0][rows], before[0][rows]) and after[0][~rows].isnan().all()
    owners = [a for a in adapters if a is not None]
    for owner, found, expected in zip(owners, after[1:], before[1:], strict=True):
        assert torch.equal(found, expected) if owner is not sick else bool(found.isnan().any())


def test_joined_weights_are_held_once(tmp_path: Path) -> None:
    base = loaded(tmp_path, "qwen3")
    assert base._fused is not None
    for layer in base._fused._layers:
        for joined in layer.linears:
            begin = joined.weight.data_ptr()
            for name in joined.delta._names:
                weight = base.targets[name].weight
                assert begin <= weight.data_ptr() < joined.weight.data_ptr() + joined.weight.nbytes


def test_neighbours_in_a_layout_share_one_matrix(tmp_path: Path) -> None:
    base = loaded(tmp_path, "qwen3")
    assert base._fused is not None
    qkv = base._fused._layers[0].qkv.delta
    owner = adapter(base, 1, 8)
    (block,) = qkv._matrices(owner).stacked_a
    assert torch.equal(block.a_RI, torch.cat([owner.compute[name][0] for name in qkv._names]))
    owner.flat_P += 1
    assert torch.equal(block.a_RI, torch.cat([owner.compute[name][0] for name in qkv._names])), "it is a view"


def test_adapters_of_the_unembedding_alone_leave_nothing_to_go_back_through(tmp_path: Path) -> None:
    base = loaded(tmp_path, "qwen3")
    layout = layout_for(LoraSpec(4, None, False, False, True), base.adaptable())
    owner = Adapter(LoraSpec(4), layout, torch.zeros(layout.numel), torch.float32)
    tokens = torch.arange(5)
    assert not base.hidden(tokens, tokens, PackedCausal([5]), Routing.of([owner], [5])).requires_grad


@pytest.mark.parametrize("arch", ["gemma2", "gpt_oss"])
def test_other_layers_go_through_their_modules(tmp_path: Path, arch: str) -> None:
    assert loaded(tmp_path, arch)._fused is None


def test_layers_that_train_differently_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer._SwiGLU, "forward", lambda _, gate_up: 1.01 * gate_up.chunk(2, -1)[0])
    assert loaded(tmp_path, "qwen3")._fused is None
