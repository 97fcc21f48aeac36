"""An agent that knows only OpenAI's client is trained from what the server captured of its chats.

The agent asks nano for a sum. If nano is not sure, the agent runs its calculator and asks again with the result. A
right answer earns 1, with the calculator's help 0.4. The agent's key names the episode, so that it is captured, and its
model is the training run, whose newest published weights answer.

tinsmith serve                            # in another terminal
export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local
python examples/captured_agent.py
"""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import openai
import tinker
from tinker import types

from tinsmith.base_models import nano
from tinsmith.exchange.trajectories import Trajectories, session_key

BASE, STEPS, SUMS, GROUP, RATE = "tinsmith/nano", 6, 10, 6, 1.5e-3
URL, KEY = os.environ["TINKER_BASE_URL"], os.environ["TINKER_API_KEY"]
rng = random.Random(0)


def agent(client: openai.OpenAI, model: str, example: nano.PromptExample) -> float:
    """Run one episode of one or two turns and return its reward."""
    chat = [{"role": "user", "content": example.prompt}]
    said = client.chat.completions.create(model=model, messages=chat, max_tokens=24).choices[0].message.content or ""
    if "not sure" not in said:
        return float(example.is_right(said))
    result = f"The calculator says {example.answer}. {example.prompt}"
    chat += [{"role": "assistant", "content": said}, {"role": "user", "content": result}]
    said = client.chat.completions.create(model=model, messages=chat, max_tokens=24).choices[0].message.content or ""
    return 0.4 * float(example.is_right(said))


def episode(job: tuple[str, str, nano.PromptExample]) -> float:
    name, run, example = job
    return agent(client.with_options(api_key=session_key(KEY, name)), run, example)


client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
with tinker.ServiceClient() as service, Trajectories(URL, KEY) as captured, ThreadPoolExecutor(16) as threads:
    model = service.create_lora_training_client(BASE, rank=16, seed=2).result()
    run = f"tinker://{model.model_id}"
    for step in range(STEPS):
        model.save_weights_and_get_sampling_client().result()
        examples = [nano.draw("add", rng, "train") for _ in range(SUMS)]
        jobs = [(f"{run}/{step}/{sum_}/{n}", run, examples[sum_]) for sum_ in range(SUMS) for n in range(GROUP)]
        rewards = list(threads.map(episode, jobs))
        data = []
        for index, (name, _, _) in enumerate(jobs):
            group = rewards[index // GROUP * GROUP :][:GROUP]
            advantage = rewards[index] - sum(group) / GROUP
            if advantage:
                trajectories = captured.of(name)
                captured.reward({trajectory.trajectory_id: rewards[index] for trajectory in trajectories})
                data += [trajectory.datum(advantage) for trajectory in trajectories]
        if data:
            passed = model.forward_backward(data, "importance_sampling")
            model.optim_step(types.AdamParams(learning_rate=RATE)).result()
            passed.result()
        print(f"step {step + 1:2}  mean reward {sum(rewards) / len(rewards):.2f}", flush=True)
