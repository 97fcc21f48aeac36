"""The number of tokens of a step, from their cost and the active tenants; and an engine that follows it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.exc import OperationalError

from support.engine_bench import BASE, Bench
from tinsmith.backends import MicroBatches
from tinsmith.engine.pacing import ACTIVE_S, COLD_TOKENS, SINGLE_TENANT_FACTOR, CostModel, Pace
from tinsmith.store.sampling_sessions import NewSamplingSession
from tinsmith.types import Partial, Pass, Sample, SampleResult

BUDGET = 65_536
SECONDS = st.floats(1e-6, 100.0)


def shared(step_seconds: float = 1.0) -> Pace:
    pace = Pace(step_seconds)
    pace.record_tenants(["alice", "bob"], 0.0)
    return pace


@given(st.floats(1e-9, 10.0), st.booleans(), st.floats(0.01, 60.0))
def test_a_step_among_tenants_is_predicted_to_take_no_longer_than_its_bound(
    token_s: float, samples: bool, step_seconds: float
) -> None:
    tokens = shared(step_seconds).step_tokens(BUDGET, token_s, samples=samples)
    bound_s = step_seconds / 2 if samples else step_seconds
    assert 1 <= tokens <= BUDGET
    assert tokens * token_s <= bound_s * (1 + 1e-9) or tokens == 1
    assert (tokens + 1) * token_s >= bound_s * (1 - 1e-9) or tokens == BUDGET


@given(st.floats(1e-9, 10.0), SECONDS, SECONDS)
def test_a_tenant_that_is_alone_has_long_steps_and_decodes_for_as_long_as_one(
    token_s: float, trained_s: float, decoded_s: float
) -> None:
    pace = Pace(1.0)
    for time_s in range(3):
        pace.record_tenants(["alice"], float(time_s))
    assert not pace.is_shared
    tokens = pace.step_tokens(BUDGET, token_s, samples=True)
    assert tokens == BUDGET or tokens == 1 or (tokens + 1) * token_s >= SINGLE_TENANT_FACTOR * (1 - 1e-9)
    assert tokens >= shared().step_tokens(BUDGET, token_s, samples=False)
    assert pace.decode_s(trained_s, decoded_s) == trained_s + decoded_s
    assert pace.decode_between_s(trained_s) == 0.0


@given(SECONDS, SECONDS)
def test_decoding_among_tenants_takes_half_of_the_bound_at_most_with_what_was_decoded_before(
    trained_s: float, decoded_s: float
) -> None:
    share_s = shared().decode_s(trained_s, decoded_s)
    assert share_s >= 0.0
    assert share_s + decoded_s <= max(0.5, decoded_s) and share_s <= trained_s
    assert shared().decode_between_s(trained_s) <= 0.5


def test_a_tenant_counts_for_a_minute_after_its_last_work() -> None:
    pace = shared()
    pace.record_tenants(["alice"], ACTIVE_S)
    assert pace.is_shared
    pace.record_tenants(["alice"], ACTIVE_S + 1)
    assert not pace.is_shared


def test_before_anything_is_known_a_step_is_short() -> None:
    assert shared().step_tokens(BUDGET, None, samples=False) == COLD_TOKENS
    assert Pace(1.0).step_tokens(BUDGET, None, samples=False) == COLD_TOKENS
    assert Pace(1.0).step_tokens(500, None, samples=False) == 500


def test_without_a_bound_every_step_has_the_whole_budget() -> None:
    assert shared(0.0).step_tokens(BUDGET, 1.0, samples=True) == BUDGET
    assert shared(0.0).step_tokens(BUDGET, None, samples=True) == BUDGET


# CostModel.


@given(st.lists(st.tuples(st.integers(1, 100_000), st.floats(1e-6, 60.0)), min_size=1, max_size=30))
def test_the_price_of_a_token_is_one_that_was_seen(steps: list[tuple[int, float]]) -> None:
    prices = CostModel()
    for tokens, seconds in steps:
        prices.record_passes(tokens, seconds)
    token_prices = [seconds / tokens for tokens, seconds in steps[-9:]]
    token_s = prices.token_s()
    assert token_s is not None and min(token_prices) * (1 - 1e-9) <= token_s <= max(token_prices) * (1 + 1e-9)


def test_short_steps_which_are_mostly_overhead_do_not_make_tokens_expensive() -> None:
    prices = CostModel()
    for _ in range(5):
        prices.record_passes(32, 0.032)  # ten times as much for a token
        prices.record_passes(3200, 0.32)
    token_s = prices.token_s()
    assert token_s is not None and token_s < 1.2e-4


def test_work_that_becomes_more_expensive_shows_after_one_step() -> None:
    prices = CostModel()
    for _ in range(9):
        prices.record_passes(1000, 0.1)
    prices.record_passes(1000, 0.5)
    token_s = prices.token_s()
    assert token_s is not None and token_s == pytest.approx(3e-4)


# The engine.


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="tn-") as sockets:  # a socket's path must be short
        new_bench = Bench(tmp_path, Path(sockets))
        yield new_bench
        new_bench.close()


def price(bench: Bench, token_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.engine._costs, "token_s", lambda: token_s)


def tokens_of_steps(bench: Bench) -> list[int]:
    return [60 * len(step) for step in bench.backend.steps]


@pytest.mark.parametrize(("num_others", "max_tokens"), [(0, SINGLE_TENANT_FACTOR * 600), (1, 600)])
def test_a_flood_has_steps_of_the_predicted_bound_only_where_another_tenant_is(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, num_others: int, max_tokens: int
) -> None:
    flooding = bench.model()
    for index in range(num_others):
        bench.model(f"t{index}:train:0", "bob")
    price(bench, 1 / 600, monkeypatch)
    for seq_id in range(1, 61):
        bench.forward(flooding, seq_id, [1] * 60)
    bench.backend.steps.clear()
    bench.run_until_idle()
    assert max(tokens_of_steps(bench)) == max_tokens
    assert sum(tokens_of_steps(bench)) == 60 * 60


def test_a_step_beside_waiting_samples_has_half_of_the_bound(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    flooding = bench.model()
    bench.samplers.create(NewSamplingSession("t:sample:0", "t", "bob", BASE))
    price(bench, 1 / 600, monkeypatch)
    for seq_id in range(1, 61):
        bench.forward(flooding, seq_id, [1] * 60)
    for seq_id in range(100):
        bench.sample("t:sample:0", seq_id, tenant="bob")
    bench.backend.steps.clear()
    bench.engine.run_once(0.0)
    bench.engine.run_once(0.0)
    assert tokens_of_steps(bench) == [300]


class _Long:
    """A backend whose run_passes has several parts, with other work between them."""

    def __init__(self, bench: Bench, meanwhile: Callable[[int], None]) -> None:
        self._run = bench.backend.run_passes
        self._meanwhile = meanwhile

    def __call__(self, passes: Sequence[Pass]) -> MicroBatches:
        for part in range(4):
            self._meanwhile(part)
            yield
        return (yield from self._run(passes))


def test_a_sample_that_arrives_during_a_long_step_is_drawn_before_its_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bench.model()
    bench.samplers.create(NewSamplingSession("t:sample:0", "t", "bob", BASE))
    was_drawn: list[bool] = []

    def meanwhile(part: int) -> None:
        if part == 1:
            bench.sample("t:sample:0", 0, tenant="bob")
        was_drawn.append(part > 1 and bench.outcome("t:sample:0:0", "bob") is not None)

    monkeypatch.setattr(bench.backend, "run_passes", _Long(bench, meanwhile))
    passed = bench.forward(model, 1)
    bench.engine.run_once(0.0)
    bench.engine.run_once(0.0)
    assert was_drawn == [False, False, True, True]
    assert bench.outcome(passed) is not None


def test_a_sample_whose_weights_are_not_in_memory_waits_for_the_end_of_the_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bench.model()
    sampler = bench.publish(model, 1, 0)
    bench.run_until_idle()
    bench.engine._versions.write_all()
    (version,) = bench.backend._versions
    bench.backend.drop_version(version)
    was_drawn: list[bool] = []

    def meanwhile(part: int) -> None:
        if part == 0:
            bench.sample(sampler)
        was_drawn.append(bench.outcome(f"{sampler}:0") is not None)

    monkeypatch.setattr(bench.backend, "run_passes", _Long(bench, meanwhile))
    bench.forward(model, 2)
    bench.run_until_idle()
    assert was_drawn == [False] * 4
    assert bench.outcome(f"{sampler}:0") is not None


def test_what_the_database_does_not_tell_during_a_step_is_read_after_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bench.model()
    bench.samplers.create(NewSamplingSession("t:sample:0", "t", "bob", BASE))

    def fail(_handles: object) -> None:
        raise OperationalError("SELECT", {}, Exception("the database is away"))

    def meanwhile(part: int) -> None:
        if part == 0:
            bench.sample("t:sample:0", 0, tenant="bob")
            monkeypatch.setattr(bench.engine._arrivals, "fetch", fail)

    passed = bench.forward(model, 1)
    with monkeypatch.context() as patched:
        patched.setattr(bench.backend, "run_passes", _Long(bench, meanwhile))
        bench.engine._run_training_step()
        bench.engine._arrivals.fetch_late()
        bench.engine._run_training_step()
    monkeypatch.undo()
    outcome = bench.outcome(passed)
    assert outcome is not None and outcome.error is None
    bench.run_until_idle()
    assert bench.outcome("t:sample:0:0", "bob") is not None


class _SlowSampler:
    """A sampler whose step time grows with its tenants' sequences, and which never ends a request."""

    runs_by_itself = False
    inference_server = None
    has_work = True

    def __init__(self) -> None:
        self.steps: list[Collection[str] | None] = []
        self.now = 0.0

    def submit(self, sample: Sample) -> None:
        pass

    def step(self, scopes: Collection[str] | None = None) -> list[tuple[str, SampleResult]]:
        self.steps.append(scopes)
        self.now += 0.2 if scopes is None else 0.012
        return []

    def partials(self) -> list[Partial]:
        return []


@pytest.mark.parametrize(("flood", "is_small"), [(40, True), (5, False)])
def test_a_tenant_with_few_sequences_has_decode_steps_of_its_own_where_one_of_all_takes_long(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, flood: int, is_small: bool
) -> None:
    sampler = _SlowSampler()
    monkeypatch.setattr(bench.backend, "_sampler", sampler)
    monkeypatch.setattr("tinsmith.engine.sampling.time.monotonic", lambda: sampler.now)
    for name, tenant in (("s:sample:0", "alice"), ("t:sample:0", "bob")):
        bench.samplers.create(NewSamplingSession(name, name[0], tenant, BASE))
    for seq_id in range(flood):
        bench.sample("s:sample:0", seq_id)
    bench.sample("t:sample:0", 0, tenant="bob")
    bench.engine._arrivals.fetch()
    sampling = bench.engine._sampling
    sampling._admit(bench.engine._queues)
    for _ in range(60):
        sampling.decode_step()
    own_steps = [scopes for scopes in sampler.steps if scopes is not None]
    assert bool(own_steps) == is_small
    assert all(set(scopes) == {"bob"} for scopes in own_steps)
    num_shared_steps = len(sampler.steps) - len(own_steps)
    assert 0.012 * len(own_steps) <= 0.2 * num_shared_steps / 2 + 0.2
    assert num_shared_steps >= 5
    if is_small:
        assert 0.012 * len(own_steps) >= 0.2 * (num_shared_steps - 2) / 2 - 0.2


def test_passes_of_one_tenant_do_not_wait_for_those_of_another(bench: Bench) -> None:
    alice_model, bob_model = bench.model(), bench.model("t:train:0", "bob")
    for model, tenant in ((alice_model, "alice"), (bob_model, "bob")):
        bench.forward(model, 1, tenant=tenant)
    queues = bench.engine._queues
    bench.engine._arrivals.fetch()
    first = queues.lanes[alice_model].waiting[1]
    second = queues.lanes[bob_model].waiting[1]
    rhythm = queues.lanes[bob_model].rhythm
    for _ in range(2):
        rhythm.answered(0.0)
        rhythm.came(0.01)
    queues.lanes[bob_model].waiting.clear()
    rhythm.answered(first.created_at)
    assert queues.passes_due([first]) == ([], [])
    assert queues.passes_due([first, second]) == ([], [])
