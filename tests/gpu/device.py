"""The device under test, which is compared with the CPU. TEST_DEVICE=cpu runs these tests without a GPU and skips those
of GPU features.
"""

from __future__ import annotations

import os

import torch

if os.environ.get("TEST_DEVICE", "cuda").startswith("cpu"):
    os.environ["TRITON_INTERPRET"] = "1"  # before the next lines import Triton

from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.adapters import Adapter, initialise_weights, layout_for
from tinsmith.backends.torch.model import BaseModel
from tinsmith.types import LoraSpec, ModelShape

NAMED = bool(os.environ.get("TEST_DEVICE"))
DEVICE = os.environ.get("TEST_DEVICE") or "cuda"
ON_CUDA = DEVICE.startswith("cuda")


def device() -> torch.device:
    """The device with its index, as in `tensor.device`."""
    return torch.empty(0, device=DEVICE).device


def pair(shape: ModelShape, **options: str | int) -> tuple[TorchBackend, TorchBackend]:
    """A backend on the CPU, which other tests compare with references, and one on the device, both in float32."""
    arguments = {"dtype": "float32", **options}
    backends = [TorchBackend(shape, device=backend_device, **arguments) for backend_device in ("cpu", DEVICE)]  # pyright: ignore
    return backends[0], backends[1]


def create(backend: TorchBackend, model_id: str, spec: LoraSpec) -> None:
    """Create a model with nonzero B, so that A has gradients; equal on every device."""
    backend.create_model(model_id, spec)
    adapter = backend._models[model_id].adapter
    fill(adapter, spec.seed or 0)


def adapter_on(base: BaseModel, seed: int, *, rank: int = 4, train_unembed: bool = True) -> Adapter:
    spec = LoraSpec(rank=rank, seed=seed, train_unembed=train_unembed)
    layout = layout_for(spec, base.adaptable_targets())
    adapter = Adapter(spec, layout, initialise_weights(layout, seed, base.device), base.dtype)
    fill(adapter, seed)
    return adapter


def fill(adapter: Adapter, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, b in adapter.weights.values():
        b.copy_(torch.randn(b.shape, generator=generator) * 0.05)
    adapter.refresh()
