"""What the commands share: how they print and refuse, and the client of those that talk to a server.

The server is TINKER_BASE_URL and the key TINKER_API_KEY, as for the SDK. With `--json`, standard output holds JSON
alone, with times in ISO 8601 and sizes in bytes; without it, times are local and sizes have units.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from tinsmith.errors import TinsmithError

if TYPE_CHECKING:
    from tinsmith.exchange.transfer import TinkerServer

REFUSED = 2
"""Exit status of a command that was refused."""

INTERRUPTED = 130
"""Exit status if the user stopped waiting."""

output = Console(soft_wrap=True, highlight=False, emoji=False)
notes = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def server() -> Iterator[TinkerServer]:
    from tinsmith import settings
    from tinsmith.exchange.transfer import TinkerServer

    found = TinkerServer(*settings.client_address())
    try:
        yield found
    finally:
        found.close()


@contextmanager
def refusals() -> Iterator[None]:
    """An expected error ends the command with one line and status 2."""
    try:
        yield
    except (TinsmithError, OSError) as error:
        notes.print(f"[red]error:[/] {escape(str(error))}")
        raise typer.Exit(REFUSED) from None


def say(as_json: bool, value: object, line: str) -> None:
    """Print one result."""
    if as_json:
        typer.echo(json.dumps(value, indent=1))
    else:
        output.print(escape(line))


def moment(iso: str | None) -> str:
    """A time of the wire, in local time to the minute; empty for None."""
    if not iso:
        return ""
    return datetime.fromisoformat(iso).astimezone().strftime("%Y-%m-%d %H:%M")


def size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else decimal(num_bytes)
