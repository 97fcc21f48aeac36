"""Logprobs of completions: offsets are exact for tokens that are parts of characters, and names are unique."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import tiny_models
from support.properties import examples
from tinsmith.base_models import nano, read_shape
from tinsmith.chat.chats import ChatRequest, CompletionRequest
from tinsmith.chat.choices import Choice
from tinsmith.chat.detokenizer import TextDecoder, decode_with_starts
from tinsmith.chat.results import ChatAnswer, CompletionAnswer
from tinsmith.chat.texts import Text
from tinsmith.types import SampledSequence, SampleResult, TopK
from tinsmith.wire.fields import validate

TEXT = Text(read_shape(nano.MODEL_NAME, nano.path()))
SIZE = TEXT.tokenizer.get_vocab_size()
FACE = TEXT.encode("\U0001f600", special=False)
SPECIAL = sorted(TEXT.tokenizer.get_added_tokens_decoder())
PARTIAL = [token_id for token_id in range(SIZE) if "\ufffd" in TEXT.token_bytes(token_id).decode(errors="replace")]
TOKENS = st.integers(0, SIZE - 1) | st.sampled_from([*FACE, *SPECIAL]) | st.sampled_from(PARTIAL)
SEQUENCES = st.lists(TOKENS, min_size=1, max_size=40)


def spans_of(spelled: bytes) -> list[tuple[int, int]]:
    """The bytes of each character, by a codec that names the invalid ones."""
    invalid: list[tuple[int, int]] = []

    def handle(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        invalid.append((error.start, error.end))
        return "\ufffd", error.end

    codecs.register_error("spans", handle)
    spelled.decode(errors="spans")
    spans: list[tuple[int, int]] = []
    at = 0
    for start, end in [*invalid, (len(spelled), len(spelled))]:
        for character in spelled[at:start].decode():
            spans.append((at, at := at + len(character.encode())))
        spans += [(start, end)] if end > start else []
        at = end
    return spans


def starts_of(tokens: Sequence[int], special: bool) -> list[int]:
    parts = [TEXT.token_bytes(token_id, special=special) for token_id in tokens]
    spans = spans_of(b"".join(parts))
    starts, at = [], 0
    for part in parts:
        starts.append(next((index for index, (_, end) in enumerate(spans) if at < end), len(spans)))
        at += len(part)
    return starts


@examples(400)
@given(SEQUENCES, st.booleans())
def test_a_token_starts_at_the_character_with_its_first_byte(tokens: list[int], special: bool) -> None:
    text, starts = decode_with_starts(TEXT, tokens, special=special)
    assert text == TEXT.decode(tokens, special=special)
    assert starts == starts_of(tokens, special)
    assert starts == sorted(starts) and len(starts) == len(tokens)


@examples(200)
@given(st.lists(st.sampled_from([*FACE, FACE[0], *SPECIAL, *TEXT.encode("ab \u00e9", special=False)]), max_size=60))
def test_long_runs_of_incomplete_characters_decode_as_one_text(tokens: list[int]) -> None:
    decoder = TextDecoder(TEXT)
    assert "".join(map(decoder.push, tokens)) + decoder.rest() == TEXT.decode(tokens)


def test_pieces_of_bytes_in_another_tokenizer_point_to_their_character(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a"]
    inner = Tokenizer(
        models.BPE({token: i for i, token in enumerate(vocabulary)}, [("\u2581", "a")], byte_fallback=True)
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    tiny_models.make(tmp_path)
    inner.save(str(tmp_path / "tokenizer.json"))
    text = Text(read_shape("local/x", tmp_path))
    euro = [1 + byte for byte in "\u20ac".encode()]
    end = len(vocabulary) - 1
    assert decode_with_starts(text, [end, *euro, end], special=False) == ("a\u20ac a", [0, 1, 1, 1, 2])
    assert decode_with_starts(text, [end, euro[0], end], special=False) == ("a\ufffd a", [0, 1, 2])


# Responses.


def result_of(prompt: Sequence[int], tokens: Sequence[int], top: int) -> SampleResult:
    """A result whose most likely tokens are as many as possible that have the same text."""
    ids = np.array([PARTIAL[:top]] * max(len(prompt), len(tokens)), np.int32)
    values = np.full(ids.shape, -1.5, np.float32)
    topk = TopK(ids[: len(tokens)], values[: len(tokens)])
    sampled = SampledSequence(np.array(tokens, np.int32), np.full(len(tokens), -0.5, np.float32), "stop", topk)
    logprobs = np.full(len(prompt), -0.5, np.float32)
    logprobs[0] = np.nan
    return SampleResult("r", (sampled,), logprobs, TopK(ids[: len(prompt)], values[: len(prompt)]))


def completion(result: SampleResult, prompt: list[int], **fields: Any) -> dict[str, Any]:  # noqa: ANN401  JSON
    body = {"model": "m", "prompt": prompt, "logprobs": 5, "max_tokens": 99, **fields}
    plan = validate(CompletionRequest, body).plan(TEXT)
    answer: Any = CompletionAnswer(plan, TEXT).whole([result])
    return answer["choices"][0]


@examples(150)
@given(SEQUENCES, SEQUENCES, st.booleans(), st.booleans())
def test_offsets_are_places_in_the_returned_text(
    prompt: list[int], tokens: list[int], special: bool, echo: bool
) -> None:
    tokens = [token_id for token_id in tokens if token_id not in TEXT.end_token_ids] or [5]
    choice = completion(result_of(prompt, tokens, 5), prompt, echo=echo, skip_special_tokens=not special)
    before = TEXT.decode(prompt, special=special) if echo else ""
    assert choice["text"] == before + TEXT.decode(tokens, special=special)
    offsets = choice["logprobs"]["text_offset"]
    expected = [len(before) + start for start in starts_of(tokens, special)]
    assert offsets == (starts_of(prompt, special) if echo else []) + expected
    assert len(offsets) == len(choice["logprobs"]["tokens"]) and max(offsets) <= len(choice["text"])


@examples(100)
@given(SEQUENCES, st.booleans())
def test_offsets_of_a_stream_are_those_of_the_whole_completion(tokens: list[int], as_ids: bool) -> None:
    body = {"model": "m", "prompt": [5], "logprobs": 0, "return_tokens_as_token_ids": as_ids}
    plan = validate(CompletionRequest, body).plan(TEXT)

    def offsets(at_once: bool) -> list[tuple[int, int]]:
        choice = Choice(plan, TEXT, 0)
        read: list[tuple[int, int]] = []
        for token_id in [*tokens, None]:
            if token_id is None:
                choice.finish()
            else:
                choice.push(token_id, -0.5)
            if token_id is None or not at_once:
                text_piece = choice.piece()
                read += [
                    (token.token_id, token.offset) for token in (text_piece.sampled if as_ids else text_piece.tokens)
                ]
        return read

    assert offsets(at_once=False) == offsets(at_once=True)


def test_tokens_that_are_parts_of_characters_have_names_of_their_own() -> None:
    top = 12
    result = result_of([5], [FACE[0]], top)
    plan = replace(validate(CompletionRequest, {"model": "m", "prompt": [5]}).plan(TEXT), top_logprobs=top)
    answer: Any = CompletionAnswer(plan, TEXT).whole([result])
    logprobs = answer["choices"][0]["logprobs"]
    (name,), (row,) = logprobs["tokens"], logprobs["top_logprobs"]
    spelled = TEXT.token_bytes(FACE[0])
    assert name == "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
    assert len(row) == len({FACE[0], *PARTIAL[:top]}) and row[name] in (-0.5, -1.5)


def test_tokens_with_one_text_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    result = result_of([5], [PARTIAL[0]], 4)
    monkeypatch.setattr(Text, "token_bytes", lambda _self, token_id, **_: b"" if token_id == PARTIAL[3] else b"same")
    logprobs = completion(result, [5])["logprobs"]
    assert set(logprobs["top_logprobs"][0]) == {"same", *(f"token_id:{token_id}" for token_id in PARTIAL[1:4])}


@examples(100)
@given(SEQUENCES)
def test_the_bytes_of_a_chats_tokens_are_those_of_its_text(tokens: list[int]) -> None:
    tokens = [token_id for token_id in tokens if token_id not in (*TEXT.end_token_ids, *SPECIAL)] or [5]
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 3}
    plan = validate(ChatRequest, body).plan(TEXT)
    answer: Any = ChatAnswer(plan, TEXT).whole([result_of([5], tokens, 3)])
    content = answer["choices"][0]["logprobs"]["content"]
    spelled = b"".join(bytes(token["bytes"]) for token in content)
    assert spelled.decode(errors="replace") == answer["choices"][0]["message"]["content"]
    assert len({tuple(top["bytes"]) for top in content[0]["top_logprobs"]}) == 3
