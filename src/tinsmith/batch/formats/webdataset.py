"""WebDataset tar files: the members that share a name up to the first dot are one row, `__key__` and their endings.

A column's name is a member's ending, and gives its type: `txt` is text, `cls` a whole number, `json` JSON, any other
bytes. The output is a directory with one tar file for each batch; a sample's key is the row's `__key__`, or its index
in the input.

Invariants:
- Written, each row is one sample: its key is unique in the output, which is checked when it is published, and the
  `webdataset` library splits each member's name into that key and the column's name.
- Extraction writes below its own directory: a name with `..` or a root is neither written nor read.
- Read, adjacent members of one shard with the same key are a sample, as in that library. Two samples may have the same
  key in an input; a member that occurs twice in a sample is refused.
"""

from __future__ import annotations

import io
import re
import sqlite3
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import IO

import orjson

from tinsmith.batch.formats import publishing
from tinsmith.batch.formats.encoding import encode
from tinsmith.batch.formats.part_lists import FilledParts
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY, OUTPUT_WRITER_REGISTRY, DirectoryWriter, InputReader
from tinsmith.batch.formats.row_sizes import tokens_in
from tinsmith.batch.types import OutputInfo, PartInfo, Row, RowRange
from tinsmith.errors import UserError
from tinsmith.storage.locations import locations, open_object, open_store

KEY = "__key__"
META = re.compile(r"__[^/]*__($|/)")
"""Members that the library skips."""


@dataclass(frozen=True)
class ShardSample:
    location: str
    key: str
    members: list[tuple[str, int, int]]


@INPUT_READER_REGISTRY.type_register(name="webdataset")
@dataclass
class WebdatasetReader(InputReader):
    """`path` is a tar file, a directory with a final slash, or a pattern."""

    in_store = True

    @cached_property
    def _samples(self) -> list[ShardSample]:
        names = [name for name in locations(self.path) if not self.path.endswith("/") or name.endswith(".tar")]
        return [sample for samples in self.open_files(names, samples_of) for sample in samples]

    def __len__(self) -> int:
        return len(self._samples)

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        return [_row(sample) for sample in self._samples[start_idx : end_idx + 1]]

    def row_sizes(self) -> Iterator[int]:
        return (tokens_in(sum(size for _, _, size in sample.members)) for sample in self._samples)


def samples_of(location: str) -> list[ShardSample]:
    """The samples of one file, in order. Raises UserError for a file or a member that cannot be read."""
    with open_object(location) as source:
        return samples_in(source, location)


def samples_in(source: IO[bytes], location: str) -> list[ShardSample]:
    samples: list[ShardSample] = []
    try:
        with tarfile.open(fileobj=source, mode="r:") as archive:
            for member in archive:
                if not member.isfile() or (split := _split(member.name, location)) is None:
                    continue
                key, ending = split
                if not samples or samples[-1].key != key:
                    samples.append(ShardSample(location, key, []))
                members = samples[-1].members
                if any(ending == name for name, _, _ in members):
                    raise UserError(f"{location} has the member {member.name!r} twice in one sample; remove one")
                if ending == KEY:
                    raise UserError(f"{location} has the member {member.name!r}, but {KEY} is its key; rename it")
                members.append((ending, member.offset_data, member.size))
    except tarfile.ReadError as error:
        raise UserError(f"{location} is not a tar file: {error}. Unpack one that is compressed") from None
    return samples


def _split(name: str, location: str) -> tuple[str, str] | None:
    """The key and the ending of a member; None for one that belongs to no sample. Raises UserError."""
    if name.startswith("/") or ".." in name.split("/"):
        raise UserError(
            f"{location} has the member {name!r}, whose name leads out of the directory where it would be extracted; "
            "make the tar file anew with relative names"
        )
    name = "/".join(part for part in name.split("/") if part not in ("", "."))
    directory, slash, file = name.rpartition("/")
    stem, dot, ending = file.partition(".")
    return (directory + slash + stem, ending) if stem and dot and not META.match(name) else None


def _row(sample: ShardSample) -> Row:
    store, key = open_store(sample.location)
    contents = store.get_ranges(key, [(offset, offset + size) for _, offset, size in sample.members])
    row: Row = {"__key__": sample.key}
    for (ending, _, _), data in zip(sample.members, contents, strict=True):
        row[ending] = _value(ending, data)
    return row


def _value(ending: str, data: bytes) -> object:
    kind = ending.rpartition(".")[2].lower()
    if kind == "json":
        return orjson.loads(data)
    if kind == "txt":
        return data.decode()
    if kind == "cls":
        return int(data)
    return data


@OUTPUT_WRITER_REGISTRY.type_register(name="webdataset")
@dataclass
class WebdatasetWriter(DirectoryWriter):
    """One tar file for each batch. `key` names the column with the samples' keys; a row without `__key__` gets its
    index in the input, and with `key=None` every row does. Neither that column nor `__key__` is a member."""

    key: str | None = KEY

    def check(self, row: Row) -> None:
        self._members(row, 0)

    def write_part(self, rows: Sequence[Row | None], span: RowRange, part_base: str) -> PartInfo:
        self.check_one_each(rows, span)
        buffer, indices = io.BytesIO(), dict[str, int]()
        numbered = True
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for index, row in enumerate(rows, span.start_idx):
                if row is None:
                    continue
                numbered = numbered and self.key not in row
                key, members = self._members(row, index)
                if (other := indices.setdefault(key, index)) != index:
                    raise ValueError(f"rows {other} and {index} have the key {key!r}, and {UNIQUE_KEY_RULE}")
                for name, data in members:
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        extension = NUMBERED_EXTENSION if numbered else KEYED_EXTENSION
        return publishing.store_part(part_base, span, extension, buffer.getvalue(), len(indices), separate=True)

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        filled = FilledParts(parts)
        if any(part.path.endswith(f".{KEYED_EXTENSION}") for part in filled):
            self._check_unique(filled)
        return publishing.publish_parts(self.path, filled, "shard", ".tar", staging, if_exists)

    def read_part(self, part: PartInfo) -> Iterator[Row]:
        reader = WebdatasetReader(part.path)
        for index in range(len(reader)):
            yield from reader.download_batch(index, index, "")

    def _members(self, row: Row, index: int) -> tuple[str, list[tuple[str, bytes]]]:
        """The key of a row's sample, and its members by name. Raises ValueError, TypeError, KeyError."""
        key = self._key(row, index)
        members = {}
        for ending, value in row.items():
            if ending not in (self.key, KEY):
                _check_ending(ending)
                members[f"{key}.{ending}"] = _member(ending, value)
        if not members:
            raise ValueError(f"the row {key!r} has no column beside its key, and a sample has one member or more")
        if len({name.lower() for name in members}) < len(members):
            raise ValueError(f"the columns {sorted(members)} differ in case only, which readers ignore; rename one")
        if skipped := next(filter(META.match, members), None):
            raise ValueError(f"{skipped!r} is a name that readers of WebDataset skip; rename the key or the column")
        return key, list(members.items())

    def _key(self, row: Row, index: int) -> str:
        if self.key is None or (self.key == KEY and KEY not in row):
            return f"{index:08d}"
        if self.key not in row:
            raise KeyError(f"the row has no column {self.key!r} for its key; it has {sorted(map(str, row))}")
        value = row[self.key]
        if not isinstance(value, str):
            raise TypeError(
                f"{self.key} is {value!r}, a {type(value).__name__}; a key is text: use str. {NUMBERING_ADVICE}"
            )
        parts = value.split("/")
        if any(part in ("", ".", "..") for part in parts) or any(ord(sign) < 32 or sign in "\\\x7f" for sign in value):
            raise ValueError(
                f"{self.key} is {value!r}; a key is a relative name without empty parts, '.', '..', backslashes and "
                f"control characters. {NUMBERING_ADVICE}"
            )
        if "." in parts[-1]:
            raise ValueError(
                f"{self.key} is {value!r}; a key ends at its first dot, so replace the dots. {NUMBERING_ADVICE}"
            )
        return value

    def _check_unique(self, parts: Iterable[PartInfo]) -> None:
        """Raises UserError for two rows with one key. The keys are in a temporary file, however many there are."""
        with closing(sqlite3.connect("")) as keys:
            keys.execute("CREATE TABLE seen (key TEXT PRIMARY KEY, part INTEGER) WITHOUT ROWID")
            for part_idx, part in enumerate(parts):
                samples = samples_in(io.BytesIO(publishing.read_verified(part)), part.path)
                if len(samples) != part.rows:
                    raise UserError(
                        f"the part {part.path} has {len(samples)} samples for {part.rows} rows, and {UNIQUE_KEY_RULE}"
                    )
                for sample in samples:
                    try:
                        keys.execute("INSERT INTO seen VALUES (?, ?)", (sample.key, part_idx))
                    except sqlite3.IntegrityError:
                        query = "SELECT part FROM seen WHERE key = ?"
                        (other,) = keys.execute(query, (sample.key,)).fetchone()
                        spans = sorted({_rows_of(_nth(parts, other)), _rows_of(part)})
                        raise UserError(
                            f"two rows have the key {sample.key!r}, in {' and '.join(spans)}, and {UNIQUE_KEY_RULE}. "
                            f"Nothing is lost: resume the job with output=WebdatasetWriter({self.path!r}, key=None)"
                        ) from None


def _nth(parts: Iterable[PartInfo], part_idx: int) -> PartInfo:
    return next(islice(parts, part_idx, None))


NUMBERED_EXTENSION = "tar"
KEYED_EXTENSION = "keyed.tar"
"""The extension of parts whose samples have keys of their rows. Only these can hold a key twice."""
UNIQUE_KEY_RULE = "a sample's key is unique"
NUMBERING_ADVICE = "WebdatasetWriter(PATH, key=None) numbers the samples instead"


def _rows_of(part: PartInfo) -> str:
    """The rows of a part in words, from the name of its file."""
    start, end = map(int, re.findall(r"\d+", part.path.rpartition("/")[2])[:2])
    return f"rows {start} to {end}"


def _check_ending(ending: object) -> None:
    if not isinstance(ending, str) or not ending or any(ord(sign) < 32 or sign in "/\\\x7f" for sign in ending):
        raise ValueError(f"the column {ending!r} cannot be the ending of a member's name; rename it")
    if ending.startswith("__") and ending.endswith("__"):
        raise ValueError(f"the column {ending!r} has a name that readers of WebDataset use themselves; rename it")


def _member(ending: str, value: object) -> bytes:
    kind = ending.rpartition(".")[2].lower()
    if kind == "json":
        return encode(value)
    if kind == "txt" and isinstance(value, str):
        return value.encode()
    if kind == "cls" and isinstance(value, int):
        return b"%d" % value
    if kind not in ("txt", "cls") and isinstance(value, bytes | bytearray):
        return bytes(value)
    raise TypeError(
        f"column {ending!r} is a {type(value).__name__}: text belongs in a column that ends with 'txt', a whole number "
        "in 'cls', lists and objects in 'json', bytes in any other"
    )
