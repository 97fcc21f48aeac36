"""Trinity's trainer for Tinker against a server: experiences sampled as its model does, steps of its losses,
checkpoints, samplers, and a second trainer that resumes. Its model for rollouts imports vLLM, whose builds are too
large for an environment of tests; the sampling here passes what that model passes. Its processes share no actor.
"""

import asyncio
import os
import tempfile
from unittest.mock import patch

from checks import KEY, NANO, URL, check

os.environ |= {"TINKER_API_KEY": KEY, "TINKER_BASE_URL": URL, "HF_ENDPOINT": f"{URL}/hub", "HF_TOKEN": KEY}

import tinker
import torch
from tinker import types
from trinity.common.config import Config
from trinity.common.experience import Experience
from trinity.manager.synchronizer import Synchronizer
from trinity.trainer.tinker.tinker_trainer import TinkerTrainerWrapper


def new_config(directory: str, **algorithm) -> Config:
    config = Config(project="tests", name="trinity", checkpoint_job_dir=directory)
    config.model.model_path = NANO
    config.model.tinker.rank, config.model.tinker.seed = 4, 1
    config.algorithm.optimizer.lr = 1e-4
    config.algorithm.optimizer.betas = (0.9, 0.95)
    config.trainer.grad_clip = 1.0
    for name, value in algorithm.items():
        setattr(config.algorithm, name, value)
    return config


def new_trainer(config: Config) -> TinkerTrainerWrapper:
    with patch.object(Synchronizer, "get_actor"):
        return TinkerTrainerWrapper(config)


async def roll_out(sampler, prompt: list[int], count: int) -> list[Experience]:
    settings = {"max_tokens": 12, "seed": 3, "temperature": 1.0, "top_k": -1, "top_p": 1}
    answer = await sampler.sample_async(
        prompt=types.ModelInput.from_ints(prompt),
        sampling_params=settings,
        num_samples=count,
        include_prompt_logprobs=False,
        topk_prompt_logprobs=0,
    )
    experiences = []
    for position, sequence in enumerate(answer.sequences):
        length = len(sequence.tokens)
        experiences.append(
            Experience(
                tokens=torch.tensor(prompt + sequence.tokens, dtype=torch.int32),
                logprobs=torch.tensor(sequence.logprobs, dtype=torch.float32),
                prompt_length=len(prompt),
                reward=float(position % 2),
                action_mask=torch.ones(length, dtype=torch.bool),
                advantages=torch.full((length,), 1.0 - 2 * (position % 2)),
                returns=torch.ones(length),
            )
        )
    return experiences


async def main(directory: str) -> None:
    sampler = await tinker.ServiceClient().create_sampling_client_async(base_model=NANO)
    prompt = sampler.get_tokenizer().encode("Say hello.")
    with check("experiences"):
        experiences = await roll_out(sampler, prompt, 4)
        scores = await sampler.compute_logprobs_async(types.ModelInput.from_ints(experiences[0].tokens.tolist()))
        expected = torch.tensor(scores[len(prompt) :])
        assert torch.allclose(expected, experiences[0].logprobs, atol=1e-3)
    trainer = new_trainer(new_config(directory, **GRPO))
    with check("a trainer of one's own adapter"):
        await trainer.prepare()
        assert trainer.train_step_num == 0 and trainer.model_info.model_id
    for _ in range(2):
        with check(f"step {trainer.train_step_num + 1}"):
            metrics = await trainer.train_step(experiences)
            assert "actor/final_loss" in metrics and metrics["actor/final_loss"] == metrics["actor/final_loss"]
    with check("checkpoints and samplers"):
        await trainer.save_checkpoint()
        await trainer.save_state_dict()
        await trainer.train_step(experiences)
        first = trainer.latest_remote_sampler_path
        await trainer.save_state_dict()  # asks for the removal of the one before, by its name alone
        assert trainer.latest_remote_sampler_path != first
        service = tinker.ServiceClient()
        later = await service.create_sampling_client_async(model_path=trainer.latest_remote_sampler_path)
        assert len(await roll_out(later, prompt, 2)) == 2
    with check("resume"):
        resumed = new_trainer(new_config(directory, **GRPO))
        await resumed.prepare()
        assert resumed.train_step_num == 2
        assert "actor/final_loss" in await resumed.train_step(await roll_out(sampler, prompt, 2))


GRPO = {"algorithm_type": "grpo", "policy_loss_fn": "ppo", "policy_loss_fn_args": {"clip_range": 0.2},
        "kl_loss_fn": "k2", "kl_loss_fn_args": {"kl_coef": 0.01}, "entropy_loss_fn": "default",
        "entropy_loss_fn_args": {"entropy_coef": 0.01}, "loss_agg_mode": "token-mean"}  # fmt: skip
with tempfile.TemporaryDirectory() as root:
    asyncio.run(main(root))
