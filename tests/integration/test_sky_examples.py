"""Examples with the names that Sky Batch publishes, and their pools' files, in which only one import differs here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from support import buckets
from support.buckets import Bucket
from support.live import API_KEY, LiveServer, serving

EXAMPLES = Path(__file__).parents[1] / "support" / "sky_examples"
POOLS = {"test-batch-pool": "simple", "diffusion-pool": "diffusion", "custom-fmt-pool": "custom_formats"}


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with buckets.bucket() as new_bucket:
        yield new_bucket


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, bucket: Bucket) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("sky_examples")
    pools = [f"{name}={EXAMPLES / example / 'pool.yaml'}" for name, example in POOLS.items()]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOME", str(directory))
        environment.setenv("SKY_EXAMPLE_PYTHON", sys.executable)
        environment.setenv("SKY_EXAMPLE_PACKAGES", ":".join(path for path in sys.path if path))
        with serving(
            directory / "data", "--backend", "fake", settings={"BATCH_POOLS": json.dumps(pools)}
        ) as new_server:
            yield new_server


def run(server: LiveServer, bucket: Bucket, script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run an example after changing its import."""
    text = (EXAMPLES / script).read_text()
    assert text.count("\nimport sky\n") == 1
    path = directory / Path(script).name
    path.write_text(text.replace("\nimport sky\n", "\nfrom tinsmith.batch import sky\n"))
    (directory / "pool.yaml").write_text((EXAMPLES / script).with_name("pool.yaml").read_text())
    environment = os.environ | {
        "TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY, "SKY_BATCH_BUCKET": bucket.name,
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, str(path)], cwd=directory, env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


def put_rows(bucket: Bucket, key: str, rows: list[dict[str, str]]) -> None:
    bucket.put(key, "".join(json.dumps(row) + "\n" for row in rows).encode())


@pytest.mark.extended
def test_the_simple_example(server: LiveServer, bucket: Bucket, tmp_path: Path) -> None:
    put_rows(bucket, "test.jsonl", [{"text": f"t{index}"} for index in range(5)])
    example = run(server, bucket, "simple/double_text.py", tmp_path)
    assert example.returncode == 0, example.stderr
    assert "the pool test-batch-pool exists" in example.stdout
    assert [line for line in example.stdout.splitlines() if line[:1].isdigit()][-1] == "5. t4t4"
    rows = [json.loads(line) for line in bucket.get("output.jsonl").splitlines()]
    assert rows == [{"text": f"t{index}", "output": f"t{index}" * 2} for index in range(5)]


@pytest.mark.extended
def test_the_example_that_draws_in_an_environment_of_its_own(
    server: LiveServer, bucket: Bucket, tmp_path: Path
) -> None:
    """The pool's setup makes the environment, and a shell command activates it."""
    put_rows(bucket, "prompts.jsonl", [{"prompt": "x" * (index + 1)} for index in range(4)])
    example = run(server, bucket, "diffusion/generate_images.py", tmp_path)
    assert example.returncode == 0, example.stderr
    assert example.stdout.count(" bytes\n") == 4
    assert bucket.get("generated_images/00000003.png").startswith(b"\x89PNG")


@pytest.mark.extended
def test_the_example_with_formats_of_its_own(server: LiveServer, bucket: Bucket, tmp_path: Path) -> None:
    example = run(server, bucket, "custom_formats/process_range.py", tmp_path)
    assert example.returncode == 0, example.stderr
    assert bucket.get("output/texts/00000019.txt") == b"row 19"
    merged = yaml.safe_load(bucket.get("output/metadata.yaml"))
    assert merged == [{"id": index, "squared": index**2} for index in range(20)]
    assert not [key for key in bucket.keys("output/") if ".sky_batch_tmp" in key]


@pytest.mark.extended
def test_a_pool_that_the_server_lacks_is_refused_with_what_to_set(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tinsmith.batch import sky
    from tinsmith.errors import NotSupportedError

    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    path = tmp_path / "pool.yaml"
    path.write_text("pool: {workers: 3}\n")
    assert sky.get(sky.jobs.pool_status(["unknown"])) == []
    with pytest.raises(NotSupportedError, match=rf"TINSMITH_BATCH_POOLS='\[\"unknown={path}\"\]'"):
        sky.jobs.pool_apply(sky.Task.from_yaml(str(path)), pool_name="unknown")
    assert sky.get(sky.jobs.pool_apply(str(path), "test-batch-pool")) == "test-batch-pool"
    (pool,) = sky.get(sky.jobs.pool_status("test-batch-pool"))
    assert pool["workers"] == 3
