"""The choice of a sampler: prefix affinity, stability, and the bound on its load."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.cluster.routing import BLOCK_TOKENS, MOST_OVER_MEAN, SLACK_TOKENS, Prefixes, chain_of, choose

NAMES = st.lists(st.text("abcdef:/-0123", min_size=1, max_size=12), min_size=1, max_size=8, unique=True)
KEYS = st.binary(max_size=64)


def even(names: list[str], tokens: int = 0) -> dict[str, int]:
    return dict.fromkeys(names, tokens)


def test_without_samplers_none_is_chosen() -> None:
    assert choose(b"key", {}) is None


@given(NAMES, KEYS, st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_the_same_key_finds_the_same_sampler_while_load_is_even(names, key, tokens, random) -> None:
    chosen = choose(key, even(names, tokens))
    shuffled = list(names)
    random.shuffle(shuffled)
    assert chosen in names
    assert choose(key, even(shuffled, tokens)) == chosen


@given(NAMES, KEYS, st.data())
def test_removing_a_sampler_moves_only_its_own_keys(names, key, data) -> None:
    chosen = choose(key, even(names))
    removed = data.draw(st.sampled_from(names))
    remaining_choice = choose(key, even([name for name in names if name != removed]))
    if removed != chosen:
        assert remaining_choice == chosen
    else:
        assert remaining_choice != removed


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=8), KEYS)
def test_no_sampler_far_above_the_mean_is_chosen(loads, key) -> None:
    waiting_tokens = {f"sampler-{index}": load for index, load in enumerate(loads)}
    chosen = choose(key, waiting_tokens)
    assert chosen is not None
    load = waiting_tokens[chosen]
    mean = sum(loads) / len(loads)
    assert load <= max(MOST_OVER_MEAN * mean, mean + SLACK_TOKENS)


@given(st.integers(1, 6), st.lists(st.tuples(KEYS, st.integers(1, 20_000)), max_size=60))
def test_a_sequence_of_samples_never_overloads_one_sampler(count, samples) -> None:
    loads = {f"sampler-{index}": 0 for index in range(count)}
    for key, tokens in samples:
        mean = sum(loads.values()) / count
        chosen = choose(key, loads)
        assert chosen is not None
        loads[chosen] += tokens
        assert loads[chosen] <= max(MOST_OVER_MEAN * mean, mean + SLACK_TOKENS) + tokens


def test_one_hot_prefix_spills_to_the_others() -> None:
    loads = dict.fromkeys(("a", "b", "c"), 0)
    for _ in range(300):
        chosen = choose(b"the same prompt", loads)
        assert chosen is not None
        loads[chosen] += 1000
    assert max(loads.values()) <= 1.3 * 100_000 and min(loads.values()) > 0.4 * 100_000, loads


def test_keys_are_spread_over_the_samplers() -> None:
    names = [f"host:/data:sampler:{index}:nano" for index in range(4)]
    counts = dict.fromkeys(names, 0)
    for key in range(2000):
        chosen = choose(b"%d" % key, even(names))
        assert chosen is not None
        counts[chosen] += 1
    assert all(400 < count < 600 for count in counts.values()), counts


def tokens(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng([seed, length]).integers(0, 1000, length).astype(np.int32)


def concatenate(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


NAMED = even([f"sampler-{index}" for index in range(4)])


def test_turns_of_a_conversation_and_samples_of_a_prompt_stay_together() -> None:
    prefixes = Prefixes()
    for seed in range(20):
        prompt = tokens(seed, 100)
        first = prefixes.choose("v", prompt, NAMED)
        assert [prefixes.choose("v", prompt, NAMED) for _ in range(5)] == [first] * 5
        for turn in range(1, 6):
            prompt = concatenate(prompt, tokens(seed, 90 + turn))
            assert prefixes.choose("v", prompt, NAMED) == first


def test_a_shared_system_prompt_maps_conversations_to_all_samplers() -> None:
    prefixes = Prefixes()
    system = tokens(0, 1000)
    counts = dict.fromkeys(NAMED, 0)
    for seed in range(1, 401):
        prompt = concatenate(system, tokens(seed, 10 if seed % 2 else 200))
        chosen = prefixes.choose("v", prompt, NAMED)
        assert chosen is not None
        counts[chosen] += 1
        if seed % 2 == 0:  # its later turns stay
            assert prefixes.choose("v", concatenate(prompt, tokens(seed, 150)), NAMED) == chosen
    assert all(60 < count < 140 for count in counts.values()), counts


def test_a_history_with_a_rewritten_end_stays_on_its_sampler() -> None:
    prefixes = Prefixes()
    shared = tokens(0, 300)
    for seed in range(1, 6):
        prefixes.choose("v", concatenate(shared, tokens(seed, 300)), NAMED)
    history = concatenate(shared, tokens(9, 300))
    first = prefixes.choose("v", concatenate(history, tokens(100, 100)), NAMED)
    assert prefixes.choose("v", concatenate(history, tokens(200, 100)), NAMED) == first


def test_a_full_sampler_keeps_no_conversation() -> None:
    prefixes = Prefixes()
    prompt = tokens(1, 200)
    first = prefixes.choose("v", prompt, NAMED)
    assert first is not None
    other = prefixes.choose("v", concatenate(prompt, tokens(2, 100)), NAMED | {first: 10**6})
    assert other not in (None, first)
    assert prefixes.choose("v", concatenate(prompt, tokens(2, 100), tokens(3, 100)), NAMED) == other
    assert prefixes.choose("v", prompt, {"only": 0}) == "only" and prefixes.choose("v", prompt, {}) is None


@given(st.lists(st.integers(0, 2), max_size=300), st.lists(st.integers(0, 2), max_size=300))
def test_keys_are_equal_as_far_as_tokens_and_scope_are(first_tokens: list[int], second_tokens: list[int]) -> None:
    chains = [chain_of("v", np.array(token_ids, np.int32)) for token_ids in (first_tokens, second_tokens)]
    for depth, (first_key, second_key) in enumerate(zip(*(chain[:-1] for chain in chains), strict=False), 1):
        assert (first_key == second_key) == (
            first_tokens[: depth * BLOCK_TOKENS] == second_tokens[: depth * BLOCK_TOKENS]
        )
    assert (chains[0] == chains[1]) == (first_tokens == second_tokens)
    assert not set(chains[0]) & set(chain_of("w", np.array(first_tokens, np.int32)))


def test_only_so_many_prefixes_are_remembered() -> None:
    prefixes = Prefixes(capacity=10)
    for seed in range(50):
        prefixes.choose("v", tokens(seed, 300), NAMED)
    assert len(prefixes._prefixes) == 10
