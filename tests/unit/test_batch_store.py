"""The store: the same promises on the local disk, in memory and on S3."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinsmith.batch.formats import registry
from tinsmith.batch.formats.images import ImageWriter
from tinsmith.batch.formats.lines import JsonReader, JsonWriter
from tinsmith.batch.types import Assignment, RowRange
from tinsmith.errors import CorruptFilesError, UserError
from tinsmith.storage.locations import locations, open_store
from tinsmith.storage.stores import PIECE_BYTES, Source, join, split

BUCKET = "rows"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """An S3 API on loopback; its URL."""
    import boto3
    from moto.server import ThreadedMotoServer

    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
        }.items():
            environment.setenv(name, value)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        environment.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}"
        server.stop()


@pytest.fixture(params=["file", "url", "memory", "s3"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A directory of this test alone, in each store."""
    name = tmp_path.name
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{name}"
    return {"file": str(tmp_path), "url": f"file://{tmp_path}", "memory": f"memory://m/{name}"}[request.param]


def test_a_new_object_replaces_nothing(base: str) -> None:
    store, key = open_store(f"{base}/a/b.bin")
    store.put_create(key, b"one")
    store.put_create(key, b"one")  # the same again is the retry of a request whose answer was lost
    with pytest.raises(FileExistsError):
        store.put_create(key, b"two")
    assert store.get(key) == b"one"
    store.put(key, b"two")
    assert store.get(key) == b"two"


def test_ranges_heads_lists_copies_and_deletions(base: str) -> None:
    store, key = open_store(f"{base}/in/a.bin")
    store.put(key, bytes(range(100)))
    assert store.get_range(key, 10, 13) == bytes([10, 11, 12])
    assert store.get_ranges(key, [(0, 2), (5, 5), (98, 100)]) == [b"\0\1", b"", b"bc"]
    assert store.head(key).size == 100 and store.exists(key)
    assert b"".join(store.chunks(key)) == bytes(range(100))
    _, other = open_store(f"{base}/in/deep/b.bin")
    store.copy(key, other)
    _, root = open_store(f"{base}/in")
    assert sorted(store.list(root)) == sorted([key, other])
    store.delete_many([key, key + "-missing"])
    assert not store.exists(key)
    with pytest.raises(FileNotFoundError):
        store.head(key)
    store.delete_below(root)
    assert list(store.list(root)) == []


@pytest.mark.parametrize("size", [0, 10, PIECE_BYTES + 5])
def test_what_is_written_in_pieces_appears_whole_at_the_end(base: str, size: int) -> None:
    store, key = open_store(f"{base}/w.bin")
    data = bytes(size)
    with store.open_writer(key) as writer:
        for start in range(0, size, 1_000_003):
            writer.write(data[start : start + 1_000_003])
        assert not store.exists(key)
    assert store.get(key) == data


@pytest.mark.parametrize("size", [10, PIECE_BYTES + 5])
def test_a_writer_that_fails_leaves_nothing(base: str, size: int) -> None:
    store, key = open_store(f"{base}/w.bin")
    with pytest.raises(RuntimeError), store.open_writer(key) as writer:
        writer.write(bytes(size))
        raise RuntimeError
    _, root = open_store(base)
    assert list(store.list(root)) == []


@pytest.mark.parametrize("size", [10, PIECE_BYTES + 5])
def test_an_exclusive_writer_replaces_nothing(base: str, size: int) -> None:
    store, key = open_store(f"{base}/w.bin")
    store.put(key, b"mine")
    with pytest.raises(FileExistsError), store.open_writer(key, exclusive=True) as writer:
        writer.write(bytes(size))
    assert store.get(key) == b"mine"


def test_joining_checks_each_source_and_shows_nothing_if_one_is_wrong(base: str) -> None:
    store, key = open_store(f"{base}/whole")
    sources = []
    for name, data in [("1", b"head,one"), ("2", b"head,two")]:
        _, part = open_store(f"{base}/{name}")
        store.put(part, data)
        sources.append(Source(store, part, hashlib.sha256(data).hexdigest(), skip=5))
    size, digest = store.concat(sources, key, head=b"H:", exclusive=True)
    assert store.get(key) == b"H:onetwo"
    assert (size, digest) == (8, hashlib.sha256(b"H:onetwo").hexdigest())
    store.put(sources[1].key, b"head,TWO")
    _, other = open_store(f"{base}/other")
    with pytest.raises(CorruptFilesError, match="SHA-256"):
        store.concat(sources, other, exclusive=False)
    assert not store.exists(other)


def test_patterns_and_directories_name_their_files_in_order(base: str) -> None:
    for name in ("in/b.jsonl", "in/a.jsonl", "in/c.txt", "in/.hidden.jsonl", "in/deep/d.jsonl", "in/_SUCCESS"):
        store, key = open_store(f"{base}/{name}")
        store.put(key, b"{}")
    assert [name.rpartition("/")[2] for name in locations(f"{base}/in/*.jsonl")] == ["a.jsonl", "b.jsonl"]
    assert [name.rpartition("/")[2] for name in locations(f"{base}/in/")] == ["a.jsonl", "b.jsonl", "c.txt"]
    assert [name.rpartition("/")[2] for name in locations(f"{base}/in/**.jsonl")] == ["a.jsonl", "b.jsonl", "d.jsonl"]
    assert locations(f"{base}/in/missing.jsonl") == [f"{base}/in/missing.jsonl"]


def test_rows_go_through_every_store(base: str) -> None:
    rows = [{"text": f"row {index}", "n": index} for index in range(10)]
    writer = JsonWriter(f"{base}/out.jsonl")
    parts = [
        writer.write_part(rows[start : start + 4], RowRange(start, min(start + 3, 9)), f"{base}/tmp/attempt-1")
        for start in (0, 4, 8)
    ]
    info = writer.publish(parts, f"{base}/tmp", "error")
    assert writer.publish(parts, f"{base}/tmp", "error").sha256 == info.sha256, "publishing again is no error"
    with pytest.raises(FileExistsError, match="if_exists"):
        writer.publish(parts[:1], f"{base}/tmp", "error")
    reader = JsonReader(f"{base}/out.jsonl")
    assert (len(reader), info.rows) == (10, 10)
    assert reader.download_batch(3, 5, "") == rows[3:6]
    assert writer.publish(parts[:1], f"{base}/tmp", "overwrite").rows == 4
    assert len(JsonReader(f"{base}/out.jsonl")) == 4, "what was known of the replaced file is not used"


def test_a_directory_is_published_with_its_manifest_last(base: str) -> None:
    import numpy as np

    writer = ImageWriter(f"{base}/images")
    rows = [{"image": np.full((2, 2, 3), index, np.uint8)} for index in range(3)]
    parts = [writer.write_part([row], RowRange(index, index), f"{base}/tmp/a-1") for index, row in enumerate(rows)]
    info = writer.publish(parts, f"{base}/tmp", "error")
    store, root = open_store(f"{base}/images")
    names = sorted(key.rpartition("/")[2] for key in store.list(root))
    assert names == ["00000000.png", "00000001.png", "00000002.png", "_SUCCESS", "_manifest.json"]
    assert writer.publish(parts, f"{base}/tmp", "error") == info
    for missing in (["_SUCCESS"], ["_SUCCESS", "_manifest.json", "00000001.png"]):  # cut short
        store.delete_many(join(root, name) for name in missing)
        assert writer.publish(parts, f"{base}/tmp", "error").sha256 == info.sha256
        assert store.exists(join(root, "_SUCCESS"))
    with pytest.raises(FileExistsError):
        writer.publish(parts[:2], f"{base}/tmp", "error")
    writer.publish(parts[:2], f"{base}/tmp", "overwrite")
    assert not store.exists(join(root, "00000002.png")), "an overwritten directory keeps nothing of the old one"


@pytest.mark.parametrize("location", ["ftp://host/a", "s3:///key", "file://host/a"])
def test_locations_that_are_not_supported_are_refused_by_name(location: str) -> None:
    with pytest.raises(UserError, match=r"file://|BUCKET"):
        split(location)


def test_a_span_of_one_assignment_is_inclusive() -> None:
    assert Assignment(0, 4, 7, 1, ()).span.rows == 4
    assert {"json", "text", "csv", "parquet", "images", "webdataset", "items", "huggingface", "openai_batch"} <= set(
        registry.INPUT_READER_REGISTRY.names()
    )


def test_what_is_stored_on_a_disk_is_in_directories_that_are_on_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    store, key = open_store(str(tmp_path / "a" / "b" / "part"))
    store.put_create(key, b"rows")
    *made, unfinished, at_last = synced
    assert made == [str(tmp_path), str(tmp_path / "a")]
    assert unfinished.startswith(f"{tmp_path}/a/b/.part.") and at_last == str(tmp_path / "a" / "b")
    synced.clear()
    store.put_create(key, b"rows")
    assert synced == [str(tmp_path / "a" / "b")], "whoever stored it first may have died in between"
    assert os.listdir(tmp_path / "a" / "b") == ["part"]
