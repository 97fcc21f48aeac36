"""A plan as people read it, and as programs do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from tinsmith.plan import memory
from tinsmith.plan.degrees import MODES, Plan, described, gib

ROWS = {
    "base": "frozen base model",
    "adapters": "adapters in training, with gradients and optimizer state",
    "activations": "activations of a whole micro-batch",
    "least_activations": "activations of one sequence, computed again",
    "keys_and_values": "keys and values of one context",
    "reserved": "the process and its libraries",
}


def rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """What of a device goes to whom."""
    needs = asdict(plan.needs)
    for name, what in ROWS.items():
        yield what, gib(needs[name])
    for mode, what in MODES.items():
        yield f"all of it, if {what}", gib(plan.needs.total(mode))
    yield "there is", gib(plan.wanted.memory_bytes)


def headline(plan: Plan) -> str:
    return described(plan.degrees) if plan.fits else f"nothing fits; the least short: {described(plan.degrees)}"


def summary(plan: Plan) -> str:
    """The model, and what was asked for, in a line."""
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
