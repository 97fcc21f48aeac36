"""A dedicated sampler's cached versions: budget, use, fairness, and missing versions."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from support.properties import examples
from tinsmith.engine.sampler_loop import VersionCache, VersionLoader
from tinsmith.engine.transfer import FetchedVersion, NotHereError, WantedVersion
from tinsmith.errors import CorruptFilesError
from tinsmith.store.sampling_sessions import SamplingSession
from tinsmith.types import Pending

SIZE = 100


class VersionFetcher:
    """Completes fetches when the test says so."""

    def __init__(self) -> None:
        self.requested: deque[str] = deque()
        self.come: list[FetchedVersion] = []
        self.closed: list[str] = []

    @property
    def num_running(self) -> int:
        return len(self.requested) + len(self.come)

    def begin(self, version: WantedVersion) -> None:
        self.requested.append(version.key)

    def bring(self, error: Exception | None = None) -> None:
        key = self.requested.popleft()
        path = None if error else Path(key)
        self.come.append(FetchedVersion(key, path, SIZE, error, lambda: self.closed.append(key)))

    def collect(self) -> list[FetchedVersion]:
        come, self.come = self.come, []
        return come


class Sampler:
    """A loader, and the versions that it keeps in memory."""

    def __init__(self, budget_bytes: int) -> None:
        self.fetcher = VersionFetcher()
        self.memory: set[str] = set()
        self.stock = VersionLoader(self.fetcher, budget_bytes, self._load, self.memory.discard)  # type: ignore[arg-type]
        self.count = 0

    def _load(self, key: str, _path: Path, _requests: list[Pending]) -> None:
        if key == "broken":
            raise CorruptFilesError("not a version")
        self.memory.add(key)

    def add(self, key: str) -> str:
        self.count += 1
        name = f"{key}-{self.count}"
        session = SamplingSession(f"session-{key}", "s", "t", "base", None, key, "m", None, 0.0, 0)
        request = Pending(self.count, name, "t", "s", "sample", "pending", None, f"session-{key}", None, 1, 0.0)
        self.stock.add(request, WantedVersion(key, session))
        return name

    def ready(self) -> list[str]:
        requests, failures = self.stock.ready()
        assert not failures
        return [request.request_id for request in requests]


def test_a_sample_is_ready_when_its_version_has_come() -> None:
    sampler = Sampler(10 * SIZE)
    name = sampler.add("a")
    assert sampler.ready() == []
    sampler.fetcher.bring()
    assert sampler.ready() == [name]
    assert sampler.memory == {"a"} and sampler.fetcher.closed == ["a"]
    assert sampler.stock.key_of(name) == "a"


def test_a_version_is_sent_for_once() -> None:
    sampler = Sampler(10 * SIZE)
    names = [sampler.add("a"), sampler.add("a")]
    sampler.ready()
    names.append(sampler.add("a"))
    sampler.ready()
    assert list(sampler.fetcher.requested) == ["a"]
    sampler.fetcher.bring()
    assert sampler.ready() == names
    later = sampler.add("a")
    assert sampler.ready() == [later] and not sampler.fetcher.requested


def test_the_least_recently_used_goes_and_comes_back_on_demand() -> None:
    sampler = Sampler(2 * SIZE)
    for key in ("a", "b"):
        name = sampler.add(key)
        sampler.ready()
        sampler.fetcher.bring()
        assert sampler.ready() == [name]
        sampler.stock.remove([name])
    again = sampler.add("a")
    assert sampler.ready() == [again]
    sampler.stock.remove([again])
    third = sampler.add("c")
    sampler.ready()
    sampler.fetcher.bring()
    assert sampler.ready() == [third]
    assert sampler.memory == {"a", "c"}
    sampler.stock.remove([third])
    back = sampler.add("b")
    sampler.ready()
    sampler.fetcher.bring()
    assert sampler.ready() == [back] and sampler.memory == {"c", "b"}


def test_versions_in_use_stay_and_the_next_waits_for_memory() -> None:
    sampler = Sampler(1)
    first = sampler.add("a")
    sampler.ready()
    sampler.fetcher.bring()
    assert sampler.ready() == [first]
    second = sampler.add("b")
    assert sampler.ready() == [] and not sampler.fetcher.requested
    sampler.stock.remove([first])
    assert sampler.ready() == [] and list(sampler.fetcher.requested) == ["b"]
    sampler.fetcher.bring()
    assert sampler.ready() == [second] and sampler.memory == {"b"}


def test_a_busy_version_does_not_keep_another_out() -> None:
    sampler = Sampler(1)
    busy = [sampler.add("a")]
    sampler.ready()
    sampler.fetcher.bring()
    assert sampler.ready() == busy
    other = sampler.add("b")
    later = sampler.add("a")
    assert sampler.ready() == [], "the later sample of the busy version must wait behind the other one"
    sampler.stock.remove(busy)
    assert sampler.ready() == [later] and list(sampler.fetcher.requested) == ["b"], "now the other is sent for"
    sampler.fetcher.bring()
    assert sampler.ready() == [other]


def test_a_missing_version_fails_only_its_samples() -> None:
    sampler = Sampler(10 * SIZE)
    lost, fine, broken = sampler.add("lost"), sampler.add("fine"), sampler.add("broken")
    sampler.ready()
    sampler.fetcher.bring(NotHereError("nowhere"))
    sampler.fetcher.bring()
    sampler.fetcher.bring()
    ready, failures = sampler.stock.ready()
    assert [request.request_id for request in ready] == [fine]
    assert [[failed.request_id for failed in failure.requests] for failure in failures] == [[lost], [broken]]
    assert [type(failure.error) for failure in failures] == [NotHereError, CorruptFilesError]
    assert sampler.fetcher.closed == ["lost", "fine", "broken"] and sampler.memory == {"fine"}


def test_a_waiting_sample_can_be_withdrawn_alone_or_with_its_session() -> None:
    sampler = Sampler(10 * SIZE)
    first, second, third = sampler.add("a"), sampler.add("a"), sampler.add("b")
    sampler.ready()
    assert [request.request_id for request in sampler.stock.withdraw(first)] == [first]
    assert [request.request_id for request in sampler.stock.withdraw("session-a")] == [second]
    sampler.stock.remove([first, second])
    sampler.fetcher.bring()
    sampler.fetcher.bring()
    assert sampler.ready() == [third]
    assert sampler.stock.waiting() == []


KEYS = st.sampled_from("abcd")


@examples(200)
@given(st.integers(1, 4 * SIZE), st.lists(st.one_of(st.tuples(st.just("add"), KEYS), st.just(("bring", "")),
                                                    st.just(("done", ""))), max_size=60))  # fmt: skip
def test_every_sample_becomes_ready_once_and_its_version_is_there_until_it_is_done(budget, steps) -> None:
    sampler = Sampler(budget)
    admitted: list[str] = []
    finished: list[str] = []

    def step() -> None:
        for name in sampler.ready():
            assert name not in admitted and name not in finished
            admitted.append(name)
        for name in admitted:
            assert sampler.stock.key_of(name) in sampler.memory

    def finish_one() -> None:
        if admitted:
            finished.append(admitted.pop(0))
            sampler.stock.remove(finished[-1:])

    for action, key in steps:
        if action == "add":
            sampler.add(key)
        elif action == "done":
            finish_one()
        elif sampler.fetcher.requested:
            sampler.fetcher.bring()
        step()
        assert len(sampler.memory) <= max(1, budget // SIZE) + len(admitted) + 4
    for _ in range(4 * sampler.count + 4):
        while sampler.fetcher.requested:
            sampler.fetcher.bring()
        step()
        finish_one()
    assert len(finished) == sampler.count, "nobody waits for ever"


def test_there_is_always_room_for_one() -> None:
    shelf = VersionCache(1)
    assert shelf.has_room(0) and not shelf.has_room(1)
    shelf.use("a")
    shelf.add("a", SIZE)
    assert not shelf.has_room(0) and shelf.evict(SIZE) == []
    shelf.release("a")
    assert shelf.has_room(0) and shelf.evict(SIZE) == ["a"] and shelf.num_bytes == 0
