"""Files of a model that is trained in full: a directory that `transformers` loads, and the optimizer's state beside it.

`model.safetensors` holds float32 under the model's own names; tied weights are there once. `optimizer.safetensors` and
`gradient.safetensors` name each tensor after its parameter.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor

from tinsmith.backends.full.weights import FullLayout, FullWeights
from tinsmith.backends.torch.checkpoint import GRADIENT_FILE, OPTIMIZER_FILE, read_tensors, write_tensors
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.optim import MOMENTS
from tinsmith.backends.torch.trained import Trained
from tinsmith.errors import UserError

WEIGHTS_FILE = "model.safetensors"


def save_weights(weights: FullWeights, directory: Path) -> None:
    write_tensors({name: view.cpu() for name, view in weights.weights.items()}, directory / WEIGHTS_FILE)


def save_company(base: BaseModel, directory: Path) -> None:
    """What makes a model of the weights: configuration and tokenizer."""
    config = copy.deepcopy(base.model.config)
    config.dtype = torch.float32
    config.save_pretrained(directory)
    base.tokenizer.save_pretrained(directory)


def load_weights(layout: FullLayout, directory: Path, device: torch.device) -> FullWeights:
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        raise UserError(
            f"there is no {WEIGHTS_FILE}: this is an adapter, and this server trains all weights (backend 'full')"
        )
    tensors = read_tensors(path)
    if wrong := sorted(tensors.keys() ^ layout.shapes.keys()):
        raise UserError(f"{WEIGHTS_FILE} is of another model: {wrong[0]!r} is in one of them alone")
    _check_shapes(layout, tensors, path)
    return FullWeights(layout, layout.filled(tensors, device))


def save_state(trained: Trained, layout: FullLayout, directory: Path) -> None:
    """The optimizer's state."""
    names = MOMENTS[trained.optimizer_type]
    moments = trained.moments or tuple(torch.zeros_like(trained.adapter.flat_P) for _ in names)
    tensors = {"step": trained.step.cpu()}
    for moment, flat_P in zip(names, moments, strict=True):
        tensors |= _named(layout, flat_P, moment)
    write_tensors(tensors, directory / OPTIMIZER_FILE)


def save_gradient(trained: Trained, layout: FullLayout, directory: Path) -> None:
    """Nothing is written where nothing has accumulated."""
    if trained.gradient_P is not None:
        write_tensors(_named(layout, trained.gradient_P, "gradient"), directory / GRADIENT_FILE)


def load_state(trained: Trained, layout: FullLayout, directory: Path) -> None:
    """The optimizer's state, and the gradient that had accumulated when a snapshot was taken."""
    path, device = directory / OPTIMIZER_FILE, trained.adapter.flat_P.device
    if not path.is_file():
        raise UserError("this checkpoint holds no optimizer state; load it without, or save with save_state")
    tensors = read_tensors(path)
    if "step" not in tensors or tensors["step"].numel() != 1:
        raise UserError(f"{path.name} does not say at which step the optimizer is")
    trained.moments = tuple(_flat(layout, tensors, kind, path, device) for kind in MOMENTS[trained.optimizer_type])
    trained.step = tensors["step"].to(device)
    gradient = directory / GRADIENT_FILE
    if gradient.is_file():
        trained.gradient_P = _flat(layout, read_tensors(gradient), "gradient", gradient, device)


def _named(layout: FullLayout, flat_P: Tensor, kind: str) -> dict[str, Tensor]:
    return {f"{name}.{kind}": view for name, view in layout.views(flat_P.cpu()).items()}


def _flat(layout: FullLayout, tensors: dict[str, Tensor], kind: str, path: Path, device: torch.device) -> Tensor:
    own = {name: tensors[f"{name}.{kind}"] for name in layout.shapes if f"{name}.{kind}" in tensors}
    _check_shapes(layout, own, path)
    return layout.filled(own, device)


def _check_shapes(layout: FullLayout, tensors: dict[str, Tensor], path: Path) -> None:
    for name, shape in layout.shapes.items():
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != shape:
            raise UserError(f"{path.name}: {name} must have {list(shape)}, not {found and list(found)}")
