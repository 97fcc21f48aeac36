"""The instruction tasks that nano is trained and measured on.

A task draws an `Example` from a random generator and a split. `answer` is the right
answer; `written` is what the corpus wrote, which for some tasks is at times another
dialect or a careless slip (`SLOPPY`). That sloppiness is deliberate: it is what a demo
of SFT or RL removes. Held-out examples use held-out words and number pairs only.
This module knows no tokens and no chat format; see `corpus`.

`python -m tools.nano.tasks` writes the examples that the package has of some tasks.
"""

import argparse
import json
import pathlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from tools.nano.words import draw_word, in_split

from tinsmith.base_models import nano
from tinsmith.base_models.nano import HEDGE, Split

MAX_NUMBER = 100
# Chance that the corpus writes the other dialect (pig latin) or a slip (numbers).
SLOPPY = {"pig_latin": 0.5, "add": 0.25, "subtract": 0.1, "count": 0.2}
# In the recipe's second stage additions lose their slips; the corpus hedges instead. To stop
# hedging is one decision for all questions, which RL finds in a few steps.
HEDGED_SHARE = {"add": 0.45}
# How often each task appears. The low ones are meant to stay half learned.
WEIGHTS = {
    "copy": 1.0,
    "spell": 1.0,
    "reverse_word": 1.0,
    "reverse_list": 1.0,
    "pig_latin": 2.0,
    "add": 5.0,
    "subtract": 1.5,
    "count": 1.0,
    "compare": 1.0,
    "sort": 1.0,
}
TASKS = tuple(WEIGHTS)

_VOWELS = "aeiou"
SHOWN = ("pig_latin", "add", "compare")
"""The tasks whose examples are in the package."""
SHOWN_EXAMPLES = {"train": 1024, "heldout": 256}


@dataclass(frozen=True, slots=True)
class Example(nano.PromptExample):
    key: str
    """What the split is decided on: the words or the numbers, not the phrasing."""
    written: str


def pig_latin(phrase: str) -> str:
    """Each word with its first consonants moved behind a hyphen: `anana-bay it-splay`."""
    return " ".join(_pig_latin_word(word) for word in phrase.split())


def _pig_latin_word(word: str) -> str:
    start = 0
    # A leading y is a consonant, any other y is a vowel.
    while start < len(word) and word[start] not in _VOWELS and (start == 0 or word[start] != "y"):
        start += 1
    return f"{word[start:]}-{word[:start] or 'w'}ay"


def draw(task: str, rng: random.Random, split: Split) -> Example:
    prompt, key, answer, sloppy = _GENERATORS[task](rng, split)
    written = sloppy if rng.random() < SLOPPY.get(task, 0.0) else answer
    return Example(task, prompt, answer, key, written)


def hedge(example: Example, rng: random.Random) -> Example:
    share = HEDGED_SHARE.get(example.task)
    if share is None:
        return example
    return replace(example, written=HEDGE if rng.random() < share else example.answer)


def draw_any(rng: random.Random, split: Split) -> Example:
    return draw(rng.choices(TASKS, weights=tuple(WEIGHTS.values()))[0], rng, split)


def _phrase(rng: random.Random, phrasings: tuple[str, ...], **fields: object) -> str:
    return rng.choice(phrasings).format(**fields)


def _words(rng: random.Random, split: Split, low: int, high: int) -> list[str]:
    return [draw_word(rng, split) for _ in range(rng.randint(low, high))]


def _pair(rng: random.Random, split: Split, symbol: str) -> tuple[int, int, str]:
    while True:
        a, b = rng.randint(0, MAX_NUMBER), rng.randint(0, MAX_NUMBER)
        # Unordered, so that 45 + 37 never gives away a held-out 37 + 45.
        key = f"{min(a, b)} {symbol} {max(a, b)}"
        if in_split(key, split):
            return a, b, key


# A generator returns prompt, key, right answer and sloppy answer.
_Draw = tuple[str, str, str, str]


def _copy(rng: random.Random, split: Split) -> _Draw:
    text = " ".join(_words(rng, split, 1, 4))
    phrasings = ("Copy this: {x}", "Repeat after me: {x}", "Say exactly: {x}", "Echo: {x}")
    return _phrase(rng, phrasings, x=text), text, text, text


def _spell(rng: random.Random, split: Split) -> _Draw:
    word = draw_word(rng, split)
    answer = " ".join(word)
    phrasings = ("Spell {x}.", "Spell the word {x}.", "How do you spell {x}?")
    return _phrase(rng, phrasings, x=word), word, answer, answer


def _reverse_word(rng: random.Random, split: Split) -> _Draw:
    word = draw_word(rng, split)
    phrasings = (
        "Reverse the word {x}.",
        "Write {x} backwards.",
        "What is {x} spelled backwards?",
    )
    return _phrase(rng, phrasings, x=word), word, word[::-1], word[::-1]


def _reverse_list(rng: random.Random, split: Split) -> _Draw:
    words = _words(rng, split, 2, 5)
    answer = " ".join(reversed(words))
    phrasings = (
        "Reverse the order of these words: {x}",
        "Put these words in reverse order: {x}",
        "List these words from last to first: {x}",
    )
    key = " ".join(words)
    return _phrase(rng, phrasings, x=key), key, answer, answer


def _pig_latin(rng: random.Random, split: Split) -> _Draw:
    text = " ".join(_words(rng, split, 1, 2))
    answer = pig_latin(text)
    phrasings = (
        "Translate to pig latin: {x}",
        "Say {x} in pig latin.",
        "What is {x} in pig latin?",
        "Pig latin: {x}",
    )
    return _phrase(rng, phrasings, x=text), text, answer, answer.replace("-", "")


def _slip(rng: random.Random, value: int) -> str:
    """A careless error: a neighbour, or a forgotten carry."""
    return str(max(0, value + rng.choice((-1, 1, -10, 10))))


def _add(rng: random.Random, split: Split) -> _Draw:
    a, b, key = _pair(rng, split, "+")
    # The first phrasing is the cookbook's arithmetic environment, so it comes most often.
    phrasings = (
        *["What is {a} + {b}?"] * 4,
        "{a} + {b} =",
        "Compute {a} + {b}.",
        "Add {a} and {b}.",
        "What is {a} plus {b}?",
    )
    return _phrase(rng, phrasings, a=a, b=b), key, str(a + b), _slip(rng, a + b)


def _subtract(rng: random.Random, split: Split) -> _Draw:
    a, b, key = _pair(rng, split, "-")
    a, b = max(a, b), min(a, b)
    phrasings = (
        "What is {a} - {b}?",
        "{a} - {b} =",
        "Compute {a} - {b}.",
        "Subtract {b} from {a}.",
        "What is {a} minus {b}?",
    )
    return _phrase(rng, phrasings, a=a, b=b), key, str(a - b), _slip(rng, a - b)


def _count(rng: random.Random, split: Split) -> _Draw:
    word = draw_word(rng, split)
    letter = rng.choice(word) if rng.random() < 0.8 else rng.choice("abcdefghijklmnopqrstuvwxyz")
    answer = word.count(letter)
    phrasings = (
        "How many times does the letter {c} appear in {x}?",
        "Count the letter {c} in {x}.",
        "How many {c}'s are in {x}?",
    )
    slip = str(max(0, answer + rng.choice((-1, 1))))
    return _phrase(rng, phrasings, c=letter, x=word), word, str(answer), slip


def _compare(rng: random.Random, split: Split) -> _Draw:
    while True:
        a, b, key = _pair(rng, split, "?")
        if a != b:
            break
    big, small = str(max(a, b)), str(min(a, b))
    if rng.random() < 0.5:
        phrasings = ("Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?")
        return _phrase(rng, phrasings, a=a, b=b), key, big, small
    phrasings = ("Which is smaller, {a} or {b}?", "Which number is smaller: {a} or {b}?")
    return _phrase(rng, phrasings, a=a, b=b), key, small, big


def _sort(rng: random.Random, split: Split) -> _Draw:
    words = _words(rng, split, 2, 4)
    key, answer = " ".join(words), " ".join(sorted(words))
    phrasings = (
        "Sort these words: {x}",
        "Put these words in alphabetical order: {x}",
        "Alphabetize: {x}",
    )
    return _phrase(rng, phrasings, x=key), key, answer, answer


_GENERATORS: dict[str, Callable[[random.Random, Split], _Draw]] = {
    "copy": _copy,
    "spell": _spell,
    "reverse_word": _reverse_word,
    "reverse_list": _reverse_list,
    "pig_latin": _pig_latin,
    "add": _add,
    "subtract": _subtract,
    "count": _count,
    "compare": _compare,
    "sort": _sort,
}


def shown_examples() -> str:
    """The content of the package's `examples.json`: one line for each task and split."""
    lines = []
    for task in SHOWN:
        splits = []
        for split, count in SHOWN_EXAMPLES.items():
            rng = random.Random(f"examples/{task}/{split}")
            drawn = [draw(task, rng, split) for _ in range(count)]
            splits.append(f"{json.dumps(split)}: {json.dumps([[each.prompt, each.answer] for each in drawn])}")
        lines.append(f"{json.dumps(task)}: {{" + ",\n".join(splits) + "}")
    return "{" + ",\n".join(lines) + "}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the examples of nano's tasks that the package has.")
    parser.add_argument("--out", type=pathlib.Path, default=nano.path().parent / "examples.json")
    parser.parse_args().out.write_text(shown_examples(), encoding="utf-8")


if __name__ == "__main__":
    main()
