"""A published version shares its model's weights until the model changes; then only the version has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support import tiny_models
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.adapters import Adapter
from tinsmith.types import (
    AdamParams,
    Datum,
    DimuonParams,
    LoraSpec,
    ModelShape,
    OptimParams,
    OptimStep,
    Pass,
    Sample,
    SamplingParams,
)

torch.set_num_threads(1)

STEPS: dict[str, OptimParams] = {"adamw": AdamParams(1e-2), "dimuon": DimuonParams(1e-2)}


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("qwen"), "qwen3")


def accumulate(backend: TorchBackend, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, tiny_models.VOCAB, 9)
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(8, np.float32)}
    data = (Datum(tokens[:-1].astype(np.int32), inputs),)
    run_to_end(backend.run_passes([Pass("r", "m", data, "cross_entropy", {}, False)]))
    gradient = backend._models["m"].gradient_P
    assert gradient is not None
    return gradient


def step(backend: TorchBackend) -> None:
    accumulate(backend)
    (outcome,) = backend.optim_step([OptimStep("o", "m", STEPS[backend._models["m"].optimizer_type])])
    assert isinstance(outcome, dict)


def sample_greedily(backend: TorchBackend, version_id: str) -> list[int]:
    params = SamplingParams(max_tokens=4, temperature=0.0, stop_eos=False)
    backend.sampler.submit(Sample("s", version_id, np.arange(5, dtype=np.int32), 1, params))
    while True:
        for _, result in backend.sampler.step():
            assert not isinstance(result, Exception)
            return result.sequences[0].tokens_T.tolist()


def address(adapter: Adapter) -> int:
    return adapter.flat_P.data_ptr()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", STEPS)
def test_a_version_keeps_what_was_published_when_its_model_goes_on(shape: ModelShape, family: str, dtype: str) -> None:
    backend = TorchBackend(shape, device="cpu", dtype=dtype)
    backend.create_model("m", LoraSpec(4), optimizer_type=family)
    step(backend)
    backend.publish("m", "v")
    version, trained = backend._versions["v"], backend._models["m"]
    assert address(version) == address(trained.adapter)  # nothing was copied
    published = version.flat_P.clone(), version.compute_P.clone()
    step(backend)
    step(backend)
    assert torch.equal(version.flat_P, published[0]) and torch.equal(version.compute_P, published[1])
    assert not torch.equal(trained.adapter.flat_P, published[0])
    assert not torch.equal(trained.adapter.compute_P, published[1])


def test_a_dropped_version_causes_no_copy(shape: ModelShape) -> None:
    backend = TorchBackend(shape, device="cpu")
    backend.create_model("m", LoraSpec(4))
    step(backend)
    before = address(backend._models["m"].adapter)
    backend.publish("m", "v")
    backend.drop_version("v")
    step(backend)
    assert address(backend._models["m"].adapter) == before


def test_weights_that_did_not_change_are_published_as_they_were(shape: ModelShape) -> None:
    backend = TorchBackend(shape, device="cpu")
    backend.create_model("m", LoraSpec(4))
    backend.publish("m", "v")
    first = backend._versions["v"]
    accumulate(backend)  # a gradient changes no weight
    backend.publish("m", "v")
    backend.publish("m", "w")
    assert backend._versions["v"] is backend._versions["w"] is first
    backend.drop_version("v")
    step(backend)  # "w" still has them
    assert address(backend._models["m"].adapter) != address(first)
    backend.publish("m", "v")
    assert backend._versions["v"] is not first


def test_training_goes_on_after_the_version_was_sampled_from(shape: ModelShape) -> None:
    backend, quiet = (TorchBackend(shape, device="cpu") for _ in range(2))
    for candidate in (backend, quiet):
        candidate.create_model("m", LoraSpec(4, seed=1))
        step(candidate)
    backend.publish("m", "v")
    answer = sample_greedily(backend, "v")
    assert torch.equal(accumulate(backend, seed=3), accumulate(quiet, seed=3))
    assert sample_greedily(backend, "v") == answer
