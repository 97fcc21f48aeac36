"""The device that the tests of this directory compute on, beside the CPU that they compare with.

TEST_DEVICE=cpu runs them without a GPU: then only the device is another, and what only a GPU has is skipped.
"""

from __future__ import annotations

import os

import torch

from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.adapters import Adapter, initialise, layout_for
from tinsmith.backends.torch.model import BaseModel
from tinsmith.types import LoraSpec, ModelShape

NAMED = bool(os.environ.get("TEST_DEVICE"))
DEVICE = os.environ.get("TEST_DEVICE") or "cuda"
ON_CUDA = DEVICE.startswith("cuda")


def device() -> torch.device:
    """With its number, as tensors on it have it."""
    return torch.empty(0, device=DEVICE).device


def pair(shape: ModelShape, **options: str | int) -> tuple[TorchBackend, TorchBackend]:
    """A backend on the CPU, which the other tests hold against references, and one on the device, in float32."""
    given = {"dtype": "float32", **options}
    made = [TorchBackend(shape, device=where, **given) for where in ("cpu", DEVICE)]  # pyright: ignore
    return made[0], made[1]


def create(backend: TorchBackend, model_id: str, spec: LoraSpec) -> None:
    """A model whose B has values, so that A has gradients too; the same on every device."""
    backend.create_model(model_id, spec)
    adapter = backend._models[model_id].adapter
    fill(adapter, spec.seed or 0)


def adapter_on(base: BaseModel, seed: int, *, rank: int = 4, train_unembed: bool = True) -> Adapter:
    spec = LoraSpec(rank=rank, seed=seed, train_unembed=train_unembed)
    layout = layout_for(spec, base.adaptable())
    adapter = Adapter(spec, layout, initialise(layout, seed, base.device), base.dtype)
    fill(adapter, seed)
    return adapter


def fill(adapter: Adapter, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, b in adapter.weights.values():
        b.copy_(torch.randn(b.shape, generator=generator) * 0.05)
    adapter.refresh()
