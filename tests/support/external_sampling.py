"""A fake backend whose samples come from a fake engine (external_engines.py), for the tests of external samplers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from support import external_engines
from tinsmith.backends.fake import FakeBackend
from tinsmith.backends.with_remote_sampler import with_remote_sampler
from tinsmith.errors import TinsmithError
from tinsmith.samplers.remote.client import RemoteEngine
from tinsmith.types import LoraSpec, ModelShape, Sample, SampleResult, SamplingParams

SHAPE = ModelShape("fake", "/nowhere", 64, 128, "fake")
EOS = frozenset({2, 3})
PROMPT = np.array([5, 9, 20, 33, 7], np.int32)
PATIENCE_S = 60.0
Fake = external_engines.Engine
Outcome = SampleResult | TinsmithError


class ExternalSetup:
    """A fake backend with a sampler at a fake engine."""

    def __init__(
        self, kind: str, fake: Fake, tmp_path: Path, trainer: FakeBackend | None = None, **engine: object
    ) -> None:
        self.fake = fake
        remote = RemoteEngine(tmp_path / "adapters", tmp_path / "engine.log", url=fake.url)
        self.trainer = trainer or FakeBackend(SHAPE)
        remote = replace(remote, **cast(dict[str, bool], engine))
        self.backend = with_remote_sampler(self.trainer, kind, remote, SHAPE, EOS)
        self.sampler = self.backend.sampler

    def publish(self, version_id: str, weight: float, model_id: str = "m") -> None:
        if not self.trainer.has_model(model_id):
            self.trainer.create_model(model_id, LoraSpec(rank=8))
        self.trainer._models[model_id] = replace(self.trainer._models[model_id], weight=weight)
        self.backend.publish(model_id, version_id)

    def run(self, *samples: Sample) -> dict[str, Outcome]:
        for sample in samples:
            self.sampler.submit(sample)
        return self.collect()

    def collect(self) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        deadline = time.monotonic() + PATIENCE_S
        while self.sampler.has_work:
            assert time.monotonic() < deadline, "the sampler has not finished"
            outcomes.update(self.sampler.step())
        return outcomes

    def answer(self, sample: Sample) -> SampleResult:
        outcome = self.run(sample)[sample.request_id]
        assert isinstance(outcome, SampleResult), outcome
        return outcome


def sample(request_id: str = "r", version: str | None = None, n: int = 1, **options: object) -> Sample:
    params = {"max_tokens": 6, "temperature": 1.0, "seed": 1}
    param_names = set(SamplingParams.__dataclass_fields__)
    params |= {name: value for name, value in options.items() if name in param_names}
    sample_options = {name: value for name, value in options.items() if name not in param_names}
    prompt = cast(np.ndarray, sample_options.pop("prompt", PROMPT))
    return Sample(request_id, version, prompt, n, SamplingParams(**params), **sample_options)  # pyright: ignore[reportArgumentType]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def interpreter(directory: Path) -> str:
    """The path of a Python that has an engine: this one, which runs the fake vLLM instead of any module, and says that
    it is vLLM 0.32 for an architecture that does not begin with "Other".
    """
    path, script = directory / "python", Path(external_engines.__file__)
    version_script = 'case "$3" in Other*) echo unknown;; *) echo 0.32.0;; esac'
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then {version_script}; exit; fi\nexec "{sys.executable}" "{script}" vllm "$@"\n'
    )
    path.chmod(0o755)
    return str(path)
