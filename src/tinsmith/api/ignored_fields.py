"""Tells operators and clients which fields of a request were ignored: a metric, a log line and a response header.

A client is a tenant with a user agent. Each name is logged once for each client. Memory, labels and header are bounded.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import structlog

log = structlog.get_logger()

HEADER = "tinsmith-ignored-fields"
MAX_CLIENTS = 1000
MAX_NAMES = 200
"""Most names that are remembered for one client."""

MAX_AGENT = 200
MAX_HEADER_NAMES, MAX_HEADER = 32, 1000


class IgnoredFieldReports:
    """Counts ignored fields and logs those that are new for a client. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._clients: OrderedDict[tuple[str, str], set[str]] = OrderedDict()
        self._lock = threading.Lock()

    def report(self, count: Callable[[str], None], tenant_id: str, user_agent: str, names: Sequence[str]) -> None:
        for name in names:
            count(name)
        if new := self._new_names(tenant_id, user_agent[:MAX_AGENT], names):
            log.info("fields ignored", tenant_id=tenant_id, user_agent=ascii(user_agent[:MAX_AGENT]), fields=new)

    def _new_names(self, tenant_id: str, user_agent: str, names: Sequence[str]) -> list[str]:
        if not names:
            return []
        with self._lock:
            logged = self._clients.setdefault((tenant_id, user_agent), set())
            self._clients.move_to_end((tenant_id, user_agent))
            while len(self._clients) > MAX_CLIENTS:
                self._clients.popitem(last=False)
            new = [name for name in names if name not in logged][: MAX_NAMES - len(logged)]
            logged.update(new)
        return new


def build_header(names: Sequence[str]) -> Mapping[str, str]:
    """Return the header that names ignored fields, or no header."""
    if not names:
        return {}
    text, num_named = "", 0
    for name in names[:MAX_HEADER_NAMES]:
        if len(text) + len(name) > MAX_HEADER:
            break
        text += (", " if text else "") + name
        num_named += 1
    num_more = len(names) - num_named
    return {HEADER: f"{text}, and {num_more} more" if num_more else text}
