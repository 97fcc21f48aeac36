"""Many LoRA adapters over one frozen linear: rows of a packed batch, each segment with its own adapter.

Owns: an adapter's weights (one flat float32 buffer with a view per matrix, so that the optimizer, a publish
and a clone are a few calls whatever the number of layers), the routing of rows to adapters, and the linear
that applies it. A row only ever meets its own segment's adapter (`sites`), so what is not finite in one never reaches
another. Gradients of A and B are added straight into the adapter's own float32 buffers during backward;
nothing is a leaf of autograd. Knows no loss, no optimizer, no file and no tenant.

Shapes: T rows of a packed batch, n rows of a segment, S segments of a run, I inputs, O outputs, r rank, P all
numbers of an adapter.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tinsmith.backends.torch.gradients import Group, Place, groups_of, view_of
from tinsmith.backends.torch.lora_ops import Shares, Site, Stacks
from tinsmith.backends.torch.products import product
from tinsmith.backends.torch.stretches import Stretch, stretches_of
from tinsmith.types import LORA_ALPHA, LoraSpec

ALIGN = 16
"""Every matrix starts at a multiple of this many numbers: 64 bytes, which vector units and tensor cores
like.
"""

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Bank:
    """That a target is one projection of all experts of a mixture, and which of its matrices, 'A' or 'B', they have in
    common. `interleaved`: outputs of gate and up alternate in the model's own parameter.
    """

    num_experts: int
    common: str
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Target:
    """One linear, or one projection of experts, that may carry adapters: its path, its group and its sizes."""

    name: str
    group: str  # 'attn', 'mlp' or 'unembed'
    in_features: int
    out_features: int
    bank: Bank | None = None

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of A [r, I] and B [O, r]; those of experts are stacked, [E, r, I] and [E, O, r]."""
        a_shape, b_shape = (rank, self.in_features), (self.out_features, rank)
        if self.bank is None:
            return a_shape, b_shape
        num_a, num_b = (1 if self.bank.common == matrix else self.bank.num_experts for matrix in "AB")
        return (num_a, *a_shape), (num_b, *b_shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each matrix of an adapter lies in its flat buffer: all A's, then all B's, so that neighbours' A's are one
    matrix. Gaps between matrices stay zero for ever. Equal layouts are one object.
    """

    rank: int
    targets: tuple[Target, ...]
    numel: int
    places: Mapping[str, tuple[Place, Place]] = field(repr=False, compare=False)
    """name -> those of A and B"""
    has_gaps: bool

    @classmethod
    def of(cls, rank: int, targets: Iterable[Target]) -> Layout:
        return _layout(rank, tuple(targets))

    def views(self, flat_P: Tensor) -> dict[str, Pair]:
        """name -> (A [r, I], B [O, r]), views of a flat buffer."""
        return {name: (view_of(flat_P, a), view_of(flat_P, b)) for name, (a, b) in self.places.items()}


@lru_cache(maxsize=256)
def _layout(rank: int, targets: tuple[Target, ...]) -> Layout:
    shapes = [target.shapes(rank) for target in targets]
    sizes = [math.prod(shape) for matrices in zip(*shapes, strict=True) for shape in matrices]
    *starts, end = accumulate((_aligned(size) for size in sizes), initial=0)
    pairs = zip(starts[: len(targets)], starts[len(targets) :], strict=True)
    places = {
        target.name: (Place.of(a_start, a_shape), Place.of(b_start, b_shape))
        for target, (a_start, b_start), (a_shape, b_shape) in zip(targets, pairs, shapes, strict=True)
    }
    return Layout(rank, targets, end, places, has_gaps=any(size % ALIGN for size in sizes))


class Adapter:
    """One adapter's weights. Published versions are never written to again; see `share`.

    `flat_P` and `weights` (views of it) are float32; `compute` holds what the model multiplies with: the same
    tensors, or copies in the model's dtype that `refresh` renews after the weights change. `fused` keeps what
    others derive from `compute`, until then; `shares` are views of it by site. `gradients` is None but during a
    training step, when it maps a name to the float32 buffers that backward adds to.
    """

    __slots__ = (
        "__weakref__",
        "compute",
        "compute_P",
        "flat_P",
        "fused",
        "gradients",
        "layout",
        "scale",
        "shares",
        "spec",
        "weights",
    )

    def __init__(self, spec: LoraSpec, layout: Layout, flat_P: Tensor, dtype: torch.dtype) -> None:
        self.spec = spec
        self.layout = layout
        self.scale = LORA_ALPHA / layout.rank
        self.flat_P = flat_P
        self.weights = layout.views(flat_P)
        self.compute_P = flat_P if dtype == torch.float32 else flat_P.to(dtype)
        self.compute = self.weights if self.compute_P is flat_P else layout.views(self.compute_P)
        self.fused: dict[str, tuple[Tensor, ...] | None] = {}
        self.shares: dict[Site, Shares] = {}
        self.gradients: Mapping[str, Pair] | None = None

    @property
    def num_bytes(self) -> int:
        return self.flat_P.nbytes + (0 if self.compute_P is self.flat_P else self.compute_P.nbytes)

    def refresh(self) -> None:
        """Bring `compute` up to date with `flat_P`."""
        self.fused.clear()
        if self.compute_P is not self.flat_P:
            self.compute_P.copy_(self.flat_P)

    def clone(self) -> Adapter:
        """A copy that shares nothing with this adapter."""
        return Adapter(self.spec, self.layout, self.flat_P.clone(), self.compute_P.dtype)

    def numbers(self) -> Adapter:
        """A copy to be written to a file: without what the model multiplies with."""
        return Adapter(self.spec, self.layout, self.flat_P.clone(), self.flat_P.dtype)

    def share(self) -> Adapter:
        """Another adapter of the same numbers, which nobody may write to as long as both are there."""
        # What is derived while sampling cannot be differentiated: each has its own `fused` and `shares`.
        other = copy(self)
        other.fused, other.shares, other.gradients = {}, {}, None
        return other


def layout_for(spec: LoraSpec, targets: Iterable[Target]) -> Layout:
    """The layout of an adapter: the targets of the groups that its spec trains."""
    groups = {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}
    return Layout.of(spec.rank, (target for target in targets if groups[target.group]))


def initialise(layout: Layout, seed: int, device: torch.device) -> Tensor:
    """A fresh flat buffer: A uniform within 1/sqrt(I), which is PEFT's kaiming_uniform(a=sqrt(5)); B zero.

    Each matrix has its own stream, keyed by seed and name, drawn on the CPU: neither the order of creation,
    nor the device, nor which groups are trained changes a matrix that is there.
    """
    flat_P = torch.zeros(layout.numel)
    for target, (a_rI, _) in zip(layout.targets, layout.views(flat_P).values(), strict=True):
        digest = hashlib.blake2b(f"{seed}/{target.name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        bound = target.in_features**-0.5
        a_rI.uniform_(-bound, bound, generator=generator)
    return flat_P.to(device)


class Segment(NamedTuple):
    """Rows start..stop of a packed batch, and whose they are; None is the base model."""

    start: int
    stop: int
    adapter: Adapter | None


class Run:
    """Segments of adapters of one layout, of `length` rows each, one after the other from row `start`.

    `stacks` keeps what sites made of their matrices, for as long as the micro-batch lasts.
    """

    __slots__ = ("_groups", "adapters", "length", "stacks", "start")

    def __init__(self, start: int, length: int, adapters: list[Adapter]) -> None:
        self.start = start
        self.length = length
        self.adapters = adapters
        self.stacks: dict[Site, Stacks] = {}
        self._groups: tuple[object, list[Group]] = (None, [])

    @property
    def groups(self) -> list[Group]:
        """Of the adapters' gradients, all of which are others if the first one's are."""
        first = self.adapters[0].gradients
        if first is None or self._groups[0] is not first:
            self._groups = first, groups_of([adapter.gradients for adapter in self.adapters])
        return self._groups[1]

    @property
    def stop(self) -> int:
        return self.start + self.length * len(self.adapters)

    def takes(self, start: int, length: int, adapter: Adapter) -> bool:
        return start == self.stop and length == self.length and adapter.layout is self.adapters[0].layout

    def rows(self, x_TI: Tensor) -> Tensor:
        """[S, n, I]"""
        own = x_TI if self.stop - self.start == len(x_TI) else x_TI[self.start : self.stop]
        return own.view(len(self.adapters), self.length, -1)

    def apart(self) -> list[Run]:
        starts = range(self.start, self.stop, self.length)
        return [Run(start, self.length, [adapter]) for start, adapter in zip(starts, self.adapters, strict=True)]


class Routing:
    """Contiguous segments that cover the rows [0, T) of a packed batch. Immutable.

    `runs` are the same segments, but for those of the base model, beside the neighbours that could join them. `work`
    keeps what each site has found to do.
    """

    __slots__ = ("_runs", "_stretches", "num_rows", "segments", "work")

    def __init__(self, segments: Sequence[Segment]) -> None:
        end = 0
        for segment in segments:
            if segment.start != end or segment.stop <= segment.start:
                raise ValueError(f"segment {segment.start}..{segment.stop} does not continue at row {end}")
            end = segment.stop
        self.segments = tuple(segments)
        self._runs: list[Run] | None = None
        self._stretches: list[Run | Stretch] | None = None
        self.work: dict[Site, list[Run | Stretch]] = {}
        self.num_rows = end

    @property
    def runs(self) -> list[Run]:
        if self._runs is None:
            self._runs = _runs(self.segments)
        return self._runs

    @property
    def stretches(self) -> list[Run | Stretch]:
        """The runs, but neighbours of unequal lengths together where one kernel takes them all (`stretches`)."""
        if self._stretches is None:
            found = stretches_of(self.segments)
            self._stretches = [*self.runs] if found is None else [_run_or_stretch(each) for each in found]
        return self._stretches

    @classmethod
    def of(cls, adapters: Iterable[Adapter | None], lengths: Iterable[int]) -> Routing:
        """Rows of consecutive sequences; neighbours of one adapter become one segment."""
        segments: list[Segment] = []
        end = 0
        for adapter, length in zip(adapters, lengths, strict=True):
            if segments and segments[-1].adapter is adapter:
                segments[-1] = Segment(segments[-1].start, end + length, adapter)
            else:
                segments.append(Segment(end, end + length, adapter))
            end += length
        return cls(segments)

    def only(self, rows: Sequence[int]) -> Routing:
        """The routing of these rows alone, which ascend, numbered from 0."""
        bounds = [bisect_left(rows, segment.stop) for segment in self.segments]
        counts = [stop - start for start, stop in zip([0, *bounds], bounds, strict=False)]
        kept = [(segment.adapter, count) for segment, count in zip(self.segments, counts, strict=True) if count]
        return Routing.of((adapter for adapter, _ in kept), (count for _, count in kept))

    def slice(self, start: int, stop: int) -> Routing:
        """The routing of rows start..stop alone, numbered from 0."""
        return Routing(
            [
                Segment(max(segment.start, start) - start, min(segment.stop, stop) - start, segment.adapter)
                for segment in self.segments
                if segment.start < stop and segment.stop > start
            ]
        )


class Switchboard:
    """Holds the routing of the call in progress; every linear of one model shares one."""

    __slots__ = ("routing",)

    def __init__(self) -> None:
        self.routing: Routing | None = None


class MultiLoRALinear(nn.Module):
    """Stands in for a frozen nn.Linear: y = x W^T + b, plus scale * x A^T B^T for each segment's adapter.

    Keeps the linear's own parameters under the same names, so tied weights and state dicts stay as they were.
    """

    def __init__(self, name: str, group: str, linear: nn.Linear, switchboard: Switchboard) -> None:
        super().__init__()
        self.name = name
        self.group = group
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._site = Site([self.target])
        self._switchboard = switchboard
        self._anchor: Tensor | None = None

    @property
    def target(self) -> Target:
        return Target(self.name, self.group, self.in_features, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        routing = self._switchboard.routing
        if routing is None:
            return nn.functional.linear(x, self.weight, self.bias)
        work = self.work(routing)
        if not work:
            return nn.functional.linear(x, self.weight, self.bias)
        if torch.is_grad_enabled():
            return _LoRALinearFunction.apply(x, self._grad_anchor(x), self, work)
        x_TI = x.reshape(-1, self.in_features)
        return self.forward_rows(x_TI, work)[0].view(*x.shape[:-1], -1)

    def work(self, routing: Routing) -> list[Run | Stretch]:
        """The runs whose adapters have this linear."""
        return self._site.work(routing)

    def forward_rows(
        self, x_TI: Tensor, work: Sequence[Run | Stretch], out_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """y [T, O], and each run's scale * x A^T, which backward needs again."""
        y_TO = product(x_TI, self.weight.t(), out_dtype or x_TI.dtype)
        if self.bias is not None:
            y_TO += self.bias
        return y_TO, self._site.forward_(y_TO, x_TI, work)

    def backward_rows(
        self,
        grad_TO: Tensor,
        x_TI: Tensor,
        work: Sequence[Run | Stretch],
        inner: Sequence[Tensor],
        *,
        need_input: bool,
    ) -> Tensor | None:
        """The gradient of x, if needed; adds those of A and B to their adapters' buffers where these
        exist.
        """
        grad_TI = product(grad_TO, self.weight, grad_TO.dtype) if need_input else None
        self._site.backward_(grad_TI, grad_TO, x_TI, work, inner)
        return grad_TI

    def _grad_anchor(self, x: Tensor) -> Tensor:
        # The embeddings are frozen, so the first layer's input asks for no gradient and autograd would not
        # record this call; an empty input that asks for one makes it, without computing the gradient of x.
        if self._anchor is None or self._anchor.device != x.device:
            self._anchor = torch.zeros(0, device=x.device, requires_grad=True)
        return self._anchor


class _LoRALinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, anchor: Tensor, module: MultiLoRALinear, work: list[Run | Stretch]) -> Tensor:
        x_TI = x.reshape(-1, module.in_features)
        y_TO, ctx.inner = module.forward_rows(x_TI, work)
        ctx.save_for_backward(x)
        ctx.module, ctx.work = module, work
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        grad_x = ctx.module.backward_rows(
            grad.reshape(-1, ctx.module.out_features),
            x.reshape(-1, ctx.module.in_features),
            ctx.work,
            ctx.inner,
            need_input=ctx.needs_input_grad[0],
        )
        return None if grad_x is None else grad_x.view(x.shape), None, None, None


def _run_or_stretch(stretch: Stretch) -> Run | Stretch:
    if len(stretch.adapters) > 1:
        return stretch
    return Run(stretch.start, stretch.sizes[0], stretch.adapters)


def _runs(segments: Iterable[Segment]) -> list[Run]:
    """Neighbours of equal length and layout together."""
    runs: list[Run] = []
    for start, stop, adapter in segments:
        if adapter is None:
            continue
        if runs and runs[-1].takes(start, stop - start, adapter):
            runs[-1].adapters.append(adapter)
        else:
            runs.append(Run(start, stop - start, [adapter]))
    return runs


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN
