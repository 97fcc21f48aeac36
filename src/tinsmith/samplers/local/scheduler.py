"""Which tokens of which sequences go through the model next: continuous batching over a bounded block pool.

`Batcher` owns the waiting and the running sequences and their blocks; it knows counts and block numbers, no
model. Each `schedule` gives every decoding sequence one token, then the rest of the step's token budget to
prompts, oldest first, in chunks; so a long prompt never stalls decoding. Sequences join between steps and
leave one by one.

Scopes (`Sequence.scope`, one for each tenant) share places and blocks. The scope with the fewest running sequences is
admitted first. If a scope waits that has at least two fewer running than another, the youngest sequence of the largest
scope is preempted for it, so no scope waits for the end of another's long answers. Prompts of several scopes share the
tokens of a step. With one scope the order of arrival is all that counts.

Memory cannot deadlock: a prompt's blocks are taken when it is admitted, later blocks on demand, and when none
is left the youngest running sequence of the largest scope gives its blocks back and waits (its tokens are computed
again later, mostly from cached blocks). The oldest running sequence of a scope is never preempted for another scope,
and the oldest of all is never preempted and fits alone, so it always finishes.

Blocks are shared in two ways. Answers of one request fork after the prompt and share its blocks; whoever
writes into a shared block copies it first (`SamplerStep.copies`). Across requests, full blocks are found by their
key; a prompt whose next block is being computed by another sequence right now waits for it rather than
compute it twice.

A model with layers that keep a state (`snapshots` is not None) reuses blocks up to a snapshot only. A prompt asks for
snapshots behind its last whole block, and where the blocks that it found end, since there another prompt went its own
way; an answer leaves one behind its last whole block.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from tinsmith.samplers.local.kv_cache import BlockPool
from tinsmith.samplers.local.request import Sequence
from tinsmith.samplers.local.states import StateSnapshots

RELAXED_AFTER = 16
"""Steps without a lack of memory after which twice as much may run again."""

FEWEST_TOKENS = 16
"""Rows of a step below which less of a prompt at a time would save nothing."""

MAX_DEFERRED = 256  # waiting sequences that one step looks past for the sake of a prefix in the making


Lines = dict[str, deque[Sequence]]
"""Waiting sequences by scope, oldest first."""


class TokenRun(NamedTuple):
    """Tokens start..stop of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def completes(self) -> bool:
        """Whether the sequence's next token can be sampled after this step."""
        return self.stop == self.sequence.length

    @property
    def num_wanted(self) -> int:
        """Of how many of its last tokens the hidden state is asked for: all where a prompt is scored."""
        if self.sequence.request.scores.next_row is not None:
            return self.stop - self.start
        return int(self.completes)


@dataclass(frozen=True, slots=True)
class SamplerStep:
    """Before the model runs: `copies` (source, target) of blocks first, then `fresh` blocks to zero."""

    spans: list[TokenRun] = field(default_factory=list)
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
        # As many as there is memory for, up to the second.
        self._max_sequences = self._most_sequences = max_sequences
        self._max_tokens = self._most_tokens = max_tokens
        self._calm_steps = 0
        self.running: list[Sequence] = []  # both lists are sorted by Sequence.order
        self.waiting: list[Sequence] = []
        self._computing: dict[bytes, Sequence] = {}
        self._num_admitted = 0
        self._admitted_at: dict[str, int] = {}  # each scope's last admission, by number

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequences: Seq[Sequence]) -> None:
        """Forget sequences, wherever they are, and give their blocks back."""
        gone = set(map(id, sequences))
        for sequence in sequences:
            self._give_back(sequence)
        self.running = [s for s in self.running if id(s) not in gone]
        self.waiting = [s for s in self.waiting if id(s) not in gone]

    def schedule(self, scopes: Container[str] | None = None) -> SamplerStep:
        """What to compute next; with `scopes`, of sequences of these alone. The others keep their places."""
        step = SamplerStep()
        is_shared = self._is_shared()
        if is_shared:
            self._make_places()
        spanned: set[int] = set()
        for sequence in self._fewest_first() if is_shared else tuple(self.running):
            if scopes is not None and sequence.scope not in scopes:
                continue
            if sequence.num_pending == 1 and sequence.blocks and self._make_writable(sequence, step, spanned):
                step.spans.append(TokenRun(sequence, sequence.num_cached, sequence.length))
                spanned.add(id(sequence))
        budget = max(self._max_tokens - len(step.spans), 1)
        lines = {scope: line for scope, line in self._lines().items() if scopes is None or scope in scopes}
        begun = [s for s in self.running if s.num_pending > 1 and (scopes is None or s.scope in scopes)]
        budget -= self._continue_prompts(begun, budget, step, lines)
        self._admit_waiting(budget, step, lines)
        written = {target for _, target in step.copies}
        step.fresh.extend(block for block in self.pool.take_fresh() if block not in written)
        return step

    def shrink(self, num_blocks: int) -> dict[int, int]:
        """Keep no more than so many blocks: the youngest sequences give theirs back first. Returns the blocks that
        moved.
        """
        while self.pool.num_live > num_blocks:
            self._preempt(self.running[-1])
        moves = self.pool.shrink(num_blocks)
        for sequence in self.running:
            sequence.blocks = [moves.get(block, block) for block in sequence.blocks]
        return moves

    # Too little memory.

    def rewind(self, spans: Seq[TokenRun]) -> None:
        """The step of these spans was cut off: what it did not come to the end with is computed again. Keys and values
        that it has written are the same then.
        """
        for span in spans:
            sequence = span.sequence
            next_row = sequence.request.scores.next_row
            unscored = next_row is not None and next_row < span.stop
            if sequence.blocks and (sequence.length == span.stop or unscored):
                if self.snapshots is not None and sequence.num_cached > span.start:
                    self._preempt(sequence)  # its state is that behind the span
                sequence.num_cached = min(sequence.num_cached, span.start)
        for sequence in tuple(self.running):
            if sequence.num_pending == 0:  # it forked within the step
                self._preempt(sequence)

    def preempt_all(self) -> None:
        """All give their blocks back and wait."""
        while self.running:
            self._preempt(self.running[-1])

    def restrain(self, num_ran: int) -> bool:
        """There was no memory for a step in which so many sequences ran: half of them, the youngest, wait, and no more
        run until `relax`. False if one ran alone, with as few tokens in a step as make a difference.
        """
        self._calm_steps = 0
        if num_ran > 1:
            self._max_sequences = num_ran // 2
            while len(self.running) > self._max_sequences:
                self._preempt(self.running[-1])
            return True
        self._max_sequences = 1
        if self._max_tokens <= FEWEST_TOKENS:
            return False
        self._max_tokens = max(FEWEST_TOKENS, self._max_tokens // 2)
        return True

    def calm(self) -> bool:
        """A step had the memory that it needed. True if more may run from now on."""
        if (self._max_sequences, self._max_tokens) == (self._most_sequences, self._most_tokens):
            return False
        self._calm_steps += 1
        if self._calm_steps < RELAXED_AFTER:
            return False
        self.relax()
        return True

    def relax(self) -> None:
        """Let twice as much run."""
        self._calm_steps = 0
        self._max_sequences = min(self._most_sequences, 2 * self._max_sequences)
        self._max_tokens = min(self._most_tokens, 2 * self._max_tokens)

    def advance(self, span: TokenRun) -> None:
        """The span's keys and values are in the cache: its full blocks may serve other prompts."""
        sequence, weights = span.sequence, span.sequence.request.weights
        for index in range(span.start // self.block_size, span.stop // self.block_size):
            key = sequence.key(index, self.block_size)
            if weights.alive:
                self.pool.register(sequence.blocks[index], key, weights.number)
            if self._computing.get(key) is sequence:
                del self._computing[key]
        sequence.num_cached = span.stop

    def fork(self, parent: Sequence, children: Seq[Sequence]) -> list[Sequence]:
        """Children of a parent that has just computed its prompt share its blocks; those returned run now.

        The others wait, for want of room, and will find the prompt's full blocks by key.
        """
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

    def _continue_prompts(self, begun: Seq[Sequence], budget: int, step: SamplerStep, lines: Lines) -> int:
        """Compute more of the prompts that have begun; returns the number of tokens. Of several scopes each takes an
        equal part at most, and those that could be admitted are among them.
        """
        if not begun:
            return 0
        takers = {sequence.scope for sequence in begun}
        if len(self.running) < self._max_sequences:
            takers |= lines.keys()
        left = dict.fromkeys(takers, max(budget // len(takers), 1))
        used = 0
        for sequence in begun:
            if (room := min(left[sequence.scope], budget - used)) > 0:
                taken = self._take(sequence, room, step)
                left[sequence.scope] -= taken
                used += taken
        return used

    def _take(self, sequence: Sequence, budget: int, step: SamplerStep) -> int:
        start = sequence.num_cached
        stop = min(sequence.length, start + budget)
        step.spans.append(TokenRun(sequence, start, stop))
        return stop - start

    def _admit_waiting(self, budget: int, step: SamplerStep, lines: Lines) -> None:
        counts = Counter(sequence.scope for sequence in self.running)
        deferred = 0
        while budget > 0 and len(self.running) < self._max_sequences and deferred < MAX_DEFERRED:
            sequence = self._next(lines, counts)
            if sequence is None:
                return
            hits = self._cached_blocks(sequence)
            if hits is None:
                deferred += 1
                continue
            if not self._admit(sequence, hits):
                return  # no sequence overtakes one that waits for memory
            self.waiting.remove(sequence)
            counts[sequence.scope] += 1
            self._num_admitted += 1
            self._admitted_at[sequence.scope] = self._num_admitted
            budget -= self._take(sequence, budget, step)

    def _is_shared(self) -> bool:
        """Whether there are several scopes."""
        sequences = [*self.running, *self.waiting]
        return any(sequence.scope != sequences[0].scope for sequence in sequences)

    def _lines(self) -> Lines:
        """The waiting sequences of each scope, oldest first."""
        lines: Lines = {}
        for sequence in self.waiting:
            lines.setdefault(sequence.scope, deque()).append(sequence)
        return lines

    def _next(self, lines: Lines, counts: Counter[str]) -> Sequence | None:
        """Take the next sequence: of the scope with the fewest running, then of the one admitted longest ago."""
        heads = [line[0] for line in lines.values() if line]
        if not heads:
            return None
        if len(heads) > 1:
            heads.sort(key=lambda head: (counts[head.scope], self._admitted_at.get(head.scope, 0), head.order))
        return lines[heads[0].scope].popleft()

    def _fewest_first(self) -> list[Sequence]:
        """The running sequences, those of the smallest scope first, then by age."""
        counts = Counter(sequence.scope for sequence in self.running)
        return sorted(self.running, key=lambda sequence: (counts[sequence.scope], sequence.order))

    def _make_places(self) -> None:
        """Preempt sequences of large scopes for waiting ones of small scopes, as far as this step can admit these."""
        lines = self._lines()
        counts = Counter(sequence.scope for sequence in self.running)
        self._admitted_at = {s: at for s, at in self._admitted_at.items() if s in lines or s in counts}
        budget = max(self._max_tokens - len(self.running), 1)
        num_coming = num_blocks = 0
        while budget > 0 and (newcomer := self._next(lines, counts)):
            num_blocks += -(-newcomer.length // self.block_size)
            if not self._displace(newcomer.scope, counts, num_coming, num_blocks):
                return
            counts[newcomer.scope] += 1
            num_coming += 1
            budget -= newcomer.num_pending

    def _displace(self, scope: str, counts: Counter[str], num_coming: int, num_blocks: int) -> bool:
        """Preempt what it takes to admit one sequence more of `scope`; nothing, and False, if that cannot be had.
        `counts` are of the running and the `num_coming` who come before it; `num_blocks` is what all of these need.
        """
        left = counts.copy()
        running = Counter(sequence.scope for sequence in self.running)
        victims: list[Sequence] = []
        available = self.pool.num_available
        while True:
            stay = len(self.running) - len(victims)
            if stay + num_coming < self._max_sequences and (not stay or available >= num_blocks + stay):
                break
            largest = max(left, key=lambda name: left[name])
            if left[largest] < left[scope] + 2 or running[largest] < 2:
                return False
            youngest = reversed(self.running)
            victim = next(other for other in youngest if other.scope == largest and other not in victims)
            victims.append(victim)
            left[largest] -= 1
            running[largest] -= 1
            available += sum(self.pool.refs(block) == 1 for block in victim.blocks)
        for victim in victims:
            self._preempt(victim)
            counts[victim.scope] -= 1
        return True

    def _cached_blocks(self, sequence: Sequence) -> list[int] | None:
        """Blocks that a waiting sequence need not compute; None if it is worth waiting for one more."""
        usable = sequence.num_reusable // self.block_size
        hits = self.pool.match(sequence.key(i, self.block_size) for i in range(usable))
        if self.snapshots is not None:
            return self._with_snapshot(sequence, hits, usable)
        if len(hits) < usable and sequence.key(len(hits), self.block_size) in self._computing:
            return None
        return hits

    def _with_snapshot(self, sequence: Sequence, hits: list[int], usable: int) -> list[int] | None:
        """The same where a state is needed behind the last of the blocks."""
        assert self.snapshots is not None
        if len(hits) < usable and sequence.key(usable - 1, self.block_size) in self._computing:
            return None  # a prompt with the same blocks will leave a snapshot behind them
        ends = {(sequence.request.num_prompt - 1) // self.block_size, len(hits)}
        sequence.cuts = tuple(end * self.block_size for end in ends if end)
        while hits and sequence.key(len(hits) - 1, self.block_size) not in self.snapshots:
            hits.pop()
        return hits

    def _admit(self, sequence: Sequence, hits: list[int]) -> bool:
        num_new = -(-sequence.length // self.block_size) - len(hits)
        self.pool.acquire(hits)
        # One spare block for everyone who runs, lest a newcomer be preempted as soon as the others go on.
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

    def _make_writable(self, sequence: Sequence, step: SamplerStep, spanned: Container[int]) -> bool:
        """Give a decoding sequence its own block for the next token; False if it was itself preempted. Those in
        `spanned` have their part of the step and keep their blocks.
        """
        index = sequence.num_cached // self.block_size
        while True:
            has_block = index < len(sequence.blocks)
            if has_block and self.pool.refs(sequence.blocks[index]) == 1:
                return True
            allocated = self.pool.allocate(1)
            if allocated is not None:
                break
            victim = self._victim(sequence, spanned)
            self._preempt(victim)
            if victim is sequence:
                return False
        if has_block:
            step.copies.append((sequence.blocks[index], allocated[0]))
            self.pool.release([sequence.blocks[index]])
            sequence.blocks[index] = allocated[0]
        else:
            sequence.blocks.append(allocated[0])
        return True

    def _victim(self, sequence: Sequence, spanned: Container[int]) -> Sequence:
        """Who gives its blocks back for this sequence: the youngest of the largest scope, if that has at least two
        more running; otherwise the youngest of all, which may be this one.
        """
        candidates = [other for other in self.running if id(other) not in spanned]
        counts = Counter(other.scope for other in self.running)
        largest = max(counts, key=lambda scope: counts[scope])
        if counts[largest] >= counts[sequence.scope] + 2:
            theirs = [other for other in self.running if other.scope == largest][1:]
            if youngest := next((other for other in reversed(theirs) if id(other) not in spanned), None):
                return youngest
        return candidates[-1]

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)
        self.add(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_cached = 0
        sequence.state = sequence.tail = None
        if self._computing:
            self._computing = {key: owner for key, owner in self._computing.items() if owner is not sequence}


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
