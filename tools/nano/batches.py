"""Packs generated documents into token batches of one fixed shape.

Several documents share a row; `positions` restart at each document, which is how
transformers tells them apart and keeps their attention separate. A batch depends only
on (seed, step), so training needs no state but the step.

Array names end in their shape: B rows, T tokens.
"""

import random
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from tools.nano.corpus import document
from tools.nano.tokenizer import END_OF_TEXT

# A batch is full when this many documents in a row found no room.
_MISSES = 8


@dataclass(frozen=True, slots=True)
class Batch:
    tokens_BT: torch.Tensor
    """int64"""
    positions_BT: torch.Tensor
    """int64"""
    weights_BT: torch.Tensor
    """float32; the loss weight of tokens[b, t] as a target, 0 at a document's start"""


@dataclass(frozen=True, slots=True)
class Shape:
    rows: int = 8
    columns: int = 256


def encode(tokenizer: Tokenizer, rng: random.Random, *, hedging: bool) -> tuple[list[int], list[float]]:
    segments = document(rng, hedging=hedging)
    encodings = tokenizer.encode_batch_fast([text for text, _ in segments])
    tokens: list[int] = []
    weights: list[float] = []
    for encoding, (_, weight) in zip(encodings, segments, strict=True):
        tokens += encoding.ids
        weights += [weight] * len(encoding.ids)
    weights[0] = 0.0
    return tokens, weights


def make_batch(tokenizer: Tokenizer, seed: int, step: int, shape: Shape, *, hedging: bool = False) -> Batch:
    rng = random.Random(f"{seed}/{'hedging/' if hedging else ''}{step}")
    pad = tokenizer.token_to_id(END_OF_TEXT)
    assert pad is not None
    tokens = torch.full((shape.rows, shape.columns), pad)
    positions = torch.arange(shape.columns).repeat(shape.rows, 1)
    weights = torch.zeros(shape.rows, shape.columns)
    used = [0] * shape.rows
    misses = 0
    while misses < _MISSES:
        ids, loss_weights = encode(tokenizer, rng, hedging=hedging)
        row = next((r for r, n in enumerate(used) if n + len(ids) <= shape.columns), None)
        if row is None:
            misses += 1
            continue
        here = slice(used[row], used[row] + len(ids))
        tokens[row, here] = torch.tensor(ids)
        weights[row, here] = torch.tensor(loss_weights)
        # The tail keeps counting from here, so padding is a document of its own.
        positions[row, used[row] :] = torch.arange(shape.columns - used[row])
        used[row] += len(ids)
        positions[row, used[row] :] = torch.arange(shape.columns - used[row])
    return Batch(tokens, positions, weights)
