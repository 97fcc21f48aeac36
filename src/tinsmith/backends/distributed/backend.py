"""`ShardedBackend`: the Backend protocol over a group of ranks. This is rank 0, which the engine calls.

Commands that change a rank's state are executed by every rank in the same order. Rank 0 writes captures and checkpoints
alone, after it has collected what other ranks hold of the model. Each command is answered, and the answers are
compared. If ranks disagree, a rank exits, or one does not answer within `timeout_s`, the engine ends (`on_lost`), and
its successor replays the log. Called from one thread.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import structlog
import torch
import torch.distributed as dist

from tinsmith.backends import Capture, MicroBatches, RunningProfile
from tinsmith.backends.distributed.collectives import join_process_group, open_store
from tinsmith.backends.distributed.processes import Link, RankProcesses, encode
from tinsmith.backends.distributed.rank import CommandOutcome, Rank, execute
from tinsmith.backends.distributed.rendezvous import (
    Listener,
    Machines,
    describe_version,
    format_address,
    open_server_socket,
)
from tinsmith.backends.distributed.sampler import GroupSampler
from tinsmith.errors import RanksLostError, SettingsError, UserError
from tinsmith.plan.degrees import Degrees
from tinsmith.types import LoraSpec, ModelShape, OptimStep, Pass, PassResult

COMMANDS_WITHOUT_TIMEOUT = frozenset({"load"})
"""Commands without a time limit, such as reading a model from a slow disk. The exit of a rank is noticed anyway."""

INDEPENDENT_COMMANDS = frozenset({"load", "place"})
"""Commands that each rank executes without the others: an error on one rank is raised."""

CHUNK_BYTES = 1 << 26

log = structlog.get_logger()


def end_engine(reason: str) -> None:
    """End this process: the supervisor starts another engine, which replays."""
    log.error("a rank of the base model is lost; this engine ends", reason=reason)
    os._exit(1)


class Group:
    """This process as rank 0, and the other ranks. It outlives a backend: another backend may use the same ranks later.

    With `machines`, waits for the ranks of the other machines first. Rank k * n + i is rank i of machine k, with n
    ranks per machine.
    """

    def __init__(
        self,
        world: int,
        *,
        device: str,
        timeout_s: float,
        on_lost: Callable[[str], None] = end_engine,
        machines: Machines | None = None,
    ) -> None:
        self.world = world
        self.ranks_per_machine = _count_ranks_per_machine(world, machines)
        self._on_lost = on_lost
        self._timeout_s = timeout_s
        self._device_type = device_type = _choose_device_type(device, self.ranks_per_machine)
        threads = max(1, torch.get_num_threads() // self.ranks_per_machine)
        self._store_dir = Path(tempfile.mkdtemp(prefix="tinsmith-ranks-"))  # readable by this user only
        listen_socket = None if machines is None else open_server_socket(machines.host, 0)
        links: dict[int, Link] = {}
        store_address = str(self._store_dir / "store")
        if machines is not None and listen_socket is not None:
            links = self._accept_machines(machines, device_type)
            store_address = f"tcp://{format_address(machines.host, listen_socket.getsockname()[1])}"
        common = {"world": world, "timeout_s": timeout_s, "threads": threads, "store": store_address}
        specs = [{**common, "rank": rank, "device": self._device_of_rank(rank, device_type)} for rank in range(world)]
        self._processes = RankProcesses.start(specs, on_lost, links)
        store = open_store(store_address, world, listen_socket.detach() if listen_socket else None)
        join_process_group(0, world, store, device=self._device_of_rank(0, device_type))
        self.rank_zero = Rank(0, device=self._device_of_rank(0, device_type), timeout_s=timeout_s, threads=threads)

    def _device_of_rank(self, rank: int, device_type: str) -> str:
        return "cpu" if device_type == "cpu" else f"cuda:{rank % self.ranks_per_machine}"

    def _accept_machines(self, machines: Machines, device_type: str) -> dict[int, Link]:
        """The links to the ranks on other machines, by rank."""
        listener = Listener(machines.host, machines.port, machines.key)
        machines.announce(listener.address)
        try:
            links_by_machine = listener.gather(
                machines.count - 1,
                self.ranks_per_machine,
                describe_version(torch.__version__),
                cuda=device_type == "cuda",
            )
        finally:
            machines.announce("")
            listener.close()
        return {
            self.ranks_per_machine * k + i: link
            for k, links in enumerate(links_by_machine, 1)
            for i, link in enumerate(links)
        }

    @contextmanager
    def mirror_directory(self, directory: Path) -> Iterator[None]:
        """Within the block, the other machines have copies of the directory's files."""
        remote_ranks = range(self.ranks_per_machine, self.world, self.ranks_per_machine)  # one rank of each machine
        if not remote_ranks:
            yield
            return
        try:
            for path in sorted(path for path in directory.iterdir() if path.is_file()):
                with path.open("rb") as file:
                    while (content := file.read(CHUNK_BYTES)) or not file.tell():
                        self.call(
                            "place", str(directory), path.name, np.frombuffer(content, np.uint8), ranks=remote_ranks
                        )
                        if not content:
                            break
            yield
        finally:
            self.call("discard", str(directory), ranks=remote_ranks)

    @property
    def pids(self) -> Mapping[int, int]:
        return self._processes.pids

    def call(self, name: str, *args: object, ranks: Sequence[int] | None = None) -> dict[int, object]:
        """Make ranks (all by default) execute a command; returns each rank's answer. Raises their common error."""
        receivers = range(self.world) if ranks is None else ranks
        try:
            other_ranks = [rank for rank in receivers if rank]
            self._processes.send(other_ranks, encode([name, args]))
            outcomes: dict[int, CommandOutcome] = {}
            if 0 in receivers:
                outcomes[0] = execute(self.rank_zero, name, args)
            timeout = None if name in COMMANDS_WITHOUT_TIMEOUT else self._timeout_s
            for rank in other_ranks:
                outcomes[rank] = CommandOutcome.read(self._processes.receive(rank, timeout))
            return _check_agreement(name, outcomes)
        except RanksLostError as error:
            self._on_lost(str(error))
            raise

    def close(self) -> None:
        self._processes.close()
        if self._device_type == "cpu":
            dist.destroy_process_group()
        else:  # NCCL's destruction would wait for the other ranks, which have ended
            dist.distributed_c10d._abort_process_group()
        shutil.rmtree(self._store_dir, ignore_errors=True)


class ShardedBackend:
    """Options are those of the torch backend; `group` has as many ranks as the degrees need. `local` is the backend of
    rank 0.
    """

    def __init__(self, shape: ModelShape, degrees: Degrees, group: Group, **options: str) -> None:
        assert group.world == degrees.devices
        self._group = group
        self._call = group.call
        self._call("join", degrees)
        for index in range(group.ranks_per_machine):  # a machine's memory holds one whole model at a time
            self._call("load", shape, options, ranks=range(index, degrees.devices, group.ranks_per_machine))
        self._call("assemble")
        self.local = group.rank_zero.backend
        self._degrees = degrees
        self._sampler: GroupSampler | None = None

    @property
    def sampler(self) -> GroupSampler:
        if self._sampler is None:
            self._call("open_sampler")
            self._sampler = GroupSampler(self._degrees, self._call)
        return self._sampler

    def sleep(self) -> None:
        self._call("sleep")

    def wake_up(self) -> None:
        self._call("wake_up")

    def create_model(self, model_id: str, spec: LoraSpec, optimizer_type: str = "adamw") -> None:
        self._call("create_model", model_id, spec, optimizer_type)

    def unload_model(self, model_id: str) -> None:
        self._call("unload_model", model_id)

    def has_model(self, model_id: str) -> bool:
        return self.local.has_model(model_id)

    @property
    def model_budget_bytes(self) -> int:
        return self.local.model_budget_bytes

    def model_bytes(self, model_id: str) -> int:
        """Of the rank that holds most."""
        return max(cast("dict[int, int]", self._call("model_bytes", model_id)).values())

    def memory_use(self) -> Mapping[str, int]:
        """The memory of rank 0."""
        return self.local.memory_use()

    def start_profile(self, directory: Path) -> RunningProfile:
        raise UserError("a profile is for an engine on one device; this one has several")

    def run_passes(self, passes: Sequence[Pass]) -> MicroBatches:
        self._call("begin_passes", list(passes))
        try:
            while (outcomes := self._call("run_micro_batch")[0]) is None:
                yield
        except GeneratorExit:
            self._call("abandon_passes")
            raise
        return cast("list[PassResult | UserError]", outcomes)

    def optim_step(self, steps: Sequence[OptimStep]) -> list[dict[str, float] | UserError]:
        answers = self._call("optim_step", list(steps))
        return cast("list[dict[str, float] | UserError]", answers[0])

    def capture(self, model_id: str) -> Capture:
        self._call("collect_model", model_id, True)
        return self.local.capture(model_id)

    def capture_version(self, version_id: str) -> Capture:
        if self._degrees.experts > 1:
            self._call("collect_version", version_id)
        return self.local.capture_version(version_id)

    def version_bytes(self, version_id: str) -> int:
        return self.local.version_bytes(version_id)

    def save(self, model_id: str, directory: Path, *, optimizer: bool, stacked: bool = False) -> None:
        self._call("collect_model", model_id, optimizer)
        self.local.save(model_id, directory, optimizer=optimizer, stacked=stacked)

    def load(
        self, model_id: str, spec: LoraSpec, directory: Path, *, optimizer: bool, optimizer_type: str = "adamw"
    ) -> None:
        with self._group.mirror_directory(directory):
            self._call("load_model", model_id, spec, str(directory), optimizer, optimizer_type)
        self._call("digest", model_id)

    def publish(self, model_id: str, version_id: str) -> None:
        self._call("publish", model_id, version_id)

    def load_version(self, version_id: str, directory: Path) -> None:
        with self._group.mirror_directory(directory):
            self._call("load_version", version_id, str(directory))

    def has_version(self, version_id: str) -> bool:
        return self.local.has_version(version_id)

    def drop_version(self, version_id: str) -> None:
        self._call("drop_version", version_id)


def _check_agreement(name: str, outcomes: Mapping[int, CommandOutcome]) -> dict[int, object]:
    """Return each rank's answer. Raises the ranks' common error, or RanksLostError if their outcomes differ."""
    if name in INDEPENDENT_COMMANDS and (
        error := next((outcome.error for outcome in outcomes.values() if outcome.error), None)
    ):
        raise error
    kinds = {outcome.kind for outcome in outcomes.values()}
    if len(kinds) > 1:
        descriptions = "; ".join(f"rank {rank}: {outcome.description}" for rank, outcome in sorted(outcomes.items()))
        raise RanksLostError(f"ranks differ over {name}: {descriptions}")
    first = outcomes[min(outcomes)]
    if first.error is not None:
        raise first.error
    for key in {key for outcome in outcomes.values() for key in outcome.digests}:
        digests = {rank: outcome.digests[key] for rank, outcome in sorted(outcomes.items()) if key in outcome.digests}
        if len(set(digests.values())) > 1:
            described = "; ".join(f"rank {rank}: {digest}" for rank, digest in digests.items())
            raise RanksLostError(f"ranks have different results for {name}: {described}")
    return {rank: outcome.value for rank, outcome in outcomes.items()}


def _count_ranks_per_machine(world: int, machines: Machines | None) -> int:
    num_machines = 1 if machines is None else machines.count
    if world % num_machines:
        raise SettingsError(
            f"the degrees need {world} devices, and {num_machines} machines cannot have equally many; change one"
        )
    return world // num_machines


def _choose_device_type(device: str, ranks: int) -> str:
    """'cpu' or 'cuda'. Raises SettingsError if this machine has too few devices."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise SettingsError(f"device is {device!r}, but {ranks} devices are needed; choose 'cuda' or 'cpu'")
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise SettingsError(
            f"the product of the degrees needs {ranks} devices on this machine, and there are "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    return device
