"""A session's timeline in Chrome's trace format, which Perfetto opens: one process per model and sampler, one slice
per request, from its arrival to its settlement.

Made from the rows of the futures while it is read. When work on a request began is not recorded, so a slice shows
waiting and work as one; what is still pending has no end, and what was refused has no length. Requests whose results
were forgotten (`result_grace_s` after the end of their session) are gone from the timeline, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import sqlalchemy as sa

from tinsmith.db import FUTURES, Database

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
)
_COLUMNS = ("arrival", "kind", "model_id", "sampling_session_id", "created_at", "settled_at", *_ARGUMENTS)


class Traces:
    def __init__(self, db: Database) -> None:
        self._db = db

    def write(self, session_id: str) -> Iterator[bytes]:
        """The trace's JSON in parts; never more than some rows are in memory."""
        yield b'{"displayTimeUnit":"ms","otherData":' + orjson.dumps({"session_id": session_id}) + b',"traceEvents":['
        processes: dict[str, int] = {}
        separator = b""
        for row in self._rows(session_id):
            lane = row.model_id or row.sampling_session_id or session_id
            events = [] if lane in processes else [_process(lane, len(processes) + 1)]
            number = processes.setdefault(lane, len(processes) + 1)
            events += _slice(row, number)
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
            with self._db.read() as connection:
                rows = connection.execute(query).all()
            yield from rows
            if len(rows) < _ROWS_AT_A_TIME:
                return
            after = rows[-1].arrival


def _process(lane: str, number: int) -> dict[str, object]:
    return {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": lane}}


def _slice(row: sa.Row, process: int) -> list[dict[str, object]]:
    """Asynchronous slices: requests of one lane overlap without one being inside the other."""
    shared = {"cat": "request", "name": row.kind, "id": row.request_id, "pid": process, "tid": 0}
    arguments = {name: row._mapping[name] for name in _ARGUMENTS if row._mapping[name] is not None}
    events = [shared | {"ph": "b", "ts": _microseconds(row.created_at), "args": arguments}]
    if row.settled_at is not None:
        events.append(shared | {"ph": "e", "ts": _microseconds(row.settled_at)})
    return events


def _microseconds(moment_s: float) -> int:
    return round(moment_s * 1e6)
