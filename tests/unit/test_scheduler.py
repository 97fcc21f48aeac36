"""The scheduler's rules as properties over random queues."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.engine.scheduler import PASS_KINDS, Fairness, ModelQueue, plan, take_in_turns
from tinsmith.types import Pending

KINDS = ("forward", "forward_backward", "optim_step", "save_weights")


def pending(arrival: int, tenant: str, model: str, seq_id: int, kind: str = "forward", tokens: int = 1) -> Pending:
    return Pending(
        arrival=arrival,
        request_id=f"{model}:{seq_id}",
        tenant_id=tenant,
        session_id="s",
        kind=kind,
        state="pending",
        model_id=model,
        sampling_session_id=None,
        seq_id=seq_id,
        num_tokens=tokens,
        created_at=0.0,
    )


@st.composite
def worlds(draw: st.DrawFn) -> list[ModelQueue]:
    queues = []
    arrival = iter(draw(st.permutations(range(200))))
    for index in range(draw(st.integers(1, 6))):
        tenant = f"t{draw(st.integers(0, 2))}"
        model = f"m{index}"
        start = draw(st.integers(0, 3))
        seq_ids = draw(st.lists(st.integers(start, start + 8), unique=True, max_size=8))
        waiting = {
            seq_id: pending(
                next(arrival), tenant, model, seq_id, draw(st.sampled_from(KINDS)), draw(st.integers(1, 150))
            )
            for seq_id in seq_ids
        }
        queues.append(ModelQueue(model, tenant, start, waiting))
    return queues


def drain(queues: list[ModelQueue], budget: int) -> list[list[Pending]]:
    """Run plans to the end; return the requests of every step."""
    fairness = Fairness()
    steps = []
    for _ in range(1000):
        step, fairness = plan(queues, fairness, budget)
        if not step:
            return steps
        ran = [*step.optim_steps, *step.singles, *step.passes]
        steps.append(ran)
        behind: dict[str | None, int] = defaultdict(int)
        for request in ran:
            behind[request.model_id] += 1
        queues = [
            ModelQueue(
                queue.model_id,
                queue.tenant_id,
                queue.next_seq_id + behind[queue.model_id],
                {s: r for s, r in queue.waiting.items() if s >= queue.next_seq_id + behind[queue.model_id]},
            )
            for queue in queues
        ]
    raise AssertionError("the plan does not end")


@given(worlds(), st.integers(1, 400))
def test_every_ready_request_runs_exactly_once_and_in_seq_order(queues: list[ModelQueue], budget: int) -> None:
    ran = [request for step in drain(queues, budget) for request in step]
    for queue in queues:
        seq_ids = [request.seq_id for request in ran if request.model_id == queue.model_id]
        assert seq_ids == [request.seq_id for request in queue.ready()]


@given(worlds(), st.integers(1, 400))
def test_a_step_keeps_its_token_budget_unless_one_pass_is_larger(queues: list[ModelQueue], budget: int) -> None:
    for step in drain(queues, budget):
        passes = [request for request in step if request.kind in PASS_KINDS]
        assert sum(request.num_tokens for request in passes) <= budget or len(passes) == 1


@given(worlds(), st.integers(1, 400))
def test_a_model_takes_part_in_a_step_with_passes_or_with_one_barrier(queues: list[ModelQueue], budget: int) -> None:
    for step in drain(queues, budget):
        kinds: dict[str | None, list[str]] = defaultdict(list)
        for request in step:
            kinds[request.model_id].append(request.kind)
        for model_kinds in kinds.values():
            assert all(kind in PASS_KINDS for kind in model_kinds) or len(model_kinds) == 1


@pytest.mark.extended
@given(worlds(), st.integers(1, 400))
def test_planning_leaves_its_arguments_alone_and_repeats_itself(queues: list[ModelQueue], budget: int) -> None:
    assert plan(queues, Fairness(), budget) == plan(queues, Fairness(), budget)


def test_passes_of_different_tenants_and_optim_steps_of_different_models_share_a_step() -> None:
    queues = [
        ModelQueue("a", "t1", 1, {1: pending(1, "t1", "a", 1), 2: pending(2, "t1", "a", 2, "forward_backward")}),
        ModelQueue("b", "t2", 1, {1: pending(3, "t2", "b", 1)}),
        ModelQueue("c", "t1", 1, {1: pending(4, "t1", "c", 1, "optim_step")}),
        ModelQueue("d", "t2", 1, {1: pending(5, "t2", "d", 1, "optim_step")}),
    ]
    step, _ = plan(queues, Fairness(), 1000)
    assert {request.request_id for request in step.passes} == {"a:1", "a:2", "b:1"}
    assert {request.request_id for request in step.optim_steps} == {"c:1", "d:1"}


def test_a_pass_behind_a_barrier_or_a_gap_does_not_run() -> None:
    barrier = {1: pending(1, "t", "a", 1, "optim_step"), 2: pending(2, "t", "a", 2)}
    gap = {2: pending(3, "t", "b", 2)}
    step, _ = plan([ModelQueue("a", "t", 1, barrier), ModelQueue("b", "t", 1, gap)], Fairness(), 1000)
    assert [request.request_id for request in step.optim_steps] == ["a:1"]
    assert step.passes == ()


@pytest.mark.extended
@given(st.integers(1, 100), st.integers(1, 64))
def test_a_flood_delays_another_tenants_request_by_at_most_one_step(tokens: int, lone_tokens: int) -> None:
    flood = {seq: pending(seq, "flood", "a", seq, "forward", tokens) for seq in range(10_000)}
    lone = {0: pending(20_000, "lone", "b", 0, "forward", lone_tokens)}
    # The flood has run alone before, so the fairness state is arbitrary.
    _, fairness = plan([ModelQueue("a", "flood", 0, flood)], Fairness(), 256)
    queues = [ModelQueue("a", "flood", 0, flood), ModelQueue("b", "lone", 0, lone)]
    first, fairness = plan(queues, fairness, 256)
    second, _ = plan(queues, fairness, 256)
    assert "b:0" in {request.request_id for request in (*first.passes, *second.passes)}


@given(st.integers(1, 300), st.integers(1, 8), st.integers(0, 500))
def test_beside_a_flood_a_small_request_runs_in_a_short_step_after_at_most_one_full_one(
    tokens: int, lone_tokens: int, debt: int
) -> None:
    flood = {seq: pending(seq, "flood", "a", seq, "forward", tokens) for seq in range(1000)}
    lone = {0: pending(20_000, "lone", "b", 0, "forward", lone_tokens)}
    queues = [ModelQueue("a", "flood", 0, flood), ModelQueue("b", "lone", 0, lone)]
    for was_short in (False, True):
        fairness = Fairness({"flood": debt}, ("flood",), was_short)
        waited = 0
        step, fairness = plan(queues, fairness, 256)
        while "b:0" not in {request.request_id for request in step.passes}:
            waited += sum(request.num_tokens for request in step.passes)
            step, fairness = plan(queues, fairness, 256)
        assert waited <= max(256, tokens) * was_short
        neighbour_tokens = sum(request.num_tokens for request in step.passes)
        assert neighbour_tokens <= (max(256, tokens) if was_short and not waited else 16)


def test_small_requests_never_keep_a_large_one_waiting_for_ever() -> None:
    large = {seq: pending(seq, "large", "a", seq, "forward", 256) for seq in range(10)}
    fairness, num_large_done = Fairness(), 0
    for turn in range(40):
        queues = [ModelQueue("a", "large", num_large_done, large)]
        for name in ("x", "y", "z"):
            small = {turn: pending(100 + turn, name, name, turn, "forward", 1)}
            queues.append(ModelQueue(name, name, turn, small))
        step, fairness = plan(queues, fairness, 256)
        num_large_done += any(request.tenant_id == "large" for request in step.passes)
        assert sum(request.num_tokens for request in step.passes) <= 256
    assert num_large_done >= 5, "one in six or seven steps, of which every other one is short"


def test_passes_that_fit_into_one_step_are_never_split() -> None:
    runs = {
        name: {0: pending(index, name, name, 0, "forward", tokens)}
        for index, (name, tokens) in enumerate((("a", 1), ("b", 100), ("c", 155)))
    }
    step, _ = plan([ModelQueue(name, name, 0, run) for name, run in runs.items()], Fairness(), 256)
    assert len(step.passes) == 3


def saves(tenant: str, count: int, first: int = 0) -> list[ModelQueue]:
    """Models of a tenant, each with a pending save."""
    numbered = range(first, first + count)
    return [ModelQueue(f"m{i}", tenant, 1, {1: pending(i, tenant, f"m{i}", 1, "save_weights")}) for i in numbered]


def a_pass(tenant: str, tokens: int) -> ModelQueue:
    return ModelQueue(f"p-{tenant}", tenant, 1, {1: pending(999, tenant, f"p-{tenant}", 1, "forward", tokens)})


def test_saves_take_at_most_half_as_long_as_the_passes_beside_them() -> None:
    step, _ = plan([*saves("t", 20), a_pass("t", 1000)], Fairness(), 1000, {"save_weights": 50})
    assert [request.arrival for request in step.singles] == list(range(10)), "of 50 tokens each"
    step, _ = plan([*saves("t", 20), a_pass("t", 1000)], Fairness(), 1000, {"save_weights": 7})
    assert len(step.singles) == 20, "cheap ones all run at once"


@given(st.integers(0, 5000), st.booleans())
def test_one_save_runs_in_every_step_at_any_cost(price: int, has_price: bool) -> None:
    prices = {"save_weights": price} if has_price else {}
    step, fairness = plan([*saves("t", 3), a_pass("u", 10)], Fairness(), 1000, prices)
    assert len(step.singles) >= 1 and len(step.passes) == 1
    step, _ = plan(saves("t", 3), fairness, 1000, prices)
    assert len(step.singles) == 1, "with nothing to compare with, others that come meanwhile are not held up"


def test_saves_are_round_robin_by_tenant_despite_a_flood() -> None:
    queues = [*saves("flood", 100), *saves("a", 1, 200), *saves("b", 1, 300), a_pass("c", 1000)]
    fairness, waited = Fairness(), []
    for _ in range(4):
        step, fairness = plan(queues, fairness, 1000, {"save_weights": 600})  # more expensive than the share
        assert len(step.singles) == 1
        waited.append(step.singles[0].tenant_id)
        queues = [queue for queue in queues if queue.model_id not in {single.model_id for single in step.singles}]
    assert waited == ["flood", "a", "b", "flood"]


def test_who_has_much_to_save_pays_for_it_with_passes() -> None:
    fairness = Fairness()
    served: dict[str, int] = defaultdict(int)
    for turn in range(400):
        queues = saves("saver", 8, 1000 * turn)
        for tenant in ("saver", "other"):
            run = {seq: pending(seq, tenant, tenant, seq, "forward", 10) for seq in range(200)}
            queues.append(ModelQueue(tenant, tenant, 0, run))
        step, fairness = plan(queues, fairness, 1000, {"save_weights": 50})
        for request in (*step.singles, *step.passes):
            served[request.tenant_id] += request.num_tokens if request.kind == "forward" else 50
    assert abs(served["saver"] - served["other"]) < 0.05 * served["other"]


def test_a_publish_among_64_clients_of_one_tenant_waits_for_about_a_step() -> None:
    """Simulates benchmarks/soak.py without samples: each client publishes or saves, then trains."""
    token_s, single_s, optim_step_s = 0.001, 0.03, 0.005
    prices = {"save_weights": round(single_s / token_s)}
    clock, arrival, fairness = 0.0, 0, Fairness()
    lanes = {f"m{index}": (0, 0.0) for index in range(64)}  # pending seq_id, and its time
    waits: dict[str, list[float]] = defaultdict(list)
    kinds = ("save_weights", "forward_backward", "optim_step", "forward_backward", "optim_step")
    longest = 0.0
    for _ in range(400):
        queues = []
        for index, (model, (seq_id, _since)) in enumerate(lanes.items()):
            request = pending(arrival + index, "t", model, seq_id, kinds[(seq_id + index) % 5], 64)
            queues.append(ModelQueue(model, "t", seq_id, {seq_id: request}))
        step, fairness = plan(queues, fairness, 65536, prices)
        took = token_s * sum(request.num_tokens for request in step.passes)
        took += single_s * len(step.singles) + optim_step_s * bool(step.optim_steps)
        clock, longest = clock + took, max(longest, took)
        for request in (*step.optim_steps, *step.singles, *step.passes):
            assert request.model_id is not None and request.seq_id is not None
            waits[request.kind].append(clock - lanes[request.model_id][1])
            lanes[request.model_id] = request.seq_id + 1, clock
    publishes = sorted(waits["save_weights"])
    assert publishes[len(publishes) // 2] < 1.5 * longest
    assert publishes[-1] < 4 * longest
    assert max(waits["forward_backward"]) < 2 * longest


@given(st.integers(1, 64), st.integers(0, 500))
def test_all_that_a_light_tenant_wants_runs_in_the_next_short_step(lone_tokens: int, debt: int) -> None:
    """A quarter of a step is half of the share of one of two tenants."""
    flood = {seq: pending(seq, "flood", "a", seq, "forward", 10) for seq in range(1000)}
    lone = {0: pending(20_000, "lone", "b", 0, "forward", lone_tokens)}
    queues = [ModelQueue("a", "flood", 0, flood), ModelQueue("b", "lone", 0, lone)]
    step, _ = plan(queues, Fairness({"flood": debt}, ("flood",), was_short=False), 256)
    assert "b:0" in {request.request_id for request in step.passes}
    assert sum(request.num_tokens for request in step.passes) <= max(16, lone_tokens)


@pytest.mark.parametrize("lone_tokens", [64, 100, 128])  # 64 of 256 are light, 128 are a share
def test_a_tenant_that_always_has_a_little_more_gets_no_more_than_its_share(lone_tokens: int) -> None:
    served: dict[str, int] = defaultdict(int)
    fairness = Fairness()
    for turn in range(400):
        flood = {seq: pending(seq, "flood", "a", seq, "forward", 8) for seq in range(200)}
        lone = {turn: pending(20_000, "lone", "b", turn, "forward", lone_tokens)}
        step, fairness = plan([ModelQueue("a", "flood", 0, flood), ModelQueue("b", "lone", turn, lone)], fairness, 256)
        for request in step.passes:
            served[request.tenant_id] += request.num_tokens
    assert served["lone"] <= served["flood"]


COUNTS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 20), max_size=4)


@given(COUNTS, st.integers(1, 30))
def test_samples_are_taken_in_turns(counts: dict[str, int], slots: int) -> None:
    waiting = {t: [pending(i, t, t, i, "sample") for i in range(n)] for t, n in counts.items()}
    chosen, _ = take_in_turns(waiting, slots, "b", {})
    assert len(chosen) >= min(slots, sum(counts.values()))
    got = {t: [r.seq_id for r in chosen if r.tenant_id == t] for t in counts}
    for tenant, seq_ids in got.items():
        assert seq_ids == list(range(len(seq_ids)))
        for other, other_ids in got.items():
            assert len(seq_ids) <= len(other_ids) + 1 or len(other_ids) == counts[other], (tenant, other)


@given(COUNTS, COUNTS, st.integers(1, 30))
def test_a_tenant_below_its_share_of_slots_gets_one_in_a_full_sampler(
    counts: dict[str, int], inside: dict[str, int], slots: int
) -> None:
    waiting = {t: [pending(i, t, t, i, "sample") for i in range(n)] for t, n in counts.items() if n}
    chosen, _ = take_in_turns(waiting, slots, "b", inside)
    active_tenants = waiting.keys() | {t for t, n in inside.items() if n}
    share = max(1, slots // max(1, len(active_tenants)))
    for tenant in waiting:
        num_taken = sum(request.tenant_id == tenant for request in chosen)
        assert num_taken == counts[tenant] or inside.get(tenant, 0) + num_taken >= share
    free = max(0, slots - sum(inside.values()))
    assert len(chosen) <= free + share * len(waiting)


def test_new_tenants_are_served_in_the_order_of_their_oldest_requests() -> None:
    arrivals = {"late": (3, 4), "early": (1, 10), "between": (2, 5)}
    queues = [
        ModelQueue(tenant, tenant, 0, {seq: pending(at[seq], tenant, tenant, seq, tokens=100) for seq in range(2)})
        for tenant, at in arrivals.items()
    ]
    fairness, order = Fairness(), []
    for _ in range(3):
        step, fairness = plan(queues, fairness, 100)
        order += [request.tenant_id for request in step.passes]
    assert order == ["early", "between", "late"]


def test_a_request_too_large_for_what_remains_of_a_step_keeps_no_later_tenant_from_it() -> None:
    tokens = {"a": (60,), "b": (60,), "c": (35, 5)}
    queues = [
        ModelQueue(t, t, 0, {seq: pending(index, t, t, seq, tokens=n) for seq, n in enumerate(tokens[t])})
        for index, t in enumerate(tokens)
    ]
    step, fairness = plan(queues, Fairness(), 100)
    assert [request.request_id for request in step.passes] == ["a:0", "c:0", "c:1"]
    assert fairness.order[0] == "b"


def test_unspent_tokens_are_carried_up_to_those_of_two_steps() -> None:
    run = {seq: pending(seq, "a", "a", seq, tokens=50) for seq in range(9)}
    _, fairness = plan([ModelQueue("a", "a", 0, run)], Fairness({"a": 10**6}, ("a",)), 100)
    assert fairness.deficits == {"a": 200}


def test_tokens_that_data_share_take_no_part_of_the_budget() -> None:
    """Three passes of 100 tokens, of which their data share 80, fit where 60 tokens do."""
    passes = {
        seq_id: replace(pending(seq_id, "t", "m", seq_id, tokens=100), shared_tokens=80) for seq_id in range(1, 5)
    }
    step, _ = plan([ModelQueue("m", "t", 1, passes)], Fairness(), 60)
    assert [request.seq_id for request in step.passes] == [1, 2, 3]
