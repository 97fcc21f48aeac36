"""When a sequence stops: end-of-sequence tokens, stop tokens, and stop strings in the decoded text.

`StopRule` is fed one token at a time and answers whether this token completes a stop. Strings are matched on
what a client sees when it decodes the generated tokens, special tokens included; a string may span tokens,
and a character may be split over tokens. Each token decodes a window of at most WINDOW_TOKENS tokens, never
the whole answer. It knows tokens and text, nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

WINDOW_TOKENS = 24  # decoded per token; the window is then cut back to KEEP_TOKENS
KEEP_TOKENS = 8  # a character has at most 4 bytes, a token at least one, so an unfinished character is inside
UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character


class StopRule:
    """One sequence's stop conditions and the little text that it must remember."""

    def __init__(self, decode: Decode, *, strings: Sequence[str], tokens: frozenset[int], min_tokens: int = 0) -> None:
        """`tokens` holds every token that stops the sequence, end-of-sequence tokens included. None of the first
        `min_tokens` tokens completes a stop string.
        """
        self._decode = decode
        self.tokens = tokens
        self._min_tokens = min_tokens
        self._num_pushed = 0
        self._strings = tuple(text for text in strings if text)
        self._tail_length = max((len(text) for text in self._strings), default=1) - 1
        self._tail = ""  # the last characters before the window's new ones: too few to hold a whole stop string
        self._window: list[int] = []
        self._num_seen = 0  # characters of the window's text that were matched already

    def push(self, token: int) -> bool:
        """Whether the sequence ends with this token."""
        self._num_pushed += 1
        if token in self.tokens:
            return True
        return bool(self._strings) and self._push_text(token)

    def _push_text(self, token: int) -> bool:
        self._window.append(token)
        text = self._settled_text()
        new, self._num_seen = text[self._num_seen :], max(self._num_seen, len(text))
        if new:
            recent = self._tail + new
            if self._num_pushed > self._min_tokens:
                for stop in self._strings:
                    if recent.find(stop, max(len(self._tail) - len(stop) + 1, 0)) >= 0:
                        return True
            self._tail = recent[len(recent) - min(self._tail_length, len(recent)) :]
        if len(self._window) >= WINDOW_TOKENS:
            del self._window[:-KEEP_TOKENS]
            self._num_seen = len(self._settled_text())
        return False

    def _settled_text(self) -> str:
        """The window's text without a last character that further tokens may still complete."""
        return self._decode(self._window).rstrip(UNFINISHED)
