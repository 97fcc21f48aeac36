"""Merges an adapter into its base model's weights, and rewrites PEFT adapters to our alpha.

Works on files, tensor by tensor, in float32: builds no model and holds at most one shard in memory. Every linear of the
adapter must be in the base with the same sizes, otherwise the merge is refused with its name. The output is complete or
absent. Knows no server.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tinsmith.errors import UserError
from tinsmith.storage.directories import atomic_directory
from tinsmith.types import LORA_ALPHA
from tinsmith.wire.adapter_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterInfo,
    encode_config,
    group_of,
    matrix_keys,
    read_adapter,
    read_header,
)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHARD_PATTERN = "model{suffix}.safetensors"
OTHER_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "LICENSE*", "additional_chat_templates")
"""Other files of a model's directory, which are copied."""

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
FILE_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPE_BYTES: Mapping[str, int] = {
    **{"F64": 8, "F32": 4, "BF16": 2, "F16": 2},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1},
}
SHARD_BYTES = 5_000_000_000
SEED = 0

Progress = Callable[[int, int], None]
"""Called with the number of tensors done and in all."""


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """A tensor of the base: its file and its key there."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the result: its source, its adapted linear, and the dtype it is rounded to."""

    source: BaseTensor
    linear: str | None
    dtype: torch.dtype | None  # None: the source's


def _num_bytes(tensor: PlannedTensor) -> int:
    width = DTYPE_BYTES[tensor.source.dtype] if tensor.dtype is None else tensor.dtype.itemsize
    return math.prod(tensor.source.shape) * width


@dataclass(frozen=True, slots=True)
class MergeResult:
    path: Path
    dtype: str
    linears: int
    shards: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MergePlan:
    """What a merge will write, by the headers of the files alone."""

    base: Path
    adapter: Path
    info: AdapterInfo
    config: Mapping[str, object]
    dtype: torch.dtype
    tensors: Mapping[str, PlannedTensor]

    @property
    def size_bytes(self) -> int:
        """The size of the weights."""
        return sum(map(_num_bytes, self.tensors.values()))

    @property
    def largest_tensor_bytes(self) -> int:
        """The size of the largest tensor of the result."""
        return max(map(_num_bytes, self.tensors.values()), default=0)

    @property
    def largest_work_bytes(self) -> int:
        """Memory for the largest tensor in work: its source, and in float32 itself, the update and their sum."""
        elements = max((math.prod(tensor.source.shape) for tensor in self.tensors.values()), default=0)
        return elements * 4 * 4

    def split(self, shard_bytes: int) -> StateDictSplit:
        """The files of the result, and which tensors each holds."""
        return split_state_dict_into_shards_factory(
            dict(self.tensors), get_storage_size=_num_bytes, filename_pattern=SHARD_PATTERN, max_shard_size=shard_bytes
        )

    def count_bytes(self, shard_bytes: int) -> list[int]:
        """The bytes that are merged after each number of tensors, from none to all."""
        names = [name for names in self.split(shard_bytes).filename_to_tensors.values() for name in names]
        return list(itertools.accumulate((_num_bytes(self.tensors[name]) for name in names), initial=0))


def plan_merge(base: Path, adapter: Path, dtype: str = "auto") -> MergePlan:
    """Check that an adapter fits its base. `dtype` auto keeps the base's. Raises UserError."""
    info = read_adapter(adapter)
    config = _base_config(base)
    base_tensors = _list_tensors(base)
    base_dtype = _majority_dtype(base_tensors.values())
    merged_dtype = _dtype(dtype, base_dtype)
    tensors = _plan(info, base_tensors, base_dtype, merged_dtype)
    _compare_copies(info, adapter / WEIGHTS_FILE, base_tensors)
    if tensors.keys() != base_tensors.keys():
        config = _untie_embeddings(config)
    if dtype != "auto":
        config = {name: value for name, value in config.items() if name != "torch_dtype"} | {"dtype": dtype}
    return MergePlan(base, adapter, info, config, merged_dtype, tensors)


def merge(
    base: Path,
    adapter: Path,
    output: Path,
    *,
    dtype: str = "auto",
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda _num_done, _num_tensors: None,
) -> MergeResult:
    """Write base + adapter as a Hugging Face model. `dtype` auto keeps the base's. Raises UserError."""
    return write_merge(plan_merge(base, adapter, dtype), output, shard_bytes=shard_bytes, progress=progress)


def write_merge(
    plan: MergePlan,
    output: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda _num_done, _num_tensors: None,
) -> MergeResult:
    """Write the model of a plan; `output` is complete or absent. Raises UserError."""
    shards = plan.split(shard_bytes)
    with atomic_directory(output) as hidden:
        _copy_other_files(plan.base, hidden)
        _write_shards(hidden, shards, plan.tensors, plan.info, plan.adapter / WEIGHTS_FILE, progress)
        (hidden / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n")
        size_bytes = sum(path.stat().st_size for path in hidden.glob("*.safetensors"))
    dtype = str(plan.dtype).removeprefix("torch.")
    return MergeResult(output, dtype, len(plan.info.linears), len(shards.filename_to_tensors), size_bytes)


def rewrite(adapter: Path, output: Path, base: Callable[[], Path]) -> AdapterInfo:
    """Write an adapter in the format that engines load: float32, one rank, our alpha. Its logits stay equal up to
    float32 rounding. `base` finds the base model, which is needed if the adapter holds copies of its weights.
    """
    info = read_adapter(adapter)
    if info.copies:
        _compare_copies(info, adapter / WEIGHTS_FILE, _list_tensors(base()))
    generator = torch.Generator().manual_seed(SEED)
    tensors: dict[str, Tensor] = {}
    with safe_open(adapter / WEIGHTS_FILE, framework="pt") as opened:
        for name, linear in info.linears.items():
            a_rI, b_Or = (opened.get_tensor(key).double() for key in linear.keys)
            if not (a_rI.isfinite().all() and b_Or.isfinite().all()):
                raise UserError(f"{WEIGHTS_FILE}: {name} holds numbers that are not finite")
            b_Or = b_Or * (info.scale(name) / (LORA_ALPHA / info.rank))
            missing = info.rank - linear.rank
            if missing:
                # Initialised like a new adapter: no effect, but trainable.
                bound = linear.in_features**-0.5
                new_mI = (
                    torch.rand(missing, linear.in_features, generator=generator, dtype=torch.float64) * 2 - 1
                ) * bound
                a_rI, b_Or = torch.cat([a_rI, new_mI]), torch.cat([b_Or, b_Or.new_zeros(len(b_Or), missing)], 1)
            for key, matrix in zip(matrix_keys(name), (a_rI, b_Or), strict=True):
                tensors[key] = matrix.float().contiguous()
    with atomic_directory(output) as hidden:
        save_file(tensors, hidden / WEIGHTS_FILE, metadata={"format": "pt"})
        (hidden / CONFIG_FILE).write_text(encode_config(info.base_name, info.rank, LORA_ALPHA, sorted(info.linears)))
    return read_adapter(output, plain=True)


def _compare_copies(info: AdapterInfo, weights: Path, base_tensors: Mapping[str, BaseTensor]) -> None:
    """PEFT stores the embeddings with an adapter of the unembedding. Raises UserError if they differ from the base's,
    which means that they were trained or resized.
    """
    for name, key in info.copies.items():
        source = base_tensors.get(f"{name}.weight") or _embedding(base_tensors, name)
        with safe_open(weights, framework="pt") as adapter_file, safe_open(source.file, framework="pt") as base_file:
            copy, weight = adapter_file.get_tensor(key), base_file.get_tensor(source.key)
        if not (torch.equal(copy.to(weight.dtype), weight) or torch.equal(weight.to(copy.dtype), copy)):
            raise UserError(
                f"{WEIGHTS_FILE} holds {key!r}, which differs from the base model's: weights that were trained in "
                "full, or resized, are not supported"
            )


def _base_config(base: Path) -> dict[str, object]:
    try:
        config = json.loads((base / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{base} is not a model's directory: config.json cannot be read ({error})") from None
    if config.get("quantization_config"):
        raise UserError(f"{base} is quantised (quantization_config); merge into the model that it was quantised from")
    return config


def _list_tensors(base: Path) -> dict[str, BaseTensor]:
    """All tensors of a model by name, in the order of its files."""
    if (base / SINGLE_FILE).is_file():
        files = [base / SINGLE_FILE]
    elif (base / INDEX_FILE).is_file():
        weight_map: dict[str, str] = json.loads((base / INDEX_FILE).read_bytes())["weight_map"]
        files = [base / name for name in dict.fromkeys(weight_map.values())]
    else:
        raise UserError(f"{base} has neither {SINGLE_FILE} nor {INDEX_FILE}; no other format is read")
    base_tensors = {
        key: BaseTensor(file, key, dtype, shape) for file in files for key, (dtype, shape) in read_header(file).items()
    }
    for name, tensor in base_tensors.items():
        if tensor.dtype not in DTYPE_BYTES:
            raise UserError(f"{tensor.file.name} holds {name!r} as {tensor.dtype}; such a base cannot be merged into")
    return base_tensors


def _majority_dtype(base_tensors: Iterable[BaseTensor]) -> torch.dtype:
    """The dtype of most parameters of the base."""
    counts: Counter[str] = Counter()
    for tensor in base_tensors:
        if tensor.dtype in FILE_DTYPES:
            counts[tensor.dtype] += math.prod(tensor.shape)
    if not counts:
        raise UserError("the base holds no floating-point weights")
    return FILE_DTYPES[counts.most_common(1)[0][0]]


def _dtype(name: str, base_dtype: torch.dtype) -> torch.dtype:
    if name != "auto" and name not in DTYPES:
        raise UserError(f"dtype is {name!r}; it must be auto, {', '.join(DTYPES)}")
    return base_dtype if name == "auto" else DTYPES[name]


def _plan(
    info: AdapterInfo,
    base_tensors: Mapping[str, BaseTensor],
    base_dtype: torch.dtype,
    merged_dtype: torch.dtype,
) -> dict[str, PlannedTensor]:
    """Tensors whose dtype differs from that of most of the base (such as a router in float32) keep it."""
    sources = dict(base_tensors)
    for name, linear in info.linears.items():
        source = base_tensors.get(f"{name}.weight")
        if source is None and group_of(name) == "unembed":
            source = sources[f"{name}.weight"] = _embedding(base_tensors, name)
        sizes = (linear.out_features, linear.in_features)
        if source is None:
            raise UserError(
                f"the adapter changes {name!r}, and the base's files hold no {name}.weight; it belongs to another "
                "base, or to a family whose files name their weights differently: merge it with PEFT's merge_and_unload"
            )
        if source.shape != sizes or source.dtype not in FILE_DTYPES:
            raise UserError(
                f"{name}.weight of the base is {source.dtype} {list(source.shape)}, and the adapter is for "
                f"floating-point {list(sizes)}; it belongs to another base"
            )
    return {
        name: PlannedTensor(
            source,
            linear if (linear := name.removesuffix(".weight")) in info.linears else None,
            merged_dtype if FILE_DTYPES.get(source.dtype) == base_dtype else None,
        )
        for name, source in sources.items()
    }


def _embedding(base_tensors: Mapping[str, BaseTensor], head: str) -> BaseTensor:
    """The tied weights of an unembedding that is not in the files."""
    embeddings = [
        tensor for name, tensor in base_tensors.items() if name.endswith(("embed_tokens.weight", "wte.weight"))
    ]
    if len(embeddings) != 1:
        raise UserError(f"the base's files hold no {head}.weight, and no single embedding to share")
    return embeddings[0]


def _untie_embeddings(config: Mapping[str, object]) -> dict[str, object]:
    """The configuration with untied embeddings, since only the unembedding is updated."""
    changed = dict(config) | {"tie_word_embeddings": False}
    if isinstance(text := config.get("text_config"), dict):
        changed["text_config"] = {**text, "tie_word_embeddings": False}
    return changed


def _write_shards(
    hidden: Path,
    shards: StateDictSplit,
    plan: Mapping[str, PlannedTensor],
    info: AdapterInfo,
    weights: Path,
    progress: Progress,
) -> None:
    num_done = 0
    with ExitStack() as stack:
        files = {
            file: stack.enter_context(safe_open(file, framework="pt"))
            for file in {planned.source.file for planned in plan.values()}
        }
        updates = stack.enter_context(safe_open(weights, framework="pt"))
        for file_name, names in shards.filename_to_tensors.items():
            tensors = {}
            for name in names:
                planned = plan[name]
                weight = files[planned.source.file].get_tensor(planned.source.key)
                tensors[name] = _merge_tensor(weight, planned, info, updates)
                num_done += 1
                progress(num_done, len(plan))
            save_file(tensors, hidden / file_name, metadata={"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (hidden / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _merge_tensor(weight_OI: Tensor, planned: PlannedTensor, info: AdapterInfo, updates: safe_open) -> Tensor:
    if planned.linear is not None:
        a_rI, b_Or = (updates.get_tensor(key).float() for key in info.linears[planned.linear].keys)
        base_dtype = weight_OI.dtype
        weight_OI = weight_OI.float() + (b_Or @ a_rI) * info.scale(planned.linear)
        if not weight_OI.isfinite().all():
            raise UserError(f"{planned.linear}: the merged weights are not all finite")
        weight_OI = weight_OI.to(planned.dtype or base_dtype)
    elif planned.dtype is not None:
        weight_OI = weight_OI.to(planned.dtype)
    return weight_OI.contiguous()


def _copy_other_files(base: Path, hidden: Path) -> None:
    """Copy all files except the weights and their index."""
    for path in {path for pattern in OTHER_FILES for path in base.glob(pattern)}:
        if path.is_dir():
            shutil.copytree(path, hidden / path.name)
        elif not path.name.endswith(".index.json"):
            shutil.copyfile(path, hidden / path.name)
