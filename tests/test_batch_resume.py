"""Jobs that are resumed: of which input, with which function, into which format; and what is read while they end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live import API_KEY, LiveServer, serving
from tinsmith import batch
from tinsmith.batch import versions
from tinsmith.batch.client import Client
from tinsmith.batch.dataset import JobRefusedError
from tinsmith.batch.job import Job, JobFailedError
from tinsmith.batch.readers.lines import JsonReader
from tinsmith.storage.stores import open_store

QUICK = {"backoff_s": 0.01, "grace_s": 1.0}
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("resume") / "data", "--backend", "fake") as made:
        yield made


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    made = Client(server.url, API_KEY)
    yield made
    made.close()


def lines(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def careful(row: dict[str, Any], gate: str) -> dict[str, Any]:
    """Fails for one row, until the gate is there."""
    from pathlib import Path

    if row["text"] == "bad" and not Path(gate).exists():
        raise ValueError("not yet")
    return {"length": len(row["text"])}


def stopped(client: Client, directory: Path, source: str, **options: Any) -> Job:  # noqa: ANN401
    """A job that has failed in its second batch of two rows, and would succeed now."""
    given: dict[str, Any] = {"output": batch.JsonWriter(f"{directory}/out.jsonl"), "batch_size": 2, "limits": QUICK}
    kwargs = {"gate": f"{directory}/gate"}
    data = batch.read_json(source)
    job = data.map(careful, fn_kwargs=kwargs, stream=False, client=client, **{**given, **options})
    assert isinstance(job, Job)
    assert job.wait(check=False)["status"] == "FAILED" and job.progress.rows_ok >= 1
    (directory / "gate").touch()
    return job


TEXTS = ["a", "bb", "bad", "dddd", "eeeee"]


def test_an_input_that_has_changed_is_not_resumed_and_one_that_is_restored_is(client: Client, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_rows(source, TEXTS)
    job = stopped(client, tmp_path, str(source))
    before = source.read_bytes()
    write_rows(source, ["new", *TEXTS])
    resumed = job.resume()
    with pytest.raises(JobFailedError, match="the input has changed since the job began") as failure:
        resumed.wait()
    said = str(failure.value)
    assert f"{source} was (size {len(before)}, etag " in said
    assert f", and is (size {source.stat().st_size}, etag " in said
    assert "Traceback" not in said and not (tmp_path / "out.jsonl").exists()

    source.write_bytes(before)  # at another time, in another file: the same bytes
    again = resumed.resume()
    again.wait()
    assert lines(tmp_path / "out.jsonl") == [{"text": text, "length": len(text)} for text in TEXTS]


@pytest.mark.parametrize("change", ["added", "removed", "renamed"])
def test_the_files_of_a_directory_are_part_of_the_input(change: str, tmp_path: Path) -> None:
    for name, texts in (("a", TEXTS[:3]), ("b", TEXTS[3:])):
        write_rows(tmp_path / f"in/{name}.jsonl", texts)
    reader = JsonReader(f"{tmp_path}/in/*.jsonl")
    before = reader.version()
    assert before is not None
    versions.check(before, reader.version())
    os.utime(tmp_path / "in/a.jsonl", (1, 1))
    versions.check(before, reader.version())  # its bytes are the same
    if change == "added":
        write_rows(tmp_path / "in/c.jsonl", ["c"])
        says = "in/c.jsonl was not there, and is (size "
    elif change == "removed":
        (tmp_path / "in/b.jsonl").unlink()
        says = r"in/b.jsonl was \(size .*\), and is not there"
    else:
        (tmp_path / "in/a.jsonl").rename(tmp_path / "in/z.jsonl")
        says = r"in/a.jsonl was \(size .*\), and is not there"
    with pytest.raises(versions.InputChangedError, match=says.replace("is (", r"is \(")):
        versions.check(before, reader.version())


def test_of_many_files_and_of_objects_in_buckets_a_change_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "MAX_FILES", 2)
    for name in "abc":
        write_rows(tmp_path / f"in/{name}.jsonl", [name])
    reader = JsonReader(f"{tmp_path}/in/")
    before = reader.version()
    assert before is not None and list(before) == [versions.ALL_FILES] and before[versions.ALL_FILES]["files"] == 3
    write_rows(tmp_path / "in/b.jsonl", ["bbb"])
    with pytest.raises(
        versions.InputChangedError, match=r"all files was \(files 3, size 42, digest .* size 44, digest"
    ):
        versions.check(before, reader.version())

    store, key = open_store("memory://versions/in.jsonl")
    store.put(key, b'{"text":"a"}\n')
    remote = JsonReader("memory://versions/in.jsonl")
    before = remote.version()
    assert before is not None
    versions.check(before, remote.version())
    store.put(key, b'{"text":"b"}\n')  # as long as before
    with pytest.raises(versions.InputChangedError, match="etag"):
        versions.check(before, remote.version())


def test_a_file_that_changes_under_a_reader_gives_no_rows(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_rows(source, TEXTS)
    reader = JsonReader(str(source))
    assert len(reader) == 5
    write_rows(source, ["new", *TEXTS])
    with pytest.raises(versions.InputChangedError, match="was changed while the job ran"):
        reader.download_batch(0, 1, "")


def test_a_script_with_another_function_does_not_go_on_with_the_rows_of_the_old_one(
    client: Client, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    write_rows(source, TEXTS)
    job = stopped(client, tmp_path, str(source))

    def other(row: dict[str, Any]) -> dict[str, Any]:
        return {"length": -1}

    output = batch.JsonWriter(f"{tmp_path}/out.jsonl")
    data = batch.read_json(str(source))
    with pytest.raises(JobRefusedError, match=rf"bulk job {int(job)} .* its function is another one: .*resume_from="):
        data.map(other, output=output, batch_size=2, if_exists="resume", client=client)
    kwargs = {"gate": f"{tmp_path}/gate"}
    same = data.map(careful, fn_kwargs=kwargs, output=output, batch_size=2, if_exists="resume", client=client)
    assert isinstance(same, Job) and same.status()["resume_from"] == int(job)
    assert [row["length"] for row in lines(tmp_path / "out.jsonl")] == [1, 2, 3, 4, 5]
    done = data.map(careful, fn_kwargs=kwargs, output=output, batch_size=2, if_exists="resume", client=client)
    assert isinstance(done, Job) and int(done) == int(same), "it finds its job done"
    with pytest.raises(JobRefusedError, match=r"is SUCCEEDED .* its function is another one"):
        data.map(careful, fn_kwargs={"gate": "x"}, output=output, if_exists="resume", client=client)
