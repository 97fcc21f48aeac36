"""Rows that travel with the job itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinsmith.batch.formats.encoding import encode
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY, InputReader
from tinsmith.batch.types import Row

MAX_BYTES = 8 * 1024 * 1024


@INPUT_READER_REGISTRY.type_register(name="items")
@dataclass
class ItemsReader(InputReader):
    """A list of rows. For small ones: the job's specification holds them, and every worker gets all of them."""

    path: str = "items"
    items: list[Row] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        for index, row in enumerate(self.items):
            if not isinstance(row, dict):
                raise ValueError(f"row {index} is a {type(row).__name__}; a row is an object")
        size = len(encode(self.items))
        if size > MAX_BYTES:
            raise ValueError(f"the rows are {size} bytes; more than {MAX_BYTES} belong in a file (batch.read_json)")

    def __len__(self) -> int:
        return len(self.items)

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        return self.items[start_idx : end_idx + 1]
