"""The history of the machine: equal totals at every level, a bounded number of rows, and time spread over its work."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import sqlalchemy as sa

from tinsmith.db.database import Database
from tinsmith.db.schema import MACHINE_HISTORY
from tinsmith.store.machine_history import LEVELS, MACHINE, SUMS, Level, MachineHistory, MachineWork

HERE, THERE = "here:1:/data", "there:2:/data"
START = 1_700_000_000.0


def work(seconds: float = 10.0, trained: float = 100.0, **values: float) -> MachineWork:
    tenants = {"alice": (trained * 0.75, 8.0), "bob": (trained * 0.25, 0.0)}
    sums = {"training_s": 4.0, "sampling_s": 3.0, "loading_s": 1.0, "memory_byte_s": seconds * 2**30} | values
    return MachineWork(
        observed_s=seconds, engine_s=seconds, trained_tokens=trained, sampled_tokens=8.0, tenants=tenants, **sums
    )


def total_of(history: MachineHistory, level: Level, at: float, base_model: str = "base") -> MachineWork:
    total = MachineWork()
    for period in history.list_periods(level, at):
        if period.base_model == base_model:
            total.add(period.totals)
    return total


def count_rows(db: Database) -> Counter[int]:
    rows = db.rows(sa.select(MACHINE_HISTORY.c.step_s, sa.func.count()).group_by(MACHINE_HISTORY.c.step_s))
    return Counter(dict(map(tuple, rows)))


def test_every_level_has_the_same_totals(db: Database) -> None:
    history, generator, at, summed = MachineHistory(db), random.Random(0), START, MachineWork()
    for index in range(60):
        seconds = generator.uniform(5, 20)
        at += seconds
        observed = work(seconds, generator.randrange(1000), training_s=generator.uniform(0, 2 * seconds))
        summed.add(observed)
        history.add(
            HERE if index % 2 else THERE, at, {"base": observed, "other": work(seconds), MACHINE: MachineWork(seconds)}
        )
    for level in LEVELS.values():
        total = total_of(history, level, at)
        for name in set(SUMS) - {"observed_s"}:  # two servers observe the same time
            assert getattr(total, name) == pytest.approx(getattr(summed, name)), (level, name)
        assert total.tenants.keys() == {"alice", "bob"}
        assert total.tenants["alice"] == pytest.approx(summed.tenants["alice"])
    periods = [history.list_periods(level, at) for level in LEVELS.values()]
    assert len(periods[0]) > len(periods[1]) > len(periods[2])
    assert all([p.began_at for p in level] == sorted(p.began_at for p in level) for level in periods)


def test_rows_are_bounded_and_coarser_levels_reach_further_back(db: Database) -> None:
    history = MachineHistory(db)
    for index in range(400):  # each fills one period of the finest level
        history.add(HERE, START + 10.0 * index, {"base": work()})
    hour, day, month = LEVELS.values()
    assert count_rows(db)[hour.step_s] <= hour.max_periods < 400
    later = START + 4000.0
    assert total_of(history, hour, later).trained_tokens < 100 * 365
    assert total_of(history, day, later).trained_tokens == total_of(history, month, later).trained_tokens == 40_000
    history.add(THERE, START + day.span_s + 5000, {"base": work()})  # another server deletes what is too old
    assert count_rows(db)[hour.step_s] <= 2 and count_rows(db)[day.step_s] <= 2 and count_rows(db)[month.step_s] >= 5
    history.add(THERE, START + month.span_s + 10_000, {"base": work()})
    assert sum(count_rows(db).values()) <= 6 + 2


def test_a_step_that_ends_fills_the_time_that_it_took(db: Database) -> None:
    history, at = MachineHistory(db), START + 100
    history.add(HERE, at, {"base": work(10.0, 600.0, training_s=60.0, sampling_s=0.0, loading_s=0.0)})
    periods = history.list_periods(LEVELS["hour"], at)
    trained = {period.began_at: period.totals for period in periods if period.totals.training_s}
    assert sorted(trained) == [at - 60.0 + 10.0 * index for index in range(6)]
    assert {round(part.training_s, 6) for part in trained.values()} == {10.0}
    assert {round(part.tenants["alice"][0], 6) for part in trained.values()} == {75.0}
    assert [period.began_at for period in periods if period.totals.observed_s] == [at - 10.0]


def test_work_of_several_engines_is_spread_over_less_time(db: Database) -> None:
    history, at = MachineHistory(db), START
    history.add(HERE, at, {"base": MachineWork(observed_s=10.0, engine_s=20.0, training_s=20.0)})
    (period,) = history.list_periods(LEVELS["hour"], at)
    assert (period.totals.training_s, period.totals.idle_s) == (20.0, 0.0)


def test_work_at_the_moment_of_the_last_reading_is_not_lost(db: Database) -> None:
    history = MachineHistory(db)
    history.add(HERE, START, {"base": MachineWork(trained_tokens=5.0, tenants={"alice": (5.0, 0.0)})})
    (period,) = history.list_periods(LEVELS["hour"], START)
    assert period.totals.trained_tokens == 5.0 and period.totals.tenants == {"alice": (5.0, 0.0)}


def test_servers_of_one_period_work_at_the_same_time(db: Database) -> None:
    history = MachineHistory(db)
    for holder, observed_s in (("first", 10.0), ("second", 5.0)):
        work = MachineWork(observed_s=observed_s, trained_tokens=100.0, memory_byte_s=7 * observed_s)
        history.add(holder, 1010.0, {"base": work})
    total = MachineWork()
    for period in history.list_periods(LEVELS["day"], 1010.0):
        total.add(period.totals)
    assert (total.observed_s, total.trained_tokens, total.memory_byte_s) == (10.0, 200.0, 105.0)
