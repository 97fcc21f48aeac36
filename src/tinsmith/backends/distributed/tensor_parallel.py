"""What one tensor rank holds of a linear and of its adapters, and how the parts make up the whole.

A linear is divided by its outputs (column-parallel: queries, keys, values, gate, up, the unembedding) or by its inputs
(row-parallel: the projections that follow them). An adapter is whole on every rank, with its optimizer state, so that
checkpoints and updates know nothing of ranks; `PartedAdapter` has beside it the part that this rank multiplies with.
The gradient of a part is put into zeros of the whole, and the sum over all ranks is the gradient of the whole, in each
of three cases: a number belongs to one rank (B of a column, A of a row); all ranks hold addends of it (A of a column, B
of a row); or all ranks compute the same (a linear that is not divided), and then only the first rank's counts.

Which linears are divided is transformers' own plan for the family. A family without a plan is refused, as are heads and
widths that do not divide, and experts. A linear whose style of division is unknown here stays whole on every rank: that
costs memory and is exact.

Shapes: T rows, I inputs, O outputs of the whole linear.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import structlog
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedConfig

from tinsmith.backends.distributed.ranks import Ranks
from tinsmith.backends.torch.adapters import Adapter, Layout, Target
from tinsmith.backends.torch.lora import MultiLoRALinear, Switchboard
from tinsmith.backends.torch.lora_ops import Run
from tinsmith.errors import SettingsError
from tinsmith.types import LoraSpec

COLUMN, ROW = "colwise", "rowwise"
GATHERED_COLUMN, SPLIT_ROW = "colwise_gather_output", "rowwise_split_input"
"""As transformers' plans for tensor parallelism call them; the latter two where what lies between is whole: a fused
linear whose output is cut apart, a norm over all heads.
"""


class Entrance:
    """The input of column-parallel linears that read the same rows: its gradient is summed over ranks once."""

    def __init__(self, num_readers: int, ranks: Ranks) -> None:
        self._num_readers = num_readers
        self._ranks = ranks
        self._left = 0
        self._given: Tensor | None = None
        self._taken: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self._given is not x or self._taken is None:
            self._given, self._taken, self._left = x, _SumBackward.apply(x, self._ranks), self._num_readers
        taken, self._left = self._taken, self._left - 1
        if self._left == 0:
            self._given = self._taken = None
        assert taken is not None
        return taken


class PartedLinear(MultiLoRALinear):
    """A part of a linear. `whole` is the target that it is a part of, `part` where in it this lies."""

    def __init__(self, own: MultiLoRALinear, switchboard: Switchboard, ranks: Ranks, kind: str) -> None:
        self.part = _share(own.out_features if kind == COLUMN else own.in_features, ranks)
        inputs, outputs = (
            (own.in_features, _length(self.part)) if kind == COLUMN else (_length(self.part), own.out_features)
        )
        linear = nn.Linear(inputs, outputs, bias=own.bias is not None, device="meta")
        rows, columns = (self.part, slice(None)) if kind == COLUMN else (slice(None), self.part)
        linear.weight = _frozen(own.weight[rows, columns])
        if own.bias is not None:
            linear.bias = _frozen(own.bias[rows] if kind == COLUMN else own.bias)
        super().__init__(own.name, own.group, linear, switchboard)
        self.kind = kind
        self.whole = own.target
        self.ranks = ranks


class ColumnLinear(PartedLinear):
    """This rank's outputs."""

    def __init__(self, own: MultiLoRALinear, switchboard: Switchboard, ranks: Ranks, entrance: Entrance) -> None:
        super().__init__(own, switchboard, ranks, COLUMN)
        self._entrance = entrance

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self._entrance(x))


class RowLinear(PartedLinear):
    """All outputs, summed over what each rank makes of its inputs."""

    def __init__(self, own: MultiLoRALinear, switchboard: Switchboard, ranks: Ranks) -> None:
        super().__init__(own, switchboard, ranks, ROW)
        self._bias = self.bias
        self.bias = None  # it is added once, to the sum

    def forward(self, x: Tensor) -> Tensor:
        y = _SumForward.apply(super().forward(x), self.ranks)
        return y if self._bias is None else y + self._bias


class GatheredColumnLinear(ColumnLinear):
    """All outputs, of which each rank computes its own."""

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Beside.apply(super().forward(x), self.part, self.ranks))


class SplitRowLinear(RowLinear):
    """As `RowLinear`, given all inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(cast(Tensor, _Take.apply(x, self.part, self.ranks)))


class GatheredLinear(PartedLinear):
    """The unembedding: every rank computes its share of the vocabulary, and has all logits."""

    def __init__(self, own: MultiLoRALinear, switchboard: Switchboard, ranks: Ranks) -> None:
        super().__init__(own, switchboard, ranks, COLUMN)

    def forward_rows(
        self, x_TI: Tensor, work: Sequence[Run], out_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        y_TO, inner = super().forward_rows(x_TI, work, out_dtype)
        return self.ranks.beside(y_TO), inner

    def backward_rows(
        self, grad_TO: Tensor, x_TI: Tensor, work: Sequence[Run], inner: Sequence[Tensor], *, need_input: bool
    ) -> Tensor | None:
        own_TO = grad_TO[:, self.part].contiguous()
        grad_TI = super().backward_rows(own_TO, x_TI, work, inner, need_input=need_input)
        return None if grad_TI is None else self.ranks.sum_tensor(grad_TI)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where one matrix of the parted layout lies in its whole one. `counted`: whether its gradient is this rank's to
    tell.
    """

    name: str
    matrix: int  # 0: A, 1: B
    place: tuple[slice, slice] | None  # None: it is the whole matrix
    counted: bool


class Parting:
    """From layouts to what this rank holds of them."""

    def __init__(self, linears: Mapping[str, MultiLoRALinear], ranks: Ranks) -> None:
        self._parted = {name: own for name, own in linears.items() if isinstance(own, PartedLinear)}
        self._first = ranks.tensor_index == 0

    def layout(self, whole: Layout) -> Layout:
        return Layout.of(whole.rank, (self._target(target) for target in whole.targets))

    def pieces(self, layout: Layout) -> list[_Piece]:
        found = []
        for target in layout.targets:
            for matrix in (0, 1):
                own = self._parted.get(target.name)
                place = None
                if own is not None and (own.kind == ROW) == (matrix == 0):
                    place = (slice(None), own.part) if matrix == 0 else (own.part, slice(None))
                found.append(_Piece(target.name, matrix, place, own is not None or self._first))
        return found

    def _target(self, target: Target) -> Target:
        own = self._parted.get(target.name)
        return target if own is None else own.target


class PartedAdapter(Adapter):
    """`compute`, and `gradients` while there are any, are this rank's part; everything else is whole."""

    __slots__ = ("compute_layout", "parting", "pieces")

    def __init__(self, spec: LoraSpec, layout: Layout, flat_P: Tensor, dtype: torch.dtype, parting: Parting) -> None:
        super().__init__(spec, layout, flat_P, torch.float32)
        self.parting = parting
        self.pieces = parting.pieces(layout)
        self.compute_layout = parting.layout(layout)
        self.compute_P = torch.zeros(self.compute_layout.numel, dtype=dtype, device=flat_P.device)
        self.compute = self.compute_layout.views(self.compute_P)
        self.refresh()

    def refresh(self) -> None:
        self.version += 1
        own = [self.compute[piece.name][piece.matrix] for piece in self.pieces]
        given = [_at(self.weights[piece.name][piece.matrix], piece) for piece in self.pieces]
        torch._foreach_copy_(own, given)  # pyright: ignore[reportPrivateImportUsage]

    def open_gradients(self) -> Tensor:
        gradient_P = torch.zeros_like(self.compute_P, dtype=torch.float32)
        self.gradients = self.compute_layout.views(gradient_P)
        return gradient_P

    def clone(self) -> Adapter:
        return PartedAdapter(self.spec, self.layout, self.flat_P.clone(), self.compute_P.dtype, self.parting)

    def whole_gradient(self, gradient_P: Tensor) -> Tensor:
        """What this rank knows of the whole gradient; the sum over the ranks is the gradient."""
        whole_P = torch.zeros_like(self.flat_P)
        own, whole = self.compute_layout.views(gradient_P), self.layout.views(whole_P)
        for piece in self.pieces:
            if piece.counted:
                _at(whole[piece.name][piece.matrix], piece).copy_(own[piece.name][piece.matrix])
        return whole_P


def whole_gradient(adapter: Adapter, gradient_P: Tensor) -> Tensor:
    return adapter.whole_gradient(gradient_P) if isinstance(adapter, PartedAdapter) else gradient_P


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, ranks: Ranks) -> Tensor:
        return ranks.sum_tensor(y.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.ranks.sum_tensor(grad.clone()), None


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, part: slice, ranks: Ranks) -> Tensor:
        ctx.part = part
        return ranks.beside(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad[..., ctx.part].contiguous(), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, part: slice, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x[..., part].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.ranks.beside(grad), None, None


def _at(matrix: Tensor, piece: _Piece) -> Tensor:
    return matrix if piece.place is None else matrix[piece.place]


def _share(size: int, ranks: Ranks) -> slice:
    length = size // ranks.degrees.tensor
    return slice(ranks.tensor_index * length, (ranks.tensor_index + 1) * length)


def _length(part: slice) -> int:
    return part.stop - part.start


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().clone(), requires_grad=False)


log = structlog.get_logger()


def check_heads(name: str, config: PreTrainedConfig, degree: int) -> None:
    """Raises SettingsError if a rank's share of the heads would not be whole heads."""
    for what, field in (("attention heads", "num_attention_heads"), ("key and value heads", "num_key_value_heads")):
        count = getattr(config, field, None)
        if isinstance(count, int) and count % degree:
            fitting = [number for number in range(1, count + 1) if count % number == 0]
            raise SettingsError(
                f"tensor_parallel is {degree}, and {name} has {count} {what}, which {degree} does not divide; "
                f"choose among {', '.join(map(str, fitting))}"
            )


def divided(name: str, config: PreTrainedConfig, decoder: nn.Module, degree: int) -> dict[str, str]:
    """Path within the decoder -> how it is divided. Raises SettingsError if the model cannot be divided."""
    plan = cast("Mapping[str, str] | None", getattr(config, "base_model_tp_plan", None))
    if not plan:
        raise SettingsError(
            f"tensor_parallel is {degree}, and transformers has no plan for {config.model_type!r} models; use "
            "data_parallel, with shard_base where one device cannot hold the model"
        )
    check_heads(name, config, degree)
    found: dict[str, str] = {}
    left = set()
    for path, module in decoder.named_modules():
        style = _style(path, plan)
        if not isinstance(module, nn.Linear) and not hasattr(module, "in_features"):
            continue
        if style in (COLUMN, GATHERED_COLUMN, ROW, SPLIT_ROW):
            by_outputs = style in (COLUMN, GATHERED_COLUMN)
            size = cast(int, module.out_features if by_outputs else module.in_features)
            if size % degree:
                raise SettingsError(
                    f"tensor_parallel is {degree}, and {name} has a linear {path} of width {size}, which {degree} "
                    "does not divide"
                )
            found[path] = style
        elif style is not None:
            left.add(re.sub(r"\d+", "*", path))
    if not found:
        raise SettingsError(
            f"tensor_parallel is {degree}, and no linear of {config.model_type!r} models can be divided here; use "
            "data_parallel, with shard_base where one device cannot hold the model"
        )
    if left:
        log.warning("linears that are whole on every rank", linears=sorted(left))
    return found


def _style(path: str, plan: Mapping[str, str]) -> str | None:
    return plan.get(re.sub(r"\d+", "*", path))
