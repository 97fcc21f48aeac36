"""What a process finds on a system that is not Linux, as far as this project asks: no /proc and /sys, no processor
affinity, none of Linux's own functions in `os`, glibc or sockets, macOS's names of `sysconf`, short paths of sockets,
and `sys.platform` as the modules of tinsmith read it. Other libraries see Linux, on which they run.

Its directory comes first on PYTHONPATH, so that the processes that a process starts are so too (`sitecustomize`).
"""

from __future__ import annotations

import builtins
import os
import socket
import sys
from types import ModuleType
from typing import Any

HIDDEN = {
    "os": (
        "sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate memfd_create copy_file_range splice eventfd "
        "pidfd_open setns unshare getrandom fdatasync pipe2 O_DIRECT O_TMPFILE O_PATH"
    ),
    "select": "epoll EPOLLIN",
    "socket": "TCP_USER_TIMEOUT TCP_KEEPIDLE SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK AF_NETLINK AF_PACKET",
    "signal": "sigtimedwait sigwaitinfo SIGRTMIN pidfd_send_signal",
    "fcntl": "F_ADD_SEALS F_GET_SEALS F_OFD_SETLK F_SETPIPE_SZ",
    "resource": "prlimit RLIMIT_MSGQUEUE",
}
MISSING_NAMES = {"SC_AVPHYS_PAGES"}
MAX_SOCKET_PATH = 103
ROOTS = ("/proc/", "/sys/", "/dev/shm")


class _Hiding(ModuleType):
    """A module without some of its names."""

    def __init__(self, module: ModuleType, names: str, **replaced: object) -> None:
        super().__init__(module.__name__)
        self._module, self._names = module, names.split()
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a module holds anything
        if name in self._names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} (hidden)")
        return getattr(self._module, name)


class _Library:
    """A C library without glibc's own functions."""

    def __init__(self, library: object) -> None:
        self._library = library

    def __getattr__(self, name: str) -> object:
        if name in ("malloc_trim", "fallocate", "prctl", "memfd_create"):
            raise AttributeError(f"symbol not found: {name} (hidden)")
        return getattr(self._library, name)


def _refuse_paths(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and _is_hidden(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory (hidden)", str(arguments[0]))
    if event == "socket.bind" and isinstance(arguments[1], str) and len(arguments[1]) > MAX_SOCKET_PATH:
        raise OSError(f"AF_UNIX path too long: {arguments[1]}")


def _is_hidden(path: object) -> bool:
    return isinstance(path, str | os.PathLike) and f"{os.fspath(path)}/".startswith(ROOTS)


def hide() -> None:
    import ctypes

    sysconf, stat, mkdir, import_ = os.sysconf, os.stat, os.mkdir, builtins.__import__

    def read_limit(name: str) -> int:
        if name in MISSING_NAMES:
            raise ValueError("unrecognized configuration name (hidden)")
        return sysconf(name)

    def without_hidden(function: Any) -> Any:  # noqa: ANN401 - a function of os
        def call(path: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            if _is_hidden(path):
                raise FileNotFoundError(2, "No such file or directory (hidden)", str(path))
            return function(path, *arguments, **options)

        return call

    os.stat, os.mkdir = without_hidden(stat), without_hidden(mkdir)
    replaced: dict[str, dict[str, object]] = {
        "os": {"sysconf": read_limit},
        "sys": {"platform": "darwin"},
        "ctypes": {"CDLL": lambda *arguments, **options: _Library(ctypes.CDLL(*arguments, **options))},
    }
    proxies: dict[str, _Hiding] = {}

    def import_for(name: str, globals: Any = None, *rest: Any, **options: Any) -> Any:  # noqa: ANN401
        module = import_(name, globals, *rest, **options)
        is_ours = globals is not None and str(globals.get("__name__")).partition(".")[0] == "tinsmith"
        if is_ours and (name in HIDDEN or name in replaced):
            if name not in proxies:
                proxies[name] = _Hiding(module, HIDDEN.get(name, ""), **replaced.get(name, {}))
            return proxies[name]
        return module

    builtins.__import__ = import_for
    sys.addaudithook(_refuse_paths)
    sys.stderr.write(f"{os.getpid()} is hidden from Linux\n")


def start_argument_of(directory: object) -> str:
    """The text of `sitecustomize.py` in a directory on PYTHONPATH."""
    return f"import sys\nsys.path.insert(0, {str(directory)!r})\nfrom support.without_linux import hide\nhide()\n"


assert socket.AF_UNIX  # a system without has no mailboxes
