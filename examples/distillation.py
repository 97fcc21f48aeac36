"""On-policy distillation: a student samples, a teacher says how likely each token was, and the student follows.

tinsmith serve                            # in another terminal
export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local
python examples/distillation.py
"""

import random

import numpy as np
import tinker
from tinker import types

from tinsmith.base_models import nano

BASE = "tinsmith/nano"
TEACHER_STEPS, STEPS, PROMPTS, RATE = 12, 10, 24, 1e-3
rng = random.Random(0)


def prompt_of(tokenizer, question: str) -> list[int]:
    turns = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    return tokenizer.encode(text, add_special_tokens=False)


def taught(service: tinker.ServiceClient) -> tuple[tinker.SamplingClient, object]:
    """A teacher: the same model after some steps of fine-tuning on one dialect of pig latin."""
    model = service.create_lora_training_client(BASE, rank=16, seed=1).result()
    tokenizer = model.get_tokenizer()
    for _ in range(TEACHER_STEPS):
        data = []
        for example in (nano.draw("pig_latin", rng, "train") for _ in range(32)):
            prompt, answer = prompt_of(tokenizer, example.prompt), tokenizer.encode(f"{example.answer}<|im_end|>")
            tokens, weights = [*prompt, *answer], [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
            arrays = {"target_tokens": np.array(tokens[1:]), "weights": np.array(weights, np.float32)}
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=arrays))
        model.forward_backward(data, "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=2e-3)).result()
    return model.save_weights_and_get_sampling_client().result(), tokenizer


with tinker.ServiceClient() as service:
    teacher, tokenizer = taught(service)
    student = service.create_lora_training_client(BASE, rank=8, seed=2).result()
    params = types.SamplingParams(max_tokens=24, temperature=1.0)
    for step in range(STEPS):
        questions = [nano.draw("pig_latin", rng, "train").prompt for _ in range(PROMPTS)]
        prompts = [prompt_of(tokenizer, question) for question in questions]
        sampler = student.save_weights_and_get_sampling_client().result()
        samples = [
            sampler.sample(types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params)
            for prompt in prompts
        ]
        sequences = [future.result().sequences[0] for future in samples]
        whole = [[*prompt, *each.tokens] for prompt, each in zip(prompts, sequences, strict=True)]
        scores = [teacher.compute_logprobs(types.ModelInput.from_ints(tokens)) for tokens in whole]
        data, divergence = [], []
        for prompt, each, tokens, score in zip(prompts, sequences, whole, scores, strict=True):
            own, wanted = np.array(each.logprobs), np.array(score.result()[len(prompt) :], np.float64)
            divergence += list(own - wanted)  # its mean estimates the reverse KL divergence
            before = [0.0] * (len(prompt) - 1)
            arrays = {
                "target_tokens": np.array(tokens[1:]),
                "logprobs": np.array([*before, *own], np.float32),
                "advantages": np.array([*before, *(wanted - own)], np.float32),
            }
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=arrays))
        passed = student.forward_backward(data, "importance_sampling")
        student.optim_step(types.AdamParams(learning_rate=RATE)).result()
        passed.result()
        print(f"step {step + 1:2}  reverse KL per token {np.mean(divergence):.3f}")
    print(student.save_state("student").result().path)
