"""Decode steps as CUDA graphs: one launch in place of a thousand, whose launching takes longer than their computing.

A step in which every sequence computes one row after cached ones has the same kernels at every step; only numbers
differ: tokens, positions, where keys are cached, which adapter each row has. A graph reads them from one buffer on the
device, which a step fills with one copy. There is a graph for each padded number of rows, width of the block table, and
layout of adapters (`_Key`). A key's first step runs without a graph, which compiles its kernels; the second captures.
All graphs share one memory pool.

Padding rows write no keys, see no keys, and have no adapter. A graph holds addresses of weights and of the cache, so
`clear` must be called when these move. Layers are those of `transformer.Decoder`; whatever else, such as prompts,
images, recurrent states and the modules of other families, runs without graphs.

Letters: n rows, C blocks of a table, B blocks of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import numpy as np
import structlog
import torch
from torch import Tensor

from tinsmith.backends.torch.adapters import Layout
from tinsmith.backends.torch.attention import AttentionOptions, Mixer
from tinsmith.backends.torch.host import upload
from tinsmith.backends.torch.lora import DeviceRouting
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.routing import BLOCK_ROWS, Segment, blocks_of
from tinsmith.samplers.local.kv_cache import KVCache
from tinsmith.samplers.local.paged_attention import Rows
from tinsmith.types import I64

log = structlog.get_logger()

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of rows, to the next of which a step is padded."""

MIN_WIDTH = 64
"""The narrowest block table; wider ones are powers of four times as wide."""

MORE_BLOCKS = 32
"""Blocks of rows beyond those of one adapter: each adapter may begin another."""


class _Key(NamedTuple):
    num_rows: int
    width: int
    layout_id: int
    """Of an object that the step keeps; a layout's hash takes longer than a step's launch."""


@dataclass(slots=True)
class _Step:
    """A key's buffers, and its graph from the second step on."""

    layout: Layout | None
    tokens_n: Tensor
    given: Tensor
    graph: torch.cuda.CUDAGraph | None = None
    hidden_nD: Tensor | None = None


class _Plan:
    """The AttentionPlan of one row for each sequence, whose places are read on the device."""

    def __init__(self, cache: KVCache, slots_n: Tensor, keys_n: Tensor, table_nC: Tensor) -> None:
        self._cache, self._slots_n, self._keys_n, self._table_nC = cache, slots_n, keys_n, table_nC

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        assert self._cache.kernels is not None
        self._cache.write(layer, self._slots_n, k_TGD, v_TGD)
        given = q_THD, self._cache.pages(layer), self._table_nC, self._keys_n
        return self._cache.kernels.paged_attention(*given, key_dim=k_TGD.shape[-1], **options)

    def mix(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        raise NotImplementedError("layers with a state run without graphs")


class DecodeGraphs:
    def __init__(self, base: BaseModel, cache: KVCache) -> None:
        self._base, self._cache = base, cache
        self._steps: dict[_Key, _Step] = {}
        self._pool: Any = None
        self._works = True

    def clear(self) -> None:
        self._steps.clear()

    def hidden(self, tokens_T: Tensor, rows: Sequence[Rows], routing: DeviceRouting) -> Tensor | None:
        """[T, D]: final hidden states, to be used before the next call. None if these rows need another way."""
        key = self._key(rows, routing)
        given = None if key is None else self._given(key, rows, routing)
        if key is None or given is None:
            return None
        step, device = self._steps.get(key), self._base.device
        if is_new := step is None:
            layout = next((segment.layout for segment in routing.segments if segment.layout), None)
            tokens_n = torch.zeros(key.num_rows, dtype=torch.int64, device=device)
            self._steps[key] = step = _Step(layout, tokens_n, upload(given, device))
        else:
            step.given.copy_(upload(given, device))
        step.tokens_n[: len(rows)].copy_(tokens_T)
        if is_new:
            return self._through(key, step)[: len(rows)]
        if step.graph is None and not self._capture(key, step):
            return None
        assert step.graph is not None and step.hidden_nD is not None
        step.graph.replay()
        return step.hidden_nD[: len(rows)]

    def _key(self, rows: Sequence[Rows], routing: DeviceRouting) -> _Key | None:
        if not self._works or routing.num_rows != len(rows) or len(rows) > ROWS[-1]:
            return None
        if any(row.start == 0 or row.seen is not None for row in rows):
            return None
        layouts = {id(segment.layout) for segment in routing.segments if segment.adapter is not None}
        if len(layouts) > 1:
            return None
        most, width = max(len(row.blocks) for row in rows), MIN_WIDTH
        while width < most:
            width *= 4
        num_rows = next(number for number in ROWS if number >= len(rows))
        return _Key(num_rows, width, next(iter(layouts), 0))

    def _given(self, key: _Key, rows: Sequence[Rows], routing: DeviceRouting) -> I64 | None:
        """Positions, slots, numbers of keys, blocks of rows and the block table of the rows, in this order. None if
        the rows have too many adapters.
        """
        blocks, most = [block for segment in routing.segments for block in blocks_of(segment)], _num_blocks(key)
        if len(blocks) > most:
            return None
        num, size = len(rows), self._cache.block_size
        found = np.zeros(3 * key.num_rows + 4 * most + key.num_rows * key.width, np.int64)
        places, own_blocks, table = np.split(found, np.cumsum([3 * key.num_rows, 4 * most]))
        places_3n, table_nC = places.reshape(3, -1), table.reshape(key.num_rows, -1)
        if blocks:
            own_blocks[: 4 * len(blocks)] = np.array(blocks, np.int64).ravel()
        for own_C, row in zip(table_nC, rows, strict=False):
            own_C[: len(row.blocks)] = row.blocks
        start_n = np.array([row.start for row in rows], np.int64)
        places_3n[1, num:] = -1
        places_3n[0, :num] = start_n
        places_3n[1, :num] = table_nC[np.arange(num), start_n // size] * size + start_n % size
        places_3n[2, :num] = start_n + 1
        return found

    def _through(self, key: _Key, step: _Step) -> Tensor:
        """[n, D]"""
        num, decoder = key.num_rows, self._base.decoder
        assert decoder is not None
        sizes = [num, num, num, 4 * _num_blocks(key), num * key.width]
        positions_n, slots_n, keys_n, blocks, table = step.given.split(sizes)
        plan = _Plan(self._cache, slots_n, keys_n.int(), table.int().view(num, -1))
        tables = [] if step.layout is None else [(step.layout, blocks.view(-1, 4))]
        routing = DeviceRouting([Segment(0, num, None)], tables=tables)
        return decoder.hidden(step.tokens_n, positions_n, plan, routing)

    def _capture(self, key: _Key, step: _Step) -> bool:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._base.device)
        stream = torch.cuda.Stream(self._base.device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                # Other threads of the engine may copy meanwhile.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    step.hidden_nD = self._through(key, step)
                finally:
                    graph.capture_end()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning("decode steps run without CUDA graphs", reason=str(error).partition("\n")[0][:200])
            self._works = False
            self.clear()
            return False
        current.wait_stream(stream)
        step.graph = graph
        return True


def _num_blocks(key: _Key) -> int:
    """Blocks of rows that a key's buffer has room for."""
    return min(key.num_rows, -(-key.num_rows // BLOCK_ROWS) + MORE_BLOCKS)
