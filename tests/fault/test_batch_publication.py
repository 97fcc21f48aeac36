"""A publisher that goes on after its coordinator has lost the job, and a later job has overwritten the output."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from support.buckets import bucket
from support.coordinating import LIMITS, PATIENCE_S, CoordinatorSetup, start_process, submit
from support.databases import fresh_url
from support.live import freeze
from tinsmith import batch
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.formats.registry import OUTPUT_WRITER_REGISTRY
from tinsmith.batch.types import OutputInfo, PartInfo
from tinsmith.db.factory import open_database


@OUTPUT_WRITER_REGISTRY.type_register(name="pausing")
@dataclass
class PausingWriter(batch.JsonWriter):
    """Its first publisher pauses until `gate` exists, when it has read the parts and its output is not visible yet."""

    directory: str = ""

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        import time
        from pathlib import Path

        from tinsmith import batch
        from tinsmith.storage import stores

        directory, read_ahead = Path(self.directory), stores.read_ahead
        if (directory / "paused").exists():
            return batch.JsonWriter.publish(self, parts, staging, if_exists)

        def read_and_pause(sources):
            yield from read_ahead(sources)
            (directory / "paused").touch()
            while not (directory / "gate").exists():
                time.sleep(0.02)

        stores.read_ahead = read_and_pause
        try:
            output = batch.JsonWriter.publish(self, parts, staging, if_exists)
            (directory / "result").write_text("published")
            return output
        except BaseException as error:
            (directory / "result").write_text(type(error).__name__)
            raise


@batch.remote_function
def copy_rows() -> None:
    from tinsmith import batch

    for rows in batch.load():
        batch.save_results(rows)


@batch.remote_function
def shout() -> None:
    from tinsmith import batch

    for rows in batch.load():
        batch.save_results([{"text": row["text"].upper()} for row in rows])


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def test_a_publisher_of_a_lost_job_does_not_replace_the_output_of_a_later_job(tmp_path: Path) -> None:
    url = fresh_url(tmp_path)
    with bucket() as objects:
        database = open_database(url)
        jobs, path = BatchJobs(database), f"{objects.url}/out.jsonl"
        pausing = PausingWriter(path, directory=str(tmp_path)).to_dict()
        options = {"if_exists": "overwrite", "limits": replace(LIMITS, lease_s=1.0)}
        job_id = submit(jobs, tmp_path, copy_rows, batch_output_formats=[pausing], **options)
        first = start_process(CoordinatorSetup(url, str(tmp_path), job_id, "first"))
        try:
            _wait_for((tmp_path / "paused").exists, first)
            freeze(first.pid, tmp_path)
            second = start_process(CoordinatorSetup(url, str(tmp_path), job_id, "second"))
            assert second.wait(PATIENCE_S) == 0, (tmp_path / "second.log").read_text()[-3000:]
            assert jobs.find("local", job_id).status == "SUCCEEDED" and b"t19" in objects.get("out.jsonl")
            plain = {"format": "json", "path": path}
            later_id = submit(jobs, tmp_path, shout, batch_output_formats=[plain], **options)
            third = start_process(CoordinatorSetup(url, str(tmp_path), later_id, "third"))
            assert third.wait(PATIENCE_S) == 0, (tmp_path / "third.log").read_text()[-3000:]
            published = objects.get("out.jsonl")
            assert published == b"".join(b'{"text":"T%d"}\n' % index for index in range(20))
            (tmp_path / "gate").touch()
            _wait_for((tmp_path / "result").exists, first)
            assert (tmp_path / "result").read_text() == "StaleWriterError"
            first.send_signal(signal.SIGCONT)
            assert first.wait(PATIENCE_S) == 0
            assert objects.get("out.jsonl") == published
            assert not objects.keys(".tinsmith_batch_tmp/out"), "a token is deleted with its publication"
        finally:
            (tmp_path / "gate").touch()
            first.kill()
            first.wait()
            database.close()
