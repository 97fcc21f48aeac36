"""Memory that was freed and that nobody has back yet.

What the C library keeps: between blocks in use, in a heap for each of many threads.

A server reads and writes bodies of all sizes in a dozen threads, so this grows to tens of megabytes in a quarter of an
hour, although nothing leaks. Only glibc keeps so much, and only glibc can be told to give it back.

And what Python's collector looks for: while modules are imported there is next to none, and looking takes a fifth of
the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For imports that take seconds."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def give_back() -> bool:
    """Return to the system the pages that hold nothing; whether there is a C library that can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    return True
