"""Checkpoints and training runs, read through the SDK's own types."""

from __future__ import annotations

import time

import pytest
from tinker.types import CheckpointsListResponse, TrainingRun, TrainingRunsResponse, WeightsInfoResponse

from support.http_harness import ALICE, BASE, BOB, Harness
from tinsmith.types import LoraSpec


def address(path: str) -> str:
    run_id, _, checkpoint_id = path.removeprefix("tinker://").partition("/")
    return f"training_runs/{run_id}/checkpoints/{checkpoint_id}"


def test_a_run_shows_its_metadata_and_newest_checkpoints(harness: Harness) -> None:
    metadata = {"renderer_name": "role_colon", "steps": 3}
    model_id = harness.model(lora_config={"rank": 4}, user_metadata=metadata)
    harness.checkpoint(model_id, name="one")
    newest = harness.checkpoint(model_id, name="two", user_metadata={"step": "2"}, ttl_s=3600)
    sampler = harness.checkpoint(model_id, "sampler_weights", "three")
    run = TrainingRun.model_validate(harness.get(f"training_runs/{model_id}?access_scope=owned").json())
    assert (run.training_run_id, run.base_model, run.lora_rank, run.corrupted) == (model_id, BASE, 4, False)
    assert run.model_owner == "tml:organization_user:alice"
    assert run.user_metadata == {"renderer_name": "role_colon", "steps": "3"}
    assert run.last_request_time.tzinfo is not None
    assert run.last_checkpoint is not None and run.last_sampler_checkpoint is not None
    assert (run.last_checkpoint.tinker_path, run.last_sampler_checkpoint.tinker_path) == (newest, sampler)
    assert run.last_checkpoint.user_metadata == {"step": "2"}
    assert run.last_checkpoint.expires_at is not None
    assert abs(run.last_checkpoint.expires_at.timestamp() - time.time() - 3600) < 60


def test_runs_are_listed_newest_first_in_pages(harness: Harness) -> None:
    session_id = harness.session()
    models = [harness.model(session_id, model_seq_id) for model_seq_id in range(3)]
    harness.model(key=BOB)
    page = TrainingRunsResponse.model_validate(harness.get("training_runs?limit=2&offset=1").json())
    assert [run.training_run_id for run in page.training_runs] == [models[1], models[0]]
    assert (page.cursor.offset, page.cursor.limit, page.cursor.total_count) == (1, 2, 3)


def test_checkpoints_are_listed_of_one_run_and_of_all(harness: Harness) -> None:
    session_id = harness.session()
    first, second = harness.model(session_id, 0), harness.model(session_id, 1)
    first_path = harness.checkpoint(first)
    second_path = harness.checkpoint(second, "sampler_weights", "two")
    harness.checkpoint(harness.model(key=BOB))
    of_run = CheckpointsListResponse.model_validate(harness.get(f"training_runs/{first}/checkpoints").json())
    (listed,) = of_run.checkpoints
    assert (listed.tinker_path, listed.checkpoint_id, listed.checkpoint_type) == (first_path, "weights/one", "training")
    assert (listed.size_bytes, listed.public, listed.expires_at) == (7, False, None)
    of_all = CheckpointsListResponse.model_validate(harness.get("checkpoints?limit=100&offset=0").json())
    assert [checkpoint.tinker_path for checkpoint in of_all.checkpoints] == [second_path, first_path]
    assert of_all.checkpoints[0].checkpoint_type == "sampler"
    assert of_all.cursor is not None and of_all.cursor.total_count == 2


def test_weights_info_tells_what_an_adapter_is(harness: Harness) -> None:
    path = harness.checkpoint(harness.model(), lora=LoraSpec(6, None, True, False, True))
    info = WeightsInfoResponse.model_validate(harness.ok("weights_info", {"tinker_path": path}))
    assert (info.base_model, info.is_lora, info.lora_rank) == (BASE, True, 6)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, False, True)


def test_a_deleted_checkpoint_is_gone(harness: Harness) -> None:
    path = harness.checkpoint(harness.model())
    assert harness.send("DELETE", address(path)).status_code == 200
    assert harness.send("DELETE", address(path)).status_code == 404
    assert harness.post("weights_info", {"tinker_path": path}).status_code == 404


def test_an_id_without_its_kind_is_refused_with_the_form(harness: Harness) -> None:
    run_id = harness.model()
    harness.checkpoint(run_id, name="0001")
    address = f"training_runs/{run_id}/checkpoints/0001"
    for method, path in (("DELETE", address), ("GET", f"{address}/archive"), ("DELETE", f"{address}/publish")):
        answer = harness.send(method, path)
        assert answer.status_code == 400, (method, path, answer.text)
        assert "weights, sampler_weights" in answer.json()["detail"]
    answer = harness.send("DELETE", address)
    assert answer.json()["detail"].startswith("checkpoint_id is '0001'; it must be KIND/NAME")
    assert harness.send("DELETE", address, key=BOB).status_code == 404
    assert len(harness.get(f"training_runs/{run_id}/checkpoints").json()["checkpoints"]) == 1


def test_publishing_is_idempotent_and_reversible(harness: Harness) -> None:
    path = harness.checkpoint(harness.model())
    info = {"tinker_path": path}
    assert harness.post("weights_info", info, BOB).status_code == 404
    for method, status in (("POST", 200), ("POST", 200), ("DELETE", 404), ("DELETE", 404)):
        assert harness.send(method, address(path) + "/publish").status_code == 200
        assert harness.post("weights_info", info, BOB).status_code == status


def test_a_ttl_can_be_set_and_taken_away(harness: Harness) -> None:
    model_id = harness.model()
    path = harness.checkpoint(model_id)

    def expires_at() -> object:
        return harness.get(f"training_runs/{model_id}/checkpoints").json()["checkpoints"][0]["expires_at"]

    assert harness.send("PUT", address(path) + "/ttl", {"ttl_seconds": 7200}).status_code == 200
    assert expires_at() is not None
    assert harness.send("PUT", address(path) + "/ttl", {"ttl_seconds": None}).status_code == 200
    assert expires_at() is None
    refusal = harness.send("PUT", address(path) + "/ttl", {"ttl_seconds": 5})
    assert refusal.status_code == 400
    assert "ttl_seconds is 5" in refusal.json()["detail"]


@pytest.mark.parametrize(
    ("method", "suffix", "body"),
    [("DELETE", "", None), ("POST", "/publish", None), ("DELETE", "/publish", None), ("PUT", "/ttl", {})],
)
def test_another_tenant_changes_nothing_even_if_it_may_read(
    harness: Harness, method: str, suffix: str, body: object
) -> None:
    path = harness.checkpoint(harness.model())
    assert harness.send(method, address(path) + suffix, body, BOB).status_code == 404
    harness.send("POST", address(path) + "/publish", key=ALICE)
    assert harness.send(method, address(path) + suffix, body, BOB).status_code == 404
    assert harness.services.checkpoints.page("alice", 10, 0)[0][0].public


@pytest.mark.parametrize(
    "path",
    [
        "training_runs/no:train:0",
        "training_runs/no:train:0/checkpoints",
        "training_runs/no:train:0/checkpoints/weights/x/nothing",
    ],
)
def test_an_unknown_run_is_404(harness: Harness, path: str) -> None:
    assert harness.get(path).status_code == 404


@pytest.mark.parametrize(
    "path", ["weights/x", "tinker://a/b", "tinker://a/other/b", "tinker://a/weights/.b", "x" * 5000]
)
def test_a_malformed_path_is_a_400(harness: Harness, path: str) -> None:
    answer = harness.post("weights_info", {"tinker_path": path})
    assert answer.status_code == 400
    assert answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "field"),
    [("weights_info", "tinker_path"), ("copy_weights", "source_path"), ("create_sampling_client", "model_path")],
)
def test_a_path_of_another_form_is_refused_by_the_name_of_its_field(harness: Harness, path: str, field: str) -> None:
    answer = harness.post(path, {field: "tinker://../../etc/passwd"})
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith(f"{field} 'tinker://../../etc/passwd' is not a checkpoint path")
