"""The calls of SkyRL-Agent's trainer for Tinker, replayed with the SDK against a server: its own modules do not import
on Python 3.11. A sampler of each step's weights, rollouts by tokens in groups, advantages of a group, overlapped
passes and steps with its losses, saved states, and a run that resumes.
"""

import asyncio
import os
import statistics

from checks import KEY, NANO, URL, check

os.environ |= {"TINKER_API_KEY": KEY, "TINKER_BASE_URL": URL, "HF_ENDPOINT": f"{URL}/hub", "HF_TOKEN": KEY}

import tinker
import torch
from tinker import types
from tinker.types.tensor_data import TensorData

GROUP = 4
SAMPLING = {"max_tokens": 12, "temperature": 1.0, "top_p": 1.0, "stop": ["<|im_end|>"]}


async def roll_out(sampler, prompt) -> tuple[list[int], list[float]]:
    """Draw one answer by tokens, as the engine of its agents does."""
    output = await sampler.sample_async(
        prompt=types.ModelInput.from_ints(tokens=prompt),
        num_samples=1,
        sampling_params=types.SamplingParams(**SAMPLING),
    )
    return output.sequences[0].tokens, output.sequences[0].logprobs


def new_datum(prompt, tokens, logprobs, advantage) -> types.Datum:
    sequence = prompt + tokens
    advantages = torch.zeros(len(sequence))
    advantages[len(prompt) :] = advantage
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens=sequence[:-1]),
        loss_fn_inputs={
            "target_tokens": TensorData.from_torch(torch.tensor(sequence[1:])),
            "logprobs": TensorData.from_torch(torch.tensor(([0] * len(prompt) + logprobs)[1:])),
            "advantages": TensorData.from_torch(advantages[1:]),
        },
    )


async def train_step(service, training, step, loss) -> None:
    path = training.save_weights_for_sampler(name=f"{step:06d}").result().path
    sampler = service.create_sampling_client(model_path=path)
    prompt = training.get_tokenizer().encode("Say hello.")
    answers = await asyncio.gather(*(roll_out(sampler, prompt) for _ in range(GROUP)))
    rewards = [float(len(tokens) % 2) for tokens, _ in answers]
    mean, deviation = statistics.mean(rewards), statistics.pstdev(rewards) or 1.0
    data = [
        new_datum(prompt, tokens, logprobs, (reward - mean) / deviation)
        for (tokens, logprobs), reward in zip(answers, rewards, strict=True)
    ]
    passed = training.forward_backward(data, loss_fn=loss)
    stepped = training.optim_step(types.AdamParams(learning_rate=4e-5, beta1=0.9, beta2=0.95, eps=1e-8))
    outputs = passed.result().loss_fn_outputs
    assert [len(output["logprobs"].to_torch()) for output in outputs] == [d.model_input.length for d in data]
    stepped.result()


async def main() -> None:
    service = tinker.ServiceClient()
    training = await service.create_lora_training_client_async(base_model=NANO, rank=16)
    for step, loss in enumerate(("ppo", "importance_sampling")):
        with check(f"a step with {loss}"):
            await train_step(service, training, step, loss)
    with check("states and samplers, saved at once"):
        futures = [await training.save_state_async("000002"), await training.save_weights_for_sampler_async("000002")]
        paths = [(await future.result_async()).path for future in futures]
        assert "/weights/" in paths[0] and "/sampler_weights/" in paths[1], paths
    with check("a run that resumes"):
        resumed = await service.create_lora_training_client_async(base_model=NANO, rank=16)
        await (await resumed.load_state_async(paths[0])).result_async()
        await train_step(service, resumed, 3, "ppo")


asyncio.run(main())
