"""Incremental detokenizer: text from tokens as they are sampled, and the place of each token in that text.

A token may be a part of a character, several characters, or nothing. Text is returned once its last character is
complete. A token's start is the index of the character that contains its first byte. Tokens of one character thus have
the same start, and starts never decrease. A token without text, such as a hidden special token, starts where the next
text does.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tinsmith.chat.texts import UNFINISHED, Text

MAX_PENDING = 16
"""Most tokens to wait for until a character is complete; a character has at most four bytes."""


class TextDecoder:
    def __init__(self, text: Text, *, special: bool = False) -> None:
        self.starts: list[int] = []
        """The start of each token of the text that was returned last, in that text."""
        self._text = text
        self._special = special
        self._window: list[int] = []  # preceding tokens, on which a token's text may depend
        self._pending: list[int] = []

    @property
    def is_pending(self) -> bool:
        """Whether there are tokens whose text was not returned."""
        return bool(self._pending)

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        new = self._new(len(self._pending))
        if not new or (new.endswith(UNFINISHED) and len(self._pending) < MAX_PENDING):
            return ""
        return self._settle(new)

    def rest(self) -> str:
        self.starts = []
        return self._settle(self._new(len(self._pending))) if self._pending else ""

    def _new(self, count: int) -> str:
        """Return the text of the first `count` pending tokens."""
        before = self._text.decode(self._window, special=self._special)
        tokens = self._window + self._pending[:count]
        return self._text.decode(tokens, special=self._special)[len(before) :]

    def _settle(self, new: str) -> str:
        self.starts = [0] if len(self._pending) == 1 else self._starts(new)
        self._window, self._pending = self._pending, []
        return new

    def _starts(self, new: str) -> list[int]:
        spelled = [self._text.token_bytes(token_id, special=self._special) for token_id in self._pending]
        if b"".join(spelled).decode(errors="replace") == new:
            return character_starts(spelled)
        # A decoder that is not one of bytes: a token starts where the text before it stops to agree with the whole.
        starts = [0]
        for count in range(1, len(self._pending)):
            before = self._new(count)
            same = next((at for at, pair in enumerate(zip(before, new, strict=False)) if pair[0] != pair[1]), None)
            starts.append(max(starts[-1], min(len(before), len(new)) if same is None else same))
        return starts


def decode_with_starts(text: Text, tokens: Sequence[int], *, special: bool) -> tuple[str, list[int]]:
    """Decode tokens and return the text and the start of each token in it."""
    decoder = TextDecoder(text, special=special)
    decoded: list[str] = []
    starts: list[int] = []
    length = 0
    for token_id in tokens:
        new = decoder.push(token_id)
        if not decoder.is_pending:
            starts += [length + start for start in decoder.starts]
            decoded.append(new)
            length += len(new)
    decoded.append(decoder.rest())
    starts += [length + start for start in decoder.starts]
    return "".join(decoded), starts


def character_starts(spelled: Sequence[bytes]) -> list[int]:
    """Return, for each part of a byte string, the index of the character with its first byte in the decoded string,
    where each invalid sequence is one replacement character.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    starts: list[int] = []
    index = 0  # of the next character
    for part in spelled:
        is_first = True
        for byte in part:
            was_open = bool(decoder.getstate()[0])
            new = len(decoder.decode(bytes([byte])))
            begins_later = was_open and (new > 1 or (new == 1 and bool(decoder.getstate()[0])))
            if is_first:
                starts.append(index + begins_later)
                is_first = False
            index += new
        if is_first:
            starts.append(index)
    return starts
