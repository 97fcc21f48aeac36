"""Whether fused layers compute what a model's modules do, part by part, on random rows.

Two families can have the same parts and use them differently: without RoPE in some layers, with a factor on what a
layer adds, with pairs of neighbours rotated instead of halves. In a whole forward such a difference can drown in
rounding, or in attention that sees little. So every layer gets the same random rows, its queries, keys, values and
options are compared before attention, and attention's result is replaced by random rows, too. What follows is compared
in four groups: where a layer's input or attention's result is small, the rest of the output is not hidden by it.
Positions are spread over the whole context. What lies between layers must be nothing at all.

Shapes: T rows, D hidden size, H query heads, G key heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from tinsmith.backends.torch.attention import AttentionOptions, AttentionPlan, Mixer
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.backends.torch.probes import draw
from tinsmith.backends.torch.transformer import Decoder

NUM_ROWS, NUM_GROUPS = 32, 4
"""Row i belongs to group i modulo the number of groups."""

SMALL = 1 / 64
"""Of small rows. Their mean square is still far above the epsilon of every norm."""

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.03}
"""Errors that rounding explains: a part rounds about ten times, in bfloat16 to half of 2^-8, together below 0.01."""

GAIN_WEIGHT = 4.0
"""Rounding has no direction, so a factor on all numbers shows in their projection before it does in their error."""

Forward = Callable[[Tensor, Tensor, AttentionPlan, LoRABatch], Tensor]


class _Recorder:
    """An AttentionPlan that records what layers pass to it, and returns the same random rows to all."""

    def __init__(self, scale_T: Tensor) -> None:
        self.scale_T = scale_T
        self.calls: dict[int, list[tuple[tuple[Tensor, ...], AttentionOptions]]] = {}

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        self.calls.setdefault(layer, []).append(((q_THD, k_TGD, v_TGD), options))
        out_THD = draw(*q_THD.shape[:2], v_TGD.shape[2], seed=1).to(v_TGD)
        return out_THD * self.scale_T[:, None, None]

    def mix(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        raise AssertionError("fused layers keep no states")


def measure_difference(decoder: Decoder, modules: nn.Module, forward: Forward, vocab: int, context: int) -> float:
    """The largest error of any part of the fused layers. Infinite where the modules do something between
    layers, or call attention otherwise. `forward` runs `modules`.
    """
    embed = cast(nn.Embedding, modules.embed_tokens)
    device, dtype = embed.weight.device, embed.weight.dtype
    rows_T = torch.arange(NUM_ROWS, device=device)
    scale_T = torch.tensor([1.0, SMALL] * 2, device=device, dtype=dtype).repeat(NUM_ROWS // NUM_GROUPS)
    attention_scale_T = torch.tensor([1.0, 1.0, 0.0, 0.0], device=device, dtype=dtype).repeat(NUM_ROWS // NUM_GROUPS)
    x_TD = draw(NUM_ROWS, embed.weight.shape[1], seed=0).to(device, dtype) * scale_T[:, None]
    positions_T = rows_T * (context - 1) // (NUM_ROWS - 1)
    tokens_T, lora_batch = rows_T * 7 % vocab, LoRABatch.of_base(NUM_ROWS)
    expected, actual = _Recorder(attention_scale_T), _Recorder(attention_scale_T)
    trace = _Trace(modules, x_TD)
    try:
        final_TD = forward(tokens_T, positions_T, expected, lora_batch)
    finally:
        trace.close()
    outputs = list(decoder.run_layers(x_TD, positions_T, actual, lora_batch))
    if not trace.is_plain(embed(tokens_T)) or not _have_equal_options(expected, actual):
        return float("inf")
    pairs = zip(outputs, [*trace.outputs[:-1], final_TD], strict=True)
    errors = [_measure_error(a[i::NUM_GROUPS], b[i::NUM_GROUPS]) for a, b in pairs for i in range(NUM_GROUPS)]
    for layer, ((tensors, _),) in expected.calls.items():
        errors += [_measure_error(a, b) for a, b in zip(actual.calls[layer][0][0], tensors, strict=True)]
    return float(torch.stack(errors).max())


class _Trace:
    """Replaces what layers and the final norm receive while it is open."""

    def __init__(self, modules: nn.Module, x_TD: Tensor) -> None:
        self._x_TD = x_TD
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self._handles: list[Any] = []
        for part in (*cast(nn.ModuleList, modules.layers), cast(nn.Module, modules.norm)):
            self._handles.append(part.register_forward_pre_hook(self._replace_input, with_kwargs=True))
            self._handles.append(part.register_forward_hook(self._record_output))
        self._num_parts = len(self._handles) // 2

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def is_plain(self, embedded_TD: Tensor) -> bool:
        """Whether every part ran once, on what the part before it returned."""
        if len(self.outputs) != self._num_parts:
            return False
        return all(map(torch.equal, self.inputs, [embedded_TD, *self.outputs[:-1]]))

    def _replace_input(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self.inputs.append((args[0] if args else kwargs["hidden_states"])[0])
        if args:
            return (self._x_TD[None], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._x_TD[None]}

    def _record_output(self, part: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        self.outputs.append((output if isinstance(output, Tensor) else output[0])[0])


def _have_equal_options(expected: _Recorder, actual: _Recorder) -> bool:
    if expected.calls.keys() != actual.calls.keys() or any(len(calls) != 1 for calls in expected.calls.values()):
        return False
    return all(actual.calls[layer][0][1] == options for layer, ((_, options),) in expected.calls.items())


def _measure_error(actual: Tensor, expected: Tensor) -> Tensor:
    """One number: the relative error, or GAIN_WEIGHT times that of the projection. NaN where a part is not finite."""
    wide = expected.float()
    error, norm = actual.float() - wide, wide.norm().clamp_min(1e-6)
    return torch.maximum(error.norm() / norm, GAIN_WEIGHT * (error * wide).sum().abs() / norm.square())
