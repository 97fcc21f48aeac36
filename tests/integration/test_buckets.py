"""Directories in a bucket keep the guarantees of local ones (test_storage.py), with a cache that may be lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import buckets
from support.buckets import Bucket
from support.live import free_port
from tinsmith.errors import CorruptFilesError
from tinsmith.storage import stores
from tinsmith.storage.buckets import BucketDirectories
from tinsmith.storage.cache import ABANDONED_S, Cache
from tinsmith.storage.directories import Directories
from tinsmith.storage.locations import open_store
from tinsmith.storage.stores import PART_BYTES, UnreachableError

LARGE = os.urandom(PART_BYTES + 12345)


@pytest.fixture(scope="module", params=["s3", pytest.param("gs", marks=pytest.mark.extended)])
def bucket(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    if request.param == "s3":
        with buckets.bucket() as new_bucket:
            yield new_bucket
    else:
        with buckets.cloud_bucket() as (new_bucket, _):
            yield new_bucket


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return f"{tmp_path.name}/versions"


@pytest.fixture
def directories(bucket: Bucket, prefix: str, tmp_path: Path) -> BucketDirectories:
    return machine(bucket, prefix, tmp_path / "one")


def machine(bucket: Bucket, prefix: str, data_dir: Path, max_bytes: int = 1 << 30) -> BucketDirectories:
    return BucketDirectories(f"{bucket.url}/{prefix}", Cache(data_dir / "cache", max_bytes))


def fill(directory: Path) -> None:
    (directory / "a").write_bytes(b"one")
    (directory / "b").write_bytes(b"two and three")


def content(directories: Directories, name: str) -> dict[str, bytes]:
    with directories.reading(name) as path:
        return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "manifest.json"}


FILLED = {"a": b"one", "b": b"two and three"}


def test_another_machine_reads_what_this_one_wrote(bucket: Bucket, prefix: str, tmp_path: Path) -> None:
    first, other = machine(bucket, prefix, tmp_path / "one"), machine(bucket, prefix, tmp_path / "other")
    name, size_bytes = first.write(fill)
    assert bucket.keys(prefix) == [f"{prefix}/{name}/{file}" for file in ("a", "b", "manifest.json")]
    assert size_bytes == sum(len(bucket.get(key)) for key in bucket.keys(prefix))
    assert content(other, name) == content(first, name) == FILLED
    assert other.files(name) == {"a": 3, "b": 13}
    assert other.digests(name) == Directories(tmp_path / "one/cache/versions").digests(name)
    other.check(name)
    other.check_sizes(name)
    other.discard(name)
    assert bucket.keys(prefix) == []
    with pytest.raises(CorruptFilesError, match=r"manifest\.json cannot be read"):
        machine(bucket, prefix, tmp_path / "third").check(name)


def test_a_large_file_goes_in_pieces_and_comes_back_in_pieces(
    bucket: Bucket, prefix: str, directories: BucketDirectories, tmp_path: Path
) -> None:
    name, _ = directories.write(lambda path: (path / "large").write_bytes(LARGE) and None)
    other = machine(bucket, prefix, tmp_path / "other")
    assert content(other, name) == {"large": LARGE}
    with other.open(name, "large") as file:
        file.seek(PART_BYTES - 3)
        assert file.read(10) == LARGE[PART_BYTES - 3 : PART_BYTES + 7]
        file.seek(-4, os.SEEK_END)
        assert file.read() == LARGE[-4:]
    copied, _ = directories.copy(name)
    directories.discard(name)
    assert content(other, copied) == {"large": LARGE}


def test_a_directory_is_there_when_its_manifest_is(
    bucket: Bucket, prefix: str, directories: BucketDirectories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[list[str]] = []
    put = type(directories._store).put

    def look(store: object, key: str, data: bytes) -> str | None:
        before.append([key.rpartition("/")[2] for key in bucket.keys(prefix)])
        return put(store, key, data)  # type: ignore[arg-type]

    monkeypatch.setattr(type(directories._store), "put", look)
    directories.write(fill)
    assert before == [["a", "b"]]


KILLED = """
import sys, pathlib
from tinsmith.runtime import failpoints
from tinsmith.storage.buckets import BucketDirectories
from tinsmith.storage.cache import Cache
data_dir = pathlib.Path(sys.argv[2])
failpoints.arm(sys.argv[3], "engine", data_dir, lambda: [])
def fill(path):
    (path / "a").write_bytes(b"one")
BucketDirectories(sys.argv[1], Cache(data_dir / "cache", 1 << 30)).write(fill)
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("point", "expected_files"),
    [("versions.writing", []), ("versions.sealed", ["a"]), ("versions.placed", ["a", "manifest.json"])],
)
def test_a_killed_writers_files_are_complete_or_swept(
    bucket: Bucket, prefix: str, tmp_path: Path, point: str, expected_files: list[str]
) -> None:
    data_dir = tmp_path / "one"
    data_dir.mkdir()
    command = [sys.executable, "-c", KILLED, f"{bucket.url}/{prefix}", str(data_dir), point]
    assert subprocess.run(command, check=False).returncode == -9
    assert [key.rpartition("/")[2] for key in bucket.keys(prefix)] == expected_files
    after = machine(bucket, prefix, tmp_path / "other")
    assert len(after.old(-60)) == bool(expected_files)
    assert after.old(60) == []
    for name in after.old(-60):
        if expected_files[-1] == "manifest.json":
            assert content(after, name) == {"a": b"one"}
        else:
            with pytest.raises(CorruptFilesError, match=r"manifest\.json cannot be read"):
                after.check(name)
    after.discard_all(after.old(-60), but=())
    assert bucket.keys(prefix) == []


def test_a_write_that_fails_leaves_nothing(
    bucket: Bucket, prefix: str, directories: BucketDirectories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_store: object, key: str, _data: bytes) -> None:
        raise OSError(5, key)

    monkeypatch.setattr(type(directories._store), "put", refuse)
    with pytest.raises(OSError, match=r"manifest\.json"):
        directories.write(fill)
    assert bucket.keys(prefix) == []
    assert list((tmp_path / "one/cache/versions").iterdir()) == []


def test_damage_in_the_bucket_is_named(bucket: Bucket, prefix: str, tmp_path: Path) -> None:
    writer = machine(bucket, prefix, tmp_path / "one")

    def write_damaged(file: str, data: bytes | None) -> BucketDirectories:
        name, _ = writer.write(fill)
        key = f"{prefix}/{name}/{file}"
        bucket.delete(key) if data is None else bucket.put(key, data)
        names.append(name)
        return machine(bucket, prefix, tmp_path / "other")

    names: list[str] = []
    with pytest.raises(CorruptFilesError, match="b is missing or was cut short: 13 bytes"):
        write_damaged("b", None).check(names[-1])
    with pytest.raises(CorruptFilesError, match="b is missing or was cut short: 13 bytes"):
        write_damaged("b", b"two").check(names[-1])
    with pytest.raises(CorruptFilesError, match="b is missing or was cut short: 13 bytes"):
        write_damaged("b", b"two").check_sizes(names[-1])
    with pytest.raises(CorruptFilesError, match=r"b does not hold the bytes .*SHA-256"):
        write_damaged("b", b"two and thrEe").check(names[-1])
    write_damaged("b", b"two and thrEe").check_sizes(names[-1])
    with pytest.raises(CorruptFilesError, match=r"manifest\.json cannot be read"):
        write_damaged("manifest.json", b"{").check(names[-1])
    outside = json.dumps({"files": {"../b": {"bytes": 1, "sha256": ""}}}).encode()
    with pytest.raises(CorruptFilesError, match="outside its directory"):
        write_damaged("manifest.json", outside).check(names[-1])
    reader = machine(bucket, prefix, tmp_path / "other")
    assert list((tmp_path / "other/cache/versions").iterdir()) == [], "nothing damaged is kept"
    with pytest.raises(CorruptFilesError, match="b is missing"):
        reader.copy(names[0])


def test_damage_in_the_cache_is_repaired_from_the_bucket(directories: BucketDirectories, tmp_path: Path) -> None:
    name, _ = directories.write(fill)
    cached = tmp_path / "one/cache/versions" / name
    (cached / "b").write_bytes(b"two and thrEe")
    assert content(directories, name) == FILLED
    assert (cached / "b").read_bytes() == b"two and three"


@pytest.mark.parametrize("missing", ["server", "bucket"])
def test_a_bucket_that_does_not_answer_is_not_taken_for_damage(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(stores.RETRIES, "max_retries", 1)
    if missing == "server":
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    nowhere = BucketDirectories(f"s3://no-{missing}-{bucket.name}/p/versions", Cache(tmp_path / "cache", 1 << 30))
    with pytest.raises(UnreachableError, match=r"object store|bucket does not exist"):
        nowhere.check("name")
    with pytest.raises(UnreachableError, match=r"object store|bucket does not exist"):
        nowhere.write(fill)
    with pytest.raises(UnreachableError, match=r"object store|bucket does not exist"):
        nowhere.check_sizes("name")
    with pytest.raises(UnreachableError, match=r"object store|bucket does not exist"):
        nowhere.old(0)
    nowhere.discard("name")
    assert list((tmp_path / "cache/versions").iterdir()) == []


# The cache.


def room(count: int) -> int:
    """The bytes of this many directories of `fill`."""
    return count * 300


def cached(data_dir: Path) -> set[str]:
    return {path.name for path in (data_dir / "cache/versions").iterdir()}


def test_the_cache_is_bounded_and_evicts_the_least_recently_read(bucket: Bucket, prefix: str, tmp_path: Path) -> None:
    writer = machine(bucket, prefix, tmp_path / "one")
    names = [writer.write(fill)[0] for _ in range(4)]
    reader = machine(bucket, prefix, tmp_path / "two", room(3))
    for name in names[:3]:
        reader.check(name)
    for age, name in zip((30, 20, 10), names, strict=False):
        os.utime(tmp_path / "two/cache/versions" / name, (time.time() - age,) * 2)
    reader.check(names[0])
    reader.check(names[3])
    assert names[1] not in cached(tmp_path / "two")
    assert {names[0], names[3]} <= cached(tmp_path / "two")
    assert content(reader, names[1]) == FILLED, "it is fetched again"


def test_files_being_read_stay_in_any_cache(bucket: Bucket, prefix: str, tmp_path: Path) -> None:
    writer = machine(bucket, prefix, tmp_path / "one")
    read_directory, other = writer.write(fill)[0], writer.write(fill)[0]
    first, second = (machine(bucket, prefix, tmp_path / "two", 1) for _ in range(2))
    with first.reading(read_directory) as path:
        second.check(other)
        assert (path / "b").read_bytes() == b"two and three"
        assert read_directory in cached(tmp_path / "two")
    second.discard(other)
    first._cache.make_room(0)
    assert cached(tmp_path / "two") == set()


def test_a_dead_processs_cache_files_are_deleted(directories: BucketDirectories, tmp_path: Path) -> None:
    root = tmp_path / "one/cache/versions"
    abandoned, fresh = root / ".left", root / ".fresh"
    for path in (abandoned, fresh):
        path.mkdir(parents=True)
    os.utime(abandoned, (time.time() - ABANDONED_S - 60,) * 2)
    directories.write(fill)
    assert not abandoned.exists() and fresh.exists()


def read_often(url: str, data_dir: Path, names: list[str]) -> None:
    directories = BucketDirectories(url, Cache(data_dir / "cache", room(2)))
    for turn in range(6):
        for name in names[turn % 2 :: 2]:
            assert content(directories, name) == FILLED


@pytest.mark.extended
def test_processes_share_a_cache_that_is_too_small_for_them(bucket: Bucket, prefix: str, tmp_path: Path) -> None:
    writer = machine(bucket, prefix, tmp_path / "one")
    names = [writer.write(fill)[0] for _ in range(4)]
    process_arguments = (f"{bucket.url}/{prefix}", tmp_path / "two", names)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=read_often, args=process_arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert not [name for name in cached(tmp_path / "two") if name.startswith(".")]


# Objects.


def test_two_names_may_have_one_object(bucket: Bucket, tmp_path: Path) -> None:
    for base in (f"{bucket.url}/{tmp_path.name}", str(tmp_path)):
        store, first = open_store(f"{base}/first")
        _, second = open_store(f"{base}/deep/second")
        store.put(first, b"once")
        store.share(first, second)
        store.put(first, b"again")
        assert store.get(second) == b"once"
        with pytest.raises(FileNotFoundError):
            store.share(f"{first}-missing", second)
        assert sorted(entry.size for entry in store.entries(open_store(base)[1])) == [4, 5]
        with pytest.raises(FileNotFoundError):
            store.open(f"{first}-missing").read()
