"""docs/security.md against a live server with keys, in raw HTTP; and rules for the source. Security tests of single
modules are in the tests of these modules; docs/security.md lists them all.
"""

from __future__ import annotations

import ast
import json
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from support import databases
from support.live import LiveServer, environment, serving
from support.raw_client import RawClient, engine_of
from tinsmith.wire import tinker_public_pb2 as pb

SOURCE = Path(__file__).parents[2] / "src" / "tinsmith"
SIGNING_SECRET = "a-secret-of-many-more-than-32-bytes-for-signing"
ELSEWHERE = {
    "TINKER_API_KEY": "tml-of-another-server",
    "HF_TOKEN": "hf_elsewhere",
    "AWS_SECRET_ACCESS_KEY": "aws-elsewhere",
}
HARMLESS = {"HF_HOME": "/some/cache", "MY_TOKENIZER": "fast"}


@dataclass(frozen=True, slots=True)
class Keyed:
    server: LiveServer
    key: str
    client: RawClient


@pytest.fixture(scope="module")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """A server whose data directory was created by `tinsmith migrate`, before the first key."""
    data_dir = tmp_path_factory.mktemp("secure") / "new" / "data"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tinsmith.cli", *arguments, "--data-dir", str(data_dir)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True, env=environment(data_dir)
        )

    run("migrate")
    completed = run("keys", "create", "alice")
    key = completed.stdout.strip()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ELSEWHERE | HARMLESS).items():
            patch.setenv(name, value)
        settings = {"HOLD_S": "1", "SIGNING_SECRET": SIGNING_SECRET}
        with serving(data_dir, "--backend", "fake", settings=settings) as server:
            http = httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": key}, timeout=60)
            with http:
                client = RawClient(http)
                model_id = client.model()
                client.result(client.ok("save_weights", {"model_id": model_id, "seq_id": 1, "path": "a"})["request_id"])
                yield Keyed(server, key, client)


def exchange(server: LiveServer, request: bytes) -> bytes:
    """Send bytes; return the answer up to the end of the connection."""
    address = urlsplit(server.url)
    parts: list[bytes] = []
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(request)
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def request(line: bytes, *fields: bytes, host: bytes = b"127.0.0.1", body: bytes = b"") -> bytes:
    return b"\r\n".join([line + b" HTTP/1.1", b"Host: " + host, *fields, b"Connection: close", b"", body])


# Request smuggling: one request must not be read as two, nor two as one.

JSON = b"Content-Type: application/json"
CHUNKED = b"Transfer-Encoding: chunked"
POST = b"POST /api/v1/telemetry"
AMBIGUOUS = {
    "length and chunks": request(POST, b"Content-Length: 4", CHUNKED, body=b"2\r\n{}\r\n0\r\n\r\n"),
    "chunks and length": request(POST, CHUNKED, b"Content-Length: 4", body=b"2\r\n{}\r\n0\r\n\r\n"),
    "two lengths": request(POST, b"Content-Length: 2", b"Content-Length: 4", body=b"{}{}"),
    "a list of lengths": request(POST, b"Content-Length: 2, 4", body=b"{}{}"),
    "a negative length": request(POST, b"Content-Length: -2", body=b"{}"),
    "a length with a sign": request(POST, b"Content-Length: +2", body=b"{}"),
    "a length that overflows": request(POST, b"Content-Length: 18446744073709551618", body=b"{}"),
    "an unknown coding": request(POST, b"Transfer-Encoding: xchunked", body=b"2\r\n{}\r\n0\r\n\r\n"),
    "chunks inside a coding": request(POST, b"Transfer-Encoding: chunked, gzip", body=b"2\r\n{}\r\n0\r\n\r\n"),
    "two codings": request(POST, CHUNKED, b"Transfer-Encoding: identity", body=b"2\r\n{}\r\n0\r\n\r\n"),
    "a chunk's size that overflows": request(POST, CHUNKED, body=b"10000000000000002\r\n{}\r\n0\r\n\r\n"),
    "a chunk's size in another notation": request(POST, CHUNKED, body=b"0x2\r\n{}\r\n0\r\n\r\n"),
    "a space before the colon": request(POST, b"Content-Length : 2", body=b"{}"),
    "a folded field": request(POST, b"X: a\r\n Content-Length: 2", body=b"{}"),
    "lines without CR": request(POST, b"Content-Length: 2", body=b"{}").replace(b"\r", b""),
    "a lone CR": request(POST, b"X: a\rContent-Length: 2", body=b"{}"),
    "NUL in a field": request(POST, b"X: a\x00b"),
    "a path that is no ASCII": request(b"GET /api/v1/\xff\xfe"),
    "a tunnel": request(b"CONNECT example.org:443"),
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_an_ambiguous_request_is_refused(keyed_server: Keyed, case: str) -> None:
    """A proxy may parse it in the other way, so the connection is closed."""
    head = request(b"GET /api/v1/healthz")
    answer = exchange(keyed_server.server, AMBIGUOUS[case].replace(b"Connection: close\r\n", b"") + head)
    assert answer.startswith(b"HTTP/1.1 400 "), answer[:200]
    assert len(re.findall(rb"HTTP/1\.1 \d", answer)) == 1
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["detail"]
    assert keyed_server.client.http.get("healthz").status_code == 200


def test_a_key_behind_the_body_opens_nothing(keyed_server: Keyed) -> None:
    late = b"2\r\n{}\r\n0\r\nX-API-Key: " + keyed_server.key.encode() + b"\r\n\r\n"
    assert exchange(keyed_server.server, request(POST, JSON, CHUNKED, body=late)).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c", b"TLS/1.0"])
def test_protocol_upgrades_are_ignored(keyed_server: Keyed, protocol: bytes) -> None:
    fields = b"Upgrade: " + protocol, b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", b"Sec-WebSocket-Version: 13"
    raw_request = request(b"GET /api/v1/healthz", *fields).replace(b"Connection: close", b"Connection: Upgrade, close")
    answer = exchange(keyed_server.server, raw_request)
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]


@pytest.mark.parametrize(
    "path", [b"/api/v1/healthz/", b"//example.org/%2e%2e", b"/api/v1//healthz", b"/api/v1/asample/"]
)
def test_no_path_redirects_to_another_host(keyed_server: Keyed, path: bytes) -> None:
    answer = exchange(keyed_server.server, request(b"GET " + path, host=b"example.org"))
    assert answer.startswith(b"HTTP/1.1 404 "), answer[:200]
    assert b"location" not in answer.lower() and b"example.org/" not in answer.partition(b"\r\n\r\n")[0]


@pytest.mark.parametrize("host", [b"[", b"a b", b"a@b", b"a\tb", b"", b"\xff", b"x" * 5000, b"a/b?c#d", b"[::1"])
def test_a_strange_host_is_no_failure_and_comes_back_nowhere(keyed_server: Keyed, host: bytes) -> None:
    key_header = b"X-API-Key: " + keyed_server.key.encode()
    for line in (b"GET /nowhere", b"GET /api/v1/sessions", b"PUT /api/v1/healthz"):
        answer = exchange(keyed_server.server, request(line, key_header, host=host))
        assert answer[9:12] in (b"200", b"404", b"405", b"400"), answer[:200]
        assert not host or host not in answer.partition(b"\r\n\r\n")[0].replace(b"HTTP/1.1", b"")


# Web pages of other origins in a browser that can reach the server.


def test_web_pages_of_other_origins_cannot_send_or_read(keyed_server: Keyed) -> None:
    """Keys are sent in a custom header, which needs a CORS preflight; preflights are never approved."""
    origin = {"Origin": "https://example.org"}
    wish = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-api-key, content-type"}
    for path in ("create_session", "telemetry", "healthz", "retrieve_future"):
        first = httpx.options(f"{keyed_server.server.url}/api/v1/{path}", headers=origin | wish)
        assert first.status_code == 405
        simple = httpx.post(
            f"{keyed_server.server.url}/api/v1/{path}", content="{}", headers={**origin, "Content-Type": "text/plain"}
        )
        assert simple.status_code in (401, 405), "what needs no asking first has no key"
        read = httpx.get(f"{keyed_server.server.url}/api/v1/{path}", headers=origin)
        for answer in (first, simple, read):
            assert not [name for name in answer.headers if name.startswith("access-control-")]
            assert "set-cookie" not in answer.headers, "a cookie would go with every request of every page"


# The server sends no requests by itself.


@pytest.fixture
def listener() -> Iterator[tuple[str, list[bytes]]]:
    """Listen on an address and record requests."""
    came: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    came.append(repr(server.accept()[1]).encode())
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/x", came
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_an_address_in_a_request_is_not_followed(keyed_server: Keyed, listener: tuple[str, list[bytes]]) -> None:
    url, came = listener
    client = keyed_server.client
    model_id = client.model()
    sampler = client.sampler()
    pointer = {"type": "image_asset_pointer", "location": url, "format": "png", "expected_tokens": 1}
    sample = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [pointer]}, "sampling_params": {}}
    assert "image" in client.error(client.ok("asample", sample)["request_id"])
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=1, loss_fn="cross_entropy")
    message.data.add().model_input.add().image.data = url.encode()
    assert "image" in client.error(client.send_pass(message.SerializeToString()).json()["request_id"])
    session_id = client.session()
    for model_seq_id, (path, body) in enumerate(
        [
            ("create_model", {"base_model": url}),
            ("create_model", {"base_model": f"../../../..{keyed_server.server.data_dir}"}),
            ("load_weights", {"path": url, "optimizer": False}),
            ("load_weights", {"path": "tinker://x/weights/a", "base_model": url, "optimizer": False}),
        ]
    ):
        body = body | {"session_id": session_id, "model_seq_id": model_seq_id}
        assert client.error(client.ok(path, body)["request_id"])
    for body in ({"base_model": url}, {"model_path": url}):
        body = body | {"session_id": session_id, "sampling_session_seq_id": 0}
        assert client.post("create_sampling_session", body).status_code in (400, 404)
    assert client.post("copy_weights", {"source_path": url, "destination_project_id": url}).status_code == 400
    time.sleep(0.2)
    assert came == []


# Files on the disk, and the engine's environment.


def test_a_servers_files_are_readable_by_its_user_only(keyed_server: Keyed) -> None:
    data_dir = keyed_server.server.data_dir
    if databases.chosen == databases.SQLITE:  # otherwise the command does not use it, and the test has created it
        assert stat.S_IMODE(data_dir.stat().st_mode) == 0o700
    for name in ("checkpoints", "logs"):
        assert stat.S_IMODE((data_dir / name).stat().st_mode) == 0o700, name
    database_files = list(data_dir.glob("tinsmith.db*"))
    assert database_files or databases.chosen == databases.POSTGRES
    for path in [*database_files, *data_dir.glob("*.key"), *data_dir.glob("*.running")]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def process_facts(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()


def test_an_engine_has_no_secrets_that_it_does_not_need(keyed_server: Keyed) -> None:
    process_data = process_facts(engine_of(keyed_server.server))
    assert process_data
    for secret in (SIGNING_SECRET, keyed_server.key, *ELSEWHERE.values()):
        assert secret.encode() not in process_data
    for name, value in HARMLESS.items():
        assert f"{name}={value}".encode() in process_data


def test_the_signing_secret_is_written_nowhere(keyed_server: Keyed) -> None:
    for path in keyed_server.server.data_dir.rglob("*"):
        assert not path.is_file() or SIGNING_SECRET.encode() not in path.read_bytes(), path


def test_nonsense_from_strangers_fills_no_log(keyed_server: Keyed) -> None:
    log = keyed_server.server.data_dir / "server.log"
    before = log.stat().st_size
    for _ in range(20):
        exchange(keyed_server.server, b"nonsense\r\n\r\n")
        exchange(keyed_server.server, request(b"GET /api/v1/sessions", b"X-API-Key: tml-wrong"))
        exchange(keyed_server.server, request(b"GET /nowhere%0a2026-01-01 level=error", b"Upgrade: x"))
    assert log.stat().st_size == before


# The source.

NEVER_IMPORTED = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "yaml",
    "ftplib",
    "telnetlib",
}
NEVER_CALLED = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "asyncio.create_subprocess_shell",
    "torch.load",
    "torch.hub.load",
}
# Exceptions for a few files. Those that run or unpickle code of bulk jobs are loaded by clients and by a worker's child
# processes; test_batch_security.py shows that a server does neither.
EXCEPTIONS = {
    "batch/client/identity.py": {"cloudpickle"},  # pickles, and never unpickles
    "batch/client/sky_pools.py": {"yaml"},  # its user's own file
    "batch/shipping.py": {"cloudpickle", "pickle", "exec", "compile"},
    "batch/formats/sky_writers.py": {"pickle"},
    "batch/worker/pipeline.py": {"pickle"},  # rows between the processes of one job's stages
    "batch/worker/stage_feed.py": {"pickle"},
    "batch/pools/local.py": {"asyncio.create_subprocess_shell"},  # the operator's own `setup`
    "batch/pools/specs.py": {"yaml"},  # the operator's own file
    "cli/batch.py": {"yaml"},  # writes a task; the file is read by pools/specs.py
}
HTTP_CLIENTS = {"httpx", "requests", "aiohttp", "urllib.request", "http.client", "urllib3", "huggingface_hub"}
# The demo connects to its own server; the clients and commands of bulk jobs, checkpoints, trajectories and `tinsmith
# bench` to the server that their user names; the operator's command to the hub, before it serves and for base models
# that it allows; uploads to the same hub; warnings go to the operator's address.
MAY_ASK = {
    "base_models/__init__.py",
    "batch/client/http.py",
    "cli/batch.py",
    "cli/bench.py",
    "cli/demo.py",
    "engine/transfer.py",
    "exchange/metrics.py",
    "exchange/merging.py",  # no requests: it uses huggingface_hub's function that splits files
    "exchange/run_cards.py",
    "exchange/trajectories.py",
    "exchange/transfer.py",
    "exchange/uploading.py",
    "samplers/remote/connection.py",
    "server/warning_posts.py",
}


def imports_of(tree: ast.AST) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def faults_of(file: str, tree: ast.AST) -> Iterator[str]:
    """What the module does against the rules."""
    names = imports_of(tree)
    roots = {name.split(".")[0] for name in names}
    if file not in MAY_ASK and (clients := (names | roots) & HTTP_CLIENTS):
        yield f"{file} imports {clients}"
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {ast.unparse(call.func) for call in calls}
    used, exceptions = (roots & NEVER_IMPORTED) | (called & NEVER_CALLED), EXCEPTIONS.get(file, set())
    if used != exceptions:
        yield f"{file} uses {used}, and its exceptions are {exceptions}"
    if loads := called & {"yaml.load", "yaml.unsafe_load", "yaml.full_load"}:
        yield f"{file} calls {loads}"
    for call in calls:
        arguments = {keyword.arg: keyword.value for keyword in call.keywords}
        for name in sorted({"shell", "trust_remote_code", "allow_pickle"} & arguments.keys()):
            if (value := ast.unparse(arguments[name])) != "False":
                yield f"{file} has {name}={value}"


def test_the_source_has_no_unpickling_eval_or_outgoing_requests() -> None:
    # One test for all files: a case for each of them would take longer than what it checks.
    assert not [
        fault
        for path in sorted(SOURCE.rglob("*.py"))
        for fault in faults_of(str(path.relative_to(SOURCE)), ast.parse(path.read_text()))
    ]


@pytest.mark.parametrize(
    "text",
    [
        "import requests",
        "from pickle import loads",
        "eval('1')",
        "yaml.load(text)",
        "subprocess.run(command, shell=True)",
        "auto.from_pretrained(name, trust_remote_code=trusted)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_a_module_against_the_rules_is_noticed(text: str) -> None:
    assert len(list(faults_of("engine/new.py", ast.parse(text)))) == 1


def test_an_exception_that_is_not_used_is_noticed() -> None:
    assert list(faults_of(min(EXCEPTIONS), ast.parse(""))) != []


def test_every_test_that_the_threat_model_names_is_there() -> None:
    tests = Path(__file__).parents[1]
    file = ""
    matches = re.findall(r"`(test_\w+\.py)?(?:::(test_\w+))?`", (tests.parent / "docs" / "security.md").read_text())
    tests_named = [(file := name or file, test) for name, test in matches if name or test]
    assert len(tests_named) > 50
    for file, test in tests_named:
        (path,) = tests.rglob(file)
        assert not test or f"\ndef {test}(" in path.read_text(), (file, test)
