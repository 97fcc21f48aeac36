"""Hugging Face data sets: read from a directory that `save_to_disk` made or by a name on the hub, and written as such a
directory, which `datasets.load_from_disk` maps into memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from tinsmith.batch.formats import input_versions, publishing
from tinsmith.batch.formats.input_versions import Version
from tinsmith.batch.formats.offset_cache import cache_directory
from tinsmith.batch.formats.parquet import Sink, TableWriter
from tinsmith.batch.formats.part_lists import FilledParts
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY, OUTPUT_WRITER_REGISTRY, InputReader, absolute_path
from tinsmith.batch.formats.row_sizes import tokens_of_table
from tinsmith.batch.types import OutputInfo, PartInfo, Row
from tinsmith.errors import UserError
from tinsmith.storage.locations import open_object

SIZED_ROWS = 65_536
"""Rows whose sizes are read together."""


@INPUT_READER_REGISTRY.type_register(name="huggingface")
@dataclass
class HuggingFaceReader(InputReader):
    """`split` is required if the data set has several."""

    split: str | None = None
    name: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        directory = absolute_path(self.path)
        if not Path(directory).is_dir():
            return
        self.path = directory
        if _is_saved(directory) and (ignored := [field for field in ("name", "revision") if getattr(self, field)]):
            raise ValueError(f"{ignored} are of data sets on the hub, and {directory} was saved; leave them out")

    def __len__(self) -> int:
        return len(self._dataset)

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        columns = self._dataset[start_idx : end_idx + 1]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def row_sizes(self) -> Iterator[int]:
        for table in self._dataset.with_format("arrow").iter(SIZED_ROWS):
            yield from tokens_of_table(table)

    def version(self) -> Version:
        if Path(self.path).is_dir():
            return input_versions.of_files(sorted(str(path) for path in Path(self.path).rglob("*") if path.is_file()))
        return {self.path: {"fingerprint": getattr(self._dataset, "_fingerprint", None)}}

    @cached_property
    def _dataset(self) -> Any:  # noqa: ANN401
        import datasets

        if _is_saved(self.path):
            loaded: Any = datasets.load_from_disk(self.path)
        else:
            loaded = datasets.load_dataset(self.path, self.name, split=self.split, revision=self.revision)
        if not isinstance(loaded, dict):
            if self.split is not None and _is_saved(self.path) and str(loaded.split) != self.split:
                raise UserError(f"split is {self.split!r}, and {self.path} has one split, {loaded.split}; leave it out")
            return loaded
        if self.split not in loaded:
            raise UserError(f"split is {self.split!r}; the splits of {self.path} are {sorted(loaded)}")
        return loaded[self.split]


@OUTPUT_WRITER_REGISTRY.type_register(name="huggingface")
@dataclass
class HuggingFaceWriter(TableWriter):
    """Parts are Parquet; the output is one Arrow file, which is not compressed so that it can be mapped into memory."""

    def __post_init__(self) -> None:
        self.path = self.path.rstrip("/") + "/" if self.path else ""

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        filled = FilledParts(parts)
        arrow = self.encode_parts(filled, self.unify_schemas(filled))
        data = publishing.stage_file(staging, "data-00000-of-00001.arrow", arrow, filled)
        state = {
            "_data_files": [{"filename": data.name}],
            "_fingerprint": hashlib.sha256(data.part.sha256.encode()).hexdigest()[:16],
            **dict.fromkeys(("_format_columns", "_format_type", "_split")),
            "_format_kwargs": {},
            "_output_all_columns": False,
        }
        files = [
            data,
            publishing.stage_file(staging, "state.json", [orjson.dumps(state)]),
            publishing.stage_file(staging, "dataset_info.json", [b"{}"]),
        ]
        return publishing.publish_directory(self.path, files, sum(part.rows for part in filled), staging, if_exists)

    def read_published(self, output: OutputInfo) -> Iterator[Row]:
        import pyarrow.ipc

        for file in publishing.iter_published_files(output, is_directory=True):
            if file.path.endswith(".arrow"):
                with open_object(file.path) as source:
                    for batch in pyarrow.ipc.open_stream(source):
                        yield from batch.to_pylist()

    def open_table(self, sink: Sink, schema: Any) -> Any:  # noqa: ANN401
        import pyarrow.ipc

        return pyarrow.ipc.new_stream(sink, schema)


def _is_saved(path: str) -> bool:
    """Whether a path is a directory that `save_to_disk` made."""
    return Path(path).is_dir() and any(Path(path).glob("*.json"))


def reader_of(dataset: object, split: str | None, **options: Any) -> HuggingFaceReader:  # noqa: ANN401
    """A reader of a name, a directory, or a data set in memory, which is first saved in this machine's cache for its
    workers."""
    if isinstance(dataset, str):
        return HuggingFaceReader(dataset, split, **options)
    if options:
        raise UserError(f"{sorted(options)} are of data sets on the hub, and this one is in memory; leave them out")
    if split is not None:
        if not isinstance(dataset, dict) or split not in dataset:
            splits = sorted(dataset) if isinstance(dataset, dict) else "none that can be chosen"
            raise UserError(f"split is {split!r}; the splits of this data set are {splits}")
        dataset = dataset[split]
    fingerprint = getattr(dataset, "_fingerprint", None)
    if fingerprint is None:
        raise UserError(f"{type(dataset).__name__} is not a data set with one split; pass one of its splits")
    directory = cache_directory() / f"huggingface-{fingerprint}"
    if not directory.exists():
        unfinished = directory.with_name(f"{directory.name}.unfinished")
        dataset.save_to_disk(str(unfinished))  # type: ignore[attr-defined]
        unfinished.rename(directory)
    return HuggingFaceReader(str(directory))
