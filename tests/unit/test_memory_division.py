"""How a GPU's memory is divided without a budget, and how many layers are recomputed: arithmetic on real models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.known_models import PUBLISHED_MODELS
from tinsmith.backends.torch.backend import FITTING_TOKENS
from tinsmith.backends.torch.memory import Division, divide
from tinsmith.backends.torch.recompute import RECOMPUTE_SHARE, bytes_with, count_saved_layers
from tinsmith.plan import memory as plan_memory
from tinsmith.plan.architecture import Architecture
from tinsmith.plan.memory import RESERVED_BYTES, RESERVED_SHARE
from tinsmith.samplers.local.kv_cache import CUDA_SHARE


def divide_gpu(name: str, total: int, *, quantize: str = "off") -> tuple[Division, Architecture, int]:
    """The division for a known model, and what it leaves free."""
    model = replace(next(row.model for row in PUBLISHED_MODELS if row.name == name), has_fused_layers=True)
    base = plan_memory.base_bytes(model, dtype="bfloat16", quantize=quantize)
    activations = plan_memory.activations(model, dtype="bfloat16", cuda=True)
    free = total - base - RESERVED_BYTES[True]
    sampling = activations.num_bytes(2048, recompute=True)
    return divide(free, total, activations, FITTING_TOKENS, model.context, sampling), model, free


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B", "Gemma-2-9B"])
def test_the_cache_has_what_training_the_longest_sequence_leaves(name: str) -> None:
    division, model, free = divide_gpu(name, 80 * 10**9)
    activations = plan_memory.activations(model, dtype="bfloat16", cuda=True)
    sampling = activations.num_bytes(2048, recompute=True)
    assert division.activations >= activations.num_bytes(model.context, recompute=True)
    assert sum(division) <= free - RESERVED_SHARE * 80 * 10**9 - 1.25 * sampling, (
        "graphs, a step and the rest of the process have room"
    )
    assert division.kv_cache > 3 * division.models > 0
    # More memory is more of everything.
    larger, _, _ = divide_gpu(name, 141 * 10**9)
    assert larger.kv_cache > division.kv_cache and larger.models > division.models


def test_an_8b_model_on_80_gb_samples_more_than_with_a_fixed_share() -> None:
    division, model, free = divide_gpu("Qwen3-8B", 80 * 10**9)
    token_bytes = plan_memory.key_value_bytes(model, dtype="bfloat16")
    sequences, before = division.kv_cache // (2048 * token_bytes), int(CUDA_SHARE * free) // (2048 * token_bytes)
    assert before < 65 and sequences > 1.2 * before


def test_a_small_model_keeps_the_activations_of_its_largest_micro_batches() -> None:
    division, model, free = divide_gpu("Qwen3-0.6B", 80 * 10**9)
    activations = plan_memory.activations(model, dtype="bfloat16", cuda=True)
    remaining = free - division.kv_cache - division.models
    assert max(FITTING_TOKENS) * activations.token_bytes <= RECOMPUTE_SHARE[True] * remaining


def test_where_the_longest_sequence_needs_more_than_half_samples_have_as_much_as_before() -> None:
    division, model, free = divide_gpu("Llama-3.1-8B", 80 * 10**9)
    activations = plan_memory.activations(model, dtype="bfloat16", cuda=True)
    assert division.activations < activations.num_bytes(model.context, recompute=True)
    assert division.kv_cache > CUDA_SHARE * free and division.models > 0
    tight, _, free = divide_gpu("Qwen3-32B", 80 * 10**9)
    assert 0 < sum(tight) < free and tight.kv_cache > tight.models > 0


def test_one_long_sequence_of_a_large_model_keeps_what_fits() -> None:
    """Qwen3 8B, 32,768 tokens, beside 45 GiB of free memory on a GPU."""
    model = replace(next(row.model for row in PUBLISHED_MODELS if row.name == "Qwen3-8B"), has_fused_layers=True)
    activations = plan_memory.activations(model, dtype="bfloat16", cuda=True)
    limit = RECOMPUTE_SHARE[True] * 45 * 2**30
    num_saved = count_saved_layers(activations, model.layers, 32_768, limit)
    assert 0 < num_saved < model.layers
    needed = [bytes_with(activations, model.layers, 32_768, count) for count in (num_saved, num_saved + 1)]
    assert needed[0] <= limit < needed[1]
    assert count_saved_layers(activations, model.layers, 32_768, 2**30) == 0
