"""LoRA adapters in PEFT's format, as described by their files: read without torch, and without loading weights.

Used for adapters made elsewhere: by the server before it stores an upload, and by the merge and import commands.
Settings that change the numbers in ways that Tinsmith does not compute are refused by name, and so are settings that
are not known to be harmless. Knows no base model: the engine checks which linears exist.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tinsmith.errors import UserError
from tinsmith.types import LORA_ALPHA, OPTIMIZERS, LoraSpec, mixes_tokens

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
OPTIMIZER_FILE = "optimizer.safetensors"
TRAINING_FILES = (OPTIMIZER_FILE, "gradient.safetensors")
"""Files that only training needs."""
PREFIX = "base_model.model."

MAX_RANK = 256
MAX_ALPHA = 1e30  # weights are float32
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20

FLOATS = ("F64", "F32", "F16", "BF16")
FAMILY_OF_STATE = {frozenset(params.state): family for family, params in OPTIMIZERS.items()}

UNEMBEDDINGS = ("lm_head", "embed_out", "output")
TINKER_HEAD, HEAD = "model.unembed_tokens", "lm_head"
"""The unembedding in Tinker's exports, and its name here and in PEFT."""

HARMLESS_SETTINGS = frozenset(
    ["auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules",
     "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
     "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r",
     "revision", "runtime_config", "target_modules", "task_type", "use_rslora", "rank_pattern", "alpha_pattern"]
)  # fmt: skip
"""Settings that do not change what a saved adapter computes, or that are handled here. Others are refused if set."""

PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initialisations that leave the base unchanged; the others (PiSSA, OLoRA, ...) subtract something from it."""

EXPERTS_PATTERN = "experts.gate_up_proj"
"""The pattern by which our own checkpoints describe experts: two matrices stored as one of twice the rank."""

RANK_MULTIPLES = {"in_proj_qkv": 3, "in_proj": 2}
"""Linears with several adapters, which our own checkpoints store as one: its rank, as a multiple of each one's."""

IMPORT_HINT = "`tinsmith checkpoints import` rewrites the adapter"

EXPERT_SETTINGS = ("target_parameters", "rank_pattern", "alpha_pattern")

_BASE_WEIGHT_KEY = re.compile(r"(?:base_model\.model\.)?(?P<name>.+?)(?:\.base_layer)?\.weight")
_LORA_KEY = re.compile(r"(?:base_model\.model\.)?(?P<name>.+)\.lora_(?P<side>[AB])(?:\.(?P<adapter>\w+))?\.weight")


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """One adapted linear, and the keys of its two matrices in the file."""

    rank: int
    in_features: int
    out_features: int
    keys: tuple[str, str]


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What an adapter's configuration and the header of its weights say."""

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, float]
    alpha_pattern: Mapping[str, float]
    base_name: str
    linears: Mapping[str, AdaptedLinear]
    copies: Mapping[str, str]
    """Weights of the base that PEFT stores with an adapter of the unembedding: module -> key."""

    experts: frozenset[str]
    """Members of `linears` that hold all experts of a layer, in the format of our own checkpoints."""

    @property
    def spec(self) -> LoraSpec:
        """Its rank, its alpha, and the groups of linears that it adapts, by the engines' rule."""
        groups = {group_of(name) for name in self.linears}
        alpha = self.alpha * math.sqrt(self.rank) if self.rslora else self.alpha
        return LoraSpec(self.rank, None, "attn" in groups, "mlp" in groups, "unembed" in groups, alpha)

    def scale(self, name: str) -> float:
        """The factor of the product of a linear's two matrices."""
        alpha, rank = _of_pattern(self.alpha_pattern, name, self.alpha), self.linears[name].rank
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def config(self) -> dict[str, object]:
        """PEFT's configuration of this adapter after a rewrite to our alpha."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_name,
            "r": self.rank,
            "lora_alpha": int(LORA_ALPHA),
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(self.linears),
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "modules_to_save": None,
            "use_rslora": False,
            "use_dora": False,
        }


def group_of(name: str) -> str:
    """The group of a linear by its path, as in the engines."""
    if name.rpartition(".")[2] in UNEMBEDDINGS and "layers." not in name:
        return "unembed"
    return "attn" if mixes_tokens(name) else "mlp"


def read(directory: Path, *, plain: bool = False) -> AdapterInfo:
    """Raises UserError if the directory is not a LoRA adapter or has an unsupported setting; with `plain`, also if
    engines cannot load it without a rewrite.
    """
    config = _read_config(directory)
    ours = plain and _is_ours(config)
    stacked = ours and bool(config.get("target_parameters"))
    split_names = (
        frozenset(cast("dict[str, int]", config.get("rank_pattern") or {})) & RANK_MULTIPLES.keys()
        if ours
        else frozenset()
    )
    if ours:
        config = {name: value for name, value in config.items() if name not in EXPERT_SETTINGS}
    _refuse_unknown(config)
    if plain:
        _require_plain(config)
    rank, alpha = config["r"], config["lora_alpha"]
    if not _is_number(rank, int) or not _is_number(alpha, int, float):
        raise UserError(f"{CONFIG_FILE}: r is {rank!r} and lora_alpha is {alpha!r}; both must be numbers")
    linears, copies = _read_linears(directory / WEIGHTS_FILE)
    if plain and copies:
        raise UserError(
            f"{WEIGHTS_FILE} holds {next(iter(copies.values()))!r}, a copy of the base's weights; {IMPORT_HINT}"
        )
    experts = frozenset(name for name in linears if stacked and name.endswith((".experts", ".experts.base_layer")))
    separate = experts | {name for name in linears if name.rpartition(".")[2] in split_names}
    info = AdapterInfo(
        rank=max((linear.rank for name, linear in linears.items() if name not in separate), default=cast(int, rank)),
        alpha=float(cast(float, alpha)),
        rslora=bool(config.get("use_rslora")),
        rank_pattern=_pattern(config, "rank_pattern"),
        alpha_pattern=_pattern(config, "alpha_pattern"),
        base_name=str(config.get("base_model_name_or_path") or ""),
        linears=linears,
        copies=copies,
        experts=experts,
    )
    for name, linear in linears.items():
        if name in separate:
            continue  # checked by the engine
        expected = _of_pattern(info.rank_pattern, name, cast(int, rank))
        if linear.rank != expected:
            raise UserError(f"{WEIGHTS_FILE}: {name} has rank {linear.rank}, and {CONFIG_FILE} says {expected}")
        if plain and not linear.keys[0].endswith(".lora_A.weight"):
            raise UserError(f"{WEIGHTS_FILE} holds {linear.keys[0]!r}, not PEFT's own name; {IMPORT_HINT}")
    alphas = [info.alpha, *info.alpha_pattern.values()]
    if not (1 <= info.rank <= MAX_RANK and all(0 < alpha_value < MAX_ALPHA for alpha_value in alphas)):
        raise UserError(
            f"{CONFIG_FILE}: the rank is {info.rank} and lora_alpha is {alpha!r}; ranks go from 1 to {MAX_RANK}, and "
            "alpha must be positive"
        )
    return info


def check_fits(info: AdapterInfo, base: Path) -> None:
    """Raises UserError if a base model's files show that the adapter is for another model. Some families name weights
    differently in files; there the engine checks when it loads the adapter.
    """
    shapes = {
        key: shape for path in sorted(base.glob("*.safetensors")) for key, (_, shape) in read_header(path).items()
    }
    if not any(f"{name}.weight" in shapes for name in info.linears):
        return
    for name, linear in info.linears.items():
        if name in info.experts:
            continue
        shape = shapes.get(f"{name}.weight")
        sizes = (linear.out_features, linear.in_features)
        if shape not in (sizes, None) or (shape is None and group_of(name) != "unembed"):
            base_linear = "no such linear" if shape is None else f"a linear of {list(shape)}"
            raise UserError(f"{WEIGHTS_FILE} changes {name} {list(sizes)}, and the base model has {base_linear}")


def optimizer_type(directory: Path) -> str | None:
    """The optimizer of the state in `optimizer.safetensors`; None without that file."""
    path = directory / OPTIMIZER_FILE
    if not path.is_file():
        return None
    state_names = frozenset(key.rpartition(".")[2] for key in read_header(path)) - {"step"}
    if state_names not in FAMILY_OF_STATE:
        raise UserError(
            f"{OPTIMIZER_FILE} holds {', '.join(sorted(state_names)) or 'nothing'}, which no supported optimizer uses"
        )
    return FAMILY_OF_STATE[state_names]


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and shape of each tensor in a safetensors file. Raises UserError if the file is invalid."""
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise UserError(f"{path.name} has a header of {length} bytes; at most {MAX_HEADER_BYTES} are read")
        with safe_open(path, framework="numpy") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118  it is no dict
            return {
                key: (str(tensor_slice.get_dtype()), tuple(tensor_slice.get_shape()))
                for key, tensor_slice in slices.items()
            }
    except FileNotFoundError:
        other_formats = sorted(other.name for other in path.parent.glob("adapter_model.*"))
        hint = f", only {other_formats[0]}; load and save it with PEFT, as safetensors" if other_formats else ""
        raise UserError(f"there is no {path.name}{hint}") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path.name} is not a complete safetensors file: {error}") from None


def _read_config(directory: Path) -> dict[str, object]:
    path = directory / CONFIG_FILE
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise UserError(f"{CONFIG_FILE} has more than {MAX_CONFIG_BYTES} bytes")
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"there is no {CONFIG_FILE}: not an adapter in PEFT's format") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{CONFIG_FILE} is not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA" or not {"r", "lora_alpha"} <= config.keys():
        raise UserError(f"{CONFIG_FILE} does not describe a LoRA adapter (peft_type LORA, r, lora_alpha)")
    if config.get("bias", "none") != "none":
        raise UserError(f"{CONFIG_FILE}: bias is {config['bias']!r}; only adapters without biases are supported")
    start = config.get("init_lora_weights", True)
    if start not in PLAIN_INITS:
        raise UserError(
            f"{CONFIG_FILE}: init_lora_weights is {start!r}, which changes the base model; convert the adapter with "
            "PEFT (save_pretrained with path_initial_model_for_weight_conversion) first"
        )
    return config


def _is_ours(config: Mapping[str, object]) -> bool:
    """Whether ranks and alphas vary only as in our own checkpoints."""
    rank, alpha = config["r"], config["lora_alpha"]
    if not (_is_number(rank, int) and _is_number(alpha, int, float)):
        return False
    ranks, alphas = (config.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
    parameters = config.get("target_parameters") or []
    if not isinstance(ranks, dict) or not isinstance(parameters, list) or not (ranks or parameters):
        return False
    if (EXPERTS_PATTERN in ranks) != any(str(name).endswith(EXPERTS_PATTERN) for name in parameters):
        return False
    times = {name: (RANK_MULTIPLES | {EXPERTS_PATTERN: 2}).get(name, 0) for name in ranks}
    return (ranks, alphas) == (
        {name: factor * cast(int, rank) for name, factor in times.items()},
        {name: factor * cast(float, alpha) for name, factor in times.items()},
    )


def _refuse_unknown(config: Mapping[str, object]) -> None:
    unknown = sorted(name for name, value in config.items() if value and name not in HARMLESS_SETTINGS)
    if unknown:
        raise UserError(f"{CONFIG_FILE} sets {', '.join(map(ascii, unknown))}, which is not supported here")


def _require_plain(config: Mapping[str, object]) -> None:
    for name in ("rank_pattern", "alpha_pattern"):
        if config.get(name):
            raise UserError(f"{CONFIG_FILE} has a {name}; {IMPORT_HINT}")


def _read_linears(path: Path) -> tuple[dict[str, AdaptedLinear], dict[str, str]]:
    """The linears, and the copies of the base's embeddings."""
    copies: dict[str, str] = {}
    sides: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for key, (dtype, shape) in read_header(path).items():
        match = _LORA_KEY.fullmatch(key)
        copy_match = None if match else _BASE_WEIGHT_KEY.fullmatch(key)
        if copy_match and copy_match["name"].rpartition(".")[2] in (*UNEMBEDDINGS, "embed_tokens"):
            copies[copy_match["name"]] = key
            continue
        if match is None or len(shape) != 2:
            raise UserError(f"{path.name} holds {key!r} {list(shape)}, which is not a LoRA matrix of a linear")
        if dtype not in FLOATS:
            raise UserError(f"{path.name}: {key!r} is {dtype}; weights must be floating-point numbers")
        name = HEAD if match["name"] == TINKER_HEAD else match["name"]
        matrices = sides.setdefault(name, {})
        if match["side"] in matrices:
            raise UserError(f"{path.name} holds {name} twice; keep one adapter in a file")
        matrices[match["side"]] = (key, shape)
    linears = {}
    for name, matrices in sides.items():
        if len(matrices) != 2 or matrices["A"][1][0] != matrices["B"][1][1] or 0 in matrices["A"][1] + matrices["B"][1]:
            raise UserError(f"{path.name}: {name} must have lora_A [rank, inputs] and lora_B [outputs, rank]")
        (key_a, (rank, inputs)), (key_b, (outputs, _)) = matrices["A"], matrices["B"]
        linears[name] = AdaptedLinear(rank, inputs, outputs, (key_a, key_b))
    if not linears:
        raise UserError(f"{path.name} holds no adapter")
    return linears, copies


def _pattern(config: Mapping[str, object], name: str) -> dict[str, float]:
    pattern = config.get(name) or {}
    if not isinstance(pattern, dict) or not all(_is_number(value, int, float) for value in pattern.values()):
        raise UserError(f"{CONFIG_FILE}: {name} must be an object of numbers")
    return pattern


def _of_pattern(pattern: Mapping[str, float], name: str, default: float) -> float:
    """PEFT's rule: the first key that matches the end of the path as a regular expression."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", name):
            return value
    return default


def _is_number(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
