"""The legacy JSON protocol, in plain HTTP requests with the bodies of its clients."""

from __future__ import annotations

import time

import httpx
import numpy as np
import orjson
import pytest
from starlette.testclient import TestClient

from support.http_harness import BOB, Harness, pass_bytes, send_pass
from support.live import API_KEY, LiveServer
from support.raw_client import pass_body
from tinsmith.api.legacy import pass_message
from tinsmith.errors import UserError
from tinsmith.store.futures import Settlement
from tinsmith.types import Datum
from tinsmith.wire import tinker_public_pb2 as pb
from tinsmith.wire.json_results import dump, pass_result, sample_result
from tinsmith.wire.training import read_pass

TOKENS = [1, 2, 3]


def datum(**changes: object) -> dict[str, object]:
    inputs = {
        "target_tokens": {"data": TOKENS, "dtype": "int64", "shape": [3]},
        "weights": {"data": [1.0, 1.0, 1.0], "dtype": "float32"},
    }
    return {"model_input": {"tokens": TOKENS}, "loss_fn_inputs": inputs} | changes


HINTS = {
    "debug_train_only": True,
    "checkpoint_path": None,
    "parallelism_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "num_gpus": 1},
    "max_batch_size": 4096,
    "max_seq_len": 2048,
    "rlve_config": {"enabled": False, "environment_list": []},
    "wandb_config": {"project": "x"},
}
"""Fields of tinkercloud's create_model that change no result here."""


def training(model_id: str, **changes: object) -> dict[str, object]:
    return {"model_id": model_id, "data": [datum()], "loss_fn": "cross_entropy"} | changes


# A complete training loop against a live server.


class Client:
    """Polls as the protocol's clients do: short requests until the status is final."""

    def __init__(self, server: LiveServer) -> None:
        self.http = httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": API_KEY}, timeout=5.0)

    def ok(self, path: str, body: object) -> dict:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def result(self, request_id: str) -> dict:
        for _ in range(300):
            answer = self.http.get(f"retrieve_future/{request_id}")
            assert answer.status_code == 200, answer.text
            if answer.json()["status"] != "pending":
                assert answer.json()["status"] == "completed", answer.text
                return answer.json()["result"]
            time.sleep(0.1)
        raise AssertionError(f"{request_id} did not end")

    def run(self, path: str, body: object) -> dict:
        return self.result(self.ok(path, body)["request_id"])


def test_a_client_of_the_dialect_trains_samples_saves_and_resumes(nano_server: LiveServer) -> None:
    client = Client(nano_server)
    base = client.http.get("get_server_capabilities").json()["supported_models"][0]["model_name"]
    session_id = client.ok("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "1"})["session_id"]
    assert session_id in client.http.get("list_sessions").json()["sessions"]
    lora = {"rank": 4, "alpha": 8, "dropout": 0.0, "seed": None, "train_unembed": True}
    creation = {"session_id": session_id, "model_seq_id": 0, "base_model": base, "lora_config": lora, **HINTS}
    created = client.ok("create_model", creation)
    model_id = created["model_id"]
    creation_result = client.result(created["request_id"])
    assert (creation_result["model_id"], creation_result["status"]) == (model_id, "ready")
    router = client.http.get("get_router_address", params={"model_id": model_id}).json()
    assert creation_result["router_address"] == router["router_address"] == nano_server.url
    assert client.ok("get_info", {"model_id": model_id})["lora_alpha"] == 8
    tokenizer = client.http.get("get_tokenizer", params={"model_id": model_id}).json()
    assert tokenizer["vocab_size"] == 512 and tokenizer["special_tokens"]["eos_token"] == "<|im_end|>"
    assert isinstance(tokenizer["eos_token_id"], int)

    passed = {"data": [datum()], "loss_fn": "cross_entropy"}
    losses = []
    for step in range(3):
        trained = client.run("forward_backward", {"model_id": model_id, "forward_backward_input": passed})
        losses.append(trained["metrics"]["loss:sum"])
        adam = {"learning_rate": 0.02, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
        assert client.run("optim_step", {"model_id": model_id, "step_num": step, "adam_params": adam})
    assert losses[2] < losses[0]
    forward = client.run("forward", {"model_id": model_id, "forward_input": passed})
    (output,) = forward["loss_fn_outputs"]
    assert output["logprobs"]["shape"] == [3]
    assert -sum(output["logprobs"]["data"]) == pytest.approx(forward["metrics"]["loss:sum"], rel=1e-5)

    response_only = {"logprobs": [-6.0, -6.0], "advantages": [1.0, -0.5], "mask": [1, 1]}
    whole = {
        "target_tokens": [2, 3, 4],
        "logprobs": [0.0, -6.0, -6.0],
        "advantages": {"data": [0.0, 1.0, -0.5], "dtype": "float32", "shape": [3]},
    }
    answers = []
    for tokens, inputs in (([1, 2, 3, 4], response_only), ([1, 2, 3], whole)):
        data = [{"model_input": {"tokens": tokens}, "loss_fn_inputs": inputs}]
        answers.append(client.run("forward", {"model_id": model_id, "data": data, "loss_fn": "ppo"}))
    assert answers[0] == answers[1]
    metrics = answers[0]["metrics"]
    assert metrics["ppo_kl"] == metrics["ppo_kl:mean"] and metrics["pg_clipfrac"] == metrics["pg_clipfrac:mean"]
    assert set(metrics) >= {"loss:sum", "ppo_kl", "pg_clipfrac"}

    saved = client.run("save_weights", {"model_id": model_id, "path": "dialect-state"})["path"]
    sampler = client.run("save_weights_for_sampler", {"model_id": model_id, "path": "dialect-sampler"})["path"]
    sampling_client = client.ok("create_sampling_client", {"model_path": sampler})
    assert sampling_client["status"] == "ready"
    request = {
        "sampling_client_id": sampling_client["sampling_client_id"],
        "prompts": [TOKENS, [4, 5]],
        "num_samples": 2,
        "prompt_logprobs": True,
        "sampling_params": {"temperature": 0.7, "max_tokens": 4, "stop_token_ids": [9]},
    }
    sampled = client.run("sample", request)
    assert len(sampled["sequences"]) == 4
    assert [len(result["prompt_logprobs"]) for result in sampled["results"]] == [3, 2]
    assert sampled["results"][0]["prompt_logprobs"][0] is None
    for sequence in sampled["sequences"]:
        assert len(sequence["tokens"]) == len(sequence["logprobs"]) in range(1, 5)
        assert sequence["stop_reason"] in ("stop", "length")
    base_answer = client.run("sample", {"prompts": [TOKENS], "base_model": base, "sampling_params": {"max_tokens": 2}})
    assert len(base_answer["sequences"]) == 1

    chat = {"model": router["model"], "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    direct = client.http.post(f"{router['openai_base_url']}/chat/completions", json=chat)
    assert direct.status_code == 200 and direct.json()["weight_version"] == sampler

    deleted = client.ok("delete_model", {"model_id": model_id})
    assert (deleted["model_id"], deleted["status"]) == (model_id, "deleted")
    resumed = client.ok("load_weights", {"session_id": session_id, "model_seq_id": 1, "path": saved, "optimizer": True})
    client.result(resumed["request_id"])
    again = client.run("forward", {"model_id": resumed["model_id"], "forward_input": passed})
    assert again["metrics"]["loss:sum"] == forward["metrics"]["loss:sum"]
    assert client.run("unload_model", {"model_id": resumed["model_id"]})["type"] == "unload_model"


# The paths.


@pytest.mark.parametrize("path", ["/health", "/api/v1/health"])
def test_health_needs_no_key_and_tells_nothing_of_tenants(harness: Harness, path: str) -> None:
    harness.model()
    answer = TestClient(harness.app, base_url="http://127.0.0.1").get(path)
    assert answer.status_code == 200
    assert answer.json()["status"] == "healthy"
    assert set(answer.json()) == {"status", "version", "timestamp"}


@pytest.mark.parametrize("nested", [None, "forward_backward_input", "forward_input"])
@pytest.mark.parametrize("path", ["forward_backward", "forward"])
def test_a_json_pass_is_stored_as_the_message_that_the_sdk_sends(
    harness: Harness, path: str, nested: str | None
) -> None:
    model_id = harness.model()
    inner = {"data": [datum()], "loss_fn": "cross_entropy", "loss_fn_config": {}}
    future = harness.ok(path, {"model_id": model_id} | ({nested: inner} if nested else inner))
    stored = read_pass(harness.read_request_body(future["request_id"]), "r")
    expected_pass = read_pass(pass_body(model_id, 1, forward_only=path == "forward"), "r")
    assert (stored.model_id, stored.loss_fn, stored.forward_only) == (
        expected_pass.model_id,
        expected_pass.loss_fn,
        expected_pass.forward_only,
    )
    for stored_datum, sent_datum in zip(stored.data, expected_pass.data, strict=True):
        np.testing.assert_array_equal(stored_datum.tokens_N, sent_datum.tokens_N)
        assert set(stored_datum.inputs) == set(sent_datum.inputs)
        for name in stored_datum.inputs:
            np.testing.assert_array_equal(np.asarray(stored_datum.inputs[name]), np.asarray(sent_datum.inputs[name]))
            assert stored_datum.inputs[name].dtype == sent_datum.inputs[name].dtype  # type: ignore[union-attr]


def test_operations_without_numbers_take_the_next_ones(harness: Harness) -> None:
    model_id = harness.model()
    requests = [
        harness.ok("forward_backward", training(model_id)),
        harness.ok("optim_step", {"model_id": model_id, "step_num": 0, "adam_params": {}}),
        harness.ok("optim_step", {"model_id": model_id, "adam_params": {"learning_rate": -1}}),
        harness.ok("save_weights", {"model_id": model_id, "path": "a"}),
    ]
    rows = {row.request_id: (row.seq_id, row.kind, row.state) for row in harness.pending()}
    assert [rows[request["request_id"]] for request in requests] == [
        (1, "forward_backward", "pending"),
        (2, "optim_step", "pending"),
        (3, "optim_step", "refused"),
        (4, "save_weights", "pending"),
    ]


def test_two_requests_never_share_a_number(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    model_id = harness.model()
    futures = type(harness.services.futures)
    honest = futures.next_seq_id
    answers = iter([1])  # as stored by another server a moment ago
    monkeypatch.setattr(futures, "next_seq_id", lambda self, model: next(answers, None) or honest(self, model))
    send_pass(harness, pass_bytes(model_id, 1))
    request_id = harness.ok("optim_step", {"model_id": model_id, "adam_params": {}})["request_id"]
    rows = {row.request_id: row.seq_id for row in harness.pending()}
    assert (rows[f"{model_id}:1"], rows[request_id]) == (1, 2)


def test_a_wrong_json_pass_with_a_number_uses_it_up(harness: Harness) -> None:
    model_id = harness.model()
    future = harness.ok("forward_backward", training(model_id, seq_id=1, data="none"))
    assert "data is 'none'" in harness.result(future["request_id"])["error"]
    assert [(row.seq_id, row.state) for row in harness.pending()] == [(1, "refused")]


def test_a_result_is_fetched_by_path(harness: Harness) -> None:
    model_id = harness.model()
    request_id = harness.ok("optim_step", {"model_id": model_id, "adam_params": {}})["request_id"]
    path = f"retrieve_future/{request_id}"
    assert harness.get(path).json() == {"request_id": request_id, "status": "pending"}
    harness.settle(request_id, b'{"metrics":{"step":1.0}}')
    expected_answer = {"request_id": request_id, "status": "completed", "result": {"metrics": {"step": 1.0}}}
    assert harness.get(path).json() == harness.post(path, {}).json() == expected_answer
    assert harness.get(path, BOB).status_code == 404
    assert harness.get("retrieve_future/nobody").status_code == 404
    failed = harness.ok("optim_step", {"model_id": model_id, "adam_params": {}})["request_id"]
    harness.fail(failed, UserError("the cat sat on it"))
    answer = harness.get(f"retrieve_future/{failed}")
    assert answer.status_code == 200
    wrong = {"status": "failed", "error": "the cat sat on it", "category": "user"}
    assert answer.json() == {"request_id": failed} | wrong


@pytest.mark.parametrize(
    "request_id", ["s:1+", "s:1+0", "s:1+9999999999", "s:x+2", "+", "s:1+1025", "1+1", "s:" + "9" * 30 + "+2"]
)
def test_an_id_that_names_no_requests_is_404(harness: Harness, request_id: str) -> None:
    assert harness.get(f"retrieve_future/{request_id}").status_code == 404


def test_samples_of_several_prompts_are_one_result(harness: Harness) -> None:
    created = harness.ok("create_sampling_client", {"base_model": "local/tiny"})
    request = {"sampling_client_id": created["sampling_client_id"], "prompts": [[1], {"input_ids": [2, 3]}]}
    request["sampling_params"] = {"max_tokens": 3, "stop": "x"}
    future = harness.ok("sample", request)
    path = f"retrieve_future/{future['request_id']}"
    assert list(harness.kinds()) == future["request_ids"]
    for index, request_id in enumerate(future["request_ids"]):
        assert harness.get(path).json()["status"] == "pending"
        sequence = pb.SampledSequence(
            tokens=np.array([index], "<i4").tobytes(), logprobs=np.array([-1], "<f4").tobytes()
        )
        body = pb.SampleResponse(sequences=[sequence]).SerializeToString()
        harness.services.futures.settle([Settlement(request_id, body, "proto")], {})
    result = harness.get(path).json()["result"]
    assert [sequence["tokens"] for sequence in result["sequences"]] == [[0], [1]]
    assert [len(sample_answer["sequences"]) for sample_answer in result["results"]] == [1, 1]


@pytest.mark.parametrize(
    "body", [{}, {"base_model": "nobody"}, {"model_path": "tinker://a/weights/b"}, {"model_path": "b"}]
)
def test_a_sampling_client_over_nothing_opens_no_session(harness: Harness, body: dict) -> None:
    assert harness.post("create_sampling_client", body).status_code in (400, 404)
    assert harness.get("sessions").json() == {"sessions": []}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompts": []}, "prompts must be a list of 1 to 1024"),
        ({"prompts": [[1]] * 1025}, "prompts must be"),
        ({"prompts": ["hello"]}, "prompts[0] is 'hello'"),
        ({"sampling_params": {"stop": "a", "stop_token_ids": [1]}}, "both stop and stop_token_ids"),
        ({"sampling_client_id": "nobody"}, "'nobody' is unknown"),
        ({"sampling_client_id": None}, "base_model and model_path are both missing"),
    ],
)
def test_a_wrong_sample_makes_nothing(harness: Harness, changes: dict, words: str) -> None:
    created = harness.ok("create_sampling_client", {"base_model": "local/tiny"})
    body = {"sampling_client_id": created["sampling_client_id"], "prompts": [[1]], "sampling_params": {"max_tokens": 1}}
    answer = harness.post("sample", body | changes)
    assert answer.status_code in (400, 404)
    assert words in answer.json()["detail"]
    assert harness.kinds() == {}


def test_sampling_keeps_the_session_of_its_client_alive(harness: Harness) -> None:
    created = harness.ok("create_sampling_client", {"base_model": "local/tiny"})
    before = harness.services.sessions.get("alice", created["session_id"]).last_heartbeat_at
    body = {"sampling_client_id": created["sampling_client_id"], "prompts": [[1]], "sampling_params": {"max_tokens": 1}}
    harness.ok("sample", body)
    assert harness.services.sessions.get("alice", created["session_id"]).last_heartbeat_at > before
    assert harness.post("sample", body, BOB).status_code == 404


def test_deleting_a_model_waits_for_its_end(harness: Harness) -> None:
    model_id = harness.model()
    answer = harness.ok("delete_model", {"model_id": model_id})
    assert answer["status"] == "deleting"
    assert harness.kinds() == {f"{model_id}:unload": "unload_model"}
    harness.settle(f"{model_id}:unload", b"{}")
    assert harness.ok("delete_model", {"model_id": model_id})["status"] == "deleted"
    assert harness.post("delete_model", {"model_id": model_id}, BOB).status_code == 404


def test_only_results_of_closed_sessions_are_cleaned_up(harness: Harness) -> None:
    open_session, closed, fresh = (harness.session() for _ in range(3))
    for session_id in (open_session, closed, fresh):
        harness.model(session_id)
    foreign = harness.session(BOB)
    harness.model(foreign, key=BOB)
    for session_id in (closed, foreign):
        harness.services.sessions.close(session_id, "gone")
    assert harness.ok("cleanup_futures", {"max_age_hours": 24})["futures_cleaned"] == 0
    assert harness.ok("cleanup_futures", {"max_age_hours": 0})["futures_cleaned"] == 1
    remaining_ids = {f"{session_id}:train:0:0" for session_id in (open_session, fresh)}
    assert all(harness.services.futures.outcome("alice", request_id) for request_id in remaining_ids)
    assert harness.services.futures.outcome("bob", f"{foreign}:train:0:0")
    assert harness.post("cleanup_futures", {"max_age_hours": -1}).status_code == 400


def test_sessions_are_listed_by_either_method(harness: Harness) -> None:
    session_id = harness.session()
    assert harness.get("list_sessions").json() == {"sessions": [session_id]}
    assert harness.post("list_sessions", {}).json() == {"sessions": [session_id]}


# The form.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_fn": None}, "loss_fn is missing"),
        ({"data": {}}, "data is {}"),
        ({"data": [3]}, "data[0] is 3"),
        ({"data": [datum(model_input="x")]}, "data[0].model_input is 'x'"),
        ({"data": [datum(model_input={})]}, "neither chunks nor tokens"),
        ({"data": [datum(model_input={"tokens": [1.5]})]}, "data[0].model_input.tokens"),
        ({"data": [datum(model_input={"chunks": [{"type": "image"}]})]}, "'image'"),
        ({"data": [datum(loss_fn_inputs={"mine": [1]})]}, "is a plain list; give it as"),
        ({"data": [datum(loss_fn_inputs={"weights": 3})]}, "must be a list, or an object"),
        ({"data": [datum(loss_fn_inputs={"weights": {"data": [1], "dtype": "int8"}})]}, "dtype is 'int8'"),
        ({"data": [datum(loss_fn_inputs={"weights": {"data": ["a"], "dtype": "float32"}})]}, "list of numbers"),
        ({"data": [datum(loss_fn_inputs={"target_tokens": [1.5]})]}, "list of integers"),
        ({"data": [datum(loss_fn_inputs={"target_tokens": [2**70]})]}, "integers of at most 64 bits"),
        ({"data": [datum(loss_fn_inputs={"weights": [[1], [1, 2]]})]}, "is not an array of numbers"),
        ({"data": [datum(loss_fn_inputs={"weights": [True]})]}, "must be a list of numbers"),
        ({"loss_fn_config": {"beta": []}}, "loss_fn_config.beta is []"),
    ],
)
def test_a_malformed_pass_names_its_field(changes: dict, words: str) -> None:
    with pytest.raises(UserError) as caught:
        pass_message(training("m") | changes, forward_only=False)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["weights", "advantages", "logprobs", "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"],
)
def test_a_plain_list_is_parsed_as_by_the_sdk(name: str) -> None:
    inputs = {"target_tokens": [1, 2, 3], name: [1, 0, 2]}
    message = pass_message(training("m", data=[datum(loss_fn_inputs=inputs)]), forward_only=False)
    pass_inputs = read_pass(message.SerializeToString(), "r").data[0].inputs
    np.testing.assert_array_equal(pass_inputs["target_tokens"], np.array([1, 2, 3], np.int64), strict=True)  # type: ignore[arg-type]
    np.testing.assert_array_equal(pass_inputs[name], np.array([1, 0, 2], np.float32), strict=True)  # type: ignore[arg-type]


def test_sparse_and_nested_arrays_keep_their_shape() -> None:
    sparse = {"data": [5, 6], "dtype": "int64", "shape": [3, 4]}
    sparse |= {"sparse_crow_indices": [0, 1, 2, 2], "sparse_col_indices": [3, 0]}
    inputs = {"target_tokens": sparse, "weights": [[1, 0.5], [0, 0], [1, 1]]}
    message = pass_message(training("m", data=[datum(loss_fn_inputs=inputs)]), forward_only=False)
    pass_inputs = read_pass(message.SerializeToString(), "r").data[0].inputs
    assert pass_inputs["target_tokens"].shape == (3, 4)
    np.testing.assert_array_equal(pass_inputs["target_tokens"].col_indices, [3, 0])  # type: ignore[union-attr]
    np.testing.assert_array_equal(np.asarray(pass_inputs["weights"]), np.array([[1, 0.5], [0, 0], [1, 1]], np.float32))


def read_datum(inputs: dict[str, object], tokens: list[int]) -> Datum:
    body = training("m", data=[{"model_input": {"tokens": tokens}, "loss_fn_inputs": inputs}])
    return read_pass(pass_message(body, forward_only=False).SerializeToString(), "r").data[0]


def test_inputs_of_the_response_alone_belong_to_the_end() -> None:
    """Every list is extended to the whole input; what comes before the response has no weight."""
    short = {
        "target_tokens": [7, 8],
        "logprobs": [-1.0, -2.0],
        "advantages": [0.5, 1.5],
        "clip_low_threshold": [0.9] * 2,
    }
    aligned = read_datum(short, [1, 2, 3, 4])
    assert aligned.tokens_N.tolist() == [1, 2, 3, 4]
    expected = {
        "target_tokens": [2, 3, 7, 8],
        "logprobs": [0, 0, -1, -2],
        "advantages": [0, 0, 0.5, 1.5],
        "clip_low_threshold": [0.9] * 4,
    }
    for name, values in expected.items():
        np.testing.assert_allclose(np.asarray(aligned.inputs[name]), values, rtol=1e-6, err_msg=name)
    # Lists of different lengths: the shortest one says where the response begins.
    mixed = read_datum({"target_tokens": [2, 3, 4, 5], "weights": [1, 2, 3, 4], "logprobs": [-1]}, [1, 2, 3, 4])
    assert np.asarray(mixed.inputs["weights"]).tolist() == [0, 0, 0, 4]
    # Without weights or advantages the response has weight 1.
    assert np.asarray(read_datum({"target_tokens": [9]}, [1, 2, 3]).inputs["weights"]).tolist() == [0, 0, 1]


def test_a_response_without_targets_is_its_own_target() -> None:
    aligned = read_datum({"logprobs": [-1.0, -2.0], "advantages": [1.0, 2.0], "mask": [1, 0]}, [1, 2, 3, 4])
    assert aligned.tokens_N.tolist() == [1, 2, 3]
    assert np.asarray(aligned.inputs["target_tokens"]).tolist() == [2, 3, 4]
    assert np.asarray(aligned.inputs["advantages"]).tolist() == [0, 1, 0]
    assert "mask" not in aligned.inputs


def test_a_mask_multiplies_the_weights() -> None:
    whole = read_datum({"target_tokens": [2, 3, 4], "mask": [0, 1, 1]}, [1, 2, 3])
    assert np.asarray(whole.inputs["weights"]).tolist() == [0, 1, 1]
    both = read_datum({"target_tokens": [2, 3, 4], "weights": [3.0, 3.0, 0.5], "mask": [0, 1, 1]}, [1, 2, 3])
    assert np.asarray(both.inputs["weights"]).tolist() == [0, 3, 0.5]


@pytest.mark.parametrize("weights", [[], [1, 1, 1, 1]])
def test_inputs_that_fit_nowhere_are_refused(harness: Harness, weights: list[int]) -> None:
    inputs = {"target_tokens": TOKENS, "weights": weights}
    future = harness.ok("forward_backward", training(harness.model(), data=[datum(loss_fn_inputs=inputs)]))
    assert "weights" in harness.result(future["request_id"])["error"]


def test_a_model_has_an_address_for_direct_inference(harness: Harness) -> None:
    model_id = harness.model()
    address = harness.get(f"get_router_address?model_id={model_id}").json()
    assert address["model"] == f"tinker://{model_id}"
    assert address["openai_base_url"] == f"{address['router_address']}/v1"
    assert address["router_address"].startswith("http://")
    assert harness.get(f"get_router_address?model_id={model_id}", BOB).status_code == 404


def test_a_number_too_large_for_float32_is_refused_by_the_loss(harness: Harness) -> None:
    inputs = {"target_tokens": TOKENS, "weights": [1e300, 1, 1]}
    future = harness.ok("forward_backward", training(harness.model(), data=[datum(loss_fn_inputs=inputs)]))
    assert "finite" in harness.result(future["request_id"])["error"]


def test_results_keep_their_shape_as_json() -> None:
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": 1.5})
    record = message.loss_fn_outputs.add(num_datums=2)
    values = np.arange(6, dtype="<f4")
    offsets = np.array([0, 8, 24], "<i8").tobytes()
    tensor = pb.BatchedTensor(data=values.tobytes(), offsets=offsets, dtype=pb.DTYPE_FLOAT32, trailing_shape=[2])
    record.fields["logprobs"].CopyFrom(tensor)
    result = pass_result(message.SerializeToString())
    shapes = [output["logprobs"]["shape"] for output in result["loss_fn_outputs"]]  # type: ignore[index, union-attr]
    assert shapes == [[1, 2], [2, 2]]
    assert result["metrics"] == {"loss:sum": 1.5}


def test_a_sample_without_prompt_logprobs_has_none() -> None:
    result = sample_result(
        pb.SampleResponse(sequences=[pb.SampledSequence(stop_reason=pb.STOP_REASON_LENGTH)]).SerializeToString()
    )
    sequence = {"stop_reason": "length", "tokens": [], "logprobs": []}
    assert orjson.loads(dump(result)) == {
        "type": "sample",
        "sequences": [sequence],
        "prompt_logprobs": None,
        "prompt_cache_hit_tokens": 0,
    }
