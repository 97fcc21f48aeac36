"""Returns freed memory to the system (malloc_trim), and pauses garbage collection during imports.

glibc keeps freed blocks in a heap for each thread. A server handles bodies of all sizes in a dozen threads, so tens of
megabytes gather in a quarter of an hour although nothing leaks; the janitor trims them after each sweep. Other C
libraries keep little and have no malloc_trim. Importing modules creates almost no garbage, and looking for it takes a
fifth of the import time.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection while slow imports run."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def give_back() -> bool:
    """Return unused pages to the system; False if the C library has no malloc_trim."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    return True
