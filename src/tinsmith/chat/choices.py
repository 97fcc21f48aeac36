"""Decodes one completion token by token into reasoning, text, tool calls and logprobs.

A `Choice` takes the tokens of one sequence, all at once or one by one, and returns deltas. The joined deltas of a
stream are the whole completion. Text is held back while its meaning is undecided: an incomplete character, a possible
prefix of a stop string, a possible tool call. Text and calls are returned in their order.

Reasoning ends at its closing tag and is returned without tags and surrounding white space. Calls in closed reasoning
are reasoning. If the completion ends inside the reasoning, the reasoning ends before its first complete call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tinsmith.chat.calls import CallAssembler, ToolCall
from tinsmith.chat.detokenizer import TextDecoder
from tinsmith.chat.dialects.marked import partial_length
from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.chat.tokenizer import ModelTokenizer

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""

TopRow = tuple[Sequence[int], Sequence[float]]


@dataclass(slots=True)
class CompletionToken:
    """A token of the completion; `top` are the most likely tokens at its position. `offset` is the index of its text in
    the completion, which is known once its character is complete.
    """

    token_id: int
    logprob: float
    top: TopRow
    offset: int


@dataclass(slots=True)
class CompletionDelta:
    """The next part of a completion. Reasoning precedes `parts`: text and calls in their order. `text` is the text
    alone; text after a call begins a line of its own in it.
    """

    reasoning: str = ""
    text: str = ""
    tokens: list[CompletionToken] = field(default_factory=list)
    sampled: list[CompletionToken] = field(default_factory=list)  # every token in order, if the plan is exact
    parts: list[str | ToolCall] = field(default_factory=list)

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in self.parts if isinstance(part, ToolCall)]

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.parts)


class Choice:
    def __init__(self, plan: GenerationPlan, tokenizer: ModelTokenizer, index: int) -> None:
        self.index = index
        self.token_ids: list[int] = []  # all pushed tokens
        self.stopped_by: str | None = None  # the stop string that ended the completion
        self.reasoning_tokens = 0  # reasoning tokens, including the tags
        self.num_calls = 0  # calls in the returned deltas
        self.weight_version = ""  # the name of the weights that sampled, once the completion has ended
        self._plan = plan
        self._tokenizer = tokenizer
        self._decoder = self._new_decoder()
        self._reasoning_tags = plan.reasoning_tags  # None after the end of the reasoning
        self._in_reasoning = plan.reasoning_tags is not None and plan.reasoning_tags.in_reasoning
        self._in_hidden = plan.hidden_tags is not None and plan.hidden_tags.in_reasoning  # inside hidden reasoning
        self._in_counted = plan.counted_tags is not None and plan.counted_tags.in_reasoning  # inside reasoning
        self._hidden_text = ""  # the hidden reasoning
        self._after_tag = False  # directly after hidden reasoning
        end_token_ids = tokenizer.end_token_ids if plan.params.stop_eos else frozenset()
        self._end_token_ids = end_token_ids | frozenset(plan.params.stop_tokens)
        self._shown_tokens = plan.tools.shown_tokens if plan.tools and not plan.shows_special else {}
        self._marks: list[tuple[int, int]] = []  # where the shown tokens are in `_content`, which text leaves out
        self._hidden_marks: list[tuple[int, int]] = []  # and in `_hidden_text`
        self._content = ""
        self._text_start = 0  # offset in `_content` of the text after the last tag
        self._assembler: CallAssembler | None = None  # of the text from `_text_start` on
        self._num_read = 0  # characters of `_content` that the assembler has read
        self._num_returned = 0  # number of returned characters, including reasoning and white space
        self._has_text = False  # whether a returned delta had text
        self._is_after_call = False  # whether a call was returned after the last text
        self._tokens: list[CompletionToken] = []
        self._num_tokens_returned = 0
        self._pending: list[CompletionToken] = []  # tokens whose characters are incomplete
        self._new_sampled: list[CompletionToken] = []  # tokens that are not yet part of a delta
        self._is_over = False  # later tokens are not part of the completion
        self._is_finished = False
        self._min_tokens = plan.params.adjustments.min_tokens if plan.params.adjustments else 0
        self._begin_text(0)

    def push(self, token_id: int, logprob: float, top: TopRow = ((), ())) -> None:
        self.token_ids.append(token_id)
        token = CompletionToken(token_id, logprob, top, self._offset)
        if self._plan.exact:
            self._new_sampled.append(token)
        if self._is_over:
            return
        if token_id not in self._end_token_ids:
            self._take(token)
            return
        if self._plan.shows_stop or token_id in self._shown_tokens:
            self._tokens.append(token)
            self._decode(token)
        self._is_over = True

    @property
    def _offset(self) -> int:
        """The offset of the next token's text."""
        return len(self._content)

    def _take(self, token: CompletionToken) -> None:
        """Take a token that does not end the completion."""
        self._count(token.token_id)
        if self._is_hidden(token.token_id):
            return
        self._tokens.append(token)
        if not self._is_tag(token.token_id):
            self._decode(token)

    def _decode(self, token: CompletionToken) -> None:
        """Add the token's text, with that of the tokens before it whose characters it completes."""
        if (mark := self._shown_tokens.get(token.token_id)) is not None:
            self._flush()
            self._decoder = self._new_decoder()
            token.offset = self._offset
            if not self._is_over:
                self._marks.append((len(self._content), len(self._content) + len(mark)))
                self._content += mark  # in which no stop string is searched
            return
        self._pending.append(token)
        if new_text := self._decoder.push(token.token_id):
            self._add(new_text)

    def _flush(self) -> None:
        """Add the text of incomplete characters."""
        self._add(self._decoder.flush())

    def finish(self) -> None:
        """Call this after the last token."""
        if self._in_hidden:
            self._hidden_text += "" if self._is_over else self._decoder.flush()
        elif not self._is_over:
            self._flush()
        self._is_over = self._is_finished = True
        if self._plan.tools and (self._in_hidden or self._in_reasoning):
            self._end_reasoning_at_call()

    def take_delta(self) -> CompletionDelta:
        """Return the next delta: all decided text that was not returned before."""
        end = len(self._content) if self._is_finished else self._before_partial_stop(self._content)
        if self._in_reasoning:
            end = self._read_calls(end)
            return self._make_delta(self._take_reasoning(end), [], end)
        if not self._is_finished and self._reasoning_tags is not None and not self._content.strip():
            return self._make_delta("", [], 0)  # reasoning may still begin
        reasoning = ""
        if self._plan.reasoning_tags is not None and self._reasoning_tags is None:
            reasoning = self._take_reasoning(self._text_start)
        end = max(end, self._text_start)
        if self._assembler is None:
            parts: list[str | ToolCall] = [self._content[max(self._num_returned, self._text_start) : end]]
            self._num_returned = max(end, self._num_returned)
        else:
            end = self._read_calls(end)
            parts = self._assembler.take_parts()
        return self._make_delta(reasoning, parts, end)

    def _make_delta(self, reasoning: str, parts: Sequence[str | ToolCall], end: int) -> CompletionDelta:
        """Make a delta, with the tokens of the text before `end`."""
        delta = CompletionDelta(reasoning)
        for part in parts:
            self._add_part(delta, part)
        # A tag's token is returned with the text after it, since a delta without text is not sent.
        while (delta or self._is_finished) and self._num_tokens_returned < len(self._tokens):
            token = self._tokens[self._num_tokens_returned]
            if not self._is_finished and token.offset >= end:
                break
            delta.tokens.append(token)
            self._num_tokens_returned += 1
        if delta or self._is_finished:
            pending = self._pending[0] if self._pending and not self._is_finished else None
            count = next((at for at, token in enumerate(self._new_sampled) if token is pending), len(self._new_sampled))
            delta.sampled, self._new_sampled = self._new_sampled[:count], self._new_sampled[count:]
        return delta

    def _add_part(self, delta: CompletionDelta, part: str | ToolCall) -> None:
        if isinstance(part, ToolCall):
            self.num_calls += 1
            self._is_after_call = True
            delta.parts.append(part)
            return
        if (
            not self._has_text
            and not self.num_calls
            and self._plan.reasoning_tags is not None
            and self._reasoning_tags is None
        ):
            part = part.lstrip()  # white space after the reasoning
        if not part:
            return
        delta.text += "\n" + part if self._is_after_call and self._has_text else part
        self._has_text, self._is_after_call = True, False
        last = delta.parts[-1] if delta.parts else None
        if isinstance(last, str):
            delta.parts[-1] = last + part
        else:
            delta.parts.append(part)

    def _new_decoder(self) -> TextDecoder:
        return TextDecoder(self._tokenizer, special=self._plan.shows_special)

    def _count(self, token_id: int) -> None:
        tags = self._plan.counted_tags
        if tags is not None and (self._in_counted or token_id == tags.open_id):
            self.reasoning_tokens += 1
            self._in_counted = token_id != tags.close_id

    # Reasoning.

    def _begin_text(self, start: int) -> None:
        """Read calls from `start` on."""
        self._text_start = self._num_read = start
        self._assembler = self._plan.tools.new_assembler() if self._plan.tools else None

    def _is_hidden(self, token_id: int) -> bool:
        """Whether a token is hidden: a tag, or a token of hidden reasoning."""
        tags = self._plan.hidden_tags
        if tags is None:
            return False
        if token_id in (tags.open_id, tags.close_id):
            if not self._in_hidden:
                self._flush()
            self._decoder, self._hidden_text, self._hidden_marks = self._new_decoder(), "", []
            self._in_hidden = token_id == tags.open_id
            self._after_tag = True
            return True
        if self._in_hidden:
            new_text = self._decode_hidden(token_id)
            self._hidden_text += new_text
            if new_text and (at := self._find_stop(self._hidden_text, len(new_text), 0)) is not None:
                self._hidden_text = self._hidden_text[:at]
                self._is_over = True
        return self._in_hidden

    def _decode_hidden(self, token_id: int) -> str:
        """Return the text of a token of hidden reasoning."""
        if (mark := self._shown_tokens.get(token_id)) is None:
            return self._decoder.push(token_id)
        before = self._decoder.flush()
        self._decoder = self._new_decoder()
        start = len(self._hidden_text) + len(before)
        self._hidden_marks.append((start, start + len(mark)))
        return before + mark

    def _is_tag(self, token_id: int) -> bool:
        """Whether a token begins or ends the reasoning."""
        tags = self._reasoning_tags
        if tags is None:
            return False
        if self._in_reasoning and token_id == tags.close_id:
            self._in_reasoning, self._reasoning_tags = False, None
        elif not self._in_reasoning and token_id == tags.open_id and not self._content.strip():
            self._in_reasoning = True
        else:
            return False
        self._flush()
        self._decoder = self._new_decoder()
        self._begin_text(len(self._content))
        return True

    def _end_reasoning_at_call(self) -> None:
        """If the unclosed reasoning has a complete call, the text begins with the first one."""
        assert self._plan.tools is not None
        assembler = self._plan.tools.new_assembler()
        assembler.feed(self._hidden_text if self._in_hidden else self._content[self._text_start :])
        assembler.finish()
        if assembler.first_call_at is None:
            return
        if self._in_hidden:
            shift = len(self._content) - assembler.first_call_at
            self._marks += [(start + shift, end + shift) for start, end in self._hidden_marks if start + shift >= 0]
            self._content += self._hidden_text[assembler.first_call_at :]
            self._in_hidden = False
        else:
            self._in_reasoning, self._reasoning_tags = False, None
            self._begin_text(self._text_start + assembler.first_call_at)

    def _take_reasoning(self, end: int) -> str:
        """Return the new part of the reasoning before `end`, without surrounding white space."""
        region = self._content[:end].rstrip()
        first = max(self._num_returned, len(region) - len(region.lstrip()))
        if first >= len(region):
            return ""
        self._num_returned = len(region)
        for start, end in reversed(self._marks):
            if first <= start < len(region):
                region = region[:start] + region[end:]
        return region[first:]

    # Text.

    def _read_calls(self, end: int) -> int:
        """Let the assembler read up to `end`; returns the offset before which everything is decided."""
        if self._assembler is None:
            return end
        if end > self._num_read:
            for start, mark_end in self._marks:
                if self._num_read <= start < end:
                    self._assembler.hide(start - self._text_start, mark_end - self._text_start)
            self._assembler.feed(self._content[self._num_read : end])
            self._num_read = end
            self._end_with_calls()
        if self._is_finished and not self._in_reasoning:
            self._assembler.finish()
        if self._in_reasoning and self._is_finished:
            return end
        decided = self._assembler.num_decided
        if self._in_reasoning and self._assembler.first_call_at is not None:
            decided = self._assembler.first_call_at
        return self._text_start + decided

    def _end_with_calls(self) -> None:
        """End the completion after its last call, if the request limits calls."""
        assert self._assembler is not None
        if self._assembler.end is None or self._in_reasoning:
            return
        end = self._text_start + self._assembler.end
        if end <= len(self._content):
            self._content, self.stopped_by = self._content[:end], None
            self._num_read = min(self._num_read, end)
            self._end_at(end)

    def _add(self, new_text: str) -> None:
        """Add the text of the first tokens in `_pending`."""
        num_stripped = 0
        if self._after_tag and not self._content.strip():
            num_stripped = len(new_text) - len(new_text.lstrip())  # white space after hidden reasoning
        self._place_tokens(-num_stripped)
        new_text = new_text[num_stripped:]
        if not new_text:
            return
        self._content += new_text
        # A stop string does not span a tag or a mark.
        first = max(self._text_start, self._marks[-1][1] if self._marks else 0)
        if (at := self._find_stop(self._content, len(new_text), first)) is not None:
            self._content = self._content[:at]
            self._end_at(at)

    def _place_tokens(self, shift: int = 0) -> None:
        """Set the offsets of the tokens whose text the decoder has returned, before it is added."""
        starts = self._decoder.starts if self._pending else []
        for token, start in zip(self._pending, starts, strict=False):
            token.offset = self._offset + max(start + shift, 0)
        self._pending = self._pending[len(starts) :]
        for token in self._pending:
            token.offset = self._offset

    def _find_stop(self, text: str, num_new: int, first: int) -> int | None:
        """Return where a text ends whose last `num_new` characters complete a stop string at `first` or later."""
        if len(self.token_ids) <= self._min_tokens:
            return None
        search_starts = ((stop, max(len(text) - num_new - len(stop) + 1, first)) for stop in self._plan.stops)
        stops = [(at, stop) for stop, start in search_starts if (at := text.find(stop, start)) >= 0]
        if not stops:
            return None
        at, self.stopped_by = min(stops)
        return at + (len(self.stopped_by) if self._plan.shows_stop else 0)

    def _end_at(self, offset: int) -> None:
        """End the completion at `offset`. Tokens whose text is later are not part of it."""
        self._tokens = [token for token in self._tokens if token.offset < max(offset, 1)]
        for token in self._new_sampled:
            token.offset = min(token.offset, offset)
        self._is_over = True

    def _before_partial_stop(self, text: str) -> int:
        """Return the length of a growing text without a suffix that may become a stop string."""
        return len(text) - max((partial_length(text, stop) for stop in self._plan.stops), default=0)
