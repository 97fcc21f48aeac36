"""Reads stored passes: the body's arrays, and the custom loss named in the configuration.

Losses are immutable, so parsed ones are cached.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tinsmith.losses import loss_id_of
from tinsmith.store.custom_losses import CustomLosses
from tinsmith.types import CustomLoss, Pass, Pending, VisionShape
from tinsmith.wire.custom_loss import read_definition
from tinsmith.wire.training import read_pass

CACHED_LOSSES = 256


class PassReader:
    def __init__(self, custom_losses: CustomLosses, vision: VisionShape | None) -> None:
        @lru_cache(maxsize=CACHED_LOSSES)
        def find(session_id: str, loss_id: str) -> CustomLoss:
            return read_definition(custom_losses.get(session_id, loss_id))

        self._find = find
        self._vision = vision

    def read(self, body: bytes, request: Pending, *, replayed: bool = False) -> Pass:
        """Raises UserError if the pass names an unknown loss."""
        pass_ = read_pass(body, request.request_id, self._vision)
        if (loss_id := loss_id_of(pass_)) is None:
            return pass_
        return replace(pass_, custom_loss=self._find(request.session_id, loss_id), replayed=replayed)
