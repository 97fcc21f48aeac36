"""A trained mixture of experts keeps what it knows in fewer bits, and learns over codes as it does over weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from support import tiny_models
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.types import AdamParams, Datum, LoraSpec, ModelShape, OptimStep, Pass, PassResult

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.extended
torch.set_num_threads(1)

RULES = ((3, 1), (5, 7), (1, 13), (10, 2), (7, 3))
"""A sequence names its rule (a, b) and continues x by a * x + b, modulo MODULUS. The last rule is learned later."""
MODULUS, FIRST_RULE_TOKEN, LENGTH = 97, 200, 24


def draw(seed: int, num: int, rules: range) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rule_n, tokens_nT = rng.choice(list(rules), num), np.zeros((num, LENGTH), np.int64)
    tokens_nT[:, 0], tokens_nT[:, 1] = FIRST_RULE_TOKEN + rule_n, rng.integers(0, MODULUS, num)
    factor_n, added_n = np.array(RULES)[rule_n].T
    for column in range(2, LENGTH):
        tokens_nT[:, column] = (factor_n * tokens_nT[:, column - 1] + added_n) % MODULUS
    return tokens_nT


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    """A model that knows the first four rules: 3 s of training."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **tiny_models._COMMON, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(300):
        tokens_nT = torch.from_numpy(draw(step, 16, range(4)))
        logits_nTV: Tensor = model(input_ids=tokens_nT, use_cache=False).logits
        cross_entropy(logits_nTV[:, 1:-1].flatten(0, 1), tokens_nT[:, 2:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    directory = tmp_path_factory.mktemp("mixture")
    model.save_pretrained(directory)
    tiny_models.tokenizer().save_pretrained(directory)
    return ModelShape("trained/mixture", str(directory), tiny_models.VOCAB, 256, "qwen3_moe")


def run_pass(backend: TorchBackend, tokens_nT: np.ndarray, *, forward_only: bool) -> float:
    """The mean loss of what follows from the rules."""
    weights_T = (np.arange(LENGTH - 1) > 0).astype(np.float32)
    data = tuple(
        Datum(tokens_T[:-1].astype(np.int32), {"target_tokens": tokens_T[1:], "weights": weights_T})
        for tokens_T in tokens_nT
    )
    (result,) = run_to_end(backend.run_passes([Pass("r", "m", data, "cross_entropy", {}, forward_only)]))
    assert isinstance(result, PassResult), result
    return -float(np.mean([logprobs[1:] for logprobs in result.logprobs]))


def measure(shape: ModelShape, quantize: str) -> tuple[float, float, float]:
    """The loss of the known rules, and that of the new one before and after 30 steps of LoRA."""
    backend = TorchBackend(shape, device="cpu", dtype="float32", quantize=quantize)
    backend.create_model("m", LoraSpec(8, seed=1))
    known = run_pass(backend, draw(1000, 48, range(4)), forward_only=True)
    before = run_pass(backend, draw(1001, 48, range(4, 5)), forward_only=True)
    for step in range(30):
        run_pass(backend, draw(2000 + step, 16, range(4, 5)), forward_only=False)
        (outcome,) = backend.optim_step([OptimStep("o", "m", AdamParams(1e-2))])
        assert isinstance(outcome, dict), outcome
    return known, before, run_pass(backend, draw(1001, 48, range(4, 5)), forward_only=True)


@pytest.fixture(scope="module")
def unquantised(trained: ModelShape) -> tuple[float, float, float]:
    return measure(trained, "off")


@pytest.mark.parametrize(("quantize", "most_lost"), [("int8", 0.01), ("nf4", 0.1), ("fp8", 0.02)])
def test_it_knows_what_it_knew_and_learns_as_well(
    trained: ModelShape, unquantised: tuple[float, float, float], quantize: str, most_lost: float
) -> None:
    """Losses of a token, whose entropy would be 4.6 without knowledge."""
    known, before, after = measure(trained, quantize)
    assert unquantised[0] < 0.1 and unquantised[1] > 4
    assert known < unquantised[0] + most_lost
    assert after < 0.5 * before and after < 1.25 * unquantised[2] + 0.05
