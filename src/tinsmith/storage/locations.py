"""Locations (paths and URLs) of settings and jobs: their stores, glob patterns and access restrictions.

A location is a path or a URL: `dir/file`, `file:///dir/file`, `s3://BUCKET/KEY`, `gs://BUCKET/KEY`, `memory://NAME/KEY`.
`open_store(location)` returns the store and the key in it. `confine` restricts the process to some locations.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache
from typing import IO, Any

from tinsmith.errors import ForbiddenError
from tinsmith.storage.stores import CHUNK_BYTES, RETRIES, LocalStore, Store, split

_confines: tuple[str, ...] | None = None


def confine(roots: Iterable[str]) -> None:
    """Restrict this process to locations at or below `roots`, after links are resolved."""
    global _confines
    _confines = tuple(roots)


def is_below(location: str, roots: Iterable[str]) -> bool:
    """Whether a location, which need not exist, is at or below a root after `..` and links are resolved."""
    target = _resolve(location)
    return any(
        target[:2] == root[:2] and (target[2] == root[2] or not root[2] or target[2].startswith(f"{root[2]}/"))
        for root in map(_resolve, roots)
    )


def _resolve(location: str) -> tuple[str, str, str]:
    scheme, bucket, key = split(location)
    if scheme == "file":
        return scheme, bucket, os.path.realpath(key).rstrip("/")
    # A key is not a path: programs interpret `..` in it differently, so such a key counts as the whole bucket.
    return scheme, bucket, "" if ".." in key.split("/") else key.rstrip("/")


def open_store(location: str) -> tuple[Store, str]:
    """The store of a path or URL, and the key in it. Raises UserError for an unsupported scheme, and ForbiddenError for
    a location that this process may not open."""
    scheme, bucket, key = split(location)
    if _confines is not None and not is_below(location, _confines):
        raise ForbiddenError(f"{location!r} is outside the locations that this bulk job may read and write")
    if scheme == "file":
        return _local, key
    return _bucket_store(scheme, bucket), key


def open_object(location: str) -> IO[bytes]:
    """Open a location for reading and seeking, with a small buffer, since many may be open at once."""
    store, key = open_store(location)
    return store.open(key, CHUNK_BYTES)


def locations(pattern: str) -> list[str]:
    """The sorted locations that match a pattern with `*`, `?`, `[...]` or a final slash; else `[pattern]`."""
    from fnmatch import fnmatchcase

    if not any(mark in pattern for mark in "*?[") and not pattern.endswith("/"):
        return [pattern]
    glob = f"{pattern}*" if pattern.endswith("/") else pattern
    store, key = open_store(glob)
    fixed = key[: min(key.index(mark) for mark in "*?[" if mark in key)]
    root = fixed.rpartition("/")[0] or ("/" if key.startswith("/") else "")
    prefix = glob[: len(glob) - len(key)] if "://" in glob and not glob.startswith("file:") else ""
    depth = key.count("/")
    names = sorted(
        name
        for name in store.list(root)
        if fnmatchcase(name, key) and ("**" in key or name.count("/") == depth) and not _hidden(name[len(root) :])
    )
    return [prefix + name for name in names]


def _hidden(name: str) -> bool:
    """Whether a name is that of a hidden or temporary file."""
    return any(part.startswith((".", "_")) for part in name.split("/"))


@lru_cache(maxsize=64)
def _bucket_store(scheme: str, bucket: str) -> Store:
    from obstore import store as obstores

    from tinsmith.storage.bucket_store import BucketStore

    if scheme == "memory":
        return BucketStore(obstores.MemoryStore())
    from tinsmith.settings.environment import storage_endpoints

    endpoints = storage_endpoints()
    retries: Any = RETRIES
    if scheme == "s3":
        options: dict[str, Any] = {}
        if endpoint := endpoints.get("s3"):
            options = {"endpoint": endpoint, "client_options": {"allow_http": endpoint.startswith("http://")}}
        return BucketStore(obstores.S3Store(bucket, retry_config=retries, **options))
    options = {}
    if endpoint := endpoints.get("gs"):
        # An emulator needs no credentials.
        key = f'{{"gcs_base_url": "{endpoint}", "disable_oauth": true, "client_email": "", "private_key": "", '
        options = {
            "service_account_key": key + '"private_key_id": ""}',
            "client_options": {"allow_http": endpoint.startswith("http://")},
        }
    return BucketStore(obstores.GCSStore(bucket, retry_config=retries, **options))


_local = LocalStore()
