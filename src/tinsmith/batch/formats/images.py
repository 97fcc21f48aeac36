"""Image files: one row each.

A row read is `{path, column: image}`, the image as the bytes of its file or decoded by PIL. A row written is one file,
named after the row's index in the input: `00000000.png`. An attempt stages its images and a list of them; publishing
copies those of the winning attempts. A row without an image fails.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

from tinsmith.batch.formats import publishing
from tinsmith.batch.formats.encoding import select_columns
from tinsmith.batch.formats.part_lists import PublishedFile
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY, OUTPUT_WRITER_REGISTRY, DirectoryWriter, InputReader
from tinsmith.batch.types import OutputInfo, PartInfo, Row, RowRange
from tinsmith.storage.locations import locations, open_store
from tinsmith.storage.stores import join

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tiff")


@INPUT_READER_REGISTRY.type_register(name="images")
@dataclass
class ImageReader(InputReader):
    """`path` is a directory with a final slash, or a pattern; files are taken in order of their names."""

    in_store = True

    column: str = "image"
    decode: bool = False

    @cached_property
    def _locations(self) -> list[str]:
        return [name for name in locations(self.path) if name.lower().endswith(ENDINGS)]

    def __len__(self) -> int:
        return len(self._locations)

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        return [self._row(location) for location in self._locations[start_idx : end_idx + 1]]

    def _row(self, location: str) -> Row:
        data = _read(location)
        return {"path": location, self.column: _decode(data, location) if self.decode else data}


KINDS = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP"}


@OUTPUT_WRITER_REGISTRY.type_register(name="images")
@dataclass
class ImageWriter(DirectoryWriter):
    """`column` holds a PIL image, the bytes of an image file, or a uint8 array [height, width] or
    [height, width, channels]. `kind` is png, jpg or webp."""

    column: str = "image"
    kind: str = "png"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; it must be one of {sorted(KINDS)}")
        super().__post_init__()

    def check(self, row: Row) -> None:
        self._image(row)

    def write_part(self, rows: Sequence[Row | None], span: RowRange, part_base: str) -> PartInfo:
        self.check_one_each(rows, span)
        listing = []
        for index, row in enumerate(rows, span.start_idx):
            if row is None:
                continue
            data, name = self._encode(row), f"{index:08d}.{self.kind}"
            store, key = open_store(join(part_base, name))
            store.put_create(key, data)
            listing.append({"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        return publishing.store_part(part_base, span, "json", orjson.dumps(listing), len(listing))

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        rows = sum(part.rows for part in parts)
        return publishing.publish_directory(self.path, _ListedFiles(parts), rows, staging, if_exists)

    def read_part(self, part: PartInfo) -> Iterator[Row]:
        for file in _ListedFiles([part]):
            yield {"path": file.name, self.column: _read(file.part.path)}

    def read_published(self, output: OutputInfo) -> Iterator[Row]:
        for file in publishing.iter_published_files(output, is_directory=True):
            yield {"path": file.path.rpartition("/")[2], self.column: _read(file.path)}

    def _image(self, row: Row) -> Any:  # noqa: ANN401
        from PIL import Image

        value: Any = select_columns(row, self.column)[self.column]
        if isinstance(value, Image.Image):
            return value
        if isinstance(value, bytes | bytearray):
            return _decode(value, f"column {self.column!r}")
        if hasattr(value, "__array__") and not isinstance(value, str):
            import numpy as np

            array = np.asarray(value)
            if array.dtype != np.uint8 or array.ndim not in (2, 3):
                raise TypeError(
                    f"column {self.column!r} is an array of {array.dtype} of shape {array.shape}; an image is one of "
                    "uint8, height x width or height x width x channels"
                )
            return Image.fromarray(array)
        raise TypeError(f"column {self.column!r} is a {type(value).__name__}; it must be an image, bytes or an array")

    def _encode(self, row: Row) -> bytes:
        image, buffer = self._image(row), io.BytesIO()
        if self.kind == "jpg" and image.mode not in ("L", "RGB", "CMYK"):
            image = image.convert("RGB")
        image.save(buffer, KINDS[self.kind])
        return buffer.getvalue()


def _read(location: str) -> bytes:
    store, key = open_store(location)
    return store.get(key)


def _decode(data: bytes | bytearray, source: str) -> Any:  # noqa: ANN401  an image of PIL
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except UnidentifiedImageError:
        raise ValueError(f"{source} has {len(data)} bytes that are not an image file") from None
    return image


class _ListedFiles:
    """The files that parts list, read from their listings each time: there may be millions."""

    def __init__(self, parts: Sequence[PartInfo]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[PublishedFile]:
        for part in self._parts:
            base = part.path.rpartition("/")[0]
            for entry in orjson.loads(publishing.read_verified(part)):
                file = PartInfo(join(base, entry["name"]), 1, entry["bytes"], entry["sha256"])
                yield PublishedFile(entry["name"], file)
