"""An adapter's parameters: which linears it has, where each matrix is in one flat buffer, and how it is initialised.

`TrainedModel` is what training changes about an adapter: its accumulated gradient, its moments and its step count. Each
is one flat float32 buffer in the adapter's layout; `optim` knows which moments an optimizer has. A published version
shares the weights until they change. Where several processes have one adapter, a target says which experts' matrices
this one holds, and a `SteppedElements` which of its elements it steps. Knows no request and no file.

Shapes: P elements that this process holds, p elements that it steps; in one process both are all of the adapter.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, count
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tinsmith.backends.torch.host import host_copies
from tinsmith.runtime.devices import kind_of
from tinsmith.types import LoraSpec

ALIGN = 16
"""Every matrix starts at a multiple of this many elements: 64 bytes, an alignment that suits vector units and tensor
cores.
"""


Pair = tuple[Tensor, Tensor]

_versions = count()


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Marks a target as one projection of all experts of a mixture, and names the matrix, 'A' or 'B', that they share.
    `interleaved`: outputs of gate and up alternate in the model's own parameter. `swapped`: PEFT takes the inputs of
    the parameters for outputs. `local`: the experts whose matrices this process holds; None for all `num_experts`.
    """

    num_experts: int
    common: str
    interleaved: bool
    swapped: bool = False
    local: range | None = None

    @property
    def num_local(self) -> int:
        return self.num_experts if self.local is None else len(self.local)


class LinearPart(NamedTuple):
    """Marks a target as some rows of a linear, from `start` on: Tinker has several adapters where transformers has one
    linear.
    """

    linear_name: str
    start: int
    num_parts: int
    num_rows: int
    """Rows of the whole linear; the parts may cover fewer."""


@dataclass(frozen=True, slots=True)
class Target:
    """A linear, some rows of one, or one projection of experts that may carry adapters: its path, group and sizes."""

    name: str
    group: str  # 'attn', 'mlp' or 'unembed'
    in_features: int
    out_features: int
    experts: ExpertStack | None = None
    part: LinearPart | None = None

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A [r, I] and B [O, r]; those of the experts that this process holds are stacked, [E, r, I] and
        [E, O, r].
        """
        a_shape, b_shape = (rank, self.in_features), (self.out_features, rank)
        if self.experts is None:
            return a_shape, b_shape
        num_a, num_b = (self.experts.num_local if self.differs_by_expert(matrix) else 1 for matrix in (0, 1))
        return (num_a, *a_shape), (num_b, *b_shape)

    def differs_by_expert(self, matrix: int) -> bool:
        """Whether each expert has its own A (0) or B (1)."""
        return self.experts is not None and self.experts.common != "AB"[matrix]

    def hold(self, experts: range | None) -> Target:
        """The target of a process that holds the matrices of these experts, None for all; itself without experts."""
        return self if self.experts is None else replace(self, experts=replace(self.experts, local=experts))

    def select(self, matrix: int, matrices: Tensor) -> Tensor:
        """The part of A (0) or B (1) of all experts that this process holds, a view."""
        local = None if self.experts is None else self.experts.local
        return matrices[local.start : local.stop] if local is not None and self.differs_by_expert(matrix) else matrices


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each matrix of an adapter is in its flat buffer: all A's, then all B's, so that adjacent A's form one
    matrix; last those that differ between experts, from `num_common` on. Gaps between matrices are always zero. Equal
    layouts are one object.
    """

    rank: int
    targets: tuple[Target, ...]
    numel: int
    num_common: int
    spans: Mapping[str, tuple[MatrixSpan, MatrixSpan]] = field(repr=False, compare=False)
    """name -> spans of A and B"""
    gaps: tuple[slice, ...] = field(repr=False, compare=False)

    @classmethod
    def of(cls, rank: int, targets: Iterable[Target]) -> Layout:
        return _layout(rank, tuple(targets))

    def views(self, flat_P: Tensor) -> dict[str, Pair]:
        """name -> (A [r, I], B [O, r]), views of a flat buffer."""
        return {name: (view_matrix(flat_P, a), view_matrix(flat_P, b)) for name, (a, b) in self.spans.items()}

    @property
    def whole(self) -> Layout:
        """The layout of a process that holds the matrices of all experts."""
        return Layout.of(self.rank, (target.hold(None) for target in self.targets))

    def stacks_in(self, start: int, stop: int) -> Iterator[MatrixSpan]:
        """The matrices that begin in this range of the buffer, as stacks [n, rows, columns], by their position."""
        for span in sorted(span for pair in self.spans.values() for span in pair):
            size, count = math.prod(span.shape[-2:]), math.prod(span.shape[:-2])
            first, end = (min(max(-(-(bound - span.start) // size), 0), count) for bound in (start, stop))
            if first < end:
                yield MatrixSpan.of(span.start + first * size, (end - first, *span.shape[-2:]))


@lru_cache(maxsize=256)
def _layout(rank: int, targets: tuple[Target, ...]) -> Layout:
    matrices = [(target, matrix) for matrix in (0, 1) for target in targets]
    matrices.sort(key=lambda entry: entry[0].differs_by_expert(entry[1]))
    shapes = {(target.name, matrix): target.shapes(rank)[matrix] for target, matrix in matrices}
    sizes = [math.prod(shape) for shape in shapes.values()]
    *starts, end = accumulate((-(-size // ALIGN) * ALIGN for size in sizes), initial=0)
    spans = {key: MatrixSpan.of(start, shape) for start, (key, shape) in zip(starts, shapes.items(), strict=True)}
    pairs = {target.name: (spans[target.name, 0], spans[target.name, 1]) for target in targets}
    gaps = [slice(start + size, start + -(-size // ALIGN) * ALIGN) for start, size in zip(starts, sizes, strict=True)]
    num_common = next(
        (start for start, entry in zip(starts, matrices, strict=True) if entry[0].differs_by_expert(entry[1])), end
    )
    return Layout(rank, targets, end, num_common, pairs, tuple(gap for gap in gaps if gap.start < gap.stop))


class TensorCopies:
    """Copies of tensors on another device. Tensors that were not added stay where they are."""

    def __init__(self, device: torch.device, tensors: Iterable[Tensor]) -> None:
        """Copies into host memory are pinned where the tensors are on a GPU."""
        # A published version shares its model's tensors.
        originals = list({id(tensor): tensor for tensor in tensors}.values())
        kind = kind_of(device)
        if kind.is_host:
            copies = host_copies(originals)
        else:
            copies = [tensor.to(device, non_blocking=kind.pins_memory) for tensor in originals]
        self._copies = {id(tensor): (tensor, copied) for tensor, copied in zip(originals, copies, strict=True)}

    def of(self, tensor: Tensor) -> Tensor:
        return self._copies.get(id(tensor), (tensor, tensor))[1]


class Adapter:
    """One adapter's weights. Published versions are never written again; see `share`.

    `flat_P` and `weights` (views of it) are float32; `compute` holds the operands of matmuls: the same tensors, or
    copies in the model's dtype that `refresh` updates after the weights change, with a new `version`. `delta_matrices`
    are views of `compute` by LoRADelta. `gradients` and `stack_slot` are None except during a training step.
    """

    __slots__ = (
        "__weakref__",
        "compute",
        "compute_P",
        "delta_matrices",
        "flat_P",
        "gradients",
        "layout",
        "scale",
        "spec",
        "stack_slot",
        "version",
        "weights",
    )

    def __init__(self, spec: LoraSpec, layout: Layout, flat_P: Tensor, dtype: torch.dtype) -> None:
        self.spec = spec
        self.layout = layout
        self.scale = spec.alpha / layout.rank
        self.flat_P = flat_P
        self.compute_P = flat_P if dtype == torch.float32 else flat_P.to(dtype)
        self.delta_matrices: dict[object, DeltaMatrices] = {}  # by `lora.LoRADelta`
        self._make_views()
        self.gradients: Gradients | None = None
        self.stack_slot: tuple[AdapterStack, int] | None = None
        self.version = next(_versions)

    def open_gradients(self) -> Tensor:
        """Let backward add to `gradients`; returns their new buffer [P], which `close_gradients` completes."""
        self.gradients = Gradients(self.layout, self.flat_P.device)
        return self.gradients.flat_P

    def close_gradients(self) -> None:
        if self.gradients is not None:
            self.gradients.complete_()
        self.gradients = self.stack_slot = None

    @property
    def num_bytes(self) -> int:
        return self.flat_P.nbytes + (0 if self.compute_P is self.flat_P else self.compute_P.nbytes)

    def refresh(self) -> None:
        """Update `compute` from `flat_P`."""
        self.version = next(_versions)
        self._copy_weights()

    def _copy_weights(self) -> None:
        if self.compute_P is not self.flat_P:
            self.compute_P.copy_(self.flat_P)

    def clone(self) -> Adapter:
        """A copy that shares nothing with this adapter."""
        return Adapter(self.spec, self.layout, self.flat_P.clone(), self.compute_P.dtype)

    def snapshot(self) -> Adapter:
        """A float32 copy for writing to a file, without compute copies."""
        return Adapter(self.spec, self.layout, self.flat_P.clone(), self.flat_P.dtype)

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        return self.flat_P, self.compute_P

    def move(self, copies: TensorCopies) -> None:
        """Replace the buffers by their copies."""
        self.flat_P, self.compute_P = (copies.of(buffer) for buffer in self.buffers)
        self._make_views()

    def _make_views(self) -> None:
        self.weights = self.layout.views(self.flat_P)
        self.compute = self.weights if self.compute_P is self.flat_P else self.layout.views(self.compute_P)
        self.delta_matrices = {}

    def share(self) -> Adapter:
        """An adapter over the same buffers, which must not be written as long as both exist."""
        # Views made in inference mode cannot be differentiated, so each has its own.
        other = copy(self)
        other.delta_matrices, other.gradients, other.stack_slot = {}, None, None
        return other


class SteppedElements(Protocol):
    """Which elements [p] of an adapter's [P] this process's optimizer steps, where several processes hold them."""

    @property
    def spans(self) -> Sequence[slice]:
        """Where they are among the elements that this process holds."""
        ...

    def spread(self, x_P: Tensor) -> None:
        """Replace the elements of the other processes by theirs, in place. Called by all of them, in one order."""
        ...


@dataclass(slots=True)
class TrainedModel:
    """`gradient_P` None means that nothing has accumulated; the moments are None before the first step. With a `share`
    both have only the elements [p] that this process steps."""

    adapter: Adapter
    gradient_P: Tensor | None = None
    moments: tuple[Tensor, ...] | None = None
    step: Tensor = field(default_factory=lambda: torch.zeros(()))
    optimizer_type: str = "adamw"
    share: SteppedElements | None = None
    _published: weakref.ref[Adapter] | None = None

    def publish(self) -> Adapter:
        """An immutable adapter with the current weights; copied only when the weights change."""
        published = self._published and self._published()
        if published is None:
            published = self.adapter.share()
            self._published = weakref.ref(published)
        return published

    def unshare(self) -> None:
        """Call before changing the weights: copies them if a published version still uses them."""
        if self._published and self._published() is not None:
            self.adapter = self.adapter.clone()
        self._published = None

    def add_gradient(self, gradient_P: Tensor) -> None:
        """Accumulate a gradient; takes ownership of the buffer."""
        if self.gradient_P is None:
            self.gradient_P = gradient_P
        else:
            self.gradient_P += gradient_P

    def gradient_or_zeros(self) -> Tensor:
        """The accumulated gradient."""
        return self._zeros() if self.gradient_P is None else self.gradient_P

    @property
    def spans(self) -> Sequence[slice]:
        """Where the elements that this process's optimizer steps are among those of the adapter."""
        return [slice(0, len(self.adapter.flat_P))] if self.share is None else self.share.spans

    @property
    def num_stepped(self) -> int:
        """p"""
        return sum(span.stop - span.start for span in self.spans)

    def local(self, x_P: Tensor) -> list[Tensor]:
        """Views of the spans of what this process holds."""
        return [x_P[span] for span in self.spans]

    def split(self, x_p: Tensor) -> list[Tensor]:
        """Views of the spans of what it steps."""
        return list(x_p.split([span.stop - span.start for span in self.spans]))

    def select(self, x_P: Tensor) -> Tensor:
        """[p]: the elements that it steps; x itself if these are all."""
        return x_P if self.num_stepped == len(x_P) else torch.cat(self.local(x_P))

    def _zeros(self) -> Tensor:
        return self.adapter.flat_P.new_zeros(self.num_stepped)

    def copy(self) -> TrainedModel:
        """A copy that shares nothing."""
        return TrainedModel(
            self.adapter.snapshot(),
            None if self.gradient_P is None else self.gradient_P.clone(),
            None if self.moments is None else tuple(state.clone() for state in self.moments),
            self.step.clone(),
            self.optimizer_type,
            self.share,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory, counting a gradient and moments from the start, but not moments on the host."""
        flat_P = self.adapter.flat_P
        moments = 2 if self.moments is None else sum(state.device == flat_P.device for state in self.moments)
        return self.adapter.num_bytes + (1 + moments) * self.num_stepped * flat_P.itemsize

    @property
    def offloadable_bytes(self) -> int:
        """Bytes that `offload` would free on the device."""
        device = self.adapter.flat_P.device
        if self.moments is None or kind_of(device).is_host:
            return 0
        return sum(state.nbytes for state in self.moments if state.device == device)

    def offload(self) -> int:
        """Move the moments to host memory until the next step; returns the device bytes freed."""
        if freed_bytes := self.offloadable_bytes:
            assert self.moments is not None
            self.moments = tuple(host_copies(self.moments))
        return freed_bytes

    def buffers(self, *, moments: bool) -> list[Tensor]:
        """The weights, the gradient and, if asked for, the moments."""
        tensors = [*self.adapter.buffers, *(self.moments or () if moments else ())]
        return tensors if self.gradient_P is None else [*tensors, self.gradient_P]

    def move(self, copies: TensorCopies) -> None:
        """Replace the buffers by their copies. Moments on the host return to a GPU with the next optimizer step."""
        self.adapter.move(copies)
        self.gradient_P = None if self.gradient_P is None else copies.of(self.gradient_P)
        self.moments = self.moments and tuple(copies.of(state) for state in self.moments)

    def moments_or_zeros(self, count: int) -> tuple[Tensor, ...]:
        """The moments on the device, created as zeros at the first step."""
        if self.moments is not None:
            self.moments = tuple(state.to(self.adapter.flat_P.device) for state in self.moments)
        if self.moments is None:
            self.moments = tuple(self._zeros() for _ in range(count))
        if self.step.device != self.adapter.flat_P.device:
            # Filled on the device: copying one element would synchronise.
            self.step = torch.full_like(self.step, float(self.step), device=self.adapter.flat_P.device)
        return self.moments


def layout_for(spec: LoraSpec, targets: Iterable[Target]) -> Layout:
    """The layout of an adapter with the targets of the groups that its spec trains."""
    groups = {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}
    return Layout.of(spec.rank, (target for target in targets if groups[target.group]))


def initialise_weights(layout: Layout, seed: int, device: torch.device) -> Tensor:
    """A fresh flat buffer: A uniform within 1/sqrt(I), which is PEFT's kaiming_uniform(a=sqrt(5)); B zero.

    Each matrix has its own random stream, keyed by seed and name, drawn on the CPU: a matrix does not depend on the
    order of creation, the device, or which groups are trained. Those of experts are one stream, of which a process that
    holds some of the experts keeps their part.
    """
    flat_P = torch.zeros(layout.numel)
    for target, (a_rI, _) in zip(layout.targets, layout.views(flat_P).values(), strict=True):
        if not a_rI.numel():
            continue
        digest = hashlib.blake2b(f"{seed}/{target.name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        bound, (shape, _) = target.in_features**-0.5, target.hold(None).shapes(layout.rank)
        is_whole = a_rI.shape == shape
        drawn = (a_rI if is_whole else a_rI.new_empty(shape)).uniform_(-bound, bound, generator=generator)
        if not is_whole:
            a_rI.copy_(target.select(0, drawn))
    return flat_P.to(device)


def select_held(layout: Layout, whole_P: Tensor) -> Tensor:
    """[P]: what a process with this layout holds of a buffer of `layout.whole`; that buffer itself if it is all."""
    if layout.whole is layout:
        return whole_P
    flat_P, sources = whole_P.new_zeros(layout.numel), layout.whole.views(whole_P)
    for target, local_pair in zip(layout.targets, layout.views(flat_P).values(), strict=True):
        for matrix in (0, 1):
            local_pair[matrix].copy_(target.select(matrix, sources[target.name][matrix]))
    return flat_P


class Gradients:
    """The float32 gradients of an adapter's matrices in one flat buffer, undefined until first written: zeros before
    them would be one more pass over memory on a CPU. On CUDA, or if `zeros_P` is passed, they are zeros: one launch
    instead of hundreds.
    """

    def __init__(self, layout: Layout, device: torch.device, zeros_P: Tensor | None = None) -> None:
        if zeros_P is None and kind_of(device).has_kernels:
            zeros_P = torch.zeros(layout.numel, device=device)
        self.flat_P = torch.empty(layout.numel, device=device) if zeros_P is None else zeros_P
        self._layout = layout
        self._unwritten: set[tuple[str, int]] = set()
        if zeros_P is None:
            self._unwritten.update((name, matrix) for name in layout.spans for matrix in (0, 1))
            for gap in layout.gaps:
                self.flat_P[gap].zero_()

    @cached_property
    def _views(self) -> dict[str, Pair]:
        return self._layout.views(self.flat_P)

    def __getitem__(self, name: str) -> Pair:
        """The buffers of A and B, to add to."""
        return self.accumulator((name,), 0), self.accumulator((name,), 1)

    def add_(self, names: Sequence[str], matrix: int, gradient: Tensor) -> None:
        """Add to the A's (0) or B's (1) of these linears, which are one matrix: see `StackedA`."""
        keys = {(name, matrix) for name in names}
        if keys <= self._unwritten:
            self._unwritten -= keys
            self._view_adjacent(names, matrix).copy_(gradient)
        else:
            self.accumulator(names, matrix).add_(gradient)

    def complete_(self) -> None:
        """Write zeros where nothing was added."""
        for name, matrix in self._unwritten:
            self._views[name][matrix].zero_()
        self._unwritten.clear()

    def accumulator(self, names: Sequence[str], matrix: int) -> Tensor:
        """The buffer of these linears' A's (0) or B's (1) as one matrix, to add to."""
        for name in names:
            if (name, matrix) in self._unwritten:
                self._unwritten.remove((name, matrix))
                self._views[name][matrix].zero_()
        return self._view_adjacent(names, matrix)

    def _view_adjacent(self, names: Sequence[str], matrix: int) -> Tensor:
        first = self._views[names[0]][matrix]
        return first if len(names) == 1 else extend_rows(first, sum(len(self._views[name][matrix]) for name in names))


class AdapterStack:
    """Adapters of one layout, in a training step on CUDA: the rows of one buffer of matrices and of one of gradients,
    so that matmuls of neighbours read and write them without copies.
    """

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        first = adapters[0]
        self._compute_SP = torch.stack([adapter.compute_P for adapter in adapters])
        self._gradient_SP = torch.zeros(self._compute_SP.shape, device=first.flat_P.device)
        self._start = int(first.compute_P.storage_offset())
        for index, (adapter, zeros_P) in enumerate(zip(adapters, self._gradient_SP.unbind(), strict=True)):
            adapter.gradients = Gradients(adapter.layout, zeros_P.device, zeros_P)
            adapter.stack_slot = self, index

    def compute_view(self, rows: slice, matrix: Tensor) -> Tensor:
        """[S, ..]: a matrix of the first adapter, in each of these rows."""
        return self._view_rows(self._compute_SP, rows, int(matrix.storage_offset()) - self._start, matrix.shape)

    def gradient_view(self, rows: slice, span: MatrixSpan, shape: Sequence[int]) -> Tensor:
        """[S, ..]: the gradients, to add to, of the matrix in this span, or of several from its start on."""
        return self._view_rows(self._gradient_SP, rows, span.start, shape)

    def take_gradients(self) -> list[Tensor]:
        """A buffer for each adapter that does not keep the others'. Frees the stack."""
        gradient_SP = self._gradient_SP
        del self._gradient_SP, self._compute_SP
        return [gradient_P.clone() for gradient_P in gradient_SP]

    @staticmethod
    def _view_rows(flat_SP: Tensor, rows: slice, start: int, shape: Sequence[int]) -> Tensor:
        size = flat_SP.shape[1]
        return flat_SP.as_strided((rows.stop - rows.start, *shape), (size, shape[1], 1), rows.start * size + start)


class MatrixSpan(NamedTuple):
    """Where a matrix, or a stack of matrices, is in a flat buffer."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, start: int, shape: tuple[int, ...]) -> MatrixSpan:
        return cls(start, shape, tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))


def view_matrix(flat_P: Tensor, span: MatrixSpan) -> Tensor:
    # One call instead of two: a step of many tenants makes thousands of views.
    return flat_P.as_strided(span.shape, span.strides, flat_P.storage_offset() + span.start)


def extend_rows(a_rI: Tensor, num_rows: int) -> Tensor:
    """The matrix of `num_rows` rows that begins where this one does."""
    return a_rI.as_strided((num_rows, a_rI.shape[1]), (a_rI.shape[1], 1))


class DeltaMatrices(NamedTuple):
    """An adapter's matrices for a LoRADelta."""

    stacked_a: tuple[StackedA, ...]
    linears_b: tuple[LinearB, ...]


class LinearB(NamedTuple):
    """One linear's B, with its columns of the outputs and of x A^T."""

    name: str
    columns: slice
    ranks: slice
    b_Or: Tensor


class StackedA(NamedTuple):
    """Adjacent A's of a layout as one matrix: all of a LoRADelta's, unless others are in between."""

    names: tuple[str, ...]
    ranks: slice
    a_RI: Tensor
