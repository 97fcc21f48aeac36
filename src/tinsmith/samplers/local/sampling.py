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
    """How to draw each row's token. temperature 0: the likeliest; top_k < 1, top_p >= 1 and min_p 0: no truncation.
    `num_top_B`: how many of each row's likeliest tokens are wanted beside it.
    """

    temperature_B: npt.NDArray[np.float32]
    top_k_B: npt.NDArray[np.int64]
    top_p_B: npt.NDArray[np.float64]
    uniform_B: npt.NDArray[np.float64]
    min_p_B: npt.NDArray[np.float64] | None = None
    num_top_B: npt.NDArray[np.int64] | None = None


class Top(NamedTuple):
    """The likeliest tokens, best first, of the rows that ask for some: as many as the one that asks for most."""

    rows: list[int]
    ids_Rk: Tensor
    logprobs_Rk: Tensor


class Chosen(NamedTuple):
    """A row whose logits hold NaN or +inf has logprob NaN, and its token means nothing."""

    token_ids_B: Tensor  # int64
    logprobs_B: Tensor  # float32, at the row's temperature
    top: Top | None = None


def choose(logits_BV: Tensor, draws: Draws, adjusted_BV: Tensor | None = None) -> Chosen:
    """Draw each row's token, from the adjusted logits if there are any; logprobs are always the model's own.

    Uses up what it is given: logits become weights in place, relative to the row's largest.
    """
    greedy_B = draws.temperature_B == 0
    temperature_B = np.where(greedy_B, np.float32(1), draws.temperature_B)
    likeliest_B = None
    if greedy_B.any():
        likeliest_B = (logits_BV if adjusted_BV is None else adjusted_BV).argmax(-1)
    own_BV = _relative_(logits_BV, temperature_B)
    top = _top(own_BV, draws)
    weights_BV = own_BV.exp() if adjusted_BV is not None else own_BV.exp_()
    sums_BC = piece_sums(weights_BV)
    total_B = sums_BC.sum(-1).log_()
    if adjusted_BV is not None:
        weights_BV = _relative_(adjusted_BV, temperature_B).exp_()
        sums_BC = piece_sums(weights_BV)

    if likeliest_B is not None and greedy_B.all():
        token_ids_B = likeliest_B
    else:
        token_ids_B = _draw(weights_BV, sums_BC, draws)
        if likeliest_B is not None:
            token_ids_B = torch.where(torch.from_numpy(greedy_B).to(logits_BV.device), likeliest_B, token_ids_B)
    # The weight of a token that was drawn is as exact as its logit; of a greedy one it is 1.
    own_B = own_BV.gather(1, token_ids_B[:, None])[:, 0].double()
    logprobs_B = ((own_B if adjusted_BV is not None else own_B.log_()) - total_B).float()
    if top is not None:
        top = top._replace(logprobs_Rk=(top.logprobs_Rk - total_B[top.rows, None]).float())
    return Chosen(token_ids_B, logprobs_B, top)


def _top(relative_BV: Tensor, draws: Draws) -> Top | None:
    """The likeliest tokens, with logits relative to the row's largest for logprobs."""
    if draws.num_top_B is None or not draws.num_top_B.any():
        return None
    rows = np.flatnonzero(draws.num_top_B).tolist()
    return Top(rows, *top_rows(relative_BV[rows], int(draws.num_top_B.max())))


def top_rows(logprobs_BV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, best first: (ids int64, logprobs), [B, min(k, V)] each."""
    values_Bk, ids_Bk = logprobs_BV.topk(min(k, logprobs_BV.shape[1]), dim=-1)
    return ids_Bk, values_Bk


def draw_each(logits_RV: Tensor, temperature: float, uniform_Rk: Tensor) -> Tensor:
    """[R, k] token ids: k independent draws from every row's whole distribution; temperature 0: the likeliest."""
    if temperature == 0:
        return logits_RV.argmax(-1, keepdim=True).expand(uniform_Rk.shape).contiguous()
    relative_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)).double()
    weights_RV = relative_RV.div_(temperature).exp_()
    sums_RV = weights_RV.cumsum_(-1)
    target_Rk = uniform_Rk.clamp(max=ALMOST_ONE) * sums_RV[:, -1:]
    # The first sum above the target: a token of weight zero adds nothing and is never the first.
    return torch.searchsorted(sums_RV, target_Rk, right=True).clamp_(max=sums_RV.shape[1] - 1)


def _relative_(logits_BV: Tensor, temperature_B: npt.NDArray[np.float32]) -> Tensor:
    """Logits over the temperature, less the row's largest, in place.

    Less the largest first, so that a tiny temperature sends others to -inf and none to NaN. A row with NaN or +inf
    has NaN somewhere.
    """
    logits_BV.sub_(logits_BV.amax(-1, keepdim=True))
    if np.any(temperature_B != 1):
        logits_BV.div_(torch.from_numpy(temperature_B).to(logits_BV.device)[:, None])
    return logits_BV


def _draw(weights_BV: Tensor, sums_BC: Tensor, draws: Draws) -> Tensor:
    """One token of each row; greedy rows get any. Tokens that min_p leaves out lose their weight in place."""
    device, num_vocab = weights_BV.device, weights_BV.shape[1]
    if draws.min_p_B is not None and draws.min_p_B.any():
        # The largest weight is 1. Rows without min_p lose nothing, not even by a rounding.
        least_B = torch.from_numpy(draws.min_p_B.astype(np.float32)).to(device)
        weights_BV.masked_fill_(weights_BV < least_B[:, None], 0.0)
        sums_BC = piece_sums(weights_BV)
    uniform_B = torch.from_numpy(draws.uniform_B).to(device)
    has_k_B = (draws.top_k_B > 0) & (draws.top_k_B < num_vocab)
    cut = np.flatnonzero((has_k_B | (draws.top_p_B < 1)) & (draws.temperature_B > 0))
    if not len(cut):
        return invert(weights_BV, uniform_B, sums_BC)
    top_k = np.where(has_k_B[cut], draws.top_k_B[cut], num_vocab)
    if len(cut) == len(weights_BV):
        return _draw_truncated(weights_BV, sums_BC.sum(-1), top_k, draws.top_p_B, uniform_B)
    token_ids_B = invert(weights_BV, uniform_B, sums_BC)
    rows = torch.from_numpy(cut).to(device)
    token_ids_B[rows] = _draw_truncated(
        weights_BV[rows], sums_BC[rows].sum(-1), top_k, draws.top_p_B[cut], uniform_B[rows]
    )
    return token_ids_B


def _draw_truncated(
    weights_BV: Tensor,
    total_B: Tensor,
    top_k_B: npt.NDArray[np.int64],
    top_p_B: npt.NDArray[np.float64],
    uniform_B: Tensor,
) -> Tensor:
    """Look among the CANDIDATES likeliest first; rows that keep more than those are sorted whole."""
    num_vocab, device = weights_BV.shape[1], weights_BV.device
    top_p, top_k = torch.from_numpy(top_p_B).to(device), torch.from_numpy(top_k_B).to(device)
    width = min(CANDIDATES, num_vocab)
    weights_BW, ids_BW = weights_BV.topk(width, dim=-1)
    weights_BW = weights_BW.double() / total_B[:, None]
    fits_B = (top_k <= width) | ((top_k == num_vocab) & (weights_BW.sum(-1) >= top_p))
    token_ids_B = _draw_sorted(weights_BW, ids_BW, top_k, top_p, uniform_B)
    rest = torch.nonzero(~fits_B)[:, 0]
    if len(rest):
        weights_RV, ids_RV = weights_BV[rest].sort(dim=-1, descending=True, stable=True)
        weights_RV = weights_RV.double() / total_B[rest, None]
        token_ids_B[rest] = _draw_sorted(weights_RV, ids_RV, top_k[rest], top_p[rest], uniform_B[rest])
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


def piece_sums(weights_BV: Tensor) -> Tensor:
    """[B, C] float64: the sum of every PIECE weights, of what is left over last."""
    whole = weights_BV.shape[1] // PIECE * PIECE
    sums_BC = weights_BV[:, :whole].unflatten(1, (whole // PIECE, PIECE)).sum(-1)
    if whole < weights_BV.shape[1]:
        sums_BC = torch.cat([sums_BC, weights_BV[:, whole:].sum(-1, keepdim=True)], -1)
    return sums_BC.double()


def invert(weights_BV: Tensor, uniform_B: Tensor, sums_BC: Tensor | None = None) -> Tensor:
    """The index where each row's cumulative weight first exceeds uniform * total; never of weight zero.

    In two levels (pieces, then entries of the piece), so that float64 sums cost little and the tail of a
    large vocabulary keeps its probability: a float32 cumulative sum cannot tell apart steps below 6e-8.
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
    """[B, 1]: the first column whose sum exceeds the target; some column if the sums are NaN."""
    return (sums_BC <= target_B[:, None]).sum(-1, keepdim=True).clamp(max=sums_BC.shape[1] - 1)
