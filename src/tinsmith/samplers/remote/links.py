"""Links by which an engine without a shared file system pulls adapters, in the protocol of the Hugging Face hub.

vLLM and SGLang take a repository's name where they take an adapter's directory, and download it from their HF_ENDPOINT.
`AdapterLinks` listens for that: each load of an adapter is a repository with a name that cannot be guessed. The name is
the credential. A name is
valid from `open` to `close_link`, and names are never listed. The connection is plain HTTP unless a proxy encrypts it.
Requests are served on separate threads.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import threading
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tinsmith.errors import SettingsError
from tinsmith.runtime.background import start_supervised_thread

OWNER = "adapters"
IDLE_TIMEOUT_S = 60.0
"""A connection that is idle for this long is closed."""


class AdapterLinks:
    def __init__(self, host: str, url: str) -> None:
        """`url` is the address at which engines reach this process; it listens at `host` on the port of the URL. Raises
        SettingsError if it cannot.
        """
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        self._directories: dict[str, Path] = {}
        try:
            self._listener = ThreadingHTTPServer((host, port), partial(_Handler, self._directories))
        except OSError as error:
            raise SettingsError(
                f"sampler_adapters_url is {url!r}, and port {port} of peer_host {host!r} cannot be listened on: {error}"
            ) from None
        self._listener.daemon_threads = True
        self._closing = threading.Event()
        start_supervised_thread("adapters", self._listener.serve_forever, self._closing.wait)

    def open(self, directory: Path) -> str:
        """The name of a new repository with the files of a directory."""
        name = f"{OWNER}/{secrets.token_hex(24)}"
        self._directories[name] = directory
        return name

    def close_link(self, name: str) -> None:
        """Stop serving this repository."""
        self._directories.pop(name, None)

    def close(self) -> None:
        self._closing.set()
        self._listener.shutdown()
        self._listener.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_TIMEOUT_S

    def __init__(self, directories: dict[str, Path], *arguments: object) -> None:
        self._directories = directories
        super().__init__(*arguments)  # pyright: ignore[reportArgumentType]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        """/api/models/REPOSITORY[/revision/R or /tree/R], or /REPOSITORY/resolve/R/FILE; of /OWNER/TOKEN alone."""
        segments = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = segments[:2] == ["api", "models"]
        owner, token, *route = [*(segments[2:] if is_api else segments), "", ""][:6]
        directory = self._directories.get(f"{owner}/{token}")
        if directory is None:
            self._fail("RepoNotFound")
            return
        names = sorted(path.name for path in directory.iterdir() if path.is_file())
        commit = hashlib.sha1(token.encode()).hexdigest()
        if is_api and route[0] == "tree":
            entries = [{"type": "file", "path": name, "oid": _etag(directory / name)} for name in names]
            sized = [entry | {"size": (directory / str(entry["path"])).stat().st_size} for entry in entries]
            self._send_json(sized, commit, body=body)
        elif is_api:
            model_info = {"id": f"{owner}/{token}", "modelId": f"{owner}/{token}", "sha": commit, "private": True}
            model_info |= {"siblings": [{"rfilename": name} for name in names], "tags": [], "downloads": 0, "likes": 0}
            self._send_json(model_info, commit, body=body)
        elif route[0] == "resolve" and len(route) > 2 and route[2] in names:
            self._send_file(directory / route[2], commit, body=body)
        else:
            self._fail("EntryNotFound")

    def _send_json(self, value: object, commit: str, *, body: bool) -> None:
        text = json.dumps(value).encode()
        self._head(len(text), "application/json", commit)
        if body:
            self.wfile.write(text)

    def _send_file(self, path: Path, commit: str, *, body: bool) -> None:
        with path.open("rb") as file:
            self._head(path.stat().st_size, "application/octet-stream", commit, _etag(path))
            if body:
                shutil.copyfileobj(file, self.wfile, 1 << 20)

    def _head(self, length: int, kind: str, commit: str, etag: str = "") -> None:
        self.send_response(HTTPStatus.OK)
        headers = {"Content-Length": str(length), "Content-Type": kind, "X-Repo-Commit": commit}
        for name, value in (headers | ({"ETag": f'"{etag}"'} if etag else {})).items():
            self.send_header(name, value)
        self.end_headers()

    def _fail(self, code: str) -> None:
        self.send_response(HTTPStatus.NOT_FOUND)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """No access log: names are credentials."""


def _etag(path: Path) -> str:
    status = path.stat()
    return hashlib.sha256(f"{path}\n{status.st_mtime_ns}\n{status.st_size}".encode()).hexdigest()
