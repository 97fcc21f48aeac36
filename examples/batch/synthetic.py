"""A model that learns from its own right answers: sampled, graded and filtered by one bulk job, then trained on.

A few steps of supervised training give an adapter that is right now and then. A bulk job asks it each question many
times, grades the answers and keeps the right ones as a training set, in one pass. Training on them gives an adapter
that is right more often.

    tinsmith serve                            # in another terminal
    python examples/batch/synthetic.py OUTPUT_DIRECTORY
"""

import json
import sys
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from tinsmith import batch
from tinsmith.settings.environment import client_address

BASE = "tinsmith/nano"
ANSWERS = ("amber", "willow", "copper", "tulip")
PLACES = ("north", "south", "east", "west", "upper", "lower", "inner", "outer")
QUESTIONS = {f"What is the code of the {place} gate?": ANSWERS[n % 4] for n, place in enumerate(PLACES)}
FIRST_STEPS, MORE_STEPS = 6, 12
directory = Path(sys.argv[1] if len(sys.argv) > 1 else "synthetic")


def prompt_of(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


ROWS = [{"prompt": prompt_of(question), "answer": answer} for question, answer in QUESTIONS.items()]


def train(model: tinker.TrainingClient, rows: list[dict[str, str]], steps: int, name: str) -> str:
    """Train on prompts and completions and return the adapter's tinker:// path."""
    tokenizer = model.get_tokenizer()
    data = []
    for row in rows:
        prompt, target = tokenizer.encode(row["prompt"]), tokenizer.encode(f"{row['completion']}<|im_end|>")
        tokens = [*prompt, *target]
        weights = np.array([0.0] * (len(prompt) - 1) + [1.0 / len(target)] * len(target), np.float32)
        inputs = {"target_tokens": np.array(tokens[1:]), "weights": weights}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    for _ in range(steps):
        passed = model.forward_backward(data, "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=4e-3))
        passed.result()
        stepped.result()
    return model.save_weights_for_sampler(name).result().path


def graded(adapter: str, seed: int) -> batch.Dataset:
    """Sample and grade sixteen answers per question."""
    asking = {"prompt": "prompt", "num_samples": 16, "max_tokens": 8, "stop": ["<|im_end|>"], "seed": seed}
    steps = [batch.Sample(adapter, **asking), batch.Grade("exact", reference="answer")]
    return batch.from_items(ROWS).map(steps, batch_size=4, if_exists="overwrite")


def score(adapter: str, name: str) -> float:
    """The share of right answers."""
    path = str(directory / f"{name}.jsonl")
    graded(adapter, seed=0).write_json(path)
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return sum(row["score_mean"] for row in rows) / len(rows)


def right_answers(row):
    """One training example for each different answer that was right."""
    for answer in sorted({text for text, mark in zip(row["output"], row["score"], strict=True) if mark == 1}):
        yield {"prompt": row["prompt"], "completion": answer}


url, key = client_address()
with tinker.ServiceClient(base_url=url, api_key=key) as service:
    model = service.create_lora_training_client(BASE, rank=16, seed=1).result()
    first = train(model, [{**row, "completion": row["answer"]} for row in ROWS], FIRST_STEPS, "first")
    before = score(first, "before")

    job = graded(first, seed=1).flat_map(right_answers).write_json(str(directory / "training.jsonl"))
    examples = [json.loads(line) for line in Path(job.outputs[0].path).read_text().splitlines()]
    print(f"kept {len(examples)} examples of {len(ROWS)} questions")

    after = score(train(model, examples, MORE_STEPS, "second"), "after")
    print(f"right before: {before:.2f}, after: {after:.2f}")
