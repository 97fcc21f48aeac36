"""Ranks on other machines join rank 0 by TCP: who is refused, and an engine with two machines against one process. Both
machines are this one; `tinsmith rank` has its own processes. Nodes of Ray: test_ray_ranks.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from support import ranked, tiny_models
from support.live import API_KEY, environment, free_port, serving
from support.random_data import random_data
from tinsmith.auth.signing import RANKS, Signer
from tinsmith.backends import run_to_end
from tinsmith.backends.distributed import Degrees, Group, rendezvous
from tinsmith.backends.distributed.processes import Link
from tinsmith.backends.distributed.rendezvous import Introduction, Listener, Machines, describe_version, join
from tinsmith.backends.torch import TorchBackend
from tinsmith.cli.rank import run_ranks
from tinsmith.engine.__main__ import check_machines
from tinsmith.errors import RanksLostError, SettingsError
from tinsmith.settings import Settings

SECRET = "a-secret-of-all-machines-0123456789"
KEY = Signer(SECRET.encode()).key(RANKS)
VERSION = describe_version(torch.__version__)
OWN = Introduction("m1", "there", 0, 1, 0, VERSION)
PATIENCE_S = 60.0


@pytest.fixture
def listener() -> Iterator[Listener]:
    with contextlib.closing(Listener("127.0.0.1", 0, KEY)) as new_listener:
        yield new_listener


def connect(listener: Listener) -> socket.socket:
    return socket.create_connection(rendezvous.parse_address(listener.address), PATIENCE_S)


def joins(listener: Listener) -> None:
    """A rank with the key still joins."""
    link = join(listener.address, KEY, OWN, PATIENCE_S)
    ((links,),) = listener.gather(1, 1, VERSION, cuda=False)
    links.send(b"hello")
    assert link.receive(PATIENCE_S) == b"hello" and links.peer == "127.0.0.1"
    link.close()


def test_a_rank_with_another_key_is_refused(listener: Listener) -> None:
    with pytest.raises(SettingsError, match="another signing secret"):
        join(listener.address, Signer(b"x" * 32).key(RANKS), OWN, PATIENCE_S)
    with pytest.raises(SettingsError, match="another signing secret"):
        join(listener.address, Signer(SECRET.encode()).key("peers"), OWN, PATIENCE_S)
    joins(listener)


@pytest.mark.parametrize("answer", [b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), rendezvous.GREETING + bytes(64), b""])
def test_garbage_is_refused_and_decoded_by_nobody(
    listener: Listener, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []
    decode = rendezvous.decode
    monkeypatch.setattr(rendezvous, "decode", lambda data: decoded.append(data) or decode(data))
    with connect(listener) as stranger:
        received = stranger.recv(48, socket.MSG_WAITALL)
        with contextlib.suppress(OSError):  # the engine may close before it has read everything
            stranger.sendall(answer)
            stranger.shutdown(socket.SHUT_WR)
            while part := stranger.recv(4096):
                received += part
    assert received.startswith(rendezvous.GREETING) and len(received) in (48, 80) and not received[48:].strip(b"\0"), (
        "and no proof"
    )
    assert not decoded
    joins(listener)


def test_a_proof_that_was_overheard_is_worth_nothing(listener: Listener) -> None:
    """The same bytes again, and the engine's own proof sent back to it."""
    with connect(listener) as first:
        greeting = first.recv(48, socket.MSG_WAITALL)
        nonce = os.urandom(32)
        answer = rendezvous.GREETING + nonce + rendezvous._proof(KEY, b"rank", greeting[16:], nonce)
        first.sendall(answer)
        proof = first.recv(32, socket.MSG_WAITALL)
        assert proof.strip(b"\0")
    for again in (answer, rendezvous.GREETING + nonce + proof):
        with connect(listener) as second:
            second.recv(48, socket.MSG_WAITALL)
            second.sendall(again)
            assert second.recv(32, socket.MSG_WAITALL) == rendezvous.DENIED


@pytest.mark.parametrize("drips", [False, True])
def test_a_silent_peer_is_dropped(listener: Listener, drips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "HANDSHAKE_S", 0.5)
    with connect(listener) as silent:
        silent.settimeout(PATIENCE_S)
        silent.recv(48, socket.MSG_WAITALL)
        began = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while drips and time.monotonic() - began < PATIENCE_S:
                silent.sendall(b"x")
                time.sleep(0.01)
            assert silent.recv(32) == b""
        assert time.monotonic() - began < PATIENCE_S
    joins(listener)


def test_a_rank_refuses_an_engine_without_the_key() -> None:
    """The rank introduces itself only to an engine that has proved the key."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        heard: list[bytes] = []

        def pretend() -> None:
            stream, _ = server.accept()
            with stream:
                stream.sendall(rendezvous.GREETING + bytes(32))
                heard.append(stream.recv(80, socket.MSG_WAITALL))
                stream.sendall(os.urandom(32))
                heard.append(stream.recv(1024))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(SettingsError, match="another signing secret"):
            join(address, KEY, OWN, 0.0)
        thread.join(PATIENCE_S)
        assert [len(message) for message in heard] == [80, 0]


@pytest.mark.parametrize(
    ("introduction", "cuda", "reason"),
    [
        (replace(OWN, version="0 with torch 0"), False, "this rank runs Tinsmith 0 with torch 0, but the engine runs"),
        (replace(OWN, num_ranks=2), False, "--ranks is 2, but this engine has 1 ranks"),
        (OWN, True, "this machine shows 0 GPUs, but this engine has 1 ranks"),
    ],
)
def test_a_rank_that_does_not_suit_the_engine_is_told_why(
    listener: Listener, introduction: Introduction, cuda: bool, reason: str
) -> None:
    with ThreadPoolExecutor(1) as engine:
        gathered = engine.submit(listener.gather, 1, 1, VERSION, cuda=cuda)
        link = join(listener.address, KEY, introduction, PATIENCE_S)
        with pytest.raises(SettingsError, match=reason):
            rendezvous.read_rank_spec(link.receive(PATIENCE_S))
        other = join(listener.address, KEY, replace(OWN, machine="m2", gpus=1), PATIENCE_S)
        assert len(gathered.result(PATIENCE_S)) == 1
    other.close()


def test_a_rank_that_joins_too_late_is_let_go(listener: Listener) -> None:
    """A fleet of ranks may have more machines than the engine needs."""
    late = join(listener.address, KEY, OWN, PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while listener._joined.empty() and time.monotonic() < deadline:
        time.sleep(0.01)
    listener.close()
    with pytest.raises(EOFError):
        late.receive(PATIENCE_S)


def test_an_engine_waits_for_whole_machines(listener: Listener) -> None:
    """A machine that left is forgotten, and one that is not needed is let go."""
    gathered: list[list[list[Link]]] = []
    thread = threading.Thread(target=lambda: gathered.append(listener.gather(1, 2, VERSION, cuda=False)))
    thread.start()
    left_link = join(listener.address, KEY, replace(OWN, num_ranks=2), PATIENCE_S)
    half = join(listener.address, KEY, replace(OWN, machine="half", num_ranks=2), PATIENCE_S)
    left_link.close()
    links = [join(listener.address, KEY, Introduction("m3", "", index, 2, 0, VERSION), 60.0) for index in (1, 0)]
    thread.join(PATIENCE_S)
    (((first, second),),) = gathered
    first.send(b"0")
    second.send(b"1")
    assert [link.receive(PATIENCE_S) for link in links] == [b"1", b"0"]
    with pytest.raises(EOFError):
        half.receive(PATIENCE_S)


def test_nobody_listens() -> None:
    with pytest.raises(TimeoutError, match="no engine accepts ranks"):
        join(f"127.0.0.1:{free_port()}", KEY, OWN, 0.0)
    for address in ("here", "here:", ":1", "here:99999"):
        with pytest.raises(SettingsError, match="must be HOST:PORT"):
            join(address, KEY, OWN, 0.0)
    with (
        socket.create_server(("127.0.0.1", 0)) as busy_socket,
        pytest.raises(SettingsError, match="TINSMITH_RANK_PORT"),
    ):
        Listener("127.0.0.1", busy_socket.getsockname()[1], KEY)


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"data_parallel": 3}, "engine", "3 devices are not equally many on each of 2 machines"),
        ({"tensor_parallel": 2, "context_parallel": 1}, "engine", "tensor parallel 2 does not divide the 1 devices"),
        ({"data_parallel": 2, "models": ("a", "b")}, "engine", "one engine with one base model"),
        ({"data_parallel": 2}, "sampler", "a dedicated sampler runs on one machine"),
        ({"data_parallel": 2, "backend": "full"}, "engine", "backend 'full' runs on one machine"),
    ],
)
def test_engines_that_cannot_have_several_machines_are_refused(
    changes: dict[str, object], kind: str, reason: str
) -> None:
    with pytest.raises(SettingsError, match=reason):
        check_machines(Settings.model_validate({"machines": 2, **changes}), kind)


@contextlib.contextmanager
def other_machine(directory: Path, address: str, model: str, ranks: int = 1) -> Iterator[list[int]]:
    """`tinsmith rank` until the end of the block; its exit status is in the list then."""
    settings = Settings.model_validate({"data_dir": directory, "signing_secret": SECRET, "models": (model,)})
    stopping, status = threading.Event(), []
    run = lambda: status.append(run_ranks(settings, address, ranks, stopping, once=True))  # noqa: E731
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield status
    finally:
        stopping.set()
        thread.join(PATIENCE_S)


@pytest.mark.extended
def test_two_machines_agree_with_one_process_until_one_is_lost(tmp_path: Path) -> None:
    """The other machine has the base model in another directory, and none of rank 0's files."""
    shape = tiny_models.make(tmp_path / "here", "qwen3")
    shutil.copytree(shape.path, tmp_path / "there")
    lost = threading.Event()
    with other_machine(tmp_path, address := f"127.0.0.1:{free_port()}", f"{shape.name}={tmp_path / 'there'}"):
        host, port = rendezvous.parse_address(address)
        group = Group(
            2, device="cpu", timeout_s=60.0, on_lost=lambda _: lost.set(), machines=Machines(2, host, port, KEY)
        )
        try:
            single = TorchBackend(shape, device="cpu", max_tokens_per_microbatch=64)
            sharded = ranked.load(shape, group, Degrees(2, shard_base=True))
            for backend in (single, sharded):
                ranked.create(backend)
            ranked.train_both(single, sharded, 2, seed=3)
            sharded.capture("m1").write(tmp_path / "saved")
            sharded.load("m1", ranked.SPECS[1], tmp_path / "saved", optimizer=True)
            ranked.agree_on(single, sharded, [ranked.pass_of(np.random.default_rng(1), 1, [9, 11])])
            ranked.publish(sharded)
            sharded.capture_version("v1").write(tmp_path / "version")
            sharded.load_version("again", tmp_path / "version")
            ranked.sample_both(single, sharded)
            (rank,) = _ranks_of(os.getpid())
            os.kill(rank, signal.SIGKILL)
            assert lost.wait(PATIENCE_S), "without a call"
            with pytest.raises(RanksLostError):
                run_to_end(sharded.run_passes([ranked.pass_of(np.random.default_rng(0), 0, [9, 10])]))
        finally:
            group.close()


def _ranks_of(parent: int) -> list[int]:
    threads = Path(f"/proc/{parent}/task").glob("*/children")
    pids = [int(pid) for path in threads for pid in path.read_text().split()]
    name = b"tinsmith.backends.distributed"
    return [pid for pid in pids if name in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("files", "reason"), [("other", "differ between the machines"), ("none", "finds no directory")], ids=str
)
def test_base_models_that_differ_between_machines_are_refused(tmp_path: Path, files: str, reason: str) -> None:
    shape, other = (tiny_models.make(tmp_path / name, "qwen3", seed=len(name)) for name in ("here", "elsewhere"))
    with other_machine(tmp_path, address := f"127.0.0.1:{free_port()}", f"{shape.name}={other.path}"):
        host, port = rendezvous.parse_address(address)
        group = Group(2, device="cpu", timeout_s=60.0, on_lost=lambda _: None, machines=Machines(2, host, port, KEY))
        try:
            if files == "none":
                shutil.rmtree(other.path)
            with pytest.raises(SettingsError, match=reason):
                ranked.load(shape, group, Degrees(2))
        finally:
            group.close()


@pytest.mark.extended
def test_a_run_outlives_the_loss_of_a_machine_without_ray(tmp_path: Path) -> None:
    """`tinsmith serve --machines 2` and `tinsmith rank`, whose process is killed between steps."""
    port = free_port()
    settings = {"RANK_PORT": str(port), "SIGNING_SECRET": SECRET, "DEVICE": "cpu", "SESSION_TIMEOUT_S": "-1"}
    command = [sys.executable, "-m", "tinsmith.cli", "rank", "--join", f"127.0.0.1:{port}", "--ranks", "1"]
    other_environment = environment(tmp_path / "there", settings)
    with subprocess.Popen([*command, "--data-dir", str(tmp_path / "there")], env=other_environment) as other:
        try:
            with (
                serving(tmp_path / "here", "--machines", "2", "--data-parallel", "2", settings=settings) as server,
                tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service,
            ):
                undisturbed = _train(service, lambda: None)
                (first,) = _ranks_of(other.pid)
                disturbed = _train(service, lambda: os.kill(first, signal.SIGKILL))
                assert np.abs(np.array(disturbed) - undisturbed).max() < 1e-4 and len(set(undisturbed)) == 6
                assert _ranks_of(other.pid) not in ([], [first])
        finally:
            other.terminate()
        assert other.wait(PATIENCE_S) == 0


def _train(service: tinker.ServiceClient, disturb: Callable[[], None]) -> list[float]:
    model = service.create_lora_training_client("tinsmith/nano", rank=4, seed=1).result(timeout=240)
    data = random_data(np.random.default_rng(0), (12, 30, 7), 200)
    losses: list[float] = []
    for step in range(6):
        passed = model.forward_backward(data, "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=1e-3, eps=1e-6))
        losses.append(passed.result(timeout=240).metrics["loss:sum"])
        stepped.result(timeout=240)
        if step == 2:
            disturb()
    return losses
