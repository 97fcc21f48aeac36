"""A base model whose own weights are trained: which weights are in it at the moment, and the proof of its gradients.

Weights are put in by reference (`bind`): parameters become views of their flat buffer, and nothing is copied. Training,
sampling and the original weights take turns, in one thread. Layers that are written out elsewhere keep copies of what
they were made from, so everything goes through the model's own modules here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tinsmith.backends.full.weights import FullLayout, FullWeights
from tinsmith.backends.torch.attention import ATTENTION_NAME, PackedCausal
from tinsmith.backends.torch.lora import Routing, Segment
from tinsmith.backends.torch.model import BaseModel
from tinsmith.errors import SettingsError
from tinsmith.types import ModelShape

TOLERANCE = 1e-3
"""Between a gradient and the one of the model's own attention, relative to the largest."""


class FullBase(BaseModel):
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        shape: ModelShape,
        recompute: str = "auto",
        quantize: str = "off",
    ) -> None:
        super().__init__(model, tokenizer, shape, recompute, quantize)
        self._written_out = self._differentiable = None
        if self.experts:
            raise SettingsError(f"{shape.name} is a mixture of experts; backend 'full' trains dense models only")
        self._parameters = dict(model.named_parameters())
        self.layout = FullLayout.of(self._parameters.items())
        given = {name: parameter.data for name, parameter in self._parameters.items()}
        self.original = FullWeights(self.layout, self.layout.filled(given, self.device))
        self._bound: FullWeights | None = None
        self.bind(self.original)

    def bind(self, weights: FullWeights) -> None:
        """From now on the model computes with these."""
        if self._bound is weights:
            return
        for name, parameter in self._parameters.items():
            parameter.data = weights.weights[name]
        self._bound = weights

    @contextmanager
    def training(self, gradients: dict[str, Tensor]) -> Iterator[None]:
        """Backward adds to these buffers meanwhile."""
        try:
            for name, parameter in self._parameters.items():
                parameter.requires_grad_(True)
                parameter.grad = gradients[name]
            yield
        finally:
            for parameter in self._parameters.values():
                parameter.grad = None
                parameter.requires_grad_(False)

    def _compare_gradients(self) -> None:
        """Raises SettingsError unless packed rows lead to the gradients of the model's own forward."""
        buffers = [torch.zeros(self.layout.numel, device=self.device) for _ in range(2)]
        tokens_T = torch.arange(9, device=self.device) * 7 % self.shape.vocab_size
        positions_T = torch.arange(9, device=self.device)
        with self.training(self.layout.views(buffers[0])), torch.enable_grad():
            plan = PackedCausal([9], self.device)
            hidden_TD = self.hidden(tokens_T, positions_T, plan, Routing([Segment(0, 9, None)]))
            slope_TD = torch.cos(torch.arange(hidden_TD.numel(), device=self.device)).view_as(hidden_TD)
            hidden_TD.backward(slope_TD)
        self.model.set_attn_implementation("eager")
        with self.training(self.layout.views(buffers[1])), torch.enable_grad():
            self.model.get_decoder()(input_ids=tokens_T[None], use_cache=False).last_hidden_state[0].backward(slope_TD)
        self.model.set_attn_implementation(ATTENTION_NAME)
        error = float((buffers[0] - buffers[1]).norm() / buffers[1].norm().clamp_min(1e-12))
        if not error < TOLERANCE:
            raise SettingsError(
                f"{type(self.model).__name__} cannot be trained in full: gradients under packed attention differ from "
                f"its own by {error:.2g} (relative)"
            )
