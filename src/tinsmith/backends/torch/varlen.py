"""Causal attention of packed sequences in one kernel, without padding: torch's variable-length flash attention.

Queries, keys and values of all sequences lie one after the other, and the kernel is told where each ends; it reads no
row of one for another. `suits` looks at what the kernel asks for, before each use, and has it tried once on each
device; where it does not hold (a CPU, float32, capped scores, sinks, heads of other sizes), the padded batches of
`attention` compute the same, and are the oracle. The order of the sums in its backward is not fixed: gradients differ
from run to run by rounding.

Shapes: T rows, H query heads, G key heads, D head dim, n sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import structlog
import torch
from torch import Tensor

try:
    from torch.nn.attention import varlen as torch_varlen
except ImportError:  # before torch 2.10
    torch_varlen = None

log = structlog.get_logger()

LEAST_CAPABILITY = (8, 0)

LARGEST_HEAD, HEAD_STEP = 256, 8
"""Head dims that the kernel has are multiples of 8 up to this."""

MOST_ERROR = 0.03
"""In bfloat16, relative; a mistake is of the size of the numbers."""


class Ends:
    """Where the sequences of one packed row end, as the kernel wants it: made when it is first asked for."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self.longest = max(lengths)
        self._on: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """[n + 1] int32, from 0."""
        if device not in self._on:
            ends = torch.tensor([0, *self._lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            self._on[device] = ends.to(device)
        return self._on[device]


def suits(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, softcap: float | None, sinks_H: Tensor | None) -> bool:
    if softcap is not None or sinks_H is not None or torch_varlen is None or not _is_fit(q_THD.device):
        return False
    if any(x.dtype not in (torch.bfloat16, torch.float16) for x in (q_THD, k_TGD, v_TGD)):
        return False
    head_dim = q_THD.shape[2]
    alike = k_TGD.shape[2] == v_TGD.shape[2] == head_dim and q_THD.shape[1] % k_TGD.shape[1] == 0
    return alike and head_dim <= LARGEST_HEAD and head_dim % HEAD_STEP == 0


def attend(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, ends: Ends, scale: float, window: int | None) -> Tensor:
    """[T, H, D]. `suits` must have said yes."""
    assert torch_varlen is not None
    ends_n = ends.on(q_THD.device)
    # The kernel counts a row's predecessors, where we count the row with them; -1 is all of them.
    before = -1 if window is None else window - 1
    # Queries and keys are halves of one tensor, whose rows the kernel would step over; it may ask for dense ones.
    q_THD, k_TGD, v_TGD = (x.contiguous() for x in (q_THD, k_TGD, v_TGD))
    out_THD = torch_varlen.varlen_attn(
        q_THD, k_TGD, v_TGD, ends_n, ends_n, ends.longest, ends.longest,
        scale=scale, window_size=(before, 0), enable_gqa=q_THD.shape[1] != k_TGD.shape[1],
    )  # fmt: skip
    assert isinstance(out_THD, Tensor)
    return out_THD


@lru_cache
def _is_fit(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return False
    return is_right_on(device)


def is_right_on(device: torch.device) -> bool:
    """Whether the kernel takes what it is to be given, and does with it, and back, what attention to each sequence by
    itself does.
    """
    with torch.inference_mode(False), torch.enable_grad():
        try:
            errors = [_error(device, window) for window in (None, 3)]
        except (RuntimeError, ValueError, TypeError) as error:
            log.info("packed attention in one kernel is not to be had here", device=str(device), error=str(error)[:200])
            return False
    if not max(errors) < MOST_ERROR:
        log.warning("packed attention in one kernel is wrong here and is not used", device=str(device), errors=errors)
    return max(errors) < MOST_ERROR


def _error(device: torch.device, window: int | None) -> float:
    """Of values and gradients of a few short sequences at random, the larger one, relative."""
    generator = torch.Generator().manual_seed(0)
    lengths, shapes = (9, 1, 30), [(40, heads, 64) for heads in (4, 2, 2, 4)]
    *leaves, grad_THD = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes)
    ours = [leaf.clone().requires_grad_() for leaf in leaves]
    found_THD = attend(ours[0], ours[1], ours[2], Ends(lengths), 0.1, window)
    found_THD.backward(grad_THD)
    alone = [leaf.float().requires_grad_() for leaf in leaves]
    parts = zip(*(leaf.split(lengths) for leaf in alone), strict=True)
    expected_THD = torch.cat([_alone(q, k, v, 0.1, window) for q, k, v in parts])
    expected_THD.backward(grad_THD.float())
    pairs = [(found_THD, expected_THD), *((own.grad, other.grad) for own, other in zip(ours, alone, strict=True))]
    return max(_relative(found, expected) for found, expected in pairs)


def _alone(q_LHD: Tensor, k_LGD: Tensor, v_LGD: Tensor, scale: float, window: int | None) -> Tensor:
    length, repeat = len(q_LHD), q_LHD.shape[1] // k_LGD.shape[1]
    k_LHD, v_LHD = k_LGD.repeat_interleave(repeat, 1), v_LGD.repeat_interleave(repeat, 1)
    visible_LL = torch.ones(length, length, dtype=torch.bool, device=q_LHD.device).tril()
    if window is not None:
        visible_LL = visible_LL.triu(1 - window)
    scores_HLL = torch.einsum("ihd,jhd->hij", q_LHD, k_LHD).mul(scale).masked_fill(~visible_LL, float("-inf"))
    return torch.einsum("hij,jhd->ihd", torch.softmax(scores_HLL, -1), v_LHD)


def _relative(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None and expected is not None
    return float((found.detach().float() - expected.detach()).norm() / expected.detach().norm())
