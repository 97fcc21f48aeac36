"""The base models that this server offers: names, directories, and the limits for validating requests.

Resident models are loaded at start, the others on demand: at their first request. Only a model's JSON files are read,
never its weights. A hub id is resolved to a local directory, downloading it if needed, before the server starts; the
weights of a model on demand are downloaded when it is loaded (`download_weights`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import structlog

from tinsmith.base_models import nano
from tinsmith.errors import NotFoundError, SettingsError
from tinsmith.types import CONFIG_DEFAULTS, VISION_TYPES, ModelShape, VisionShape

INDEXED_MODEL_TYPES = frozenset({"deepseek_v32", "glm_moe_dsa"})
"""Values of model_type whose attention sees only the `index_topk` tokens that an indexer selects; config.json may omit
transformers' default, 2,048.
"""

SMALL_HUB_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
HUB_FILES = (*SMALL_HUB_FILES, "*.safetensors")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Bases:
    """The served base models, by name. `hub_ids` has those on demand whose weights may not be on this disk."""

    shapes: tuple[ModelShape, ...]
    on_demand: frozenset[str] = frozenset()
    hub_ids: Mapping[str, str] = field(default_factory=dict)

    @property
    def resident(self) -> tuple[ModelShape, ...]:
        """The base models that are loaded at start."""
        return tuple(shape for shape in self.shapes if shape.name not in self.on_demand)

    def __iter__(self) -> Iterator[ModelShape]:
        return iter(self.shapes)

    def get(self, name: str) -> ModelShape:
        """The base model. Raises a NotFoundError that lists the served models."""
        for shape in self.shapes:
            if shape.name == name:
                return shape
        served = ", ".join(repr(shape.name) for shape in self.shapes)
        raise NotFoundError(f"base_model {name!r} is not served here; served: {served}")


def resolve(
    models: Iterable[str],
    *,
    vision: bool = True,
    models_from: Iterable[Path] = (),
    allow_models: Iterable[str] = (),
) -> Bases:
    """Resolve `NAME=DIRECTORY_OR_HUB_ID` entries. The models of the directories `models_from` and the entries
    `allow_models` are loaded on demand; `models` take precedence. Without any, the embedded model is served.
    """
    directories, allowed = list(models_from), list(allow_models)
    entries = list(models) or ([] if directories or allowed else [f"{nano.MODEL_NAME}={nano.path()}"])
    shapes = [_resolve_entry(entry, "--model", HUB_FILES, vision=vision)[0] for entry in entries]
    _refuse_duplicates("--model", [shape.name for shape in shapes])
    residents = {shape.name for shape in shapes}
    resolved = [_resolve_entry(entry, "--allow-model", SMALL_HUB_FILES, vision=vision) for entry in allowed]
    loadable = [shape for shape, _ in resolved]
    for directory in directories:
        loadable += _scan(directory, residents, vision=vision)
    _refuse_duplicates("--models-from and --allow-model", [shape.name for shape in loadable])
    shapes += [shape for shape in loadable if shape.name not in residents]
    hub_ids = {shape.name: hub_id for shape, hub_id in resolved if hub_id}
    return Bases(tuple(shapes), frozenset(shape.name for shape in shapes) - residents, hub_ids)


def _refuse_duplicates(flag: str, names: Sequence[str]) -> None:
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        advice = "give each its own NAME=..." if flag == "--model" else "name each once"
        raise SettingsError(f"{flag} names {duplicates} more than once; {advice}")


def _scan(root: Path, residents: Collection[str], *, vision: bool) -> list[ModelShape]:
    """The models of a directory's subdirectories NAME and ORG/NAME; without those that are resident or unusable."""
    directory = root.expanduser().resolve()
    if not directory.is_dir():
        raise SettingsError(f"--models-from {str(root)!r}: the directory {directory} does not exist")
    shapes: list[ModelShape] = []
    for path in sorted({file.parent for depth in ("*", "*/*") for file in directory.glob(f"{depth}/config.json")}):
        name = path.relative_to(directory).as_posix()
        if name in residents or (path.parent != directory and (path.parent / "config.json").exists()):
            continue  # a part of a model, such as its image tower
        try:
            shapes.append(read_shape(name, path.resolve(), vision=vision))
        except SettingsError as error:
            log.warning("a directory is no base model", directory=str(path), reason=str(error))
    if not shapes and not residents:
        raise SettingsError(
            f"--models-from {str(root)!r} has no base model; one is a subdirectory NAME or ORG/NAME with a config.json"
        )
    return shapes


def download_weights(shape: ModelShape, hub_id: str) -> None:
    """Download the weights of a model whose JSON files are in the hub's cache, of the same revision.

    Raises SettingsError.
    """
    _download(hub_id, "--allow-model", HUB_FILES, revision=Path(shape.path).name)


def read_shape(name: str, directory: Path, *, vision: bool = True) -> ModelShape:
    """Read a model's shape from its config.json and, with `vision`, from its image processor's configuration."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        raise SettingsError(f"model {name!r}: {directory} has no config.json") from None
    except ValueError as error:
        raise SettingsError(f"model {name!r}: {directory / 'config.json'} is not JSON: {error}") from None
    text = config.get("text_config", config)
    text = {**CONFIG_DEFAULTS.get(text.get("model_type"), {}), **text}
    is_long = name == nano.LONG_NAME and directory.resolve() == nano.path().resolve()
    try:
        return ModelShape(
            name=name,
            path=str(directory),
            vocab_size=int(text["vocab_size"]),
            max_context_length=nano.LONG_CONTEXT if is_long else _context(text),
            arch=str((config.get("architectures") or [config.get("model_type", "unknown")])[0]),
            vision=_vision(config, directory) if vision else None,
        )
    except KeyError as error:
        raise SettingsError(
            f"model {name!r}: config.json, or the file of its image processor, has no {error}; is it a causal language "
            "model?"
        ) from None


def _vision(config: dict[str, Any], directory: Path) -> VisionShape | None:
    """Read the vision shape; None for a text model or without an image processor's file. Raises KeyError."""
    if config.get("model_type") not in VISION_TYPES:
        return None
    image_processor: Any = json_object(directory / "preprocessor_config.json")
    image_processor = image_processor or json_object(directory / "processor_config.json").get("image_processor")
    if not isinstance(image_processor, dict) or not image_processor:
        return None
    processor: dict[str, Any] = image_processor
    size = processor.get("size") or {}
    if config["model_type"] == "gemma3":
        return _square_vision(config, int(size["height"]))
    return VisionShape(
        image_token_id=int(config["image_token_id"]),
        token_pixels=int(processor["patch_size"]) * int(processor["merge_size"]),
        min_pixels=int(processor.get("min_pixels") or size["shortest_edge"]),
        max_pixels=int(processor.get("max_pixels") or size["longest_edge"]),
    )


def _square_vision(config: dict[str, Any], height: int) -> VisionShape:
    """The shape of a model that resizes every image to one square. transformers' config.json omits default values."""
    side = math.isqrt(int(config.get("mm_tokens_per_image", 256)))
    return VisionShape(
        image_token_id=int(config.get("image_token_index", 262_144)),
        token_pixels=height // side,
        min_pixels=height**2,
        max_pixels=height**2,
        side_tokens=side,
        begin_token_id=int(config.get("boi_token_index", 255_999)),
        end_token_id=int(config.get("eoi_token_index", 256_000)),
    )


def _context(text: Mapping[str, Any]) -> int:
    """Return the longest sequence. With RoPE of type 'longrope' it is the length up to which keys are not rescaled;
    with sparse attention, the length up to which attention sees all tokens.
    """
    # GPT-2 and similar models name it n_positions.
    longest = text.get("model_max_length") or text.get("max_position_embeddings") or text.get("n_positions")
    context = int(longest or text["max_position_embeddings"])
    if text.get("model_type") in INDEXED_MODEL_TYPES:
        context = min(context, int(text.get("index_topk", 2048)))
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) == "longrope":
        original_context = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
        context = min(context, int(original_context or context))
    return context


SPECIAL_TOKEN_KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def read_special_tokens(shape: ModelShape) -> dict[str, str]:
    """The special tokens that the tokenizer's configuration names: bos_token, eos_token and so on."""
    config = json_object(Path(shape.path) / "tokenizer_config.json")
    entries = {f"{kind}_token": config.get(f"{kind}_token") for kind in SPECIAL_TOKEN_KINDS}
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in entries.items()}
    return {name: token for name, token in contents.items() if isinstance(token, str)}


def tokenizer_info(shape: ModelShape) -> dict[str, object]:
    """The tokenizer's properties from the model's files; null for those that the files do not have."""
    config = json_object(Path(shape.path) / "tokenizer_config.json")
    added = cast("list[dict[str, object]]", json_object(Path(shape.path) / "tokenizer.json").get("added_tokens") or [])
    ids = {token["content"]: token["id"] for token in added}
    special_tokens = {
        kind: token.get("content") if isinstance(token, dict) else token
        for kind in ("pad", "eos", "bos", "unk")
        if (token := config.get(f"{kind}_token"))
    }
    return {
        "tokenizer_type": config.get("tokenizer_class"),
        "model_max_length": shape.max_context_length,
        **{f"{kind}_token_id": ids.get(special_tokens.get(kind)) for kind in ("pad", "eos", "bos")},
        "special_tokens": {f"{kind}_token": token for kind, token in special_tokens.items()},
    }


def eos_token_ids(shape: ModelShape) -> frozenset[int]:
    """Return the end-of-sequence tokens of all of the model's files."""
    directory = Path(shape.path)
    config = json_object(directory / "config.json")
    sources = (json_object(directory / "generation_config.json"), config.get("text_config", config))
    entries = [source.get("eos_token_id") for source in sources if isinstance(source, dict)]
    ids: set[int] = set()
    for entry in (*entries, tokenizer_info(shape)["eos_token_id"]):
        ids.update(entry if isinstance(entry, list) else [entry] if isinstance(entry, int) else [])
    return frozenset(ids)


def json_object(path: Path) -> dict[str, object]:
    """Read a file's JSON object; empty if the file has none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _resolve_entry(entry: str, flag: str, hub_files: Sequence[str], *, vision: bool) -> tuple[ModelShape, str]:
    """A model's shape, and its hub id if it is not a directory of this disk."""
    name, equals, target = entry.partition("=")
    if not equals:
        target = name
    if name == target and name in (nano.MODEL_NAME, nano.LONG_NAME):
        target = str(nano.path())
    if not name or not target:
        raise SettingsError(f"{flag} {entry!r} is not NAME=DIRECTORY_OR_HUB_ID")
    directory, hub_id = Path(target).expanduser(), ""
    if not directory.is_dir():
        if target.startswith(("/", ".", "~")):
            raise SettingsError(f"{flag} {entry!r}: the directory {directory} does not exist")
        hub_id, directory = target, _download(target, flag, hub_files)
    return read_shape(name, directory.resolve(), vision=vision), hub_id


def _download(hub_id: str, flag: str, files: Sequence[str], revision: str | None = None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(files)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())
        raise SettingsError(
            f"{flag}: could not load {hub_id!r}: no such local directory, and the hub did not provide it; "
            f"{flag} NAME=DIRECTORY serves a model from this disk. The hub's client reports: {reason}"
        ) from error
