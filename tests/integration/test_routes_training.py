"""Models and their operations: what is stored, what is refused, and that nothing is stored twice."""

from __future__ import annotations

import dataclasses

import pytest
import zstandard
from starlette.testclient import TestClient
from structlog.testing import capture_logs
from tinker.types import GetInfoResponse, UntypedAPIFuture

from support.http_harness import (
    ALICE,
    BASE,
    BOB,
    MAX_BODY_BYTES,
    Harness,
    json_bytes,
    pass_bytes,
    send_pass,
)
from support.pending_requests import incoming
from tinsmith.api.app import create_app
from tinsmith.base_models import Bases
from tinsmith.store.models import set_state
from tinsmith.types import LoraSpec
from tinsmith.wire import tinker_public_pb2 as pb
from tinsmith.wire.training import read_pass


def creation(session_id: str, model_seq_id: int = 0, **changes: object) -> dict[str, object]:
    return {
        "session_id": session_id,
        "model_seq_id": model_seq_id,
        "base_model": BASE,
        "type": "create_model",
    } | changes


def adam_step(model_id: str, seq_id: int, **adam: object) -> dict[str, object]:
    return {"model_id": model_id, "seq_id": seq_id, "adam_params": adam, "type": "optim_step"}


def refusal_reason(harness: Harness, future: dict) -> str:
    """The reason of a stored future that was refused at its submission."""
    UntypedAPIFuture.model_validate(future)
    result = harness.result(future["request_id"])
    assert result["category"] == "user"
    states = {row.request_id: row.state for row in harness.pending()}
    assert states.get(future["request_id"], "refused") == "refused"
    return result["error"]


def test_a_models_id_and_first_future_follow_from_its_session(harness: Harness) -> None:
    session_id = harness.session()
    future = harness.ok("create_model", creation(session_id, 3, lora_config={"rank": 4, "seed": 9}))
    assert future == {"request_id": f"{session_id}:train:3:0", "model_id": f"{session_id}:train:3"}
    model = harness.services.models.get("alice", future["model_id"])
    assert (model.state, model.lora) == ("creating", LoraSpec(4, 9))
    assert harness.kinds() == {future["request_id"]: "create_model"}
    assert harness.woken == [BASE]


@pytest.mark.parametrize(("lora_changes", "alpha"), [({}, 32.0), ({"alpha": None}, 32.0), ({"alpha": 64}, 64.0)])
def test_alpha_is_that_of_the_request_or_the_usual_one(
    harness: Harness, lora_changes: dict[str, object], alpha: float
) -> None:
    session_id = harness.session()
    model_id = harness.ok("create_model", creation(session_id, lora_config={"rank": 4, "seed": 9, **lora_changes}))[
        "model_id"
    ]
    assert harness.services.models.get("alice", model_id).lora == LoraSpec(4, 9, alpha=alpha)
    assert harness.ok("get_info", {"model_id": model_id})["lora_alpha"] == alpha
    path = harness.checkpoint(model_id)
    assert harness.ok("weights_info", {"tinker_path": path})["lora_alpha"] == alpha
    load = {"session_id": session_id, "model_seq_id": 1, "path": path}
    resumed = harness.ok("load_weights", load)["model_id"]
    assert harness.services.models.get("alice", resumed).lora == LoraSpec(4, None, alpha=alpha)


def test_a_model_of_the_usual_alpha_takes_that_of_what_it_loads_first(harness: Harness) -> None:
    session_id = harness.session()
    source = harness.ok("create_model", creation(session_id, lora_config={"rank": 4, "alpha": 64}))["model_id"]
    path = harness.checkpoint(source)
    usual = harness.ok("create_model", creation(session_id, 1, lora_config={"rank": 4}))["model_id"]
    loading = harness.ok("load_weights", {"model_id": usual, "path": path, "seq_id": 1})
    assert {row.request_id: row.state for row in harness.pending()}[loading["request_id"]] == "pending"
    other = harness.ok("create_model", creation(session_id, 2, lora_config={"rank": 4, "alpha": 8}))["model_id"]
    words = refusal_reason(harness, harness.ok("load_weights", {"model_id": other, "path": path, "seq_id": 1}))
    assert "alpha=64.0" in words and "alpha=8.0" in words


def test_creating_a_model_twice_makes_one(harness: Harness) -> None:
    session_id = harness.session()
    first = harness.ok("create_model", creation(session_id))
    assert harness.ok("create_model", creation(session_id)) == first
    assert len(harness.pending()) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_model": "no/such"}, "base_model 'no/such' is not served here"),
        ({"base_model": 3}, "base_model is 3"),
        ({"base_model": None}, "base_model is missing"),
        ({"lora_config": {"rank": 0}}, "rank is 0"),
        ({"lora_config": {"rank": 300}}, "rank is 300"),
        ({"lora_config": {"rank": 8, "dropout": 0.1}}, "lora_config.dropout is not supported"),
        ({"lora_config": {"dropout": 0.1}}, "adapters are trained without dropout"),
        ({"checkpoint_path": "/data/x"}, "checkpoint_path is not supported by this server: send its tinker:// path to"),
        ({"rlve_config": {"enabled": True}}, "rlve_config is not supported by this server: environments run in the"),
        ({"wandb_config": {"enabled": True}}, "wandb_config is not supported by this server: log from the client"),
        ({"lora_config": {"alpha": 0}}, "lora_config.alpha is 0; it must be above 0 and below 1e+30"),
        ({"lora_config": {"alpha": -3.5}}, "lora_config.alpha is -3.5"),
        ({"lora_config": {"alpha": 1e30}}, "lora_config.alpha is 1e+30"),
        ({"lora_config": {"alpha": True}}, "lora_config.alpha is True; it must be a number"),
        ({"lora_config": {"alpha": "64"}}, "lora_config.alpha is '64'; it must be a number"),
        ({"lora_config": {"train_attn": False, "train_mlp": False, "train_unembed": False}}, "trains nothing"),
        ({"optimizer_config": {"type": "sgd"}}, "optimizer_config.type is 'sgd'; it must be one of adamw, dimuon"),
        ({"optimizer_config": {"type": "dimuon", "version": 2}}, "optimizer_config.version is 2"),
        ({"optimizer_config": {"type": "adamw", "version": 1}}, "optimizer_config.version is not supported"),
        ({"user_metadata": 3}, "user_metadata is 3"),
    ],
)
def test_an_invalid_creation_is_a_refused_future(harness: Harness, changes: dict[str, object], words: str) -> None:
    session_id = harness.session()
    body = creation(session_id, **changes)
    assert words in refusal_reason(harness, harness.ok("create_model", body))
    assert harness.services.models.find(f"{session_id}:train:0") is None


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"session_id": "no"}, 404, "session_id 'no' is unknown"),
        ({"session_id": None}, 400, "session_id is missing"),
        ({"model_seq_id": None}, 400, "model_seq_id is missing"),
        ({"model_seq_id": -1}, 400, "model_seq_id is -1"),
        ({"model_seq_id": "0"}, 400, "model_seq_id is '0'"),
        ({"model_seq_id": True}, 400, "model_seq_id is True"),
    ],
)
def test_a_creation_that_belongs_nowhere_is_an_http_error(
    harness: Harness, changes: dict[str, object], status: int, words: str
) -> None:
    answer = harness.post("create_model", creation(harness.session()) | changes)
    assert answer.status_code == status
    assert words in answer.json()["detail"]
    assert harness.pending() == []


def test_a_pass_is_stored_as_it_was_received(harness: Harness) -> None:
    model_id = harness.model()
    body = pass_bytes(model_id, 1)
    answer = send_pass(harness, zstandard.ZstdCompressor().compress(body), content_encoding="zstd")
    assert answer.json() == {"request_id": f"{model_id}:1", "model_id": model_id}
    assert harness.read_request_body(f"{model_id}:1") == body
    (row,) = [row for row in harness.pending() if row.state == "pending"]
    assert (row.kind, row.seq_id, row.num_tokens, row.model_id) == ("forward_backward", 1, 3, model_id)


def test_a_forward_is_told_from_a_forward_backward(harness: Harness) -> None:
    model_id = harness.model()
    send_pass(harness, pass_bytes(model_id, 1, forward_only=True))
    send_pass(harness, pass_bytes(model_id, 2), path="forward")
    assert harness.kinds() == {f"{model_id}:1": "forward", f"{model_id}:2": "forward"}
    for seq_id in (1, 2):
        assert read_pass(harness.read_request_body(f"{model_id}:{seq_id}"), "r").forward_only


def test_numbers_may_arrive_in_any_order(harness: Harness) -> None:
    model_id = harness.model()
    for seq_id in (3, 1):
        assert send_pass(harness, pass_bytes(model_id, seq_id)).status_code == 200
    harness.ok("optim_step", adam_step(model_id, 2))
    assert [row.seq_id for row in harness.pending()] == [3, 1, 2]


def test_a_request_that_is_sent_again_finds_its_future(harness: Harness) -> None:
    model_id = harness.model()
    first = send_pass(harness, pass_bytes(model_id, 1)).json()
    again = send_pass(harness, pass_bytes(model_id, 1)).json()
    step = harness.ok("optim_step", adam_step(model_id, 2))
    assert first == again
    assert harness.ok("optim_step", adam_step(model_id, 2)) == step
    assert len(harness.pending()) == 2


def test_a_settled_request_that_is_sent_again_stays_settled(harness: Harness) -> None:
    model_id = harness.model()
    step = harness.ok("optim_step", adam_step(model_id, 1))
    harness.settle(step["request_id"], b'{"metrics":{}}')
    harness.ok("optim_step", adam_step(model_id, 1))
    assert harness.pending() == []
    assert harness.result(step["request_id"]) == {"metrics": {}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda model_id: pass_bytes(model_id, 1, loss_fn="mystery"), "loss_fn is 'mystery'"),
        (lambda model_id: pass_bytes(model_id, 1, (1, 99)), "99"),
        (lambda model_id: pass_bytes(model_id, 1, tuple(range(17))), "17"),
        (lambda model_id: pb.ForwardBackwardRequest(model_id=model_id, seq_id=1).SerializeToString(), "loss_fn"),
        (lambda model_id: image_pass(model_id), "'image'"),
    ],
)
def test_an_invalid_pass_is_a_refused_future_that_uses_its_number(harness: Harness, body, words: str) -> None:
    model_id = harness.model()
    answer = send_pass(harness, body(model_id))
    assert answer.status_code == 200
    assert words in refusal_reason(harness, answer.json())
    assert [(row.seq_id, row.state) for row in harness.pending()] == [(1, "refused")]
    corrected = send_pass(harness, pass_bytes(model_id, 1))
    assert words in refusal_reason(harness, corrected.json())  # the seq_id is used and cannot get another body


def image_pass(model_id: str) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=1, loss_fn="cross_entropy")
    message.data.add().model_input.add().image.format = "png"
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("adam", "words"),
    [
        ({"learning_rate": -1}, "adam_params.learning_rate is -1"),
        ({"beta2": 1}, "adam_params.beta2 is 1"),
        ({"nesterov": True}, "adam_params.nesterov is not supported"),
    ],
)
def test_an_invalid_step_is_a_refused_future(harness: Harness, adam: dict[str, object], words: str) -> None:
    assert words in refusal_reason(harness, harness.ok("optim_step", adam_step(harness.model(), 1, **adam)))


def test_another_optimizer_is_a_refused_future(harness: Harness) -> None:
    body = {"model_id": harness.model(), "seq_id": 1, "optimizer_params": {"type": "dimuon", "learning_rate": 1}}
    assert "'dimuon'" in refusal_reason(harness, harness.ok("optim_step", body))


@pytest.mark.parametrize("seq_id", [0, -1])
def test_a_pass_without_a_number_is_a_400(harness: Harness, seq_id: int) -> None:
    answer = send_pass(harness, pass_bytes(harness.model(), seq_id))
    assert answer.status_code == 400
    assert f"seq_id is {seq_id}" in answer.json()["detail"]
    assert harness.pending() == []


@pytest.mark.parametrize(("seq_id", "words"), [(0, "seq_id is 0"), (2**63, "64 bits"), (1.0, "seq_id is 1.0")])
def test_a_step_without_a_number_is_a_400(harness: Harness, seq_id: object, words: str) -> None:
    answer = harness.post("optim_step", {"model_id": harness.model(), "seq_id": seq_id, "adam_params": {}})
    assert answer.status_code == 400
    assert words in answer.json()["detail"]


def test_an_unknown_model_is_404_for_every_operation(harness: Harness) -> None:
    harness.model()
    bodies = {
        "optim_step": adam_step("no:train:0", 1),
        "save_weights": {"model_id": "no:train:0", "seq_id": 1, "path": "x"},
        "save_weights_for_sampler": {"model_id": "no:train:0", "seq_id": 1, "path": "x"},
        "load_weights": {"model_id": "no:train:0", "seq_id": 1, "path": "tinker://a/weights/b", "optimizer": False},
        "get_info": {"model_id": "no:train:0"},
        "unload_model": {"model_id": "no:train:0"},
    }
    answers = [harness.post(path, body) for path, body in bodies.items()]
    answers.append(send_pass(harness, pass_bytes("no:train:0", 1)))
    assert [answer.status_code for answer in answers] == [404] * len(answers)
    assert all("no:train:0" in answer.json()["detail"] for answer in answers)
    assert harness.pending() == []


@pytest.mark.parametrize("model_id", ["x" * 50_000, "a\x00b", ""])
def test_an_id_that_cannot_be_is_404_in_few_words(harness: Harness, model_id: str) -> None:
    answer = send_pass(harness, pass_bytes(model_id, 1))
    assert answer.status_code == 404
    assert len(answer.json()["detail"]) < 200


def test_another_tenants_model_is_unknown(harness: Harness) -> None:
    model_id = harness.model()
    answers = [
        harness.post("optim_step", adam_step(model_id, 1), BOB),
        harness.post("get_info", {"model_id": model_id}, BOB),
        harness.post("unload_model", {"model_id": model_id}, BOB),
        harness.get(f"training_runs/{model_id}", BOB),
        send_pass(harness, pass_bytes(model_id, 1), key=BOB),
    ]
    assert [answer.status_code for answer in answers] == [404] * len(answers)
    assert harness.pending() == []


def test_a_closed_session_is_410_for_every_operation(harness: Harness) -> None:
    session_id = harness.session()
    model_id = harness.model(session_id)
    harness.services.sessions.close(session_id, "no heartbeat for 300 s")
    answers = [
        send_pass(harness, pass_bytes(model_id, 1)),
        harness.post("optim_step", adam_step(model_id, 1)),
        harness.post("create_model", creation(session_id, 1)),
        harness.post("unload_model", {"model_id": model_id}),
    ]
    assert [answer.status_code for answer in answers] == [410] * len(answers)
    assert all("no heartbeat for 300 s" in answer.json()["detail"] for answer in answers)


def test_a_finished_session_still_takes_its_last_requests(harness: Harness) -> None:
    session_id = harness.session()
    model_id = harness.model(session_id)
    harness.ok(f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None})
    harness.ok("optim_step", adam_step(model_id, 1))


@pytest.mark.parametrize("state", ["failed", "unloaded"])
def test_an_operation_on_a_lost_model_is_refused_with_the_reason(harness: Harness, state: str) -> None:
    model_id = harness.model()
    with harness.services.models._db.write() as connection:
        connection.execute(set_state(model_id, state, "the cat sat on it"))
    assert "the cat sat on it" in refusal_reason(harness, harness.ok("optim_step", adam_step(model_id, 1)))


@pytest.mark.parametrize(
    ("headers", "body", "status", "words"),
    [
        ({}, b"\xff\xff", 400, "not a ForwardBackwardRequest"),
        ({"content_encoding": "zstd"}, b"not zstd", 400, "not one whole zstd frame"),
        ({"content_encoding": "br"}, b"", 415, "'br'"),
        ({"Content-Type": "application/json"}, b"{}", 400, "model_id is missing"),
        ({"Content-Type": "text/plain"}, b"{}", 415, "application/x-protobuf"),
        ({}, b"\0" * (MAX_BODY_BYTES + 1), 413, str(MAX_BODY_BYTES)),
        (
            {"content_encoding": "zstd"},
            zstandard.ZstdCompressor().compress(b"\0" * (MAX_BODY_BYTES + 1)),
            413,
            str(MAX_BODY_BYTES),
        ),
        ({}, b"", 400, "seq_id is 0"),
    ],
)
def test_a_pass_that_cannot_be_read_is_an_http_error(
    harness: Harness, headers: dict[str, str], body: bytes, status: int, words: str
) -> None:
    answer = send_pass(harness, body, **headers)
    assert answer.status_code == status
    assert words in answer.json()["detail"]


def test_info_tells_where_the_tokenizer_is(harness: Harness) -> None:
    model_id = harness.model(lora_config={"rank": 4})
    info = GetInfoResponse.model_validate(harness.ok("get_info", {"model_id": model_id}))
    assert (info.model_id, info.model_name, info.is_lora, info.lora_rank) == (model_id, BASE, True, 4)
    assert info.model_data.tokenizer_id == "/models/tiny"
    assert info.model_data.arch == "Tiny"


def test_unloading_is_a_future_of_its_own(harness: Harness) -> None:
    model_id = harness.model()
    future = harness.ok("unload_model", {"model_id": model_id})
    assert harness.ok("unload_model", {"model_id": model_id}) == future
    assert harness.kinds() == {future["request_id"]: "unload_model"}


def test_a_save_is_stored_with_its_kind(harness: Harness) -> None:
    model_id = harness.model()
    bodies = {
        "save_weights": {"model_id": model_id, "seq_id": 1, "path": "a.b-1", "ttl_seconds": 3600, "overwrite": True},
        "save_weights_for_sampler": {"model_id": model_id, "seq_id": 2, "sampling_session_seq_id": 0},
    }
    for kind, body in bodies.items():
        future = harness.ok(kind, body)
        assert harness.kinds()[future["request_id"]] == kind
        assert harness.read_request_body(future["request_id"]) == json_bytes(body)


@pytest.mark.parametrize(
    ("path", "changes", "words"),
    [
        ("save_weights", {}, "path is missing"),
        ("save_weights", {"path": "../x"}, "'../x'"),
        ("save_weights", {"path": ""}, "''"),
        ("save_weights", {"path": "a/b"}, "'a/b'"),
        ("save_weights", {"path": "x" * 129}, "xxx"),
        ("save_weights", {"path": "x", "ttl_seconds": 60}, "ttl_seconds is 60"),
        ("save_weights", {"path": "x", "overwrite": "yes"}, "overwrite is 'yes'"),
        ("save_weights_for_sampler", {}, "both missing"),
        ("save_weights_for_sampler", {"path": ".hidden"}, "'.hidden'"),
        ("save_weights_for_sampler", {"sampling_session_seq_id": -1}, "sampling_session_seq_id is -1"),
        ("save_weights_for_sampler", {"path": "x", "kind": "inflight"}, "inflight"),
    ],
)
def test_an_invalid_save_is_a_refused_future(
    harness: Harness, path: str, changes: dict[str, object], words: str
) -> None:
    body = {"model_id": harness.model(), "seq_id": 1, **changes}
    assert words in refusal_reason(harness, harness.ok(path, body))


def load(session_id: str, path: str, model_seq_id: int = 1, **changes: object) -> dict[str, object]:
    return {"session_id": session_id, "model_seq_id": model_seq_id, "path": path, "optimizer": True, **changes}


def test_a_model_made_from_a_checkpoint_takes_its_adapter(harness: Harness) -> None:
    session_id = harness.session()
    path = harness.checkpoint(harness.model(session_id), lora=LoraSpec(5, None, True, False, True))
    future = harness.ok("load_weights", load(session_id, path, user_metadata={"a": "b"}))
    assert future == {"request_id": f"{session_id}:train:1:0", "model_id": f"{session_id}:train:1"}
    model = harness.services.models.get("alice", future["model_id"])
    assert model.lora == LoraSpec(5, None, True, False, True)
    assert (model.base_model, model.user_metadata, model.state) == (BASE, {"a": "b"}, "creating")
    assert harness.kinds() == {future["request_id"]: "load_model"}


@pytest.mark.parametrize(
    ("make_path", "changes", "words"),
    [
        (lambda h, m: "tinker://none:train:0/weights/x", {}, "does not exist"),
        (lambda h, m: "weights/x", {}, "not a checkpoint path"),
        (lambda h, m: h.checkpoint(m, "sampler_weights"), {}, "no optimizer state"),
        (lambda h, m: h.checkpoint(m), {"base_model": "local/other"}, "was trained on"),
        (lambda h, m: h.checkpoint(m), {"weights_access_token": "t"}, "not a valid key of this server"),
        (lambda h, m: h.checkpoint(m, base_model="gone/base"), {}, "'gone/base' is not served"),
        (lambda h, m: h.checkpoint(h.model(key=BOB)), {}, "does not exist"),
    ],
)
def test_an_invalid_load_is_a_refused_future(harness: Harness, make_path, changes: dict, words: str) -> None:
    session_id = harness.session()
    path = make_path(harness, harness.model(session_id))
    assert words in refusal_reason(harness, harness.ok("load_weights", load(session_id, path, **changes)))
    assert harness.services.models.find(f"{session_id}:train:1") is None


def test_sampler_weights_load_without_the_optimizer(harness: Harness) -> None:
    session_id = harness.session()
    path = harness.checkpoint(harness.model(session_id), "sampler_weights")
    future = harness.ok("load_weights", load(session_id, path, optimizer=False))
    assert harness.kinds() == {future["request_id"]: "load_model"}


def test_a_published_checkpoint_can_be_loaded_by_anyone(harness: Harness) -> None:
    path = harness.checkpoint(harness.model(key=BOB))
    answer = harness.send(
        "POST",
        path.replace("tinker://", "training_runs/").replace("/weights", "/checkpoints/weights") + "/publish",
        key=BOB,
    )
    assert answer.status_code == 200
    future = harness.ok("load_weights", load(harness.session(), path))
    assert harness.kinds() == {future["request_id"]: "load_model"}


def test_a_load_into_a_model_needs_the_same_adapter(harness: Harness) -> None:
    session_id = harness.session()
    first, second, third = (
        harness.model(session_id, model_seq_id, lora_config={"rank": 8, "seed": 3}) for model_seq_id in range(3)
    )
    fits, wrong = harness.checkpoint(first), harness.checkpoint(first, name="wide", lora=LoraSpec(16))
    body = {"model_id": first, "seq_id": 1, "path": fits, "optimizer": False}
    assert harness.kinds() == {} and harness.ok("load_weights", body)["request_id"] == f"{first}:1"
    assert harness.kinds() == {f"{first}:1": "load_weights"}
    reason = refusal_reason(harness, harness.ok("load_weights", body | {"model_id": second, "path": wrong}))
    assert "rank=16" in reason and "rank=8" in reason
    foreign = harness.checkpoint(first, name="foreign", base_model="local/other")
    reason = refusal_reason(harness, harness.ok("load_weights", body | {"model_id": third, "path": foreign}))
    assert "'local/other'" in reason and f"{BASE!r}" in reason


@pytest.mark.parametrize("numbered", [True, False])
def test_a_model_is_loaded_into_in_the_middle_of_a_run(harness: Harness, numbered: bool) -> None:
    model_id = harness.model()
    path = harness.checkpoint(model_id)
    numbers = iter(range(1, 4)) if numbered else None

    def number() -> dict[str, object]:
        return {} if numbers is None else {"seq_id": next(numbers)}

    harness.ok("optim_step", {"model_id": model_id, "adam_params": {}, **number()})
    for _ in range(2):
        harness.ok("load_weights", {"model_id": model_id, "path": path, "optimizer": False, **number()})
    assert sorted(harness.kinds().values()) == ["load_weights", "load_weights", "optim_step"]


@pytest.mark.parametrize("numbered", [True, False])
def test_a_setting_refuses_a_load_that_is_not_a_models_first_request(harness: Harness, numbered: bool) -> None:
    """As in the hosted service, a forward and an earlier load count."""
    settings = harness.services.settings.model_copy(update={"refuse_late_loads": True})
    harness.app.state.services = dataclasses.replace(harness.services, settings=settings)
    model_id = harness.model()
    path = harness.checkpoint(model_id)
    load_ = {"model_id": model_id, "path": path, "optimizer": False}

    def number(seq_id: int) -> dict[str, object]:
        return {"seq_id": seq_id} if numbered else {}

    harness.ok("optim_step", {"model_id": model_id, "adam_params": {}, **number(1)})
    for _ in range(2):  # sent again, it is refused again
        answer = harness.post("load_weights", {**load_, **number(2)})
        assert answer.status_code == 400
        assert answer.json()["detail"].startswith("LoadWeights is not permitted with seq_id ")
    assert "load_weights" not in harness.kinds().values(), "nothing waits to be loaded"
    if numbered:
        assert "LoadWeights is not permitted with seq_id 2" in refusal_reason(harness, {"request_id": f"{model_id}:2"})
        assert harness.ok("optim_step", adam_step(model_id, 3))["request_id"] == f"{model_id}:3"


def test_ids_of_one_tenant_never_reach_anothers_queue(harness: Harness) -> None:
    alice_model, bob_model = harness.model(), harness.model(key=BOB)
    harness.ok("optim_step", adam_step(alice_model, 1), ALICE)
    harness.ok("optim_step", adam_step(bob_model, 1), BOB)
    assert {row.request_id: row.tenant_id for row in harness.pending()} == {
        f"{alice_model}:1": "alice",
        f"{bob_model}:1": "bob",
    }


def test_a_load_may_name_another_base_that_holds_the_same_weights(harness: Harness) -> None:
    twin = dataclasses.replace(harness.services.bases.get(BASE), name="local/longer", max_context_length=32)
    shapes = (*harness.services.bases.shapes, twin)
    services = dataclasses.replace(harness.services, bases=Bases(shapes))
    client = TestClient(create_app(services), base_url="http://127.0.0.1")
    twin_harness = dataclasses.replace(harness, services=services, client=client)
    session_id = twin_harness.session()
    path = twin_harness.checkpoint(twin_harness.model(session_id))
    future = twin_harness.ok("load_weights", load(session_id, path, base_model=twin.name))
    model = services.models.get("alice", future["model_id"])
    assert (model.base_model, model.state) == (twin.name, "creating")
    assert [row.request_id for row in incoming(services.futures._db, twin.name)] == [future["request_id"]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("create_model", {"model_seq_id": 0, "base_model": BASE}),
        ("load_weights", {"model_seq_id": 0, "path": "tinker://a/weights/b", "optimizer": False}),
        ("load_weights", {"seq_id": 1, "path": "tinker://a/weights/b", "optimizer": False}),
        ("save_weights", {"seq_id": 1, "path": "one"}),
        ("save_weights_for_sampler", {"seq_id": 1, "path": "one"}),
        ("save_weights_external", {"seq_id": 1, "path": "one"}),
    ],
)
def test_unsupported_options_are_refused_by_name(harness: Harness, path: str, body: dict) -> None:
    whose = {"session_id": harness.session()} if "model_seq_id" in body else {"model_id": harness.model()}
    future = harness.ok(path, body | whose | {"placement_config": {"data": 8}, "empty": None})
    refusal = harness.result(future["request_id"])
    assert refusal["category"] == "user"
    assert "placement_config is not supported" in refusal["error"]


def test_a_new_run_is_logged_once_with_the_address_of_its_page(harness: Harness) -> None:
    session_id = harness.session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
    with capture_logs() as logs:
        model_id = harness.ok("create_model", body)["model_id"]
        assert harness.ok("create_model", body)["model_id"] == model_id
        harness.ok("create_model", body | {"model_seq_id": 1, "base_model": "no/such"})
    created = [entry for entry in logs if entry["event"] == "run created"]
    page = f"http://127.0.0.1/#/runs/{model_id.replace(':', '%3A')}"
    assert [(entry["log_level"], entry["base_model"], entry["page"]) for entry in created] == [("info", BASE, page)]
