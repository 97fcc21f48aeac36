"""Bulk jobs: a function over every row of a data set, on a pool of workers, each result written exactly once.

    from tinsmith import batch

    @batch.remote_function
    def shout():
        for rows in batch.load():
            batch.save_results([{"text": row["text"].upper()} for row in rows])

    job = batch.read_json("in.jsonl").map(shout, batch_size=32, output=batch.JsonWriter("out.jsonl"))

Everything is loaded when it is first used: a worker starts without the client, a client without the formats.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinsmith.batch.functions import is_remote_function, remote_function
    from tinsmith.batch.mapper_runtime import RowError, load, save_results
    from tinsmith.batch.protocols import InputReader, JobSpec, OutputWriter
    from tinsmith.batch.readers.lines import JsonReader, TextReader
    from tinsmith.batch.registry import INPUT_READER_REGISTRY, OUTPUT_WRITER_REGISTRY
    from tinsmith.batch.writers.lines import JsonWriter, TextWriter

WHERE = {
    "functions": "is_remote_function remote_function",
    "mapper_runtime": "RowError load save_results",
    "protocols": "InputReader JobSpec OutputWriter",
    "readers.lines": "JsonReader TextReader",
    "registry": "INPUT_READER_REGISTRY OUTPUT_WRITER_REGISTRY",
    "writers.lines": "JsonWriter TextWriter",
}
MODULES = {name: f"tinsmith.batch.{module}" for module, names in WHERE.items() for name in names.split()}

__all__ = [
    "INPUT_READER_REGISTRY",
    "OUTPUT_WRITER_REGISTRY",
    "InputReader",
    "JobSpec",
    "JsonReader",
    "JsonWriter",
    "OutputWriter",
    "RowError",
    "TextReader",
    "TextWriter",
    "is_remote_function",
    "load",
    "remote_function",
    "save_results",
]


def __getattr__(name: str) -> object:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)
