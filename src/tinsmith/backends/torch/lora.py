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

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tinsmith.backends.torch.adapters import LinearPart, Target
from tinsmith.backends.torch.attention import AttentionPlan
from tinsmith.backends.torch.lora_ops import Routing, Run, Site
from tinsmith.backends.torch.products import product


class Switchboard:
    """Holds the routing and the plan of the call in progress; every linear and mixer of one model share one."""

    __slots__ = ("plan", "routing")

    def __init__(self) -> None:
        self.routing: Routing | None = None
        self.plan: AttentionPlan | None = None


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
        self.adapted: tuple[Target, ...] = (self.target,)
        self._site = Site(self.adapted)
        self._switchboard = switchboard

    @property
    def target(self) -> Target:
        return Target(self.name, self.group, self.in_features, self.out_features)

    def divide(self, parts: Sequence[tuple[str, int]]) -> None:
        """Carry an adapter for each of these last names, on so many of the outputs each, from the first on."""
        starts = accumulate((num_rows for _, num_rows in parts), initial=0)
        parent = self.name.rpartition(".")[0]
        self.adapted = tuple(
            Target(f"{parent}.{last}", self.group, self.in_features, num_rows,
                   part=LinearPart(self.name, start, len(parts), self.out_features))
            for (last, num_rows), start in zip(parts, starts, strict=False)
        )  # fmt: skip
        self._site = Site(self.adapted)

    def forward(self, x: Tensor) -> Tensor:
        routing = self._switchboard.routing
        if routing is None:
            return nn.functional.linear(x, self.weight, self.bias)
        work = self.work(routing)
        if not work:
            return nn.functional.linear(x, self.weight, self.bias)
        if torch.is_grad_enabled():
            return apply_with_gradient(x, self, work)
        x_TI = x.reshape(-1, self.in_features)
        return self.forward_rows(x_TI, work)[0].view(*x.shape[:-1], -1)

    def work(self, routing: Routing) -> list[Run]:
        """The runs whose adapters have this linear."""
        return self._site.work(routing)

    def forward_rows(
        self, x_TI: Tensor, work: Sequence[Run], out_dtype: torch.dtype | None = None
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
        work: Sequence[Run],
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


class Projection(Protocol):
    """A frozen product with what adapters add, as `MultiLoRALinear` has it."""

    in_features: int
    out_features: int

    def forward_rows(
        self, x_TI: Tensor, work: Sequence[Run], out_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, list[Tensor]]: ...

    def backward_rows(
        self, grad_TO: Tensor, x_TI: Tensor, work: Sequence[Run], inner: Sequence[Tensor], *, need_input: bool
    ) -> Tensor | None: ...


def apply_with_gradient(x: Tensor, linear: Projection, work: Sequence[Run]) -> Tensor:
    """What the linear makes of x [.., I]; backward gives x its gradient and adds the adapters' to their buffers."""
    return cast(Tensor, _LoRALinearFunction.apply(x, anchor(x.device) if work else None, linear, work))


@cache
def anchor(device: torch.device) -> Tensor:
    """An empty input that asks for a gradient. The embeddings are frozen, so the first layer's input asks for none and
    autograd would not record what adapters do to it; this makes it, without computing the gradient of that input.
    """
    return torch.zeros(0, device=device, requires_grad=True)


class _LoRALinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, anchor: Tensor | None, module: Projection, work: list[Run]) -> Tensor:
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
