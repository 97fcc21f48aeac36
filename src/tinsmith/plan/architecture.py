"""What a base model is made of: its linears, its other numbers, what it caches.

`read` has transformers build the model of a configuration on the meta device, where it takes no memory, and counts what
is there. No weight is read. A model with layers that neither attend nor keep a known state is refused by name.
Where the model's files are there, `size_of_files` is the truth about their bytes, and the count is compared with it.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tinsmith.errors import SettingsError
from tinsmith.plan.mixers import MixerLinears, is_mixer, kept_numbers, state_numbers

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

Config = Mapping[str, object]

WRITTEN_OUT = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
"""Layers that `backends.torch.transformer` computes itself."""

NOT_ADAPTED = frozenset({"gate", "router", "shared_expert_gate", "wg"})
"""Last names of linears that choose experts: training them on part of the batch would change the routing of all."""

ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention"})
STATE_KINDS = frozenset({"linear_attention", "conv", "hybrid"})
"""Kinds of layers that keep a state; 'hybrid' ones attend, too."""

OTHER_KINDS = frozenset({"mlp", "moe"})
"""Kinds of layers in which no token meets another."""

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
"""What transformers would replace by a default of its own, and a plan must not."""

OTHER_NAMES = {"max_position_embeddings": "model_max_length"}
"""What some families call these."""

CHOSEN = ("num_experts_per_tok", "moe_k", "top_k")
"""What configurations call the number of experts of one token."""

FUSED = frozenset({"qkv_proj", "query_key_value", "c_attn"})
"""Linears that make queries, keys and values."""

CUTS = {"colwise": "outputs", "colwise_gather_output": "outputs", "rowwise": "inputs", "rowwise_split_input": "inputs"}
"""What each style of transformers' plans for tensor parallelism divides."""

MOST_HEADER_BYTES = 100 * 2**20
"""The safetensors format allows no longer header."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix that `layers` layers have, each `copies` times: once, or for every expert. `met` is how many of the
    copies one token goes through. `along` is what tensor parallelism cuts: its outputs, its inputs, or nothing.
    """

    name: str
    group: str  # 'attn', 'mlp' or 'unembed'
    inputs: int
    outputs: int
    layers: int
    along: str = "outputs"
    copies: int = 1
    met: int = 1
    shared: str = ""  # the matrix of its adapter that all experts have in common: 'A', 'B'
    keeps_state: bool = False

    @property
    def numbers(self) -> int:
        return self.inputs * self.outputs * self.layers * self.copies

    @property
    def numbers_met(self) -> int:
        return self.inputs * self.outputs * self.layers * self.met

    def adapter_numbers(self, rank: int) -> int:
        a_copies, b_copies = (1 if self.shared == matrix else self.copies for matrix in "AB")
        return rank * self.layers * (self.inputs * a_copies + self.outputs * b_copies)


@dataclass(frozen=True, slots=True)
class Architecture:
    """`linears` may carry adapters and are most of a model; `other_numbers` are norms, biases, routers and sinks."""

    model_type: str
    layers: int
    hidden: int
    vocab: int
    context: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    tied: bool
    linears: tuple[Linear, ...]
    other_numbers: int
    written_out: bool
    attending: int
    """Layers that cache keys and values."""

    state_numbers: int = 0
    """What the other layers keep of a sequence."""

    mixer_numbers: float = 0.0
    """What they keep of a token for backward, in float32, beside what their linears do."""

    @property
    def embedding_numbers(self) -> int:
        return self.vocab * self.hidden

    @property
    def unembedding(self) -> Linear:
        return Linear("lm_head", "unembed", self.hidden, self.vocab, 1)

    @property
    def num_parameters(self) -> int:
        """As transformers counts them; a tied embedding once."""
        ends = self.embedding_numbers * (1 if self.tied else 2)
        return sum(linear.numbers for linear in self.linears) + ends + self.other_numbers

    @property
    def num_active(self) -> int:
        """What one token meets: all but the matrices of experts that it did not choose."""
        return self.num_parameters - sum(linear.numbers - linear.numbers_met for linear in self.linears)

    @property
    def has_experts(self) -> bool:
        return any(linear.copies > 1 for linear in self.linears)

    def layer_numbers(self) -> int:
        """The largest share of one layer, which sharding over data ranks gathers while it is computed."""
        per_layer: dict[int, int] = {}
        for linear in self.linears:
            per_layer[linear.layers] = per_layer.get(linear.layers, 0) + linear.numbers // linear.layers
        every = per_layer.pop(self.layers, 0)
        return every + max(per_layer.values(), default=0)


def read(config: Config, where: str = "config.json") -> Architecture:
    """Raises SettingsError for a model that transformers does not know, or that is not counted here."""
    nested = config.get("text_config")
    try:
        return _read(json.dumps(nested if isinstance(nested, Mapping) else config, sort_keys=True))
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from None


@lru_cache(maxsize=64)
def _read(text: str) -> Architecture:
    given = cast("dict[str, object]", json.loads(text, object_hook=_number))
    model = _on_meta(given)
    config, decoder = model.config, model.get_decoder()
    embeddings = cast("nn.Embedding", model.get_input_embeddings())
    kinds = list(getattr(config, "layer_types", None) or ())
    mixers = [module for module in decoder.modules() if is_mixer(module)]
    known = ATTENTION_KINDS | OTHER_KINDS | (STATE_KINDS if mixers else frozenset())
    if other := sorted(set(kinds) - known):
        raise _refusal(given, f"it has layers of kind {', '.join(other)}")
    linears = tuple(_linears(decoder, config))
    if not any(linear.group == "attn" for linear in linears):
        raise _refusal(given, "it has no linear projections of attention")
    heads = cast(int, config.num_attention_heads)
    try:
        key_heads, key_dim, value_dim = _cached(config, heads, linears)
    except RuntimeError as error:
        raise _refusal(given, f"its layers do not cache alike ({error})") from error
    head = model.get_output_embeddings()
    tied = head is None or head.weight is embeddings.weight
    ends = embeddings.weight.numel() * (1 if tied else 2)
    return Architecture(
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        context=getattr(config, "model_max_length", None) or config.max_position_embeddings,
        heads=heads,
        key_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        tied=tied,
        linears=linears,
        other_numbers=model.num_parameters() - ends - sum(linear.numbers for linear in linears),
        written_out=all(type(layer).__name__ in WRITTEN_OUT for layer in getattr(decoder, "layers", [None])),
        attending=sum(kind in ATTENTION_KINDS or kind == "hybrid" for kind in kinds) or config.num_hidden_layers,
        state_numbers=sum(state_numbers(module) for module in mixers),
        mixer_numbers=sum(kept_numbers(module) for module in mixers),
    )


def _on_meta(given: dict[str, object]) -> PreTrainedModel:
    """Neither code nor weights of the model's own are loaded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        made = type(AutoConfig.for_model(str(given.get("model_type"))))
    except ValueError:
        raise _refusal(given, "transformers does not know it") from None
    for key in REQUIRED:
        if key == "num_hidden_layers" and isinstance(given.get("layers_block_type"), list):
            continue  # it has one entry for each
        value = given.get(key, given.get(made.attribute_map.get(key, OTHER_NAMES.get(key, key))))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SettingsError(f"{key} is {value!r}; a plan needs a whole number there")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(made.from_dict(given), trust_remote_code=False)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise _refusal(given, f"transformers cannot build it ({reason})") from error


def _number(found: dict[str, object]) -> object:
    """The object by which transformers writes a number that JSON does not have, such as infinity."""
    return float(str(found["__float__"])) if found.keys() == {"__float__"} else found


def _refusal(given: Config, reason: str) -> SettingsError:
    return SettingsError(f"model_type {given.get('model_type')!r} is not one that a plan counts: {reason}")


def _cached(config: PreTrainedConfig, heads: int, linears: Sequence[Linear]) -> tuple[int, int, int]:
    """Heads of keys and values, and their sizes. Latent attention caches what attention sees, those of every head.
    Raises RuntimeError if layers differ.
    """
    if getattr(config, "kv_lora_rank", None):
        return heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    key_dim = cast(int, getattr(config, "head_dim", None) or config.hidden_size // heads)
    found = set()
    for linear in linears:
        last = linear.name.rpartition(".")[2]
        if linear.keeps_state:
            continue
        if last in ("k_proj", "v_proj"):
            found.add(linear.outputs)
        elif last in FUSED:
            found.add((linear.outputs - heads * key_dim) // 2)
    if len(found) != 1:
        raise RuntimeError(f"keys and values of {sorted(found)} numbers")
    return found.pop() // key_dim, key_dim, key_dim


def _linears(decoder: nn.Module, config: PreTrainedConfig) -> Iterator[Linear]:
    """Those that may carry adapters, each with the number of layers that have it."""
    from torch import nn

    plan = cast("Mapping[str, str]", getattr(config, "base_model_tp_plan", None) or {})
    found: Counter[tuple[str, int, int, int]] = Counter()
    mixed, stateful = MixerLinears.of(decoder), set[str]()
    for path, module in decoder.named_modules():
        pattern = re.sub(r"\d+", "*", path)
        if module in mixed.all:
            for last, outputs in _adapted_parts(module, pattern, mixed):
                stateful.add(last)
                found[last, cast(int, module.in_features), outputs, 1] += 1
        elif type(module) is nn.Linear and NOT_ADAPTED.isdisjoint(path.split(".")):
            found[pattern, module.in_features, module.out_features, 1] += 1
        elif hasattr(module, "is_concatenated"):  # fused experts, as transformers writes them
            experts, *sizes = cast("nn.Parameter", module.down_proj).shape
            inner, hidden = sizes if module.is_transposed else reversed(sizes)
            for name, inputs, outputs in (("w1", hidden, inner), ("w3", hidden, inner), ("w2", inner, hidden)):
                found[f"{pattern}.{name}", inputs, outputs, experts] += 1
    for (pattern, inputs, outputs, copies), layers in found.items():
        group = "attn" if pattern in stateful or "attn" in pattern or "attention" in pattern else "mlp"
        name = pattern.rpartition("*.")[2]
        if copies == 1:
            along = "" if pattern in stateful else CUTS.get(plan.get(pattern, ""), "")
            yield Linear(name, group, inputs, outputs, layers, along, keeps_state=pattern in stateful)
            continue
        chosen = next((count for key in CHOSEN if (count := getattr(config, key, None))), copies)
        chosen = chosen if isinstance(chosen, int) else max(chosen)  # one for each layer
        along, shared = ("inputs", "B") if pattern.endswith("w2") else ("outputs", "A")
        yield Linear(name, group, inputs, outputs, layers, along, copies, chosen, shared)


def _adapted_parts(linear: nn.Module, pattern: str, mixed: MixerLinears) -> Iterator[tuple[str, int]]:
    """The names and outputs that a mixer's linear has for adapters: its own, those of its parts, or none."""
    if linear in mixed.parts:
        parent = pattern.rpartition(".")[0]
        yield from ((f"{parent}.{last}", outputs) for last, outputs in mixed.parts[linear])
    elif linear not in mixed.excluded:
        yield pattern, cast("nn.Linear", linear).out_features


def read_directory(path: Path) -> Architecture:
    """Of a model's directory, or of a configuration alone."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}; name a model's directory, or its config.json") from None
    except ValueError as error:
        raise SettingsError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise SettingsError(f"{file} holds no JSON object")
    return read(config, str(file))


def size_of_files(directory: Path) -> tuple[int, int] | None:
    """(numbers, bytes) of a directory's safetensors, by their headers; None if it has none. Raises SettingsError on a
    header that is not one.
    """
    files = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    numbers = size = 0
    for file in files:
        for name, entry in _header(file).items():
            if name == "__metadata__":
                continue
            found = 1
            for dimension in entry["shape"]:
                found *= dimension
            numbers += found
            begin, end = entry["data_offsets"]
            size += end - begin
    return (numbers, size) if files else None


def _header(file: Path) -> dict[str, dict[str, list[int]]]:
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > MOST_HEADER_BYTES:
                raise ValueError(f"its header would have {length} bytes")
            return json.loads(opened.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise SettingsError(f"{file} is no safetensors file: {error}") from None
