"""Bulk jobs that ask a model, beside one asyncio client that sends the same requests at once.

    python benchmarks/batch_models.py                         # nano and m50, 2,000 rows
    python benchmarks/batch_models.py --sizes m50 --rows 500 --runs 5

Answers have a long tail: `/v1/batches` and `/v1/completions` get 4 to 256 tokens a request, `Sample` and the SDK
stop at words that end an answer after 64 to 128 tokens on average and 256 at most. The ways alternate, so that the
machine's state is the same for all. Prints tokens per second (medians) and their ratios to the client's, of runs next
to each other. A job's time includes its start and its outputs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TINKER_TELEMETRY", "0")

import httpx
import numpy as np
import tinker
from harness import API_KEY, describe_machine, start_server, write_json
from models import SIZES, make
from tinker import types

from tinsmith import batch
from tinsmith.batch.client.dataset import Dataset
from tinsmith.batch.client.http import Client

SHORTEST, MEAN, LONGEST = 4, 64, 256
MAX_STOP_WORDS = 64
"""A request has at most so many."""
PROMPT = 16
"""Tokens of each prompt."""
VOCABULARY = 400
POLL_S = 0.1


def draw_lengths(count: int) -> list[int]:
    lengths = np.random.default_rng(0).exponential(MEAN - SHORTEST, count).astype(int) + SHORTEST
    return np.minimum(lengths, LONGEST).tolist()


class Comparison:
    """One server and one model; each method runs all rows and returns how many tokens were sampled."""

    def __init__(self, url: str, model: str, rows: int, stop: list[int] | None, directory: Path) -> None:
        self.url, self.model, self.directory, self.stop = url, model, directory, stop
        self.headers = {"Authorization": f"Bearer {API_KEY}"}
        self.lengths = draw_lengths(rows)
        self.run = 0

    def body(self, index: int) -> dict[str, Any]:
        length = self.lengths[index]
        return {"model": self.model, "prompt": self.prompt(index), "max_tokens": length, "ignore_eos": True}

    def openai_client(self) -> int:
        """All requests at once."""

        async def ask_all() -> int:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            async with httpx.AsyncClient(headers=self.headers, timeout=None, limits=limits) as client:
                url = f"{self.url}/v1/completions"
                replies = await asyncio.gather(
                    *(client.post(url, json=self.body(index)) for index in range(len(self.lengths)))
                )
            return sum(reply.raise_for_status().json()["usage"]["completion_tokens"] for reply in replies)

        return asyncio.run(ask_all())

    def openai_batch(self) -> int:
        lines = [
            json.dumps({
                "custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": self.body(index)
            })
            for index in range(len(self.lengths))
        ]  # fmt: skip
        with httpx.Client(base_url=self.url, headers=self.headers, timeout=60) as client:
            files = {"file": ("in.jsonl", "\n".join(lines).encode())}
            file = client.post("/v1/files", data={"purpose": "batch"}, files=files).raise_for_status().json()
            request = {
                "input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"
            }  # fmt: skip
            state = client.post("/v1/batches", json=request).raise_for_status().json()
            while state["status"] not in ("completed", "failed", "expired", "cancelled"):
                time.sleep(POLL_S)
                state = client.get(f"/v1/batches/{state['id']}").raise_for_status().json()
            assert state["request_counts"]["completed"] == len(self.lengths), state
            content = client.get(f"/v1/files/{state['output_file_id']}/content").raise_for_status().text
        bodies = [json.loads(line)["response"]["body"] for line in content.splitlines()]
        return sum(body["usage"]["completion_tokens"] for body in bodies)

    def prompt(self, index: int) -> list[int]:
        return np.random.default_rng((self.run, index)).integers(1, VOCABULARY, PROMPT).tolist()

    def sdk_client(self) -> int:
        """All samples at once."""
        service = tinker.ServiceClient(base_url=self.url, api_key=API_KEY)
        sampler = service.create_sampling_client(base_model=self.model).result()
        parameters = types.SamplingParams(max_tokens=LONGEST, temperature=1.0, stop=self.stop)

        async def sample_all() -> int:
            prompts = [types.ModelInput.from_ints(self.prompt(index)) for index in range(len(self.lengths))]
            results = await asyncio.gather(*(sampler.sample(prompt, 1, parameters) for prompt in prompts))
            return sum(len(result.sequences[0].tokens) for result in results)

        try:
            return asyncio.run(sample_all())
        finally:
            service.holder.close()

    def sample_job(self) -> int:
        source, output = self.directory / f"in-{self.run}.jsonl", self.directory / f"out-{self.run}.jsonl"
        source.write_text("".join(json.dumps({"ids": self.prompt(index)}) + "\n" for index in range(len(self.lengths))))
        step = batch.Sample(self.model, tokens_column="ids", max_tokens=LONGEST, stop=self.stop, tokens=True)
        data = Dataset(batch.JsonReader(str(source)))
        client = Client(self.url, api_key=API_KEY)
        job = data.map(step, output=batch.JsonWriter(str(output)), stream=False, client=client)
        status = job.wait()
        assert status["rows_failed"] == 0, status
        return status["tokens_out"]


def time_rate(run: Callable[[], int]) -> float:
    began = time.perf_counter()
    num_tokens = run()
    return num_tokens / (time.perf_counter() - began)


def measure(comparison: Comparison, runs: int) -> dict[str, list[float]]:
    ways = {name: getattr(comparison, name) for name in ("openai_client", "openai_batch", "sdk_client", "sample_job")}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for comparison.run in range(runs + 1):
        for name, way in ways.items():
            rate = time_rate(way)
            if comparison.run:  # the first run warms up
                rates[name].append(rate)
    return rates


def print_rates(size: str, rates: dict[str, list[float]]) -> None:
    for job, client in (("openai_batch", "openai_client"), ("sample_job", "sdk_client")):
        ratios = sorted(ours / theirs for ours, theirs in zip(rates[job], rates[client], strict=True))
        ours, theirs = (statistics.median(rates[name]) for name in (job, client))
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        print(f"| {size} | {job} | {ours:,.0f} | {client} | {theirs:,.0f} | {spread} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["nano", "m50"], choices=["nano", *SIZES])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(describe_machine())
    print("| model | job | tokens/s | client | tokens/s | ratio |\n|---|---|---|---|---|---|")
    figures: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
        for size in args.sizes:
            model, stop, served = "tinsmith/nano", None, "tinsmith/nano"
            if size != "nano":
                vocabulary = int(str(SIZES[size]["vocab_size"]))
                stop = list(range(1, 1 + min(MAX_STOP_WORDS, vocabulary // MEAN)))
                model = f"bench/{size}"
                served = f"{model}={make(size, Path(directory) / size)}"
            with start_server(served) as server:
                comparison = Comparison(server.url, model, args.rows, stop, Path(directory))
                figures[size] = measure(comparison, args.runs)
            print_rates(size, figures[size])
    write_json(args.json, figures)


if __name__ == "__main__":
    main()
