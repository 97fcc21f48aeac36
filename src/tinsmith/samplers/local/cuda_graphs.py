"""Decode steps of fixed shapes: captured once for each size of rows and of context, then launched.

On a GPU a decode step of a small batch is a thousand kernels of a few microseconds, and Python is slower than they are.
So a step's rows are padded to a size, all that differs from step to step goes into one tensor of numbers at a fixed
address (tokens, positions, where keys go, block tables, slots of adapters), and the layers that are written out run
over it. What was captured for a size serves every later step of it: sequences come and go, versions are published,
without another graph. When the cache's tensors or the adapters' slots move, graphs are forgotten.

Attention gathers each row's blocks, as many as the size of context has, and masks what is not there. That reads and
writes keys and values once more than a kernel that follows the tables would, and of the whole size, which is at most
half as long again as the longest context; steps whose contexts are too unlike are left to others (`MOST_WASTE`).

Rows that pad are nobody's: they read the null block, and what they would write is made zero and lands there, so that it
stays zero whatever they compute. No row meets another's keys or adapter.

A capture that fails is logged once, and nothing is tried again. Called by the sampler, in one thread.

Letters: T rows of a size, C blocks of a table, K = C * block size positions, S slots, D hidden size; n rows, H query
heads, G key heads, R = H / G.

How a run of kernels of fixed shapes at fixed addresses is captured, to be launched again without Python.

A `Capture` is given a run and hands back its launch. The run reads and writes tensors that are there before it, and
makes its result; whoever launches it has changed what is in those tensors, never where they are. What a run reads from
Python (numbers, shapes, which tensors) is as it was at the capture, for ever: on CUDA a launch is the kernels alone.
So a run must look at nothing that lies on the device, and must do no harm when it is done several times over.

`plain` captures nothing and runs it again: for CPUs, where the tests hold it against a recording of each kernel.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tinsmith.backends.torch.fused_linear import Adding
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.slots import SLOTS_BYTES, NoWork, SlotWork, is_grouped_on, rank_class
from tinsmith.backends.torch.transformer import Decoder
from tinsmith.samplers.local.kv_cache import KVCache
from tinsmith.samplers.local.paged_attention import visible
from tinsmith.samplers.local.scheduler import Span
from tinsmith.types import I64

Run = Callable[[], Tensor]
"""Its result is overwritten by the next launch of any run that was captured by the same `Capture`."""

Capture = Callable[[Run], Run]

WARM_UPS = 2
"""Runs before a capture, in which libraries load kernels and take their workspaces: neither may be captured."""


def plain(run: Run) -> Run:
    return run


class CudaCapture:
    """CUDA graphs that share one pool of memory: at any time only one of them runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Run) -> Run:
        with torch.cuda.device(self._device):
            self._warm_up(run)
            graph = torch.cuda.CUDAGraph()
            # Other threads copy and allocate meanwhile; what they do is not captured, and is no mistake.
            with torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):
                result = run()

        def launch() -> Tensor:
            graph.replay()
            return result

        return launch

    def _warm_up(self, run: Run) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(self._stream)


def capture_for(device: torch.device) -> Capture | None:
    """None where capturing gains nothing."""
    return CudaCapture(device) if device.type == "cuda" else None


log = structlog.get_logger()

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sizes of rows. Steps of more go another way."""

LEAST_CONTEXT = 128
"""Positions of the smallest size of context; the others are 1.5, 2, 3, 4, 6, ... times as long."""

MOST_WASTE = 4
"""A size may have so many positions for each that is somebody's, or SMALL positions in all."""

SMALL = 1 << 15

MOST_KEPT = 48
"""Graphs. The one that was used longest ago goes first."""

SLOTS_SHARE = 0.05
"""The adapters' slots of one rank may have so much of what a budget leaves beside the base model."""

NUMBERS = 4
"""Of a row, beside its table: token, position, where its keys go, slot."""


class _Size(NamedTuple):
    rows: int
    blocks: int
    rank: int  # of the slots; 0: no row has an adapter


@dataclass(slots=True)
class _Graph:
    """`numbers` and `ends_S` are what its run reads; it holds as long as `generations` are what they were."""

    numbers: Tensor
    ends_S: Tensor
    generations: tuple[int, int]
    launch: Run


class DecodeGraphs:
    """Use `of`."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, capture: Capture, device: torch.device, slots_bytes: int
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._capture = capture
        self._device = device
        self._slots = decoder.slots
        self._slots.max_bytes = slots_bytes
        self._grouped = is_grouped_on(device)
        self._kept: OrderedDict[_Size, _Graph] = OrderedDict()
        self._failed = False
        self.num_captures = 0

    @classmethod
    def of(
        cls, base: BaseModel, cache: KVCache, capture: Capture | None, *, room_bytes: float = float("inf")
    ) -> DecodeGraphs | None:
        """None without a capture, or for a model whose layers are not written out."""
        if capture is None or base.written_out is None:
            return None
        slots_bytes = int(min(SLOTS_BYTES, SLOTS_SHARE * room_bytes))
        return cls(base.written_out, cache, capture, base.device, slots_bytes)

    @property
    def num_bytes(self) -> int:
        """Of slots and numbers. The intermediate results of all graphs share one place, which is a step's."""
        numbers = sum(kept.numbers.nbytes + kept.ends_S.nbytes for kept in self._kept.values())
        return numbers + self._slots.num_bytes

    def drop(self) -> None:
        """Hold nothing, until the next step."""
        self._kept.clear()
        self._slots.drop()

    def compute(self, spans: Seq[Span]) -> tuple[list[Span], Tensor] | None:
        """Final hidden states of spans that decode a token each: [n, D], overwritten by the next call, and the spans in
        the order of its rows. None if they have to go another way.
        """
        if self._failed or not spans or len(spans) > ROWS[-1]:
            return None
        num_keys = np.array([span.stop for span in spans])
        rows = next(size for size in ROWS if size >= len(spans))
        context = _context_for(int(num_keys.max()))
        if rows * context > max(SMALL, MOST_WASTE * int(num_keys.sum())):
            return None
        with torch.inference_mode(False), torch.no_grad():
            return self._compute(spans, rows, -(-context // self._cache.block_size))

    def _compute(self, spans: Seq[Span], rows: int, blocks: int) -> tuple[list[Span], Tensor] | None:
        adapters = {id(a): a for span in spans if (a := span.sequence.request.weights.adapter) is not None}
        rank = max(map(rank_class, adapters.values()), default=0)
        slot_of: dict[int, int] = {}
        if rank:
            placed = self._slots.of(rank).place(list(adapters.values()))
            if placed is None:
                return None
            slot_of = dict(zip(adapters, placed, strict=True))
        last = self._slots.of(rank).num_slots if rank else 0
        slots = [slot_of.get(id(span.sequence.request.weights.adapter), last) for span in spans]
        order = np.argsort(slots, kind="stable")
        spans = [spans[at] for at in order]
        size = _Size(rows, blocks, rank)
        numbers = _numbers_of(spans, np.array(slots)[order], size, last, self._cache.block_size)
        return self._run(size, spans, numbers, last)

    def _run(self, size: _Size, spans: list[Span], numbers: I64, last: int) -> tuple[list[Span], Tensor] | None:
        generations = (self._cache.generation, self._slots.of(size.rank).generation if size.rank else 0)
        graph = self._kept.get(size)
        if graph is None or graph.generations != generations:
            self._forget_stale()
            graph = self._new(size, last, generations)
        _fill(graph, numbers, size, last)
        if graph.launch is _nothing:
            try:
                graph.launch = self._capture(self._run_of(size, graph))
            except RuntimeError as error:
                log.warning("decode steps cannot be captured and are run one kernel at a time", error=str(error)[:300])
                self._failed = True
                self.drop()
                return None
            self.num_captures += 1
        self._kept.move_to_end(size)
        return spans, graph.launch()[: len(spans)]

    def _new(self, size: _Size, last: int, generations: tuple[int, int]) -> _Graph:
        numbers = torch.zeros(size.rows * (NUMBERS + size.blocks), dtype=torch.int64, device=self._device)
        ends_S = torch.zeros(last + 1, dtype=torch.int32, device=self._device)
        self._kept[size] = graph = _Graph(numbers, ends_S, generations, _nothing)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return graph

    def _run_of(self, size: _Size, graph: _Graph) -> Run:
        token_T, position_T, at_T, slot_T = graph.numbers[: NUMBERS * size.rows].view(NUMBERS, -1)
        table_TC = graph.numbers[NUMBERS * size.rows :].view(size.rows, -1)
        decoder, cache = self._decoder, self._cache
        work: Adding = NoWork()
        if size.rank:
            work = SlotWork(self._slots.of(size.rank), slot_T, graph.ends_S if self._grouped else None)

        def run() -> Tensor:
            with torch.inference_mode():
                return decoder.through(token_T, position_T, BlocksPlan(cache, at_T, table_TC, position_T), work)

        return run

    def _forget_stale(self) -> None:
        """Graphs of what has moved."""
        for size, kept in list(self._kept.items()):
            slots = self._slots.of(size.rank).generation if size.rank else 0
            if kept.generations != (self._cache.generation, slots):
                del self._kept[size]


def _nothing() -> Tensor:
    """Of a graph that is still to be made."""
    raise AssertionError("never captured")


def _context_for(num_keys: int) -> int:
    power = LEAST_CONTEXT
    while True:
        for size in (power, power * 3 // 2):
            if size >= num_keys:
                return size
        power *= 2


def _numbers_of(spans: Seq[Span], slots: I64, size: _Size, last: int, block_size: int) -> I64:
    """What a step's rows are, as a graph reads it; rows that pad are all zeros but for their slot."""
    numbers = np.zeros(size.rows * (NUMBERS + size.blocks), np.int64)
    token_T, position_T, at_T, slot_T = numbers[: NUMBERS * size.rows].reshape(NUMBERS, -1)
    table_TC = numbers[NUMBERS * size.rows :].reshape(size.rows, -1)
    num = len(spans)
    slot_T[:num], slot_T[num:] = slots, last
    position_T[:num] = [span.start for span in spans]
    for row, (sequence, start, _) in enumerate(spans):
        token_T[row] = sequence.tokens_T[start]
        at_T[row] = sequence.blocks[start // block_size] * block_size + start % block_size
        used = sequence.blocks[: start // block_size + 1]
        table_TC[row, : len(used)] = used
    return numbers


def _fill(graph: _Graph, numbers: I64, size: _Size, last: int) -> None:
    graph.numbers.copy_(torch.from_numpy(numbers))
    if size.rank:
        slot_T = numbers[3 * size.rows : NUMBERS * size.rows]
        ends_S = np.bincount(slot_T, minlength=last + 1).cumsum().astype(np.int32)
        graph.ends_S.copy_(torch.from_numpy(ends_S))


class BlocksPlan:
    """The AttentionPlan of rows that each decode one token, behind what the blocks of their tables hold."""

    def __init__(self, cache: KVCache, at_T: Tensor, table_TC: Tensor, position_T: Tensor) -> None:
        self._cache = cache
        self._at_T = at_T
        self._table_TC = table_TC
        self._position_T = position_T
        self._pads_T11 = (at_T == 0)[:, None, None]
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        if softcap is not None or sinks_H is not None:
            raise ValueError("layers that are written out cap no scores and have no sinks")
        k_TGD, v_TGD = (x.masked_fill(self._pads_T11, 0.0) for x in (k_TGD, v_TGD))
        self._cache.write(layer, self._at_T, k_TGD, v_TGD)
        k_TGKD, v_TGKD = self._cache.read(layer, self._table_TC)
        # Query heads of one key head act as its rows, as in `paged`.
        q_TGRD = q_THD.reshape(len(q_THD), k_TGKD.shape[1], -1, q_THD.shape[2])
        mask = self._mask(window, k_TGKD)
        out_TGRD = scaled_dot_product_attention(q_TGRD, k_TGKD, v_TGKD, mask, scale=scale)
        return out_TGRD.reshape(len(q_THD), q_THD.shape[1], -1)

    def _mask(self, window: int | None, k_TGKD: Tensor) -> Tensor:
        """[T, 1, 1, K]: 0 where a row sees a position, else -inf. Made once for all layers."""
        num_keys = k_TGKD.shape[2]
        if window is not None and window >= num_keys:
            window = None
        if window not in self._masks:
            self._masks[window] = visible(self._position_T[:, None], num_keys, window, k_TGKD.dtype)
        return self._masks[window]
