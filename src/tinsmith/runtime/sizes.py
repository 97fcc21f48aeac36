"""Sizes of memory, files and bodies for people: one form in messages, in the CLI and, as `format.js`, in pages.

A size has binary units and one decimal, as in `1.5 GiB`; bytes are whole. JSON, and limits that a message compares with
a setting in bytes, have plain numbers. Users write sizes with binary or decimal units: `24GiB`, `80GB`.
"""

from __future__ import annotations

from pydantic import ByteSize, TypeAdapter, ValidationError

MEBIBYTE = 2**20
GIBIBYTE = 2**30

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

_NEXT_UNIT_FROM = 1023.95
"""A value from here on would be rounded to 1024.0, which is 1.0 of the next unit."""


def format_bytes(num_bytes: float) -> str:
    """Format a size in the largest unit of which it has at least one: `0 B`, `1.0 KiB`, `131.4 GiB`."""
    remaining, unit = float(num_bytes), 0
    while abs(remaining) >= _NEXT_UNIT_FROM and unit < len(UNITS) - 1:
        remaining /= 1024
        unit += 1
    return f"{remaining:.1f} {UNITS[unit]}" if unit else f"{round(remaining)} B"


def parse_bytes(text: str) -> int:
    """Parse a size with a binary or decimal unit; a plain number is in bytes.

    Raises ValueError if it is not a positive size.
    """
    try:
        num_bytes = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        raise ValueError(f"{text!r} is not a size") from error
    if num_bytes <= 0:
        raise ValueError(f"{text!r} is not a positive size")
    return num_bytes
