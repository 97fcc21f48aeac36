"""Formats of one's own: rows from a range, a text file for each row, and one merged YAML file."""

import os
from dataclasses import dataclass
from typing import Any

import sky
from sky.batch import io_formats, utils
from sky.serve import serve_utils
from sky.utils import registry


@registry.INPUT_READER_REGISTRY.type_register(name="range")
@dataclass
class RangeReader(io_formats.InputReader):
    count: int

    def __len__(self) -> int:
        return self.count

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[dict[str, Any]]:
        return [{"index": index} for index in range(start_idx, end_idx + 1)]


@registry.OUTPUT_WRITER_REGISTRY.type_register(name="text_per_row")
@dataclass
class TextPerRowWriter(io_formats.OutputWriter):
    column: str

    def __post_init__(self) -> None:
        if not self.path.startswith("s3://") or not self.path.endswith("/"):
            raise ValueError(f"not a directory of a bucket: {self.path}")

    def upload_batch(self, results: list[dict[str, Any]], start_idx: int, end_idx: int, job_id: str) -> str:
        for index, result in enumerate(results, start_idx):
            utils.upload_bytes_to_cloud(str(result[self.column]).encode(), f"{self.path}{index:08d}.txt")
        return self.path

    def reduce_results(self, job_id: str) -> None:
        pass

    def cleanup(self, job_id: str) -> None:
        pass


@registry.OUTPUT_WRITER_REGISTRY.type_register(name="merged_yaml")
@dataclass
class MergedYamlWriter(io_formats.OutputWriter):
    column: str

    def upload_batch(self, results: list[dict[str, Any]], start_idx: int, end_idx: int, job_id: str) -> str:
        batch_path = utils.get_batch_path(self.path, start_idx, end_idx, job_id)
        utils.save_jsonl_to_cloud([result[self.column] for result in results], batch_path)
        return batch_path

    def reduce_results(self, job_id: str) -> None:
        import yaml

        rows: list[dict[str, Any]] = []
        for batch_path in utils.list_batch_files(self.path, job_id):
            rows.extend(utils.load_jsonl_from_cloud(batch_path))
        utils.upload_bytes_to_cloud(yaml.safe_dump(rows).encode(), self.path)

    def cleanup(self, job_id: str) -> None:
        utils.delete_batch_files(self.path, job_id)
        utils.delete_input_batch_files(self.path, job_id)


@sky.batch.remote_function
def process_items():
    for batch in sky.batch.load():
        sky.batch.save_results(
            [
                {"text": f"row {item['index']}", "metadata": {"id": item["index"], "squared": item["index"] ** 2}}
                for item in batch
            ]
        )


def ensure_pool(pool_name: str, pool_yaml: str) -> None:
    try:
        if sky.stream_and_get(sky.jobs.pool_status([pool_name])):
            return
    except sky.exceptions.ClusterNotUpError:
        pass
    task = sky.Task.from_yaml(pool_yaml)
    task.name = pool_name
    sky.stream_and_get(sky.jobs.pool_apply(task, pool_name=pool_name, mode=serve_utils.DEFAULT_UPDATE_MODE))


def main() -> None:
    bucket = os.environ["SKY_BATCH_BUCKET"]
    ensure_pool("custom-fmt-pool", os.path.join(os.path.dirname(__file__), "pool.yaml"))
    sky.batch.Dataset(RangeReader(path="", count=20)).map(
        process_items,
        pool_name="custom-fmt-pool",
        batch_size=5,
        output=[
            TextPerRowWriter(f"s3://{bucket}/output/texts/", column="text"),
            MergedYamlWriter(f"s3://{bucket}/output/metadata.yaml", column="metadata"),
        ],
    )


if __name__ == "__main__":
    main()
