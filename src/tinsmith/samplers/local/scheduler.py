"""Which tokens of which sequences go through the model next: continuous batching over a bounded block pool.

`Batcher` owns the waiting and the running sequences and their blocks; it handles counts and block numbers, no model.
Each `schedule` gives every decoding sequence one token, then the rest of the step's token budget to prompts, oldest
first, in chunks; so a long prompt never stalls decoding. Sequences join and leave between steps.

Scopes (`Sequence.scope`, one per tenant) share slots and blocks. The scope with the fewest running sequences is
admitted first. If a waiting scope has at least two fewer running sequences than another, the youngest sequence of the
largest scope is preempted for it, so no scope waits for the end of another's long answers. Prompts of several scopes
share the tokens of a step. With one scope only the order of arrival counts.

Memory cannot deadlock: a prompt's blocks are allocated on admission, later blocks on demand; when none is left, the
youngest running sequence of the largest scope gives its blocks back and waits (its tokens are computed again later,
mostly from cached blocks). The oldest running sequence of a scope is never preempted for another scope. The oldest of
all is never preempted and fits alone, so it always finishes.

Blocks are shared in two ways. Answers of one request fork after the prompt and share its blocks; a shared block is
copied before it is written (`SamplerStep.copies`). Across requests, full blocks are found by their key; a prompt whose
next block another sequence is computing waits for that block.

A model with stateful layers (`snapshots` is not None) reuses blocks up to a snapshot only. A prompt requests snapshots
after its last full block and at the end of the blocks it found, because another prompt diverged there; an answer stores
one after its last full block.

A sequence with an unread token (`Sequence.num_unread`) decodes on: the model finds that token on the device. If it is
preempted, it waits until the token is read. A block is registered once all of its tokens are known.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Container, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from tinsmith.samplers.local.kv_cache import BlockPool
from tinsmith.samplers.local.request import Sequence
from tinsmith.samplers.local.states import StateSnapshots

RELAX_AFTER_STEPS = 16
"""Steps without a shortage of memory after which the limits double."""

MIN_STEP_TOKENS = 16
"""Fewest rows of a step; fewer prompt tokens at a time would save no memory."""

MAX_DEFERRED = 256  # waiting sequences that a step skips because their prefix is being computed


ScopeQueues = dict[str, deque[Sequence]]
"""Waiting sequences by scope, oldest first."""


class TokenSpan(NamedTuple):
    """Tokens start..stop of a sequence, computed in this step."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def completes(self) -> bool:
        """Whether the sequence's next token can be sampled after this step."""
        return self.stop == self.sequence.length

    @property
    def num_output_rows(self) -> int:
        """How many of the last tokens need their final hidden state: all where a prompt is scored."""
        if self.sequence.request.scores.next_row is not None:
            return self.num_tokens
        return int(self.completes)


@dataclass(frozen=True, slots=True)
class SamplerStep:
    """Before the model runs: first `copies` (source, target) of blocks, then `fresh` blocks to zero."""

    spans: list[TokenSpan] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)


class Batcher:
    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_sequences: int,
        max_tokens: int,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self.pool = pool
        self.snapshots = snapshots
        self.block_size = block_size
        # Current limits, which follow the available memory, and the configured ones.
        self._max_sequences = self._sequence_limit = max_sequences
        self._max_tokens = self._token_limit = max_tokens
        self._steps_since_shortage = 0
        self.running: list[Sequence] = []  # both lists are sorted by Sequence.order
        self.waiting: list[Sequence] = []
        self._computing: dict[bytes, Sequence] = {}
        self._num_admitted = 0
        self._admitted_at: dict[str, int] = {}  # the ordinal of each scope's last admission
        self._paused: Container[str] = ()  # ids of requests that are not admitted

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Close sequences, and retire those that run or wait."""
        sequences = list(sequences)
        for sequence in sequences:
            sequence.is_open = False
        self.retire(sequences)

    def retire(self, sequences: Seq[Sequence]) -> None:
        """Free the slots and blocks of running or waiting sequences."""
        retired_ids = set(map(id, sequences))
        for sequence in sequences:
            self._free_blocks(sequence)
        self.running = [s for s in self.running if id(s) not in retired_ids]
        self.waiting = [s for s in self.waiting if id(s) not in retired_ids]

    def pause(self, request_ids: Container[str]) -> None:
        """Preempt the sequences of these requests and admit none of them; sequences of all others continue."""
        self._paused = request_ids
        for sequence in [s for s in self.running if s.request.sample.request_id in request_ids]:
            self._preempt(sequence)

    def schedule(self, scopes: Container[str] | None = None) -> SamplerStep:
        """Choose the next step; with `scopes`, only sequences of those scopes. The others keep their slots."""
        step = SamplerStep()
        is_shared = self._is_shared()
        if is_shared:
            self._preempt_for_waiting()
        for sequence in self._smallest_scope_first() if is_shared else tuple(self.running):
            start, stop = sequence.num_cached, sequence.length
            if stop - start != 1 or not sequence.blocks or (scopes is not None and sequence.scope not in scopes):
                continue
            if start < sequence.writable_end or self._make_writable(sequence, step):
                step.spans.append(TokenSpan(sequence, start, stop))
        budget = max(self._max_tokens - len(step.spans), 1)
        queues = {scope: queue for scope, queue in self._queues().items() if scopes is None or scope in scopes}
        prefilling = [s for s in self.running if s.length - s.num_cached > 1 and (scopes is None or s.scope in scopes)]
        budget -= self._continue_prompts(prefilling, budget, step, queues)
        self._admit_waiting(budget, step, queues)
        written = {target for _, target in step.copies}
        step.fresh.extend(block for block in self.pool.take_fresh() if block not in written)
        return step

    def shrink(self, num_blocks: int) -> dict[int, int]:
        """Keep at most `num_blocks` blocks, preempting the youngest sequences first. Returns the blocks that moved."""
        while self.pool.num_live > num_blocks:
            self._preempt(self.running[-1])
        moves = self.pool.shrink(num_blocks)
        for sequence in self.running:
            sequence.blocks = [moves.get(block, block) for block in sequence.blocks]
        return moves

    # Shortage of memory.

    def rewind(self, spans: Seq[TokenSpan]) -> None:
        """The step with these spans was interrupted: unfinished work is computed again, which writes the same keys and
        values.
        """
        for span in spans:
            sequence = span.sequence
            next_row = sequence.request.scores.next_row
            unscored = next_row is not None and next_row < span.stop
            if sequence.blocks and (sequence.length == span.stop or unscored):
                if self.snapshots is not None and sequence.num_cached > span.start:
                    self._preempt(sequence)  # its state already includes the span
                sequence.num_cached = min(sequence.num_cached, span.start)
        for sequence in tuple(self.running):
            if sequence.num_pending == 0:  # it forked within the step
                self._preempt(sequence)

    def preempt_all(self) -> None:
        """Preempt every running sequence."""
        while self.running:
            self._preempt(self.running[-1])

    def throttle(self, num_ran: int) -> bool:
        """There was no memory for a step of `num_ran` sequences: preempt the younger half and admit no more until
        `relax`. False if one sequence ran alone with the smallest useful token budget.
        """
        self._steps_since_shortage = 0
        if num_ran > 1:
            self._max_sequences = num_ran // 2
            while len(self.running) > self._max_sequences:
                self._preempt(self.running[-1])
            return True
        self._max_sequences = 1
        if self._max_tokens <= MIN_STEP_TOKENS:
            return False
        self._max_tokens = max(MIN_STEP_TOKENS, self._max_tokens // 2)
        return True

    def note_success(self) -> bool:
        """A step had enough memory. Returns whether the limits were raised."""
        if (self._max_sequences, self._max_tokens) == (self._sequence_limit, self._token_limit):
            return False
        self._steps_since_shortage += 1
        if self._steps_since_shortage < RELAX_AFTER_STEPS:
            return False
        self.relax()
        return True

    def relax(self) -> None:
        """Double the limits."""
        self._steps_since_shortage = 0
        self._max_sequences = min(self._sequence_limit, 2 * self._max_sequences)
        self._max_tokens = min(self._token_limit, 2 * self._max_tokens)

    def advance(self, spans: Iterable[TokenSpan]) -> None:
        """The spans' keys and values are cached: register their full blocks for other prompts."""
        for sequence, start, stop in spans:
            self.register(sequence, start, min(stop, sequence.length - sequence.num_unread))
            sequence.num_cached = stop

    def register(self, sequence: Sequence, start: int, stop: int) -> None:
        """Register the blocks that tokens start..stop, cached and known, have completed."""
        first, end = start // self.block_size, stop // self.block_size
        if first >= end:
            return
        weights = sequence.request.weights
        for index in range(first, end):
            key = sequence.key(index, self.block_size)
            if weights.alive:
                self.pool.register(sequence.blocks[index], key, weights.weights_id)
            if self._computing.get(key) is sequence:
                del self._computing[key]

    def fork(self, parent: Sequence, children: Seq[Sequence]) -> list[Sequence]:
        """Children of a parent that has just computed its prompt share its blocks; the returned ones run now.

        The others wait for a slot and will find the prompt's full blocks by key.
        """
        parent.writable_end = 0
        room = max(self._max_sequences - len(self.running), 0)
        for child in children[:room]:
            self.pool.acquire(parent.blocks)
            child.blocks = list(parent.blocks)
            child.num_cached = parent.num_cached
            child.state = parent.state
            insort(self.running, child, key=_order)
        for child in children[room:]:
            self.add(child)
        return list(children[:room])

    def _continue_prompts(self, prefilling: Seq[Sequence], budget: int, step: SamplerStep, queues: ScopeQueues) -> int:
        """Add spans of the prompts in computation; returns their number of tokens. Each scope gets at most an equal
        part, counting scopes that could be admitted.
        """
        if not prefilling:
            return 0
        sharing_scopes = {sequence.scope for sequence in prefilling}
        if len(self.running) < self._max_sequences:
            sharing_scopes |= queues.keys()
        scope_budgets = dict.fromkeys(sharing_scopes, max(budget // len(sharing_scopes), 1))
        used = 0
        for sequence in prefilling:
            if (room := min(scope_budgets[sequence.scope], budget - used)) > 0:
                num_tokens = self._add_span(sequence, room, step)
                scope_budgets[sequence.scope] -= num_tokens
                used += num_tokens
        return used

    def _add_span(self, sequence: Sequence, budget: int, step: SamplerStep) -> int:
        start = sequence.num_cached
        stop = min(sequence.length, start + budget)
        if sequence.request.image_input is not None:
            stop = sequence.request.image_input.piece_end(start, stop)
        step.spans.append(TokenSpan(sequence, start, stop))
        return stop - start

    def _admit_waiting(self, budget: int, step: SamplerStep, queues: ScopeQueues) -> None:
        if not queues:
            return
        counts = Counter(sequence.scope for sequence in self.running)
        deferred = 0
        while budget > 0 and len(self.running) < self._max_sequences and deferred < MAX_DEFERRED:
            sequence = self._pop_next(queues, counts)
            if sequence is None:
                return
            hits = self._cached_blocks(sequence)
            if hits is None:
                deferred += 1
                continue
            if not self._admit(sequence, hits):
                return  # sequences do not overtake one that waits for memory
            self.waiting.remove(sequence)
            counts[sequence.scope] += 1
            self._num_admitted += 1
            self._admitted_at[sequence.scope] = self._num_admitted
            budget -= self._add_span(sequence, budget, step)

    def _is_shared(self) -> bool:
        """Whether sequences of several scopes are present."""
        return len({sequence.scope for sequence in (*self.running, *self.waiting)}) > 1

    def _queues(self) -> ScopeQueues:
        """The waiting sequences of each scope that can be admitted, oldest first."""
        queues: ScopeQueues = {}
        for sequence in self.waiting:
            if not sequence.num_unread and sequence.request.sample.request_id not in self._paused:
                queues.setdefault(sequence.scope, deque()).append(sequence)
        return queues

    def _pop_next(self, queues: ScopeQueues, counts: Counter[str]) -> Sequence | None:
        """Pop the next sequence: of the scope with the fewest running, then of the scope admitted longest ago."""
        heads = [queue[0] for queue in queues.values() if queue]
        if not heads:
            return None
        if len(heads) > 1:
            heads.sort(key=lambda head: (counts[head.scope], self._admitted_at.get(head.scope, 0), head.order))
        return queues[heads[0].scope].popleft()

    def _smallest_scope_first(self) -> list[Sequence]:
        """The running sequences, smallest scope first, then by age."""
        counts = Counter(sequence.scope for sequence in self.running)
        return sorted(self.running, key=lambda sequence: (counts[sequence.scope], sequence.order))

    def _preempt_for_waiting(self) -> None:
        """Preempt sequences of large scopes for waiting ones of small scopes, as far as this step can admit those."""
        queues = self._queues()
        counts = Counter(sequence.scope for sequence in self.running)
        self._admitted_at = {s: at for s, at in self._admitted_at.items() if s in queues or s in counts}
        budget = max(self._max_tokens - len(self.running), 1)
        num_coming = num_blocks = 0
        while budget > 0 and (newcomer := self._pop_next(queues, counts)):
            num_blocks += -(-newcomer.length // self.block_size)
            if not self._displace(newcomer.scope, counts, num_coming, num_blocks):
                return
            counts[newcomer.scope] += 1
            num_coming += 1
            budget -= newcomer.num_pending

    def _displace(self, scope: str, counts: Counter[str], num_coming: int, num_blocks: int) -> bool:
        """Preempt what is needed to admit one more sequence of `scope`; False, and no preemption, if that is
        impossible. `counts` covers running sequences and the `num_coming` admitted before; `num_blocks` is what all
        newcomers need.
        """
        counts_after = counts.copy()
        running = Counter(sequence.scope for sequence in self.running)
        victims: list[Sequence] = []
        available = self.pool.num_available
        while True:
            num_staying = len(self.running) - len(victims)
            if num_staying + num_coming < self._max_sequences and (
                not num_staying or available >= num_blocks + num_staying
            ):
                break
            largest = max(counts_after, key=lambda name: counts_after[name])
            if counts_after[largest] < counts_after[scope] + 2 or running[largest] < 2:
                return False
            youngest = reversed(self.running)
            victim = next(other for other in youngest if other.scope == largest and other not in victims)
            victims.append(victim)
            counts_after[largest] -= 1
            running[largest] -= 1
            available += sum(self.pool.refs(block) == 1 for block in victim.blocks)
        for victim in victims:
            self._preempt(victim)
            counts[victim.scope] -= 1
        return True

    def _cached_blocks(self, sequence: Sequence) -> list[int] | None:
        """Cached blocks that a waiting sequence can reuse; None if it should wait for a block in computation."""
        usable = sequence.num_reusable // self.block_size
        hits = self.pool.match(sequence.key(i, self.block_size) for i in range(usable))
        if self.snapshots is not None:
            return self._with_snapshot(sequence, hits, usable)
        if len(hits) < usable and sequence.key(len(hits), self.block_size) in self._computing:
            return None
        return hits

    def _with_snapshot(self, sequence: Sequence, hits: list[int], usable: int) -> list[int] | None:
        """Cached blocks up to a snapshot that a sequence of a stateful model can reuse; None if it should wait for a
        block in computation.
        """
        assert self.snapshots is not None
        if len(hits) < usable and sequence.key(usable - 1, self.block_size) in self._computing:
            return None  # a prompt with the same blocks will store a snapshot after them
        ends = {(sequence.request.num_prompt - 1) // self.block_size, len(hits)}
        sequence.cuts = tuple(end * self.block_size for end in ends if end and self.snapshots.max_states)
        while hits and sequence.key(len(hits) - 1, self.block_size) not in self.snapshots:
            hits.pop()
        return hits

    def _admit(self, sequence: Sequence, hits: list[int]) -> bool:
        num_new = -(-sequence.length // self.block_size) - len(hits)
        self.pool.acquire(hits)
        # One spare block per running sequence, so that a newcomer is not preempted as soon as the others continue.
        enough = not self.running or self.pool.num_available >= num_new + len(self.running)
        blocks = self.pool.allocate(num_new) if enough else None
        if blocks is None:
            self.pool.release(hits)
            return False
        sequence.blocks = hits + blocks
        sequence.num_cached = len(hits) * self.block_size
        if self.snapshots is not None and hits:
            sequence.state = self.snapshots.get(sequence.key(len(hits) - 1, self.block_size))
        if sequence.request.prompt_cache_hit_tokens is None:
            sequence.request.prompt_cache_hit_tokens = sequence.num_cached
        for index in range(len(hits), sequence.length // self.block_size):
            if sequence.request.weights.alive:
                self._computing.setdefault(sequence.key(index, self.block_size), sequence)
        insort(self.running, sequence, key=_order)
        return True

    def _make_writable(self, sequence: Sequence, step: SamplerStep) -> bool:
        """Give a decoding sequence its own block for the next token; False if it was itself preempted. Sequences that
        are already part of the step keep their blocks.
        """
        index = sequence.num_cached // self.block_size
        while True:
            has_block = index < len(sequence.blocks)
            if has_block and self.pool.refs(sequence.blocks[index]) == 1:
                sequence.writable_end = (index + 1) * self.block_size
                return True
            allocated = self.pool.allocate(1)
            if allocated is not None:
                break
            victim = self._victim(sequence, {id(span.sequence) for span in step.spans})
            self._preempt(victim)
            if victim is sequence:
                return False
        if has_block:
            step.copies.append((sequence.blocks[index], allocated[0]))
            self.pool.release([sequence.blocks[index]])
            sequence.blocks = list(sequence.blocks)  # decode graphs know the old list
            sequence.blocks[index] = allocated[0]
        else:
            sequence.blocks.append(allocated[0])
        sequence.writable_end = (index + 1) * self.block_size
        return True

    def _victim(self, sequence: Sequence, scheduled_ids: Container[int]) -> Sequence:
        """Which sequence is preempted for this one: the youngest of the largest scope, if that scope runs at least two
        more; otherwise the youngest of all, which may be this one.
        """
        candidates = [other for other in self.running if id(other) not in scheduled_ids]
        counts = Counter(other.scope for other in self.running)
        largest = max(counts, key=lambda scope: counts[scope])
        if counts[largest] >= counts[sequence.scope] + 2:
            of_largest = [other for other in self.running if other.scope == largest][1:]
            if youngest := next((other for other in reversed(of_largest) if id(other) not in scheduled_ids), None):
                return youngest
        return candidates[-1]

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_blocks(sequence)
        self.add(sequence)

    def _free_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_cached = sequence.writable_end = 0
        sequence.state = sequence.tail = None
        if self._computing:
            self._computing = {key: owner for key, owner in self._computing.items() if owner is not sequence}


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
