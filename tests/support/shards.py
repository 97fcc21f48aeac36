"""Parts of `make test-extended` of about equal length, each of whole files: the tests of a file share its servers.

A part depends on the files alone, so that all parts together are every test once, on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

TEST = re.compile(r"^(?:async )?def test_", re.MULTILINE)
MODULE_MARK = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(smoke|slow|recipes)\b", re.MULTILINE)
EXTENDED_MARK = re.compile(r"mark\.(?:extended|matrix)\b")

SECONDS_PER_TEST = {"e2e": 6.0, "fault": 8.0, "cluster": 15.0, "fuzz": 5.0, "recipes": 1.0}
"""About how long a test takes of a directory that is extended as a whole."""

SECONDS_PER_MARK = 8.0
"""About how long the extended cases of a marked test take together, in the other directories and in smoke files."""

SECONDS = {
    "contract/test_isolation.py": 90.0,
    "fuzz/test_fuzz_http.py": 180.0,
    "fuzz/test_fuzz_wire.py": 60.0,
    "integration/test_settling.py": 60.0,
    "unit/test_tool_dialects.py": 60.0,
    "unit/test_start_check.py": 60.0,
}
"""About how long a file takes that has many extended cases of few tests."""


def estimate_seconds(name: str, text: str) -> float:
    """About how long the extended tests of a file take, whose path below tests/ is `name`; 0.1 at least."""
    if name in SECONDS:
        return SECONDS[name]
    mark = match[1] if (match := MODULE_MARK.search(text)) else ""
    if mark in ("slow", "recipes"):
        return 0.1
    seconds = SECONDS_PER_TEST.get(name.partition("/")[0])
    if seconds and mark != "smoke":
        return max(0.1, seconds * len(TEST.findall(text)))
    return max(0.1, SECONDS_PER_MARK * len(EXTENDED_MARK.findall(text)))


def divide(seconds: Mapping[str, float], count: int) -> list[set[str]]:
    """The names in `count` sets of about equal sums: each name, the longest first, goes to the least set so far."""
    sets: list[set[str]] = [set() for _ in range(count)]
    sums = [0.0] * count
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        least = sums.index(min(sums))
        sets[least].add(name)
        sums[least] += seconds[name]
    return sets


def parse(shard: str) -> tuple[int, int]:
    """The number of a shard, from 1, and the count of shards. ValueError names the form."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", shard)
    if not match or int(match[1]) > int(match[2]):
        raise ValueError(f"--shard {shard}: write it as 2/8, the second of eight")
    return int(match[1]), int(match[2])


def files_of(shard: str, directory: Path, paths: Iterable[Path]) -> set[Path]:
    """The files of `2/8`, among all test files of the directory tests/."""
    number, count = parse(shard)
    files = {path.relative_to(directory).as_posix(): path for path in paths}
    seconds = {name: estimate_seconds(name, path.read_text()) for name, path in files.items()}
    return {files[name] for name in divide(seconds, count)[number - 1]}
