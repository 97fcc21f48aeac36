"""Rows to and from Ray Data, with Ray itself. Run by `make test-ray`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.data")

from support.ray_cluster import ray_nodes
from tinsmith import batch
from tinsmith.batch.client import ray_data
from tinsmith.batch.client.dataset import Dataset
from tinsmith.batch.types import RowRange

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # of Ray Data itself
]
NUM_ROWS = 1000
ROWS: list[dict[str, Any]] = [
    {"n": index, "text": f"é {index}", "tags": ["a"] * (index % 3), "inner": {"x": index / 2}, "none": None}
    for index in range(NUM_ROWS)
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    import ray

    with ray_nodes(2) as nodes:
        ray.init(address=nodes.address, log_to_driver=False)
        yield


def test_ray_reads_the_rows_of_a_job_in_their_order(tmp_path: Path) -> None:
    files = {
        "json": batch.JsonWriter(f"{tmp_path}/rows.jsonl.gz"),
        "parquet": batch.ParquetWriter(f"{tmp_path}/rows.parquet"),
    }
    for name, writer in files.items():
        part = writer.write_part(ROWS, RowRange(0, NUM_ROWS - 1), f"{tmp_path}/{name}")
        writer.publish([part], f"{tmp_path}/staging-{name}", "error")
    for data in (*(batch.load(writer.path) for writer in files.values()), batch.from_items(ROWS)):
        assert list(data.to_ray().iter_rows()) == ROWS, data
        limited = data.limit(ray_data.SPAN_ROWS + 1).to_ray()
        assert list(limited.iter_rows()) == ROWS[: ray_data.SPAN_ROWS + 1]
    doubled = batch.load(files["json"].path).to_ray().map(lambda row: {"n": row["n"] * 2})
    assert [row["n"] for row in doubled.iter_rows()] == [2 * index for index in range(NUM_ROWS)], "the order stays"
    assert batch.from_items([]).to_ray().count() == 0


def test_a_data_set_of_ray_is_run_once_and_its_rows_are_those_of_a_job(tmp_path: Path) -> None:
    import ray.data

    def note(row: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / f"run-{row['n']}").open("a").write("x")
        return row

    source = ray.data.from_items(ROWS[:300]).map(note)
    data = Dataset.from_ray(source, f"{tmp_path}/kept.parquet")
    mapped = data.map(lambda row: {"twice": row["n"] * 2})
    assert not list(tmp_path.glob("run-*")) and not (tmp_path / "kept.parquet").exists(), "nothing has run"
    assert len(data) == 300
    assert data.take(300) == ROWS[:300]
    assert mapped.take(3)[2] == {**ROWS[2], "twice": 4}
    assert [path.read_text() for path in tmp_path.glob("run-*")] == ["x"] * 300, "once"
    assert source.context.execution_options.preserve_order is False
    assert batch.load(f"{tmp_path}/kept.parquet").take(1) == ROWS[:1]
    assert list(Dataset.from_ray(batch.load(f"{tmp_path}/kept.parquet").to_ray()).to_ray().iter_rows()) == ROWS[:300]
