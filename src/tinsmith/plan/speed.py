"""How long a training step takes on given devices: operations, and what the devices send each other, by arithmetic.

The traffic is that of `backends.distributed`; `tests/cluster/test_ranks.py` compares it with the bytes given to the
collectives. Families whose fused linears are gathered within a layer (Phi-3) exchange more than is counted. Times come
from `Rates`: from data sheets and assumed shares of them, or measured (`tinsmith doctor MODEL --measure`).
Attention and adapters are not counted. Measures nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tinsmith.plan import memory
from tinsmith.plan.architecture import Architecture
from tinsmith.plan.degrees import Degrees, Plan, Workload, adapter_regions


@dataclass(frozen=True, slots=True)
class Device:
    """A device from its vendor's data sheet: dense bfloat16 TFLOP/s, GB/s of its memory, bytes of memory, and GB/s in
    each direction to devices of its machine (`link`) and of other machines, with a network card each (`network`).
    """

    name: str
    tflops: float
    gigabytes_s: float
    memory_bytes: int
    link: float
    network: float

    def rates(self, plan: Plan) -> Rates:
        """The rates that ranks of the plan are assumed to reach on devices of this kind."""
        degrees, per_machine = plan.degrees, plan.workload.devices // plan.workload.num_machines
        expert_group = degrees.expert_groups()[0]

        def among(num_devices: int) -> LinkRate:
            """The rate of a link among so many neighbouring devices."""
            return LinkRate(LINK_SHARE * (self.link if num_devices <= per_machine else self.network) * 1e9)

        return Rates(
            TRAINING_SHARE * self.tflops * 1e12,
            SAMPLING_SHARE * self.gigabytes_s * 1e9,
            tensor=among(degrees.tensor),
            context=among(degrees.context * degrees.group_size),
            stages=among(degrees.group_size),
            base=among(degrees.devices),
            gradients=among(degrees.devices),
            experts=among(expert_group[-1] - expert_group[0] + 1),
        )


class LinkRate(NamedTuple):
    """The collectives of a group: bytes/s that a rank sends, and seconds of each in addition."""

    bytes_s: float = math.inf
    latency_s: float = 0.0

    def seconds(self, num_bytes: float, calls: float = 0.0) -> float:
        return num_bytes / self.bytes_s + calls * self.latency_s


class Rates(NamedTuple):
    """Operations/s of a rank's device in training and bytes/s of its memory in sampling, and its collectives: sums of
    its tensor group, exchanges of its context group, messages between stages, gathering of layers from its replicas,
    sums over all ranks, exchanges of its expert group.
    """

    operations_s: float
    memory_bytes_s: float
    tensor: LinkRate
    context: LinkRate
    stages: LinkRate
    base: LinkRate
    gradients: LinkRate
    experts: LinkRate

    @classmethod
    def read(cls, fields: Sequence[Sequence[float]]) -> Rates:
        """From plain numbers: those of the device, then of each exchange."""
        (operations_s, bytes_s), *exchanges = fields
        return cls(operations_s, bytes_s, *(LinkRate(*exchange) for exchange in exchanges))


DEVICES = (
    Device("H200", 989, 4800, 141 * 10**9, 450, 50),
    Device("H100 SXM", 989, 3350, 80 * 10**9, 450, 50),
    Device("A100 80 GB", 312, 2039, 80 * 10**9, 300, 25),
    Device("L40S", 362, 864, 48 * 10**9, 32, 12.5),
    Device("A100 40 GB", 312, 1555, 40 * 10**9, 300, 25),
    Device("RTX 4090", 165, 1008, 24 * 10**9, 32, 12.5),
    Device("L4", 121, 300, 24 * 10**9, 32, 12.5),
)
TRAINING_SHARE, SAMPLING_SHARE, LINK_SHARE = 0.4, 0.6, 0.7
"""Assumed shares of the peak: of arithmetic in training, of memory bandwidth in sampling, of a link."""

OPERATIONS, OPERATIONS_WITHOUT_RECOMPUTE = 6, 4
"""For each token and active number in a step that recomputes activations: two forwards, and the backward pass through
the frozen base without the gradients of its weights. A step that keeps them has one forward.
"""


@dataclass(frozen=True, slots=True)
class StepShare:
    """A device's part of a step: `rows`, all of them scored, in `micro_batches`. Its tensor group has the same rows."""

    rows: int
    micro_batches: int = 1
    recompute: bool = True


class Traffic(NamedTuple):
    """Bytes that a device sends in a step, with collectives in a ring: `tensor` and `logits` within its tensor group,
    `context` within its context group, `experts` to the ranks of the experts and back if the router spreads tokens
    evenly, `stages` to the neighbouring stages, `base` gathers layers over data and context ranks, and `gradients` sums
    those of adapters over the devices that hold them, and sends the weights.
    """

    tensor: float = 0.0
    logits: float = 0.0
    context: float = 0.0
    stages: float = 0.0
    base: float = 0.0
    gradients: float = 0.0
    experts: float = 0.0


def all_gather_bytes(num_bytes: float, ranks: int) -> float:
    """Bytes that a rank sends in an all-gather with this result, or an all-to-all of so much from each rank."""
    return num_bytes * (ranks - 1) / ranks


def all_reduce_bytes(num_bytes: float, ranks: int) -> float:
    """Bytes that a rank sends in an all-reduce of a tensor of so many bytes."""
    return 2 * all_gather_bytes(num_bytes, ranks)


def traffic(model: Architecture, workload: Workload, degrees: Degrees, share: StepShare) -> Traffic:
    """The bytes that a device sends in a training step of every adapter."""
    rows_all = share.rows * degrees.groups
    logprobs = all_reduce_bytes(4 * rows_all, degrees.groups * degrees.pipeline)
    # Gradients are summed where they are stepped, and the weights are sent from there.
    adapter = sum(
        2 * all_gather_bytes(4 * region.num_parameters, region.holders)
        for region in adapter_regions(model, workload.rank, degrees)
    )
    return Traffic(
        tensor=_tensor(model, workload, degrees, share),
        logits=_logits(model, workload, degrees, share),
        context=_context(model, workload, degrees, share),
        stages=_stages(model, workload, degrees, share),
        base=_base(model, workload, degrees, share),
        gradients=workload.models * adapter + logprobs,
        experts=_experts(model, workload, degrees, share),
    )


def _tensor(model: Architecture, workload: Workload, degrees: Degrees, share: StepShare) -> float:
    """Sums of row-parallel outputs, and in backward of the inputs that column-parallel linears share."""
    outputs = sum(
        linear.layers * linear.outputs
        for linear in model.linears
        if linear.copies == 1 and linear.split_dim == "inputs"
    )
    inputs = _row_parallel(model)[1] * model.hidden
    if not degrees.shard_base and degrees.pipeline == 1:
        inputs -= model.hidden  # the embeddings require no gradient
    elements = (outputs * (1 + share.recompute) + inputs) / degrees.pipeline
    return all_reduce_bytes(_addend_bytes(workload) * share.rows * elements, degrees.tensor)


def _logits(model: Architecture, workload: Workload, degrees: Degrees, share: StepShare) -> float:
    """Where the degree divides the vocabulary: each row's largest logit, its sum of exponentials and its target's logit
    in float32, and the gradient of the hidden states.
    """
    if model.vocab % degrees.tensor:
        return 0.0
    states = all_reduce_bytes(_addend_bytes(workload) * share.rows * model.hidden, degrees.tensor)
    return all_reduce_bytes(3 * 4 * share.rows, degrees.tensor) + states


def _addend_bytes(workload: Workload) -> int:
    """Bytes per element of a sum over ranks, which a CPU computes in float32."""
    return memory.DTYPE_BYTES[workload.dtype] if workload.cuda else 4


def _context(model: Architecture, workload: Workload, degrees: Degrees, share: StepShare) -> float:
    """Queries, keys and values to the ranks of their heads and results back, and the same in backward. Of a sequence on
    all ranks, the states of layers that keep one, and their gradients, or such layers' hidden states.
    """
    ranks, tensor = degrees.context, degrees.tensor
    heads, keys = model.heads // tensor, max(model.key_heads // tensor, 1)
    keys = heads if heads % ranks else math.lcm(keys, ranks)
    heads, keys = (-(-count // ranks) * ranks for count in (heads, keys))
    elements = (heads + keys) * (model.key_dim + model.value_dim)
    exchanged = (
        memory.DTYPE_BYTES[workload.dtype] * share.rows * model.attention_layers * elements * (2 + share.recompute)
    )
    states = 0.0
    if model.is_whole:
        hidden = share.rows * ranks * model.hidden * model.mixers
        exchanged += memory.DTYPE_BYTES[workload.dtype] * hidden * (2 + share.recompute)
    elif ranks > 1:
        # Of two ranks, one sends states and the other their gradients.
        states = 4 * model.state_elements * share.micro_batches * (1 + share.recompute + (ranks > 2)) / degrees.pipeline
    exchanged /= degrees.pipeline
    logprobs = all_reduce_bytes(4 * share.rows * ranks, ranks)
    return states + all_gather_bytes(exchanged, ranks) + logprobs


def _experts(model: Architecture, workload: Workload, degrees: Degrees, share: StepShare) -> float:
    """Each row and its router's weight to each of its experts, and the result back; the same in backward. Tensor ranks
    send their share of the rows, and gather results and gradients.
    """
    if degrees.experts == 1:
        return 0.0
    down = [linear for linear in model.linears if linear.copies > 1 and linear.name.endswith("w2")]
    rows, times = -(-share.rows // degrees.tensor), 2 + share.recompute
    pairs = times * rows * sum(w2.layers * w2.active * (2 * w2.outputs + 1) for w2 in down)
    shared = rows * degrees.tensor * sum(w2.layers * (times * w2.outputs + w2.active) for w2 in down)
    dtype_bytes = memory.DTYPE_BYTES[workload.dtype]
    num_bytes = all_gather_bytes(dtype_bytes * pairs, degrees.experts) + all_gather_bytes(
        dtype_bytes * shared, degrees.tensor
    )
    return num_bytes / degrees.pipeline


def _stages(model: Architecture, workload: Workload, degrees: Degrees, share: StepShare) -> float:
    """Rows to the next stage and their gradients to the one before: of two stages, each sends one of both."""
    messages = min(degrees.pipeline - 1, 2)
    return messages * memory.DTYPE_BYTES[workload.dtype] * share.rows * model.hidden


def _base(model: Architecture, workload: Workload, degrees: Degrees, share: StepShare) -> float:
    """Each layer, gathered for the forward and for the backward of every micro-batch."""
    if not degrees.shard_base:
        return 0.0
    linears = [linear for linear in model.linears if degrees.experts == 1 or linear.copies == 1]
    split = sum(linear.num_parameters for linear in linears if linear.split_dim)
    parameters = split / degrees.tensor + sum(linear.num_parameters for linear in linears if not linear.split_dim)
    parameters += model.other_parameters
    return 2 * share.micro_batches * all_gather_bytes(memory.DTYPE_BYTES[workload.dtype] * parameters, degrees.groups)


class StepTime(NamedTuple):
    """Seconds of a step by activity; layers are gathered while others are computed."""

    compute: float
    tensor: float
    context: float
    stages: float
    base: float
    gradients: float
    experts: float
    waiting: float
    """Share of a step in which a stage waits for others."""

    @property
    def total(self) -> float:
        busy = self.compute + self.tensor + self.context + self.experts + self.stages
        return max(busy / (1 - self.waiting), self.base) + self.gradients


def calls(model: Architecture, degrees: Degrees, share: StepShare) -> Traffic:
    """How many collectives a device takes part in, by kind, for one adapter."""
    outputs, inputs = _row_parallel(model)
    forwards, times = 1 + share.recompute, share.micro_batches
    exchanges = EXCHANGES * model.attention_layers + model.mixers
    mixtures = sum(linear.layers for linear in model.linears if linear.copies > 1 and linear.name.endswith("w2"))
    regions = adapter_regions(model, 1, degrees)
    return Traffic(
        tensor=times * (outputs * forwards + inputs) / degrees.pipeline if degrees.tensor > 1 else 0.0,
        logits=3.0 * times if degrees.tensor > 1 and model.vocab % degrees.tensor == 0 else 0.0,
        context=times * (exchanges * (1 + forwards) + 1) if degrees.context > 1 else 0.0,
        stages=float(min(degrees.pipeline - 1, 2) * _in_stages(degrees, share)),
        base=2.0 * times * model.layers if degrees.shard_base else 0.0,
        gradients=1.0 + sum(2 * holders for _, holders in regions if holders > 1) if degrees.devices > 1 else 0.0,
        experts=times * mixtures * (4 * forwards + 3) / degrees.pipeline if degrees.experts > 1 else 0.0,
    )


def _in_stages(degrees: Degrees, share: StepShare) -> int:
    """Micro-batches of a step, which are more with stages."""
    return max(share.micro_batches, memory.MICRO_BATCHES_PER_STAGE * degrees.pipeline)


EXCHANGES = 2
"""Exchanges of an attention in one direction: to the ranks of its heads, and back."""


def _row_parallel(model: Architecture) -> tuple[int, int]:
    """The number of row-parallel linears, and of inputs that column-parallel ones share."""
    linears = [linear for linear in model.linears if linear.copies == 1]
    readers = {(linear.name.rpartition(".")[0], linear.layers) for linear in linears if linear.split_dim == "outputs"}
    outputs = sum(linear.layers for linear in linears if linear.split_dim == "inputs")
    return outputs, sum(layers for _, layers in readers)


def step_time(plan: Plan, source: Device | Rates, share: StepShare) -> StepTime:
    """An estimate for devices of this kind, or from measured rates."""
    rates = source.rates(plan) if isinstance(source, Device) else source
    degrees = plan.degrees
    num_bytes, times = traffic(plan.model, plan.workload, degrees, share), calls(plan.model, degrees, share)
    operations = OPERATIONS if share.recompute else OPERATIONS_WITHOUT_RECOMPUTE
    active = plan.model.num_active
    if plan.model.is_whole:
        # The last context rank computes all rows of these layers.
        mixers = sum(linear.num_active_parameters for linear in plan.model.linears if linear.keeps_state)
        active += (degrees.context - 1) * mixers
    return StepTime(
        compute=operations * active * share.rows / degrees.group_size / rates.operations_s,
        tensor=rates.tensor.seconds(num_bytes.tensor + num_bytes.logits, times.tensor + times.logits),
        context=rates.context.seconds(num_bytes.context, times.context),
        stages=rates.stages.seconds(num_bytes.stages, times.stages),
        base=rates.base.seconds(num_bytes.base, times.base),
        gradients=rates.gradients.seconds(num_bytes.gradients, times.gradients),
        experts=rates.experts.seconds(num_bytes.experts, times.experts),
        waiting=(degrees.pipeline - 1) / (_in_stages(degrees, share) + degrees.pipeline - 1),
    )


def token_s(plan: Plan, source: Device | Rates) -> float:
    """Seconds of one sampled token: all active weights are read, if need be dequantised, and a sharded base is
    gathered.
    """
    rates = source.rates(plan) if isinstance(source, Device) else source
    model, workload, degrees = plan.model, plan.workload, plan.degrees
    read = _count_moved_bytes(model, workload) / degrees.tensor / rates.memory_bytes_s
    times = calls(model, degrees, StepShare(1))
    base = rates.base.seconds(_base(model, workload, degrees, StepShare(1)) / 2, times.base / 2)  # only for a forward
    return max(read, base)


def _count_moved_bytes(model: Architecture, workload: Workload) -> float:
    """Bytes of weights that are read and written for a sampled token. A dequantised matrix is written and then read."""
    dtype_bytes = memory.DTYPE_BYTES[workload.dtype]
    if (code_bytes := memory.QUANTISED_BYTES.get(workload.quantize)) is None:
        return model.num_active * dtype_bytes
    copied_bytes = 0 if workload.quantize == "fp8" else 2 * dtype_bytes
    num_quantised = sum(linear.num_active_parameters for linear in model.linears)
    return num_quantised * (code_bytes + copied_bytes) + (model.num_active - num_quantised) * dtype_bytes
