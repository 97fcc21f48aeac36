"""One rank of several on a simulated CUDA device, with torch's fake process group, whose collectives do nothing. Each
is checked against NCCL's rules, or gloo's where its tensors are on the host. The other ranks are taken to be like this
one: `Ranks.gather` repeats its value, and every expert rank gets as many rows as the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from support.fake_cuda import DEVICE, FakeDevice, fake_cuda, load
from tinsmith.backends.distributed import Degrees, expert_parallel
from tinsmith.backends.distributed.model import ShardedBase
from tinsmith.backends.distributed.rank import RankBackend
from tinsmith.backends.distributed.ranks import Ranks
from tinsmith.backends.torch import moe
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.transformer import Decoder
from tinsmith.types import ModelShape

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_single", "all_to_all_single", "isend", "recv")
NCCL_DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8}


def _checked(name: str, own: Callable[..., Any], calls: Counter[tuple[str, str]]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        lists = [arg if isinstance(arg, list) else [arg] for arg in args]
        tensors = [each for part in lists for each in part if isinstance(each, Tensor)]
        (where,) = {each.device for each in tensors}
        assert where in (DEVICE, torch.device("cpu")), f"{name} on {where}"
        (dtype,) = {each.dtype for each in tensors}
        assert dtype in NCCL_DTYPES, f"{name} of {dtype}"
        assert all(each.is_contiguous() for each in tensors), f"{name} of a tensor with gaps"
        assert not any(each.requires_grad for each in tensors) or not torch.is_grad_enabled()
        if name == "all_gather":
            assert {each.shape for each in args[0]} == {args[1].shape}
        if name == "all_gather_single":
            assert args[0].numel() == args[1].numel() * kwargs["group"].size()
        if name == "all_to_all_single":
            for x, way in zip(args, ("output_split_sizes", "input_split_sizes"), strict=True):
                sizes, count = kwargs.get(way), kwargs["group"].size()
                assert (len(sizes), sum(sizes)) == (count, len(x)) if sizes else len(x) % count == 0
        calls[name, where.type] += 1
        return own(*args, **kwargs)

    return call


def _spread_evenly(device: FakeDevice, stack: ExitStack) -> None:
    """The counts that experts read, whose values a simulated device has not."""
    pairs: list[int] = []
    own = expert_parallel.PairOrder.by

    def by(key_N: Tensor) -> object:
        pairs.append(len(key_N))
        return own(key_N)

    def read(counts_EK: Tensor, received_EK: Tensor) -> list[np.ndarray]:
        assert counts_EK.device == received_EK.device == DEVICE
        device.reads += 1
        cells = counts_EK.numel()
        counts = np.bincount(np.arange(pairs[-1]) % cells, minlength=cells).reshape(counts_EK.shape)
        return [counts, counts]

    stack.enter_context(mock.patch.object(expert_parallel.PairOrder, "by", by))

    def read_ends(*ends: Tensor) -> list[np.ndarray]:
        assert {each.device for each in ends} == {DEVICE}
        device.reads += 1
        return [np.arange(1, len(each) + 1) * pairs[-1] // len(each) for each in ends]

    stack.enter_context(mock.patch.object(expert_parallel, "read", read))
    stack.enter_context(mock.patch.object(moe, "read", read_ends))


@contextmanager
def fake_rank(degrees: Degrees, rank: int) -> Iterator[tuple[FakeDevice, Ranks, Counter[tuple[str, str]]]]:
    calls: Counter[tuple[str, str]] = Counter()
    with ExitStack() as stack:
        device = stack.enter_context(fake_cuda(pages=False))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=degrees.devices)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(mock.patch.object(nn.Module, "to", _move))
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, _checked(name, getattr(dist, name), calls)))
        stack.enter_context(mock.patch.object(Ranks, "gather", lambda self, value: [value] * degrees.devices))
        own = Ranks.any_of_forward
        stack.enter_context(mock.patch.object(Ranks, "any_of_forward", lambda self, flag: (own(self, flag), flag)[1]))
        _spread_evenly(device, stack)
        yield device, Ranks(degrees, rank, str(DEVICE), 60.0), calls


def _move(module: nn.Module, device: torch.device) -> nn.Module:
    """`Module.to` of fake tensors, which keeps the parameters' identity as it does for others."""
    for held in (each for own in module.modules() for each in (own._parameters, own._buffers)):
        for value in held.values():
            if value is not None and value.device != device:
                value.data = value.data.to(device)
                value.fake_device = device
    return module


class _Base(ShardedBase):
    def _probe(self, ranks: Ranks | None) -> list[Tensor]:
        """On the host there is nothing to simulate."""
        return [torch.zeros(1)] if ranks is None else super()._probe(ranks)

    def _compared(self, decoder: Decoder) -> Decoder:
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
