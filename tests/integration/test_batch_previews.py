"""The first rows, the files and the kinds of errors of real jobs, as the dashboard reads them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.live import API_KEY
from tinsmith import batch
from tinsmith.api.routes import batch_outputs
from tinsmith.batch.client.http import Client
from tinsmith.batch.client.job import Job
from tinsmith.batch.formats.registry import OutputWriter

ROWS = [{"i": index, "text": f"row {index}, with a comma"} for index in range(30)]


def fail_some(row: dict[str, Any]) -> dict[str, Any]:
    if row["i"] % 10 == 3:
        raise KeyError(f"no column {row['i']}")
    if row["i"] == 20:
        raise ValueError("a bad row")
    return {"long": "x" * 1000}


def double(row: dict[str, Any]) -> dict[str, Any]:
    return {"twice": 2 * row["i"]}


def run_job(client: Client, writer: OutputWriter, **options: Any) -> Job:  # noqa: ANN401
    function = options.pop("function", double)
    job = batch.from_items(ROWS).map(function, output=writer, client=client, **options)
    assert isinstance(job, Job)
    return job


def read(client: Client, path: str) -> httpx.Response:
    return httpx.get(f"{client.base_url}/api/v1/batch/jobs/{path}", headers={"X-API-Key": API_KEY}, timeout=60)


WRITERS = {
    "jsonl": batch.JsonWriter,
    "csv": batch.CsvWriter,
    "tsv": batch.CsvWriter,
    "jsonl.gz": batch.JsonWriter,
    "parquet": batch.ParquetWriter,
}


@pytest.mark.extended
@pytest.mark.parametrize("ending", list(WRITERS))
def test_the_first_rows_of_an_output_are_shown(client: Client, tmp_path: Path, ending: str) -> None:
    job = run_job(client, WRITERS[ending](f"{tmp_path}/out.{ending}"), batch_size=10)
    answer = read(client, f"{job.job_id}/preview?rows=3")
    assert answer.status_code == 200, answer.text
    shown = answer.json()
    assert shown["columns"] == ["i", "text", "twice"]
    assert [str(row["i"]) for row in shown["rows"]] == ["0", "1", "2"]
    assert shown["rows"][1]["text"] == "row 1, with a comma" and str(shown["rows"][2]["twice"]) == "4"
    file = read(client, f"{job.job_id}/download")
    assert file.content == (tmp_path / f"out.{ending}").read_bytes()
    assert f'filename="out.{ending}"' in file.headers["content-disposition"]
    assert read(client, f"{job.job_id}/download?output=1").status_code == 400


def test_what_is_not_the_output_of_the_job_is_not_read(client: Client, tmp_path: Path) -> None:
    job = run_job(client, batch.JsonWriter(f"{tmp_path}/out.jsonl"), batch_size=10)
    path = tmp_path / "out.jsonl"
    content = path.read_bytes()
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * len(content))
    path.unlink()
    path.symlink_to(secret)
    for what in ("preview", "download"):
        refusal = read(client, f"{job.job_id}/{what}")
        assert refusal.status_code == 403 and "link in place" in refusal.text
    path.unlink()
    path.write_bytes(content + b"\n")
    assert "has changed since the job published it" in read(client, f"{job.job_id}/preview").text
    os.unlink(path)
    assert read(client, f"{job.job_id}/download").status_code == 404


def test_directories_are_refused_by_name(client: Client, tmp_path: Path) -> None:
    job = run_job(client, batch.ParquetWriter(f"{tmp_path}/out/"), batch_size=10)
    refusal = read(client, f"{job.job_id}/preview")
    assert refusal.status_code == 400 and "directory of files" in refusal.text


def test_errors_are_counted_by_kind_with_an_example(client: Client, tmp_path: Path) -> None:
    job = run_job(
        client, batch.JsonWriter(f"{tmp_path}/out.jsonl"), function=fail_some, batch_size=10, max_failed_rows=10
    )
    kinds = read(client, f"{job.job_id}/error_kinds").json()
    assert kinds["rows_failed"] == 4
    assert [(kind["error_type"], kind["head"], kind["rows"], kind["first_row"]) for kind in kinds["kinds"]] == [
        ("KeyError", "'no column #'", 3, 3),
        ("ValueError", "a bad row", 1, 20),
    ]
    assert kinds["kinds"][0]["example"]["row"] == ROWS[3]
    rows = read(client, f"{job.job_id}/preview?rows=1").json()["rows"]
    assert len(rows[0]["long"]) < 300 and "1000 characters" in rows[0]["long"]
    status = read(client, str(job.job_id)).json()
    (stage,) = status["stages"]
    assert (stage["rows_in"], stage["rows_out"], stage["rows_failed"], stage["batches"]) == (30, 26, 4, 3)
    assert stage["device"] == "CPU" and stage["rows_per_s"] > 0 and "fail_some" in stage["name"]


def test_the_output_of_failed_rows_is_read_like_the_others(client: Client, tmp_path: Path) -> None:
    errors = batch.JsonWriter(f"{tmp_path}/errors.jsonl")
    job = run_job(
        client,
        batch.JsonWriter(f"{tmp_path}/out.jsonl"),
        function=fail_some,
        batch_size=10,
        max_failed_rows=10,
        errors=errors,
    )
    answer = read(client, f"{job.job_id}/preview?output=1")
    assert answer.status_code == 200, answer.text
    assert [row["idx"] for row in answer.json()["rows"]] == [3, 13, 20, 23]
    file = read(client, f"{job.job_id}/download?output=1")
    assert file.status_code == 200 and file.content == (tmp_path / "errors.jsonl").read_bytes()
    assert read(client, f"{job.job_id}/preview?output=2").status_code == 400


def test_a_preview_reads_few_bytes(tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"n": index, "pad": "x" * 900}).encode() + b"\n" for index in range(5000))
    cut = batch_outputs._cut_last_line(lines[: batch_outputs.MAX_PREVIEW_BYTES])
    assert cut.endswith(b"}") and len(cut) < batch_outputs.MAX_PREVIEW_BYTES
    assert all(json.loads(line) for line in cut.splitlines())
    assert batch_outputs._cut_last_line(b"no end") == b"no end"
