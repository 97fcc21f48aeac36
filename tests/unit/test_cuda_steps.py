"""Steps on a simulated device, as in test_fake_cuda.py: images, every loss, custom losses, training of all weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support import tiny_models, traced_losses, vision_models
from support.fake_cuda import DEVICE, FakeCudaBackend, FakeCudaFullBackend, fake_cuda
from support.local_sampling import make_prompt, make_sample
from support.ranked import CONFIGS, NAMED_LOSSES, datum
from support.vision_models import GEMMA3, VISION, picture
from tinsmith.backends import run_to_end
from tinsmith.types import (
    AdamParams,
    CustomLoss,
    Datum,
    LoraSpec,
    ModelShape,
    OptimStep,
    Pass,
    PassResult,
    SamplingParams,
)

VISION_MODELS = ("qwen3_vl", "qwen3_5", "gemma3")
PICTURES = picture(61, 22, 1), picture(20, 75, 2, "jpeg")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("qwen"))


def step(backend: FakeCudaBackend | FakeCudaFullBackend, *passes: Pass) -> None:
    results = run_to_end(backend.run_passes(passes))
    assert all(isinstance(result, PassResult) for result in results), results


def taught(one: Datum) -> Datum:
    rng = np.random.default_rng(len(one.tokens_N))
    return replace(one, inputs={"target_tokens": rng.integers(0, tiny_models.VOCAB, len(one.tokens_N))})


@pytest.mark.parametrize("arch", VISION_MODELS)
def test_images_in_training_and_prompts_wait_for_nothing_else(tmp_path: Path, arch: str) -> None:
    make: Callable[..., ModelShape] = vision_models.make_gemma3 if arch == "gemma3" else vision_models.make
    shape = make(tmp_path) if arch == "gemma3" else make(tmp_path, arch)
    kind, words = GEMMA3 if arch == "gemma3" else VISION, list(range(9))
    inputs = [vision_models.model_input(words, one, words[:3], vision=kind) for one in PICTURES]
    data = tuple(taught(Datum(tokens, {}, images)) for tokens, images in inputs)
    with fake_cuda(pages=False) as device:
        backend = FakeCudaBackend(shape)
        backend.create_model("0", LoraSpec(8))
        backend.publish("0", "0/1")
        device.strict = True
        text = taught(Datum(np.arange(5, dtype=np.int32), {}))
        step(backend, Pass("a", "0", (*data, text), "cross_entropy", {}, False))
        assert device.reads == 1
        gradient_P = backend._models["0"].gradient_P
        assert gradient_P is not None and gradient_P.device == DEVICE
        params = SamplingParams(max_tokens=4, stop_eos=False)
        for number, (tokens, images) in enumerate(inputs):
            sample = make_sample(str(number), tokens, params, version_id="0/1", images=images)
            backend.sampler.submit(sample)
        backend.sampler.submit(make_sample("text", make_prompt(7), params))
        for expected in (0, 1, 1):
            device.reads = 0
            backend.sampler.step()
            assert device.reads == expected


def test_every_loss_reads_once(qwen: ModelShape) -> None:
    rng = np.random.default_rng(0)
    with fake_cuda() as device:
        backend = FakeCudaBackend(qwen)
        backend.create_model("0", LoraSpec(8))
        device.strict = True
        for forward_only in (False, True):
            for loss_fn in NAMED_LOSSES:
                device.reads = 0
                data = tuple(datum(rng, length, loss_fn) for length in (9, 4))
                step(backend, Pass("a", "0", data, loss_fn, CONFIGS.get(loss_fn, {}), forward_only))
                assert device.reads == 1, loss_fn


def custom(name: str) -> tuple[CustomLoss, Datum]:
    fn, ranks = traced_losses.LOSSES[name]
    one = traced_losses.datum(np.random.default_rng(0), 9, tiny_models.VOCAB, ranks)
    inputs = {name: tensor.to_numpy() for name, tensor in one.loss_fn_inputs.items()}
    loss = traced_losses.sent(traced_losses.trace(fn, ranks))
    return loss, Datum(np.array(one.model_input.to_ints(), np.int32), inputs)


@pytest.mark.parametrize("name", ["clipped", "top_k"])
def test_a_custom_loss_reads_its_log_probabilities_besides(qwen: ModelShape, name: str) -> None:
    loss, one = custom(name)
    with fake_cuda() as device:
        backend = FakeCudaBackend(qwen)
        backend.create_model("0", LoraSpec(8))
        device.strict = True
        for forward_only, reads in ((False, 2), (True, 1)):
            device.reads = 0
            step(backend, Pass("a", "0", (one, one), "custom", {"loss_id": "1"}, forward_only, loss))
            assert device.reads == reads
        gradient_P = backend._models["0"].gradient_P
        assert gradient_P is not None and gradient_P.device == DEVICE


@pytest.mark.parametrize("recompute", ["off", "on"])
@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "llama"])
def test_training_of_all_weights_reads_once(tmp_path: Path, arch: str, recompute: str) -> None:
    rng, shape = np.random.default_rng(0), tiny_models.make(tmp_path, arch)
    with fake_cuda() as device:
        backend = FakeCudaFullBackend(shape, recompute=recompute)
        for name in ("0", "1"):
            backend.create_model(name, LoraSpec(0))
        backend.publish("0", "0/1")
        device.strict = True
        step(backend, Pass("a", "0", tuple(datum(rng, n, "cross_entropy") for n in (9, 4)), "cross_entropy", {}, False))
        assert device.reads == 1
        trained = backend._models["0"]
        assert trained.gradient_P is not None and trained.gradient_P.device == DEVICE
        assert all(each.grad is None and each.device == DEVICE for each in backend.base.model.parameters())
        device.reads = 0
        (outcome,) = backend.optim_step([OptimStep("a", "0", AdamParams(1e-3, grad_clip_norm=0.5))])
        assert isinstance(outcome, dict) and device.reads == 1
        assert trained.adapter.flat_P.dtype == torch.float32
        device.reads = 0
        backend.sampler.submit(make_sample("s", make_prompt(9), SamplingParams(max_tokens=4), version_id="0/1"))
        backend.sampler.submit(make_sample("t", make_prompt(9), SamplingParams(max_tokens=4)))
        for _ in range(3):
            backend.sampler.step()
        assert device.reads <= 3
