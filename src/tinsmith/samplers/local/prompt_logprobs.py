"""Prompt logprobs of a request: which rows are scored, and their logprobs from chunks of hidden states.

Row t of a prompt is the hidden state of token t; it predicts token t + 1. `rows_R` are the rows whose logits are
needed, in order; the first `num_scored` of them are done. Rows before the next one to score may come from the prefix
cache, so a request for the logprobs of a prompt's end does not pay for its beginning. A row is scored once, even if
preemptions compute it several times.

`score_prompt` accepts hidden states in chunks of any size and reads from the device once per chunk of rows. All
logprobs are at temperature 1 and over the whole vocabulary, including those of alternatives: only the drawing of
alternatives follows the request's temperature. Their random numbers depend on the seed, the row and the draw alone, and
top_k and top_p are ignored.

Letters: T tokens of the prompt, R needed rows or those scored at once, D hidden size, V vocabulary, C cells that name a
target, k entries of a row.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tinsmith.backends.torch.adapters import Adapter
from tinsmith.backends.torch.host import read, upload
from tinsmith.backends.torch.lora_batch import LoRABatch, Segment
from tinsmith.backends.torch.model import BaseModel
from tinsmith.runtime.devices import place_for_float64
from tinsmith.samplers.local.sampling import draw_alternatives, top_rows, uniforms
from tinsmith.types import EMPTY_LOGPROB, F32, I64, AltTokens, Sample, SparseRows, TopK

MAX_LOGIT_ELEMENTS = 2**22
"""Rows times vocabulary of logits computed at once: 16 MiB of float32."""


class PromptScores:
    """`first_prompt_row`: the first row that needs the logprob of the prompt's own token and the top-k tokens."""

    def __init__(self, sample: Sample, seed: int) -> None:
        self.sample = sample
        num_prompt, k = len(sample.prompt_T), sample.topk_prompt_logprobs
        num_rows, last_n, alt_k = num_prompt - 1, sample.prompt_logprobs_last_n, sample.prompt_alt_tokens_k
        self.prompt_logprobs_T = np.full(num_prompt, np.nan, np.float32) if sample.prompt_logprobs else None
        self.topk_prompt = empty_topk(num_prompt, k) if k else None
        self.alt_tokens = None
        if alt_k:
            self.alt_tokens = AltTokens(np.zeros((num_rows, alt_k), np.int64), np.zeros((num_rows, alt_k), np.float32))
            self.alt_uniform_Tk = uniforms(seed, num_rows * alt_k).reshape(num_rows, alt_k)
        self.first_prompt_row = num_rows
        if sample.prompt_logprobs or k:
            self.first_prompt_row = 0 if last_n is None else num_rows - last_n

        self._targets = sample.target_prompt_logprobs
        self.cells_C, self.cell_rows_C, self.cell_ids_C = _cells(self._targets)
        self.target_logprobs_C = np.zeros(len(self.cells_C), np.float32)

        is_scored_T = np.zeros(num_rows, np.bool_)
        is_scored_T[0 if alt_k else self.first_prompt_row :] = True
        is_scored_T[self.cell_rows_C] = True
        self.rows_R = np.flatnonzero(is_scored_T)
        self.num_scored = 0

    @property
    def next_row(self) -> int | None:
        """The first row whose logits are still needed; None if all are scored."""
        return int(self.rows_R[self.num_scored]) if self.num_scored < len(self.rows_R) else None

    def target_prompt(self) -> F32 | SparseRows | None:
        """The targets' logprobs in the layout of the request."""
        targets = self._targets
        if targets is None:
            return None
        ids = _ids(targets)
        values = np.zeros(ids.size, np.float32)
        values[self.cells_C] = self.target_logprobs_C
        return replace(targets, values=values) if isinstance(targets, SparseRows) else values.reshape(targets.shape)


def max_target(sample: Sample) -> int:
    """The largest id among the targets; -1 if there is none."""
    targets = sample.target_prompt_logprobs
    return -1 if targets is None else int(_ids(targets).max(initial=-1))


def empty_topk(num_rows: int, k: int) -> TopK:
    return TopK(np.zeros((num_rows, k), np.int32), np.full((num_rows, k), EMPTY_LOGPROB, np.float32))


def _cells(targets: I64 | SparseRows | None) -> tuple[I64, I64, I64]:
    """For every cell that names a token: its index among the values, its row and its token, ordered by row."""
    if targets is None:
        empty = np.empty(0, np.int64)
        return empty, empty, empty
    ids = _ids(targets)
    sizes = np.diff(targets.crow_indices) if isinstance(targets, SparseRows) else targets.shape[1]
    rows = np.repeat(np.arange(targets.shape[0]), sizes)
    cells = np.flatnonzero(ids >= 0)
    return cells, rows[cells], ids[cells].astype(np.int64)


def _ids(targets: I64 | SparseRows) -> F32 | I64:
    return targets.values if isinstance(targets, SparseRows) else targets.ravel()


def score_prompt(
    base: BaseModel,
    scores: PromptScores,
    adapter: Adapter | None,
    hidden_TD: Tensor,
    start: int,
    max_rows: int | None,
) -> bool:
    """Score the prompt from token `start` on. False if some logits are not finite.

    Logits are computed for at most `max_rows` rows at once; None: as many as MAX_LOGIT_ELEMENTS allows.
    """
    device = hidden_TD.device
    stop = int(np.searchsorted(scores.rows_R, start + len(hidden_TD)))
    chunk = max_rows or max(MAX_LOGIT_ELEMENTS // base.vocab_size, 1)
    while scores.num_scored < stop:
        rows_R = scores.rows_R[scores.num_scored : min(scores.num_scored + chunk, stop)]
        hidden_RD = hidden_TD.index_select(0, upload(rows_R - start, device))
        logits_RV = place_for_float64(base.logits(hidden_RD, LoRABatch([Segment(0, len(rows_R), adapter)])))
        logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
        tensors = {"is_nan": logprobs_RV[:, 0].isnan()}
        tensors |= _prompt_tensors(scores, rows_R, logprobs_RV) | _target_tensors(scores, rows_R, logprobs_RV)
        tensors |= _alternative_tensors(scores, rows_R, logits_RV, logprobs_RV)
        values = dict(zip(tensors, read(*tensors.values()), strict=True))
        if values["is_nan"].any():
            return False
        _store(scores, rows_R, values)
        scores.num_scored += len(rows_R)
    return True


def _prompt_tensors(scores: PromptScores, rows_R: I64, logprobs_RV: Tensor) -> dict[str, Tensor]:
    """Logprobs of the prompt's own tokens and the top-k tokens, for rows from `first_prompt_row` on."""
    rows_R = rows_R[int(np.searchsorted(rows_R, scores.first_prompt_row)) :]
    logprobs_RV = logprobs_RV[len(logprobs_RV) - len(rows_R) :]
    tensors: dict[str, Tensor] = {}
    if len(rows_R) and scores.prompt_logprobs_T is not None:
        targets_R = upload(scores.sample.prompt_T[rows_R + 1], logprobs_RV.device, torch.int64)
        tensors["own"] = logprobs_RV.gather(1, targets_R[:, None])[:, 0]
    if len(rows_R) and scores.topk_prompt is not None:
        tensors["top_ids"], tensors["top"] = top_rows(logprobs_RV, scores.sample.topk_prompt_logprobs)
    return tensors


def _cells_of(scores: PromptScores, rows_R: I64) -> slice:
    """The cells of these rows, which are adjacent among the cells of all rows."""
    return slice(*np.searchsorted(scores.cell_rows_C, [rows_R[0], rows_R[-1] + 1]).tolist())


def _target_tensors(scores: PromptScores, rows_R: I64, logprobs_RV: Tensor) -> dict[str, Tensor]:
    cells = _cells_of(scores, rows_R)
    if cells.start == cells.stop:
        return {}
    at_C = np.searchsorted(rows_R, scores.cell_rows_C[cells]) * logprobs_RV.shape[1] + scores.cell_ids_C[cells]
    return {"targets": logprobs_RV.view(-1).index_select(0, upload(at_C, logprobs_RV.device))}


def _alternative_tensors(
    scores: PromptScores, rows_R: I64, logits_RV: Tensor, logprobs_RV: Tensor
) -> dict[str, Tensor]:
    if scores.alt_tokens is None:
        return {}
    uniform_Rk = upload(scores.alt_uniform_Tk[rows_R], logits_RV.device)
    ids_Rk = draw_alternatives(logits_RV, scores.sample.params.temperature, uniform_Rk)
    return {"alt_ids": ids_Rk, "alt": logprobs_RV.gather(1, ids_Rk)}


def _store(scores: PromptScores, rows_R: I64, values: dict[str, np.ndarray]) -> None:
    """Store the values that were read for these rows."""
    positions_R = rows_R[int(np.searchsorted(rows_R, scores.first_prompt_row)) :] + 1
    if scores.prompt_logprobs_T is not None and "own" in values:
        scores.prompt_logprobs_T[positions_R] = values["own"]
    if scores.topk_prompt is not None and "top" in values:
        width = values["top"].shape[1]
        scores.topk_prompt.token_ids_Tk[positions_R, :width] = values["top_ids"]
        scores.topk_prompt.logprobs_Tk[positions_R, :width] = values["top"]
    if "targets" in values:
        scores.target_logprobs_C[_cells_of(scores, rows_R)] = values["targets"]
    if scores.alt_tokens is not None:
        scores.alt_tokens.token_ids_Tk[rows_R] = values["alt_ids"]
        scores.alt_tokens.logprobs_Tk[rows_R] = values["alt"]
