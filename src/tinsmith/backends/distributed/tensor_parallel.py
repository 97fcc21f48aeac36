"""A tensor rank's shard of a linear and of its adapters, and how the shards combine.

A linear is sharded by its outputs (column-parallel: queries, keys, values, gate, up, the unembedding) or by its inputs
(row-parallel: the projections that follow them). Every rank holds the matrices of its adapters uncut (`placement`);
`ShardedAdapter` also has the shard for this rank's matmuls, and of several stages only those of its own. A shard's
gradient is copied into zeros of the full shape, and the sum over the holders is the full gradient, in each of three
cases: an element belongs to one rank (B of a column, A of a row); all ranks have addends of it (A of a column, B of a
row; matrices of experts); or all ranks compute the same value (an unsharded linear), and then only the first rank's is
added.

transformers' plan for the family says which linears are sharded. Families without a plan, heads and widths that the
degree does not divide, and routed experts without `expert_parallel` are refused. A linear with an unsupported style is
replicated on every rank, which costs memory and is exact.

Shapes: T rows, I inputs, O outputs of the unsharded linear, or in `forward_shard` and `backward_shard` of its shard.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import structlog
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedConfig

from tinsmith.backends.distributed.collectives import Ranks
from tinsmith.backends.torch.adapters import Adapter, Gradients, Layout, Target
from tinsmith.backends.torch.frozen_weights import WHOLE, WeightCodes
from tinsmith.backends.torch.lora import ForwardContext, MultiLoRALinear
from tinsmith.backends.torch.lora_batch import AdapterGroup
from tinsmith.errors import SettingsError
from tinsmith.types import LoraSpec

COLUMN, ROW = "colwise", "rowwise"
GATHERED_COLUMN, SPLIT_ROW = "colwise_gather_output", "rowwise_split_input"
"""Styles in transformers' plans for tensor parallelism. The last two apply where the tensor in between must be
complete: a fused linear whose output is split, a norm over all heads.
"""


class SharedInput:
    """The input of column-parallel linears that read the same rows, so that its gradient is summed over ranks once."""

    def __init__(self, num_readers: int, ranks: Ranks) -> None:
        self._num_readers = num_readers
        self._ranks = ranks
        self._readers_left = 0
        self._input: Tensor | None = None
        self._shared: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self._input is not x or self._shared is None:
            self._input, self._shared, self._readers_left = x, _SumBackward.apply(x, self._ranks), self._num_readers
        shared, self._readers_left = self._shared, self._readers_left - 1
        if self._readers_left == 0:
            self._input = self._shared = None
        assert shared is not None
        return shared


class ShardedLinear(MultiLoRALinear):
    """A linear's `shard`, a range of its outputs or inputs."""

    def __init__(self, linear: MultiLoRALinear, context: ForwardContext, ranks: Ranks, kind: str) -> None:
        self.shard = _rank_slice(linear.out_features if kind == COLUMN else linear.in_features, ranks)
        inputs, outputs = (
            (linear.in_features, _length(self.shard)) if kind == COLUMN else (_length(self.shard), linear.out_features)
        )
        shard_linear = nn.Linear(inputs, outputs, bias=linear.bias is not None, device="meta")
        rows, columns = (self.shard, WHOLE) if kind == COLUMN else (WHOLE, self.shard)
        codes = None
        if linear.codes is None:
            shard_linear.weight = _freeze(linear.weight[rows, columns])
        else:
            codes = _select_codes(linear.name, linear.codes, rows, columns, ranks.degrees.tensor)
        if linear.bias is not None:
            shard_linear.bias = _freeze(linear.bias[rows] if kind == COLUMN else linear.bias)
        super().__init__(linear.name, linear.group, shard_linear, context, codes)
        self.kind = kind
        self.ranks = ranks


class ColumnLinear(ShardedLinear):
    """Computes this rank's outputs."""

    def __init__(
        self, linear: MultiLoRALinear, context: ForwardContext, ranks: Ranks, shared_input: SharedInput
    ) -> None:
        super().__init__(linear, context, ranks, COLUMN)
        self._shared_input = shared_input

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self._shared_input(x))


class RowLinear(ShardedLinear):
    """All outputs, summed over the ranks' inputs."""

    def __init__(self, linear: MultiLoRALinear, context: ForwardContext, ranks: Ranks) -> None:
        super().__init__(linear, context, ranks, ROW)
        self._bias = self.bias
        self.bias = None  # added once, after the sum

    def forward(self, x: Tensor) -> Tensor:
        y = _SumForward.apply(super().forward(x), self.ranks)
        return y if self._bias is None else y + self._bias


class GatheredColumnLinear(ColumnLinear):
    """All outputs, gathered from the ranks that compute them."""

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, _GatherOutputs.apply(super().forward(x), self.shard, self.ranks))


class SplitRowLinear(RowLinear):
    """A `RowLinear` that receives all inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(cast(Tensor, _SplitInputs.apply(x, self.shard, self.ranks)))


class GatheredLinear(ShardedLinear):
    """The unembedding: every rank computes its shard of the vocabulary. `forward_rows` returns and `backward_rows`
    takes all logits, which are gathered; `forward_shard` and `backward_shard` the logits of this rank's shard.
    """

    def __init__(self, linear: MultiLoRALinear, context: ForwardContext, ranks: Ranks) -> None:
        super().__init__(linear, context, ranks, COLUMN)

    def forward_rows(
        self,
        x_TI: Tensor,
        adapter_groups: Sequence[AdapterGroup],
        out_dtype: torch.dtype | None = None,
        frozen_TO: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        y_TO, a_outputs = self.forward_shard(x_TI, adapter_groups, out_dtype, frozen_TO)
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
        grad_TI = self.backward_shard(grad_TO[:, self.shard].contiguous(), x_TI, adapter_groups, a_outputs)
        return grad_TI if need_input else None

    def forward_shard(
        self,
        x_TI: Tensor,
        adapter_groups: Sequence[AdapterGroup],
        out_dtype: torch.dtype | None,
        frozen_TO: Tensor | None,
    ) -> tuple[Tensor, list[Tensor]]:
        return super().forward_rows(x_TI, adapter_groups, out_dtype, frozen_TO)

    def backward_shard(
        self, local_grad_TO: Tensor, x_TI: Tensor, adapter_groups: Sequence[AdapterGroup], a_outputs: Sequence[Tensor]
    ) -> Tensor:
        """[T, I], summed over ranks."""
        grad_TI = super().backward_rows(local_grad_TO, x_TI, adapter_groups, a_outputs, need_input=True)
        assert grad_TI is not None
        return self.ranks.sum_tensor(grad_TI)


@dataclass(frozen=True, slots=True)
class _MatrixShard:
    """The slices of a full matrix that make up this rank's shard. `is_counted`: this rank adds its gradient to the sum
    over ranks.
    """

    name: str
    matrix: int  # 0: A, 1: B
    index: tuple[slice, ...] | None  # None: the full matrix
    is_counted: bool


class Sharding:
    """Maps layouts of adapters that this rank holds to its shard of them."""

    def __init__(
        self, linears: Mapping[str, MultiLoRALinear], ranks: Ranks, names: Collection[str] | None = None
    ) -> None:
        """`names`: the targets of this rank's stage; None for all."""
        self._names = names
        self._sharded = {name: linear for name, linear in linears.items() if isinstance(linear, ShardedLinear)}
        self._is_first = ranks.tensor_index == 0

    def layout(self, full: Layout) -> Layout:
        return Layout.of(full.rank, map(self._shard_target, self._local_targets(full)))

    def matrix_shards(self, layout: Layout) -> list[_MatrixShard]:
        shards = []
        for target in self._local_targets(layout):
            linear = self._sharded.get(target.name)
            is_counted = target.experts is not None or linear is not None or self._is_first
            for matrix in (0, 1):
                index = None
                if linear is not None and (linear.kind == ROW) == (matrix == 0):
                    index = (slice(None), linear.shard) if matrix == 0 else (linear.shard, slice(None))
                shards.append(_MatrixShard(target.name, matrix, index, is_counted))
        return shards

    def _local_targets(self, layout: Layout) -> list[Target]:
        return [target for target in layout.targets if self._names is None or target.name in self._names]

    def _shard_target(self, target: Target) -> Target:
        linear = self._sharded.get(target.name)
        return target if linear is None else linear.target


class ShardedAdapter(Adapter):
    """`compute` and `gradients` are of this rank's shard; all other buffers are of what it holds."""

    __slots__ = ("compute_layout", "matrix_shards", "sharding")

    def __init__(self, spec: LoraSpec, layout: Layout, flat_P: Tensor, dtype: torch.dtype, sharding: Sharding) -> None:
        super().__init__(spec, layout, flat_P, torch.float32)
        self.sharding = sharding
        self.matrix_shards = sharding.matrix_shards(layout)
        self.compute_layout = sharding.layout(layout)
        self.compute_P = torch.zeros(self.compute_layout.numel, dtype=dtype, device=flat_P.device)
        self._make_views()
        self.refresh()

    def _make_views(self) -> None:
        self.weights, self.delta_matrices = self.layout.views(self.flat_P), {}
        # The base class's constructor calls this method before the shard exists.
        is_complete = self.compute_P is self.flat_P
        self.compute = self.weights if is_complete else self.compute_layout.views(self.compute_P)

    def _copy_weights(self) -> None:
        targets = [self.compute[shard.name][shard.matrix] for shard in self.matrix_shards]
        sources = [_select_shard(self.weights[shard.name][shard.matrix], shard) for shard in self.matrix_shards]
        if targets:
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]

    def open_gradients(self) -> Tensor:
        self.gradients = Gradients(self.compute_layout, self.compute_P.device)
        return self.gradients.flat_P

    def clone(self) -> Adapter:
        return ShardedAdapter(self.spec, self.layout, self.flat_P.clone(), self.compute_P.dtype, self.sharding)

    def full_gradient(self, gradient_P: Tensor) -> Tensor:
        """This rank's contribution to the full gradient, which is the sum over ranks."""
        full_P = torch.zeros_like(self.flat_P)
        local, full = self.compute_layout.views(gradient_P), self.layout.views(full_P)
        for shard in self.matrix_shards:
            if shard.is_counted:
                _select_shard(full[shard.name][shard.matrix], shard).copy_(local[shard.name][shard.matrix])
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
    def forward(ctx, y: Tensor, shard: slice, ranks: Ranks) -> Tensor:
        ctx.shard = shard
        return ranks.gather_tensor(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad[..., ctx.shard].contiguous(), None, None


class _SplitInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, shard: slice, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x[..., shard].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.ranks.gather_tensor(grad), None, None


def _select_shard(matrix: Tensor, shard: _MatrixShard) -> Tensor:
    return matrix if shard.index is None else matrix[shard.index]


def _rank_slice(size: int, ranks: Ranks) -> slice:
    length = size // ranks.degrees.tensor
    return slice(ranks.tensor_index * length, (ranks.tensor_index + 1) * length)


def _length(shard: slice) -> int:
    return shard.stop - shard.start


def _select_codes(name: str, codes: WeightCodes, outputs: slice, inputs: slice, degree: int) -> WeightCodes:
    try:
        return codes.select(outputs=outputs, inputs=inputs)
    except ValueError as error:
        raise SettingsError(
            f"tensor_parallel is {degree}, and {name} cannot be cut into as many parts: {error}; choose a smaller "
            "degree, or set quantize to 'int8' or 'fp8'"
        ) from None


def _freeze(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().clone(), requires_grad=False)


log = structlog.get_logger()


def check_heads(name: str, config: PreTrainedConfig, degree: int) -> None:
    """Raises SettingsError if the degree does not divide the number of heads."""
    for noun, field in (("attention heads", "num_attention_heads"), ("key and value heads", "num_key_value_heads")):
        count = getattr(config, field, None)
        if isinstance(count, int) and count % degree:
            divisors = [divisor for divisor in range(1, count + 1) if count % divisor == 0]
            raise SettingsError(
                f"tensor_parallel is {degree}, and {name} has {count} {noun}, which {degree} does not divide; "
                f"choose among {', '.join(map(str, divisors))}"
            )


def find_sharding_styles(name: str, config: PreTrainedConfig, decoder: nn.Module, degree: int) -> dict[str, str]:
    """The style of each sharded linear, by its path within the decoder. Raises SettingsError if the model cannot be
    sharded.
    """
    plan = cast("Mapping[str, str] | None", getattr(config, "base_model_tp_plan", None))
    if not plan:
        raise SettingsError(
            f"tensor_parallel is {degree}, and transformers has no plan for {config.model_type!r} models; use "
            "data_parallel, with shard_base where one device cannot hold the model"
        )
    check_heads(name, config, degree)
    styles: dict[str, str] = {}
    replicated = set()
    for path, module in decoder.named_modules():
        style = _find_style(path, plan)
        if not isinstance(module, nn.Linear) and not hasattr(module, "in_features"):
            continue
        if style in (COLUMN, GATHERED_COLUMN, ROW, SPLIT_ROW):
            is_column = style in (COLUMN, GATHERED_COLUMN)
            size = cast(int, module.out_features if is_column else module.in_features)
            if size % degree:
                raise SettingsError(
                    f"tensor_parallel is {degree}, and {name} has a linear {path} of width {size}, which {degree} "
                    "does not divide"
                )
            styles[path] = style
        elif style is not None:
            replicated.add(re.sub(r"\d+", "*", path))
    if not styles:
        raise SettingsError(
            f"tensor_parallel is {degree}, and no linear of {config.model_type!r} models can be split; use "
            "data_parallel, with shard_base where one device cannot hold the model"
        )
    if replicated:
        log.warning("linears replicated on every rank", linears=sorted(replicated))
    return styles


def _find_style(path: str, plan: Mapping[str, str]) -> str | None:
    return plan.get(re.sub(r"\d+", "*", path))
