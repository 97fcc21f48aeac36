"""Experts' adapters in files: as Tinker's exports hold them, and as PEFT does.

Tinker's form is ours in memory: `{experts}.w1`, `.w3` and `.w2`, with A or B of all experts stacked, and one where
they share it. PEFT adapts the two parameters that transformers keeps, `gate_up_proj` and `down_proj`
(`target_parameters`): gate and up become one adapter of twice the rank, whose B is zero across the halves, and what
experts share is repeated for each. Both forms hold the same numbers, and either is read back exactly; an adapter of
PEFT's own whose experts share nothing is refused. Knows no directory.

Shapes: E experts, r rank, D hidden size, I inner size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.backends.torch.lora import Pair, Target
from tinsmith.errors import UserError

GATE_UP, DOWN = "gate_up_proj", "down_proj"
RANK_KEY = "experts.gate_up_proj"
"""Where PEFT's rank_pattern and alpha_pattern say that gate and up are one adapter of twice the rank."""

SETTINGS = ("target_parameters", "rank_pattern", "alpha_pattern")

RESERVED = frozenset({"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"})
"""Last names of linears that PEFT takes for experts of an older layout: beside experts it wants them as parameters."""


class _Experts(NamedTuple):
    """One module of experts: its path, and the targets w1, w3 and w2 of it."""

    path: str
    gate: Target
    up: Target
    down: Target

    @property
    def num_experts(self) -> int:
        assert self.gate.bank is not None
        return self.gate.bank.num_experts

    def halves(self) -> tuple[slice, slice]:
        """Where gate and up are among the outputs of `gate_up_proj`."""
        assert self.gate.bank is not None
        if self.gate.bank.interleaved:
            return slice(0, None, 2), slice(1, None, 2)
        return slice(0, self.gate.out_features), slice(self.gate.out_features, None)


def names(targets: Iterable[Target]) -> set[str]:
    """What tensors of PEFT's form are called, beside the targets themselves."""
    return {name for experts in _modules(targets) for name in (_outer(experts.path), experts.path)}


def understood(config: Mapping[str, object]) -> frozenset[str]:
    """Those of SETTINGS that say what `settings` writes; they need no refusal."""
    rank, alpha = config["r"], config["lora_alpha"]
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        return frozenset()
    patterns = {"rank_pattern": {RANK_KEY: 2 * rank}, "alpha_pattern": {RANK_KEY: 2 * alpha}}
    return frozenset(SETTINGS) if all(config.get(name) == value for name, value in patterns.items()) else frozenset()


def settings(targets: Iterable[Target], rank: int, alpha: int) -> dict[str, object]:
    """What PEFT's configuration says of an adapter of these targets; nothing if it has no experts."""
    targets = list(targets)
    paths = [experts.path for experts in _modules(targets)]
    if not paths:
        return {}
    linears = [f"{target.name}.weight" for target in targets if is_parameter(target)]
    return {
        "target_parameters": [f"{path}.{name}" for path in paths for name in (GATE_UP, DOWN)] + linears,
        "rank_pattern": {RANK_KEY: 2 * rank},
        "alpha_pattern": {RANK_KEY: 2 * alpha},
    }


def is_parameter(target: Target) -> bool:
    """Whether PEFT wants this linear as a parameter, where there are experts."""
    return target.bank is None and target.name.rpartition(".")[2] in RESERVED


def packed(weights: Mapping[str, Pair], targets: Iterable[Target]) -> dict[str, Pair]:
    """PEFT's form of the same adapter."""
    out = dict(weights)
    for experts in _modules(targets):
        (gate_a, gate_b), (up_a, up_b), (down_a, down_b) = (
            out.pop(target.name) for target in (experts.gate, experts.up, experts.down)
        )
        num_experts, (gate_rows, up_rows) = experts.num_experts, experts.halves()
        rank = down_a.shape[1]
        a_RD = torch.cat((gate_a[0], up_a[0]))
        b_GRE = a_RD.new_zeros(2 * experts.gate.out_features, 2 * rank, num_experts)
        b_GRE[gate_rows, :rank] = gate_b.permute(1, 2, 0)
        b_GRE[up_rows, rank:] = up_b.permute(1, 2, 0)
        out[_outer(experts.path)] = a_RD.repeat(num_experts, 1), b_GRE.flatten(1)
        out[experts.path] = down_a.flatten(0, 1), down_b[0].repeat_interleave(num_experts, 1)
    return out


def unpacked(
    pairs: Mapping[str, Sequence[Tensor | None]], targets: Iterable[Target], rank: int
) -> dict[str, Sequence[Tensor | None]]:
    """Our form of what may be in PEFT's; a matrix that the file lacks is None. Raises UserError on adapters whose
    experts do not share what ours do.
    """
    out = dict(pairs)
    for experts in _modules(targets):
        outer, inner = (out.pop(name, None) for name in (_outer(experts.path), experts.path))
        if outer is None and inner is None:
            continue
        num_experts, (gate_rows, up_rows) = experts.num_experts, experts.halves()
        width, hidden = experts.gate.out_features, experts.gate.in_features
        outer_sizes = (num_experts * 2 * rank, hidden), (2 * width, 2 * rank * num_experts)
        outer_a, outer_b = _checked(f"{experts.path}.{GATE_UP}", outer, outer_sizes)
        inner_sizes = (num_experts * rank, width), (hidden, rank * num_experts)
        inner_a, inner_b = _checked(f"{experts.path}.{DOWN}", inner, inner_sizes)
        a_ERD = outer_a.view(num_experts, 2 * rank, hidden)
        b_EGR = outer_b.view(2 * width, 2 * rank, num_experts).permute(2, 0, 1)
        b_EDr = inner_b.view(hidden, rank, num_experts).permute(2, 0, 1)
        if not (
            torch.equal(a_ERD, a_ERD[:1].expand_as(a_ERD))
            and torch.equal(b_EDr, b_EDr[:1].expand_as(b_EDr))
            and not b_EGR[:, gate_rows, rank:].any()
            and not b_EGR[:, up_rows, :rank].any()
        ):
            raise UserError(
                f"{experts.path}: here all experts share A of gate and of up, and B of {DOWN} (docs/decisions.md); "
                "this adapter's have their own"
            )
        out[experts.gate.name] = a_ERD[:1, :rank], b_EGR[:, gate_rows, :rank]
        out[experts.up.name] = a_ERD[:1, rank:], b_EGR[:, up_rows, rank:]
        out[experts.down.name] = inner_a.view(num_experts, rank, width), b_EDr[:1]
    return out


def _modules(targets: Iterable[Target]) -> Iterator[_Experts]:
    found: dict[str, dict[str, Target]] = {}
    for target in targets:
        if target.bank is not None:
            path, _, last = target.name.rpartition(".")
            found.setdefault(path, {})[last] = target
    for path, own in found.items():
        yield _Experts(path, own["w1"], own["w3"], own["w2"])


def _outer(path: str) -> str:
    """PEFT wraps a module once for each parameter; the first one it meets is innermost."""
    return f"{path}.base_layer"


def _checked(name: str, pair: Sequence[Tensor | None] | None, sizes: tuple[tuple[int, int], tuple[int, int]]) -> Pair:
    a_rI, b_Or = pair or (None, None)
    if a_rI is None or b_Or is None or (tuple(a_rI.shape), tuple(b_Or.shape)) != sizes:
        raise UserError(f"{name} must have lora_A {list(sizes[0])} and lora_B {list(sizes[1])}")
    return a_rI, b_Or
