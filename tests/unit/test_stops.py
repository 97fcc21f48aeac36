"""Stop rules against their definition: the first token after which a stop is in the decoded answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from support import tiny_models
from tinsmith.samplers.local.request import Decode, StopRule

BYTES = tiny_models.tokenizer()


def _byte_decode(token_ids: list[int]) -> str:
    return BYTES.backend_tokenizer.decode(token_ids, skip_special_tokens=False)


def _fallback_decode() -> Decode:
    """A SentencePiece-like tokenizer: words with a leading mark, and byte fallback."""
    words = ["<unk>", "\u2581the", "\u2581", "stop", "s", "t", "o", "p", "\u2581end"]
    vocab = {token: i for i, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return lambda token_ids: inner.decode(token_ids, skip_special_tokens=False)


def _encode(text: str) -> list[int]:
    return BYTES.encode(text, add_special_tokens=False)


def _first_hit(decode: Decode, tokens: list[int], strings: tuple[str, ...]) -> int | None:
    """The definition, which decodes the whole answer each time; an unfinished character is not text yet."""
    for end in range(1, len(tokens) + 1):
        if any(text in decode(tokens[:end]).rstrip("\ufffd") for text in strings):
            return end
    return None


def _rule_hit(decode: Decode, tokens: list[int], strings: tuple[str, ...]) -> int | None:
    rule = StopRule(decode, strings=strings, tokens=frozenset())
    for end, token in enumerate(tokens, 1):
        if rule.push(token):
            return end
    return None


def test_a_stop_string_that_spans_tokens_is_found_at_its_last_token():
    assert _rule_hit(_byte_decode, _encode("abc\n\nUser: hello"), ("\n\nUser:",)) == len(_encode("abc\n\nUser:"))


def test_a_character_split_over_tokens_stops_at_its_last_byte_and_not_before():
    tokens = _encode("x\u4f60\U0001f600y")
    assert len(tokens) == 9
    assert _rule_hit(_byte_decode, tokens, ("\u4f60",)) == 4
    assert _rule_hit(_byte_decode, tokens, ("\U0001f600",)) == 8


def test_a_special_token_can_be_named_by_its_text():
    assert _rule_hit(_byte_decode, [1, 2, 260, 3], ("<|special_3|>",)) == 3


def test_stop_tokens_stop_and_other_tokens_do_not():
    rule = StopRule(_byte_decode, strings=(), tokens=frozenset({7, 9}))
    assert [rule.push(token) for token in (1, 2, 9)] == [False, False, True]


def test_a_stop_far_behind_a_long_answer_is_still_found_and_no_window_grows():
    longest = 0

    def decode(token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return _byte_decode(token_ids)

    tokens = _encode("word " * 300 + "END and more")
    assert _rule_hit(decode, tokens, ("END",)) == 5 * 300 + 3
    assert longest <= 24


def test_a_split_character_is_found_wherever_the_window_is_cut():
    for offset in range(60):
        for text in ("\u4f60", "\U0001f600"):
            tokens = _encode("x" * offset + text + "x" * 40)
            assert _rule_hit(_byte_decode, tokens, (text,)) == offset + len(text.encode())


def test_text_on_both_sides_of_undecodable_bytes_does_not_join_up():
    broken = [token for token in range(256) if _byte_decode([token]) == "\ufffd"][:1] * 40
    assert _rule_hit(_byte_decode, [*_encode("ab"), *broken, *_encode("cd")], ("abcd",)) is None


@given(
    tokens=st.lists(st.integers(0, 299) | st.sampled_from(_encode("ab\u4f60\U0001f600")), max_size=60),
    strings=st.lists(st.text("ab\u4f60\U0001f600", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_byte_level_tokens_stop_where_the_whole_decoded_answer_says(tokens: list[int], strings: list[str]):
    expected = _first_hit(_byte_decode, tokens, tuple(strings))
    assert _rule_hit(_byte_decode, tokens, tuple(strings)) == expected


@given(
    tokens=st.lists(st.integers(1, 8) | st.sampled_from([9 + b for b in "\u4f60s".encode()]), max_size=60),
    strings=st.lists(
        st.sampled_from(["stop", " the", "the", "\u4f60", "s\u4f60", "p end", "stopstop"]), min_size=1, max_size=3
    ),
)
def test_byte_fallback_tokens_stop_where_the_whole_decoded_answer_says(tokens: list[int], strings: list[str]):
    decode = _fallback_decode()
    assert _rule_hit(decode, tokens, tuple(strings)) == _first_hit(decode, tokens, tuple(strings))


@given(st.lists(st.sampled_from(_encode("ab\u4f60")), max_size=14), st.integers(0, 8))
def test_a_stop_string_counts_if_its_last_token_comes_after_the_least_number(tokens: list[int], least: int) -> None:
    strings = ("ab", "bab", "\u4f60a", "b")
    rule = StopRule(_byte_decode, strings=strings, tokens=frozenset(), min_tokens=least)
    hits = [end for end, token in enumerate(tokens, 1) if rule.push(token)]
    expected = []
    for end in range(least + 1, len(tokens) + 1):
        before = len(_byte_decode(tokens[: end - 1]).rstrip("\ufffd"))
        text = _byte_decode(tokens[:end]).rstrip("\ufffd")
        if len(text) > before and any(text.find(stop, max(before - len(stop) + 1, 0)) >= 0 for stop in strings):
            expected.append(end)
    assert hits[:1] == expected[:1]
