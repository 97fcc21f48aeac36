"""Estimates of the tokens of rows, for jobs with `batch_tokens`: four bytes of a row as JSON are one token.

Readers find the bytes without decoding a row: from the offsets of lines, of members in an archive, or of values in
Arrow's buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pyarrow

BYTES_PER_TOKEN = 4
JSON_BYTES_OF_COLUMN = len('"":"",')
"""What a row as JSON has for each column beside its name and its value."""


def tokens_in(num_bytes: int) -> int:
    return 1 + num_bytes // BYTES_PER_TOKEN


def tokens_of_table(table: pyarrow.Table) -> Iterator[int]:
    """The estimate of each row of a table. Only the offsets of texts and lists are read."""
    import numpy as np

    names = sum(len(name.encode()) + JSON_BYTES_OF_COLUMN for name in table.column_names)
    sizes = np.full(table.num_rows, names, np.int64)
    for column in table.columns:
        sizes += np.concatenate([_bytes_of(chunk) for chunk in column.chunks] or [np.zeros(0, np.int64)])
    return map(tokens_in, sizes.tolist())


def _bytes_of(array: Any) -> np.ndarray:  # noqa: ANN401  an array of pyarrow
    """The bytes of each value of an array: int64 [rows]; 0 for null."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute

    pc: Any = pyarrow.compute
    kind = array.type
    if isinstance(kind, pa.ExtensionType):
        return _bytes_of(array.storage)
    if pa.types.is_dictionary(kind):
        return _bytes_of(array.dictionary_decode())
    if pa.types.is_struct(kind):
        parts = [_bytes_of(field) for field in array.flatten()]
        return sum(parts, np.zeros(len(array), np.int64))
    if pa.types.is_fixed_size_list(kind):
        sizes = _bytes_of(array.flatten()) if not array.null_count else None
        width = kind.list_size
        return np.zeros(len(array), np.int64) if sizes is None or not width else sizes.reshape(-1, width).sum(axis=1)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        ends = np.concatenate([[0], np.cumsum(pc.fill_null(pc.list_value_length(array), 0).to_numpy(False))])
        totals = np.concatenate([[0], np.cumsum(_bytes_of(array.flatten()))])
        return np.diff(totals[ends.astype(np.int64)])
    if (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    ):
        return pc.fill_null(pc.binary_length(array), 0).to_numpy(False).astype(np.int64)
    try:
        width = max(1, kind.bit_width // 8)
    except ValueError:  # of null, for one
        width = 0
    return np.full(len(array), width, np.int64)
