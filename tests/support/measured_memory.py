"""Peaks of memory of one training step on a CPU, beside what the plan expects. test_plan.py runs it in its own process.

Prints a line of JSON for each. The peak of the resident set is the kernel's own, set back before each step.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.base_models import read_shape
from tinsmith.plan import memory
from tinsmith.plan.architecture import read_directory
from tinsmith.types import Datum, LoraSpec, Pass

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import models  # pyright: ignore[reportMissingImports]

VOCABULARY = 8192


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        for size, tokens in (("tiny", 4096), ("m50", 1024)):
            path = models.make(size, Path(directory) / size)
            for recompute in ("off", "on"):
                backend = TorchBackend(
                    read_shape(size, path), device="cpu", recompute=recompute, max_tokens_per_microbatch=tokens
                )
                backend.create_model("m", LoraSpec(8))
                run_to_end(backend.run_passes([_pass(64)]))
                before = _resident("VmRSS")
                Path("/proc/self/clear_refs").write_text("5")
                run_to_end(backend.run_passes([_pass(tokens)]))
                measured = _resident("VmHWM") - before
                architecture = read_directory(path)
                kept = memory.activations(architecture, dtype="float32", cuda=False)
                expected = kept.num_bytes(tokens, recompute=recompute == "on")
                expected += 4 * memory.adapter_numbers(architecture, 8)  # the gradient of the step
                found = {"size": size, "recompute": recompute, "expected": expected, "measured": measured}
                sys.stdout.write(json.dumps(found) + "\n")


def _pass(tokens: int) -> Pass:
    rng = np.random.default_rng(0)
    inputs = {"target_tokens": rng.integers(0, VOCABULARY, tokens), "weights": np.ones(tokens, np.float32)}
    return Pass(
        "r", "m", (Datum(rng.integers(0, VOCABULARY, tokens).astype(np.int32), inputs),), "cross_entropy", {}, False
    )


def _resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise LookupError(key)


if __name__ == "__main__":
    main()
