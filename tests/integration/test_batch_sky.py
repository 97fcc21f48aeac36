"""Code for `sky.batch` runs after changing one import: two examples, rewritten with the original names."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.live import API_KEY, LiveServer, serving
from tinsmith import batch
from tinsmith.batch.client.http import Client

SIMPLE = """
from tinsmith.batch import sky

@sky.batch.remote_function
def double_text():
    import sky.batch

    for rows in sky.batch.load():
        sky.batch.save_results([{**row, "output": row["text"] * 2} for row in rows])

ds = sky.batch.Dataset(sky.batch.JsonReader(path="prompts.jsonl"))
print(ds, ds.path, ds.input_format)
job_id = ds.map(double_text, "local", 2, sky.batch.JsonWriter("out/results.jsonl"))
print("JOB", int(job_id))
"""

CUSTOM = """
from dataclasses import dataclass

from tinsmith.batch import InputReader, OutputWriter, sky
from tinsmith.batch import INPUT_READER_REGISTRY, OUTPUT_WRITER_REGISTRY

@INPUT_READER_REGISTRY.type_register(name="range")
@dataclass
class RangeReader(InputReader):
    count: int = 0

    def __len__(self):
        return self.count

    def download_batch(self, start_idx, end_idx, cache_dir):
        return [{"id": index} for index in range(start_idx, end_idx + 1)]

@OUTPUT_WRITER_REGISTRY.type_register(name="text_files")
@dataclass
class TextFilesWriter(OutputWriter):
    def upload_batch(self, results, start_idx, end_idx, job_id):
        import os

        os.makedirs(self.path, exist_ok=True)
        for index, row in enumerate(results, start_idx):
            with open(os.path.join(self.path, f"{index:08d}.txt"), "w") as file:
                file.write(f"{row['id']} squared is {row['squared']}")

@OUTPUT_WRITER_REGISTRY.type_register(name="yaml")
@dataclass
class YamlWriter(OutputWriter):
    def upload_batch(self, results, start_idx, end_idx, job_id):
        import os
        import yaml

        directory = os.path.join(os.path.dirname(self.path), f".yaml-{job_id}")
        os.makedirs(directory, exist_ok=True)
        with open(os.path.join(directory, f"{start_idx:08d}.yaml"), "w") as file:
            yaml.safe_dump(results, file)

    def reduce_results(self, job_id):
        import os

        directory = os.path.join(os.path.dirname(self.path), f".yaml-{job_id}")
        with open(self.path, "w") as merged:
            for name in sorted(os.listdir(directory)):
                with open(os.path.join(directory, name)) as part:
                    merged.write(part.read())

    def cleanup(self, job_id):
        import os, shutil

        shutil.rmtree(os.path.join(os.path.dirname(self.path), f".yaml-{job_id}"), ignore_errors=True)

@sky.batch.remote_function
def square():
    import sky.batch

    for rows in sky.batch.load():
        sky.batch.save_results([{"id": row["id"], "squared": row["id"] ** 2} for row in rows])

sky.batch.Dataset(RangeReader(path="unused", count=20)).map(
    square, pool_name="local", batch_size=3, output=[TextFilesWriter("out/texts/"), YamlWriter("out/merged.yaml")]
)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("sky") / "data", "--backend", "fake") as new_server:
        yield new_server


def run(server: LiveServer, directory: Path, script: str) -> str:
    import os

    (directory / "script.py").write_text(script)
    environment = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY}
    completed = subprocess.run(
        [sys.executable, "script.py"], cwd=directory, env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.mark.extended
def test_the_simple_example_runs_by_changing_its_import(server: LiveServer, tmp_path: Path) -> None:
    assert importlib.util.find_spec("sky") is None or "tinsmith" in str(sys.modules.get("sky"))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": f"t{index}"}) + "\n" for index in range(50)))
    out = run(server, tmp_path, SIMPLE)
    assert "prompts.jsonl json" in out and "Dataset(JsonReader(" in out
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert rows == [{"text": f"t{index}", "output": f"t{index}" * 2} for index in range(50)]
    job_id = int(out.rpartition("JOB")[2])
    assert batch.Job(job_id, Client(server.url, API_KEY)).progress.batches == 25


@pytest.mark.extended
def test_the_example_with_formats_of_its_own_runs_by_changing_its_import(server: LiveServer, tmp_path: Path) -> None:
    import yaml

    run(server, tmp_path, CUSTOM)
    texts = sorted((tmp_path / "out" / "texts").glob("*.txt"))
    assert [path.name for path in texts] == [f"{index:08d}.txt" for index in range(20)]
    assert [path.read_text() for path in texts] == [f"{index} squared is {index**2}" for index in range(20)]
    merged = yaml.safe_load((tmp_path / "out" / "merged.yaml").read_text())
    assert merged == [{"id": index, "squared": index**2} for index in range(20)]


def test_the_sky_module_exists_only_on_request() -> None:
    script = (
        "import sys; from tinsmith import batch; batch.Dataset; assert 'sky' not in sys.modules\n"
        "from tinsmith.batch import sky; import sky as other, sky.batch as b\n"
        "assert other is sky and b is batch and b.JsonReader is batch.JsonReader"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_an_installed_skypilot_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "sky").mkdir()
    (tmp_path / "sky" / "__init__.py").write_text("real = True")
    script = "from tinsmith.batch import sky as ours\nimport sky\nassert sky.real and sky is not ours"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=tmp_path)


@pytest.mark.extended
def test_a_job_is_gone_on_with_by_its_output(server: LiveServer, tmp_path: Path) -> None:
    client = Client(server.url, API_KEY)
    options: dict[str, Any] = {
        "output": batch.JsonWriter(f"{tmp_path}/o.jsonl"), "batch_size": 2, "stream": False, "client": client,
        "if_exists": "resume", "limits": {"max_retries": 0, "backoff_s": 0.01},
    }  # fmt: skip

    def picky(row: dict[str, Any], gate: str) -> dict[str, Any]:
        from pathlib import Path

        if row["n"] == 5 and not Path(gate).exists():
            raise ValueError("not this one")
        return row

    rows = [{"n": index} for index in range(8)]
    gate = tmp_path / "gate"
    first = batch.from_items(rows).map(picky, fn_kwargs={"gate": str(gate)}, **options)
    assert isinstance(first, batch.Job) and first.wait(check=False)["status"] == "FAILED"
    gate.touch()
    second = batch.from_items(rows).map(picky, fn_kwargs={"gate": str(gate)}, **options)
    assert isinstance(second, batch.Job)
    assert second.wait()["resume_from"] == int(first)
    third = batch.from_items(rows).map(picky, fn_kwargs={"gate": str(gate)}, **options)
    assert isinstance(third, batch.Job) and int(third) == int(second), "it is done"
    assert [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()] == rows


def test_positional_arguments_cannot_repeat_as_keywords() -> None:
    with pytest.raises(TypeError, match="multiple values for argument 'batch_size'"):
        batch.from_items([]).map(len, "local", 2, batch_size=3)  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional arguments"):
        batch.from_items([]).map(len, "local", 2, batch.JsonWriter("o.jsonl"), None, True, 1)  # type: ignore[misc]


@pytest.mark.extended
def test_the_names_for_the_states_of_batches(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinsmith.batch import sky
    from tinsmith.errors import NotSupportedError

    client = Client(server.url, API_KEY)
    monkeypatch.setenv("TINKER_BASE_URL", client.base_url)
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    job = batch.from_items([{"n": n} for n in range(5)]).map(
        lambda row: row, batch_size=2, output=batch.JsonWriter(f"{tmp_path}/o.jsonl"), client=client
    )
    assert sky.is_batch_job(int(job)) and not sky.is_batch_job(10**6)
    states = sky.get_batch_states(int(job))
    assert [(batch_state["start_idx"], batch_state["end_idx"], batch_state["status"]) for batch_state in states] == [
        (0, 1, "COMPLETED"), (2, 3, "COMPLETED"), (4, 4, "COMPLETED"),
    ]  # fmt: skip
    for change in (sky.set_batch_status, sky.reset_dispatched_batches):
        with pytest.raises(NotSupportedError, match=r"Job\(ID\)\.resume\(\)"):
            change(int(job), 0, "PENDING")
