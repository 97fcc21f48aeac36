"""Decodes one completion token by token into reasoning, text, tool calls and logprobs.

A `Choice` takes the tokens of one sequence, all at once or one by one, and returns pieces. The joined pieces of a
stream are the whole completion. Text is held back while its meaning is undecided: an incomplete character, a possible
prefix of a stop string, a tool call. Reasoning ends at its closing tag and is returned without tags and surrounding
white space. Tool calls follow the reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.chat.texts import UNFINISHED, Text
from tinsmith.chat.tools import ToolCall, partial_length

MAX_PENDING = 16
"""Most tokens to wait for until a character is complete; a character has at most four bytes."""

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""

TopRow = tuple[Sequence[int], Sequence[float]]


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of the completion and the offset of its text; `top` are the most likely tokens at its position."""

    token_id: int
    logprob: float
    top: TopRow
    offset: int


@dataclass(slots=True)
class TextPiece:
    """The next piece of a completion. Reasoning precedes text."""

    reasoning: str = ""
    text: str = ""
    tokens: list[ShownToken] = field(default_factory=list)
    sampled: list[ShownToken] = field(default_factory=list)  # every token in order, if the plan is exact
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.text or self.calls)


class TextDecoder:
    """Incremental detokenizer: holds back a character until its last token."""

    def __init__(self, text: Text, *, special: bool = False) -> None:
        self._text = text
        self._special = special
        self._window: list[int] = []  # preceding tokens, on which a token's text may depend
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
        self.token_ids: list[int] = []  # all pushed tokens
        self.stopped_by: str | None = None  # the stop string that ended the completion
        self.reasoning_tokens = 0  # reasoning tokens, including the tags
        self._plan = plan
        self._text = text
        self._decoder = self._new_decoder()
        self._thinking = plan.thinking  # None after the end of the reasoning
        self._in_reasoning = plan.thinking is not None and plan.thinking.begun
        self._in_hidden = plan.hidden is not None and plan.hidden.begun  # inside hidden reasoning
        self._in_counted = plan.counted is not None and plan.counted.begun  # inside reasoning
        self._hidden_text = ""  # the hidden reasoning
        self._after_tag = False  # directly after hidden reasoning
        self._text_start = 0  # offset in `_whole` of the text after the last tag
        ends = text.end_token_ids if plan.params.stop_eos else frozenset()
        self._ends = ends | frozenset(plan.params.stop_tokens)
        self._whole = ""
        self._shown = 0  # number of returned characters, including reasoning and white space
        self._tokens: list[ShownToken] = []
        self._tokens_shown = 0
        self._ended = False  # later tokens are not part of the completion
        self._finished = False
        self._calls: list[ToolCall] = []
        self._sampled: list[ShownToken] = []  # tokens that are not yet part of a piece
        self._min_tokens = plan.params.adjustments.min_tokens if plan.params.adjustments else 0

    def push(self, token_id: int, logprob: float, top: TopRow = ((), ())) -> None:
        self.token_ids.append(token_id)
        token = ShownToken(token_id, logprob, top, self._offset)
        if self._plan.exact:
            self._sampled.append(token)
        if self._ended:
            return
        if token_id not in self._ends:
            self._take(token)
            return
        if self._plan.shows_stop:
            self._tokens.append(token)
            self._add(self._decoder.push(token_id))
        self._ended = True

    @property
    def _offset(self) -> int:
        """The offset of the next token's text."""
        return len(self._whole)

    def _take(self, token: ShownToken) -> None:
        """Take a token that does not end the completion."""
        self._count(token.token_id)
        if self._is_hidden(token.token_id):
            return
        self._tokens.append(token)
        if not self._is_tag(token.token_id):
            self._add(self._decoder.push(token.token_id))

    def finish(self) -> None:
        """Call this after the last token."""
        if not self._ended and not self._in_hidden:
            self._add(self._decoder.rest())
        self._ended = self._finished = True
        if self._in_reasoning:
            self._text_start = len(self._whole)
        if self._plan.tools:
            text, self._calls = self._plan.tools.found(self._whole[self._text_start :])
            self._whole = self._whole[: self._text_start] + text

    def piece(self) -> TextPiece:
        """Return the next piece: all decided text that was not returned before."""
        end = len(self._whole) if self._finished else self._decided_length()
        piece = TextPiece(self._new_reasoning(end), self._new_text(end))
        return self._completed(piece, end)

    def _completed(self, piece: TextPiece, end: int) -> TextPiece:
        """Add the tokens of the text before `end`, and the calls."""
        # A tag's token is returned with the text after it, since a piece without text is not sent.
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

    def _count(self, token_id: int) -> None:
        tags = self._plan.counted
        if tags is not None and (self._in_counted or token_id == tags.open_id):
            self.reasoning_tokens += 1
            self._in_counted = token_id != tags.close_id

    def _is_hidden(self, token_id: int) -> bool:
        """Whether a token is hidden: a tag, or a token of hidden reasoning."""
        tags = self._plan.hidden
        if tags is None:
            return False
        if token_id in (tags.open_id, tags.close_id):
            if not self._in_hidden:
                self._add(self._decoder.rest())
            self._decoder, self._hidden_text = self._new_decoder(), ""
            self._in_hidden = token_id == tags.open_id
            self._after_tag = True
            return True
        if self._in_hidden:
            self._hidden_text += self._decoder.push(token_id)
            self.stopped_by = next((stop for stop in self._plan.stops if stop in self._hidden_text), None)
            self._ended = self.stopped_by is not None
        return self._in_hidden

    def _is_tag(self, token_id: int) -> bool:
        """Whether a token begins or ends the reasoning."""
        tags = self._thinking
        if tags is None:
            return False
        if self._in_reasoning and token_id == tags.close_id:
            self._in_reasoning, self._thinking = False, None
        elif not self._in_reasoning and token_id == tags.open_id and not self._whole.strip():
            self._in_reasoning = True
        else:
            return False
        self._add(self._decoder.rest())
        self._decoder = self._new_decoder()
        self._text_start = len(self._whole)
        return True

    def _new_reasoning(self, end: int) -> str:
        """Return the new part of the reasoning, up to `end`."""
        if self._plan.thinking is None:
            return ""
        end = min(end, len(self._whole) if self._in_reasoning else self._text_start)
        return self._stripped(0, len(self._whole[:end].rstrip()))

    def _new_text(self, end: int) -> str:
        """Return the new part of the text after the reasoning, up to `end`."""
        if self._in_reasoning:
            return ""
        if self._plan.thinking is not None and self._thinking is None:
            return self._stripped(self._text_start, end)
        new = self._whole[self._shown : end]
        self._shown = max(end, self._shown)
        return new

    def _stripped(self, start: int, end: int) -> str:
        """Return the new part between two offsets, without leading white space."""
        region = self._whole[start:end]
        first = max(self._shown, start + len(region) - len(region.lstrip()))
        if first >= end:
            return ""
        self._shown = end
        return self._whole[first:end]

    def _add(self, new: str) -> None:
        if self._after_tag and not self._whole.strip():
            new = new.lstrip()  # white space after hidden reasoning
        if not new:
            return
        self._whole += new
        # A stop string does not span a tag.
        if (at := self._find_stop(self._whole, len(new), self._text_start)) is not None:
            self._whole = self._whole[:at]
            self._end_at(at)

    def _find_stop(self, text: str, num_new: int, first: int) -> int | None:
        """Return where a text ends whose last `num_new` characters complete a stop string at `first` or later."""
        if len(self.token_ids) <= self._min_tokens:
            return None
        places = ((stop, max(len(text) - num_new - len(stop) + 1, first)) for stop in self._plan.stops)
        found = [(at, stop) for stop, start in places if (at := text.find(stop, start)) >= 0]
        if not found:
            return None
        at, self.stopped_by = min(found)
        return at + (len(self.stopped_by) if self._plan.shows_stop else 0)

    def _end_at(self, offset: int) -> None:
        """End the completion at `offset`. Tokens whose text is later are not part of it."""
        self._tokens = [token for token in self._tokens if token.offset < max(offset, 1)]
        self._ended = True

    def _before_partial_stop(self, text: str) -> int:
        """Return the length of a growing text without a suffix that may become a stop string."""
        return len(text) - max((partial_length(text, stop) for stop in self._plan.stops), default=0)

    def _decided_length(self) -> int:
        text = self._whole
        end = self._before_partial_stop(text)
        if self._in_reasoning:
            return end
        if self._thinking is not None and not text.strip():
            return 0  # reasoning may still begin
        if not self._plan.tools:
            return end
        return self._text_start + self._plan.tools.decided_length(text[self._text_start : max(end, self._text_start)])
