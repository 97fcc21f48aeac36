"""A program that runs evaluators of tinker-cookbook on one model and prints their metrics as a line of JSON.

The same held-out data is scored by the trainer and by a sampler over its weights, and a benchmark samples and grades.
"""

from __future__ import annotations

import asyncio
import json
import sys

import tinker
from tinker_cookbook import renderers
from tinker_cookbook.eval.benchmark_evaluator import BenchmarkEvaluator
from tinker_cookbook.recipes.chat_sl.chat_datasets import NoRobotsBuilder
from tinker_cookbook.supervised.nll_evaluator import NLLEvaluator, SamplerNLLEvaluator
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer

MODEL = "local/tiny"
RENDERER = "role_colon"


async def main() -> None:
    tokenizer = get_tokenizer(MODEL)
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=MODEL, renderer_name=RENDERER, max_length=256, batch_size=32, train_on_what=None
    )
    _, held_out = NoRobotsBuilder(common_config=common)()
    data = held_out.get_batch(0)
    with tinker.ServiceClient() as service:
        model = await service.create_lora_training_client(MODEL, rank=8)
        passed = model.forward_backward(data, "cross_entropy")
        stepped = model.optim_step(tinker.AdamParams(learning_rate=1e-3))
        await passed
        await stepped
        sampler = await model.save_weights_and_get_sampling_client()
        benchmark = BenchmarkEvaluator(
            "gsm8k", renderers.get_renderer(RENDERER, tokenizer), max_examples=8, max_tokens=16
        )
        metrics = {
            **await NLLEvaluator(data, "trainer", tokenizer)(model),
            **await SamplerNLLEvaluator(data, "sampler", tokenizer)(sampler),
            **await benchmark(sampler),
        }
    sys.stdout.write(json.dumps(metrics) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
