"""What follows an attempt at a batch that ended without a result. No I/O.

| cause | the batch |
|---|---|
| not begun, or the function does not start | is pending again, as it was |
| the worker; the first death of the function's process | is pending again, `MAX_INFRA_RETRIES` times, and then failed |
| an error | has `max_retries` more tries, with back-off; a part of a split batch has one, at once |
| an error that the same rows raise again; the second death | has no more tries |
| a broken rule | is failed, and so is the job |

A batch without more tries is split. If it is one row, the next attempt only records the row as failed; if not even that
succeeds, the batch is failed. The first death may have been an accident of the machine, so it uses no retry. When a
part of a batch fails, a transient cause has had time to pass.
"""

from __future__ import annotations

from enum import Enum, auto

from tinsmith.batch.types import FailureCause

MAX_INFRA_RETRIES = 20
"""How often a batch is tried again after the loss of its worker, before it fails."""


class BatchAction(Enum):
    RETURN = auto()
    """Pending again; nothing is counted."""
    RETRY_ELSEWHERE = auto()
    """Pending again; a retry for the worker's sake is counted."""
    RETRY = auto()
    """Pending again; a retry is counted."""
    BACK_OFF = auto()
    """Pending again after a pause; a retry is counted."""
    SPLIT = auto()
    GIVE_UP = auto()
    """Pending again, to record its only row as failed."""
    FAIL = auto()
    FAIL_ELSEWHERE = auto()
    """Failed, by its workers."""


def choose_action(
    cause: FailureCause,
    *,
    retries: int,
    infra_retries: int,
    max_retries: int,
    num_rows: int,
    is_part: bool,
    died_before: bool,
) -> BatchAction:
    """The action after a failed attempt. `retries` and `infra_retries` are those before it, `is_part` says whether the
    batch is a part of a split one, `died_before` whether the function's process died in its last attempt."""
    if cause in (FailureCause.NOT_BEGUN, *FailureCause.of_setup()):
        return BatchAction.RETURN
    if cause is FailureCause.WORKER or (cause is FailureCause.DEATH and not died_before):
        return BatchAction.RETRY_ELSEWHERE if infra_retries < MAX_INFRA_RETRIES else BatchAction.FAIL_ELSEWHERE
    if cause is FailureCause.PROGRAM or retries > max_retries:  # the row could not even be recorded as failed
        return BatchAction.FAIL
    if cause is FailureCause.ERROR and retries < (min(1, max_retries) if is_part else max_retries):
        return BatchAction.RETRY if is_part else BatchAction.BACK_OFF
    return BatchAction.SPLIT if num_rows > 1 else BatchAction.GIVE_UP
