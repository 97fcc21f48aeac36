"""A Hugging Face hub on this machine that takes uploads: repositories, large files and commits, in memory."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tinsmith.store.checkpoints import CheckpointRef

INLINE_BYTES = 1000
"""Larger files are sent as large ones."""


def repository_of(ref: CheckpointRef) -> str:
    """The id of the repository in which a server of ours has a checkpoint."""
    run, _, number = ref.training_run_id.partition(":train:")
    return f"{run}/{number}.{ref.kind}.{ref.name}"


@dataclass
class FakeHub:
    """`files` are those of commits, by repository. A large file is not in them before its commit."""

    url: str = ""
    token: str = "hf_right"
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    authorizations: list[str] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    """While it is cleared, large files wait."""


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    hub.held.set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _read(self) -> bytes:
            if self.headers.get("transfer-encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("content-length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _answer(self, content: object, status: int = 200) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _is_allowed(self) -> bool:
            hub.authorizations.append(self.headers.get("authorization", ""))
            return self.headers.get("authorization") == f"Bearer {hub.token}"

        def do_GET(self) -> None:
            repository = self.path.removeprefix("/api/models/").partition("/revision")[0].partition("?")[0]
            if repository not in hub.private:
                return self._answer({"error": "Repository not found"}, 404)
            return self._answer({"id": repository, "private": hub.private[repository], "siblings": [], "sha": "0" * 40})

        def do_PUT(self) -> None:
            hub.held.wait(30)
            hub.large[self.path.rpartition("/")[2]] = self._read()
            self._answer({})

        def do_POST(self) -> None:
            body = self._read()
            if self.path == "/api/validate-yaml":
                return self._answer({"errors": [], "warnings": []})
            if not self._is_allowed():
                return self._answer({"error": "Invalid credentials"}, 401)
            if self.path == "/api/repos/create":
                asked = json.loads(body)
                repository = "/".join(filter(None, (asked.get("organization"), asked["name"])))
                if repository in hub.private:
                    return self._answer({"error": "exists", "url": f"{hub.url}/{repository}"}, 409)
                hub.private[repository] = asked.get("private") is True or asked.get("visibility") == "private"
                return self._answer({"url": f"{hub.url}/{repository}", "name": repository})
            if "/preupload/" in self.path:
                return self._answer({"files": [_mode(file) for file in json.loads(body)["files"]]})
            if self.path.endswith("/objects/batch"):
                return self._answer(
                    {"transfer": "basic", "objects": [_place(hub, one) for one in json.loads(body)["objects"]]}
                )
            repository = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            hub.files.setdefault(repository, {}).update(_commit(hub, body))
            address = f"{hub.url}/{repository}"
            return self._answer({"commitUrl": f"{address}/commit/{'0' * 40}", "commitOid": "0" * 40})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.held.set()
        server.shutdown()
        server.server_close()


def _mode(file: dict[str, Any]) -> dict[str, object]:
    mode = "lfs" if file["size"] > INLINE_BYTES else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}


def _place(hub: FakeHub, asked: dict[str, Any]) -> dict[str, object]:
    return {**asked, "actions": {"upload": {"href": f"{hub.url}/large/{asked['oid']}", "header": {}}}}


def _commit(hub: FakeHub, body: bytes) -> dict[str, bytes]:
    files = {}
    for line in body.splitlines():
        entry = json.loads(line)
        value = entry["value"]
        if entry["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif entry["key"] == "lfsFile":
            files[value["path"]] = hub.large[value["oid"]]
    return files
