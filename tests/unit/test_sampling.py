"""Sampling of tokens, against numpy in float64 and the distributions themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.samplers.local import sampling
from tinsmith.samplers.local.sampling import DrawParams, SampledTokens, choose, invert, top_rows, uniform


def _draws(
    num: int,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    uniforms: np.ndarray | None = None,
    min_p: float | None = None,
) -> DrawParams:
    return DrawParams(
        temperature_B=np.full(num, temperature, np.float32),
        top_k_B=np.full(num, top_k),
        top_p_B=np.full(num, top_p),
        uniform_B=np.random.default_rng(0).random(num) if uniforms is None else uniforms,
        min_p_B=None if min_p is None else np.full(num, min_p),
    )


def _logits(num_rows: int, num_vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, num_vocab, generator=torch.Generator().manual_seed(seed)) * scale


def _log_softmax(logits: torch.Tensor, temperature: float = 1.0) -> np.ndarray:
    x = logits.double().numpy() / temperature
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _frequencies(logits_V: torch.Tensor, num: int, **params: float) -> np.ndarray:
    """The frequency of each token over `num` evenly spaced uniforms: within 1/num of its probability."""
    grid = (np.arange(num) + 0.5) / num
    counts = np.zeros(len(logits_V))
    for part in np.array_split(grid, max(num * len(logits_V) // 4_000_000, 1)):
        rows = logits_V.expand(len(part), -1).clone()
        chosen = choose(rows, _draws(len(part), uniforms=part, **params))
        counts += np.bincount(chosen.token_ids_B.numpy(), minlength=len(logits_V))
    return counts / num


def _truncate(probs_V: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """The definition: the top k, then the fewest of them with at least top_p of their mass."""
    order = np.argsort(-probs_V, kind="stable")
    order = order[:top_k] if top_k > 0 else order
    mass = probs_V[order] / probs_V[order].sum()
    size = int(np.searchsorted(np.cumsum(mass), top_p - 1e-12) + 1) if top_p < 1 else len(order)
    truncated = np.zeros_like(probs_V)
    truncated[order[:size]] = probs_V[order[:size]]
    return truncated / truncated.sum()


def test_the_logprob_is_that_of_the_full_vocabulary_at_the_sampling_temperature():
    for temperature in (0.3, 1.0, 2.0, 2.5):
        logits = _logits(32, 500)
        full_logprobs = _log_softmax(logits, temperature)
        chosen = choose(logits, _draws(32, temperature=temperature, top_k=5, top_p=0.8))
        expected = full_logprobs[np.arange(32), chosen.token_ids_B.numpy()]
        np.testing.assert_allclose(chosen.logprobs_B.numpy(), expected, atol=2e-5)


@pytest.mark.parametrize("num_vocab", [60, 300])
def test_logprobs_and_likeliest_tokens_are_those_of_a_softmax_in_float64(num_vocab: int):
    for temperature in (0.7, 1.0):
        logits = _logits(8, num_vocab)
        full_logprobs = _log_softmax(logits, np.float32(temperature))
        draws = replace(_draws(8, temperature=temperature), num_top_B=np.array([0, 3, 0, 0, 100, 1, 0, 0]))
        chosen = choose(logits, draws)
        chosen_logprobs = full_logprobs[np.arange(8), chosen.token_ids_B.numpy()]
        np.testing.assert_allclose(chosen.logprobs_B.numpy(), chosen_logprobs, atol=1e-6)
        assert chosen.top is not None and chosen.top.rows == [1, 4, 5]
        width = min(100, num_vocab)
        assert chosen.top.ids_Rk.tolist() == np.argsort(-full_logprobs[[1, 4, 5]], kind="stable")[:, :width].tolist()
        best = -np.sort(-full_logprobs[[1, 4, 5]])[:, :width]
        np.testing.assert_allclose(chosen.top.logprobs_Rk.numpy(), best, atol=2e-6)


def test_tokens_are_drawn_from_adjusted_logits_and_logprobs_are_of_the_given_ones():
    logits = _logits(6, 200)
    adjusted = torch.full_like(logits, -torch.inf)
    adjusted[:, 11] = 5.0
    full_logprobs = _log_softmax(logits)
    for temperature in (0.0, 1.0):
        chosen = choose(logits.clone(), _draws(6, temperature=temperature), adjusted.clone())
        assert chosen.token_ids_B.tolist() == [11] * 6
        np.testing.assert_allclose(chosen.logprobs_B.numpy(), full_logprobs[:, 11], atol=1e-6)


def test_an_adjusted_neighbour_changes_no_bit_of_a_row():
    logits = _logits(40, 300)
    adjusted = logits.clone()
    adjusted[::4] = adjusted[::4].neg()
    for temperature in (0.0, 0.5, 1.0):
        draws = _draws(40, temperature=temperature)
        plain, mixed = choose(logits.clone(), draws), choose(logits.clone(), draws, adjusted.clone())
        for row in set(range(40)) - set(range(0, 40, 4)):
            assert plain.token_ids_B[row] == mixed.token_ids_B[row]
            assert plain.logprobs_B[row] == mixed.logprobs_B[row]


@pytest.mark.parametrize("distance", [80.0, 87.5, 100.0, 300.0])
def test_the_logprob_of_a_forced_token_is_exact_where_float32_has_no_weight_for_it(distance: float):
    logits = _logits(3, 50, scale=1.0)
    logits[:, 7] = logits.amax(-1) - distance
    forced = torch.full_like(logits, -torch.inf)
    forced[:, 7] = 0.0
    chosen = choose(logits.clone(), _draws(3), forced)
    np.testing.assert_allclose(chosen.logprobs_B.numpy(), _log_softmax(logits)[:, 7], rtol=1e-6)


def test_temperature_zero_takes_the_likeliest_token_and_reports_it_at_temperature_one():
    logits = _logits(16, 700)
    chosen = choose(logits.clone(), _draws(16, temperature=0.0, top_p=0.5))
    assert torch.equal(chosen.token_ids_B, logits.argmax(-1))
    np.testing.assert_allclose(chosen.logprobs_B.numpy(), _log_softmax(logits).max(-1), atol=2e-5)


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-45])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float):
    logits = _logits(16, 700)
    chosen = choose(logits.clone(), _draws(16, temperature=temperature))
    assert torch.equal(chosen.token_ids_B, logits.argmax(-1))
    assert torch.isfinite(chosen.logprobs_B).all()


@pytest.mark.parametrize("num_vocab", [7, 64, 300, 1000])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_come_as_often_as_their_probability_says(num_vocab: int, temperature: float):
    logits = _logits(1, num_vocab)[0]
    frequencies = _frequencies(logits, 4_000, temperature=temperature)
    np.testing.assert_allclose(frequencies, np.exp(_log_softmax(logits, temperature)), atol=1.01 / 4_000)


@pytest.mark.parametrize("num_vocab", [50, 400])
@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(1, 1.0), (5, 1.0), (200, 1.0), (-1, 0.5), (-1, 0.999), (0, 0.999), (10, 0.7), (200, 0.9), (-1, 1e-6)],
)
def test_truncation_keeps_exactly_the_tokens_that_it_should(num_vocab: int, top_k: int, top_p: float):
    for scale in (0.1, 3.0):
        logits = _logits(1, num_vocab, scale=scale)[0]
        expected = _truncate(np.exp(_log_softmax(logits)), top_k, top_p)
        frequencies = _frequencies(logits, 4_000, top_k=top_k, top_p=top_p)
        np.testing.assert_allclose(frequencies, expected, atol=1.01 / 4_000)
        assert not frequencies[expected == 0].any()


@pytest.mark.parametrize("num_vocab", [50, 400])
@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (4, 1.0), (-1, 0.8), (200, 0.999)])
def test_min_p_keeps_the_tokens_that_have_this_share_of_the_largest_probability(
    num_vocab: int, top_k: int, top_p: float
):
    for min_p, scale in ((0.3, 0.5), (0.02, 2.0)):
        logits = _logits(1, num_vocab, scale=scale)[0]
        probs = np.exp(_log_softmax(logits))
        likely = np.where(probs >= min_p * probs.max(), probs, 0.0)
        expected = _truncate(likely / likely.sum(), top_k, top_p)
        frequencies = _frequencies(logits, 4_000, top_k=top_k, top_p=top_p, min_p=min_p)
        np.testing.assert_allclose(frequencies, expected, atol=1.01 / 4_000)
        assert not frequencies[expected == 0].any() and not likely.all()


def test_a_min_p_of_one_keeps_all_of_the_likeliest_tokens():
    logits = torch.zeros(100)
    logits[7:] = -0.01
    assert _frequencies(logits, 700, min_p=1.0)[:7].tolist() == [1 / 7] * 7


def test_min_p_changes_neither_a_greedy_row_nor_a_logprob():
    logits = _logits(16, 300)
    chosen = choose(logits.clone(), _draws(16, temperature=0.0, min_p=0.5))
    assert torch.equal(chosen.token_ids_B, logits.argmax(-1))
    drawn = choose(logits.clone(), _draws(16, min_p=0.2))
    expected = _log_softmax(logits)[np.arange(16), drawn.token_ids_B.numpy()]
    np.testing.assert_allclose(drawn.logprobs_B.numpy(), expected, atol=2e-5)


@pytest.mark.parametrize("num_vocab", [50, 64, 300])
@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.5}])
def test_a_uniform_next_to_one_draws_a_token_that_has_weight(num_vocab: int, params: dict[str, float]):
    ends = np.array([0.0, 1 - 2.0**-53, 1.0])
    logits = torch.full((3, num_vocab), -torch.inf)
    logits[:, 2:4] = 0.0
    assert choose(logits, _draws(3, uniforms=ends, **params)).token_ids_B.tolist() == [2, 3, 3]


def test_rows_that_are_sorted_whole_give_the_tokens_that_candidates_give():
    """As on a device, where the host does not check which rows need more than the candidates."""
    rng, num_vocab = np.random.default_rng(3), 1000
    weights_RV = torch.from_numpy(rng.standard_normal((400, num_vocab)).astype(np.float32) * 3).exp()
    top_k_R = torch.from_numpy(rng.choice([num_vocab, 3, 100, 300], 400)).double()
    top_p_R = torch.from_numpy(rng.choice([1.0, 0.3, 0.9, 0.999], 400))
    arguments = weights_RV, weights_RV.double().sum(-1), top_k_R, top_p_R, torch.from_numpy(rng.random(400))
    by_candidates = sampling._draw_truncated(*arguments, sampling.CANDIDATES, is_exact=False)
    assert by_candidates.unique().numel() > 100
    assert torch.equal(sampling._draw_truncated(*arguments, num_vocab, is_exact=True), by_candidates)


def test_hashed_uniforms_give_the_right_frequencies_by_chi_square():
    logits = _logits(1, 40, scale=1.5)[0]
    num = 40_000
    uniforms = np.array([uniform(seed, 0, 3) for seed in range(num)])
    chosen = choose(logits.expand(num, -1).clone(), _draws(num, uniforms=uniforms))
    counts = np.bincount(chosen.token_ids_B.numpy(), minlength=40)
    expected = np.exp(_log_softmax(logits)) * num
    big = expected >= 5
    chi_square = ((counts - expected) ** 2 / expected)[big].sum()
    # 39 degrees of freedom: 99.99 % of draws stay below 82.
    assert chi_square < 82


def test_uniforms_of_neighbouring_coordinates_do_not_resemble_each_other():
    grid = np.array([[uniform(seed, index, 5) for index in range(50)] for seed in range(50)])
    assert len(np.unique(grid)) == grid.size
    assert ((grid >= 0) & (grid < 1)).all()
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.1
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.1


def test_each_row_is_drawn_as_alone_beside_any_others():
    logits = _logits(24, 333)
    rng = np.random.default_rng(1)
    draws = DrawParams(
        temperature_B=rng.choice([0.0, 0.5, 1.0], 24).astype(np.float32),
        top_k_B=rng.choice([-1, 3, 200], 24),
        top_p_B=rng.choice([1.0, 0.6], 24),
        uniform_B=rng.random(24),
        min_p_B=rng.choice([0.0, 0.3], 24),
    )
    assert draws.min_p_B is not None
    together = choose(logits.clone(), draws)
    for row in range(24):
        row_slice = slice(row, row + 1)
        single = choose(
            logits[row_slice].clone(),
            DrawParams(
                draws.temperature_B[row_slice],
                draws.top_k_B[row_slice],
                draws.top_p_B[row_slice],
                draws.uniform_B[row_slice],
                draws.min_p_B[row_slice],
            ),
        )
        assert single.token_ids_B[0] == together.token_ids_B[row]
        torch.testing.assert_close(single.logprobs_B[0], together.logprobs_B[row], atol=1e-6, rtol=0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"temperature": 0.5, "top_k": 3}])
def test_a_row_that_is_not_finite_says_so_and_leaves_its_neighbours_alone(poison: float, params: dict[str, float]):
    clean = _logits(5, 90)
    dirty = clean.clone()
    dirty[2, 17] = poison
    expected, chosen = _choose_pair(clean, dirty, params)
    assert chosen.logprobs_B[2].isnan()
    assert 0 <= chosen.token_ids_B[2] < 90
    finite_rows = [0, 1, 3, 4]
    assert torch.equal(chosen.token_ids_B[finite_rows], expected.token_ids_B[finite_rows])
    assert torch.equal(chosen.logprobs_B[finite_rows], expected.logprobs_B[finite_rows])


def _choose_pair(
    clean: torch.Tensor, dirty: torch.Tensor, params: dict[str, float]
) -> tuple[SampledTokens, SampledTokens]:
    return choose(clean, _draws(len(clean), **params)), choose(dirty, _draws(len(dirty), **params))


def test_a_logit_of_minus_infinity_is_a_token_that_never_comes():
    logits = _logits(1, 100)[0]
    logits[::2] = -torch.inf
    frequencies = _frequencies(logits, 5_000)
    assert not frequencies[::2].any()
    np.testing.assert_allclose(frequencies, np.exp(_log_softmax(logits)), atol=1.01 / 5_000)


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.25, 1.0, 7.0]), min_size=1, max_size=200).filter(any),
    point=st.floats(0, 1, exclude_max=True),
)
def test_inversion_never_picks_weight_zero_and_agrees_with_the_definition(weights: list[float], point: float):
    picked = int(invert(torch.tensor([weights]), torch.tensor([point], dtype=torch.float64))[0])
    assert weights[picked] > 0
    sums = np.cumsum(np.array(weights, np.float32), dtype=np.float64)
    below = sums[picked - 1] if picked else 0.0
    slack = 1e-6 * sums[-1]
    assert below - slack <= point * sums[-1] <= sums[picked] + slack


def test_a_vocabulary_of_rare_tokens_keeps_its_tail():
    weights = torch.full((1, 2**18), 2.0**-40)
    weights[0, 0] = 1.0
    points = 1 - (np.arange(1, 200) / 200) * 2.0**-22
    picked = invert(weights.expand(len(points), -1), torch.from_numpy(points)).numpy()
    assert len(np.unique(picked)) > 190


def test_top_rows_are_sorted_and_no_wider_than_the_vocabulary():
    logprobs = torch.log_softmax(_logits(3, 10), -1)
    ids, values = top_rows(logprobs, 20)
    assert ids.shape == values.shape == (3, 10)
    assert torch.equal(values, logprobs.sort(descending=True).values)
    assert torch.equal(logprobs.gather(1, ids), values)
