"""Image files, one a row: `{path, image}`, the image as the bytes of its file, or decoded, as PIL gives it.

One image file for each row, named after the row's index in the input: `00000000.png`.

An attempt stages its images and a listing of them; publishing copies the winners', so a directory never holds an image
of an attempt that lost. A row without an image fails: it is not passed over in silence.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tinsmith.batch.formats import publishing
from tinsmith.batch.formats.encoding import selected
from tinsmith.batch.formats.publishing import PublishedFile
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY, OUTPUT_WRITER_REGISTRY, InputReader, OutputWriter
from tinsmith.batch.types import OutputInfo, PartInfo, ProgramError, Row, Span, part_name
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
    _found: list[str] | None = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self._locations())

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        return [self._row(location) for location in self._locations()[start_idx : end_idx + 1]]

    def _locations(self) -> list[str]:
        if self._found is None:
            self._found = [name for name in locations(self.path) if name.lower().endswith(ENDINGS)]
        return self._found

    def _row(self, location: str) -> Row:
        store, key = open_store(location)
        data = store.get(key)
        if not self.decode:
            return {"path": location, self.column: data}
        from PIL import Image, UnidentifiedImageError

        try:
            image = Image.open(io.BytesIO(data))
            image.load()
        except UnidentifiedImageError as error:
            raise ValueError(f"{location} is no image: {error}") from None
        return {"path": location, self.column: image}


KINDS = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP"}


@OUTPUT_WRITER_REGISTRY.type_register(name="images")
@dataclass
class ImageWriter(OutputWriter):
    """`column` holds an image: PIL's, the bytes of an image file, or an array of uint8, height x width (x channels).
    `kind` is png, jpg or webp. `path` is a directory, with or without a final slash."""

    column: str = "image"
    kind: str = "png"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; it must be one of {sorted(KINDS)}")
        if not self.path:
            raise ValueError("the path of an ImageWriter is empty; it must name a directory")
        self.path = self.path.rstrip("/") + "/"

    def check(self, row: Row) -> None:
        self._image(row)

    def write_part(self, rows: Sequence[Row | None], span: Span, part_base: str) -> PartInfo:
        if len(rows) != span.rows:
            raise ProgramError("images are named after the rows of the input, so a row cannot become several or none")
        listing = []
        for index, row in enumerate(rows, span.start_idx):
            if row is None:
                continue
            data, name = self._encoded(row), f"{index:08d}.{self.kind}"
            store, key = open_store(join(part_base, name))
            store.put_create(key, data)
            listing.append({"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        return publishing.store_part(join(part_base, part_name(span, "json")), orjson.dumps(listing), len(listing))

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        rows = sum(part.rows for part in parts)
        return publishing.publish_directory(self.path, _Listed(parts), rows, staging, if_exists)

    def read_part(self, part: PartInfo) -> Iterator[Row]:
        for file in _Listed([part]):
            store, key = open_store(file.location)
            yield {"path": file.name, self.column: store.get(key)}

    def read_published(self, output: OutputInfo) -> Iterator[Row]:
        for file in publishing.published_files(output, is_directory=True):
            store, key = open_store(file.path)
            yield {"path": file.path.rpartition("/")[2], self.column: store.get(key)}

    def _image(self, row: Row) -> Any:  # noqa: ANN401
        from PIL import Image, UnidentifiedImageError

        value: Any = selected(row, self.column)[self.column]
        if isinstance(value, Image.Image):
            return value
        if isinstance(value, bytes | bytearray):
            try:
                image = Image.open(io.BytesIO(value))
                image.load()
            except UnidentifiedImageError:
                raise ValueError(f"column {self.column!r} has {len(value)} bytes that are no image file") from None
            return image
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

    def _encoded(self, row: Row) -> bytes:
        image, buffer = self._image(row), io.BytesIO()
        if self.kind == "jpg" and image.mode not in ("L", "RGB", "CMYK"):
            image = image.convert("RGB")
        image.save(buffer, KINDS[self.kind])
        return buffer.getvalue()


class _Listed:
    """The files that parts list, read from their listings each time: there may be millions."""

    def __init__(self, parts: Sequence[PartInfo]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[PublishedFile]:
        for part in self._parts:
            base = part.path.rpartition("/")[0]
            for entry in orjson.loads(publishing.read_verified(part)):
                yield PublishedFile(entry["name"], join(base, entry["name"]), entry["bytes"], entry["sha256"])
