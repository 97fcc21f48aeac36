"""What a model takes of one device: bytes of base, adapters, activations and keys and values, by arithmetic.

The figures are those of `backends.torch` and `samplers`: packed micro-batches, logits in chunks, adapters in float32
beside a copy in the base's format, a cache of keys and values for whole contexts (windows do not shorten it, and latent
attention caches what every head sees). The backend asks `Activations` the same when it has a budget. What is measured
lies within `FACTOR` of this (tests/unit/test_plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tinsmith.errors import SettingsError
from tinsmith.plan.architecture import Architecture, Linear

NUMBER_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
QUANTISED_BYTES: Mapping[str, float] = {"int8": 1.0, "nf4": 0.5 + 4 / 64}
"""Of a linear's number, scales included."""

MICRO_BATCH = {False: 1024, True: 8192}
"""Tokens of a micro-batch on a CPU and with CUDA; a longer sequence is one alone."""

LOGITS = {False: 2**22, True: 2**26}
"""Numbers of logits that exist at once, on a CPU and with CUDA."""

LEAST_CHUNK, LARGEST_CHUNK = 128, 1024
"""Rows of logits that exist at once."""

LOGIT_COPIES = 3
"""Logits, their logarithms and their gradient."""

KEPT_PER_LINEAR = 2.0
"""Numbers that the modules keep for each input and output of a linear, what backward needs while it runs included."""

FACTOR = 1.5
"""Peaks that were measured are within this factor of what is said here, either way."""

BLOCKS_SHARE = 0.5
"""Of the room for keys and values under a budget: tensors that grow are there twice for a moment."""

STATES_EACH = 3
"""States of a running sequence in a step: that before it, that behind it, and the one at its answer's last block."""

RESERVED_SHARE = 0.04
RESERVED_BYTES = {False: 512 * 2**20, True: 1536 * 2**20}
"""What a process and its libraries take of a device besides: code, CUDA's context, communication, gaps."""


@dataclass(frozen=True, slots=True)
class Activations:
    """What training keeps of each token between forward and backward: `kept` numbers in all layers together, or, where
    layers run again, the `inputs` of all and what one keeps (`layer`). Going backward through one takes as much again;
    the logits are gone by then.
    """

    kept: float
    layer: float
    inputs: float
    number_bytes: int
    logits_bytes: float

    def num_bytes(self, tokens: int, *, recompute: bool) -> int:
        held, working = (self.inputs, 2 * self.layer) if recompute else (self.kept, self.layer)
        per_number = tokens * self.number_bytes
        return int(per_number * held + max(per_number * working, self.logits_bytes))


def logits_bytes(vocab: int, *, cuda: bool) -> float:
    rows = min(max(LOGITS[cuda] // vocab, LEAST_CHUNK), LARGEST_CHUNK)
    return 4.0 * LOGIT_COPIES * rows * vocab


def activations(model: Architecture, *, dtype: str, cuda: bool, tensor: int = 1) -> Activations:
    """With tensor parallelism a device keeps its part of what linears that are cut read or make."""
    kept = sum(_kept_by(linear, tensor) for linear in model.linears)
    if model.written_out:
        kept = _kept_by_written_out(model, tensor)
    kept += model.mixer_numbers * 4 / NUMBER_BYTES[dtype]
    return Activations(
        kept=kept,
        layer=kept / model.layers,
        inputs=model.layers * model.hidden,
        number_bytes=NUMBER_BYTES[dtype],
        logits_bytes=logits_bytes(model.vocab, cuda=cuda),
    )


def _kept_by(linear: Linear, tensor: int) -> float:
    inputs = linear.inputs / (tensor if linear.along == "inputs" else 1)
    outputs = linear.outputs / (tensor if linear.along == "outputs" else 1)
    return KEPT_PER_LINEAR * (inputs + outputs) * linear.layers * linear.met


def _kept_by_written_out(model: Architecture, tensor: int) -> float:
    """Of each layer: its input and what comes after attention, before and after their norms; queries, keys and values,
    the first two also turned, and what attention makes of them; gate, up and their product.
    """
    queries, keys = model.heads * model.key_dim, model.key_heads * model.key_dim
    wide = sum(linear.outputs for linear in model.linears if linear.name.endswith(("gate_proj", "up_proj")))
    return model.layers * (4 * model.hidden + (3 * queries + 3 * keys + 1.5 * wide) / tensor)


def base_bytes(model: Architecture, *, dtype: str, quantize: str, tensor: int = 1, shards: int = 1) -> int:
    """Frozen weights on one of `tensor` devices; over `shards` of those a layer is whole only while it is computed.
    Embeddings, norms and routers are on every device.
    """
    number_bytes = NUMBER_BYTES[dtype]
    if quantize != "off" and model.has_experts:
        raise SettingsError(f"quantize is {quantize!r}, but {model.model_type} has routed experts, which are not")
    linear_bytes = QUANTISED_BYTES.get(quantize, number_bytes)
    cut = sum(linear.numbers for linear in model.linears if linear.along) * linear_bytes / tensor
    whole = sum(linear.numbers for linear in model.linears if not linear.along) * linear_bytes
    ends = model.embedding_numbers * (1 if model.tied else 2) + model.other_numbers
    gathered = model.layer_numbers() * linear_bytes / tensor if shards > 1 else 0
    return int((cut + whole) / shards + gathered + ends * number_bytes)


def packed_bytes(model: Architecture, *, dtype: str, quantize: str, cuda: bool) -> int:
    """A CPU's second copy of the linears, laid out for decoding, of layers that are written out."""
    if cuda or not model.written_out or quantize != "off":
        return 0
    return sum(linear.numbers for linear in model.linears) * NUMBER_BYTES[dtype]


def adapter_numbers(model: Architecture, rank: int) -> int:
    linears = (*model.linears, model.unembedding)
    return sum(linear.adapter_numbers(rank) for linear in linears)


def training_bytes(numbers: int, *, dtype: str) -> int:
    """An adapter in training: its weights, their copy to multiply with, its gradient, two moments, and the gradient of
    the step that runs.
    """
    copy = 0 if dtype == "float32" else NUMBER_BYTES[dtype]
    return numbers * (5 * 4 + copy)


def key_value_bytes(model: Architecture, *, dtype: str, tensor: int = 1) -> int:
    """Of one token, in all layers."""
    heads = -(-model.key_heads // tensor)
    return model.attending * heads * (model.key_dim + model.value_dim) * NUMBER_BYTES[dtype]


def state_bytes(model: Architecture) -> int:
    """Of one sequence that is sampled, at most: as many float32 states as there are of it at once."""
    return 4 * STATES_EACH * model.state_numbers


def reserved_bytes(memory_bytes: int, *, cuda: bool) -> int:
    return int(RESERVED_SHARE * memory_bytes) + RESERVED_BYTES[cuda]
