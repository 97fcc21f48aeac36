"""All batches of one job made into rows, or such rows deleted: a million of them, in transactions that are short.

The database makes the rows itself, of one array for each chunk: one statement, whatever the number of its rows. After
each chunk others have their turn. Who may write is checked by the caller's `begin`, in every transaction.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Connection

from tinsmith.db.database import Database, now
from tinsmith.db.schema import BATCH_STATES as STATES

NUMBER = sa.BigInteger
PENDING = sa.literal_column("'PENDING'")

CHUNK = 2000
"""Rows in one transaction: some milliseconds."""
CHECKPOINT_CHUNKS = 8
"""So many chunks stay below SQLite's limit of its log, at which whoever commits must empty it while all others wait."""
PAUSE_S = 0.0002
"""For those who wait: on SQLite a lock that is taken again at once would be taken past them."""

Begin = Callable[[Connection], None]


def insert_batches(db: Database, job_id: int, starts: Sequence[int], total_rows: int, begin: Begin) -> None:
    """`starts` has the first row of each batch, ascending; a batch ends where the next one begins."""
    for count, first in enumerate(range(0, len(starts), CHUNK), 1):
        chunk = list(starts[first : first + CHUNK])
        after = starts[first + CHUNK] if first + CHUNK < len(starts) else total_rows
        given = {"job": job_id, "first": first, "after": after, "at": now()}
        with db.write() as connection:
            begin(connection)
            if db.is_sqlite:
                connection.execute(_INSERT_SQLITE, {**given, "starts": json.dumps(chunk)})
            else:
                connection.execute(_INSERT_POSTGRES, {**given, "starts": chunk})
        _let_others(db, count)


def delete_batches(db: Database, job_id: int, begin: Begin) -> None:
    mine = STATES.c.job_id == job_id
    with db.read() as connection:
        last = connection.scalar(sa.select(sa.func.max(STATES.c.batch_idx)).where(mine))
    for count, first in enumerate(range(0, -1 if last is None else last + 1, CHUNK), 1):
        with db.write() as connection:
            begin(connection)
            connection.execute(STATES.delete().where(mine, STATES.c.batch_idx.between(first, first + CHUNK - 1)))
        _let_others(db, count)


def _let_others(db: Database, chunks_done: int) -> None:
    if chunks_done % CHECKPOINT_CHUNKS == 0:
        db.checkpoint()
    time.sleep(PAUSE_S)


def _insert(offset: sa.ColumnElement[int], start: sa.ColumnElement[int]) -> sa.Insert:
    next_start = sa.func.lead(start, 1, sa.bindparam("after", type_=NUMBER)).over(order_by=offset)
    columns = {
        "job_id": sa.bindparam("job", type_=NUMBER),
        "batch_idx": sa.bindparam("first", type_=NUMBER) + offset,
        "start_idx": start,
        "end_idx": next_start - 1,
        "status": PENDING,
        "updated_at": sa.bindparam("at", type_=sa.Float),
    }
    return STATES.insert().from_select(list(columns), sa.select(*columns.values()))


def _of_json() -> sa.Insert:
    """SQLite has no arrays."""
    columns = [sa.column("key", NUMBER), sa.column("value", NUMBER)]
    each = sa.func.json_each(sa.bindparam("starts", type_=sa.String)).table_valued(*columns, name="each_start")
    return _insert(each.c.key, each.c.value)


def _of_array() -> sa.Insert:
    starts = sa.bindparam("starts", type_=postgresql.ARRAY(NUMBER))
    each = sa.func.unnest(starts).table_valued(sa.column("start", NUMBER), with_ordinality="number", name="each_start")
    each = each.render_derived()
    return _insert(each.c.number - 1, each.c.start)


_INSERT_SQLITE, _INSERT_POSTGRES = _of_json(), _of_array()
