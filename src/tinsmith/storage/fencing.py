"""Fencing tokens: which of several writers may replace an object, although an earlier one may go on at any time.

A token is a small object beside its target, with a value that no other writer has. `issue` replaces the token of every
earlier writer. A writer of the target enters `enforce` for the one step that makes its bytes visible: it raises
StaleWriterError if a later writer has issued a token, or if the token is gone.

- On the local disk, `issue` and `enforce` lock the token's file, so that no token is issued between the check and the
  rename. A file system without such locks leaves the time between these two system calls.
- In a bucket, `open_writer` reads the target's etag before `enforce`, and writes on the condition that it is unchanged.
  An upload of several parts has no condition; its check comes right before its completion.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tinsmith.storage.locations import open_store
from tinsmith.storage.stores import LocalStore, StaleWriterError

LOCK_S = 60.0
"""How long a writer waits for another one that is between its check and its rename."""
LOCK_PAUSE_S = 0.02
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class FencingToken:
    """The token of one writer, stored at `location` once it is issued."""

    location: str
    value: str

    def issue(self) -> None:
        store, key = open_store(self.location)
        if not isinstance(store, LocalStore):
            store.put(key, self.value.encode())
            return
        os.makedirs(os.path.dirname(key), exist_ok=True)
        with _lock(key, os.O_RDWR | os.O_CREAT) as descriptor:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, self.value.encode(), 0)
            os.fsync(descriptor)

    @contextlib.contextmanager
    def enforce(self) -> Iterator[None]:
        """A block for the step that makes the target's new bytes visible. Raises StaleWriterError."""
        store, key = open_store(self.location)
        with contextlib.ExitStack() as stack:
            try:
                if isinstance(store, LocalStore):
                    descriptor = stack.enter_context(_lock(key, os.O_RDWR))
                    stored = os.pread(descriptor, len(self.value.encode()) + 1, 0)
                else:
                    stored = store.get(key)
            except FileNotFoundError:
                stored = b""
            if stored != self.value.encode():
                raise StaleWriterError(f"a later writer has issued the token {self.location}")
            yield

    def release(self) -> None:
        """Delete the token, unless a later writer has issued one."""
        store, key = open_store(self.location)
        with contextlib.suppress(StaleWriterError), self.enforce():
            store.delete_many([key])


def read_token(location: str) -> FencingToken | None:
    """The newest token at a location; None if there is none."""
    store, key = open_store(location)
    try:
        return FencingToken(location, store.get(key).decode(errors="replace"))
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _lock(path: str, flags: int) -> Iterator[int]:
    """Open and lock the file that has this name now. Raises FileNotFoundError, TimeoutError."""
    deadline = time.monotonic() + LOCK_S
    while True:
        descriptor = os.open(path, flags, 0o644)
        try:
            _acquire(descriptor, path, deadline)
            if _has_name(descriptor, path):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _acquire(descriptor: int, path: str, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has locked {path} for {LOCK_S:g} s") from None
            time.sleep(LOCK_PAUSE_S)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return
            raise


def _has_name(descriptor: int, path: str) -> bool:
    """Whether the open file is still the one of this name: it may have been deleted while it was waited for."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
