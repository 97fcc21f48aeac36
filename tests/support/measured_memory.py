"""Measures peaks of memory of training steps on a CPU against the plan, and prints a line of JSON for each.
test_plan.py runs it in a separate process. A peak is the kernel's counter of the resident set, reset before each step,
or that of anonymous memory, read every millisecond, if it is larger: a system that is short of memory takes pages of
files from the resident set meanwhile.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Self

import numpy as np
import torch
from transformers import AutoConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

from tinsmith.backends import run_to_end
from tinsmith.backends.distributed import Degrees, Group, ShardedBackend
from tinsmith.backends.torch import TorchBackend
from tinsmith.base_models import read_shape
from tinsmith.plan import memory
from tinsmith.plan.architecture import read_directory, tower_numbers
from tinsmith.runtime import malloc
from tinsmith.types import Datum, LoraSpec, Pass, PassResult

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import models  # pyright: ignore[reportMissingImports]

VOCABULARY = 8192


def main() -> None:
    torch.set_num_threads(1)
    for model_type in ("qwen3_vl", "gemma3"):
        sys.stdout.write(json.dumps(_tower(model_type)) + "\n")
    with tempfile.TemporaryDirectory() as directory:
        for size, tokens in (("tiny", 4096), ("m50", 1024)):
            path = models.make(size, Path(directory) / size)
            for recompute in ("off", "on"):
                backend = TorchBackend(
                    read_shape(size, path), device="cpu", recompute=recompute, max_tokens_per_microbatch=tokens
                )
                row = {"size": size, "recompute": recompute, **_step(backend, path, tokens, recompute)}
                sys.stdout.write(json.dumps(row) + "\n")
                del backend
        _on_context_ranks(Path(directory) / "tiny", 4096)


def _on_context_ranks(path: Path, tokens: int) -> None:
    """Run this process as one of two ranks, each with half of the sequence."""
    group = Group(2, device="cpu", timeout_s=600.0)
    for recompute in ("off", "on"):
        options = {"recompute": recompute, "max_tokens_per_microbatch": str(tokens // 2)}
        backend = ShardedBackend(read_shape("tiny", path), Degrees(context=2), group, **options)
        row = {"context": 2, "recompute": recompute, **_step(backend, path, tokens, recompute, ranks=2)}
        sys.stdout.write(json.dumps(row) + "\n")
    group.close()


def _step(
    backend: TorchBackend | ShardedBackend, path: Path, tokens: int, recompute: str, ranks: int = 1
) -> dict[str, int]:
    """The expected and the measured peak of a training step over a sequence of `tokens`."""
    backend.create_model("m", LoraSpec(8))
    run_to_end(backend.run_passes([_pass(64)]))
    with _Peak() as peak:
        (result,) = run_to_end(backend.run_passes([_pass(tokens)]))
    assert isinstance(result, PassResult), result
    architecture = read_directory(path)
    estimate = memory.activations(architecture, dtype="float32", cuda=False)
    expected = estimate.num_bytes(tokens // ranks, recompute=recompute == "on")
    expected += 4 * memory.adapter_numbers(architecture, 8)  # the gradient of the step
    return {"expected": expected, "measured": peak.num_bytes}


def _tower(model_type: str) -> dict[str, object]:
    """A vision tower with an image of 512 x 512 pixels in patches of 16, 4 layers."""
    sizes: dict[str, object] = {"hidden_size": 256, "intermediate_size": 1024, "patch_size": 16}
    if model_type == "qwen3_vl":
        sizes |= {"depth": 4, "num_heads": 4, "out_hidden_size": 256, "deepstack_visual_indexes": []}
        config = AutoConfig.for_model(model_type, vision_config=sizes)
        tower, num_tokens = Qwen3VLVisionModel(config.vision_config).eval(), 256

        def run(rows: int) -> None:
            tower(torch.randn(rows * 32, 16 * 16 * 3 * 2), grid_thw=torch.tensor([[1, rows, 32]]))
    else:
        sizes |= {"num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 512}
        config = AutoConfig.for_model(model_type, vision_config=sizes, text_config={}, mm_tokens_per_image=256)
        siglip, num_tokens = SiglipVisionModel(config.vision_config).eval(), 256

        def run(rows: int) -> None:
            siglip(pixel_values=torch.randn(1, 3, 512, 512))

    with torch.no_grad():
        run(2)
        with _Peak() as peak:
            run(32)
    expected = memory.tower_bytes(tower_numbers(config), num_tokens, dtype="float32")
    return {"size": model_type, "tower": True, "expected": expected, "measured": peak.num_bytes}


def _pass(tokens: int) -> Pass:
    rng = np.random.default_rng(0)
    inputs = {"target_tokens": rng.integers(0, VOCABULARY, tokens), "weights": np.ones(tokens, np.float32)}
    return Pass(
        "r", "m", (Datum(rng.integers(0, VOCABULARY, tokens).astype(np.int32), inputs),), "cross_entropy", {}, False
    )


class _Peak:
    """The most memory of this process inside of the block, in bytes, beyond what it has at its beginning."""

    def __enter__(self) -> Self:
        gc.collect()  # what earlier steps left would be freed in this one
        malloc.trim()
        Path("/proc/self/clear_refs").write_text("5")
        self._resident, self._anonymous = _resident("VmRSS"), _resident("RssAnon")
        self.num_bytes = 0
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.num_bytes = max(self.num_bytes, _resident("RssAnon") - self._anonymous)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._watcher.join()
        self.num_bytes = max(self.num_bytes, _resident("VmHWM") - self._resident)


def _resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise LookupError(key)


if __name__ == "__main__":
    main()
