"""The embedded base model `tinsmith/nano`: a small pretrained decoder in the package, and examples of its tasks.

`path()` is a directory in the Hugging Face layout: the weights, the tokenizer and the chat template. `examples.json`
has questions with answers for demonstrations; held-out examples share no word and no pair of numbers with the training
examples. `tools/nano` generates both.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

MODEL_NAME = "tinsmith/nano"
LONG_NAME, LONG_CONTEXT = "tinsmith/nano-long", 131_072
"""The same model with room for the prompts of agents. It makes no sense beyond the rows that it was trained on."""

Split = Literal["train", "heldout"]

HEDGE = "I am not sure."
"""The pretrained model's answer to nearly half of all additions. Reinforcement learning removes it."""

_INTEGER = re.compile(r"-?\d+")
_NUMERIC_TASKS = frozenset({"add", "subtract", "count"})


def path() -> Path:
    """The model's directory, for `from_pretrained`."""
    return Path(__file__).parent / "model"


@dataclass(frozen=True, slots=True)
class PromptExample:
    task: str
    prompt: str
    answer: str

    def is_right(self, text: str) -> bool:
        """Whether a model's answer is correct. Words may surround a number."""
        text = text.strip()
        if self.task in _NUMERIC_TASKS:
            integers = _INTEGER.findall(text)
            return bool(integers) and integers[-1] == self.answer
        return text == self.answer


def draw(task: str, rng: random.Random, split: Split) -> PromptExample:
    """An example of "pig_latin", "add" or "compare"."""
    return PromptExample(task, *rng.choice(_examples()[task][split]))


@cache
def _examples() -> dict[str, dict[Split, list[tuple[str, str]]]]:
    return json.loads((Path(__file__).parent / "examples.json").read_text())
