"""Adapters as files: PEFT's format for the weights, safetensors of our own for the optimizer.

An adapter directory holds adapter_model.safetensors and adapter_config.json exactly as PEFT, vLLM and SGLang
read them, or, where there are experts and whoever saves asks for it, as Tinker's exports are;
`optimizer.safetensors` beside them makes training continue bit for bit, and `gradient.safetensors`, of a snapshot
only, holds what has accumulated and was not stepped. Files are fsynced one by one; making the directory appear at
once is the caller's affair.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinsmith.backends.torch import expert_files
from tinsmith.backends.torch.lora import Adapter, Layout, Target
from tinsmith.backends.torch.optim import MOMENTS
from tinsmith.backends.torch.trained import Trained
from tinsmith.errors import UserError
from tinsmith.types import LORA_ALPHA

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
OPTIMIZER_FILE = "optimizer.safetensors"
GRADIENT_FILE = "gradient.safetensors"

PREFIX = "base_model.model."

MAX_ALPHA = 1e30  # weights are float32

UNSUPPORTED = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias", "fan_in_fan_out",
               "trainable_token_indices", "target_parameters", "layer_replication")  # fmt: skip
"""PEFT settings that change what an adapter computes in ways that we do not have."""


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A saved adapter: name -> (A, B), scaled so that our alpha fits."""

    rank: int
    alpha: float
    pairs: Mapping[str, tuple[Tensor, Tensor]]


def save_adapter(
    adapter: Adapter, base_name: str, module_names: Sequence[str], directory: Path, *, stacked: bool = False
) -> None:
    """`module_names` are the paths of all modules of the base model: target_modules must select ours
    exactly. `stacked`: experts as Tinker's exports have them (see expert_files.py).
    """
    targets, weights = adapter.layout.targets, adapter.layout.views(adapter.flat_P.cpu())
    settings = {} if stacked else expert_files.settings(targets, adapter.layout.rank, int(LORA_ALPHA))
    adapted = [t.name for t in targets if not settings or not (t.bank or expert_files.is_parameter(t))]
    tensors = {}
    for name, (a_rI, b_Or) in (expert_files.packed(weights, targets) if settings else weights).items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a_rI.contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b_Or.contiguous()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": adapter.layout.rank,
        "lora_alpha": int(LORA_ALPHA),
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": _target_modules(adapted, module_names),
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        **settings,
    }
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, directory / WEIGHTS_FILE)
    path = directory / CONFIG_FILE
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    _fsync(path)


def save_optimizer(trained: Trained, directory: Path) -> None:
    layout = trained.adapter.layout
    names = MOMENTS[trained.optimizer_type]
    moments = trained.moments or tuple(torch.zeros_like(trained.adapter.flat_P) for _ in names)
    tensors = {"step": trained.step.cpu()}
    for moment, flat_P in zip(names, moments, strict=True):
        tensors |= _named(layout, flat_P, moment)
    write_tensors(tensors, directory / OPTIMIZER_FILE)


def save_gradient(trained: Trained, directory: Path) -> None:
    """Nothing is written where nothing has accumulated."""
    if trained.gradient_P is not None:
        tensors = _named(trained.adapter.layout, trained.gradient_P, "gradient")
        write_tensors(tensors, directory / GRADIENT_FILE)


def _named(layout: Layout, flat_P: Tensor, kind: str) -> dict[str, Tensor]:
    tensors = {}
    for name, (a_rI, b_Or) in layout.views(flat_P.cpu()).items():
        tensors[f"{name}.lora_A.{kind}"] = a_rI
        tensors[f"{name}.lora_B.{kind}"] = b_Or
    return tensors


def load_adapter(directory: Path, targets: Mapping[str, Target]) -> AdapterFile:
    """Raises UserError unless every tensor has its place in the base model whose `targets` these are."""
    config = _read_config(directory)
    rank, alpha = config["r"], config["lora_alpha"]
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or bool in (type(rank), type(alpha)):
        raise UserError(f"{CONFIG_FILE}: r is {rank!r} and lora_alpha is {alpha!r}; both must be numbers")
    if rank < 1 or not 0 < alpha < MAX_ALPHA:
        raise UserError(f"{CONFIG_FILE}: r is {rank!r} and lora_alpha is {alpha!r}; both must be positive numbers")
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    known = targets.keys() | expert_files.names(targets.values())
    pairs: dict[str, list[Tensor | None]] = {}
    for key, tensor in read_tensors(directory / WEIGHTS_FILE).items():
        name, _, last = key.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
        if last not in ("A", "B") or name not in known:
            raise UserError(f"{WEIGHTS_FILE} holds {key!r}, which this base model cannot carry")
        if not tensor.is_floating_point():
            raise UserError(f"{WEIGHTS_FILE}: {key!r} is {tensor.dtype}; weights must be floating-point numbers")
        pairs.setdefault(name, [None, None])[last == "B"] = tensor.float()
    complete = {}
    for name, (a_rI, b_Or) in expert_files.unpacked(pairs, targets.values(), rank).items():
        sizes = targets[name].shapes(rank)
        if a_rI is None or b_Or is None or (tuple(a_rI.shape), tuple(b_Or.shape)) != sizes:
            raise UserError(f"{WEIGHTS_FILE}: {name} must have lora_A {list(sizes[0])} and lora_B {list(sizes[1])}")
        # Exact when the file is ours: the factor is 1.
        factor = scale / (LORA_ALPHA / rank)
        complete[name] = (a_rI, b_Or if factor == 1.0 else b_Or * factor)
    if not complete:
        raise UserError(f"{WEIGHTS_FILE} holds no adapter")
    return AdapterFile(rank, float(alpha), complete)


def fill(layout: Layout, pairs: Mapping[str, tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """A flat buffer that holds these matrices, which must be the layout's."""
    flat_P = torch.zeros(layout.numel)
    for name, (a_rI, b_Or) in layout.views(flat_P).items():
        a_rI.copy_(pairs[name][0])
        b_Or.copy_(pairs[name][1])
    return flat_P.to(device)


def load_optimizer(trained: Trained, directory: Path) -> None:
    """Raises UserError if there is no optimizer state, or one of another adapter or optimizer family."""
    path = directory / OPTIMIZER_FILE
    if not path.is_file():
        raise UserError("this checkpoint holds no optimizer state; load it without, or save with save_state")
    tensors = read_tensors(path)
    layout, device = trained.adapter.layout, trained.adapter.flat_P.device
    family = trained.optimizer_type
    held = {name.rpartition(".")[2] for name in tensors} - {"step"}
    if "step" not in tensors or tensors["step"].numel() != 1:
        raise UserError(f"{path.name} does not say at which step the optimizer is")
    if held != set(MOMENTS[family]):
        raise UserError(
            f"this checkpoint holds the optimizer state {', '.join(sorted(held))}, which is not that of {family!r} "
            f"({', '.join(MOMENTS[family])}); load it without the optimizer"
        )
    trained.moments = tuple(_flat(layout, tensors, moment, path, device) for moment in MOMENTS[family])
    trained.step = tensors["step"].to(device)


def load_gradient(trained: Trained, directory: Path) -> None:
    """What had accumulated when a snapshot was taken, if anything had."""
    path = directory / GRADIENT_FILE
    if path.is_file():
        adapter = trained.adapter
        trained.gradient_P = _flat(adapter.layout, read_tensors(path), "gradient", path, adapter.flat_P.device)


def _flat(layout: Layout, tensors: Mapping[str, Tensor], kind: str, path: Path, device: torch.device) -> Tensor:
    try:
        pairs = {
            target.name: (tensors[f"{target.name}.lora_A.{kind}"], tensors[f"{target.name}.lora_B.{kind}"])
            for target in layout.targets
        }
    except KeyError as error:
        raise UserError(f"{path.name} has no {error}") from None
    for target in layout.targets:
        # A smaller tensor would be repeated until it fits.
        sizes = target.shapes(layout.rank)
        if (tuple(pairs[target.name][0].shape), tuple(pairs[target.name][1].shape)) != sizes:
            raise UserError(f"{path.name}: {kind} of {target.name} must have {list(sizes[0])} and {list(sizes[1])}")
    return fill(layout, pairs, device)


def _target_modules(adapted: Sequence[str], module_names: Iterable[str]) -> list[str]:
    """Last names if they select exactly the adapted modules, as most readers expect; full paths otherwise."""
    short = {name.rpartition(".")[2] for name in adapted}
    selected = {name for name in module_names if name.rpartition(".")[2] in short}
    return sorted(short if selected == set(adapted) else adapted)


def _read_config(directory: Path) -> dict[str, object]:
    path = directory / CONFIG_FILE
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"there is no {CONFIG_FILE}: not an adapter in PEFT's format") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{CONFIG_FILE} is not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA" or not {"r", "lora_alpha"} <= config.keys():
        raise UserError(f"{CONFIG_FILE} does not describe a LoRA adapter")
    understood = expert_files.understood(config)
    found = [name for name in UNSUPPORTED if config.get(name) and name not in understood]
    if found or config.get("bias", "none") != "none":
        raise UserError(f"{CONFIG_FILE} uses {', '.join(found or ['bias'])}, which is not supported here")
    return config


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise UserError(f"there is no {path.name}: not an adapter in PEFT's format") from None
    except SafetensorError as error:
        raise UserError(f"{path.name} is not a safetensors file: {error}") from None


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
