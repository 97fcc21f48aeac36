"""The files of a LoRA adapter in PEFT's format: their names, keys and settings, and the checks at every door.

Servers check what is uploaded, engines what they load, and the merge and import commands what they rewrite, all by
`read_adapter`, so that each refuses it with the same sentence. Settings that change the numbers in ways that Tinsmith
does not compute are refused by name, and so are settings that are not known to be harmless. Reads the configuration and
the header of the weights, without torch and without the weights. Knows no base model: engines check which linears
exist, and their sizes.

A checkpoint of ours has PEFT's format, too, or that of Tinker's exports, where the matrices of all experts are stacked.
Its experts and its linears with several adapters are parameters and linears of a multiple of the rank to PEFT, which
its patterns of ranks and alphas say.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tinsmith.errors import UserError
from tinsmith.types import OPTIMIZERS, LoraSpec, mixes_tokens

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
OPTIMIZER_FILE = "optimizer.safetensors"
GRADIENT_FILE = "gradient.safetensors"
TRAINING_FILES = (OPTIMIZER_FILE, GRADIENT_FILE)
"""Files that only training needs."""

UPLOAD_FILES = (CONFIG_FILE, WEIGHTS_FILE, OPTIMIZER_FILE)
"""The files that a client may upload; the last one is optional."""

MAX_RANK = 256
MAX_ALPHA = 1e30  # weights are float32
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20

FLOATS = ("F64", "F32", "F16", "BF16")
FAMILY_OF_STATE = {frozenset(params.state): family for family, params in OPTIMIZERS.items()}

WRAPPED, PLAIN = "model.language_model.", "model."
"""Prefixes of a text model's module paths: inside a multimodal wrapper, and standalone."""

UNEMBED_TOKENS, EMBED_TOKENS = "model.unembed_tokens", "model.embed_tokens"
"""Tinker's name for the unembedding, and the embedding into which tinker_cookbook.weights merges it in a tied model."""

UNEMBEDDINGS = ("lm_head", "embed_out", "output")
HEAD = "lm_head"
"""PEFT's name for the unembedding of most models."""

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
"""The key in PEFT's patterns for gate and up of experts, which are one adapter of twice the rank."""

RANK_MULTIPLES = {"in_proj_qkv": 3, "in_proj": 2, EXPERTS_PATTERN: 2}
"""Keys of the patterns in our own checkpoints: PEFT's rank there, as a multiple of each adapter's."""

OWN_SETTINGS = ("target_parameters", "rank_pattern", "alpha_pattern")
"""Settings that engines load with the values of our own checkpoints alone."""

IMPORT_HINT = "`tinsmith checkpoints import` rewrites the adapter"

_PREFIX = "base_model.model."
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
    def alpha_over_rank(self) -> float:
        """The alpha that gives the same scale as `alpha / rank`, without rsLoRA."""
        return self.alpha * math.sqrt(self.rank) if self.rslora else self.alpha

    @property
    def spec(self) -> LoraSpec:
        """Its rank, its alpha, and the groups of linears that it adapts, by the engines' rule."""
        groups = {group_of(name) for name in self.linears}
        return LoraSpec(self.rank, None, "attn" in groups, "mlp" in groups, "unembed" in groups, self.alpha_over_rank)

    def scale(self, name: str) -> float:
        """The factor of the product of a linear's two matrices."""
        alpha, rank = _of_pattern(self.alpha_pattern, name, self.alpha), self.linears[name].rank
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def text_name(path: str) -> str:
    """A module's path in the standalone text model, which is Tinker's name for it (tinker_cookbook.weights)."""
    return PLAIN + path.removeprefix(WRAPPED) if path.startswith(WRAPPED) else path


def wrapper_name(name: str) -> str:
    """A module's path in a model with a wrapper, from that in the standalone text model."""
    return WRAPPED + name.removeprefix(PLAIN) if name.startswith(PLAIN) else name


def group_of(name: str) -> str:
    """The group of a linear by its path, as in the engines."""
    if name.rpartition(".")[2] in UNEMBEDDINGS and "layers." not in name:
        return "unembed"
    return "attn" if mixes_tokens(name) else "mlp"


def matrix_keys(name: str) -> tuple[str, str]:
    """The keys of a linear's A and B in the weights' file."""
    return f"{_PREFIX}{name}.lora_A.weight", f"{_PREFIX}{name}.lora_B.weight"


def describe_patterns(rank: int, alpha: float, multiples: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """PEFT's patterns for these multiples of an adapter's rank and alpha, so that its scale is everywhere the same."""
    return {
        "rank_pattern": {key: times * rank for key, times in multiples.items()},
        "alpha_pattern": {key: _number(times * alpha) for key, times in multiples.items()},
    }


def encode_config(
    base_name: str, rank: int, alpha: float, target_modules: Sequence[str], settings: Mapping[str, object] | None = None
) -> str:
    """The text of adapter_config.json; `settings` has further ones."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": _number(alpha),
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": target_modules,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        **(settings or {}),
    }
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def _number(alpha: float) -> int | float:
    """PEFT and inference engines declare an integer alpha, and accept a fraction."""
    return int(alpha) if alpha == int(alpha) else alpha


def read_adapter(
    directory: Path,
    *,
    plain: bool = False,
    multiples: Mapping[str, int] = RANK_MULTIPLES,
    head: str = HEAD,
    stacked: bool = False,
) -> AdapterInfo:
    """Raises UserError if the directory is not a LoRA adapter or has an unsupported setting; with `plain`, also if
    engines cannot load it without a rewrite, that is, unless its patterns are of our own checkpoints with `multiples`.
    `head`: the name of the base model's unembedding, which replaces Tinker's name for it. With `stacked`, matrices may
    have three dimensions, as those of experts in Tinker's exports.
    """
    config = _read_config(directory)
    is_ours = plain and _is_ours(config, multiples)
    patterns = cast("dict[str, int]", config.get("rank_pattern") or {}) if is_ours else {}
    has_experts = is_ours and bool(config.get("target_parameters"))
    if is_ours:
        config = {name: value for name, value in config.items() if name not in OWN_SETTINGS}
    _refuse_unknown(config)
    if plain:
        _require_plain(config)
    rank, alpha = cast(int, config["r"]), cast(float, config["lora_alpha"])
    linears, copies = _read_linears(directory / WEIGHTS_FILE, head, stacked)
    if plain and copies:
        raise UserError(
            f"{WEIGHTS_FILE} holds {next(iter(copies.values()))!r}, a copy of the base's weights; {IMPORT_HINT}"
        )
    experts = frozenset(name for name in linears if has_experts and name.endswith((".experts", ".experts.base_layer")))
    separate = experts | {name for name in linears if name.rpartition(".")[2] in patterns}
    info = AdapterInfo(
        rank=max((linear.rank for name, linear in linears.items() if name not in separate), default=rank),
        alpha=float(alpha),
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
        expected = _of_pattern(info.rank_pattern, name, rank)
        if linear.rank != expected:
            raise UserError(f"{WEIGHTS_FILE}: {name} has rank {linear.rank}, and {CONFIG_FILE} says {expected}")
        if plain and not linear.keys[0].endswith(".lora_A.weight"):
            raise UserError(f"{WEIGHTS_FILE} holds {linear.keys[0]!r}, not PEFT's own name; {IMPORT_HINT}")
    if not 1 <= info.rank <= MAX_RANK:
        raise UserError(f"{CONFIG_FILE}: the rank is {info.rank}; ranks go from 1 to {MAX_RANK}")
    for key, pattern_alpha in info.alpha_pattern.items():
        _check_alpha(f"alpha_pattern[{key!r}]", pattern_alpha)
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


@contextmanager
def refuse_invalid(path: Path) -> Iterator[None]:
    """Turn errors of reading a safetensors file into a UserError that names it."""
    from safetensors import SafetensorError

    try:
        yield
    except FileNotFoundError:
        other_formats = sorted(other.name for other in path.parent.glob("adapter_model.*"))
        hint = f", only {other_formats[0]}; load and save it with PEFT, as safetensors" if other_formats else ""
        raise UserError(f"there is no {path.name}{hint}") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path.name} is not a complete safetensors file: {error}") from None


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and shape of each tensor in a safetensors file. Raises UserError if the file is invalid."""
    from safetensors import safe_open

    with refuse_invalid(path):
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
    rank, alpha = config["r"], config["lora_alpha"]
    if not _is_number(rank, int) or not _is_number(alpha, int, float):
        raise UserError(f"{CONFIG_FILE}: r is {rank!r} and lora_alpha is {alpha!r}; both must be numbers")
    _check_alpha("lora_alpha", alpha)
    if config.get("bias", "none") != "none":
        raise UserError(f"{CONFIG_FILE}: bias is {config['bias']!r}; only adapters without biases are supported")
    start = config.get("init_lora_weights", True)
    if start not in PLAIN_INITS:
        raise UserError(
            f"{CONFIG_FILE}: init_lora_weights is {start!r}, which changes the base model; convert the adapter with "
            "PEFT (save_pretrained with path_initial_model_for_weight_conversion) first"
        )
    return config


def _check_alpha(field: str, alpha: float) -> None:
    if not 0 < alpha < MAX_ALPHA:
        raise UserError(f"{CONFIG_FILE}: {field} is {alpha!r}; alpha must be positive, and below {MAX_ALPHA:g}")


def _is_ours(config: Mapping[str, object], multiples: Mapping[str, int]) -> bool:
    """Whether ranks and alphas vary only as in our own checkpoints with these multiples."""
    patterns = {name: config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    ranks, parameters = patterns["rank_pattern"], config.get("target_parameters") or []
    if not isinstance(ranks, dict) or not isinstance(parameters, list) or not (ranks or parameters):
        return False
    if (EXPERTS_PATTERN in ranks) != any(str(name).endswith(EXPERTS_PATTERN) for name in parameters):
        return False
    times = {key: multiples.get(key, 0) for key in ranks}
    return patterns == describe_patterns(cast(int, config["r"]), cast(float, config["lora_alpha"]), times)


def _refuse_unknown(config: Mapping[str, object]) -> None:
    unknown = sorted(name for name, value in config.items() if value and name not in HARMLESS_SETTINGS)
    if unknown:
        raise UserError(f"{CONFIG_FILE} sets {', '.join(map(ascii, unknown))}, which is not supported here")


def _require_plain(config: Mapping[str, object]) -> None:
    for name in ("rank_pattern", "alpha_pattern"):
        if config.get(name):
            raise UserError(f"{CONFIG_FILE} has a {name}; {IMPORT_HINT}")


def _read_linears(path: Path, head: str, stacked: bool) -> tuple[dict[str, AdaptedLinear], dict[str, str]]:
    """The linears, and the copies of the base's embeddings."""
    copies: dict[str, str] = {}
    sides: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for key, (dtype, shape) in read_header(path).items():
        match = _LORA_KEY.fullmatch(key)
        copy_match = None if match else _BASE_WEIGHT_KEY.fullmatch(key)
        if copy_match and copy_match["name"].rpartition(".")[2] in (*UNEMBEDDINGS, "embed_tokens"):
            copies[copy_match["name"]] = key
            continue
        if match is None or len(shape) not in ((2, 3) if stacked else (2,)):
            raise UserError(f"{path.name} holds {key!r} {list(shape)}, which is not a LoRA matrix of a linear")
        if dtype not in FLOATS:
            raise UserError(f"{path.name}: {key!r} is {dtype}; weights must be floating-point numbers")
        name = head if match["name"] == UNEMBED_TOKENS else match["name"]
        matrices = sides.setdefault(name, {})
        if match["side"] in matrices:
            raise UserError(f"{path.name} holds {name} twice; keep one adapter in a file")
        matrices[match["side"]] = (key, shape)
    linears = {}
    for name, matrices in sides.items():
        shapes = {side: shape for side, (_, shape) in matrices.items()}
        if len(shapes) != 2 or shapes["A"][-2] != shapes["B"][-1] or 0 in shapes["A"] + shapes["B"]:
            actual = " and ".join(f"lora_{side} {list(shapes[side])}" for side in sorted(shapes))
            raise UserError(
                f"{path.name}: {name} must have lora_A [rank, inputs] and lora_B [outputs, rank]; it has {actual}"
            )
        keys = matrices["A"][0], matrices["B"][0]
        linears[name] = AdaptedLinear(shapes["A"][-2], shapes["A"][-1], shapes["B"][-2], keys)
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
