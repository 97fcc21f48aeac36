"""Stores give the same guarantees on the local disk, in memory, on S3 and on Google Cloud Storage."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from support.buckets import Bucket, CloudStorage, cloud_bucket
from tinsmith.batch.formats import publishing, registry
from tinsmith.batch.formats.images import ImageWriter
from tinsmith.batch.formats.lines import JsonReader, JsonWriter
from tinsmith.batch.formats.openai import OpenAIBatchWriter
from tinsmith.batch.formats.parquet import ParquetWriter
from tinsmith.batch.formats.registry import OutputWriter
from tinsmith.batch.openai.results import Results, success_lines
from tinsmith.batch.types import TEMPORARY_DIRECTORY, Assignment, PartInfo, RowRange, staging_of
from tinsmith.errors import CorruptFilesError, UserError
from tinsmith.storage import fencing, stores
from tinsmith.storage.bucket_store import BucketStore
from tinsmith.storage.locations import locations, open_store
from tinsmith.storage.stores import (
    PART_BYTES,
    READS,
    LocalStore,
    Source,
    StaleWriterError,
    UnreachableError,
    join,
    read_ahead,
    split,
)

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


@pytest.fixture(scope="module")
def cloud() -> Iterator[tuple[Bucket, CloudStorage]]:
    with cloud_bucket() as bucket_and_storage:
        yield bucket_and_storage


@pytest.fixture(params=["file", "url", "memory", "s3", "gs"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A directory of this test alone, in each store."""
    name = tmp_path.name
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{name}"
    if request.param == "gs":
        return f"{request.getfixturevalue('cloud')[0].url}/{name}"
    return {"file": str(tmp_path), "url": f"file://{tmp_path}", "memory": f"memory://m/{name}"}[request.param]


def test_a_new_object_replaces_nothing(base: str) -> None:
    store, key = open_store(f"{base}/a/b.bin")
    store.put_create(key, b"one")
    store.put_create(key, b"one")  # an equal object is a retry of a request whose answer was lost
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


@pytest.mark.parametrize("size", [0, 10, PART_BYTES + 5])
def test_a_write_in_pieces_appears_atomically(base: str, size: int) -> None:
    store, key = open_store(f"{base}/w.bin")
    data = bytes(size)
    with store.open_writer(key) as writer:
        for start in range(0, size, 1_000_003):
            writer.write(data[start : start + 1_000_003])
        assert not store.exists(key)
    assert store.get(key) == data


@pytest.mark.parametrize("size", [10, PART_BYTES + 5])
def test_a_writer_that_fails_leaves_nothing(base: str, size: int) -> None:
    store, key = open_store(f"{base}/w.bin")
    with pytest.raises(RuntimeError), store.open_writer(key) as writer:
        writer.write(bytes(size))
        raise RuntimeError
    _, root = open_store(base)
    assert list(store.list(root)) == []


@pytest.mark.parametrize("size", [10, PART_BYTES + 5])
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


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_parts_that_share_an_object_are_the_parts_that_do_not(base: str, kind: str) -> None:
    """They are read one by one and published; a changed byte is detected in its part."""
    rows = [{"n": index, "text": "ä\n," * index} for index in range(9)]

    def parts(name: str, output: str) -> tuple[list[PartInfo], OutputWriter]:
        writer = OutputWriter.from_dict({"format": kind, "path": join(base, output)})
        spans = [RowRange(start, start + 2) for start in range(0, 9, 3)]
        return [writer.write_part(rows[s.start_idx : s.end_idx + 1], s, join(base, name)) for s in spans], writer

    separate, writer = parts("alone", f"a.{kind}")
    with publishing.in_segments():
        together, other = parts("together", f"b.{kind}")
        assert not open_store(base)[0].exists(open_store(together[0].path)[1]), "durable at the end of the block"
    assert len({part.path for part in together}) == 1 and len({part.offset for part in together}) == 3
    assert [PartInfo.from_dict(part.to_dict()) for part in together] == together
    assert [list(writer.read_part(part)) for part in separate] == [list(other.read_part(part)) for part in together]
    first = writer.publish(separate, join(base, "staging-a"), "error")
    second = other.publish(together, join(base, "staging-b"), "error")
    assert (first.rows, first.sha256) == (9, second.sha256)
    store, key = open_store(together[0].path)
    data = bytearray(store.get(key))
    data[(together[1].offset or 0) + 4] ^= 1
    store.put(key, bytes(data))
    assert publishing.read_verified(together[0]) and publishing.read_verified(together[2])
    with pytest.raises(CorruptFilesError):
        publishing.read_verified(together[1])


def test_results_of_an_openai_batch_are_read_from_parts_that_share_an_object(base: str) -> None:
    writer = OpenAIBatchWriter(join(base, "out.jsonl"), keep="succeeded")
    rows = [{"custom_id": str(index), "response": {"status_code": 200}} for index in range(6)]
    with publishing.in_segments():
        parts = [writer.write_part(rows[n : n + 2], RowRange(n, n + 1), join(base, "a")) for n in (0, 2, 4)]
    assert len({part.path for part in parts}) == 1
    lines = list(success_lines(Results(succeeded=parts[:2])))
    assert [json.loads(line)["custom_id"] for line in lines] == ["0", "1", "2", "3"]
    assert all(line.endswith(b"\n") for line in lines)
    changed = replace(parts[0], sha256="0" * 64)
    with pytest.raises(CorruptFilesError):
        list(success_lines(Results(succeeded=[changed])))
    with pytest.raises(CorruptFilesError, match="does not exist"):
        list(success_lines(Results(succeeded=[replace(parts[0], path=join(base, "none"), offset=None)])))


def test_a_segment_has_a_limit_and_none_is_left_by_an_error(base: str) -> None:
    store, root = open_store(base)
    size = publishing.SEGMENT_BYTES // 2 + 1
    with publishing.in_segments():
        parts = [publishing.store_part(base, RowRange(n, n), "x", bytes(size), 1) for n in range(3)]
        parts.append(publishing.store_part(base, RowRange(3, 3), "x", bytes(2 * size), 1))
        parts.append(publishing.store_part(base, RowRange(4, 4), "x", b"alone", 1, separate=True))
    assert len({part.path for part in parts}) == 5
    assert [part.offset for part in parts] == [0, 0, 0, None, None]
    before = sorted(store.list(root))
    with pytest.raises(RuntimeError), publishing.in_segments():
        publishing.store_part(base, RowRange(9, 9), "x", b"lost", 1)
        raise RuntimeError
    assert sorted(store.list(root)) == before


@pytest.mark.parametrize("location", ["ftp://host/a", "s3:///key", "file://host/a"])
def test_locations_that_are_not_supported_are_refused_by_name(location: str) -> None:
    with pytest.raises(UserError, match=r"file://|BUCKET"):
        split(location)


def test_a_span_of_one_assignment_is_inclusive() -> None:
    assert Assignment(0, 4, 7, 1, ()).span.rows == 4
    assert {"json", "text", "csv", "parquet", "images", "webdataset", "items", "huggingface", "openai_batch"} <= set(
        registry.INPUT_READER_REGISTRY.names()
    )


def test_a_bucket_of_cloud_storage_lists_more_than_a_page(cloud: tuple[Bucket, CloudStorage]) -> None:
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    bucket, server = cloud
    store, root = open_store(f"{bucket.url}/many")
    for index in range(1005):
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(bucket.name, f"many/{index:04d}", b"x")
    before = server.lists
    assert sorted(store.list(root)) == [f"many/{index:04d}" for index in range(1005)]
    assert server.lists == before + 2


def test_a_bucket_of_cloud_storage_that_refuses_its_client_is_not_an_empty_one(
    cloud: tuple[Bucket, CloudStorage],
) -> None:
    """Expired credentials and missing permissions raise; server errors are retried."""
    bucket, server = cloud
    store, key = open_store(f"{bucket.url}/here")
    store.put(key, b"x")
    for status, code in (("401 Unauthorized", "AuthenticationRequired"), ("403 Forbidden", "AccessDenied")):
        server.refusals.append((status, f"<Error><Code>{code}</Code></Error>"))
        with pytest.raises(UnreachableError, match="the object store failed"):
            store.get(key)
    server.refusals += [("503 Service Unavailable", "<Error/>"), ("429 Too Many Requests", "<Error/>")]
    assert store.get(key) == b"x" and not server.refusals


@pytest.mark.extended
def test_a_request_to_cloud_storage_that_is_never_answered_is_sent_again(cloud: tuple[Bucket, CloudStorage]) -> None:
    bucket, server = cloud
    store, key = open_store(f"{bucket.url}/stalled")
    store.put(key, b"x")
    server.refusals.append(None)
    assert store.get(key) == b"x" and not server.released.is_set()


def test_directories_of_stored_files_are_fsynced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record_fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record_fsync)
    store, key = open_store(str(tmp_path / "a" / "b" / "part"))
    store.put_create(key, b"rows")
    *parent_directories, unfinished, at_last = synced
    assert parent_directories == [str(tmp_path), str(tmp_path / "a")]
    assert unfinished.startswith(f"{tmp_path}/a/b/.part.") and at_last == str(tmp_path / "a" / "b")
    synced.clear()
    store.put_create(key, b"rows")
    assert synced == [str(tmp_path / "a" / "b")], "whoever stored it first may have died in between"
    assert os.listdir(tmp_path / "a" / "b") == ["part"]


class SlowStore(LocalStore):
    """A disk whose reads wait as those of a bucket do. Records how many wait at the same time."""

    is_remote = True

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reading = self.most_reading = self.reads = 0

    def chunks(self, key: str) -> Iterator[bytes]:
        with self.lock:
            self.reads += 1
            self.reading += 1
            self.most_reading = max(self.most_reading, self.reading)
        time.sleep(0.02)
        data = b"".join(super().chunks(key))
        with self.lock:
            self.reading -= 1
        yield data


def sources_in(store: LocalStore, directory: Path, count: int, size: int) -> list[Source]:
    sources = []
    for index in range(count):
        data, key = bytes([index % 251]) * size, str(directory / f"part-{index}")
        store.put(key, data)
        sources.append(Source(store, key, hashlib.sha256(data).hexdigest(), expected_bytes=size))
    return sources


def test_small_sources_of_a_bucket_are_read_at_the_same_time_and_joined_in_order(tmp_path: Path) -> None:
    store = SlowStore()
    sources = sources_in(store, tmp_path, 60, 10)
    store.concat(sources, str(tmp_path / "whole"), exclusive=False)
    assert (tmp_path / "whole").read_bytes() == b"".join(bytes([index]) * 10 for index in range(60))
    assert 4 < store.most_reading <= READS and store.reads == 60
    (tmp_path / "part-40").write_bytes(b"changed")
    with pytest.raises(CorruptFilesError, match="part-40"):
        store.concat(sources, str(tmp_path / "other"), exclusive=False)
    assert not (tmp_path / "other").exists() and store.reading == 0


def test_sources_that_are_read_ahead_are_few_and_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "READ_AHEAD_BYTES", 1000)
    store = SlowStore()
    for chunks in read_ahead(sources_in(store, tmp_path, 20, 400)):
        assert sum(map(len, chunks)) == 400
    assert store.most_reading <= 3
    unknown = [source._replace(expected_bytes=None) for source in sources_in(store, tmp_path, 5, 10)]
    store.most_reading = 0
    assert [b"".join(chunks) for chunks in read_ahead(unknown)] == [bytes([index]) * 10 for index in range(5)]
    assert store.most_reading == 1


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "parquet/"])
def test_publishing_reads_each_part_once(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    base = f"memory://m/{tmp_path.name}"
    writer = JsonWriter(f"{base}/o.jsonl") if kind == "jsonl" else ParquetWriter(f"{base}/o.{kind}")
    parts = [
        writer.write_part([{"n": index}], RowRange(index, index), f"{base}/.tinsmith_batch_tmp/1/out-0/attempt-1")
        for index in range(40)
    ]
    reads: list[str] = []
    read_chunks, read_ranges = BucketStore.chunks, BucketStore.get_ranges

    def chunks(store: BucketStore, key: str) -> Iterator[bytes]:
        reads.append(key)
        return read_chunks(store, key)

    def get_ranges(store: BucketStore, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        reads.append(key)
        return read_ranges(store, key, ranges)

    monkeypatch.setattr(BucketStore, "chunks", chunks)
    monkeypatch.setattr(BucketStore, "get_ranges", get_ranges)
    output = writer.publish(parts, f"{base}/.tinsmith_batch_tmp/1/out-0", "error")
    assert output.rows == 40
    assert sorted(key for key in reads if "/attempt-1/" in key) == sorted(open_store(part.path)[1] for part in parts)
    assert [row["n"] for row in writer.read_published(output)] == list(range(40))


def test_the_parts_of_an_upload_grow_with_the_object(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terabytes = 3 * 2**40
    assert stores.part_bytes(0) == stores.part_bytes(70 * 2**30) == PART_BYTES
    assert terabytes <= stores.part_bytes(terabytes) * stores.MAX_PARTS < terabytes + 2**40
    monkeypatch.setattr(stores, "MAX_PARTS", 3)
    store, key = open_store(f"{s3}/{tmp_path.name}/large")
    data = bytes(3 * PART_BYTES + 5)
    with store.open_writer(key, max_bytes=len(data)) as writer:
        writer.write(data)
    etag = store.head(key).etag
    assert etag is not None and etag.strip('"').endswith("-3")
    store.put(f"{key}-part", data)
    source = Source(store, f"{key}-part", hashlib.sha256(data).hexdigest(), expected_bytes=len(data))
    store.concat([source], f"{key}-joined", exclusive=False, max_bytes=len(data))
    file = tmp_path / "file"
    file.write_bytes(data)
    assert isinstance(store, BucketStore)
    store.upload(file, f"{key}-uploaded")
    for name in ("joined", "uploaded"):
        assert (store.head(f"{key}-{name}").etag or "").strip('"').endswith("-3"), name


# Fencing.


class Pause:
    """Pauses the first writer that has read its parts, before its bytes become visible."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paused, self.resume = threading.Event(), threading.Event()
        self._is_first = itertools.chain([True], itertools.repeat(False))
        monkeypatch.setattr(stores, "read_ahead", self._read_ahead)

    def _read_ahead(self, sources: Iterable[Source]) -> Iterator[Iterable[memoryview]]:
        yield from read_ahead(sources)
        if next(self._is_first):
            self.paused.set()
            assert self.resume.wait(60)


def _write_parts(writer: OutputWriter, job_id: int, rows: int, text: str) -> tuple[list[PartInfo], str]:
    staging = staging_of(writer.path, job_id, 0)
    base = f"{staging}/attempt-1"
    return [
        writer.write_part([{"text": text}] * rows, RowRange(first, first + rows - 1), base) for first in (0, 5)
    ], staging


@pytest.mark.parametrize(
    ("writer_class", "rows"),
    [(JsonWriter, 2), pytest.param(JsonWriter, 20_000, id="an upload of parts"), (ParquetWriter, 2)],
)
@pytest.mark.parametrize("if_exists", ["overwrite", "error"])
def test_a_publisher_that_was_overtaken_replaces_nothing(
    writer_class: type[JsonWriter | ParquetWriter],
    rows: int,
    if_exists: str,
    base: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first publisher of job 1 pauses. Another coordinator publishes job 1, and job 2 overwrites the output."""
    writer = writer_class(f"{base}/o.jsonl" if writer_class is JsonWriter else f"{base}/o/")
    monkeypatch.setattr("tinsmith.storage.bucket_store.PART_BYTES", 256 * 1024 if rows > 2 else PART_BYTES)
    text = "x" * 100
    parts, staging = _write_parts(writer, 1, rows, text)
    pause = Pause(monkeypatch)
    errors: list[BaseException] = []
    token = publishing.issue_token(writer.path, 1)

    def publish_first() -> None:
        try:
            with publishing.use_token(token):
                writer.publish(parts, staging, if_exists)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    first = threading.Thread(target=publish_first)
    first.start()
    assert pause.paused.wait(60)
    second = publishing.issue_token(writer.path, 1)
    with publishing.use_token(second):
        writer.publish(parts, staging, if_exists)
    second.release()
    others, other_staging = _write_parts(writer, 2, 3, "later")
    later = publishing.issue_token(writer.path, 2)
    with publishing.use_token(later):
        output = writer.publish(others, other_staging, "overwrite")
    later.release()
    pause.resume.set()
    first.join(60)
    assert [type(error) for error in errors] in ([StaleWriterError], [FileExistsError])
    if if_exists == "overwrite":
        assert isinstance(errors[0], StaleWriterError)
    assert list(writer.read_published(output)) == [{"text": "later"}] * 6
    store, key = open_store(writer.path)
    if writer.is_directory:
        names = {name.rpartition("/")[2] for name in store.list(key) if TEMPORARY_DIRECTORY not in name}
        assert names == {"part-00000.parquet", "part-00001.parquet", "_manifest.json", "_SUCCESS"}
        assert orjson.loads(store.get(join(key, "_manifest.json")))["rows"] == 6
    else:
        assert store.head(key).etag == output.etag


def test_a_token_is_not_issued_between_the_check_and_the_rename(tmp_path: Path) -> None:
    path = f"{tmp_path}/o.jsonl"
    token, issued = publishing.issue_token(path, 1), threading.Event()

    def issue() -> None:
        publishing.issue_token(path, 2)
        issued.set()

    with token.enforce():
        thread = threading.Thread(target=issue)
        thread.start()
        assert not issued.wait(0.2)
    assert issued.wait(10)
    thread.join()
    with pytest.raises(StaleWriterError), token.enforce():
        pass


def test_the_token_of_an_ended_job_is_deleted_and_that_of_another_stays(base: str) -> None:
    path = f"{base}/o.jsonl"
    store, key = open_store(f"{base}/{TEMPORARY_DIRECTORY}/o.jsonl.publisher")
    token = publishing.issue_token(path, 1)
    publishing.delete_token(path, 12)
    assert store.exists(key)
    publishing.delete_token(path, 1)
    publishing.delete_token(path, 1)
    assert not store.exists(key)
    with pytest.raises(StaleWriterError), token.enforce():
        pass
    newest = publishing.issue_token(path, 2)
    token.release()
    with newest.enforce():
        assert store.exists(key)


@pytest.mark.parametrize("holds_lock", [True, False])
def test_a_lock_of_a_publisher_that_hangs_is_waited_for_so_long(
    holds_lock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing, "LOCK_S", 0.1)
    token = publishing.issue_token(f"{tmp_path}/o.jsonl", 1)
    if not holds_lock:
        monkeypatch.setattr(fencing.fcntl, "flock", _raise_no_locks)
    with token.enforce():
        if holds_lock:
            with pytest.raises(TimeoutError, match=r"has locked .*o\.jsonl\.publisher for 0\.1 s"):
                publishing.issue_token(f"{tmp_path}/o.jsonl", 2)
        else:
            publishing.issue_token(f"{tmp_path}/o.jsonl", 2)


def _raise_no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, "no locks available")
