"""A live server with late, repeated, invalid and huge requests, and with killed processes."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import orjson
import pytest
import tinker
import zstandard
from tinker import types

from support.live import API_KEY, LiveServer, serving
from support.random_data import random_data
from support.raw_client import (
    BASE,
    PROTO,
    RawClient,
    connect,
    engine_of,
    pass_body,
    resident_bytes,
    send_heartbeats,
    tensor,
)
from tinsmith.wire import tinker_public_pb2 as pb

CONTEXT, VOCAB = 2048, 512
MAX_BODY_BYTES = 1_000_000
SETTINGS = {"HOLD_S": "1", "SEQ_GAP_S": "1", "MAX_BODY_BYTES": str(MAX_BODY_BYTES)}
AT_ONCE_S = 20.0  # far below the 30 s until a client's retry, far above the usual duration


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("robust") / "data", "--backend", "fake", settings=SETTINGS) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[RawClient]:
    raw_client = connect(server)
    yield raw_client
    raw_client.http.close()


@pytest.fixture(scope="module")
def model(server: LiveServer) -> str:
    """One model for all invalid requests, each of which must leave it usable."""
    return connect(server).model()


@pytest.fixture(scope="module")
def seq_counter() -> itertools.count:
    return itertools.count(1)


def pending_rows(server: LiveServer) -> int:
    return server.count("futures WHERE state = 'pending'")


# Repeated, late and unordered requests.


def raw_request(server: LiveServer, path: str, body: bytes, content_type: str, length: int | None = None) -> bytes:
    head = (
        f"POST /api/v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {API_KEY}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


def cut(server: LiveServer, request: bytes) -> None:
    """Send the request and close the connection without reading."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(request)


def send_again_and_again(server: LiveServer, path: str, body: bytes, content_type: str) -> set[bytes]:
    """Send a request with a dropped connection, then eight times at once; return the answers."""
    request = raw_request(server, path, body, content_type)
    cut(server, request)

    def send(_index: int) -> bytes:
        answer = connect(server).send(path, body, Content_Type=content_type)
        assert answer.status_code == 200, answer.text
        return answer.content

    with ThreadPoolExecutor(8) as pool:
        return set(pool.map(send, range(8)))


@pytest.mark.smoke
def test_a_step_that_is_sent_ten_times_is_taken_once(server: LiveServer, client: RawClient) -> None:
    model = client.model()
    body = orjson.dumps({"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1}})
    answers = send_again_and_again(server, "optim_step", body, "application/json")
    assert len(answers) == 1
    assert client.steps_taken(f"{model}:1") == 1
    assert client.steps_taken(client.step(model, 2)) == 2


@pytest.mark.smoke
def test_a_gradient_that_is_sent_ten_times_is_added_once(server: LiveServer, client: RawClient) -> None:
    once, often = client.model(), client.model()
    client.send_pass(pass_body(once, 1))
    send_again_and_again(server, "forward_backward", pass_body(often, 1), PROTO["Content-Type"])
    norms = [client.result(client.step(model, 2)).json()["metrics"]["grad_norm"] for model in (once, often)]
    assert norms[0] == norms[1] > 0


def test_a_request_sent_ten_times_runs_once(server: LiveServer, client: RawClient) -> None:
    session = client.session()
    bodies = {
        "create_model": {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}},
        "save_weights": {"model_id": f"{session}:train:0", "seq_id": 1, "path": "one"},
        "save_weights_for_sampler": {"model_id": f"{session}:train:0", "seq_id": 2, "sampling_session_seq_id": 0},
        "asample": {
            "sampling_session_id": f"{session}:sample:0",
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            "sampling_params": {"max_tokens": 4},
        },
    }
    for path, body in bodies.items():
        (answer,) = send_again_and_again(server, path, orjson.dumps(body), "application/json")
        client.result(orjson.loads(answer)["request_id"])
    session_row = client.http.get(f"sessions/{session}").json()
    assert (len(session_row["training_run_ids"]), len(session_row["sampler_ids"])) == (1, 1)
    listed = client.http.get(f"training_runs/{session}:train:0/checkpoints").json()["checkpoints"]
    assert [checkpoint["checkpoint_id"] for checkpoint in listed] == ["weights/one"]


@pytest.mark.smoke
def test_requests_out_of_order_run_in_order(client: RawClient) -> None:
    model = client.model()
    started = time.monotonic()
    last = client.step(model, 3)
    client.step(model, 2)
    assert time.monotonic() - started < AT_ONCE_S, "a gap delays no answer to a submission"
    client.send_pass(pass_body(model, 1))
    assert client.steps_taken(last) == 2
    assert client.result(f"{model}:2").json()["metrics"]["grad_norm"] > 0, "the gradient came before the first step"
    assert client.result(last).json()["metrics"]["grad_norm"] == 0


def test_a_gap_is_given_up_and_what_waited_behind_it_runs(client: RawClient) -> None:
    model = client.model()
    behind = client.step(model, 4)
    assert client.steps_taken(behind) == 1
    assert "arrived after" in client.error(client.step(model, 2))


def test_a_huge_seq_id_affects_no_other_model(server: LiveServer, client: RawClient) -> None:
    engine = engine_of(server)
    model = client.model()
    assert client.steps_taken(client.step(model, 2**62)) == 1
    assert server.engine_pids() == [engine]


# Invalid requests.

ONES = [1.0, 1.0, 1.0]
POLICY = {"logprobs": tensor([-1.0] * 3, "float32"), "advantages": tensor(ONES, "float32")}
BadPass = Callable[[str, int], bytes]


def bad(*tokens: int, **changes: object) -> BadPass:
    return lambda model_id, seq_id: pass_body(model_id, seq_id, tokens or (1, 2, 3), **changes)  # type: ignore[arg-type]


def with_input(name: str, value: pb.Tensor, loss_fn: str = "cross_entropy") -> BadPass:
    other_inputs = POLICY if loss_fn != "cross_entropy" else {}
    return bad(inputs={**other_inputs, name: value}, loss_fn=loss_fn)


def without_data(model_id: str, seq_id: int) -> bytes:
    return pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy").SerializeToString()


def without_tokens(model_id: str, seq_id: int) -> bytes:
    message = pb.ForwardBackwardRequest.FromString(pass_body(model_id, seq_id))
    message.data[0].model_input[0].encoded_text.tokens = b""
    return message.SerializeToString()


NAN, INF = float("nan"), float("inf")
BAD_PASSES = {
    "unknown loss": (bad(loss_fn="mystery"), "loss_fn is 'mystery'"),
    "unknown setting": (bad(loss_fn="ppo", inputs=POLICY, config={"clip": 1}), r"loss_fn_config['clip']"),
    "setting out of range": (bad(loss_fn="dro", inputs=POLICY, config={"beta": NAN}), "loss_fn_config['beta'] is nan"),
    "short targets": (with_input("target_tokens", tensor([1], "int64")), "['target_tokens'] has shape [1]"),
    "long weights": (with_input("weights", tensor(ONES * 2, "float32")), "['weights'] has shape [6]"),
    "input token too large": (bad(1, VOCAB), f"model_input tokens holds {VOCAB}"),
    "input token negative": (bad(1, -3), "model_input tokens holds -3"),
    "target too large": (with_input("target_tokens", tensor([1, VOCAB, 2], "int64")), f"target_tokens holds {VOCAB}"),
    "target negative": (with_input("target_tokens", tensor([1, -100, 2], "int64")), "target_tokens holds -100"),
    "nan weight": (with_input("weights", tensor([1, NAN, 1], "float32")), "['weights'] holds nan"),
    "inf advantage": (with_input("advantages", tensor([INF, 1, 1], "float32"), "ppo"), "['advantages'] holds inf"),
    "nan logprob": (with_input("logprobs", tensor([NAN] * 3, "float32"), "ppo"), "['logprobs'] holds nan"),
    "no advantages": (bad(loss_fn="ppo", inputs={"logprobs": POLICY["logprobs"]}), "no 'advantages'"),
    "float targets": (with_input("target_tokens", tensor(ONES, "float32")), "['target_tokens'] is float32"),
    "half a float": (with_input("weights", pb.Tensor(dense=b"123", dtype=pb.DTYPE_FLOAT32)), "3 bytes long"),
    "unknown dtype": (with_input("weights", pb.Tensor(dense=b"1234", dtype=pb.DTYPE_UNSPECIFIED)), "dtype is 0"),
    "too long": (bad(*([1] * (CONTEXT + 1))), f"has {CONTEXT + 1} tokens"),
    "no data": (without_data, "data is empty"),
    "no tokens": (without_tokens, "model_input has no tokens"),
}


@pytest.mark.parametrize("case", BAD_PASSES)
def test_a_wrong_pass_is_refused_at_once_and_the_next_request_works(
    client: RawClient, model: str, seq_counter: itertools.count, case: str
) -> None:
    make, words = BAD_PASSES[case]
    started = time.monotonic()
    answer = client.send_pass(make(model, next(seq_counter)))
    assert answer.status_code == 200, answer.text
    assert words in client.error(answer.json()["request_id"])
    client.result(client.forward(model, next(seq_counter)))
    assert time.monotonic() - started < AT_ONCE_S


BAD_OPERATIONS = {
    "negative rate": ("optim_step", {"adam_params": {"learning_rate": -1}}, "adam_params.learning_rate is -1"),
    "rate as text": ("optim_step", {"adam_params": {"learning_rate": "NaN"}}, "learning_rate is 'NaN'"),
    "infinite rate": ("optim_step", b'{"adam_params":{"learning_rate":1e999},', "learning_rate"),
    "name of a parent": ("save_weights", {"path": "../x"}, "'../x'"),
    "absolute name": ("save_weights", {"path": "/abs"}, "'/abs'"),
    "name in another script": ("save_weights", {"path": "modèle"}, "is not allowed"),
    "empty name": ("save_weights", {"path": ""}, "name ''"),
    "no name": ("save_weights", {}, "path is missing"),
    "name of 300 letters": ("save_weights", {"path": "a" * 300}, "1 to 128 letters"),
    "sampler name of a parent": ("save_weights_for_sampler", {"path": ".."}, "'..'"),
    "path of a file": ("load_weights", {"path": "/etc/passwd"}, "'/etc/passwd' is not a checkpoint path"),
    "path of another form": ("load_weights", {"path": "tinker://a/b"}, "is not a checkpoint path"),
    "path with a parent": ("load_weights", {"path": "tinker://a/weights/.."}, "'..'"),
    "checkpoint of nobody": ("load_weights", {"path": "tinker://a/weights/b"}, "'tinker://a/weights/b' does not exist"),
}


@pytest.mark.parametrize("case", BAD_OPERATIONS)
def test_a_wrong_operation_is_refused_at_once_and_the_next_request_works(
    client: RawClient, model: str, seq_counter: itertools.count, case: str
) -> None:
    path, body, words = BAD_OPERATIONS[case]
    ids = {"model_id": model, "seq_id": next(seq_counter)}
    raw = orjson.dumps(ids | body) if isinstance(body, dict) else body + orjson.dumps(ids)[1:]
    started = time.monotonic()
    answer = client.send(path, raw, Content_Type="application/json")
    if answer.status_code == 400:  # not even JSON: the number is not used
        assert words in answer.text or "not valid JSON" in answer.text
        client.result(client.forward(model, ids["seq_id"]))
    else:
        assert words in client.error(answer.json()["request_id"])
    client.result(client.forward(model, next(seq_counter)))
    assert time.monotonic() - started < AT_ONCE_S


def test_a_deleted_checkpoint_cannot_be_loaded(client: RawClient) -> None:
    model = client.model()
    saved = client.ok("save_weights", {"model_id": model, "seq_id": 1, "path": "one"})
    path = client.result(saved["request_id"]).json()["path"]
    assert client.http.delete(f"training_runs/{model}/checkpoints/weights/one").status_code == 200
    fresh = client.model()
    load = client.ok("load_weights", {"model_id": fresh, "seq_id": 1, "path": path})
    assert f"{path!r} does not exist" in client.error(load["request_id"])
    client.result(client.forward(fresh, 2))


BAD_CREATIONS = {
    "rank 0": ({"lora_config": {"rank": 0}}, "lora_config.rank is 0"),
    "rank -1": ({"lora_config": {"rank": -1}}, "lora_config.rank is -1"),
    "rank too large": ({"lora_config": {"rank": 10**9}}, "lora_config.rank is 1000000000"),
    "rank as text": ({"lora_config": {"rank": "4"}}, "lora_config.rank is '4'"),
    "nothing to train": (
        {"lora_config": {"rank": 4, "train_attn": False, "train_mlp": False, "train_unembed": False}},
        "trains nothing",
    ),
    "unknown base model": ({"base_model": "no/such"}, "'no/such' is not served here"),
}


@pytest.mark.parametrize("case", BAD_CREATIONS)
def test_a_wrong_model_is_refused_at_once_and_the_next_is_made(client: RawClient, case: str) -> None:
    changes, words = BAD_CREATIONS[case]
    session = client.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}} | changes
    assert words in client.error(client.ok("create_model", body)["request_id"])
    assert client.model(session, 1)


BAD_SAMPLES = {
    "no samples": ({"num_samples": 0}, "num_samples is 0"),
    "negative samples": ({"num_samples": -1}, "num_samples is -1"),
    "too many samples": ({"num_samples": 10**9}, "num_samples is 1000000000"),
    "cold": ({"sampling_params": {"temperature": -1}}, "temperature is -1"),
    "top_p 0": ({"sampling_params": {"top_p": 0}}, "top_p is 0"),
    "top_p 2": ({"sampling_params": {"top_p": 2}}, "top_p is 2"),
    "top_k -5": ({"sampling_params": {"top_k": -5}}, "top_k is -5"),
    "no tokens to make": ({"sampling_params": {"max_tokens": 0}}, "max_tokens is 0"),
    "prompt too long": ({"prompt": [1] * (CONTEXT + 1)}, f"prompt of {CONTEXT + 1} tokens"),
    "over the context": ({"prompt": [1] * CONTEXT, "sampling_params": {"max_tokens": 1}}, f"context of {CONTEXT}"),
    "empty prompt": ({"prompt": []}, "prompt is empty"),
    "token too large": ({"prompt": [1, VOCAB]}, f"prompt token 1 is {VOCAB}"),
    "token negative": ({"prompt": [-1]}, "-1"),
    "too many likeliest": ({"topk_prompt_logprobs": VOCAB + 1}, f"topk_prompt_logprobs is {VOCAB + 1}"),
}


@pytest.mark.parametrize("case", BAD_SAMPLES)
def test_a_wrong_sample_is_refused_at_once_and_the_next_is_drawn(client: RawClient, case: str) -> None:
    changes, words = BAD_SAMPLES[case]
    sampler = client.sampler()

    def body(seq_id: int, prompt: object = (1,), **fields: object) -> dict[str, object]:
        chunks = [{"type": "encoded_text", "tokens": list(prompt)}]  # type: ignore[call-overload]
        return {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": {"chunks": chunks}} | fields

    started = time.monotonic()
    assert words in client.error(client.ok("asample", body(0, **changes))["request_id"])
    client.result(client.ok("asample", body(1, sampling_params={"max_tokens": 2}))["request_id"])
    assert time.monotonic() - started < AT_ONCE_S


def compress(body: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(body)


HUGE = b"\0" * (10 * MAX_BODY_BYTES)
JSON, ZSTD = {"Content_Type": "application/json"}, {"Content_Encoding": "zstd"}
BAD_REQUESTS = {
    "unknown model": ("optim_step", b'{"model_id":"a:train:0","seq_id":1,"adam_params":{}}', JSON, 404, "'a:train:0'"),
    "unknown future": ("retrieve_future", b'{"request_id":"no-such"}', JSON, 404, "'no-such'"),
    "malformed protobuf": ("forward_backward", b"\xff\xff\xff", {"Content_Type": PROTO["Content-Type"]}, 400, "proto"),
    "malformed JSON": ("optim_step", b'{"model_id":', JSON, 400, "not valid JSON"),
    "deep JSON": ("optim_step", b'{"a":' * 100_000 + b"1" + b"}" * 100_000, JSON, 400, "not valid JSON"),
    "deep list": ("telemetry", b"[" * 500_000, JSON, 400, "lists and objects"),
    "JSON that is no text": ("optim_step", b'{"model_id":"\xff"}', JSON, 400, "not valid JSON"),
    "protobuf as JSON": ("optim_step", b"{}", {"Content_Type": PROTO["Content-Type"]}, 415, "application/json"),
    "no content type": ("forward_backward", b"", {"Content_Type": ""}, 415, "application/x-protobuf"),
    "a body too large": ("optim_step", HUGE, JSON, 413, str(MAX_BODY_BYTES)),
    "a zstd bomb": ("optim_step", compress(HUGE), JSON | ZSTD, 413, str(MAX_BODY_BYTES)),
    "a zstd bomb of unknown size": (
        "optim_step",
        compress(HUGE, write_content_size=False),
        JSON | ZSTD,
        413,
        str(MAX_BODY_BYTES),
    ),
    "not zstd": ("optim_step", b"{}", JSON | ZSTD, 400, "zstd"),
    "another encoding": ("optim_step", b"{}", JSON | {"Content_Encoding": "br"}, 415, "br"),
    "no key": ("optim_step", b"{}", JSON | {"X_API_Key": ""}, 401, "X-API-Key"),
    "a key of another form": ("optim_step", b"{}", JSON | {"X_API_Key": "sk-abc"}, 401, "tml-"),
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_wrong_request_is_answered_with_its_status_and_reason(client: RawClient, case: str) -> None:
    path, body, headers, status, words = BAD_REQUESTS[case]
    answer = client.send(path, body, **headers)
    assert (answer.status_code, words in answer.text) == (status, True), answer.text
    assert len(answer.text) < 1000


def test_a_length_that_lies_is_answered_before_the_body_comes(server: LiveServer) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(raw_request(server, "optim_step", b"{", "application/json", length=10**12))
        assert b" 413 " in connection.recv(100)


def test_a_body_that_never_comes_whole_leaves_nothing(server: LiveServer, client: RawClient) -> None:
    model = client.model()
    body = orjson.dumps({"model_id": model, "seq_id": 1, "adam_params": {}})
    cut(server, raw_request(server, "optim_step", body, "application/json", length=len(body) + 10))
    assert client.steps_taken(client.step(model, 1, learning_rate=0.5)) == 1


def test_the_sdk_raises_what_is_wrong_and_goes_on(server: LiveServer) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
        client = service.create_lora_training_client(BASE, rank=4).result()
        inputs = {"target_tokens": np.array([2, 3]), "weights": np.ones(2, np.float32)}
        good, wrong = (
            types.Datum(model_input=types.ModelInput.from_ints([1, token]), loss_fn_inputs=inputs)
            for token in (2, VOCAB)
        )
        with pytest.raises(tinker.RequestFailedError, match=f"holds {VOCAB}"):
            client.forward_backward([wrong], "cross_entropy").result()
        with pytest.raises(tinker.RequestFailedError, match="learning_rate is -1"):
            client.optim_step(types.AdamParams(learning_rate=-1)).result()
        with pytest.raises(tinker.RequestFailedError, match="rank is 0"):
            service.create_lora_training_client(BASE, rank=0).result()
        sampler = service.create_sampling_client(base_model=BASE).result()
        with pytest.raises(tinker.RequestFailedError, match="top_p is 2"):
            sampler.sample(good.model_input, 1, types.SamplingParams(top_p=2)).result()
        assert client.forward_backward([good], "cross_entropy").result().metrics["loss:sum"] > 0


def test_hundreds_of_wrong_requests_leave_no_memory_and_no_rows_pending(server: LiveServer, client: RawClient) -> None:
    model = client.model()
    seq_ids = itertools.count(1)
    engine = engine_of(server)
    noise = np.random.default_rng(0).bytes(100_000)  # a leak of it would show

    def send(count: int) -> None:
        for _ in range(count):
            client.send_pass(pass_body(model, next(seq_ids), loss_fn="x" * 100_000))
            client.send_pass(pass_body(model, next(seq_ids), [VOCAB] * 1000))
            client.post("optim_step", {"model_id": model, "seq_id": next(seq_ids), "adam_params": {"x": "y" * 100_000}})
            client.send("optim_step", noise, Content_Type="application/json")
            client.send("forward_backward", noise, **{"Content_Type": PROTO["Content-Type"]})
        client.result(client.forward(model, next(seq_ids)))

    send(60)
    before = [resident_bytes(server.process.pid), resident_bytes(engine)]
    send(80)
    grown = [after - was for after, was in zip(map(resident_bytes, (server.process.pid, engine)), before, strict=True)]
    assert max(grown) < 6_000_000, f"server and engine grew by {grown} bytes over 400 requests of 40 MB"
    assert pending_rows(server) == 0
    assert server.count("future_bodies") < 50, "refused requests keep no body"


# Sessions end.


def test_a_silent_session_ends_with_its_models_and_later_its_results(tmp_path: Path) -> None:
    brief = {"HOLD_S": "1", "SESSION_TIMEOUT_S": "3", "SESSION_SWEEP_S": "0.2", "RESULT_GRACE_S": "10"}
    with serving(tmp_path / "data", "--backend", "fake", settings=brief) as server:
        engine_of(server)
        client = connect(server)
        session = client.session()
        with send_heartbeats(server, session):
            model = client.model(session)
            settled_id = client.forward(model, 1)
            expected = client.result(settled_id).content
            waiting = client.step(model, 3)
        assert "no heartbeat for 3 s" in client.error(waiting)
        assert client.result(settled_id).content == expected, "what was settled stays for its grace"
        for path, body in (
            ("session_heartbeat", {"session_id": session}),
            ("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}}),
            ("create_model", {"session_id": session, "model_seq_id": 1, "base_model": BASE}),
            ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}),
        ):
            answer = client.post(path, body)
            assert (answer.status_code, "no heartbeat for 3 s" in answer.text) == (410, True), answer.text
        deadline = time.monotonic() + 40
        while client.post("retrieve_future", {"request_id": settled_id}).status_code != 404:
            assert time.monotonic() < deadline, "results go when their grace is over"
            time.sleep(0.1)
        with send_heartbeats(server, session := client.session()):
            assert client.model(session), "a new session works"


def test_a_heartbeat_keeps_a_session(tmp_path: Path) -> None:
    brief = {"SESSION_TIMEOUT_S": "3", "SESSION_SWEEP_S": "0.1"}
    with serving(tmp_path / "data", "--backend", "fake", settings=brief) as server:
        engine_of(server)
        client = connect(server)
        with send_heartbeats(server, session := client.session()):
            model = client.model(session)
            time.sleep(4)
            client.result(client.forward(model, 1))


# Figures of one tenant.


def test_a_tenant_with_infinite_weights_does_not_touch_another(nano_server: LiveServer) -> None:
    data = random_data(np.random.default_rng(0), [12] * 2)

    def losses(service: tinker.ServiceClient) -> list[float]:
        client = service.create_lora_training_client(BASE, rank=4, seed=1).result()
        loss_sums = []
        for _ in range(6):
            passed = client.forward_backward(data, "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            loss_sums.append(passed.result().metrics["loss:sum"])
        return loss_sums

    complaints: list[str] = []
    stop = threading.Event()

    def poison(service: tinker.ServiceClient) -> None:
        client = service.create_lora_training_client(BASE, rank=4, seed=2).result()
        while not stop.is_set():
            try:
                client.forward_backward(data, "cross_entropy").result()
                client.optim_step(types.AdamParams(learning_rate=1e30)).result()
            except tinker.RequestFailedError as error:
                complaints.append(str(error))

    with tinker.ServiceClient(base_url=nano_server.url, api_key=API_KEY) as service:
        lone_losses = losses(service)
        with tinker.ServiceClient(base_url=nano_server.url, api_key=API_KEY) as other, ThreadPoolExecutor(1) as pool:
            poisoning = pool.submit(poison, other)
            try:
                while not complaints and not poisoning.done():
                    time.sleep(0.01)
                together = losses(service)
            finally:
                stop.set()
            poisoning.result()
    assert together == pytest.approx(lone_losses, rel=1e-4)
    assert "gradient contains NaN or infinite numbers" in complaints[0]
