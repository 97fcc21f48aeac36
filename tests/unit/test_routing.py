"""Which sampler a sample goes to: affinity, stability, and the bound on what one of them is given."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.cluster.routing import MOST_OVER_MEAN, PREFIX_TOKENS, SLACK_TOKENS, choose, prefix_key

NAMES = st.lists(st.text("abcdef:/-0123", min_size=1, max_size=12), min_size=1, max_size=8, unique=True)
KEYS = st.binary(max_size=64)


def even(names: list[str], tokens: int = 0) -> dict[str, int]:
    return dict.fromkeys(names, tokens)


def test_without_samplers_nobody_is_chosen() -> None:
    assert choose(b"key", {}) is None


@given(NAMES, KEYS, st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_the_same_key_finds_the_same_sampler_while_load_is_even(names, key, tokens, random) -> None:
    chosen = choose(key, even(names, tokens))
    shuffled = list(names)
    random.shuffle(shuffled)
    assert chosen in names
    assert choose(key, even(shuffled, tokens)) == chosen


@given(NAMES, KEYS, st.data())
def test_a_sampler_that_goes_moves_only_what_it_had(names, key, data) -> None:
    chosen = choose(key, even(names))
    gone = data.draw(st.sampled_from(names))
    left = choose(key, even([name for name in names if name != gone]))
    if gone != chosen:
        assert left == chosen
    else:
        assert left != gone


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=8), KEYS)
def test_nobody_far_above_the_mean_is_chosen(loads, key) -> None:
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
    for number in range(2000):
        chosen = choose(b"%d" % number, even(names))
        assert chosen is not None
        counts[chosen] += 1
    assert all(400 < count < 600 for count in counts.values()), counts


def test_prompts_are_alike_if_their_first_tokens_and_their_version_are() -> None:
    prompt = np.arange(PREFIX_TOKENS + 10, dtype=np.int32)
    other_end = prompt.copy()
    other_end[PREFIX_TOKENS:] = 7
    other_beginning = prompt.copy()
    other_beginning[PREFIX_TOKENS - 1] = 7
    assert prefix_key("v1", prompt) == prefix_key("v1", other_end)
    assert prefix_key("v1", prompt) != prefix_key("v1", other_beginning)
    assert prefix_key("v1", prompt) != prefix_key("v2", prompt)
    assert prefix_key("v1", prompt[:5]) != prefix_key("v1", prompt[:6])
