"""A backend without a model: deterministic and instant, for tests of everything around compute.

An adapter is one number, `weight`; a gradient is the sum over targets of weight-independent tokens; a logprob is
-(token mod 7 + 1) / 8 - weight. It keeps every promise of the Backend protocol (isolation, all or nothing, save and
load, immutable versions), so that the engine can be tested with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from tinsmith.backends import Capture, MicroBatches, RunningProfile
from tinsmith.errors import NonFiniteGradientError, UserError
from tinsmith.losses import cross_entropy_weights, elementwise_cross_entropy, loss_registry
from tinsmith.samplers.fake import FakeSampler
from tinsmith.types import F32, Datum, LoraSpec, ModelShape, OptimStep, Pass, PassResult, SparseRows

STATE_FILE = "fake_adapter.json"

ADAPTER_BYTES = 64
"""The reported size of an adapter."""


@dataclass(frozen=True, slots=True)
class FakeAdapter:
    spec: LoraSpec
    weight: float = 0.0
    gradient: float = 0.0
    step: int = 0
    optimizer_type: str = "adamw"


class FakeBackend:
    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._models: dict[str, FakeAdapter] = {}
        self._versions: dict[str, float] = {}
        self._sampler = FakeSampler(shape, self._versions)
        self.is_asleep = False

    @property
    def sampler(self) -> FakeSampler:
        return self._sampler

    def create_model(self, model_id: str, spec: LoraSpec, optimizer_type: str = "adamw") -> None:
        self._models[model_id] = FakeAdapter(spec, optimizer_type=optimizer_type)

    def unload_model(self, model_id: str) -> None:
        self._models.pop(model_id, None)

    def has_model(self, model_id: str) -> bool:
        return model_id in self._models

    @property
    def model_budget_bytes(self) -> int:
        return 2**40

    def model_bytes(self, model_id: str) -> int:
        return ADAPTER_BYTES

    def memory_use(self) -> dict[str, int]:
        return {"models": ADAPTER_BYTES * len(self._models)}

    def start_profile(self, directory: Path) -> RunningProfile:
        raise UserError("the fake backend computes nothing that a profile could show")

    def sleep(self) -> None:
        self.is_asleep = True

    def wake_up(self) -> None:
        self.is_asleep = False

    def run_passes(self, passes: Sequence[Pass]) -> MicroBatches:
        assert not self.is_asleep
        results: list[PassResult | UserError] = []
        gradients: dict[str, float] = {}
        for request in passes:
            weight = self._models[request.model_id].weight
            logprobs = tuple(_logprobs(datum, weight) for datum in request.data)
            elementwise: tuple[F32, ...] = ()
            if loss_registry()[request.loss_fn].elementwise:
                weights = map(cross_entropy_weights, request.data)
                elementwise = tuple(map(elementwise_cross_entropy, weights, logprobs))
            loss = float(sum(values.sum(dtype=np.float64) for values in elementwise or [-lp for lp in logprobs]))
            if not request.forward_only:
                gradients[request.model_id] = gradients.get(request.model_id, 0.0) + loss
            metrics = {"loss:sum": loss, "tokens:sum": float(request.num_tokens)}
            results.append(PassResult(logprobs, metrics, elementwise))
            yield
        for model_id, gradient in gradients.items():
            adapter = self._models[model_id]
            self._models[model_id] = replace(adapter, gradient=adapter.gradient + gradient)
        return results

    def optim_step(self, steps: Sequence[OptimStep]) -> list[dict[str, float] | UserError]:
        assert not self.is_asleep
        results: list[dict[str, float] | UserError] = []
        for step in steps:
            adapter = self._models[step.model_id]
            if step.params.family != adapter.optimizer_type:
                results.append(UserError(f"the model was created with {adapter.optimizer_type!r}"))
                continue
            if not np.isfinite(adapter.gradient):
                self._models[step.model_id] = replace(adapter, gradient=0.0)
                results.append(NonFiniteGradientError())
                continue
            self._models[step.model_id] = replace(
                adapter,
                weight=adapter.weight - step.params.learning_rate * float(np.sign(adapter.gradient)),
                gradient=0.0,
                step=adapter.step + 1,
            )
            results.append({"grad_norm": abs(adapter.gradient), "step": float(adapter.step + 1)})
        return results

    def capture(self, model_id: str) -> Capture:
        return Capture(ADAPTER_BYTES, partial(_write, _describe(self._models[model_id], optimizer=True)))

    def capture_version(self, version_id: str) -> Capture:
        text = json.dumps({"weight": self._versions[version_id], "step": None})
        return Capture(ADAPTER_BYTES, partial(_write, text))

    def version_bytes(self, version_id: str) -> int:
        return ADAPTER_BYTES

    def save(self, model_id: str, directory: Path, *, optimizer: bool, stacked: bool = False) -> None:
        _write(_describe(self._models[model_id], optimizer=optimizer), directory)

    def load(
        self, model_id: str, spec: LoraSpec, directory: Path, *, optimizer: bool, optimizer_type: str = "adamw"
    ) -> None:
        state = json.loads((directory / STATE_FILE).read_text())
        if optimizer and state["step"] is None:
            raise UserError("the checkpoint holds no optimizer state; load it without the optimizer")
        if optimizer and state["optimizer_type"] != optimizer_type:
            raise UserError(f"the checkpoint holds the state of {state['optimizer_type']!r}, not {optimizer_type!r}")
        step, gradient = (state["step"], state["gradient"]) if optimizer else (0, 0.0)
        self._models[model_id] = FakeAdapter(spec, state["weight"], gradient, step, optimizer_type)

    def publish(self, model_id: str, version_id: str) -> None:
        self._versions[version_id] = self._models[model_id].weight

    def load_version(self, version_id: str, directory: Path) -> None:
        self._versions[version_id] = json.loads((directory / STATE_FILE).read_text())["weight"]

    def has_version(self, version_id: str) -> bool:
        return version_id in self._versions

    def drop_version(self, version_id: str) -> None:
        self._versions.pop(version_id, None)


def _describe(adapter: FakeAdapter, *, optimizer: bool) -> str:
    state = {"weight": adapter.weight, "step": adapter.step if optimizer else None}
    state |= {"optimizer_type": adapter.optimizer_type, "gradient": adapter.gradient if optimizer else 0.0}
    return json.dumps(state)


def _write(text: str, directory: Path) -> None:
    (directory / STATE_FILE).write_text(text)


def _logprobs(datum: Datum, weight: float) -> F32:
    targets = datum.inputs.get("target_tokens", datum.tokens_N)
    dense = np.zeros(targets.shape, np.int64) if isinstance(targets, SparseRows) else targets
    return (-(dense % 7 + 1) / 8 - weight).astype(np.float32)
