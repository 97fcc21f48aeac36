"""An object of a store as a file that can be read at any place, for libraries that ask for one."""

from __future__ import annotations

import io

from tinsmith.storage.stores import CHUNK_BYTES, open_store


class RangedFile(io.RawIOBase):
    def __init__(self, location: str) -> None:
        super().__init__()
        self._store, self._key = open_store(location)
        self._size = self._store.head(self._key).size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        end = min(self._size, self._at + len(buffer))
        if end <= self._at:
            return 0
        data = self._store.get_range(self._key, self._at, end)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def open_ranged(location: str) -> io.BufferedReader:
    return io.BufferedReader(RangedFile(location), CHUNK_BYTES)
