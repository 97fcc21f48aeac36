"""Image chunks of training and sampling: checked by their header, never decoded here.

Format, width and height are read from the first bytes of the file; the model's `VisionShape` gives the number of
tokens. So a request that a model cannot take is refused before memory for its pixels is allocated. The engine decodes
the file and finds errors in the rest of it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tinsmith.errors import NotSupportedError, UserError
from tinsmith.types import I32, MAX_ASPECT, Image, VisionShape
from tinsmith.wire.fields import show

FORMATS = ("png", "jpeg")
MAX_IMAGE_BYTES = 20 << 20
MAX_SIDE = 16384
MAX_PIXELS = 2**25
"""96 MiB once decoded."""

MAX_IMAGES = 256
"""Most images of one prompt or datum."""

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8"
_SIZES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""JPEG's markers of a frame header (ITU T.81, table B.1)."""

_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})
"""JPEG's markers without a length field."""


@dataclass(frozen=True, slots=True)
class ImageBytes:
    """An image chunk of a request, unchecked."""

    data: bytes
    format: str
    expected_tokens: int | None = None


def image_chunk(chunk: Mapping[str, object], path: str) -> ImageBytes:
    """An image chunk of a JSON body. Raises UserError for fields of wrong types."""
    data, expected = chunk.get("data"), chunk.get("expected_tokens")
    if not isinstance(data, str):
        raise UserError(
            f"{path}.data is {show(data)}; a chunk of type 'image' has the image file's bytes there, as base64"
        )
    if expected is not None and (not isinstance(expected, int) or isinstance(expected, bool)):
        raise UserError(f"{path}.expected_tokens is {show(expected)}; it must be an integer, or left out")
    try:
        image_bytes = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"{path}.data is not base64: {error}") from error
    return ImageBytes(image_bytes, _format(chunk.get("format"), path), expected)


def refuse_chunk(path: str, kind: object, vision: VisionShape | None = None) -> UserError:
    """The error for a chunk that the model does not take."""
    if kind == "image":
        return NotSupportedError(f"{path} is of type 'image', and this base model takes text only; send encoded_text")
    if kind == "image_asset_pointer":
        return NotSupportedError(
            f"{path} is of type 'image_asset_pointer'; this server fetches no assets, so send the image's bytes in a "
            "chunk of type 'image'"
        )
    accepted_types = "'encoded_text' (token ids)" + ("" if vision is None else " and 'image'")
    return NotSupportedError(f"{path} is of type {show(kind)}; this base model takes only {accepted_types}")


class InputParts:
    """Collects the chunks of one input: token ids, with the image token at the positions of images, and images."""

    def __init__(self, vision: VisionShape | None) -> None:
        self._vision = vision
        self._parts: list[I32] = []
        self._images: list[Image] = []
        self._length = 0

    def add_tokens(self, tokens: I32) -> None:
        self._parts.append(tokens)
        self._length += len(tokens)

    def add_tokens_of(self, tokens: Sequence[int]) -> None:
        self.add_tokens(np.array(tokens, np.int32))

    def add_image(self, chunk: ImageBytes, path: str) -> None:
        """Add an image. Raises UserError if the model does not take it."""
        if self._vision is None:
            raise refuse_chunk(path, "image")
        if len(self._images) == MAX_IMAGES:
            raise UserError(f"{path} is one image too many; one input may have at most {MAX_IMAGES}")
        width, height = check_header(chunk.data, _format(chunk.format, path), path)
        rows, columns = self._vision.grid(width, height)
        num_tokens = rows * columns
        if chunk.expected_tokens not in (None, num_tokens):
            raise UserError(
                f"{path}.expected_tokens is {chunk.expected_tokens}, but this model makes {num_tokens} tokens of an "
                f"image of {width} x {height} pixels; count with the model's own image processor, or leave it out"
            )
        digest = hashlib.blake2b(chunk.data, digest_size=16).digest()
        self._images.append(Image(path, chunk.data, chunk.format, width, height, self._length, num_tokens, digest))
        self.add_tokens(np.full(num_tokens, self._vision.image_token_id, np.int32))

    @property
    def tokens(self) -> I32:
        if len(self._parts) == 1:
            return self._parts[0]
        return np.concatenate(self._parts) if self._parts else np.empty(0, np.int32)

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(self._images)


class PlacedImage(Protocol):
    """An image at its positions of an input."""

    @property
    def data(self) -> bytes: ...
    @property
    def format(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


def chunks_of(tokens: Sequence[int], images: Sequence[PlacedImage]) -> list[dict[str, object]]:
    """The JSON chunks of these tokens and images."""
    chunks: list[dict[str, object]] = []
    begin = 0
    for image in images:
        if begin < image.start:
            chunks.append({"type": "encoded_text", "tokens": tokens[begin : image.start]})
        chunks.append(
            {
                "type": "image",
                "data": base64.b64encode(image.data).decode(),
                "format": image.format,
                "expected_tokens": image.num_tokens,
            }
        )
        begin = image.stop
    if begin < len(tokens) or not chunks:
        chunks.append({"type": "encoded_text", "tokens": tokens[begin:] if begin else tokens})
    return chunks


def check_header(data: bytes, declared: str, path: str) -> tuple[int, int]:
    """Width and height. Raises UserError unless the header is of the declared format and within all limits."""
    if len(data) > MAX_IMAGE_BYTES:
        raise UserError(f"{path}.data is an image of {len(data)} bytes; at most {MAX_IMAGE_BYTES} are taken")
    actual = sniff_format(data)
    if actual != declared:
        raise UserError(f"{path}.format is {declared!r}, but data is {actual or 'neither png nor jpeg'}")
    size = _png_size(data) if declared == "png" else _jpeg_size(data)
    if size is None:
        raise UserError(f"{path}.data is not a {declared} image: its header is truncated or malformed")
    width, height = size
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE and width * height <= MAX_PIXELS):
        raise UserError(
            f"{path}.data is an image of {width} x {height} pixels; sides may have 1 to {MAX_SIDE} and the image "
            f"{MAX_PIXELS}, so make it smaller"
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise UserError(
            f"{path}.data is an image of {width} x {height} pixels; one side may be at most {MAX_ASPECT} times the "
            "other"
        )
    return width, height


def sniff_format(data: bytes) -> str | None:
    """The format by a file's first bytes; None if unknown."""
    return "png" if data.startswith(_PNG) else "jpeg" if data.startswith(_JPEG) else None


def _format(value: object, path: str) -> str:
    if not isinstance(value, str) or value not in FORMATS:
        raise UserError(f"{path}.format is {show(value)}; it must be 'png' or 'jpeg'")
    return value


def _png_size(data: bytes) -> tuple[int, int] | None:
    """The size in the header chunk, which is the first (PNG, section 11.2.1)."""
    if len(data) < 33 or data[12:16] != b"IHDR":
        return None
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """The size in the first frame header (ITU T.81, section B.2.2)."""
    at = 2
    while at + 9 <= len(data):
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # fill bytes
            at += 1
        elif marker in _WITHOUT_LENGTH:
            at += 2
        elif marker in _SIZES:
            return int.from_bytes(data[at + 7 : at + 9], "big"), int.from_bytes(data[at + 5 : at + 7], "big")
        else:
            length = int.from_bytes(data[at + 2 : at + 4], "big")
            if length < 2:
                return None
            at += 2 + length
    return None
