"""What a decode step costs the host: the sampler's scheduling, bookkeeping and draws, with the layers left out.

    python benchmarks/decode_host.py                     # 16, 64 and 256 samples at once
    python benchmarks/decode_host.py --rows 512 --steps 200

On a GPU this time must stay below that of the layers, or the device waits for it. The sampler runs on a CPU as it does
there: decode steps replay graphs, which here compute nothing, and tokens are read a step late. The model has a
vocabulary of 256, so what remains of the device's part are some thirty small operations. Prints processor time of one
thread: of a step, and what each of its rows adds.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from typing import cast

import numpy as np
import torch
from harness import describe_machine, write_json
from interleaving import format_spread, summarize_spread
from models import write_random
from torch import Tensor
from transformers import AutoConfig

from tinsmith.backends.torch.model import BaseModel
from tinsmith.base_models import read_shape
from tinsmith.samplers.local.decode_graphs import DecodeGraphs, _Key, _Step
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.types import Sample, SamplingParams

CONFIG = AutoConfig.for_model(
    "qwen3",
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=64,
    vocab_size=256,
    max_position_embeddings=4096,
    eos_token_id=0,
)
PROMPT_TOKENS = 64
WARM_UP_STEPS = 4


class EmptyGraphs(DecodeGraphs):
    """Their replay leaves the hidden states of the capture as they are."""

    def replay(self) -> None:
        pass

    def _capture(self, key: _Key, step: _Step) -> bool:
        step.graph, step.hidden_nD = cast(torch.cuda.CUDAGraph, self), self._forward(key, step)
        return True

    def _forward(self, key: _Key, step: _Step) -> Tensor:
        width = cast(Tensor, self._base.model.get_input_embeddings().weight).shape[1]
        return torch.randn(key.num_rows, width, generator=torch.Generator().manual_seed(0))


def make_sampler(directory: Path, max_rows: int) -> LocalSampler:
    base = BaseModel.load(read_shape("bench", directory), device="cpu", dtype="float32")
    sampler = LocalSampler(base, {}, options=SamplerOptions(max_sequences=max_rows, reads_late=True))
    sampler._contiguous = sampler._cache_budget._contiguous = None
    sampler._graphs = EmptyGraphs(base, sampler._cache, sampler._states)
    return sampler


def measure_step(sampler: LocalSampler, num_rows: int, num_steps: int, names: itertools.count[int]) -> float:
    """Seconds of processor time of a decode step of `num_rows` samples."""
    params = SamplingParams(max_tokens=num_steps + 2 * WARM_UP_STEPS, temperature=1.0, stop_eos=False)
    for _ in range(num_rows):
        name = next(names)
        prompt_T = np.random.default_rng(name).integers(0, 250, PROMPT_TOKENS).astype(np.int32)
        sampler.submit(Sample(f"s{name}", None, prompt_T, 1, params))
    batcher = sampler._batcher
    while batcher.waiting or any(sequence.num_generated < 1 for sequence in batcher.running):
        sampler.step()
    for _ in range(WARM_UP_STEPS):
        sampler.step()
    start = time.thread_time()
    for _ in range(num_steps):
        sampler.step()
    seconds = time.thread_time() - start
    while sampler.has_work:
        sampler.step()
    return seconds / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(describe_machine())
    figures: dict[str, list[float]] = {}
    names = itertools.count()
    with tempfile.TemporaryDirectory() as directory:
        sampler = make_sampler(write_random(CONFIG, Path(directory)), max(args.rows))
        for num_rows in args.rows:
            measure_step(sampler, num_rows, 1, names)
            times = [1e3 * measure_step(sampler, num_rows, args.steps, names) for _ in range(args.runs)]
            figures[str(num_rows)] = times
            print(f"{num_rows} rows: {format_spread(summarize_spread(times), '.2f')} ms a step")
    if len(args.rows) > 1:
        least, most = min(args.rows), max(args.rows)
        middle = {num: float(np.median(figures[str(num)])) for num in (least, most)}
        print(f"a row: {1e3 * (middle[most] - middle[least]) / (most - least):.1f} us")
    write_json(args.json, figures)


if __name__ == "__main__":
    main()
