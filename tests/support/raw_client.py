"""A plain HTTP client, for requests and timings that the SDK does not produce."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import numpy as np

from support.live import API_KEY, LiveServer
from tinsmith.wire import tinker_public_pb2 as pb

PROTO = {"Content-Type": "application/x-protobuf"}
BASE = "tinsmith/nano"
DTYPES = {"float32": pb.DTYPE_FLOAT32, "int64": pb.DTYPE_INT64}
DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class RawClient:
    http: httpx.Client

    def post(self, path: str, body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def send(self, path: str, body: bytes, **headers: str) -> httpx.Response:
        return self.http.post(path, content=body, headers={name.replace("_", "-"): v for name, v in headers.items()})

    def send_pass(self, body: bytes) -> httpx.Response:
        return self.http.post("forward_backward", content=body, headers=PROTO)

    def ok(self, path: str, body: object) -> dict:
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def session(self) -> str:
        return self.ok("create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]

    def model(self, session_id: str | None = None, model_seq_id: int = 0) -> str:
        body = {"session_id": session_id or self.session(), "model_seq_id": model_seq_id, "base_model": BASE}
        created = self.ok("create_model", body | {"lora_config": {"rank": 4}})
        self.result(created["request_id"])
        return created["model_id"]

    def sampler(self, session_id: str | None = None, sampler_seq_id: int = 0) -> str:
        body = {
            "session_id": session_id or self.session(),
            "sampling_session_seq_id": sampler_seq_id,
            "base_model": BASE,
        }
        return self.ok("create_sampling_session", body)["sampling_session_id"]

    def step(self, model_id: str, seq_id: int, **adam: object) -> str:
        body = {"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": 0.1} | adam}
        return self.ok("optim_step", body)["request_id"]

    def forward(self, model_id: str, seq_id: int) -> str:
        answer = self.send_pass(pass_body(model_id, seq_id, forward_only=True))
        assert answer.status_code == 200, answer.text
        return answer.json()["request_id"]

    def poll(self, request_id: str) -> httpx.Response:
        """Poll until the answer is not 'try again'."""
        deadline = time.monotonic() + DEADLINE_S
        while (answer := self.post("retrieve_future", {"request_id": request_id})).status_code == 408:
            assert time.monotonic() < deadline, f"{request_id} did not settle: {answer.text}"
        return answer

    def result(self, request_id: str) -> httpx.Response:
        answer = self.poll(request_id)
        assert answer.status_code == 200, answer.text
        assert b'"category"' not in answer.content[-40:], answer.text
        return answer

    def error(self, request_id: str) -> str:
        answer = self.poll(request_id).json()
        assert answer["category"] == "user", answer
        return answer["error"]

    def steps_taken(self, request_id: str) -> float:
        """Take an optimizer step; return the fake optimizer's step count."""
        return self.result(request_id).json()["metrics"]["step"]


def connect(server: LiveServer) -> RawClient:
    http = httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": API_KEY}, timeout=60)
    return RawClient(http)


@contextmanager
def send_heartbeats(server: LiveServer, session_id: str) -> Iterator[None]:
    """Keep a session alive until the end of the block, with a client of its own."""
    client, is_over = connect(server), threading.Event()

    def beat() -> None:
        while not is_over.wait(0.2):
            client.ok("session_heartbeat", {"session_id": session_id})

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def tensor(values: Sequence[float] | np.ndarray, dtype: str) -> pb.Tensor:
    return pb.Tensor(dense=np.asarray(values, dtype).tobytes(), dtype=DTYPES[dtype])


def pass_body(
    model_id: str,
    seq_id: int,
    tokens: Sequence[int] = (1, 2, 3),
    *,
    loss_fn: str = "cross_entropy",
    inputs: Mapping[str, pb.Tensor] | None = None,
    config: Mapping[str, float] | None = None,
    forward_only: bool = False,
) -> bytes:
    """A pass of one datum; `inputs` replace those of cross_entropy one by one."""
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn=loss_fn, forward_only=forward_only)
    for key, value in (config or {}).items():
        message.loss_fn_config_v2[key].number = value
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
    usual = {"target_tokens": tensor(tokens, "int64"), "weights": tensor(np.ones(len(tokens)), "float32")}
    for name, value in (usual | dict(inputs or {})).items():
        datum.loss_fn_inputs[name].CopyFrom(value)
    return message.SerializeToString()


def engine_of(server: LiveServer) -> int:
    """The pid of the only engine; waits for it, since a server answers before it starts the engine."""
    deadline = time.monotonic() + DEADLINE_S
    while not (pids := server.engine_pids()):
        assert time.monotonic() < deadline, "no engine came"
        time.sleep(0.02)
    (pid,) = pids
    return pid


def resident_bytes(pid: int) -> int:
    """The resident set of a process."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, timeout_s: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(pid)
