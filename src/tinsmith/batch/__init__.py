"""Bulk jobs: a function over every row of a data set, on a pool of workers, each result written exactly once.

    from tinsmith import batch

    @batch.remote_function
    def shout():
        for rows in batch.load():
            batch.save_results([{"text": row["text"].upper()} for row in rows])

    job = batch.read_json("in.jsonl").map(shout, batch_size=32, output=batch.JsonWriter("out.jsonl"))

A name is imported when it is first used: a worker starts without the client, a client without the formats.
"""

# ruff: noqa: F401  the names of `__all__`

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers and editors
    from tinsmith.batch.client.dataset import (
        Dataset,
        from_huggingface,
        from_items,
        read_csv,
        read_images,
        read_json,
        read_openai_batch,
        read_parquet,
        read_sql,
        read_text,
        read_webdataset,
        resume,
    )
    from tinsmith.batch.client.functions import is_remote_function, remote_function
    from tinsmith.batch.client.http import Client
    from tinsmith.batch.client.job import Job, JobFailedError
    from tinsmith.batch.client.loading import load
    from tinsmith.batch.client.local_run import DryRun, RowFailedError
    from tinsmith.batch.formats.csv import CsvReader, CsvWriter
    from tinsmith.batch.formats.huggingface import HuggingFaceReader, HuggingFaceWriter
    from tinsmith.batch.formats.images import ImageReader, ImageWriter
    from tinsmith.batch.formats.lines import ItemsReader, JsonReader, JsonWriter, TextReader, TextWriter
    from tinsmith.batch.formats.openai import OpenAIBatchReader, OpenAIBatchWriter
    from tinsmith.batch.formats.parquet import ParquetReader, ParquetWriter
    from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY, OUTPUT_WRITER_REGISTRY, InputReader, OutputWriter
    from tinsmith.batch.formats.sql import SqlReader, SqlWriter
    from tinsmith.batch.formats.webdataset import WebdatasetReader, WebdatasetWriter
    from tinsmith.batch.operations.base import row_seed
    from tinsmith.batch.operations.grade import Grade
    from tinsmith.batch.operations.rollout import Retry, Rollout, Turns
    from tinsmith.batch.operations.sample import Sample
    from tinsmith.batch.types import JobSpec
    from tinsmith.batch.worker.feed import RowError
    from tinsmith.batch.worker.runtime import save_results

NAMES_BY_MODULE = {
    "client.http": "Client",
    "client.dataset": "Dataset from_huggingface from_items read_csv read_images read_json read_openai_batch "
    "read_parquet read_sql read_text read_webdataset resume",
    "client.functions": "is_remote_function remote_function",
    "client.job": "Job JobFailedError",
    "client.loading": "load",
    "client.local_run": "DryRun RowFailedError",
    "worker.feed": "RowError",
    "worker.runtime": "save_results",
    "operations.base": "row_seed",
    "operations.grade": "Grade",
    "operations.rollout": "Retry Rollout Turns",
    "operations.sample": "Sample",
    "formats.csv": "CsvReader CsvWriter",
    "formats.huggingface": "HuggingFaceReader HuggingFaceWriter",
    "formats.images": "ImageReader ImageWriter",
    "formats.lines": "ItemsReader JsonReader JsonWriter TextReader TextWriter",
    "formats.openai": "OpenAIBatchReader OpenAIBatchWriter",
    "formats.parquet": "ParquetReader ParquetWriter",
    "formats.registry": "INPUT_READER_REGISTRY InputReader OUTPUT_WRITER_REGISTRY OutputWriter",
    "formats.sql": "SqlReader SqlWriter",
    "formats.webdataset": "WebdatasetReader WebdatasetWriter",
    "types": "JobSpec",
}
"""The module of each public name."""
MODULES = {name: f"tinsmith.batch.{module}" for module, names in NAMES_BY_MODULE.items() for name in names.split()}
__all__ = sorted(MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)
