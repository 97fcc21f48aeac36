"""Bytes of uploads under way count against quotas, and the threads that spool and stream are bounded."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from starlette.concurrency import run_in_threadpool

from support.databases import fresh_url
from tinsmith.auth.quotas import QuotaLimits, Quotas
from tinsmith.db.factory import open_database
from tinsmith.errors import TooManyRequestsError
from tinsmith.runtime.threads import bound_starlette_threads


def test_uploads_at_the_same_time_share_what_the_quota_leaves(tmp_path: Path) -> None:
    database = open_database(fresh_url(tmp_path))
    quotas = Quotas(database, QuotaLimits(file_bytes=100, checkpoint_bytes=100))
    for reserve in (quotas.reserve_file, quotas.reserve_checkpoint):
        with reserve("alice", 60) as first:
            with pytest.raises(TooManyRequestsError, match="uploads under way 110, the limit is 100"):
                reserve("alice", 50)
            with reserve("bob", 100), reserve("alice", 30) as second:
                first.cover(50)  # it has more already
                second.cover(40)
                with pytest.raises(TooManyRequestsError):
                    first.cover(61)
                assert quotas._reserved.totals.total() == 200
            first.cover(100)
        assert quotas._reserved.totals == {}
        with pytest.raises(RuntimeError), reserve("alice", 100):
            raise RuntimeError
        with reserve("alice", 100):
            pass
    database.close()


def test_without_a_limit_nothing_is_refused(tmp_path: Path) -> None:
    database = open_database(fresh_url(tmp_path))
    quotas = Quotas(database, QuotaLimits())
    with quotas.reserve_file("alice", 10**15) as reservation:
        reservation.cover(10**16)
    database.close()


def test_starlettes_threads_are_bounded_by_the_setting() -> None:
    running, peak, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    async def spool() -> None:
        bound_starlette_threads(3)
        await asyncio.gather(*(run_in_threadpool(work) for _ in range(30)))

    asyncio.run(spool())
    assert peak == 3
