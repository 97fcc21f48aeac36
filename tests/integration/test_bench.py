"""`tinsmith bench`: two live servers side by side, through the real SDK."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Iterator
from typing import ClassVar

import httpx
import pytest
from typer.testing import CliRunner, Result

from support.live import API_KEY, LiveServer, free_port, serving
from tinsmith.cli import bench
from tinsmith.cli.bench import MEASURES, Comparison, Figure, Measure
from tinsmith.cli.main import app, output
from tinsmith.errors import SettingsError


@pytest.fixture(scope="module")
def other_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("other") / "data", "--backend", "fake") as server:
        yield server


def run(*flags: str) -> Result:
    output.width = 200  # otherwise the width is that of the terminal of the first import
    return CliRunner().invoke(app, ["bench", "--key", API_KEY, "--runs", "2", *flags])


@pytest.mark.extended
def test_two_servers_side_by_side(fake_server: LiveServer, other_server: LiveServer) -> None:
    answer = run("--url", fake_server.url, "--url", other_server.url, "--json")
    assert answer.exit_code == 0, answer.output
    rows = json.loads(answer.stdout)
    listed = httpx.get(f"{other_server.url}/api/v1/dashboard/runs", headers={"X-API-Key": API_KEY}).json()["runs"]
    assert listed and {run["name"] for run in listed} == {"tinsmith bench"}
    assert [row["measure"] for row in rows] == [measure.name for measure in MEASURES]
    for row in rows:
        first, second = row["servers"]
        assert (first["url"], second["url"]) == (fake_server.url, other_server.url)
        assert first["model"] == second["model"] == "tinsmith/nano"
        for server in row["servers"]:
            assert server["error"] is None
            assert 0 < server["least"] <= server["value"] <= server["most"]
        assert first["ratio"] == 1.0
        better = second["value"] / first["value"]
        assert second["ratio"] == pytest.approx(better if row["unit"] == "tokens/s" else 1 / better)


@pytest.mark.extended
def test_a_table_names_the_servers_and_what_one_cannot_do(fake_server: LiveServer, other_server: LiveServer) -> None:
    urls = ("--url", fake_server.url, "--url", other_server.url)
    answer = run(*urls, "--model", "tinsmith/nano", "--model", "no/such")
    assert answer.exit_code == 1
    assert fake_server.url in answer.output and other_server.url in answer.output
    assert "no/such" in answer.output
    for measure in MEASURES:
        assert measure.name in answer.output
        assert f"{measure.name} at {other_server.url}: " in answer.output
        assert f"{measure.name} at {fake_server.url}: " not in answer.output


def test_json_bodies_of_earlier_sdks_do_the_same_work(fake_server: LiveServer) -> None:
    answer = run("--url", fake_server.url, "--dialect", "json", "--json")
    assert answer.exit_code == 0, answer.output
    rows = json.loads(answer.stdout)
    assert [row["measure"] for row in rows] == [measure.name for measure in MEASURES]
    for row in rows:
        (server,) = row["servers"]
        assert server["error"] is None and server["value"] > 0 and server["model"] == "tinsmith/nano"


class OtherMake(http.server.BaseHTTPRequestHandler):
    """A server of an earlier SDK's protocol: its own key, only JSON, bare results after short polls, no health check,
    no sampling sessions, and 500 for failed operations. Its optimizer is broken.
    """

    protocol_version = "HTTP/1.1"
    polled: ClassVar[set[str]] = set()
    requests: ClassVar[list[dict]] = []

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: dict) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if self.path == "/api/v1/get_server_capabilities":
            self.answer(200, {"supported_models": [{"model_name": "local/theirs"}]})
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.path.removeprefix("/api/v1/")
        if (self.headers["X-API-Key"], self.headers["Authorization"]) != ("slime-dev-key", "Bearer slime-dev-key"):
            self.answer(401, {"detail": "Invalid API key"})
        elif path == "create_session":
            self.answer(200, {"session_id": "s"})
        elif path == "create_sampling_session":
            self.answer(404, {"detail": "Not Found"})
        elif path != "retrieve_future":
            self.requests.append(body | {"path": path})
            self.answer(200, {"request_id": f"{path} {len(self.requests)}"})
        elif body["request_id"] not in self.polled:
            self.polled.add(body["request_id"])
            self.answer(408, {"detail": "Operation still in progress"})
        else:
            kind = body["request_id"].partition(" ")[0]
            results = {
                "create_model": {"model_id": "m", "status": "ready"},
                "forward": {"metrics": {}},
                "forward_backward": {"status": "completed", "result": {"metrics": {}}},
                "save_weights_for_sampler": {"path": "tinker://m/sampler_weights/x"},
                "asample": {"type": "sample", "sequences": [{"tokens": [1, 2], "stop_reason": "stop"}]},
            }
            self.answer(200 if kind in results else 500, results.get(kind, {"error": "no optimizer"}))


@pytest.fixture
def other_make() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OtherMake)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.extended
def test_a_server_of_another_make_is_measured_beside_ours(fake_server: LiveServer, other_make: str) -> None:
    keys = ("--key", "slime-dev-key")  # the last of two: `run` gives the first
    answer = run("--url", fake_server.url, "--url", other_make, *keys, "--json")
    assert answer.exit_code == 1, answer.output
    servers = {row["measure"]: row["servers"][1] for row in json.loads(answer.stdout)}
    for name, server in servers.items():
        assert server["model"] == "local/theirs"
        if name.startswith(("forward_backward", "training")):
            assert "returned 500" in server["error"] and "no optimizer" in server["error"]
        else:
            assert server["error"] is None and server["value"] > 0
    drawn = [body for body in OtherMake.requests if body["path"] == "asample"]
    weights_named = [body.get("model_path") or body.get("base_model") for body in drawn]
    assert set(weights_named) == {"local/theirs", "tinker://m/sampler_weights/x"}
    (creation,) = [body for body in OtherMake.requests if body["path"] == "create_model"]
    assert (creation["session_id"], creation["base_model"], creation["lora_config"]) == (
        "s",
        "local/theirs",
        {"rank": 16},
    )
    passes = [body for body in OtherMake.requests if body["path"] == "forward"]
    assert len(passes[0]["forward_input"]["data"][0]["model_input"]["chunks"][0]["tokens"]) == 32


def test_a_key_that_another_make_refuses_is_an_error_in_one_line(other_make: str) -> None:
    answer = run("--url", other_make, "--dialect", "json")
    assert answer.exit_code == 1 and "create_session returned 401" in answer.output
    answer = run("--url", other_make, "--dialect", "grpc")
    assert "--dialect is 'grpc'; it must be sdk or json" in str(answer.exception)


def test_an_address_without_a_server_is_refused_at_once(fake_server: LiveServer) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SettingsError, match=f"no server responds at {url}.*tinsmith serve"):
        bench.bench_as_json([bench.BenchTarget(url, API_KEY)], runs=1, rank=1, patience_s=1)


def test_as_many_models_as_servers_or_one(fake_server: LiveServer) -> None:
    answer = run("--url", fake_server.url, "--model", "a", "--model", "b")
    assert isinstance(answer.exception, SettingsError)
    assert "--model is given 2 times and --url 1;" in str(answer.exception)


def test_without_the_sdk_it_says_what_to_do(fake_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tinker", None)
    answer = run("--url", fake_server.url)
    assert isinstance(answer.exception, SettingsError)
    assert "pip install 'tinsmith[demo]'" in str(answer.exception)


def test_ratios_say_how_many_times_as_good() -> None:
    def row(*, is_rate: bool, values: tuple[float, ...]) -> Comparison:
        return Comparison(Measure("m", lambda _client: 1, is_rate), tuple(Figure([value]) for value in values))

    assert row(is_rate=True, values=(100, 300)).ratio(1) == 3.0
    assert row(is_rate=False, values=(100, 300)).ratio(1) == pytest.approx(1 / 3)
    assert row(is_rate=False, values=(100, 300)).ratio(0) == 1.0


def test_a_median_of_what_counted() -> None:
    assert Figure([1.0, 9.0, 2.0]).value == 2.0
    assert Figure([1.0], error="it broke").value is None
