"""Evaluation: base model and adapter on the same held-out questions, each with its standard error.

    tinsmith serve                            # in another terminal
    export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local
    python examples/evaluation.py [tinker://... of a checkpoint]

Without a path it evaluates the base model alone.
"""

import math
import random
import sys

import tinker
from tinker import types

from tinsmith.base_models import nano

BASE, EXAMPLES = "tinsmith/nano", 40
TASKS = ("pig_latin", "add", "compare")


def prompt_of(tokenizer, question: str) -> types.ModelInput:
    turns = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    return types.ModelInput.from_ints(tokenizer.encode(text, add_special_tokens=False))


def graded(sampler: tinker.SamplingClient, tokenizer, task: str) -> list[bool]:
    """Sample greedy answers to all examples. All are sent at once, and the server packs them."""
    rng = random.Random(f"evaluation of {task}")
    examples = [nano.draw(task, rng, "heldout") for _ in range(EXAMPLES)]
    greedy = types.SamplingParams(max_tokens=32, temperature=0.0)
    futures = [
        sampler.sample(prompt_of(tokenizer, example.prompt), num_samples=1, sampling_params=greedy)
        for example in examples
    ]
    answers = [tokenizer.decode(each.result().sequences[0].tokens, skip_special_tokens=True) for each in futures]
    return list(map(nano.PromptExample.is_right, examples, answers))


with tinker.ServiceClient() as service:
    samplers = {"base": service.create_sampling_client(base_model=BASE).result()}
    if len(sys.argv) > 1:
        samplers["adapter"] = service.create_sampling_client(model_path=sys.argv[1]).result()
    tokenizer = service.create_lora_training_client(BASE, rank=1).result().get_tokenizer()
    print(f"{'task':<12}" + "".join(f"{name:>16}" for name in samplers))
    for task in TASKS:
        cells = []
        for sampler in samplers.values():
            right = graded(sampler, tokenizer, task)
            share = sum(right) / len(right)
            cells.append(f"{share:.0%} +- {math.sqrt(share * (1 - share) / len(right)):.0%}")
        print(f"{task:<12}" + "".join(f"{cell:>16}" for cell in cells))
