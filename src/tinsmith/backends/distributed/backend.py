"""`ShardedBackend`: the Backend protocol over a group of ranks. This is rank 0, which the engine calls.

Commands that change a rank's state are executed by every rank in the same order; a capture or a checkpoint only reads,
and rank 0 makes it alone, since adapters and optimizer states are complete on every rank. Each command is answered, and
the answers are compared. If ranks disagree, a rank exits, or one does not answer within `timeout_s`, the engine ends
(`on_lost`), and its successor replays the log. Called from one thread.
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

from tinsmith.backends import Capture, MicroBatches
from tinsmith.backends.distributed.joining import Listener, Machines, address_of, listening_socket, version
from tinsmith.backends.distributed.processes import Link, RankProcesses, encode
from tinsmith.backends.distributed.rank import CommandOutcome, Rank, execute
from tinsmith.backends.distributed.ranks import join_process_group, open_store
from tinsmith.backends.distributed.sampler import GroupSampler
from tinsmith.errors import RanksLostError, SettingsError, UserError
from tinsmith.plan.degrees import Degrees
from tinsmith.types import LoraSpec, ModelShape, OptimStep, Pass, PassResult

WITHOUT_TIMEOUT = frozenset({"load"})
"""Commands without a time limit, such as reading a model from a slow disk. The exit of a rank is noticed anyway."""

ALONE = frozenset({"load", "place"})
"""Commands that a rank executes by itself: one that fails on a rank fails."""

CHUNK_BYTES = 1 << 26

log = structlog.get_logger()


def end_engine(reason: str) -> None:
    """End this process: the supervisor starts another engine, which replays."""
    log.error("a rank of the base model is lost; this engine ends", reason=reason)
    os._exit(1)


class Group:
    """This process as rank 0, and the other ranks. It outlives a backend: another one may use the same ranks later.

    With `machines`, the ranks of the others are awaited first. Rank k * n + i is the i-th of machine k, with n ranks on
    each.
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
        self.ranks_here = _ranks_here(world, machines)
        self._on_lost = on_lost
        self._timeout_s = timeout_s
        self._device = device = _device(device, self.ranks_here)
        threads = max(1, torch.get_num_threads() // self.ranks_here)
        self._rendezvous_dir = Path(tempfile.mkdtemp(prefix="tinsmith-ranks-"))  # readable by this user only
        listening = None if machines is None else listening_socket(machines.host, 0)
        links: dict[int, Link] = {}
        place = str(self._rendezvous_dir / "store")
        if machines is not None and listening is not None:
            links = self._await(machines, device)
            place = f"tcp://{address_of(machines.host, listening.getsockname()[1])}"
        common = {"world": world, "timeout_s": timeout_s, "threads": threads, "store": place}
        specs = [{**common, "rank": rank, "device": self._device_of(rank, device)} for rank in range(world)]
        self._others = RankProcesses.start(specs, on_lost, links)
        store = open_store(place, world, listening.detach() if listening else None)
        join_process_group(0, world, store, device=self._device_of(0, device))
        self.own = Rank(0, device=self._device_of(0, device), timeout_s=timeout_s, threads=threads)

    def _device_of(self, rank: int, device: str) -> str:
        return "cpu" if device == "cpu" else f"cuda:{rank % self.ranks_here}"

    def _await(self, machines: Machines, device: str) -> dict[int, Link]:
        """The links of the ranks on other machines, by rank."""
        listener = Listener(machines.host, machines.port, machines.key)
        machines.announce(listener.address)
        try:
            found = listener.gather(
                machines.count - 1, self.ranks_here, version(torch.__version__), cuda=device == "cuda"
            )
        finally:
            machines.announce("")
            listener.close()
        return {self.ranks_here * k + i: link for k, links in enumerate(found, 1) for i, link in enumerate(links)}

    @contextmanager
    def placed(self, directory: Path) -> Iterator[None]:
        """The files of this directory, on the other machines as well."""
        elsewhere = range(self.ranks_here, self.world, self.ranks_here)  # one rank of each machine
        if not elsewhere:
            yield
            return
        try:
            for path in sorted(path for path in directory.iterdir() if path.is_file()):
                with path.open("rb") as file:
                    while (content := file.read(CHUNK_BYTES)) or not file.tell():
                        self.call("place", str(directory), path.name, np.frombuffer(content, np.uint8), ranks=elsewhere)
                        if not content:
                            break
            yield
        finally:
            self.call("discard", str(directory), ranks=elsewhere)

    @property
    def pids(self) -> Mapping[int, int]:
        return self._others.pids

    def call(self, name: str, *args: object, ranks: Sequence[int] | None = None) -> dict[int, object]:
        """Make ranks (all by default) execute a command; returns each rank's answer. Raises their common error."""
        chosen = range(self.world) if ranks is None else ranks
        try:
            others = [rank for rank in chosen if rank]
            self._others.send(others, encode([name, args]))
            outcomes: dict[int, CommandOutcome] = {}
            if 0 in chosen:
                outcomes[0] = execute(self.own, name, args)
            timeout = None if name in WITHOUT_TIMEOUT else self._timeout_s
            for rank in others:
                outcomes[rank] = CommandOutcome.read(self._others.receive(rank, timeout))
            return _agreed(name, outcomes)
        except RanksLostError as error:
            self._on_lost(str(error))
            raise

    def close(self) -> None:
        self._others.close()
        if self._device == "cpu":
            dist.destroy_process_group()
        else:  # NCCL's destruction would wait for the other ranks, which have ended
            dist.distributed_c10d._abort_process_group()
        shutil.rmtree(self._rendezvous_dir, ignore_errors=True)


class ShardedBackend:
    """Options are those of the torch backend; `group` has as many ranks as the degrees need. `own` is rank 0's."""

    def __init__(self, shape: ModelShape, degrees: Degrees, group: Group, **options: str) -> None:
        assert group.world == degrees.devices
        self._group = group
        self._call = group.call
        self._call("join", degrees)
        for index in range(group.ranks_here):  # a machine's memory holds one whole model at a time
            self._call("load", shape, options, ranks=range(index, degrees.devices, group.ranks_here))
        self._call("assemble")
        self.own = group.own.backend
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
        return self.own.has_model(model_id)

    @property
    def model_budget_bytes(self) -> int:
        return self.own.model_budget_bytes

    def model_bytes(self, model_id: str) -> int:
        return self.own.model_bytes(model_id)

    def memory_use(self) -> Mapping[str, int]:
        """The memory of rank 0."""
        return self.own.memory_use()

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

    def capture(self, model_id: str, *, optimizer: bool, gradient: bool = False) -> Capture:
        return self.own.capture(model_id, optimizer=optimizer, gradient=gradient)

    def capture_version(self, version_id: str) -> Capture:
        return self.own.capture_version(version_id)

    def save(self, model_id: str, directory: Path, *, optimizer: bool, stacked: bool = False) -> None:
        self.own.save(model_id, directory, optimizer=optimizer, stacked=stacked)

    def load(
        self, model_id: str, spec: LoraSpec, directory: Path, *, optimizer: bool, optimizer_type: str = "adamw"
    ) -> None:
        with self._group.placed(directory):
            self._call("load_model", model_id, spec, str(directory), optimizer, optimizer_type)
        self._call("digest", model_id)

    def publish(self, model_id: str, version_id: str) -> None:
        self._call("publish", model_id, version_id)

    def load_version(self, version_id: str, directory: Path) -> None:
        with self._group.placed(directory):
            self._call("load_version", version_id, str(directory))

    def save_version(self, version_id: str, directory: Path) -> None:
        self.own.save_version(version_id, directory)

    def has_version(self, version_id: str) -> bool:
        return self.own.has_version(version_id)

    def drop_version(self, version_id: str) -> None:
        self._call("drop_version", version_id)


def _agreed(name: str, outcomes: Mapping[int, CommandOutcome]) -> dict[int, object]:
    if name in ALONE and (failed := next((one.error for one in outcomes.values() if one.error), None)):
        raise failed
    kinds = {outcome.kind for outcome in outcomes.values()}
    if len(kinds) > 1:
        described = "; ".join(f"rank {rank}: {outcome.described}" for rank, outcome in sorted(outcomes.items()))
        raise RanksLostError(f"ranks differ over {name}: {described}")
    first = outcomes[min(outcomes)]
    if first.error is not None:
        raise first.error
    if len({outcome.digest for outcome in outcomes.values()}) > 1:
        digests = "; ".join(f"rank {rank}: {outcome.digest}" for rank, outcome in sorted(outcomes.items()))
        raise RanksLostError(f"ranks have different results for {name}: {digests}")
    return {rank: outcome.value for rank, outcome in outcomes.items()}


def _ranks_here(world: int, machines: Machines | None) -> int:
    count = 1 if machines is None else machines.count
    if world % count:
        raise SettingsError(
            f"the degrees need {world} devices, and {count} machines cannot have equally many; change one"
        )
    return world // count


def _device(device: str, ranks: int) -> str:
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
