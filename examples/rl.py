"""Reinforcement learning: a model that often says it is not sure learns to answer, from rewards alone.

tinsmith serve                            # in another terminal
export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local
python examples/rl.py
"""

import random

import numpy as np
import tinker
from tinker import types

from tinsmith.base_models import nano
from tinsmith.exchange.metrics import RunMetrics

BASE, STEPS, PROMPTS, GROUP, RATE = "tinsmith/nano", 10, 12, 8, 1e-3
rng = random.Random(0)


def prompt_of(tokenizer, question: str) -> list[int]:
    turns = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    return tokenizer.encode(text, add_special_tokens=False)


def datum_of(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """Return a datum of a sample with its logprobs; the prompt has no advantage."""
    tokens, before = [*prompt, *sequence.tokens], [0.0] * (len(prompt) - 1)
    arrays = {
        "target_tokens": np.array(tokens[1:]),
        "logprobs": np.array([*before, *(sequence.logprobs or [])], np.float32),
        "advantages": np.array([*before, *[advantage] * len(sequence.tokens)], np.float32),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=arrays)


with tinker.ServiceClient() as service:
    model = service.create_lora_training_client(BASE, rank=16, seed=2).result()
    tokenizer = model.get_tokenizer()
    params = types.SamplingParams(max_tokens=24, temperature=1.0)
    run = RunMetrics(model.model_id)  # for the dashboard
    for step in range(STEPS):
        examples = [nano.draw("add", rng, "train") for _ in range(PROMPTS)]
        prompts = [prompt_of(tokenizer, example.prompt) for example in examples]
        sampler = model.save_weights_and_get_sampling_client().result()
        futures = [
            sampler.sample(types.ModelInput.from_ints(prompt), num_samples=GROUP, sampling_params=params)
            for prompt in prompts
        ]
        data, rewards = [], []
        for example, prompt, future in zip(examples, prompts, futures, strict=True):
            sequences = future.result().sequences
            texts = [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in sequences]
            group = [float(example.is_right(text)) for text in texts]
            mean = sum(group) / len(group)
            rewards += group
            run.reward(prompt, [each.tokens for each in sequences], group)
            if 0.0 < mean < 1.0:  # where all are alike, there is nothing to prefer
                data += [datum_of(prompt, each, one - mean) for each, one in zip(sequences, group, strict=True)]
        if data:
            passed = model.forward_backward(data, "importance_sampling")
            model.optim_step(types.AdamParams(learning_rate=RATE)).result()
            passed.result()
        run.log({"reward": rewards}, step + 1)
        print(f"step {step + 1:2}  mean reward {sum(rewards) / len(rewards):.2f}")
    print(model.save_state("sums").result().path)
