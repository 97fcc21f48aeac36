"""What a job's input was when its rows were counted, so that rows of two versions are never mixed.

A version has an entry for each thing that is read, by name: of a file its size and etag and, where it is small and on
this machine, its sha256, so that one that was only touched, or copied back, is the same. It is taken before the rows
are counted, kept in the job's specification, and held against the input by every mapper that starts: one of a job that
is resumed, that another server goes on with, or whose workers are replaced.

What has no version (rows in the job itself, tables, readers that name no file) is not checked here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from tinsmith.storage.locations import open_store
from tinsmith.storage.stores import LocalStore

Version = dict[str, dict[str, Any]]

MAX_FILES = 1000
"""Of more files, only their number, size and a digest of all their entries are kept."""
DIGESTED_BYTES = 64 * 1024 * 1024
"""So many bytes of one input are read for digests: some tenths of a second."""
ALL_FILES = "all files"


class InputChangedError(RuntimeError):
    """The input is not what the job began with."""


def of_files(locations: Iterable[str]) -> Version:
    """The version of these files now. Raises FileNotFoundError."""
    found: Version = {}
    left = DIGESTED_BYTES
    for location in locations:
        entry = _entry(location)
        if entry["size"] <= left and isinstance(open_store(location)[0], LocalStore):
            left -= entry["size"]
            entry["sha256"] = _digest(location)
        found[location] = entry
    return found if len(found) <= MAX_FILES else _summed(found)


def _entry(location: str) -> dict[str, Any]:
    store, key = open_store(location)
    info = store.head(key)
    return {"size": info.size, "etag": info.etag}


def _digest(location: str) -> str:
    store, key = open_store(location)
    digest = hashlib.sha256()
    for chunk in store.chunks(key):
        digest.update(chunk)
    return digest.hexdigest()


def _summed(files: Version) -> Version:
    digest = hashlib.sha256()
    for location, entry in files.items():
        digest.update(f"{location} {entry['size']} {entry['etag']}\n".encode())
    total = sum(entry["size"] for entry in files.values())
    return {ALL_FILES: {"files": len(files), "size": total, "digest": digest.hexdigest()}}


def check(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]] | None) -> None:
    """Raises InputChangedError, which names the first thing that is not what it was, and what it was and is."""
    for name in [*before, *(name for name in after or {} if name not in before)]:
        old, new = before.get(name), (after or {}).get(name)
        if old is None or new is None or not _same(old, new):
            raise InputChangedError(
                f"the input has changed since the job began: {name} was {_shown(old)}, and is {_shown(new)}. Rows of "
                "both versions would be mixed: restore the input and resume the job, or submit it as a new one"
            )


def _same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if "sha256" in old and "sha256" in new:
        return old["sha256"] == new["sha256"]
    return all(old.get(name) == new.get(name) for name in {*old, *new} - {"sha256"})


def _shown(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "not there"
    return "(" + ", ".join(f"{name} {value}" for name, value in entry.items()) + ")"
