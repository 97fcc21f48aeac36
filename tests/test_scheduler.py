"""The scheduler's rules as properties over random queues."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from tinsmith.ops import Pending
from tinsmith.scheduler import MAX_SINGLES_PER_TENANT, PASS_KINDS, Fairness, ModelQueue, plan, take_in_turns

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
    """Run plans to the end; every step as the requests it ran."""
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
        mine = [request.seq_id for request in ran if request.model_id == queue.model_id]
        assert mine == [request.seq_id for request in queue.ready()]


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
        for mine in kinds.values():
            assert all(kind in PASS_KINDS for kind in mine) or len(mine) == 1


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


@given(st.integers(1, 100), st.integers(1, 64))
def test_a_flood_delays_another_tenants_request_by_at_most_one_step(tokens: int, lone_tokens: int) -> None:
    flood = {seq: pending(seq, "flood", "a", seq, "forward", tokens) for seq in range(10_000)}
    lone = {0: pending(20_000, "lone", "b", 0, "forward", lone_tokens)}
    # The flood has been running alone: its fairness state is whatever it left.
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
        beside = sum(request.num_tokens for request in step.passes)
        assert beside <= (max(256, tokens) if was_short and not waited else 16)


def test_small_requests_never_keep_a_large_one_waiting_for_ever() -> None:
    large = {seq: pending(seq, "large", "a", seq, "forward", 256) for seq in range(10)}
    fairness, done = Fairness(), 0
    for turn in range(40):
        queues = [ModelQueue("a", "large", done, large)]
        for name in ("x", "y", "z"):
            small = {turn: pending(100 + turn, name, name, turn, "forward", 1)}
            queues.append(ModelQueue(name, name, turn, small))
        step, fairness = plan(queues, fairness, 256)
        done += any(request.tenant_id == "large" for request in step.passes)
        assert sum(request.num_tokens for request in step.passes) <= 256
    assert done >= 5, "one in six or seven steps, of which every other one is short"


def test_what_fits_into_one_step_is_never_split() -> None:
    runs = {
        name: {0: pending(index, name, name, 0, "forward", tokens)}
        for index, (name, tokens) in enumerate((("a", 1), ("b", 100), ("c", 155)))
    }
    step, _ = plan([ModelQueue(name, name, 0, run) for name, run in runs.items()], Fairness(), 256)
    assert len(step.passes) == 3


def test_saves_of_one_tenant_are_bounded_per_step() -> None:
    queues = [ModelQueue(f"m{i}", "t", 1, {1: pending(i, "t", f"m{i}", 1, "save_weights")}) for i in range(20)]
    step, _ = plan(queues, Fairness(), 1000)
    assert [request.arrival for request in step.singles] == list(range(MAX_SINGLES_PER_TENANT))


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 20), max_size=4), st.integers(0, 30))
def test_samples_are_taken_in_turns(counts: dict[str, int], room: int) -> None:
    waiting = {t: [pending(i, t, t, i, "sample") for i in range(n)] for t, n in counts.items()}
    taken, _ = take_in_turns(waiting, room, "b")
    assert len(taken) == min(room, sum(counts.values()))
    got = {t: [r.seq_id for r in taken if r.tenant_id == t] for t in counts}
    for tenant, mine in got.items():
        assert mine == list(range(len(mine)))
        for other, theirs in got.items():
            assert len(mine) <= len(theirs) + 1 or len(theirs) == counts[other], (tenant, other)
