"""The choice of the next step: a pure function of the queues.

Rules. A model's requests take effect strictly in seq_id order; a gap waits. Passes (forward, forward_backward) at the
heads of any number of models share one step, for any losses, ranks or tenants; everything else is a barrier of its
model: optim_steps of different models merge into one call, the rest runs singly. The engine runs optim_steps that
waited for the passes of a step at its end, before it decodes. Tenants share the step's token budget by deficit round
robin (Shreedhar and Varghese, 1995), so that a flood of one delays another's next request by at most one step. If more
waits than one step holds, every other step may be a short one that first serves tenants with little work; otherwise
such a tenant would wait for the running full step and then for its own.

A single has a cost in tokens, so that it can be weighed against passes. A step has one single, and more as long as they
take at most half as long as its passes: one of each tenant in turn, paid from the tenants' share of later passes. So
neither kind delays the other by much, at any cost. No I/O, no clock, no device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tinsmith.types import Pending

PASS_KINDS = frozenset({"forward", "forward_backward"})
SINGLES_SHARE = 2
"""Saves, loads, publishes and creations beyond the first take at most 1/SINGLES_SHARE of the time of the passes."""

SHORT_STEPS = 16
"""A short step has 1/SHORT_STEPS of a full step's budget, or all tokens that light tenants want, if that is more."""

LIGHT_SHARE = 2
"""A light tenant wants at most 1/LIGHT_SHARE of its share of a full step. Since it may be served in every step and
others in every other one, half is the most that leaves the others their share.
"""


@dataclass(frozen=True, slots=True)
class ModelQueue:
    """A model's waiting requests by seq_id, and the seq_id that may take effect next."""

    model_id: str
    tenant_id: str
    next_seq_id: int
    waiting: Mapping[int, Pending]

    def ready(self) -> Iterator[Pending]:
        """The requests without a gap before them, in order."""
        seq_id = self.next_seq_id
        while (request := self.waiting.get(seq_id)) is not None:
            yield request
            seq_id += 1


@dataclass(frozen=True, slots=True)
class Fairness:
    """State carried to the next step: each tenant's unspent tokens, the order of service, whether the step was short,
    and the order of tenants with waiting singles.
    """

    deficits: Mapping[str, int] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    was_short: bool = False
    singles_order: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """The requests to run, in this order. A model appears in only one of the three."""

    optim_steps: tuple[Pending, ...] = ()
    singles: tuple[Pending, ...] = ()
    passes: tuple[Pending, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.optim_steps or self.singles or self.passes)


def plan(
    queues: Sequence[ModelQueue], fairness: Fairness, token_budget: int, costs: Mapping[str, int] | None = None
) -> tuple[Step, Fairness]:
    """Choose one step. `token_budget` bounds the tokens of its passes; one larger pass runs alone. `costs`: by kind of
    single, how many tokens of passes take as long.
    """
    optim_steps: list[Pending] = []
    singles: list[Pending] = []
    runs: list[list[Pending]] = []
    for queue in queues:
        head = queue.waiting.get(queue.next_seq_id)
        if head is None:
            continue
        if head.kind == "optim_step":
            optim_steps.append(head)
        elif head.kind in PASS_KINDS:
            runs.append(_run_of_passes(queue, token_budget))
        else:
            singles.append(head)
    passes, shared = _share_budget(_group_by_tenant(runs), fairness, token_budget)
    room = sum(request.cost_tokens for request in passes) // SINGLES_SHARE
    chosen_singles, paid, singles_order = _choose_singles(singles, fairness.singles_order, room, costs or {})
    deficits = {t: max(-token_budget, deficit - paid.get(t, 0)) for t, deficit in shared.deficits.items()}
    next_fairness = replace(shared, deficits=deficits, singles_order=singles_order)
    return Step(tuple(optim_steps), tuple(chosen_singles), tuple(passes)), next_fairness


def _run_of_passes(queue: ModelQueue, token_budget: int) -> list[Pending]:
    """The passes at a model's head that one step could take, and one more, which shows whether there are too many."""
    run: list[Pending] = []
    total = 0
    for request in queue.ready():
        if request.kind not in PASS_KINDS or total > token_budget:
            break
        run.append(request)
        total += request.cost_tokens
    return run


def _choose_singles(
    singles: Sequence[Pending], order: Sequence[str], room: int, costs: Mapping[str, int]
) -> tuple[list[Pending], dict[str, int], tuple[str, ...]]:
    """The singles of one step, the oldest of each tenant in turn; what each tenant pays; and the tenants' order in the
    next step: those that got nothing come first. A kind without a cost runs alone.
    """
    waiting: dict[str, deque[Pending]] = {}
    for request in sorted(singles, key=lambda single: single.arrival):
        waiting.setdefault(request.tenant_id, deque()).append(request)
    turns = deque(tenant_id for tenant_id in order if tenant_id in waiting)
    turns.extend(tenant_id for tenant_id in waiting if tenant_id not in order)
    chosen: list[Pending] = []
    paid: dict[str, int] = {}
    while turns:
        cost = max(1, costs.get(waiting[turns[0]][0].kind, room + 1))
        if chosen and cost > room:
            break
        tenant_id = turns.popleft()
        chosen.append(waiting[tenant_id].popleft())
        paid[tenant_id] = paid.get(tenant_id, 0) + cost
        room -= cost
        if waiting[tenant_id]:
            turns.append(tenant_id)
    return chosen, paid, tuple(sorted(turns, key=lambda tenant_id: tenant_id in paid))


def _group_by_tenant(runs: Sequence[Sequence[Pending]]) -> dict[str, list[Pending]]:
    """Each tenant's passes by arrival, but never a model's later pass before its earlier one."""
    keyed: dict[str, list[tuple[int, int, Pending]]] = {}
    for run in runs:
        latest = 0
        for position, request in enumerate(run):
            latest = max(latest, request.arrival)
            keyed.setdefault(request.tenant_id, []).append((latest, position, request))
    return {
        tenant_id: [request for _, _, request in sorted(entries, key=lambda entry: entry[:2])]
        for tenant_id, entries in keyed.items()
    }


def _share_budget(
    runs: Mapping[str, list[Pending]], fairness: Fairness, token_budget: int
) -> tuple[list[Pending], Fairness]:
    """Deficit round robin over the tenants' runs within the budget."""
    order = [tenant_id for tenant_id in fairness.order if tenant_id in runs]
    order += sorted(runs.keys() - set(order), key=lambda tenant_id: runs[tenant_id][0].arrival)
    light = {} if fairness.was_short else _light_tenants(runs, token_budget)
    order.sort(key=lambda tenant_id: tenant_id not in light)
    deficits = {tenant_id: fairness.deficits.get(tenant_id, 0) for tenant_id in order}
    passes: list[Pending] = []
    room = max(token_budget // SHORT_STEPS, sum(light.values())) if light else token_budget
    position = dict.fromkeys(order, 0)
    open_tenants = list(order)
    quantum = max(1, room // max(1, len(order)))
    rounds = dict.fromkeys(order, 0)
    while open_tenants:
        still_open: list[str] = []
        for tenant_id in open_tenants:
            run = runs[tenant_id]
            if passes and run[position[tenant_id]].cost_tokens > room:
                continue  # no quantum: it cannot use it now
            deficits[tenant_id] += max(quantum, light.get(tenant_id, 0))
            rounds[tenant_id] += 1
            while position[tenant_id] < len(run):
                tokens = run[position[tenant_id]].cost_tokens
                if tokens > deficits[tenant_id] or (tokens > room and passes):
                    break
                passes.append(run[position[tenant_id]])
                position[tenant_id] += 1
                deficits[tenant_id] -= tokens
                room -= tokens
            if position[tenant_id] < len(run):
                still_open.append(tenant_id)
        open_tenants = still_open
    unfinished = [tenant_id for tenant_id in order if position[tenant_id] < len(runs[tenant_id])]
    unfinished.sort(key=lambda tenant_id: rounds[tenant_id])
    served = [tenant_id for tenant_id in order if tenant_id not in unfinished]
    carried_deficits = {tenant_id: min(deficits[tenant_id], 2 * token_budget) for tenant_id in unfinished}
    return passes, Fairness(carried_deficits, tuple(unfinished + served), was_short=bool(light))


def _light_tenants(runs: Mapping[str, list[Pending]], token_budget: int) -> dict[str, int]:
    """The light tenants and their total tokens; empty if everything fits into one full step."""
    totals = {tenant_id: sum(request.cost_tokens for request in run) for tenant_id, run in runs.items()}
    if sum(totals.values()) <= token_budget:
        return {}
    return {
        tenant_id: total for tenant_id, total in totals.items() if total * LIGHT_SHARE * len(totals) <= token_budget
    }


def take_in_turns(
    waiting: Mapping[str, Iterable[Pending]], num_slots: int, last_tenant: str, occupied: Mapping[str, int]
) -> tuple[list[Pending], str]:
    """The samples that get a slot, one tenant after the other, starting after `last_tenant`; and the last tenant
    served.

    `occupied` has each tenant's slots. A tenant takes one while fewer than `num_slots` are taken in all, or while it
    has fewer than an equal share: it does not wait for other tenants' samples to end. So up to twice as many may be
    taken, and at least one per tenant.
    """
    tenants = sorted(waiting)
    tenants = [t for t in tenants if t > last_tenant] + [t for t in tenants if t <= last_tenant]
    queues = deque((tenant_id, iter(waiting[tenant_id])) for tenant_id in tenants)
    share = max(1, num_slots // max(1, len(waiting.keys() | {t for t, count in occupied.items() if count})))
    slots_of_tenant = dict(occupied)
    total = sum(slots_of_tenant.values())
    requests: list[Pending] = []
    while queues:
        tenant_id, queue = queues.popleft()
        if total >= num_slots and slots_of_tenant.get(tenant_id, 0) >= share:
            continue
        if (request := next(queue, None)) is not None:
            requests.append(request)
            last_tenant = tenant_id
            slots_of_tenant[tenant_id] = slots_of_tenant.get(tenant_id, 0) + 1
            total += 1
            queues.append((tenant_id, queue))
    return requests, last_tenant
