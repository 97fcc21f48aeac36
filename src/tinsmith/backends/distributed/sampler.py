"""Sampling by ranks: requests are distributed to sampling groups, whose ranks decode together.

`RankSampler` is one rank's `LocalSampler`. Ranks of a sampling group hold different layers or heads of the same KV
cache and must run identical steps: they get the same requests in the same order, caches of equally many blocks, and the
tokens drawn by the first rank of the last stage. Only that stage has logits. With sharded layers or expert parallelism,
a rank without rows takes part in every forward, and holds the adapters of all ranks' requests.

`GroupSampler` is the engine's sampler, on rank 0. Every request runs on one group; requests with a common prefix go to
the group that has it cached, unless that group has much more work than another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from tinsmith.backends.distributed.collectives import Ranks
from tinsmith.backends.distributed.model import ShardedBase
from tinsmith.backends.torch.adapters import Adapter
from tinsmith.backends.torch.model import BaseModel
from tinsmith.errors import UserError
from tinsmith.plan.degrees import Degrees
from tinsmith.samplers import CacheUse
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.samplers.local.kv_cache import default_bytes, layer_shapes
from tinsmith.samplers.local.request import Request
from tinsmith.samplers.local.request import Sequence as RequestSequence
from tinsmith.samplers.local.sampling import SampledTokens
from tinsmith.samplers.local.scheduler import SamplerStep
from tinsmith.types import Partial, Sample, SampleResult

PREFIX_TOKENS = 64
"""Requests whose prompts have these first tokens in common have a common prefix."""

MAX_PREFIXES = 4096
"""Prefixes with a recorded group."""

MAX_IMBALANCE_TOKENS = 2048
"""A group with this many more pending tokens than the least loaded one gets no requests for its cache."""

ANSWER_TOKENS = 256
"""The assumed length of an answer without max_tokens."""

SampleOutcomes = list[tuple[str, SampleResult | UserError]]


class RankSampler(LocalSampler):
    def __init__(self, base: BaseModel, versions: Mapping[str, Adapter], ranks: Ranks, options: SamplerOptions) -> None:
        token_bytes = sum(shape.num_bytes for shape in layer_shapes(base).values())
        # Free memory differs between devices; the schedule must not.
        kv_cache_bytes = options.kv_cache_bytes or default_bytes(base, token_bytes)
        min_bytes = min(cast("list[int]", ranks.gather(kv_cache_bytes)))
        self._ranks = ranks
        super().__init__(base, versions, options=replace(options, kv_cache_bytes=min_bytes))
        self._ran = False
        self._held_adapters: dict[str, Adapter] = {}
        # Other ranks would not take part in the repetition of a collective step.
        self._can_retry = not ranks.degrees.sharded

    def hold(self, request_id: str, version_id: str | None) -> None:
        """Hold the adapter of a request of any rank, whose rows are sent to this rank's experts."""
        if (adapter := self._capture(version_id).adapter) is not None:
            self._held_adapters[request_id] = adapter

    def release(self, request_id: str) -> None:
        self._held_adapters.pop(request_id, None)

    def _sizes(self, token_bytes: int, state_bytes: int) -> tuple[int, int]:
        """The sizes of the largest stage, so that all stages have equally many blocks and states."""
        sizes = cast("list[tuple[int, int]]", self._ranks.gather((token_bytes, state_bytes)))
        return max(tokens for tokens, _ in sizes), max(states for _, states in sizes)

    def step(self, scopes: Collection[str] | None = None) -> SampleOutcomes:
        self._ran = False
        if not self._ranks.degrees.in_step:
            return super().step(scopes)
        assert isinstance(self._base, ShardedBase)
        if self._base.exchange is not None:
            adapters = self._held_adapters.values()
            self._base.exchange.adapters = list({id(adapter): adapter for adapter in adapters}.values())
        finished = super().step(scopes)
        if not self._ran:
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

    def _score_prompt(self, request: Request, hidden_TD: Tensor, start: int) -> bool:
        is_finite = super()._score_prompt(request, hidden_TD, start)
        if self._ranks.degrees.pipeline == 1:
            return is_finite
        return bool(self._ranks.broadcast_sampling(torch.tensor(float(is_finite))))

    def _queue_readback(self, sequences: Sequence[RequestSequence], chosen: SampledTokens) -> None:
        if self._ranks.degrees.group_size > 1:
            broadcast = self._ranks.broadcast_sampling
            top = chosen.top
            if top is not None:
                top = top._replace(ids_Rk=broadcast(top.ids_Rk), logprobs_Rk=broadcast(top.logprobs_Rk))
            chosen = chosen._replace(
                token_ids_B=broadcast(chosen.token_ids_B), logprobs_B=broadcast(chosen.logprobs_B), top=top
            )
        super()._queue_readback(sequences, chosen)


@dataclass(slots=True)
class _Assignment:
    """A request's group and its approximate number of tokens."""

    group_index: int
    num_tokens: int


Call = Callable[..., dict[int, object]]
"""Sends a command with its arguments to some ranks; returns each rank's answer."""


class GroupSampler:
    """Implements the Sampler protocol. `call` makes ranks execute a command."""

    runs_by_itself = False
    inference_server = None

    def __init__(self, degrees: Degrees, call: Call) -> None:
        self._degrees = degrees
        self._call = call
        self._assignments: dict[str, _Assignment] = {}
        self._loads = [0] * degrees.groups
        self._prefix_groups: OrderedDict[tuple[str | None, str, bytes], int] = OrderedDict()
        self._partials: list[Partial] = []
        self._uses: dict[int, CacheUse] = {}
        self._paused: frozenset[str] = frozenset()

    @property
    def has_work(self) -> bool:
        return not self._paused.issuperset(self._assignments)

    def submit(self, sample: Sample) -> None:
        group_index = self._choose_group(sample)
        if self._degrees.experts > 1:
            self._call("hold", sample.request_id, sample.version_id)
        try:
            self._call("submit", sample, ranks=self._degrees.sampling_group(group_index))
        except UserError:
            self._release(sample.request_id)
            raise
        answer = ANSWER_TOKENS if sample.params.max_tokens is None else sample.params.max_tokens
        assignment = _Assignment(group_index, len(sample.prompt_T) + answer * sample.num_samples)
        self._assignments[sample.request_id] = assignment
        self._loads[group_index] += assignment.num_tokens

    def cancel(self, request_id: str) -> bool:
        assignment = self._assignments.get(request_id)
        if assignment is None:
            return False
        self._remove(request_id)
        group = self._degrees.sampling_group(assignment.group_index)
        return bool(self._call("cancel", request_id, ranks=group)[group[0]])

    def pause(self, request_ids: Collection[str]) -> None:
        self._paused = frozenset(request_ids)
        self._call("pause", sorted(self._paused))

    def step(self, scopes: Collection[str] | None = None) -> SampleOutcomes:
        if not self._assignments:
            return []
        # With sharded layers or expert parallelism all ranks step, with or without work.
        busy_groups = {assignment.group_index for assignment in self._assignments.values()}
        group_indices = range(self._degrees.groups) if self._degrees.in_step else sorted(busy_groups)
        groups = [self._degrees.sampling_group(index) for index in group_indices]
        scope_names = None if scopes is None else sorted(scopes)
        answers = self._call("step", scope_names, ranks=[rank for group in groups for rank in group])
        finished: SampleOutcomes = []
        for group in groups:
            results, partials, use = cast("tuple[SampleOutcomes, list[Partial], CacheUse]", answers[group[-1]])
            finished += results
            self._partials += partials
            self._uses[group[0]] = use
        for request_id, _ in finished:
            self._remove(request_id)
        return finished

    def partials(self) -> list[Partial]:
        partials, self._partials = self._partials, []
        return partials

    def cache_use(self) -> CacheUse:
        """The sum over all groups after their last steps."""
        uses = list(self._uses.values())
        return CacheUse(
            sum(use.live_blocks for use in uses),
            sum(use.cached_blocks for use in uses),
            sum(use.max_blocks for use in uses),
            sum(use.waiting_sequences for use in uses),
        )

    def _choose_group(self, sample: Sample) -> int:
        key = (sample.version_id, sample.cache_scope, sample.prompt_T[:PREFIX_TOKENS].tobytes())
        min_load = min(self._loads)
        group_index = self._prefix_groups.pop(key, None)
        if group_index is None or self._loads[group_index] > min_load + MAX_IMBALANCE_TOKENS:
            group_index = self._loads.index(min_load)
        self._prefix_groups[key] = group_index
        if len(self._prefix_groups) > MAX_PREFIXES:
            self._prefix_groups.popitem(last=False)
        return group_index

    def _remove(self, request_id: str) -> None:
        if (assignment := self._assignments.pop(request_id, None)) is not None:
            self._loads[assignment.group_index] -= assignment.num_tokens
            self._release(request_id)

    def _release(self, request_id: str) -> None:
        if self._degrees.experts > 1:
            self._call("release", request_id)
