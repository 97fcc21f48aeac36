"""The torch backend end to end, against a float64 oracle that shares no code with it (float64_reference.py)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support import tiny_models
from support.float64_reference import Reference, loss
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend, lora, trainer
from tinsmith.backends.torch.attention import PackedCausal
from tinsmith.backends.torch.lora import MultiLoRALinear
from tinsmith.backends.torch.recompute import RECOMPUTE_SHARE, bytes_with
from tinsmith.errors import NonFiniteGradientError, SettingsError, UserError
from tinsmith.losses import LOSSES, dense
from tinsmith.types import AdamParams, Datum, LoraSpec, ModelShape, OptimStep, Pass, PassResult, SparseRows

torch.set_num_threads(1)

OUR_LOSSES = [name for name in LOSSES if name != "custom"]  # which test_custom_loss.py tests
RL_LOSSES = [name for name in OUR_LOSSES if name != "cross_entropy"]
WIDE_CLIPS = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4}
CONFIGS = {
    "ppo": WIDE_CLIPS,
    "cispo": WIDE_CLIPS,
    "gspo": WIDE_CLIPS,
    "dro": {"beta": 0.3},
    "stable_reinforce": {"kl_coeff": 0.2},
}
SPECS = [
    LoraSpec(1),
    LoraSpec(3, seed=1, train_mlp=False),
    LoraSpec(8, seed=2, train_attn=False, train_mlp=False),
    LoraSpec(16, seed=3, train_unembed=False),
    LoraSpec(5, seed=4, train_attn=False, train_unembed=False),
    LoraSpec(32, seed=5),
    LoraSpec(2, seed=6, train_attn=False),
    LoraSpec(7, seed=7, train_mlp=False, train_unembed=False),
]


@pytest.fixture(scope="module", params=["qwen3", "llama", "gemma2"])
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("qwen"), "qwen3")


def sft(rng: np.random.Generator, length: int, num_targets: int | None = None) -> Datum:
    size = length if num_targets is None else (length, num_targets)
    weights = rng.normal(size=size).astype(np.float32) * (rng.random(size) < 0.7)
    return Datum(
        rng.integers(0, tiny_models.VOCAB, length).astype(np.int32),
        {"target_tokens": rng.integers(0, tiny_models.VOCAB, size), "weights": weights},
    )


def rl(rng: np.random.Generator, length: int, model: Reference, **extra: np.ndarray) -> Datum:
    """Old logprobs near the base model's, so that some ratios are inside and some outside of the clip range."""
    tokens = rng.integers(0, tiny_models.VOCAB, length).astype(np.int32)
    targets = rng.integers(0, tiny_models.VOCAB, length)
    base = model.logprobs(tokens, {})[torch.arange(length), torch.from_numpy(targets)].numpy()
    advantages = rng.normal(size=length).astype(np.float32)
    advantages[: length // 3] = 0
    logprobs = (base + rng.normal(size=length) * 0.4).astype(np.float32)
    return Datum(tokens, {"target_tokens": targets, "logprobs": logprobs, "advantages": advantages, **extra})


def run(backend: TorchBackend, *passes: Pass) -> list[PassResult]:
    results = run_to_end(backend.run_passes(passes))
    assert all(isinstance(result, PassResult) for result in results), results
    return [result for result in results if isinstance(result, PassResult)]


def fb(model_id: str, data: list[Datum], loss_fn: str = "cross_entropy", *, forward_only: bool = False) -> Pass:
    return Pass(f"r-{model_id}", model_id, tuple(data), loss_fn, CONFIGS.get(loss_fn, {}), forward_only)


def warm(backend: TorchBackend, model_id: str, seed: int = 0) -> None:
    """Give B values, so that A has gradients too."""
    trained = backend._models[model_id]
    generator = torch.Generator().manual_seed(seed)
    for _, b in trained.adapter.weights.values():
        b.copy_(torch.randn(b.shape, generator=generator) * 0.02)


def gradient(backend: TorchBackend, model_id: str) -> dict[str, tuple[Tensor, Tensor]]:
    trained = backend._models[model_id]
    assert trained.gradient_P is not None
    return trained.adapter.layout.views(trained.gradient_P)


def weights(backend: TorchBackend, model_id: str) -> Tensor:
    return backend._models[model_id].adapter.flat_P


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-12))


def check_divergence(result: PassResult, loss_fn: str, inputs: list[dict[str, np.ndarray]], lp: list[Tensor]) -> None:
    names = [name for name in result.metrics if "sample_train" in name]
    assert bool(names) == LOSSES[loss_fn].is_policy
    if not names:
        return
    differences: list[float] = []
    for arrays, lp_N in zip(inputs, (array.detach().numpy() for array in lp), strict=True):
        takes_rollout = "rollout_logprobs" in arrays and "rollout_logprobs" in LOSSES[loss_fn].optional
        sampling_N = arrays["rollout_logprobs" if takes_rollout else "logprobs"]
        differences += [float(lp_N[t]) - float(sampling_N[t]) for t in np.flatnonzero(arrays["advantages"])]
    d = np.array(differences)
    expected = {
        "sample_train_tokens:sum": len(d),
        "sample_train_nonfinite:sum": 0,
        "kl_sample_train_v1:sum": -d.sum(),
        "kl_sample_train_v2:sum": (d**2 / 2).sum(),
        "kl_sample_train_v3:sum": (np.exp(d) - 1 - d).sum(),
        "sample_train_ratio:sum": np.exp(d).sum(),
        "sample_train_ratio_squared:sum": np.exp(2 * d).sum(),
        "sample_train_ratio:max": np.exp(d).max(),
    }
    assert {name: result.metrics[name] for name in names} == pytest.approx(expected, rel=1e-3, abs=1e-3)


def check_against_reference(
    backend: TorchBackend, oracle: Reference, model_id: str, data: list[Datum], loss_fn: str
) -> None:
    (result,) = run(backend, fb(model_id, data, loss_fn))
    leaves = oracle.leaves(backend._models[model_id].adapter.weights)
    total = torch.zeros((), dtype=torch.float64)
    config = {**LOSSES[loss_fn].config, **CONFIGS.get(loss_fn, {})}
    all_inputs: list[dict[str, np.ndarray]] = []
    all_lp: list[Tensor] = []
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        inputs = {name: dense(array) for name, array in datum.inputs.items()}
        if loss_fn == "cross_entropy":
            inputs.setdefault("weights", np.ones(inputs["target_tokens"].shape, np.float32))
        all_inputs.append(inputs)
        targets = torch.from_numpy(inputs["target_tokens"]).reshape(len(datum.tokens_N), -1)
        lp = oracle.logprobs(datum.tokens_N, leaves).gather(1, targets).reshape(inputs["target_tokens"].shape)
        assert logprobs.dtype == np.float32 and logprobs.shape == inputs["target_tokens"].shape
        assert np.abs(logprobs - lp.detach().numpy()).max() < 1e-4
        all_lp.append(lp)
        total = total + loss(loss_fn, lp, inputs, config)
    assert result.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4, abs=1e-4)
    assert all(key.count(":") == 1 for key in result.metrics)
    check_divergence(result, loss_fn, all_inputs, all_lp)
    assert len(result.elementwise_loss) == (len(data) if loss_fn == "cross_entropy" else 0)
    for losses_N, lp, inputs in zip(result.elementwise_loss, all_lp, all_inputs, strict=bool(result.elementwise_loss)):
        assert losses_N.dtype == np.float32 and losses_N.shape == lp.shape
        assert np.abs(losses_N + inputs["weights"] * lp.detach().numpy()).max() < 1e-4
        assert not losses_N[inputs["weights"] == 0].any()
    total.backward()
    for name, pair in gradient(backend, model_id).items():
        for gradient_part, leaf in zip(pair, leaves[name], strict=True):
            assert leaf.grad is not None and leaf.grad.norm() > 0
            assert relative(gradient_part, leaf.grad) < 1e-4, name


@pytest.mark.matrix(10)
@pytest.mark.parametrize("loss_fn", OUR_LOSSES)
def test_values_and_gradients_equal_float64(shape: ModelShape, loss_fn: str) -> None:
    backend, oracle, rng = TorchBackend(shape, device="cpu"), Reference(shape.path), np.random.default_rng(0)
    backend.create_model("m", LoraSpec(4, seed=9))
    warm(backend, "m")
    data = [sft(rng, n) if loss_fn == "cross_entropy" else rl(rng, n, oracle) for n in (9, 1, 17)]
    check_against_reference(backend, oracle, "m", data, loss_fn)


def test_several_targets_per_position_equal_float64(qwen: ModelShape) -> None:
    backend, oracle, rng = (
        TorchBackend(qwen, device="cpu", logits_chunk=4),
        Reference(qwen.path),
        np.random.default_rng(1),
    )
    backend.create_model("m", LoraSpec(4))
    warm(backend, "m")
    check_against_reference(backend, oracle, "m", [sft(rng, 9, 3), sft(rng, 6), sft(rng, 5, 1)], "cross_entropy")


def test_sparse_targets_mean_the_same_as_dense_ones(qwen: ModelShape) -> None:
    backend, oracle, rng = TorchBackend(qwen, device="cpu"), Reference(qwen.path), np.random.default_rng(2)
    backend.create_model("m", LoraSpec(4))
    warm(backend, "m")
    datum = sft(rng, 8, 4)
    inputs = dict(datum.inputs)
    targets, weight = inputs["target_tokens"], inputs["weights"]
    assert isinstance(targets, np.ndarray) and isinstance(weight, np.ndarray)
    targets[rng.random(targets.shape) < 0.6] = 0
    weight[rng.random(weight.shape) < 0.6] = 0
    sparse = Datum(datum.tokens_N, {"target_tokens": csr(targets), "weights": csr(weight)})
    check_against_reference(backend, oracle, "m", [sparse], "cross_entropy")
    half = Datum(datum.tokens_N, {"target_tokens": targets, "weights": csr(weight)})
    (first, second) = (run(backend, fb("m", [d], forward_only=True))[0] for d in (sparse, half))
    assert np.array_equal(first.logprobs[0], second.logprobs[0])
    assert first.metrics == second.metrics


@pytest.mark.parametrize("form", ["one", "several", "sparse"])
def test_targets_without_weights_count_once_each(qwen: ModelShape, form: str) -> None:
    backend, oracle, rng = TorchBackend(qwen, device="cpu"), Reference(qwen.path), np.random.default_rng(7)
    backend.create_model("m", LoraSpec(4))
    warm(backend, "m")
    tokens = rng.integers(0, tiny_models.VOCAB, 8).astype(np.int32)
    targets = rng.integers(0, tiny_models.VOCAB, 8 if form == "one" else (8, 3))
    if form == "sparse":
        targets[rng.random(targets.shape) < 0.5] = 0
    inputs = {"target_tokens": csr(targets) if form == "sparse" else targets}
    check_against_reference(backend, oracle, "m", [Datum(tokens, inputs), sft(rng, 5)], "cross_entropy")


def csr(array: np.ndarray) -> SparseRows:
    rows, cols = np.nonzero(array)
    crow = np.searchsorted(rows, np.arange(len(array) + 1))
    return SparseRows(array[rows, cols], crow.astype(np.int64), cols.astype(np.int64), array.shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
def test_clips_per_token_override_the_configuration(qwen: ModelShape, loss_fn: str) -> None:
    backend, oracle, rng = TorchBackend(qwen, device="cpu"), Reference(qwen.path), np.random.default_rng(3)
    backend.create_model("m", LoraSpec(4))
    warm(backend, "m")
    # gspo's ratio is a mean, so nearer to 1 than a token's.
    spans = ((0.9, 1.0), (1.0, 1.01)) if loss_fn == "gspo" else ((0.5, 0.99), (1.01, 1.6))
    low, high = (rng.uniform(*span, 12).astype(np.float32) for span in spans)
    data = [
        rl(rng, 12, oracle, clip_low_threshold=low, clip_high_threshold=high),
        rl(rng, 12, oracle, clip_high_threshold=high),
    ]
    check_against_reference(backend, oracle, "m", data, loss_fn)
    before = gradient(backend, "m")["lm_head"][1].clone()
    plain = [Datum(d.tokens_N, {k: v for k, v in d.inputs.items() if "clip" not in k}) for d in data]
    run(backend, fb("m", plain, loss_fn))
    assert not torch.allclose(gradient(backend, "m")["lm_head"][1], 2 * before)


@pytest.mark.parametrize(
    ("loss_fn", "config", "rollout"),
    [
        ("ppo", {"dual_clip_threshold": 1.3}, False),
        ("ppo", {"dual_clip_threshold": 1.3, "rollout_ratio_max": 1.2}, True),
        *((name, {"rollout_ratio_max": 1.2}, True) for name in ("importance_sampling", "ppo", "cispo", "gspo")),
    ],
)
def test_dual_clip_and_rollout_logprobs_equal_the_reference(
    qwen: ModelShape, monkeypatch: pytest.MonkeyPatch, loss_fn: str, config: dict[str, float], rollout: bool
) -> None:
    backend, oracle, rng = TorchBackend(qwen, device="cpu"), Reference(qwen.path), np.random.default_rng(7)
    backend.create_model("m", LoraSpec(4))
    warm(backend, "m")
    plain = [rl(rng, length, oracle) for length in (40, 25)]
    data = plain
    if rollout:
        noise = [(rng.normal(size=len(datum.tokens_N)) * 0.4).astype(np.float32) for datum in plain]
        data = [
            Datum(datum.tokens_N, {**datum.inputs, "rollout_logprobs": dense(datum.inputs["logprobs"]) + noise_N})
            for datum, noise_N in zip(plain, noise, strict=True)
        ]
    (without,) = run(backend, fb("m", plain, loss_fn, forward_only=True))
    monkeypatch.setitem(CONFIGS, loss_fn, CONFIGS.get(loss_fn, {}) | config)
    check_against_reference(backend, oracle, "m", data, loss_fn)
    (result,) = run(backend, fb("m", data, loss_fn, forward_only=True))
    assert result.metrics["loss:sum"] != pytest.approx(without.metrics["loss:sum"], rel=1e-3)


def test_gspo_counts_only_the_masked_positions_in_its_ratio(qwen: ModelShape) -> None:
    backend, oracle, rng = (
        TorchBackend(qwen, device="cpu", logits_chunk=5),
        Reference(qwen.path),
        np.random.default_rng(4),
    )
    backend.create_model("m", LoraSpec(4))
    warm(backend, "m")
    masks = [(rng.random(n) < 0.5).astype(np.float32) for n in (11, 14)]
    data = [rl(rng, len(mask), oracle, sequence_ratio_mask=mask) for mask in masks]
    check_against_reference(backend, oracle, "m", data, "gspo")


def make_passes(rng: np.random.Generator, oracle: Reference) -> list[Pass]:
    """Passes of eight tenants, with every loss and ragged lengths."""
    passes = []
    for i, loss_fn in enumerate([*OUR_LOSSES, "cross_entropy"]):
        lengths = rng.integers(1, 40, 3).tolist()
        data = [
            sft(rng, n, 3 if i == 7 else None) if loss_fn == "cross_entropy" else rl(rng, n, oracle) for n in lengths
        ]
        passes.append(fb(f"m{i}", data, loss_fn))
    return passes


def train(backend: TorchBackend, groups: list[list[Pass]], steps: int) -> list[dict[str, np.ndarray]]:
    """Run each group as one packed step; the logprobs of every step by model."""
    logprobs_by_step = []
    for _ in range(steps):
        logprobs = {}
        for group in groups:
            for pass_, result in zip(group, run(backend, *group), strict=True):
                logprobs[pass_.model_id] = np.concatenate([array.reshape(-1) for array in result.logprobs])
        logprobs_by_step.append(logprobs)
        ids = [pass_.model_id for group in groups for pass_ in group]
        backend.optim_step([OptimStep("o", model_id, AdamParams(1e-3, eps=1e-8)) for model_id in ids])
    return logprobs_by_step


@pytest.mark.parametrize("max_tokens", [64, 8192])
def test_eight_tenants_packed_equal_each_alone(qwen: ModelShape, max_tokens: int) -> None:
    oracle = Reference(qwen.path)
    passes = make_passes(np.random.default_rng(5), oracle)
    results = []
    for groups in ([passes], [[pass_] for pass_ in passes]):
        backend = TorchBackend(qwen, device="cpu", max_tokens_per_microbatch=max_tokens, logits_chunk=32)
        for i, spec in enumerate(SPECS):
            backend.create_model(f"m{i}", spec)
        results.append((backend, train(backend, groups, 3)))
    (packed, packed_logprobs), (separate, separate_logprobs) = results
    worst = max(
        np.abs(a[key] - b[key]).max() for a, b in zip(packed_logprobs, separate_logprobs, strict=True) for key in a
    )
    assert worst < 5e-5
    for i in range(len(SPECS)):
        assert relative(weights(packed, f"m{i}"), weights(separate, f"m{i}").double()) < 1e-5


def test_tenants_of_one_loss_keep_their_own_configurations(qwen: ModelShape) -> None:
    """Neighbours share a call of their loss only if their configurations are equal."""
    oracle, rng, backend = Reference(qwen.path), np.random.default_rng(9), TorchBackend(qwen, device="cpu")
    betas, gradients = (0.05, 0.05, 0.7), {}
    passes = [
        Pass("r", f"m{i}", tuple(rl(rng, 8, oracle) for _ in range(2)), "dro", {"beta": beta}, False)
        for i, beta in enumerate(betas)
    ]
    for groups in ([passes], [[pass_] for pass_ in passes]):
        for pass_ in passes:
            backend.create_model(pass_.model_id, LoraSpec(4, seed=1))
            warm(backend, pass_.model_id)
        for group in groups:
            run(backend, *group)
        for pass_ in passes:
            gradient_P = backend._models[pass_.model_id].gradient_P
            assert gradient_P is not None
            gradients.setdefault(pass_.model_id, []).append(gradient_P.clone())
            backend.unload_model(pass_.model_id)
    for packed_P, alone_P in gradients.values():
        assert relative(packed_P, alone_P.double()) < 1e-4


def test_a_kept_gradient_does_not_retain_other_models_memory(qwen: ModelShape) -> None:
    rng, backend = np.random.default_rng(8), TorchBackend(qwen, device="cpu")
    for name in ("stays", "steps", "later"):
        backend.create_model(name, LoraSpec(4, seed=0))
        warm(backend, name)
    data = {name: [sft(rng, 9)] for name in ("stays", "steps", "later")}
    run(backend, fb("stays", data["stays"]), fb("steps", data["steps"]))
    shared = [backend._models[name].gradient_P for name in ("stays", "steps")]
    assert shared[0] is not None and shared[1] is not None
    assert shared[0].untyped_storage().data_ptr() != shared[1].untyped_storage().data_ptr()
    before_P = shared[0].clone()
    backend.optim_step([OptimStep("o", "steps", AdamParams(1e-3))])
    run(backend, fb("later", data["later"]))
    remaining_P = backend._models["stays"].gradient_P
    assert remaining_P is not None and torch.equal(remaining_P, before_P)
    assert remaining_P.untyped_storage().nbytes() == remaining_P.nbytes
    run(backend, fb("stays", data["stays"]))
    summed_P = backend._models["stays"].gradient_P
    assert summed_P is not None and relative(summed_P, 2 * before_P.double()) < 1e-5


def test_a_batch_split_into_chunks_accumulates_to_the_whole(qwen: ModelShape) -> None:
    rng = np.random.default_rng(6)
    data = [sft(rng, n) for n in rng.integers(1, 50, 9)]
    backend = TorchBackend(qwen, device="cpu")
    for name in ("whole", "split", "packed"):
        backend.create_model(name, LoraSpec(4, seed=0))
        warm(backend, name)
    (unsplit_result,) = run(backend, fb("whole", data))
    split = [run(backend, fb("split", data[i : i + 2]))[0] for i in range(0, 9, 2)]
    run(backend, *(fb("packed", data[i : i + 2]) for i in range(0, 9, 2)))
    assert unsplit_result.metrics["loss:sum"] == pytest.approx(sum(r.metrics["loss:sum"] for r in split), rel=1e-6)
    expected = backend._models["whole"].gradient_P
    assert expected is not None
    for name in ("split", "packed"):
        accumulated_P = backend._models[name].gradient_P
        assert accumulated_P is not None and relative(accumulated_P, expected.double()) < 1e-5


def test_a_tenant_that_is_not_finite_does_not_reach_its_neighbours(shape: ModelShape) -> None:
    rng = np.random.default_rng(7)
    backend = TorchBackend(shape, device="cpu")
    lengths = [12, 12, 5, 12, 30, 5]
    passes = []
    for i in range(3):
        backend.create_model(f"m{i}", LoraSpec(4, seed=i))
        warm(backend, f"m{i}", i)
        passes.append(fb(f"m{i}", [sft(rng, n) for n in lengths]))
    healthy = run(backend, *passes)
    expected = [gradient(backend, f"m{i}") for i in (0, 2)]
    for i in range(3):
        backend._models[f"m{i}"].gradient_P = None
    poison = weights(backend, "m1")
    poison[::7] = math.inf
    poison[::11] = math.nan
    sick = run(backend, *passes)
    assert not np.isfinite(sick[1].logprobs[0]).any()
    for i in (0, 2):
        for a, b in zip(healthy[i].logprobs, sick[i].logprobs, strict=True):
            assert np.array_equal(a, b)
    for i, pairs in zip((0, 2), expected, strict=True):
        for name, pair in gradient(backend, f"m{i}").items():
            assert all(torch.equal(a, b) for a, b in zip(pair, pairs[name], strict=True))
    before = weights(backend, "m0").clone()
    results = backend.optim_step([OptimStep("o", f"m{i}", AdamParams(1e-2)) for i in range(3)])
    assert isinstance(results[1], NonFiniteGradientError)
    assert isinstance(results[0], dict) and not torch.equal(weights(backend, "m0"), before)


def test_a_gradient_that_is_not_finite_is_dropped_and_changes_nothing(qwen: ModelShape) -> None:
    rng = np.random.default_rng(8)
    backend = TorchBackend(qwen, device="cpu")
    backend.create_model("m", LoraSpec(4))
    good = fb("m", [sft(rng, 10)])
    run(backend, good)
    backend.optim_step([OptimStep("o", "m", AdamParams())])
    trained = backend._models["m"]
    assert trained.moments is not None
    before = [trained.adapter.flat_P.clone(), *(moment_P.clone() for moment_P in trained.moments)]
    overflow = rl(rng, 6, Reference(qwen.path))
    overflow.inputs["logprobs"][:] = -200.0  # type: ignore[index]
    (result,) = run(backend, fb("m", [overflow], "importance_sampling"))
    assert np.isfinite(result.logprobs[0]).all()
    (outcome,) = backend.optim_step([OptimStep("o", "m", AdamParams())])
    assert isinstance(outcome, NonFiniteGradientError)
    after = [trained.adapter.flat_P, *trained.moments]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) and float(trained.step) == 1
    run(backend, good)
    (metrics,) = backend.optim_step([OptimStep("o", "m", AdamParams())])
    assert isinstance(metrics, dict) and metrics["step"] == 2


def test_tokens_of_zero_advantage_cannot_overflow(qwen: ModelShape) -> None:
    rng, oracle = np.random.default_rng(9), Reference(qwen.path)
    backend = TorchBackend(qwen, device="cpu")
    for loss_fn in RL_LOSSES:
        backend.create_model(loss_fn, LoraSpec(2, seed=0))
        datum = rl(rng, 9, oracle)
        datum.inputs["logprobs"][:3] = -1e30  # type: ignore[index]
        mask = np.array([0, 0, 0, 1, 1, 1, 1, 1, 1], np.float32)
        datum = Datum(datum.tokens_N, {**datum.inputs, "sequence_ratio_mask": mask})
        (result,) = run(backend, fb(loss_fn, [datum], loss_fn))
        assert all(math.isfinite(value) for value in result.metrics.values()), result.metrics
        assert np.isfinite(result.logprobs[0]).all()
        gradient_P = backend._models[loss_fn].gradient_P
        assert gradient_P is not None and torch.isfinite(gradient_P).all()


def test_a_forward_has_the_same_logprobs_and_moves_nothing(shape: ModelShape) -> None:
    rng, oracle = np.random.default_rng(10), Reference(shape.path)
    backend = TorchBackend(shape, device="cpu")
    backend.create_model("m", LoraSpec(4))
    warm(backend, "m")
    before = weights(backend, "m").clone()
    for loss_fn in OUR_LOSSES:
        data = [sft(rng, 12) if loss_fn == "cross_entropy" else rl(rng, 12, oracle)]
        (forward,) = run(backend, fb("m", data, loss_fn, forward_only=True))
        assert backend._models["m"].gradient_P is None
        (backward_too,) = run(backend, fb("m", data, loss_fn))
        assert np.abs(forward.logprobs[0] - backward_too.logprobs[0]).max() < 1e-5
        assert forward.metrics == pytest.approx(backward_too.metrics, rel=1e-4, abs=1e-6)
        backend._models["m"].gradient_P = None
    assert torch.equal(weights(backend, "m"), before)


def test_forward_only_data_packed_with_training_data_add_no_gradient(qwen: ModelShape) -> None:
    rng = np.random.default_rng(11)
    backend = TorchBackend(qwen, device="cpu")
    for name in ("a", "b"):
        backend.create_model(name, LoraSpec(4, seed=0))
        warm(backend, name)
    data, other = [sft(rng, 12)], [sft(rng, 20)]
    run(backend, fb("a", data), fb("a", other, forward_only=True), fb("b", data, forward_only=True))
    run(backend, fb("b", data))
    assert torch.equal(*(g for n in "ab" if (g := backend._models[n].gradient_P) is not None))


def test_logits_never_exist_for_more_rows_than_a_chunk(qwen: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(12)
    backend = TorchBackend(qwen, device="cpu", logits_chunk=16)
    backend.create_model("m", LoraSpec(4))
    rows: list[int] = []
    forward_rows, forward = MultiLoRALinear.forward_rows, MultiLoRALinear.forward

    def spy(self: MultiLoRALinear, x: Tensor, *args: object) -> tuple[Tensor, list[Tensor]]:
        if self.group == "unembed":
            rows.append(len(x))
        return forward_rows(self, x, *args)  # type: ignore[arg-type]

    def never(self: MultiLoRALinear, x: Tensor) -> Tensor:
        assert self.group != "unembed"
        return forward(self, x)

    monkeypatch.setattr(MultiLoRALinear, "forward_rows", spy)
    monkeypatch.setattr(MultiLoRALinear, "forward", never)
    run(backend, fb("m", [sft(rng, 100), sft(rng, 33)]), fb("m", [sft(rng, 50)], forward_only=True))
    assert max(rows) == 16 and sum(rows) == 183


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_logits_in_pieces_give_the_results_of_a_whole_chunk(qwen: ModelShape, dtype: str, bound: float) -> None:
    passes = make_passes(np.random.default_rng(14), Reference(qwen.path))
    arrays_by_run = []
    for rows in ((64, 64), (64, 5)):
        backend = TorchBackend(qwen, device="cpu", dtype=dtype)
        head = backend._trainer._head
        head._chunk_rows, head._subchunk_rows = rows
        for i, spec in enumerate(SPECS):
            backend.create_model(f"m{i}", spec)
            warm(backend, f"m{i}")
        results = run(backend, *passes)
        logprobs = np.concatenate([array.ravel() for result in results for array in result.logprobs])
        arrays_by_run.append(
            [torch.from_numpy(logprobs), *(trained.gradient_P for trained in backend._models.values())]
        )
    for in_one, in_pieces in zip(*arrays_by_run, strict=True):
        assert in_one.norm() > 0 and (in_one - in_pieces).norm() <= bound * in_one.norm()


def test_an_exception_in_the_middle_leaves_no_gradient(qwen: ModelShape) -> None:
    rng = np.random.default_rng(13)
    backend = TorchBackend(qwen, device="cpu", max_tokens_per_microbatch=16)
    backend.create_model("m", LoraSpec(4))
    run(backend, fb("m", [sft(rng, 10)]))
    gradient_P = backend._models["m"].gradient_P
    assert gradient_P is not None
    before = gradient_P.clone()

    def fail() -> None:
        raise RuntimeError("decode failed")

    with pytest.raises(RuntimeError, match="decode failed"):
        run_to_end(backend.run_passes([fb("m", [sft(rng, 16), sft(rng, 16)])]), fail)
    assert torch.equal(gradient_P, before) and backend._models["m"].adapter.gradients is None


def test_between_is_called_between_micro_batches(qwen: ModelShape) -> None:
    rng, calls = np.random.default_rng(14), []
    backend = TorchBackend(qwen, device="cpu", max_tokens_per_microbatch=16)
    backend.create_model("m", LoraSpec(4))
    run_to_end(backend.run_passes([fb("m", [sft(rng, 16) for _ in range(4)])]), lambda: calls.append(1))
    assert len(calls) == 3


def test_a_bad_pass_fails_alone(qwen: ModelShape) -> None:
    rng = np.random.default_rng(15)
    backend = TorchBackend(qwen, device="cpu")
    backend.create_model("m", LoraSpec(4))
    bad = Datum(np.array([5, 300], np.int32), dict(sft(rng, 2).inputs))
    results = run_to_end(backend.run_passes([fb("m", [sft(rng, 5)]), fb("m", [bad]), fb("nobody", [sft(rng, 5)])]))
    assert isinstance(results[0], PassResult)
    assert isinstance(results[1], UserError) and "300" in str(results[1])
    assert isinstance(results[2], UserError) and "nobody" in str(results[2])


@pytest.mark.parametrize("rank", [0, -1, 257])
def test_a_rank_out_of_range_is_refused(qwen: ModelShape, rank: int) -> None:
    backend = TorchBackend(qwen, device="cpu")
    with pytest.raises(UserError, match=rf"rank is {rank}; it must be from 1 to 256"):
        backend.create_model("m", LoraSpec(rank))
    assert not backend.has_model("m")


def test_an_adapter_must_train_something(qwen: ModelShape) -> None:
    backend = TorchBackend(qwen, device="cpu")
    with pytest.raises(UserError, match="trains nothing"):
        backend.create_model("m", LoraSpec(4, None, False, False, False))


def test_bad_options_are_refused(qwen: ModelShape) -> None:
    for options in ({"logits_chunk": "many"}, {"max_tokens_per_microbatch": "0"}, {"dtype": "int8"}):
        with pytest.raises(SettingsError):
            TorchBackend(qwen, device="cpu", **options)


def test_the_bfloat16_base_stays_near_float32(qwen: ModelShape) -> None:
    rng = np.random.default_rng(16)
    data = [sft(rng, n) for n in (20, 9)]
    gradients, values = [], []
    for dtype in ("float32", "bfloat16"):
        backend = TorchBackend(qwen, device="cpu", dtype=dtype)
        backend.create_model("m", LoraSpec(4, seed=0))
        warm(backend, "m")
        backend._models["m"].adapter.refresh()
        (result,) = run(backend, fb("m", data))
        gradient_P = backend._models["m"].gradient_P
        assert gradient_P is not None and gradient_P.dtype == torch.float32
        gradients.append(gradient_P)
        values.append(result.metrics["loss:sum"])
    assert values[1] == pytest.approx(values[0], rel=0.05)
    assert relative(gradients[1], gradients[0].double()) < 0.1


def test_packed_rows_equal_transformers_own_logits(shape: ModelShape) -> None:
    rng, oracle = np.random.default_rng(17), Reference(shape.path)
    backend = TorchBackend(shape, device="cpu")
    backend.create_model("fresh", LoraSpec(4))
    data = [sft(rng, n) for n in (31, 2, 31, 8)]
    (result,) = run(backend, fb("fresh", data, forward_only=True))
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        inputs = torch.from_numpy(datum.tokens_N.astype(np.int64))[None]
        logits = oracle.model(input_ids=inputs, use_cache=False).logits[0]
        expected = torch.log_softmax(logits, -1).gather(
            1, torch.from_numpy(dense(datum.inputs["target_tokens"]))[:, None]
        )
        assert np.abs(logprobs - expected[:, 0].numpy()).max() < 1e-4


def test_a_model_that_mixes_rows_is_refused(tmp_path: Path) -> None:
    from transformers import RwkvConfig, RwkvForCausalLM

    RwkvForCausalLM(RwkvConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2)).save_pretrained(tmp_path)
    tiny_models.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(SettingsError):
        TorchBackend(ModelShape("rwkv", str(tmp_path), 300, 128, "RwkvForCausalLM"), device="cpu")


def test_a_gpu_that_is_not_there_is_refused_by_name(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=r"device 'cuda:1' is unavailable.* use 'auto' or 'cpu'"):
        TorchBackend(shape, device="cuda:1")


def test_recomputed_activations_give_the_same_gradients(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, calls = np.random.default_rng(18), []
    attend = PackedCausal.attend

    def spy(self: PackedCausal, layer: int, *tensors: Tensor, **options: object) -> Tensor:
        calls.append(layer)
        return attend(self, layer, *tensors, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(PackedCausal, "attend", spy)
    data = [[sft(rng, n) for n in (20, 9)] for _ in range(2)]
    gradients = []
    for mode in ("off", "on", "auto"):
        backend = TorchBackend(shape, device="cpu", recompute=mode)
        for name in ("a", "b"):
            backend.create_model(name, LoraSpec(4, seed=0))
            warm(backend, name, ord(name))
        calls.clear()
        run(backend, fb("a", data[0]), fb("b", data[1]))
        assert len(calls) == (4 if mode == "on" else 2)
        gradients.append([g for n in "ab" if (g := backend._models[n].gradient_P) is not None])
    for other in gradients[1:]:
        assert all(torch.equal(x, y) for x, y in zip(gradients[0], other, strict=True))
    with pytest.raises(SettingsError, match="recompute is 'maybe'"):
        TorchBackend(shape, device="cpu", recompute="maybe")


def test_as_many_layers_are_recomputed_as_must_be_with_the_gradients_of_float64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = tiny_models.make(tmp_path, "qwen3", num_hidden_layers=4)
    calls, attend, free = [0], PackedCausal.attend, [0.0]

    def spy(self: PackedCausal, layer: int, *tensors: Tensor, **options: object) -> Tensor:
        calls[0] += 1
        return attend(self, layer, *tensors, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(PackedCausal, "attend", spy)
    monkeypatch.setattr("tinsmith.backends.torch.recompute._free_bytes", lambda _: free[0])
    backend, oracle, rng = (
        TorchBackend(shape, device="cpu", dtype="float32"),
        Reference(shape.path),
        np.random.default_rng(5),
    )
    backend.create_model("m", LoraSpec(4, seed=0))
    warm(backend, "m")
    data, recompute = [sft(rng, n) for n in (40, 9)], backend.base.recompute
    activations = recompute.activations
    assert activations is not None and recompute.num_layers == 4
    # Logits of a tiny model are larger than its layers.
    activations = recompute.activations = replace(activations, logits_bytes=0.0)
    for num_saved, whole in ((0, True), (4, False)):
        assert bytes_with(activations, 4, 49, num_saved) == pytest.approx(
            activations.num_bytes(49, recompute=whole), abs=1
        )
    gradients = []
    for num_saved in (0, 1, 2, 4):  # all take less than three, beside one that is computed again
        free[0] = (1 + bytes_with(activations, 4, 49, num_saved)) / RECOMPUTE_SHARE[False]
        backend._models["m"].gradient_P, calls[0] = None, 0
        run(backend, fb("m", data))
        assert calls[0] == 4 + (4 - num_saved), "the layers that run again"
        gradients.append(backend._models["m"].gradient_P)
    assert all(other is not None and torch.equal(gradients[0], other) for other in gradients[1:])
    backend._models["m"].gradient_P = None
    check_against_reference(backend, oracle, "m", data, "cross_entropy")


def test_where_memory_runs_out_beside_activations_that_were_kept_all_layers_are_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = tiny_models.make(tmp_path, "qwen3")
    backend, rng = TorchBackend(shape, device="cpu"), np.random.default_rng(5)
    backend.create_model("m", LoraSpec(4, seed=0))
    recompute, hidden, sizes = backend.base.recompute, backend.base.hidden, list[int]()

    def fail_once(tokens_T: Tensor, *arguments: object, **options: object) -> Tensor:
        sizes.append(len(tokens_T))
        if len(sizes) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return hidden(tokens_T, *arguments, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(backend.base, "hidden", fail_once)
    run(backend, fb("m", [sft(rng, 20)]))
    assert sizes == [20, 20], "the micro-batch is as large as before"
    assert recompute.active and recompute.count_recomputed(2) == 2
    for _ in range(trainer.GROW_AFTER):
        backend._trainer._grow()
    run(backend, fb("m", [sft(rng, 20)]))
    assert not recompute.active
    # Under a budget, or where the owner chose, it is not this one's choice.
    recompute.chosen = False
    assert not recompute.recompute_all()


def test_fused_layers_keep_what_the_plan_counts(shape: ModelShape) -> None:
    """Storages that autograd saves in a step, without the model's own."""
    backend = TorchBackend(shape, device="cpu", dtype="float32", recompute="off")
    recompute, saved_tensors = backend.base.recompute, []
    base_pointers = {parameter.untyped_storage().data_ptr() for parameter in backend.base.model.parameters()}
    saved_bytes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if (storage := x.untyped_storage()).data_ptr() not in base_pointers:
            saved_bytes[storage.data_ptr()] = storage.nbytes()
            saved_tensors.append(x)  # or another takes its place
        return x

    backend.create_model("a", LoraSpec(4))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run(backend, fb("a", [sft(np.random.default_rng(0), 200)]))
    counted = sum(saved_bytes.values()) < 200 * recompute.bytes_per_token() < 1.5 * sum(saved_bytes.values())
    assert counted or not backend.base.has_fused_layers


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_adapters_that_a_gpu_takes_together_learn_as_each_alone(
    shape: ModelShape, dtype: str, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal and, in bfloat16, similar lengths, micro-batches that divide a model's data, another rank, one that is not
    finite, and models that accumulate.
    """
    rng = np.random.default_rng(23)
    lengths = {"a": [24, 24], "b": [24], "c": [24, 22], "d": [22, 20], "e": [24], "f": [24]}
    data = {name: [sft(rng, length) for length in datums] for name, datums in lengths.items()}
    gradients: list[dict[str, Tensor]] = []
    for together in (False, True):
        for module in (lora, trainer):
            monkeypatch.setattr(module, "is_launch_bound", lambda _, together=together: together)
        backend = TorchBackend(shape, device="cpu", dtype=dtype, max_tokens_per_microbatch=64)
        for name in lengths:
            backend.create_model(name, LoraSpec(8 if name == "e" else 4, seed=ord(name)))
            warm(backend, name, ord(name))
        for value in backend._models["b"].adapter.weights.values():
            value[1].fill_(float("nan"))
        for datums in backend._models.values():
            datums.adapter.refresh()
        for _ in range(2):
            run(backend, *(fb(name, datums) for name, datums in data.items()), fb("c", data["a"], forward_only=True))
        gradients.append(
            {n: datums.gradient_P for n, datums in backend._models.items() if datums.gradient_P is not None}
        )
        assert all(datums.adapter.stack_slot is datums.adapter.gradients is None for datums in backend._models.values())
    assert gradients[0].keys() == gradients[1].keys() == lengths.keys()
    assert not any(bool(datums.pop("b").isfinite().all()) for datums in gradients)
    for name, gradient_P in gradients[1].items():
        assert gradient_P.untyped_storage().nbytes() == gradient_P.nbytes, "it keeps no other's"
        assert (gradient_P - gradients[0][name]).norm() <= bound * gradients[0][name].norm()
