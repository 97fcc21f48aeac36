"""One rank of several on a simulated device: collectives as NCCL takes them, every tensor where it must be, and no wait
for the device beyond the ones that are needed.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from support import tiny_models
from support.fake_cuda import DEVICE
from support.fake_ranks import FakeCudaRank, fake_rank
from support.local_sampling import make_prompt, make_sample
from support.ranked import datum
from tinsmith.backends import run_to_end
from tinsmith.backends.distributed import Degrees, measuring
from tinsmith.types import AdamParams, DimuonParams, LoraSpec, OptimStep, Pass, PassResult, SamplingParams
from unit.test_cuda_steps import custom

LAYERS = 2
CASES = {
    "data": ("qwen3", Degrees(2), 0, 1, 1),
    "tensor": ("qwen3", Degrees(tensor=2), 1, 1, 1),
    "tensor, biases": ("llama", Degrees(tensor=2), 1, 1, 1),
    "context": ("qwen3", Degrees(context=2), 1, 1, 1),
    "context, windows": ("gemma2", Degrees(context=2), 0, 1, 1),
    "context and tensor": ("llama", Degrees(context=2, tensor=2), 3, 1, 1),
    "experts": ("gpt_oss", Degrees(2, experts=2), 1, 1 + LAYERS, 1 + LAYERS),
    "first stage": ("qwen3", Degrees(pipeline=2), 0, 0, 1),
    "last stage": ("qwen3", Degrees(pipeline=2), 1, 1, 1),
    "stages and tensor": ("llama", Degrees(tensor=2, pipeline=2), 3, 1, 1),
    "stages and data": ("gemma2", Degrees(2, pipeline=2), 0, 0, 1),
}
"""Family, degrees, rank, and reads of a micro-batch and of a sampler's step after the first."""


@pytest.mark.parametrize("recompute", ["off", "on"])
@pytest.mark.parametrize("case", CASES)
def test_a_rank_computes_and_speaks_on_its_device(tmp_path: Path, case: str, recompute: str) -> None:
    arch, degrees, number, reads, step_reads = CASES[case]
    shape, rng = tiny_models.make(tmp_path, arch), np.random.default_rng(0)
    with fake_rank(degrees, number) as (device, ranks, calls):
        backend = FakeCudaRank(shape, ranks, recompute=recompute)
        tensors = [*backend.base.model.parameters(), *backend.base.model.buffers()]
        assert {each.device for each in tensors if each.numel()} == {DEVICE}
        backend.agree()
        for model_id in ("0", "1"):
            backend.create_model(model_id, LoraSpec(8), "adamw" if model_id == "0" else "dimuon")
            backend.publish(model_id, f"v{model_id}")
        sampler = backend.sampler
        device.strict, device.reads = True, 0
        calls.clear()
        passes = [
            Pass("a", "0", tuple(datum(rng, n, "cross_entropy") for n in (9, 9, 4, 4)), "cross_entropy", {}, False),
            Pass("b", "1", tuple(datum(rng, n, "gspo") for n in (22, 21)), "gspo", {}, False),
        ]
        results = run_to_end(backend.run_passes(passes))
        assert all(isinstance(result, PassResult) for result in results), results
        repeated = LAYERS if recompute == "on" and degrees.experts > 1 else 0
        assert device.reads == reads + repeated
        assert calls["all_reduce", "cuda"] >= len(passes), "the gradients"
        assert not calls["isend", "cpu"] and not calls["recv", "cpu"]
        device.reads = 0
        params = [OptimStep("a", "0", AdamParams(1e-3, grad_clip_norm=0.5)), OptimStep("b", "1", DimuonParams(1e-3))]
        assert all(isinstance(outcome, dict) for outcome in backend.optim_step(params))
        assert device.reads == 1
        calls.clear()
        wanted = SamplingParams(max_tokens=8, stop_eos=False)
        for sample in (
            make_sample("s", make_prompt(9), wanted, version_id="v0", num_samples=2, topk_sample_logprobs=2),
            make_sample("t", make_prompt(5), wanted, version_id=None, prompt_logprobs=True),
        ):
            if degrees.experts > 1:
                sampler.hold(sample.request_id, sample.version_id)
            sampler.submit(sample)
        found = []
        for _ in range(4):
            device.reads = 0
            sampler.step()
            found.append(device.reads)
        assert found[1:] == [step_reads] * 3


@pytest.mark.parametrize("degrees", [Degrees(tensor=2), Degrees(context=2)])
def test_ranks_agree_on_weights_of_a_custom_loss_without_the_device(tmp_path: Path, degrees: Degrees) -> None:
    shape, (loss, one) = tiny_models.make(tmp_path), custom("clipped")
    with fake_rank(degrees, 1) as (device, ranks, calls):
        backend = FakeCudaRank(shape, ranks)
        backend.create_model("0", LoraSpec(8))
        device.strict, device.reads = True, 0
        calls.clear()
        (result,) = run_to_end(
            backend.run_passes([Pass("a", "0", (one, one), "custom", {"loss_id": "1"}, False, loss)])
        )
        assert isinstance(result, PassResult), result
        assert device.reads == 2, "the log probabilities that it is a function of, and those of the result"
        assert (calls["broadcast", "cpu"], calls["broadcast", "cuda"]) == (1, 0)


@pytest.mark.parametrize("degrees", [Degrees(2, pipeline=2), Degrees(2, tensor=2, context=2, experts=2)])
def test_collectives_are_measured_on_the_device(degrees: Degrees) -> None:
    with fake_rank(degrees, 1) as (_, ranks, calls):
        with mock.patch.object(measuring, "measured_products", lambda *_: (1.0, 1.0)):
            assert len(measuring.measure(ranks, "bfloat16", 64, 1000)) == len(measuring.Rates._fields) - 1
        assert {where for _, where in calls} == {"cuda"}
        assert ranks.gather_tensor(torch.empty(4, 6, device=DEVICE).t()).is_contiguous()
