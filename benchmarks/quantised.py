"""The cost of a quantised base: loss after fine-tuning, memory and speed, compared with the same base in full.

    python benchmarks/quantised.py                          # nano; about a minute on a calm machine
    python benchmarks/quantised.py --steps 60 --json quantised.json

In process, without a service. The same fine-tuning (nano's own instruction tasks, pig latin only, one answer for each
question) over a base in float32, in int8 and in nf4, each from the same adapter; the loss is the mean over the tokens
of answers to held-out questions, before and after. Memory is that of the linears that carry adapters, without the
unembedding. A small model has the most to lose: the larger a matrix, the better it is quantised.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
from invariance import print_rows

from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.quantization import KINDS
from tinsmith.base_models import nano, read_shape
from tinsmith.types import AdamParams, Datum, LoraSpec, OptimStep, Pass, PassResult

TASK = "pig_latin"
BATCH, HELD_OUT = 8, 32
ADAM = AdamParams(2e-3)


def datum_of(backend: TorchBackend, example: nano.PromptExample) -> Datum:
    chat = [{"role": "user", "content": example.prompt}]
    tokenizer = backend.base.tokenizer
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    answer = tokenizer.encode(f"{example.answer}<|im_end|>")
    tokens = np.array([*prompt, *answer])
    weights = np.zeros(len(tokens) - 1, np.float32)
    weights[len(prompt) - 1 :] = 1
    return Datum(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:].astype(np.int64), "weights": weights})


def data_of(backend: TorchBackend, seed: int, num: int, split: str) -> tuple[Datum, ...]:
    rng = random.Random(seed)
    return tuple(datum_of(backend, nano.draw(TASK, rng, split)) for _ in range(num))  # pyright: ignore[reportArgumentType]


def mean_loss(backend: TorchBackend, data: tuple[Datum, ...], *, forward_only: bool) -> float:
    (result,) = run_to_end(backend.run_passes([Pass("r", "m", data, "cross_entropy", {}, forward_only)]))
    assert isinstance(result, PassResult), result
    return result.metrics["loss:sum"] / sum(float(np.sum(np.asarray(datum.inputs["weights"]))) for datum in data)


def measure_kind(kind: str, steps: int) -> dict[str, object]:
    shape = read_shape(nano.MODEL_NAME, nano.path())
    backend = TorchBackend(shape, device="cpu", dtype="float32", quantize=kind)
    backend.create_model("m", LoraSpec(16, seed=0))
    held_out = data_of(backend, -1, HELD_OUT, "heldout")
    before = mean_loss(backend, held_out, forward_only=True)
    started = time.perf_counter()
    for step in range(steps):
        mean_loss(backend, data_of(backend, step, BATCH, "train"), forward_only=False)
        backend.optim_step([OptimStep("o", "m", ADAM)])
    seconds = time.perf_counter() - started
    after = mean_loss(backend, held_out, forward_only=True)
    linears = [linear for linear in backend.base.targets.values() if linear.group != "unembed"]
    stored = [[x.weight] if x.codes is None else x.codes.tensors() for x in linears]
    num_bytes = sum(tensor.nbytes for tensors in stored for tensor in tensors)
    return {
        "base": kind,
        "before": before,
        "after": after,
        "linears MiB": num_bytes / 2**20,
        "steps/s": steps / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    rows = []
    for kind in args.kinds:
        rows.append(measure_kind(kind, args.steps))
        print(f"{kind}: {rows[-1]['after']:.4f}", flush=True)
    print_rows("Mean loss of held-out answers, before and after fine-tuning", rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
