"""What a notebook shows: cards and tables as HTML, and the progress of work that is waited for.

The HTML is whole in itself, without scripts, and every text in it is escaped. Its colours are those of the notebook's
theme. Progress replaces its own display in a notebook, and its own line in a terminal; elsewhere, as in a log, it is
silent.
"""

from __future__ import annotations

import html
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

MAX_ROWS = 20
MAX_CHARACTERS = 300
"""Rows of a table, and characters of a value, that are written."""
EVERY_S = 0.2
"""Least time between two states of a progress."""
BAR_WIDTH = 20

_BOX = "border:1px solid rgba(128,128,128,.4);border-radius:6px;padding:8px 12px;max-width:56em"
_CELL = "padding:2px 12px 2px 0;text-align:left;vertical-align:top;background:none"
_TABLE = "border-collapse:collapse;margin:4px 0"
_QUIET = "opacity:.7"


def card(
    title: str, fields: Mapping[str, object], *, link: str = "", share: float | None = None, note: str = ""
) -> str:
    """A box with a title, which `link` makes a link, fields by name, a bar for a `share` from 0 to 1, and a note.
    Fields that are None or empty are left out.
    """
    heading = html.escape(title)
    if link:
        heading = f'<a href="{html.escape(link)}" target="_blank" rel="noopener">{heading}</a>'
    parts = [f"<strong>{heading}</strong>"]
    if share is not None:
        percent = round(100 * min(1.0, max(0.0, share)))
        bar = f"width:{percent}%;height:6px;border-radius:3px;background:#2a7fb8"
        parts.append(
            f'<div role="progressbar" aria-valuenow="{percent}" aria-valuemin="0" aria-valuemax="100" '
            f'style="margin:6px 0;border-radius:3px;background:rgba(128,128,128,.3)"><div style="{bar}"></div></div>'
        )
    rows = [
        f'<tr><td style="{_CELL};{_QUIET}">{_text(name)}</td><td style="{_CELL}">{_text(value)}</td></tr>'
        for name, value in fields.items()
        if value is not None and value != ""
    ]
    if rows:
        parts.append(f'<table style="{_TABLE}"><tbody>{"".join(rows)}</tbody></table>')
    if note:
        parts.append(f'<div style="{_QUIET};white-space:pre-wrap">{_text(note)}</div>')
    return f'<div style="{_BOX}">{"".join(parts)}</div>'


def table(title: str, rows: Sequence[Mapping[str, object]]) -> str:
    """The first `MAX_ROWS` rows, with the columns of all of these, and how many there are."""
    columns = list(dict.fromkeys(str(name) for row in rows[:MAX_ROWS] for name in row))
    head = "".join(f'<th scope="col" style="{_CELL}">{_text(name)}</th>' for name in columns)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{_text(row.get(name, ""))}</td>' for name in columns) + "</tr>"
        for row in rows[:MAX_ROWS]
    )
    counted = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
    omission = f", of which the first {MAX_ROWS} are here" if len(rows) > MAX_ROWS else ""
    heading = f"<strong>{_text(title)}</strong>: {counted}{omission}"
    caption = f'<caption style="text-align:left;padding-bottom:4px">{heading}'
    content = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>" if rows else ""
    return f'<div style="{_BOX};overflow-x:auto"><table style="{_TABLE}">{caption}</caption>{content}</table></div>'


def format_number(value: float | None) -> str:
    """Four digits; `-` for a value that is missing or not finite and so stored as null."""
    return "-" if value is None else f"{value:.4g}"


def text_bar(share: float) -> str:
    """A bar of characters."""
    filled = round(BAR_WIDTH * min(1.0, max(0.0, share)))
    return f"[{'#' * filled}{'-' * (BAR_WIDTH - filled)}]"


def _text(value: object) -> str:
    text = str(value)
    return html.escape(text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}... ({len(text)} characters)")


class LiveDisplay:
    """A place for the newest state of something: `show` replaces what is there, `close` leaves the last one. `stream`
    is the terminal, by default stderr.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._in_notebook = in_notebook()
        self._on_terminal = not self._in_notebook and self._stream.isatty()
        self._handle: Any = None
        self._shown_at = float("-inf")
        self._waiting: tuple[str, str] | None = None
        self._has_line = False

    def show(self, line: str, content: str) -> None:
        """Show a state: as `line` in a terminal, as the HTML `content` in a notebook. One that comes less than
        `EVERY_S` after another is shown by the next call."""
        self._waiting = line, content
        if time.monotonic() - self._shown_at >= EVERY_S:
            self._draw()

    def close(self) -> None:
        self._draw()
        if self._has_line:
            self._stream.write("\n")
            self._stream.flush()
            self._has_line = False

    def __enter__(self) -> LiveDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self) -> None:
        if self._waiting is None:
            return
        (line, content), self._waiting = self._waiting, None
        self._shown_at = time.monotonic()
        if self._on_terminal:
            columns = shutil.get_terminal_size().columns
            self._stream.write(f"\r{line[: columns - 1]}\x1b[K")
            self._stream.flush()
            self._has_line = True
        elif self._in_notebook:
            from IPython.display import display

            state = {"text/html": content, "text/plain": line}
            if self._handle is None:
                self._handle = display(state, raw=True, display_id=True)
            else:
                self._handle.update(state, raw=True)


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook, which has imported IPython."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")
