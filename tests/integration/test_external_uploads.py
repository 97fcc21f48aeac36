"""Uploads by signed links (SDK 0.39): start, PUT, finish; checks, expiry and sweeps.

The tests send the requests that SDK 0.39 sends; the installed SDK is tested in `contract/test_sdk_surface.py`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from httpx import Response
from safetensors.numpy import save

from support.http_harness import ALICE, BASE, BOB, Harness, close, make_harness
from tinsmith.api import links
from tinsmith.api.routes import external_uploads
from tinsmith.auth.quotas import QuotaLimits
from tinsmith.db.schema import UPLOADS

NAME = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 32, "target_modules": ["q_proj"]}
LORA = {"rank": 2, "train_mlp": False, "train_unembed": False}
WEIGHTS = save(
    {
        f"{NAME}.lora_A.weight": np.ones((2, 3), np.float32),
        f"{NAME}.lora_B.weight": np.ones((4, 2), np.float32),
    }
)
FILES = {"adapter_config.json": json.dumps(CONFIG).encode(), "adapter_model.safetensors": WEIGHTS}
MAX_BYTES = 50_000


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path, max_upload_bytes=MAX_BYTES)
    yield new_harness
    close(new_harness)


def start(harness: Harness, **fields: object) -> dict[str, Any]:
    return harness.ok("external_weights_upload_start", {"base_model": BASE, "lora_config": LORA, **fields})


def put(harness: Harness, url: str, content: bytes) -> Response:
    parts = urlsplit(url)
    return harness.client.put(f"{parts.path}?{parts.query}", content=content)  # type: ignore[return-value]


def put_all(harness: Harness, started: dict[str, Any], **changed: bytes) -> None:
    for name, url in started["urls"].items():
        assert put(harness, url, changed.get(name.partition(".")[0], FILES[name])).status_code == 200


def finish(harness: Harness, started: dict[str, Any], key: str = ALICE) -> Response:
    return harness.post("external_weights_upload_finish", {"upload_id": started["upload_id"]}, key)


def unfinished_files(harness: Harness) -> list[Path]:
    """The bytes of uploads that are not finished."""
    root = harness.services.files.path("x")
    assert root is not None
    return sorted(root.parent.glob("upload-*"))


def test_uploaded_files_become_a_checkpoint_of_the_project(harness: Harness) -> None:
    started = start(harness, destination_project_id="p")
    assert set(started["urls"]) == set(FILES) and started["expires"].endswith("Z")
    put_all(harness, started)
    path = finish(harness, started).json()["tinker_path"]
    (listed,) = harness.get("checkpoints?project_id=p").json()["checkpoints"]
    assert listed["tinker_path"] == path and listed["base_model"] == BASE and listed["checkpoint_type"] == "training"
    info = harness.ok("weights_info", {"tinker_path": path})
    assert (info["lora_rank"], info["train_attn"], info["train_mlp"]) == (2, True, False)
    (checkpoint,) = harness.services.checkpoints.of_run("alice", path.split("/")[2])
    with harness.services.checkpoints.reading(checkpoint) as directory:
        assert {name: (directory / name).read_bytes() for name in FILES} == FILES
    assert finish(harness, started).json() == {"tinker_path": path}, "a repeated finish finds the first one's"
    assert not unfinished_files(harness) and len(harness.get("checkpoints").json()["checkpoints"]) == 1


LYING = WEIGHTS[:8] + WEIGHTS[8:].replace(b"[2,3]", b"[9,3]")


@pytest.mark.parametrize(
    ("changed", "lora", "words"),
    [
        ({"adapter_model": b"no tensors"}, LORA, "adapter_model.safetensors"),
        ({"adapter_model": LYING}, LORA, "adapter_model.safetensors"),
        ({"adapter_model": WEIGHTS[:-4]}, LORA, "adapter_model.safetensors"),
        ({"adapter_config": b"{"}, LORA, "adapter_config.json"),
        (
            {"adapter_config": json.dumps(CONFIG | {"r": 3}).encode()},
            LORA,
            "has rank 2, and adapter_config.json says 3",
        ),
        ({}, LORA | {"rank": 4}, "lora_config is rank 4 of attn, but the files hold rank 2 of attn"),
        ({}, {"rank": 2}, "lora_config is rank 2 of attn, mlp, unembed"),
        ({}, LORA | {"alpha": 64}, "rank 2 of attn with alpha 64, but the files hold rank 2 of attn"),
    ],
)
def test_files_that_are_no_such_adapter_are_refused(
    harness: Harness, changed: dict[str, bytes], lora: dict[str, object], words: str
) -> None:
    started = start(harness, lora_config=lora)
    put_all(harness, started, **changed)
    answer = finish(harness, started)
    assert answer.status_code == 400 and words in answer.json()["detail"]
    assert harness.get("checkpoints").json()["checkpoints"] == []
    root = harness.services.checkpoints.files.path("")
    assert not root.is_dir() or list(root.iterdir()) == []


def test_a_finish_needs_every_file_and_its_own_tenant(harness: Harness) -> None:
    started = start(harness)
    assert put(harness, started["urls"]["adapter_config.json"], FILES["adapter_config.json"]).status_code == 200
    answer = finish(harness, started)
    assert answer.status_code == 400 and "adapter_model.safetensors was not uploaded" in answer.json()["detail"]
    assert finish(harness, started, BOB).status_code == 404
    changed = {"upload_id": "A" + started["upload_id"][1:]}
    assert harness.post("external_weights_upload_finish", changed).status_code == 404
    put_all(harness, started)
    assert finish(harness, started).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"base_model": "x/y"}, 404, "served: 'local/tiny'"),
        ({"lora_config": {"rank": 0}}, 400, "lora_config.rank is 0"),
        ({"lora_config": None}, 400, "lora_config is missing"),
        ({"ttl_seconds": 5}, 400, "ttl_seconds is not supported"),
    ],
)
def test_a_start_says_what_is_wrong(harness: Harness, body: dict[str, object], status: int, words: str) -> None:
    answer = harness.post("external_weights_upload_start", {"base_model": BASE, "lora_config": LORA} | body)
    assert answer.status_code == status and words in answer.json()["detail"]


def test_a_link_is_for_its_file_and_its_hour(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    started = start(harness)
    url = started["urls"]["adapter_config.json"]
    assert put(harness, url.replace("adapter_config.json", "other.json"), b"x").status_code == 403
    assert put(harness, url, bytes(MAX_BYTES + 1)).status_code == 413
    assert not unfinished_files(harness)
    put_all(harness, started)
    later = time.time() + links.LINK_S + 1
    monkeypatch.setattr(links.time, "time", lambda: later)
    monkeypatch.setattr(external_uploads.time, "time", lambda: later)
    assert put(harness, url, b"x").status_code == 410
    assert finish(harness, started).status_code == 410


def test_abandoned_uploads_are_swept(harness: Harness) -> None:
    put_all(harness, start(harness))
    waiting = unfinished_files(harness)
    assert len(waiting) == 2
    os.utime(waiting[0], (0, 0))
    files = harness.services.files
    assert files.sweep_unreferenced(3600) == files.sweep_expired() == [], "their links are still valid"
    with harness.services.models._db.write() as connection:
        connection.execute(UPLOADS.update().values(expires_at=0.0))
    assert sorted(files.sweep_expired()) == [path.name for path in waiting]
    assert unfinished_files(harness) == []


def list_files(harness: Harness) -> list[object]:
    return harness.client.get("/v1/files", headers={"X-API-Key": ALICE}).json()["data"]


def test_uploads_count_against_the_quota_of_checkpoints_from_their_first_byte(tmp_path: Path) -> None:
    size = sum(map(len, FILES.values()))
    harness = make_harness(tmp_path, max_upload_bytes=MAX_BYTES, limits=QuotaLimits(checkpoint_bytes=2 * size))
    try:
        first, second, third = (start(harness) for _ in range(3))
        put_all(harness, first)
        put_all(harness, first)  # replaces the bytes
        put_all(harness, second)
        assert harness.services.quotas.checkpoint_bytes("alice") == 2 * size
        for name, url in third["urls"].items():
            refused = put(harness, url, FILES[name])
            assert refused.status_code == 429 and "quota checkpoint_bytes" in refused.json()["detail"]
        refused = harness.post("external_weights_upload_start", {"base_model": BASE, "lora_config": LORA})
        assert refused.status_code == 429 and "quota checkpoint_bytes" in refused.json()["detail"]
        assert len(unfinished_files(harness)) == 4 and list_files(harness) == []
        assert harness.services.quotas.file_bytes("alice") == 0, "they are no files"
        assert finish(harness, first).status_code == 200, "its bytes are counted already"
        assert len(unfinished_files(harness)) == 2
    finally:
        close(harness)


def test_a_put_that_does_not_say_its_length_is_stopped_at_the_quota(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, max_upload_bytes=MAX_BYTES, limits=QuotaLimits(checkpoint_bytes=10_000))
    try:
        url = urlsplit(start(harness)["urls"]["adapter_model.safetensors"])
        chunks_sent: list[int] = []

        def chunks() -> Iterator[bytes]:
            for index in range(40):
                chunks_sent.append(index)
                yield bytes(1000)

        refused = harness.client.put(f"{url.path}?{url.query}", content=chunks())
        assert refused.status_code == 429 and unfinished_files(harness) == []
        assert harness.services.quotas._reserved.totals == {}
    finally:
        close(harness)


def test_a_finished_or_expired_upload_takes_no_more_bytes(harness: Harness) -> None:
    started = start(harness)
    put_all(harness, started)
    assert finish(harness, started).status_code == 200
    for name, url in started["urls"].items():
        assert put(harness, url, FILES[name]).status_code == 410
    assert unfinished_files(harness) == []
