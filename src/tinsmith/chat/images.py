"""Turns conversations with OpenAI's `image_url` parts into the prompt's token ids and its images.

A chat template writes one token for each image. This module replaces it by as many tokens as the model's image
processor makes of the image, with the model's tokens around them. Only `data:` URLs are read, because fetching URLs for
clients would let them reach internal addresses.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence

from tinsmith.chat.tokenizer import Message, ModelTokenizer
from tinsmith.errors import RequestError, not_supported
from tinsmith.types import Image
from tinsmith.wire.fields import show
from tinsmith.wire.images import FORMATS, ImageBytes, InputParts

Prompt = tuple[list[int], tuple[Image, ...]]
MEDIA_TYPES = {f"image/{form}": form for form in FORMATS}


def encode_conversation(
    tokenizer: ModelTokenizer,
    messages: Sequence[Message],
    tools: Sequence[Message] | None = None,
    variables: Mapping[str, object] | None = None,
    **options: bool,
) -> Prompt:
    """Return a conversation's token ids and images. `options` are those of `ModelTokenizer.chat`. Raises UserError for
    an unsupported image.
    """
    images: list[tuple[str, ImageBytes]] = []
    template_messages = [
        _extract_images(message, f"messages[{index}]", tokenizer, images) for index, message in enumerate(messages)
    ]
    tokens = tokenizer.chat(template_messages, tools, variables, images=bool(images), **options)
    if not images or tokenizer.vision is None:
        return tokens, ()
    image_positions = [
        position for position, token_id in enumerate(tokens) if token_id == tokenizer.vision.image_token_id
    ]
    if len(image_positions) != len(images):
        raise RequestError(
            "messages",
            f"messages have {len(images)} images, but the model's chat template writes {len(image_positions)} image "
            "tokens for them; remove the image token from texts, or use a model whose template supports images",
        )
    parts = InputParts(tokenizer.vision)
    text_start = 0
    for position, (field, image) in zip(image_positions, images, strict=True):
        parts.add_tokens_of(tokens[text_start:position])
        parts.add_image(image, field)
        text_start = position + 1
    parts.add_tokens_of(tokens[text_start:])
    return parts.tokens.tolist(), parts.images


def _extract_images(
    message: Message, message_path: str, tokenizer: ModelTokenizer, images: list[tuple[str, ImageBytes]]
) -> Message:
    """Return the message for a template, with `{"type": "image"}` for each image, and add its images to `images`."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts: list[object] = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "image_url":
            parts.append(part)
            continue
        part_path = f"{message_path}.content[{index}].image_url"
        if tokenizer.vision is None:
            raise not_supported(part_path, "this model takes text only; leave the image out")
        image_url = part.get("image_url")
        images.append(
            (
                f"{part_path}.url",
                read_data_url(
                    image_url.get("url") if isinstance(image_url, Mapping) else image_url, f"{part_path}.url"
                ),
            )
        )
        parts.append({"type": "image"})
    return {**message, "content": parts}


def read_data_url(url: object, field: str) -> ImageBytes:
    """Read the file in a data URL (RFC 2397)."""
    if not isinstance(url, str):
        raise RequestError(field, f"{field} is {show(url)}; it must be a data: URL")
    header, comma, data = url.partition(",")
    scheme = header.partition(":")[0].lower()
    if scheme != "data" or not comma:
        description = f"the address {show(url)}" if scheme in ("http", "https") else show(url)
        raise not_supported(
            field, f"{description}: this server fetches nothing; send the image as data:image/png;base64,..."
        )
    media_type, *parameters = header[len("data:") :].lower().split(";")
    if "base64" not in parameters:
        raise RequestError(field, f"{field} is not in base64; send data:image/png;base64,...")
    return decode_image(media_type, data, field)


def decode_image(media_type: str, data: str, field: str) -> ImageBytes:
    image_format = MEDIA_TYPES.get(media_type.replace("image/jpg", "image/jpeg"))
    if image_format is None:
        raise RequestError(field, f"{field} has type {show(media_type)}; use {' or '.join(MEDIA_TYPES)}")
    try:
        return ImageBytes(base64.b64decode(data, validate=True), image_format)
    except (binascii.Error, ValueError) as error:
        raise RequestError(field, f"{field} is not base64: {error}") from error


def data_url(data: bytes, image_format: str) -> str:
    return f"data:image/{image_format};base64,{base64.b64encode(data).decode()}"
