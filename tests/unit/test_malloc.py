"""Freed memory is returned to the system."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys

import pytest

from tinsmith.runtime.malloc import importing

SCRIPT = """
from pathlib import Path
from tinsmith.runtime.malloc import trim

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

blocks = [b"x" * 60_000 for _ in range(2000)]
last = blocks[-1]  # nothing below it can go by itself
del blocks
untrimmed_kib = resident()
assert trim()
print(untrimmed_kib - resident(), len(last))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep less")
def test_pages_that_hold_nothing_are_given_back() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    given_back_kib = int(ran.stdout.split()[0])
    assert given_back_kib > 100_000


def test_nothing_is_looked_for_while_modules_are_imported() -> None:
    assert gc.isenabled()
    gc.unfreeze()
    with pytest.raises(ImportError), importing():
        assert not gc.isenabled()
        with importing():
            pass
        assert not gc.isenabled()  # the inner one does not change it
        assert not gc.get_freeze_count()
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000  # and what was imported is not looked at again
    gc.unfreeze()
