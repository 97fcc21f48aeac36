"""How far two computations of the same numbers may differ, from their dtype, their depth and the length of their sums.

A processor, a library or a number of threads chooses the order of a sum, and with it the rounding. A sum of n products
rounds by about eps * sqrt(n) of their magnitude, and the roundings of consecutive sums add up. These bounds hold on any
processor; a scale that is wrong by a thousandth exceeds them (tests/unit/test_tolerances.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

MARGIN = 4
"""Both computations round, and the worst of many numbers is about twice as far off as a usual one."""

SUMS_OF_LAYER = 7
"""Norm, queries and keys, scores, values, output; gate and up, and down."""


def rounding(dtype: torch.dtype, *, sums: int, length: int, scale: float = 1.0) -> float:
    """Return an absolute tolerance for numbers of magnitude `scale` behind `sums` sums, one after the other, of
    `length` products each.
    """
    return MARGIN * torch.finfo(dtype).eps * sums * math.sqrt(length) * scale


def rounding_of_model(
    config: PreTrainedConfig | Mapping[str, object], dtype: torch.dtype = torch.float32, *, scale: float = 1.0
) -> float:
    """Return the rounding bound of the logits and logprobs of a decoder, with its vision tower if it has one."""
    values: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    text: Mapping[str, Any] = values.get("text_config") or values
    vision: Mapping[str, Any] = values.get("vision_config") or {}
    layers = int(text["num_hidden_layers"]) + int(vision.get("depth") or vision.get("num_hidden_layers") or 0)
    widths = [int(part.get(name) or 0) for part in (text, vision) for name in ("hidden_size", "intermediate_size")]
    return rounding(dtype, sums=SUMS_OF_LAYER * layers + 1, length=max(widths), scale=scale)
