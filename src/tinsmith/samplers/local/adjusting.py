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


class Adjusted(NamedTuple):
    """The logits to draw from, and a flag per row whose masks may leave no token: whether they do."""

    logits_BV: Tensor
    exhausted_B: Tensor | None


class _Edits:
    """Changes to a step's rows, as indices into the flattened logits and amounts. Built on the host."""

    def __init__(self, num_vocab: int) -> None:
        self._num_vocab = num_vocab
        self._places: dict[str, list[I64]] = {name: [] for name in ("masked", "biased", "repeated", "counted")}
        self._amounts: dict[str, list[F32]] = {name: [] for name in self._places}

    def add(self, name: str, row: int, ids_S: Collection[int] | I64, amount: Seq[float] | F32 | float = 0.0) -> None:
        places = np.asarray(ids_S, np.int64) + row * self._num_vocab
        self._places[name].append(places)
        self._amounts[name].append(np.broadcast_to(np.asarray(amount, np.float32), places.shape))

    def on(self, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
        """Indices and amounts of each kind of change in use, on the device."""
        given = [name for name, places in self._places.items() if places]
        if not given:
            return {}
        places = upload_all([np.concatenate(self._places[name]) for name in given], device)
        amounts = upload_all([np.concatenate(self._amounts[name]) for name in given], device)
        return dict(zip(given, zip(places, amounts, strict=True), strict=True))


def adjust(logits_BV: Tensor, sequences: Seq[Sequence]) -> Adjusted | None:
    """The logits to draw from; None if no row is adjusted."""
    if not any(sequence.request.sample.params.adjustments for sequence in sequences):
        return None
    num_vocab, device = logits_BV.shape[1], logits_BV.device
    adjusted_BV = logits_BV.float().clone()
    edits, allowed, may_exhaust_B = _Edits(num_vocab), {}, np.zeros(len(sequences), np.bool_)
    for row, sequence in enumerate(sequences):
        adjustments = sequence.request.sample.params.adjustments
        if adjustments is None:
            continue
        if (allowed_V := _allowed(sequence, num_vocab)) is not None:
            allowed[row] = allowed_V
        if masked := _masked(adjustments, sequence):
            edits.add("masked", row, masked)
        may_exhaust_B[row] = bool(masked) or len(sequence.request.allowed_ids) > 0
        _note_changes(edits, row, adjustments, sequence)
    if allowed:
        rows_R, allowed_RV = upload(np.array(list(allowed)), device), upload(np.stack(list(allowed.values())), device)
        adjusted_BV.index_copy_(0, rows_R, adjusted_BV.index_select(0, rows_R).masked_fill_(~allowed_RV, -torch.inf))
    flat, changes = adjusted_BV.view(-1), edits.on(device)
    if "masked" in changes:
        flat.index_fill_(0, changes["masked"][0], -torch.inf)
    exhausted_B = None
    if may_exhaust_B.any():
        exhausted_B = (adjusted_BV.amax(-1) == -torch.inf) & upload(may_exhaust_B, device)
    for name, (places_S, amounts_S) in changes.items():
        own_S = flat.index_select(0, places_S)
        if name == "biased":
            flat.index_copy_(0, places_S, own_S + amounts_S)
        elif name == "repeated":
            flat.index_copy_(0, places_S, torch.where(own_S > 0, own_S / amounts_S, own_S * amounts_S))
        elif name == "counted":
            flat.index_copy_(0, places_S, own_S - amounts_S)
    return Adjusted(adjusted_BV, exhausted_B)


def _allowed(sequence: Sequence, num_vocab: int) -> npt.NDArray[np.bool_] | None:
    """[V] Tokens that the grammar and the request allow; None: all."""
    allowed_V = None if sequence.constraint is None else sequence.constraint.allowed()
    if len(ids := sequence.request.allowed_ids):
        listed_V = np.zeros(num_vocab, np.bool_)
        listed_V[ids] = True
        allowed_V = listed_V if allowed_V is None else listed_V & allowed_V
    return allowed_V


def _masked(adjustments: Adjustments, sequence: Sequence) -> list[int]:
    """Tokens that would complete a bad word, or that would end an answer before min_tokens."""
    answer_T = sequence.tokens_T[sequence.request.num_prompt : sequence.length]
    masked = [
        word[-1]
        for word in adjustments.bad_words
        if len(word) <= len(answer_T) + 1 and tuple(answer_T[len(answer_T) + 1 - len(word) :].tolist()) == word[:-1]
    ]
    if sequence.num_generated < adjustments.min_tokens:
        masked += sequence.stop.tokens
    return masked


def _note_changes(edits: _Edits, row: int, adjustments: Adjustments, sequence: Sequence) -> None:
    if adjustments.logit_bias:
        edits.add("biased", row, *zip(*adjustments.logit_bias, strict=True))
    counted = np.fromiter(sequence.counts, np.int64, len(sequence.counts))
    if adjustments.repetition_penalty != 1.0:
        seen_S = np.union1d(sequence.request.prompt_ids, counted)
        edits.add("repeated", row, seen_S, adjustments.repetition_penalty)
    if len(counted) and (adjustments.frequency_penalty or adjustments.presence_penalty):
        counts_S = np.fromiter(sequence.counts.values(), np.float32, len(counted))
        amounts_S = np.float32(adjustments.frequency_penalty) * counts_S + np.float32(adjustments.presence_penalty)
        edits.add("counted", row, counted, amounts_S)
