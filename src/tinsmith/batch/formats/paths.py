"""Which format a path names, and readers and writers as they are sent: with paths that mean the same elsewhere."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from tinsmith.batch.formats import registry
from tinsmith.batch.formats.registry import InputReader, OutputWriter
from tinsmith.errors import UserError

FORMAT_OF = {ending: name for name, each in registry.FORMATS.items() for ending in each.extensions}
PACKED = (".gz", ".zst")


def format_of(path: str) -> str:
    """The format that a path's ending names. Raises UserError."""
    plain = path.removesuffix(".gz").removesuffix(".zst").rstrip("*")
    for ending, name in FORMAT_OF.items():
        if plain.endswith(ending):
            return name
    raise UserError(f"the format of {path!r} cannot be told from its name; use batch.read_json or another")


def in_format(writer: OutputWriter, format: str) -> OutputWriter:
    """A writer of another format beside this one's output: `out.parquet`, or `out/`, in `jsonl` is `out.jsonl`. Raises
    UserError."""
    names = {ending: name for ending, name in FORMAT_OF.items() if registry.FORMATS[name].resumes_as}
    ending = f".{format.removeprefix('.')}"
    if ending not in names:
        raise UserError(f"format is {format!r}; it must be one of {[each[1:] for each in names]}")
    base = writer.path.rstrip("/")
    for known in (*PACKED, *FORMAT_OF):
        base = base.removesuffix(known)
    kind = registry.OUTPUT_WRITER_REGISTRY.find(names[ending])
    takes = {each.name for each in dataclasses.fields(kind)}
    column = getattr(writer, "column", None)
    keeps = {"column": column} if "column" in takes and column is not None else {}
    return kind(base + ending, **keeps)  # type: ignore[call-arg]


def sent(one: InputReader | OutputWriter) -> dict[str, Any]:
    """Its dictionary. Workers have a directory of their own, so that a path relative to this one says nothing there."""
    data = one.to_dict()
    if one.in_store and "://" not in one.path:
        data["path"] = os.path.join(os.getcwd(), one.path)
    return data
