"""The version of a job's input, so that rows of two versions are never mixed.

A version has an entry for each file: its size and etag and, where it is small and on this machine, its sha256, so that
a file that was only touched, or copied back, is the same. It is taken before the rows are counted, stored in the job's
specification, and compared with the input by every mapper that starts, also of a job that is resumed, that another
server continues, or whose workers are replaced.

Rows in the job itself, tables, and readers that name no file have no version and are not checked here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from tinsmith.storage.locations import open_store
from tinsmith.storage.stores import LocalStore

Version = dict[str, dict[str, Any]]

MAX_FILES = 1000
"""For more files, the version holds only their number, size and a digest of all entries."""
DIGESTED_BYTES = 64 * 1024 * 1024
"""The most bytes of one input that are read for digests."""
ALL_FILES = "all files"


class InputChangedError(RuntimeError):
    """The input has changed since the job began."""


def of_files(locations: Iterable[str]) -> Version:
    """The version of these files now. Raises FileNotFoundError."""
    version: Version = {}
    remaining_bytes = DIGESTED_BYTES
    for location in locations:
        store, key = open_store(location)
        info = store.head(key)
        version[location] = {"size": info.size, "etag": info.etag}
        if info.size <= remaining_bytes and isinstance(store, LocalStore):
            remaining_bytes -= info.size
            version[location]["sha256"] = store.digest(key)
    return version if len(version) <= MAX_FILES else _summarize(version)


def _summarize(files: Version) -> Version:
    digest = hashlib.sha256()
    for location, entry in files.items():
        digest.update(f"{location} {entry['size']} {entry['etag']}\n".encode())
    total = sum(entry["size"] for entry in files.values())
    return {ALL_FILES: {"files": len(files), "size": total, "digest": digest.hexdigest()}}


def check(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]] | None) -> None:
    """Raises InputChangedError that names the first changed file, its old and its new version."""
    for name in [*before, *(name for name in after or {} if name not in before)]:
        old, new = before.get(name), (after or {}).get(name)
        if old is None or new is None or not _same(old, new):
            raise InputChangedError(
                f"the input has changed since the job began: {name} was {_format_entry(old)}, and is "
                f"{_format_entry(new)}. Rows of both versions would be mixed: restore the input and resume the job, or "
                "submit it as a new one"
            )


def _same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if "sha256" in old and "sha256" in new:
        return old["sha256"] == new["sha256"]
    return all(old.get(name) == new.get(name) for name in {*old, *new} - {"sha256"})


def _format_entry(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "not there"
    return "(" + ", ".join(f"{name} {value}" for name, value in entry.items()) + ")"
