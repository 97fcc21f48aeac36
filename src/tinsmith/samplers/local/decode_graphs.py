"""Decode steps as CUDA graphs: one launch in place of those of all kernels, which take longer than the computation.

A step in which every sequence computes one row after cached ones has the same kernels at every step; only numbers
differ: tokens, positions, where keys are cached, which adapter each row has. A graph reads them from one buffer on the
device, which a step fills with one copy. There is a graph for each padded number of rows, width of the block table, and
set of layouts of adapters (`_Key`). Those without adapters are captured at load, the largest first, since all graphs
share one memory pool; others when they come a second time, since their first step compiles kernels.

Layers are whatever the model has: `transformer.Decoder` or transformers' modules. What a graph cannot hold runs without
one, is counted by its reason (`uncaptured_steps`), and is tried again after RETRY_STEPS steps. Prompts and images run
without graphs.

Padding rows write no keys, see no keys, continue the state in slot 0, and have no adapter. A graph holds addresses of
weights, of the cache and of states' slots, so `clear` must be called when these move.

Letters: n rows, C blocks of a table, B blocks of rows.
"""

from __future__ import annotations

from collections import Counter
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
from tinsmith.backends.torch.lora_batch import BLOCK_ROWS, Segment
from tinsmith.backends.torch.model import BaseModel
from tinsmith.samplers.local.kv_cache import KVCache
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

MAX_LAYOUTS = 4
"""Layouts of adapters in a graph: each takes launches of its own in every linear."""

RETRY_STEPS = 1000
"""Steps without graphs after one could not be captured."""

NUM_COLUMNS = 5
"""Of a row's inputs: its position, its slot in the cache, its number of keys, and the slots of the states that it
continues and leaves, which are 0 for models without states.
"""


class _Key(NamedTuple):
    num_rows: int
    width: int
    layout_ids: tuple[int, ...]
    """The ids of the layouts that the step references: hashing a layout would take longer than a launch."""


class _HostInputs:
    """A key's inputs on the host: the rows' columns, each layout's blocks of rows, and the rows' block table, in this
    order. What a step has in common with the one before is not written again.
    """

    def __init__(self, key: _Key) -> None:
        self.buffer = np.zeros(sum(_input_sizes(key)), np.int64)
        num_columns, num_blocks = NUM_COLUMNS * key.num_rows, 4 * _num_blocks(key) * len(key.layout_ids)
        columns, blocks, table = np.split(self.buffer, np.cumsum([num_columns, num_blocks]))
        self._columns_5n, self._table_nC = columns.reshape(NUM_COLUMNS, -1), table.reshape(key.num_rows, -1)
        self._columns_5n[1] = -1
        self._blocks_LB4 = blocks.reshape(len(key.layout_ids), _num_blocks(key), 4)
        self._lora_batch: DeviceLoRABatch | None = None
        self._tabled_blocks: list[Sequence[int]] = [()] * key.num_rows
        self._num_tabled = [0] * key.num_rows

    def set_adapters(self, lora_batch: DeviceLoRABatch, layouts: Sequence[Layout]) -> bool:
        """False if a layout has more blocks of rows than there is room for."""
        if lora_batch is self._lora_batch:
            return True
        self._lora_batch = None
        for blocks_B4, layout in zip(self._blocks_LB4, layouts, strict=True):
            blocks = lora_batch.list_row_blocks(layout)
            if len(blocks) > len(blocks_B4):
                return False
            blocks_B4[: len(blocks)] = blocks
            blocks_B4[len(blocks) :] = 0
        self._lora_batch = lora_batch
        return True

    def set_rows(self, starts: Sequence[int], blocks: Sequence[Sequence[int]], block_size: int) -> None:
        """Each row's position, and the blocks of its sequence. The same list of blocks has at most grown."""
        num = len(starts)
        for row, row_blocks in enumerate(blocks):
            first = self._num_tabled[row] if row_blocks is self._tabled_blocks[row] else 0
            if first < len(row_blocks):
                self._table_nC[row, first : len(row_blocks)] = row_blocks[first:]
                self._tabled_blocks[row], self._num_tabled[row] = row_blocks, len(row_blocks)
        start_n = np.array(starts, np.int64)
        position_n, slot_n, num_keys_n = self._columns_5n[:3]
        position_n[:num], num_keys_n[:num] = start_n, start_n + 1
        slot_n[:num] = self._table_nC[np.arange(num), start_n // block_size] * block_size + start_n % block_size
        position_n[num:], slot_n[num:], num_keys_n[num:] = 0, -1, 0

    def set_states(self, slots_2n: I64) -> None:
        """The slots of the states that rows continue and leave."""
        self._columns_5n[3:, : slots_2n.shape[1]] = slots_2n
        self._columns_5n[3:, slots_2n.shape[1] :] = 0


@dataclass(slots=True)
class _Step:
    """A key's buffers, and its graph once it is captured."""

    layouts: Sequence[Layout]
    host_inputs: _HostInputs
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
        self._paused_steps = 0
        self.uncaptured_steps: Counter[str] = Counter()
        """Steps of one row for each sequence that no graph ran, by reason."""

    def clear(self) -> None:
        self._steps.clear()

    @torch.inference_mode()
    def capture_sizes(self, max_rows: int) -> None:
        """Capture the graphs of up to `max_rows` rows without adapters, by steps of padding alone."""
        try:
            for num_rows in sorted((size for size in CAPTURE_ROWS if size < 2 * max_rows), reverse=True):
                key = _Key(num_rows, MIN_TABLE_WIDTH, ())
                step = self._steps[key] = self._make_step(key, ())
                self._forward(key, step)
                if not self._capture(key, step):
                    return
        except torch.OutOfMemoryError:
            log.warning("memory is too short for the graphs of many rows; they are captured when rows come")
            self.clear()

    def hidden(
        self,
        tokens_T: Tensor,
        starts: Sequence[int],
        blocks: Sequence[Sequence[int]],
        lora_batch: DeviceLoRABatch,
        recurrence: Recurrence | None = None,
    ) -> Tensor | None:
        """[T, D]: final hidden states, to be used before the next call, of one row for each sequence, which continues
        its first `starts` tokens in these `blocks`. None if these rows cannot run as a graph; then no state of the
        `recurrence` is written.
        """
        if self._paused_steps:
            self._paused_steps -= 1
            return self._refuse("capture failed")
        layouts = sorted(lora_batch.list_layouts(), key=id)
        if len(starts) > CAPTURE_ROWS[-1]:
            return self._refuse("many rows")
        if len(layouts) > MAX_LAYOUTS:
            return self._refuse("many layouts")
        key = _key(len(starts), max(map(len, blocks)), layouts)
        is_new = key not in self._steps
        step = self._make_step(key, layouts) if is_new else self._steps[key]
        if not step.host_inputs.set_adapters(lora_batch, layouts):
            return self._refuse("many adapters")
        step.host_inputs.set_rows(starts, blocks, self._cache.block_size)
        if recurrence is not None:
            step.host_inputs.set_states(recurrence.slots_2n)
        step.inputs.copy_(upload(step.host_inputs.buffer, self._base.device))
        step.tokens_n[: len(starts)].copy_(tokens_T)
        if is_new:
            self._steps[key] = step
            self._refuse("first of its kind")
            return self._forward(key, step)[: len(starts)]
        if step.graph is None and not self._capture(key, step):
            return self._refuse("capture failed")
        assert step.graph is not None and step.hidden_nD is not None
        step.graph.replay()
        return step.hidden_nD[: len(starts)]

    def _refuse(self, reason: str) -> None:
        self.uncaptured_steps[reason] += 1

    def _make_step(self, key: _Key, layouts: Sequence[Layout]) -> _Step:
        """With inputs of padding rows alone."""
        host_inputs = _HostInputs(key)
        tokens_n = torch.zeros(key.num_rows, dtype=torch.int64, device=self._base.device)
        inputs = upload(host_inputs.buffer.copy(), self._base.device)
        return _Step(layouts, host_inputs, tokens_n, inputs)

    def _forward(self, key: _Key, step: _Step) -> Tensor:
        """[n, D]"""
        num = key.num_rows
        *parts, table = step.inputs.split(_input_sizes(key))
        positions_n, slots_n, keys_n, *state_slots_2n = parts[:NUM_COLUMNS]
        table_nC = table.int().view(num, -1)
        plan = _Plan(self._cache, slots_n, keys_n.int(), table_nC, self._states, state_slots_2n)
        tables = [(layout, part.view(-1, 4)) for layout, part in zip(step.layouts, parts[NUM_COLUMNS:], strict=True)]
        lora_batch = DeviceLoRABatch([Segment(0, num, None)], tables=tables)
        return self._base.decode_rows(step.tokens_n, positions_n, plan, lora_batch)

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
            reason = str(error).partition("\n")[0][:200]
            log.warning("a decode step runs without a CUDA graph", rows=key.num_rows, reason=reason)
            self._paused_steps = RETRY_STEPS
            self.clear()
            return False
        current.wait_stream(stream)
        step.graph = graph
        return True


def _key(num_rows: int, num_blocks: int, layouts: Sequence[Layout]) -> _Key:
    """Of so many rows, whose sequences have up to `num_blocks` blocks."""
    width = MIN_TABLE_WIDTH
    while width < num_blocks:
        width *= 4
    return _Key(next(size for size in CAPTURE_ROWS if size >= num_rows), width, tuple(map(id, layouts)))


def _input_sizes(key: _Key) -> list[int]:
    """The sizes of the parts of a key's inputs."""
    num, blocks_size = key.num_rows, 4 * _num_blocks(key)
    return [*[num] * NUM_COLUMNS, *[blocks_size] * len(key.layout_ids), num * key.width]


def _num_blocks(key: _Key) -> int:
    """The most blocks of rows of a layout that a key's buffer can hold."""
    return min(key.num_rows, -(-key.num_rows // BLOCK_ROWS) + EXTRA_BLOCKS)
