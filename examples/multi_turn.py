"""Reinforcement learning over two turns: an answer, a correction where it was wrong, and a second try.

tinsmith serve                            # in another terminal
export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local
python examples/multi_turn.py
"""

import random
from dataclasses import dataclass, field

import numpy as np
import tinker
from tinker import types

from tinsmith.base_models import nano
from tinsmith.exchange.metrics import RunMetrics

BASE, STEPS, EPISODES, GROUP, RATE = "tinsmith/nano", 8, 8, 6, 1e-3
OPEN, CLOSE = "<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_end|>\n"
rng = random.Random(0)


@dataclass
class Episode:
    """One conversation as tokens. `mine` marks the sampled tokens, which have logprobs."""

    example: nano.PromptExample
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mine: list[bool] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False

    def hears(self, tokenizer, text: str) -> None:
        heard = tokenizer.encode(text, add_special_tokens=False)
        self.tokens += heard
        self.logprobs += [0.0] * len(heard)
        self.mine += [False] * len(heard)

    def says(self, sequence: types.SampledSequence) -> None:
        self.tokens += sequence.tokens
        self.logprobs += sequence.logprobs or []
        self.mine += [True] * len(sequence.tokens)

    def datum(self, advantage: float) -> types.Datum:
        """Return one datum for the whole conversation; tokens of the environment have no advantage."""
        arrays = {
            "target_tokens": np.array(self.tokens[1:]),
            "logprobs": np.array(self.logprobs[1:], np.float32),
            "advantages": np.array([advantage * mine for mine in self.mine[1:]], np.float32),
        }
        return types.Datum(model_input=types.ModelInput.from_ints(self.tokens[:-1]), loss_fn_inputs=arrays)


def play(sampler: tinker.SamplingClient, tokenizer, episodes: list[Episode]) -> None:
    """Run two turns of all conversations in parallel. The second try is worth half."""
    params = types.SamplingParams(max_tokens=24, temperature=1.0)
    for turn in range(2):
        running = [episode for episode in episodes if not episode.done]
        for episode in running:
            said = episode.example.prompt if turn == 0 else f"That is wrong. {episode.example.prompt}"
            episode.hears(tokenizer, f"{CLOSE[-1:] if turn else ''}<|im_start|>user\n{said}{CLOSE}{OPEN}")
        futures = [
            sampler.sample(types.ModelInput.from_ints(episode.tokens), num_samples=1, sampling_params=params)
            for episode in running
        ]
        for episode, future in zip(running, futures, strict=True):
            sequence = future.result().sequences[0]
            episode.says(sequence)
            if episode.example.is_right(tokenizer.decode(sequence.tokens, skip_special_tokens=True)):
                episode.reward, episode.done = 1.0 if turn == 0 else 0.5, True


with tinker.ServiceClient() as service:
    model = service.create_lora_training_client(BASE, rank=16, seed=4).result()
    tokenizer = model.get_tokenizer()
    run = RunMetrics(model.model_id)  # for the dashboard
    for step in range(STEPS):
        examples = [nano.draw("add", rng, "train") for _ in range(EPISODES)]
        groups = [[Episode(example) for _ in range(GROUP)] for example in examples]
        sampler = model.save_weights_and_get_sampling_client().result()
        play(sampler, tokenizer, [episode for group in groups for episode in group])
        data = []
        for group in groups:
            mean = sum(episode.reward for episode in group) / GROUP
            data += [episode.datum(episode.reward - mean) for episode in group if episode.reward != mean]
        if data:
            passed = model.forward_backward(data, "importance_sampling")
            model.optim_step(types.AdamParams(learning_rate=RATE)).result()
            passed.result()
        rewards = [episode.reward for group in groups for episode in group]
        at_once = sum(reward == 1.0 for reward in rewards) / len(rewards)
        run.log({"reward": rewards, "right at once": at_once}, step + 1)
        print(f"step {step + 1}  mean reward {np.mean(rewards):.2f}  right at once {at_once:.0%}")
    print(model.save_state("second-try").result().path)
