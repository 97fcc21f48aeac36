"""Which tokens of which sequences go through the model next: continuous batching over a bounded block pool.

`Batcher` owns the waiting and the running sequences and their blocks; it knows counts and block numbers, no
model. Each `schedule` gives every decoding sequence one token, then the rest of the step's token budget to
prompts, oldest first, in chunks; so a long prompt never stalls decoding. Sequences join between steps and
leave one by one.

Memory cannot deadlock: a prompt's blocks are taken when it is admitted, later blocks on demand, and when none
is left the youngest running sequence gives its blocks back and waits (its tokens are computed again later,
mostly from cached blocks). The oldest sequence is never preempted for another and fits alone, so it always
finishes.

Blocks are shared in two ways. Answers of one request fork after the prompt and share its blocks; whoever
writes into a shared block copies it first (`Step.copies`). Across requests, full blocks are found by their
key; a prompt whose next block is being computed by another sequence right now waits for it rather than
compute it twice.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from tinsmith.samplers.blocks import BlockPool
from tinsmith.samplers.sequences import Sequence

MAX_DEFERRED = 256  # waiting sequences that one step looks past for the sake of a prefix in the making


class Span(NamedTuple):
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
class Step:
    """Before the model runs: `copies` (source, target) of blocks first, then `fresh` blocks to zero."""

    spans: list[Span] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)


class Batcher:
    def __init__(self, pool: BlockPool, *, block_size: int, max_sequences: int, max_tokens: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self.running: list[Sequence] = []  # both lists are sorted by Sequence.order
        self.waiting: list[Sequence] = []
        self._computing: dict[bytes, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequences: Seq[Sequence]) -> None:
        """Forget sequences, wherever they are, and give their blocks back."""
        gone = set(map(id, sequences))
        for sequence in sequences:
            self._give_back(sequence)
        self.running = [s for s in self.running if id(s) not in gone]
        self.waiting = [s for s in self.waiting if id(s) not in gone]

    def schedule(self) -> Step:
        step = Step()
        for sequence in tuple(self.running):
            # A victim of preemption is younger than everyone who has a span already.
            if sequence.num_pending == 1 and sequence.blocks and self._make_writable(sequence, step):
                step.spans.append(Span(sequence, sequence.num_cached, sequence.length))
        budget = max(self._max_tokens - len(step.spans), 1)
        for sequence in self.running:
            if sequence.num_pending > 1 and budget > 0:
                budget -= self._take(sequence, budget, step)
        self._admit_waiting(budget, step)
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

    def advance(self, span: Span) -> None:
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
            insort(self.running, child, key=_order)
        for child in children[room:]:
            self.add(child)
        return list(children[:room])

    def _take(self, sequence: Sequence, budget: int, step: Step) -> int:
        start = sequence.num_cached
        stop = min(sequence.length, start + budget)
        step.spans.append(Span(sequence, start, stop))
        return stop - start

    def _admit_waiting(self, budget: int, step: Step) -> None:
        deferred = 0
        while budget > 0 and deferred < min(len(self.waiting), MAX_DEFERRED):
            if len(self.running) >= self._max_sequences:
                return
            sequence = self.waiting[deferred]
            hits = self._cached_blocks(sequence)
            if hits is None:
                deferred += 1
                continue
            if not self._admit(sequence, hits):
                return  # nobody overtakes a sequence that waits for memory
            del self.waiting[deferred]
            budget -= self._take(sequence, budget, step)

    def _cached_blocks(self, sequence: Sequence) -> list[int] | None:
        """Blocks that a waiting sequence need not compute; None if it is worth waiting for one more."""
        usable = sequence.num_reusable // self.block_size
        hits = self.pool.match(sequence.key(i, self.block_size) for i in range(usable))
        if len(hits) < usable and sequence.key(len(hits), self.block_size) in self._computing:
            return None
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
        if sequence.request.prompt_cache_hit_tokens is None:
            sequence.request.prompt_cache_hit_tokens = sequence.num_cached
        for index in range(len(hits), sequence.length // self.block_size):
            if sequence.request.weights.alive:
                self._computing.setdefault(sequence.key(index, self.block_size), sequence)
        insort(self.running, sequence, key=_order)
        return True

    def _make_writable(self, sequence: Sequence, step: Step) -> bool:
        """Give a decoding sequence its own block for the next token; False if it was itself preempted."""
        index = sequence.num_cached // self.block_size
        while True:
            has_block = index < len(sequence.blocks)
            if has_block and self.pool.refs(sequence.blocks[index]) == 1:
                return True
            allocated = self.pool.allocate(1)
            if allocated is not None:
                break
            victim = self.running[-1]
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

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)
        self.add(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_cached = 0
        if self._computing:
            self._computing = {key: owner for key, owner in self._computing.items() if owner is not sequence}


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
