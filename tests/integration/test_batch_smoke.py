"""The requirements of sky.batch's smoke tests, against a live server; docs/batch.md has the list."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.coordinating import PATIENCE_S, CoordinatorSetup, start_process, submit
from support.databases import fresh_url
from tinsmith import batch
from tinsmith.batch.client.dataset import Dataset
from tinsmith.batch.client.http import Client
from tinsmith.batch.client.job import Job
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.formats import registry
from tinsmith.batch.formats.registry import InputReader, OutputWriter
from tinsmith.db.factory import open_database
from tinsmith.errors import UserError

QUICK = {"backoff_s": 0.01, "grace_s": 1.0}


@batch.remote_function
def double() -> None:
    from tinsmith import batch

    for rows in batch.load():
        batch.save_results([{"text": row["text"], "output": row["text"] * 2} for row in rows])


@batch.remote_function
def double_slowly() -> None:
    import time

    from tinsmith import batch

    for rows in batch.load():
        time.sleep(0.03)
        batch.save_results([{"text": row["text"], "output": row["text"] * 2} for row in rows])


@batch.remote_function
def fail_some() -> None:
    from tinsmith import batch

    for rows in batch.load():
        if any(row["text"].startswith("FAIL_") for row in rows):
            raise ValueError("a row that fails")
        batch.save_results([{"text": row["text"], "output": row["text"] * 2} for row in rows])


def input_of(directory: Path, texts: list[str]) -> str:
    path = directory / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def start_job(client: Client, data: object, function: Callable[..., object], output: object, **options: Any) -> Job:  # noqa: ANN401
    all_options = {"batch_size": 2, "stream": False, "limits": QUICK, **options}
    job = Dataset(data).map(function, output=output, client=client, **all_options)  # type: ignore[arg-type]
    assert isinstance(job, Job)
    return job


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def until(condition: Callable[[], Any]) -> Any:  # noqa: ANN401
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)
    return value


def test_simple(client: Client, tmp_path: Path) -> None:
    texts = [f"item {index}" for index in range(50)]
    output = batch.JsonWriter(str(tmp_path / "out.jsonl"))
    job = start_job(client, batch.JsonReader(input_of(tmp_path, texts)), double, output, name="simple")
    job.wait()
    (listed,) = (row for row in client.jobs() if row["job_id"] == int(job))
    assert (listed["status"], listed["pool"], listed["name"]) == ("SUCCEEDED", "local", "simple")
    assert (listed["batch_completed_batches"], listed["batch_total_batches"]) == (25, 25)
    assert rows_of(tmp_path / "out.jsonl") == [{"text": text, "output": text * 2} for text in texts]


def test_diffusion(client: Client, tmp_path: Path) -> None:
    """One function with two outputs: an image per row, and a manifest."""

    @batch.remote_function
    def paint() -> None:
        from PIL import Image

        from tinsmith import batch

        for rows in batch.load():
            painted = []
            for row in rows:
                shade = len(row["prompt"]) * 8 % 256
                image = Image.new("RGB", (8, 6))
                for x in range(8):
                    for y in range(6):
                        image.putpixel((x, y), (shade, x * 30, y * 40))
                painted.append({"prompt": row["prompt"], "shade": shade, "image": image})
            batch.save_results(painted)

    from PIL import Image

    prompts = ["a cat", "a lighthouse", "three kettles on a stove"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    images = batch.ImageWriter(f"{tmp_path}/images/", column="image")
    manifest = batch.JsonWriter(str(tmp_path / "manifest.jsonl"), column=["prompt", "shade"])
    job = start_job(client, batch.JsonReader(f"{tmp_path}/in.jsonl"), paint, [images, manifest])
    job.wait()
    assert sorted(path.name for path in (tmp_path / "images").glob("*.png")) == [
        "00000000.png", "00000001.png", "00000002.png",
    ]  # fmt: skip
    written = rows_of(tmp_path / "manifest.jsonl")
    assert written == [{"prompt": prompt, "shade": len(prompt) * 8 % 256} for prompt in prompts]
    for index, row in enumerate(written):
        with Image.open(tmp_path / "images" / f"{index:08d}.png") as image:
            assert image.size == (8, 6) and image.convert("RGB").getpixel((3, 2)) == (row["shade"], 90, 80)
    assert [output.rows for output in job.outputs] == [3, 3]


@registry.INPUT_READER_REGISTRY.type_register(name="smoke_range")
@dataclass
class RangeReader(InputReader):
    """A reader of numbers without a file."""

    count: int = 0

    def __len__(self) -> int:
        return self.count

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[dict[str, Any]]:
        return [{"id": index} for index in range(start_idx, end_idx + 1)]


@registry.OUTPUT_WRITER_REGISTRY.type_register(name="smoke_text")
@dataclass
class TextFilesWriter(OutputWriter):
    """Writes one file per row, so that there is nothing to merge."""

    def upload_batch(self, results: list[dict[str, Any]], start_idx: int, end_idx: int, job_id: str) -> None:
        Path(self.path).mkdir(parents=True, exist_ok=True)
        for index, row in enumerate(results, start_idx):
            (Path(self.path) / f"{index:08d}.txt").write_text(f"{row['id']} squared is {row['squared']}")


@registry.OUTPUT_WRITER_REGISTRY.type_register(name="smoke_yaml")
@dataclass
class YamlWriter(OutputWriter):
    """Writes a file per batch and merges them."""

    def upload_batch(self, results: list[dict[str, Any]], start_idx: int, end_idx: int, job_id: str) -> None:
        directory = Path(f"{self.path}.{job_id}")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{start_idx:08d}-{end_idx:08d}.yaml").write_text(yaml.safe_dump(results))

    def reduce_results(self, job_id: str) -> None:
        merged: list[Any] = []
        for path in sorted(Path(f"{self.path}.{job_id}").glob("*.yaml")):
            merged += yaml.safe_load(path.read_text())
        Path(self.path).write_text(yaml.safe_dump(merged))

    def cleanup(self, job_id: str) -> None:
        import shutil

        shutil.rmtree(f"{self.path}.{job_id}")


def test_custom_formats(client: Client, tmp_path: Path) -> None:
    @batch.remote_function
    def square() -> None:
        from tinsmith import batch

        for rows in batch.load():
            batch.save_results([{"id": row["id"], "squared": row["id"] ** 2} for row in rows])

    texts, merged = TextFilesWriter(f"{tmp_path}/texts/"), YamlWriter(f"{tmp_path}/all.yaml")
    start_job(client, RangeReader("numbers", count=20), square, [texts, merged], batch_size=3).wait()
    files = sorted((tmp_path / "texts").glob("*.txt"))
    assert [path.name for path in files] == [f"{index:08d}.txt" for index in range(20)]
    assert [path.read_text() for path in files] == [f"{index} squared is {index**2}" for index in range(20)]
    assert yaml.safe_load((tmp_path / "all.yaml").read_text()) == [{"id": i, "squared": i * i} for i in range(20)]


def test_cancel_leaves_the_pool_to_others(client: Client, tmp_path: Path) -> None:
    source = batch.JsonReader(input_of(tmp_path, [f"t{index}" for index in range(500)]))
    job = start_job(client, source, double_slowly, batch.JsonWriter(f"{tmp_path}/out.jsonl"))
    until(lambda: job.status()["status"] == "RUNNING")
    assert job.cancel()["status"] in ("CANCELLING", "CANCELLED")
    final = job.wait(check=False)
    assert final["status"] == "CANCELLED" and final["batch_total_batches"] == 250
    assert final["batch_completed_batches"] < 250 and not (tmp_path / "out.jsonl").exists()
    after = start_job(client, [{"text": "a"}], double, batch.JsonWriter(f"{tmp_path}/after.jsonl"))
    after.wait()
    assert rows_of(tmp_path / "after.jsonl") == [{"text": "a", "output": "aa"}]


def test_resume_does_the_rest_only(client: Client, tmp_path: Path) -> None:
    texts = [f"t{index}" for index in range(80)]
    source = batch.JsonReader(input_of(tmp_path, texts))
    job = start_job(client, source, double_slowly, batch.JsonWriter(f"{tmp_path}/out.jsonl"))
    until(lambda: job.status()["batch_completed_batches"] >= 5)
    job.cancel()
    job.wait(check=False)
    completed = {state["start_idx"]: state for state in job.batches() if state["status"] == "COMPLETED"}
    assert 5 <= len(completed) < 40
    resumed = job.resume()
    assert resumed.wait()["batch_total_batches"] == 40
    again = {state["start_idx"]: state for state in resumed.batches()}
    assert len(again) == 40
    for start_idx, state in completed.items():
        assert (again[start_idx]["parts"], again[start_idx]["attempt_id"]) == (state["parts"], state["attempt_id"])
    assert rows_of(tmp_path / "out.jsonl") == [{"text": text, "output": text * 2} for text in texts]


@pytest.mark.extended
def test_resume_of_a_failed_job_with_another_function(client: Client, tmp_path: Path) -> None:
    texts = [f"FAIL_{index}" if index in (4, 13) else f"t{index}" for index in range(20)]
    source = batch.JsonReader(input_of(tmp_path, texts))
    output = batch.JsonWriter(f"{tmp_path}/out.jsonl")
    job = start_job(client, source, fail_some, output)
    assert job.wait(check=False)["status"] == "FAILED"
    start_job(client, source, double, output, resume_from=int(job)).wait()
    assert rows_of(tmp_path / "out.jsonl") == [{"text": text, "output": text * 2} for text in texts]


def test_a_job_that_runs_is_not_resumed(client: Client, tmp_path: Path) -> None:
    """Neither directly nor with resume_from; after its cancellation both work."""
    source = batch.JsonReader(input_of(tmp_path, [f"t{index}" for index in range(200)]))
    output = batch.JsonWriter(f"{tmp_path}/out.jsonl")
    job = start_job(client, source, double_slowly, output)
    until(lambda: job.status()["status"] == "RUNNING")
    for refused in (job.resume, lambda: start_job(client, source, double, output, resume_from=int(job))):
        with pytest.raises(UserError, match="cancel it first"):
            refused()
    assert len([row for row in client.jobs() if row["resume_from"] == int(job)]) == 0
    job.cancel()
    job.wait(check=False)
    start_job(client, source, double, output, resume_from=int(job)).wait()
    assert len(rows_of(tmp_path / "out.jsonl")) == 200


@pytest.mark.extended
def test_progress_never_goes_back_when_the_server_is_killed(tmp_path: Path, database_kind: str) -> None:
    """The server is killed twice; batches committed before a kill remain and are not repeated."""
    url = fresh_url(tmp_path, database_kind)
    database = open_database(url)
    jobs = BatchJobs(database)
    try:
        setup = CoordinatorSetup(url, str(tmp_path), submit(jobs, tmp_path, double_slowly, rows=60))
        counts: list[int] = []

        def read_progress() -> int:
            counts.append(jobs.find("local", setup.job_id).completed_batches)
            return counts[-1]

        for enough in (5, 15):
            process = start_process(setup)
            until(lambda enough=enough: read_progress() >= enough)
            process.send_signal(signal.SIGKILL)
            process.wait()
            committed = {state["batch_idx"]: state for state in jobs.get_batch_states(setup.job_id) if state["parts"]}
            assert len(committed) == read_progress()
        last = start_process(setup)
        until(lambda: (read_progress(), last.poll() is not None)[1])
        assert last.returncode == 0, (tmp_path / "here.log").read_text()[-3000:]
        assert counts == sorted(counts) and read_progress() == 30
        states = {state["batch_idx"]: state for state in jobs.get_batch_states(setup.job_id)}
        assert {index: states[index] for index in committed} == committed
        assert [row["text"] for row in rows_of(tmp_path / "out.jsonl")] == [f"t{index}" for index in range(60)]
    finally:
        database.close()
