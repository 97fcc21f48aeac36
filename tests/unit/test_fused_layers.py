"""Which families take fused layers, and that no family takes them whose layers compute something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3 import modeling_qwen3

from support import vision_models
from support.families import FAMILIES, Family, make
from support.local_sampling import make_prompt, make_sample, run
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.memory import activations_of
from tinsmith.backends.torch.model import BaseModel
from tinsmith.errors import SettingsError
from tinsmith.plan import memory
from tinsmith.plan.architecture import read_directory
from tinsmith.samplers.local.engine import LocalSampler
from tinsmith.types import Datum, LoraSpec, Pass, SamplingParams

torch.set_num_threads(1)

FUSED = {"internlm3", "llama", "ministral", "ministral3", "mistral", "qwen2", "qwen3", "seed_oss"}
"""Families of fused layers, by model_type. All others of docs/models.md run as modules."""

OTHER_ARITHMETIC = {"ernie4_5", "granite", "helium", "smollm3"}
"""Families with the parts of fused layers, which compute something else with them."""

LONGER_CONTEXT = {"ministral3"}
"""Fused up to the length from which queries are scaled by their positions; a plan counts modules."""


NOT_PLANNED = {"gemma4_text", "mimo_v2_flash"}


def family_of(model_type: str) -> Family:
    return next(family for family in FAMILIES if family.model_type == model_type)


def load(directory: Path, family: Family, dtype: str = "float32") -> BaseModel:
    return BaseModel.load(make(directory, family), device="cpu", dtype=dtype)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            family,
            id=f"{family.model_type}-{family.title}",
            marks=[] if family.model_type in FUSED | OTHER_ARITHMETIC else pytest.mark.extended,
        )
        for family in FAMILIES
    ],
)
def test_a_family_takes_fused_layers_or_modules_as_listed(family: Family, tmp_path: Path) -> None:
    base = load(tmp_path, family)
    assert base.has_fused_layers == (family.model_type in FUSED)
    try:
        planned = read_directory(tmp_path)
    except SettingsError:
        assert family.model_type in NOT_PLANNED
        return
    assert planned.has_fused_layers == (family.model_type in FUSED - LONGER_CONTEXT), "a plan counts the larger number"
    in_plan, loaded = memory.activations(planned, dtype="float32", cuda=False), activations_of(base)
    assert in_plan.saved >= loaded.saved and in_plan.layer >= loaded.layer


@pytest.mark.parametrize(("name", "is_fused"), [("qwen3_vl", True), ("qwen3_vl_moe", False)])
def test_text_layers_beside_a_vision_tower_are_fused_too(name: str, is_fused: bool, tmp_path: Path) -> None:
    shape = vision_models.make(tmp_path, name)
    base = BaseModel.load(shape, device="cpu", dtype="float32")
    assert base.has_fused_layers == read_directory(tmp_path).has_fused_layers == is_fused


def gradients_and_answers(backend: TorchBackend) -> tuple[Tensor, list[tuple[list[int], np.ndarray]]]:
    """Of one adapter on sequences of several lengths, and of greedy samples of it."""
    data = []
    for length in (11, 1, 100, 16):
        rng = np.random.default_rng(length)
        inputs = {"target_tokens": rng.integers(0, 90, length), "weights": np.ones(length, np.float32)}
        data.append(Datum(rng.integers(0, 90, length).astype(np.int32), inputs))
    run_to_end(backend.run_passes([Pass("r", "m", tuple(data), "cross_entropy", {}, False)]))
    gradient_P = backend._models["m"].gradient_P
    assert gradient_P is not None
    sampler = LocalSampler(backend.base, backend._versions)
    params = SamplingParams(max_tokens=9, temperature=0.0, stop_eos=False)
    samples = [make_sample(str(n), make_prompt(n), params, version_id="v") for n in (1, 7, 90)]
    results = run(sampler, *samples)
    answers = [results[sample.request_id].sequences[0] for sample in samples]
    return gradient_P.clone(), [(answer.tokens_T.tolist(), np.asarray(answer.logprobs_T)) for answer in answers]


@pytest.mark.parametrize("model_type", sorted(FUSED & {family.model_type for family in FAMILIES}))
def test_gradients_and_answers_of_fused_layers_are_those_of_the_modules(model_type: str, tmp_path: Path) -> None:
    shape, results = make(tmp_path, family_of(model_type)), []
    for is_fused in (True, False):
        backend = TorchBackend(shape, device="cpu")
        assert backend.base.has_fused_layers
        if not is_fused:
            backend.base._fused = None
        backend.create_model("m", LoraSpec(4, seed=1))
        flat_P = backend._models["m"].adapter.flat_P
        flat_P.add_(0.05 * torch.randn(flat_P.shape, generator=torch.Generator().manual_seed(2)))
        backend._models["m"].adapter.refresh()
        backend.publish("m", "v")
        results.append(gradients_and_answers(backend))
    (fused_P, fused_answers), (modules_P, module_answers) = results
    assert float(modules_P.abs().max()) > 0
    assert float((fused_P - modules_P).norm() / modules_P.norm()) < 1e-5
    for (tokens, logprobs), (expected_tokens, expected) in zip(fused_answers, module_answers, strict=True):
        assert tokens == expected_tokens
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("granite", {"residual_multiplier": 0.98}),
        ("granite", {"embedding_multiplier": 1.02}),
        ("smollm3", {"no_rope_layers": [1, 0], "use_sliding_window": False}),
        ("ministral3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1,
                                            "original_max_position_embeddings": 64}}),
    ],
    ids=["residual factor", "embedding factor", "a layer without RoPE", "queries scaled by position"],
)  # fmt: skip
def test_a_family_that_uses_the_same_parts_otherwise_runs_as_modules(
    model_type: str, config: dict[str, object], dtype: str, tmp_path: Path
) -> None:
    family = Family(model_type, "", config=config)
    assert not load(tmp_path, family, dtype).has_fused_layers
    assert not read_directory(tmp_path).has_fused_layers


def test_factors_of_one_are_no_difference(tmp_path: Path) -> None:
    """Attention's own factor is an option of attention."""
    config = {"residual_multiplier": 1.0, "embedding_multiplier": 1.0, "attention_multiplier": 0.2}
    assert load(tmp_path, Family("granite", "", config=config)).has_fused_layers
    assert read_directory(tmp_path).has_fused_layers


def rotate_in_part(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Partial RoPE of the first half of each head."""
    half = q.shape[-1] // 2
    cos, sin = (x[..., ::2].unsqueeze(unsqueeze_dim) for x in (cos, sin))
    rotated = [x[..., :half] * cos + modeling_qwen3.rotate_half(x[..., :half]) * sin for x in (q, k)]
    return torch.cat((rotated[0], q[..., half:]), -1), torch.cat((rotated[1], k[..., half:]), -1)


def rotate_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """RoPE of neighbours."""
    cos, sin = (
        x[..., : x.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for x in (cos, sin)
    )  # fmt: skip
    swapped = [torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) for x in (q, k)]
    return q * cos + swapped[0] * sin, k * cos + swapped[1] * sin


def attend_with_late_norms(
    self: modeling_qwen3.Qwen3Attention,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: object = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Norms of queries and keys after their rotation."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    queries, keys, values = (
        linear(hidden_states).view(shape).transpose(1, 2) for linear in (self.q_proj, self.k_proj, self.v_proj)
    )
    queries, keys = modeling_qwen3.apply_rotary_pos_emb(queries, keys, *position_embeddings)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(
        str(self.config._attn_implementation), modeling_qwen3.eager_attention_forward
    )
    out, _ = attend(self, self.q_norm(queries), self.k_norm(keys), values, attention_mask, dropout=0.0,
                    scaling=self.scaling, sliding_window=self.sliding_window, **kwargs)  # fmt: skip
    return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


def scale_mlp(factor: float) -> Callable[[modeling_qwen3.Qwen3MLP, Tensor], Tensor]:
    return lambda self, x: factor * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def add_to_norm(self: modeling_qwen3.Qwen3RMSNorm, x: Tensor) -> Tensor:
    """Gemma's norm."""
    wide = x.float()
    return ((1.0 + self.weight.float()) * wide * torch.rsqrt(wide.square().mean(-1, True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("apply_rotary_pos_emb", rotate_in_part),
        ("apply_rotary_pos_emb", rotate_pairs),
        ("Qwen3Attention.forward", attend_with_late_norms),
        ("Qwen3MLP.forward", scale_mlp(0.98)),
        ("Qwen3RMSNorm.forward", add_to_norm),
    ],
)
def test_other_arithmetic_in_the_same_modules_is_noticed(
    name: str, replacement: object, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = make(tmp_path, family_of("qwen3"))
    assert BaseModel.load(shape, device="cpu", dtype=dtype).has_fused_layers
    owner, _, attribute = name.rpartition(".")
    monkeypatch.setattr(getattr(modeling_qwen3, owner) if owner else modeling_qwen3, attribute, replacement)
    assert not BaseModel.load(shape, device="cpu", dtype=dtype).has_fused_layers


def test_a_difference_that_short_sequences_do_not_show_is_noticed(tmp_path: Path) -> None:
    """Scaled from the last position of the context on: the served context decides."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.5}
    shape = make(
        tmp_path,
        Family("ministral3", "", config={"rope_parameters": {**rope, "original_max_position_embeddings": 127}}),
    )
    assert not BaseModel.load(shape, device="cpu").has_fused_layers
    assert BaseModel.load(replace(shape, max_context_length=126), device="cpu").has_fused_layers
