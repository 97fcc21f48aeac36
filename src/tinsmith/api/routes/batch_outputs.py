"""What a bulk job has written: the first rows of an output, the file itself, and its errors by kind.

A file is read without any code of its job, and only formats of one file that this server knows. Reads are bounded:
`MAX_PREVIEW_BYTES` for the first rows, `MAX_DOWNLOAD_BYTES` for a file. The file must have the size that the job
published; a file of a confined job must still be below the job's roots, and a link in place of a file is not followed.
"""

from __future__ import annotations

import csv
import io
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any

import orjson
from pydantic import Field
from starlette.responses import Response

from tinsmith.api.declaration import ThreadPool, operation
from tinsmith.api.openapi import COUNT, FILE_TYPE, LIST, TEXTS, fields
from tinsmith.api.request import Call, JsonObject
from tinsmith.api.routes.batch import MAX_SHOWN_COLUMNS, find_job, shorten, shorten_error
from tinsmith.api.routes.downloads import StoredFile, file_response
from tinsmith.batch.coordinator.job_run import error_row
from tinsmith.batch.formats.lines import open_decompressed
from tinsmith.batch.formats.publishing import MANIFEST
from tinsmith.batch.formats.registry import FORMATS, SHIPPED_KEYS
from tinsmith.errors import ForbiddenError, NotFoundError, TooLargeError, UserError
from tinsmith.runtime.sizes import MEBIBYTE, format_bytes
from tinsmith.storage.locations import is_below, open_store
from tinsmith.storage.stores import Store, join, split
from tinsmith.wire.fields import Query

MAX_PREVIEW_BYTES = MEBIBYTE
MAX_ROW_GROUP_BYTES = 64 * MEBIBYTE
"""The largest row group, decompressed, of a Parquet file whose rows are shown."""
MAX_DOWNLOAD_BYTES = 256 * MEBIBYTE
READABLE = ("json", "text", "csv", "parquet")


class OutputQuery(Query):
    output: Annotated[int, Field(ge=0, le=63, description="the number of the output, from 0")] = 0


class PreviewQuery(OutputQuery):
    rows: Annotated[int, Field(ge=1, le=50)] = 10


@operation(
    "GET",
    "/batch/jobs/{job_id}/preview",
    "Read the first rows of an output",
    answer=fields({"columns": TEXTS, "rows": LIST}),
    query=PreviewQuery,
    errors=(403, 404),
    threads=ThreadPool.TRANSFERS,
)
def preview(call: Call, query: PreviewQuery) -> JsonObject:
    """Return the first rows of a published output, with long values cut."""
    output, store, key = _find_output(call, query.output)
    path = str(output["path"])
    with store.open(key, MAX_PREVIEW_BYTES) as source:
        if output["format"] == "parquet":
            rows = _read_parquet(source, query.rows)
        else:
            with open_decompressed(source, path) as file:
                data = file.read(MAX_PREVIEW_BYTES)
            text = _cut_last_line(data).decode("utf-8", errors="replace")
            rows = list(itertools.islice(_read_rows(output, text), query.rows))
    columns = list(dict.fromkeys(name for row in rows for name in row))[:MAX_SHOWN_COLUMNS]
    return {
        "columns": columns,
        "rows": [{name: shorten(_plain(row[name])) for name in columns if name in row} for row in rows],
    }


@operation(
    "GET",
    "/batch/jobs/{job_id}/download",
    "Download an output",
    answer=FILE_TYPE,
    query=OutputQuery,
    errors=(206, 403, 404, 413, 416),
    threads=ThreadPool.TRANSFERS,
)
def download(call: Call, query: OutputQuery) -> Response:
    """Return the file of a published output, whole or by range."""
    output, store, key = _find_output(call, query.output)
    if output["bytes"] > MAX_DOWNLOAD_BYTES:
        raise TooLargeError(
            f"output {query.output} has {format_bytes(output['bytes'])}, and a download has at most "
            f"{format_bytes(MAX_DOWNLOAD_BYTES)}; read it where it is: {output['path']}"
        )
    name = PurePosixPath(str(output["path"])).name
    headers = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
    stored = StoredFile(None, int(output["bytes"]), lambda: store.open(key))
    return file_response(call.request, stored, FILE_TYPE, headers, filename=name)


@operation(
    "GET",
    "/batch/jobs/{job_id}/error_kinds",
    "Count a job's errors by kind",
    answer=fields({"kinds": LIST, "rows_failed": COUNT}),
)
def error_kinds(call: Call) -> JsonObject:
    """Return the most frequent kinds: the class of the error and the beginning of its message, without numbers, with
    one failed row of each.
    """
    job, batch_jobs = find_job(call), call.services.batch_jobs
    kinds: list[JsonObject] = []
    for kind in batch_jobs.error_kinds(job.job_id):
        examples = batch_jobs.row_errors(job.job_id, 1, kind.first_row - 1)
        example = shorten_error(error_row(examples[0])) if examples else None
        kinds.append({**kind._asdict(), "example": example})
    return {"kinds": kinds, "rows_failed": job.rows_failed}


def _find_output(call: Call, index: int) -> tuple[Mapping[str, Any], Store, str]:
    """A published output, its store and its key. Raises UserError if it cannot be read here."""
    job = find_job(call)
    outputs = call.services.batch_jobs.outputs(job.job_id)
    output = next((entry for entry in outputs if entry["output_idx"] == index), None)
    if output is None:
        raise UserError(f"output is {index}, and bulk job {job.job_id} has published {len(outputs)} outputs so far")
    spec = call.services.batch_jobs.spec(job.job_id)
    written, path = spec.all_output_formats[index], str(output["path"])
    kind = str(written.get("format"))
    unreadable = UserError(f"the server cannot read rows of the format {kind!r}; read them with job.outputs: {path}")
    if kind not in FORMATS or not FORMATS[kind].confined or any(name in written for name in SHIPPED_KEYS):
        raise unreadable
    if spec.roots is not None and not is_below(path, spec.roots):
        raise ForbiddenError(f"output {index} is not below the locations that the job may reach any more: {path}")
    store, key = open_store(join(path, MANIFEST) if path.endswith("/") else path)
    if split(path)[0] == "file" and os.path.islink(key):
        raise ForbiddenError(f"there is a link in place of output {index}: {path}")
    try:
        size = store.head(key).size
    except FileNotFoundError:
        raise NotFoundError(f"output {index} is not there any more, or not on this server's machine: {path}") from None
    if kind not in READABLE:
        raise unreadable
    if path.endswith("/") or written.get("rows_per_file") is not None:
        raise UserError(f"output {index} is a directory of files, and only single files are read here: {path}")
    if size != output["bytes"]:
        raise NotFoundError(f"output {index} has changed since the job published it: {path}")
    return {**output, "format": kind, "delimiter": str(written.get("delimiter") or ",")}, store, key


def _cut_last_line(data: bytes) -> bytes:
    """The data without a line that may go on; the whole data if it is one line."""
    if len(data) < MAX_PREVIEW_BYTES or b"\n" not in data:
        return data
    return data[: data.rindex(b"\n")]


def _read_rows(output: Mapping[str, Any], text: str) -> Iterator[dict[str, Any]]:
    kind = output["format"]
    if kind == "csv":
        yield from csv.DictReader(io.StringIO(text, newline=""), delimiter=output["delimiter"], restkey="...")
        return
    for line in text.removesuffix("\n").split("\n"):
        if kind == "text":
            yield {"text": line}
        elif line:
            yield _read_json(line)


def _read_json(line: str) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {"text": line}  # a row longer than the preview
    return row if isinstance(row, dict) else {"value": row}


def _read_parquet(source: Any, count: int) -> list[dict[str, Any]]:  # noqa: ANN401  any file
    """The first rows of a Parquet file. Raises UserError if they cannot be read in little memory."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("the server has no pyarrow to read Parquet: install tinsmith[batch]") from None
    try:
        file = pyarrow.parquet.ParquetFile(source)
        if not file.metadata.num_row_groups:
            return []
        size = file.metadata.row_group(0).total_byte_size
        if size > MAX_ROW_GROUP_BYTES:
            raise UserError(f"the first row group has {format_bytes(size)}, too much for a preview; download the file")
        batch = next(file.iter_batches(count, row_groups=[0]), None)
    except pyarrow.ArrowException as error:
        raise UserError(f"the output is no readable Parquet file: {error}") from error
    return [] if batch is None else batch.to_pylist()


def _plain(value: object) -> object:
    """A value as JSON can hold it."""
    if isinstance(value, bytes):
        return f"{format_bytes(len(value))} of binary data"
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
