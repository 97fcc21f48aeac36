"""Sealed directories in a bucket, read through a cache on this machine's disk.

A directory is filled on the disk, its files are uploaded below its name, and the manifest is uploaded last: a directory
exists once its manifest does. Files that a dead process left without a manifest are swept by age. Readers download a
directory into the cache, verify each file's digest on the way, and read it there. The cache is disposable, since the
bucket has everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

import structlog

from tinsmith.errors import CorruptFilesError, SettingsError
from tinsmith.runtime.failpoints import hit
from tinsmith.settings.groups import StorageSettings
from tinsmith.storage.bucket_store import BucketStore
from tinsmith.storage.cache import Cache
from tinsmith.storage.directories import (
    MANIFEST,
    Directories,
    Manifest,
    Staged,
    manifest_text,
    read_manifest,
    write_manifest,
)
from tinsmith.storage.locations import open_store
from tinsmith.storage.stores import PART_BYTES, UnreachableError, join, split

if TYPE_CHECKING:
    pass


CACHED_MANIFESTS = 1024
"""Manifests cached in memory; they never change."""

log = structlog.get_logger()


class BucketDirectories(Directories):
    is_remote = True

    def __init__(self, location: str, cache: Cache) -> None:
        store, self._prefix = open_store(location.rstrip("/"))
        assert isinstance(store, BucketStore)
        self._store = store
        self._cache = cache
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()
        super().__init__(cache.root / PurePosixPath(self._prefix).name)

    def _key(self, name: str, file: str) -> str:
        return join(join(self._prefix, name), file)

    # Writing.

    def place(self, staged: Staged) -> tuple[str, int]:
        name, hidden = staged.name, staged.hidden
        paths = [path for path in sorted(hidden.iterdir()) if path.name != MANIFEST]
        try:
            size_bytes = sum(path.stat().st_size for path in hidden.iterdir())
            with self._cache.hold(hidden):
                for path in paths:
                    self._store.upload(path, self._key(name, path.name))
                hit(f"{self._root.name}.sealed")
                self._store.put(self._key(name, MANIFEST), (hidden / MANIFEST).read_bytes())
        except BaseException:
            self.discard(name)  # if this fails too, the files are swept later
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        hit(f"{self._root.name}.placed")
        try:
            hidden.rename(self._root / name)
            self._cache.make_room(0)
        except OSError as error:  # of the local disk; the directory in the bucket is complete
            log.warning("an uploaded directory could not be cached", directory=name, error=str(error))
            shutil.rmtree(hidden, ignore_errors=True)
        return name, size_bytes

    def copy(self, name: str) -> tuple[str, int]:
        """Make a durable directory with the same files, by server-side copies. Returns (name, bytes)."""
        self.check_sizes(name)
        files, target = self.files(name), uuid.uuid4().hex
        try:
            for file in (*files, MANIFEST):
                self._store.copy(self._key(name, file), self._key(target, file))
            manifest_bytes = self._store.head(self._key(target, MANIFEST)).size
        except FileNotFoundError as error:
            self.discard(target)
            raise CorruptFilesError(f"a file of {name} disappeared while it was copied") from error
        except BaseException:
            self.discard(target)
            raise
        return target, sum(files.values()) + manifest_bytes

    # Reading.

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        path, fetched = self._root / name, False
        while True:
            with self._cache.hold(path) as cached:
                if cached and (fetched or self._is_intact(name)):
                    yield path
                    return
            if cached:
                log.warning("a cached directory is damaged; downloading it again", directory=name)
                self._cache.remove(path)
            self._fetch(name)
            fetched = True

    def _is_intact(self, name: str) -> bool:
        try:
            Directories(self._root).check(name)
        except CorruptFilesError:
            return False
        return True

    def _fetch(self, name: str) -> None:
        """Download a directory into the cache. Raises CorruptFilesError that names the damaged file."""
        manifest = self._manifest(name)
        self._cache.make_room(sum(size_bytes for size_bytes, _ in manifest.values()) + len(manifest_text(manifest)))
        with self._cache.filling(self._root / name) as hidden:
            for file, (size_bytes, sha256) in manifest.items():
                try:
                    downloaded_bytes, digest = self._download(self._key(name, file), hidden / file)
                except FileNotFoundError as error:
                    raise CorruptFilesError(_truncation_message(file, size_bytes)) from error
                if downloaded_bytes != size_bytes:
                    raise CorruptFilesError(_truncation_message(file, size_bytes))
                if digest != sha256:
                    raise CorruptFilesError(f"{file} does not hold the bytes that were written (SHA-256 differs)")
            write_manifest(hidden, manifest)

    def _download(self, key: str, path: Path) -> tuple[int, str]:
        """Download an object; returns its size and SHA-256 digest."""
        digest, size_bytes = hashlib.sha256(), 0
        with self._store.open(key) as source, path.open("xb") as target:
            while chunk := source.read(PART_BYTES):
                digest.update(chunk)
                size_bytes += len(chunk)
                target.write(chunk)
        return size_bytes, digest.hexdigest()

    def file_path(self, name: str, file: str) -> Path | None:
        return None

    def open(self, name: str, file: str) -> IO[bytes]:
        return self._store.open(self._key(name, file))

    def check(self, name: str) -> None:
        with self.reading(name):
            pass

    def check_sizes(self, name: str) -> None:
        sizes = {entry.key: entry.size for entry in self._store.entries(join(self._prefix, name))}
        for file, size_bytes in self.files(name).items():
            if sizes.get(self._key(name, file)) != size_bytes:
                raise CorruptFilesError(_truncation_message(file, size_bytes))

    def _manifest(self, name: str) -> Manifest:
        if (manifest := self._manifests.get(name)) is not None:
            return manifest
        try:
            fetched = read_manifest(self._store.get(self._key(name, MANIFEST)))
        except FileNotFoundError as error:
            raise CorruptFilesError(f"{MANIFEST} cannot be read: it does not exist") from error
        self._manifests[name] = fetched
        while len(self._manifests) > CACHED_MANIFESTS:
            self._manifests.popitem(last=False)
        return fetched

    # Deleting.

    def old(self, age_s: float) -> list[str]:
        newest: dict[str, float] = {}
        for entry in self._store.entries(self._prefix):
            name = entry.key[len(self._prefix) + 1 :].partition("/")[0]
            newest[name] = max(entry.modified_at, newest.get(name, 0.0))
        before = time.time() - age_s
        return [name for name, modified_at in newest.items() if modified_at < before]

    def discard(self, name: str | None) -> None:
        if not name:
            return
        self._manifests.pop(name, None)
        self._cache.remove(self._root / name)
        try:
            self._store.delete_many([self._key(name, MANIFEST)])  # first: without it the directory does not exist
            self._store.delete_below(join(self._prefix, name))
        except UnreachableError as error:
            log.warning("a directory could not be deleted; a later sweep deletes it", directory=name, error=str(error))


def _truncation_message(file: str, size_bytes: int) -> str:
    return f"{file} is missing or was cut short: {size_bytes} bytes were written"


def open_directories(settings: StorageSettings, kind: str) -> Directories:
    """The directories of a kind, on the disk or in the bucket of the settings."""
    location = settings.storage_location(kind)
    if not settings.has_bucket:
        return Directories(Path(split(location)[2]))
    return BucketDirectories(location, Cache(settings.cache_dir, settings.storage_cache_bytes))


def check_reachable(settings: StorageSettings) -> None:
    """Raise SettingsError if the settings name a bucket that cannot be listed."""
    if not settings.has_bucket:
        return
    store, prefix = open_store(settings.storage_location("checkpoints"))
    try:
        next(store.entries(prefix), None)
    except UnreachableError as error:
        raise SettingsError(
            f"storage_dir is {settings.storage_dir!r}, which cannot be read; keys, region and endpoint come from AWS_* "
            f"or GOOGLE_* variables. {error}"
        ) from None
