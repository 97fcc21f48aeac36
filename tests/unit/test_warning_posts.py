"""Warnings posted to the operator's address."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr, ValidationError

from support.http_harness import BOB, Harness, close, make_harness
from tinsmith.db.statements import execute
from tinsmith.server.warning_posts import PostError, WarningPoster
from tinsmith.settings import Settings
from tinsmith.store.curves import Curves

URL = "http://chat.example/hooks/secret-token"


class Receiver(httpx.BaseTransport):
    """Records the bodies that it accepts; `status` is its next answers'."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, str | None]] = []
        self.status = 204

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert str(request.url) == URL and request.method == "POST"
        if self.status < 300:
            self.bodies.append(json.loads(request.content))
        return httpx.Response(self.status, headers={"location": "http://127.0.0.1:9/"})


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    monkeypatch.setattr("tinsmith.api.dashboard.warnings.FULL", 2.0)
    new_harness = make_harness(tmp_path, warnings_url=SecretStr(URL))
    yield new_harness
    close(new_harness)


def record_step(harness: Harness, model_id: str, step: int, loss: float) -> None:
    db = harness.services.models._db
    with db.write() as connection:
        execute(connection, Curves(db).step_statement(model_id, step, {"loss_per_token": loss}))


def test_a_warning_is_posted_once_while_it_lasts_and_again_when_it_comes_back(harness: Harness) -> None:
    receiver = Receiver()
    poster = WarningPoster(harness.services, receiver)
    run = harness.model(key=BOB, user_metadata={"name": "fragile"})
    harness.model()
    poster.post_new()
    assert receiver.bodies == []
    record_step(harness, run, 1, math.nan)
    poster.post_new()
    poster.post_new()
    (body,) = receiver.bodies
    assert body.pop("time")
    reason = "loss_per_token is not finite at step 1"
    assert body == {
        "text": f"fragile: diverged: {reason}", "kind": "diverged", "warning": reason, "tenant": "bob", "run": run,
        "name": "fragile",
    }  # fmt: skip
    record_step(harness, run, 2, 0.5)
    poster.post_new()
    record_step(harness, run, 3, math.nan)
    poster.post_new()
    assert [body["kind"] for body in receiver.bodies] == ["diverged"] * 2


@pytest.mark.parametrize("status", [302, 404, 500])
def test_a_post_that_fails_is_tried_again_and_its_error_does_not_tell_the_address(
    harness: Harness, status: int
) -> None:
    receiver = Receiver()
    poster = WarningPoster(harness.services, receiver)
    record_step(harness, harness.model(), 1, math.nan)
    receiver.status = status
    with pytest.raises(PostError, match=f"TINSMITH_WARNINGS_URL returned status {status}") as caught:
        poster.post_new()
    assert "secret" not in str(caught.value)
    receiver.status = 200
    poster.post_new()
    assert len(receiver.bodies) == 1


def test_without_a_server_at_the_address_the_error_says_so(harness: Harness) -> None:
    settings = harness.services.settings.model_copy(update={"warnings_url": SecretStr("http://127.0.0.1:9/x")})
    poster = WarningPoster(replace(harness.services, settings=settings))
    record_step(harness, harness.model(), 1, math.nan)
    with pytest.raises(PostError, match="cannot be reached: ConnectError"):
        poster.post_new()


@pytest.mark.parametrize("address", ["file:///etc/passwd", "chat.example/x", "http://user:word@host/", "http:///x"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValidationError, match="it must be http://HOST/PATH"):
        Settings(warnings_url=SecretStr(address))
