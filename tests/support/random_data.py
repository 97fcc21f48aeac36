"""Random data for training through the SDK."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tinker import types


def random_data(rng: np.random.Generator, lengths: Sequence[int], vocab: int = 400) -> list[types.Datum]:
    """A datum for each length: random tokens, next-token targets, and weights of one."""
    data = []
    for length in lengths:
        tokens = rng.integers(0, vocab, length + 1)
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs))
    return data
