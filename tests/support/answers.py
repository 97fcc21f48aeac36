"""A model's completion as the answers of every protocol make it, whole and as a stream of single tokens."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tinsmith.chat.calls import ToolCall
from tinsmith.chat.harmony import new_choice
from tinsmith.chat.results import ClientAnswer, finish_reason
from tinsmith.chat.tokenizer import ModelTokenizer
from tinsmith.chat.tools import ToolUse
from tinsmith.types import SampledSequence, SampleResult


def result_of(tokenizer: ModelTokenizer, written: str, reason: str = "stop") -> SampleResult:
    ids = np.array(tokenizer.encode(written, special=False), np.int32)
    return SampleResult("r", (SampledSequence(ids, np.full(len(ids), -0.5, np.float32), reason),))


def stream_events(answer: ClientAnswer, tokenizer: ModelTokenizer, result: SampleResult) -> list[dict[str, Any]]:
    """Return the events of a stream in which each token comes alone."""
    choice = new_choice(answer.plan, tokenizer, 0)
    events = list(answer.start_events())
    for token in result.sequences[0].tokens_T.tolist():
        choice.push(token, -0.5)
        if delta := choice.take_delta():
            events += answer.delta_events(choice, delta, None)
    choice.finish()
    delta = choice.take_delta()
    reason = finish_reason(answer.plan, choice.num_calls, result.sequences[0].stop_reason)
    events += answer.delta_events(choice, delta, reason)
    return [json.loads(json.dumps(content)) for _, content in [*events, *answer.end_events([result])]]


def read_parts(use: ToolUse, written: str) -> list[str | ToolCall]:
    """Return the text and calls of a completion."""
    assembler = use.new_assembler()
    assembler.feed(written)
    assembler.finish()
    return assembler.take_parts()
