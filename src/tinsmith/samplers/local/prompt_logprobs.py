"""What a request wants to know about its prompt, and how much of that is known: no tensors, no model.

Row t of a prompt is the hidden state of its token t; it predicts token t + 1. `rows_R` are the rows whose logits
somebody wants, in order, and the first `num_scored` of them are done. Rows before the next one to score may come
from the prefix cache: whoever asks for the logprobs of a prompt's end only does not pay for its beginning.

Letters: T tokens of the prompt, R wanted rows, C cells that name a target, k entries of a row.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tinsmith.samplers.local.sampling import uniforms
from tinsmith.types import EMPTY_LOGPROB, F32, I64, AltTokens, Sample, SparseRows, TopK


class PromptScores:
    """`first_own_row`: from here on the prompt's own tokens and the likeliest ones are wanted."""

    def __init__(self, sample: Sample, seed: int) -> None:
        num_prompt, k = len(sample.prompt_T), sample.topk_prompt_logprobs
        num_rows, last_n, alt_k = num_prompt - 1, sample.prompt_logprobs_last_n, sample.prompt_alt_tokens_k
        self.prompt_logprobs_T = np.full(num_prompt, np.nan, np.float32) if sample.prompt_logprobs else None
        self.topk_prompt = empty_topk(num_prompt, k) if k else None
        self.alt_tokens = None
        if alt_k:
            self.alt_tokens = AltTokens(np.zeros((num_rows, alt_k), np.int64), np.zeros((num_rows, alt_k), np.float32))
            self.alt_uniform_Tk = uniforms(seed, num_rows * alt_k).reshape(num_rows, alt_k)
        self.first_own_row = num_rows
        if sample.prompt_logprobs or k:
            self.first_own_row = 0 if last_n is None else num_rows - last_n

        self._targets = sample.target_prompt_logprobs
        self.cells_C, self.cell_rows_C, self.cell_ids_C = _cells(self._targets)
        self.target_logprobs_C = np.zeros(len(self.cells_C), np.float32)

        wanted_T = np.zeros(num_rows, np.bool_)
        wanted_T[0 if alt_k else self.first_own_row :] = True
        wanted_T[self.cell_rows_C] = True
        self.rows_R = np.flatnonzero(wanted_T)
        self.num_scored = 0

    @property
    def next_row(self) -> int | None:
        """The first row whose logits are still wanted."""
        return int(self.rows_R[self.num_scored]) if self.num_scored < len(self.rows_R) else None

    def target_prompt(self) -> F32 | SparseRows | None:
        """The targets' logprobs in the layout in which the targets came."""
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
    """Of every cell that names a token: its place among the values, its row and its token, by row."""
    if targets is None:
        nothing = np.empty(0, np.int64)
        return nothing, nothing, nothing
    ids = _ids(targets)
    sizes = np.diff(targets.crow_indices) if isinstance(targets, SparseRows) else targets.shape[1]
    rows = np.repeat(np.arange(targets.shape[0]), sizes)
    cells = np.flatnonzero(ids >= 0)
    return cells, rows[cells], ids[cells].astype(np.int64)


def _ids(targets: I64 | SparseRows) -> F32 | I64:
    return targets.values if isinstance(targets, SparseRows) else targets.ravel()
