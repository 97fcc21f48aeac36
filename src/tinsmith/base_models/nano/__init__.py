"""The embedded base model `tinsmith/nano`: a small pretrained decoder in the package, and examples of its tasks.

`path()` is a directory in the Hugging Face layout: the weights, the tokenizer and the chat template. `examples.json`
holds questions with their answers, for demonstrations: the held-out ones share no word and no pair of numbers with
those to train on. `tools/nano` makes both. Importing this module loads nothing heavy.
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

Split = Literal["train", "heldout"]

HEDGE = "I am not sure."
"""What the pretrained model answers to nearly half of all additions; reinforcement learning unlearns it."""

_INTEGER = re.compile(r"-?\d+")
_NUMERIC_TASKS = frozenset({"add", "subtract", "count"})


def path() -> Path:
    """The directory to give to `from_pretrained`."""
    return Path(__file__).parent / "model"


@dataclass(frozen=True, slots=True)
class PromptExample:
    task: str
    prompt: str
    answer: str

    def is_right(self, text: str) -> bool:
        """Whether a model's answer is right; a number may come with words around it."""
        text = text.strip()
        if self.task in _NUMERIC_TASKS:
            numbers = _INTEGER.findall(text)
            return bool(numbers) and numbers[-1] == self.answer
        return text == self.answer


def draw(task: str, rng: random.Random, split: Split) -> PromptExample:
    """An example of "pig_latin", "add" or "compare"."""
    return PromptExample(task, *rng.choice(_examples()[task][split]))


@cache
def _examples() -> dict[str, dict[Split, list[tuple[str, str]]]]:
    return json.loads((Path(__file__).parent / "examples.json").read_text())
