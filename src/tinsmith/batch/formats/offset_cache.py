"""A cache of derived files: offsets of rows, and unpacked files that allow reads at any place.

Files are named by a digest of all that decides their contents: the source (location, etag and size) and, where a
reader rewrites it, the identity of the reader. So a changed input or a changed field is a new entry, and all jobs on a
machine share them. Files that were not used for a week are deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

UNUSED_S = 7 * 24 * 3600.0
SWEEP_S = 3600.0


def cache_directory() -> Path:
    """This user's own directory. Raises PermissionError if it belongs to another user."""
    directory = Path(tempfile.gettempdir()) / f"tinsmith-batch-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.lstat().st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user; set TMPDIR to a directory of your own")
    return directory


def cached(make: Callable[[Path], None], *names: str | int | None) -> Path:
    """The file that `make` writes for these names, unless it is cached. Two processes may write it at once."""
    directory = cache_directory()
    path = directory / hashlib.sha256(json.dumps(names).encode()).hexdigest()
    if path.exists():
        os.utime(path)
        return path
    _sweep(directory)
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        make(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _sweep(directory: Path) -> None:
    """Deletes files that were not used for a week, at most once in `SWEEP_S` however many files are added."""
    now, marker = time.time(), directory / ".swept"
    with contextlib.suppress(OSError):
        if now - marker.stat().st_mtime < SWEEP_S:
            return
    marker.touch()
    for path in directory.iterdir():
        with contextlib.suppress(OSError):
            if path.is_file() and path.stat().st_mtime < now - UNUSED_S:
                path.unlink()
