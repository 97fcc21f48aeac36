"""Choosing next tokens: temperature, top-k, top-p and randomness, for a whole batch of rows at once.

Letters: B rows, V vocabulary, W candidates of a truncated row, C pieces of a row and S entries of a piece.

The reported logprob is log softmax(logits / temperature) over the FULL vocabulary: truncation restricts the choice but
not the logprobs, so log p_tau(i) - log p_tau(j) = (log p_1(i) - log p_1(j)) / tau holds exactly and ratios against a
trainer's logprobs are right. Temperature 0 takes the likeliest token and reports its logprob at temperature 1. top-k is
applied before top-p, and top-p counts mass within the top-k tokens.

Randomness is a function of (seed, index of the sample, position in the answer) alone: one uniform number per token
inverts the row's cumulative distribution. A request thus gives the same tokens in any batch, up to the rounding of the
logits, which differs between batch shapes: by some 1e-5 with a float32 base, which flips a token about once in 1e5; by
some 1e-2 with a bfloat16 base, which flips about one in a hundred.

Nothing here synchronises with a CUDA device: a step's parameters are uploaded together, and the host knows which rows
need more than the likeliest candidates, or all rows are sorted. On a CPU reading values is free, so only the rows that
need it are sorted.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.backends.torch.host import upload, upload_all
from tinsmith.runtime.devices import runs_kernels

CANDIDATES = 128  # on a CPU top-p first tries this many of the likeliest tokens, since a full sort takes much longer
PIECE = 64  # inverting a distribution first picks a piece of this many entries, then an entry
MIN_LOG_WEIGHT = -87.0  # float32 weights with a smaller logarithm lose digits, and then become 0
ALMOST_ONE = 1 - 2.0**-52  # its product with a total stays below the total despite rounding


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) for one token of one sample: 53 bits of a hash of (seed, index, position)."""
    digest = hashlib.blake2b(f"{seed},{index},{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def uniforms(seed: int, num: int) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) for the alternatives of a prompt: a stream separate from those of the samples."""
    key = hashlib.blake2b(f"{seed},alternatives".encode(), digest_size=16).digest()
    # The raw stream of a counter-based generator is the same in every version of numpy.
    raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(num)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How to draw each row's token. temperature 0: the likeliest; top_k < 1, top_p >= 1 and min_p 0: no truncation.
    `num_top_B`: how many of each row's likeliest tokens to report.
    """

    temperature_B: npt.NDArray[np.float32]
    top_k_B: npt.NDArray[np.int64]
    top_p_B: npt.NDArray[np.float64]
    uniform_B: npt.NDArray[np.float64]
    min_p_B: npt.NDArray[np.float64] | None = None
    num_top_B: npt.NDArray[np.int64] | None = None


class TopTokens(NamedTuple):
    """The likeliest tokens, best first, of the rows that request some; as many as the largest request."""

    rows: list[int]
    rows_R: Tensor | None  # the same on the device; None: all
    ids_Rk: Tensor
    logprobs_Rk: Tensor


class SampledTokens(NamedTuple):
    """Each row's token and its logprob; a row whose logits hold NaN or +inf has logprob NaN and an arbitrary token."""

    token_ids_B: Tensor  # int64
    logprobs_B: Tensor  # float32, at the row's temperature
    top: TopTokens | None = None
    exhausted_B: Tensor | None = None  # whether masks left the row no token to draw


class _DeviceParams(NamedTuple):
    """The parameters of `DrawParams` on the device, float64."""

    temperature_B: Tensor  # 1 for greedy rows
    greedy_B: Tensor  # 1 or 0
    top_k_B: Tensor  # the vocabulary's size: no truncation
    top_p_B: Tensor
    uniform_B: Tensor
    min_p_B: Tensor


def choose(logits_BV: Tensor, draws: DrawParams, adjusted_BV: Tensor | None = None) -> SampledTokens:
    """Draw each row's token, from `adjusted_BV` unless it is None; logprobs are always of the model's own logits.

    Overwrites both inputs: logits become weights in place, relative to the row's largest.
    """
    greedy_B = draws.temperature_B == 0
    params = _upload_params(draws, greedy_B, logits_BV)
    has_temperature = bool(np.any((draws.temperature_B != 1) & ~greedy_B))
    likeliest_B = None
    if greedy_B.any():
        likeliest_B = (logits_BV if adjusted_BV is None else adjusted_BV).argmax(-1)
    relative_BV = _relative_(logits_BV, params.temperature_B if has_temperature else None)
    top = _top(relative_BV, draws)
    model_weights_BV = weights_BV = relative_BV.exp() if adjusted_BV is not None else relative_BV.exp_()
    sums_BC = piece_sums(weights_BV)
    total_B = sums_BC.sum(-1).log_()
    if adjusted_BV is not None:
        weights_BV = _relative_(adjusted_BV, params.temperature_B if has_temperature else None).exp_()
        sums_BC = piece_sums(weights_BV)

    if likeliest_B is not None and greedy_B.all():
        token_ids_B = likeliest_B
    else:
        token_ids_B = _draw(weights_BV, sums_BC, draws, params)
        if likeliest_B is not None:
            token_ids_B = torch.where(params.greedy_B == 1, likeliest_B, token_ids_B)
    # The weight of a drawn token is as exact as its logit; that of a greedy one is 1.
    log_weight_B = model_weights_BV.gather(1, token_ids_B[:, None])[:, 0].double().log_()
    if adjusted_BV is not None:  # may draw a token that has no weight of its own
        logit_B = relative_BV.gather(1, token_ids_B[:, None])[:, 0].double()
        log_weight_B = torch.where(log_weight_B < MIN_LOG_WEIGHT, logit_B, log_weight_B)
    logprobs_B = (log_weight_B - total_B).float()
    if top is not None:
        total_R = _rows_of(total_B, top.rows_R)
        top = top._replace(logprobs_Rk=(top.logprobs_Rk - total_R[:, None]).float())
    return SampledTokens(token_ids_B, logprobs_B, top)


def _upload_params(draws: DrawParams, greedy_B: npt.NDArray[np.bool_], logits_BV: Tensor) -> _DeviceParams:
    num_rows, num_vocab = logits_BV.shape
    columns = (
        np.where(greedy_B, 1.0, draws.temperature_B),
        greedy_B,
        np.where((draws.top_k_B > 0) & (draws.top_k_B < num_vocab), draws.top_k_B, num_vocab),
        draws.top_p_B,
        draws.uniform_B,
        np.zeros(num_rows) if draws.min_p_B is None else draws.min_p_B,
    )
    return _DeviceParams(*upload_all([np.asarray(column, np.float64) for column in columns], logits_BV.device))


def _rows_of(x_B: Tensor, rows: Tensor | None) -> Tensor:
    """The rows of `x_B` at these indices; None: all."""
    return x_B if rows is None else x_B.index_select(0, rows)


def _top(relative_BV: Tensor, draws: DrawParams) -> TopTokens | None:
    """The likeliest tokens, with logits relative to the row's largest instead of logprobs."""
    if draws.num_top_B is None or not draws.num_top_B.any():
        return None
    rows = np.flatnonzero(draws.num_top_B)
    on_device = None if len(rows) == len(relative_BV) else upload(rows, relative_BV.device)
    return TopTokens(rows.tolist(), on_device, *top_rows(_rows_of(relative_BV, on_device), int(draws.num_top_B.max())))


def top_rows(logprobs_BV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, best first: (ids int64, logprobs), [B, min(k, V)] each."""
    values_Bk, ids_Bk = logprobs_BV.topk(min(k, logprobs_BV.shape[1]), dim=-1)
    return ids_Bk, values_Bk


def draw_alternatives(logits_RV: Tensor, temperature: float, uniform_Rk: Tensor) -> Tensor:
    """[R, k] token ids: k independent draws from every row's full distribution; temperature 0: the likeliest."""
    if temperature == 0:
        return logits_RV.argmax(-1, keepdim=True).expand(uniform_Rk.shape).contiguous()
    relative_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)).double()
    weights_RV = relative_RV.div_(temperature).exp_()
    sums_RV = weights_RV.cumsum_(-1)
    target_Rk = uniform_Rk.clamp(max=ALMOST_ONE) * sums_RV[:, -1:]
    # The first sum above the target: a token of weight zero adds nothing, so it is never the first.
    return torch.searchsorted(sums_RV, target_Rk, right=True).clamp_(max=sums_RV.shape[1] - 1)


def _relative_(logits_BV: Tensor, temperature_B: Tensor | None) -> Tensor:
    """Logits minus the row's largest, divided by the temperature unless it is None, in place.

    Subtracting first makes a tiny temperature send other logits to -inf and none to NaN. A row with NaN or +inf
    contains NaN afterwards.
    """
    logits_BV.sub_(logits_BV.amax(-1, keepdim=True))
    return logits_BV if temperature_B is None else logits_BV.div_(temperature_B.float()[:, None])


def _draw(weights_BV: Tensor, sums_BC: Tensor, draws: DrawParams, params: _DeviceParams) -> Tensor:
    """One token of each row; arbitrary for greedy rows. Tokens that min_p excludes lose their weight in place."""
    num_rows, num_vocab = weights_BV.shape
    if draws.min_p_B is not None and draws.min_p_B.any():
        # The largest weight is 1. Rows without min_p are unchanged, not even by rounding.
        weights_BV.masked_fill_(weights_BV < params.min_p_B.float()[:, None], 0.0)
        sums_BC = piece_sums(weights_BV)
    has_k_B = (draws.top_k_B > 0) & (draws.top_k_B < num_vocab)
    truncated_rows = np.flatnonzero((has_k_B | (draws.top_p_B < 1)) & (draws.temperature_B > 0))
    if not len(truncated_rows):
        return invert(weights_BV, params.uniform_B, sums_BC)
    width = min(CANDIDATES, num_vocab)
    is_exact = bool((has_k_B[truncated_rows] & (draws.top_k_B[truncated_rows] <= width)).all())
    if runs_kernels(weights_BV) and not is_exact:
        width, is_exact = num_vocab, True
    rows = None if len(truncated_rows) == num_rows else upload(truncated_rows, weights_BV.device)
    weights_RV, total_R, top_k_R, top_p_R, uniform_R = (
        _rows_of(x, rows) for x in (weights_BV, sums_BC.sum(-1), params.top_k_B, params.top_p_B, params.uniform_B)
    )
    drawn_R = _draw_truncated(weights_RV, total_R, top_k_R, top_p_R, uniform_R, width, is_exact=is_exact)
    if rows is None:
        return drawn_R
    return invert(weights_BV, params.uniform_B, sums_BC).index_copy_(0, rows, drawn_R)


def _draw_truncated(
    weights_RV: Tensor,
    total_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    uniform_R: Tensor,
    width: int,
    *,
    is_exact: bool,
) -> Tensor:
    """Draw among the `width` likeliest; rows whose top_k or top_p allows more are sorted. `is_exact`: none does."""
    num_vocab = weights_RV.shape[1]
    weights_RW, ids_RW = _likeliest(weights_RV, total_R, width)
    token_ids_R = _draw_sorted(weights_RW, ids_RW, top_k_R, top_p_R, uniform_R)
    if is_exact or width == num_vocab:
        return token_ids_R
    fits_R = (top_k_R <= width) | ((top_k_R == num_vocab) & (weights_RW.sum(-1) >= top_p_R))
    wide_rows = torch.nonzero(~fits_R)[:, 0]
    if len(wide_rows):
        sorted_rV, ids_rV = _likeliest(weights_RV[wide_rows], total_R[wide_rows], num_vocab)
        token_ids_R[wide_rows] = _draw_sorted(
            sorted_rV, ids_rV, top_k_R[wide_rows], top_p_R[wide_rows], uniform_R[wide_rows]
        )
    return token_ids_R


def _likeliest(weights_RV: Tensor, total_R: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """[R, W] each: shares of the total in descending order, float64, and their tokens."""
    if width < weights_RV.shape[1]:
        weights_RW, ids_RW = weights_RV.topk(width, dim=-1)
    else:
        weights_RW, ids_RW = weights_RV.sort(dim=-1, descending=True, stable=True)
    return weights_RW.double() / total_R[:, None], ids_RW


def _draw_sorted(weights_BW: Tensor, ids_BW: Tensor, top_k_B: Tensor, top_p_B: Tensor, uniform_B: Tensor) -> Tensor:
    """Draw from rows of descending weights: the top k, and of those the fewest that hold top_p of the mass."""
    rank_W = torch.arange(weights_BW.shape[1], device=weights_BW.device)
    weights_BW = weights_BW * (rank_W < top_k_B[:, None])
    before_BW = weights_BW.cumsum(-1) - weights_BW
    # Without top-k the mass is 1 by definition, even where only the likeliest candidates are present.
    mass_B = torch.where(top_k_B <= weights_BW.shape[1], weights_BW.sum(-1), 1.0)
    keep_BW = before_BW < (top_p_B * mass_B)[:, None]
    keep_BW[:, 0] = True
    picked_B = invert(weights_BW * keep_BW, uniform_B)
    return ids_BW.gather(1, picked_B[:, None])[:, 0]


def piece_sums(weights_BV: Tensor) -> Tensor:
    """[B, C] float64: the sum of every PIECE weights; the last piece may be shorter."""
    full = weights_BV.shape[1] // PIECE * PIECE
    sums_BC = weights_BV[:, :full].unflatten(1, (full // PIECE, PIECE)).sum(-1)
    if full < weights_BV.shape[1]:
        sums_BC = torch.cat([sums_BC, weights_BV[:, full:].sum(-1, keepdim=True)], -1)
    return sums_BC.double()


def invert(weights_BV: Tensor, uniform_B: Tensor, sums_BC: Tensor | None = None) -> Tensor:
    """The index where each row's cumulative weight first exceeds uniform * total; never an index of weight zero.

    Works in two levels (pieces, then entries of the piece), so that float64 sums cost little and the tail of a large
    vocabulary keeps its probability: a float32 cumulative sum cannot distinguish steps below 6e-8.
    """
    num_vocab = weights_BV.shape[1]
    pieces_BC = piece_sums(weights_BV) if sums_BC is None else sums_BC
    before_BC = pieces_BC.cumsum(-1)
    target_B = uniform_B.clamp(max=ALMOST_ONE) * before_BC[:, -1]
    piece_B1 = _first_above(before_BC, target_B)
    weight_B = pieces_BC.gather(1, piece_B1)[:, 0]
    fraction_B = (target_B - before_BC.gather(1, piece_B1)[:, 0] + weight_B) / weight_B

    entry_BS = piece_B1 * PIECE + torch.arange(PIECE, device=weights_BV.device)
    weights_BS = weights_BV.gather(1, entry_BS.clamp(max=num_vocab - 1)).double()
    if num_vocab % PIECE:
        weights_BS.masked_fill_(entry_BS >= num_vocab, 0.0)
    sums_BS = weights_BS.cumsum(-1)
    entry_B1 = _first_above(sums_BS, fraction_B.clamp(0.0, ALMOST_ONE) * sums_BS[:, -1])
    return (piece_B1 * PIECE + entry_B1)[:, 0].clamp(max=num_vocab - 1)


def _first_above(sums_BC: Tensor, target_B: Tensor) -> Tensor:
    """[B, 1]: the first column whose sum exceeds the target; an arbitrary column if the sums are NaN."""
    return (sums_BC <= target_B[:, None]).sum(-1, keepdim=True).clamp(max=sums_BC.shape[1] - 1)
