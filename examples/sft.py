"""Supervised fine-tuning: a model that knows two dialects of pig latin learns which one is wanted.

tinsmith serve                            # in another terminal
export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local
python examples/sft.py
"""

import random

import numpy as np
import tinker
from tinker import types

from tinsmith.base_models import nano

BASE, STEPS, BATCH, RATE = "tinsmith/nano", 16, 32, 2e-3
rng = random.Random(0)


def prompt_of(tokenizer, question: str) -> list[int]:
    turns = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    return tokenizer.encode(text, add_special_tokens=False)


def datum_of(tokenizer, question: str, answer: str) -> types.Datum:
    """Return a datum with next-token targets; only tokens of the answer have a weight."""
    prompt, target = prompt_of(tokenizer, question), tokenizer.encode(f"{answer}<|im_end|>")
    tokens = [*prompt, *target]
    weights = np.array([0.0] * (len(prompt) - 1) + [1.0] * len(target), np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": weights},
    )


def share_right(sampler: tinker.SamplingClient, tokenizer, examples: list[nano.PromptExample]) -> float:
    greedy = types.SamplingParams(max_tokens=32, temperature=0.0)
    prompts = [types.ModelInput.from_ints(prompt_of(tokenizer, example.prompt)) for example in examples]
    futures = [sampler.sample(prompt, num_samples=1, sampling_params=greedy) for prompt in prompts]
    answers = [tokenizer.decode(each.result().sequences[0].tokens, skip_special_tokens=True) for each in futures]
    return sum(map(nano.PromptExample.is_right, examples, answers)) / len(examples)


with tinker.ServiceClient(display_name="pig latin") as service:
    tags = {"tags": "sft,nano"}  # for the list of runs
    model = service.create_lora_training_client(BASE, rank=16, seed=1, user_metadata=tags).result()
    tokenizer = model.get_tokenizer()
    held_out = [nano.draw("pig_latin", rng, "heldout") for _ in range(48)]
    before = share_right(model.save_weights_and_get_sampling_client().result(), tokenizer, held_out)
    for step in range(STEPS):
        examples = [nano.draw("pig_latin", rng, "train") for _ in range(BATCH)]
        data = [datum_of(tokenizer, example.prompt, example.answer) for example in examples]
        # Both are sent before either is waited for: the server runs them in this order.
        passed = model.forward_backward(data, "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=RATE * (1 - step / STEPS)))
        num_tokens = sum(float(np.sum(datum.loss_fn_inputs["weights"].data)) for datum in data)
        print(f"step {step + 1:2}  loss per token {passed.result().metrics['loss:sum'] / num_tokens:.3f}")
        stepped.result()
    after = share_right(model.save_weights_and_get_sampling_client().result(), tokenizer, held_out)
    print(f"right on held-out words: {before:.0%} before, {after:.0%} after")
    print(model.save_state("pig-latin").result().path)
