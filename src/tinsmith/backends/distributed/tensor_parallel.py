"""One tensor rank's shard of a linear and of its adapters, and how shards combine to the whole.

A linear is sharded by its outputs (column-parallel: queries, keys, values, gate, up, the unembedding) or by its inputs
(row-parallel: the projections that follow them). Adapters are complete on every rank, with their optimizer state, so
that checkpoints and updates are independent of ranks; `ShardedAdapter` also holds the shard that this rank multiplies
with. A shard's gradient is copied into zeros of the full shape, and the sum over all ranks is the full gradient, in
each of three cases: a number belongs to one rank (B of a column, A of a row); all ranks hold addends of it (A of a
column, B of a row); or all ranks compute the same (an unsharded linear), and then only the first rank's counts.

transformers' plan for the family says which linears are sharded. Families without a plan, heads and widths that the
degree does not divide, and experts that are not spread (`expert_parallel`) are refused. A linear with an unsupported
style stays whole on every rank: that costs memory and is exact.

Shapes: T rows, I inputs, O outputs of the whole linear.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import structlog
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedConfig

from tinsmith.backends.distributed.ranks import Ranks
from tinsmith.backends.torch.adapters import Adapter, Gradients, Layout, Target
from tinsmith.backends.torch.lora import ForwardContext, MultiLoRALinear
from tinsmith.backends.torch.lora_batch import AdapterGroup
from tinsmith.errors import SettingsError
from tinsmith.types import LoraSpec

COLUMN, ROW = "colwise", "rowwise"
GATHERED_COLUMN, SPLIT_ROW = "colwise_gather_output", "rowwise_split_input"
"""Names in transformers' plans for tensor parallelism; the last two apply where the tensor in between must be whole: a
fused linear whose output is split, a norm over all heads.
"""


class SharedInput:
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


class ShardedLinear(MultiLoRALinear):
    """A shard of a linear: `full_target` is the target of the whole linear, `part` the range of it in this shard."""

    def __init__(self, own: MultiLoRALinear, context: ForwardContext, ranks: Ranks, kind: str) -> None:
        self.part = _share(own.out_features if kind == COLUMN else own.in_features, ranks)
        inputs, outputs = (
            (own.in_features, _length(self.part)) if kind == COLUMN else (_length(self.part), own.out_features)
        )
        linear = nn.Linear(inputs, outputs, bias=own.bias is not None, device="meta")
        rows, columns = (self.part, slice(None)) if kind == COLUMN else (slice(None), self.part)
        linear.weight = _frozen(own.weight[rows, columns])
        if own.bias is not None:
            linear.bias = _frozen(own.bias[rows] if kind == COLUMN else own.bias)
        super().__init__(own.name, own.group, linear, context)
        self.kind = kind
        self.full_target = own.target
        self.ranks = ranks


class ColumnLinear(ShardedLinear):
    """Computes this rank's outputs."""

    def __init__(self, own: MultiLoRALinear, context: ForwardContext, ranks: Ranks, shared_input: SharedInput) -> None:
        super().__init__(own, context, ranks, COLUMN)
        self._shared_input = shared_input

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self._shared_input(x))


class RowLinear(ShardedLinear):
    """All outputs, summed over the ranks' inputs."""

    def __init__(self, own: MultiLoRALinear, context: ForwardContext, ranks: Ranks) -> None:
        super().__init__(own, context, ranks, ROW)
        self._bias = self.bias
        self.bias = None  # added once, to the sum

    def forward(self, x: Tensor) -> Tensor:
        y = _SumForward.apply(super().forward(x), self.ranks)
        return y if self._bias is None else y + self._bias


class GatheredColumnLinear(ColumnLinear):
    """All outputs, gathered from the ranks that compute them."""

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, _GatherOutputs.apply(super().forward(x), self.part, self.ranks))


class SplitRowLinear(RowLinear):
    """A `RowLinear` that receives all inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(cast(Tensor, _SplitInputs.apply(x, self.part, self.ranks)))


class GatheredLinear(ShardedLinear):
    """The unembedding: every rank computes its share of the vocabulary. `forward_rows` and `backward_rows` take all
    logits, which are gathered; `forward_part` and `backward_part` take the rank's own.
    """

    def __init__(self, own: MultiLoRALinear, context: ForwardContext, ranks: Ranks) -> None:
        super().__init__(own, context, ranks, COLUMN)

    def forward_rows(
        self,
        x_TI: Tensor,
        adapter_groups: Sequence[AdapterGroup],
        out_dtype: torch.dtype | None = None,
        frozen_TO: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        y_TO, a_outputs = self.forward_part(x_TI, adapter_groups, out_dtype, frozen_TO)
        return self.ranks.gather_tensor(y_TO), a_outputs

    def backward_rows(
        self,
        grad_TO: Tensor,
        x_TI: Tensor,
        adapter_groups: Sequence[AdapterGroup],
        a_outputs: Sequence[Tensor],
        *,
        need_input: bool,
    ) -> Tensor | None:
        grad_TI = self.backward_part(grad_TO[:, self.part].contiguous(), x_TI, adapter_groups, a_outputs)
        return grad_TI if need_input else None

    def forward_part(
        self,
        x_TI: Tensor,
        adapter_groups: Sequence[AdapterGroup],
        out_dtype: torch.dtype | None,
        frozen_TO: Tensor | None,
    ) -> tuple[Tensor, list[Tensor]]:
        return super().forward_rows(x_TI, adapter_groups, out_dtype, frozen_TO)

    def backward_part(
        self, own_TO: Tensor, x_TI: Tensor, adapter_groups: Sequence[AdapterGroup], a_outputs: Sequence[Tensor]
    ) -> Tensor:
        """[T, I], summed over ranks."""
        grad_TI = super().backward_rows(own_TO, x_TI, adapter_groups, a_outputs, need_input=True)
        assert grad_TI is not None
        return self.ranks.sum_tensor(grad_TI)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where one matrix of the sharded layout is in the full one. `counted`: whether this rank
    contributes its gradient.
    """

    name: str
    matrix: int  # 0: A, 1: B
    place: tuple[slice, ...] | None  # None: it is the whole matrix
    counted: bool


class Sharding:
    """Maps layouts to this rank's shard of them. `names`: the targets in this rank's layers, where others have the
    rest.
    """

    def __init__(
        self,
        linears: Mapping[str, MultiLoRALinear],
        ranks: Ranks,
        experts: Mapping[str, slice] | None = None,
        names: Collection[str] | None = None,
    ) -> None:
        """`experts`: by target, which experts this rank has. `names`: the targets of its stage."""
        self._names = names
        self._sharded = {name: own for name, own in linears.items() if isinstance(own, ShardedLinear)}
        self._experts = experts or {}
        self._first = ranks.tensor_index == 0

    def layout(self, full: Layout) -> Layout:
        return Layout.of(full.rank, map(self._target, self._own(full)))

    def pieces(self, layout: Layout) -> list[_Piece]:
        found = []
        for target in self._own(layout):
            for matrix in (0, 1):
                if target.experts is not None and (part := self._experts.get(target.name)) is not None:
                    place = None if target.experts.common == "AB"[matrix] else (part,)
                    found.append(_Piece(target.name, matrix, place, True))
                    continue
                own = self._sharded.get(target.name)
                place = None
                if own is not None and (own.kind == ROW) == (matrix == 0):
                    place = (slice(None), own.part) if matrix == 0 else (own.part, slice(None))
                found.append(_Piece(target.name, matrix, place, own is not None or self._first))
        return found

    def _own(self, layout: Layout) -> list[Target]:
        return [target for target in layout.targets if self._names is None or target.name in self._names]

    def _target(self, target: Target) -> Target:
        if target.experts is not None and (part := self._experts.get(target.name)) is not None:
            return replace(target, experts=replace(target.experts, num_experts=_length(part)))
        own = self._sharded.get(target.name)
        return target if own is None else own.target


class ShardedAdapter(Adapter):
    """`compute` and `gradients` are this rank's shard; everything else is complete."""

    __slots__ = ("compute_layout", "pieces", "sharding")

    def __init__(self, spec: LoraSpec, layout: Layout, flat_P: Tensor, dtype: torch.dtype, sharding: Sharding) -> None:
        super().__init__(spec, layout, flat_P, torch.float32)
        self.sharding = sharding
        self.pieces = sharding.pieces(layout)
        self.compute_layout = sharding.layout(layout)
        self.compute_P = torch.zeros(self.compute_layout.numel, dtype=dtype, device=flat_P.device)
        self._make_views()
        self.refresh()

    def _make_views(self) -> None:
        self.weights, self.delta_matrices = self.layout.views(self.flat_P), {}
        # The constructor of the base class comes first, with the whole adapter.
        is_whole = self.compute_P is self.flat_P
        self.compute = self.weights if is_whole else self.compute_layout.views(self.compute_P)

    def _copy_weights(self) -> None:
        own = [self.compute[piece.name][piece.matrix] for piece in self.pieces]
        given = [_at(self.weights[piece.name][piece.matrix], piece) for piece in self.pieces]
        if own:
            torch._foreach_copy_(own, given)  # pyright: ignore[reportPrivateImportUsage]

    def open_gradients(self) -> Tensor:
        self.gradients = Gradients(self.compute_layout, self.compute_P.device)
        return self.gradients.flat_P

    def clone(self) -> Adapter:
        return ShardedAdapter(self.spec, self.layout, self.flat_P.clone(), self.compute_P.dtype, self.sharding)

    def full_gradient(self, gradient_P: Tensor) -> Tensor:
        """This rank's contribution to the full gradient, which is the sum over ranks."""
        full_P = torch.zeros_like(self.flat_P)
        own, full = self.compute_layout.views(gradient_P), self.layout.views(full_P)
        for piece in self.pieces:
            if piece.counted:
                _at(full[piece.name][piece.matrix], piece).copy_(own[piece.name][piece.matrix])
        return full_P


def full_gradient(adapter: Adapter, gradient_P: Tensor) -> Tensor:
    return adapter.full_gradient(gradient_P) if isinstance(adapter, ShardedAdapter) else gradient_P


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


class _GatherOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, part: slice, ranks: Ranks) -> Tensor:
        ctx.part = part
        return ranks.gather_tensor(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad[..., ctx.part].contiguous(), None, None


class _SplitInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, part: slice, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x[..., part].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.ranks.gather_tensor(grad), None, None


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
    """Raises SettingsError if the degree does not divide the number of heads."""
    for what, field in (("attention heads", "num_attention_heads"), ("key and value heads", "num_key_value_heads")):
        count = getattr(config, field, None)
        if isinstance(count, int) and count % degree:
            fitting = [number for number in range(1, count + 1) if count % number == 0]
            raise SettingsError(
                f"tensor_parallel is {degree}, and {name} has {count} {what}, which {degree} does not divide; "
                f"choose among {', '.join(map(str, fitting))}"
            )


def divided(name: str, config: PreTrainedConfig, decoder: nn.Module, degree: int) -> dict[str, str]:
    """Path within the decoder -> style of sharding. Raises SettingsError if the model cannot be sharded."""
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
            f"tensor_parallel is {degree}, and no linear of {config.model_type!r} models can be split; use "
            "data_parallel, with shard_base where one device cannot hold the model"
        )
    if left:
        log.warning("linears replicated on every rank", linears=sorted(left))
    return found


def _style(path: str, plan: Mapping[str, str]) -> str | None:
    return plan.get(re.sub(r"\d+", "*", path))
