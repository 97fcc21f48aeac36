"""Which linears are divided among tensor ranks, and whether they can be: transformers' own plan for the family.

A family without a plan is refused, as are heads and widths that do not divide, and experts. What a plan names in a
way that is not known here stays whole on every rank: it costs memory and is exact. Knows no device and makes no group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

import structlog
from torch import nn
from transformers import PreTrainedConfig

from tinsmith.backends.distributed.tensor_parallel import COLUMN, GATHERED_COLUMN, ROW, SPLIT_ROW
from tinsmith.errors import SettingsError

log = structlog.get_logger()


def check_heads(name: str, config: PreTrainedConfig, degree: int) -> None:
    """Raises SettingsError if a rank's share of the heads would not be whole heads."""
    for what, field in (("attention heads", "num_attention_heads"), ("key and value heads", "num_key_value_heads")):
        count = getattr(config, field, None)
        if isinstance(count, int) and count % degree:
            fitting = [number for number in range(1, count + 1) if count % number == 0]
            raise SettingsError(
                f"tensor_parallel is {degree}, and {name} has {count} {what}, which {degree} does not divide; "
                f"choose among {', '.join(map(str, fitting))}"
            )


def divided(name: str, config: PreTrainedConfig, decoder: nn.Module, degree: int) -> dict[str, str]:
    """Path within the decoder -> how it is divided. Raises SettingsError if the model cannot be divided."""
    plan = cast("Mapping[str, str] | None", getattr(config, "base_model_tp_plan", None))
    if not plan:
        raise SettingsError(
            f"tensor_parallel is {degree}, and transformers has no plan for {config.model_type!r} models; use "
            "data_parallel, with shard_base where one device cannot hold the model"
        )
    check_heads(name, config, degree)
    found: dict[str, str] = {}
    left = set()
    for path, module in decoder.named_modules():
        style = _style(path, plan)
        if not isinstance(module, nn.Linear) and not hasattr(module, "in_features"):
            continue
        if style in (COLUMN, GATHERED_COLUMN, ROW, SPLIT_ROW):
            by_outputs = style in (COLUMN, GATHERED_COLUMN)
            size = cast(int, module.out_features if by_outputs else module.in_features)
            if size % degree:
                raise SettingsError(
                    f"tensor_parallel is {degree}, and {name} has a linear {path} of width {size}, which {degree} "
                    "does not divide"
                )
            found[path] = style
        elif style is not None:
            left.add(re.sub(r"\d+", "*", path))
    if not found:
        raise SettingsError(
            f"tensor_parallel is {degree}, and no linear of {config.model_type!r} models can be divided here; use "
            "data_parallel, with shard_base where one device cannot hold the model"
        )
    if left:
        log.warning("linears that are whole on every rank", linears=sorted(left))
    return found


def _style(path: str, plan: Mapping[str, str]) -> str | None:
    return plan.get(re.sub(r"\d+", "*", path))
