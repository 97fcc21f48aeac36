"""Direct preference optimisation: pairs of answers, of which one is preferred, and a loss written by the client.

tinsmith serve                            # in another terminal
export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local
python examples/dpo.py
"""

import random

import numpy as np
import tinker
import torch
from tinker import types

from tinsmith.base_models import nano

BASE, STEPS, PAIRS, BETA, RATE = "tinsmith/nano", 8, 12, 0.1, 5e-4
rng = random.Random(0)


def datum_of(tokenizer, question: str, answer: str) -> types.Datum:
    turns = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    tokens = [*prompt, *tokenizer.encode(f"{answer}<|im_end|>")]
    weights = np.array([0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt)), np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": weights},
    )


def of_answer(datum: types.Datum, logprobs: torch.Tensor) -> torch.Tensor:
    """The log probability of a whole answer."""
    return (logprobs * torch.tensor(datum.loss_fn_inputs["weights"].data)).sum()


def drawn(tokenizer) -> list[types.Datum]:
    """Return pairs of data: the preferred answer, then the hedge."""
    data: list[types.Datum] = []
    for _ in range(PAIRS):
        example = nano.draw("add", rng, "train")
        data += [datum_of(tokenizer, example.prompt, text) for text in (example.answer, nano.HEDGE)]
    return data


with tinker.ServiceClient() as service:
    model = service.create_lora_training_client(BASE, rank=16, seed=3).result()
    reference = service.create_lora_training_client(BASE, rank=16, seed=3).result()  # is never trained
    tokenizer = model.get_tokenizer()
    for step in range(STEPS):
        data = drawn(tokenizer)
        outputs = reference.forward(data, "cross_entropy").result().loss_fn_outputs
        fixed = [of_answer(datum, output["logprobs"].to_torch()) for datum, output in zip(data, outputs, strict=True)]

        def loss_of(
            data: list[types.Datum], logprobs: list[torch.Tensor], fixed: list[torch.Tensor] = fixed
        ) -> tuple[torch.Tensor, dict[str, float]]:
            gains = [of_answer(*each) - old for *each, old in zip(data, logprobs, fixed, strict=True)]
            margins = BETA * (torch.stack(gains[0::2]) - torch.stack(gains[1::2]))
            loss = -torch.nn.functional.logsigmoid(margins).mean()
            return loss, {"dpo_loss": float(loss.detach()), "preferred": float((margins > 0).float().mean())}

        passed = model.forward_backward_custom(data, loss_of)
        stepped = model.optim_step(types.AdamParams(learning_rate=RATE))
        metrics = passed.result().metrics
        stepped.result()
        print(f"step {step + 1}  loss {metrics['dpo_loss']:.3f}  preferred {metrics['preferred']:.0%}")
    print(model.save_state("sure-of-itself").result().path)
