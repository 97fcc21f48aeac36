"""Commands and results between ranks as bytes: numbers, text, arrays, and the values of `ops`.

MessagePack, with extensions for what it has not. Nothing in such bytes is ever called: only the classes that are
listed here are made, from their fields.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import cast

import msgpack
import numpy as np

from tinsmith import errors, types
from tinsmith.backends.distributed.degrees import Degrees
from tinsmith.samplers import CacheUse

TUPLE, ARRAY, VALUE, ERROR, ELLIPSIS, INTEGER = range(1, 7)

VALUES = {
    **{name: found for name, found in inspect.getmembers(types, inspect.isclass) if dataclasses.is_dataclass(found)},
    "CacheUse": CacheUse,
    "Degrees": Degrees,
}

ERRORS = {
    name: found
    for name, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, errors.TinsmithError)
}


def encode(value: object) -> bytes:
    """Raises TypeError on anything that has no form here."""
    return cast(bytes, msgpack.packb(value, default=_extension, strict_types=True))


def decode(data: bytes) -> object:
    return msgpack.unpackb(data, ext_hook=_restored, strict_map_key=False)


def _extension(value: object) -> object:
    if isinstance(value, tuple):
        return msgpack.ExtType(TUPLE, encode(list(value)))
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(ARRAY, encode([value.dtype.str, list(value.shape), value.tobytes()]))
    if VALUES.get(type(value).__name__) is type(value):
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]  # pyright: ignore[reportArgumentType]
        return msgpack.ExtType(VALUE, encode([type(value).__name__, fields]))
    if ERRORS.get(type(value).__name__) is type(value):
        return msgpack.ExtType(ERROR, encode([type(value).__name__, str(value)]))
    if isinstance(value, Mapping):
        return dict(value)
    if value is ...:
        return msgpack.ExtType(ELLIPSIS, b"")
    if isinstance(value, int):  # of more than 64 bits
        return msgpack.ExtType(INTEGER, str(value).encode())
    raise TypeError(f"a {type(value).__name__} has no form between ranks")


def _restored(code: int, data: bytes) -> object:
    if code == ELLIPSIS:
        return ...
    if code == INTEGER:
        return int(data)
    parts = decode(data)
    assert isinstance(parts, list)
    if code == TUPLE:
        return tuple(parts)
    if code == ARRAY:
        dtype, shape, content = parts
        return np.frombuffer(content, dtype).reshape(shape)
    if code == VALUE:
        name, fields = parts
        return VALUES[name](*fields)
    if code == ERROR:
        name, text = parts
        return ERRORS[name](text)
    raise ValueError(f"extension {code} is unknown")
