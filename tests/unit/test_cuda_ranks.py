"""One rank of several on a simulated device, with torch's fake process group, whose collectives do nothing: each is
checked against NCCL's rules, every tensor is where it must be, and no wait for the device is added. The other ranks are
taken to be like this one: `Ranks.gather` repeats its value, and every expert gets as many rows as the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_state
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from support import tiny_models
from support.fake_cuda import DEVICE, Event, FakeDevice, Stream, fake_cuda, load
from support.local_sampling import make_prompt, make_sample
from tinsmith.backends.distributed import Degrees, expert_parallel, rates
from tinsmith.backends.distributed.collectives import Ranks
from tinsmith.backends.distributed.model import PROBE_ADAPTER_RANKS, ShardedBase
from tinsmith.backends.distributed.rank import RankBackend
from tinsmith.backends.torch import expert_pairs
from tinsmith.backends.torch.adapters import Layout
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.transformer import Decoder
from tinsmith.types import AdamParams, DimuonParams, LoraSpec, ModelShape, OptimStep, Pass, SamplingParams
from unit.test_fake_cuda import custom, data, step

COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_single",
    "all_to_all_single",
    "isend",
    "recv",
)
BY_NAME = {"all_gather_single": ("output_tensor", "input_tensor")}
NCCL_DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8}


def _wrap_collective(name: str, collective: Callable[..., Any], calls: Counter[tuple[str, str]]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if name in BY_NAME:  # FSDP's way
            args, kwargs = (*args, *(kwargs.pop(key) for key in BY_NAME[name] if key in kwargs)), kwargs
        lists = [arg if isinstance(arg, list) else [arg] for arg in args]
        tensors = [tensor for part in lists for tensor in part if isinstance(tensor, Tensor)]
        (device,) = {tensor.device for tensor in tensors}
        assert device in (DEVICE, torch.device("cpu")), f"{name} on {device}"
        (dtype,) = {tensor.dtype for tensor in tensors}
        assert dtype in NCCL_DTYPES, f"{name} of {dtype}"
        assert all(tensor.is_contiguous() for tensor in tensors), f"{name} of a tensor with gaps"
        assert not any(tensor.requires_grad for tensor in tensors) or not torch.is_grad_enabled()
        if name == "all_gather":
            assert {tensor.shape for tensor in args[0]} == {args[1].shape}
        if name == "all_gather_single":
            assert args[0].numel() == args[1].numel() * kwargs["group"].size()
        if name == "all_to_all_single":
            for x, way in zip(args, ("output_split_sizes", "input_split_sizes"), strict=True):
                sizes, count = kwargs.get(way), kwargs["group"].size()
                assert (len(sizes), sum(sizes)) == (count, len(x)) if sizes else len(x) % count == 0
        calls[name, device.type] += 1
        return collective(*args, **kwargs)

    return call


def _spread_evenly(device: FakeDevice, stack: ExitStack) -> None:
    """The counts that experts read, whose values a simulated device has not."""
    pairs: list[int] = []
    order_by = expert_parallel.PairOrder.by

    def by(key_N: Tensor) -> object:
        pairs.append(len(key_N))
        return order_by(key_N)

    def read(counts_EK: Tensor, received_EK: Tensor) -> list[np.ndarray]:
        assert counts_EK.device == received_EK.device == DEVICE
        device.reads += 1
        cells = counts_EK.numel()
        counts = np.bincount(np.arange(pairs[-1]) % cells, minlength=cells).reshape(counts_EK.shape)
        return [counts, counts]

    stack.enter_context(mock.patch.object(expert_parallel.PairOrder, "by", by))

    def read_ends(*ends: Tensor) -> list[np.ndarray]:
        assert {end.device for end in ends} == {DEVICE}
        device.reads += 1
        return [np.arange(1, len(end) + 1) * pairs[-1] // len(end) for end in ends]

    stack.enter_context(mock.patch.object(expert_parallel, "read", read))
    stack.enter_context(mock.patch.object(expert_pairs, "read", read_ends))


@contextmanager
def fake_rank(degrees: Degrees, rank: int) -> Iterator[tuple[FakeDevice, Ranks, Counter[tuple[str, str]]]]:
    calls: Counter[tuple[str, str]] = Counter()
    with ExitStack() as stack:
        device = stack.enter_context(fake_cuda(pages=False))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=degrees.devices)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(mock.patch.object(nn.Module, "to", _move))
        for holder, name, value in (
            (Ranks, "replica_mesh", property(_mesh)),
            (torch.cuda, "current_device", lambda: DEVICE.index),
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "stream", lambda stream: nullcontext()),
            (torch.cuda, "Event", _CurrentEvent),
            (
                _fsdp_init,
                "_move_states_to_device",
                lambda parameters, buffers, destination: _move_tensors(parameters + buffers, destination),
            ),
            (_fsdp_state, "Variable", mock.Mock(_execution_engine=mock.Mock(queue_callback=device.callbacks.append))),
        ):
            stack.enter_context(mock.patch.object(holder, name, value))
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, _wrap_collective(name, getattr(dist, name), calls)))
        stack.enter_context(mock.patch.object(Ranks, "gather", lambda self, value: [value] * degrees.devices))
        any_of_forward = Ranks.any_of_forward
        stack.enter_context(
            mock.patch.object(Ranks, "any_of_forward", lambda self, flag: (any_of_forward(self, flag), flag)[1])
        )
        _spread_evenly(device, stack)
        yield device, Ranks(degrees, rank, str(DEVICE), 60.0), calls


class _CurrentEvent(Event):
    """A rank's device is the current one."""

    def record(self, stream: Stream | None = None) -> None:
        super().record(stream or Stream())


def _mesh(ranks: Ranks) -> DeviceMesh:
    """Of ranks, which are numbers with values."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return replica_mesh(ranks)


replica_mesh = cast("Callable[[Ranks], DeviceMesh]", cast(property, Ranks.replica_mesh).fget)


def _move(module: nn.Module, device: torch.device) -> nn.Module:
    """`Module.to` of fake tensors, which keeps the parameters' identity as it does for others."""
    states = (tensors for submodule in module.modules() for tensors in (submodule._parameters, submodule._buffers))
    _move_tensors([value for values in states for value in values.values() if value is not None], device)
    return module


def _move_tensors(tensors: Sequence[Tensor], device: torch.device) -> None:
    for mismatched in (tensor for tensor in tensors if tensor.device != device):
        mismatched.data = mismatched.data.to(device)
        mismatched.fake_device = device  # pyright: ignore[reportAttributeAccessIssue]


class _Base(ShardedBase):
    def _probe(self, ranks: Ranks | None) -> list[Tensor]:
        """On the host there is nothing to simulate."""
        if ranks is not None:
            return super()._probe(ranks)
        return [torch.zeros(Layout.of(rank, self.adaptable_targets()).numel) for rank in PROBE_ADAPTER_RANKS]

    def _verify_decoder(self, decoder: Decoder) -> Decoder:
        return decoder


class FakeCudaRank(RankBackend):
    """Its base is on the host until it is sharded, as in `load_base`."""

    def _load_base(self, shape: ModelShape, *, device: str, dtype: str, recompute: str, quantize: str) -> BaseModel:
        degrees = self.ranks.degrees
        if not degrees.sharded and degrees.context == 1:
            base = load(BaseModel, shape, torch.bfloat16, recompute, quantize)
            base._fused.prepare()
            return base
        base = load(_Base, shape, torch.bfloat16, recompute, quantize, on_device=not degrees.sharded)
        base._check_training()
        base.shard(self.ranks)
        return base


LAYERS = 2
CASES = {
    "data": ("qwen3", "off", Degrees(2), 0, 1, 1),
    "tensor": ("qwen3", "on", Degrees(tensor=2), 1, 1, 1),
    "tensor, biases": ("llama", "off", Degrees(tensor=2), 1, 1, 1),
    "context": ("qwen3", "off", Degrees(context=2), 1, 1, 1),
    "context, windows": ("gemma2", "on", Degrees(context=2), 0, 1, 1),
    "context and tensor": ("llama", "on", Degrees(context=2, tensor=2), 3, 1, 1),
    "experts": ("gpt_oss", "off", Degrees(2, experts=2), 1, 1 + LAYERS, 1 + LAYERS),
    "experts again": ("gpt_oss", "on", Degrees(2, experts=2), 0, 1 + 2 * LAYERS, 1 + LAYERS),
    "first stage": ("qwen3", "off", Degrees(pipeline=2), 0, 0, 1),
    "last stage": ("qwen3", "on", Degrees(pipeline=2), 1, 1, 1),
    "stages and tensor": ("llama", "on", Degrees(tensor=2, pipeline=2), 3, 1, 1),
    "shards": ("qwen3", "off", Degrees(2, shard_base=True), 0, 1, 1),
    "shards, context": ("llama", "on", Degrees(2, context=2, shard_base=True), 3, 1, 1),
    "shards, experts": ("gpt_oss", "off", Degrees(2, experts=2, shard_base=True), 1, 1 + LAYERS, 1 + LAYERS),
    "stages and data": ("gemma2", "off", Degrees(2, pipeline=2), 0, 0, 1),
    "stages and experts": ("gpt_oss", "on", Degrees(2, experts=2, pipeline=2), 1, 1 + LAYERS, 1 + LAYERS // 2),
}
"""Family, recomputation, degrees, rank, and reads of a micro-batch and of a sampler's step after the first."""


def _check_shards(backend: RankBackend) -> None:
    """Between steps a device holds no layer whole."""
    layers = [module for module in backend.base.model.modules() if isinstance(module, FSDPModule)]
    groups = [group for layer in layers for group in layer._get_fsdp_state()._fsdp_param_groups]
    assert len(groups) == LAYERS
    for parameter in (parameter for group in groups for parameter in group.fsdp_params):
        share = -(-parameter._orig_size[0] // backend.ranks.replica_mesh.size())
        local_shard = cast(DTensor, parameter.sharded_param).to_local()
        assert len(local_shard) <= share and local_shard.device == DEVICE
        assert not any(gathered.untyped_storage().nbytes() for gathered in parameter.all_gather_outputs)


@pytest.mark.extended
@pytest.mark.parametrize("case", CASES)
def test_a_rank_computes_and_speaks_on_its_device(tmp_path: Path, case: str) -> None:
    arch, recompute, degrees, rank, reads, step_reads = CASES[case]
    shape = tiny_models.make(tmp_path, arch)
    with fake_rank(degrees, rank) as (device, ranks, calls):
        backend = FakeCudaRank(shape, ranks, recompute=recompute)
        tensors = [*backend.base.model.parameters(), *backend.base.model.buffers()]
        assert {tensor.device for tensor in tensors if tensor.numel()} == {DEVICE}
        backend.agree()
        for model_id in ("0", "1"):
            backend.create_model(model_id, LoraSpec(8), "adamw" if model_id == "0" else "dimuon")
            backend.publish(model_id, f"v{model_id}")
        sampler = backend.sampler
        device.strict, device.reads = True, 0
        calls.clear()
        first = Pass("a", "0", data(9, 9, 4, 4), "cross_entropy", {}, False)
        step(backend, first, Pass("b", "1", data(22, 21), "gspo", {}, False))
        assert device.reads == reads
        assert calls["reduce", "cuda"] >= 2, "the gradients"
        assert not calls["isend", "cpu"] and not calls["recv", "cpu"]
        device.reads = 0
        params = [OptimStep("a", "0", AdamParams(1e-3, grad_clip_norm=0.5)), OptimStep("b", "1", DimuonParams(1e-3))]
        assert all(isinstance(outcome, dict) for outcome in backend.optim_step(params))
        backend.publish("0", "v2")
        assert device.reads == 1
        calls.clear()
        sampling = SamplingParams(max_tokens=8, stop_eos=False)
        for sample in (
            make_sample("s", make_prompt(9), sampling, version_id="v2", num_samples=2, topk_sample_logprobs=2),
            make_sample("t", make_prompt(5), sampling, version_id=None, prompt_logprobs=True),
        ):
            if degrees.experts > 1:
                sampler.hold(sample.request_id, sample.version_id)
            sampler.submit(sample)
        reads_by_step = []
        for _ in range(4):
            device.reads = 0
            sampler.step()
            reads_by_step.append(device.reads)
        assert reads_by_step[1:] == [step_reads] * 3
        if degrees.shard_base:
            assert calls["all_gather_single", "cuda"] == 4 * LAYERS, "each layer once in each step"
            calls.clear()
            step(backend, first)
            assert calls["all_gather_single", "cuda"] == 2 * LAYERS, "once in forward and once in backward"
            _check_shards(backend)


@pytest.mark.parametrize("degrees", [Degrees(tensor=2), Degrees(context=2)])
def test_ranks_agree_on_weights_of_a_custom_loss_without_the_device(tmp_path: Path, degrees: Degrees) -> None:
    shape, (loss, datum) = tiny_models.make(tmp_path), custom("clipped")
    with fake_rank(degrees, 1) as (device, ranks, calls):
        backend = FakeCudaRank(shape, ranks)
        backend.create_model("0", LoraSpec(8))
        device.strict, device.reads = True, 0
        calls.clear()
        step(backend, Pass("a", "0", (datum, datum), "custom", {"loss_id": "1"}, False, loss))
        assert device.reads == 2, "the log probabilities that it is a function of, and those of the result"
        assert (calls["broadcast", "cpu"], calls["broadcast", "cuda"]) == (1, 0)


@pytest.mark.parametrize("degrees", [Degrees(2, experts=2, pipeline=2), Degrees(2, tensor=2, context=2, experts=2)])
def test_collectives_are_measured_on_the_device(degrees: Degrees) -> None:
    with fake_rank(degrees, 1) as (_, ranks, calls):
        with mock.patch.object(rates, "measure_matmul", lambda *_: (1.0, 1.0)):
            assert len(rates.measure_rates(ranks, "bfloat16", 64, 1000)) == len(rates.Rates._fields) - 1
        assert {device_type for _, device_type in calls} == {"cuda"}
        ranks.gather_tensor(torch.empty(4, 6, device=DEVICE).t())
