"""One rank: what it does of each command. All ranks have one, rank 0 in the engine's process, the others in their own.

`RankBackend` is the torch backend with what ranks share: its base may be parted, its steps are everyone's. `Rank`
lists the commands; those that return something return plain values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch

from tinsmith.backends.distributed.degrees import Degrees
from tinsmith.backends.distributed.model import PartedBase, load_base
from tinsmith.backends.distributed.ranks import Ranks
from tinsmith.backends.distributed.sampler import Finished, RankSampler
from tinsmith.backends.distributed.trainer import RankedTrainer
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.adapters import Adapter, Layout
from tinsmith.backends.torch.checkpoint import Tensor
from tinsmith.backends.torch.model import BaseModel
from tinsmith.errors import SettingsError, UserError
from tinsmith.samplers import CacheUse
from tinsmith.types import LoraSpec, ModelShape, OptimStep, Partial, Pass, PassResult, Sample

COMMANDS = frozenset(
    {
        "join", "load", "assemble", "create_model", "unload_model", "load_model", "run_passes", "optim_step", "publish",
        "load_version", "drop_version", "submit", "cancel", "step", "digest",
    }
)  # fmt: skip
"""What a message may name."""


class RankBackend(TorchBackend):
    def __init__(self, shape: ModelShape, ranks: Ranks, **options: str) -> None:
        self.ranks = ranks
        if options.get("deterministic") == "on":
            raise SettingsError(
                "deterministic is 'on', and the bits of a sum over ranks depend on how many there are; leave "
                "data_parallel and tensor_parallel at 1"
            )
        super().__init__(shape, **options)

    def agree(self) -> None:
        """With all ranks: that the parts make up the whole, and what there is room for."""
        if isinstance(self._base, PartedBase):
            self._base.compare()
        self._room_bytes = min(cast("list[int]", self.ranks.gather(self._room_bytes)))
        _ = self.sampler

    def flat_of(self, model_id: str) -> Tensor:
        """All numbers of an adapter."""
        return self._model(model_id).adapter.flat_P

    def _load_base(self, shape: ModelShape, *, device: str, dtype: str, recompute: str, quantize: str) -> BaseModel:
        return load_base(shape, self.ranks, dtype=dtype, recompute=recompute, quantize=quantize)

    def _make_trainer(self, max_tokens: int, chunk_rows: int) -> RankedTrainer:
        return RankedTrainer(self._base, max_tokens, chunk_rows, self.ranks)

    def _make_sampler(self) -> RankSampler:
        return RankSampler(self._base, self._versions, self.ranks)

    def _adapter(self, spec: LoraSpec, layout: Layout, flat_P: Tensor) -> Adapter:
        if isinstance(self._base, PartedBase):
            return self._base.adapter(spec, layout, flat_P)
        return super()._adapter(spec, layout, flat_P)


class Rank:
    """`serve` takes commands until rank 0 says that its own step goes on; rank 0 has none to take."""

    def __init__(
        self, rank: int, *, device: str, timeout_s: float, threads: int, serve: Callable[[], None] | None = None
    ) -> None:
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        self._serve = serve
        self._ranks: Ranks | None = None
        self._loaded: RankBackend | None = None
        if device == "cpu":
            # As many on every rank: sums that threads share are added in another order by more or fewer.
            torch.set_num_threads(threads)

    @property
    def backend(self) -> RankBackend:
        assert self._loaded is not None
        return self._loaded

    def join(self, degrees: Degrees) -> None:
        self._loaded = None
        self._ranks = Ranks(degrees, self._rank, self._device, self._timeout_s)

    def load(self, shape: ModelShape, options: Mapping[str, str]) -> None:
        """Each rank in its turn: the host holds one whole model at a time."""
        assert self._ranks is not None
        self._loaded = RankBackend(shape, self._ranks, **options)

    def assemble(self) -> None:
        self.backend.agree()

    def create_model(self, model_id: str, spec: LoraSpec, optimizer_type: str) -> None:
        self.backend.create_model(model_id, spec, optimizer_type)

    def unload_model(self, model_id: str) -> None:
        self.backend.unload_model(model_id)

    def load_model(self, model_id: str, spec: LoraSpec, directory: str, optimizer: bool, optimizer_type: str) -> None:
        self.backend.load(model_id, spec, Path(directory), optimizer=optimizer, optimizer_type=optimizer_type)

    def digest(self, model_id: str) -> str:
        """Of an adapter's weights: what all ranks have alike."""
        flat_P = self.backend.flat_of(model_id).cpu().numpy()
        return hashlib.blake2b(flat_P.tobytes(), digest_size=16).hexdigest()

    def run_passes(self, passes: Sequence[Pass], between: Callable[[], None] | bool) -> list[PassResult | UserError]:
        """`between` is rank 0's own, for the others whether there is any: they then do what rank 0 wants meanwhile."""
        meanwhile = between if callable(between) else self._serve if between else None
        return self.backend.run_passes(passes, between=meanwhile)

    def optim_step(self, steps: Sequence[OptimStep]) -> list[dict[str, float] | UserError]:
        return self.backend.optim_step(steps)

    def publish(self, model_id: str, version_id: str) -> None:
        self.backend.publish(model_id, version_id)

    def load_version(self, version_id: str, directory: str) -> None:
        self.backend.load_version(version_id, Path(directory))

    def drop_version(self, version_id: str) -> None:
        self.backend.drop_version(version_id)

    def submit(self, sample: Sample) -> None:
        self.backend.sampler.submit(sample)

    def cancel(self, request_id: str) -> bool:
        return self.backend.sampler.cancel(request_id)

    def step(self, scopes: Sequence[str] | None) -> tuple[Finished, list[Partial], CacheUse]:
        sampler = self.backend.sampler
        return sampler.step(scopes), sampler.partials(), sampler.cache_use()
