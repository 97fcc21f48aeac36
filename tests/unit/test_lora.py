"""Adapters and the multi-adapter linear, against PEFT and plain float64."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from support import tiny_models
from support.properties import examples
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend, matmul
from tinsmith.backends.torch.adapters import Adapter, Layout, Target, TrainedModel, initialise_weights, layout_for
from tinsmith.backends.torch.attention import PackedCausal
from tinsmith.backends.torch.lora import ForwardContext, MultiLoRALinear
from tinsmith.backends.torch.lora_batch import LoRABatch, Segment
from tinsmith.backends.torch.matmul import HAS_ONEDNN, _suits_onednn
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.optim import norms_and_steps, prepare_step
from tinsmith.errors import UserError
from tinsmith.types import AdamParams, Datum, LoraSpec, ModelShape, OptimStep, Pass, PassResult

torch.set_num_threads(1)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("qwen"), "qwen3")


def adapter(rank: int, target: Target, seed: int, alpha: float = 32.0) -> Adapter:
    layout = Layout.of(rank, [target])
    flat = torch.zeros(layout.numel)
    for a, b in layout.views(flat).values():
        generator = torch.Generator().manual_seed(seed)
        a.copy_(torch.randn(a.shape, generator=generator))
        b.copy_(torch.randn(b.shape, generator=generator))
    return Adapter(LoraSpec(rank, alpha=alpha), layout, flat, torch.float32)


@examples(40)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(-1, 4)), min_size=1, max_size=6),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_each_row_uses_its_own_adapter_only(parts: list[tuple[int, int]], bias: bool, seed: int) -> None:
    target = Target("x", "mlp", 6, 10)
    alphas = {1: 32.0, 2: 32.0, 5: 3.5, 16: 80.0}
    owners = [adapter(rank, target, rank, alpha) for rank, alpha in alphas.items()]
    owners.append(adapter(2, target, 9, alpha=7.0))  # with the layout of another, but not its scale
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(6, 10, bias=bias).requires_grad_(False)
    context = ForwardContext()
    module = MultiLoRALinear("x", "mlp", linear, context)
    context.lora_batch = LoRABatch.of([owners[i] if i >= 0 else None for _, i in parts], [n for n, _ in parts])
    x = torch.randn(sum(n for n, _ in parts), 6, generator=generator).requires_grad_()
    for owner in owners:
        owner.open_gradients()
    y = module(x[None])[0]
    grad = torch.randn(y.shape, generator=generator)
    y.backward(grad)

    x64 = x.detach().double().requires_grad_()
    pairs = [tuple(w.double().requires_grad_() for w in owner.weights["x"]) for owner in owners]
    rows, start = [], 0
    for n, i in parts:
        x_rows = x64[start : start + n]
        base = x_rows @ linear.weight.double().t() + (linear.bias.double() if bias else 0)
        rows.append(
            base
            if i < 0
            else base + owners[i].spec.alpha / owners[i].layout.rank * x_rows @ pairs[i][0].t() @ pairs[i][1].t()
        )
        start += n
    expected = torch.cat(rows)
    expected.backward(grad.double())
    assert x.grad is not None and x64.grad is not None
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-4, atol=1e-3)
    for owner, pair in zip(owners, pairs, strict=True):
        assert owner.gradients is not None
        for gradient, leaf in zip(owner.gradients["x"], pair, strict=True):
            reference = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            torch.testing.assert_close(gradient.double(), reference, rtol=1e-4, atol=1e-3)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_a_slice_of_a_lora_batch_has_the_same_adapters(lengths: list[int], data: st.DataObject) -> None:
    target = Target("x", "mlp", 2, 2)
    owners = [None, adapter(1, target, 0), adapter(2, target, 1)]
    chosen = [owners[data.draw(st.integers(0, 2))] for _ in lengths]
    lora_batch = LoRABatch.of(chosen, lengths)
    start = data.draw(st.integers(0, lora_batch.num_rows - 1))
    stop = data.draw(st.integers(start + 1, lora_batch.num_rows))

    def rows(r: LoRABatch) -> list[Adapter | None]:
        return [s.adapter for s in r.segments for _ in range(s.start, s.stop)]

    assert rows(lora_batch.slice(start, stop)) == rows(lora_batch)[start:stop]


def test_segments_must_cover_the_rows_without_gaps() -> None:
    with pytest.raises(ValueError, match="does not continue at row 2"):
        LoRABatch([Segment(0, 2, None), Segment(3, 4, None)])


def test_a_is_uniform_as_in_peft_and_b_is_zero() -> None:
    layout = Layout.of(64, [Target("x", "attn", 100, 30)])
    a, b = layout.views(initialise_weights(layout, 0, CPU))["x"]
    assert float(a.abs().max()) <= 0.1 and float(a.abs().max()) > 0.099
    assert float(a.std()) == pytest.approx(0.1 / 3**0.5, rel=0.03) and not b.any()


def test_a_seed_determines_every_matrix(qwen: ModelShape) -> None:
    first, second = TorchBackend(qwen, device="cpu"), TorchBackend(qwen, device="cpu")
    first.create_model("a", LoraSpec(4, seed=7))
    second.create_model("noise", LoraSpec(4))
    second.create_model("b", LoraSpec(4, seed=7, train_mlp=False))
    second.create_model("c", LoraSpec(4, seed=8))
    full, part, other = (b._models[n].adapter.weights for b, n in ((first, "a"), (second, "b"), (second, "c")))
    assert all(torch.equal(full[name][0], part[name][0]) for name in part)
    assert not any(torch.equal(full[name][0], other[name][0]) for name in full)
    a = [pair[0] for pair in full.values()]
    assert not torch.equal(a[0], a[1])


def test_without_a_seed_the_model_id_decides(qwen: ModelShape) -> None:
    first, second = TorchBackend(qwen, device="cpu"), TorchBackend(qwen, device="cpu")
    for backend, names in ((first, ("x", "y")), (second, ("y", "x"))):
        for name in names:
            backend.create_model(name, LoraSpec(4))
    flat = [b._models[n].adapter.flat_P for b, n in ((first, "x"), (second, "x"), (first, "y"))]
    assert torch.equal(flat[0], flat[1]) and not torch.equal(flat[0], flat[2])


@pytest.mark.parametrize("arch", ["qwen3", "llama", "gemma2", "gpt_oss"])
def test_the_groups_name_what_they_say(arch: str, tmp_path: Path) -> None:
    base = BaseModel.load(tiny_models.make(tmp_path, arch), device="cpu")

    def names(*flags: bool) -> set[str]:
        return {
            t.name.rpartition(".")[2] for t in layout_for(LoraSpec(1, None, *flags), base.adaptable_targets()).targets
        }

    assert names(True, False, False) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    mlp = {"w1", "w2", "w3"} if arch == "gpt_oss" else {"gate_proj", "up_proj", "down_proj"}
    assert names(False, True, False) == mlp
    assert names(False, False, True) == {"lm_head"}


def test_an_adapter_on_a_tied_unembedding_leaves_the_embeddings_alone(qwen: ModelShape) -> None:
    base = BaseModel.load(qwen, device="cpu")
    layout = layout_for(LoraSpec(4, None, False, False, True), base.adaptable_targets())
    flat = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    owner = Adapter(LoraSpec(4), layout, flat, torch.float32)
    tokens, plan = torch.arange(5), PackedCausal([5])
    hidden = []
    for row_owner in (None, owner):
        lora_batch = LoRABatch.of([row_owner], [5])
        hidden.append(base.hidden(tokens, tokens, plan, lora_batch))
    assert torch.equal(hidden[0], hidden[1])
    assert not torch.equal(base.logits(hidden[0], LoRABatch.of([None], [5])), base.logits(hidden[0], lora_batch))
    assert base.model.get_input_embeddings().weight is base.unembedding.weight


def peft_model(shape: ModelShape, backend: TorchBackend, model_id: str) -> nn.Module:
    """PEFT's own model with the backend's initial weights."""
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(shape.path)
    owner = backend._models[model_id].adapter
    config = peft.LoraConfig(
        r=owner.layout.rank, lora_alpha=owner.spec.alpha, lora_dropout=0.0, task_type="CAUSAL_LM",
        target_modules=[t.name for t in owner.layout.targets],
    )  # fmt: skip
    with warnings.catch_warnings():
        # Tied weights matter to merging only.
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, config)
    for name, (a, b) in owner.weights.items():
        layer = model.base_model.model.get_submodule(name)
        layer.lora_A["default"].weight.data.copy_(a)
        layer.lora_B["default"].weight.data.copy_(b)
    return model


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("clip", "alpha"), [(0.0, 32.0), (0.5, 32.0), (0.5, 5.0)])
def test_twenty_steps_equal_peft_with_torchs_adamw(qwen: ModelShape, clip: float, alpha: float) -> None:
    backend, rng = TorchBackend(qwen, device="cpu"), np.random.default_rng(0)
    spec = LoraSpec(8, seed=3, alpha=alpha)
    backend.create_model("m", spec)
    model = peft_model(qwen, backend, "m")
    params = AdamParams(2e-3, 0.9, 0.95, 1e-8, 0.1, clip)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    layers = {t.name: model.base_model.model.get_submodule(t.name) for t in backend.base.adaptable_targets()}
    for step in range(20):
        data = [sft(rng, n) for n in (12, 30)]
        (result,) = run_to_end(backend.run_passes([Pass("r", "m", tuple(data), "cross_entropy", {}, False)]))
        (metrics,) = backend.optim_step([OptimStep("o", "m", params)])
        assert isinstance(result, PassResult) and isinstance(metrics, dict)
        optimizer.zero_grad()
        total = torch.zeros(())
        for datum in data:
            logits = model(input_ids=torch.from_numpy(datum.tokens_N.astype(np.int64))[None], use_cache=False).logits[0]
            targets, weights = (torch.from_numpy(datum.inputs[k]) for k in ("target_tokens", "weights"))  # type: ignore[arg-type]
            total = total + nn.functional.cross_entropy(logits, targets, reduction="none") @ weights
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(
            [p for p in model.parameters() if p.requires_grad], clip if clip > 0 else float("inf")
        )
        optimizer.step()
        assert result.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert metrics["step"] == step + 1 and metrics["learning_rate"] == 2e-3
        for name, (a, b) in backend._models["m"].adapter.weights.items():
            theirs = layers[name].lora_A["default"].weight, layers[name].lora_B["default"].weight
            for actual, reference in zip((a, b), (w.detach() for w in theirs), strict=True):
                assert float((actual - reference).norm()) < 1e-3 * float(reference.norm()) + 1e-6


def sft(rng: np.random.Generator, length: int) -> Datum:
    return Datum(
        rng.integers(0, tiny_models.VOCAB, length).astype(np.int32),
        {
            "target_tokens": rng.integers(0, tiny_models.VOCAB, length),
            "weights": rng.random(length).astype(np.float32),
        },
    )


def make_trained(seed: int, size: int = 6) -> TrainedModel:
    return TrainedModel(adapter(2, Target("x", "mlp", size, size), seed))


@examples(30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1e-3, 0.1]),
            st.sampled_from([0.0, 0.9]),
            st.sampled_from([0.0, 0.5]),
            st.sampled_from([0.0, 0.3]),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_merged_steps_honour_every_parameter_of_each(requests: list[tuple[float, float, float, float, bool]]) -> None:
    models = [make_trained(i) for i in range(len(requests))]
    references = [nn.Parameter(t.adapter.flat_P.clone()) for t in models]
    optimizers = [torch.optim.AdamW([p]) for p in references]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        params = []
        for t, p, optimizer, (rate, beta1, decay, clip, has_gradient) in zip(
            models, references, optimizers, requests, strict=True
        ):
            gradient = torch.randn(p.shape, generator=generator) if has_gradient else torch.zeros_like(p)
            t.gradient_P = gradient.clone() if has_gradient else None
            p.grad = gradient
            if clip:
                nn.utils.clip_grad_norm_([p], clip)
            optimizer.param_groups[0].update(lr=rate, betas=(beta1, 0.95), eps=1e-8, weight_decay=decay)
            optimizer.step()
            params.append(AdamParams(rate, beta1, 0.95, 1e-8, decay, clip))
        outcomes = prepare_step(list(zip(models, params, strict=True))).apply()
        assert all(isinstance(outcome, dict) for outcome in outcomes)
    for t, p in zip(models, references, strict=True):
        torch.testing.assert_close(t.adapter.flat_P, p.detach(), rtol=1e-5, atol=1e-6)


def test_a_step_without_a_gradient_is_a_step_with_zero() -> None:
    model = make_trained(0)
    before = model.adapter.flat_P.clone()
    (metrics,) = prepare_step([(model, AdamParams(0.1))]).apply()
    assert metrics == {"grad_norm": 0.0, "learning_rate": 0.1, "step": 1.0}
    assert torch.equal(model.adapter.flat_P, before)
    prepare_step([(model, AdamParams(0.1, weight_decay=0.5))]).apply()
    torch.testing.assert_close(model.adapter.flat_P, before * 0.95)


@pytest.mark.parametrize("size", [1e-30, 1e-21, 1e-3, 1.0, 1e15, 1e25])
@pytest.mark.parametrize("length", [7, 4096, 10_001])
def test_the_norm_of_a_gradient_is_float64s_at_every_size(size: float, length: int) -> None:
    gradient_P = torch.randn(length, generator=torch.Generator().manual_seed(0)) * size
    (norm,), (step,) = norms_and_steps([gradient_P], [torch.tensor(3.0)])
    assert norm == pytest.approx(float(gradient_P.double().norm()), rel=1e-6) and step == 3
    gradient_P[-1] = torch.nan
    assert math.isnan(norms_and_steps([gradient_P], [torch.tensor(3.0)])[0][0])


@pytest.mark.parametrize("suits_mkl", [False, True])
def test_a_matrix_with_gaps_is_multiplied_by_its_numbers_alone(
    suits_mkl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "SUITS_MKL", suits_mkl)
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(64, 48, generator=generator)
    a, b = torch.randn(600, 64, generator=generator), wide[:, 16:32]
    torch.testing.assert_close(matmul.matmul(a, b, torch.float32), (a.double() @ b.double()).float())
    torch.testing.assert_close(matmul.matmul(a, wide, torch.float32), (a.double() @ wide.double()).float())
    assert not _suits_onednn(a, b) and _suits_onednn(a, wide) is (HAS_ONEDNN and not suits_mkl)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("rows, inner, columns", [(512, 3072, 512), (768, 2048, 640), (1024, 1600, 576)])
def test_a_product_by_columns_is_the_plain_one(rows: int, inner: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    a, b = (torch.randn(shape, generator=generator).bfloat16() for shape in ((rows, inner), (inner, columns)))
    expected = a.double() @ b.double()
    for matrix in (b, b.t().contiguous().t()):
        error = (matmul._matmul_by_columns(a, matrix).double() - expected).norm() / expected.norm()
        assert error < 0.004  # the rounding of bfloat16


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (AdamParams(float("inf")), "learning_rate is inf"),
        (AdamParams(-1.0), "learning_rate is -1.0; it must be finite and at least 0"),
        (AdamParams(beta1=1.0), "beta1 is 1.0; it must be at least 0 and below 1"),
        (AdamParams(beta2=float("nan")), "beta2 is nan"),
        (AdamParams(eps=0.0), "eps is 0.0; it must be finite and above 0"),
        (AdamParams(weight_decay=-0.1), "weight_decay is -0.1"),
        (AdamParams(grad_clip_norm=float("nan")), "grad_clip_norm is nan"),
    ],
)
def test_parameters_that_mean_nothing_are_refused_and_cost_nothing(
    qwen: ModelShape, params: AdamParams, message: str
) -> None:
    backend = TorchBackend(qwen, device="cpu")
    backend.create_model("m", LoraSpec(2))
    backend.create_model("n", LoraSpec(2))
    results = backend.optim_step(
        [OptimStep("a", "m", params), OptimStep("b", "n", AdamParams()), OptimStep("c", "x", AdamParams())]
    )
    assert isinstance(results[0], UserError) and message in str(results[0])
    assert isinstance(results[1], dict) and results[1]["step"] == 1
    assert isinstance(results[2], UserError) and "'x' is not loaded" in str(results[2])
    assert float(backend._models["m"].step) == 0


def test_weights_of_the_base_never_ask_for_gradients(qwen: ModelShape) -> None:
    base = BaseModel.load(qwen, device="cpu")
    assert not any(p.requires_grad for p in base.model.parameters()) and not base.model.training
    parameters: list[Tensor] = list(base.model.parameters())
    assert {p.dtype for p in parameters} == {torch.float32}
    assert base.eos_token_ids == {tiny_models.EOS}


@pytest.mark.parametrize("rows", [1, 5])
def test_joined_matrices_of_some_outputs_leave_the_others(rows: int) -> None:
    linear, context = nn.Linear(6, 10).requires_grad_(False), ForwardContext()
    module = MultiLoRALinear("m.x", "mlp", linear, context)
    module.divide([("a", 3), ("b", 4)])
    layout = Layout.of(2, module.targets)
    flat_P = torch.randn(layout.numel, generator=torch.Generator().manual_seed(rows))
    joined_adapter = Adapter(LoraSpec(2, alpha=3.0), layout, flat_P, torch.float32)
    x_TI = torch.randn(rows + 2, 6, generator=torch.Generator().manual_seed(1))
    context.lora_batch = LoRABatch.of([None, joined_adapter], [2, rows], repeats=True)
    with torch.no_grad():
        found_TO = module(x_TI)
    expected_TO = linear(x_TI).double()
    for columns, name in ((slice(0, 3), "m.a"), (slice(3, 7), "m.b")):
        a_rI, b_Or = (matrix.double() for matrix in joined_adapter.weights[name])
        expected_TO[2:, columns] += joined_adapter.scale * (x_TI[2:].double() @ a_rI.t() @ b_Or.t())
    torch.testing.assert_close(found_TO.double(), expected_TO, rtol=1e-5, atol=1e-5)
    has_stack = [module.delta in run.stacks for run in context.lora_batch.groups_by_delta[module.delta]]
    assert has_stack == [HAS_ONEDNN]
