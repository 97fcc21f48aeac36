"""The process groups of a rank and their collectives: sums, broadcasts, exchanges, messages, gathers of plain values.

All ranks of a group must call its methods in the same order. A collective that times out, or
fails because a rank is gone, raises RanksLostError, after which the group is unusable. Plain data only; nothing is
unpickled. Knows no model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from tinsmith.backends.distributed.processes import decode, encode
from tinsmith.errors import RanksLostError
from tinsmith.plan.degrees import Degrees

START_TIMEOUT_S = 1800.0
"""How long ranks may take to start; the exit of a rank meanwhile is noticed anyway."""


def open_store(address: str, world: int, listen_fd: int | None = None) -> Store:
    """The store of the process group: a file of one machine, or `tcp://HOST:PORT`, which rank 0 serves on an open
    socket.
    """
    if not address.startswith("tcp://"):
        return dist.FileStore(address, world)  # pyright: ignore[reportPrivateImportUsage]
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host.strip("[]"),
        int(port),
        world,
        is_master=listen_fd is not None,
        timeout=timedelta(seconds=START_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def join_process_group(rank: int, world: int, store: Store, *, device: str) -> None:
    """Join the other processes. NCCL for tensors on CUDA, gloo for everything else."""
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=START_TIMEOUT_S),
    )


class Ranks:
    """This rank's position among the degrees, and its groups. Constructed by all ranks at the same time."""

    def __init__(self, degrees: Degrees, rank: int, device: str, timeout_s: float) -> None:
        self.degrees = degrees
        self.rank = rank
        self.group_index, offset = divmod(rank, degrees.group_size)
        self.stage, self.tensor_index = divmod(offset, degrees.tensor)
        self.data_index, self.context_index = divmod(self.group_index, degrees.context)
        self.device = torch.device(device)
        self._groups: list[dist.ProcessGroup] = []
        group = partial(self._group, timeout=timedelta(seconds=timeout_s))
        all_ranks = list(range(degrees.devices))
        self._all = group(all_ranks)
        stages = [(index, stage) for index in range(degrees.groups) for stage in range(degrees.pipeline)]
        tensor_groups = {position: group(degrees.tensor_group(*position)) for position in stages}
        replica_groups = [group(degrees.replica_group(t)) for t in range(degrees.tensor)]
        self._tensor = self._sampling = tensor_groups[self.group_index, self.stage]
        self._replicas = self._context = replica_groups[self.tensor_index]
        self._sends: deque[tuple[dist.Work, torch.Tensor]] = deque()
        if degrees.context > 1 and degrees.context < len(degrees.replica_group(0)):
            positions = [(d, o) for d in range(degrees.data) for o in range(degrees.group_size)]
            groups = {position: group(degrees.context_group(*position)) for position in positions}
            self._context = groups[self.data_index, offset]
        expert_groups = degrees.expert_groups()
        expert_group_index = next(index for index, ranks in enumerate(expert_groups) if rank in ranks)
        self.expert_index = expert_groups[expert_group_index].index(rank)
        self._holders = {tuple(all_ranks): self._all}
        if degrees.experts > 1:
            same_experts = {tuple(ranks): group(ranks) for ranks in degrees.same_expert_groups() if len(ranks) > 1}
            self._holders |= {ranks: joined for ranks, joined in same_experts.items() if rank in ranks}
            self._experts = [group(ranks) for ranks in expert_groups][expert_group_index]
            stage_groups = [degrees.stage_group(stage) for stage in range(degrees.pipeline)]
            self._in_stage = (
                [group(ranks) for ranks in stage_groups][self.stage] if len(stage_groups) > 1 else self._all
            )
        if degrees.pipeline > 1:
            # One group for each direction: NCCL executes the messages between two ranks of a group in one order.
            groups_by_use = [
                [group(degrees.sampling_group(index)) for index in range(degrees.groups)] for _ in range(3)
            ]
            self._sampling, self._forward, self._backward = (groups[self.group_index] for groups in groups_by_use)

    def close(self) -> None:
        """End the groups, each of which has threads that wake a hundred times a second. No collective may run."""
        for group in self._groups:
            dist.destroy_process_group(group)

    def _group(self, ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
        """All processes must create all groups, including those that they are not in."""
        group = cast(dist.ProcessGroup, dist.new_group(ranks, timeout=timeout))
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            self._groups.append(group)
        return group

    @property
    def replica_mesh(self) -> DeviceMesh:
        return DeviceMesh.from_group(self._replicas, self.device.type)

    def sum_all(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum(x, self._all, self.degrees.devices)

    def sum_replicas(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum(x, self._replicas, self.degrees.groups * self.degrees.pipeline)

    def sum_context(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum(x, self._context, self.degrees.context)

    def exchange_context(self, x_CnW: torch.Tensor) -> torch.Tensor:
        """[C, n, W]: sends part c to context rank c; returns the part from each rank. Applied twice, it returns x."""
        received = torch.empty_like(x_CnW)
        with self._convert_errors("an exchange"):
            dist.all_to_all_single(received, x_CnW, group=self._context)
        return received

    def send_context(self, x: torch.Tensor, step: int) -> None:
        """Begin to send to the next context rank, or with `step` -1 to the previous one."""
        while self._sends and self._sends[0][0].is_completed():
            self.finish(self._sends.popleft()[0])
        x = x.contiguous()
        self._sends.append((self._begin_send(x, self.rank + step * self.degrees.group_size, self._context), x))

    def receive_context(self, x: torch.Tensor, step: int) -> dist.Work:
        """Begin to fill the contiguous tensor with the next message of that rank; `finish` waits for the handle."""
        with self._convert_errors("a message"):
            handle = dist.irecv(x, src=self.rank + step * self.degrees.group_size, group=self._context)
        assert handle is not None
        return handle

    def exchange_experts(
        self, x: torch.Tensor, input_splits: list[int] | None = None, output_splits: list[int] | None = None
    ) -> torch.Tensor:
        """Send `input_splits` rows to each expert rank, in order; returns the `output_splits` rows from each. Without
        splits, all parts are equal.
        """
        x = x.contiguous()
        received = torch.empty_like(x) if output_splits is None else x.new_empty(sum(output_splits), *x.shape[1:])
        with self._convert_errors("an exchange"):
            dist.all_to_all_single(
                received, x, output_split_sizes=output_splits, input_split_sizes=input_splits, group=self._experts
            )
        return received

    def sum_sampling(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum(x, self._sampling, self.degrees.group_size)

    def sum_tensor(self, x: torch.Tensor) -> torch.Tensor:
        """Sums bfloat16 in float32 where that is cheap, on a CPU."""
        if x.dtype == torch.bfloat16 and not x.is_cuda:
            return self._sum(x.float(), self._tensor, self.degrees.tensor).to(x.dtype)
        return self._sum(x, self._tensor, self.degrees.tensor)

    def max_tensor(self, x: torch.Tensor) -> torch.Tensor:
        """The largest of the tensor ranks' values, in place."""
        with self._convert_errors("a maximum"):
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self._tensor)
        return x

    def gather_tensor(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenates the tensor ranks' last dimensions."""
        if self.degrees.tensor == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.degrees.tensor)]
        with self._convert_errors("a gathering"):
            dist.all_gather(parts, x, group=self._tensor)
        return torch.cat(parts, -1)

    def gather_replicas(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers a shard of x from each rank with the same heads and columns, as FSDP gathers a layer."""
        count = self.degrees.groups * self.degrees.pipeline
        shard_size = len(x) // count
        gathered = x.new_empty(shard_size * count)
        with self._convert_errors("a gathering"):
            dist.all_gather_single(gathered, x[:shard_size], group=self._replicas)
        return gathered

    def broadcast_tensor(self, x: torch.Tensor) -> torch.Tensor:
        """The first tensor rank's value, on all tensor ranks."""
        return self._broadcast(x, self.degrees.tensor_group(self.group_index, self.stage), self._tensor)

    def broadcast_context(self, x: torch.Tensor) -> torch.Tensor:
        """The first context rank's value, on all context ranks."""
        group = self.degrees.context_group(self.data_index, self.rank % self.degrees.group_size)
        return self._broadcast(x, group, self._context)

    def broadcast_sampling(self, x: torch.Tensor) -> torch.Tensor:
        """The value of the last stage's first rank, on all ranks that sample together."""
        group, first = self.degrees.sampling_group(self.group_index), (self.degrees.pipeline - 1) * self.degrees.tensor
        return self._broadcast(x, group[first:] + group[:first], self._sampling)

    def sum_holders(self, x: torch.Tensor, holders: tuple[int, ...]) -> torch.Tensor:
        """Sums over ranks that hold the same parameters: all ranks, or those with this rank's experts."""
        return x if len(holders) == 1 else self._sum(x, self._holders[holders], len(holders))

    def sum_to(self, x: torch.Tensor, rank: int, holders: tuple[int, ...]) -> None:
        """Replace the contiguous tensor on one of the holders by their sum; the others must not use theirs again."""
        if len(holders) > 1 and len(x):
            with self._convert_errors("a sum"):
                dist.reduce(x, rank, group=self._holders[holders])

    def broadcast_from(self, x: torch.Tensor, rank: int, holders: tuple[int, ...]) -> None:
        """Fill the contiguous tensor on all holders with that of one."""
        if len(holders) > 1 and len(x):
            with self._convert_errors("a broadcast"):
                dist.broadcast(x, rank, group=self._holders[holders])

    def send_to_first(self, x: torch.Tensor) -> None:
        """Send to rank 0, which calls `receive_from`."""
        with self._convert_errors("a message"):
            dist.send(x.contiguous(), dst=0, group=self._all)

    def receive_from(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        """Fill the contiguous tensor with the next message of `send_to_first`."""
        return self._receive(x, rank, self._all)

    def send(self, x: torch.Tensor, *, forward: bool) -> dist.Work:
        """Begin to send to the same rank of the next stage, or of the previous one. The tensor must not change until
        `finish` has waited for the returned handle.
        """
        group, peer = self._neighbour(forward)
        return self._begin_send(x, peer, group)

    def _begin_send(self, x: torch.Tensor, peer: int, group: dist.ProcessGroup) -> dist.Work:
        with self._convert_errors("a message"):
            handle = dist.isend(x, dst=peer, group=group)
        assert handle is not None
        return handle

    def receive(self, x: torch.Tensor, *, forward: bool) -> torch.Tensor:
        """Fill the tensor with the next message in this direction."""
        group, _ = self._neighbour(forward)
        return self._receive(x, self._neighbour(not forward)[1], group)

    def _receive(self, x: torch.Tensor, rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        with self._convert_errors("a message"):
            dist.recv(x, src=rank, group=group)
        return x

    def finish(self, handle: dist.Work) -> None:
        with self._convert_errors("a message"):
            handle.wait()

    def _neighbour(self, forward: bool) -> tuple[dist.ProcessGroup, int]:
        """The group of messages in a direction, and the rank that they are sent to."""
        step = self.degrees.tensor
        return (self._forward, self.rank + step) if forward else (self._backward, self.rank - step)

    def any_of_forward(self, flag: bool) -> bool:
        """Whether the flag is set on any of the ranks that run each forward together. Does not wait for the device."""
        flags = torch.tensor(float(flag))
        if self.degrees.experts > 1:
            return bool(self._sum(flags, self._in_stage, self.degrees.stage_size))
        return bool(self.sum_context(self.sum_tensor(flags)))

    def gather(self, value: object) -> list[object]:
        """Every rank's plain value, in rank order."""
        content = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.degrees.devices)]
        with self._convert_errors("an agreement"):
            dist.all_gather(sizes, torch.tensor([len(content)]), group=self._all)
            max_size = max(int(size) for size in sizes)
            padded = torch.zeros(max_size, dtype=torch.uint8)
            padded[: len(content)] = content
            parts = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(parts, padded, group=self._all)
        return [decode(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def _broadcast(self, x: torch.Tensor, ranks: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
        """The first rank's value."""
        if len(ranks) == 1:
            return x
        shared = x.contiguous()
        with self._convert_errors("a broadcast"):
            dist.broadcast(shared, ranks[0], group=group)
        return shared

    def _sum(self, x: torch.Tensor, group: dist.ProcessGroup, size: int) -> torch.Tensor:
        """Reduces in place where possible; the argument must not be used again."""
        if size == 1:
            return x
        x = x.contiguous()
        with self._convert_errors("a sum"):
            dist.all_reduce(x, group=group)
        return x

    @contextmanager
    def _convert_errors(self, collective: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            first_line = str(error).strip().partition("\n")[0]
            raise RanksLostError(f"rank {self.rank}: {collective} with other ranks failed: {first_line}") from error
