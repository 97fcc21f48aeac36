"""Triton's kernels inside transformers' modules, in its interpreter: what is swapped in each family, and that results
and gradients stay the modules' own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from support import (
    interpreted,  # noqa: F401 - before the kernels
    tiny_models,
)
from support.families import FAMILIES, Family, build, is_installed, make
from tinsmith.backends.full.base import FullBase
from tinsmith.backends.torch import layer_kernels, module_kernels
from tinsmith.backends.torch.adapters import Adapter, initialise_weights, layout_for
from tinsmith.backends.torch.attention import PackedCausal
from tinsmith.backends.torch.lora import ForwardContext, MultiLoRALinear
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.backends.torch.model import BaseModel, _swap_experts, _swap_linears
from tinsmith.backends.torch.module_kernels import SwappedKernels, join_gated_products, swap_kernels
from tinsmith.plan.architecture import decoder_of, mark_experts
from tinsmith.types import LoraSpec

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

ROUNDED, ONCE, OFFSET = "norms that round", "norms", "norms with an offset"
GATED, SIGMOID, GATED_FIRST = "norms, then gates", "norms, then sigmoid gates", "gates, then norms"
ALL, PART, SHARED = "rotations", "rotations of a part", "rotations with shared cosines"
MLP, EXPERTS = "MLPs", "experts"

# What is swapped -> the titles of families.
SWAPPED: dict[frozenset[str], set[str]] = {
    frozenset({ROUNDED, ALL, MLP}): {
        "Llama 3",
        "Qwen2.5",
        "Qwen3",
        "Mistral",
        "Falcon-H1",
        "LFM2",
        "Granite",
        "SmolLM3",
        "EXAONE 4",
        "Hunyuan",
        "Seed-OSS",
        "Ministral",
        "InternLM 3",
        "Ministral 3",
        "Llama with dynamic RoPE",
    },
    frozenset({ROUNDED, ALL, MLP, EXPERTS}): {
        "Qwen3-MoE",
        "DeepSeek-V3",
        "Jamba",
        "LFM2-MoE",
        "Qwen2-MoE",
        "dots.llm1",
        "Hunyuan MoE",
        "Granite MoE, shared",
        "Solar Open",
        "EXAONE MoE",
        "DeepSeek-V3.2 up to index_topk tokens",
    },
    frozenset({OFFSET, ALL, MLP}): {"Gemma 2", "Gemma 3 (text)", "Gemma", "VaultGemma"},
    frozenset({ROUNDED, PART, MLP}): {"Phi-3", "Phi-3 128k up to its original length"},
    frozenset({ONCE, SHARED}): {"gpt-oss"},
    frozenset({OFFSET, GATED, PART, MLP, EXPERTS}): {"Qwen3-Next", "Qwen3.5-MoE"},
    frozenset({OFFSET, GATED, PART, MLP}): {"Qwen3.5"},
    frozenset({ROUNDED, SIGMOID, MLP, EXPERTS}): {"Kimi Linear"},
    frozenset({ROUNDED, GATED_FIRST, ALL, MLP, EXPERTS}): {"Granite 4"},
    frozenset({ONCE, GATED_FIRST, ALL}): {"Nemotron-H", "Nemotron-H with experts"},
    frozenset({ROUNDED, GATED_FIRST, PART, MLP}): {"Bamba"},
    frozenset({ROUNDED, ALL, EXPERTS}): {"MiniMax-Text-01", "Mixtral", "OLMoE", "Granite MoE"},
    frozenset({ONCE, ALL, MLP}): {"OLMo 2", "OLMo 3"},
    frozenset({MLP}): {"Command R", "Command R7B"},
    frozenset({ROUNDED, MLP}): {"GLM-4 (9B)", "GLM-4-0414", "ERNIE 4.5"},
    frozenset({ROUNDED, PART, MLP, EXPERTS}): {"GLM-4.5", "MiMo-V2-Flash"},
    frozenset({ROUNDED, MLP, EXPERTS}): {"DeepSeek-V2", "ERNIE 4.5 MoE", "GLM-5 up to index_topk tokens"},
    frozenset({ALL}): {"StarCoder2", "Persimmon", "Phi-2"},
    frozenset({ROUNDED, ALL}): {"Arcee AFM", "Apertus", "BitNet"},
    frozenset({ROUNDED, PART, EXPERTS}): {"MiniMax-M2"},
    frozenset({ALL, EXPERTS}): {"Phi-3.5-MoE"},
    frozenset({ONCE, ALL, EXPERTS}): {"FlexOlmo"},
    frozenset({PART}): {"GPT-NeoX, Pythia"},
    frozenset({ALL, MLP}): {"OLMo"},
    frozenset({ONCE, ALL, MLP, EXPERTS}): {"Arcee Trinity"},
    frozenset({EXPERTS}): {"Command A MoE"},
    frozenset(): {"StarCoder", "OPT"},
    frozenset({ONCE, MLP}): {"Helium", "Gemma 4 (text)"},
    frozenset({ROUNDED, ONCE, MLP, EXPERTS}): {"Llama 4 (text)"},
    frozenset({ROUNDED, GATED_FIRST}): {"Mamba-2"},
    frozenset({ROUNDED}): {"Mamba", "Falcon Mamba"},
}

# Class or modeling file -> why nothing is swapped in it.
MEAN, NO_GATE, INTERLEAVED = "subtracts a mean", "no gate", "pairs of columns that are neighbours"
REASONS = {
    **dict.fromkeys(("LayerNorm", "OlmoLayerNorm", "CohereLayerNorm", "Cohere2LayerNorm", "Cohere2MoeLayerNorm"), MEAN),
    "FalconMambaWeightlessRMSNorm": "has a buffer",
    **dict.fromkeys(("ApertusMLP", "ArceeMLP", "GPTBigCodeMLP", "GPTNeoXMLP", "NemotronHMLP", "PersimmonMLP"), NO_GATE),
    **dict.fromkeys(("PhiMLP", "Starcoder2MLP"), NO_GATE),
    "BitNetMLP": "a norm before its last linear",
    "GptOssMLP": "a mixture",
    "MultiLoRAExperts": "columns that alternate, or no gate",
    **dict.fromkeys(("modeling_cohere", "modeling_cohere2", "modeling_cohere2_moe", "modeling_helium"), INTERLEAVED),
    **dict.fromkeys(("modeling_ernie4_5", "modeling_ernie4_5_moe", "modeling_glm", "modeling_glm4"), INTERLEAVED),
    "modeling_glm_moe_dsa": INTERLEAVED,
    **dict.fromkeys(("modeling_deepseek_v2", "modeling_llama4"), "complex numbers"),
    "modeling_gemma4": "one tensor for each call",
}


def name_form(form: layer_kernels.NormForm) -> str:
    if form.activation is not None:
        return GATED_FIRST if form.gates_first else GATED if form.activation == "silu" else SIGMOID
    return OFFSET if form.has_offset else ROUNDED if form.rounds else ONCE


def name_rotation(kinds: module_kernels.RotationKinds) -> str:
    return SHARED if kinds.shares_halves else PART if kinds.rotates_part else ALL


def list_others(decoder: nn.Module, swapped: SwappedKernels) -> set[str]:
    """Classes of norms and MLPs, and modeling files with rotations, in which nothing was swapped."""
    others, paths = set[str](), {*swapped.norms, *swapped.mlps, *swapped.gates}
    for path, module in decoder.named_modules():
        name, modeling = type(module).__name__, type(module).__module__
        if path not in paths and any(part in name for part in ("Norm", "MLP", "MultiLoRAExperts")):
            others.add(name)
        has_rotation = any(key.startswith("apply_rotary") for key in vars(sys.modules[modeling]))
        if modeling.startswith("transformers.models") and has_rotation and modeling not in swapped.rotations:
            others.add(modeling.rpartition(".")[-1])
    return others


def swap_in(family: Family) -> tuple[nn.Module, SwappedKernels]:
    model, context = build(family).eval(), ForwardContext()
    decoder = decoder_of(model)
    _swap_linears(model, decoder, context, None)
    mark_experts(model)
    _swap_experts(model, context, None)
    return decoder, swap_kernels(decoder, context)


LATER = is_installed("5.23")


@pytest.mark.skipif(not LATER, reason="other releases have other classes")
@pytest.mark.parametrize("family", [pytest.param(family, id=family.title) for family in FAMILIES])
def test_each_family_swaps_what_it_computes(family: Family) -> None:
    decoder, swapped = swap_in(family)
    kinds = {name_form(form) for form in swapped.norms.values()}
    kinds |= {name_rotation(rotation.kinds) for rotation in swapped.rotations.values()}
    kinds |= {name for name, parts in ((MLP, swapped.mlps), (EXPERTS, swapped.gates)) if parts}
    assert [kinds] == [set(expected) for expected, titles in SWAPPED.items() if family.title in titles]
    assert list_others(decoder, swapped) <= REASONS.keys()


@pytest.mark.parametrize("family", [pytest.param(family, id=family.title) for family in FAMILIES if family.core])
def test_norms_round_where_the_modules_do(family: Family) -> None:
    """In bfloat16 a rounding more or less would change many numbers."""
    decoder, swapped = swap_in(family)
    for path, form in swapped.norms.items():
        module = decoder.get_submodule(path).bfloat16()
        weight, eps = getattr(module, "weight", None), module_kernels._eps_of(module)
        assert eps is not None
        x, gate = torch.randn(2, 1, 64, 16 if weight is None else len(weight)).bfloat16()
        gate = gate if form.activation else None
        actual = module(x) if gate is None else module(x, gate)
        expected = module_kernels.norm_reference(x, weight, eps, form, gate)
        assert (actual != expected).float().mean() < 1e-3, (path, form)


@pytest.fixture
def swaps(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseModel], SwappedKernels]:
    """Swaps kernels in a base model on the CPU, as on a GPU."""
    monkeypatch.setattr(module_kernels, "runs_kernels", lambda x: True)

    def swap(base: BaseModel) -> SwappedKernels:
        base.swapped = swap_kernels(base._decoder, base._context)
        return base.swapped

    return swap


def load(directory: Path, model_type: str, **options: Any) -> BaseModel:  # noqa: ANN401
    (family, *_) = [family for family in FAMILIES if family.model_type == model_type]
    base = BaseModel.load(make(directory, family), device="cpu", dtype=options.pop("dtype", "float32"), **options)
    base.pin()
    return base


def make_adapters(base: BaseModel) -> list[Adapter | None]:
    adapters: list[Adapter | None] = [None]
    for seed, (attn, mlp) in enumerate([(True, True), (False, True)]):
        spec = LoraSpec(rank=3 + seed, seed=seed, train_attn=attn, train_mlp=mlp, train_unembed=False)
        layout = layout_for(spec, base.adaptable_targets())
        flat_P = initialise_weights(layout, seed, base.device)
        for _, b_Or in layout.views(flat_P).values():
            b_Or.normal_(0, 0.1, generator=torch.Generator().manual_seed(seed))
        adapters.append(Adapter(spec, layout, flat_P, base.dtype))
    return adapters


def forward_backward(base: BaseModel, adapters: list[Adapter | None], spoilt: int | None = None) -> list[Tensor]:
    """Hidden states, and each adapter's gradient. The embedding of token `spoilt` is not finite."""
    lengths = LENGTHS
    tokens_T = torch.randint(1, tiny_models.VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    if spoilt is not None:
        tokens_T[: lengths[0]] = spoilt
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    buffers = [adapter.open_gradients() for adapter in adapters if adapter is not None]
    hidden_TD = base.hidden(tokens_T, positions_T, PackedCausal(lengths), LoRABatch.of(adapters, lengths))
    grad_TD = torch.randn(hidden_TD.shape, generator=torch.Generator().manual_seed(1)).to(hidden_TD)
    hidden_TD.backward(grad_TD)
    for adapter in adapters:
        if adapter is not None:
            adapter.close_gradients()
    return [hidden_TD.detach(), *buffers]


LENGTHS = [3, 2, 4]


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    "model_type",
    [
        *("qwen3_5_text", "gpt_oss"),
        *(
            pytest.param(model_type, marks=pytest.mark.extended)
            for model_type in ("qwen3_moe", "qwen3_next", "gemma3_text", "deepseek_v3", "glm4_moe", "phi3", "bamba")
        ),
    ],
)
def test_results_and_gradients_are_the_modules_own(
    model_type: str, tmp_path: Path, swaps: Callable[[BaseModel], SwappedKernels]
) -> None:
    base = load(tmp_path, model_type)
    adapters = make_adapters(base)
    expected = forward_backward(base, adapters)
    swapped = swaps(base)
    launches = LaunchCounter()
    with launches:
        separate = forward_backward(base, adapters)
    assert launches.total > 0
    join_gated_products(swapped)
    joined = forward_backward(base, adapters)
    for results in (separate, joined):
        assert max(relative(actual, theirs) for actual, theirs in zip(results, expected, strict=True)) < 1e-4


def test_layers_that_run_again_in_backward_run_the_same_kernels(
    tmp_path: Path, swaps: Callable[[BaseModel], SwappedKernels]
) -> None:
    base = load(tmp_path, "qwen3_5_text")
    join_gated_products(swaps(base))
    adapters, once, twice = make_adapters(base), LaunchCounter(), LaunchCounter()
    with once:
        expected = forward_backward(base, adapters)
    base.recompute.active = True
    with twice:
        results = forward_backward(base, adapters)
    assert all(torch.equal(actual, theirs) for actual, theirs in zip(results, expected, strict=True))
    assert twice.total > once.total


class LaunchCounter:
    """Counts kernels while it is entered."""

    def __init__(self) -> None:
        self.total = 0

    def __enter__(self) -> None:
        self._launch = layer_kernels._launch
        layer_kernels._launch = self._count

    def __exit__(self, *_: object) -> None:
        layer_kernels._launch = self._launch

    def _count(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        self.total += 1
        self._launch(*args, **kwargs)


def test_a_models_own_forward_runs_no_kernel(tmp_path: Path, swaps: Callable[[BaseModel], SwappedKernels]) -> None:
    base = load(tmp_path, "qwen3_5_text")
    tokens_1T = torch.arange(7)[None]
    expected_TV = base.reference_logits(input_ids=tokens_1T)
    swaps(base)
    launches = LaunchCounter()
    with launches, torch.no_grad():
        assert torch.equal(base.reference_logits(input_ids=tokens_1T), expected_TV)
    assert launches.total == 0


def test_tensors_of_a_cpu_run_no_kernel(tmp_path: Path) -> None:
    base = load(tmp_path, "qwen3_5_text")
    assert not str(base.swapped)
    swap_kernels(base._decoder, base._context)
    launches, adapters = LaunchCounter(), make_adapters(base)
    with launches:
        forward_backward(base, adapters)
    assert launches.total == 0


def test_a_wrong_kernel_is_found_at_load(
    tmp_path: Path, swaps: Callable[[BaseModel], SwappedKernels], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load(tmp_path, "gemma3_text")
    swaps(base)
    base.check_servable()
    monkeypatch.setattr(layer_kernels, "apply_norm", lambda x, *_: x)
    with pytest.raises(Exception, match="cannot be served"):
        base.check_servable()


@pytest.mark.extended
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "bamba"])
def test_a_sequence_that_is_not_finite_changes_no_other(
    model_type: str, tmp_path: Path, swaps: Callable[[BaseModel], SwappedKernels]
) -> None:
    base = load(tmp_path, model_type)
    join_gated_products(swaps(base))
    adapters = make_adapters(base)
    expected = forward_backward(base, adapters, spoilt=0)
    base.model.get_input_embeddings().weight.data[0] = float("nan")
    hidden_TD, *gradients = forward_backward(base, adapters, spoilt=0)
    first = LENGTHS[0]
    assert hidden_TD[:first].isnan().any() and torch.equal(hidden_TD[first:], expected[0][first:])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, expected[1:], strict=True))


def test_weights_in_training_get_their_gradients(
    tmp_path: Path, swaps: Callable[[BaseModel], SwappedKernels], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all weights are trained, `_check_training` compares gradients with those of eager attention."""
    (family,) = [family for family in FAMILIES if family.title == "Phi-3"]
    base = FullBase.load(make(tmp_path, family), device="cpu", dtype="float32")
    assert isinstance(base, FullBase)
    swaps(base)
    launches = LaunchCounter()
    with launches:
        base._check_training()
    assert launches.total > 0


def test_joined_weights_are_views_of_one_tensor(tmp_path: Path, swaps: Callable[[BaseModel], SwappedKernels]) -> None:
    base = load(tmp_path, "qwen3_moe")
    num_bytes = base.num_bytes
    swapped = swaps(base)
    join_gated_products(swapped)
    assert base.num_bytes == num_bytes
    (path,) = swapped.mlps
    mlp = base._decoder.get_submodule(path)
    assert mlp.gate_proj.weight.untyped_storage().data_ptr() == mlp.up_proj.weight.untyped_storage().data_ptr()  # pyright: ignore


class LookAlike(nn.Module):
    """A norm with one peculiarity."""

    def __init__(self, forward: Callable[[Tensor, Tensor], Tensor], size: int = 12) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.eps = 1e-5
        self._compute = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._compute(x, self.weight)


def norm(x: Tensor, eps: float = 1e-5) -> Tensor:
    wide = x.float()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x, w: (norm(x) * w.float()).to(x.dtype), ONCE),
        (lambda x, w: norm(x).to(x.dtype) * w, ROUNDED),
        (lambda x, w: (norm(x) * (1 + w.float())).to(x.dtype), OFFSET),
        (lambda x, w: norm(x - x.mean(-1, keepdim=True)).to(x.dtype) * w, None),
        (lambda x, w: norm(x, 1e-3).to(x.dtype) * w, None),
        (lambda x, w: norm(x) * w, None),  # float32, whatever the input is
        (lambda x, w: norm(x).to(x.dtype) * w * 1.01, None),
        (lambda x, w: (norm(x).to(x.dtype) * w)[..., :-1], None),
        (lambda x, w: [x, w], None),
        (lambda x, w: x.no_such_attribute, None),
    ],
)
def test_norms_are_found_by_what_they_compute(compute: Callable[[Tensor, Tensor], Tensor], name: str | None) -> None:
    form = module_kernels.find_norm_form(LookAlike(compute).requires_grad_(False))
    assert (None if form is None else name_form(form)) == name


def test_rotations_are_found_by_what_they_compute() -> None:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        return module_kernels.rotate_reference(q, cos, sin), module_kernels.rotate_reference(k, cos, -sin)

    def rotate_alike(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        return module_kernels.rotate_reference(q, cos, sin), module_kernels.rotate_reference(k, cos, sin)

    def rotate_by_position(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    assert module_kernels.find_rotation_kinds(rotate) is None
    assert module_kernels.find_rotation_kinds(rotate_by_position) is None
    kinds = module_kernels.find_rotation_kinds(rotate_alike)
    assert kinds == module_kernels.RotationKinds(True, True, False, False)


@pytest.mark.parametrize("case", ["two sequences", "another dtype", "cosines for other rows", "no cosines for halves"])
def test_calls_that_the_kernel_does_not_take_run_the_function(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_kernels, "runs_kernels", lambda x: True)
    calls: list[object] = []

    def function(*args: object) -> tuple[Tensor, Tensor]:
        calls.append(args)
        return torch.zeros(0), torch.zeros(0)

    kinds = module_kernels.RotationKinds(True, False, False, False)
    rotation, context = module_kernels.FusedRotation(function, kinds), ForwardContext()
    rotation.contexts.add(context)
    context.plan = PackedCausal([3])
    q, k, cos = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 3, 8)
    rotation(q, k, cos, cos)
    assert not calls
    if case == "two sequences":
        q, k, cos = (torch.cat([x, x]) for x in (q, k, cos))
    elif case == "another dtype":
        cos = cos.double()
    elif case == "cosines for other rows":
        cos = cos[:, :1]
    else:
        cos = cos[..., :4]
    rotation(q, k, cos, cos)
    assert len(calls) == 1


def test_an_mlp_with_another_product_is_not_swapped() -> None:
    class Gated(nn.Module):
        def __init__(self, compute: Callable[..., Tensor]) -> None:
            super().__init__()
            context = ForwardContext()
            for name, sizes in (("gate_proj", (6, 10)), ("up_proj", (6, 10)), ("down_proj", (10, 6))):
                setattr(self, name, MultiLoRALinear(name, "mlp", nn.Linear(*sizes), context))
            self._compute = compute

        def forward(self, x: Tensor) -> Tensor:
            return self._compute(self.gate_proj(x), self.up_proj(x), self.down_proj)

    with torch.no_grad():
        for compute, is_swapped in (
            (lambda gate, up, down: down(silu(gate) * up), True),
            (lambda gate, up, down: down(silu(up) * gate), False),
            (lambda gate, up, down: 0.5 * down(silu(gate) * up), False),
            (lambda gate, up, down: down(torch.sigmoid(gate) * up), False),
            (lambda gate, up, down: down(gelu(gate, approximate="tanh") * up), True),
            (lambda gate, up, down: down(gelu(gate) * up), False),
        ):
            assert (module_kernels.find_mlp_form(Gated(compute)) is not None) == is_swapped
