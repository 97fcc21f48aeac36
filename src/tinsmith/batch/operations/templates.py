"""Templates: `{column}` is the row's value, `{{` and `}}` are braces. There is nothing else, and nothing is run.

A text goes in as it is, anything else as JSON.
"""

from __future__ import annotations

import json
import re

from tinsmith.batch.formats.protocols import Row
from tinsmith.batch.operations.base import column_of
from tinsmith.errors import UserError

MAX_LENGTH = 100_000
_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def check_template(name: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_LENGTH:
        raise UserError(
            f"{name} must be a text of 1 to {MAX_LENGTH} characters with the columns that it takes in braces"
        )
    for piece in _PIECE.finditer(value):
        if piece[0] in "{}" or piece[1] == "":
            raise UserError(
                f"{name} has {piece[0]!r} at {piece.start()}: a column is {{name}}, a brace of the text is doubled"
            )


def render(template: str, row: Row) -> str:
    """Raises KeyError naming a column that the row lacks."""

    def filled(piece: re.Match[str]) -> str:
        if piece[1] is None:
            return piece[0][0]
        value = column_of(row, piece[1])
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return _PIECE.sub(filled, template)
