"""Blocks, batching and the cache's tensors, without a model.

`_Shadow` plays the model: it keeps, for every slot of every block, the whole token prefix whose keys and values a
real cache would hold there, and checks that each span reads exactly its own prefix. A block given to two owners,
freed too early, copied too late or not zeroed shows up as a wrong prefix.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.properties import examples
from tinsmith.backends.torch.attention import Window
from tinsmith.samplers.local.kv_cache import BlockPool, KVCache, LayerShape, chain_key, root_key
from tinsmith.samplers.local.paged_attention import PagedPlan, SequenceRows
from tinsmith.samplers.local.request import Request, Sequence, StopRule, Weights
from tinsmith.samplers.local.scheduler import Batcher, SamplerStep
from tinsmith.types import Sample, SamplingParams

BLOCK = 4


def _request(
    prompt: list[int],
    *,
    index: int,
    max_new: int = 5,
    num_samples: int = 1,
    weights: Weights,
    scored: int | None = 0,
    scope: str = "",
) -> Request:
    """`scored` is the number of last prompt tokens with logprobs; None means all."""
    params = SamplingParams(max_tokens=max_new)
    last_n = min(scored, len(prompt) - 1) if scored else None
    wants = scored is None or (last_n is not None and last_n > 0)
    sample = Sample(
        str(index),
        None,
        np.array(prompt, np.int32),
        num_samples,
        params,
        prompt_logprobs=wants,
        prompt_logprobs_last_n=last_n if wants else None,
        cache_scope=scope,
    )
    return Request(sample, weights, index, max_new)


def _sequence(request: Request, index: int = 0) -> Sequence:
    return Sequence(request, index, StopRule(lambda _: "", strings=(), tokens=frozenset()))


def _batcher(max_blocks: int, *, max_sequences: int = 8, max_tokens: int = 16) -> Batcher:
    pool = BlockPool(max_blocks=max_blocks, initial_blocks=4)
    return Batcher(pool, block_size=BLOCK, max_sequences=max_sequences, max_tokens=max_tokens)


class _Shadow:
    """Runs a batcher's steps; a sequence's next token is a function of its tokens, so answers can be checked."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.live: dict[int, list[Sequence]] = {}
        self.answers: dict[tuple[int, int], tuple[int, ...]] = {}
        self.num_computed = 0

    def submit(self, request: Request) -> None:
        self.live[request.arrival_index] = [_sequence(request)]
        self.batcher.add(self.live[request.arrival_index][0])

    def cancel(self, index: int) -> None:
        self.batcher.remove(self.live.pop(index, []))

    def step(self, scopes: set[str] | None = None) -> SamplerStep:
        step = self.batcher.schedule(scopes)
        assert scopes is None or {span.sequence.scope for span in step.spans} <= scopes
        for source, target in step.copies:
            for slot in range(BLOCK):
                self.slots[target, slot] = self.slots.get((source, slot), ())
        for block in step.fresh:
            for slot in range(BLOCK):
                self.slots.pop((block, slot), None)
        for span in step.spans:
            self._compute(span.sequence, span.start, span.stop)
        for span in step.spans:
            self._check_reads(span.sequence, span.stop)
            self.batcher.advance([span])
            scores = span.sequence.request.scores
            assert scores.next_row is None or span.start <= scores.next_row, "a wanted row was skipped"
            scores.num_scored = max(scores.num_scored, int(np.searchsorted(scores.rows_R, span.stop)))
        for span in step.spans:
            if span.completes:
                self._sample(span.sequence)
        return step

    def _compute(self, sequence: Sequence, start: int, stop: int) -> None:
        assert start == sequence.num_cached < stop <= sequence.length
        self.num_computed += stop - start
        tokens = (sequence.request.weights.weights_id, *sequence.tokens_T[:stop].tolist())
        for position in range(start, stop):
            block = sequence.blocks[position // BLOCK]
            assert block != 0
            assert self.batcher.pool.refs(block) == 1, "a shared block is written"
            self.slots[block, position % BLOCK] = tokens[: position + 2]

    def _check_reads(self, sequence: Sequence, stop: int) -> None:
        tokens = (sequence.request.weights.weights_id, *sequence.tokens_T[:stop].tolist())
        for position in range(stop):
            written = self.slots[sequence.blocks[position // BLOCK], position % BLOCK]
            assert written == tokens[: position + 2]
        # A mask does not hide a stale NaN, so allocated slots that are not yet written must be zero.
        for position in range(stop, len(sequence.blocks) * BLOCK):
            assert not self.slots.get((sequence.blocks[position // BLOCK], position % BLOCK))

    def _sample(self, leader: Sequence) -> None:
        request, family = leader.request, [leader]
        if leader.index == 0 and not leader.num_generated and request.sample.num_samples > 1:
            children = [_sequence(request, i) for i in range(1, request.sample.num_samples)]
            self.live[request.arrival_index] += children
            family += self.batcher.fork(leader, children)
        for sequence in family:
            tokens = sequence.tokens_T[: sequence.length].tolist()
            if sequence.append(_next_token(tokens, sequence.index), 0.0, None):
                self.batcher.remove([sequence])
                self.answers[sequence.order] = tuple(sequence.tokens_T[: sequence.length].tolist())
                self.live[request.arrival_index].remove(sequence)


def _next_token(tokens: list[int], index: int) -> int:
    return (sum(tokens) * 7 + index * 3 + len(tokens)) % 50


def _reference_tokens(prompt: list[int], index: int, max_new: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(max_new):
        tokens.append(_next_token(tokens, index))
    return tuple(tokens)


requests = st.tuples(
    st.integers(0, 2),  # weights
    st.integers(0, 2),  # which common beginning
    st.integers(1, 22),  # prompt length
    st.integers(1, 8),  # max_new
    st.integers(1, 3),  # num_samples
    st.sampled_from([0, None, 1, 5]),  # how many prompt logprobs
    st.sampled_from(["a", "a", "b", "c"]),  # scope
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), requests),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("few"), st.integers(1, 4)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("replace"), st.integers(1, 2)),
    ),
    max_size=30,
)


@examples(150)
@given(actions=actions, max_blocks=st.integers(8, 30), max_sequences=st.integers(1, 6), max_tokens=st.integers(1, 20))
def test_in_any_interleaving_spans_read_their_own_prefix_and_no_block_leaks(
    actions: list[tuple[str, tuple[int, ...] | int]], max_blocks: int, max_sequences: int, max_tokens: int
):
    batcher = _batcher(max_blocks, max_sequences=max_sequences, max_tokens=max_tokens)
    shadow = _Shadow(batcher)
    weights = [Weights(None, index) for index in range(3)]
    expected: dict[tuple[int, int], tuple[int, ...]] = {}
    cancelled: set[int] = set()
    index = 0

    for action, value in actions:
        if action == "submit":
            weights_index, beginning, length, max_new, num_samples, scored, scope = value
            prompt = [(position * 5 + beginning * (position > 9)) % 50 for position in range(length)]
            request = _request(
                prompt,
                index=index,
                max_new=max_new,
                num_samples=num_samples,
                weights=weights[weights_index],
                scored=scored,
                scope=scope,
            )
            shadow.submit(request)
            expected.update({(index, i): _reference_tokens(prompt, i, max_new) for i in range(num_samples)})
            index += 1
        elif action == "step":
            for _ in range(value):
                _check_step(shadow.step(), batcher, max_tokens, max_sequences)
        elif action == "few":
            for _ in range(value):
                _check_step(shadow.step({"b", "c"}), batcher, max_tokens, max_sequences)
        elif action == "cancel":
            shadow.cancel(value)
            cancelled.add(value)
        else:
            weights[value].alive = False
            batcher.pool.forget(weights[value].weights_id)
            weights[value] = Weights(None, weights[value].weights_id + 10)

    for _ in range(5_000):
        if not batcher.running and not batcher.waiting:
            break
        assert shadow.step().spans, "there is work, and nothing moves"
    for order, tokens in expected.items():
        if order[0] not in cancelled:
            assert shadow.answers[order] == tokens
    pool = batcher.pool
    assert pool.num_live == 0
    assert pool.num_available == max_blocks
    for namespace in {weight.weights_id for weight in weights}:
        pool.forget(namespace)
    assert pool.num_cached == 0
    assert sorted(pool.allocate(max_blocks) or []) == list(range(1, max_blocks + 1))


def _check_step(step: SamplerStep, batcher: Batcher, max_tokens: int, max_sequences: int) -> None:
    decoding = [span for span in step.spans if span.stop - span.start == 1]
    prefill_tokens = sum(span.stop - span.start for span in step.spans) - len(decoding)
    assert prefill_tokens <= max(max_tokens - len(decoding), 1) + len(decoding)
    assert len({id(span.sequence) for span in step.spans}) == len(step.spans) <= max_sequences
    assert len(batcher.running) <= max_sequences


def test_a_long_prompt_does_not_stop_others_from_decoding():
    shadow = _Shadow(_batcher(100, max_tokens=8))
    weights = Weights(None, 0)
    shadow.submit(_request([1, 2], index=0, max_new=30, weights=weights))
    shadow.step()
    shadow.submit(_request(list(range(80)), index=1, weights=weights))
    for _ in range(11):
        spans = {span.sequence.order[0]: span for span in shadow.step().spans}
        assert spans[0].stop - spans[0].start == 1
        assert spans[1].stop - spans[1].start == 7
    assert shadow.live[1][0].num_cached == 77


def test_samples_of_a_request_share_the_prompt_and_copy_only_its_last_block():
    shadow = _Shadow(_batcher(100))
    shadow.submit(_request(list(range(14)), index=0, num_samples=4, max_new=3, weights=Weights(None, 0)))
    shadow.step()
    assert shadow.num_computed == 14
    assert shadow.batcher.pool.num_live == 4
    step = shadow.step()
    assert len(step.spans) == 4
    assert len(step.copies) == 3  # the last owner writes in place
    assert shadow.batcher.pool.num_live == 3 + 4
    assert shadow.num_computed == 18


def test_samples_beyond_the_limit_wait_and_find_the_prompt_cached():
    shadow = _Shadow(_batcher(100, max_sequences=2))
    shadow.submit(_request(list(range(14)), index=0, num_samples=6, max_new=4, weights=Weights(None, 0)))
    while shadow.live[0]:
        shadow.step()
    assert len(shadow.answers) == 6
    assert shadow.num_computed == 14 + 4 * 2 + 6 * 3  # later samples compute the two tokens of the open block


def test_equal_prompts_that_arrive_together_are_computed_once():
    shadow = _Shadow(_batcher(100, max_tokens=64))
    weights = Weights(None, 0)
    for index in range(8):
        shadow.submit(_request(list(range(17)), index=index, max_new=1, weights=weights))
    for _ in range(4):
        shadow.step()
    assert len(shadow.answers) == 8
    assert shadow.num_computed == 17 + 7 * 1


def test_weights_never_share_blocks_and_replaced_weights_find_nothing():
    shadow = _Shadow(_batcher(100))
    first, second = Weights(None, 1), Weights(None, 2)
    for index, weights in enumerate([first, second, first]):
        shadow.submit(request := _request(list(range(13)), index=index, max_new=1, weights=weights))
        shadow.step()
        assert request.prompt_cache_hit_tokens == (12 if index == 2 else 0)
    shadow.batcher.pool.forget(1)
    shadow.submit(request := _request(list(range(13)), index=3, max_new=1, weights=first))
    shadow.step()
    assert request.prompt_cache_hit_tokens == 0


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt_and_leaves_it_to_others():
    shadow = _Shadow(_batcher(100))
    weights = Weights(None, 0)
    for index, scored in enumerate([0, None, None, 0]):
        request = _request(list(range(13)), index=index, max_new=1, weights=weights, scored=scored)
        shadow.submit(request)
        shadow.step()
        assert request.prompt_cache_hit_tokens == (12 if index == 3 else 0)
    assert shadow.num_computed == 13 * 3 + 1


@pytest.mark.parametrize(("last_n", "hits"), [(1, 8), (3, 8), (4, 8), (5, 4), (8, 4), (9, 0), (12, 0)])
def test_a_request_for_the_logprobs_of_its_last_tokens_finds_what_lies_before_them(last_n: int, hits: int):
    shadow = _Shadow(_batcher(100))
    weights = Weights(None, 0)
    shadow.submit(_request(list(range(13)), index=0, max_new=1, weights=weights))
    shadow.step()
    shadow.submit(request := _request(list(range(13)), index=1, max_new=1, weights=weights, scored=last_n))
    shadow.step()
    # The first wanted logprob is predicted by row 12 - last_n, which must be computed.
    assert request.prompt_cache_hit_tokens == hits == (12 - last_n) // BLOCK * BLOCK
    assert request.scores.next_row is None
    assert shadow.num_computed == 13 + 13 - hits


def test_generated_tokens_are_found_by_the_next_turn_of_a_conversation():
    shadow = _Shadow(_batcher(100))
    weights = Weights(None, 0)
    shadow.submit(_request(list(range(10)), index=0, max_new=8, weights=weights))
    while shadow.live[0]:
        shadow.step()
    next_turn = [*shadow.answers[0, 0], 7, 7]
    shadow.submit(request := _request(next_turn, index=1, max_new=1, weights=weights))
    shadow.step()
    assert request.prompt_cache_hit_tokens == 16  # of 18 tokens the last was never computed


def test_when_memory_runs_out_the_youngest_waits_and_everyone_finishes():
    shadow = _Shadow(_batcher(10, max_tokens=40))
    weights = Weights(None, 0)
    for index in range(4):
        shadow.submit(_request([index] * 7, index=index, max_new=20, weights=weights))
    finished = []
    while any(shadow.live.values()):
        shadow.step()
        finished += [order for order in shadow.answers if order not in finished]
    assert finished[0] == (0, 0)
    assert shadow.answers == {(n, 0): _reference_tokens([n] * 7, 0, 20) for n in range(4)}
    assert shadow.batcher.pool.num_live == 0


def test_no_request_overtakes_a_prompt_that_waits_for_memory():
    shadow = _Shadow(_batcher(10, max_tokens=64))
    weights = Weights(None, 0)
    shadow.submit(_request([1] * 20, index=0, max_new=6, weights=weights))
    shadow.step()
    shadow.submit(_request([2] * 32, index=1, max_new=2, weights=weights))
    shadow.submit(_request([3] * 2, index=2, max_new=2, weights=weights))
    finished = []
    while any(shadow.live.values()):
        shadow.step()
        finished += [order for order in shadow.answers if order not in finished]
    assert finished == [(0, 0), (1, 0), (2, 0)]


def _steps_until_answered(shadow: _Shadow, order: tuple[int, int], max_steps: int) -> int:
    for count in range(1, max_steps + 1):
        shadow.step()
        if order in shadow.answers:
            return count
    raise AssertionError(f"{order} was not answered within {max_steps} steps")


@pytest.mark.parametrize("num_samples", [1, 8])
def test_a_sequence_of_another_scope_does_not_wait_for_the_end_of_long_answers(num_samples: int):
    shadow = _Shadow(_batcher(1000, max_sequences=8, max_tokens=64))
    weights = Weights(None, 0)
    for index in range(16 // num_samples):
        prompt = [index] * 5
        shadow.submit(
            _request(prompt, index=index, max_new=300, num_samples=num_samples, weights=weights, scope="flood")
        )
    for _ in range(5):
        shadow.step()
    assert len(shadow.batcher.running) == 8
    oldest = shadow.batcher.running[0]
    shadow.submit(_request([9] * 5, index=100, max_new=3, weights=weights, scope="lone"))
    assert _steps_until_answered(shadow, (100, 0), 5) == 3
    shadow.step()
    assert len(shadow.batcher.running) == 8, "the place is the flood's again"
    assert shadow.batcher.running[0] is oldest
    while any(shadow.live.values()):
        shadow.step()
    expected = {
        (n, i): _reference_tokens([n] * 5, i, 300) for n in range(16 // num_samples) for i in range(num_samples)
    }
    assert {order: tokens for order, tokens in shadow.answers.items() if order[0] < 100} == expected


def test_a_step_of_some_scopes_leaves_the_others_as_they_are():
    shadow = _Shadow(_batcher(1000, max_sequences=8, max_tokens=64))
    weights = Weights(None, 0)
    for index in range(10):
        shadow.submit(_request([index] * 5, index=index, max_new=20, weights=weights, scope="flood"))
    shadow.step()
    lengths = [sequence.length for sequence in shadow.batcher.running[:6]]
    shadow.submit(_request([9] * 5, index=100, max_new=3, weights=weights, scope="lone"))
    for _ in range(3):
        assert [span.sequence.scope for span in shadow.step({"lone"}).spans] == ["lone"]
    assert (100, 0) in shadow.answers
    assert [sequence.length for sequence in shadow.batcher.running[:6]] == lengths


def test_scopes_share_places_equally_and_none_loses_its_oldest():
    shadow = _Shadow(_batcher(1000, max_sequences=6, max_tokens=64))
    weights = Weights(None, 0)
    for index in range(12):
        shadow.submit(_request([index] * 3, index=index, max_new=50, weights=weights, scope="flood"))
    shadow.step()
    for index in range(12, 30):
        scope = "b" if index % 2 else "c"
        shadow.submit(_request([index] * 3, index=index, max_new=50, weights=weights, scope=scope))
    for _ in range(3):
        shadow.step()
        assert shadow.batcher.running[0].order == (0, 0)
    counts = [sequence.scope for sequence in shadow.batcher.running]
    assert sorted(counts) == ["b", "b", "c", "c", "flood", "flood"]


def test_a_sequence_of_another_scope_gets_blocks_that_one_scope_holds():
    shadow = _Shadow(_batcher(24, max_sequences=8, max_tokens=64))
    weights = Weights(None, 0)
    for index in range(4):
        shadow.submit(_request([index] * 12, index=index, max_new=12, weights=weights, scope="flood"))
    for _ in range(8):
        shadow.step()
    assert shadow.batcher.pool.num_available < 5
    shadow.submit(_request([9] * 12, index=100, max_new=4, weights=weights, scope="lone"))
    assert _steps_until_answered(shadow, (100, 0), 10) == 4
    while any(shadow.live.values()):
        shadow.step()
    assert len(shadow.answers) == 5


def test_prompts_of_two_scopes_share_the_tokens_of_a_step():
    shadow = _Shadow(_batcher(1000, max_tokens=16))
    weights = Weights(None, 0)
    shadow.submit(_request([1] * 400, index=0, max_new=1, weights=weights, scope="flood"))
    shadow.step()
    shadow.submit(_request([2] * 24, index=1, max_new=1, weights=weights, scope="lone"))
    assert _steps_until_answered(shadow, (1, 0), 4) == 3
    assert shadow.live[0][0].num_cached == 16 + 3 * 8


def test_least_recently_used_blocks_go_first_and_a_chain_goes_from_its_end():
    pool = BlockPool(max_blocks=4, initial_blocks=4)
    keys = [chain_key(root_key(0), bytes([i])) for i in range(4)]
    blocks = pool.allocate(4) or []
    for block, key in zip(blocks, keys, strict=True):
        pool.register(block, key, 0)
    pool.release(blocks[:2])
    pool.release(blocks[2:])
    pool.acquire(blocks[:1])
    pool.release(blocks[:1])
    evicted = [block for _ in range(3) for block in pool.allocate(1) or []]
    assert evicted == [blocks[1], blocks[3], blocks[2]]
    assert pool.match(keys[:1]) == blocks[:1]


def test_the_pool_grows_for_live_blocks_and_not_for_cached_ones():
    pool = BlockPool(max_blocks=1000, initial_blocks=8)
    for turn in range(200):
        blocks = pool.allocate(4) or []
        for index, block in enumerate(blocks):
            pool.register(block, chain_key(root_key(0), bytes([turn, index])), 0)
        pool.release(blocks)
    assert pool.num_blocks <= 17
    assert len(pool.allocate(600) or []) == 600
    assert pool.allocate(401) is None


def test_keys_depend_on_weights_tokens_and_everything_before():
    tokens = [np.array(row, np.int32).tobytes() for row in ([1, 2], [2, 1], [1, 2, 0])]
    roots = [root_key(0), root_key(0, "alice"), root_key(1)]
    keys = {chain_key(root, row) for root in roots for row in tokens}
    keys |= {chain_key(key, tokens[0]) for key in list(keys)}
    assert len(keys) == 18


def _plain_attention(
    q_HD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    repeat = q_HD.shape[0] // k_TGD.shape[1]
    k_THD, v_THD = k_TGD.double().repeat_interleave(repeat, 1), v_TGD.double().repeat_interleave(repeat, 1)
    scores_HT = torch.einsum("hd,thd->ht", q_HD.double(), k_THD) * scale
    scores_HT = scores_HT if softcap is None else softcap * torch.tanh(scores_HT / softcap)
    return torch.einsum("ht,thd->hd", scores_HT.softmax(-1), v_THD)


@examples(80)
@given(
    sizes=st.lists(
        st.tuples(st.just(0) | st.integers(1, 60), st.sampled_from([1, 1, 1, 2, 5, 19])), min_size=1, max_size=7
    ),
    window=st.sampled_from([None, Window(3), Window(16), Window(5, chunked=True), Window(16, chunked=True)]),
    softcap=st.sampled_from([None, 2.0]),
    dims=st.sampled_from([(4, 2, 8, 8), (3, 3, 8, 4)]),
    seed=st.integers(0, 99),
)
def test_paged_attention_equals_attention_over_each_sequence_alone(
    sizes: list[tuple[int, int]],
    window: Window | None,
    softcap: float | None,
    dims: tuple[int, int, int, int],
    seed: int,
):
    num_heads, num_groups, key_dim, value_dim = dims
    generator = torch.Generator().manual_seed(seed)
    device = torch.device("cpu")
    cache = KVCache({3: LayerShape(num_groups, key_dim, value_dim, torch.float32)}, BLOCK, device)
    lengths = [start + new for start, new in sizes]
    num_blocks = [-(-length // BLOCK) for length in lengths]
    ids = torch.randperm(sum(num_blocks), generator=generator).add(1).tolist()
    tables = [[ids.pop() for _ in range(num)] for num in num_blocks]
    cache.resize(sum(num_blocks) + 1)

    full_k = [torch.randn(n, num_groups, key_dim, generator=generator) for n in lengths]
    full_v = [torch.randn(n, num_groups, value_dim, generator=generator) for n in lengths]
    for k, v, table, (start, _) in zip(full_k, full_v, tables, sizes, strict=True):
        slots = torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(start)], dtype=torch.int64)
        cache.write(3, slots, k[:start], v[:start])

    q_THD = torch.randn(sum(new for _, new in sizes), num_heads, key_dim, generator=generator)
    rows = [SequenceRows(start, start + new, table) for (start, new), table in zip(sizes, tables, strict=True)]
    plan = PagedPlan(cache, rows, device)
    new_k, new_v = (
        torch.cat([x[start:] for x, (start, _) in zip(full, sizes, strict=True)]) for full in (full_k, full_v)
    )
    for _ in range(2):  # a second layer of the same step reuses the masks
        out_THD = plan.attend(3, q_THD, new_k, new_v, scale=0.3, window=window, softcap=softcap)

    row = 0
    for k, v, (start, new) in zip(full_k, full_v, sizes, strict=True):
        for position in range(start, start + new):
            assert plan.positions_T[row] == position
            first = 0
            if window is not None:
                first = position - position % window.size if window.chunked else max(position - window.size + 1, 0)
            visible = slice(first, position + 1)
            expected = _plain_attention(q_THD[row], k[visible], v[visible], 0.3, softcap)
            torch.testing.assert_close(out_THD[row].double(), expected, atol=2e-5, rtol=1e-4)
            row += 1


@pytest.mark.parametrize("parity", [0, 1])
def test_a_sequence_of_nans_stays_alone_in_every_kind_of_group(parity: int):
    device = torch.device("cpu")
    cache = KVCache({0: LayerShape(2, 8, 8, torch.float32)}, BLOCK, device)
    cache.resize(50)
    sizes = [(0, 6), (0, 9), (0, 4), (0, 9), (5, 1), (9, 1), (7, 5), (8, 6)]
    rows = [SequenceRows(start, start + new, range(1 + 5 * i, 6 + 5 * i)) for i, (start, new) in enumerate(sizes)]
    plan = PagedPlan(cache, rows, device)
    torch.manual_seed(0)
    q, k, v = torch.randn(41, 4, 8), torch.randn(41, 2, 8), torch.randn(41, 2, 8)
    clean = plan.attend(0, q, k, v, scale=0.3)
    bad = torch.zeros(41, dtype=torch.bool)
    first = 0
    for index, (_, new) in enumerate(sizes):
        bad[first : first + new] = index % 2 == parity
        first += new
    k, v = k.clone(), v.clone()
    k[bad] = torch.nan
    v[bad] = torch.inf
    for softcap in (None, 4.0):
        expected = plan.attend(0, q, *(x.nan_to_num(0, 0) for x in (k, v)), scale=0.3, softcap=softcap)
        out = plan.attend(0, q, k, v, scale=0.3, softcap=softcap)
        assert not out[bad].isfinite().any()
        assert torch.equal(out[~bad], expected[~bad])
    assert clean.isfinite().all()


def test_fresh_blocks_hold_nothing_of_their_last_owner_and_copies_come_before():
    small, large = LayerShape(1, 2, 2, torch.float32), LayerShape(2, 4, 4, torch.float32)
    cache = KVCache({0: small, 1: large, 2: small}, 2, torch.device("cpu"))
    assert cache.token_bytes == (4 + 16 + 4) * 4
    cache.resize(4)
    for layer in (0, 2):
        cache.write(layer, torch.arange(2, 8), torch.full((6, 1, 2), torch.nan), torch.full((6, 1, 2), 5.0 + layer))
    cache.write(2, torch.arange(2, 4), torch.full((2, 1, 2), torch.nan), torch.full((2, 1, 2), 8.0))
    cache.prepare(copies=[(1, 2)], fresh=[1])
    for layer, copied in ((0, 5), (2, 8)):
        k, v = cache.read(layer, torch.tensor([[0, 1, 2, 3]]))
        assert not k[0, 0, :4].any()
        assert not v[0, 0, :4].any()
        assert k[0, 0, 4:].isnan().all()
        assert (v[0, 0, 4:6] == copied).all()
        assert (v[0, 0, 6:] == 5 + layer).all()
    cache.resize(9)
    _, v = cache.read(2, torch.tensor([[2, 8]]))
    assert (v[0, 0, :2] == 8).all()
    assert not v[0, 0, 2:].any()


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="max_blocks"):
        BlockPool(max_blocks=0)
