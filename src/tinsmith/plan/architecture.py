"""What a base model is made of, as far as its config.json tells: its linears, its other numbers, what it caches.

Pure arithmetic on the configuration; no weight is read and no library of models loaded. A family is counted only if it
is in `FAMILIES`, exactly as transformers builds it; any other is refused by name, since a guess that is a tenth off is
worse than none. Where the model's files are there, `size_of_files` is the truth about their bytes, and the count is
held against it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tinsmith.errors import SettingsError

Config = Mapping[str, object]

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configurations call the number of experts."""

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
    vision_numbers: int = 0  # of a vision tower, which carries no adapters

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
        return sum(linear.numbers for linear in self.linears) + ends + self.other_numbers + self.vision_numbers

    @property
    def num_active(self) -> int:
        """What one token of text meets: all but the matrices of experts that it did not choose."""
        return (
            self.num_parameters
            - self.vision_numbers
            - sum(linear.numbers - linear.numbers_met for linear in self.linears)
        )

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


@dataclass(frozen=True, slots=True)
class Family:
    """How a `model_type` differs from Llama. Biases are those that its configuration cannot turn off."""

    norms: int = 2  # vectors of the hidden size in each layer
    head_norms: str = ""  # 'head': one for the queries' and one for the keys' heads; 'all': over all heads at once
    qkv_bias: bool = False
    out_bias: bool = True  # whether attention_bias reaches the output projection
    head_dim: int | None = None  # where the configuration does not say
    tied: bool = False  # likewise
    experts: bool = False
    inner: str = "moe_intermediate_size"  # the key of an expert's width
    always_experts: bool = True  # every layer has them, whatever else the configuration says
    written_out: bool = False  # trained by the layers that are written out


FAMILIES: dict[str, Family] = {
    "llama": Family(written_out=True),
    "mistral": Family(written_out=True),
    "qwen2": Family(qkv_bias=True, out_bias=False, written_out=True),
    "qwen3": Family(head_norms="head", head_dim=128, written_out=True),
    "gemma": Family(head_dim=256, tied=True),
    "gemma2": Family(norms=4, head_dim=256, tied=True),
    "gemma3_text": Family(norms=4, head_norms="head", head_dim=256, tied=True),
    "phi3": Family(),
    "olmo2": Family(head_norms="all"),
    "olmo3": Family(head_norms="all"),
    "granite": Family(),
    "smollm3": Family(tied=True),
    "seed_oss": Family(qkv_bias=True, out_bias=False),
    "ministral": Family(),
    "ministral3": Family(),
    "qwen3_moe": Family(head_norms="head", experts=True, always_experts=False),
    "mixtral": Family(experts=True, inner="intermediate_size"),
    "granitemoe": Family(experts=True, inner="intermediate_size"),
    "gpt_oss": Family(qkv_bias=True, experts=True, inner="intermediate_size", head_dim=64),
    "qwen3_vl_text": Family(head_norms="head", head_dim=128, written_out=True),
    "qwen3_vl_moe_text": Family(head_norms="head", experts=True, always_experts=False),
    "deepseek_v2": Family(experts=True, always_experts=False),
    "deepseek_v3": Family(experts=True, always_experts=False),
}


class _Reader:
    """A configuration's numbers, by name; a missing one is refused by name."""

    def __init__(self, config: Config, where: str) -> None:
        self._config = config
        self._where = where

    def number(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise SettingsError(f"{self._where}: {key} is {value!r}; a plan needs a whole number there")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._config.get(key)
        return default if value is None else bool(value)

    def first(self, keys: Sequence[str]) -> str:
        """Which of these names the configuration uses."""
        return next((key for key in keys if self.has(key)), keys[0])

    def has(self, key: str) -> bool:
        return self._config.get(key) is not None

    def text(self, key: str) -> str:
        return str(self._config.get(key, ""))

    def layer_numbers(self, key: str) -> list[int]:
        value = self._config.get(key) or []
        return [int(one) for one in cast("list[int]", value)]


def read(config: Config, where: str = "config.json") -> Architecture:
    """Raises SettingsError for a family, or a form of one, that is not counted here."""
    vision_numbers = _vision_numbers(config, where)
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        # Of a wrapper, transformers ties the embeddings that the outer configuration says.
        config = {**cast("Config", nested), "tie_word_embeddings": config.get("tie_word_embeddings", False)}
    given = _Reader(config, where)
    model_type = given.text("model_type")
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise SettingsError(f"{where}: model_type {model_type!r} is not one that a plan counts; it counts {known}")
    family = FAMILIES[model_type]
    hidden, layers = given.number("hidden_size"), given.number("num_hidden_layers")
    heads = given.number("num_attention_heads")
    if given.has("kv_lora_rank"):
        attention, other, widths = _latent_attention(given, hidden, layers, heads)
    else:
        attention, other, widths = _attention(given, family, hidden, layers, heads)
    mlp, more = _mlp(given, family, hidden, layers)
    return Architecture(
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        vocab=given.number("vocab_size"),
        context=given.number("max_position_embeddings"),
        heads=heads,
        key_heads=widths[0],
        key_dim=widths[1],
        value_dim=widths[2],
        tied=given.flag("tie_word_embeddings", family.tied),
        linears=(*attention, *mlp),
        other_numbers=other + more + hidden * (family.norms * layers + 1),
        written_out=family.written_out,
        vision_numbers=vision_numbers,
    )


def _vision_numbers(config: Config, where: str) -> int:
    """Of the tower that Qwen3-VL has; 0 for a model without one. Others are counted without theirs, and refused."""
    nested = config.get("vision_config")
    if not isinstance(nested, Mapping) or not str(config.get("model_type")).startswith("qwen3_vl"):
        return 0
    given = _Reader(cast("Config", nested), f"{where}: vision_config")
    hidden, inner, depth = (given.number(key) for key in ("hidden_size", "intermediate_size", "depth"))
    merged = hidden * given.number("spatial_merge_size") ** 2
    pixels = given.number("in_channels", 3) * given.number("temporal_patch_size") * given.number("patch_size") ** 2
    patches = pixels * hidden + hidden + given.number("num_position_embeddings") * hidden
    attention = 4 * hidden * hidden + 4 * hidden
    block = attention + 2 * hidden * inner + inner + hidden + 2 * 2 * hidden
    merger = merged * merged + merged + merged * given.number("out_hidden_size") + given.number("out_hidden_size")
    deepstack = len(given.layer_numbers("deepstack_visual_indexes"))
    # The last merger's norm comes before the merging, those of deepstack behind it.
    return patches + depth * block + (1 + deepstack) * merger + 2 * hidden + deepstack * 2 * merged


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


def _attention(
    given: _Reader, family: Family, hidden: int, layers: int, heads: int
) -> tuple[list[Linear], int, tuple[int, int, int]]:
    key_heads = given.number("num_key_value_heads", heads)
    head_dim = given.number("head_dim", family.head_dim or hidden // heads)
    queries, keys = heads * head_dim, key_heads * head_dim
    linears = [
        Linear("q_proj", "attn", hidden, queries, layers),
        Linear("k_proj", "attn", hidden, keys, layers),
        Linear("v_proj", "attn", hidden, keys, layers),
        Linear("o_proj", "attn", queries, hidden, layers, along="inputs"),
    ]
    each = 0
    asked = given.flag("attention_bias", False)
    if family.qkv_bias or asked:
        each += queries + 2 * keys
    if family.out_bias and (asked or (family.qkv_bias and given.text("model_type") == "gpt_oss")):
        each += hidden
    if family.head_norms == "head":
        each += 2 * head_dim
    elif family.head_norms == "all":
        each += queries + keys
    if given.text("model_type") == "gpt_oss":
        each += heads  # the sinks
    return linears, each * layers, (key_heads, head_dim, head_dim)


def _latent_attention(
    given: _Reader, hidden: int, layers: int, heads: int
) -> tuple[list[Linear], int, tuple[int, int, int]]:
    """DeepSeek's: queries, and keys with values, come out of narrow vectors. Cached is what attention sees: keys
    and values of every head.
    """
    rope, plain = given.number("qk_rope_head_dim"), given.number("qk_nope_head_dim")
    value, narrow = given.number("v_head_dim"), given.number("kv_lora_rank")
    linears = [
        Linear("kv_a_proj_with_mqa", "attn", hidden, narrow + rope, layers, along=""),
        Linear("kv_b_proj", "attn", narrow, heads * (plain + value), layers),
        Linear("o_proj", "attn", heads * value, hidden, layers, along="inputs"),
    ]
    each = narrow
    if given.has("q_lora_rank"):
        narrow_queries = given.number("q_lora_rank")
        linears += [
            Linear("q_a_proj", "attn", hidden, narrow_queries, layers, along=""),
            Linear("q_b_proj", "attn", narrow_queries, heads * (plain + rope), layers),
        ]
        each += narrow_queries
    else:
        linears.append(Linear("q_proj", "attn", hidden, heads * (plain + rope), layers))
    if given.flag("attention_bias", False):
        raise SettingsError("attention_bias with latent attention is not a form that a plan counts")
    return linears, each * layers, (heads, plain + rope, value)


def _mlp(given: _Reader, family: Family, hidden: int, layers: int) -> tuple[list[Linear], int]:
    if not family.experts:
        width = given.number("intermediate_size")
        biases = (2 * width + hidden) * layers if given.flag("mlp_bias", False) else 0
        return _gated("", hidden, width, layers), biases
    sparse = layers if family.always_experts else _sparse_layers(given, layers)
    experts, chosen = given.number(given.first(EXPERTS)), given.number("num_experts_per_tok")
    inner = given.number(family.inner)
    linears: list[Linear] = []
    if layers > sparse:
        linears += _gated("", hidden, given.number("intermediate_size"), layers - sparse)
    linears += [
        Linear("experts.w1", "mlp", hidden, inner, sparse, "outputs", experts, chosen, "A"),
        Linear("experts.w3", "mlp", hidden, inner, sparse, "outputs", experts, chosen, "A"),
        Linear("experts.w2", "mlp", inner, hidden, sparse, "inputs", experts, chosen, "B"),
    ]
    if shared := given.number("n_shared_experts", 0):
        linears += _gated("shared_experts.", hidden, shared * inner, sparse)
    router = hidden * experts
    if given.text("model_type") == "gpt_oss":
        router += experts + experts * (2 * inner + hidden)  # biases
    return linears, router * sparse


def _sparse_layers(given: _Reader, layers: int) -> int:
    if given.has("first_k_dense_replace"):
        return layers - min(layers, given.number("first_k_dense_replace"))
    dense, step = set(given.layer_numbers("mlp_only_layers")), given.number("decoder_sparse_step", 1)
    return sum(1 for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)


def _gated(prefix: str, hidden: int, width: int, layers: int) -> list[Linear]:
    return [
        Linear(f"{prefix}gate_proj", "mlp", hidden, width, layers),
        Linear(f"{prefix}up_proj", "mlp", hidden, width, layers),
        Linear(f"{prefix}down_proj", "mlp", width, hidden, layers, along="inputs"),
    ]
