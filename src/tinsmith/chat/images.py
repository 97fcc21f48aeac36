"""Turns conversations with OpenAI's `image_url` parts into the prompt's token ids and its images.

A chat template writes one token for each image. This module replaces it by as many tokens as the model's image
processor makes of the image, with the model's tokens around them. Only `data:` URLs are read, because fetching URLs for
clients would let them reach internal addresses.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence

from tinsmith.chat.texts import Message, Text
from tinsmith.errors import RequestError, not_supported
from tinsmith.types import Image
from tinsmith.wire.fields import show
from tinsmith.wire.images import FORMATS, ImageBytes, InputParts

Prompt = tuple[list[int], tuple[Image, ...]]
MEDIA_TYPES = {f"image/{form}": form for form in FORMATS}


def prompt_of(
    text: Text,
    messages: Sequence[Message],
    tools: Sequence[Message] | None = None,
    variables: Mapping[str, object] | None = None,
    **options: bool,
) -> Prompt:
    """Render a conversation; `options` are those of `Text.chat`. Raises UserError for an unsupported image."""
    images: list[tuple[str, ImageBytes]] = []
    shown = [_shown(message, f"messages[{index}]", text, images) for index, message in enumerate(messages)]
    tokens = text.chat(shown, tools, variables, images=bool(images), **options)
    if not images or text.vision is None:
        return tokens, ()
    places = [place for place, token_id in enumerate(tokens) if token_id == text.vision.image_token_id]
    if len(places) != len(images):
        raise RequestError(
            "messages",
            f"messages have {len(images)} images, but the model's chat template writes {len(places)} image tokens for "
            "them; remove the image token from texts, or use a model whose template supports images",
        )
    parts = InputParts(text.vision)
    begin = 0
    for place, (where, image) in zip(places, images, strict=True):
        parts.add_tokens_of(tokens[begin:place])
        parts.add_image(image, where)
        begin = place + 1
    parts.add_tokens_of(tokens[begin:])
    return parts.tokens.tolist(), parts.images


def _shown(message: Message, where: str, text: Text, images: list[tuple[str, ImageBytes]]) -> Message:
    """Return the message for a template, with `{"type": "image"}` for each image, and add its images to `images`."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts: list[object] = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "image_url":
            parts.append(part)
            continue
        at = f"{where}.content[{index}].image_url"
        if text.vision is None:
            raise not_supported(at, "this model takes text only; leave the image out")
        given = part.get("image_url")
        images.append((f"{at}.url", read_url(given.get("url") if isinstance(given, Mapping) else given, f"{at}.url")))
        parts.append({"type": "image"})
    return {**message, "content": parts}


def read_url(url: object, where: str) -> ImageBytes:
    """Read the file in a data URL (RFC 2397)."""
    if not isinstance(url, str):
        raise RequestError(where, f"{where} is {show(url)}; it must be a data: URL")
    head, comma, data = url.partition(",")
    scheme = head.partition(":")[0].lower()
    if scheme != "data" or not comma:
        what = f"the address {show(url)}" if scheme in ("http", "https") else show(url)
        raise not_supported(where, f"{what}: this server fetches nothing; send the image as data:image/png;base64,...")
    media_type, *parameters = head[len("data:") :].lower().split(";")
    if "base64" not in parameters:
        raise RequestError(where, f"{where} is not in base64; send data:image/png;base64,...")
    return from_base64(media_type, data, where)


def from_base64(media_type: str, data: str, where: str) -> ImageBytes:
    form = MEDIA_TYPES.get(media_type.replace("image/jpg", "image/jpeg"))
    if form is None:
        raise RequestError(where, f"{where} has type {show(media_type)}; use {' or '.join(MEDIA_TYPES)}")
    try:
        return ImageBytes(base64.b64decode(data, validate=True), form)
    except (binascii.Error, ValueError) as error:
        raise RequestError(where, f"{where} is not base64: {error}") from error


def data_url(data: bytes, form: str) -> str:
    return f"data:image/{form};base64,{base64.b64encode(data).decode()}"
