"""The memory of the host, or of this process's container, as Linux reports it. Elsewhere all memory counts as free."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""The files of this process's container (cgroup v2)."""

MEMINFO = Path("/proc/meminfo")


def read_host_memory(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> tuple[int, int]:
    """Free and total bytes; both are bounded by the container's limit, if it has one."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _read_available(meminfo) or total
    limit, used = _read_cgroup(cgroup)
    if not limit or limit >= total:
        return free, total
    return min(free, max(0, limit - used)), limit


def _read_available(meminfo: Path) -> int:
    """The host's available bytes; 0 if Linux does not say."""
    try:
        lines = meminfo.read_text().split("\n")
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0


def _read_cgroup(cgroup: Path) -> tuple[int, int]:
    """The limit of this container's memory and the bytes in use that it cannot reclaim; zeros without a limit."""
    try:
        limit = int((cgroup / "memory.max").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().strip().split("\n"))
        return limit, int((cgroup / "memory.current").read_text()) - int(statistics["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0, 0
