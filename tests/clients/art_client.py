"""ART's TinkerNativeBackend against a server: rollouts with a tool through its proxy, training with its losses,
checkpoints, and a second process that resumes and forks."""

import asyncio
import os
import random
import tempfile

from checks import KEY, NANO, TOOL, URL, check

os.environ |= {"TINKER_API_KEY": KEY, "TINKER_BASE_URL": URL, "HF_ENDPOINT": f"{URL}/hub", "HF_TOKEN": KEY}
os.environ |= {"WANDB_MODE": "disabled", "WEAVE_DISABLED": "true"}

import art
import tinker
from art.tinker_native import TinkerNativeBackend

SYSTEM = {"role": "system", "content": "Look up the weather before you answer."}
USER = {"role": "user", "content": "Is it raining?"}
HOST = {"server_args": {"host": "127.0.0.1"}}


def new_model(name: str) -> art.TrainableModel:
    arguments = {"renderer_name": "qwen3_disable_thinking", "training_client_args": {"rank": 4}}
    config = art.dev.InternalModelConfig(tinker_native_args=arguments)
    return art.TrainableModel(name=name, project="tests", base_model=NANO, _internal_config=config)


async def roll_out(model: art.TrainableModel, reward: float) -> art.Trajectory:
    """Answer, give a tool's result, and answer again."""
    trajectory = art.Trajectory(messages_and_choices=[SYSTEM, USER], tools=[TOOL], reward=reward)
    client = model.openai_client()
    for _ in range(2):
        completion = await client.chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages(), tools=[TOOL], max_completion_tokens=16
        )
        trajectory.messages_and_choices.append(completion.choices[0])
        calls = completion.choices[0].message.tool_calls or []
        results = [{"role": "tool", "tool_call_id": call.id, "content": "dry"} for call in calls]
        trajectory.messages_and_choices += results or [{"role": "user", "content": "Again."}]
    trajectory.messages_and_choices.pop()
    return trajectory


async def main(path: str) -> None:
    backend, model = TinkerNativeBackend(path=path), new_model("agent")
    with check("register"):
        await model.register(backend, _openai_client_config=HOST)
        assert await model.get_step() == 0
    with check("rollouts through the proxy"):
        groups = [art.TrajectoryGroup([await roll_out(model, float(n)) for n in range(2)])]
        for trajectory in groups[0].trajectories:
            choice = trajectory.messages_and_choices[-1]
            assert all(scored.token.startswith("token_id:") for scored in choice.logprobs.content)
    with check("a tool's result in the prompt"):
        called = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        history = [SYSTEM, USER, {"role": "assistant", "content": None, "tool_calls": [called]}]
        history += [{"role": "tool", "tool_call_id": "c", "content": "dry"}]
        answer = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=history, tools=[TOOL], max_completion_tokens=4, n=2, seed=1
        )
        assert len(answer.choices) == 2 and answer.usage.completion_tokens > 0
    for loss in ("cispo", "ppo", "importance_sampling", "dro"):
        with check(f"train with {loss}"):
            configuration = {"beta": 0.05} if loss == "dro" else None
            trained = await backend.train(model, groups, loss_fn=loss, loss_fn_config=configuration, learning_rate=1e-4)
            assert trained.step == await model.get_step() and trained.metrics["data/step_num_datums"] == 2
    with check("train with clip thresholds and Adam's parameters"):
        configuration = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
        adam = tinker.AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.99, eps=1e-8)
        await backend.train(model, groups, loss_fn="ppo", loss_fn_config=configuration, adam_params=adam)
    with check("a checkpoint"):
        trained = await backend.train(model, groups, save_checkpoint=True)
        assert trained.step == 6
    with check("an earlier step answers"):
        answer = await model.openai_client().chat.completions.create(
            model=f"{model.name}@1", messages=[USER], max_completion_tokens=2, temperature=0, top_p=0.9
        )
        assert answer.model == "agent@1"
    await backend.close()
    later, resumed = TinkerNativeBackend(path=path), new_model("agent")
    with check("resume"):
        await resumed.register(later, _openai_client_config=HOST)
        assert await resumed.get_step() == 6
        assert (await roll_out(resumed, 1.0)).messages()
        trained = await later.train(resumed, groups, learning_rate=1e-4)
        assert trained.step == 7
    with check("fork"):
        fork = new_model(f"fork-{random.randrange(1 << 32)}")
        await fork.register(later, _openai_client_config=HOST)
        await later._experimental_fork_checkpoint(fork, from_model="agent")
        assert await fork.get_step() == 6
    await later.close()


with tempfile.TemporaryDirectory() as directory:
    asyncio.run(main(directory))
