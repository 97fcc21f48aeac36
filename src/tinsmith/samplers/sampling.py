"""Choosing next tokens: temperature, top-k, top-p and the randomness, for a whole batch of rows at once.

Letters: B rows, V vocabulary, W candidates kept by truncation, C pieces of a row and S entries of a piece.

The reported logprob is log softmax(logits / temperature) over the FULL vocabulary: truncation chooses among
tokens but does not change their logprobs, so log p_tau(i) - log p_tau(j) = (log p_1(i) - log p_1(j)) / tau
holds exactly and ratios against a trainer's logprobs are right. Temperature 0 takes the likeliest token and
reports its logprob at temperature 1. top-k is applied before top-p, and top-p counts mass within what top-k
left.

Randomness is a function of (seed, index of the sample, position in the answer) alone: one uniform number per
token inverts the row's cumulative distribution. A request thus gives the same tokens in any company, up to the
rounding of the logits, which differs between batch shapes: by some 1e-5 with a float32 base, which flips a token
about once in 1e5; by some 1e-2 with a bfloat16 base, which flips one in a hundred or so.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CANDIDATES = 128  # top-p first looks among so many of the likeliest tokens; a full sort costs 20 times as much
PIECE = 64  # inverting a distribution first picks a piece of so many entries, then an entry
ALMOST_ONE = 1 - 2.0**-52  # times a total, it is below the total whatever the rounding


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) for one token of one sample: 53 bits of a hash of its coordinates."""
    digest = hashlib.blake2b(f"{seed},{index},{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def uniforms(seed: int, num: int) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) for the alternatives of a prompt: a stream of its own beside those of the samples."""
    key = hashlib.blake2b(f"{seed},alternatives".encode(), digest_size=16).digest()
    # The raw stream of a counter-based generator, which is the same in every version of numpy.
    raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(num)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Draws:
    """How to draw each row's token. temperature 0: the likeliest; top_k < 1, top_p >= 1 and min_p 0: no truncation."""

    temperature_B: npt.NDArray[np.float32]
    top_k_B: npt.NDArray[np.int64]
    top_p_B: npt.NDArray[np.float64]
    uniform_B: npt.NDArray[np.float64]
    min_p_B: npt.NDArray[np.float64] | None = None


class Chosen(NamedTuple):
    """A row whose logits hold NaN or +inf has logprob NaN, and its token means nothing."""

    token_ids_B: Tensor  # int64
    logprobs_B: Tensor  # float32
    logprobs_BV: Tensor  # float32, at the row's temperature


def choose(logits_BV: Tensor, draws: Draws, adjusted_BV: Tensor | None = None) -> Chosen:
    """Draw each row's token, from the adjusted logits if there are any; logprobs are always the model's own."""
    device = logits_BV.device
    greedy_B = draws.temperature_B == 0
    temperature_B = np.where(greedy_B, np.float32(1), draws.temperature_B)
    logprobs_BV = _logprobs_at(logits_BV, temperature_B)
    drawn_BV = logits_BV if adjusted_BV is None else adjusted_BV

    if greedy_B.all():
        token_ids_B = drawn_BV.argmax(-1)
    else:
        uniform_B = torch.from_numpy(draws.uniform_B).to(device)
        drawn_logprobs_BV = logprobs_BV if adjusted_BV is None else _logprobs_at(adjusted_BV, temperature_B)
        token_ids_B = _draw(_without_unlikely(drawn_logprobs_BV, draws), draws, greedy_B, uniform_B)
        if greedy_B.any():
            token_ids_B = torch.where(torch.from_numpy(greedy_B).to(device), drawn_BV.argmax(-1), token_ids_B)
    logprobs_B = logprobs_BV.gather(1, token_ids_B[:, None])[:, 0]
    # A NaN anywhere in a row makes the whole row NaN, whichever token the garbage chose.
    logprobs_B = torch.where(logprobs_BV[:, 0].isnan(), torch.nan, logprobs_B)
    return Chosen(token_ids_B, logprobs_B, logprobs_BV)


def top_rows(logprobs_BV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, best first: (ids int64, logprobs), [B, min(k, V)] each."""
    values_Bk, ids_Bk = logprobs_BV.topk(min(k, logprobs_BV.shape[1]), dim=-1)
    return ids_Bk, values_Bk


def draw_each(logits_RV: Tensor, temperature: float, uniform_Rk: Tensor) -> Tensor:
    """[R, k] token ids: k independent draws from every row's whole distribution; temperature 0: the likeliest."""
    if temperature == 0:
        return logits_RV.argmax(-1, keepdim=True).expand(uniform_Rk.shape).contiguous()
    weights_RV = _logprobs_at(logits_RV, np.full(len(logits_RV), temperature, np.float32)).double().exp_()
    sums_RV = weights_RV.cumsum_(-1)
    target_Rk = uniform_Rk.clamp(max=ALMOST_ONE) * sums_RV[:, -1:]
    # The first sum above the target: a token of weight zero adds nothing and is never the first.
    return torch.searchsorted(sums_RV, target_Rk, right=True).clamp_(max=sums_RV.shape[1] - 1)


def _logprobs_at(logits_BV: Tensor, temperature_B: npt.NDArray[np.float32]) -> Tensor:
    scaled_BV = logits_BV.float()
    if np.any(temperature_B != 1):
        # Relative to the row's maximum, so that a tiny temperature sends others to -inf and none to NaN.
        scaled_BV = scaled_BV - scaled_BV.amax(-1, keepdim=True)
        scaled_BV = scaled_BV / torch.from_numpy(temperature_B).to(logits_BV.device)[:, None]
    return torch.log_softmax(scaled_BV, dim=-1)


def _without_unlikely(logprobs_BV: Tensor, draws: Draws) -> Tensor:
    """min_p: only tokens that are at least that fraction as likely as the likeliest one."""
    if draws.min_p_B is None or not draws.min_p_B.any():
        return logprobs_BV
    cut = np.flatnonzero(draws.min_p_B)  # no other row may change by as much as a rounding
    rows = torch.from_numpy(cut).to(logprobs_BV.device)
    least_R = torch.from_numpy(np.log(draws.min_p_B[cut]).astype(np.float32)).to(logprobs_BV.device)
    kept_RV = logprobs_BV[rows]
    kept_RV = kept_RV.masked_fill(kept_RV < kept_RV.amax(-1, keepdim=True) + least_R[:, None], -torch.inf)
    return logprobs_BV.index_copy(0, rows, torch.log_softmax(kept_RV, dim=-1))


def _draw(logprobs_BV: Tensor, draws: Draws, greedy_B: npt.NDArray[np.bool_], uniform_B: Tensor) -> Tensor:
    num_vocab = logprobs_BV.shape[1]
    has_k_B = (draws.top_k_B > 0) & (draws.top_k_B < num_vocab)
    cut_B = (has_k_B | (draws.top_p_B < 1)) & ~greedy_B
    if not cut_B.any():
        return invert(logprobs_BV.exp(), uniform_B)
    token_ids_B = torch.zeros(len(logprobs_BV), dtype=torch.int64, device=logprobs_BV.device)
    whole = np.flatnonzero(~cut_B & ~greedy_B)
    if len(whole):
        rows = torch.from_numpy(whole).to(logprobs_BV.device)
        token_ids_B[rows] = invert(logprobs_BV[rows].exp(), uniform_B[rows])
    cut = np.flatnonzero(cut_B)
    top_k = np.where(has_k_B[cut], draws.top_k_B[cut], num_vocab)
    rows = torch.from_numpy(cut).to(logprobs_BV.device)
    token_ids_B[rows] = _draw_truncated(logprobs_BV[rows], top_k, draws.top_p_B[cut], uniform_B[rows])
    return token_ids_B


def _draw_truncated(
    logprobs_BV: Tensor, top_k_B: npt.NDArray[np.int64], top_p_B: npt.NDArray[np.float64], uniform_B: Tensor
) -> Tensor:
    """Look among the CANDIDATES likeliest first; rows that keep more than those are sorted whole."""
    num_vocab, device = logprobs_BV.shape[1], logprobs_BV.device
    top_p = torch.from_numpy(top_p_B).to(device)
    width = min(CANDIDATES, num_vocab)
    logprobs_BW, ids_BW = logprobs_BV.topk(width, dim=-1)
    weights_BW = logprobs_BW.double().exp()
    fits_B = torch.from_numpy(top_k_B <= width).to(device)
    fits_B = fits_B | (torch.from_numpy(top_k_B == num_vocab).to(device) & (weights_BW.sum(-1) >= top_p))
    token_ids_B = _draw_sorted(weights_BW, ids_BW, torch.from_numpy(top_k_B).to(device), top_p, uniform_B)
    rest = torch.nonzero(~fits_B)[:, 0]
    if len(rest):
        logprobs_RV, ids_RV = logprobs_BV[rest].sort(dim=-1, descending=True, stable=True)
        top_k_R = torch.from_numpy(top_k_B).to(device)[rest]
        token_ids_B[rest] = _draw_sorted(logprobs_RV.double().exp(), ids_RV, top_k_R, top_p[rest], uniform_B[rest])
    return token_ids_B


def _draw_sorted(weights_BW: Tensor, ids_BW: Tensor, top_k_B: Tensor, top_p_B: Tensor, uniform_B: Tensor) -> Tensor:
    """Draw from rows of descending weights: the top k, and of those the fewest that hold top_p of the mass."""
    rank_W = torch.arange(weights_BW.shape[1], device=weights_BW.device)
    weights_BW = weights_BW * (rank_W < top_k_B[:, None])
    before_BW = weights_BW.cumsum(-1) - weights_BW
    # Without top-k the mass is 1 by definition, also where only the likeliest candidates are at hand.
    mass_B = torch.where(top_k_B <= weights_BW.shape[1], weights_BW.sum(-1), 1.0)
    keep_BW = before_BW < (top_p_B * mass_B)[:, None]
    keep_BW[:, 0] = True
    picked_B = invert(weights_BW * keep_BW, uniform_B)
    return ids_BW.gather(1, picked_B[:, None])[:, 0]


def invert(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The index where each row's cumulative weight first exceeds uniform * total; never of weight zero.

    In two levels (pieces, then entries of the piece), so that float64 sums cost little and the tail of a
    large vocabulary keeps its probability: a float32 cumulative sum cannot tell apart steps below 6e-8.
    """
    num_rows, num_vocab = weights_BV.shape
    if num_vocab % PIECE:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, PIECE - num_vocab % PIECE))
    weights_BCS = weights_BV.view(num_rows, -1, PIECE)
    pieces_BC = weights_BCS.sum(-1).double()
    sums_BC = pieces_BC.cumsum(-1)
    target_B = uniform_B.clamp(max=ALMOST_ONE) * sums_BC[:, -1]
    piece_B1 = _first_above(sums_BC, target_B)
    weight_B = pieces_BC.gather(1, piece_B1)[:, 0]
    fraction_B = (target_B - sums_BC.gather(1, piece_B1)[:, 0] + weight_B) / weight_B

    sums_BS = weights_BCS.gather(1, piece_B1[:, :, None].expand(-1, -1, PIECE))[:, 0].double().cumsum(-1)
    entry_B1 = _first_above(sums_BS, fraction_B.clamp(0.0, ALMOST_ONE) * sums_BS[:, -1])
    return (piece_B1 * PIECE + entry_B1)[:, 0].clamp(max=num_vocab - 1)


def _first_above(sums_BC: Tensor, target_B: Tensor) -> Tensor:
    """[B, 1]: the first column whose sum exceeds the target; some column if the sums are NaN."""
    return (sums_BC <= target_B[:, None]).sum(-1, keepdim=True).clamp(max=sums_BC.shape[1] - 1)
