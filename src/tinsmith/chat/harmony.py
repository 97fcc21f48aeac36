"""Decodes completions in the harmony format (gpt-oss): messages on channels become reasoning, text and tool calls.

A message is a header (role, channel, recipient), `<|message|>` and its text. The channel "analysis" contains reasoning.
A message to `functions.NAME` is a call of that tool, if the request defines the tool; its text must be a JSON object.
Every other message is text: the channel "final", and the preambles of the channel "commentary". Messages of one kind
are joined by line ends. Text that only resembles a call remains text.
"""

from __future__ import annotations

import re
import secrets

from tinsmith.chat.choices import Choice, ShownToken, TextPiece
from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.chat.texts import Channels, Text
from tinsmith.chat.tools import ToolCall, read_arguments

CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"to=([^\s<]+)")
FUNCTIONS = "functions."
REASONING, TEXT, CALL, HIDDEN = "reasoning", "text", "call", "hidden"


def new_choice(plan: GenerationPlan, text: Text, index: int) -> Choice:
    """Make the decoder of one completion in the model's format."""
    return Choice(plan, text, index) if plan.channels is None else HarmonyChoice(plan, text, index, plan.channels)


class HarmonyChoice(Choice):
    def __init__(self, plan: GenerationPlan, text: Text, index: int, channels: Channels) -> None:
        super().__init__(plan, text, index)
        self._channels = channels
        self._new = {REASONING: "", TEXT: ""}  # the contents of the next piece
        self._begun: set[str] = set()  # the kinds of earlier pieces
        self._message = ""
        self._returned = 0  # characters of the message that are in `_new`
        self._base = 0  # characters of the earlier messages
        self._kind = TEXT
        self._tool = ""
        self._is_reasoning = False
        self._inside = False
        self._has_message = False  # whether there was a message
        self._header: list[int] = list(channels.header)
        if channels.begun:
            self._open()

    @property
    def _offset(self) -> int:
        return self._base + len(self._message)

    def _take(self, token: ShownToken) -> None:
        token_id = token.token_id
        if self._kind != HIDDEN or not self._inside:
            self._tokens.append(token)
        self.reasoning_tokens += self._inside and self._is_reasoning
        if token_id in (self._channels.start_id, self._channels.end_id):
            if self._inside:
                self._add(self._decoder.rest())
            self._close()
        elif self._inside:
            self._add(self._decoder.push(token_id))
        elif token_id == self._channels.message_id:
            self._open()
            self.reasoning_tokens += self._is_reasoning * (len(self._header) + 1)
        else:
            self._header.append(token_id)

    def finish(self) -> None:
        if not self._inside and not self._has_message and self._channels.channel_id not in self._header:
            self._header, own = [], self._header[len(self._channels.header) :]  # not this format: everything is text
            self._open()
            self._add(self._text.decode(own))
        elif self._inside and not self._ended:
            self._add(self._decoder.rest())
        self._ended = self._finished = True
        self._close()

    def piece(self) -> TextPiece:
        if self._inside and self._kind != CALL:
            self._return_up_to(self._before_partial_stop(self._message))
        piece = TextPiece(self._new[REASONING], self._new[TEXT])
        self._new = {REASONING: "", TEXT: ""}
        return self._completed(piece, self._base + self._returned)

    def _open(self) -> None:
        """Begin the text of a message after its complete header."""
        header = self._text.decode(self._header, special=True)
        channel, recipient = CHANNEL.search(header), RECIPIENT.search(header)
        self._is_reasoning = channel is not None and channel[1] == "analysis"
        shown = {"apart": REASONING, "hidden": HIDDEN}.get(self._channels.thoughts, TEXT)
        self._kind = shown if self._is_reasoning else TEXT
        name = recipient[1].removeprefix(FUNCTIONS) if recipient and recipient[1].startswith(FUNCTIONS) else ""
        if name and self._plan.tools and name in {tool.name for tool in self._plan.tools.tools}:
            self._kind, self._tool = CALL, name
        self._inside, self._has_message, self._decoder = True, True, self._new_decoder()

    def _close(self) -> None:
        """End a message, or a header without a message."""
        if self._inside:
            if self._kind == CALL and (arguments := read_arguments(self._message)) is not None:
                self._calls.append(ToolCall("call_" + secrets.token_hex(12), self._tool, arguments))
            else:
                self._kind = TEXT if self._kind == CALL else self._kind
                self._return_up_to(len(self._message))
        self._base += len(self._message)
        self._message, self._returned, self._header = "", 0, []
        self._inside, self._is_reasoning = False, False

    def _return_up_to(self, end: int) -> None:
        """Add the message up to `end` to the next piece."""
        if self._kind != HIDDEN and end > self._returned:
            between = "\n" if not self._returned and self._kind in self._begun else ""
            self._new[self._kind] += between + self._message[self._returned : end]
            self._begun.add(self._kind)
        self._returned = max(end, self._returned)

    def _add(self, new: str) -> None:
        if not self._inside or not new:
            return
        self._message += new
        if (at := self._find_stop(self._message, len(new), 0)) is not None:
            self._message = self._message[:at]
            self._end_at(self._base + at)
