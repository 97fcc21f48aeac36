"""Bulk jobs that run one after another during an attack: one maps a function, the other samples from the service."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from fault.crash.restarted_server import RestartedServer
from tinsmith import batch
from tinsmith.batch.client.http import Client
from tinsmith.errors import TinsmithError

TENANT = "cal"
ROWS = 60
PAUSE_S = 0.4  # of one batch: long enough for several kills during one job
GIVE_UP_S = 300.0
MODEL = "tinsmith/nano"


@batch.remote_function
def double_slowly(pause_s: float) -> None:
    import time

    from tinsmith import batch

    for rows in batch.load():
        time.sleep(pause_s)
        batch.save_results([{"text": row["text"], "output": row["text"] * 2} for row in rows])


SAMPLED = batch.Sample(MODEL, prompt="text", max_tokens=6, temperature=1.0, seed=5, tokens=True)


class BulkJobs:
    """Starts a job when the last one has ended; `outputs` are the files of those that succeeded, by kind."""

    def __init__(self, server: RestartedServer, directory: Path) -> None:
        self.outputs: dict[str, list[bytes]] = {"doubled": [], "sampled": []}
        self._client = Client(server.url, server.keys[TENANT], patience_s=GIVE_UP_S)
        self._directory = directory
        self._directory.mkdir()
        self._input = directory / "in.jsonl"
        self._input.write_text("".join(f'{{"text":"row {index}"}}\n' for index in range(ROWS)))
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run_and_keep_error, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the running job. Raises the error of any failed job."""
        self._stopping.set()
        self._thread.join()
        self._client.close()
        if self._failure is not None:
            raise self._failure

    def _run_and_keep_error(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - raised by stop
            self._failure = error

    def _run(self) -> None:
        run_index = 0
        while not self._stopping.is_set():
            for kind, start in (("doubled", self._double), ("sampled", self._sample)):
                target = self._directory / f"{kind}-{run_index}.jsonl"
                _persistently(lambda start=start, target=target: start(target)).wait()
                self.outputs[kind].append(target.read_bytes())
            run_index += 1

    def _double(self, target: Path) -> batch.Job:
        return batch.read_json(str(self._input)).map(
            double_slowly, fn_kwargs={"pause_s": PAUSE_S}, batch_size=2, **self._to(target)
        )

    def _sample(self, target: Path) -> batch.Job:
        return batch.read_json(str(self._input)).map(SAMPLED, batch_size=4, **self._to(target))

    def _to(self, target: Path) -> dict:
        output = batch.JsonWriter(str(target))
        return {"output": output, "client": self._client, "stream": False, "if_exists": "resume"}


def _persistently(start: Callable[[], batch.Job]) -> batch.Job:
    """Start a job, and retry until the server accepts it."""
    deadline = time.monotonic() + GIVE_UP_S
    while True:
        try:
            return start()
        except TinsmithError as error:
            if "no connection" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.5)
