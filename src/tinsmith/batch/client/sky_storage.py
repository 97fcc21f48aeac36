"""The functions of `sky.batch.utils` and the names of `sky.batch.constants`, for formats written for Sky Batch.

They open whatever this server's jobs open: paths, `s3://` and `gs://`. Parts of an output lie beside it, in
`.sky_batch_tmp/JOB`; a writer's methods are called on a staging path, so they are deleted with it
(`formats/sky_writers.py`). Errors are those of the storage: FileNotFoundError, UserError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tinsmith.batch.types import Row
from tinsmith.storage.locations import open_object, open_store
from tinsmith.storage.stores import split

TEMP_DIR_NAME = ".sky_batch_tmp"
BATCH_NAME_PATTERN = "batch_{start:08d}-{end:08d}.jsonl"


def parse_cloud_path(path: str) -> tuple[str, str, str]:
    """The scheme (`file` for a path on this machine), the bucket and the key."""
    return split(path)


def cloud_path_exists(path: str) -> bool:
    store, key = open_store(path)
    return store.exists(key)


def load_jsonl_from_cloud(path: str) -> list[Row]:
    """The rows of a file of JSON lines; empty lines are skipped. Raises ValueError that names the line."""
    rows: list[Row] = []
    with open_object(path) as file:
        for line_number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {line_number} of {path} is not JSON: {error}") from error
    return rows


def save_jsonl_to_cloud(data: Sequence[Mapping[str, object]], cloud_path: str) -> None:
    upload_bytes_to_cloud("".join(json.dumps(row) + "\n" for row in data).encode(), cloud_path)


def upload_bytes_to_cloud(data: bytes, cloud_path: str) -> None:
    store, key = open_store(cloud_path)
    store.put(key, data)


def upload_file_to_cloud(local_path: str, cloud_path: str) -> None:
    upload_bytes_to_cloud(Path(local_path).read_bytes(), cloud_path)


def download_file_from_cloud(cloud_path: str, local_path: str) -> None:
    store, key = open_store(cloud_path)
    with Path(local_path).open("wb") as file:
        file.writelines(store.chunks(key))


def get_batch_path(output_path: str, start_idx: int, end_idx: int, job_id: str) -> str:
    """The path of the part of an output that holds rows `start_idx` to `end_idx`."""
    return f"{_parts_directory(output_path, job_id)}/{BATCH_NAME_PATTERN.format(start=start_idx, end=end_idx)}"


def list_batch_files(output_path: str, job_id: str) -> list[str]:
    """The paths of an output's parts, in the order of their rows."""
    directory = _parts_directory(output_path, job_id)
    store, key = open_store(directory)
    names = (part_key.rpartition("/")[2] for part_key in store.list(key))
    return [f"{directory}/{name}" for name in sorted(names) if name.startswith("batch_")]


def delete_batch_files(output_path: str, job_id: str) -> None:
    store, key = open_store(_parts_directory(output_path, job_id))
    store.delete_many(list(store.list(key)))


def delete_input_batch_files(output_path: str, job_id: str) -> None:
    """Does nothing: workers read the input itself."""


def concatenate_batches_to_output(output_path: str, job_id: str) -> None:
    """Join the parts of an output of JSON lines, and delete them."""
    rows = [row for path in list_batch_files(output_path, job_id) for row in load_jsonl_from_cloud(path)]
    save_jsonl_to_cloud(rows, output_path)
    delete_batch_files(output_path, job_id)


def _parts_directory(output_path: str, job_id: str) -> str:
    parent, slash, _ = output_path.rpartition("/")
    return f"{parent}{slash}{TEMP_DIR_NAME}/{job_id}"
