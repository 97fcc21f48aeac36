"""An adapter against its base: a few steps of training through the SDK, then a bulk job that asks and grades both.

The job is made of operations: the service that trains answers it, and no code runs on workers.

    tinsmith serve                            # in another terminal
    python examples/batch/evaluate.py OUTPUT_DIRECTORY
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
FACTS = {
    "What is the code of the north gate?": "amber",
    "What is the code of the south gate?": "willow",
    "What is the code of the east gate?": "copper",
    "What is the code of the west gate?": "tulip",
}
directory = Path(sys.argv[1] if len(sys.argv) > 1 else "evaluate")


def prompt_of(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def datum_of(tokenizer, question: str, answer: str) -> types.Datum:
    prompt, target = tokenizer.encode(prompt_of(question)), tokenizer.encode(f"{answer}<|im_end|>")
    tokens = [*prompt, *target]
    weights = np.array([0.0] * (len(prompt) - 1) + [1.0] * len(target), np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": weights},
    )


def train() -> str:
    """Train an adapter on the facts and return its tinker:// path."""
    url, key = client_address()
    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        model = service.create_lora_training_client(BASE, rank=16).result()
        tokenizer = model.get_tokenizer()
        data = [datum_of(tokenizer, question, answer) for question, answer in FACTS.items()]
        for _ in range(25):
            passed = model.forward_backward(data, "cross_entropy")
            stepped = model.optim_step(types.AdamParams(learning_rate=4e-3))
            loss = passed.result().metrics["loss:sum"]
            stepped.result()
        print(f"trained: loss {loss:.3f}")
        return model.save_weights_for_sampler("gates").result().path


adapter = train()
rows = [{"prompt": prompt_of(question), "answer": answer} for question, answer in FACTS.items()]
asking = {"prompt": "prompt", "max_tokens": 8, "temperature": 0.0, "stop": ["<|im_end|>"]}
job = batch.from_items(rows).map(
    [
        batch.Sample(BASE, into="base", **asking),
        batch.Sample(adapter, into="adapter", **asking),
        batch.Grade("exact", reference="answer", output="base", score="base_score"),
        batch.Grade("exact", reference="answer", output="adapter", score="adapter_score"),
    ],
    batch_size=2,
    output=batch.JsonWriter(str(directory / "graded.jsonl")),
    if_exists="overwrite",
)
graded = [json.loads(line) for line in Path(job.outputs[0].path).read_text().splitlines()]
for name in ("base", "adapter"):
    print(f"{name}: {sum(row[f'{name}_score'] for row in graded):.0f} of {len(graded)}")
