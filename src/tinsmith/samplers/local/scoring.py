"""What a prompt's hidden states say about its tokens, as they come by: in bounded memory, in any pieces.

All logprobs are at temperature 1 and over the whole vocabulary, those of alternatives too: only the drawing of these
follows the request's temperature. Alternatives are drawn by numbers that depend on the seed, the row and the draw
alone, from the whole distribution whatever top_k and top_p are. A row is scored once, however often a preemption
has it computed.

Letters: T rows of the span, D hidden size, R rows scored at once, V vocabulary, C target cells, k entries of a row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tinsmith.backends.torch.lora_ops import Routing, Segment
from tinsmith.backends.torch.model import BaseModel
from tinsmith.samplers.local.prompt_logprobs import PromptScores
from tinsmith.samplers.local.request import Request
from tinsmith.samplers.local.sampling import draw_each, top_rows
from tinsmith.types import I64

SCORED_NUMBERS = 2**22
"""Rows times vocabulary of the logits computed at once: 16 MiB of float32."""


def score_prompt(
    base: BaseModel, request: Request, hidden_TD: Tensor, start: int, most_rows: int | None = None
) -> bool:
    """Fill in what hidden states of prompt tokens start.. predict. False if some logits are not finite.

    Logits are computed for at most `most_rows` rows at once; None: as many as SCORED_NUMBERS has room for.
    """
    scores = request.scores
    stop = int(np.searchsorted(scores.rows_R, start + len(hidden_TD)))
    chunk = most_rows or max(SCORED_NUMBERS // base.vocab_size, 1)
    while scores.num_scored < stop:
        rows_R = scores.rows_R[scores.num_scored : min(scores.num_scored + chunk, stop)]
        hidden_RD = hidden_TD.index_select(0, torch.from_numpy(rows_R - start).to(hidden_TD.device))
        logits_RV = base.logits(hidden_RD, Routing([Segment(0, len(rows_R), request.weights.adapter)]))
        logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
        if bool(logprobs_RV[:, 0].isnan().any()):
            return False
        _score_own(request, rows_R, logprobs_RV)
        _score_targets(scores, rows_R, logprobs_RV)
        _draw_alternatives(request, rows_R, logits_RV, logprobs_RV)
        scores.num_scored += len(rows_R)
    return True


def _score_own(request: Request, rows_R: I64, logprobs_RV: Tensor) -> None:
    """The prompt's own tokens and the likeliest ones, of the rows from `first_own_row` on."""
    scores, sample = request.scores, request.sample
    skipped = int(np.searchsorted(rows_R, scores.first_own_row))
    logprobs_RV, positions_R = logprobs_RV[skipped:], rows_R[skipped:] + 1
    if not len(positions_R):
        return
    if scores.prompt_logprobs_T is not None:
        targets_R = torch.from_numpy(sample.prompt_T[positions_R].astype(np.int64)).to(logprobs_RV.device)
        scores.prompt_logprobs_T[positions_R] = logprobs_RV.gather(1, targets_R[:, None])[:, 0].cpu().numpy()
    if scores.topk_prompt is not None:
        ids_Rk, values_Rk = top_rows(logprobs_RV, sample.topk_prompt_logprobs)
        width = ids_Rk.shape[1]
        scores.topk_prompt.token_ids_Tk[positions_R, :width] = ids_Rk.cpu().numpy()
        scores.topk_prompt.logprobs_Tk[positions_R, :width] = values_Rk.cpu().numpy()


def _score_targets(scores: PromptScores, rows_R: I64, logprobs_RV: Tensor) -> None:
    first, last = np.searchsorted(scores.cell_rows_C, [rows_R[0], rows_R[-1] + 1])
    if first == last:
        return
    at_C = torch.from_numpy(np.searchsorted(rows_R, scores.cell_rows_C[first:last])).to(logprobs_RV.device)
    ids_C = torch.from_numpy(scores.cell_ids_C[first:last]).to(logprobs_RV.device)
    scores.target_logprobs_C[first:last] = logprobs_RV[at_C, ids_C].cpu().numpy()


def _draw_alternatives(request: Request, rows_R: I64, logits_RV: Tensor, logprobs_RV: Tensor) -> None:
    scores = request.scores
    alt_tokens = scores.alt_tokens
    if alt_tokens is None:
        return
    uniform_Rk = torch.from_numpy(scores.alt_uniform_Tk[rows_R]).to(logits_RV.device)
    ids_Rk = draw_each(logits_RV, request.sample.params.temperature, uniform_Rk)
    alt_tokens.token_ids_Tk[rows_R] = ids_Rk.cpu().numpy()
    alt_tokens.logprobs_Tk[rows_R] = logprobs_RV.gather(1, ids_Rk).cpu().numpy()
