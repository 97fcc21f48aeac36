"""How requests change their logits before a token is drawn: masks, bias and penalties, in this order.

The order and the formulas are vLLM's (and OpenAI's, for frequency and presence): a repetition penalty r divides a
positive logit and multiplies a negative one, for every token of the prompt or the answer so far; a frequency penalty is
subtracted once per occurrence of a token in the answer, a presence penalty once if it occurs. Temperature and min_p
follow in `sampling`. Rows without adjustments are unchanged.

The changes of all rows are collected on the host and applied together, by a few operations on the flattened logits.

Letters: B rows, V vocabulary, R rows with a mask, S tokens that are changed.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.backends.torch.host import upload, upload_all
from tinsmith.samplers.local.request import Sequence
from tinsmith.types import F32, I64, Adjustments


class AdjustedLogits(NamedTuple):
    """The logits to draw from. `exhausted_B`: whether a row's masks leave no token; None if no row has masks."""

    logits_BV: Tensor
    exhausted_B: Tensor | None


class _Edits:
    """Changes to a step's rows, as indices into the flattened logits and amounts. Built on the host."""

    def __init__(self, num_vocab: int) -> None:
        self._num_vocab = num_vocab
        self._indices: dict[str, list[I64]] = {name: [] for name in ("masked", "biased", "repeated", "counted")}
        self._amounts: dict[str, list[F32]] = {name: [] for name in self._indices}

    def add(self, name: str, row: int, ids_S: Collection[int] | I64, amount: Seq[float] | F32 | float = 0.0) -> None:
        indices = np.asarray(ids_S, np.int64) + row * self._num_vocab
        self._indices[name].append(indices)
        self._amounts[name].append(np.broadcast_to(np.asarray(amount, np.float32), indices.shape))

    def on(self, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
        """Indices and amounts of each kind of change in use, on the device."""
        kinds = [name for name, indices in self._indices.items() if indices]
        if not kinds:
            return {}
        indices = upload_all([np.concatenate(self._indices[name]) for name in kinds], device)
        amounts = upload_all([np.concatenate(self._amounts[name]) for name in kinds], device)
        return dict(zip(kinds, zip(indices, amounts, strict=True), strict=True))


def adjust(logits_BV: Tensor, sequences: Seq[Sequence]) -> AdjustedLogits | None:
    """The logits to draw from; None if no row is adjusted."""
    if not any(sequence.request.sample.params.adjustments for sequence in sequences):
        return None
    num_vocab, device = logits_BV.shape[1], logits_BV.device
    adjusted_BV = logits_BV.float().clone()
    edits, row_masks, may_exhaust_B = _Edits(num_vocab), {}, np.zeros(len(sequences), np.bool_)
    for row, sequence in enumerate(sequences):
        adjustments = sequence.request.sample.params.adjustments
        if adjustments is None:
            continue
        if (allowed_V := _token_mask(sequence, num_vocab)) is not None:
            row_masks[row] = allowed_V
        if masked_ids := _collect_masked_ids(adjustments, sequence):
            edits.add("masked", row, masked_ids)
        may_exhaust_B[row] = bool(masked_ids) or len(sequence.request.allowed_ids) > 0
        _note_changes(edits, row, adjustments, sequence)
    if row_masks:
        rows_R = upload(np.array(list(row_masks)), device)
        allowed_RV = upload(np.stack(list(row_masks.values())), device)
        adjusted_BV.index_copy_(0, rows_R, adjusted_BV.index_select(0, rows_R).masked_fill_(~allowed_RV, -torch.inf))
    flat, changes = adjusted_BV.view(-1), edits.on(device)
    if "masked" in changes:
        flat.index_fill_(0, changes["masked"][0], -torch.inf)
    exhausted_B = None
    if may_exhaust_B.any():
        exhausted_B = (adjusted_BV.amax(-1) == -torch.inf) & upload(may_exhaust_B, device)
    for name, (indices_S, amounts_S) in changes.items():
        logits_S = flat.index_select(0, indices_S)
        if name == "biased":
            flat.index_copy_(0, indices_S, logits_S + amounts_S)
        elif name == "repeated":
            flat.index_copy_(0, indices_S, torch.where(logits_S > 0, logits_S / amounts_S, logits_S * amounts_S))
        elif name == "counted":
            flat.index_copy_(0, indices_S, logits_S - amounts_S)
    return AdjustedLogits(adjusted_BV, exhausted_B)


def _token_mask(sequence: Sequence, num_vocab: int) -> npt.NDArray[np.bool_] | None:
    """[V] Whether the grammar and the request allow each token; None if all are allowed."""
    allowed_V = None if sequence.constraint is None else sequence.constraint.token_mask()
    if len(ids := sequence.request.allowed_ids):
        request_mask_V = np.zeros(num_vocab, np.bool_)
        request_mask_V[ids] = True
        allowed_V = request_mask_V if allowed_V is None else request_mask_V & allowed_V
    return allowed_V


def _collect_masked_ids(adjustments: Adjustments, sequence: Sequence) -> list[int]:
    """Tokens that would complete a bad word, or that would end an answer before min_tokens."""
    answer_T = sequence.answer_T
    masked_ids = [
        word[-1]
        for word in adjustments.bad_words
        if len(word) <= len(answer_T) + 1 and tuple(answer_T[len(answer_T) + 1 - len(word) :].tolist()) == word[:-1]
    ]
    if sequence.num_generated < adjustments.min_tokens:
        masked_ids += sequence.stop.tokens
    return masked_ids


def _note_changes(edits: _Edits, row: int, adjustments: Adjustments, sequence: Sequence) -> None:
    if adjustments.logit_bias:
        edits.add("biased", row, *zip(*adjustments.logit_bias, strict=True))
    if not adjustments.has_penalty:
        return
    answer_ids, counts_S = np.unique(sequence.answer_T.astype(np.int64), return_counts=True)
    if adjustments.repetition_penalty != 1.0:
        ids_S = np.union1d(sequence.request.prompt_ids, answer_ids)
        edits.add("repeated", row, ids_S, adjustments.repetition_penalty)
    if len(answer_ids) and (adjustments.frequency_penalty or adjustments.presence_penalty):
        frequency, presence = np.float32(adjustments.frequency_penalty), np.float32(adjustments.presence_penalty)
        amounts_S = frequency * counts_S.astype(np.float32) + presence
        edits.add("counted", row, answer_ids, amounts_S)
