"""Returns freed memory to the system (malloc_trim), and keeps the garbage collector away from imported modules.

glibc keeps freed blocks in a heap for each thread. A server handles bodies of all sizes in a dozen threads, so tens of
megabytes accumulate in a quarter of an hour without a leak; the janitor trims the heaps after each sweep. An engine
trims its own after evictions and when it becomes idle. Other C libraries keep little and have no malloc_trim. Imports
create almost no garbage, but collections would slow them down, and later ones would scan what they loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection while slow imports run, and exempt what they load from it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.enable()


def trim() -> bool:
    """Return unused pages to the system; False if the C library has no malloc_trim."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is None:
        return False
    malloc_trim(0)
    return True
