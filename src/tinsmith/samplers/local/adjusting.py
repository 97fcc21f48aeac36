"""What requests do to their logits before a token is drawn: grammar, bias and penalties, in this order.

The order and the formulas are vLLM's (and OpenAI's, for frequency and presence): a repetition penalty r divides a
positive logit and multiplies a negative one, for every token of the prompt or the answer so far; a frequency penalty is
subtracted once for each time that the answer has a token, a presence penalty once if it has it at all. Temperature and
min_p follow in `sampling`. Rows without adjustments are left as they are.

Letters: B rows, V vocabulary, S tokens of a row that are changed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from tinsmith.samplers.local.request import Sequence
from tinsmith.types import Adjustments


def adjust(logits_BV: Tensor, sequences: Seq[Sequence]) -> Tensor | None:
    """The logits to draw from, None if they are the model's own."""
    if not any(sequence.request.sample.params.adjustments for sequence in sequences):
        return None
    adjusted_BV = logits_BV.float().clone()
    for row, sequence in enumerate(sequences):
        adjustments = sequence.request.sample.params.adjustments
        if adjustments is None:
            continue
        if sequence.constraint is not None:
            allowed_V = torch.from_numpy(sequence.constraint.allowed()).to(adjusted_BV.device)
            adjusted_BV[row].masked_fill_(~allowed_V, -torch.inf)
        _add_bias(adjusted_BV[row], adjustments)
        _repeat_less(adjusted_BV[row], adjustments, sequence)
        _penalise(adjusted_BV[row], adjustments, sequence)
    return adjusted_BV


def _add_bias(logits_V: Tensor, adjustments: Adjustments) -> None:
    if adjustments.logit_bias:
        ids_S, biases_S = zip(*adjustments.logit_bias, strict=True)
        logits_V[torch.tensor(ids_S, device=logits_V.device)] += torch.tensor(biases_S, device=logits_V.device)


def _repeat_less(logits_V: Tensor, adjustments: Adjustments, sequence: Sequence) -> None:
    penalty = adjustments.repetition_penalty
    if penalty == 1.0:
        return
    seen_S = np.union1d(sequence.request.prompt_ids, np.fromiter(sequence.counts, np.int64, len(sequence.counts)))
    ids_S = torch.from_numpy(seen_S).to(logits_V.device)
    own_S = logits_V[ids_S]
    logits_V[ids_S] = torch.where(own_S > 0, own_S / penalty, own_S * penalty)


def _penalise(logits_V: Tensor, adjustments: Adjustments, sequence: Sequence) -> None:
    if not sequence.counts or not (adjustments.frequency_penalty or adjustments.presence_penalty):
        return
    ids_S = torch.tensor(list(sequence.counts), device=logits_V.device)
    counts_S = torch.tensor(list(sequence.counts.values()), dtype=torch.float32, device=logits_V.device)
    logits_V[ids_S] -= adjustments.frequency_penalty * counts_S + adjustments.presence_penalty
