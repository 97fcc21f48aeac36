"""The collectives of a group of ranks: sums, broadcasts, gathers of plain values.

Every method is called by all ranks that it concerns, in the same order: that is the whole protocol. A collective that
times out, or fails because a rank is gone, raises RanksLostError, after which the group is unusable. Plain data only;
nothing is unpickled. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tinsmith.backends.distributed.processes import decode, encode
from tinsmith.errors import RanksLostError
from tinsmith.plan.degrees import Degrees

MEETING_S = 1800.0
"""How long ranks may take to start; a rank that ends meanwhile is noticed all the same."""


def meet(rank: int, world: int, meeting: Path, *, device: str) -> None:
    """Join the other processes. NCCL for tensors on CUDA, gloo for everything else."""
    if device.startswith("cuda"):
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo",
        store=dist.FileStore(str(meeting / "store"), world),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=MEETING_S),
    )


class Ranks:
    """This rank's place among the degrees, and its groups. Made by all ranks at the same time."""

    def __init__(self, degrees: Degrees, rank: int, device: str, timeout_s: float) -> None:
        self.degrees = degrees
        self.rank = rank
        self.data_index, self.tensor_index = divmod(rank, degrees.tensor)
        self.device = torch.device("cuda", rank) if device.startswith("cuda") else torch.device("cpu")
        patience = timedelta(seconds=timeout_s)
        everyone = list(range(degrees.devices))
        self._all = _group(everyone, patience)
        tensor_groups = [_group(degrees.tensor_group(d), patience) for d in range(degrees.data)]
        data_groups = [_group(degrees.data_group(t), patience) for t in range(degrees.tensor)]
        self._tensor = tensor_groups[self.data_index]
        self._data = data_groups[self.tensor_index]

    @property
    def data_mesh(self) -> DeviceMesh:
        return DeviceMesh.from_group(self._data, self.device.type)

    def sum_all(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum(x, self._all, self.degrees.devices)

    def sum_data(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum(x, self._data, self.degrees.data)

    def sum_tensor(self, x: torch.Tensor) -> torch.Tensor:
        """Of bfloat16, too, in float32 where that costs little: on a CPU."""
        if x.dtype == torch.bfloat16 and not x.is_cuda:
            return self._sum(x.float(), self._tensor, self.degrees.tensor).to(x.dtype)
        return self._sum(x, self._tensor, self.degrees.tensor)

    def beside(self, x: torch.Tensor) -> torch.Tensor:
        """Every tensor rank's last dimension, one after the other."""
        if self.degrees.tensor == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.degrees.tensor)]
        with self._naming("a gathering"):
            dist.all_gather(parts, x.contiguous(), group=self._tensor)
        return torch.cat(parts, -1)

    def first_of_tensor(self, x: torch.Tensor) -> torch.Tensor:
        """The first tensor rank's, on all of them."""
        if self.degrees.tensor == 1:
            return x
        shared = x.contiguous()
        with self._naming("a broadcast"):
            dist.broadcast(shared, self.degrees.tensor_group(self.data_index)[0], group=self._tensor)
        return shared

    def any_of_tensor(self, flag: bool) -> bool:
        return bool(self.sum_tensor(torch.tensor(float(flag), device=self.device)))

    def gather(self, value: object) -> list[object]:
        """Every rank's plain value, in the order of ranks."""
        content = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.degrees.devices)]
        with self._naming("an agreement"):
            dist.all_gather(sizes, torch.tensor([len(content)]), group=self._all)
            most = max(int(size) for size in sizes)
            padded = torch.zeros(most, dtype=torch.uint8)
            padded[: len(content)] = content
            parts = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(parts, padded, group=self._all)
        return [decode(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def _sum(self, x: torch.Tensor, group: dist.ProcessGroup, size: int) -> torch.Tensor:
        """The argument itself where that is possible; it is used up."""
        if size == 1:
            return x
        x = x.contiguous()
        with self._naming("a sum"):
            dist.all_reduce(x, group=group)
        return x

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            first_line = str(error).strip().partition("\n")[0]
            raise RanksLostError(f"rank {self.rank}: {what} with other ranks failed: {first_line}") from error


def _group(ranks: list[int], patience: timedelta) -> dist.ProcessGroup:
    """All processes make all groups, those that they are in and those that they are not."""
    return cast(dist.ProcessGroup, dist.new_group(ranks, timeout=patience))
