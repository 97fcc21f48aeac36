"""Model families through a running server and the real SDK: trained, sampled and saved; the saved weights give the same
answers. One server serves several base models. `make test` runs a mixture of experts with latent attention; `make
test-families` runs all of families.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from support import tiny_models
from support.families import FAMILIES, Family, make
from support.live import API_KEY, LiveServer, serving
from unit.test_families import logprobs, reference

torch.set_num_threads(1)

QUICK = ("deepseek_v3",)
PER_SERVER = 5
LENGTHS = (9, 21)


def groups() -> list[object]:
    quick = tuple(family for family in FAMILIES if family.model_type in QUICK)
    other_families = [family for family in FAMILIES if family.model_type not in QUICK]
    slow = [tuple(other_families[i : i + PER_SERVER]) for i in range(0, len(other_families), PER_SERVER)]
    return [
        pytest.param(quick, id="quick"),
        *(pytest.param(group, id=group[0].model_type, marks=pytest.mark.slow) for group in slow),
    ]


@pytest.mark.parametrize("group", groups())
def test_families_are_trained_and_sampled_through_the_service(group: tuple[Family, ...], tmp_path: Path) -> None:
    shapes = [make(tmp_path / family.model_type, family) for family in group]
    flags = [text for shape in shapes for text in ("--model", f"{shape.name}={shape.path}")]
    with (
        serving(tmp_path / "data", *flags) as server,
        tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        for shape in shapes:
            journey(service, server, shape.name, shape.path)


def journey(service: tinker.ServiceClient, server: LiveServer, name: str, path: str) -> None:
    model = service.create_lora_training_client(name, rank=3, seed=1).result()
    for step in range(2):
        passed = model.forward_backward(batch(step), "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=2e-2))
        assert np.isfinite(passed.result().metrics["loss:sum"]), name
        stepped.result()
    saved = model.save_state("done").result().path
    sampler = model.save_weights_and_get_sampling_client().result()
    adapted = reference(path, directory_of(server, name))
    scored = model.forward(batch(7), "cross_entropy").result()
    for datum, output in zip(batch(7), scored.loss_fn_outputs, strict=True):
        targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].data)
        expected = logprobs(adapted, np.array(datum.model_input.to_ints()))[torch.arange(len(targets)), targets]
        np.testing.assert_allclose(output["logprobs"].data, expected, atol=1e-4, err_msg=name)
    prompt = list(range(30, 53))
    params = types.SamplingParams(max_tokens=6, temperature=0)
    answer = sampler.sample(
        types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params, include_prompt_logprobs=True
    ).result()
    tokens, answer_logprobs = answer.sequences[0].tokens, answer.sequences[0].logprobs
    expected = logprobs(adapted, np.array([*prompt, *tokens]))
    assert tokens == expected[len(prompt) - 1 : -1].argmax(-1).tolist(), name
    np.testing.assert_allclose(answer_logprobs, expected[len(prompt) - 1 : -1].max(-1).values, atol=1e-4, err_msg=name)
    prompt_logprobs_P = expected[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    assert answer.prompt_logprobs is not None
    np.testing.assert_allclose(np.array(answer.prompt_logprobs[1:], float), prompt_logprobs_P, atol=1e-4, err_msg=name)
    # A run loaded from the checkpoint continues where the first ended.
    again = service.create_training_client_from_state_with_optimizer(saved).result()
    first, second = (m.forward(batch(7), "cross_entropy").result().metrics["loss:sum"] for m in (model, again))
    assert first == second, name


def batch(seed: int) -> list[types.Datum]:
    rng = np.random.default_rng(seed)
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(rng.integers(0, tiny_models.VOCAB, length).tolist()),
            loss_fn_inputs={
                "target_tokens": rng.integers(0, tiny_models.VOCAB, length),
                "weights": np.ones(length, np.float32),
            },
        )
        for length in LENGTHS
    ]


def directory_of(server: LiveServer, base_model: str) -> Path:
    """The directory of the only checkpoint of this base model."""
    (model_directory,) = (
        path.parent
        for path in server.data_dir.glob("checkpoints/**/adapter_config.json")
        if f'"{base_model}"' in path.read_text()
    )
    return model_directory
