"""Image chunks on the wire: bounds, formats, numbers of tokens, without decoding."""

from __future__ import annotations

import base64
import io
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from support import vision_models
from support.vision_models import IMAGE, VISION, picture
from tinsmith.backends.torch.vision import decode_image
from tinsmith.errors import NotSupportedError, UserError
from tinsmith.types import MAX_ASPECT, Image, VisionShape
from tinsmith.wire import tinker_public_pb2 as pb
from tinsmith.wire.images import MAX_IMAGE_BYTES, MAX_IMAGES, ImageBytes, InputParts, check_header, image_chunk
from tinsmith.wire.sampling import AsampleRequest, sample_of
from tinsmith.wire.training import pass_of


def header_only(width: int, height: int) -> bytes:
    """A PNG file of a few bytes whose header declares this size."""
    ihdr = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\x00\x00\x00"
    return b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4, "big") + ihdr + zlib.crc32(ihdr).to_bytes(4, "big")


@pytest.mark.parametrize("form", ["png", "jpeg"])
def test_the_header_has_the_size_that_pillow_reads(form: str) -> None:
    for width, height in ((1, 1), (37, 21), (640, 4)):
        assert check_header(picture(width, height, form=form), form, "x") == (width, height)


def test_a_progressive_jpeg_with_metadata_has_its_size() -> None:
    file = io.BytesIO()
    exif = Pillow.Exif()
    exif[0x0112] = 6
    Pillow.new("L", (40, 30)).save(file, "JPEG", progressive=True, exif=exif, comment=b"\xff\xc0 a comment")
    assert check_header(file.getvalue(), "jpeg", "x") == (40, 30)


@pytest.mark.parametrize(
    ("data", "declared", "said"),
    [
        (picture(8, 8), "jpeg", "format is 'jpeg', but data is png"),
        (picture(8, 8, form="jpeg"), "png", "format is 'png', but data is jpeg"),
        (b"GIF89a\x01\x00\x01\x00", "png", "neither png nor jpeg"),
        (b"", "png", "neither png nor jpeg"),
        (picture(8, 8)[:20], "png", "header is truncated"),
        (b"\xff\xd8\xff\xe0\x00\x00" + b"x" * 20, "jpeg", "header is truncated or malformed"),
        (b"\xff\xd8" + b"x" * 20, "jpeg", "header is truncated or malformed"),
        (b"\xff\xd8" + b"\xff" * 50, "jpeg", "header is truncated or malformed"),
        (header_only(65000, 65000), "png", "65000 x 65000 pixels"),
        (header_only(16384, 16384), "png", "16384 x 16384 pixels"),
        (header_only(0, 10), "png", "0 x 10 pixels"),
        (header_only(2, 2 * MAX_ASPECT + 1), "png", "at most 200 times the other"),
        (b"\x89PNG\r\n\x1a\n" + bytes(MAX_IMAGE_BYTES), "png", "bytes; at most"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_invalid_and_oversized_images_are_refused(data: bytes, declared: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        check_header(data, declared, "prompt.chunks[3]")
    assert said in str(refused.value)
    assert "prompt.chunks[3]." in str(refused.value)


SHAPES = (VISION, VisionShape(IMAGE, 28, 56 * 56, 28 * 28 * 1280), VisionShape(IMAGE, 32, 65536, 16777216))


@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from(SHAPES))
def test_tokens_are_counted_as_the_image_processor_counts_them(width: int, height: int, shape: VisionShape) -> None:
    if max(width, height) > MAX_ASPECT * min(width, height):
        return
    size = {"shortest_edge": shape.min_pixels, "longest_edge": shape.max_pixels}
    processor = Qwen2VLImageProcessorPil(patch_size=shape.token_pixels // 2, merge_size=2, size=size)
    rows, columns = shape.grid(width, height)
    assert rows * columns == processor.get_number_of_image_patches(height, width) // 4
    assert shape.grid(height, width) == (columns, rows)


def test_an_input_has_the_image_token_where_an_image_is() -> None:
    first, second = picture(37, 21), picture(8, 8, form="jpeg")
    tokens, images = vision_models.model_input([1, 2], first, second, [3])
    assert tokens.tolist() == [1, 2, *[IMAGE] * 15, IMAGE, 3]
    assert [(image.start, image.stop, image.width, image.height) for image in images] == [
        (2, 17, 37, 21),
        (17, 18, 8, 8),
    ]
    assert [image.data for image in images] == [first, second]
    assert len({image.digest for image in images}) == 2


def chunk(data: bytes, **fields: object) -> dict[str, object]:
    return {"type": "image", "data": base64.b64encode(data).decode(), "format": "png", **fields}


def asample(*chunks: object) -> AsampleRequest:
    body = {"prompt": {"chunks": list(chunks)}, "sampling_session_id": "s", "seq_id": 0}
    return AsampleRequest.model_validate(body)


def test_a_prompt_and_a_datum_hold_images() -> None:
    data = picture(37, 21)
    request = asample({"type": "encoded_text", "tokens": [5]}, chunk(data, expected_tokens=15), {"tokens": [6]})
    sample = sample_of(request, "r", None, VISION)
    message = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([5], "<i4").tobytes()
    image = datum.model_input.add().image
    image.data, image.format, image.expected_tokens = data, "png", 15
    datum.model_input.add().encoded_text.tokens = np.array([6], "<i4").tobytes()
    (read,) = pass_of(message, "r", VISION).data
    for tokens, images in ((sample.prompt_T, sample.images), (read.tokens_N, read.images)):
        assert tokens.tolist() == [5, *[IMAGE] * 15, 6]
        assert [placed.data for placed in images] == [data]
    assert sample.images[0].path == "prompt.chunks[1]"
    assert read.images[0].path == "data[0].model_input.chunks[1]"


def test_a_wrong_number_of_tokens_is_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match=r"prompt\.chunks\[0\]\.expected_tokens is 14, but this model makes 15 tokens"):
        sample_of(asample(chunk(picture(37, 21), expected_tokens=14)), "r", None, VISION)


def test_a_model_of_text_refuses_an_image_and_an_asset_pointer_by_name() -> None:
    with pytest.raises(NotSupportedError, match=r"chunks\[0\] is of type 'image', and this base model takes text only"):
        sample_of(asample(chunk(picture(8, 8))), "r", None)
    message = pb.ForwardBackwardRequest()
    message.data.add().model_input.add().image.data = picture(8, 8)
    with pytest.raises(NotSupportedError, match="takes text only"):
        pass_of(message, "r")
    pointer = {"type": "image_asset_pointer", "location": "http://127.0.0.1/x.png", "format": "png"}
    for vision in (None, VISION):
        with pytest.raises(NotSupportedError, match="'image_asset_pointer'; this server fetches no assets"):
            sample_of(asample(pointer), "r", None, vision)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"data": 7}, "data is 7"),
        ({"data": "*"}, "data is not base64"),
        ({"format": "webp"}, "format is 'webp'; it must be 'png' or 'jpeg'"),
        ({"format": None}, "format is None"),
        ({"expected_tokens": "15"}, "expected_tokens is '15'"),
        ({"expected_tokens": True}, "expected_tokens is True"),
    ],
)
def test_a_field_that_is_wrong_is_named(fields: dict[str, object], said: str) -> None:
    with pytest.raises(UserError) as refused:
        image_chunk(chunk(picture(8, 8)) | fields, "prompt.chunks[0]")
    assert said in str(refused.value)


def test_an_input_may_have_so_many_images() -> None:
    parts = InputParts(VISION)
    for _ in range(MAX_IMAGES):
        parts.add_image(ImageBytes(picture(8, 8), "png"), "x")
    with pytest.raises(UserError, match="one image too many"):
        parts.add_image(ImageBytes(picture(8, 8), "png"), "x")


@given(st.sampled_from(["png", "jpeg"]), st.integers(0, 2**31), st.integers(1, 24))
def test_a_damaged_file_is_refused_by_name_or_decoded(form: str, seed: int, num_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    data = np.frombuffer(picture(24, 16, form=form), np.uint8).copy()
    data[rng.integers(0, len(data), num_bytes)] = rng.integers(0, 256, num_bytes)
    damaged = data.tobytes()[: int(rng.integers(len(data) // 2, len(data) + 1))]
    try:
        width, height = check_header(damaged, form, "chunks[0]")
        image = Image("chunks[0]", damaged, form, width, height, 0, 1, b"")
        assert decode_image(image).mode == "RGB"
    except UserError as error:
        assert "chunks[0]." in str(error)
