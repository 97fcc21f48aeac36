"""Background responses outlive the server and the engine that worked on them, and the timeout of sessions."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from support.live import API_KEY, LiveServer, free_port, freeze, serving

NANO = "tinsmith/nano"
TIMEOUT_S = 3.0
ARGUMENTS = ("--session-timeout-s", str(TIMEOUT_S), "--session-sweep-s", "0.5")
DEADLINE_S = 120.0


def responses(server: LiveServer, method: str = "POST", path: str = "", **body: object) -> dict[str, Any]:
    url, headers = f"{server.url}/v1/responses{path}", {"Authorization": f"Bearer {API_KEY}"}
    answer = httpx.request(method, url, json=body or None, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def in_background(server: LiveServer) -> str:
    request = {"model": NANO, "input": "Say hello.", "max_output_tokens": 8, "temperature": 0}
    return responses(server, **request, background=True)["id"]


def await_end(server: LiveServer, response_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + DEADLINE_S
    while (body := responses(server, "GET", f"/{response_id}"))["status"] in ("queued", "in_progress"):
        assert time.monotonic() < deadline, body
        time.sleep(0.2)
    return body


def output(body: dict[str, Any]) -> list[str]:
    assert body["status"] in ("completed", "incomplete"), body["error"]
    return [part["text"] for item in body["output"] for part in item["content"]]


def test_pending_responses_survive_kills_and_silence_longer_than_the_timeout(tmp_path: Path) -> None:
    port, data_dir = free_port(), tmp_path / "data"
    with ExitStack() as servers:
        server = servers.enter_context(serving(data_dir, *ARGUMENTS, port=port))
        expected = output(await_end(server, in_background(server)))
        (engine,) = server.engine_pids()
        freeze(engine, data_dir)
        unread, polled = in_background(server), in_background(server)
        until = time.monotonic() + 2 * TIMEOUT_S
        while time.monotonic() < until:
            assert responses(server, "GET", f"/{polled}")["status"] == "in_progress"
            time.sleep(0.5)
        os.kill(engine, signal.SIGKILL)
        server.stop(signal.SIGKILL)
        time.sleep(1.5 * TIMEOUT_S)  # no server keeps anything alive
        server = servers.enter_context(serving(data_dir, *ARGUMENTS, port=port))
        assert output(await_end(server, polled)) == expected
        deadline = time.monotonic() + DEADLINE_S
        while server.count("responses WHERE NOT answered"):  # the other one is stored without being read
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert output(responses(server, "GET", f"/{unread}")) == expected
