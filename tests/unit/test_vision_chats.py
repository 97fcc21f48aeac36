"""Images in conversations: in OpenAI's and Anthropic's requests and in rows of a bulk job."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import orjson
import pytest
from transformers import AutoTokenizer

from support import tiny_models, vision_models
from support.vision_models import IMAGE, picture
from tinsmith.base_models import read_shape
from tinsmith.batch.operations.sample import Sample
from tinsmith.chat.chats import ChatRequest
from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.chat.messages import MessageRequest
from tinsmith.chat.responses import ResponseRequest
from tinsmith.chat.texts import Text
from tinsmith.errors import RequestError, UserError
from tinsmith.types import SamplingParams
from tinsmith.wire.fields import IgnoredFields, validate
from tinsmith.wire.sampling import read_sample, sample_body

WIDE, TALL = picture(61, 22), picture(20, 75, form="jpeg")


def url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def part(address: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": address}}


IMAGE_CONTENT: list[dict[str, Any]] = [
    {"type": "text", "text": "Compare "},
    part(url(WIDE)),
    {"type": "text", "text": " with "},
    part(url(TALL, "image/jpg")),
    {"type": "text", "text": "!"},
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(vision_models.make(tmp_path_factory.mktemp("vl")))


def chat(text: Text, *content: object, **fields: object) -> GenerationPlan:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": list(content)}]
    return validate(ChatRequest, {"model": "m", "messages": messages, **fields}).plan(text)


def test_a_chat_with_images_is_written_as_transformers_does(text: Text) -> None:
    """The reference is the tokenizer's template with the image processor's counts, since the combined processor needs
    torchvision."""
    plan = chat(text, *IMAGE_CONTENT)
    tokenizer = AutoTokenizer.from_pretrained(text._directory)
    content = [{"type": "image"} if block["type"] == "image_url" else block for block in IMAGE_CONTENT]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for width, height in ((61, 22), (20, 75)):
        num_tokens = vision_models.processor().get_number_of_image_patches(height, width) // 4
        written = written.replace("<|image_pad|>", "<|placeholder|>" * num_tokens, 1)
    expected = tokenizer(written.replace("<|placeholder|>", "<|image_pad|>"))["input_ids"]
    assert list(plan.prompts[0]) == expected
    assert [image.data for image in plan.images] == [WIDE, TALL]
    assert [image.format for image in plan.images] == ["png", "jpeg"]
    for image in plan.images:
        assert set(plan.prompts[0][image.start : image.stop]) == {IMAGE}


def test_the_stored_body_of_a_chat_is_read_as_the_same_prompt(text: Text) -> None:
    plan = chat(text, *IMAGE_CONTENT)
    body = sample_body(plan.prompts[0], 1, SamplingParams(max_tokens=3), {}, images=plan.images)
    sample = read_sample(orjson.dumps(body), "r", None, text.vision)
    assert sample.prompt_T.tolist() == list(plan.prompts[0])
    read = [(image.data, image.start, image.stop, image.digest) for image in sample.images]
    assert read == [(image.data, image.start, image.stop, image.digest) for image in plan.images]


def test_blocks_of_anthropic_become_the_same_prompt(text: Text) -> None:
    def block(data: bytes, media_type: str) -> dict[str, object]:
        source = {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}
        return {"type": "image", "source": source}

    blocks = [
        {"type": "text", "text": "Compare "},
        block(WIDE, "image/png"),
        {"type": "text", "text": " with "},
        block(TALL, "image/jpeg"),
        {"type": "text", "text": "!"},
    ]
    body = {"model": "m", "max_tokens": 3, "system": "Be brief.", "messages": [{"role": "user", "content": blocks}]}
    plan, expected = validate(MessageRequest, body).plan(text), chat(text, *IMAGE_CONTENT)
    assert plan.prompts == expected.prompts
    assert [image.data for image in plan.images] == [WIDE, TALL]
    blocks[1]["source"] = {"type": "url", "url": "http://127.0.0.1/x.png"}
    with pytest.raises(RequestError, match="this server fetches nothing"):
        validate(MessageRequest, body).plan(text)


def test_images_of_responses_become_the_same_prompt(text: Text, tmp_path: Path) -> None:
    """In the input, and in the output of a function that looks at a picture."""

    def image_block(data: bytes, media_type: str, **fields: object) -> dict[str, object]:
        return {"type": "input_image", "image_url": url(data, media_type), **fields}

    said = [
        {"type": "input_text", "text": "Compare "},
        image_block(WIDE, "image/png", detail="low"),
        {"type": "input_text", "text": " with "},
        image_block(TALL, "image/jpg", file_id=None),
        {"type": "input_text", "text": "!"},
    ]
    items: list[dict[str, Any]] = [{"role": "user", "content": said}]
    body = {"model": "m", "instructions": "Be brief.", "input": items}
    ignored = IgnoredFields()
    request = validate(ResponseRequest, body, ignored)
    assert request.plan(text) == chat(text, *IMAGE_CONTENT) and ignored.names == ("input[].content[].detail",)
    again = validate(ResponseRequest, {"model": "m", "instructions": "Be brief.", "input": "so"})
    assert len(again.plan(text, request.items()).images) == 2, "a later response reads the stored items"
    items[0]["content"] = "Look."
    items += [
        {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [image_block(WIDE, "image/png")]},
    ]
    (image,) = validate(ResponseRequest, body).plan(text).images
    assert image.data == WIDE
    tiny_models.make(tmp_path / "m")
    with pytest.raises(RequestError, match="input is not supported by this server: an input_image: this model takes"):
        validate(ResponseRequest, body).plan(Text(read_shape("local/x", tmp_path / "m")))


def test_images_in_a_result_of_a_tool_are_in_the_prompt(text: Text, tmp_path: Path) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(WIDE).decode()}
    result: dict[str, Any] = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [{"type": "text", "text": "a map"}, {"type": "image", "source": source}],
    }
    turns = [
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "map", "input": {}}]},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]
    body = {"model": "m", "max_tokens": 3, "messages": turns}
    plan = validate(MessageRequest, body).plan(text)
    (image,) = plan.images
    assert image.data == WIDE and set(plan.prompts[0][image.start : image.stop]) == {IMAGE}
    before, after = text.decode(plan.prompts[0][: image.start]), text.decode(plan.prompts[0][image.stop :])
    assert "a map" in before and "and now?" in after
    result["content"][1]["source"] = {"type": "url", "url": "http://127.0.0.1/x.png"}
    with pytest.raises(RequestError, match="this server fetches nothing"):
        validate(MessageRequest, body).plan(text)
    result["content"][1] = {"type": "document"}
    with pytest.raises(RequestError, match=r"content\[1\]"):
        validate(MessageRequest, body).plan(text)
    result["content"][1] = {"type": "image", "source": source}
    tiny_models.make(tmp_path / "m")
    blind = Text(read_shape("local/x", tmp_path / "m"))
    (tmp_path / "m" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match="takes text only"):
        validate(MessageRequest, body).plan(blind)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://127.0.0.1:1/x.png", "the address 'http://127.0.0.1:1/x.png': this server fetches nothing"),
        ("HTTPS://example.com/x.png", "this server fetches nothing"),
        ("file:///etc/passwd", "this server fetches nothing"),
        ("", "this server fetches nothing"),
        ("data:image/png,abc", "is not in base64"),
        (url(WIDE, "image/webp"), "has type 'image/webp'; use image/png or image/jpeg"),
        ("data:image/png;base64,*", "is not base64"),
        (url(TALL), "format is 'png', but data is jpeg"),
        (url(WIDE[:20]), "header is truncated"),
    ],
)
def test_another_address_or_file_is_refused_and_never_fetched(text: Text, address: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        chat(text, {"type": "text", "text": "x"}, part(address))
    assert said in str(refused.value)
    assert "messages[1].content[1].image_url.url" in str(refused.value)


def test_an_image_token_in_a_text_is_no_image(text: Text) -> None:
    with pytest.raises(RequestError, match=r"messages have 1 images, but .* writes 2 image tokens"):
        chat(text, {"type": "text", "text": "<|image_pad|>"}, part(url(WIDE)))
    plan = chat(text, {"type": "text", "text": "<|image_pad|>"})
    assert list(plan.prompts[0]).count(IMAGE) == 1 and not plan.images


def test_invalid_images_are_refused_by_name(text: Text, tmp_path: Path) -> None:
    for detail in ("auto", "high", "low"):
        image_block = {"type": "image_url", "image_url": {"url": url(WIDE), "detail": detail}}
        assert chat(text, image_block).images == chat(text, part(url(WIDE))).images, "an image is taken whole"
    with pytest.raises(RequestError, match=r"messages\[1\]\.content\[0\] has no image_url"):
        chat(text, {"type": "image_url"})
    plain = tmp_path / "plain"
    shape = tiny_models.make(plain)
    (plain / "chat_template.jinja").write_text(vision_models.TEMPLATE)
    with pytest.raises(RequestError, match=r"messages\[1\]\.content\[0\]\.image_url.*this model takes text only"):
        chat(Text(shape), part(url(WIDE)))


class Row:
    """The service of a row without a server; it records the request."""

    row_idx = 0

    def __init__(self, text: Text) -> None:
        self._text = text
        self.request: dict[str, Any] = {}

    async def text(self, _model: str) -> Text:
        return self._text

    async def sample(self, _model: str, request: dict[str, Any]) -> None:
        self.request = request
        raise StopAsyncIteration


def request_of(text: Text, row: dict[str, object], operation: Sample) -> dict[str, Any]:
    service = Row(text)
    operation.check()
    with pytest.raises((StopAsyncIteration, RuntimeError)):
        asyncio.run(operation.answer(row, service))  # pyright: ignore[reportArgumentType]
    return service.request


def test_a_bulk_sample_takes_a_column_of_images(text: Text) -> None:
    operation = Sample("m", messages="question", image="picture", max_tokens=3)
    request = request_of(text, {"question": "What is it?", "picture": WIDE}, operation)
    body = {"prompt": request["prompt"], "sampling_params": {}}
    sample = read_sample(orjson.dumps(body), "r", None, text.vision)
    content = [part(url(WIDE)), {"type": "text", "text": "What is it?"}]
    plan = validate(ChatRequest, {"model": "m", "messages": [{"role": "user", "content": content}]}).plan(text)
    assert sample.prompt_T.tolist() == list(plan.prompts[0])
    assert [image.data for image in sample.images] == [WIDE]
    two = request_of(text, {"question": [{"role": "user", "content": "x"}], "picture": [WIDE, TALL]}, operation)
    assert [chunk["type"] for chunk in two["prompt"]["chunks"]].count("image") == 2
    for other in (base64.b64encode(WIDE).decode(), url(WIDE)):
        assert request_of(text, {"question": "What is it?", "picture": other}, operation) == request
    parts = request_of(text, {"said": [{"role": "user", "content": IMAGE_CONTENT}]}, Sample("m", messages="said"))
    assert [chunk["type"] for chunk in parts["prompt"]["chunks"]].count("image") == 2


@pytest.mark.parametrize("value", ["text", b"GIF89a", None, [WIDE, 3]])
def test_a_column_without_an_image_fails_its_row(text: Text, value: object) -> None:
    with pytest.raises(ValueError, match="column 'picture' must hold PNG or JPEG files"):
        row = {"question": "x", "picture": value}
        operation = Sample("m", messages="question", image="picture")
        asyncio.run(operation.answer(row, Row(text)))  # pyright: ignore[reportArgumentType]


def test_an_image_goes_with_messages_only() -> None:
    with pytest.raises(UserError, match="image 'picture' without messages"):
        Sample("m", prompt="question", image="picture").check()
