"""Documents of the pretraining corpus: examples put into the chat formats.

A document is a list of (text, weight) segments. Segment borders are where the cookbook's
renderers encode separately, so the tokens seen in training are the tokens seen later.
Formats: ChatML with the empty think block (renderers `qwen3`, `qwen3_disable_thinking`),
ChatML without it (`qwen3_instruct`), `role_colon`, and for pig latin a bare completion.
"""

import random

from tools.nano.tasks import Example, draw, draw_any, hedge

from tinsmith.base_models.nano import Split

Segment = tuple[str, float]

ANSWER_WEIGHT = 1.0
# A little loss on the questions keeps the model a language model of its prompts.
PROMPT_WEIGHT = 0.05
NO_THINKING = "<think>\n\n</think>\n\n"
SYSTEM_PROMPT = "You are a helpful assistant."
# The cookbook's math_rl arithmetic environment puts this turn before its question.
ARITHMETIC_PREFACE = Example("add", "What is 4 + 5?", "9", "4 + 5", "9")

_PREFACE_SHARE = 0.3
_HISTORY_SHARE = 0.2
_SYSTEM_SHARE = 0.05
_COMPLETION_SHARE = 0.2


def chatml(turns: list[Example], *, think: bool = True, system: str = "", prompt_only: bool = False) -> list[Segment]:
    """`turns` end with the one being asked; the ones before are history.

    With `prompt_only` the document stops where `qwen3_disable_thinking` starts to sample
    (`think`), or `qwen3_instruct` and `qwen3` do (not `think`).
    """
    segments: list[Segment] = []
    if system:
        segments += [(f"<|im_start|>system\n{system}<|im_end|>", PROMPT_WEIGHT)]
    for turn in turns:
        newline = "\n" if segments else ""
        segments += [
            (f"{newline}<|im_start|>user\n", PROMPT_WEIGHT),
            (turn.prompt, PROMPT_WEIGHT),
            ("<|im_end|>", PROMPT_WEIGHT),
            ("\n<|im_start|>assistant\n", PROMPT_WEIGHT),
        ]
        last = turn is turns[-1]
        if last and think:
            segments += [(NO_THINKING, ANSWER_WEIGHT)]
        if not (last and prompt_only):
            # History answers come without the think block, and without loss, so that
            # the model does not learn to answer a first question without one.
            weight = ANSWER_WEIGHT if last else PROMPT_WEIGHT
            segments += [(turn.written, weight), ("<|im_end|>", weight)]
    return segments


def role_colon(turns: list[Example], *, prompt_only: bool = False) -> list[Segment]:
    segments: list[Segment] = []
    for turn in turns:
        segments += [
            ("User:", ANSWER_WEIGHT if segments else PROMPT_WEIGHT),
            (f" {turn.prompt}\n\n", PROMPT_WEIGHT),
            ("Assistant:", PROMPT_WEIGHT),
        ]
        if not (prompt_only and turn is turns[-1]):
            segments += [(f" {turn.written}\n\n", ANSWER_WEIGHT)]
    return segments if prompt_only else [*segments, ("User:", ANSWER_WEIGHT)]


def completion(example: Example, phrase: str, *, prompt_only: bool = False) -> list[Segment]:
    """The form of the Tinker quickstart: `English: <phrase>` / `Pig Latin: <answer>`."""
    prompt = (f"English: {phrase}\nPig Latin:", PROMPT_WEIGHT)
    if prompt_only:
        return [prompt]
    written = f" {example.written}\n\n"
    return [prompt, (written, ANSWER_WEIGHT), ("<|endoftext|>", ANSWER_WEIGHT)]


def document(rng: random.Random, split: Split = "train", *, hedging: bool = False) -> list[Segment]:
    example = draw_any(rng, split)
    if hedging:
        example = hedge(example, rng)
    if example.task == "pig_latin" and rng.random() < _COMPLETION_SHARE:
        return completion(example, example.key)
    turns = [example]
    if example.task == "add" and rng.random() < _PREFACE_SHARE:
        turns = [ARITHMETIC_PREFACE, example]
    elif rng.random() < _HISTORY_SHARE:
        same_task = rng.random() < 0.5
        first = draw(example.task, rng, split) if same_task else draw_any(rng, split)
        turns = [first, example]
    form = rng.random()
    if form < 0.3:
        return role_colon(turns)
    system = SYSTEM_PROMPT if rng.random() < _SYSTEM_SHARE else ""
    return chatml(turns, think=form < 0.85, system=system)
