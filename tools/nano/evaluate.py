"""Measures nano on held-out examples: `python -m tools.nano.evaluate`.

Per task: greedy accuracy and the accuracy of samples at temperature 1, both in ChatML as
`qwen3_disable_thinking` renders it, and greedy accuracy in `role_colon`. The last row is
pig latin in the bare completion form of the Tinker quickstart.
"""

import argparse
import pathlib
import random
import sys
from collections.abc import Callable, Iterable

import torch
from tools.nano.corpus import ARITHMETIC_PREFACE, Segment, chatml, completion, role_colon
from tools.nano.tasks import TASKS, Example, draw
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from tinsmith.base_models.nano import path

MAX_NEW_TOKENS = 56
_BATCH = 100

Render = Callable[[Example], list[Segment]]


def render_chatml(example: Example) -> list[Segment]:
    return chatml([example], prompt_only=True)


def render_arithmetic_env(example: Example) -> list[Segment]:
    return role_colon([ARITHMETIC_PREFACE, example], prompt_only=True)


def render_role_colon(example: Example) -> list[Segment]:
    return role_colon([example], prompt_only=True)


def render_completion(example: Example) -> list[Segment]:
    return completion(example, example.key, prompt_only=True)


def heldout(task: str, num_examples: int, seed: int) -> list[Example]:
    rng = random.Random(f"evaluate/{seed}/{task}")
    return [draw(task, rng, "heldout") for _ in range(num_examples)]


def load(directory: pathlib.Path) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(directory)


@torch.inference_mode()
def answers(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[Segment]],
    *,
    sample: bool,
) -> list[str]:
    """The model's answers, cut at whichever stop the format has."""
    texts: list[str] = []
    for start in range(0, len(prompts), _BATCH):
        rows = [
            [token for text, _ in segments for token in tokenizer.encode(text)]
            for segments in prompts[start : start + _BATCH]
        ]
        width = max(map(len, rows))
        pad = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        generated = model.generate(  # pyright: ignore[reportAttributeAccessIssue]  # transformers annotates self
            input_ids=torch.tensor([[pad] * (width - len(row)) + row for row in rows]),
            attention_mask=torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
            do_sample=sample,
            temperature=1.0 if sample else None,
            top_k=0 if sample else None,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        texts += [_cut(str(tokenizer.decode(row))) for row in generated[:, width:].tolist()]
    return texts


def _cut(text: str) -> str:
    for stop in ("<|im_end|>", "<|endoftext|>", "\n\nUser:", "\n\n"):
        text = text.split(stop)[0]
    return text


def accuracy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Example],
    render: Render = render_chatml,
    *,
    sample: bool = False,
) -> float:
    prompts = [render(example) for example in examples]
    texts = answers(model, tokenizer, prompts, sample=sample)
    return sum(map(Example.is_right, examples, texts)) / len(examples)


def report(directory: pathlib.Path, num_examples: int, seed: int) -> Iterable[str]:
    """Lines of a Markdown table."""
    torch.manual_seed(seed)
    model, tokenizer = load(directory)
    yield "| task | greedy | temperature 1 | role_colon greedy | role_colon temperature 1 |"
    yield "| --- | ---: | ---: | ---: | ---: |"

    def row(name: str, task: str, renders: tuple[Render, ...]) -> str:
        examples = heldout(task, num_examples, seed)
        cells = [
            f"{accuracy(model, tokenizer, examples, render, sample=sample):.1%}"
            for render in renders
            for sample in (False, True)
        ]
        return f"| {' | '.join([name, *cells])} |"

    for task in TASKS:
        yield row(task, task, (render_chatml, render_role_colon))
    yield row("add, after the preface", "add", (_chatml_preface, render_arithmetic_env))
    yield row("pig_latin, quickstart form", "pig_latin", (render_completion,)) + " | |"


def _chatml_preface(example: Example) -> list[Segment]:
    return chatml([ARITHMETIC_PREFACE, example], prompt_only=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure tinsmith/nano on held-out examples.")
    parser.add_argument("--model", type=pathlib.Path, default=path())
    parser.add_argument("--examples", type=int, default=300, help="per task")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for line in report(args.model, args.examples, args.seed):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
