"""Sizes in texts for people."""

from __future__ import annotations

import pytest

from tinsmith.runtime.sizes import format_bytes, parse_bytes

GIBIBYTE = 2**30


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1048575, "1.0 MiB"),  # not 1024.0 KiB
        (1.5 * GIBIBYTE, "1.5 GiB"),
        (131.4 * GIBIBYTE, "131.4 GiB"),
        (5000 * 2**40, "5000.0 TiB"),
        (-2 * 2**20, "-2.0 MiB"),
    ],
)
def test_a_size_has_the_largest_unit_that_fits(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_a_size_is_written_with_binary_or_decimal_units() -> None:
    assert parse_bytes("24GiB") == 24 * GIBIBYTE and parse_bytes("80GB") == 80 * 10**9 and parse_bytes("5") == 5


@pytest.mark.parametrize("text", ["much", "0", "-1GB", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)
