"""Copies of checkpoints, and reads by access token: permission, copied fields, and retries."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
from httpx import Response
from tinker.types import Checkpoint, TrainingRun

from support.http_harness import ALICE, BASE, BOB, FILES, Harness
from tinsmith.wire.weights import read_load

METADATA = {"renderer_name": "role_colon"}


@pytest.fixture
def source(harness: Harness) -> str:
    return harness.save_checkpoint(harness.model(user_metadata=METADATA, lora_config={"rank": 4}))


def copy(harness: Harness, source: str, key: str = ALICE, headers: dict[str, str] | None = None, **body) -> Response:
    """Copy into a project, unless the body names another destination."""
    if "session_id" not in body:
        body = {"destination_project_id": "archive"} | body
    all_headers = {"X-API-Key": key, "X-Idempotency-Key": str(uuid.uuid4()), **(headers or {})}
    return harness.client.post("/api/v1/copy_weights", json={"source_path": source} | body, headers=all_headers)  # type: ignore[return-value]


def copied_path(answer: Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["tinker_path"]


def detail(answer: Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["detail"]


def run_of(harness: Harness, path: str, key: str = ALICE) -> TrainingRun:
    return TrainingRun.model_validate(harness.get(f"training_runs/{path.split('/')[2]}", key).json())


def checkpoint_of(harness: Harness, path: str, key: str = ALICE) -> Checkpoint:
    (row,) = harness.get(f"training_runs/{path.split('/')[2]}/checkpoints", key).json()["checkpoints"]
    return Checkpoint.model_validate(row)


def directories(harness: Harness) -> list[Path]:
    return list(harness.services.checkpoints.files.path("").iterdir())


def test_a_copy_is_a_checkpoint_of_a_new_run_that_lists_like_any_other(harness: Harness, source: str) -> None:
    harness.services.checkpoints.set_ttl("alice", harness.services.checkpoints.page("alice", 1, 0)[0][0].ref, 7200)
    path = copied_path(copy(harness, source))
    run_id = path.split("/")[2]
    assert run_id not in source
    assert path == f"tinker://{run_id}/weights/one"
    run = run_of(harness, path)
    assert (run.base_model, run.lora_rank, run.user_metadata, run.corrupted) == (BASE, 4, METADATA, False)
    assert run.last_checkpoint is not None and run.last_checkpoint.tinker_path == path
    assert run_id in {run["training_run_id"] for run in harness.get("training_runs").json()["training_runs"]}
    checkpoint = checkpoint_of(harness, path)
    assert (checkpoint.checkpoint_type, checkpoint.expires_at, checkpoint.public) == ("training", None, False)
    assert checkpoint.size_bytes == checkpoint_of(harness, source).size_bytes
    of_project = harness.get("training_runs?project_id=archive").json()["training_runs"]
    assert [run["training_run_id"] for run in of_project] == [run_id]


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
def test_a_copy_keeps_its_kind_and_survives_its_source(harness: Harness, kind: str) -> None:
    source = harness.save_checkpoint(harness.model(), kind)
    path = copied_path(copy(harness, source, ttl_seconds=3600))
    assert path.split("/")[3] == kind
    assert checkpoint_of(harness, path).expires_at is not None
    run_id, kind, name = source.split("/")[2:]
    assert harness.send("DELETE", f"training_runs/{run_id}/checkpoints/{kind}/{name}").status_code == 200
    (directory,) = directories(harness)
    assert {name: (directory / name).read_bytes() for name in FILES} == FILES
    run_id = path.split("/")[2]
    assert harness.send("DELETE", f"training_runs/{run_id}/checkpoints/{kind}/{name}").status_code == 200
    assert directories(harness) == []


# Permission.


def test_another_tenants_checkpoint_is_copied_if_published_or_opened_by_token(harness: Harness, source: str) -> None:
    assert "does not exist" in detail(copy(harness, source, BOB), 404)
    token = {"X-Tinker-Weights-Access-Token": ALICE}
    with_token = copied_path(copy(harness, source, BOB, token))
    assert run_of(harness, with_token, BOB).user_metadata == METADATA  # the token opens the run, too
    assert harness.get(f"training_runs/{with_token.split('/')[2]}").status_code == 404  # alice does not own it
    run_id = source.split("/")[2]
    harness.send("POST", f"training_runs/{run_id}/checkpoints/weights/one/publish")
    of_published = copied_path(copy(harness, source, BOB))
    assert run_of(harness, of_published, BOB).user_metadata is None  # the checkpoint is public, the run is not
    assert not checkpoint_of(harness, of_published, BOB).public


@pytest.mark.parametrize("token", ["tml-carol", "", "x" * 9000, "eyJhbGciOiJub25lIn0.e30."])
def test_a_wrong_token_is_the_users_error_and_not_a_401(harness: Harness, source: str, token: str) -> None:
    answer = copy(harness, source, BOB, {"X-Tinker-Weights-Access-Token": token})
    assert "not a valid key of this server" in detail(answer)
    assert not token or token not in answer.text


def test_a_token_may_be_one_that_a_key_was_exchanged_for(harness: Harness, source: str) -> None:
    jwt = harness.ok("auth/token", {})["jwt"]
    copied_path(copy(harness, source, BOB, {"X-Tinker-Weights-Access-Token": jwt}))


def test_a_token_opens_its_owners_checkpoints_only(harness: Harness, source: str) -> None:
    assert "does not exist" in detail(copy(harness, source, BOB, {"X-Tinker-Weights-Access-Token": BOB}), 404)
    # A tenant's own checkpoints stay readable with another tenant's token.
    copied_path(copy(harness, source, ALICE, {"X-Tinker-Weights-Access-Token": BOB}))


# Idempotency.


def test_a_retry_finds_the_copy_that_it_made_before(harness: Harness, source: str) -> None:
    key = {"X-Idempotency-Key": str(uuid.uuid4())}
    first = copied_path(copy(harness, source, headers=key))
    assert copied_path(copy(harness, source, headers=key)) == first
    assert len(directories(harness)) == 2
    assert copied_path(copy(harness, source)) != first
    assert "exists already and was not copied from" in detail(
        copy(harness, harness.save_checkpoint(harness.model()), headers=key)
    )
    harness.send("POST", f"training_runs/{source.split('/')[2]}/checkpoints/weights/one/publish")
    assert copied_path(copy(harness, source, BOB, headers=key)) != first  # another tenant's key is another key


def test_a_retry_finds_its_copy_when_the_source_is_gone(harness: Harness, source: str) -> None:
    key = {"X-Idempotency-Key": str(uuid.uuid4())}
    first = copied_path(copy(harness, source, headers=key))
    harness.send("DELETE", f"training_runs/{source.split('/')[2]}/checkpoints/weights/one")
    assert copied_path(copy(harness, source, headers=key)) == first


def test_into_a_session_the_slot_is_the_key(harness: Harness, source: str) -> None:
    session_id = harness.session()
    slot = {"session_id": session_id, "model_seq_id": 3}
    path = copied_path(copy(harness, source, **slot))
    assert path == f"tinker://{session_id}:train:3/weights/one"
    assert copied_path(copy(harness, source, **slot)) == path
    assert "was not copied from" in detail(copy(harness, harness.save_checkpoint(harness.model()), **slot))
    existing_model = harness.model(session_id, 4)
    assert existing_model in detail(copy(harness, source, session_id=session_id, model_seq_id=4))
    assert f"{session_id}:train:3" in harness.get(f"sessions/{session_id}").json()["training_run_ids"]
    harness.session(BOB)
    assert copy(harness, source, session_id=harness.session(BOB), model_seq_id=0).status_code == 404


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"destination_project_id": None}, "either destination_project_id, or session_id"),
        ({"session_id": "s", "destination_project_id": "p"}, "either destination_project_id, or session_id"),
        ({"model_seq_id": 1}, "model_seq_id cannot be combined"),
        ({"ttl_seconds": 5}, "ttl_seconds is 5"),
        ({"source_path": "weights/x"}, "not a checkpoint path"),
        ({"destination_project_id": "p" * 200}, "destination_project_id"),
    ],
)
def test_a_wrong_request_is_refused_by_name(harness: Harness, source: str, body: dict, words: str) -> None:
    assert words in detail(copy(harness, source, **body))
    assert len(directories(harness)) == 1


# A copied run is not a model.


@pytest.mark.parametrize("taker", ["create_model", "load_weights"])
def test_a_copied_run_cannot_be_trained(harness: Harness, source: str, taker: str) -> None:
    session_id = harness.session()
    path = copied_path(copy(harness, source, session_id=session_id, model_seq_id=3))
    run_id = path.split("/")[2]
    body = {"model_id": run_id, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
    for route, fields in (("optim_step", {}), ("save_weights", {"path": "x"}), ("unload_model", {})):
        answer = harness.post(route, body | fields)
        assert "holds a copied checkpoint (copied from tinker://" in detail(answer)
    project_run = copied_path(copy(harness, source)).split("/")[2]
    assert "cannot be trained" in detail(harness.post("optim_step", body | {"model_id": project_run}))
    fields = {"base_model": BASE} if taker == "create_model" else {"path": source, "optimizer": False}
    future = harness.ok(taker, {"session_id": session_id, "model_seq_id": 3, **fields})
    outcome = harness.result(future["request_id"])
    assert outcome["category"] == "user"
    assert "taken by a copied checkpoint" in outcome["error"]
    assert harness.services.models.get("alice", run_id).state == "copied"
    future = harness.ok("load_weights", {"session_id": session_id, "model_seq_id": 4, "path": path, "optimizer": True})
    assert harness.kinds()[future["request_id"]] == "load_model"


# Loading by token.


def test_a_token_is_checked_at_the_door_and_only_its_tenant_is_stored(harness: Harness, source: str) -> None:
    body = {"session_id": harness.session(BOB), "model_seq_id": 0, "path": source, "optimizer": False}
    future = harness.ok("load_weights", body | {"weights_access_token": ALICE}, BOB)
    assert harness.kinds()[future["request_id"]] == "load_model"
    stored = harness.read_request_body(future["request_id"])
    assert read_load(stored).granted_by == "alice"
    assert ALICE.encode() not in stored and b"token" not in stored
    model = harness.services.models.get("bob", future["model_id"])
    assert model.lora_rank == 4


def test_a_load_into_a_model_takes_a_token_too(harness: Harness, source: str) -> None:
    model_id = harness.model(key=BOB, lora_config={"rank": 4})
    body = {"model_id": model_id, "seq_id": 1, "path": source, "optimizer": False}
    future = harness.ok("load_weights", body | {"weights_access_token": ALICE}, BOB)
    assert harness.kinds()[future["request_id"]] == "load_weights"
    assert read_load(harness.read_request_body(future["request_id"])).granted_by == "alice"


@pytest.mark.parametrize("into_model", [False, True])
@pytest.mark.parametrize("token", ["tml-carol", 7, ["tml-alice"], "", None])
def test_a_wrong_token_uses_up_the_number_and_is_not_repeated(
    harness: Harness, source: str, token: object, into_model: bool
) -> None:
    if into_model:
        body = {"model_id": harness.model(key=BOB, lora_config={"rank": 4}), "seq_id": 1}
    else:
        body = {"session_id": harness.session(BOB), "model_seq_id": 0}
    body |= {"path": source, "optimizer": False, "weights_access_token": token}
    outcome = harness.result(harness.ok("load_weights", body, BOB)["request_id"], BOB)
    assert outcome["category"] == "user"
    words = "does not exist" if token is None else "weights_access_token is not a valid key"
    assert words in outcome["error"]
    assert "carol" not in json.dumps(outcome)


def test_a_client_cannot_grant_itself_anything(harness: Harness, source: str) -> None:
    for fields in ({}, {"weights_access_token": BOB}):
        body = {"session_id": harness.session(BOB), "model_seq_id": 0, "path": source, "optimizer": False}
        outcome = harness.result(
            harness.ok("load_weights", body | {"granted_by": "alice"} | fields, BOB)["request_id"], BOB
        )
        assert "does not exist" in outcome["error"]
