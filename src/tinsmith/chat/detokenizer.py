"""Incremental detokenizer: text from tokens as they are sampled, and the place of each token in that text.

A token may be a part of a character, several characters, or nothing. Text is returned once its last character is
complete. A token's start is the index of the character that contains its first byte. Tokens of one character thus have
the same start, and starts never decrease. A token without text, such as a hidden special token, starts where the next
text does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from tinsmith.chat.tokenizer import REPLACEMENT_CHARACTER, ModelTokenizer

MAX_PENDING = 16
"""Most tokens to wait for until a character is complete."""
MAX_OPEN = 3
"""Most tokens of a character without its last byte; a character has at most four bytes."""


class TextDecoder:
    def __init__(self, tokenizer: ModelTokenizer, *, special: bool = False) -> None:
        self.starts: list[int] = []
        """The start of each token of the text that was returned last, in that text; the oldest pending token first."""
        self._tokenizer = tokenizer
        self._special = special
        self._window: list[int] = []  # preceding tokens, on which a token's text may depend
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        pending_text = self._decode_pending()
        if not pending_text or (pending_text.endswith(REPLACEMENT_CHARACTER) and len(self._pending) < MAX_PENDING):
            return ""
        num_open = self._num_open(pending_text)
        if num_open and not self._decode_pending(-num_open):
            return ""
        return self._settle(pending_text, num_open)

    def flush(self) -> str:
        self.starts = []
        return self._settle(self._decode_pending(), 0) if self._pending else ""

    def _decode_pending(self, count: int | None = None) -> str:
        """Return the text of the pending tokens, or of the first `count` of them."""
        before = self._tokenizer.decode(self._window, special=self._special)
        tokens = self._window + self._pending[:count]
        return self._tokenizer.decode(tokens, special=self._special)[len(before) :]

    def _num_open(self, pending_text: str) -> int:
        """Return how many of the last pending tokens may belong to an incomplete character."""
        if not pending_text.endswith(REPLACEMENT_CHARACTER):
            return 0
        for count in range(MAX_OPEN, 0, -1):
            if (
                self._decode_pending(-count) + self._tokenizer.decode(self._pending[-count:], special=self._special)
                == pending_text
            ):
                return count
        return 0

    def _settle(self, pending_text: str, num_open: int) -> str:
        """Return the text of the pending tokens but the last `num_open`, which stay pending."""
        open_tokens = self._pending[len(self._pending) - num_open :]
        pending_text = self._decode_pending(len(self._pending) - num_open) if open_tokens else pending_text
        self._pending = self._pending[: len(self._pending) - num_open]
        self.starts = [0] if len(self._pending) == 1 else self._starts(pending_text)
        self._window, self._pending = self._pending, open_tokens
        return pending_text

    def _starts(self, pending_text: str) -> list[int]:
        token_bytes = [self._tokenizer.token_bytes(token_id, special=self._special) for token_id in self._pending]
        if b"".join(token_bytes).decode(errors="replace") == pending_text:
            return character_starts(token_bytes)
        # A decoder that is not one of bytes: a token starts where the text before it stops to agree with the whole.
        starts = [0]
        for count in range(1, len(self._pending)):
            before = self._decode_pending(count)
            starts.append(max(starts[-1], _common_length(before, pending_text)))
        return starts


def _common_length(first: str, second: str) -> int:
    """Return how many characters at the beginning of two texts are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (before, after) in pairs if before != after), min(len(first), len(second)))


def decode_with_starts(tokenizer: ModelTokenizer, tokens: Sequence[int], *, special: bool) -> tuple[str, list[int]]:
    """Decode tokens and return the text and the start of each token in it."""
    decoder = TextDecoder(tokenizer, special=special)
    decoded: list[str] = []
    starts: list[int] = []
    length = 0
    for token_id in tokens:
        if new_text := decoder.push(token_id):
            starts += [length + start for start in decoder.starts]
            decoded.append(new_text)
            length += len(new_text)
    decoded.append(decoder.flush())
    starts += [length + start for start in decoder.starts]
    return "".join(decoded), starts


def character_starts(parts: Sequence[bytes]) -> list[int]:
    """Return, for each part of a byte string, the index of the character with its first byte in the decoded string,
    where each invalid sequence is one replacement character. An empty part starts where the next one does.
    """
    ends = list(accumulate(_character_sizes(b"".join(parts))))
    offsets = accumulate(map(len, parts[:-1]), initial=0)
    return [bisect_right(ends, offset) for offset in offsets]


def _character_sizes(encoded: bytes) -> Iterator[int]:
    """Yield the number of bytes of each character of the decoded string."""
    at = 0
    for character in encoded.decode(errors="replace"):
        size = len(character.encode())
        if character == REPLACEMENT_CHARACTER and not encoded.startswith(character.encode(), at):
            # The longest beginning that is one invalid sequence.
            num_bytes = range(min(3, len(encoded) - at), 0, -1)
            size = next(n for n in num_bytes if encoded[at : at + n].decode(errors="replace") == REPLACEMENT_CHARACTER)
        yield size
        at += size
