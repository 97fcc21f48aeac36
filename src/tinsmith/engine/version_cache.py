"""The stock of a dedicated sampler: which versions it has, which are on their way, and which samples wait for those.

A sample whose version is not here waits; versions are sent for in the order in which samples began to wait for them.
From the moment that it is ready to the moment that it is removed it uses its version, which stays so long (`shelf`). As
long as one version finds no room, because all of it is in use, whoever comes later waits behind it, even for a version
that is here: otherwise a busy one could keep the others out for ever. Called from the sampler's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tinsmith.engine.fetching import Fetched, Fetcher, Wanted
from tinsmith.engine.version_files import Shelf
from tinsmith.types import Pending


@dataclass(slots=True)
class _Awaited:
    wanted: Wanted
    requests: list[Pending]
    coming: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """Samples whose version cannot be had here, and why."""

    requests: list[Pending]
    error: Exception


class Stock:
    def __init__(
        self,
        fetcher: Fetcher,
        budget_bytes: int,
        load: Callable[[str, Path, list[Pending]], None],
        drop: Callable[[str], None],
    ) -> None:
        """`load` puts a version's files into memory, for some requests; `drop` forgets a version."""
        self._fetcher = fetcher
        self._shelf = Shelf(budget_bytes)
        self._load = load
        self._drop = drop
        self._keys: dict[str, str] = {}  # of every sample that was added and not removed
        self._using: dict[str, str] = {}  # of those that are ready
        self._awaited: OrderedDict[str, _Awaited] = OrderedDict()

    @property
    def is_fetching(self) -> bool:
        return self._fetcher.num_running > 0

    def key_of(self, request_id: str) -> str | None:
        """Under which key the weights of a sample are in memory; None for the base model's own."""
        return self._keys.get(request_id)

    def add(self, request: Pending, wanted: Wanted) -> None:
        """A sample of a version; it comes out of `ready` sooner or later."""
        self._keys[request.request_id] = wanted.key
        self._awaited.setdefault(wanted.key, _Awaited(wanted, [])).requests.append(request)

    def ready(self) -> tuple[list[Pending], list[Failure]]:
        """Load what has come, send for what is missing; the samples that can be admitted, and those that never can."""
        ready: list[Pending] = []
        failures: list[Failure] = []
        for fetched in self._fetcher.collect():
            error = self._put(fetched)
            if error is None:
                ready += self._take(fetched.key)
            else:
                failures.append(Failure(self._awaited.pop(fetched.key).requests, error))
        for key, awaited in list(self._awaited.items()):
            if awaited.coming:
                continue
            if key in self._shelf:
                ready += self._take(key)
            elif self._shelf.has_room(self._fetcher.num_running):
                awaited.coming = True
                self._fetcher.begin(awaited.wanted)
            else:
                break
        return ready, failures

    def _put(self, fetched: Fetched) -> Exception | None:
        """On the shelf; or why that is impossible."""
        try:
            if fetched.path is None:
                return fetched.error
            for key in self._shelf.evict(fetched.num_bytes):
                self._drop(key)
            self._load(fetched.key, fetched.path, self._awaited[fetched.key].requests)
            self._shelf.add(fetched.key, fetched.num_bytes)
            return None
        except Exception as error:  # noqa: BLE001  told to whoever asked for the version
            return error
        finally:
            fetched.close()

    def _take(self, key: str) -> list[Pending]:
        requests = self._awaited.pop(key).requests
        for request in requests:
            self._shelf.use(key)
            self._using[request.request_id] = key
        return requests

    def waiting(self) -> list[Pending]:
        """The samples whose version is not here."""
        return [request for awaited in self._awaited.values() for request in awaited.requests]

    def withdraw(self, name: str) -> list[Pending]:
        """Let go of one waiting sample, or of all of one sampling session, which stay until they are removed."""
        found = [one for one in self.waiting() if name in (one.request_id, one.sampling_session_id)]
        for request in found:
            self._leave(request.request_id)
        return found

    def remove(self, request_ids: Iterable[str]) -> None:
        """These are settled, or another's."""
        for request_id in request_ids:
            if request_id in self._keys:
                self._leave(request_id)
                del self._keys[request_id]
                if (key := self._using.pop(request_id, None)) is not None:
                    self._shelf.release(key)

    def _leave(self, request_id: str) -> None:
        key = self._keys[request_id]
        if (awaited := self._awaited.get(key)) is not None:
            awaited.requests = [one for one in awaited.requests if one.request_id != request_id]
            if not awaited.requests and not awaited.coming:
                del self._awaited[key]
