"""Whether the installed releases sample and train a model as its own forward computes it, checked at start.

How a layer exchanges its state is transformers' own business and changes between releases, so every model with such
layers is checked, and every model under a release that was not tested (`plan.versions`). For one layer of each class, a
row of two sequences must equal each of them alone, in values and in gradients, and so must sequences in pieces, in
single rows and continued twice from one state. Then the model samples some tokens: a prompt, one token after the other,
and again from the state after the prompt. The reference is transformers' forward over the whole sequence, without a
cache and without a plan.

Takes as long as a few forward passes of a few tokens. Knows no adapter, request or tenant.

Shapes: T rows of a call, L rows of a sequence, D hidden size, V vocabulary, H and G query and key heads of D elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, Unpack

import torch
from torch import Tensor

from tinsmith.backends.torch.attention import (
    AttentionOptions,
    AttentionPlan,
    Mixer,
    PackedCausal,
    prefill,
    visibility_mask,
)
from tinsmith.backends.torch.lora import ForwardContext
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.backends.torch.recurrent import SequenceMixer
from tinsmith.backends.torch.servable import ReleaseError
from tinsmith.samplers.local.state_pool import SequenceState, StatePool
from tinsmith.samplers.local.states import Recurrence, RecurrentSpan

TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.1}
"""Largest relative error. Matmuls of other shapes round differently, and kernels for GPUs may multiply float32 values
with fewer bits; a lost state is an error of 0.3 and more.
"""

EIGHT_BIT_TOLERANCE = 0.25
"""The same where rows are rounded to 8 bits."""

LENGTHS = (70, 60)
"""Rows of the two sequences of a layer: padded to one batch, and one is longer than a chunk of 64 rows."""

SPLITS = (((5,), (5,)), ((28, 7), (2,)), ((1,), (1,)), ((1,), (1,)), ((28,), (51,)))
"""By step, the parts of each sequence's rows: a snapshot of the state is kept between two. Pieces of equal length go
through a layer as one batch.
"""

TOKENS, PROMPT = 6, 4


class CheckedModel(Protocol):
    device: torch.device
    dtype: torch.dtype

    @property
    def rounds_to_8_bits(self) -> bool: ...

    @property
    def may_change_rows(self) -> bool:
        """Whether one row may differ by far, because another expert computes it."""
        ...

    def forward_modules(
        self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan, lora_batch: LoRABatch
    ) -> Tensor:
        """[T, D]"""
        ...

    def logits(self, hidden_TD: Tensor, lora_batch: LoRABatch) -> Tensor:
        """[T, V]"""
        ...

    def reference_logits(self, *, input_ids: Tensor) -> Tensor:
        """[T, V]: those of transformers' forward of [1, T] tokens."""
        ...


def check_mixers(
    mixers: Iterable[SequenceMixer], context: ForwardContext, hidden_size: int, model: CheckedModel
) -> None:
    """Check one layer of each class. Raises ReleaseError."""
    tolerance = _tolerance(model)
    for name, mixer in {mixer.name: mixer for mixer in mixers}.items():
        generator = torch.Generator().manual_seed(0)
        x_TD, weight_TD = (
            torch.randn(sum(LENGTHS), hidden_size, generator=generator).to(model.device, model.dtype) for _ in range(2)
        )
        expected, gradient = _run_with_gradient(_Alone(LENGTHS, context), mixer, x_TD, weight_TD, context)
        packed, packed_gradient = _run_with_gradient(
            PackedCausal(LENGTHS, model.device), mixer, x_TD, weight_TD, context
        )
        _compare(packed, expected, tolerance, f"two sequences in one row of {name} differ from each alone")
        _compare(packed_gradient, gradient, tolerance, f"gradients of two sequences in one row of {name} differ")
        with torch.no_grad():
            _check_steps(mixer, x_TD, expected, context, tolerance)


class _Alone:
    """Each sequence through transformers' own module."""

    def __init__(self, lengths: Sequence[int], context: ForwardContext) -> None:
        self._lengths, self._context = lengths, context

    def mix(self, mixer: SequenceMixer, x_TD: Tensor) -> Tensor:
        outputs = []
        for x_LD in x_TD.split(list(self._lengths)):
            self._context.lora_batch = LoRABatch.of_base(len(x_LD))
            outputs.append(mixer.reference_output(x_LD))
        return torch.cat(outputs)


def _run_with_gradient(
    plan: _Alone | PackedCausal, mixer: SequenceMixer, x_TD: Tensor, weight_TD: Tensor, context: ForwardContext
) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of its weighted sum."""
    with torch.enable_grad():
        leaf_TD = x_TD.clone().requires_grad_()
        context.lora_batch = LoRABatch.of_base(len(x_TD))
        try:
            y_TD = plan.mix(mixer, leaf_TD)  # pyright: ignore[reportArgumentType]
        finally:
            context.lora_batch = None
        (gradient_TD,) = torch.autograd.grad((y_TD * weight_TD).sum(), leaf_TD)
    return y_TD.detach(), gradient_TD


def _check_steps(
    mixer: SequenceMixer, x_TD: Tensor, expected_TD: Tensor, context: ForwardContext, tolerance: float
) -> None:
    sequences, outputs = x_TD.split(list(LENGTHS)), expected_TD.split(list(LENGTHS))
    lengths, states = [0] * len(LENGTHS), list[SequenceState | None]([None] * len(LENGTHS))
    pool = StatePool(x_TD.device)
    for parts in SPLITS:
        sizes = [sum(part) for part in parts]
        rows = [x_LD[start : start + size] for x_LD, start, size in zip(sequences, lengths, sizes, strict=True)]
        cuts = [part[:1] if len(part) > 1 else () for part in parts]
        y_TD, recurrence = _step(mixer, rows, states, cuts, pool, context)
        for index, y_LD in enumerate(y_TD.split(sizes)):
            start, stop = lengths[index], lengths[index] + sizes[index]
            _compare(y_LD, outputs[index][start:stop], tolerance, f"a sequence of {mixer.name} in pieces differs")
            for cut, snapshot in zip(cuts[index], recurrence.cut_states[index], strict=True):
                again_LD, _ = _step(mixer, [rows[index][cut:]], [snapshot], [()], pool, context)
                difference = f"a sequence of {mixer.name} that continues from a saved state differs"
                _compare(again_LD, outputs[index][start + cut : stop], tolerance, difference)
            lengths[index] = stop
        states = list(recurrence.final_states)


def _step(
    mixer: SequenceMixer,
    rows: Sequence[Tensor],
    states: Sequence[SequenceState | None],
    cuts: Sequence[Sequence[int]],
    pool: StatePool,
    context: ForwardContext,
) -> tuple[Tensor, Recurrence]:
    spans, first = [], 0
    for x_LD, state, own_cuts in zip(rows, states, cuts, strict=True):
        spans.append(RecurrentSpan(first, len(x_LD), state, own_cuts))
        first += len(x_LD)
    recurrence = Recurrence(spans, pool)
    context.lora_batch = LoRABatch.of_base(first)
    try:
        return recurrence.mix(mixer, torch.cat(list(rows))), recurrence
    finally:
        context.lora_batch = None


class _SampledSequence:
    """An AttentionPlan of one sequence that keeps what its layers cache, and may return to an earlier length."""

    def __init__(self, device: torch.device) -> None:
        self.length = 0
        self.state: SequenceState | None = None
        self._pool = StatePool(device)
        self._cached: dict[int, tuple[Tensor, Tensor]] = {}
        self._recurrence = Recurrence([RecurrentSpan(0, 1, None)], self._pool)

    def begin(self, num_rows: int) -> None:
        self._recurrence = Recurrence([RecurrentSpan(0, num_rows, self.state)], self._pool)

    def finish(self, num_rows: int) -> None:
        self.length += num_rows
        self.state = self._recurrence.final_states[0]

    def return_to(self, length: int, state: SequenceState | None) -> None:
        self.length, self.state = length, state
        self._cached = {layer: (keys[:length], values[:length]) for layer, (keys, values) in self._cached.items()}

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        if layer in self._cached:
            k_TGD, v_TGD = (torch.cat(pair) for pair in zip(self._cached[layer], (k_TGD, v_TGD), strict=True))
        self._cached[layer] = k_TGD, v_TGD
        position_1L = torch.arange(self.length, len(k_TGD), device=q_THD.device)[None]
        mask = visibility_mask(position_1L, len(k_TGD), options.get("window"), q_THD.dtype)
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TGD, v_TGD))
        return prefill(q, k, v, mask, **options)[0].transpose(0, 1)

    def mix(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        return self._recurrence.mix(mixer, x_TD)


@torch.no_grad()
def check_sampling(model: CheckedModel, vocab_size: int) -> None:
    """Sample through the whole model. Raises ReleaseError."""
    tokens_T = (torch.arange(TOKENS, device=model.device) * 7 + 3) % vocab_size
    expected_TV = model.reference_logits(input_ids=tokens_T[None])
    sequence = _SampledSequence(model.device)
    errors: dict[str, list[Tensor]] = {}

    def extend(stop: int, difference: str) -> None:
        start, lora_batch = sequence.length, LoRABatch.of_base(stop - sequence.length)
        sequence.begin(stop - start)
        positions_T = torch.arange(start, stop, device=model.device)
        hidden_TD = model.forward_modules(tokens_T[start:stop], positions_T, sequence, lora_batch)
        sequence.finish(stop - start)
        row_errors_T = _row_errors(model.logits(hidden_TD, lora_batch), expected_TV[start:stop])
        errors.setdefault(difference, []).append(row_errors_T)

    extend(PROMPT, "a prompt differs")
    state = sequence.state
    for stop in range(PROMPT + 1, TOKENS + 1):
        extend(stop, "a sampled token differs")
    sequence.return_to(PROMPT, state)
    extend(TOKENS, "tokens that continue from a saved state differ")
    for difference, parts in errors.items():
        # A state that is lost changes every row after it.
        error_T = torch.cat(parts)
        _refuse_error(error_T.median() if model.may_change_rows else error_T.max(), _tolerance(model), difference)


def _tolerance(model: CheckedModel) -> float:
    return EIGHT_BIT_TOLERANCE if model.rounds_to_8_bits else TOLERANCE[model.dtype]


def _compare(actual: Tensor, expected: Tensor, tolerance: float, difference: str) -> None:
    """Row by row, so that a long sequence does not hide one row."""
    _refuse_error(_row_errors(actual, expected).max(), tolerance, difference)


def _row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """[T]: how far each row is, relative to the mean row."""
    actual, expected = actual.float(), expected.float()
    return (actual - expected).norm(dim=-1) / expected.norm(dim=-1).mean().clamp_min(1e-6)


def _refuse_error(value: Tensor, tolerance: float, difference: str) -> None:
    if not (error := float(value)) < tolerance:
        raise ReleaseError(f"{difference} from the model's own forward by {error:.2g} (relative)")
