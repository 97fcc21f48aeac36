"""The failed rows of a job by the kind of their error: the class, and the beginning of the message without its numbers.

So `KeyError: no column 7` and `KeyError: no column 12` are one kind. Counts are exact unless a job has more than
`MAX_HEADS` different beginnings; the rest are then only in the job's own count.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import sqlalchemy as sa

from tinsmith.db.database import Database
from tinsmith.db.schema import BATCH_ROW_ERRORS as ROW_ERRORS

HEAD_CHARS = 100
MAX_HEADS = 2000
MAX_KINDS = 20

_NUMBER = re.compile(r"\d+(\.\d+)?")


class ErrorKind(NamedTuple):
    error_type: str
    head: str
    """The beginning of the message; each number is `#`."""
    rows: int
    first_row: int
    """The index of the first such row."""


def list_error_kinds(db: Database, job_id: int) -> list[ErrorKind]:
    """The kinds of a job's errors, the most frequent first; at most `MAX_KINDS`."""
    head = sa.func.substr(ROW_ERRORS.c.message, 1, HEAD_CHARS).label("head")
    num_rows = sa.func.count().label("num_rows")
    query = sa.select(ROW_ERRORS.c.error_class, head, num_rows, sa.func.min(ROW_ERRORS.c.row_idx))
    query = query.where(ROW_ERRORS.c.job_id == job_id).group_by(ROW_ERRORS.c.error_class, head)
    kinds: dict[tuple[str, str], tuple[int, int]] = {}
    for error_class, text, count, first_row in db.rows(query.order_by(num_rows.desc()).limit(MAX_HEADS)):
        key = error_class, _NUMBER.sub("#", text.partition("\n")[0])
        count_before, first_before = kinds.get(key, (0, first_row))
        kinds[key] = count_before + count, min(first_before, first_row)
    listed = [ErrorKind(*key, *counts) for key, counts in kinds.items()]
    return sorted(listed, key=lambda kind: (-kind.rows, kind.first_row))[:MAX_KINDS]
