"""Bulk jobs and security: what runs where, who may run it, and which files a job reaches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from live import LiveServer, serving
from tinsmith import batch
from tinsmith.batch import registry
from tinsmith.batch.client import Client
from tinsmith.batch.dataset import Dataset
from tinsmith.batch.protocols import InputReader

MARKER = "a text that only the code of this job holds"

# Every Python that finds this file writes down which code it compiles, runs and unpickles, and what it imports.
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
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Path]]:
    """A server each of whose processes writes down what it runs."""
    directory = tmp_path_factory.mktemp("watched")
    (directory / "sitecustomize.py").write_text(HOOK)
    (directory / "logs").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory))
        patch.setenv("WATCHED", str(directory / "logs"))
        with serving(directory / "data", "--backend", "fake") as server:
            yield server, directory / "logs"


def test_a_server_runs_and_unpickles_nothing_of_a_job(watched: tuple[LiveServer, Path], tmp_path: Path) -> None:
    server, logs = watched
    client = Client(server.url, "tml-test")
    marker = MARKER

    @batch.remote_function(serializer="cloudpickle")
    def compare() -> None:
        from tinsmith import batch

        for rows in batch.load():
            batch.save_results([{"marker": row["marker"], "same": row["marker"] == marker} for row in rows])

    output = batch.JsonWriter(str(tmp_path / "out.jsonl"))
    Dataset(MarkedReader("nowhere")).map(compare, output=output, stream=False, client=client).wait()
    client.close()
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [
        {"marker": MARKER, "same": True}
    ] * 3
    seen = {path.name: path.read_text() for path in logs.iterdir()}
    own = seen.pop(str(server.process.pid))
    assert "compile " in own and "exec " in own, "the server is watched"
    below = "".join(seen.values())
    assert MARKER in below and "pickle.find_class" in below, "somebody ran it"
    assert MARKER not in own
    assert "pickle.find_class" not in own
    imported = {line for line in own.splitlines() if line.startswith("import ")}
    for module in ("cloudpickle", "functions", "adapters", "mapper_runtime", "reducing", "planning", "child"):
        name = module if module == "cloudpickle" else f"tinsmith.batch.{module}"
        assert not [line for line in imported if f"'{name}'" in line], name
