"""Outputs of a user's writer, read and exported by a client without running the writer's code in its process.

Such a writer travels as source, and its parts may be pickles. A child of this process, as a worker has one for its
operations, builds the writer, reads its parts and publishes them, and sends rows as plain values: JSON's, bytes, dates,
times and decimals. It ends with this process, or when its writer is collected.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from tinsmith.batch.formats.registry import OutputWriter, is_shipped
from tinsmith.batch.types import JobSpec, OutputInfo, PartInfo, Row
from tinsmith.batch.worker.children import ChildError, IoProcess
from tinsmith.batch.worker.frames import Message
from tinsmith.errors import UserError


@dataclass
class ShippedWriter(OutputWriter):
    """A proxy for the writer of a user's class: `data` is that writer's dictionary. `part_formats` has the dictionaries
    of the writers of older parts, by the prefix of their paths."""

    data: dict[str, Any] = field(default_factory=dict)
    part_formats: dict[str, dict[str, Any]] = field(default_factory=dict)
    _reader: IoProcess | None = field(default=None, init=False, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        return {**self.data, "path": self.path}

    @property
    def column(self) -> Any:  # noqa: ANN401  a field of the user's class
        return self.data.get("column")

    def read_part(self, part: PartInfo) -> Iterator[Row]:
        return self._read("read_part", part.to_dict())

    def read_published(self, output: OutputInfo) -> Iterator[Row]:
        return self._read("read_published", output.to_dict())

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        """Publishes in the child, which converts older parts, too."""
        name = staging.rpartition("/")[0].rpartition("/")[2]
        spec = JobSpec("", {}, [self.to_dict()], 1, if_exists=if_exists, part_formats=self.part_formats)
        with tempfile.NamedTemporaryFile("wb", prefix="tinsmith-parts-", delete=False) as lines:
            for part in parts:
                lines.write(orjson.dumps([part.to_dict()]) + b"\n")
        with _child(spec, name) as child:
            *_, end = child.run({"op": "publish", "output_idx": 0, "path": lines.name, "token": None})
            return OutputInfo.from_dict(_check_reply(end)["end"]["output"])

    def _read(self, op: str, source: Mapping[str, Any]) -> Iterator[Row]:
        child = self._start_reader()
        is_complete = False
        try:
            for message in child.run({"op": op, "source": source}):
                yield from _check_reply(message).get("rows", ())
            is_complete = True
        except ChildError as error:
            raise UserError(f"the rows of {self.path} cannot be read: {error}") from None
        finally:
            if not is_complete:  # the rest of its messages would answer the next request
                self._reader = None
                child.reap()

    def _start_reader(self) -> IoProcess:
        if self._reader is None:
            self._reader = _start(JobSpec("", {}, [self.to_dict()], 1), "read")
            weakref.finalize(self, self._reader.reap)
        return self._reader


def client_writer(data: Mapping[str, Any], part_formats: Mapping[str, dict[str, Any]] | None = None) -> OutputWriter:
    """The writer of a dictionary, for a client: one that runs code only in a child."""
    if not is_shipped(data):
        return OutputWriter.from_dict(data)
    return ShippedWriter(str(data["path"]), dict(data), dict(part_formats or {}))


@contextlib.contextmanager
def _child(spec: JobSpec, name: str) -> Iterator[IoProcess]:
    child = _start(spec, name)
    try:
        yield child
    finally:
        child.reap()


def _start(spec: JobSpec, name: str) -> IoProcess:
    descriptor, log = tempfile.mkstemp(prefix="tinsmith-reader-")
    os.close(descriptor)
    child = IoProcess(spec.to_dict(), name, Path(log))
    weakref.finalize(child, Path(log).unlink, missing_ok=True)
    return child


def _check_reply(message: Message) -> Message:
    """Raises the error that the child reports, as far as a client can act on it."""
    if "error" not in message:
        return message
    kinds = {"FileNotFoundError": FileNotFoundError, "FileExistsError": FileExistsError}
    raise kinds.get(message["error_type"], UserError)(message["message"])
