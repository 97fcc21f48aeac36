"""Every family of docs/models.md on the device: trained and sampled as on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpu.device import pair
from support.families import FAMILIES, Family, make
from support.local_sampling import assert_same, make_prompt, make_sample, run
from tinsmith.backends import run_to_end
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.types import LoraSpec, PassResult
from unit.test_families import GREEDY, batch, train
from unit.test_torch_backend import relative, weights


@pytest.mark.parametrize("family", [pytest.param(family, id=family.model_type) for family in FAMILIES])
def test_a_family_is_what_it_is_on_the_cpu(family: Family, tmp_path: Path) -> None:
    backends = pair(make(tmp_path / "base", family))
    runs = []
    for backend in backends:
        backend.create_model("m", LoraSpec(3, seed=1))
        backend.create_model("n", LoraSpec(5, seed=2))
        train(backend, "m", "n")
        backend.publish("m", "v")
        (scored,) = run_to_end(backend.run_passes([batch("m", 7, forward_only=True)]))
        assert isinstance(scored, PassResult)
        sampler = LocalSampler(backend.base, backend._versions, options=SamplerOptions(block_size=4))
        samples = [
            make_sample(f"s{n}", make_prompt(n), GREEDY, version_id="v", prompt_logprobs=True) for n in (1, 7, 30)
        ]
        runs.append((scored, weights(backend, "m").cpu(), run(sampler, *samples)))
    (expected, expected_P, answers), (ours, ours_P, theirs) = runs
    for a, b in zip(ours.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)
    assert relative(ours_P, expected_P.double()) < 3e-2  # an optimizer's first steps divide by tiny moments
    for name, answer in answers.items():
        assert_same(theirs[name], answer, atol=2e-3)
