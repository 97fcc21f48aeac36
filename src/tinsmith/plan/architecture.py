"""The parts of a base model: its linears, its other parameters, its cache.

`read` lets transformers build the model of a configuration on the meta device, where it takes no memory, and counts its
parts. No weight is read. A model with layers that neither attend nor keep a known state is refused by name. Where the
model's files exist, `size_of_files` gives their actual bytes, which the count is compared with.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tinsmith.errors import SettingsError
from tinsmith.plan.fused_layers import has_fusable_layers, has_plain_arithmetic
from tinsmith.plan.mixers import MixerLinears, count_saved_activations, count_state_elements, is_mixer, is_whole
from tinsmith.types import CONFIG_DEFAULTS, VISION_TYPES

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

Config = Mapping[str, object]

UNADAPTED_LINEARS = frozenset({"gate", "router", "shared_expert_gate", "wg", "indexer"})
"""Names of linears that choose experts, since training them on part of the batch would change the routing of all, and
of modules that choose tokens, which get no gradient.
"""

ATTENTION_KINDS = frozenset({"chunked_attention", "full_attention", "indexed_attention", "sliding_attention"})
STATE_KINDS = frozenset({"linear_attention", "conv", "hybrid"})
"""Kinds of stateful layers; 'hybrid' ones attend, too."""

OTHER_KINDS = frozenset({"mlp", "moe"})
"""Kinds of layers that compute each token separately."""

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
"""Keys that transformers would replace by its own defaults, which a plan must not use."""

OTHER_NAMES = {"max_position_embeddings": "model_max_length"}
"""Other names of these keys in some families."""

EXPERT_COUNT_KEYS = ("num_experts_per_tok", "moe_k", "top_k")
"""Names of the number of experts per token in configurations."""

FUSED_QKV = frozenset({"qkv_proj", "query_key_value", "c_attn"})
"""Linears that produce queries, keys and values."""

SPLIT_DIMS = {
    "colwise": "outputs",
    "colwise_gather_output": "outputs",
    "rowwise": "inputs",
    "rowwise_split_input": "inputs",
}
"""The dimension that each style of transformers' tensor-parallel plans splits."""

TOWER_ATTENTION = 12.0
"""Elements per patch in a tower's attention, for each unit of its hidden size: input, norm, queries, keys and values,
the first two rotated in float32, and the result.
"""

MAX_HEADER_BYTES = 100 * 2**20
"""The longest header that the safetensors format allows."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix in `layers` layers, each with `copies` of it: one, or one per expert. A token uses `active` of the
    copies. `split_dim`: what tensor parallelism splits, its outputs, its inputs, or nothing.
    """

    name: str
    group: str  # 'attn', 'mlp' or 'unembed'
    inputs: int
    outputs: int
    layers: int
    split_dim: str = "outputs"
    copies: int = 1
    active: int = 1
    shared: str = ""  # the adapter's matrix that all experts share: 'A', 'B'
    keeps_state: bool = False

    @property
    def num_parameters(self) -> int:
        return self.inputs * self.outputs * self.layers * self.copies

    @property
    def num_active_parameters(self) -> int:
        return self.inputs * self.outputs * self.layers * self.active

    def adapter_parameters(self, rank: int) -> int:
        a_copies, b_copies = (1 if self.shared == matrix else self.copies for matrix in "AB")
        return rank * self.layers * (self.inputs * a_copies + self.outputs * b_copies)

    def expert_adapter_parameters(self, rank: int) -> int:
        """Those of the matrix that differs between experts."""
        if self.copies == 1:
            return 0
        return rank * self.layers * self.copies * (self.outputs if self.shared == "A" else self.inputs)


@dataclass(frozen=True, slots=True)
class Architecture:
    """`linears` may carry adapters and are most of a model; `other_parameters` are norms, biases, routers and sinks."""

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
    other_parameters: int
    has_fused_layers: bool
    attention_layers: int
    """The number of layers that cache keys and values."""

    state_elements: int = 0
    """Elements of one sequence's state in the other layers."""

    mixer_activations: float = 0.0
    """float32 elements that those layers save per token for backward, in addition to their linears."""

    is_whole: bool = False
    """Whether a context rank computes whole sequences in those layers."""

    vision_parameters: int = 0
    """Parameters of a vision tower, which carries no adapters."""

    tower_activations: float = 0.0
    """Elements that the tower holds at once per token of an image."""

    layer_sizes: tuple[int, ...] = ()
    """Parameters of each layer, in order; empty if the model does not mark its layers."""

    expert_sizes: tuple[int, ...] = ()
    """Parameters of the routed experts of each layer, which `layer_sizes` includes."""

    indivisible_reason: str = ""
    """The reason why layers cannot be on different devices; empty if they can."""

    stored_dtype: str = ""
    """The dtype that config.json names for the files' weights; empty if it names none."""

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def unembedding(self) -> Linear:
        return Linear("lm_head", "unembed", self.hidden, self.vocab, 1)

    @property
    def num_parameters(self) -> int:
        """All parameters, as transformers counts them, with a tied embedding once."""
        ends = self.embedding_parameters * (1 if self.tied else 2)
        return (
            sum(linear.num_parameters for linear in self.linears)
            + ends
            + self.other_parameters
            + self.vision_parameters
        )

    @property
    def num_active(self) -> int:
        """Parameters that a text token uses: neither the vision tower's nor those of experts that it did not choose."""
        return (
            self.num_parameters
            - self.vision_parameters
            - sum(linear.num_parameters - linear.num_active_parameters for linear in self.linears)
        )

    @property
    def experts(self) -> int:
        """The number of routed experts that every mixture of the model has a multiple of; 1 without mixtures."""
        counts = [linear.copies for linear in self.linears if linear.copies > 1]
        return math.gcd(*counts) if counts else 1

    @property
    def mixers(self) -> int:
        """The number of layers with a state."""
        return max((linear.layers for linear in self.linears if linear.keeps_state), default=0)

    @property
    def has_experts(self) -> bool:
        return any(linear.copies > 1 for linear in self.linears)

    def layer_parameters(self, *, with_experts: bool) -> int:
        """Parameters of the largest layer, which sharding over data ranks gathers while it is computed."""
        per_layer: dict[int, int] = {}
        for linear in self.linears:
            if linear.copies > 1 and not with_experts:
                continue
            per_layer[linear.layers] = per_layer.get(linear.layers, 0) + linear.num_parameters // linear.layers
        common = per_layer.pop(self.layers, 0)
        return common + max(per_layer.values(), default=0)


def read(config: Config, source: str = "config.json") -> Architecture:
    """Raises SettingsError for a model that transformers does not know, or that plans do not support."""
    stored_dtype = read_stored_dtype(config)
    nested = config.get("text_config")
    if isinstance(nested, Mapping) and config.get("model_type") not in VISION_TYPES:
        config = cast("Config", nested)
    try:
        return replace(_read(json.dumps(config, sort_keys=True)), stored_dtype=stored_dtype)
    except SettingsError as error:
        raise SettingsError(f"{source}: {error}") from None


def read_stored_dtype(config: Config) -> str:
    """The dtype that a config.json names, or its text model's; older files call it `torch_dtype`. Empty without one."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, Mapping) else {}):
        if isinstance(dtype := part.get("dtype") or part.get("torch_dtype"), str):
            return dtype
    return ""


@lru_cache(maxsize=64)
def _read(text: str) -> Architecture:
    from torch import nn

    config_dict = cast("dict[str, object]", json.loads(text, object_hook=_number))
    model = _on_meta(config_dict)
    mark_experts(model)
    config, decoder = model.config.get_text_config(), decoder_of(model)
    vision_parameters = sum(map(count_parameters, _vision_parts(model)))
    embeddings = cast("nn.Embedding", model.get_input_embeddings())
    kinds = list(getattr(config, "layer_types", None) or ())
    mixers = [module for module in decoder.modules() if is_mixer(module)]
    supported = ATTENTION_KINDS | OTHER_KINDS | (STATE_KINDS if mixers else frozenset())
    if other := sorted(set(kinds) - supported):
        raise _refusal(config_dict, f"it has layers of kind {', '.join(other)}")
    linears, layers = tuple(_linears(decoder, config)), decoder_layers(decoder)
    if not any(linear.group == "attn" for linear in linears):
        raise _refusal(config_dict, "it has no linear projections of attention")
    attention_layers = (
        sum(kind in ATTENTION_KINDS or kind == "hybrid" for kind in kinds) if kinds else config.num_hidden_layers
    )
    heads = cast(int, getattr(config, "num_attention_heads", 0)) if attention_layers else 0
    if attention_layers and not heads:
        raise _refusal(config_dict, "its configuration has no num_attention_heads")
    try:
        key_heads, key_dim, value_dim = _cache_dims(config, heads, linears) if attention_layers else (0, 0, 0)
    except RuntimeError as error:
        raise _refusal(config_dict, f"its layers cache different sizes ({error})") from error
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
        other_parameters=model.num_parameters()
        - ends
        - vision_parameters
        - sum(linear.num_parameters for linear in linears),
        has_fused_layers=has_fusable_layers(decoder, nn.Linear) and has_plain_arithmetic(decoder, config),
        vision_parameters=vision_parameters,
        tower_activations=tower_activations(model.config) if vision_parameters else 0.0,
        attention_layers=attention_layers,
        state_elements=sum(count_state_elements(module) for module in mixers),
        mixer_activations=sum(count_saved_activations(module) for module in mixers),
        is_whole=any(is_whole(module) for module in mixers),
        layer_sizes=tuple(map(count_parameters, layers)),
        expert_sizes=tuple(sum(map(count_parameters, filter(is_experts, layer.modules()))) for layer in layers),
        indivisible_reason=find_indivisible_reason(config),
    )


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its unembedding. transformers does not find that of Llama 4."""
    decoder = model.get_decoder()
    return cast("PreTrainedModel", model.model if decoder is model else decoder)


def mark_experts(model: PreTrainedModel) -> None:
    """Describe experts that transformers does not, as it describes the others: gate and up side by side, stored as
    [E, inputs, outputs]. PEFT takes their inputs for outputs.
    """
    for module in model.modules():
        if _is_unmarked_experts(module):
            attributes = {"has_gate": True, "has_bias": False, "has_post_expert_norm": False, "is_concatenated": True}
            for name, value in {**attributes, "is_transposed": True, "is_swapped_by_peft": True}.items():
                setattr(module, name, value)


def _is_unmarked_experts(module: nn.Module) -> bool:
    """Whether a module computes all rows by each of its experts, and says nothing of the form of its weights."""
    outer, down = (module._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    if outer is None or down is None or outer.dim() != 3 or down.dim() != 3 or is_experts(module):
        return False
    experts, inner, hidden = down.shape
    return outer.shape == (experts, hidden, 2 * inner) and len(inspect.signature(module.forward).parameters) == 1


def find_indivisible_reason(config: PreTrainedConfig) -> str:
    """The reason why a layer needs more than the rows of the layer before it; empty if none does."""
    if getattr(config, "num_kv_shared_layers", None):
        return "has layers that attend to keys and values of earlier ones"
    if getattr(config, "hidden_size_per_layer_input", None):
        return "has embeddings for each layer"
    return ""


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def is_experts(module: nn.Module) -> bool:
    """Whether it is a layer's routed experts, fused as transformers writes them."""
    return hasattr(module, "is_concatenated")


def decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    """The decoder's layers, in order; empty if the model does not mark them."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    lists = [list(module.children()) for module in decoder.modules() if type(module).__name__ == "ModuleList"]
    layer_lists = (layers for layers in lists if all(isinstance(layer, GradientCheckpointingLayer) for layer in layers))
    return next(layer_lists, [])


def _vision_parts(model: PreTrainedModel) -> list[nn.Module]:
    """A wrapper's modules besides its text model: the vision tower and its projection."""
    inner, decoder = getattr(model, "model", None), decoder_of(model)
    if inner is None or not hasattr(inner, "language_model"):
        return []
    return [part for part in inner.children() if part is not decoder]


def tower_activations(config: PreTrainedConfig) -> float:
    """Elements that a vision tower holds at once per image token; an image runs alone and without gradients: the pixels
    of each patch, and a layer's intermediate results. 0 without a tower.
    """
    tower = getattr(config, "vision_config", None)
    if tower is None:
        return 0.0
    pixels = tower.patch_size**2 * getattr(tower, "in_channels", 3) * getattr(tower, "temporal_patch_size", 1)
    per_patch = pixels + max(TOWER_ATTENTION * tower.hidden_size, 2 * tower.hidden_size + 2 * tower.intermediate_size)
    if (merge_size := getattr(tower, "spatial_merge_size", None)) is not None:
        return per_patch * merge_size**2
    return per_patch * (tower.image_size // tower.patch_size) ** 2 / config.mm_tokens_per_image


def _on_meta(config_dict: dict[str, object]) -> PreTrainedModel:
    """Builds the model on the meta device. Loads neither code nor weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        defaults = AutoConfig.for_model(str(config_dict.get("model_type")))
    except ValueError:
        raise _refusal(config_dict, "transformers does not support it") from None
    config_class = type(defaults)
    text = cast("dict[str, object]", config_dict.get("text_config", config_dict))
    auto = AutoModelForCausalLM if text is config_dict else AutoModelForImageTextToText
    text = {**CONFIG_DEFAULTS.get(str(text.get("model_type")), {}), **text}
    for key in REQUIRED:
        if key == "num_hidden_layers" and isinstance(text.get("layers_block_type"), list):
            continue  # it has one entry per layer
        if key == "num_attention_heads" and not hasattr(defaults.get_text_config(), key):
            continue  # its layers are all stateful
        value = text.get(key, text.get(config_class.attribute_map.get(key, OTHER_NAMES.get(key, key))))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SettingsError(f"{key} is {value!r}; it must be a positive integer")
    try:
        with torch.device("meta"):
            return auto.from_config(config_class.from_dict(config_dict), trust_remote_code=False)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise _refusal(config_dict, f"transformers cannot build it ({reason})") from error


def _number(value: dict[str, object]) -> object:
    """Decode transformers' JSON form of numbers that JSON does not have, such as infinity."""
    return float(str(value["__float__"])) if value.keys() == {"__float__"} else value


def _refusal(config: Config, reason: str) -> SettingsError:
    return SettingsError(f"model_type {config.get('model_type')!r} is not supported by plans: {reason}")


def _cache_dims(config: PreTrainedConfig, heads: int, linears: Sequence[Linear]) -> tuple[int, int, int]:
    """Key heads, key dim and value dim. Latent attention caches expanded keys and values of every head. Raises
    RuntimeError if layers differ.
    """
    if getattr(config, "kv_lora_rank", None):
        return heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    key_dim = cast(int, getattr(config, "head_dim", None) or config.hidden_size // heads)
    widths = set()
    for linear in linears:
        last = linear.name.rpartition(".")[2]
        if linear.keeps_state:
            continue
        if last in ("k_proj", "v_proj"):
            widths.add(linear.outputs)
        elif last in FUSED_QKV:
            widths.add((linear.outputs - heads * key_dim) // 2)
    if len(widths) != 1:
        raise RuntimeError(f"keys and values of {sorted(widths)} numbers")
    return widths.pop() // key_dim, key_dim, key_dim


def _linears(decoder: nn.Module, config: PreTrainedConfig) -> Iterator[Linear]:
    """Linears that may carry adapters, each with the number of layers that have it."""
    from torch import nn

    plan = cast("Mapping[str, str]", getattr(config, "base_model_tp_plan", None) or {})
    counts: Counter[tuple[str, int, int, int]] = Counter()
    mixer_linears, stateful = MixerLinears.of(decoder), set[str]()
    for path, module in decoder.named_modules():
        pattern = re.sub(r"\d+", "*", path)
        if module in mixer_linears.all:
            for last, outputs in _adapter_parts(module, pattern, mixer_linears):
                stateful.add(last)
                counts[last, cast(int, module.in_features), outputs, 1] += 1
        elif type(module) is nn.Linear and UNADAPTED_LINEARS.isdisjoint(path.split(".")):
            counts[pattern, module.in_features, module.out_features, 1] += 1
        elif is_experts(module):
            experts, *sizes = cast("nn.Parameter", module.down_proj).shape
            inner, hidden = sizes if module.is_transposed else reversed(sizes)
            outer = ("w1", "w3") if module.has_gate else ("w1",)
            for name, inputs, outputs in (
                *((name_of_copy, hidden, inner) for name_of_copy in outer),
                ("w2", inner, hidden),
            ):
                counts[f"{pattern}.{name}", inputs, outputs, experts] += 1
    for (pattern, inputs, outputs, copies), layers in counts.items():
        group = "attn" if pattern in stateful or "attn" in pattern or "attention" in pattern else "mlp"
        name = pattern.rpartition("*.")[2]
        if copies == 1:
            split_dim = "" if pattern in stateful else SPLIT_DIMS.get(plan.get(pattern, ""), "")
            yield Linear(name, group, inputs, outputs, layers, split_dim, keeps_state=pattern in stateful)
            continue
        num_active = next((count for key in EXPERT_COUNT_KEYS if (count := getattr(config, key, None))), copies)
        num_active = num_active if isinstance(num_active, int) else max(num_active)  # one per layer
        split_dim, shared = ("inputs", "B") if pattern.endswith("w2") else ("outputs", "A")
        yield Linear(name, group, inputs, outputs, layers, split_dim, copies, num_active, shared)


def _adapter_parts(linear: nn.Module, pattern: str, mixer_linears: MixerLinears) -> Iterator[tuple[str, int]]:
    """A mixer linear's names and outputs for adapters: its own, those of its parts, or none."""
    if linear in mixer_linears.parts:
        parent = pattern.rpartition(".")[0]
        yield from ((f"{parent}.{last}", outputs) for last, outputs in mixer_linears.parts[linear])
    elif linear not in mixer_linears.excluded:
        yield pattern, cast("nn.Linear", linear).out_features


def read_directory(path: Path) -> Architecture:
    """The architecture of a model's directory, or of a config.json alone. Raises SettingsError."""
    file = path / "config.json" if path.is_dir() else path
    return read(read_config(file), str(file))


def read_config(file: Path) -> Config:
    """A config.json. Raises SettingsError if it cannot be read."""
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}; name a model's directory, or its config.json") from None
    except ValueError as error:
        raise SettingsError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise SettingsError(f"{file} holds no JSON object")
    return config


def size_of_files(directory: Path) -> tuple[int, int] | None:
    """(parameters, bytes) of a directory's safetensors files from their headers; None if it has none. Raises
    SettingsError on an invalid header.
    """
    files = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    num_parameters = num_bytes = 0
    for file in files:
        for name, entry in _header(file).items():
            if name == "__metadata__":
                continue
            num_elements = 1
            for dimension in entry["shape"]:
                num_elements *= dimension
            num_parameters += num_elements
            begin, end = entry["data_offsets"]
            num_bytes += end - begin
    return (num_parameters, num_bytes) if files else None


def _header(file: Path) -> dict[str, dict[str, list[int]]]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {length} bytes")
            return json.loads(stream.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise SettingsError(f"{file} is not a safetensors file: {error}") from None
