"""Lines of streams end only at line ends: neither what we send nor what we read is cut at Unicode's."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tinsmith
from support.properties import examples
from tinsmith.api.event_stream import encode_event
from tinsmith.api.openai.message_batches import CreateMessageBatchRequest
from tinsmith.samplers.remote.connection import EngineConnection, RemoteEngine, _lines
from tinsmith.samplers.remote.dialect import EngineCall
from tinsmith.wire.bodies import write_json_line
from tinsmith.wire.fields import validate

LINE_ENDS = "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e\r\n"
SOURCE = Path(tinsmith.__file__).parent
SPLITTERS = re.compile(r"\.(splitlines|iter_lines|aiter_lines)\(")
OF_TEXT_FOR_PEOPLE = {"backends/torch/custom_loss.py", "losses/registry.py"}
"""Files that split messages for people, not data."""


@examples(200)
@given(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(LINE_ENDS)))
def test_json_of_a_stream_is_one_line_for_every_client(text: str) -> None:
    line = write_json_line({"text": text, text: 1})
    assert json.loads(line) == {"text": text, text: 1}
    assert len(line.decode().splitlines()) == 1


def test_events_and_lines_of_batches_are_one_line_each() -> None:
    event = encode_event("message", {"text": LINE_ENDS}).decode()
    assert event.splitlines() == [line for line in event.split("\n") if line] + [""]
    params = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": LINE_ENDS}]}
    requests = {"requests": [{"custom_id": "a", "params": params}]}
    (line,) = validate(CreateMessageBatchRequest, requests).lines()
    assert len(line.decode().splitlines()) == 1 and json.loads(line)["body"] == params


@examples(100)
@given(st.text(st.sampled_from("ab\u2028\u0085\n\r"), max_size=20), st.data())
def test_a_stream_is_split_only_at_its_line_ends(text: str, data: st.DataObject) -> None:
    written = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(written)))) | {0, len(written)})

    async def chunks() -> AsyncIterator[bytes]:
        for start, end in pairwise(cuts):
            yield written[start:end]

    async def lines() -> list[bytes]:
        return [line async for line in _lines(chunks())]

    *complete, last = written.split(b"\n")
    expected = [line.removesuffix(b"\r") for line in complete] + ([last] if last else [])
    assert asyncio.run(lines()) == expected


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085"])
def test_an_engine_may_stream_any_character(character: str) -> None:
    events = [{"choices": [{"index": 0, "text": text}]} for text in ("a", f"b{character}c", "d")]
    body = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n" for event in events) + "data: [DONE]\n\n"

    async def read() -> list[Any]:
        engine = RemoteEngine(Path("."), Path("x"), url="http://127.0.0.1:1")
        connection = EngineConnection(cast("Any", SimpleNamespace(name="vLLM")), engine, "m", cast("Any", None))
        answer = httpx.MockTransport(lambda _: httpx.Response(200, content=body.encode()))
        connection._client = httpx.AsyncClient(transport=answer, base_url="http://engine")
        return [event async for event in connection.events(EngineCall("/v1/completions", {"stream": True}))]

    assert asyncio.run(read()) == events


def test_no_data_is_split_at_line_ends_of_unicode() -> None:
    """`str.splitlines` and httpx's line iterators also split at characters that JSON may contain."""
    splitting = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if SPLITTERS.search(path.read_text()) and path.relative_to(SOURCE).parts[0] != "batch"
    ]
    assert set(splitting) == OF_TEXT_FOR_PEOPLE
