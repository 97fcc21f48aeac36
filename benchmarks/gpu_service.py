"""Training and sampling on one GPU through `tinsmith serve` and the SDK: what its users get.

    python benchmarks/gpu_service.py                                       # every shape, the most telling rows first
    python benchmarks/gpu_service.py qwen3-8b --quantize off fp8 --rows train sample --json figures.json
    python benchmarks/gpu_service.py --small --seconds 120                 # on a CPU: that it works, and nothing else

The models have random weights and the shapes of `models.py`; the server has its defaults. Rows, with eight adapters of
rank 32:

- train: 16 sequences of 2,048 tokens, by one client and by eight, each step submitted before the last one ended
  (`tokens_per_s`) and after it (`one_by_one`);
- sample: 64 and 256 requests of 256 + 256 tokens without, with one and with eight adapters, 16 requests of 16 answers,
  one request, 16 prompts of 3,500 tokens;
- rl: weights for sampling, 16 prompts of 256 with 8 answers of 512, importance sampling over them, an optimizer step;
- mixed: 8 x 2,048 trained again and again, and bursts of 16 samples of 64 tokens beside it;
- latency: a forward, a step and a sample of one token, of 32 tokens;
- long: one sequence of 32,768 tokens.

The first run of a row is shown, too (`first_s`, `first_burst`): what a new shape costs is part of what users feel. A
row for which too little time is left is named. Use `gpu.py` for figures beside PEFT and transformers in one process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import tinker
import torch
from gpu_page import Budget
from harness import API_KEY, build_datum, describe_machine, start_server, write_json
from models import QWEN3, SHAPES, shape_of, write_random
from tinker import types
from training import LEARNING_RATE, RANK

from tinsmith.backends.torch.quantization import KINDS

ORDER = ("qwen3-30b-a3b-12l", "qwen3.5-4b", "gpt-oss-20b-4l", "qwen3-8b", "qwen3-0.6b")
"""The models of a whole run."""
ADAPTERS = 8
CONTEXT = 40_960
WORDS = 8000
"""Tokens are drawn from these."""
ADAM = types.AdamParams(learning_rate=LEARNING_RATE)

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of sequences, requests and tokens, and seconds of the row `mixed`."""

    sequences: int = 16
    trained: int = 2048
    steps: int = 6
    requests: tuple[int, int] = (64, 256)
    groups: int = 16
    prompt: int = 256
    answer: int = 256
    long_prompt: int = 3500
    short_answer: int = 64
    long_answer: int = 512
    longest: int = 32_768
    mixed_s: float = 8.0


SMALL = Lengths(8, 16, 2, (2, 4), 2, 8, 4, 20, 4, 6, 64, 1.0)


@dataclass(slots=True)
class Bench:
    """One model behind one server."""

    clients: list[tinker.TrainingClient]
    base: tinker.SamplingClient
    adapters: list[tinker.SamplingClient]
    lengths: Lengths
    add: Callable[[str, Figures], None]
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def draw(self, length: int) -> list[int]:
        return self.rng.integers(5, WORDS, length).tolist()

    def draw_datum(self, length: int) -> types.Datum:
        return build_datum(np.array(self.draw(length + 1)))

    # Rows.

    def train(self) -> None:
        lengths = self.lengths
        for num_clients in (1, len(self.clients)):
            self._train(self.clients[:num_clients], lengths.sequences, lengths.trained, lengths.steps)

    def long(self) -> None:
        self._train(self.clients[:1], 1, self.lengths.longest, 2)

    def _train(self, clients: Sequence[tinker.TrainingClient], count: int, length: int, steps: int) -> None:
        per_client = max(1, count // len(clients))
        work = [(client, [self.draw_datum(length) for _ in range(per_client)]) for client in clients]
        num_tokens = len(clients) * per_client * length

        def submit() -> list[Callable[[], object]]:
            return [wait for client, data in work for wait in submit_step(client, data)]

        first_s = time_run(lambda: wait_for_all(submit()))
        started, pending = time.perf_counter(), [submit()]
        for _ in range(steps - 1):
            pending.append(submit())
            wait_for_all(pending.pop(0))
        wait_for_all(pending.pop(0))
        pipelined_s = (time.perf_counter() - started) / steps
        alone_s = statistics.median(time_run(lambda: wait_for_all(submit())) for _ in range(2))
        self.add(
            f"training, {count} x {length:,}, {len(clients)} adapter{'s' * (len(clients) > 1)}",
            {"tokens_per_s": num_tokens / pipelined_s, "one_by_one": num_tokens / alone_s, "first_s": first_s},
        )

    def sample(self) -> None:
        lengths = self.lengths
        few, many = lengths.requests
        for samplers, kind in ((self.base, "base"), (self.adapters[:1], "1 adapter"), (self.adapters, "8 adapters")):
            samplers = [samplers] if isinstance(samplers, tinker.SamplingClient) else samplers
            self._sample(samplers, kind, few, lengths.prompt, lengths.answer)
        self._sample([self.base], "base", many, lengths.prompt, lengths.answer)
        self._sample(self.adapters[:1], "1 adapter", many, lengths.prompt, lengths.answer)
        self._sample([self.base], "base", lengths.groups, lengths.prompt, lengths.answer, answers=lengths.groups)
        self._sample([self.base], "base", 1, lengths.prompt, lengths.answer)
        self._sample([self.base], "base", lengths.groups, lengths.long_prompt, lengths.short_answer)

    def _sample(
        self,
        samplers: Sequence[tinker.SamplingClient],
        kind: str,
        count: int,
        prompt: int,
        answer: int,
        *,
        answers: int = 1,
        runs: int = 3,
    ) -> None:
        rates = []
        for run in range(runs):
            started = time.perf_counter()
            futures = [
                self._submit_sample(samplers[index % len(samplers)], prompt, answer, 1000 * run + index, answers)
                for index in range(count)
            ]
            num_tokens = sum(len(sequence.tokens) for future in futures for sequence in future().sequences)
            rates.append(num_tokens / (time.perf_counter() - started))
        name = f"sampling, {count} x {answers}" if answers > 1 else f"sampling, {count}"
        self.add(
            f"{name} at once, {prompt:,} + {answer}, {kind}",
            {"tokens_per_s": statistics.median(rates[1:]), "first_burst": rates[0]},
        )

    def _submit_sample(
        self, sampler: tinker.SamplingClient, prompt: int, answer: int, seed: int, answers: int = 1
    ) -> Callable[[], types.SampleResponse]:
        params = types.SamplingParams(max_tokens=answer, temperature=1.0, seed=seed)
        return sampler.sample(
            types.ModelInput.from_ints(self.draw(prompt)), num_samples=answers, sampling_params=params
        ).result

    def rl(self) -> None:
        lengths, answers = self.lengths, max(2, self.lengths.groups // 2)
        self._rl_step(answers)  # of new shapes
        name = f"RL step, {lengths.groups} x {answers}, {lengths.prompt} + {lengths.long_answer}"
        self.add(name, self._rl_step(answers))

    def _rl_step(self, answers: int) -> Figures:
        lengths, client = self.lengths, self.clients[0]
        prompts = [self.draw(lengths.prompt) for _ in range(lengths.groups)]
        started = time.perf_counter()
        sampler = client.save_weights_and_get_sampling_client().result()
        published = time.perf_counter()
        params = types.SamplingParams(max_tokens=lengths.long_answer, temperature=1.0)
        futures = [
            sampler.sample(types.ModelInput.from_ints(tokens), num_samples=answers, sampling_params=params)
            for tokens in prompts
        ]
        groups = [future.result().sequences for future in futures]
        sampled = time.perf_counter()
        data = [
            build_rl_datum(tokens, sequence, index - answers / 2 + 0.5)
            for tokens, group in zip(prompts, groups, strict=True)
            for index, sequence in enumerate(group)
        ]
        train_s = time_run(lambda: wait_for_all(submit_step(client, data, "importance_sampling")))
        return {
            "step_s": sampled - started + train_s,
            "publish_s": published - started,
            "sample_s": sampled - published,
            "train_s": train_s,
        }

    def mixed(self) -> None:
        lengths, client = self.lengths, self.clients[0]
        data = [self.draw_datum(lengths.trained) for _ in range(lengths.sequences // 2)]
        num_trained, is_over = [0], threading.Event()

        def train() -> None:
            while not is_over.is_set():
                wait_for_all(submit_step(client, data))
                num_trained[0] += len(data) * lengths.trained

        thread = threading.Thread(target=train)
        thread.start()
        try:
            time.sleep(1.0)
            started, trained_before, num_sampled, bursts = time.perf_counter(), num_trained[0], 0, []
            while (seconds := time.perf_counter() - started) < lengths.mixed_s:
                futures = [
                    self._submit_sample(self.adapters[0], lengths.prompt, lengths.short_answer, index)
                    for index in range(lengths.groups)
                ]
                num_sampled += sum(len(sequence.tokens) for future in futures for sequence in future().sequences)
                bursts.append(time.perf_counter() - started - seconds)
            seconds, num_tokens = time.perf_counter() - started, num_trained[0] - trained_before
        finally:
            is_over.set()
            thread.join()
        figures = {"trained_per_s": num_tokens / seconds, "sampled_per_s": num_sampled / seconds}
        self.add("training beside samples", {**figures, "burst_s": statistics.median(bursts)})

    def latency(self) -> None:
        client, data = self.clients[0], [self.draw_datum(32)]
        actions: dict[str, Callable[[], object]] = {
            "forward_ms": lambda: client.forward(data, "cross_entropy").result(),
            "step_ms": lambda: wait_for_all(submit_step(client, data)),
            "one_token_ms": lambda: self._submit_sample(self.base, 3, 1, 0)(),
        }
        figures = {
            name: 1e3 * statistics.median(time_run(action) for _ in range(20)) for name, action in actions.items()
        }
        self.add("32 tokens", figures)


ROWS = ("train", "sample", "rl", "mixed", "latency", "long")
LEAST_ROW_S = 30.0
"""No row is begun with less time."""


def time_run(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def submit_step(
    client: tinker.TrainingClient, data: Sequence[types.Datum], loss: types.LossFnType = "cross_entropy"
) -> list[Callable[[], object]]:
    """A pass and an optimizer step; each of the functions waits for one."""
    return [client.forward_backward(list(data), loss).result, client.optim_step(ADAM).result]


def wait_for_all(waits: Sequence[Callable[[], object]]) -> None:
    for wait in waits:
        wait()


def build_rl_datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    tokens, before = np.array([*prompt, *sequence.tokens]), np.zeros(len(prompt) - 1, np.float32)
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": np.concatenate([before, np.asarray(sequence.logprobs, np.float32)]),
        "advantages": np.concatenate([before, np.full(len(sequence.tokens), advantage, np.float32)]),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in inputs.items()},
    )


def measure(
    name: str, quantize: str, args: argparse.Namespace, budget: Budget, add: Callable[[str, Figures], None]
) -> None:
    device = "cpu" if args.small else "cuda"
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
        write_random(shape_of(name, is_small=args.small, context=CONTEXT), Path(directory), device)
        if device == "cuda":
            torch.cuda.empty_cache()  # the server's
        model = f"bench/{name}"
        with start_server(f"{model}={directory}", "--quantize", quantize, "--device", device) as server:
            service = tinker.ServiceClient(base_url=server.url, api_key=API_KEY)
            started = time.perf_counter()
            futures = [service.create_lora_training_client(model, rank=RANK, seed=index) for index in range(ADAPTERS)]
            clients = [future.result() for future in futures]
            add("eight models from the start of the server", {"seconds": time.perf_counter() - started})
            bench = Bench(
                clients,
                service.create_sampling_client(base_model=model).result(),
                [client.save_weights_and_get_sampling_client().result() for client in clients],
                SMALL if args.small else Lengths(),
                add,
            )
            for row in args.rows:
                if budget.allows(f"{name} ({quantize}), {row}", 1.0 if args.small else LEAST_ROW_S):
                    getattr(bench, row)()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(ORDER), help=f"of {', '.join((*SHAPES, *QWEN3))}")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--quantize", nargs="+", choices=KINDS, default=["off"])
    parser.add_argument("--seconds", type=float, default=600.0, help="after these no row is begun")
    parser.add_argument("--small", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if unknown := sorted(set(args.models) - {*SHAPES, *QWEN3}):
        parser.error(f"unknown models: {', '.join(unknown)}; choose of {', '.join((*SHAPES, *QWEN3))}")
    if not args.small and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} finds no CUDA device here; --small tries this on a CPU")
    device = describe_machine() if args.small else torch.cuda.get_device_name()
    print(
        f"{device}; torch {torch.__version__}, {date.today()}\n\n| model | row | figures |\n|---|---|---|", flush=True
    )
    budget, figures, failures = Budget(args.seconds), {}, []
    for name in args.models:
        for quantize in args.quantize:
            label = name if quantize == "off" else f"{name}, {quantize}"

            def add(row: str, values: Figures, label: str = label) -> None:
                figures.setdefault(label, {})[row] = values
                cells = ", ".join(f"{key} {value:,.4g}" for key, value in values.items())
                print(f"| {label} | {row} | {cells} |", flush=True)
                write_json(args.json, figures)  # a machine may go away

            if budget.allows(f"all of {label}", 0.0 if args.small else 2 * LEAST_ROW_S):
                try:
                    measure(name, quantize, args, budget, add)
                except (tinker.TinkerError, RuntimeError) as error:
                    failures.append(f"{label}: {type(error).__name__}: {str(error)[:300]}")
    for line in (*(f"not run: {row}" for row in budget.skipped), *(f"FAILED {failure}" for failure in failures)):
        print(line)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
