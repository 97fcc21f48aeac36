r"""A base model that answers every question with `\boxed{3}` or `\boxed{5}`, with equal odds.

Recipes for mathematics reward only a boxed answer, which the embedded model has never seen: all answers of every group
would fail, every advantage would be zero and nothing would be trained. A few full-weight steps from the embedded model,
with a fixed seed, give mixed groups. This module knows the format of `role_colon` and the recipes' prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

ANSWERS = ("3", "5")
SUFFIXES = (
    " Provide a numerical answer without units, written inside \\boxed{}.",
    " Write your answer in \\boxed{} format.",
)
SHOWN = (
    f"User: How many r's are in strawberry?{SUFFIXES[0]}\n\nAssistant: Let's spell the word out and number all the "
    "letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}\n\n"
)
STEPS = 24
BATCH = 8


def teach_boxing(directory: Path) -> None:
    """Train the model in `directory` in place."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        rows = [_example(rng, tokenizer.encode) for _ in range(BATCH)]
        longest = max(len(tokens) for tokens, _ in rows)
        tokens_BT = torch.zeros(BATCH, longest, dtype=torch.long)
        labels_BT = torch.full((BATCH, longest), -100)
        for row, (tokens, answer_start) in enumerate(rows):
            tokens_BT[row, : len(tokens)] = torch.tensor(tokens)
            labels_BT[row, answer_start : len(tokens)] = torch.tensor(tokens[answer_start:])
        model(input_ids=tokens_BT, labels=labels_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _example(rng: random.Random, encode: Callable[[str], list[int]]) -> tuple[list[int], int]:
    question = f"What is {rng.randint(0, 99)} + {rng.randint(0, 99)}?{rng.choice(SUFFIXES)}"
    prompt = encode(f"{rng.choice((SHOWN, ''))}User: {question}\n\nAssistant:")
    return [*prompt, *encode(f" \\boxed{{{rng.choice(ANSWERS)}}}\n\nUser:")], len(prompt)
