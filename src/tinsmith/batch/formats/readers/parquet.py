"""Rows of Parquet files, by row groups: a batch reads those that it touches, and no others."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from tinsmith.batch.formats.protocols import InputReader, Row
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY
from tinsmith.storage.stores import locations, open_object


@INPUT_READER_REGISTRY.type_register(name="parquet")
@dataclass
class ParquetReader(InputReader):
    """`path` is a file, a directory with a final slash, or a pattern. `columns`, if given, are the ones to read."""

    in_store = True

    columns: list[str] | None = None
    _groups: list[tuple[Any, int]] | None = field(default=None, init=False, repr=False, compare=False)
    _ends: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        self._open()
        return self._ends[-1] if self._ends else 0

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        groups = self._open()
        if not 0 <= start_idx <= end_idx < len(self):
            raise IndexError(f"rows {start_idx} to {end_idx} of {self.path}, which has {len(self)}")
        rows: list[Row] = []
        number = bisect_right(self._ends, start_idx)
        while len(rows) <= end_idx - start_idx:
            file, group = groups[number]
            before = self._ends[number - 1] if number else 0
            first, last = max(start_idx, before) - before, min(end_idx + 1, self._ends[number]) - before
            table = file.read_row_group(group, columns=self.columns)
            rows += table.slice(first, last - first).to_pylist()
            number += 1
        return rows

    def _open(self) -> list[tuple[Any, int]]:
        if self._groups is None:
            import pyarrow.parquet

            found = [name for name in locations(self.path) if not self.path.endswith("/") or name.endswith(".parquet")]
            if not found:
                raise FileNotFoundError(f"no file is named {self.path}")
            try:
                files = [pyarrow.parquet.ParquetFile(open_object(location)) for location in found]
            except FileNotFoundError:
                raise FileNotFoundError(f"no file is named {self.path}") from None
            self._groups = [(file, group) for file in files for group in range(file.num_row_groups)]
            self._ends = list(accumulate(file.metadata.row_group(group).num_rows for file, group in self._groups))
        return self._groups
