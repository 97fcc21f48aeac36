"""One answer, token by token: its thought, its text, what of them may be shown already, its calls and its logprobs.

A `Choice` takes the tokens of one sequence, all at once or one by one, and gives out pieces; the pieces of a stream
joined are the whole answer. It holds back text that may become something else: an unfinished character, the beginning
of a stop string, a tool call. A thought ends at its mark and comes without the mark and surrounding white space; calls
follow the thought.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.chat.texts import UNFINISHED, Text
from tinsmith.chat.tools import ToolCall

MAX_PENDING = 16
"""Tokens that are waited for to complete a character, which has four bytes at most."""

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""

TopRow = tuple[Sequence[int], Sequence[float]]


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of the answer and where its text begins; `top` are the likeliest at its place."""

    token_id: int
    logprob: float
    top: TopRow
    offset: int


@dataclass(slots=True)
class TextPiece:
    """The next piece of an answer; thoughts come before text."""

    reasoning: str = ""
    text: str = ""
    tokens: list[ShownToken] = field(default_factory=list)
    sampled: list[ShownToken] = field(default_factory=list)  # for a plan that is exact: every token, in order
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.text or self.calls)


class TextDecoder:
    """Tokens to text as they come; a character waits for its last token."""

    def __init__(self, text: Text, *, special: bool = False) -> None:
        self._text = text
        self._special = special
        self._window: list[int] = []  # the tokens before, since a token's text may depend on them
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        new = self._new()
        if not new or (new.endswith(UNFINISHED) and len(self._pending) < MAX_PENDING):
            return ""
        self._window, self._pending = self._pending, []
        return new

    def rest(self) -> str:
        return self._new() if self._pending else ""

    def _new(self) -> str:
        before = self._text.decode(self._window, special=self._special)
        return self._text.decode(self._window + self._pending, special=self._special)[len(before) :]


class Choice:
    def __init__(self, plan: GenerationPlan, text: Text, index: int) -> None:
        self.index = index
        self.token_ids: list[int] = []  # all that were pushed
        self.stopped_by: str | None = None  # the stop string
        self._plan = plan
        self._text = text
        self._decoder = self._new_decoder()
        self._thinking = plan.thinking  # until the thought is over
        self._thinks = plan.thinking is not None and plan.thinking.begun
        self._hides = plan.hidden is not None and plan.hidden.begun  # inside a thought that is left out
        self._left_out = ""  # what was thought in it
        self._after_mark = False  # of a thought that was left out
        self._answers_at = 0  # where in `_whole` what came after the last mark begins
        ends = text.end_token_ids if plan.params.stop_eos else frozenset()
        self._ends = ends | frozenset(plan.params.stop_tokens)
        self._whole = ""
        self._shown = 0  # characters that were given out, thought and white space included
        self._tokens: list[ShownToken] = []
        self._tokens_shown = 0
        self._ended = False  # later tokens are not part of the answer
        self._finished = False
        self._calls: list[ToolCall] = []
        self._sampled: list[ShownToken] = []  # those that no piece has
        self._min_tokens = plan.params.adjustments.min_tokens if plan.params.adjustments else 0

    def push(self, token_id: int, logprob: float, top: TopRow = ((), ())) -> None:
        self.token_ids.append(token_id)
        if self._plan.exact:
            self._sampled.append(ShownToken(token_id, logprob, top, len(self._whole)))
        if self._ended:
            return
        if token_id in self._ends:
            if self._plan.shows_stop:
                self._tokens.append(ShownToken(token_id, logprob, top, len(self._whole)))
                self._add(self._decoder.push(token_id))
            self._ended = True
            return
        if self._leaves_out(token_id):
            return
        self._tokens.append(ShownToken(token_id, logprob, top, len(self._whole)))
        if not self._is_mark(token_id):
            self._add(self._decoder.push(token_id))

    def finish(self) -> None:
        """The last token was pushed."""
        if not self._ended and not self._hides:
            self._add(self._decoder.rest())
        self._ended = self._finished = True
        if self._thinks:
            self._answers_at = len(self._whole)
        if self._plan.tools:
            text, self._calls = self._plan.tools.found(self._whole[self._answers_at :])
            self._whole = self._whole[: self._answers_at] + text

    def piece(self) -> TextPiece:
        """The next piece: everything that is certain and was not given out before."""
        end = len(self._whole) if self._finished else self._certain()
        piece = TextPiece(self._thought(end), self._answer(end))
        # A mark's token comes with the text after it: a piece without text is not shown.
        while (piece or self._finished) and self._tokens_shown < len(self._tokens):
            token = self._tokens[self._tokens_shown]
            if not self._finished and token.offset >= end:
                break
            piece.tokens.append(token)
            self._tokens_shown += 1
        piece.calls, self._calls = self._calls, []
        if piece or self._finished:
            piece.sampled, self._sampled = self._sampled, []
        return piece

    def _new_decoder(self) -> TextDecoder:
        return TextDecoder(self._text, special=self._plan.shows_special)

    def _leaves_out(self, token_id: int) -> bool:
        """Whether the answer hides a token: a mark, or a token of a hidden thought."""
        marks = self._plan.hidden
        if marks is None:
            return False
        if token_id in (marks.open_id, marks.close_id):
            if not self._hides:
                self._add(self._decoder.rest())
            self._decoder, self._left_out = self._new_decoder(), ""
            self._hides = token_id == marks.open_id
            self._after_mark = True
            return True
        if self._hides:
            self._left_out += self._decoder.push(token_id)
            self.stopped_by = next((stop for stop in self._plan.stops if stop in self._left_out), None)
            self._ended = self.stopped_by is not None
        return self._hides

    def _is_mark(self, token_id: int) -> bool:
        """Whether a token begins the thought or ends it."""
        marks = self._thinking
        if marks is None:
            return False
        if self._thinks and token_id == marks.close_id:
            self._thinks, self._thinking = False, None
        elif not self._thinks and token_id == marks.open_id and not self._whole.strip():
            self._thinks = True
        else:
            return False
        self._add(self._decoder.rest())
        self._decoder = self._new_decoder()
        self._answers_at = len(self._whole)
        return True

    def _thought(self, end: int) -> str:
        """The new part of the thought, up to `end`."""
        if self._plan.thinking is None:
            return ""
        end = min(end, len(self._whole) if self._thinks else self._answers_at)
        return self._stripped(0, len(self._whole[:end].rstrip()))

    def _answer(self, end: int) -> str:
        """The new part of the answer after the thought, up to `end`."""
        if self._thinks:
            return ""
        if self._plan.thinking is not None and self._thinking is None:
            return self._stripped(self._answers_at, end)
        new = self._whole[self._shown : end]
        self._shown = max(end, self._shown)
        return new

    def _stripped(self, start: int, end: int) -> str:
        """The new part between two places, without leading white space."""
        region = self._whole[start:end]
        first = max(self._shown, start + len(region) - len(region.lstrip()))
        if first >= end:
            return ""
        self._shown = end
        return self._whole[first:end]

    def _add(self, new: str) -> None:
        if self._after_mark and not self._whole.strip():
            new = new.lstrip()  # the white space after a thought that was left out
        if not new:
            return
        before = len(self._whole)
        self._whole += new
        if len(self.token_ids) <= self._min_tokens:
            return
        # A stop ends in the new text and does not lie across the mark.
        places = ((stop, max(before - len(stop) + 1, self._answers_at)) for stop in self._plan.stops)
        found = [(at, stop) for stop, first in places if (at := self._whole.find(stop, first)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            at += len(self.stopped_by) if self._plan.shows_stop else 0
            self._whole = self._whole[:at]
            self._tokens = [token for token in self._tokens if token.offset < max(at, 1)]
            self._ended = True

    def _certain(self) -> int:
        text = self._whole
        end = len(text)
        for stop in self._plan.stops:
            for length in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:length]):
                    end = min(end, len(text) - length)
                    break
        if self._thinks:
            return end
        if self._thinking is not None and not text.strip():
            return 0  # it may still begin to think
        if not self._plan.tools:
            return end
        return self._answers_at + self._plan.tools.held(text[self._answers_at : max(end, self._answers_at)])
