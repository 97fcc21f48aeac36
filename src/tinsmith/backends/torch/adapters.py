"""An adapter's numbers: which linears it has, where each matrix lies in one flat vector, and how it is initialised.

`Trained` is what training changes about an adapter: its accumulated gradient, its moments and its step count. Each is
one flat float32 buffer in the adapter's own layout; `optim` knows which moments an optimizer has. A published version
shares the weights until they change. Knows no request and no file.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, count
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.types import LORA_ALPHA, LoraSpec

ALIGN = 16
"""Every matrix starts at a multiple of this many numbers: 64 bytes, which vector units and tensor cores
like.
"""


Pair = tuple[Tensor, Tensor]

_versions = count()


@dataclass(frozen=True, slots=True)
class Bank:
    """That a target is one projection of all experts of a mixture, and which of its matrices, 'A' or 'B', they have in
    common. `interleaved`: outputs of gate and up alternate in the model's own parameter.
    """

    num_experts: int
    common: str
    interleaved: bool


class LinearPart(NamedTuple):
    """That a target is some rows of a linear, from `start` on: Tinker has several adapters where transformers has one
    linear.
    """

    whole: str
    start: int
    num_parts: int
    num_rows: int
    """Of the whole linear, of which the parts may be fewer."""


WRAPPED, PLAIN = "model.language_model.", "model."
"""How paths begin of a text model's modules: inside a wrapper, beside a vision tower, and by itself."""


def text_name(path: str) -> str:
    """A module's path as its text model by itself has it, which is Tinker's name for it (tinker_cookbook.weights)."""
    return PLAIN + path.removeprefix(WRAPPED) if path.startswith(WRAPPED) else path


def wrapped_name(name: str) -> str:
    """The reverse of `text_name`, for a model with a wrapper."""
    return WRAPPED + name.removeprefix(PLAIN) if name.startswith(PLAIN) else name


@dataclass(frozen=True, slots=True)
class Target:
    """One linear, some rows of one, or one projection of experts, that may carry adapters: its path, its group and its
    sizes.
    """

    name: str
    group: str  # 'attn', 'mlp' or 'unembed'
    in_features: int
    out_features: int
    bank: Bank | None = None
    part: LinearPart | None = None

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
    return Layout(rank, targets, end, places)


class Adapter:
    """One adapter's weights. Published versions are never written to again; see `share`.

    `flat_P` and `weights` (views of it) are float32; `compute` holds what the model multiplies with: the same
    tensors, or copies in the model's dtype that `refresh` renews after the weights change. `version` is
    another number then; `shares` are views of `compute` by site. `gradients` is None but during a
    training step, when it maps a name to the float32 buffers that backward adds to.
    """

    __slots__ = (
        "__weakref__",
        "compute",
        "compute_P",
        "flat_P",
        "gradients",
        "layout",
        "scale",
        "shares",
        "spec",
        "version",
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
        self.shares: dict[object, Shares] = {}  # by site (`lora_ops.Site`)
        self.gradients: Mapping[str, Pair] | None = None
        self.version = next(_versions)

    def open_gradients(self) -> Tensor:
        """Set `gradients` to views of the buffer [P] of zeros that is returned."""
        gradient_P = torch.zeros_like(self.flat_P)
        self.gradients = self.layout.views(gradient_P)
        return gradient_P

    @property
    def num_bytes(self) -> int:
        return self.flat_P.nbytes + (0 if self.compute_P is self.flat_P else self.compute_P.nbytes)

    def refresh(self) -> None:
        """Bring `compute` up to date with `flat_P`."""
        self.version = next(_versions)
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
        # Views that are made in inference mode cannot be differentiated: each has its own.
        other = copy(self)
        other.shares, other.gradients = {}, None
        return other


@dataclass(slots=True)
class Trained:
    """`gradient_P` None means that nothing has accumulated; the moments are None before the first step."""

    adapter: Adapter
    gradient_P: Tensor | None = None
    moments: tuple[Tensor, ...] | None = None
    step: Tensor = field(default_factory=lambda: torch.zeros(()))
    optimizer_type: str = "adamw"
    _published: weakref.ref[Adapter] | None = None

    def publish(self) -> Adapter:
        """The adapter as it is now and stays: nothing is copied before the weights change."""
        published = self._published and self._published()
        if published is None:
            published = self.adapter.share()
            self._published = weakref.ref(published)
        return published

    def own(self) -> None:
        """The weights are about to change: leave them to who still has them, and go on with a copy."""
        if self._published and self._published() is not None:
            self.adapter = self.adapter.clone()
        self._published = None

    def add_gradient(self, gradient_P: Tensor) -> None:
        """Take a buffer over, or add it to what has accumulated."""
        if self.gradient_P is None:
            self.gradient_P = gradient_P
        else:
            self.gradient_P += gradient_P

    def gradient_or_zeros(self) -> Tensor:
        """What has accumulated."""
        return torch.zeros_like(self.adapter.flat_P) if self.gradient_P is None else self.gradient_P

    def copy(self, *, gradient: bool) -> Trained:
        """All of it as it is now, sharing nothing; without its gradient unless asked for."""
        return Trained(
            self.adapter.numbers(),
            self.gradient_P.clone() if gradient and self.gradient_P is not None else None,
            None if self.moments is None else tuple(moment.clone() for moment in self.moments),
            self.step.clone(),
            self.optimizer_type,
        )

    @property
    def num_bytes(self) -> int:
        """What it takes, or will once it has a gradient and moments; without those that are in the host's memory."""
        device = self.adapter.flat_P.device
        moments = 2 if self.moments is None else sum(moment.device == device for moment in self.moments)
        return self.adapter.num_bytes + self.adapter.flat_P.nbytes * (1 + moments)

    @property
    def parkable_bytes(self) -> int:
        """What `park` would take off the device."""
        device = self.adapter.flat_P.device
        if self.moments is None or device.type == "cpu":
            return 0
        return sum(moment.nbytes for moment in self.moments if moment.device == device)

    def park(self) -> int:
        """Have the moments in the host's memory until the next step; returns what that frees of the device."""
        if freed := self.parkable_bytes:
            assert self.moments is not None
            self.moments = tuple(moment.cpu() for moment in self.moments)
        return freed

    def moments_or_zeros(self, count: int) -> tuple[Tensor, ...]:
        """The moments, on the device, made with zeros at the first step."""
        if self.moments is not None:
            self.moments = tuple(moment.to(self.adapter.flat_P.device) for moment in self.moments)
        if self.moments is None:
            self.moments = tuple(torch.zeros_like(self.adapter.flat_P) for _ in range(count))
            self.step = self.step.to(self.adapter.flat_P.device)
        return self.moments


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


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


class Place(NamedTuple):
    """Where a matrix, or a stack of them, lies in a flat buffer."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, start: int, shape: tuple[int, ...]) -> Place:
        return cls(start, shape, tuple(math.prod(shape[place + 1 :]) for place in range(len(shape))))


def view_of(flat_P: Tensor, place: Place) -> Tensor:
    # One call instead of two: a step of many tenants has thousands of these.
    return flat_P.as_strided(place.shape, place.strides, flat_P.storage_offset() + place.start)


def rows_from(a_rI: Tensor, num_rows: int) -> Tensor:
    """The matrix of `num_rows` rows that begins where this one does."""
    return a_rI.as_strided((num_rows, a_rI.shape[1]), (a_rI.shape[1], 1))


class Shares(NamedTuple):
    """What an adapter has at a site."""

    blocks: tuple[Block, ...]
    members: tuple[Member, ...]


class Member(NamedTuple):
    """One linear's share of an adapter at a site: its columns of the outputs and of the inner rows, and its B."""

    name: str
    columns: slice
    ranks: slice
    b_Or: Tensor


class Block(NamedTuple):
    """A's that lie side by side in the layout, as one matrix: all of a site's, unless others are in between."""

    names: tuple[str, ...]
    ranks: slice
    a_RI: Tensor

    def gradient(self, adapter: Adapter) -> Tensor:
        """The buffer [R, I] of these A's gradients, which lie side by side as the A's do."""
        assert adapter.gradients is not None
        return rows_from(adapter.gradients[self.names[0]][0], len(self.a_RI))
