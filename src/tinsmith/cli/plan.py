"""`tinsmith doctor MODEL`: plans where a base model fits, from its configuration and the flags, and shows the plan.

What the flags leave open is read from this machine. Loads no weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ByteSize, TypeAdapter, ValidationError

from tinsmith import base_models
from tinsmith.errors import SettingsError
from tinsmith.plan import memory
from tinsmith.plan.architecture import Architecture, read_directory, size_of_files
from tinsmith.plan.degrees import MODES, Degrees, Plan, Wanted, check, choose, described, gib
from tinsmith.plan.memory import NUMBER_BYTES, QUANTISED_BYTES

LARGEST_RANK = 256


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The flags; None where one was not given."""

    model: str
    gpus: int | None = None
    memory: str | None = None
    rank: int = 32
    context: int | None = None
    adapters: int = 1
    dtype: str | None = None
    quantize: str = "off"
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    shard_base: bool = False


def plan_of(request: PlanRequest) -> Plan:
    """Raises SettingsError for invalid flags, and if the model does not fit the given degrees."""
    directory = find(request.model)
    model = read_directory(directory)
    _compare(model, directory)
    wanted = _wanted(request, model)
    if request.tensor_parallel is None and request.data_parallel is None and not request.shard_base:
        return choose(model, wanted)
    tensor = request.tensor_parallel or 1
    data = request.data_parallel or max(1, wanted.devices // max(1, tensor))
    return check(model, wanted, Degrees(data, tensor, request.shard_base))


def find(model: str) -> Path:
    """The path of a directory or config.json, or where the server would find this model."""
    path = Path(model.partition("=")[2] or model).expanduser()
    return path if path.exists() else Path(next(iter(base_models.resolve([model]))).path)


def _compare(model: Architecture, directory: Path) -> None:
    """Raises SettingsError if the files hold fewer weights than the configuration counts."""
    found = size_of_files(directory)
    # Tied embeddings are often stored twice, and quantised weights in other shapes.
    if found and found[0] < model.num_parameters and found[1] >= 2 * model.num_parameters:
        raise SettingsError(
            f"{directory}: its config.json tells of {model.num_parameters:,} weights, its files hold {found[0]:,}"
        )


def _wanted(request: PlanRequest, model: Architecture) -> Wanted:
    devices, memory_bytes, cuda = request.gpus, None, True
    if request.memory is not None:
        memory_bytes = _bytes_of(request.memory)
    if devices is None or memory_bytes is None:
        found = _this_machine()
        devices, memory_bytes = devices or found[0], memory_bytes or found[1]
        cuda = found[2] or request.gpus is not None
    dtype = request.dtype or ("bfloat16" if cuda else "float32")
    context = request.context or 0
    longest = f"it must be from 1 to the model's own {model.context:,}"
    for name, value, good, hint in (
        ("--gpus", devices, devices >= 1, "it must be at least 1"),
        ("--rank", request.rank, 1 <= request.rank <= LARGEST_RANK, f"it must be from 1 to {LARGEST_RANK}"),
        ("--adapters", request.adapters, request.adapters >= 1, "it must be at least 1"),
        ("--context", request.context, request.context is None or 1 <= context <= model.context, longest),
        ("--dtype", dtype, dtype in NUMBER_BYTES, "choose bfloat16 or float32"),
        ("--quantize", request.quantize, request.quantize in ("off", *QUANTISED_BYTES), "choose off, int8 or nf4"),
    ):
        if not good:
            raise SettingsError(f"{name} is {value!r}; {hint}")
    return Wanted(devices, memory_bytes, request.rank, context, dtype, request.quantize, request.adapters, cuda)


def _bytes_of(text: str) -> int:
    try:
        found = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        found = 0
    if found <= 0:
        raise SettingsError(f"--memory is {text!r}; write a size such as 80GB or 24GiB")
    return found


def _this_machine() -> tuple[int, int, bool]:
    """Devices, bytes of each, and whether they are GPUs."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory, True
    return 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), False


ROWS = {
    "base": "frozen base model",
    "adapters": "adapters in training, with gradients and optimizer state",
    "activations": "activations of a whole micro-batch",
    "least_activations": "activations of one sequence, computed again",
    "keys_and_values": "keys and values of one context",
    "reserved": "the process and its libraries",
}


def rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """The memory of each device, by use."""
    needs = asdict(plan.needs)
    for name, what in ROWS.items():
        yield what, gib(needs[name])
    for mode, what in MODES.items():
        yield f"all of it, if {what}", gib(plan.needs.total(mode))
    yield "there is", gib(plan.wanted.memory_bytes)


def headline(plan: Plan) -> str:
    return described(plan.degrees) if plan.fits else f"nothing fits; the least short: {described(plan.degrees)}"


def summary(plan: Plan) -> str:
    """The model and the flags in a line."""
    model, wanted = plan.model, plan.wanted
    active = f" ({billions(model.num_active)} of them active)" if model.has_experts else ""
    return (
        f"{model.model_type}: {billions(model.num_parameters)} parameters{active} in {wanted.dtype}"
        f"{'' if wanted.quantize == 'off' else ', ' + wanted.quantize}; {wanted.models} adapter(s) of rank "
        f"{wanted.rank}, sequences of {wanted.context_of(model)} tokens, {wanted.devices} x {gib(wanted.memory_bytes)}"
    )


def as_json(plan: Plan) -> dict[str, object]:
    model, wanted = plan.model, plan.wanted
    return {
        "model_type": model.model_type,
        "parameters": model.num_parameters,
        "active_parameters": model.num_active,
        "wanted": {**asdict(wanted), "context": wanted.context_of(model)},
        "data_parallel": plan.degrees.data,
        "tensor_parallel": plan.degrees.tensor,
        "shard_base": plan.degrees.shard_base,
        "plan": described(plan.degrees),
        "fits": plan.fits,
        "mode": plan.mode or None,
        "missing_bytes": plan.missing_bytes,
        "bytes_per_device": {
            **asdict(plan.needs),
            "key_value_bytes_per_token": memory.key_value_bytes(model, dtype=wanted.dtype, tensor=plan.degrees.tensor),
            **{f"total_{mode.replace(' ', '_')}": plan.needs.total(mode) for mode in MODES},
        },
        "words": list(plan.words),
    }


def billions(numbers: int) -> str:
    if numbers < 10**8:
        return f"{numbers / 1e6:.1f} M"
    return f"{numbers / 1e9:.2f} B" if numbers < 10**10 else f"{numbers / 1e9:.1f} B"
