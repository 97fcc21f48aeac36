"""Sampled tokens per second: the whole service through the real SDK, and transformers' `generate` on the same work.

    python benchmarks/sampling.py                       # tiny and m50; 1, 16 and 64 at once; 0, 1 and 8 adapters
    python benchmarks/sampling.py --url http://... --model NAME    # another Tinker-compatible address

A run is as many requests as there are to be at once, each of 64 prompt tokens (all different: no cache helps) and 64
new ones, from the first submission to the last answer. The baseline runs in the same call, in a process of its own with
as many threads: one batch, the base model without an adapter, which is less work. Prints medians with their spread
and the ratio, and how long the first token of one request takes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import tinker
from latency import API_KEY, own_server
from models import SIZES, make
from tinker import types
from training import RANK, VOCAB, timed

PROMPT, NEW = 64, 64
NUMBERS = itertools.count()


def prompt() -> list[int]:
    return np.random.default_rng(next(NUMBERS)).integers(1, VOCAB, PROMPT).tolist()


def samplers_of(service: tinker.ServiceClient, model: str, adapters: int) -> list[tinker.SamplingClient]:
    """Of adapters that were just published after a step each; of the base model, if there are none."""
    if not adapters:
        return [service.create_sampling_client(base_model=model).result()]
    found = []
    for _ in range(adapters):
        client = service.create_lora_training_client(model, rank=RANK).result()
        tokens = np.array(prompt())
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(PROMPT - 1, np.float32)}
        datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        found.append(client.save_weights_and_get_sampling_client().result())
    return found


def of_service(samplers: list[tinker.SamplingClient], at_once: int, new: int, runs: int) -> list[float]:
    """Seconds of each run. No seed, so that nothing can be remembered; an end of text does not end a sample."""
    params = types.SamplingParams(max_tokens=new, temperature=1.0)

    def run() -> None:
        inputs = [types.ModelInput.from_ints(prompt()) for _ in range(at_once)]
        chosen = itertools.islice(itertools.cycle(samplers), at_once)
        for future in [s.sample(given, 1, params) for s, given in zip(chosen, inputs, strict=True)]:
            future.result()

    return timed(run, runs)


def of_transformers(directory: Path, at_once: int, runs: int) -> list[float]:
    given = json.dumps({"directory": str(directory), "at_once": at_once, "runs": runs})
    found = subprocess.run([sys.executable, __file__, "--baseline", given], stdout=subprocess.PIPE, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def baseline(directory: str, at_once: int, runs: int) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    def run() -> None:
        ids = torch.tensor([prompt() for _ in range(at_once)])
        options = {"do_sample": True, "max_new_tokens": NEW, "pad_token_id": 0}
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # pyright: ignore[reportAttributeAccessIssue]

    return timed(run, runs)


def show(size: str, what: str, at_once: int, seconds: list[float], base: float | None) -> dict[str, object]:
    rates = sorted(at_once * NEW / second for second in seconds)
    rate = statistics.median(rates)
    ratio = f"{rate / base:5.2f} x" if base else ""
    spread = f"({rates[0]:,.0f} - {rates[-1]:,.0f})"
    print(f"{size:5s} {at_once:4d} at once  {what:24s} {rate:8,.0f} tokens/s {spread:17s} {ratio}", flush=True)
    return {"size": size, "at_once": at_once, "what": what, "tokens_per_s": rate, "least": rates[0], "most": rates[-1]}


def compared(size: str, directory: Path, given: argparse.Namespace) -> list[dict[str, object]]:
    figures, bases = [], {}
    for at_once in given.at_once:
        seconds = of_transformers(directory, at_once, given.runs)
        figures.append(show(size, "generate float32", at_once, seconds, None))
        bases[at_once] = statistics.median(at_once * NEW / second for second in seconds)
    for dtype in given.dtypes:
        os.environ["TINSMITH_DTYPE"] = dtype
        with own_server(f"bench/{size}={directory}") as (url, _):
            figures += of_address(url, f"bench/{size}", size, f" {dtype}", given, bases)
    return figures


def of_address(
    url: str, model: str, size: str, suffix: str, given: argparse.Namespace, bases: dict[int, float]
) -> list[dict[str, object]]:
    figures = []
    with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
        for adapters in given.adapters:
            samplers = samplers_of(service, model, adapters)
            for at_once in given.at_once:
                seconds = of_service(samplers, at_once, NEW, given.runs)
                what = f"service{suffix}, {adapters} LoRA"
                figures.append(show(size, what, at_once, seconds, bases.get(at_once)))
        first = statistics.median(of_service(samplers_of(service, model, 0), 1, 1, 4 * given.runs))
        print(f"{size:5s} first token of one request: {1000 * first:.1f} ms", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny", "m50"])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--adapters", nargs="+", type=int, default=[0, 1, 8])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--url", help="a running server, without a baseline")
    parser.add_argument("--model", help="the base model's name there")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--baseline", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.baseline:
        with contextlib.redirect_stdout(sys.stderr):
            seconds = baseline(**json.loads(given.baseline))
        sys.stdout.write(json.dumps(seconds) + "\n")
        return
    figures = []
    if given.url:
        figures = of_address(given.url, given.model, given.model, "", given, {})
    else:
        for size in given.sizes:
            with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
                figures += compared(size, make(size, Path(directory) / size), given)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
