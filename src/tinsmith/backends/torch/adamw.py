"""AdamW over many adapters in one fused pass, equal to torch.optim.AdamW.

A step without a gradient is a step with a gradient of zero: moments decay, what they still hold moves the weights,
the step counts. What is common to all optimizers (norm, clipping, a gradient that is not finite) is `optimizers`'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.optim.adamw import adamw

from tinsmith.backends.torch.trained import Trained
from tinsmith.errors import UserError
from tinsmith.types import AdamParams

MOMENTS = ("exp_avg", "exp_avg_sq")


def check_adam(params: AdamParams) -> None:
    """Raise UserError on what AdamW cannot mean."""
    for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
        value = getattr(params, name)
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"adam_params.{name} is {value}; it must be finite and not negative")
    for name in ("beta1", "beta2"):
        value = getattr(params, name)
        if not 0 <= value < 1:
            raise UserError(f"adam_params.{name} is {value}; it must be at least 0 and less than 1")
    # With eps 0 a weight that has never had a gradient becomes 0 / 0.
    if not (math.isfinite(params.eps) and params.eps > 0):
        raise UserError(f"adam_params.eps is {params.eps}; it must be finite and greater than 0")


def step_adamw(group: Sequence[tuple[Trained, Tensor]], params: AdamParams) -> None:
    """One pass over every number, with each adapter's own gradient [P]: all are read and written once."""
    moments = [trained.moments_or_zeros(len(MOMENTS)) for trained, _ in group]
    adamw(
        [trained.adapter.flat_P for trained, _ in group],
        [gradient_P for _, gradient_P in group],
        [first for first, _ in moments],
        [second for _, second in moments],
        [],
        [trained.step for trained, _ in group],
        fused=True,
        lr=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        weight_decay=params.weight_decay,
        eps=params.eps,
        amsgrad=False,
        maximize=False,
    )
    for trained, _ in group:
        trained.adapter.refresh()
