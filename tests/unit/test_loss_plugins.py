"""Losses of installed distributions: what is loaded and refused, and the example's two against float64."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support import tiny_models
from support.float64_reference import Reference
from support.loss_plugins import EXAMPLE, install
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.cli.doctor import _losses
from tinsmith.errors import SettingsError, UserError
from tinsmith.losses import LOSSES, check_pass, list_plugins, loss_registry, token_weight
from tinsmith.losses.registry import Loss, _problems
from tinsmith.types import Array, Datum, LoraSpec, ModelShape, Pass, PassResult

F32 = np.float32
PLAIN = "from tinsmith.losses import LOSSES, Loss, LossTerms\nfrom dataclasses import replace\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of sys.path whose distributions have entry points."""
    directory = tmp_path / "site"
    monkeypatch.syspath_prepend(str(directory))
    modules = set(sys.modules)
    loss_registry.cache_clear()
    yield directory
    loss_registry.cache_clear()
    for name in set(sys.modules) - modules:
        if str(directory) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def example(site: Path) -> None:
    install(site, "example-losses", {"dapo": "DAPO", "orpo": "ORPO"}, EXAMPLE)


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("models"))


def test_without_plugins_there_are_the_losses_of_the_wire(site: Path) -> None:
    assert loss_registry() == LOSSES and list_plugins() == []
    assert list(_losses()) == []


def test_a_plugin_is_named_with_its_distribution(site: Path, example: None) -> None:
    assert [(loss.name, loss.distribution) for loss in list_plugins()] == [
        ("dapo", "example-losses 0.1"), ("orpo", "example-losses 0.1"),
    ]  # fmt: skip
    (finding,) = _losses()
    assert finding.good and finding.detail == "dapo (example-losses 0.1), orpo (example-losses 0.1)"
    with pytest.raises(UserError, match=r"loss_fn is 'dopa'; it must be one of cross_entropy, .*, dapo, orpo"):
        check_pass(Pass("r", "m", (), "dopa", {}, False), ModelShape("m", "/", 9, 9, "X"))


@pytest.mark.parametrize(
    ("entries", "code", "message"),
    [
        ({"ppo": "L"}, "L = LOSSES['dro']", "bad-loss 0.1 has a loss 'ppo', which is the name of a built-in one"),
        ({"x": "L"}, "import no_such_module", "of bad-loss 0.1 cannot be loaded: ModuleNotFoundError: No module named"),
        ({"x": "Missing"}, "", "the loss 'x' (bad_loss:Missing) of bad-loss 0.1 cannot be loaded: AttributeError"),
        ({"x": "L"}, "L = 3", "is a int; it must be a tinsmith.losses.Loss"),
        ({"x" * 65: "L"}, "L = LOSSES['dro']", "its name may have up to 64 letters"),
        ({"x": "L"}, "L = LOSSES['cross_entropy']", "custom, elementwise and recorded_sequences are for built-in"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_refused_in_one_line_that_names_its_distribution(
    site: Path, entries: dict[str, str], code: str, message: str
) -> None:
    install(site, "bad-loss", entries, PLAIN + code)
    with pytest.raises(SettingsError) as refusal:
        loss_registry()
    assert message in str(refusal.value) and "\n" not in str(refusal.value)
    (finding,) = _losses()
    assert not finding.good and message in finding.detail


def test_two_distributions_with_one_name_are_refused_by_name(site: Path) -> None:
    install(site, "first-loss", {"x": "L"}, PLAIN + "L = LOSSES['dro']")
    install(site, "second-loss", {"x": "L"}, PLAIN + "L = LOSSES['dro']")
    with pytest.raises(SettingsError, match=r"first-loss 0\.1 and second-loss 0\.1 both have a loss 'x'"):
        loss_registry()


GOOD = Loss(LOSSES["dro"].formula, ("target_tokens", "logprobs", "advantages"), config={"beta": 0.1})
CONTRADICTIONS = {
    "formula must be a function": {"formula": 3},
    "the first of required must be": {"required": ("logprobs", "advantages")},
    "named twice": {"optional": ("logprobs",)},
    "no input may have the name 'sequence_count'": {"optional": ("sequence_count",), "defaults": {"sequence_count": 1}},
    "weight is 'mask', which is none of its inputs": {"weight": "mask"},
    "defaults has no value for mask": {"optional": ("mask",)},
    "each of defaults must be finite": {"optional": ("mask",), "defaults": {"mask": np.nan}},
    "the default of beta is not in its range": {"config": {"beta": -1.0}},
    "ranges has a key": {"ranges": {"alpha": (0, 1)}},
    "config needs both": {"optional": ("clip_low_threshold",)},
    "config needs rollout_ratio_max": {"optional": ("rollout_logprobs",)},
    "sequence_ratio_mask needs sequence_ratio": {"optional": ("sequence_ratio_mask",)},
    "constant metrics need a suffix": {"constant_metrics": {"x": 1.0}},
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_a_declaration_that_contradicts_itself_is_refused(message: str) -> None:
    assert not [problem for holds, problem in _problems(GOOD) if holds]
    changed = replace(GOOD, **CONTRADICTIONS[message])  # pyright: ignore[reportArgumentType]
    assert any(message in problem for holds, problem in _problems(changed) if holds)


# The example's losses through the backend, with logprobs and gradients of a float64 model.


def datum(rng: np.random.Generator, length: int, **inputs: Array) -> Datum:
    tokens = rng.integers(0, tiny_models.VOCAB, length + 1)
    return Datum(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:].astype(np.int64), **inputs})


def policy(rng: np.random.Generator, length: int) -> Datum:
    advantages = (rng.normal(size=length) * (rng.random(length) < 0.8)).astype(F32)
    return datum(rng, length, logprobs=rng.normal(-5.5, 0.4, length).astype(F32), advantages=advantages)


def backend_of(shape: ModelShape) -> TorchBackend:
    backend = TorchBackend(shape, device="cpu", logits_chunk=5)
    backend.create_model("m", LoraSpec(4))
    adapter = backend._models["m"].adapter
    generator = torch.Generator().manual_seed(3)
    adapter.flat_P.add_(torch.randn(adapter.flat_P.shape, generator=generator) * 0.02)
    return backend


def check_against_float64(
    backend: TorchBackend, oracle: Reference, request: Pass, total: Tensor, leaves: dict[str, tuple[Tensor, Tensor]]
) -> PassResult:
    (result,) = run_to_end(backend.run_passes([request]))
    assert isinstance(result, PassResult), result
    assert result.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4, abs=1e-4)
    total.backward()
    trained = backend._models["m"]
    assert trained.gradient_P is not None
    for name, pair in trained.adapter.layout.views(trained.gradient_P).items():
        for actual, leaf in zip(pair, leaves[name], strict=True):
            assert leaf.grad is not None
            assert (actual.double() - leaf.grad).norm() < 1e-3 * leaf.grad.norm().clamp_min(1e-9), name
    return result


def logprobs_of(oracle: Reference, data: list[Datum], leaves: dict[str, tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [
        oracle.logprobs(item.tokens_N, leaves).gather(1, torch.from_numpy(item.inputs["target_tokens"])[:, None])[:, 0]
        for item in data
    ]


def test_dapo_equals_float64(example: None, shape: ModelShape) -> None:
    rng, oracle, backend = np.random.default_rng(0), Reference(shape.path), backend_of(shape)
    data = [policy(rng, length) for length in (7, 13, 1)]
    request = Pass("r", "m", tuple(data), "dapo", {"num_tokens": 21.0}, False)
    check_pass(request, shape)
    leaves = oracle.leaves(backend._models["m"].adapter.weights)
    total = torch.zeros((), dtype=torch.float64)
    for item, lp in zip(data, logprobs_of(oracle, data, leaves), strict=True):
        for t in range(len(lp)):
            ratio = torch.exp(lp[t] - float(item.inputs["logprobs"][t]))
            advantage = float(item.inputs["advantages"][t])
            total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage) / 21
    result = check_against_float64(backend, oracle, request, total, leaves)
    trained = sum(np.count_nonzero(item.inputs["advantages"]) for item in data)
    assert result.metrics["sample_train_tokens:sum"] == trained == token_weight(request)


def test_orpo_equals_float64(example: None, shape: ModelShape) -> None:
    """The gradient of both data together is that of the pair's loss, though each reads the other as a constant."""
    rng, oracle, backend = np.random.default_rng(1), Reference(shape.path), backend_of(shape)
    leaves = oracle.leaves(backend._models["m"].adapter.weights)
    masks = [(np.arange(n) >= 3).astype(F32) for n in (9, 12)]
    plain = [datum(rng, len(mask)) for mask in masks]
    means = [
        (lp * torch.from_numpy(mask)).sum() / mask.sum()
        for lp, mask in zip(logprobs_of(oracle, plain, leaves), masks, strict=True)
    ]
    odds = [mean - torch.log(-torch.expm1(mean)) for mean in means]
    total = -means[0] - 0.7 * torch.nn.functional.logsigmoid(odds[0] - odds[1])
    data = tuple(
        Datum(
            item.tokens_N,
            {
                **item.inputs,
                "sequence_ratio_mask": mask,
                "is_chosen": np.full(len(mask), chosen, F32),
                "other_log_odds": np.full(len(mask), other.item(), F32),
            },
        )
        for item, mask, chosen, other in zip(plain, masks, (1, 0), odds[::-1], strict=True)
    )
    request = Pass("r", "m", data, "orpo", {"beta": 0.7}, False)
    check_pass(request, shape)
    result = check_against_float64(backend, oracle, request, total, leaves)
    assert "sample_train_tokens:sum" not in result.metrics and token_weight(request) == 15


def test_a_plugin_beside_other_losses_leaves_their_numbers_alone(example: None, shape: ModelShape) -> None:
    rng = np.random.default_rng(2)
    data = tuple(policy(rng, length) for length in (7, 9))
    ones = np.ones(8, F32)
    answer = datum(rng, 8, sequence_ratio_mask=ones, is_chosen=ones, other_log_odds=-5 * ones)
    passes = [Pass(f"r{name}", name, data, name, {}, False) for name in ("ppo", "dapo", "dro")]
    passes.append(Pass("r", "orpo", (answer,), "orpo", {}, False))
    gradients: list[dict[str, Tensor]] = []
    for groups in ([passes], [[request] for request in passes]):
        backend = TorchBackend(shape, device="cpu")
        for request in passes:
            backend.create_model(request.model_id, LoraSpec(4, seed=1))
        for group in groups:
            assert all(isinstance(result, PassResult) for result in run_to_end(backend.run_passes(group)))
        gradients.append({name: model.gradient_or_zeros() for name, model in backend._models.items()})
    for name, together in gradients[0].items():
        alone = gradients[1][name]
        assert alone.any() and (together - alone).norm() < 1e-4 * alone.norm(), name


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('no such thing')", "ValueError: no such thing"),
        ("return x.logprob_P", "its formula returned Tensor, not LossTerms"),
        ("return LossTerms(x.logprob_P.sum(), x.logprob_P, x.logprob_P, x.logprob_P)", r"its loss_P is torch.float32"),
        ("lp = x.logprob_P; return LossTerms(lp, lp.double(), lp, lp)", "its dloss_dlogprob_P is torch.float64"),
        ("return LossTerms(x.logprob_P, x.logprob_P, x.logprob_P, None)", "its clipped_P is NoneType"),
    ],
)
def test_a_formula_that_fails_fails_its_own_pass_and_names_its_distribution(
    site: Path, shape: ModelShape, body: str, message: str
) -> None:
    code = f"{PLAIN}def formula(x, config):\n    {body}\nL = replace(LOSSES['dro'], formula=formula, config={{}})"
    install(site, "bad-loss", {"x": "L"}, code)
    rng, backend = np.random.default_rng(3), backend_of(shape)
    good = Pass("good", "m", (policy(rng, 5),), "ppo", {}, False)
    outcomes = run_to_end(backend.run_passes([good, Pass("bad", "m", (policy(rng, 5),), "x", {}, False)]))
    assert isinstance(outcomes[0], PassResult) and isinstance(outcomes[1], UserError)
    assert "the loss 'x' of bad-loss 0.1 failed: " in str(outcomes[1]) and message in str(outcomes[1])


def test_inputs_and_configuration_are_checked_as_declared(example: None, shape: ModelShape) -> None:
    rng = np.random.default_rng(4)

    def refusal(loss_fn: str, item: Datum, **config: float) -> str:
        with pytest.raises(UserError) as error:
            check_pass(Pass("r", "m", (item,), loss_fn, config, False), shape)
        return str(error.value)

    item = policy(rng, 4)
    assert "num_tokens'] is 0; it must be finite and between 1 and 1e+12" in refusal("dapo", item, num_tokens=0)
    assert "is not a setting of dapo; it takes clip_low_threshold" in refusal("dapo", item, beta=1)
    assert "has no 'sequence_ratio_mask'; orpo needs target_tokens" in refusal("orpo", item)
    mask, ones = np.zeros(4, F32), np.ones(4, F32)
    item = datum(rng, 4, sequence_ratio_mask=ones, is_chosen=ones, other_log_odds=np.full(4, np.inf, F32))
    assert "loss_fn_inputs['other_log_odds'] holds inf" in refusal("orpo", item)
    item = datum(rng, 4, sequence_ratio_mask=ones, is_chosen=ones, other_log_odds=np.ones(3, F32))
    assert "loss_fn_inputs['other_log_odds'] has shape [3]; it must be [4]" in refusal("orpo", item)
    # The mask is the weight: without an answer there is nothing to train.
    item = datum(rng, 4, sequence_ratio_mask=mask, is_chosen=ones, other_log_odds=ones)
    check_pass(Pass("r", "m", (item,), "orpo", {}, False), shape)
