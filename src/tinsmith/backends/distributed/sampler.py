"""Sampling by ranks: requests are distributed to data ranks, and the ranks of a tensor group decode together.

`RankSampler` is one rank's `LocalSampler`. Ranks of a tensor group hold different heads of the same KV cache and must
do the same in every step: they get the same requests in the same order, caches of one size, and the tokens that the
first of them has drawn. Where layers are sharded over data ranks, a rank without rows takes part in every forward.

`GroupSampler` is what the engine sees, on rank 0. Every request lives on one data rank; requests that share a prefix go
to the rank that has it cached, unless that rank has much more to do than another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from tinsmith.backends.distributed.model import PartedBase
from tinsmith.backends.distributed.ranks import Ranks
from tinsmith.backends.torch.adapters import Adapter
from tinsmith.backends.torch.model import BaseModel
from tinsmith.errors import UserError
from tinsmith.plan.degrees import Degrees
from tinsmith.samplers import CacheUse
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.samplers.local.kv_cache import default_bytes, layer_shapes
from tinsmith.samplers.local.request import Sequence as Running
from tinsmith.samplers.local.sampling import Chosen, Top
from tinsmith.samplers.local.scheduler import SamplerStep
from tinsmith.types import Partial, Sample, SampleResult

BEGINNING = 64
"""Tokens of a prompt that decide which rank has its prefix cached."""

REMEMBERED = 4096
"""Prefixes whose data rank is remembered."""

MOST_MORE = 2048
"""A rank with this many more tokens to do than the least loaded one gets no request for the sake of its cache."""

ANSWER_TOKENS = 256
"""The assumed length of an answer without max_tokens."""

Finished = list[tuple[str, SampleResult | UserError]]


class RankSampler(LocalSampler):
    def __init__(self, base: BaseModel, versions: Mapping[str, Adapter], ranks: Ranks) -> None:
        token_bytes = sum(shape.num_bytes for shape in layer_shapes(base).values())
        # Free memory differs from device to device; the schedule must not.
        budget = min(cast("list[int]", ranks.gather(default_bytes(base, token_bytes))))
        super().__init__(base, versions, options=SamplerOptions(kv_cache_bytes=budget))
        self._ranks = ranks
        self._ran = False
        # Where ranks compute together, a rank that repeats a step would be alone in it.
        self._can_retry = ranks.degrees.tensor == 1 and not ranks.degrees.shard_base

    def step(self, scopes: Collection[str] | None = None) -> Finished:
        self._ran = False
        finished = super().step(scopes)
        if self._ranks.degrees.shard_base and not self._ran:
            assert isinstance(self._base, PartedBase)
            self._base.idle(train=False)
        return finished

    def _run(self, step: SamplerStep) -> None:
        self._ran = True
        if not self._ranks.degrees.shard_base:
            super()._run(step)
            return
        # Weights that are gathered here are used in training, too.
        with torch.inference_mode(False), torch.no_grad():
            super()._run(step)

    def _append(self, sequences: Sequence[Running], chosen: Chosen) -> None:
        if self._ranks.degrees.tensor > 1:
            agreed = self._ranks.first_of_tensor
            top = chosen.top
            if top is not None:
                top = Top(top.rows, agreed(top.ids_Rk), agreed(top.logprobs_Rk))
            chosen = Chosen(agreed(chosen.token_ids_B), agreed(chosen.logprobs_B), top)
        super()._append(sequences, chosen)


@dataclass(slots=True)
class _Place:
    """The data rank of a request, and about how many tokens it takes."""

    data_index: int
    num_tokens: int


Call = Callable[..., dict[int, object]]
"""A command and its arguments, for some ranks; returns each rank's answer."""


class GroupSampler:
    """Implements the Sampler protocol. `call` has ranks carry out a command."""

    runs_by_itself = False

    def __init__(self, degrees: Degrees, call: Call) -> None:
        self._degrees = degrees
        self._call = call
        self._places: dict[str, _Place] = {}
        self._loads = [0] * degrees.data
        self._homes: OrderedDict[tuple[str | None, str, bytes], int] = OrderedDict()
        self._partials: list[Partial] = []
        self._uses: dict[int, CacheUse] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._places)

    def submit(self, sample: Sample) -> None:
        data_index = self._home(sample)
        self._call("submit", sample, ranks=self._degrees.tensor_group(data_index))
        answer = ANSWER_TOKENS if sample.params.max_tokens is None else sample.params.max_tokens
        place = _Place(data_index, len(sample.prompt_T) + answer * sample.num_samples)
        self._places[sample.request_id] = place
        self._loads[data_index] += place.num_tokens

    def cancel(self, request_id: str) -> bool:
        place = self._places.get(request_id)
        if place is None:
            return False
        self._forget(request_id)
        group = self._degrees.tensor_group(place.data_index)
        return bool(self._call("cancel", request_id, ranks=group)[group[0]])

    def step(self, scopes: Collection[str] | None = None) -> Finished:
        if not self._places:
            return []
        # Where layers are shared, all ranks step, whether they have work or not.
        busy = {place.data_index for place in self._places.values()}
        chosen = range(self._degrees.data) if self._degrees.shard_base else sorted(busy)
        groups = [self._degrees.tensor_group(data_index) for data_index in chosen]
        only = None if scopes is None else sorted(scopes)
        answers = self._call("step", only, ranks=[rank for group in groups for rank in group])
        finished: Finished = []
        for group in groups:
            own, partials, use = cast("tuple[Finished, list[Partial], CacheUse]", answers[group[0]])
            finished += own
            self._partials += partials
            self._uses[group[0]] = use
        for request_id, _ in finished:
            self._forget(request_id)
        return finished

    def partials(self) -> list[Partial]:
        partials, self._partials = self._partials, []
        return partials

    def cache_use(self) -> CacheUse:
        """Of all data ranks together, as of their last steps."""
        uses = list(self._uses.values())
        return CacheUse(
            sum(use.live_blocks for use in uses),
            sum(use.cached_blocks for use in uses),
            sum(use.max_blocks for use in uses),
            sum(use.waiting_sequences for use in uses),
        )

    def _home(self, sample: Sample) -> int:
        key = (sample.version_id, sample.cache_scope, sample.prompt_T[:BEGINNING].tobytes())
        least = min(self._loads)
        home = self._homes.pop(key, None)
        if home is None or self._loads[home] > least + MOST_MORE:
            home = self._loads.index(least)
        self._homes[key] = home
        if len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)
        return home

    def _forget(self, request_id: str) -> None:
        if (place := self._places.pop(request_id, None)) is not None:
            self._loads[place.data_index] -= place.num_tokens
