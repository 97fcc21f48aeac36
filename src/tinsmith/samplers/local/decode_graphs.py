"""Decode steps as CUDA graphs: one launch in place of those of all kernels, which take longer than the computation.

A step in which every sequence computes one row after cached ones has the same kernels at every step; only numbers
differ: tokens, positions, where keys are cached, which adapter each row has. A graph reads them from one buffer on the
device, which a step fills with one copy. There is a graph for each padded number of rows, width of the block table, and
layout of adapters (`_Key`). A key's first step runs without a graph, which compiles its kernels; the second captures.
All graphs share one memory pool.

Padding rows write no keys, see no keys, continue the state in slot 0, and have no adapter. A graph holds addresses of
weights, of the cache and of states' slots, so `clear` must be called when these move. Prompts and images run without
graphs.

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
from tinsmith.backends.torch.lora import DeviceLoRABatch
from tinsmith.backends.torch.lora_batch import BLOCK_ROWS, Segment, list_row_blocks
from tinsmith.backends.torch.model import BaseModel
from tinsmith.samplers.local.kv_cache import KVCache
from tinsmith.samplers.local.paged_attention import SequenceRows
from tinsmith.samplers.local.state_pool import StatePool
from tinsmith.samplers.local.states import Recurrence
from tinsmith.types import I64

log = structlog.get_logger()

CAPTURE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""The numbers of rows for which graphs are captured; a step is padded to the next one."""

MIN_TABLE_WIDTH = 64
"""The narrowest block table; wider ones are powers of four times as wide."""

EXTRA_BLOCKS = 32
"""Blocks of rows beyond those that one adapter would need, since each adapter begins a new block."""

NUM_COLUMNS = 5
"""Of a row's inputs: its position, its slot in the cache, its number of keys, and the slots of the states that it
continues and leaves, which are 0 for models without states.
"""


class _Key(NamedTuple):
    num_rows: int
    width: int
    layout_id: int
    """The id of a `Layout` that the step references: hashing the layout would take longer than a launch."""


@dataclass(slots=True)
class _Step:
    """A key's buffers, and its graph from the second step on."""

    layout: Layout | None
    tokens_n: Tensor
    inputs: Tensor
    graph: torch.cuda.CUDAGraph | None = None
    hidden_nD: Tensor | None = None


class _Plan:
    """The AttentionPlan of one row for each sequence, which reads slots and tables on the device. `state_slots_2n`:
    those of the states that rows continue, and those of the states after them.
    """

    def __init__(
        self,
        cache: KVCache,
        slots_n: Tensor,
        keys_n: Tensor,
        table_nC: Tensor,
        states: StatePool,
        state_slots_2n: Sequence[Tensor],
    ) -> None:
        self._cache, self._slots_n, self._keys_n, self._table_nC = cache, slots_n, keys_n, table_nC
        self._states, self._state_slots_2n = states, state_slots_2n

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        assert self._cache.kernels is not None
        self._cache.write(layer, self._slots_n, k_TGD, v_TGD)
        kernel_inputs = q_THD, self._cache.pages(layer), self._table_nC, self._keys_n
        return self._cache.kernels.paged_attention(*kernel_inputs, key_dim=k_TGD.shape[-1], **options)

    def mix(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        slots = self._states.slots(mixer.layer, *self._state_slots_2n)
        return mixer(x_TD[:, None], tuple(range(len(x_TD))), slots)[0][:, 0]


class DecodeGraphs:
    def __init__(self, base: BaseModel, cache: KVCache, states: StatePool) -> None:
        self._base, self._cache, self._states = base, cache, states
        self._steps: dict[_Key, _Step] = {}
        self._pool: Any = None
        self._can_capture = True

    def clear(self) -> None:
        self._steps.clear()

    def hidden(
        self,
        tokens_T: Tensor,
        rows: Sequence[SequenceRows],
        lora_batch: DeviceLoRABatch,
        recurrence: Recurrence | None = None,
    ) -> Tensor | None:
        """[T, D]: final hidden states, to be used before the next call. None if these rows cannot run as a graph; then
        no state of the `recurrence` is written.
        """
        key = self._key(rows, lora_batch)
        inputs = None if key is None else self._build_inputs(key, rows, lora_batch, recurrence)
        if key is None or inputs is None:
            return None
        step, device = self._steps.get(key), self._base.device
        if is_new := step is None:
            layout = next((segment.layout for segment in lora_batch.segments if segment.layout), None)
            tokens_n = torch.zeros(key.num_rows, dtype=torch.int64, device=device)
            self._steps[key] = step = _Step(layout, tokens_n, upload(inputs, device))
        else:
            step.inputs.copy_(upload(inputs, device))
        step.tokens_n[: len(rows)].copy_(tokens_T)
        if is_new:
            return self._forward(key, step)[: len(rows)]
        if step.graph is None and not self._capture(key, step):
            return None
        assert step.graph is not None and step.hidden_nD is not None
        step.graph.replay()
        return step.hidden_nD[: len(rows)]

    def _key(self, rows: Sequence[SequenceRows], lora_batch: DeviceLoRABatch) -> _Key | None:
        if not self._can_capture or lora_batch.num_rows != len(rows) or len(rows) > CAPTURE_ROWS[-1]:
            return None
        if any(row.start == 0 or row.visible_counts is not None for row in rows):
            return None
        layouts = {id(segment.layout) for segment in lora_batch.segments if segment.adapter is not None}
        if len(layouts) > 1:
            return None
        num_blocks, width = max(len(row.blocks) for row in rows), MIN_TABLE_WIDTH
        while width < num_blocks:
            width *= 4
        num_rows = next(size for size in CAPTURE_ROWS if size >= len(rows))
        return _Key(num_rows, width, next(iter(layouts), 0))

    def _build_inputs(
        self, key: _Key, rows: Sequence[SequenceRows], lora_batch: DeviceLoRABatch, recurrence: Recurrence | None
    ) -> I64 | None:
        """The rows' columns, their blocks of rows and their block table, in this order. None if they have too many
        adapters.
        """
        row_blocks = [block for segment in lora_batch.segments for block in list_row_blocks(segment)]
        max_row_blocks = _num_blocks(key)
        if len(row_blocks) > max_row_blocks:
            return None
        num, size = len(rows), self._cache.block_size
        buffer = np.zeros(NUM_COLUMNS * key.num_rows + 4 * max_row_blocks + key.num_rows * key.width, np.int64)
        columns, blocks, table = np.split(buffer, np.cumsum([NUM_COLUMNS * key.num_rows, 4 * max_row_blocks]))
        columns_5n, table_nC = columns.reshape(NUM_COLUMNS, -1), table.reshape(key.num_rows, -1)
        if row_blocks:
            blocks[: 4 * len(row_blocks)] = np.array(row_blocks, np.int64).ravel()
        for table_C, row in zip(table_nC, rows, strict=False):
            table_C[: len(row.blocks)] = row.blocks
        start_n = np.array([row.start for row in rows], np.int64)
        columns_5n[1, num:] = -1
        columns_5n[0, :num] = start_n
        columns_5n[1, :num] = table_nC[np.arange(num), start_n // size] * size + start_n % size
        columns_5n[2, :num] = start_n + 1
        if recurrence is not None:
            columns_5n[3:, :num] = recurrence.slots_2n
        return buffer

    def _forward(self, key: _Key, step: _Step) -> Tensor:
        """[n, D]"""
        num, decoder = key.num_rows, self._base.decoder
        sizes = [*[num] * NUM_COLUMNS, 4 * _num_blocks(key), num * key.width]
        positions_n, slots_n, keys_n, *state_slots_2n, blocks, table = step.inputs.split(sizes)
        table_nC = table.int().view(num, -1)
        plan = _Plan(self._cache, slots_n, keys_n.int(), table_nC, self._states, state_slots_2n)
        tables = [] if step.layout is None else [(step.layout, blocks.view(-1, 4))]
        lora_batch = DeviceLoRABatch([Segment(0, num, None)], tables=tables)
        forward = self._base.forward_modules if decoder is None else decoder.hidden
        return forward(step.tokens_n, positions_n, plan, lora_batch)

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
                    step.hidden_nD = self._forward(key, step)
                finally:
                    graph.capture_end()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning("decode steps run without CUDA graphs", reason=str(error).partition("\n")[0][:200])
            self._can_capture = False
            self.clear()
            return False
        current.wait_stream(stream)
        step.graph = graph
        return True


def _num_blocks(key: _Key) -> int:
    """The most blocks of rows that a key's buffer can hold."""
    return min(key.num_rows, -(-key.num_rows // BLOCK_ROWS) + EXTRA_BLOCKS)
