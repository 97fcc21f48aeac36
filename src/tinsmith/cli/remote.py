"""Shared by the commands: output, refusals, and the client of the server's API.

As for the SDK, TINKER_BASE_URL is the server and TINKER_API_KEY the key. With `--json`, standard output contains only
JSON, with times in ISO 8601 and sizes in bytes; without it, times are local and sizes have units.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tinsmith.errors import SettingsError, TinsmithError
from tinsmith.runtime.sizes import format_bytes

if TYPE_CHECKING:
    from tinsmith.exchange.transfer import TinkerServer

T = TypeVar("T")

REFUSED = 2
"""Exit status of a command that was refused."""

INTERRUPTED = 130
"""Exit status if the user stopped waiting."""

output = Console(soft_wrap=True, highlight=False, emoji=False)
notes = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)

MAX_WIDTH = 1000
"""Width of the widest table, in characters."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def json_object(flag: str, text: str, noun: str = "a JSON object") -> dict[str, Any]:
    """Parse a flag. Raises SettingsError unless it is a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"{flag} is {text!r}, which is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise SettingsError(f"{flag} is {text!r}; it must be {noun}")
    return value


def plain_table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False)


def print_rows(as_json: bool, rows: Sequence[T], columns: Sequence[str], row: Callable[[T], Iterable[object]]) -> None:
    """Print a list: as JSON, or as a table of the cells that `row` makes of each. Only cells of `Text` have markup."""
    if as_json:
        print_json(rows)
        return
    table = plain_table(*columns)
    for item in rows:
        table.add_row(*(cell if isinstance(cell, Text) else escape(str(cell)) for cell in row(item)))
    print_table(table)


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=1))


def print_table(table: Table) -> None:
    """Print every cell in full, so that ids can be copied. A narrow terminal wraps the lines."""
    wide = Console(width=MAX_WIDTH, highlight=False, emoji=False)
    wide.print(table, width=Measurement.get(wide, wide.options, table).maximum)


@contextmanager
def server() -> Iterator[TinkerServer]:
    from tinsmith.exchange.transfer import TinkerServer
    from tinsmith.settings.environment import client_address

    client = TinkerServer(*client_address())
    try:
        yield client
    finally:
        client.close()


@contextmanager
def exit_on_errors(*kinds: type[Exception]) -> Iterator[None]:
    """End the command with one line and status 2 on an expected error, or one of `kinds`."""
    try:
        yield
    except (TinsmithError, OSError, *kinds) as error:
        notes.print(f"[red]error:[/] {escape(str(error))}")
        raise typer.Exit(REFUSED) from None


def print_result(as_json: bool, value: object, line: str) -> None:
    """Print one result."""
    if as_json:
        print_json(value)
    else:
        output.print(escape(line))


def format_time(iso: str | None) -> str:
    """Format an ISO time as local time to the minute; empty for None."""
    if not iso:
        return ""
    return datetime.fromisoformat(iso).astimezone().strftime("%Y-%m-%d %H:%M")


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units: `2 d 3 h`, `4 min 5 s`."""
    remaining_s, parts = round(seconds), []
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, remaining_s = divmod(remaining_s, unit_s)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else format_bytes(num_bytes)
