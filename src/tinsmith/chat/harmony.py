"""Decodes completions in the harmony format (gpt-oss): messages on channels become reasoning, text and tool calls.

A message is a header (role, channel, recipient), `<|message|>` and its text. The channel "analysis" contains reasoning.
A message to `functions.NAME` is a call of that tool, if the request defines the tool, with its text as arguments. Every
other message is text: the channel "final", and the preambles of the channel "commentary". Messages of one kind are
joined by line ends. `calls.CallAssembler` decides what is a call, as in other formats.
"""

from __future__ import annotations

import re

from tinsmith.chat.calls import CallArguments, CallAssembler, CallEnd, CallStart, TextEvent
from tinsmith.chat.choices import Choice, CompletionDelta, CompletionToken
from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.chat.tokenizer import Channels, ModelTokenizer

CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"to=([^\s<]+)")
FUNCTIONS = "functions."
REASONING, TEXT, CALL, HIDDEN = "reasoning", "text", "call", "hidden"


def new_choice(plan: GenerationPlan, tokenizer: ModelTokenizer, index: int) -> Choice:
    """Make the decoder of one completion in the model's format."""
    return (
        Choice(plan, tokenizer, index)
        if plan.channels is None
        else HarmonyChoice(plan, tokenizer, index, plan.channels)
    )


class HarmonyChoice(Choice):
    def __init__(self, plan: GenerationPlan, tokenizer: ModelTokenizer, index: int, channels: Channels) -> None:
        super().__init__(plan, tokenizer, index)
        self._channels = channels
        self._call_assembler = plan.tools.new_assembler() if plan.tools else CallAssembler(())
        self._reasoning = ""  # of the next delta
        self._has_reasoning = False  # whether there was reasoning
        self._message = ""
        self._message_read = 0  # characters of the message that were read
        self._message_start = 0  # characters of the earlier messages
        self._kind = TEXT
        self._is_reasoning = False
        self._in_message = False
        self._has_message = False  # whether there was a message
        self._header: list[int] = list(channels.header)
        if channels.in_message:
            self._open()

    @property
    def _offset(self) -> int:
        return self._message_start + len(self._message)

    def _take(self, token: CompletionToken) -> None:
        token_id = token.token_id
        if self._kind != HIDDEN or not self._in_message:
            self._tokens.append(token)
        self.reasoning_tokens += self._in_message and self._is_reasoning
        if token_id in (self._channels.start_id, self._channels.end_id):
            if self._in_message:
                self._flush()
            self._close(is_cut=self.stopped_by is not None)
        elif self._in_message:
            self._decode(token)
        elif token_id == self._channels.message_id:
            self._open()
            self.reasoning_tokens += self._is_reasoning * (len(self._header) + 1)
        else:
            self._header.append(token_id)

    def finish(self) -> None:
        if not self._in_message and not self._has_message and self._channels.channel_id not in self._header:
            token_ids = self._header[len(self._channels.header) :]  # not this format: everything is text
            self._header = []
            self._open()
            self._add(self._tokenizer.decode(token_ids))
        elif self._in_message and not self._is_over:
            self._flush()
        is_cut = not self._is_over or self.stopped_by is not None
        self._is_over = self._is_finished = True
        self._close(is_cut=is_cut)
        self._call_assembler.finish()

    def take_delta(self) -> CompletionDelta:
        if self._in_message:
            self._read_up_to(self._before_partial_stop(self._message))
        reasoning, self._reasoning = self._reasoning, ""
        end = self._message_start + self._message_read - self._call_assembler.num_undecided
        return self._make_delta(reasoning, self._call_assembler.take_parts(), end)

    def _open(self) -> None:
        """Begin the text of a message after its complete header."""
        header = self._tokenizer.decode(self._header, special=True)
        channel, recipient = CHANNEL.search(header), RECIPIENT.search(header)
        self._is_reasoning = channel is not None and channel[1] == "analysis"
        reasoning = {"apart": REASONING, "hidden": HIDDEN}.get(self._channels.reasoning_mode, TEXT)
        self._kind = reasoning if self._is_reasoning else TEXT
        name = recipient[1].removeprefix(FUNCTIONS) if recipient and recipient[1].startswith(FUNCTIONS) else ""
        self._call_assembler.separate()
        if name and self._plan.tools and name in {tool.name for tool in self._plan.tools.tools}:
            self._kind = CALL
            self._call_assembler.take(CallStart(name, ""))
        self._in_message, self._has_message, self._decoder = True, True, self._new_decoder()

    def _close(self, *, is_cut: bool) -> None:
        """End a message, or a header without a message. `is_cut`: the completion ends inside it."""
        if self._in_message:
            self._read_up_to(len(self._message))
            if self._kind == CALL and not (is_cut and not self._message.strip()):
                self._call_assembler.take(CallEnd(""))
        self._message_start += len(self._message)
        self._message, self._message_read, self._header = "", 0, []
        self._in_message, self._is_reasoning = False, False

    def _read_up_to(self, end: int) -> None:
        """Read the message up to `end`."""
        new_text = self._message[self._message_read : end]
        self._message_read = max(end, self._message_read)
        if not new_text:
            return
        if self._kind == REASONING:
            is_first = self._message_read == len(new_text)
            self._reasoning += "\n" + new_text if is_first and self._has_reasoning else new_text
            self._has_reasoning = True
        elif self._kind == TEXT:
            self._call_assembler.take(TextEvent(new_text))
        elif self._kind == CALL:
            self._call_assembler.take(CallArguments(new_text, new_text))

    def _add(self, new_text: str) -> None:
        self._place_tokens()
        if not self._in_message or not new_text:
            return
        self._message += new_text
        if (at := self._find_stop(self._message, len(new_text), 0)) is not None:
            self._message = self._message[:at]
            self._end_at(self._message_start + at)
