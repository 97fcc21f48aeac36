"""A session's timeline in Chrome's trace format, which Perfetto opens: one process per model and sampler.

Each request is an asynchronous slice from arrival to settlement with the parts `queued` (until an engine began), `run`
(until the engine had the result) and `settle` (until the result was stored). Requests of a sampler overlap. Those of a
model take effect in order, so each model also has a thread that shows its work step by step; an engine numbers its
steps from 1, and a step can contain passes of several models and sessions.

The timeline is generated from the rows of futures while it is read. Pending requests have no end, refused ones no
duration. Requests whose results were deleted (`result_grace_s` after the end of their session) are missing.
"""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import sqlalchemy as sa

from tinsmith.db.database import Database
from tinsmith.db.schema import FUTURES

_ROWS_AT_A_TIME = 2000
_ARGUMENTS = (
    "request_id",
    "seq_id",
    "state",
    "category",
    "num_tokens",
    "body_bytes",
    "prefill_tokens",
    "cached_tokens",
    "sampled_tokens",
    "step",
)
_TIMES = ("created_at", "started_at", "ran_at", "settled_at")
_COLUMNS = ("arrival", "kind", "model_id", "sampling_session_id", *_TIMES, *_ARGUMENTS)
_PARTS = ("queued", "run", "settle")
_REQUESTS, _WORK = 0, 1  # threads of a process

Event = dict[str, object]


class Traces:
    def __init__(self, db: Database) -> None:
        self._db = db

    def write(self, session_id: str) -> Iterator[bytes]:
        """Write the trace's JSON in chunks, with a bounded number of rows in memory."""
        yield b'{"displayTimeUnit":"ms","otherData":' + orjson.dumps({"session_id": session_id}) + b',"traceEvents":['
        processes: dict[str, int] = {}
        separator = b""
        for row in self._rows(session_id):
            lane = row.model_id or row.sampling_session_id or session_id
            events = [] if lane in processes else _process(lane, len(processes) + 1, works=row.model_id is not None)
            process = processes.setdefault(lane, len(processes) + 1)
            events += _slices(row, process)
            yield separator + b",".join(orjson.dumps(event) for event in events)
            separator = b","
        yield b"]}"

    def _rows(self, session_id: str) -> Iterator[sa.Row]:
        after = -1
        while True:
            query = (
                sa.select(*(FUTURES.c[name] for name in _COLUMNS))
                .where(FUTURES.c.session_id == session_id, FUTURES.c.arrival > after)
                .order_by(FUTURES.c.arrival)
                .limit(_ROWS_AT_A_TIME)
            )
            rows = self._db.rows(query)
            yield from rows
            if len(rows) < _ROWS_AT_A_TIME:
                return
            after = rows[-1].arrival


def _process(lane: str, process: int, *, works: bool) -> list[Event]:
    names = [("process_name", _REQUESTS, lane), ("thread_name", _REQUESTS, "requests")]
    if works:
        names.append(("thread_name", _WORK, "work"))
    return [
        {"ph": "M", "name": name, "pid": process, "tid": tid, "args": {"name": value}} for name, tid, value in names
    ]


def _slices(row: sa.Row, process: int) -> list[Event]:
    shared = {"cat": "request", "id": row.request_id, "pid": process, "tid": _REQUESTS}
    arguments = {name: row._mapping[name] for name in _ARGUMENTS if row._mapping[name] is not None}
    times = _times(row)
    events = [shared | {"name": row.kind, "ph": "b", "ts": times[0], "args": arguments}]
    if len(times) == len(_TIMES):
        for name, start, end in zip(_PARTS, times, times[1:], strict=False):
            events += [shared | {"name": name, "ph": "b", "ts": start}, shared | {"name": name, "ph": "e", "ts": end}]
    if row.settled_at is not None:
        events.append(shared | {"name": row.kind, "ph": "e", "ts": times[-1]})
    if row.model_id is not None and len(times) == len(_TIMES):
        work_slice: Event = {"ph": "X", "cat": "work", "pid": process, "tid": _WORK, "name": row.kind}
        events.append(work_slice | {"ts": times[1], "dur": times[2] - times[1], "args": arguments})
    return events


def _times(row: sa.Row) -> list[int]:
    """A request's known times in microseconds, made non-decreasing, since the clocks of two processes may differ."""
    times: list[int] = []
    for name in _TIMES:
        time_s = row._mapping[name]
        if time_s is not None:
            times.append(max(round(time_s * 1e6), times[-1] if times else 0))
    return times
