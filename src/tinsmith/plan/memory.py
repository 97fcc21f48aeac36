"""A model's memory on one device: bytes of base, adapters, activations and KV cache, by arithmetic.

The figures are those of `backends.torch` and `samplers`: packed micro-batches, logits in chunks, adapters in float32
plus a copy in the base's dtype, a KV cache for whole contexts (windows do not shorten it, and latent attention caches
what every head sees). The backend uses the same `Activations` when it has a budget. Measurements lie within `FACTOR` of
these figures (tests/unit/test_plan.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path

from tinsmith.errors import SettingsError
from tinsmith.plan.architecture import Architecture, Linear

NUMBER_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
QUANTISED_BYTES: Mapping[str, float] = {"int8": 1.0, "nf4": 0.5 + 4 / 64}
"""Bytes per number of a linear, including scales."""

MICRO_BATCH = {False: 1024, True: 8192}
"""Tokens of a micro-batch on a CPU and with CUDA, which takes twice as many where their activations take little memory;
a longer sequence gets its own. A CPU is not much faster at 2,048, with twice the activations and longer waits for
decoding: m50 1.06 times, 0.6B not at all.
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
"""Logits, their logarithms and their gradient; with CUDA no logarithms, and the gradient in bfloat16."""

KEPT_PER_LINEAR = 2.0
"""Numbers that modules keep per input and output of a linear, including what backward needs while it runs."""

FACTOR = 1.5
"""Measured peaks are within this factor of these figures, either way."""

MOST_PACKED = 2**28
"""Bytes of weights up to which a CPU keeps a second copy for decoding; the products of larger models gain 5 % by it."""

BLOCKS_SHARE = 0.5
"""Share of the memory for keys and values under a budget: growing tensors exist twice for a moment."""

STATES_EACH = 3
"""States of a running sequence in a step: before it, after it, and at its answer's last block."""

RESERVED_SHARE = 0.04
RESERVED_BYTES = {False: 512 * 2**20, True: 1536 * 2**20}
"""Other device memory of a process and its libraries: code, CUDA's context, communication, fragmentation."""


def choose_dtype(requested: str, *, cuda: bool, stored: str) -> str:
    """The dtype of the base weights. `auto` is bfloat16 on CUDA, and on a CPU with instructions that multiply bfloat16
    if the checkpoint is stored in it: half the memory, and about twice the speed of float32. Else it is float32.
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
    """Numbers that training keeps per token between forward and backward: `kept` in all layers, or, with recomputation,
    the `inputs` of all layers and one layer's activations (`layer`). The backward of a layer takes as much again; by
    then the logits are freed.
    """

    kept: float
    layer: float
    inputs: float
    number_bytes: int
    logits_bytes: float

    @property
    def num_bytes_kept(self) -> float:
        """Of a token, without recomputation and logits."""
        return self.number_bytes * (self.kept + self.layer)

    def num_bytes(self, tokens: int, *, recompute: bool) -> int:
        held, working = (self.inputs, 2 * self.layer) if recompute else (self.kept, self.layer)
        per_number = tokens * self.number_bytes
        return int(per_number * held + max(per_number * working, self.logits_bytes))


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
    times = context if model.is_whole else 1
    kept = sum(_kept_by(linear, tensor) * (times if linear.keeps_state else 1) for linear in model.linears)
    if model.has_fused_layers:
        kept = _kept_by_fused(model, tensor)
    kept += times * model.mixer_numbers * 4 / NUMBER_BYTES[dtype]
    layers = max((stages - stage) * count for stage, count in enumerate(stages_of(model, stages)))
    return Activations(
        kept=kept * layers / model.layers,
        layer=kept / model.layers,
        inputs=layers * model.hidden,
        number_bytes=NUMBER_BYTES[dtype],
        logits_bytes=logits_bytes(model.vocab, cuda=cuda, tensor=tensor),
    )


def tower_bytes(numbers: float, tokens: int, *, dtype: str) -> int:
    """Memory of a vision tower with `numbers` per token (`Architecture.tower_numbers`) for an image of `tokens`."""
    return int(numbers * tokens * NUMBER_BYTES[dtype])


def _kept_by(linear: Linear, tensor: int) -> float:
    # Tensor ranks send different rows to experts, and cut other linears.
    inputs = linear.inputs / (tensor if linear.along == "inputs" or linear.copies > 1 else 1)
    outputs = linear.outputs / (tensor if linear.along == "outputs" or linear.copies > 1 else 1)
    return KEPT_PER_LINEAR * (inputs + outputs) * linear.layers * linear.active


def _kept_by_fused(model: Architecture, tensor: int) -> float:
    """Per layer: its input and the sum after attention; queries, keys and values, the first two also rotated, and
    attention's output; gate and up. Norms and the product of gate and up are computed again.
    """
    queries, keys = model.heads * model.key_dim, model.key_heads * model.key_dim
    wide = sum(linear.outputs for linear in model.linears if linear.name.endswith(("gate_proj", "up_proj")))
    return model.layers * (2 * model.hidden + (3 * queries + 3 * keys + wide) / tensor)


def stages_of(model: Architecture, stages: int) -> tuple[int, ...]:
    """The number of layers of each stage."""
    if stages == 1:
        return (model.layers,)
    first, *later_sizes = model.layer_sizes
    sizes = [first + model.embedding_numbers, *later_sizes]
    sizes[-1] += model.embedding_numbers
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
    number_bytes = NUMBER_BYTES[dtype]
    if quantize != "off" and model.has_experts:
        raise SettingsError(
            f"quantize is {quantize!r}, but {model.model_type} has routed experts, which cannot be quantised"
        )
    linear_bytes = QUANTISED_BYTES.get(quantize, number_bytes)
    linears = [linear for linear in model.linears if experts == 1 or linear.copies == 1]
    cut = sum(linear.numbers for linear in linears if linear.along) * linear_bytes / tensor
    replicated = sum(linear.numbers for linear in linears if not linear.along) * linear_bytes
    spread = sum(linear.numbers for linear in model.linears if experts > 1 and linear.copies > 1) * linear_bytes
    ends = model.embedding_numbers * (1 if model.tied else 2) + model.other_numbers + model.vision_numbers
    layer = model.layer_numbers(with_experts=experts == 1)
    gathered = layer * linear_bytes / tensor if shards > 1 else 0
    if stages > 1:
        routed = model.expert_sizes if experts > 1 else (0,) * len(model.layer_sizes)
        others = [size - numbers for size, numbers in zip(model.layer_sizes, routed, strict=True)]
        each = (cut + replicated + model.other_numbers * number_bytes) / sum(others)
        layers = [own * each + number_bytes / experts * numbers for own, numbers in zip(others, routed, strict=True)]
        return int(max(_stage_bytes(model, stages, layers, model.embedding_numbers * number_bytes)))
    return int((cut + replicated) / shards + gathered + spread / experts + ends * number_bytes)


def _stage_bytes(model: Architecture, stages: int, layers: Sequence[float], end: float) -> Iterator[float]:
    """Of layers with these bytes, and of embeddings and unembedding with `end` bytes."""
    start = 0
    for stage, count in enumerate(stages_of(model, stages)):
        ends = end * ((stage == 0) + (stage == stages - 1))
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
            ways = []
            for start in range(stop - 1, -1, -1):
                if (size := totals[stop] - totals[start]) > bound:
                    break
                if start in best:
                    largest, squares, counts = best[start]
                    ways.append((max(largest, size), squares + size**2, (*counts, stop - start)))
            if ways:
                splits[stop] = min(ways)
        best = splits
    return best[len(sizes)][2]


def packed_bytes(model: Architecture, *, dtype: str, quantize: str, cuda: bool) -> int:
    """A CPU's second copy of the linears of small models with fused layers, packed for decoding."""
    if cuda or not model.has_fused_layers or quantize != "off":
        return 0
    numbers = sum(linear.numbers for linear in model.linears) + model.embedding_numbers
    return numbers * NUMBER_BYTES[dtype] if numbers * NUMBER_BYTES[dtype] <= MOST_PACKED else 0


def adapter_numbers(model: Architecture, rank: int) -> int:
    linears = (*model.linears, model.unembedding)
    return sum(linear.adapter_numbers(rank) for linear in linears)


def training_bytes(numbers: int, *, dtype: str) -> int:
    """An adapter in training: its weights, their compute copy, its gradient, two moments, and the gradient of the
    running step.
    """
    copy = 0 if dtype == "float32" else NUMBER_BYTES[dtype]
    return numbers * (5 * 4 + copy)


def key_value_bytes(model: Architecture, *, dtype: str, tensor: int = 1) -> int:
    """Bytes of one token in all layers."""
    heads = -(-model.key_heads // tensor)
    return model.attending * heads * (model.key_dim + model.value_dim) * NUMBER_BYTES[dtype]


def state_bytes(model: Architecture) -> int:
    """Bytes of one sampled sequence's states, including all that exist during a step."""
    return 4 * STATES_EACH * model.state_numbers


def reserve_bytes(memory_bytes: int, *, cuda: bool) -> int:
    return int(RESERVED_SHARE * memory_bytes) + RESERVED_BYTES[cuda]
