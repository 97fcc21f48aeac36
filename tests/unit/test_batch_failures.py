"""What follows a failed attempt, for every cause, number of retries and size of the batch."""

from __future__ import annotations

from itertools import product

import pytest

from tinsmith.batch.coordinator.failures import MAX_INFRA_RETRIES, BatchAction, choose_action
from tinsmith.batch.types import FailureCause


def choose(cause: FailureCause, **facts: int) -> BatchAction:
    defaults = {"retries": 0, "infra_retries": 0, "max_retries": 3, "num_rows": 4, "is_part": 0, "died_before": 0}
    values = {**defaults, **facts}
    is_part, died_before = bool(values.pop("is_part")), bool(values.pop("died_before"))
    return choose_action(cause, is_part=is_part, died_before=died_before, **values)


@pytest.mark.parametrize("cause", [FailureCause.NOT_BEGUN, *FailureCause.of_setup()])
def test_a_batch_that_nothing_has_worked_on_is_as_before(cause: FailureCause) -> None:
    for retries, infra_retries, num_rows in product((0, 3, 4), (0, MAX_INFRA_RETRIES), (1, 4)):
        facts = {"retries": retries, "infra_retries": infra_retries, "num_rows": num_rows}
        assert choose(cause, **facts) is BatchAction.RETURN


def test_a_lost_worker_and_a_first_death_use_no_retry_but_there_is_an_end() -> None:
    for cause, retries in product((FailureCause.WORKER, FailureCause.DEATH), (0, 3, 4)):
        for infra_retries in range(MAX_INFRA_RETRIES):
            assert choose(cause, retries=retries, infra_retries=infra_retries) is BatchAction.RETRY_ELSEWHERE
        assert choose(cause, retries=retries, infra_retries=MAX_INFRA_RETRIES) is BatchAction.FAIL_ELSEWHERE
    assert choose(FailureCause.WORKER, died_before=1) is BatchAction.RETRY_ELSEWHERE


def test_an_error_has_its_retries_with_back_off_and_then_isolates_the_row() -> None:
    for max_retries in (0, 1, 3):
        chosen = [
            choose(FailureCause.ERROR, retries=tries, max_retries=max_retries) for tries in range(max_retries + 2)
        ]
        assert chosen == [BatchAction.BACK_OFF] * max_retries + [BatchAction.SPLIT, BatchAction.FAIL]
        parts = [
            choose(FailureCause.ERROR, retries=tries, max_retries=max_retries, is_part=1, num_rows=1)
            for tries in range(max_retries + 1)
        ]
        assert parts == [BatchAction.RETRY] * min(1, max_retries) + [BatchAction.GIVE_UP] * (
            max_retries + 1 - min(1, max_retries)
        )


@pytest.mark.parametrize(("cause", "died_before"), [(FailureCause.SAME_ERROR, 0), (FailureCause.DEATH, 1)])
def test_what_would_come_again_is_not_tried_again(cause: FailureCause, died_before: int) -> None:
    for retries, is_part in product(range(4), (0, 1)):
        facts = {"retries": retries, "is_part": is_part, "died_before": died_before}
        assert choose(cause, **facts) is BatchAction.SPLIT
        assert choose(cause, num_rows=1, **facts) is BatchAction.GIVE_UP
    assert choose(cause, retries=4, num_rows=1, died_before=died_before) is BatchAction.FAIL, "it was not even recorded"


def test_a_broken_rule_fails_the_job() -> None:
    for retries, num_rows, died_before in product((0, 3, 4), (1, 4), (0, 1)):
        facts = {"retries": retries, "num_rows": num_rows, "died_before": died_before}
        assert choose(FailureCause.PROGRAM, **facts) is BatchAction.FAIL
