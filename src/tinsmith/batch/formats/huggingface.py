"""Rows of a Hugging Face data set: a directory that `save_to_disk` made, or a name on the hub."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinsmith.batch.formats import input_versions
from tinsmith.batch.formats.input_versions import Version
from tinsmith.batch.formats.offset_cache import cache_directory
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY, InputReader
from tinsmith.batch.types import Row
from tinsmith.errors import UserError


@INPUT_READER_REGISTRY.type_register(name="huggingface")
@dataclass
class HuggingFaceReader(InputReader):
    """`split` is needed wherever the data set has more than one."""

    split: str | None = None
    name: str | None = None
    revision: str | None = None
    _loaded: Any = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self._dataset())

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        columns = self._dataset()[start_idx : end_idx + 1]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def version(self) -> Version:
        if Path(self.path).is_dir():
            return input_versions.of_files(sorted(str(path) for path in Path(self.path).rglob("*") if path.is_file()))
        return {self.path: {"fingerprint": getattr(self._dataset(), "_fingerprint", None)}}

    def _dataset(self) -> Any:  # noqa: ANN401
        if self._loaded is None:
            import datasets

            if Path(self.path).is_dir() and any(Path(self.path).glob("*.json")):
                loaded: Any = datasets.load_from_disk(self.path)
            else:
                loaded = datasets.load_dataset(self.path, self.name, split=self.split, revision=self.revision)
            if isinstance(loaded, dict):
                if self.split not in loaded:
                    raise UserError(f"{self.path} has the splits {sorted(loaded)}; split is {self.split!r}")
                loaded = loaded[self.split]
            self._loaded = loaded
        return self._loaded


def reader_of(dataset: object, split: str | None, **options: Any) -> HuggingFaceReader:  # noqa: ANN401
    """A reader of a name, a directory, or a data set in memory, which is first saved in this machine's cache for its
    workers."""
    if isinstance(dataset, str):
        return HuggingFaceReader(dataset, split, **options)
    fingerprint = getattr(dataset, "_fingerprint", None)
    if fingerprint is None:
        raise UserError(f"{type(dataset).__name__} is not a data set with one split; pass one of its splits")
    directory = cache_directory() / f"huggingface-{fingerprint}"
    if not directory.exists():
        unfinished = directory.with_name(f"{directory.name}.unfinished")
        dataset.save_to_disk(str(unfinished))  # type: ignore[attr-defined]
        unfinished.rename(directory)
    return HuggingFaceReader(str(directory))
