"""Training on groups of answers to one prompt, beside as many data of the same sizes that share nothing.

    python benchmarks/shared_prompts.py                       # m50, float32; prompts and answers of several lengths
    python benchmarks/shared_prompts.py --dtypes bfloat16 --sizes m50 --groups 1 8 --shapes 512x64 256x512

Through the service, with the SDK: each step is one forward_backward with `importance_sampling` over groups, and an
optimizer step. The two kinds alternate, so that the machine's state is the same for both. Prints medians; with --json
FILE also writes the figures. The last column is how many fewer tokens go through the model: the most to be gained.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import tinker
from harness import API_KEY, describe_machine, start_server, summarize_times, time_runs, write_json
from models import SIZES, make
from tinker import types

VOCABULARY = 8192
PROMPTS = 2


def draw_answers(
    rng: np.random.Generator, shape: tuple[int, int], group: int, *, is_shared: bool
) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Inputs and loss inputs of `group` answers to each of PROMPTS prompts; not `is_shared`: to a prompt of its own."""
    num_prompt, num_answer = shape
    for _ in range(PROMPTS):
        prompt = rng.integers(1, VOCABULARY, num_prompt)
        for _ in range(group):
            if not is_shared:
                prompt = rng.integers(1, VOCABULARY, num_prompt)
            tokens = np.concatenate([prompt, rng.integers(1, VOCABULARY, num_answer)])
            advantages = np.zeros(len(tokens) - 1, np.float32)
            advantages[num_prompt - 1 :] = rng.normal()
            logprobs = np.full(len(tokens) - 1, -9.0, np.float32)
            yield tokens[:-1].tolist(), {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": advantages}


def make_data(rng: np.random.Generator, shape: tuple[int, int], group: int, *, is_shared: bool) -> list[types.Datum]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens),
            loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in arrays.items()},
        )
        for tokens, arrays in draw_answers(rng, shape, group, is_shared=is_shared)
    ]


def count_fewer(shape: tuple[int, int], group: int) -> float:
    num_prompt, num_answer = shape
    return group * (num_prompt + num_answer) / (num_prompt + group * num_answer)


def measure(url: str, model: str, shape: tuple[int, int], group: int, runs: int) -> dict[str, float]:
    client = tinker.ServiceClient(base_url=url, api_key=API_KEY)
    training = client.create_lora_training_client(base_model=model, rank=32).result()
    rng = np.random.default_rng(0)

    def step(data: list[types.Datum]) -> None:
        training.forward_backward(data, "importance_sampling").result()
        training.optim_step(types.AdamParams(learning_rate=1e-5)).result()

    times: dict[bool, list[float]] = {False: [], True: []}
    for run in range(runs + 1):
        for is_shared in (False, True):
            data = make_data(rng, shape, group, is_shared=is_shared)
            (elapsed_ms,) = time_runs(lambda data=data: step(data), 1, warm_up=0)
            if run:
                times[is_shared].append(elapsed_ms)
    distinct, shared = (summarize_times(times[is_shared]) for is_shared in (False, True))
    return {
        "distinct_ms": distinct["p50_ms"],
        "shared_ms": shared["p50_ms"],
        "speedup": distinct["p50_ms"] / shared["p50_ms"],
        "fewer_tokens": count_fewer(shape, group),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=["m50"])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--groups", nargs="+", type=int, default=[8])
    parser.add_argument("--shapes", nargs="+", default=["512x64", "256x512", "256x256"], help="tokens: PROMPTxANSWER")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{describe_machine()}; {PROMPTS} groups a step\n")
    print(f"{'model':<18}{'prompt x answer':>18}{'group':>7}{'distinct ms':>13}{'shared ms':>11}", end="")
    print(f"{'speedup':>9}{'tokens':>8}")
    figures = {}
    for size in args.sizes:
        for dtype in args.dtypes:
            with tempfile.TemporaryDirectory() as scratch:
                model = f"bench/{size}={make(size, Path(scratch) / size)}"
                with start_server(model, settings={"DTYPE": dtype}) as server:
                    for shape in args.shapes:
                        for group in args.groups:
                            lengths = tuple(map(int, shape.split("x")))
                            row = measure(server.url, f"bench/{size}", (lengths[0], lengths[1]), group, args.runs)
                            figures[f"{size}/{dtype}/{shape}/{group}"] = row
                            print(
                                f"{size + ' ' + dtype:<18}{shape:>18}{group:>7}{row['distinct_ms']:>13.0f}"
                                f"{row['shared_ms']:>11.0f}{row['speedup']:>9.2f}{row['fewer_tokens']:>8.2f}",
                                flush=True,
                            )
    write_json(args.json, figures)


if __name__ == "__main__":
    main()
