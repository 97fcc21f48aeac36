"""rLLM's engine and trainer for Tinker against a server: rollouts with tools through the engine and its gateway's
handler, steps with each of its losses, whole and overlapped, checkpoints, and a second trainer that resumes."""

import asyncio
import os
import tempfile

from checks import KEY, NANO, SAY, TOOL, URL, check

os.environ |= {"TINKER_API_KEY": KEY, "TINKER_BASE_URL": URL, "HF_ENDPOINT": f"{URL}/hub", "HF_TOKEN": KEY}

import tinker
from omegaconf import OmegaConf
from rllm.engine.rollout.tinker_engine import TinkerEngine
from rllm.gateway.tinker_adapter import create_tinker_handler
from rllm.trainer.algorithms import AlgorithmConfig, CompactFilteringConfig, TransformConfig
from rllm.trainer.tinker.tinker_policy_trainer import TinkerPolicyTrainer
from rllm.types import Step, Trajectory, TrajectoryGroup

LOSSES = ("importance_sampling", "ppo", "cispo", "dro")
HISTORY = [
    *SAY,
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]},
    {"role": "tool", "tool_call_id": "c", "name": "weather", "content": "It is dry."},
]  # fmt: skip


def new_trainer(directory: str, service, loss: str | None = None) -> TinkerPolicyTrainer:
    config = OmegaConf.create(
        {
            "model": {"name": NANO, "lora_rank": 4, "train_unembed": False},
            "training": {"default_local_dir": directory, "resume_mode": "auto"},
        }
    )
    algorithm = AlgorithmConfig(loss_fn=loss)
    return TinkerPolicyTrainer(config, service, CompactFilteringConfig(), TransformConfig(), algorithm)


async def roll_out(engine, reward: float) -> Trajectory:
    answer = await engine.get_model_response(SAY, max_tokens=12)
    step = Step(
        prompt_ids=answer.prompt_ids, response_ids=answer.completion_ids, logprobs=answer.logprobs, reward=reward
    )
    return Trajectory(steps=[step], reward=reward)


async def main(directory: str) -> None:
    service = tinker.ServiceClient()
    trainer = new_trainer(directory, service)
    with check("a trainer and its sampler"):
        start, sampler, _ = await trainer.initialize_async()
        assert start == 0
    engine = TinkerEngine(
        URL,
        NANO,
        trainer.get_tokenizer(),
        service,
        sampling_params={"train": {"temperature": 1.0}},
        bypass_render_with_parser=False,
        renderer_name="qwen3_disable_thinking",
    )
    engine.set_sampling_client(sampler)
    with check("rollouts"):
        trajectories = [await roll_out(engine, float(n % 2)) for n in range(4)]
        assert all(len(t.steps[0].logprobs) == len(t.steps[0].response_ids) > 0 for t in trajectories)
    with check("the gateway's handler, with a tool's result"):
        handle = create_tinker_handler(engine)
        answer = await handle({"messages": HISTORY, "tools": [TOOL], "max_tokens": 8, "temperature": 0.5, "top_k": 5})
        assert answer["choices"][0]["token_ids"] and answer["usage"]["completion_tokens"] > 0
    groups = [TrajectoryGroup(trajectories=trajectories, group_id="task:agent")]
    for position, loss in enumerate(LOSSES):
        with check(f"a step with {loss}"):
            trainer.algorithm_config = AlgorithmConfig(loss_fn=loss)
            for trajectory in trajectories:
                trajectory.steps[0].advantage = None
            datums, logprobs, metrics, rate = await trainer.fused_forward_backward_and_optim_step(
                step=position, total_steps=8, trajectory_groups=groups, learning_rate=1e-4
            )
            assert len(datums) == len(logprobs) == 4 and rate > 0 and any(key.startswith("train/") for key in metrics)
    with check("gradients of two passes, then a step"):
        await trainer.forward_backward_from_trajectory_groups(groups)
        await trainer.forward_backward_from_trajectory_groups(groups)
        future, _ = await trainer.optim_step_future(step=5, total_steps=8, learning_rate=1e-4)
        await future.result_async()
    with check("the sampler of the last weights"):
        engine.set_sampling_client(await trainer.save_checkpoint_and_get_sampling_client(5))
        assert (await roll_out(engine, 1.0)).steps[0].response_ids
    with check("a checkpoint, and a trainer that resumes"):
        await trainer.save_checkpoint_and_get_sampling_client(6, do_save=True, dataloader_state={"at": 6})
        resumed = new_trainer(directory, service)
        start, sampler, state = await resumed.initialize_async()
        assert (start, state) == (6, {"at": 6})
        engine.set_sampling_client(sampler)
        assert (await roll_out(engine, 1.0)).steps[0].response_ids
        await resumed.forward_backward_from_trajectory_groups(groups)


with tempfile.TemporaryDirectory() as root:
    asyncio.run(main(root))
