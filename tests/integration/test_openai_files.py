"""Files through the real `openai` client: uploads, lists, downloads, refusals and limits."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from support.batch_files import REQUEST, REQUEST_LINE, lines_of_size
from support.databases import fresh_url
from support.http_harness import ALICE, BOB, Harness, close, make_harness
from support.live import LiveServer
from tinsmith.auth.quotas import QuotaLimits
from tinsmith.db.factory import open_database
from tinsmith.db.schema import UPLOADS
from tinsmith.store.files import BATCH, Files, new_id

LINES = REQUEST_LINE + REQUEST_LINE.replace(b'"custom_id": "a"', b'"custom_id": "b"')


@pytest.fixture
def client(fake_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="tml-test", max_retries=0) as openai_client:
        yield openai_client


@pytest.fixture
def files(tmp_path: Path, database_kind: str) -> Iterator[Files]:
    database = open_database(fresh_url(tmp_path, database_kind))
    yield Files(database, str(tmp_path / "files"))
    database.close()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path, max_file_bytes=1000)
    yield new_harness
    close(new_harness)


def upload(client: openai.OpenAI, content: bytes = LINES, name: str = "in.jsonl") -> openai.types.FileObject:
    return client.files.create(file=(name, content), purpose="batch")


def test_a_file_comes_back_as_it_went(client: openai.OpenAI) -> None:
    content = lines_of_size(3_000_000)
    before = int(time.time())
    file = upload(client, content, "tea & cake.jsonl")
    assert file.bytes == len(content)
    assert (file.filename, file.purpose, file.status) == ("tea & cake.jsonl", "batch", "processed")
    assert before <= file.created_at <= time.time()
    assert file.expires_at == file.created_at + 30 * 86400
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == content


def test_the_hosted_service_s_address_works_too(fake_server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{fake_server.url}/oai/api/v1", api_key="tml-test", max_retries=0) as client:
        assert client.files.content(upload(client).id).content == LINES


def test_a_part_of_a_file_can_be_read(client: openai.OpenAI) -> None:
    file = upload(client)
    part = client.files.with_raw_response.content(file.id, extra_headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, LINES[10:20])
    assert part.headers["content-range"] == f"bytes 10-19/{len(LINES)}"
    assert part.headers["etag"] == f'"{hashlib.sha256(LINES).hexdigest()}"'
    with pytest.raises(openai.APIStatusError) as refused:
        client.files.content(file.id, extra_headers={"Range": "bytes=1000-"})
    assert refused.value.status_code == 416


@pytest.mark.parametrize("before", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_a_file_that_no_batch_takes_is_refused_when_it_is_uploaded(client: openai.OpenAI, before: bytes) -> None:
    before_ids = [file.id for file in client.files.list()]
    line = {**REQUEST, "url": "/v1/embeddings"}
    words = rf"the file is no batch's: line {1 + before.count(10)}: url is '/v1/embeddings'; it must be one of"
    with pytest.raises(openai.BadRequestError, match=words) as refusal:
        upload(client, before + json.dumps(line).encode() + b"\n")
    assert (refusal.value.param, refusal.value.code) == ("file", "url_mismatch")
    assert [file.id for file in client.files.list()] == before_ids
    assert upload(client, before + LINES).bytes == len(before + LINES)


def test_a_deleted_file_is_not_there(client: openai.OpenAI, fake_server: LiveServer) -> None:
    file = upload(client)
    path = fake_server.data_dir / "files" / file.id
    assert path.read_bytes() == LINES
    assert client.files.delete(file.id).deleted
    assert not path.exists()
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match=file.id):
            ask(file.id)


def test_lists_come_in_pages_newest_first(client: openai.OpenAI) -> None:
    file_ids = [upload(client).id for _ in range(5)]
    first = client.files.list(limit=2)
    assert [file.id for file in first.data] == file_ids[:-3:-1]
    assert first.has_more
    assert [file.id for file in client.files.list(limit=2)][:5] == file_ids[::-1], "the client goes on by itself"
    assert [file.id for file in client.files.list(after=file_ids[3], order="asc").data] == file_ids[4:]
    oldest = client.files.list(order="asc").data
    assert [file.id for file in oldest][-5:] == file_ids
    outputs = client.files.list(
        purpose="batch_output", after=file_ids[2]
    ).data  # batches of other tests may have added some
    assert {file.purpose for file in outputs} <= {"batch_output"} and not {file.id for file in outputs} & set(file_ids)
    assert file_ids[2] in [file.id for file in client.files.list(purpose="batch")]


def test_a_file_expires_when_its_owner_says(client: openai.OpenAI) -> None:
    after: openai.types.file_create_params.ExpiresAfter = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=("in.jsonl", LINES), purpose="batch", expires_after=after)
    assert file.expires_at == file.created_at + 3600
    for seconds in (3599, 30 * 86400 + 1):
        after["seconds"] = seconds
        with pytest.raises(openai.BadRequestError, match=rf"expires_after.seconds is {seconds}") as refused:
            client.files.create(file=("in.jsonl", LINES), purpose="batch", expires_after=after)
        assert refused.value.param == "expires_after.seconds"


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"purpose": "fine-tune"}, "purpose", "'fine-tune'"),
        ({"file": ("in.txt", LINES)}, "file", "ends with .jsonl"),
        ({"file": ("a\u202eb.jsonl", LINES)}, "file", "filename"),
        ({"file": ("x" * 600 + ".jsonl", LINES)}, "file", "filename"),
        ({"extra_body": {"color": "red"}}, "'color'", "'color'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    client: openai.OpenAI, changes: dict[str, object], param: str, words: str
) -> None:
    arguments: dict[str, object] = {"file": ("in.jsonl", LINES), "purpose": "batch", **changes}
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(**arguments)  # type: ignore[arg-type]
    assert words in refused.value.message
    assert refused.value.param == param


def test_a_missing_key_has_openais_error(harness: Harness) -> None:
    for headers in ({}, {"Authorization": "Bearer tml-carol"}, {"Authorization": "Basic tml-alice"}):
        answer = harness.client.get("/v1/files", headers=headers)
        assert answer.status_code == 401
        error = answer.json()["error"]
        assert error["code"] == "invalid_api_key"
        assert set(error) == {"message", "type", "param", "code"}
    assert harness.client.get("/v1/files", headers={"Authorization": "Bearer tml-alice"}).status_code == 200
    assert harness.client.get("/api/v1/sessions", headers={"Authorization": "Bearer tml-alice"}).status_code == 401


def form(harness: Harness, content: bytes, *, key: str = ALICE, **changes: object) -> httpx.Response:
    arguments = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch"}, **changes}
    return harness.client.post("/v1/files", headers={"X-API-Key": key}, **arguments)  # type: ignore[arg-type, return-value]


def test_foreign_files_are_not_listed(harness: Harness) -> None:
    file_id = form(harness, REQUEST_LINE).json()["id"]
    form(harness, REQUEST_LINE, key=BOB)
    listed = harness.client.get("/v1/files", headers={"X-API-Key": ALICE}).json()["data"]
    assert [file["id"] for file in listed] == [file_id]
    refused = harness.client.get(f"/v1/files?after={file_id}", headers={"X-API-Key": BOB})
    assert refused.status_code == 404


def test_a_file_that_is_too_large_is_refused_and_leaves_nothing(harness: Harness) -> None:
    assert form(harness, lines_of_size(1000)).status_code == 200
    file_names = set(os.listdir(harness.services.settings.data_dir / "files"))
    for size in (1001, 100_000, 1_000_000):
        answer = form(harness, b"x" * size)
        assert answer.status_code == 413, size
        assert "1000 bytes" in answer.json()["error"]["message"]

    def chunks_without_length() -> Iterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        for _ in range(10):
            yield b"x" * 10_000

    headers = {"X-API-Key": ALICE, "Content-Type": "multipart/form-data; boundary=b"}
    assert harness.client.post("/v1/files", headers=headers, content=chunks_without_length()).status_code == 413
    assert set(os.listdir(harness.services.settings.data_dir / "files")) == file_names


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no file"),
        (b"junk", "form"),
        (b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\nx', "form"),
        (b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--\r\n', "no file"),
        (b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n", "name"),
        (b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n' + b"y" * 5000 + b"\r\n--b--\r\n", "maximum size"),
        (b"--b\r\nA: " + b"y" * 9000 + b"\r\n\r\n\r\n--b--\r\n", "form"),
        (b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n\r\n' * 20 + b"--b--\r\n", "Too many fields"),
        (
            b'--b\r\nContent-Disposition: form-data; name="f"; filename="a"\r\n\r\n\r\n' * 2 + b"--b--\r\n",
            "Too many files",
        ),
    ],
)
def test_a_form_that_is_none_is_refused(harness: Harness, body: bytes, words: str) -> None:
    headers = {"X-API-Key": ALICE, "Content-Type": "multipart/form-data; boundary=b"}
    answer = harness.client.post("/v1/files", headers=headers, content=body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_a_body_that_is_no_form_at_all_is_415(harness: Harness) -> None:
    for content_type in ("application/json", "", "multipart/form-data2"):
        headers = {"X-API-Key": ALICE, "Content-Type": content_type}
        assert harness.client.post("/v1/files", headers=headers, content=b"{}").status_code == 415
    headers = {"X-API-Key": ALICE, "Content-Type": "multipart/form-data; boundary=b", "Content-Encoding": "gzip"}
    assert harness.client.post("/v1/files", headers=headers, content=b"{}").status_code == 415
    headers = {"X-API-Key": ALICE, "Content-Type": "multipart/form-data"}
    assert harness.client.post("/v1/files", headers=headers, content=b"{}").status_code == 400


@pytest.mark.parametrize("query", ["limit=0", "limit=10001", "limit=x", "order=up", "purpose=x", "limit=%C2%B2"])
def test_a_page_that_cannot_be_is_refused(harness: Harness, query: str) -> None:
    answer = harness.client.get(f"/v1/files?{query}", headers={"X-API-Key": ALICE})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


def test_a_tenants_stored_bytes_are_bounded(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, limits=QuotaLimits(file_bytes=1000))
    try:
        first = form(harness, lines_of_size(600)).json()["id"]
        refused = form(harness, lines_of_size(500))
        assert refused.status_code == 429
        assert (
            "quota file_bytes: the files take 600 bytes, and uploads under way 500"
            in refused.json()["error"]["message"]
        )
        assert form(harness, lines_of_size(500), key=BOB).status_code == 200
        harness.client.delete(f"/v1/files/{first}", headers={"X-API-Key": ALICE})
        assert form(harness, lines_of_size(1000)).status_code == 200
    finally:
        close(harness)


def test_an_expired_file_is_not_there_and_is_swept(files: Files) -> None:
    fresh, expired = (files.add("t", files.store(new_id(), [b"x"]), "a.jsonl", BATCH, 60) for _ in range(2))
    with files._db.write() as connection:
        connection.execute(UPLOADS.update().where(UPLOADS.c.file_id == expired.file_id).values(expires_at=1.0))
    page, has_more = files.page("t", 10, after=None, ascending=False, purpose=None)
    assert ([file.file_id for file in page], has_more) == ([fresh.file_id], False)
    assert files.sweep_expired() == [expired.file_id]
    assert files.sweep_expired() == []
    assert (files.path(fresh.file_id).exists(), files.path(expired.file_id).exists()) == (True, False)


def test_bytes_without_a_row_are_swept_once_they_are_old(files: Files) -> None:
    listed = files.add("t", files.store(new_id(), [b"x"]), "a.jsonl", BATCH, None)
    stored = files.store(new_id(), [b"x"])
    cut_short = files.path(".x.unfinished")
    cut_short.write_bytes(b"x")
    for path in (files.path(listed.file_id), files.path(stored.file_id), cut_short):
        os.utime(path, (1, 1))
    fresh = files.store(new_id(), [b"x"])
    assert sorted(files.sweep_unreferenced(60)) == sorted([stored.file_id, cut_short.name])
    assert sorted(os.listdir(files.path("."))) == sorted([listed.file_id, fresh.file_id])


def test_bytes_that_were_cut_short_are_no_file(files: Files) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"x"
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        files.store(new_id(), pieces())
    assert os.listdir(files.path(".")) == []


def test_a_file_made_twice_under_one_id_is_one_file(files: Files) -> None:
    for _ in range(2):
        file = files.add("t", files.store("file-1", [b"x"]), "a.jsonl", BATCH, None)
    assert files.page("t", 10, after=None, ascending=False, purpose=None) == ([file], False)
