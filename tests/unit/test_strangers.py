"""Unknown keys: they cost few queries, and no client with a known key waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.databases import fresh_url
from support.http_harness import ALICE, Harness, close, make_harness
from tinsmith.auth import tenants as tenants_module
from tinsmith.auth.keys import Key, Keys
from tinsmith.auth.signing import Signer
from tinsmith.auth.tenants import CACHE_S, REFUSAL_S, StoredTenants
from tinsmith.auth.tokens import Tokens
from tinsmith.db.factory import open_database
from tinsmith.errors import NotAuthenticatedError, TooManyRequestsError
from tinsmith.runtime.threads import STRANGERS


class CountingKeys(Keys):
    lookups = 0

    def find(self, secret: str) -> Key | None:
        self.lookups += 1
        return super().find(secret)


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[CountingKeys]:
    database = open_database(fresh_url(tmp_path))
    yield CountingKeys(database)
    database.close()


def ask(tenants: StoredTenants, key: str) -> str:
    """The tenant of a key, as a request finds it."""
    try:
        return (tenants.find_cached(key) or tenants.authenticate(key)).tenant_id
    except NotAuthenticatedError as error:
        return str(error)


def test_an_unknown_key_is_looked_up_once_a_second(keys: CountingKeys) -> None:
    clock = [100.0]
    tenants = StoredTenants(keys, Tokens(Signer(bytes(32))), clock=lambda: clock[0])
    key, secret = keys.create("alice")
    for _ in range(100):
        assert "does not know the API key" in ask(tenants, "tml-unknown")
    assert keys.lookups == 1
    clock[0] += REFUSAL_S
    assert "does not know the API key" in ask(tenants, "tml-unknown")
    assert keys.lookups == 2
    assert ask(tenants, secret) == "alice" and keys.lookups == 3
    keys.revoke(key.key_id)
    clock[0] += CACHE_S
    for _ in range(100):
        assert "revoked" in ask(tenants, secret)
    assert keys.lookups == 4 and tenants.is_stranger(secret)


def test_a_key_that_was_used_before_its_creation_works_within_a_second(
    keys: CountingKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    tenants = StoredTenants(keys, Tokens(Signer(bytes(32))), clock=lambda: clock[0])
    keys.create("bob")
    monkeypatch.setattr("tinsmith.auth.keys.secrets.token_urlsafe", lambda _size: "early")
    assert "does not know" in ask(tenants, "tml-early")
    keys.create("alice")
    clock[0] += REFUSAL_S
    assert ask(tenants, "tml-early") == "alice" and REFUSAL_S <= 1.0


def test_the_cache_of_refusals_is_bounded(keys: CountingKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants_module, "MAX_CACHED", 10)
    tenants = StoredTenants(keys, Tokens(Signer(bytes(32))))
    keys.create("alice")
    for index in range(35):
        ask(tenants, f"tml-{index}")
        assert len(tenants._refusals) <= 10


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path)
    yield new_harness
    close(new_harness)


def test_a_flood_of_unknown_keys_delays_no_client_with_a_known_one(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants_module, "MAX_STRANGERS", 20)
    session_id = harness.session()
    keys, release, waiting = harness.services.tenants._keys, threading.Event(), threading.Semaphore(0)
    find = keys.find

    def slow_find(secret: str) -> Key | None:
        if "stranger" in secret:
            waiting.release()
            release.wait(30)
        return find(secret)

    monkeypatch.setattr(keys, "find", slow_find)
    tenants = harness.services.tenants
    expired = tenants._clock() + 2 * CACHE_S
    monkeypatch.setattr(tenants, "_clock", lambda: expired)  # nothing is cached

    async def flood() -> tuple[httpx.Response, list[httpx.Response]]:
        transport = httpx.ASGITransport(harness.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/api/v1/") as client:

            async def heartbeat(key: str) -> httpx.Response:
                body = {"session_id": session_id}
                return await client.post("session_heartbeat", json=body, headers={"X-API-Key": key})

            strangers = [asyncio.create_task(heartbeat(f"tml-stranger-{index}")) for index in range(50)]
            for _ in range(STRANGERS):
                await asyncio.to_thread(waiting.acquire)
            beat = await asyncio.wait_for(heartbeat(ALICE), 10)
            assert not release.is_set()
            release.set()
            return beat, await asyncio.gather(*strangers)

    beat, refused = asyncio.run(flood())
    assert beat.status_code == 200
    assert sorted(response.status_code for response in refused) == [401] * 20 + [429] * 30
    assert {response.headers["retry-after"] for response in refused if response.status_code == 429} == {"1"}


def test_strangers_are_admitted_again_after_an_error(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants_module, "MAX_STRANGERS", 1)
    tenants = harness.services.tenants
    for _ in range(3):
        with pytest.raises(RuntimeError), tenants.admit_stranger():
            with pytest.raises(TooManyRequestsError), tenants.admit_stranger():
                pass
            raise RuntimeError
