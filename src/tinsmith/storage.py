"""Directories of files that are complete or absent, and claims on files that end with their process.

A directory is filled under a hidden name, its files are checksummed in `manifest.json` and fsynced, and only then
is it renamed to its final, random name. Knows nothing of what the files mean.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO


class Directories:
    """Sealed directories below one root."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, name: str) -> Path:
        return self._root / name

    def write(self, fill: Callable[[Path], None]) -> tuple[str, int]:
        """Have `fill` write files into a fresh directory and make it durable. Returns (name, bytes)."""
        name = uuid.uuid4().hex
        self._root.mkdir(parents=True, exist_ok=True)
        hidden = self._root / f".{name}"
        hidden.mkdir()
        try:
            fill(hidden)
            size_bytes = _seal(hidden)
            hidden.rename(self._root / name)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        _fsync(self._root)
        return name, size_bytes

    def discard(self, name: str | None) -> None:
        """Remove a directory that no row names any more; None is ignored."""
        if name:
            shutil.rmtree(self._root / name, ignore_errors=True)


def claim(path: Path, *, wait: bool) -> IO[bytes] | None:
    """Hold `path` for this process alone until the result is closed; None if another one holds it.

    The kernel ends a claim with its process, however that dies; with `wait`, this waits for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _seal(directory: Path) -> int:
    """Write the manifest and fsync everything; returns the bytes of all files."""
    files: dict[str, dict[str, object]] = {}
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        files[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
    manifest = directory / "manifest.json"
    manifest.write_text(json.dumps({"format": 1, "files": files}, indent=1))
    _fsync(manifest)
    _fsync(directory)
    return sum(path.stat().st_size for path in directory.iterdir())


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
