"""Activation recomputation: layers run again in backward when keeping their activations would not fit.

A decoder layer keeps only its input and runs once more for its gradient: a third more compute for a small part of the
memory. Each micro-batch is compared with `RECOMPUTE_SHARE` of the free memory, unless the owner has chosen. Where the
plan's arithmetic holds, only as many layers run again as must: the first ones, since backward has freed the last ones'
activations by then. A layer that runs again needs the LoRA batch and the plan of its first run, so transformers' own
gradient checkpointing cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from tinsmith.backends.torch.lora import ForwardContext, MultiLoRALinear
from tinsmith.backends.torch.moe import MultiLoRAExperts
from tinsmith.errors import SettingsError
from tinsmith.plan.memory import Activations
from tinsmith.plan.mixers import count_saved_activations, is_mixer, is_whole
from tinsmith.runtime.devices import count_unused_bytes, free_bytes, kind_of

RECOMPUTE_SHARE = {False: 0.4, True: 0.6}
"""Share of the free memory for activations, on a CPU, whose memory others use too, and on a GPU. The plan's figures may
be a third too small there; if memory runs out, all layers run again (`recompute_all`).
"""

SAVED_PER_LINEAR = 2.0
"""Elements per token for each input and output of a linear, including what backward needs while it runs. An expert is
two linears for each of its rows, unless its gate is fused.
"""


class Recompute:
    """`mode` is 'auto', 'on' or 'off'. `wrap` is called once, at load. `active` is the result of `decide`; a value in
    `chosen` overrides it.
    """

    def __init__(self, mode: str, context: ForwardContext) -> None:
        if mode not in ("auto", "on", "off"):
            raise SettingsError(f"backend option recompute is {mode!r}; choose 'auto', 'on' or 'off'")
        self.mode = mode
        self.chosen: bool | None = None
        self._context = context
        self.active = False
        self.num_saved_layers = 0
        """If `active`: how many layers keep their activations all the same, of those that `activations` counts."""
        self.activations: Activations | None = None
        """What fused layers keep, by the plan's arithmetic; None if it is unknown, or ranks must agree."""
        self.num_layers = 0
        self._recomputes_all = False
        self._linears_bytes = 0
        self._mixers_bytes = 0.0
        self._experts: list[MultiLoRAExperts] = []

    def wrap(self, decoder: nn.Module) -> None:
        for layer in decoder.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.forward = self._wrap_forward(layer.forward)
        self.count(decoder)

    def count(self, decoder: nn.Module, context: int = 1) -> None:
        """Count what the decoder's linears keep; call again after linears were replaced. Of so many context ranks, each
        computes all rows of some mixers.
        """
        linears = [module for module in decoder.modules() if isinstance(module, MultiLoRALinear)]
        self._linears_bytes = sum(
            (linear.in_features + linear.out_features) * linear.dtype.itemsize for linear in linears
        )
        mixers = [module for module in decoder.modules() if is_mixer(module)]
        self._mixers_bytes = sum(
            4.0 * count_saved_activations(mixer) * (context if is_whole(mixer) else 1) for mixer in mixers
        )
        self._experts = [module for module in decoder.modules() if isinstance(module, MultiLoRAExperts)]

    def decide(self, num_tokens: int, device: torch.device) -> None:
        """Decide for the next forward."""
        self.num_saved_layers = 0
        if self.chosen is not None:
            self.active = self.chosen
            return
        if self.mode != "auto" or self._recomputes_all:
            self.active = self.mode != "off"
            return
        self.active = not self.fits(num_tokens, device)
        if self.active and self.activations is not None:
            self.num_saved_layers = count_saved_layers(
                self.activations, self.num_layers, num_tokens, _limit_bytes(device)
            )

    def count_recomputed(self, num_layers: int) -> int:
        """How many of so many layers, the first ones, run again in the next forward."""
        return num_layers - self.num_saved_layers if self.active else 0

    def recompute_all(self) -> bool:
        """Memory ran out: keep no activations until `relax`. False if none were kept, or others choose."""
        is_own = self.mode == "auto" and self.chosen is None and self.activations is not None
        keeps = not self.active or self.num_saved_layers > 0
        if not is_own or not keeps or self._recomputes_all:
            return False
        self._recomputes_all = True
        return True

    def relax(self) -> None:
        self._recomputes_all = False

    def fits(self, num_tokens: int, device: torch.device) -> bool:
        """Whether the activations of so many tokens may be kept."""
        return num_tokens * self.bytes_per_token() <= _limit_bytes(device)

    def bytes_per_token(self) -> float:
        if self.activations is not None:
            return self.activations.token_bytes
        return SAVED_PER_LINEAR * self._linears_bytes + self._experts_bytes() + self._mixers_bytes

    def _experts_bytes(self) -> float:
        """The number of experts per row is known after the first rows."""
        saved = working = 0.0
        for module in self._experts:
            if module.is_fused:
                saved += module.saved_per_row * module.dtype.itemsize
                working = max(working, module.working_per_row * module.dtype.itemsize)
            else:
                saved += SAVED_PER_LINEAR * module.features_per_row * module.dtype.itemsize
        return saved + working

    def _wrap_forward(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: object, **kwargs: object) -> Tensor:
            if not (self.active and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            context = self._context
            lora_batch, plan = context.lora_batch, context.plan

            def rerun(*args: object, **kwargs: object) -> Tensor:
                outer_state, (context.lora_batch, context.plan) = (context.lora_batch, context.plan), (lora_batch, plan)
                try:
                    return forward(*args, **kwargs)
                finally:
                    context.lora_batch, context.plan = outer_state

            # The base uses no random numbers, so there is no generator state to keep.
            return checkpoint(partial(rerun, **kwargs), *args, use_reentrant=False, preserve_rng_state=False)

        return run


def count_saved_layers(activations: Activations, num_layers: int, num_tokens: int, limit_bytes: float) -> int:
    """The most layers that may keep their activations; 0 also if not even their inputs fit."""
    fitting = (
        num_saved_layers for num_saved_layers in range(num_layers - 1, 0, -1)
        if bytes_with(activations, num_layers, num_tokens, num_saved_layers) <= limit_bytes
    )  # fmt: skip
    return next(fitting, 0)


def bytes_with(activations: Activations, num_layers: int, num_tokens: int, num_saved_layers: int) -> float:
    """Bytes of a micro-batch of which `num_saved_layers` keep their activations, and the other layers their inputs;
    see `Activations.num_bytes`.
    """
    bytes_per_element = num_tokens * activations.dtype_bytes
    saved = (num_saved_layers * activations.saved + (num_layers - num_saved_layers) * activations.inputs) / num_layers
    working = activations.layer * (1 if num_saved_layers == num_layers else 2)
    return bytes_per_element * saved + max(bytes_per_element * working, activations.logits_bytes)


def _limit_bytes(device: torch.device) -> float:
    return RECOMPUTE_SHARE[kind_of(device).has_kernels] * _free_bytes(device)


def _free_bytes(device: torch.device) -> float:
    return free_bytes(device) + count_unused_bytes(device)
