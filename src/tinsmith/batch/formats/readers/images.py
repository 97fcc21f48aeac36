"""Image files, one a row: `{path, image}`, the image as the bytes of its file, or decoded, as PIL gives it."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

from tinsmith.batch.formats.protocols import InputReader, Row
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY
from tinsmith.storage.stores import locations, open_store

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
