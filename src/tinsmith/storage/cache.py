"""A bounded LRU cache of a bucket's directories on the local disk, shared by the processes of this machine.

Invariants:
- A directory under its final name is complete: it appears and disappears by a rename.
- A directory that is being read is not evicted: its readers hold a kernel lock on it until they end, and eviction skips
  locked directories.
- The cache is disposable. Readers detect damage by the manifest.

The root has one directory for each kind, which contains the bucket's directories.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tinsmith.storage.stores import make_private

ABANDONED_S = 3600.0
"""An unlocked hidden directory of this age was left by a dead process; a younger one may still be filled."""


@dataclass(frozen=True, slots=True)
class _CachedDirectory:
    path: Path
    size_bytes: int
    read_at: float


class Cache:
    def __init__(self, root: Path, max_bytes: int) -> None:
        self.root = root
        self._max_bytes = max_bytes

    @contextlib.contextmanager
    def hold(self, path: Path) -> Iterator[bool]:
        """Protect a directory from eviction until the end of the block; yields False if it is not cached."""
        descriptor = _lock(path, fcntl.LOCK_SH)
        if descriptor is None:
            yield False
            return
        try:
            with contextlib.suppress(OSError):
                os.utime(path)
            yield True
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def filling(self, path: Path) -> Iterator[Path]:
        """A hidden directory that is renamed to `path` at the end of the block, unless `path` exists by then."""
        make_private(path.parent)
        hidden = path.parent / f".{path.name}.{uuid.uuid4().hex}"
        hidden.mkdir()
        try:
            with self.hold(hidden):
                yield hidden
                with contextlib.suppress(OSError):  # another process has cached the same files first
                    hidden.rename(path)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)

    def make_room(self, needed_bytes: int) -> None:
        """Evict the least recently read directories until `needed_bytes` fit, or until all others are in use."""
        cached = sorted(self._cached(), key=lambda directory: directory.read_at)
        excess = sum(directory.size_bytes for directory in cached) + needed_bytes - self._max_bytes
        for directory in cached:
            is_abandoned = directory.path.name.startswith(".") and directory.read_at < time.time() - ABANDONED_S
            if excess <= 0 and not is_abandoned:
                continue
            if (is_abandoned or not directory.path.name.startswith(".")) and self.remove(directory.path):
                excess -= directory.size_bytes

    def remove(self, path: Path) -> bool:
        """Remove a directory; returns False if it is being read."""
        descriptor = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if descriptor is None:
            return not path.exists()
        hidden = path.parent / f".{uuid.uuid4().hex}"
        try:
            path.rename(hidden)
        except FileNotFoundError:
            return True
        finally:
            os.close(descriptor)
        shutil.rmtree(hidden, ignore_errors=True)
        return True

    def _cached(self) -> Iterator[_CachedDirectory]:
        for kind in _directories(self.root):
            for path in _directories(kind):
                try:
                    sizes = [file.stat().st_size for file in path.iterdir()]
                    yield _CachedDirectory(path, sum(sizes), path.stat().st_mtime)
                except FileNotFoundError:  # it is being removed
                    continue


def _directories(root: Path) -> list[Path]:
    try:
        return [path for path in root.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []


def _lock(path: Path, how: int) -> int | None:
    """A descriptor that holds the lock of a directory; None if it does not exist or is locked."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, how)
            if _is_same_file(path, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the directory was replaced or removed before it was locked


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
