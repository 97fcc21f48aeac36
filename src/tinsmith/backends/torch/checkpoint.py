"""Adapters as files: PEFT's format for the weights, our own safetensors files for the optimizer.

An adapter directory holds adapter_model.safetensors and adapter_config.json exactly as PEFT, vLLM and SGLang read them,
or, if `stacked` is set, with experts in the format of Tinker's exports. `optimizer.safetensors` makes training continue
bit for bit; `gradient.safetensors`, beside it, holds the accumulated gradient, if any. Files are fsynced one by one;
publishing the directory atomically is up to the caller.

Tinker's format is ours in memory: `{experts}.w1`, `.w3` and `.w2`, with A or B of all experts stacked, and a single one
where they share it. PEFT adapts the two parameters of transformers, `gate_up_proj` and `down_proj`
(`target_parameters`): gate and up become one adapter of twice the rank, whose B is zero across the halves, and shared
matrices are repeated for each expert. Experts without a gate have `.w1` and `up_proj` instead. Both formats hold the
same values, and either is read back exactly; a PEFT adapter whose experts share nothing is refused. A linear with an
adapter for each of several parts is one adapter to PEFT, too: of the sum of their ranks, with a B that is zero across
the parts.

Shapes: E experts, r rank, D hidden size, I inner size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinsmith.backends.torch.adapters import Adapter, Layout, Pair, Target, TrainedModel
from tinsmith.errors import UserError
from tinsmith.types import OPTIMIZERS
from tinsmith.wire.adapter_files import (
    CONFIG_FILE,
    EXPERTS_PATTERN,
    GRADIENT_FILE,
    OPTIMIZER_FILE,
    UNEMBED_TOKENS,
    WEIGHTS_FILE,
    WRAPPED,
    describe_patterns,
    encode_config,
    matrix_keys,
    read_adapter,
    refuse_invalid,
    text_name,
    wrapper_name,
)

GATE_UP, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"

RESERVED = frozenset({"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"})
"""Last names of linears that PEFT takes for experts of an older layout: next to experts it wants them as parameters."""


Sizes = tuple[int, int]


class _Experts(NamedTuple):
    """One module of experts: its path, the targets that read hidden states (w1 and w3, or w1 alone), and w2."""

    path: str
    outer: tuple[Target, ...]
    down: Target

    @property
    def num_experts(self) -> int:
        assert self.down.experts is not None
        return self.down.experts.num_experts

    @property
    def outer_parameter(self) -> str:
        return GATE_UP if len(self.outer) == 2 else UP

    def as_peft(self, pair: Pair) -> Pair:
        """A [E * r, I] and B [O, r * E] as PEFT stores them, or such a pair as we store it. Swapped, they are B and A
        of each expert, transposed.
        """
        assert self.down.experts is not None
        if not self.down.experts.swapped:
            return pair
        (a_RI, b_OR), num = pair, self.num_experts
        by_expert, by_output = a_RI.view(num, -1, a_RI.shape[1]), b_OR.view(len(b_OR), -1, num)
        return by_output.permute(2, 1, 0).flatten(0, 1), by_expert.permute(2, 1, 0).flatten(1)

    def check_pair(self, parameter: str, pair: Pair | None, sizes: tuple[Sizes, Sizes]) -> Pair:
        """A and B of one parameter from PEFT's pair. Raises UserError unless they have these sizes."""
        assert self.down.experts is not None
        name = f"{self.path}.{parameter}"
        if not self.down.experts.swapped:
            return _check_sizes(name, pair, sizes)
        (num_a, inputs), (outputs, num_b) = sizes
        return self.as_peft(_check_sizes(name, pair, ((num_a, outputs), (inputs, num_b))))

    def outer_rows(self) -> tuple[slice, ...]:
        """The output rows of each of `outer` in their parameter."""
        gate = self.outer[0]
        assert gate.experts is not None
        if len(self.outer) == 1:
            return (slice(None),)
        if gate.experts.interleaved:
            return slice(0, None, 2), slice(1, None, 2)
        return slice(0, gate.out_features), slice(gate.out_features, None)


def list_peft_names(targets: Iterable[Target]) -> set[str]:
    """Names of tensors in PEFT's format that are not targets themselves."""
    targets = list(targets)
    return {
        name for experts in _expert_modules(targets) for name in (_outer_path(experts.path), experts.path)
    } | _group_parts(targets).keys()


def adapter_settings(targets: Iterable[Target], rank: int, alpha: float) -> dict[str, object]:
    """PEFT's extra settings for an adapter with these targets; empty without experts and parts."""
    targets = list(targets)
    multiples, modules = _rank_multiples(targets), list(_expert_modules(targets))
    if not multiples and not modules:
        return {}
    settings: dict[str, object] = {**describe_patterns(rank, alpha, multiples)}
    if modules:
        linears = [f"{target.name}.weight" for target in targets if is_parameter(target)]
        parameters = [f"{experts.path}.{name}" for experts in modules for name in (experts.outer_parameter, DOWN)]
        settings["target_parameters"] = parameters + linears
    return settings


def peft_linears(targets: Iterable[Target]) -> list[str]:
    """The paths of the linears that PEFT adapts as modules."""
    targets = list(targets)
    has_experts = any(target.experts for target in targets)
    plain = [t for t in targets if not (t.experts or (has_experts and is_parameter(t)))]
    return list(dict.fromkeys(t.part.linear_name if t.part else t.name for t in plain))


def _rank_multiples(targets: Iterable[Target]) -> dict[str, int]:
    """Path suffixes, as in PEFT's patterns, for which PEFT's rank is a multiple of ours."""
    targets = list(targets)
    times = {
        linear_name.rpartition(".")[2]: parts[0].part.num_parts
        for linear_name, parts in _group_parts(targets).items()
        if parts[0].part
    }
    has_gates = any(len(experts.outer) == 2 for experts in _expert_modules(targets))
    return times | ({EXPERTS_PATTERN: 2} if has_gates else {})


def _group_parts(targets: Iterable[Target]) -> dict[str, list[Target]]:
    """Path of a linear -> the parts of it that carry adapters, in order."""
    parts_by_linear: dict[str, list[Target]] = {}
    for target in targets:
        if target.part is not None:
            parts_by_linear.setdefault(target.part.linear_name, []).append(target)
    return parts_by_linear


def is_parameter(target: Target) -> bool:
    """Whether PEFT wants this linear as a parameter if there are experts."""
    return target.experts is None and target.name.rpartition(".")[2] in RESERVED


def convert_to_peft(weights: Mapping[str, Pair], targets: Iterable[Target]) -> dict[str, Pair]:
    """An adapter's matrices in PEFT's format, from those in ours."""
    out = dict(weights)
    for linear_name, parts in _group_parts(targets).items():
        pairs = [out.pop(target.name) for target in parts]
        assert parts[0].part is not None
        rank = len(pairs[0][0])
        b_OR = pairs[0][1].new_zeros(parts[0].part.num_rows, rank * len(parts))
        for index, (rows, (_, b_Or)) in enumerate(zip(_part_rows(parts), pairs, strict=True)):
            b_OR[rows, index * rank : (index + 1) * rank] = b_Or
        out[linear_name] = torch.cat([a_rI for a_rI, _ in pairs]), b_OR
    for experts in _expert_modules(targets):
        outer, (down_a, down_b) = [out.pop(target.name) for target in experts.outer], out.pop(experts.down.name)
        num_experts, num_outer, rank = experts.num_experts, len(experts.outer), down_a.shape[1]
        a_RD = torch.cat([a_1rD[0] for a_1rD, _ in outer])
        b_GRE = a_RD.new_zeros(num_outer * experts.down.in_features, num_outer * rank, num_experts)
        for index, (rows, (_, b_EIr)) in enumerate(zip(experts.outer_rows(), outer, strict=True)):
            b_GRE[rows, index * rank : (index + 1) * rank] = b_EIr.permute(1, 2, 0)
        out[_outer_path(experts.path)] = experts.as_peft((a_RD.repeat(num_experts, 1), b_GRE.flatten(1)))
        out[experts.path] = experts.as_peft((down_a.flatten(0, 1), down_b[0].repeat_interleave(num_experts, 1)))
    return out


def convert_from_peft(pairs: Mapping[str, Pair], targets: Iterable[Target], rank: int) -> dict[str, Pair]:
    """The adapter in our format; `pairs` may be in PEFT's. Raises UserError if experts do not share the matrices that
    ours share, or if outputs change that carry no adapter.
    """
    out = dict(pairs)
    for linear_name, parts in _group_parts(targets).items():
        if (pair := out.pop(linear_name, None)) is not None:
            out |= _split_parts(linear_name, parts, pair, rank)
    for experts in _expert_modules(targets):
        outer, inner = (out.pop(name, None) for name in (_outer_path(experts.path), experts.path))
        if outer is None and inner is None:
            continue
        num_experts, num_outer = experts.num_experts, len(experts.outer)
        width, hidden = experts.down.in_features, experts.down.out_features
        outer_sizes = (num_experts * num_outer * rank, hidden), (num_outer * width, num_outer * rank * num_experts)
        outer_a, outer_b = experts.check_pair(experts.outer_parameter, outer, outer_sizes)
        inner_sizes = (num_experts * rank, width), (hidden, rank * num_experts)
        inner_a, inner_b = experts.check_pair(DOWN, inner, inner_sizes)
        a_ERD = outer_a.view(num_experts, num_outer * rank, hidden)
        b_EGR = outer_b.view(num_outer * width, num_outer * rank, num_experts).permute(2, 0, 1)
        unassigned_EGR = b_EGR.clone()
        for index, (target, rows) in enumerate(zip(experts.outer, experts.outer_rows(), strict=True)):
            ranks = slice(index * rank, (index + 1) * rank)
            out[target.name] = a_ERD[:1, ranks], b_EGR[:, rows, ranks]
            unassigned_EGR[:, rows, ranks] = 0
        b_EDr = inner_b.view(hidden, rank, num_experts).permute(2, 0, 1)
        if not (
            torch.equal(a_ERD, a_ERD[:1].expand_as(a_ERD))
            and torch.equal(b_EDr, b_EDr[:1].expand_as(b_EDr))
            and not unassigned_EGR.any()
        ):
            raise UserError(
                f"{experts.path}: here all experts share A of gate and of up, and B of {DOWN} (docs/decisions.md); "
                "this adapter's experts have their own"
            )
        out[experts.down.name] = inner_a.view(num_experts, rank, width), b_EDr[:1]
    return out


def _split_parts(linear_name: str, parts: Sequence[Target], pair: Pair, rank: int) -> dict[str, Pair]:
    """The adapter of each part, from one of the summed ranks, or of a single rank, whose A the parts then share."""
    assert parts[0].part is not None
    num_rows, inputs, num_parts = parts[0].part.num_rows, parts[0].in_features, len(parts)
    shares = len(pair[0]) == rank
    width = rank if shares else rank * num_parts
    a_RI, b_OR = _check_sizes(linear_name, pair, ((width, inputs), (num_rows, width)))
    pairs, unassigned_OR = {}, b_OR.clone()
    for index, (target, rows) in enumerate(zip(parts, _part_rows(parts), strict=True)):
        ranks = slice(None) if shares else slice(index * rank, (index + 1) * rank)
        pairs[target.name] = a_RI[ranks], b_OR[rows, ranks]
        unassigned_OR[rows, ranks] = 0
    if unassigned_OR.any():
        part_names = ", ".join(target.name.rpartition(".")[2] for target in parts)
        raise UserError(
            f"{linear_name}: here {part_names} carry one adapter each (docs/decisions.md); this one cannot be split"
        )
    return pairs


def _part_rows(parts: Iterable[Target]) -> list[slice]:
    return [slice(t.part.start, t.part.start + t.out_features) for t in parts if t.part is not None]


def _expert_modules(targets: Iterable[Target]) -> Iterator[_Experts]:
    targets_by_path: dict[str, dict[str, Target]] = {}
    for target in targets:
        if target.experts is not None:
            path, _, last = target.name.rpartition(".")
            targets_by_path.setdefault(path, {})[last] = target
    for path, targets_by_name in targets_by_path.items():
        yield _Experts(
            path,
            tuple(targets_by_name[name] for name in ("w1", "w3") if name in targets_by_name),
            targets_by_name["w2"],
        )


def _outer_path(path: str) -> str:
    """PEFT wraps a module once per parameter; the first parameter is innermost."""
    return f"{path}.base_layer"


def _check_sizes(name: str, pair: Pair | None, sizes: tuple[Sequence[int], Sequence[int]]) -> Pair:
    if pair is None or tuple(tuple(matrix.shape) for matrix in pair) != sizes:
        raise UserError(f"{WEIGHTS_FILE}: {name} must have lora_A {list(sizes[0])} and lora_B {list(sizes[1])}")
    return pair


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A saved adapter: name -> (A, B). The scale of B @ A is `alpha / rank`."""

    rank: int
    alpha: float
    pairs: Mapping[str, tuple[Tensor, Tensor]]


def save_adapter(
    adapter: Adapter,
    base_name: str,
    module_names: Sequence[str],
    directory: Path,
    *,
    stacked: bool = False,
    tied_head: str | None = None,
) -> None:
    """`module_names` are the paths of all modules of the base model: target_modules must select ours exactly.
    `stacked`: experts and names as in Tinker's exports, with the names of the standalone text model; otherwise PEFT can
    load it into the model, including a model with a wrapper around its text model. `tied_head` is the unembedding that
    a stacked adapter gives Tinker's name, since the base's files hold no weights of it.
    """
    targets, weights = adapter.layout.targets, adapter.layout.views(adapter.flat_P.cpu())
    rank, alpha = adapter.layout.rank, adapter.spec.alpha
    settings = {} if stacked else adapter_settings(targets, rank, alpha)
    adapted = [target.name for target in targets] if not settings else peft_linears(targets)
    path_of = text_name
    if stacked:
        path_of = _tinker_name(tied_head)
        module_names = [path_of(name) for name in module_names]
    elif any(name.startswith(WRAPPED) for name in module_names):
        path_of = wrapper_name
    if "target_parameters" in settings:
        settings["target_parameters"] = [path_of(name) for name in cast("list[str]", settings["target_parameters"])]
    tensors = {}
    for name, pair in (convert_to_peft(weights, targets) if settings else weights).items():
        for key, matrix in zip(matrix_keys(path_of(name)), pair, strict=True):
            tensors[key] = matrix.contiguous()
    target_modules = _target_modules([path_of(name) for name in adapted], module_names)
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, directory / WEIGHTS_FILE)
    path = directory / CONFIG_FILE
    path.write_text(encode_config(base_name, rank, alpha, target_modules, settings))
    _fsync(path)


def _tinker_name(tied_head: str | None) -> Callable[[str], str]:
    """Return the map from a module's path to its name in Tinker's exports."""

    def path_of(name: str) -> str:
        return UNEMBED_TOKENS if name == tied_head else text_name(name)

    return path_of


def fill_buffer(
    layout: Layout,
    pairs: Mapping[str, Pair],
    device: torch.device,
    factor: float = 1.0,
    initial_P: Tensor | None = None,
) -> Tensor:
    """A flat buffer with what the layout holds of these matrices, which are those of all experts; each B is multiplied
    by `factor`. `initial_P`, on the host, has the matrices that are not among `pairs`.
    """
    flat_P = torch.zeros(layout.numel) if initial_P is None else initial_P
    views = layout.views(flat_P)
    for target in layout.targets:
        if initial_P is not None and target.name not in pairs:
            continue
        for matrix, local_matrix in enumerate(views[target.name]):
            local_matrix.copy_(target.select(matrix, pairs[target.name][matrix]))
        if factor != 1.0:
            views[target.name][1].mul_(factor)
    return flat_P.to(device)


NameTensors = Callable[["TrainedModel", Tensor, str], dict[str, Tensor]]
"""Maps a whole model's flat buffer [P] to tensors of a file, whose names end in `kind`."""

FlattenTensors = Callable[["TrainedModel", Mapping[str, Tensor], str, Path], Tensor]
"""Maps tensors of a file to a flat buffer [P] of what this process holds. Raises UserError unless every tensor of the
model is present, in its shape.
"""


def name_pairs(trained: TrainedModel, flat_P: Tensor, kind: str) -> dict[str, Tensor]:
    tensors = {}
    for name, (a_rI, b_Or) in trained.adapter.layout.views(flat_P.cpu()).items():
        tensors[f"{name}.lora_A.{kind}"] = a_rI
        tensors[f"{name}.lora_B.{kind}"] = b_Or
    return tensors


def _flat_pairs(trained: TrainedModel, tensors: Mapping[str, Tensor], kind: str, path: Path) -> Tensor:
    layout, device = trained.adapter.layout, trained.adapter.flat_P.device
    try:
        pairs = {
            target.name: (tensors[f"{target.name}.lora_A.{kind}"], tensors[f"{target.name}.lora_B.{kind}"])
            for target in layout.targets
        }
    except KeyError as error:
        raise UserError(f"{path.name} has no {error}") from None
    for target in layout.targets:
        # copy_ would broadcast a smaller tensor.
        sizes = target.hold(None).shapes(layout.rank)
        if (tuple(pairs[target.name][0].shape), tuple(pairs[target.name][1].shape)) != sizes:
            raise UserError(f"{path.name}: {kind} of {target.name} must have {list(sizes[0])} and {list(sizes[1])}")
    return fill_buffer(layout, pairs, device)


def save_optimizer(trained: TrainedModel, directory: Path, name_tensors: NameTensors = name_pairs) -> None:
    state_names = OPTIMIZERS[trained.optimizer_type].state
    assert trained.share is None
    moments = trained.moments or tuple(torch.zeros_like(trained.adapter.flat_P) for _ in state_names)
    tensors = {"step": trained.step.cpu()}
    for state_name, flat_P in zip(state_names, moments, strict=True):
        tensors |= name_tensors(trained, flat_P, state_name)
    write_tensors(tensors, directory / OPTIMIZER_FILE)


def save_gradient(trained: TrainedModel, directory: Path, name_tensors: NameTensors = name_pairs) -> None:
    """Writes nothing if no gradient has accumulated."""
    if trained.gradient_P is not None:
        write_tensors(name_tensors(trained, trained.gradient_P, "gradient"), directory / GRADIENT_FILE)


def load_adapter(directory: Path, targets: Mapping[str, Target]) -> AdapterFile:
    """Raises UserError unless every tensor belongs to one of `targets`, those of the base model with all experts."""
    head = next((name for name, target in targets.items() if target.group == "unembed"), UNEMBED_TOKENS)
    info = read_adapter(directory, plain=True, multiples=_rank_multiples(targets.values()), head=head, stacked=True)
    known_names = targets.keys() | list_peft_names(targets.values())
    tensors = read_tensors(directory / WEIGHTS_FILE)
    pairs: dict[str, Pair] = {}
    for path, linear in info.linears.items():
        if (name := text_name(path)) not in known_names:
            raise UserError(f"{WEIGHTS_FILE} holds {linear.keys[0]!r}, which this base model cannot carry")
        key_a, key_b = linear.keys
        pairs[name] = tensors[key_a].float(), tensors[key_b].float()
    pairs = convert_from_peft(pairs, targets.values(), info.rank)
    for name, pair in pairs.items():
        _check_sizes(name, pair, targets[name].shapes(info.rank))
    return AdapterFile(info.rank, info.alpha_over_rank, pairs)


def load_optimizer(trained: TrainedModel, directory: Path, flatten_tensors: FlattenTensors = _flat_pairs) -> None:
    """Raises UserError without optimizer state, or if it belongs to another adapter or optimizer."""
    path = directory / OPTIMIZER_FILE
    if not path.is_file():
        raise UserError("this checkpoint holds no optimizer state; load it without, or save with save_state")
    tensors = read_tensors(path)
    family = trained.optimizer_type
    saved_names = {name.rpartition(".")[2] for name in tensors} - {"step"}
    if "step" not in tensors or tensors["step"].numel() != 1:
        raise UserError(f"{path.name} has no optimizer step")
    if saved_names != set(OPTIMIZERS[family].state):
        raise UserError(
            f"this checkpoint holds the optimizer state {', '.join(sorted(saved_names))}, which is not that of "
            f"{family!r} ({', '.join(OPTIMIZERS[family].state)}); load it without the optimizer"
        )
    trained.moments = tuple(
        trained.select(flatten_tensors(trained, tensors, state_name, path)) for state_name in OPTIMIZERS[family].state
    )
    # A copy: a view would keep the whole file mapped, and on the disk after its deletion.
    trained.step = tensors["step"].to(trained.adapter.flat_P.device, copy=True)


def load_gradient(trained: TrainedModel, directory: Path, flatten_tensors: FlattenTensors = _flat_pairs) -> None:
    """Load the gradient that had accumulated when the files were written, if any."""
    path = directory / GRADIENT_FILE
    if path.is_file():
        trained.gradient_P = trained.select(flatten_tensors(trained, read_tensors(path), "gradient", path))


def _target_modules(adapted: Sequence[str], module_names: Iterable[str]) -> list[str]:
    """Last names if they select exactly the adapted modules, as most readers expect; otherwise full paths."""
    short = {name.rpartition(".")[2] for name in adapted}
    selected = {name for name in module_names if name.rpartition(".")[2] in short}
    return sorted(short if selected == set(adapted) else adapted)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Raises UserError if it is not a complete safetensors file."""
    with refuse_invalid(path):
        return load_file(path)


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
