"""Sealed directories: sets of files that are complete or absent, and file locks that end with their process.

A directory is filled under a hidden name, its files are checksummed in `manifest.json` and fsynced, and then it is
renamed to its final, random name. Its files never change afterwards, so copies may share them and readers can verify
them by the manifest. The contents of files are opaque.

`Directories` are on a disk, `buckets.BucketDirectories` in a bucket.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tinsmith.errors import CorruptFilesError, UserError
from tinsmith.runtime.failpoints import hit
from tinsmith.storage.stores import fsync, make_private

MANIFEST = "manifest.json"
Manifest = dict[str, tuple[int, str]]
"""Files of a directory by name, with size in bytes and SHA-256 digest."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A filled directory before its rename."""

    name: str
    hidden: Path


class Directories:
    """Sealed directories below one root."""

    is_remote = False
    """Whether `place` uploads the directory, which takes long; the files on the disk are then not made durable."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, name: str) -> Path:
        """The path of a directory on this disk, whether or not it exists."""
        return self._root / name

    def write(self, fill: Callable[[Path], None]) -> tuple[str, int]:
        """Have `fill` write files into a fresh directory and make it durable. Returns (name, bytes)."""
        return self.place(self.stage(fill))

    def stage(self, fill: Callable[[Path], None]) -> Staged:
        """Have `fill` write files into a hidden directory and seal it; `place` gives it its name."""

        def fill_and_seal(hidden: Path) -> None:
            fill(hidden)
            hit(f"{self._root.name}.writing")
            seal(hidden, durable=not self.is_remote)

        return self._fill_hidden(fill_and_seal)

    def _fill_hidden(self, fill: Callable[[Path], None]) -> Staged:
        name = uuid.uuid4().hex
        make_private(self._root)
        hidden = self._root / f".{name}"
        hidden.mkdir()
        try:
            fill(hidden)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        return Staged(name, hidden)

    def place(self, staged: Staged) -> tuple[str, int]:
        """Make a staged directory durable and rename it, on any thread. Returns (name, bytes)."""
        name, hidden = staged.name, staged.hidden
        try:
            fsync(hidden)
            size_bytes = sum(path.stat().st_size for path in hidden.iterdir())
            hit(f"{self._root.name}.sealed")
            hidden.rename(self._root / name)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        fsync(self._root)
        hit(f"{self._root.name}.placed")
        return name, size_bytes

    def copy(self, name: str) -> tuple[str, int]:
        """Make a durable directory with the same files, independent of the first. Returns (name, bytes).

        Files are hard links where the file system supports them, else copies. So is the manifest, so that damage in the
        source is detected in the copy.
        """
        source = self._root / name
        self.check_sizes(name)

        def fill(target: Path) -> None:
            for file in (*self.files(name), MANIFEST):
                try:
                    os.link(source / file, target / file)
                except OSError:  # too many links, or a file system without hard links
                    shutil.copyfile(source / file, target / file)
                fsync(target / file)

        try:
            return self.place(self._fill_hidden(fill))
        except FileNotFoundError as error:
            raise CorruptFilesError(f"{Path(error.filename).name} disappeared while it was copied") from error

    @contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        """The path of a directory with verified files, which can be read until the end of the block. Raises
        CorruptFilesError, or UnreachableError if the bucket does not answer.
        """
        self.check(name)
        yield self.path(name)

    def file_path(self, name: str, file: str) -> Path | None:
        """The path of a file, or None if it is in a bucket. `file` must be one of `files`."""
        return self._root / name / file

    def open(self, name: str, file: str) -> IO[bytes]:
        """Open a file for reading and seeking. `file` must be one of `files`. Raises FileNotFoundError."""
        return (self._root / name / file).open("rb")

    def files(self, name: str) -> dict[str, int]:
        """The sizes of the files by name, from the manifest. Raises CorruptFilesError if the manifest is unreadable."""
        return {file: size_bytes for file, (size_bytes, _) in self._manifest(name).items()}

    def digests(self, name: str) -> Mapping[str, tuple[int, str]]:
        """The sizes and SHA-256 digests of the files by name, from the manifest. Raises CorruptFilesError."""
        return self._manifest(name)

    def check_sizes(self, name: str) -> None:
        """A cheap check for missing and truncated files. Raises CorruptFilesError."""
        for file, size_bytes in self.files(name).items():
            path = self._root / name / file
            if path.is_symlink() or not path.is_file() or path.stat().st_size != size_bytes:
                raise CorruptFilesError(f"{file} is missing or was cut short: {size_bytes} bytes were written")

    def check(self, name: str) -> None:
        """Read every file and compare it with its digest. Raises CorruptFilesError."""
        self.check_sizes(name)
        for file, (_, sha256) in self._manifest(name).items():
            with (self._root / name / file).open("rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != sha256:
                    raise CorruptFilesError(f"{file} does not hold the bytes that were written (SHA-256 differs)")

    def _manifest(self, name: str) -> Manifest:
        try:
            return read_manifest((self._root / name / MANIFEST).read_bytes())
        except OSError as error:
            raise CorruptFilesError(f"{MANIFEST} cannot be read: {error!r}") from error

    def old(self, age_s: float) -> list[str]:
        """The names of directories, also incomplete ones, without writes for `age_s` seconds."""
        if not self._root.is_dir():
            return []
        before = time.time() - age_s
        return [path.name for path in self._root.iterdir() if path.is_dir() and _newest(path) < before]

    def discard_all(self, names: Iterable[str], *, but: Collection[str]) -> list[str]:
        """Remove the directories of `names` that are not in `but`; returns their names."""
        discarded = [name for name in names if name not in but]
        for name in discarded:
            self.discard(name)
        return discarded

    def discard(self, name: str | None) -> None:
        """Remove an unreferenced directory; None is ignored."""
        if name:
            shutil.rmtree(self._root / name, ignore_errors=True)


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A hidden directory beside `target` that is renamed to it at the end of the block, and removed on an error. Raises
    UserError if `target` exists.
    """
    if target.exists():
        raise UserError(f"{target} exists already; choose another directory, or delete it")
    target.parent.mkdir(parents=True, exist_ok=True)
    hidden = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    hidden.mkdir()
    try:
        yield hidden
        fsync(hidden)
        hidden.rename(target)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def claim(path: Path, *, wait: bool) -> IO[bytes] | None:
    """Lock `path` for this process until the result is closed; None if another process holds the lock.

    The kernel releases the lock when the process dies. With `wait`, waits for the lock.
    """
    make_private(path.parent)
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def seal(directory: Path, *, durable: bool) -> None:
    """Write the manifest of the files in `directory`; with `durable`, fsync them and the manifest."""
    manifest: Manifest = {}
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if durable:
                os.fsync(file.fileno())
        manifest[path.name] = path.stat().st_size, digest
    write_manifest(directory, manifest)
    if durable:
        fsync(directory / MANIFEST)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    (directory / MANIFEST).write_text(manifest_text(manifest))


def manifest_text(manifest: Manifest) -> str:
    files = {file: {"bytes": size_bytes, "sha256": sha256} for file, (size_bytes, sha256) in manifest.items()}
    return json.dumps({"format": 1, "files": files}, indent=1)


def read_manifest(text: bytes) -> Manifest:
    """Parse a manifest. Raises CorruptFilesError if it is malformed or names a file outside its directory."""
    try:
        files = json.loads(text)["files"]
        manifest = {file: (int(entry["bytes"]), str(entry["sha256"])) for file, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFilesError(f"{MANIFEST} cannot be read: {error!r}") from error
    if outside := [file for file in manifest if file != os.path.basename(file) or file in ("", ".", "..")]:
        raise CorruptFilesError(f"{MANIFEST} names {outside[0]!r}, which is outside its directory")
    return manifest


def _newest(directory: Path) -> float:
    """The time of a directory's last write, including its own: files that a copy shares are older than the copy."""
    try:
        return max(path.stat().st_mtime for path in (directory, *directory.iterdir()))
    except FileNotFoundError:  # removed or renamed concurrently
        return time.time()
