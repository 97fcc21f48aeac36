"""Uploads of adapters: the checks before a checkpoint is created, and the deletion of refused files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from httpx import Response
from safetensors.numpy import save, save_file

from support.http_harness import ALICE, BASE, BOB, Harness, close, make_harness
from tinsmith.auth.quotas import QuotaLimits
from tinsmith.base_models import Bases
from tinsmith.types import ModelShape

NAME = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 32, "target_modules": ["q_proj"]}
MAX_BYTES = 50_000


def matrices(rank: int = 2, inputs: int = 3, outputs: int = 4, name: str = NAME) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        f"{name}.lora_A.weight": rng.random((rank, inputs), np.float32),
        f"{name}.lora_B.weight": rng.random((outputs, rank), np.float32),
    }


def optimizer(*moments: str) -> bytes:
    return save({"step": np.ones(1, np.float32)} | {f"{NAME}.lora_A.{name}": np.ones((2, 3)) for name in moments})


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path, max_upload_bytes=MAX_BYTES)
    yield new_harness
    close(new_harness)


def upload(
    harness: Harness,
    *,
    key: str = ALICE,
    config: object = CONFIG,
    weights: Mapping[str, np.ndarray] | bytes | None = None,
    files: Mapping[str, bytes] | None = None,
    idempotency_key: str = "",
    **fields: str,
) -> Response:
    content = weights if isinstance(weights, bytes) else save(dict(matrices() if weights is None else weights))
    parts = {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": content, **(files or {})}
    headers = {"X-API-Key": key} | ({"X-Idempotency-Key": idempotency_key} if idempotency_key else {})
    return harness.client.post(  # type: ignore[return-value]
        "/api/v1/upload_weights",
        headers=headers,
        data={"base_model": BASE, "name": "first", **fields},
        files={name: (name, body) for name, body in parts.items()},
    )


def stored_paths(harness: Harness, key: str = ALICE) -> list[str]:
    return [row["tinker_path"] for row in harness.get("checkpoints", key).json()["checkpoints"]]


def directories(harness: Harness) -> list[str]:
    root = harness.services.checkpoints.files.path("")
    return [path.name for path in root.iterdir()] if root.is_dir() else []


def test_an_adapter_becomes_a_training_checkpoint_of_its_tenant(harness: Harness) -> None:
    answer = upload(harness, ttl_seconds="3600", user_metadata='{"from": "elsewhere"}', project_id="p")
    assert answer.status_code == 200, answer.text
    path = answer.json()["tinker_path"]
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    assert (kind, name, answer.json()["lora_rank"], answer.json()["base_model"]) == ("weights", "first", 2, BASE)
    assert stored_paths(harness) == [path] and stored_paths(harness, BOB) == []
    (checkpoint,) = harness.get("checkpoints?project_id=p").json()["checkpoints"]
    assert checkpoint["user_metadata"] == {"from": "elsewhere"} and checkpoint["expires_at"]
    assert checkpoint["size_bytes"] == answer.json()["size_bytes"]
    info = harness.ok("weights_info", {"tinker_path": path})
    assert (info["train_attn"], info["train_mlp"], info["train_unembed"]) == (True, False, False)
    assert harness.get(f"training_runs/{run_id}").json()["base_model"] == BASE
    session_id = harness.session()
    loaded = {"session_id": session_id, "model_seq_id": 0, "path": path, "optimizer": False}
    future = harness.ok("load_weights", loaded)
    assert harness.kinds()[future["request_id"]] == "load_model"
    assert harness.post("weights_info", {"tinker_path": path}, BOB).status_code == 404
    audit = harness.services.audit.entries("alice", "checkpoints", 0, 1e12)
    assert ("checkpoint_uploaded", path) in [
        (audit_entry.event, audit_entry.details["tinker_path"]) for audit_entry in audit
    ]


def test_the_stored_bytes_are_the_sent_ones(harness: Harness) -> None:
    state = optimizer("exp_avg", "exp_avg_sq")
    path = upload(harness, files={"optimizer.safetensors": state}).json()["tinker_path"]
    run_id = path.removeprefix("tinker://").partition("/")[0]
    (checkpoint,) = harness.services.checkpoints.of_run("alice", run_id)
    with harness.services.checkpoints.reading(checkpoint) as directory:
        assert (directory / "optimizer.safetensors").read_bytes() == state
        assert (directory / "adapter_model.safetensors").read_bytes() == save(matrices())
    assert checkpoint.optimizer_type == "adamw"
    dimuon = upload(harness, files={"optimizer.safetensors": optimizer("momentum")}).json()["tinker_path"]
    assert harness.ok("weights_info", {"tinker_path": dimuon})["optimizer_config"]["type"] == "dimuon"


def test_a_request_that_is_sent_again_finds_what_it_made(harness: Harness) -> None:
    first, second = (upload(harness, idempotency_key="k").json() for _ in range(2))
    assert first == second and stored_paths(harness) == [first["tinker_path"]]
    assert len(directories(harness)) == 1
    other = upload(harness, idempotency_key="k", name="other")
    assert other.status_code == 400 and "exists already and was not uploaded as other" in other.json()["detail"]
    assert upload(harness, idempotency_key="k", key=BOB).json()["tinker_path"] != first["tinker_path"]


REFUSED = {
    "an unknown base": ({"base_model": "x/y"}, 404, "served: 'local/tiny'"),
    "a wrong name": ({"name": "../x"}, 400, "checkpoint name"),
    "an unknown field": ({"colour": "blue"}, 400, "has an unknown field 'colour'"),
    "a ttl that is no number": ({"ttl_seconds": "soon"}, 400, "ttl_seconds is 'soon'"),
    "a short ttl": ({"ttl_seconds": "1"}, 400, "ttl_seconds"),
    "metadata that are none": ({"user_metadata": "[]"}, 400, "must be a JSON object"),
    "dora": ({"config": CONFIG | {"use_dora": True}}, 400, "sets 'use_dora'"),
    "a pattern": ({"config": CONFIG | {"rank_pattern": {"(a+)+$": 2}}}, 400, "checkpoints import"),
    "no configuration": ({"config": []}, 400, "does not describe a LoRA adapter"),
    "another rank": ({"weights": matrices(3)}, 400, "has rank 3, and adapter_config.json says 2"),
    "a key of its own": (
        {"weights": {k.replace("A.w", "A.x.w"): v for k, v in matrices().items()}},
        400,
        "not PEFT's own",
    ),
    "no tensors": ({"weights": b"x" * 100}, 400, "has a header of"),
    "a cut file": ({"weights": save(matrices())[:-1]}, 400, "is not a complete safetensors file"),
    "a pickle": ({"files": {"adapter_model.bin": b"x"}}, 400, "has an unknown field 'adapter_model.bin'"),
    "a path": ({"files": {"../../x": b"x"}}, 400, "has an unknown field '../../x'"),
    "another optimizer": ({"files": {"optimizer.safetensors": optimizer("q")}}, 400, "which no supported optimizer"),
    "too much": ({"files": {"optimizer.safetensors": b"x" * 2_000_000}}, 413, "larger than 50000 bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_has_a_reason_and_leaves_nothing(harness: Harness, case: str) -> None:
    changes, status, words = REFUSED[case]
    answer = upload(harness, **changes)  # type: ignore[arg-type]
    assert answer.status_code == status, answer.text
    assert words in answer.json()["detail"]
    assert stored_paths(harness) == [] and directories(harness) == []
    assert harness.services.audit.entries("alice", "checkpoints", 0, 1e12) == []


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors", "base_model", "name"])
def test_a_forms_missing_fields_are_named(harness: Harness, missing: str) -> None:
    texts = {"base_model": BASE, "name": "x"}
    parts = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
    answer = harness.client.post(
        "/api/v1/upload_weights",
        headers={"X-API-Key": ALICE},
        data={name: text for name, text in texts.items() if name != missing},
        files={name: (name, body) for name, body in parts.items() if name != missing} or None,
    )
    assert answer.status_code == 400 and missing in answer.json()["detail"]


def test_a_file_where_a_text_belongs_is_refused(harness: Harness) -> None:
    swapped = upload(harness, files={"project_id": b"x"})
    assert swapped.status_code == 400 and "project_id must be a text" in swapped.json()["detail"]


def test_an_adapter_of_another_base_is_refused(harness: Harness, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    save_file({"model.layers.0.self_attn.q_proj.weight": np.ones((4, 5), np.float32)}, base / "model.safetensors")
    shape = ModelShape(BASE, str(base), 50, 16, "Tiny")
    harness.app.state.services = replace(harness.services, bases=Bases((shape,)))
    refused = upload(harness)
    assert refused.status_code == 400
    assert "q_proj [4, 3], and the base model has a linear of [4, 5]" in refused.json()["detail"]
    assert upload(harness, weights=matrices(2, 5, 4)).status_code == 200


def test_a_tenant_whose_space_is_full_uploads_no_more(tmp_path: Path) -> None:
    harness = make_harness(tmp_path, limits=QuotaLimits(checkpoint_bytes=1000))
    try:
        answer = upload(harness)
        assert answer.status_code == 200 and 500 < answer.json()["size_bytes"] < 1000, "two do not fit"
        assert upload(harness).status_code == 429
        assert len(directories(harness)) == 1
    finally:
        close(harness)
