"""The number of threads of a forward pass, by the size of the model and the batch, and by other processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tinsmith.backends.torch.threads import (
    AWAKE_SPINS,
    FIRST_RETRY_S,
    LAST_RETRY_S,
    NARROW_FLOPS,
    SMALL_FORWARD_FLOPS,
    SMALL_SHARED_FLOPS,
    WINDOW_S,
    WINDOWS,
    Allowance,
    ProcessUsage,
    Threads,
    process_usage,
)


@pytest.fixture
def two() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("num_parameters", "num_adapters", "spins", "small_flops"),
    [
        (int(NARROW_FLOPS / 4), 100_000, 0, SMALL_SHARED_FLOPS),
        (int(NARROW_FLOPS / 40), 2, 0, SMALL_FORWARD_FLOPS),
        (int(NARROW_FLOPS / 4), 1, AWAKE_SPINS, SMALL_FORWARD_FLOPS),
        (int(NARROW_FLOPS), 100_000, AWAKE_SPINS - 1, SMALL_FORWARD_FLOPS),
        (int(NARROW_FLOPS), 1, "infinite", SMALL_FORWARD_FLOPS),
        (int(NARROW_FLOPS), 1, AWAKE_SPINS, 0.0),
    ],
    ids=[
        "narrow and shared by many",
        "narrow, with many tokens each",
        "narrow, of one",
        "wide",
        "wide, other",
        "wide, awake",
    ],
)
def test_small_forwards_get_one_thread_and_others_all(
    num_parameters: int, num_adapters: int, spins: int | str, small_flops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", str(spins))
    threads = Threads(num_parameters, torch.device("cpu"))
    largest = int(small_flops / (2 * num_parameters))
    small = 1 if largest else 2
    below = max(largest - 1, 1)
    for num_tokens, expected_threads in (
        (1, small),
        (below, small),
        (largest + 1, 2),
        (below, small),
        (100 * below + 100, 2),
    ):
        threads.fit(num_tokens, num_adapters)
        assert torch.get_num_threads() == expected_threads


class Machine:
    """An allowance on a simulated machine, where others cause so many switches a second."""

    def __init__(self, max_threads: int) -> None:
        self.now = ProcessUsage(0, 0.0, 0.0)
        self.allowance = Allowance(max_threads, self.now)

    def compute(self, switches_per_s: int, windows: int = WINDOWS) -> None:
        for _ in range(windows):
            used, seconds = self.allowance.threads, 1.5 * WINDOW_S / self.allowance.threads
            switches, processor_s, clock_s = self.now
            new_switches = switches_per_s * seconds if used > 1 else 0
            self.now = ProcessUsage(switches + round(new_switches), processor_s + used * seconds, clock_s + seconds)
            self.allowance.update(self.now, used)

    def wait(self, seconds: float) -> None:
        self.now = self.now._replace(clock_s=self.now.clock_s + seconds)
        self.allowance.update(self.now, self.allowance.threads)


@pytest.mark.parametrize(("max_threads", "least"), [(2, 1), (3, 1), (8, 4)])
def test_threads_give_way_to_another_process_down_to_half(max_threads: int, least: int) -> None:
    machine = Machine(max_threads)
    machine.compute(100)
    for _ in range(5):
        machine.compute(700, windows=WINDOWS - 1)
        machine.compute(100, windows=1)
    assert machine.allowance.threads == max_threads
    machine.compute(700)
    assert machine.allowance.threads == max_threads - 1
    machine.compute(700, windows=20)
    assert machine.allowance.threads in (least, least + 1)  # or one more is tried just now


def test_a_thread_is_tried_again_ever_later_and_soon_once_the_machine_is_free() -> None:
    machine, waits = Machine(2), []
    for _ in range(8):
        machine.compute(700)
        assert machine.allowance.threads == 1
        begun_s = machine.now.clock_s
        while machine.allowance.threads == 1:
            machine.wait(0.5)
        waits.append(machine.now.clock_s - begun_s)
    assert waits[0] == FIRST_RETRY_S and waits[-1] == LAST_RETRY_S and waits == sorted(waits)
    machine.compute(10, windows=1)
    machine.compute(700)
    machine.wait(FIRST_RETRY_S)
    assert machine.allowance.threads == 2


def test_time_on_one_thread_says_nothing_of_two() -> None:
    machine = Machine(2)
    machine.allowance.update(ProcessUsage(10_000, 10.0, 10.0), 1)
    assert machine.allowance.threads == 2


@pytest.mark.usefixtures("two")
def test_a_forward_takes_what_is_allowed_unless_threads_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [process_usage()]
    monkeypatch.setattr("tinsmith.backends.torch.threads.process_usage", lambda: now[0])
    threads = Threads(10**9, torch.device("cpu"))
    threads.fit(1000)
    assert torch.get_num_threads() == 2
    for _ in range(WINDOWS):
        assert torch.get_num_threads() == 2
        now[0] = ProcessUsage(now[0].switches + 1000, now[0].processor_s + 1.0, now[0].clock_s + 0.5)
        threads.fit(1000)
    assert torch.get_num_threads() == 1
    threads.pin()
    threads.fit(1000)
    assert torch.get_num_threads() == 2


def test_usage_counts_processor_time_and_involuntary_switches() -> None:
    first = process_usage()
    while process_usage().processor_s < first.processor_s + 0.05:
        sum(range(1000))
    last = process_usage()
    assert last.processor_s > first.processor_s and last.clock_s > first.clock_s and last.switches >= first.switches
