"""The examples and the code of docs/batch.md run unchanged on one live server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.live import API_KEY, LiveServer
from tinsmith import batch
from tinsmith.batch.pools.specs import parse_pool

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "batch"


def run(server: LiveServer, directory: Path, *words: str) -> str:
    """Run a command in a directory; return its output. It must succeed."""
    environment = {
        **os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY, "COLUMNS": "200",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    completed = subprocess.run(
        words, cwd=directory, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-3000:]
    return completed.stdout


def example(server: LiveServer, directory: Path, name: str) -> str:
    return run(server, directory, sys.executable, str(EXAMPLES / f"{name}.py"), "out")


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.smoke
def test_every_example_is_in_the_readme_and_has_a_test() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert f"examples/batch/{path.name}" in (ROOT / "README.md").read_text()
        assert f'"{path.stem}"' in Path(__file__).read_text()


@pytest.mark.smoke
def test_simple(nano_server: LiveServer, tmp_path: Path) -> None:
    assert "100 rows in" in example(nano_server, tmp_path, "simple")
    rows = lines(tmp_path / "out" / "counts.jsonl")
    assert rows == [{"text": f"word {index}", "count": str(index).count("1")} for index in range(100)]


def test_images(nano_server: LiveServer, tmp_path: Path) -> None:
    from PIL import Image

    example(nano_server, tmp_path, "images")
    manifest = lines(tmp_path / "out" / "manifest.jsonl")
    pictures = sorted((tmp_path / "out" / "png").glob("*.png"))
    assert [path.name for path in pictures] == [f"{index:08d}.png" for index in range(6)]
    assert len(manifest) == 6 and manifest[2]["prompt"] == "moss" and set(manifest[2]) == {"prompt", "brightness"}
    assert len({path.read_bytes() for path in pictures}) == 6
    for path in pictures:
        assert Image.open(path).size == (64, 64)


def test_custom_formats(nano_server: LiveServer, tmp_path: Path) -> None:
    assert "46 rows in" in example(nano_server, tmp_path, "custom_formats")
    table = (tmp_path / "out" / "primes.md").read_text().splitlines()
    assert table[:3] == ["| prime | by_4 | by_6 |", "|---|---|---|", "| 2 | 2 | 2 |"]
    assert len(table) == 48 and table[-1] == "| 199 | 3 | 1 |"


def test_evaluate(nano_server: LiveServer, tmp_path: Path) -> None:
    said = example(nano_server, tmp_path, "evaluate")
    assert "base: 0 of 4" in said and "adapter: 4 of 4" in said
    rows = lines(tmp_path / "out" / "graded.jsonl")
    assert [row["answer"] for row in rows] == [row["adapter"] for row in rows]


def test_synthetic(nano_server: LiveServer, tmp_path: Path) -> None:
    said = example(nano_server, tmp_path, "synthetic")
    before, after = (float(re.search(rf"{name}: ([\d.]+)", said)[1]) for name in ("right before", "after"))  # type: ignore[index]
    assert after > before + 0.3, said
    examples = lines(tmp_path / "out" / "training.jsonl")
    assert f"kept {len(examples)} examples" in said and all(set(row) == {"prompt", "completion"} for row in examples)
    graded = {row["prompt"]: row for row in lines(tmp_path / "out" / "after.jsonl")}
    assert all(row["completion"] == graded[row["prompt"]]["answer"] for row in examples)


def test_the_code_of_the_guide_runs_in_its_order(fake_server: LiveServer, tmp_path: Path) -> None:
    """The first line of a Python block names its file; each line of a shell block is a command."""
    guide = (ROOT / "docs" / "batch.md").read_text().partition("## Operations")[0]
    said = ""
    for language, block in re.findall(r"```(python|bash)\n(.*?)```", guide, re.DOTALL):
        if language == "python":
            name = block.partition("\n")[0].removeprefix("# ")
            (tmp_path / name).write_text(block)
            said += run(fake_server, tmp_path, sys.executable, name)
        else:
            last = json.loads(run(fake_server, tmp_path, "tinsmith", "batch", "list", "--json"))[0]["job_id"]
            commands = re.sub(r"\b3\b", str(last + 1), block)
            assert "SUCCEEDED" in run(fake_server, tmp_path, "bash", "-e", "-c", commands)
    assert [row["loud"] for row in lines(tmp_path / "loud.jsonl")] == ["HELLO!", "BULK!", "JOBS!"]
    assert [row["count"] for row in lines(tmp_path / "counts.jsonl")] == [2, 1, 3, 3]
    assert [row["count"] for row in lines(tmp_path / "copy.jsonl")] == [1, 0, 1, 1]
    assert "2 a bad one ValueError there is something bad in it" in said
    assert [row["length"] for row in lines(tmp_path / "strict.jsonl")] == [7, 5, 9, 13]
    written = batch.read_parquet(f"{tmp_path}/words/").reader
    rows = written.download_batch(0, len(written) - 1, "")
    assert [row["word"] for row in rows] == ["one", "two", "three", "one", "four", "five", "six"]
    assert rows[2] == {"word": "three", "length": 5}
    assert [row["weight"] for row in lines(tmp_path / "weights.jsonl")] == [2, 1, 3, 3]
    assert len(lines(tmp_path / "most.jsonl")) == 3 and len(lines(tmp_path / "rest.jsonl")) == 1


def test_the_pool_of_the_guide_is_one() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "batch.md").read_text(), re.DOTALL)
    spec = parse_pool("gpu", yaml.safe_load(block))
    assert (spec.workers, spec.devices_per_worker) == (2, 1) and "once" in spec.setup
