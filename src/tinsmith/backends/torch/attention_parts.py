"""Attention in parts: kernels that return each row's log sum of exponentials beside its output, by which parts over
different keys are joined; and attention with sinks, which are a part without values.

Gradients are exact if a kernel's backward gets the joined outputs and log sums in place of its own, as in ring
attention (arXiv 2310.01889). So neither scores nor masks are stored, and sinks need no kernel of their own.

Shapes: n sequences of L rows, H query heads, G key heads, D head dim. Log sums are float32, or float64 if rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import structlog
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tinsmith.runtime.devices import is_on_host, runs_kernels

aten = torch.ops.aten

log = structlog.get_logger()

MAX_FLASH_DIM = 256
"""The largest heads of FlashAttention, whose backward takes no larger ones."""

MAX_PROBE_ERROR = 0.05


class PartKernel(Protocol):
    """[n, L, H, D] outputs and [n, L, H] log sums; and the gradients of queries, keys and values."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool) -> tuple[Tensor, Tensor]: ...

    @staticmethod
    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, grad: Tensor, scale: float, *, is_causal: bool
    ) -> list[Tensor]:
        """Backward reads log sums and outputs of all parts, and `grad`, the gradient of these outputs."""
        ...


def suits_flash(dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Whether FlashAttention supports heads of these sizes. It takes no mask."""
    return dtype in (torch.bfloat16, torch.float16) and key_dim == value_dim <= MAX_FLASH_DIM


def suits_parts(q: Tensor, v: Tensor) -> bool:
    """Whether this device has a kernel for heads of these sizes."""
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    if runs_kernels(q):
        return suits_flash(q.dtype, key_dim, value_dim) and key_dim % 8 == 0
    return is_on_host(q) and key_dim == value_dim


def equals_reference(
    attend: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    grad: Tensor,
    *,
    consequence: str,
) -> bool:
    """Whether a device's outputs and gradients for these inputs are those of a reference. If not, the log says why, and
    what happens then, `consequence`.
    """
    results, device = [], str(grad.device)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            for function in (attend, reference):
                leaves = [x.clone().requires_grad_() for x in inputs]
                out = function(*leaves)
                results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
        errors = [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(*results, strict=True)]
    except RuntimeError as error:
        log.warning(f"{consequence}: its kernel failed", device=device, error=repr(error))
        return False
    if max(errors) < MAX_PROBE_ERROR:
        return True
    log.warning(f"{consequence}: its kernel differs", device=device, error=max(errors))
    return False


def part_kernel(q: Tensor) -> type[PartKernel]:
    return CudaKernel if runs_kernels(q) else HostKernel


def join_(out_LHD: Tensor, log_sum_LH: Tensor, part_LHD: Tensor, part_log_sum_LH: Tensor) -> None:
    """Join a part's outputs and log sums with those of the parts before, in place."""
    joined_LH = torch.logaddexp(log_sum_LH, part_log_sum_LH)
    out_LHD.mul_((log_sum_LH - joined_LH).exp_()[..., None])
    out_LHD.addcmul_(part_LHD.to(out_LHD.dtype), (part_log_sum_LH - joined_LH).exp_()[..., None])
    log_sum_LH.copy_(joined_LH)


class HostKernel:
    """[n, L, H, D] outputs and [n, L, H] log sums; and the gradients of queries, keys and values."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool) -> tuple[Tensor, Tensor]:
        attend = aten._scaled_dot_product_flash_attention_for_cpu.default
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out_nHLD, log_sum_nHL = attend(q, k, v, 0.0, is_causal, scale=scale)
        return out_nHLD.transpose(1, 2), log_sum_nHL.transpose(1, 2)

    @staticmethod
    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, grad: Tensor, scale: float, *, is_causal: bool
    ) -> list[Tensor]:
        differentiate = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        grad, q, k, v, out, log_sum = (x.transpose(1, 2) for x in (grad, q, k, v, out, log_sum))
        grads = differentiate(grad, q, k, v, out, log_sum, 0.0, is_causal, scale=scale)
        return [x.transpose(1, 2) for x in grads]


class CudaKernel:
    """FlashAttention, likewise."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool) -> tuple[Tensor, Tensor]:
        attend = aten._scaled_dot_product_flash_attention.default
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out_nHLD, log_sum_nHL, *_ = attend(q, k, v, 0.0, is_causal, False, scale=scale)
        return out_nHLD.transpose(1, 2), log_sum_nHL[..., : q.shape[2]].transpose(1, 2)

    @staticmethod
    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, grad: Tensor, scale: float, *, is_causal: bool
    ) -> list[Tensor]:
        differentiate = aten._scaled_dot_product_flash_attention_backward.default
        grad, q, k, v, out, log_sum = (x.transpose(1, 2) for x in (grad, q, k, v, out, log_sum))
        lengths = q.shape[2], k.shape[2]
        seed = torch.empty(0, dtype=torch.int64, device=q.device)  # without dropout, nothing reads it
        grads = differentiate(
            grad, q, k, v, out, log_sum.contiguous(), None, None, *lengths, 0.0, is_causal, seed, seed, scale=scale
        )
        return [x.transpose(1, 2) for x in grads]


# Sinks.


def add_sinks_(out: Tensor, log_sum: Tensor, sinks_H: Tensor) -> None:
    """Join outputs [.., H, D] and log sums [.., H] with a part that has the sinks' logits and values of 0, in place."""
    joined = torch.logaddexp(log_sum, sinks_H.to(log_sum.dtype))
    out.mul_((log_sum - joined).exp_()[..., None])
    log_sum.copy_(joined)


def sink_gradient(sinks_H: Tensor, out: Tensor, log_sum: Tensor, grad: Tensor) -> Tensor:
    """[H], from joined outputs and log sums and the gradient of the outputs."""
    read = (grad.to(log_sum.dtype) * out).sum(-1)
    return -((sinks_H - log_sum).exp_() * read).flatten(0, -2).sum(0).to(sinks_H.dtype)


def attend_with_sinks(
    q_nLHD: Tensor,
    k_nLGD: Tensor,
    v_nLGD: Tensor,
    sinks_H: Tensor,
    scale: float,
    before: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """[n, L, H, D]: causal attention whose softmax has one more logit for each head. `before`: the keys and values
    [n, L, G, D] of the L rows before, of which a row sees the last L - 1 - i if it is row i, so that each sees L rows.
    """
    return cast(Tensor, _SinkAttention.apply(q_nLHD, k_nLGD, v_nLGD, sinks_H, scale, *(before or (None, None))))


class _SinkAttention(torch.autograd.Function):
    """What a row sees of the rows before is causal in reverse order: the second last row sees the last of them, the row
    before it the last two, and so on.
    """

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_H: Tensor,
        scale: float,
        k_before: Tensor | None,
        v_before: Tensor | None,
    ) -> Tensor:
        kernel = part_kernel(q)
        out, log_sum = kernel.forward(q, k, v, scale, is_causal=True)
        wide_out = out.to(log_sum.dtype, copy=True)
        log_sum = log_sum.clone()
        if k_before is not None and v_before is not None and q.shape[1] > 1:
            part = kernel.forward(*_reverse(q, k_before, v_before), scale, is_causal=True)
            join_(wide_out[:, :-1], log_sum[:, :-1], *(x.flip(1) for x in part))
        add_sinks_(wide_out, log_sum, sinks_H)
        out = wide_out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks_H, k_before, v_before, out, log_sum)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, sinks_H, k_before, v_before, out, log_sum = ctx.saved_tensors
        kernel = part_kernel(q)
        q_grad, k_grad, v_grad = kernel.backward(q, k, v, out, log_sum, grad, ctx.scale, is_causal=True)
        before_grads: list[Tensor | None] = [None, None]
        if k_before is not None:
            before_grads = [torch.zeros_like(k_before), torch.zeros_like(v_before)]
        if k_before is not None and q.shape[1] > 1:
            inputs = _reverse(q, k_before, v_before)
            part_out, part_log_sum, part_grad = (x[:, :-1].flip(1) for x in (out, log_sum, grad))
            part = kernel.backward(*inputs, part_out, part_log_sum, part_grad, ctx.scale, is_causal=True)
            q_grad[:, :-1] += part[0].flip(1)
            for before_grad, gradient in zip(before_grads, part[1:], strict=True):
                cast(Tensor, before_grad)[:, 1:] = gradient.flip(1)
        sinks_grad = sink_gradient(sinks_H, out, log_sum, grad) if ctx.needs_input_grad[3] else None
        return q_grad, k_grad, v_grad, sinks_grad, None, *before_grads


def _reverse(q: Tensor, k_before: Tensor, v_before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q[:, :-1].flip(1), k_before[:, 1:].flip(1), v_before[:, 1:].flip(1)
