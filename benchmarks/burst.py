"""Samples and passes of the real SDK at a distance: a poll for each sample or for the session, plain or zstd bodies.

    python benchmarks/burst.py                               # the fake backend on this machine: the way, not the work
    python benchmarks/burst.py --round-trip-ms 0 1 20 80     # as far away as these round trips, over 100 Mbit/s
    python benchmarks/burst.py --backend torch --size 256    # with tinsmith/nano

The ways take turns, round by round, so that a noisy neighbour disturbs all alike. A burst is `--size` samples sent at
once; its time ends with the last result. A pass is a `forward` of 64 x 2,048 tokens. Prints a table of medians; with
--json FILE also writes the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import tinker
from harness import API_KEY, describe_machine, start_server, summarize_times, time_runs, write_json
from relay import start_relay
from tinker import types

MODEL = "tinsmith/nano"
POLLS = {"poll each": False, "poll session": True}
BODIES = {"plain": False, "zstd": True}
ROWS, LENGTH = 64, 2048


def open_service(stack: contextlib.ExitStack, url: str, flags: dict[str, bool]) -> tinker.ServiceClient:
    """A client that behaves by these flags, whatever the server's are."""
    service = stack.enter_context(tinker.ServiceClient(base_url=url, api_key=API_KEY))
    config = service.holder.get_client_config().model_copy(update=dict(flags))
    service.holder._client_config = service.holder._constructor_kwargs["_client_config"] = config
    return service


def sample_burst(sampler: tinker.SamplingClient, size: int) -> None:
    prompt = types.ModelInput.from_ints(list(range(32)))
    params = types.SamplingParams(max_tokens=8)
    for future in [sampler.sample(prompt, 1, params) for _ in range(size)]:
        future.result()


def build_data() -> list[types.Datum]:
    """Rows as in training: token ids that compress as text does, and weights of 0 and 1."""
    generator = np.random.default_rng(0)
    data = []
    for _ in range(ROWS):
        tokens = np.minimum(generator.zipf(1.3, LENGTH + 1), 400).astype(np.int64)
        inputs = {"target_tokens": tokens[1:], "weights": (np.arange(LENGTH) > LENGTH // 4).astype(np.float32)}
        fields = {name: types.TensorData.from_numpy(values) for name, values in inputs.items()}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=fields))
    return data


def list_actions(stack: contextlib.ExitStack, url: str, size: int) -> dict[str, Callable[[], object]]:
    actions: dict[str, Callable[[], object]] = {}
    for name, session in POLLS.items():
        service = open_service(stack, url, {"sample_use_retrieve_futures": session})
        sampler = service.create_sampling_client(base_model=MODEL).result()
        actions[f"1 sample, {name}"] = partial(sample_burst, sampler, 1)
        actions[f"{size} samples, {name}"] = partial(sample_burst, sampler, size)
    data = build_data()
    for name, packed in BODIES.items():
        service = open_service(stack, url, {"proto_compress_fwdbwd": packed})
        trainer = service.create_lora_training_client(MODEL, rank=4).result()

        def run_pass(trainer: tinker.TrainingClient = trainer) -> None:
            trainer.forward(data, "cross_entropy").result()

        actions[f"a pass, {name}"] = run_pass
    return actions


def measure(url: str, size: int, runs: int) -> dict[str, dict[str, float]]:
    with contextlib.ExitStack() as stack:
        actions = list_actions(stack, url, size)
        times: dict[str, list[float]] = {name: [] for name in actions}
        for round_index in range(runs):
            for name, action in actions.items():
                times[name] += time_runs(action, 1, warm_up=0 if round_index else 1)
    return {name: summarize_times(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="fake", choices=["fake", "torch"])
    parser.add_argument("--size", type=int, default=64, help="samples of a burst")
    parser.add_argument("--runs", type=int, default=10, help="rounds")
    parser.add_argument("--round-trip-ms", type=float, nargs="+", default=[0.0], help="0: without a relay")
    parser.add_argument("--mbit", type=float, default=100.0, help="bandwidth of each direction of the relay")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    print(describe_machine())
    figures: dict[str, Any] = {}
    with start_server(None, "--backend", args.backend) as server, contextlib.ExitStack() as stack:
        for round_trip_ms in args.round_trip_ms:
            url = server.url
            if round_trip_ms:
                relay = start_relay(urlsplit(url).port or 0, round_trip_ms, args.mbit)
                url = f"http://127.0.0.1:{stack.enter_context(relay)}"
            row = figures[f"{round_trip_ms:g} ms"] = measure(url, args.size, args.runs)
            if len(figures) == 1:
                print("| round trip | " + " | ".join(row) + " |\n" + "|---" * (len(row) + 1) + "|")
            medians = (f"{values['p50_ms']:.0f}" for values in row.values())
            print(f"| {round_trip_ms:g} ms | " + " | ".join(medians) + " |", flush=True)
    write_json(args.json, figures)


if __name__ == "__main__":
    main()
