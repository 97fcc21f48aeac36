"""Images for multimodal models: from the bytes of a file to features among the embeddings of packed rows.

`Vision` owns the model's image processor and its vision tower, which is frozen and carries no adapters (as on Tinker,
whose adapters are on attention, MLP and unembedding of the text model). Each image runs through the tower alone, so
that its features depend on nothing else. They are cached by digest, within bounds and the memory budget.

Two families differ in the rest. `_QwenTower` (Qwen3-VL, Qwen3.5) keeps an image's aspect ratio and has positions of
multimodal RoPE (Qwen2-VL, arXiv 2409.12191, section 2.1): three positions per token, for time, row and column. Those of
text are equal; those of an image count rows and columns of its grid from the next position on, and text continues after
the larger of the two. `_GemmaTower` (Gemma 3) resizes every image to one square, counts positions as in text, and lets
the tokens of an image see each other in both directions, within the window of layers that have one.

Decoding allocates no more than the header promised, which `wire.images` has bounded. Knows no request and no KV cache.

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
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image as Pillow
from PIL import ImageOps
from torch import Tensor, nn
from transformers import AutoImageProcessor, PreTrainedModel

from tinsmith.backends.torch.host import upload
from tinsmith.errors import SettingsError, UserError
from tinsmith.plan.architecture import decoder_of
from tinsmith.types import I64, Image, ModelShape, VisionShape

PIXEL_BYTES = 64 << 20
"""Limit for decoded images that wait for the tower."""

FEATURE_BYTES = 256 << 20
"""Limit for cached features, with or without a memory budget."""

MAX_GRIDS = 1 << 16
BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Pillow.DecompressionBombError)
"""Pillow's exceptions for invalid files."""

CHECKED_SIZES = ((1, 1), (37, 21), (640, 480), (4000, 30))
"""Sizes in pixels at which the processor's token counts are compared with the `VisionShape` at load."""


class Features(NamedTuple):
    """An image's embeddings, which replace those of its tokens, and the deepstack features of the first layers."""

    embeddings_RD: Tensor
    deepstack: tuple[Tensor, ...]  # [R, D] each

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.embeddings_RD, *self.deepstack))


class ImageRows(NamedTuple):
    """The image rows of a step and their features."""

    rows_R: Tensor
    features: Features

    def inputs(self, embeddings_TD: Tensor) -> dict[str, object]:
        """Arguments of the decoder: embeddings with the features inserted, and those of later layers."""
        features = self.features
        inputs: dict[str, object] = {
            "inputs_embeds": embeddings_TD.index_copy(0, self.rows_R, features.embeddings_RD)[None]
        }
        if features.deepstack:
            inputs |= {"visual_pos_masks": self.rows_R, "deepstack_visual_embeds": list(features.deepstack)}
        return inputs


def _add_features(add_by_mask: Callable[..., Tensor], hidden_1TD: Tensor, rows: Tensor, features_RD: Tensor) -> Tensor:
    """A decoder's `_deepstack_process` of a mask, or of the image rows: what a mask selects is read from the device."""
    if rows.dtype == torch.bool:
        return add_by_mask(hidden_1TD, rows, features_RD)
    return hidden_1TD.index_add(1, rows, features_RD[None].to(hidden_1TD.dtype))


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An input's images, and the positions [3, N] of its tokens. `bidirectional`: tokens of an image also see later
    ones of the same image, so an image must run through the model in one piece.
    """

    images: tuple[Image, ...]
    positions_3N: I64
    bidirectional: bool = False

    def visible_counts(self, start: int, stop: int) -> I64 | None:
        """[stop - start]: for tokens start..stop, the number of tokens that each one sees from the first on; None:
        those up to itself.
        """
        inside = [image for image in self.images if image.start < stop and image.stop > start]
        if not (self.bidirectional and inside):
            return None
        counts = np.arange(start, stop) + 1
        for image in inside:
            counts[max(image.start - start, 0) : max(image.stop - start, 0)] = image.stop
        return counts

    def piece_end(self, start: int, stop: int) -> int:
        """Where a piece from `start` should end, near `stop`: never within an image that must run in one piece."""
        for image in self.images if self.bidirectional else ():
            if image.start < stop < image.stop:
                return image.start if image.start > start else image.stop
        return stop

    def align_piece(self, position: int, size: int) -> tuple[int, int, int]:
        """The piece of a token when pieces have `size` tokens each, counted from the last bidirectional image before
        it: (first token, end of its tokens, size); the size may reach beyond the end, into an image.
        """
        begin, end = 0, None
        for image in self.images if self.bidirectional else ():
            if image.start <= position < image.stop:
                return image.start, image.stop, image.num_tokens
            if image.stop <= position:
                begin = image.stop
            else:
                end = image.start if end is None else end
        first = begin + (position - begin) // size * size
        return first, first + size if end is None else min(first + size, end), size

    def positions(self, start: int, stop: int) -> I64:
        """[3, stop - start]: positions of tokens of the input, or of tokens generated after it."""
        input_positions = self.positions_3N[:, start:stop]
        generated = np.arange(max(start, self.positions_3N.shape[1]), stop) + self.shift
        return np.concatenate([input_positions, np.broadcast_to(generated, (3, len(generated)))], 1)

    @property
    def shift(self) -> int:
        """A generated token's position minus its index."""
        return int(self.positions_3N.max()) + 1 - self.positions_3N.shape[1]


class InputSpan(NamedTuple):
    """Tokens start..stop of a sequence among the rows of a step; `image_input` None: without images."""

    image_input: ImageInput | None
    start: int
    stop: int


class _Pixels(NamedTuple):
    """An image processor's output for one image; `grid_thw` None: all images have the same shape."""

    patches: Tensor
    grid_thw: Tensor | None


class _QwenTower:
    """Qwen3-VL's and Qwen3.5's. Raises SettingsError if the image processor's token counts differ from the server's."""

    bidirectional, multimodal_rope = False, True

    def __init__(self, model: PreTrainedModel, processor: Any, shape: ModelShape) -> None:  # noqa: ANN401  transformers'
        assert shape.vision is not None
        self.module = cast(nn.Module, cast(nn.Module, model.model).visual)
        decoder: Any = decoder_of(model)
        if hasattr(decoder, "_deepstack_process"):
            decoder._deepstack_process = partial(_add_features, decoder._deepstack_process)
        self._processor = processor
        for width, height in CHECKED_SIZES:
            rows, columns = shape.vision.grid(width, height)
            counted = processor.get_number_of_image_patches(height, width) // processor.merge_size**2
            if counted != rows * columns:
                raise SettingsError(
                    f"{shape.name}: its image processor makes {counted} tokens of an image of {width} x {height} "
                    f"pixels, where {rows * columns} are expected; serve it as a text model with --no-vision"
                )

    def read(self, image: Pillow.Image) -> tuple[_Pixels, tuple[int, int]]:
        """The pixels, and the rows and columns of tokens."""
        processed = self._processor(images=[image], return_tensors="pt")
        grid_thw, merged = processed["image_grid_thw"], self._processor.merge_size
        return _Pixels(processed["pixel_values"], grid_thw), (
            int(grid_thw[0, 1]) // merged,
            int(grid_thw[0, 2]) // merged,
        )

    def features(self, pixels: _Pixels, device: torch.device) -> Features:
        assert pixels.grid_thw is not None
        output = self.module(upload(pixels.patches.numpy(), device), grid_thw=pixels.grid_thw.to(device))
        return Features(output.pooler_output, tuple(getattr(output, "deepstack_features", None) or ()))

    def reference_inputs(self, pixels: _Pixels, is_image_T: Tensor) -> dict[str, Tensor]:
        """Arguments of the model's own forward for an input with this image, apart from token ids."""
        device, grid_thw = is_image_T.device, pixels.grid_thw
        assert grid_thw is not None
        inputs = {"pixel_values": pixels.patches.to(device), "image_grid_thw": grid_thw.to(device)}
        return inputs | {"mm_token_type_ids": is_image_T.int()[None]}

    def positions(self, length: int, images: Sequence[Image], grids: Sequence[tuple[int, int]]) -> I64:
        """[3, N]"""
        parts: list[I64] = []
        at = position = 0
        for image, (rows, columns) in zip(images, grids, strict=True):
            parts.append(np.broadcast_to(np.arange(image.start - at) + position, (3, image.start - at)))
            position += image.start - at
            row_R, column_R = np.divmod(np.arange(image.num_tokens), columns)
            parts.append(np.stack([np.zeros_like(row_R), row_R, column_R]) + position)
            position += max(rows, columns)
            at = image.stop
        parts.append(np.broadcast_to(np.arange(length - at) + position, (3, length - at)))
        return np.concatenate(parts, 1)


class _GemmaTower:
    """Gemma 3's. Raises SettingsError if the token counts of images differ from the server's, or if the image processor
    crops images.
    """

    bidirectional, multimodal_rope = True, False

    def __init__(self, model: PreTrainedModel, processor: Any, shape: ModelShape) -> None:  # noqa: ANN401  transformers'
        assert shape.vision is not None
        inner = cast(nn.Module, model.model)
        self.module = cast(nn.Module, inner.vision_tower)
        self._projector = cast(nn.Module, inner.multi_modal_projector)
        self._processor = processor
        side = cast(int, self._projector.tokens_per_side)
        self._grid = side, side
        size, expected = processor.size, model.config.vision_config.image_size
        problem = None
        if processor.do_pan_and_scan:
            problem = "do_pan_and_scan is on, and crops of an image are not supported; set it to false"
        elif (size["height"], size["width"]) != (expected, expected):
            problem = f"size is {dict(size)}, and the vision tower takes {expected} x {expected} pixels"
        elif shape.vision.side_tokens != side:
            problem = f"an image has {side} x {side} tokens, where {shape.vision.side_tokens} a side are expected"
        if problem is not None:
            raise SettingsError(f"{shape.name}: preprocessor_config.json: {problem}, or serve it with --no-vision")

    def read(self, image: Pillow.Image) -> tuple[_Pixels, tuple[int, int]]:
        return _Pixels(self._processor(images=[image], return_tensors="pt")["pixel_values"], None), self._grid

    def features(self, pixels: _Pixels, device: torch.device) -> Features:
        hidden = self.module(pixel_values=upload(pixels.patches.numpy(), device)).last_hidden_state
        return Features(self._projector(hidden)[0], ())

    def reference_inputs(self, pixels: _Pixels, is_image_T: Tensor) -> dict[str, Tensor]:
        return {"pixel_values": pixels.patches.to(is_image_T.device), "token_type_ids": is_image_T.int()[None]}

    def positions(self, length: int, images: Sequence[Image], grids: Sequence[tuple[int, int]]) -> I64:
        for before, image in pairwise(images):
            if before.stop == image.start:
                raise UserError(
                    f"{image.path} directly follows another image, and this model would see one image; put the "
                    "end-of-image and begin-of-image tokens between them"
                )
        return np.broadcast_to(np.arange(length), (3, length))


class Vision:
    """Use `load`. Called from one thread."""

    def __init__(self, tower: _QwenTower | _GemmaTower, shape: VisionShape, device: torch.device) -> None:
        self._tower = tower
        self._shape = shape
        self._device = device
        self._grids: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._pixels: OrderedDict[bytes, _Pixels] = OrderedDict()
        self._features: OrderedDict[bytes, Features] = OrderedDict()
        self._pixel_bytes = self.feature_bytes = 0
        self.limit_bytes: Callable[[], float] = lambda: FEATURE_BYTES
        """How many bytes of features may be cached now."""

    @classmethod
    def load(cls, model: PreTrainedModel, shape: ModelShape) -> Vision:
        """Raises SettingsError if the image processor does not behave as the server expects."""
        assert shape.vision is not None
        processor = AutoImageProcessor.from_pretrained(
            shape.path, backend="pil", trust_remote_code=False, local_files_only=True
        )
        tower = _QwenTower if shape.vision.side_tokens is None else _GemmaTower
        return cls(tower(model, processor, shape), shape.vision, model.device)

    @property
    def tower(self) -> nn.Module:
        return self._tower.module

    @property
    def image_token_id(self) -> int:
        return self._shape.image_token_id

    def probe(self) -> Image:
        """A noise image at the start of an input."""
        side = 2 * self._shape.token_pixels
        pixels = np.random.default_rng(0).integers(0, 256, (side, 2 * side, 3)).astype(np.uint8)
        file = io.BytesIO()
        Pillow.fromarray(pixels).save(file, "PNG")
        rows, columns = self._shape.grid(2 * side, side)
        return Image("probe", file.getvalue(), "png", 2 * side, side, 0, rows * columns, b"probe")

    def reference_inputs(self, image: Image, tokens_T: Tensor) -> dict[str, Tensor]:
        """Arguments of the model's own forward for an input with this image, apart from token ids."""
        return self._tower.reference_inputs(self._read(image, keep=False), tokens_T == self.image_token_id)

    # Positions.

    def prepare_images(self, length: int, images: tuple[Image, ...], scope: str = "") -> ImageInput | None:
        """The positions of an input's tokens. Decodes its images; raises UserError naming the chunk if one is invalid.

        Images are cached per `scope`, since a faster answer would reveal that an image was sent before.
        """
        if not images:
            return None
        images = tuple(replace(image, digest=_salt_digest(image.digest, scope)) for image in images)
        positions_3N = self._tower.positions(length, images, [self._grid(image) for image in images])
        return ImageInput(images, positions_3N, self._tower.bidirectional)

    def pack(self, input_spans: Sequence[InputSpan]) -> tuple[I64, ImageRows | None]:
        """Positions of a step's rows, [T], or [3, T] with multimodal RoPE and images; and the image rows."""
        parts: list[I64] = []
        rows: list[I64] = []
        features: list[Features] = []
        first = 0
        for image_input, start, stop in input_spans:
            if image_input is None:
                parts.append(np.broadcast_to(np.arange(start, stop), (3, stop - start)))
            else:
                parts.append(image_input.positions(start, stop))
                for image in image_input.images:
                    begin, end = max(start, image.start), min(stop, image.stop)
                    if begin < end:
                        rows.append(np.arange(begin, end) + first - start)
                        features.append(_slice_features(self.features(image), begin - image.start, end - image.start))
            first += stop - start
        positions_3T = np.concatenate(parts, 1)
        if not features:
            # After an image all three are equal again.
            return positions_3T[0], None
        rows_R = upload(np.concatenate(rows), self._device)
        positions = positions_3T if self._tower.multimodal_rope else positions_3T[0]
        return positions, ImageRows(rows_R, _concat_features(features))

    def _grid(self, image: Image) -> tuple[int, int]:
        if (grid := self._grids.get(image.digest)) is None:
            self._read(image)
            grid = self._grids[image.digest]
        return grid

    # Features.

    def features(self, image: Image) -> Features:
        """An image's features, from the cache or computed. Raises UserError if the image is invalid."""
        cached = self._features.get(image.digest)
        if cached is not None:
            self._features.move_to_end(image.digest)
            return cached
        pixels = self._pixels.pop(image.digest, None)
        if pixels is None:
            pixels = self._read(image, keep=False)
        else:
            self._pixel_bytes -= pixels.patches.nbytes
        # Ordinary tensors, since training may use features that sampling computed.
        with torch.inference_mode(False), torch.no_grad():
            features = self._tower.features(pixels, self._device)
        self._features[image.digest] = features
        self.feature_bytes += features.num_bytes
        self.evict_to(min(FEATURE_BYTES, self.limit_bytes()))
        return features

    def evict_to(self, num_bytes: float) -> None:
        """Drop the least recently used features until at most `num_bytes` are cached."""
        while self._features and self.feature_bytes > num_bytes:
            _, oldest = self._features.popitem(last=False)
            self.feature_bytes -= oldest.num_bytes

    def _read(self, image: Image, *, keep: bool = True) -> _Pixels:
        pixels, (rows, columns) = self._tower.read(decode_image(image))
        if rows * columns != image.num_tokens:
            raise UserError(
                f"{image.path} takes {image.num_tokens} tokens by its header of {image.width} x {image.height} "
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


def decode_image(image: Image) -> Pillow.Image:
    """RGB pixels, rotated as the EXIF data say. Raises UserError naming the chunk if the image is invalid."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Pillow.DecompressionBombWarning)
            with Pillow.open(io.BytesIO(image.data), formats=[image.format.upper()]) as opened:
                if opened.size != (image.width, image.height):
                    raise ValueError(f"its size is {opened.size}, and its header says {image.width, image.height}")
                opened.load()
                return ImageOps.exif_transpose(opened).convert("RGB")
    except (*BROKEN, Pillow.DecompressionBombWarning) as error:
        raise UserError(f"{image.path}.data is not a valid {image.format} image: {error}") from error


def _salt_digest(digest: bytes, scope: str) -> bytes:
    return hashlib.blake2b(digest + scope.encode(), digest_size=16).digest()


def _slice_features(features: Features, begin: int, end: int) -> Features:
    return Features(features.embeddings_RD[begin:end], tuple(layer[begin:end] for layer in features.deepstack))


def _concat_features(features: Sequence[Features]) -> Features:
    if len(features) == 1:
        return features[0]
    layers = zip(*(image_features.deepstack for image_features in features), strict=True)
    return Features(
        torch.cat([image_features.embeddings_RD for image_features in features]), tuple(map(torch.cat, layers))
    )
