"""Images of a model that takes them: from the bytes of a file to features among the embeddings of packed rows.

`Vision` owns the model's own image processor and its vision tower, which is frozen and carries no adapters (as on
Tinker, whose adapters are on attention, MLP and unembedding of the text model). Each image goes through the tower
alone, so that its features depend on nothing beside it. They are kept by digest, within bounds and the memory budget.

Positions are those of multimodal RoPE (Qwen2-VL, arXiv 2409.12191, section 2.1): three numbers a token, for time, row
and column. Those of text are equal; those of an image count rows and columns of its grid from the next position on, and
text goes on behind the larger of the two.

Decoding allocates no more than the header promised, which `wire.images` has bounded. Knows no request and no cache of
keys and values.

Shapes: T rows of a step, R rows of images, N tokens of an input, D hidden size.
"""

from __future__ import annotations

import hashlib
import io
import struct
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image as Pillow
from PIL import ImageOps
from torch import Tensor, nn
from transformers import AutoImageProcessor, PreTrainedModel

from tinsmith.errors import SettingsError, UserError
from tinsmith.types import I64, Image, ModelShape, VisionShape

PIXEL_BYTES = 64 << 20
"""Of decoded images that wait for the tower."""

FEATURE_BYTES = 256 << 20
"""Of features that are kept for requests to come, without a memory budget or within it."""

MAX_GRIDS = 1 << 16
BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Pillow.DecompressionBombError)
"""What Pillow raises over a file that is not sound."""

CHECKED_SIZES = ((1, 1), (37, 21), (640, 480), (4000, 30))
"""Pixels of images whose tokens are counted at load, to compare the processor with the `VisionShape`."""


class Features(NamedTuple):
    """An image's embeddings, which replace those of its tokens, and the deepstack features for the first layers."""

    embeddings_RD: Tensor
    deepstack: tuple[Tensor, ...]  # [R, D] each

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self.embeddings_RD, *self.deepstack))


class ImageRows(NamedTuple):
    """The rows of a step that are of images, and their features."""

    rows_R: Tensor
    features: Features

    def inputs(self, embeddings_TD: Tensor) -> dict[str, object]:
        """Arguments of the decoder: embeddings with the features in their places, and those of later layers."""
        features = self.features
        inputs: dict[str, object] = {
            "inputs_embeds": embeddings_TD.index_copy(0, self.rows_R, features.embeddings_RD)[None]
        }
        if features.deepstack:
            mask_T = torch.zeros(len(embeddings_TD), dtype=torch.bool, device=embeddings_TD.device)
            mask_T[self.rows_R] = True
            inputs |= {"visual_pos_masks": mask_T[None], "deepstack_visual_embeds": list(features.deepstack)}
        return inputs


@dataclass(frozen=True, slots=True)
class Placed:
    """An input's images, and the positions [3, N] of its tokens."""

    images: tuple[Image, ...]
    positions_3N: I64

    def positions(self, start: int, stop: int) -> I64:
        """[3, stop - start]: of tokens of the input, or of those generated behind it."""
        known = self.positions_3N[:, start:stop]
        behind = np.arange(max(start, self.positions_3N.shape[1]), stop) + self.shift
        return np.concatenate([known, np.broadcast_to(behind, (3, len(behind)))], 1)

    @property
    def shift(self) -> int:
        """From the number of a token behind the input to its position."""
        return int(self.positions_3N.max()) + 1 - self.positions_3N.shape[1]


class PlacedSpan(NamedTuple):
    """Tokens start..stop of a sequence among the rows of a step; `placed` None: it has no images."""

    placed: Placed | None
    start: int
    stop: int


class _Pixels(NamedTuple):
    patches: Tensor
    grid_thw: Tensor


class Vision:
    """Use `load`. Called from one thread."""

    def __init__(self, model: PreTrainedModel, processor: Any, shape: VisionShape) -> None:  # noqa: ANN401  transformers'
        self._tower = cast(nn.Module, cast(nn.Module, model.model).visual)
        self._processor = processor
        self._shape = shape
        self._device = model.device
        self._grids: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._pixels: OrderedDict[bytes, _Pixels] = OrderedDict()
        self._features: OrderedDict[bytes, Features] = OrderedDict()
        self._pixel_bytes = self.feature_bytes = 0
        self.limit_bytes: Callable[[], float] = lambda: FEATURE_BYTES
        """How many bytes of features may be kept now."""

    @classmethod
    def load(cls, model: PreTrainedModel, shape: ModelShape) -> Vision:
        """Raises SettingsError if the image processor counts tokens otherwise than the server."""
        assert shape.vision is not None
        processor = AutoImageProcessor.from_pretrained(
            shape.path, backend="pil", trust_remote_code=False, local_files_only=True
        )
        for width, height in CHECKED_SIZES:
            rows, columns = shape.vision.grid(width, height)
            counted = processor.get_number_of_image_patches(height, width) // processor.merge_size**2
            if counted != rows * columns:
                raise SettingsError(
                    f"{shape.name}: its image processor makes {counted} tokens of an image of {width} x {height} "
                    f"pixels, where {rows * columns} are expected; serve it as a text model with --no-vision"
                )
        return cls(model, processor, shape.vision)

    @property
    def tower(self) -> nn.Module:
        return self._tower

    @property
    def image_token_id(self) -> int:
        return self._shape.image_token_id

    def probe(self) -> tuple[Image, dict[str, Tensor]]:
        """An image of noise at the start of an input, and what the model's own forward takes for it."""
        side = 2 * self._shape.token_pixels
        pixels = np.random.default_rng(0).integers(0, 256, (side, 2 * side, 3)).astype(np.uint8)
        file = io.BytesIO()
        Pillow.fromarray(pixels).save(file, "PNG")
        rows, columns = self._shape.grid(2 * side, side)
        image = Image("probe", file.getvalue(), "png", 2 * side, side, 0, rows * columns, b"probe")
        own = self._read(image)
        return image, {"pixel_values": own.patches.to(self._device), "image_grid_thw": own.grid_thw.to(self._device)}

    # Positions.

    def place(self, length: int, images: tuple[Image, ...], scope: str = "") -> Placed | None:
        """Where an input's tokens are. Decodes its images; raises UserError, which names the chunk, on a broken one.

        What is kept of an image is found within one `scope` only, since the time that is saved would tell others that
        it was sent before.
        """
        if not images:
            return None
        images = tuple(replace(image, digest=_salted(image.digest, scope)) for image in images)
        parts: list[I64] = []
        at = position = 0
        for image in images:
            rows, columns = self._grid(image)
            parts.append(np.broadcast_to(np.arange(image.start - at) + position, (3, image.start - at)))
            position += image.start - at
            row_R, column_R = np.divmod(np.arange(image.num_tokens), columns)
            parts.append(np.stack([np.zeros_like(row_R), row_R, column_R]) + position)
            position += max(rows, columns)
            at = image.stop
        parts.append(np.broadcast_to(np.arange(length - at) + position, (3, length - at)))
        return Placed(images, np.concatenate(parts, 1))

    def pack(self, pieces: Sequence[PlacedSpan]) -> tuple[I64, ImageRows | None]:
        """Positions of a step's rows, [T], or [3, T] if they are not all of text; and the rows of images."""
        parts: list[I64] = []
        rows: list[I64] = []
        features: list[Features] = []
        first = 0
        for placed, start, stop in pieces:
            if placed is None:
                parts.append(np.broadcast_to(np.arange(start, stop), (3, stop - start)))
            else:
                parts.append(placed.positions(start, stop))
                for image in placed.images:
                    begin, end = max(start, image.start), min(stop, image.stop)
                    if begin < end:
                        rows.append(np.arange(begin, end) + first - start)
                        features.append(_cut(self.features(image), begin - image.start, end - image.start))
            first += stop - start
        positions_3T = np.concatenate(parts, 1)
        if not features:
            # Behind an image all three are equal again.
            return positions_3T[0], None
        rows_R = torch.from_numpy(np.concatenate(rows)).to(self._device)
        return positions_3T, ImageRows(rows_R, _joined(features))

    def _grid(self, image: Image) -> tuple[int, int]:
        if (grid := self._grids.get(image.digest)) is None:
            self._read(image)
            grid = self._grids[image.digest]
        return grid

    # Features.

    def features(self, image: Image) -> Features:
        """Of a sound image, computed if they are not there. Raises UserError if it is broken."""
        found = self._features.get(image.digest)
        if found is not None:
            self._features.move_to_end(image.digest)
            return found
        pixels = self._pixels.pop(image.digest, None)
        if pixels is None:
            pixels = self._read(image, keep=False)
        else:
            self._pixel_bytes -= pixels.patches.nbytes
        # Training may use what sampling has computed, so these are ordinary tensors.
        with torch.inference_mode(False), torch.no_grad():
            output = self._tower(pixels.patches.to(self._device), grid_thw=pixels.grid_thw.to(self._device))
        found = Features(output.pooler_output, tuple(getattr(output, "deepstack_features", None) or ()))
        self._features[image.digest] = found
        self.feature_bytes += found.num_bytes
        self.keep_within(min(FEATURE_BYTES, self.limit_bytes()))
        return found

    def keep_within(self, num_bytes: float) -> None:
        """Drop the features that were used longest ago until no more than so many bytes are kept."""
        while self._features and self.feature_bytes > num_bytes:
            _, oldest = self._features.popitem(last=False)
            self.feature_bytes -= oldest.num_bytes

    def _read(self, image: Image, *, keep: bool = True) -> _Pixels:
        found = self._processor(images=[decoded(image)], return_tensors="pt")
        pixels = _Pixels(found["pixel_values"], found["image_grid_thw"])
        merged = self._processor.merge_size
        rows, columns = (int(side) // merged for side in pixels.grid_thw[0, 1:])
        if rows * columns != image.num_tokens:
            raise UserError(
                f"{image.where} takes {image.num_tokens} tokens by its header of {image.width} x {image.height} "
                f"pixels, and the model's image processor makes {rows * columns} of it"
            )
        self._grids[image.digest] = rows, columns
        if len(self._grids) > MAX_GRIDS:
            self._grids.popitem(last=False)
        if keep:
            self._pixels[image.digest] = pixels
            self._pixel_bytes += pixels.patches.nbytes
            while self._pixels and self._pixel_bytes > PIXEL_BYTES:
                _, oldest = self._pixels.popitem(last=False)
                self._pixel_bytes -= oldest.patches.nbytes
        return pixels


def decoded(image: Image) -> Pillow.Image:
    """RGB pixels, upright if the file says how it was held. Raises UserError that names the chunk if it is broken."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Pillow.DecompressionBombWarning)
            with Pillow.open(io.BytesIO(image.data), formats=[image.format.upper()]) as opened:
                if opened.size != (image.width, image.height):
                    raise ValueError(f"its size is {opened.size}, and its header says {image.width, image.height}")
                opened.load()
                return ImageOps.exif_transpose(opened).convert("RGB")
    except (*BROKEN, Pillow.DecompressionBombWarning) as error:
        raise UserError(f"{image.where}.data is no sound {image.format} image: {error}") from error


def _salted(digest: bytes, scope: str) -> bytes:
    return hashlib.blake2b(digest + scope.encode(), digest_size=16).digest()


def _cut(features: Features, begin: int, end: int) -> Features:
    return Features(features.embeddings_RD[begin:end], tuple(each[begin:end] for each in features.deepstack))


def _joined(features: Sequence[Features]) -> Features:
    if len(features) == 1:
        return features[0]
    layers = zip(*(each.deepstack for each in features), strict=True)
    return Features(torch.cat([each.embeddings_RD for each in features]), tuple(map(torch.cat, layers)))
