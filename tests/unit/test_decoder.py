"""Fused layers equal the modules, with adapters, and refuse unknown modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedConfig, Qwen2Config

from support import tiny_models
from tinsmith.backends.torch import lora, matmul
from tinsmith.backends.torch import transformer as decoder_module
from tinsmith.backends.torch.adapters import Adapter, initialise_weights, layout_for
from tinsmith.backends.torch.attention import PackedCausal
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.backends.torch.model import BaseModel
from tinsmith.types import LoraSpec, ModelShape

LENGTHS = [3, 17, 1, 20, 2]


def other(config: PreTrainedConfig, directory: Path) -> ModelShape:
    """A model that is not in tests/support/tiny_models.py."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(directory)
    tiny_models.tokenizer().save_pretrained(directory)
    return ModelShape("tiny/other", str(directory), tiny_models.VOCAB, 256, type(model).__name__)


def load_base(directory: Path, arch: str, dtype: str = "float32") -> BaseModel:
    if arch == "mistral":
        shape = other(MistralConfig(**tiny_models._COMMON, sliding_window=6), directory)
    elif arch == "qwen2":
        shape = other(Qwen2Config(**tiny_models._COMMON, tie_word_embeddings=False), directory)
    else:
        shape = tiny_models.make(directory, arch)
    return BaseModel.load(shape, device="cpu", dtype=dtype)


def adapter(
    base: BaseModel, seed: int, rank: int, *, attn: bool = True, mlp: bool = True, unembed: bool = False
) -> Adapter:
    spec = LoraSpec(rank=rank, seed=seed, train_attn=attn, train_mlp=mlp, train_unembed=unembed)
    layout = layout_for(spec, base.adaptable_targets())
    flat_P = initialise_weights(layout, seed, base.device)
    generator = torch.Generator().manual_seed(seed)
    for _, b_Or in layout.views(flat_P).values():
        b_Or.normal_(0, 0.1, generator=generator)
    return Adapter(spec, layout, flat_P, base.dtype)


def forward_both(base: BaseModel, adapters: list[Adapter | None]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of the modules and of the fused layers."""
    tokens_T = torch.randint(0, tiny_models.VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions_T = torch.cat([torch.arange(n) for n in LENGTHS])
    inputs = (tokens_T, positions_T, PackedCausal(LENGTHS), LoRABatch.of(adapters, LENGTHS))
    with torch.no_grad():
        modules = base.forward_modules(*inputs)
        assert base._fused is not None
        ours = base.hidden(*inputs)
        assert base._fused is not None and base._fused._is_packed, "the two were compared; it is in use"
    return modules, ours


@pytest.mark.parametrize("arch", ["qwen3", "llama", "mistral", "qwen2"])
def test_hidden_states_are_the_modules_own(tmp_path: Path, arch: str) -> None:
    base = load_base(tmp_path, arch)
    first_adapter = adapter(base, 1, 8)
    mixed = [first_adapter, None, adapter(base, 2, 4, mlp=False), adapter(base, 3, 16, attn=False), first_adapter]
    modules, ours = forward_both(base, mixed)
    torch.testing.assert_close(ours, modules, rtol=2e-5, atol=2e-5)
    plain, _ = forward_both(base, [None] * len(LENGTHS))
    assert float((plain - modules).abs().max()) > 0.1, "the adapters matter"


def test_in_bfloat16_they_differ_by_rounding(tmp_path: Path) -> None:
    base = load_base(tmp_path, "llama", "bfloat16")
    if not matmul.has_onednn(base.unembedding.weight):
        pytest.skip("this processor multiplies no bfloat16")
    modules, ours = forward_both(base, [adapter(base, seed, 8) for seed in range(5)])
    assert float((ours - modules).float().norm() / modules.float().norm()) < 0.03


def test_an_adapter_that_has_changed_is_read_again(tmp_path: Path) -> None:
    base = load_base(tmp_path, "qwen3")
    changing = adapter(base, 1, 8)
    _, before = forward_both(base, [changing] * len(LENGTHS))
    changing.flat_P.mul_(1.5)
    changing.refresh()
    modules, after = forward_both(base, [changing] * len(LENGTHS))
    torch.testing.assert_close(after, modules, rtol=2e-5, atol=2e-5)
    assert float((after - before).abs().max()) > 0.1


def test_non_finite_values_stay_in_their_rows(tmp_path: Path) -> None:
    base = load_base(tmp_path, "qwen3")
    broken, sound = adapter(base, 1, 8), adapter(base, 2, 8)
    _, clean = forward_both(base, [sound, broken, sound, sound, sound])
    broken.flat_P.fill_(float("nan"))
    broken.refresh()
    _, mixed = forward_both(base, [sound, broken, sound, sound, sound])
    assert mixed[3:20].isnan().all()
    assert torch.equal(mixed[:3], clean[:3]) and torch.equal(mixed[20:], clean[20:])


@pytest.mark.parametrize("arch", ["gemma2", "gpt_oss"])
def test_other_layers_go_through_their_modules(tmp_path: Path, arch: str) -> None:
    assert load_base(tmp_path, arch)._fused is None


def test_without_memory_to_spare_nothing_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load_base(tmp_path, "qwen3")
    monkeypatch.setattr(decoder_module, "PACKED_MEMORY_SHARE", 0.0)
    inputs = (torch.zeros(2, dtype=torch.int64), torch.arange(2), PackedCausal([2]), LoRABatch.of([None], [2]))
    with torch.no_grad():
        hidden = base.hidden(*inputs)
        assert base._fused is not None and not base._fused._is_packed
        assert base._fused.packed_bytes == 0
        torch.testing.assert_close(hidden, base.forward_modules(*inputs), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("arch", ["qwen3", "qwen2"])  # without and with biases
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lengths", [[1], [2, 1, 5], [40, 90]])
def test_large_weights_are_stored_once_and_decode_as_the_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, dtype: str, lengths: list[int]
) -> None:
    monkeypatch.setattr(decoder_module, "MAX_PACKED_BYTES", 0)
    base = load_base(tmp_path, arch, dtype)
    before = base.num_bytes
    adapters = [adapter(base, seed, 8, unembed=True) for seed in range(len(lengths))]
    modules, ours = forward_both_with(base, list(adapters), lengths)
    lora_batch = LoRABatch.of(adapters, lengths)
    with torch.no_grad():
        logits = base.next_logits(ours, lora_batch)
        expected = base.logits(ours, lora_batch)
    assert base._fused is not None and not base._fused._is_packed and base.num_bytes == before
    if dtype == "float32":
        torch.testing.assert_close(ours, modules, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)
    else:
        assert float((ours - modules).float().norm() / modules.float().norm()) < 0.03
        assert float((logits - expected).norm() / expected.norm()) < 0.03
    assert logits.dtype == torch.float32 and logits.is_contiguous()


def test_loaded_weights_do_not_map_their_file(tmp_path: Path) -> None:
    base = load_base(tmp_path, "qwen3")
    assert base.has_fused_layers
    if (maps := Path("/proc/self/maps")).exists():
        assert str(tmp_path) not in maps.read_text()


def test_layers_that_differ_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load_base(tmp_path, "qwen3")
    assert base._fused is not None
    monkeypatch.setattr(decoder_module, "silu", torch.relu)
    inputs = (torch.zeros(2, dtype=torch.int64), torch.arange(2), PackedCausal([2]), LoRABatch.of([None], [2]))
    with torch.no_grad():
        assert torch.equal(base.hidden(*inputs), base.forward_modules(*inputs))
    assert base._fused is None


def rows_of(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and positions of sequences of these lengths, the same at each call."""
    total = sum(lengths)
    tokens_T = torch.randint(0, tiny_models.VOCAB, (total,), generator=torch.Generator().manual_seed(total))
    return tokens_T, torch.cat([torch.arange(n) for n in lengths])


def forward_both_with(
    base: BaseModel, adapters: list[Adapter | None], lengths: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of the modules and of the fused layers, for sequences of these lengths."""
    inputs = (*rows_of(lengths), PackedCausal(lengths), LoRABatch.of(adapters, lengths))
    with torch.no_grad():
        return base.forward_modules(*inputs), base.hidden(*inputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_adapters_with_any_row_layout_equal_the_modules(tmp_path: Path, dtype: str) -> None:
    base = load_base(tmp_path, "qwen3", dtype)
    if base._fused is None:
        pytest.skip("this processor multiplies no bfloat16")
    pool = [adapter(base, seed, rank=5 + seed % 3, mlp=seed != 2, attn=seed != 3) for seed in range(6)]
    other = adapter(base, 9, 20)
    works: list[tuple[list[Adapter | None], list[int]]] = [
        (list(pool), [2] * 6),
        (list(pool), [2] * 6),
        ([*pool[1:4], None], [1, 3, 2, 4]),
        ([None, pool[5], None, pool[0], pool[2]], [2, 1, 1, 3, 3]),
        ([pool[4], pool[1]], [9, 1]),
        ([pool[0], other], [2, 2]),
        (list(pool[::-1]), [3] * 6),
    ]
    for adapters, lengths in works:
        modules, ours = forward_both_with(base, adapters, lengths)
        if dtype == "float32":
            torch.testing.assert_close(ours, modules, rtol=2e-5, atol=2e-5)
        else:
            assert float((ours - modules).float().norm() / modules.float().norm()) < 0.03


def test_stacks_that_sampling_keeps_are_few_and_follow_new_weights(tmp_path: Path) -> None:
    base = load_base(tmp_path, "llama")
    pool = [adapter(base, seed, 4) for seed in range(5)]
    with torch.inference_mode():  # as the sampler does
        for chosen in ((0, 1, 2), (3, 4), (4, 3), (0, 4, 2), (1, 2), (0, 1, 2, 3)):
            for _ in range(3):
                modules, ours = forward_both_with(base, [pool[i] for i in chosen], [2] * len(chosen))
                torch.testing.assert_close(ours, modules, rtol=2e-5, atol=2e-5)
        for _ in range(2):
            pool[1].flat_P.mul_(1.5)
            pool[1].refresh()
            for _ in range(3):
                modules, ours = forward_both_with(base, [pool[1], pool[2]], [1, 1])
                torch.testing.assert_close(ours, modules, rtol=2e-5, atol=2e-5)
    assert base._fused is not None
    stack_cache = base._fused._layers[0].down.delta._stack_cache
    assert len(stack_cache) == lora.MAX_STACKS and any(stacks is not None for stacks in stack_cache.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_that_decode_together_are_batched_from_the_first_step(tmp_path: Path, dtype: str) -> None:
    base = load_base(tmp_path, "qwen3", dtype)
    if base._fused is None:
        pytest.skip("this processor multiplies no bfloat16")
    delta, pool = base._fused._layers[0].down.delta, [adapter(base, seed, 4) for seed in range(3)]
    # Sequences of unlike length are padded in bfloat16.
    for lengths, num_batches in (([2, 2, 2], 1), ([7, 8, 8], 1 if dtype == "bfloat16" else 2)):
        modules, _ = forward_both_with(base, [*pool], lengths)
        once, often = (LoRABatch.of(pool, lengths, repeats=repeats) for repeats in (False, True))
        delta._stack_cache.clear()
        with torch.inference_mode():
            assert len(delta.groups(once)) == 3, "matrices that serve one step are not copied"
            delta._stack_cache.clear()
            ours = base.hidden(*rows_of(lengths), PackedCausal(lengths), often)
            assert len(delta.groups(often)) == num_batches
        assert float((ours - modules).float().norm() / modules.float().norm()) < (0.03 if dtype == "bfloat16" else 2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_joined_matrices_of_adapters_equal_the_modules(tmp_path: Path, dtype: str) -> None:
    base = load_base(tmp_path, "qwen3", dtype)
    if not matmul.has_onednn(base.unembedding.weight):
        pytest.skip("this processor multiplies no bfloat16")
    complete, without_mlp, without_attn = (
        adapter(base, 0, 8, unembed=True),
        adapter(base, 1, 5, mlp=False),
        adapter(base, 2, 3, attn=False),
    )
    long = lora.PACKED_MAX_ROWS + 1
    works: list[tuple[list[Adapter | None], list[int]]] = [
        ([complete], [4]),
        ([None, complete, without_mlp], [3, 2, 5]),
        ([without_attn, None], [7, 4]),
        ([complete, without_attn], [long, 1]),
    ]
    for refreshed in range(2):
        for adapters, lengths in works:
            modules, _ = forward_both_with(base, adapters, lengths)
            lora_batch = LoRABatch.of(adapters, lengths, repeats=True)
            with torch.inference_mode():
                ours = base.hidden(*rows_of(lengths), PackedCausal(lengths), lora_batch)
                logits, expected = (
                    base.next_logits(ours, lora_batch),
                    base.logits(modules, LoRABatch.of(adapters, lengths)),
                )
            if dtype == "float32":
                torch.testing.assert_close(ours, modules, rtol=2e-5, atol=2e-5)
                torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            else:
                assert float((ours - modules).float().norm() / modules.float().norm()) < 0.03
                assert float((logits - expected).norm() / expected.norm()) < 0.03
            batched_runs = [
                run for delta, runs in lora_batch.groups_by_delta.items() for run in runs if delta in run.stacks
            ]
            short = {n for owner, n in zip(adapters, lengths, strict=True) if owner is not None and n < long}
            assert {run.length for run in batched_runs} == short
        if not refreshed:
            for owner in (complete, without_mlp, without_attn):
                owner.flat_P.mul_(-1.5)
                owner.refresh()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_a_batched_product_non_finite_values_stay_in_their_rows(tmp_path: Path, dtype: str) -> None:
    base = load_base(tmp_path, "qwen3", dtype)
    if base._fused is None:
        pytest.skip("this processor multiplies no bfloat16")
    pool = [adapter(base, seed, 4) for seed in range(3)]
    for lengths in ([2, 2, 2], [3, 1, 2], [2, 2, 2]):
        _, clean = forward_both_with(base, [*pool], lengths)
    pool[1].flat_P.fill_(float("nan"))
    pool[1].refresh()
    for lengths in ([2, 2, 2], [2, 2, 2], [2, 2, 2]):
        _, mixed = forward_both_with(base, [*pool], lengths)
    assert mixed[2:4].isnan().all()
    finite_rows = torch.cat((mixed[:2], mixed[4:])), torch.cat((clean[:2], clean[4:]))
    if dtype == "float32":
        assert torch.equal(*finite_rows)
    else:
        assert float((finite_rows[0] - finite_rows[1]).float().norm() / finite_rows[1].float().norm()) < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_to_draw_from_are_those_of_the_unembedding(tmp_path: Path, dtype: str) -> None:
    base = load_base(tmp_path, "llama", dtype)
    if base._fused is None:
        pytest.skip("this processor multiplies no bfloat16")
    pool = [adapter(base, seed, 8, unembed=seed != 2) for seed in range(4)]
    works: list[tuple[list[Adapter | None], list[int]]] = [
        ([None], [6]), ([pool[0]], [6]), ([pool[0]], [6]),
        (list(pool), [2] * 4), (list(pool), [2] * 4), ([pool[2], None, pool[1]], [5, 1, 4]),
    ]  # fmt: skip
    for adapters, lengths in works:
        _, hidden_TD = forward_both_with(base, adapters, lengths)
        lora_batch = LoRABatch.of(adapters, lengths)
        with torch.no_grad():
            expected, actual = base.logits(hidden_TD, lora_batch), base.next_logits(hidden_TD, lora_batch)
        assert actual.dtype == torch.float32
        if dtype == "float32":
            torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
        else:
            assert float((actual - expected).norm() / expected.norm()) < 0.01


def test_numbers_of_rows_are_few_and_not_much_larger() -> None:
    sizes = {decoder_module.round_up(num) for num in range(1, 513)}
    assert len(sizes) < 50 and sizes >= {1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512}
    assert all(num <= decoder_module.round_up(num) <= max(1.42 * num, num + 1) for num in range(1, 5000))


def test_rotations_reach_as_far_as_positions_go(tmp_path: Path) -> None:
    base = load_base(tmp_path, "llama")
    for length in (5, 9, 70):
        modules, ours = forward_both_with(base, [None], [length])
        torch.testing.assert_close(ours, modules, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("suits_mkl", [True, False])
def test_small_float32_weights_are_packed_unless_mkl_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suits_mkl: bool
) -> None:
    monkeypatch.setattr(matmul, "SUITS_MKL", suits_mkl)
    base = load_base(tmp_path, "qwen3")
    modules, ours = forward_both_with(base, [adapter(base, 1, 8)], [5])
    torch.testing.assert_close(ours, modules, rtol=2e-5, atol=2e-5)
    assert base._fused is not None
    linears = [linear for layer in base._fused._layers for linear in layer.linears]
    assert all((linear._packed_OI is None) is suits_mkl for linear in linears)
