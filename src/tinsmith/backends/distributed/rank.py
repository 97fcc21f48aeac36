"""One rank and the commands that it executes. Rank 0 is in the engine's process; each other rank is a process.

`RankBackend` is the torch backend for ranks: its base may be sharded, and all ranks take part in its steps. `Rank` has
the commands; `execute` runs one and returns a `CommandOutcome`, plain data that rank 0 compares.
"""

from __future__ import annotations

import gc
import hashlib
import math
import operator
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import structlog
import torch

from tinsmith.backends import MicroBatches
from tinsmith.backends.distributed.collectives import Ranks
from tinsmith.backends.distributed.model import ShardedBase, load_base
from tinsmith.backends.distributed.placement import Cut, Placement, RankShare, list_regions
from tinsmith.backends.distributed.processes import Link, decode, encode
from tinsmith.backends.distributed.rates import measure_rates
from tinsmith.backends.distributed.sampler import RankSampler, SampleOutcomes
from tinsmith.backends.distributed.trainer import RankedTrainer
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.adapters import Adapter, Layout, TrainedModel
from tinsmith.backends.torch.checkpoint import Tensor
from tinsmith.backends.torch.memory import memory_errors
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.optim import PreparedStep, measure_gradients, prepare_measured_step
from tinsmith.errors import RankFailedError, RanksLostError, SettingsError, TinsmithError, UserError
from tinsmith.plan.degrees import Degrees
from tinsmith.samplers import CacheUse
from tinsmith.types import OPTIMIZERS, LoraSpec, ModelShape, OptimParams, Partial, Pass, PassResult

T = TypeVar("T")

RANK_COMMANDS = frozenset(
    {
        "join", "load", "assemble", "load_model", "begin_passes", "run_micro_batch", "abandon_passes", "load_version",
        "step", "digest", "open_sampler", "place", "discard", "measure",
    }
)  # fmt: skip
BACKEND_COMMANDS = frozenset(
    {
        "create_model", "unload_model", "model_bytes", "optim_step", "collect_model", "collect_version", "publish",
        "drop_version", "sleep", "wake_up",
    }
)  # fmt: skip
SAMPLER_COMMANDS = frozenset({"submit", "cancel", "pause", "hold", "release"})
"""The commands that messages may name: methods of the rank, of its backend, and of its sampler."""


COMPARED_BYTES = 1 << 16
"""Of the end of each file of weights; the files themselves are too large to read twice."""


def digest_of_files(directory: Path) -> str:
    """A digest of the configuration and of the names, sizes and last bytes of a base model's weights."""
    digest = hashlib.blake2b((directory / "config.json").read_bytes(), digest_size=16)
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            file.seek(max(0, size - COMPARED_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


def allocate_host(count: int, num_elements: int) -> list[Tensor]:
    return [torch.zeros(num_elements) for _ in range(count)]


class RankBackend(TorchBackend):
    def __init__(self, shape: ModelShape, ranks: Ranks, **options: str) -> None:
        self.ranks = ranks
        if options.get("deterministic") == "on":
            raise SettingsError(
                "deterministic is 'on', and the bits of a sum over ranks depend on how many there are; leave "
                "data_parallel, context_parallel, pipeline_parallel and tensor_parallel at 1"
            )
        self._base_name, self._files = shape.name, digest_of_files(Path(shape.path))
        self._placement = Placement(ranks, [{}] * ranks.degrees.devices)
        self._collected: TrainedModel | None = None
        self._collected_version: Adapter | None = None
        super().__init__(shape, **options)
        if isinstance(self._base, ShardedBase):
            self._module_names = self._base.module_names

    def agree(self) -> None:
        """Check, with all ranks, that all have the same files and that the shards reproduce the unsharded model, and
        set the smallest memory budget.
        """
        if len(set(self.ranks.gather(self._files))) > 1:
            raise SettingsError(
                f"the files of base model {self._base_name} differ between the machines of its ranks; give all of them "
                "the same files"
            )
        if isinstance(self._base, ShardedBase):
            experts_by_rank = self.ranks.gather(
                {name: [r.start, r.stop] for name, r in self._base.local_experts.items()}
            )
            self._placement = Placement(
                self.ranks,
                [
                    {name: range(*bounds) for name, bounds in local_experts.items()}
                    for local_experts in cast("list[dict[str, list[int]]]", experts_by_rank)
                ],
            )
            self._base.compare()
        super()._log_kernels()
        self._model_budget_bytes = min(cast("list[int]", self.ranks.gather(self._model_budget_bytes)))

    def _log_kernels(self) -> None:
        """Does nothing: `agree` logs the kernels, since on CUDA that runs a forward, which may need all ranks."""

    def digests(self, model_id: str) -> dict[str, str]:
        """Digest of each region of an adapter's weights, which are equal on all of its holders."""
        adapter = self._model(model_id).adapter
        regions = list_regions(adapter.layout, self.ranks.degrees, self.ranks.rank)
        weights = {str(region.holders): adapter.flat_P[region.start : region.stop] for region in regions}
        return {
            holders: hashlib.blake2b(weights_P.cpu().numpy().tobytes(), digest_size=16).hexdigest()
            for holders, weights_P in weights.items()
        }

    def _load_base(self, shape: ModelShape, *, device: str, dtype: str, recompute: str, quantize: str) -> BaseModel:
        return load_base(shape, self.ranks, dtype=dtype, recompute=recompute, quantize=quantize)

    def _make_trainer(self, max_tokens: int, chunk_rows: int) -> RankedTrainer:
        return RankedTrainer(self._base, max_tokens, chunk_rows, self.ranks)

    def _make_sampler(self) -> RankSampler:
        return RankSampler(self._base, self._versions, self.ranks, self._sampler_options())

    def collect_model(self, model_id: str, gradient: bool) -> None:
        """Bring a copy of the whole model to rank 0, for the capture or the checkpoint that it makes next: weights of
        other ranks' experts, moments and, if asked for, the gradient to its host.
        """
        trained, self._collected = self._model(model_id), None
        assert isinstance(trained.share, RankShare)
        weights = self._collect_weights(trained.adapter)
        if any(self.ranks.gather(trained.moments is not None)):
            # A step for which one rank had no memory may have left zeros on others.
            count = len(OPTIMIZERS[trained.optimizer_type].state)
            self._run_together(lambda: trained.moments or trained.moments_or_zeros(count))
        moments = trained.moments or ()
        stepped = [*moments, *([trained.gradient_P] if gradient and trained.gradient_P is not None else [])]
        collected = self._gather_whole(trained.adapter.layout, stepped, trained.share.cut)
        if self.ranks.rank == 0:
            gradient_P = collected.pop() if len(stepped) > len(moments) else None
            step, optimizer_type = trained.step.clone(), trained.optimizer_type
            self._collected = TrainedModel(weights, gradient_P, tuple(collected) or None, step, optimizer_type)

    def collect_version(self, version_id: str) -> None:
        """Bring a whole version to rank 0, for the capture that it makes next."""
        self._collected_version = self._collect_weights(self._version(version_id))

    def _collect_weights(self, adapter: Adapter) -> Adapter:
        """On rank 0, a copy of the whole adapter."""
        if self.ranks.degrees.experts == 1:
            return self._run_together(lambda: adapter if self.ranks.rank else adapter.snapshot())[0]
        spans = RankShare(self.ranks, adapter.layout, Cut.FIRST).spans
        size, end = sum(span.stop - span.start for span in spans), spans[-1].stop  # the last elements, or all, or none
        collected = self._gather_whole(adapter.layout, [adapter.flat_P[end - size : end]], Cut.FIRST)
        if self.ranks.rank:
            return adapter
        return Adapter(adapter.spec, adapter.layout.whole, collected[0], torch.float32)

    def _gather_whole(self, layout: Layout, parts: Sequence[Tensor], cut: Cut) -> list[Tensor]:
        """On rank 0, buffers of the whole layout on the host, from the parts [p] that all ranks have by this cut.
        Raises MemoryError on all ranks if the host has no room for them.
        """
        count = len(parts) if self.ranks.rank == 0 else 0
        buffers, _ = self._run_together(lambda: allocate_host(count, layout.whole.numel))
        self._placement.collect(layout, parts, cut, buffers)
        return buffers

    def _copy_model(self, model_id: str) -> TrainedModel:
        return self._whole_model(model_id)

    def _whole_model(self, model_id: str) -> TrainedModel:
        trained, self._collected = self._collected, None
        assert trained is not None
        return trained

    def _whole_version(self, version_id: str) -> Adapter:
        adapter, self._collected_version = self._collected_version, None
        return self._version(version_id) if adapter is None else adapter

    def _prepare_step(self, requests: Sequence[tuple[TrainedModel, OptimParams]]) -> PreparedStep:
        """Raises MemoryError on all ranks if memory runs out on one: the others would wait for its elements."""
        measured, norms_by_rank = self._run_together(partial(measure_gradients, requests), operator.attrgetter("norms"))
        # Each rank has other elements, so the squares of the norms add up.
        norms = [math.hypot(*parts) for parts in zip(*cast("list[list[float]]", norms_by_rank), strict=True)]
        prepared, _ = self._run_together(partial(prepare_measured_step, measured, norms))
        return prepared

    def _run_together(
        self, compute: Callable[[], T], report: Callable[[T], object] = lambda _: None
    ) -> tuple[T, list[object]]:
        """The result of a computation that all ranks make, and what each of them reports of it, plain data. Raises
        MemoryError on all ranks if memory runs out on one.
        """
        result, problem = None, None
        try:
            with memory_errors(self._base.device):
                result = compute()
        except MemoryError as error:
            problem = str(error)
        reports = self.ranks.gather([problem, None if result is None else report(result)])
        answers = cast("list[tuple[str | None, object]]", reports)
        problems = [text for text, _ in answers if text is not None]
        if result is None or problems:
            raise MemoryError(problems[0])
        return result, [value for _, value in answers]

    def _build_model(self, adapter: Adapter, optimizer_type: str) -> TrainedModel:
        cut = Cut.ELEMENTS if OPTIMIZERS[optimizer_type].is_elementwise else Cut.MATRICES
        return replace(super()._build_model(adapter, optimizer_type), share=RankShare(self.ranks, adapter.layout, cut))

    def _adapter(self, spec: LoraSpec, layout: Layout, flat_P: Tensor) -> Adapter:
        if isinstance(self._base, ShardedBase):
            return self._base.adapter(spec, layout, flat_P)
        return super()._adapter(spec, layout, flat_P)


@dataclass(frozen=True, slots=True)
class RemoteMachine:
    """A machine other than rank 0's: `base_models` maps names to directories, and `scratch` is a directory of all ranks
    of the machine, for files that rank 0 sends.
    """

    base_models: Mapping[str, str]
    scratch: Path


class Rank:
    def __init__(
        self, rank: int, *, device: str, timeout_s: float, threads: int, machine: RemoteMachine | None = None
    ) -> None:
        """`device` is 'cpu' or 'cuda:N'. `machine` is None on rank 0's machine."""
        self._machine = machine
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        self._ranks: Ranks | None = None
        self._backend: RankBackend | None = None
        self._passes: MicroBatches | None = None
        if device == "cpu":
            # The same number on every rank, since it decides the order in which threads add.
            torch.set_num_threads(threads)

    @property
    def backend(self) -> RankBackend:
        assert self._backend is not None
        return self._backend

    def join(self, degrees: Degrees) -> None:
        self._backend = None
        if self._ranks is not None:
            gc.collect()  # meshes of the model before refer to its groups
            self._ranks.close()
        self._ranks = Ranks(degrees, self._rank, self._device, self._timeout_s)

    def measure(self, dtype: str, hidden: int, num_weights: int) -> list[list[float]]:
        assert self._ranks is not None
        return measure_rates(self._ranks, dtype, hidden, num_weights)

    def load(self, shape: ModelShape, options: Mapping[str, str]) -> None:
        """Load the base model. Called on one rank after the other, so that the host holds one unsharded model at a
        time.
        """
        assert self._ranks is not None
        if self._machine is not None:
            shape = replace(shape, path=self._machine.base_models.get(shape.name, shape.path))
        if not Path(shape.path).is_dir():
            raise SettingsError(
                f"rank {self._rank} finds no directory {shape.path} on {socket.gethostname()}; pass --model "
                f"{shape.name}=DIRECTORY to `tinsmith rank` there"
            )
        self._backend = RankBackend(shape, self._ranks, **options)

    def place(self, directory: str, name: str, content: np.ndarray) -> None:
        """Append to a file of this machine's copy of rank 0's directory."""
        path = self._local_path(directory) / Path(name).name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with path.open("ab") as file:
            file.write(content.tobytes())

    def discard(self, directory: str) -> None:
        """Delete what `place` wrote."""
        shutil.rmtree(self._local_path(directory), ignore_errors=True)

    def _local_path(self, directory: str) -> Path:
        if self._machine is None:
            return Path(directory)
        return self._machine.scratch / hashlib.blake2b(directory.encode(), digest_size=16).hexdigest()

    def assemble(self) -> None:
        self.backend.agree()

    def open_sampler(self) -> None:
        """Allocate the KV cache, with all ranks. An external sampler needs none."""
        _ = self.backend.sampler

    def load_model(self, model_id: str, spec: LoraSpec, directory: str, optimizer: bool, optimizer_type: str) -> None:
        self.backend.load(
            model_id, spec, self._local_path(directory), optimizer=optimizer, optimizer_type=optimizer_type
        )

    def digest(self, model_id: str) -> dict[str, str]:
        """Digests of an adapter's weights, by the ranks that hold them."""
        return self.backend.digests(model_id)

    def begin_passes(self, passes: Sequence[Pass]) -> None:
        """Prepare a step, which runs micro-batch by micro-batch."""
        self._passes = self.backend.run_passes(passes)

    def run_micro_batch(self) -> list[PassResult | UserError] | None:
        """Run to the next pause (returns None) or to the end (returns the outcome of each pass)."""
        assert self._passes is not None
        try:
            next(self._passes)
        except StopIteration as end:
            return end.value
        return None

    def abandon_passes(self) -> None:
        assert self._passes is not None
        self._passes.close()

    def load_version(self, version_id: str, directory: str) -> None:
        self.backend.load_version(version_id, self._local_path(directory))

    def step(self, scopes: Sequence[str] | None) -> tuple[SampleOutcomes, list[Partial], CacheUse]:
        sampler = self.backend.sampler
        return sampler.step(scopes), sampler.partials(), sampler.cache_use()


log = structlog.get_logger()

COMPARED = frozenset({"optim_step", "digest"})
"""Commands whose results must be equal on all ranks, or, if they are mappings, under each key that several have."""

SILENT = frozenset({"run_micro_batch"})
"""Commands with large results that are the same on every rank: only rank 0's are used."""


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """`kind` is 'done' or the name of the error. `digests` are of the result, for commands in COMPARED."""

    kind: str
    value: object = None
    error: Exception | None = None
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def description(self) -> str:
        return self.kind if self.error is None else f"{self.kind}: {self.error}"

    def message(self) -> bytes:
        error = self.error if self.error is None or isinstance(self.error, TinsmithError) else str(self.error)
        return encode([self.kind, self.value, error, dict(self.digests)])

    @classmethod
    def read(cls, message: bytes) -> CommandOutcome:
        kind, value, error, digests = cast(
            "tuple[str, object, TinsmithError | str | None, dict[str, str]]", decode(message)
        )
        if isinstance(error, str):
            failure = MemoryError(error) if kind == "MemoryError" else RankFailedError(f"{kind}: {error}")
            return cls(kind, value, failure, digests)
        return cls(kind, value, error, digests)


def _command(rank: Rank, name: str) -> Callable[..., object]:
    if name in BACKEND_COMMANDS:
        return getattr(rank.backend, name)
    if name in SAMPLER_COMMANDS:
        return getattr(rank.backend.sampler, name)
    assert name in RANK_COMMANDS
    return getattr(rank, name)


def execute(rank: Rank, name: str, args: Sequence[object]) -> CommandOutcome:
    """Raises RanksLostError if the other ranks are gone."""
    try:
        value = _command(rank, name)(*args)
    except RanksLostError:
        raise
    except Exception as error:  # noqa: BLE001  rank 0 raises it, or reports which ranks differ
        return CommandOutcome(type(error).__name__, error=error)
    digests = {key: str(part) for key, part in value.items()} if isinstance(value, dict) else {name: repr(value)}
    return CommandOutcome("done", value, digests=digests if name in COMPARED else {})


def serve(rank: Rank, link: Link) -> None:
    """Execute commands until the stream ends (EOFError)."""
    while True:
        name, args = cast("tuple[str, list[object]]", decode(link.receive()))
        outcome = execute(rank, name, args)
        if not isinstance(outcome.error, TinsmithError | MemoryError | None):
            log.error("a rank failed", command=name, exc_info=outcome.error)
        if name in SILENT and outcome.error is None:
            outcome = CommandOutcome("done")
        link.send(outcome.message())
