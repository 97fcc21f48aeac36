"""Environment variables and secrets of bulk jobs: where their values are, and where they are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.http_harness import ALICE, BOB, Harness, close, make_harness
from support.live import API_KEY, LiveServer, serving
from tinsmith import batch
from tinsmith.batch.client.functions import describe_function
from tinsmith.batch.client.http import Client
from tinsmith.batch.operations import describe_operations
from tinsmith.batch.secrets import SecretFiles
from tinsmith.batch.types import pack_payload
from tinsmith.errors import NotSupportedError, UserError

VALUE = "sk-value-that-is-in-no-file-but-its-own"
ROTATED = "sk-rotated-value-that-is-in-no-file-but-its-own"


@pytest.fixture(scope="module")
def secrets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("secrets")
    (directory / "API_KEY").write_text(f"{VALUE}\n")
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, secrets_dir: Path) -> Iterator[LiveServer]:
    settings = {"BATCH_SECRETS_DIR": str(secrets_dir), "LOG_LEVEL": "DEBUG"}
    with serving(tmp_path_factory.mktemp("server") / "data", "--backend", "fake", settings=settings) as new_server:
        yield new_server


def look(row: dict[str, Any], stop: str) -> dict[str, Any]:
    import hashlib
    import os
    from pathlib import Path

    command_lines = [
        path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK) and path.exists()
    ]
    key = os.environ["API_KEY"]
    if Path(stop).exists() and row["n"] == 1:
        raise ValueError("stopped")
    return {
        "digest": hashlib.sha256(key.encode()).hexdigest(),
        "mode": os.environ["MODE"],
        "shown": any(key.encode() in line for line in command_lines),
    }


def files_with(directory: Path, text: str) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


@pytest.mark.extended
def test_a_secret_reaches_the_function_and_is_stored_nowhere(
    server: LiveServer, secrets_dir: Path, tmp_path: Path
) -> None:
    import hashlib

    client, stop = Client(server.url, API_KEY), tmp_path / "stop"
    stop.touch()
    data = batch.from_items([{"n": 0}, {"n": 1}])
    job = data.map(
        look, fn_kwargs={"stop": str(stop)}, output=batch.JsonWriter(str(tmp_path / "out.jsonl")), batch_size=1,
        env={"MODE": "fast"}, secrets=["API_KEY"], stream=False, client=client,
    )  # fmt: skip
    assert job.wait(check=False)["status"] == "FAILED"
    answers = [job.status(), client.partial(job.job_id), list(job.errors()), job.batches(), list(job.logs())]
    assert VALUE not in json.dumps(answers, default=str)
    stop.unlink()
    (secrets_dir / "API_KEY").write_text(ROTATED)
    try:
        job.resume().wait()
    finally:
        (secrets_dir / "API_KEY").write_text(VALUE)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["digest"] for row in rows] == [hashlib.sha256(key.encode()).hexdigest() for key in (VALUE, ROTATED)]
    assert [(row["mode"], row["shown"]) for row in rows] == [("fast", False)] * 2
    for value in (VALUE, ROTATED):
        assert files_with(server.data_dir, value) == [] and files_with(tmp_path, value) == []
    assert files_with(server.data_dir, "API_KEY"), "the specification has the name"


def test_variables_are_there_before_libraries_are_imported(server: LiveServer, tmp_path: Path) -> None:
    def threads(row: dict[str, Any]) -> dict[str, Any]:
        import sys

        return {"hash": sys.flags.hash_randomization, "utf8": sys.flags.utf8_mode}

    output = tmp_path / "out.jsonl"
    variables = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
    batch.from_items([{"n": 0}]).map(
        threads, output=batch.JsonWriter(str(output)), env=variables, client=Client(server.url, API_KEY)
    )
    assert json.loads(output.read_text()) == {"n": 0, "hash": 0, "utf8": 1}


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    directory = tmp_path / "secrets"
    (directory / "alice").mkdir(parents=True)
    (directory / "SHARED").write_text("for all")
    (directory / "alice" / "ONLY_ALICE").write_text("hers")
    (tmp_path / "data").mkdir()
    new_harness = make_harness(tmp_path / "data", batch_tenants=("alice", "bob"), batch_secrets_dir=directory)
    yield new_harness
    close(new_harness)


def job(**changes: object) -> dict[str, object]:
    return {
        "batch_serialized_fn": pack_payload(describe_function(keep)),
        "batch_input_format": {"format": "json", "path": "/in.jsonl"},
        "batch_output_formats": [{"format": "json", "path": "/out.jsonl"}],
        "batch_size": 1,
        **changes,
    }


@batch.remote_function
def keep() -> None:
    for rows in batch.load():
        batch.save_results(rows)


def test_a_secret_of_one_tenant_is_no_others(harness: Harness) -> None:
    harness.ok("batch/jobs", job(secrets=["SHARED"]), BOB)
    harness.ok("batch/jobs", job(secrets=["ONLY_ALICE"]), ALICE)
    for name in ("ONLY_ALICE", "alice", "MISSING"):
        refused = harness.post("batch/jobs", job(secrets=[name]), BOB)
        assert refused.status_code == 400, refused.text
        assert f"secrets has '{name}', and the server does not have it" in refused.text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"secrets": ["../SHARED"]}, "secrets"),
        ({"secrets": "SHARED"}, "secrets"),
        ({"env": {"A B": "x"}}, "env"),
        ({"env": {"A": 1}}, "env"),
        ({"env": {"A": "x\0"}}, "env"),
        ({"env": {"SHARED": "x"}, "secrets": ["SHARED"]}, "env and secrets both have ['SHARED']"),
    ],
)
def test_names_that_no_variable_has_are_refused(harness: Harness, changes: dict[str, object], says: str) -> None:
    refused = harness.post("batch/jobs", job(**changes), ALICE)
    assert refused.status_code in (400, 422) and says in refused.text, refused.text


def test_variables_are_code_and_of_no_use_to_operations(tmp_path: Path) -> None:
    new_harness = make_harness(tmp_path, batch_tenants=("alice",))
    operation = pack_payload(describe_operations([batch.Grade(by="exact", reference="r")]))
    for changes in ({"env": {"LD_PRELOAD": "/evil.so"}}, {"secrets": ["SHARED"]}):
        body = job(batch_serialized_fn=operation, **changes)
        refused = new_harness.post("batch/jobs", body, BOB)
        assert refused.status_code == 403, refused.text
    close(new_harness)
    with pytest.raises(NotSupportedError, match=r"\['env'\] are options of functions"):
        batch.from_items([{"q": "x"}]).map(batch.Grade(by="exact", reference="q", output="q"), env={"A": "b"})


def test_files_that_hold_no_text_are_refused_without_their_contents(tmp_path: Path) -> None:
    secrets = SecretFiles(tmp_path)
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe")
    (tmp_path / "NUL").write_bytes(b"a\0b")
    (tmp_path / "LONG").write_bytes(b"a" * 70_000)
    (tmp_path / "LINES").write_bytes(b"first\nsecond\r\n")
    for name, says in [("BINARY", "not UTF-8"), ("NUL", "NUL"), ("LONG", "at most"), ("NONE", "does not have it")]:
        with pytest.raises(UserError, match=says):
            secrets.read("alice", [name])
    assert secrets.read("alice", ["LINES"]) == {"LINES": "first\nsecond"}
    with pytest.raises(UserError, match="has no TINSMITH_BATCH_SECRETS_DIR"):
        SecretFiles().read("alice", ["LINES"])
