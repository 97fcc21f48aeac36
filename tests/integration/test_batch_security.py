"""Security of bulk jobs: where code runs, which tenants may run it, and which files a job can access."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.coordinating import PATIENCE_S, CoordinatorSetup, coordinate, start_process, submit
from support.databases import fresh_url
from support.http_harness import ALICE, BOB, Harness, close, make_harness
from support.live import LiveServer, serving
from tinsmith import batch
from tinsmith.batch import operations
from tinsmith.batch.client.dataset import Dataset
from tinsmith.batch.client.functions import describe_function
from tinsmith.batch.client.http import Client
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.formats import registry
from tinsmith.batch.formats.registry import InputReader
from tinsmith.batch.operations.grade import Grade
from tinsmith.batch.operations.sample import Sample
from tinsmith.batch.types import CHAIN, JobSpec, pack_payload
from tinsmith.db.factory import open_database
from tinsmith.db.schema import BATCH_JOBS
from tinsmith.errors import ForbiddenError
from tinsmith.storage import locations

MARKER = "a text that only the code of this job holds"

# A Python process that imports this file records the code that it compiles, runs and unpickles, and its imports.
HOOK = """
import os, sys
_log = open(os.path.join(os.environ["WATCHED"], str(os.getpid())), "a", buffering=1)
_log.write("argv " + repr(sys.orig_argv) + chr(10))
def _watch(event, given):
    if event == "exec":
        text = repr((given[0].co_filename, given[0].co_consts))
    elif event == "compile":
        text = repr(given)
    elif event in ("pickle.find_class", "import"):
        text = repr(given[:2])
    else:
        return
    _log.write(event + " " + text + chr(10))
sys.addaudithook(_watch)
"""


@registry.INPUT_READER_REGISTRY.type_register(name="marked")
@dataclass
class MarkedReader(InputReader):
    """Rows from nowhere."""

    count: int = 3

    def __len__(self) -> int:
        return self.count

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[dict[str, Any]]:
        return [{"marker": "a text that only the code of this job holds"} for _ in range(start_idx, end_idx + 1)]


@pytest.fixture(scope="module")
def watched_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Path]]:
    """A server whose processes record the code that they run."""
    directory = tmp_path_factory.mktemp("watched")
    (directory / "sitecustomize.py").write_text(HOOK)
    (directory / "logs").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)
        patch.setenv("WATCHED", str(directory / "logs"))
        with serving(directory / "data", "--backend", "fake") as server:
            yield server, directory / "logs"


def test_a_server_runs_and_unpickles_nothing_of_a_job(watched_server: tuple[LiveServer, Path], tmp_path: Path) -> None:
    server, logs = watched_server
    client = Client(server.url, "tml-test")
    marker = MARKER

    @batch.remote_function(serializer="cloudpickle")
    def compare() -> None:
        from tinsmith import batch

        for rows in batch.load():
            batch.save_results([{"marker": row["marker"], "same": row["marker"] == marker} for row in rows])

    output = batch.JsonWriter(str(tmp_path / "out.jsonl"))
    started = Dataset(MarkedReader("nowhere")).map(compare, output=output, stream=False, client=client)
    assert isinstance(started, batch.Job)
    started.wait()
    client.close()
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [
        {"marker": MARKER, "same": True}
    ] * 3
    logs_by_pid = {path.name: path.read_text() for path in logs.iterdir()}
    server_log = logs_by_pid.pop(str(server.process.pid))
    assert "compile " in server_log and "exec " in server_log, "the server is watched"
    below = "".join(logs_by_pid.values())
    assert MARKER in below and "pickle.find_class" in below, "somebody ran it"
    assert MARKER not in server_log
    assert "pickle.find_class" not in server_log
    imported = {line for line in server_log.splitlines() if line.startswith("import ")}
    for module in ("worker.adapters", "worker.runtime", "worker.feed", "worker.child"):
        assert not [line for line in imported if f"'tinsmith.batch.{module}'" in line], module
    assert not [line for line in imported if "'cloudpickle'" in line]


@batch.remote_function
def count_listeners(opens_at: str) -> None:
    """The listening sockets of this process, its parent and the parent's other children."""
    import os
    import socket
    from pathlib import Path

    from tinsmith import batch

    def listening_inodes() -> set[str]:
        tcp = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
        unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        return {words[9] for words in tcp if words[3] == "0A"} | {words[6] for words in unix if words[3] == "00010000"}

    def inodes_of(pid: int) -> set[str]:
        links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
        return {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}

    opened = []
    for rows in batch.load():
        if any(row["text"] == opens_at for row in rows):
            opened.append(socket.create_server(("127.0.0.1", 0)))
        siblings = " ".join(path.read_text() for path in Path(f"/proc/{os.getppid()}/task").glob("*/children"))
        family = {os.getppid(), *map(int, siblings.split())}
        assert os.getpid() in family
        inodes = set().union(*map(inodes_of, family))
        batch.save_results([{"processes": len(family), "listening": len(inodes & listening_inodes())} for _ in rows])


@pytest.mark.extended
def test_no_process_of_a_job_listens(tmp_path: Path) -> None:
    url = fresh_url(tmp_path, "sqlite")
    with contextlib.closing(open_database(url)) as database:
        job_id = submit(BatchJobs(database), tmp_path, count_listeners, fn_kwargs={"opens_at": "t18"})
    process = start_process(CoordinatorSetup(url, str(tmp_path), job_id))
    assert process.wait(PATIENCE_S) == 0, (tmp_path / "here.log").read_text()[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["listening"] for row in rows] == [0] * 18 + [1] * 2, "only what the function itself opened"
    assert min(row["processes"] for row in rows) >= 3, "the coordinator, the function's, and the one for operations"


# Permission to run code.

FUNCTION = "bm8gb3BlcmF0aW9u"
ROWS = {"format": "json", "path": "in.jsonl"}
SOURCE = {"_class_source": "class A: ...", "_class_imports": {}, "_class_name": "A", "_class_sha256": "0"}


def job(**changes: object) -> dict[str, object]:
    """A job of operations; `changes` give it code or other locations."""
    payload = operations.payload_of([Sample(model="local/tiny", prompt="text", max_tokens=1)])
    outputs = [{"format": "json", "path": "out.jsonl"}]
    spec = {"batch_serialized_fn": payload, "batch_input_format": ROWS, "batch_output_formats": outputs}
    return {**spec, "batch_size": 1, **changes}


CODE: dict[str, dict[str, object]] = {
    "a function": {"batch_serialized_fn": FUNCTION},
    "a reader": {"batch_input_format": {**ROWS, **SOURCE}},
    "a writer": {"batch_output_formats": [{"format": "json", "path": "out.jsonl", **SOURCE}]},
    "a writer of errors": {"batch_error_format": {"format": "json", "path": "err.jsonl", **SOURCE}},
    "a writer without all of it": {"batch_output_formats": [{"format": "json", "path": "o", "_class_source": ""}]},
    "an interpreter": {"python": "/tmp/python"},
    "an environment": {"batch_activate_env": "/tmp/env"},
}


@pytest.mark.parametrize("code", CODE)
def test_only_allowed_tenants_run_code_and_none_if_it_is_off(tmp_path: Path, code: str) -> None:
    cases = [
        ({"local": True}, ALICE, 200, ""),
        ({"local": True, "batch_user_code": False}, ALICE, 403, "TINSMITH_BATCH_USER_CODE"),
        ({"batch_tenants": ("alice",)}, ALICE, 200, ""),
        ({"batch_tenants": ("alice",)}, BOB, 403, "TINSMITH_BATCH_TENANTS"),
        ({"batch_tenants": ("alice",), "batch_user_code": False}, ALICE, 403, "TINSMITH_BATCH_USER_CODE"),
    ]
    for index, (settings, key, status, words) in enumerate(cases):
        (directory := tmp_path / str(index)).mkdir()
        harness = make_harness(directory, **settings)  # type: ignore[arg-type]
        try:
            answer = harness.post("batch/jobs", job(**CODE[code]), key)
            assert answer.status_code == status, (settings, answer.text)
            assert words in answer.text
            assert harness.services.batch_jobs.page(key.removeprefix("tml-"), 9, 0)[1] == (
                1 if status == 200 and not settings.get("local") else 0
            )
        finally:
            close(harness)


def test_a_job_with_code_that_was_stored_before_is_not_run(tmp_path: Path) -> None:
    """With and without keys, after the server was restarted with the setting."""
    new_harness = make_harness(tmp_path, local=True, batch_user_code=False, batch_workers=1)
    jobs, coordinator = new_harness.services.batch_jobs, new_harness.services.coordinator
    job_id = jobs.create("local", JobSpec.from_dict(job(batch_serialized_fn=FUNCTION)))

    async def run() -> None:
        coordinator.start()
        for _ in range(200):
            await asyncio.sleep(0.02)
            if jobs.find("local", job_id).ended_at:
                break
        await coordinator.stop()

    asyncio.run(run())
    job_ = jobs.find("local", job_id)
    assert job_.status == "FAILED" and "TINSMITH_BATCH_USER_CODE" in str(job_.error)
    assert jobs.workers(job_id) == []
    close(new_harness)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    """Alice may run code; bob may not, and has an additional directory."""
    (tmp_path / "shared" / "bob").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    roots = (f"{tmp_path}/shared/{{tenant}}", "s3://bucket/for/{tenant}/", "gs://all")
    new_harness = make_harness(tmp_path / "data", batch_tenants=("alice",), batch_roots=roots)
    yield new_harness
    close(new_harness)


def test_a_job_of_operations_is_open_to_everybody_and_begins_in_ones_own_directory(harness: Harness) -> None:
    job_id = harness.ok("batch/jobs", job(batch_error_format={"format": "json", "path": "a/err.jsonl"}), BOB)["job_id"]
    spec = harness.services.batch_jobs.spec(job_id)
    bob_directory = f"{harness.services.settings.resolved_data_dir}/batch/bob"
    assert spec.roots is not None and spec.roots[0] == bob_directory
    assert spec.batch_input_format["path"] == f"{bob_directory}/in.jsonl"
    assert spec.batch_output_path == [f"{bob_directory}/out.jsonl"]
    assert spec.batch_error_format == {"format": "json", "path": f"{bob_directory}/a/err.jsonl"}
    moved_job = job(directory="/home/bob", batch_input_format={"format": "json", "path": "/home/bob/a/in.jsonl"})
    moved = harness.services.batch_jobs.spec(harness.ok("batch/jobs", moved_job, BOB)["job_id"])
    assert moved.batch_dataset_path == f"{bob_directory}/a/in.jsonl", "where his client put its own directory in front"
    upwards = job(directory="/home/bob", batch_input_format={"format": "json", "path": "/home/bob/../alice/in.jsonl"})
    assert harness.post("batch/jobs", upwards, BOB).status_code == 403
    trusted = harness.services.batch_jobs.spec(harness.ok("batch/jobs", job(), ALICE)["job_id"])
    assert trusted.roots is None and trusted.batch_dataset_path == "in.jsonl"


def chain(*steps: object) -> str:
    return pack_payload({"type": CHAIN, "version": "1.0", "steps": steps})


def test_a_job_is_created_and_resumed_once_for_each_idempotency_key(harness: Harness) -> None:
    def post(path: str, body: object, key: str = ALICE, **headers: str) -> Any:  # noqa: ANN401
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return harness.client.post(f"/api/v1/batch/{path}", json=body, headers={"X-API-Key": key, **names})

    first = post("jobs", job(name="a"), Idempotency_Key="k").json()["job_id"]
    turned = dict(reversed(job(name="a").items()))
    assert post("jobs", turned, Idempotency_Key="k").json()["job_id"] == first
    assert post("jobs", job(name="a"), X_Idempotency_Key="k").json()["job_id"] == first
    assert post("jobs", job(name="a"), BOB, Idempotency_Key="k").json()["job_id"] != first
    other = post("jobs", job(name="b"), Idempotency_Key="k")
    assert other.status_code == 400 and f"another request created bulk job {first}" in other.json()["detail"]
    for headers in ({"Idempotency_Key": "k" * 257}, {"Idempotency_Key": "k", "X_Idempotency_Key": "l"}):
        refused = post("jobs", job(name="a"), **headers)
        assert refused.status_code == 400 and "Idempotency-Key is" in refused.json()["detail"]
    with harness.services.batch_jobs._db.write() as connection:
        connection.execute(BATCH_JOBS.update().where(BATCH_JOBS.c.job_id == first).values(status="FAILED"))
    resumed = post(f"jobs/{first}/resume", {}, Idempotency_Key="r").json()["job_id"]
    assert post(f"jobs/{first}/resume", {}, Idempotency_Key="r").json()["job_id"] == resumed != first
    assert "another request created" in post(f"jobs/{resumed}/resume", {}, Idempotency_Key="r").json()["detail"]
    assert "PENDING: cancel it first" in post(f"jobs/{first}/resume", {}, Idempotency_Key="s").json()["detail"]


def test_a_chain_of_operations_is_no_code_and_one_with_a_function_is(harness: Harness) -> None:
    sample = Sample(model="local/tiny", prompt="text", max_tokens=1)
    graded = Dataset("in.jsonl").sample("local/tiny", prompt="text", max_tokens=1).map(Grade(by="exact", reference="r"))
    assert isinstance(graded, Dataset)
    payload, graded._forgotten = graded._payload(), False
    assert operations.steps_of(payload) == [
        Sample(model="local/tiny", prompt="text", max_tokens=1), Grade(by="exact", reference="r")
    ]  # fmt: skip
    spec = harness.services.batch_jobs.spec(harness.ok("batch/jobs", job(batch_serialized_fn=payload), BOB)["job_id"])
    assert spec.roots is not None
    operation = operations.describe_operations([sample])
    function = describe_function(lambda row: row, kind="row")
    refused = {
        "a function": chain(operation, function),
        "a function first": chain(function, operation),
        "a chain in a chain": chain(operation, {"type": CHAIN, "steps": [function]}),
        "another type": chain(operation, {**operation, "type": "source"}),
        "no object": chain(operation, "x"),
        "nothing": chain(),
    }
    for description, code in refused.items():
        answer = harness.post("batch/jobs", job(batch_serialized_fn=code), BOB)
        assert answer.status_code == 403 and "TINSMITH_BATCH_TENANTS" in answer.text, description
    long_chain_answer = harness.post("batch/jobs", job(batch_serialized_fn=chain(*[operation] * 17)), BOB)
    assert long_chain_answer.status_code == 400 and "17 operations" in long_chain_answer.text


def test_a_tenant_without_code_cannot_resume_code_or_resize_a_pool(harness: Harness) -> None:
    assert harness.send("PUT", "batch/pools/local", {"workers": 9}, BOB).status_code == 403
    jobs = harness.services.batch_jobs
    job_id = jobs.create("bob", JobSpec.from_dict(job(batch_serialized_fn=FUNCTION)))  # while he was allowed to
    assert jobs.acquire_batch_coordinator(job_id, "token", "here", 60)
    assert jobs.set_status(job_id, "token", "FAILED", "for a test")
    assert harness.send("POST", f"batch/jobs/{job_id}/resume", {}, BOB).status_code == 403
    for changes in ({"roots": ["/"]}, {"roots": []}):
        assert "roots" in harness.post("batch/jobs", job(**changes), BOB).json()["detail"]


PLACES = {
    "in.jsonl": True,
    "a/b/../in.jsonl": True,
    "{tmp}/shared/bob/in.jsonl": True,
    "file://{tmp}/shared/bob/in.jsonl": True,
    "{tmp}/shared/bob/": True,
    "{tmp}/shared/bob/*.jsonl": True,
    "{tmp}/shared/bob/link-inside/in.jsonl": True,
    "s3://bucket/for/bob/in.jsonl": True,
    "gs://all/in.jsonl": True,
    "../alice/in.jsonl": False,
    "a/../../alice/in.jsonl": False,
    "../../tinsmith.db": False,
    "/etc/passwd": False,
    "/": False,
    "~/in.jsonl": False,
    "{tmp}/shared/alice/in.jsonl": False,
    "{tmp}/shared/bobby/in.jsonl": False,
    "{tmp}/shared/bob/../alice/*": False,
    "{tmp}/shared/*/in.jsonl": False,
    "{tmp}/shared/**/in.jsonl": False,
    "file://{tmp}/shared/bob/%2e%2e/alice/in.jsonl": False,
    "{tmp}/shared/bob/link/in.jsonl": False,
    "{tmp}/shared/bob/link": False,
    "{tmp}/shared/bob/link/../shared/alice/x": True,  # below his directory: `..` is resolved before links
    "{tmp}/data/batch/alice/in.jsonl": False,
    "{tmp}/data/checkpoints/": False,
    "s3://bucket/for/alice/in.jsonl": False,
    "s3://bucket/for/bob/../alice/in.jsonl": False,
    "s3://bucket/for/bobby": False,
    "s3://other/for/bob/in.jsonl": False,
    "gs://bucket/for/bob/in.jsonl": False,
    "memory://bucket/for/bob/in.jsonl": False,
}


@pytest.mark.parametrize("field", ["batch_input_format", "batch_output_formats", "batch_error_format"])
def test_a_job_without_code_names_its_own_places_only(harness: Harness, tmp_path: Path, field: str) -> None:
    (tmp_path / "shared" / "bob" / "inside").mkdir()
    (tmp_path / "shared" / "bob" / "link-inside").symlink_to("inside")
    (tmp_path / "shared" / "bob" / "link").symlink_to(tmp_path)
    for path, allowed in PLACES.items():
        format_ = {"format": "json", "path": path.replace("{tmp}", str(tmp_path))}
        answer = harness.post(
            "batch/jobs", job(**{field: [format_] if field == "batch_output_formats" else format_}), BOB
        )
        assert answer.status_code == (200 if allowed else 403), (path, answer.text)
        assert allowed or "TINSMITH_BATCH_ROOTS" in answer.json()["detail"]


@pytest.mark.parametrize("format", ["huggingface", "items"])
def test_a_job_without_code_uses_formats_that_open_files_in_the_one_way(harness: Harness, format: str) -> None:
    answer = harness.post("batch/jobs", job(batch_input_format={"format": format, "path": "org/name"}), BOB)
    assert answer.status_code == (200 if format == "items" else 403), answer.text
    written = harness.post("batch/jobs", job(batch_output_formats=[{"format": format, "path": "name"}]), BOB)
    assert written.status_code == 403


def test_a_worker_holds_every_location_against_the_roots_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links that appear after the submission, and matches of patterns."""
    allowed_root, other = tmp_path / "own", tmp_path / "other"
    for directory in (allowed_root, other):
        directory.mkdir()
        (directory / "in.jsonl").write_text('{"a": 1}\n')
    (allowed_root / "link.jsonl").symlink_to(other / "in.jsonl")
    (allowed_root / "link").symlink_to(other)
    monkeypatch.setattr(locations, "_confines", None)
    locations.confine([str(allowed_root), f"{tmp_path}/cache", "s3://bucket/own"])
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tinsmith.batch.formats.offset_cache.cache_directory", lambda: Path(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    assert Dataset(batch.JsonReader(f"{allowed_root}/in.jsonl")).reader.download_batch(0, 0, "") == [{"a": 1}]
    for path in ("other/in.jsonl", "own/link.jsonl", "own/link/in.jsonl", "own/*.jsonl", "own/../other/"):
        with pytest.raises(ForbiddenError, match="may read and write"):
            len(batch.JsonReader(f"{tmp_path}/{path}"))
    for path in (f"{allowed_root}/link/out.jsonl", "s3://bucket/owner/x", "s3://bucket/own/../x"):
        with pytest.raises(ForbiddenError):
            locations.open_store(path)
    assert os.listdir(other) == ["in.jsonl"]


@batch.remote_function
def keep() -> None:
    from tinsmith import batch

    for rows in batch.load():
        batch.save_results(rows)


def test_a_confined_job_writes_only_below_its_roots(tmp_path: Path) -> None:
    allowed_root, other = tmp_path / "own", tmp_path / "other"
    for directory in (allowed_root, other):
        directory.mkdir()
        (directory / "in.jsonl").write_text("".join(f'{{"text": "t{index}"}}\n' for index in range(5)))
    (allowed_root / "way-out").symlink_to(other)
    outputs_by_input = {"in.jsonl": "out.jsonl", "way-out/in.jsonl": "two.jsonl", "*/in.jsonl": "three.jsonl"}
    outputs_by_input |= {"in.jsonl ": "way-out/four.jsonl"}
    (allowed_root / "in.jsonl ").write_bytes((allowed_root / "in.jsonl").read_bytes())
    url = fresh_url(tmp_path)
    with contextlib.closing(open_database(url)) as database:
        jobs = BatchJobs(database)
        for input_name, output_name in outputs_by_input.items():
            source = {"format": "json", "path": f"{allowed_root}/{input_name}"}
            outputs = [
                {"format": "json", "path": f"{allowed_root}/{output_name}"},
                {"format": "text", "path": f"{allowed_root}/texts/{output_name}"},
            ]
            errors = {"format": "json", "path": f"{allowed_root}/errors/{output_name}"}
            confined = {"batch_input_format": source, "batch_output_formats": outputs, "batch_error_format": errors}
            job_id = submit(jobs, allowed_root, keep, roots=[str(allowed_root)], **confined)
            asyncio.run(coordinate(CoordinatorSetup(url, str(tmp_path), job_id), jobs))
            job_row = jobs.find("local", job_id)
            if input_name == "in.jsonl":
                assert (job_row.status, job_row.rows_ok) == ("SUCCEEDED", 5), job_row.error
                assert len((allowed_root / "texts" / output_name).read_text().splitlines()) == 5
            else:
                assert job_row.status == "FAILED", input_name
                assert "may read and write" in str(job_row.error) or "no file matches" in str(job_row.error), (
                    job_row.error
                )
        assert [path.name for path in other.iterdir()] == ["in.jsonl"]
