"""Well-known models: their configurations, what their publishers say of their size, and docs/plan.md made from both.

`tests/data/known_models.json` has the facts: of each configuration, what a count needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tinsmith.cli.plan import billions
from tinsmith.plan import memory
from tinsmith.plan.architecture import Architecture, read
from tinsmith.plan.degrees import Degrees, Plan, Wanted, choose, needs_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "plan.md"
FACTS = Path(__file__).parents[1] / "data" / "known_models.json"

DEVICE_BYTES = 80_000_000_000
GIBIBYTE = 2**30


@dataclass(frozen=True, slots=True)
class Known:
    """`published` in billions; `active` likewise, of mixtures."""

    name: str
    published: float
    active: float | None
    config: Mapping[str, object]

    @property
    def model(self) -> Architecture:
        return read(self.config, self.name)


KNOWN = tuple(
    Known(one["name"], one["billions"], one["active_billions"], cast("Mapping[str, object]", one["config"]))
    for one in json.loads(FACTS.read_text())
)

INTRODUCTION = """# Where a model fits

`tinsmith doctor MODEL --gpus N --memory M` says what a base model takes of each device, how to lay it over N devices of
M each, and why; it needs the model's `config.json` and nothing else:

```
tinsmith doctor /data/models/Qwen3-32B --gpus 8 --memory 80GB
tinsmith doctor config.json --gpus 2 --memory 24GiB --rank 16 --context 4096 --quantize nf4
tinsmith doctor Qwen/Qwen3-8B --gpus 4 --memory 40GiB --tensor-parallel 2 --data-parallel 2 --json
```

MODEL is a directory, a `config.json`, or a base model that the server would know. What is asked for with
`--tensor-parallel`, `--data-parallel` and `--shard-base` is taken as it is, or refused with the reason: heads that do
not divide, or how many GiB are missing. The command ends with 0 if the plan fits, 1 if nothing does, 2 if what was
asked for is refused. An engine holds its settings against the same plan before it loads a weight.

## What is counted

- **base**: every frozen number in `--dtype`, or in the bits of `--quantize`; on a CPU a second copy of linears that are
  laid out for decoding. Tensor parallelism cuts heads and MLPs; embeddings, the unembedding, norms and routers
  are on every device. A base that is sharded over data ranks is there in parts, and one layer whole. A mixture's
  experts are sharded and not cut; a quantised base is neither.
- **adapters**: on every device, in float32 with gradient, two moments and the gradient of the step that runs: 20 bytes
  a number, and a copy in the base's format.
- **activations**: of a packed micro-batch (1,024 tokens on a CPU, 8,192 with CUDA, or one longer sequence), either kept
  or computed again layer by layer; logits exist for some rows at a time.
- **keys and values**: of one context. More sequences want more; the cache takes what nobody else does.
- **the process**: 4 % of the device and 1.5 GiB (0.5 GiB on a CPU).

Sizes that were measured on a CPU lie within a factor of 1.5 of what is said here (`tests/unit/test_plan.py`).

## What is preferred

1. Data parallel alone: each device has the whole base, and gradients of adapters are all that is exchanged.
2. Tensor parallel within a machine (up to 8 devices), with groups of it in data parallel.
3. A base sharded over data ranks; then both. Layers are gathered for each micro-batch and for each decoded token.
4. Context parallel or pipeline parallel where nothing else fits: the plan names what would be needed, and that it is
   not supported here.

Training that keeps its activations beside sampling comes before training that computes them again, and that before the
two taking turns with the memory ([howto/memory.md](howto/memory.md)).

## Well-known models

Rank 32 on every linear, one adapter, sequences of up to 8,192 tokens, bfloat16, devices of 80 GB. *Counted* is what
`tinsmith` makes of the configuration; `transformers` builds exactly as many. The last two columns are plans: DP 4 x TP
2 is four groups of two devices, *again* says that activations are computed again, *turns* that training and sampling
take turns.

| model | counted | published | active | base | adapter | keys and values a token | 1 device | 8 devices |
|---|---|---|---|---|---|---|---|---|
"""

AFTER = """
A mixture of experts has large adapters: each expert has its own half of them. Gemma 3 is counted without its vision
tower, DeepSeek-V3 without the layer that predicts a second token. What OpenAI calls active leaves out the embeddings.
Made by `scripts/write-plan` from `tests/data/known_models.json`.
"""


def render() -> str:
    lines = []
    for known in KNOWN:
        model = known.model
        needs = needs_of(model, Wanted(1, DEVICE_BYTES), Degrees())
        per_token = memory.key_value_bytes(model, dtype="bfloat16") / 1024
        plans = [_in_short(choose(model, Wanted(devices, DEVICE_BYTES))) for devices in (1, 8)]
        published = f"{known.published:g} B" + (f", {known.active:g} B active" if known.active else "")
        cells = [
            known.name,
            billions(model.num_parameters),
            published,
            billions(model.num_active) if model.has_experts else "",
            f"{needs.base / GIBIBYTE:.1f} GiB",
            f"{needs.adapters / GIBIBYTE:.2f} GiB",
            f"{per_token:,.0f} KiB",
            *plans,
        ]
        lines.append("| " + " | ".join(cells) + " |\n")
    return INTRODUCTION + "".join(lines) + AFTER


def _in_short(plan: Plan) -> str:
    if not plan.fits:
        return f"lacks {plan.missing_bytes / GIBIBYTE:,.0f} GiB each"
    degrees = plan.degrees
    parts = [f"DP {degrees.data}" if degrees.tensor == 1 else f"DP {degrees.data} x TP {degrees.tensor}"]
    if degrees.devices == 1:
        parts = ["fits"]
    if degrees.shard_base:
        parts.append("sharded")
    if plan.mode != "kept":
        parts.append({"recomputed": "again", "in turns": "turns"}[plan.mode])
    return ", ".join(parts)
