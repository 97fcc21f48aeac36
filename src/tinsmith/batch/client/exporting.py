"""What a job has, as a file or directory elsewhere: all of it once it has succeeded, what is committed before that.

The bytes are those that publishing makes of the same batches. Rows are not held in memory, whatever their number; the
list of parts is. An output that is no file (a table) is written in the format that the target's name says.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tinsmith.batch.client.http import Client, Status
from tinsmith.batch.formats import publishing, registry
from tinsmith.batch.formats.protocols import (
    OutputInfo,
    OutputWriter,
    PartInfo,
    Span,
    part_base,
    staging_of,
    writer_of_part,
)
from tinsmith.batch.formats.publishing import MANIFEST, PublishedFile
from tinsmith.batch.worker.reducing import delete_staging
from tinsmith.errors import UserError
from tinsmith.storage.stores import join, open_store

PACKED = (".gz", ".zst")


def export(client: Client, job_id: int, target: str, output: int = 0, if_exists: str = "error") -> OutputInfo:
    """Writes one output of a job to `target`. Raises UserError, FileExistsError, FileNotFoundError."""
    told = client.partial(job_id, limit=1)
    formats = told["outputs"]
    if not 0 <= output < len(formats):
        raise UserError(f"output is {output}; bulk job {job_id} has outputs 0 to {len(formats) - 1}")
    writer = registry.writer_from_dict(formats[output])
    publishing.check_output(target, if_exists)
    name = f"export-{job_id}-{uuid.uuid4().hex[:8]}"
    staging = staging_of(target, name, output)
    try:
        status = client.status(job_id)
        if status["status"] != "SUCCEEDED":
            try:
                return _committed(client, job_id, output, writer, target, name, if_exists, told["part_formats"])
            except FileNotFoundError:
                status = client.status(job_id)  # a job that succeeds meanwhile deletes its parts
                if status["status"] != "SUCCEEDED":
                    raise
        return _published(OutputInfo.from_dict(status["outputs"][output]), writer, target, staging, if_exists)
    finally:
        delete_staging(target, name)


def _committed(
    client: Client,
    job_id: int,
    output: int,
    writer: OutputWriter,
    target: str,
    name: str,
    if_exists: str,
    part_formats: dict[str, dict[str, object]],
) -> OutputInfo:
    """Of the parts as they are now. Raises FileNotFoundError if they are deleted meanwhile."""
    staging = staging_of(target, name, output)
    if not writer.in_store or part_formats:
        other = _writer_for(target) if not writer.in_store else replace(writer, path=target)
        converted = _converted(client, job_id, output, writer, other, name, part_formats)
        return other.publish(list(converted), staging, if_exists)
    _check_name(writer, target)
    parts = [part for _, part in _parts(client, job_id, output)]
    return replace(writer, path=target).publish(parts, staging, if_exists)


def _published(info: OutputInfo, writer: OutputWriter, target: str, staging: str, if_exists: str) -> OutputInfo:
    if not writer.in_store:
        raise UserError(f"the output is {info.path}, which is no file: read it there")
    store, root = open_store(info.path.rstrip("/"))
    if store.exists(root):
        _check_name(writer, target)
        return publishing.publish_file(target, [PartInfo(**info.to_dict())], staging, if_exists)
    manifest = join(root, MANIFEST)
    base = info.path.rstrip("/")
    files = [
        PublishedFile(file["name"], join(base, file["name"]), file["bytes"], file["sha256"])
        for file in json.loads(store.get(manifest))["files"]
    ]
    return publishing.publish_directory(target.rstrip("/") + "/", files, info.rows, staging, if_exists)


def _check_name(writer: OutputWriter, target: str) -> None:
    """Bytes that are packed, or of a directory, stay so."""
    kind = "a directory (with a final slash)" if writer.is_directory else "a file"
    if writer.is_directory != target.endswith("/"):
        raise UserError(f"the output {writer.path} is {kind}, and {target!r} is not")
    for packing in PACKED:
        if writer.path.endswith(packing) != target.endswith(packing):
            raise UserError(f"the output {writer.path} and {target!r} must both end in {packing}, or neither")


def _writer_for(target: str) -> OutputWriter:
    from tinsmith.batch.formats.paths import format_of

    return registry.OUTPUT_WRITER_REGISTRY.find(format_of(target))(target)


def _parts(client: Client, job_id: int, output: int) -> Iterator[tuple[Status, PartInfo]]:
    after = -1
    while found := client.partial(job_id, after)["batches"]:
        for batch in found:
            after = batch["start_idx"]
            if batch["parts"]:
                yield batch, PartInfo.from_dict(batch["parts"][output])


def _converted(
    client: Client,
    job_id: int,
    output: int,
    writer: OutputWriter,
    other: OutputWriter,
    name: str,
    part_formats: dict[str, dict[str, object]],
) -> Sequence[PartInfo]:
    found = []
    for batch, part in _parts(client, job_id, output):
        rows = list((writer_of_part(part, part_formats) or writer).read_part(part))
        base = part_base(other.path, name, output, 0)
        found.append(other.write_part(rows, Span(batch["start_idx"], batch["end_idx"]), base))
    return found
