"""Well-known models: their configurations, their published sizes, and docs/plan.md, which is rendered from both.
`src/tinsmith/plan/known_models.json` has the fields of each configuration that the planner needs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tinsmith.cli.plan import billions
from tinsmith.plan import memory
from tinsmith.plan.architecture import Architecture, read
from tinsmith.plan.degrees import Degrees, Plan, Workload, choose, estimate_needs
from tinsmith.plan.speed import DEVICES, StepShare, step_time, traffic

DOCUMENT = Path(__file__).parents[2] / "docs" / "plan.md"
FACTS = Path(__file__).parents[2] / "src" / "tinsmith" / "plan" / "known_models.json"

DEVICE_BYTES = 80_000_000_000
GIBIBYTE = 2**30


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """`published` parameters and, for mixtures, `active` ones, both in billions."""

    name: str
    published: float
    active: float | None
    config: Mapping[str, object]

    @property
    def model(self) -> Architecture:
        return read(self.config, self.name)


PUBLISHED_MODELS = tuple(
    PublishedModel(row["name"], row["billions"], row["active_billions"], cast("Mapping[str, object]", row["config"]))
    for row in json.loads(FACTS.read_text())
)

INTRODUCTION = """# Where a model fits

`tinsmith doctor MODEL` estimates the memory that a base model needs on each device and proposes how to divide it.
It reads only the model's `config.json`:

```
tinsmith doctor /data/models/Qwen3-32B --gpus 8 --memory 80GB
tinsmith doctor config.json --gpus 2 --memory 24GiB --rank 16 --context 4096 --quantize nf4
```

MODEL is a directory, a `config.json`, or a base model that the server knows. The last line is a command that serves the
plan or, where nothing fits, a smaller one. The exit status is 0 if the plan fits, 1 if nothing fits, 2 if the given
degrees are refused. An engine checks its settings against the same plan before it loads weights.

Speeds of GPUs are estimated from their data sheets, including what devices exchange; a CPU's from matmuls that are
measured on the spot.

## What is counted

- **base**: every frozen parameter in `--dtype` or `--quantize`; of quantised experts also a product's matrices, on a
  CPU a second copy of linears up to 256 MiB. Tensor parallelism divides heads and MLPs; embeddings, unembedding, norms
  and routers are on every device.
  `--shard-base` keeps a part of each layer and one whole layer. Of several stages the largest counts.
- **adapters**: 8 bytes a parameter that a device holds (float32 weight, the step's gradient) and a copy in the base's
  format, 12 bytes a parameter that it steps (accumulated gradient, two moments). It holds all, but of routed experts
  with expert parallelism only those of its experts; it steps its part of those that several devices hold.
- **activations** of a packed micro-batch (1,024 tokens on a CPU, 8,192 with CUDA, twice that of small models, or one
  longer sequence), kept or recomputed by layer. Stages keep those of several micro-batches.
- **KV cache** of one context; more sequences use what is left.
- **the process**: 4 % of the device and 1.5 GiB (0.5 GiB on a CPU).

Sizes measured on a CPU are within a factor of 1.5 of these estimates (`tests/unit/test_plan.py`).

## What is preferred

The plan is the first of these that fits: data parallel alone; for a mixture, its experts over the fewest devices;
tensor parallel within a machine (up to 8 devices) in data-parallel groups; a sharded base; both; each of these with the
lowest context-parallel degree; with the fewest stages; and with experts spread within stages. Keeping activations is
preferred to recomputing them, and recomputing to alternating between training and sampling ([memory](howto/memory.md)).

## Well-known models

The table is for one adapter of rank 32 on every linear, sequences of up to 8,192 tokens, bfloat16 and devices of 80 GB.
Parameters (in billions) are those that `transformers` builds; *active* ones compute a token of a mixture. The last
columns are plans: DP 4 x TP 2 is four groups of two devices, EP 8 spreads experts over 8; *again* means recomputed
activations, *turns* that training and sampling alternate.

| model | parameters (active) | base, GiB | adapter, GiB | KV cache a token, KiB | 1 device | 8 devices |
|---|---|---|---|---|---|---|
"""

EXCHANGES = """
## What devices exchange

Estimated, not measured: a step of 8,192 tokens for each tensor group, on H100s with 450 GB/s within a machine of 8 and
50 GB/s between machines, each used to 70 %, and tokens that choose experts evenly. With data parallelism alone only
gradients are exchanged, for at most 2 % of a step of Llama-3.1-8B.

| model | devices | plan | GB sent by a device | seconds | exchanges |
|---|---|---|---|---|---|
"""

AFTER = """
Gemma 3 is counted without its vision tower, DeepSeek-V3 without its multi-token-prediction layer. This page is made by
`scripts/write-plan` from `src/tinsmith/plan/known_models.json`.
"""


def render() -> str:
    lines = []
    for published_model in PUBLISHED_MODELS:
        model = published_model.model
        needs = estimate_needs(model, Workload(1, DEVICE_BYTES), Degrees())
        per_token = memory.key_value_bytes(model, dtype="bfloat16") / 1024
        plans = [_in_short(choose(model, Workload(devices, DEVICE_BYTES))) for devices in (1, 8)]
        cells = [
            published_model.name,
            billions(model.num_parameters).removesuffix(" B")
            + (f" ({billions(model.num_active).removesuffix(' B')})" if model.has_experts else ""),
            f"{needs.base / GIBIBYTE:.1f}",
            f"{needs.adapters / GIBIBYTE:.2f}",
            f"{per_token:,.0f}",
            *plans,
        ]
        lines.append("| " + " | ".join(cells) + " |\n")
    return INTRODUCTION + "".join(lines) + EXCHANGES + "".join(_exchanges()) + AFTER


def _exchanges() -> Iterator[str]:
    device = next(device for device in DEVICES if device.name == "H100 SXM")
    step_share = StepShare(memory.MICRO_BATCH[True])
    models = {published_model.name: published_model.model for published_model in PUBLISHED_MODELS}
    for name, devices in itertools.product(("Llama-3.1-70B", "Qwen3-235B-A22B"), (8, 64)):
        plan = choose(models[name], Workload(devices, device.memory_bytes))
        exchanged, step = (
            traffic(plan.model, plan.workload, plan.degrees, step_share),
            step_time(plan, device, step_share),
        )
        sizes = (exchanged.tensor, exchanged.logits, exchanged.experts, exchanged.base, exchanged.gradients)
        share = f"{1 - step.compute / step.total:.0%}"
        cells = [name, str(devices), _in_short(plan)]
        if plan.fits:
            cells += [f"{sum(sizes) / 1e9:.0f}", f"{step.total:.1f}", share]
            yield "| " + " | ".join(cells) + " |\n"


def _in_short(plan: Plan) -> str:
    if not plan.fits:
        return f"lacks {plan.missing_bytes / GIBIBYTE:,.0f} GiB"
    degrees = plan.degrees
    ways = {"DP": degrees.data, "CP": degrees.context, "PP": degrees.pipeline, "TP": degrees.tensor}
    parts = [" x ".join(f"{way} {degree}" for way, degree in ways.items() if way == "DP" or degree > 1)]
    if degrees.devices == 1:
        parts = ["fits"]
    if degrees.experts > 1:
        parts.append(f"EP {degrees.experts}")
    if degrees.shard_base:
        parts.append("sharded")
    if plan.mode != "kept":
        parts.append({"recomputed": "again", "in turns": "turns"}[plan.mode])
    return ", ".join(parts)
