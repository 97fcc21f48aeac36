"""The deltas of adapters by one matmul after another, for tests only."""

from __future__ import annotations

from torch import Tensor

from tinsmith.backends.torch.lora import LoRADelta
from tinsmith.backends.torch.lora_batch import LoRABatch


def add_deltas_(delta: LoRADelta, y_TO: Tensor, x_TI: Tensor, lora_batch: LoRABatch) -> None:
    """Add each segment's delta to y: the oracle of `LoRADelta.forward_`."""
    for start, stop, adapter in lora_batch.segments:
        for name, columns in zip(delta._names, delta._columns, strict=True):
            if adapter is not None and name in adapter.compute:
                a_rI, b_Or = adapter.compute[name]
                y_TO[start:stop, columns] += adapter.scale * (x_TI[start:stop] @ a_rI.t() @ b_Or.t())
