"""A model's memory on one device: bytes of base, adapters, activations and KV cache, by arithmetic.

The figures are those of `backends.torch` and `samplers`: packed micro-batches, logits in chunks, adapters in float32
plus a copy in the base's dtype, a KV cache for whole contexts (windows do not shorten it, and latent attention caches
what every head sees). The backend uses the same `Activations` when it has a budget. Measurements lie within `FACTOR` of
these figures (tests/unit/test_plan.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from tinsmith.plan.architecture import Architecture, Linear

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
NF4_BLOCK = 64
"""Weights that share a scale in nf4."""

QUANTISED_BYTES: Mapping[str, float] = {"int8": 1.0, "nf4": 0.5 + 4 / NF4_BLOCK, "fp8": 1.0}
"""Bytes per parameter of a quantised linear, including scales."""

MICRO_BATCH = {False: 1024, True: 8192}
"""Tokens of a micro-batch on a CPU and with CUDA, which takes twice as many where their activations take little memory;
a longer sequence gets its own. A CPU gains little from larger ones, which have more activations and delay decoding.
"""

MICRO_BATCHES_PER_STAGE = 2
"""Micro-batches of a step for each stage of a pipeline, where its sequences allow: P stages wait (P-1)/(3P-1) of it."""

LOGITS = {False: 2**22, True: 2**30}
"""Float32 logits that exist at once, on a CPU and with CUDA. A CPU reads them several times, from its cache."""

MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 128, {False: 1024, True: 2048}
"""Bounds for the rows whose logits exist at once. Smaller chunks make inefficient products, larger ones gain nothing. A
GPU reads the unembedding twice for each, and the gradient of 2,048 hidden states of 1,024 is one tile for each
multiprocessor of a large one.
"""

LOGIT_COPIES = {False: 3.0, True: 1.5}
"""Float32 copies of the logits: logits, logarithms and gradient; with CUDA no logarithms, and a bfloat16 gradient."""

SAVED_PER_LINEAR = 2.0
"""Elements that modules save for backward per input and output of a linear, including those that backward itself
needs.
"""

FACTOR = 1.5
"""Measured peaks are within this factor of these figures, either way."""

MAX_PACKED_BYTES = 2**28
"""Bytes of weights up to which a CPU keeps a second, packed copy for decoding; larger models gain little by it."""

BLOCKS_SHARE = 0.5
"""Share of the memory for keys and values under a budget: growing tensors exist twice while they are copied."""

STATES_PER_SEQUENCE = 3
"""States of a running sequence in a step: before it, after it, and at its answer's last block."""

RESERVED_SHARE = 0.04
RESERVED_BYTES = {False: 512 * 2**20, True: 1536 * 2**20}
"""Other device memory of a process and its libraries: code, CUDA's context, communication, fragmentation."""


def choose_dtype(requested: str, *, cuda: bool, stored: str) -> str:
    """The dtype of the base weights. `auto` is bfloat16 on CUDA, and on a CPU with instructions that multiply bfloat16
    if the checkpoint is stored in it: half the memory, and faster than float32. Else it is float32.
    """
    if requested != "auto":
        return requested
    return "bfloat16" if cuda or (stored == "bfloat16" and cpu_multiplies_bfloat16()) else "float32"


@cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether Linux lists such instructions (avx512_bf16, amx_bf16; bf16 on Arm). Emulated products are slower than
    those of float32.
    """
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


@dataclass(frozen=True, slots=True)
class Activations:
    """Elements that training saves per token between forward and backward: `saved` in all layers, or, with
    recomputation, the `inputs` of all layers and one layer's activations (`layer`). The backward of a layer takes as
    much again; by then the logits are freed.
    """

    saved: float
    layer: float
    inputs: float
    dtype_bytes: int
    logits_bytes: float

    @property
    def token_bytes(self) -> float:
        """Bytes of one token, without recomputation and logits."""
        return self.dtype_bytes * (self.saved + self.layer)

    def num_bytes(self, tokens: int, *, recompute: bool) -> int:
        saved, working = (self.inputs, 2 * self.layer) if recompute else (self.saved, self.layer)
        bytes_per_element = tokens * self.dtype_bytes
        return int(bytes_per_element * saved + max(bytes_per_element * working, self.logits_bytes))


def chunk_rows(vocab: int, *, cuda: bool) -> int:
    """Rows whose logits exist at once."""
    return min(max(LOGITS[cuda] // vocab, MIN_CHUNK_ROWS), MAX_CHUNK_ROWS[cuda])


def logits_bytes(vocab: int, *, cuda: bool, tensor: int = 1) -> float:
    copies = LOGIT_COPIES[cuda] * chunk_rows(vocab, cuda=cuda)
    return 4.0 * copies * (vocab / tensor if vocab % tensor == 0 else vocab)


def activations(
    model: Architecture, *, dtype: str, cuda: bool, tensor: int = 1, stages: int = 1, context: int = 1
) -> Activations:
    """With tensor parallelism a device keeps its share of the inputs or outputs of split linears. A stage keeps its
    layers' for as many micro-batches as there are stages from it on; those of the stage that keeps most are counted.
    Some layers with a state compute the rows of all `context` ranks.
    """
    num_parts = context if model.is_whole else 1
    saved = sum(
        _linear_activations(linear, tensor) * (num_parts if linear.keeps_state else 1) for linear in model.linears
    )
    if model.has_fused_layers:
        saved = _fused_activations(model, tensor)
    saved += num_parts * model.mixer_activations * 4 / DTYPE_BYTES[dtype]
    layers = max((stages - stage) * count for stage, count in enumerate(stages_of(model, stages)))
    return Activations(
        saved=saved * layers / model.layers,
        layer=saved / model.layers,
        inputs=layers * model.hidden,
        dtype_bytes=DTYPE_BYTES[dtype],
        logits_bytes=logits_bytes(model.vocab, cuda=cuda, tensor=tensor),
    )


def tower_bytes(activations: float, tokens: int, *, dtype: str) -> int:
    """Bytes of a vision tower for an image of `tokens`, each with `activations` (`Architecture.tower_activations`)."""
    return int(activations * tokens * DTYPE_BYTES[dtype])


def _linear_activations(linear: Linear, tensor: int) -> float:
    """Elements per token that a linear's layers save on one of `tensor` devices."""
    # Tensor ranks send different rows to experts, and cut other linears.
    inputs = linear.inputs / (tensor if linear.split_dim == "inputs" or linear.copies > 1 else 1)
    outputs = linear.outputs / (tensor if linear.split_dim == "outputs" or linear.copies > 1 else 1)
    return SAVED_PER_LINEAR * (inputs + outputs) * linear.layers * linear.active


def _fused_activations(model: Architecture, tensor: int) -> float:
    """Elements per token that fused layers save. Per layer: its input and the sum after attention; queries, keys and
    values, the first two also rotated, and attention's output; gate and up. Norms and the product of gate and up are
    computed again.
    """
    queries, keys = model.heads * model.key_dim, model.key_heads * model.key_dim
    wide = sum(linear.outputs for linear in model.linears if linear.name.endswith(("gate_proj", "up_proj")))
    return model.layers * (2 * model.hidden + (3 * queries + 3 * keys + wide) / tensor)


def stages_of(model: Architecture, stages: int) -> tuple[int, ...]:
    """The number of layers of each stage."""
    if stages == 1:
        return (model.layers,)
    first, *later_sizes = model.layer_sizes
    sizes = [first + model.embedding_parameters, *later_sizes]
    sizes[-1] += model.embedding_parameters
    return split_layers(tuple(sizes), stages)


def base_bytes(
    model: Architecture,
    *,
    dtype: str,
    quantize: str,
    tensor: int = 1,
    shards: int = 1,
    experts: int = 1,
    stages: int = 1,
) -> int:
    """Frozen weights on one of `tensor` devices of the largest stage; with `shards`, a layer is complete only while it
    is computed. With `experts`, a device has only so many parts of the routed ones of its stage, which are then neither
    cut nor sharded. Embeddings, norms, routers and vision towers are on every device; of several stages, the first has
    the embeddings and the last the unembedding.
    """
    dtype_bytes = DTYPE_BYTES[dtype]
    linear_bytes = QUANTISED_BYTES.get(quantize, dtype_bytes)
    linears = [linear for linear in model.linears if experts == 1 or linear.copies == 1]
    split = sum(linear.num_parameters for linear in linears if linear.split_dim) * linear_bytes / tensor
    replicated = sum(linear.num_parameters for linear in linears if not linear.split_dim) * linear_bytes
    spread = sum(linear.num_parameters for linear in model.linears if experts > 1 and linear.copies > 1) * linear_bytes
    unembedding = _unembedding_parameters(model, tensor)
    is_shared = model.tied and unembedding == model.embedding_parameters
    embeddings = model.embedding_parameters + (0 if is_shared else unembedding)
    other_parameters = embeddings + model.other_parameters + model.vision_parameters
    gathered_parameters = model.layer_parameters(with_experts=experts == 1)
    gathered = gathered_parameters * linear_bytes / tensor if shards > 1 else 0
    if stages > 1:
        routed = model.expert_sizes if experts > 1 else (0,) * len(model.layer_sizes)
        unrouted_sizes = [size - routed_size for size, routed_size in zip(model.layer_sizes, routed, strict=True)]
        bytes_per_parameter = (split + replicated + model.other_parameters * dtype_bytes) / sum(unrouted_sizes)
        layers = [
            unrouted_size * bytes_per_parameter + linear_bytes / experts * routed_size
            for unrouted_size, routed_size in zip(unrouted_sizes, routed, strict=True)
        ]
        ends = model.embedding_parameters * dtype_bytes, unembedding * dtype_bytes
        return int(max(_stage_bytes(model, stages, layers, *ends)))
    return int((split + replicated) / shards + gathered + spread / experts + other_parameters * dtype_bytes)


def _unembedding_parameters(model: Architecture, tensor: int) -> float:
    """Those of one of `tensor` devices, each with a part of the vocabulary if it can be divided."""
    return model.embedding_parameters / (tensor if model.vocab % tensor == 0 else 1)


def _stage_bytes(
    model: Architecture, stages: int, layers: Sequence[float], embeddings: float, unembedding: float
) -> Iterator[float]:
    """Bytes of each stage, of layers, embeddings and an unembedding with these bytes."""
    start = 0
    for stage, count in enumerate(stages_of(model, stages)):
        ends = embeddings * (stage == 0) + unembedding * (stage == stages - 1)
        yield sum(layers[start : (start := start + count)]) + ends


@lru_cache(maxsize=1024)
def split_layers(sizes: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """How many consecutive layers each stage gets, so that the largest stage is as small as possible. The first layer's
    size includes the embeddings, the last layer's the unembedding.
    """
    totals = list(accumulate(sizes, initial=0))
    bound = totals[-1] / stages + max(sizes)  # cutting greedily at the mean stays below it
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stage in range(stages):
        splits = {}
        for stop in range(stage + 1, len(sizes) - (stages - 1 - stage) + 1):
            options = []
            for start in range(stop - 1, -1, -1):
                if (size := totals[stop] - totals[start]) > bound:
                    break
                if start in best:
                    largest, squares, counts = best[start]
                    options.append((max(largest, size), squares + size**2, (*counts, stop - start)))
            if options:
                splits[stop] = min(options)
        best = splits
    return best[len(sizes)][2]


def packed_bytes(model: Architecture, *, dtype: str, quantize: str, cuda: bool) -> int:
    """A CPU's second copy of the linears of small models with fused layers, packed for decoding."""
    if cuda or not model.has_fused_layers or quantize != "off":
        return 0
    num_parameters = sum(linear.num_parameters for linear in model.linears) + model.embedding_parameters
    return num_parameters * DTYPE_BYTES[dtype] if num_parameters * DTYPE_BYTES[dtype] <= MAX_PACKED_BYTES else 0


def count_copied_bytes(model: Architecture, *, dtype: str, quantize: str, cuda: bool, experts: int = 1) -> int:
    """What a product of quantised experts takes for matrices made from codes: of gate and up, on a GPU of all a
    device's experts at once, and as much again in the graphs of decode steps.
    """
    if quantize == "off":
        return 0
    sizes = [linear.inputs * linear.outputs * (2 * linear.copies // experts if cuda else 1) for linear in model.linears
             if linear.copies > 1 and not linear.name.endswith("w2")]  # fmt: skip
    return sum(sizes) * (1 if quantize == "fp8" and cuda else DTYPE_BYTES[dtype])


def adapter_parameters(model: Architecture, rank: int) -> int:
    linears = (*model.linears, model.unembedding)
    return sum(linear.adapter_parameters(rank) for linear in linears)


class AdapterRegion(NamedTuple):
    """Parameters of an adapter that a device holds, and the number of devices that hold them, each of which steps an
    equal part.
    """

    num_parameters: int
    holders: int

    @property
    def num_stepped(self) -> int:
        return -(-self.num_parameters // self.holders)


def adapter_regions(
    model: Architecture, rank: int, *, devices: int = 1, experts: int = 1, stages: int = 1
) -> tuple[AdapterRegion, ...]:
    """Of the device that holds most. All hold the parameters of all targets, but with `experts` only those with the
    same part of the routed experts hold the matrices that differ between experts, of one of `stages`.
    """
    total = adapter_parameters(model, rank)
    if experts == 1:
        return (AdapterRegion(total, devices),)
    routed = sum(linear.expert_adapter_parameters(rank) for linear in model.linears)
    share = 1.0
    if stages > 1:
        bounds = [0, *accumulate(stages_of(model, stages))]
        sizes = [sum(model.expert_sizes[start:stop]) for start, stop in pairwise(bounds)]
        share = max(sizes) / sum(sizes)
    local = AdapterRegion(math.ceil(routed * share / experts), devices // (stages * experts))
    return AdapterRegion(total - routed, devices), local


def training_bytes(regions: Iterable[AdapterRegion], *, dtype: str) -> int:
    """Bytes of an adapter in training on a device: of what it holds the weights, their compute copy and the gradient of
    the running step; of what it steps the accumulated gradient and two moments.
    """
    copy = 0 if dtype == "float32" else DTYPE_BYTES[dtype]
    return sum(region.num_parameters * (2 * 4 + copy) + region.num_stepped * 3 * 4 for region in regions)


def key_value_bytes(model: Architecture, *, dtype: str, tensor: int = 1) -> int:
    """Bytes of one token in all layers."""
    heads = -(-model.key_heads // tensor)
    return model.attention_layers * heads * (model.key_dim + model.value_dim) * DTYPE_BYTES[dtype]


def state_bytes(model: Architecture) -> int:
    """Bytes of one sampled sequence's states, including all that exist during a step."""
    return 4 * STATES_PER_SEQUENCE * model.state_elements


def reserve_bytes(memory_bytes: int, *, cuda: bool) -> int:
    return int(RESERVED_SHARE * memory_bytes) + RESERVED_BYTES[cuda]
