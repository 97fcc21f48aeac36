"""The client's side of downloading checkpoints from a server and uploading adapters to one.

A download is complete or absent, and no archive member is written outside its directory. The key is sent to the server
alone, not to the addresses that its links name. Knows HTTP and files; `adapters` knows their contents.
"""

from __future__ import annotations

import os
import tarfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import httpx
from tqdm.utils import CallbackIOWrapper

from tinsmith.errors import TinsmithError, UserError, refusal
from tinsmith.exchange import adapters
from tinsmith.storage.directories import appearing
from tinsmith.storage.stores import fsync

TIMEOUT_S = 60.0
UPLOAD_TIMEOUT_S = 3600.0
"""How long a server may take to check and store an upload."""

PARTS = (adapters.CONFIG_FILE, adapters.WEIGHTS_FILE, adapters.OPTIMIZER_FILE)
CHUNK_BYTES = 1 << 20

Progress = Callable[[int, int], None]
"""Called with the bytes done and in all (0: not known)."""


@dataclass(frozen=True, slots=True)
class Pulled:
    path: str
    directory: Path
    files: Mapping[str, int]


class TinkerServer:
    """One server and one key."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._url = base_url.rstrip("/")
        self._http = httpx.Client(base_url=f"{self._url}/api/v1/", headers={"X-API-Key": api_key}, timeout=TIMEOUT_S)
        self._keyless = httpx.Client(timeout=TIMEOUT_S, follow_redirects=True)

    def close(self) -> None:
        self._http.close()
        self._keyless.close()

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer to GET /api/v1/`path`. Raises UserError."""
        return self._asked(lambda: self._http.get(path, params=dict(query or {}))).json()

    def pull(self, path: str, directory: Path, progress: Progress) -> Pulled:
        """Fetch all files of a checkpoint. Raises UserError."""
        run_id, kind, name = _parts(path)
        answer = self._asked(lambda: self._http.get(f"training_runs/{run_id}/checkpoints/{kind}/{name}/archive"))
        link = answer.headers.get("location", "")
        if not answer.is_redirect or not link.startswith(("http://", "https://")):
            raise TinsmithError(f"{self._url} answered {answer.status_code} instead of a link to the files")
        try:
            with self._keyless.stream("GET", link) as response:
                if response.is_error:
                    response.read()
                    raise refusal(response.status_code, response.text)
                total = int(response.headers.get("content-length", 0))
                with appearing(directory) as hidden:
                    files = _unpacked(_Stream(response.iter_bytes(CHUNK_BYTES), total, progress), hidden)
        except (httpx.TransportError, tarfile.TarError, EOFError) as error:
            raise TinsmithError(f"the download failed: {error!r}; nothing was kept, try again") from None
        return Pulled(path, directory, files)

    def push(self, directory: Path, fields: Mapping[str, str], progress: Progress) -> dict[str, Any]:
        """Upload an adapter as a training checkpoint; returns the response. Raises UserError."""
        present = [directory / name for name in PARTS if (directory / name).is_file()]
        total = sum(path.stat().st_size for path in present)
        # A retried request carries the same key, so that it creates one checkpoint.
        headers = {"X-Idempotency-Key": uuid.uuid4().hex}
        done = 0

        def read(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            progress(done, total)

        with ExitStack() as stack:
            opened = {path.name: stack.enter_context(path.open("rb")) for path in present}
            files = {
                name: (name, cast(IO[bytes], CallbackIOWrapper(read, file, "read"))) for name, file in opened.items()
            }
            answer = self._asked(
                lambda: self._http.post(
                    "upload_weights", data=dict(fields), files=files, headers=headers, timeout=UPLOAD_TIMEOUT_S
                )
            )
        return answer.json()

    def _asked(self, ask: Callable[[], httpx.Response]) -> httpx.Response:
        try:
            answer = ask()
        except httpx.TransportError as error:
            raise TinsmithError(
                f"no answer from {self._url}: {error!r}; is it `tinsmith serve`? TINKER_BASE_URL says where it is"
            ) from None
        if answer.is_error:
            raise refusal(answer.status_code, answer.text)
        return answer


class _Stream:
    """The bytes of a response as a file that is read once, in order."""

    def __init__(self, pieces: Iterator[bytes], total: int, progress: Progress) -> None:
        self._pieces = pieces
        self._total = total
        self._progress = progress
        self._done = 0
        self._rest = b""

    def read(self, size: int) -> bytes:
        while len(self._rest) < size and (piece := next(self._pieces, b"")):
            self._rest += piece
        found, self._rest = self._rest[:size], self._rest[size:]
        self._done += len(found)
        self._progress(self._done, self._total)
        return found


def _unpacked(stream: _Stream, directory: Path) -> dict[str, int]:
    """Writes the files of an archive durably. Raises UserError for a member that is not a plain file."""
    files: dict[str, int] = {}
    with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[arg-type]
        for member in archive:
            name = member.name.removeprefix("./")
            if member.isdir() and name in ("", "."):
                continue
            if not member.isreg() or name != os.path.basename(name) or name in ("", ".", "..") or name in files:
                raise UserError(f"the archive holds {member.name!a}, which is not a plain file of the directory")
            source = archive.extractfile(member)
            assert source is not None
            with (directory / name).open("xb") as target:
                while piece := source.read(CHUNK_BYTES):
                    target.write(piece)
            fsync(directory / name)
            files[name] = member.size
    if not files:
        raise UserError("the archive holds no files")
    return files


def _parts(path: str) -> tuple[str, str, str]:
    prefix, _, rest = path.partition("://")
    parts = rest.split("/")
    if prefix != "tinker" or len(parts) != 3 or not all(parts):
        raise UserError(f"{path!r} is not a checkpoint path; the form is tinker://TRAINING_RUN_ID/KIND/NAME")
    return parts[0], parts[1], parts[2]
