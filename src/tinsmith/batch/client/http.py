"""A client of the routes of bulk jobs. Knows HTTP and no rows.

A request that did not reach the server, or that a busy server refused, is repeated for `patience_s`. A request that
creates a job has an idempotency key, so that its repetitions find the job of the first one.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import httpx

from tinsmith.errors import NotFoundError, TinsmithError, UserError, refusal

JOBS = "/api/v1/batch/jobs"
POOLS = "/api/v1/batch/pools"
PATIENCE_S = 60.0
HINT = ". `tinsmith serve` starts a server; set TINKER_BASE_URL to its address"
PAUSE_S = 0.5
REQUEST_TIMEOUT_S = 60.0
BUSY = frozenset({429, 502, 503, 504})
FINAL = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})
Status = dict[str, Any]


def read_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a stream, which end with a line feed. JSON may hold every other character that Unicode counts as the
    end of a line (`httpx.Response.iter_lines` splits at these, too)."""
    partial: list[bytes] = []
    for chunk in chunks:
        first, *following = chunk.split(b"\n")
        partial.append(first)
        for line in following:
            yield b"".join(partial)
            partial = [line]
    if any(partial):
        yield b"".join(partial)


class Client:
    """One server and one key; by default those of the environment, as the SDK's."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None, patience_s: float = PATIENCE_S) -> None:
        self.patience_s = patience_s
        if base_url is None or api_key is None:
            from tinsmith.settings.environment import client_address

            default_url, default_key = client_address()
            base_url, api_key = base_url or default_url, api_key or default_key
        self.base_url = base_url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.base_url, headers={"X-API-Key": api_key}, timeout=httpx.Timeout(REQUEST_TIMEOUT_S)
        )

    def close(self) -> None:
        self._http.close()

    def submit(self, spec: Mapping[str, Any], idempotency_key: str | None = None) -> int:
        """A new job, or the job of an earlier call with this key and specification."""
        return self._create(JOBS, spec, idempotency_key)

    def _create(self, path: str, body: Mapping[str, Any], idempotency_key: str | None) -> int:
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return int(self._call("POST", path, body=body, headers=headers)["job_id"])

    def jobs(self, limit: int = 100) -> list[Status]:
        """The statuses of jobs, newest first."""
        return self._call("GET", JOBS, query={"limit": limit})["jobs"]

    def __repr__(self) -> str:
        return f"Client({self.base_url!r})"

    def status(self, job_id: int, patience_s: float | None = None) -> Status:
        """With `patience_s`, in place of the client's, fails after that time without an answer."""
        return self._call("GET", f"{JOBS}/{job_id}", patience_s=patience_s)

    def batches(self, job_id: int, offset: int = 0) -> list[Status]:
        """A page of the job's batches."""
        return self._call("GET", f"{JOBS}/{job_id}/batches", query={"offset": offset})["batches"]

    def cancel(self, job_id: int) -> Status:
        return self._call("POST", f"{JOBS}/{job_id}/cancel", body={})

    def purge(self, job_id: int) -> Status:
        return self._call("POST", f"{JOBS}/{job_id}/purge", body={})

    def resume(
        self, job_id: int, outputs: Sequence[Mapping[str, Any]] | None = None, idempotency_key: str | None = None
    ) -> int:
        """A new job for the remaining rows, or that of an earlier call with this key; `outputs`, from
        `OutputWriter.to_dict`, replace the job's."""
        body = {} if outputs is None else {"batch_output_formats": list(outputs)}
        return self._create(f"{JOBS}/{job_id}/resume", body, idempotency_key)

    def errors(self, job_id: int, after: int = -1, limit: int = 1000) -> Status:
        """A page of failed rows, `errors`, and the `after` of the `next` page, None at the end."""
        return self._call("GET", f"{JOBS}/{job_id}/errors", query={"after": after, "limit": limit})

    def partial(self, job_id: int, after: int = -1, limit: int = 1000, order: str = "rows") -> Status:
        """A page of committed batches after a row or, with `order="commits"`, after the number of a commit."""
        query = {"after": after, "limit": limit} | ({"order": order} if order != "rows" else {})
        return self._call("GET", f"{JOBS}/{job_id}/partial", query=query)

    def has_output(self, job_id: int, output: int) -> bool:
        """Whether the server still finds a published output; True where it cannot look for it."""
        try:
            self._call("GET", f"{JOBS}/{job_id}/preview", query={"output": output, "rows": 1})
        except NotFoundError:
            return False
        except UserError:
            return True
        return True

    def logs(self, job_id: int, worker: str | None = None, after: int = 0) -> Status:
        """The workers that printed; with `worker`, its lines after this many bytes, and their end."""
        return self._call(
            "GET", f"{JOBS}/{job_id}/logs", query={"after": after, **({"worker": worker} if worker else {})}
        )

    def pools(self) -> list[Status]:
        return self._call("GET", POOLS)["pools"]

    def resize_pool(self, name: str, workers: int) -> list[Status]:
        return self._call("PUT", f"{POOLS}/{name}", body={"workers": workers})["pools"]

    def statuses(self, job_id: int) -> Iterator[Status]:
        """The job's status whenever it changes, until it is final. Reconnects when the connection is lost."""
        failing_since: float | None = None
        while True:
            try:
                for status in self._events(job_id):
                    failing_since = None
                    yield status
                    if status["status"] in FINAL:
                        return
            except httpx.TransportError as error:
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > self.patience_s:
                    raise TinsmithError(
                        f"no connection to {self.base_url} for {self.patience_s:g} s: {error}{HINT}"
                    ) from None
            time.sleep(PAUSE_S)

    def _events(self, job_id: int) -> Iterator[Status]:
        with self._http.stream("GET", f"{JOBS}/{job_id}/events") as response:
            if response.status_code in BUSY:
                raise httpx.TransportError(f"the server answered {response.status_code}")
            if response.is_error:
                response.read()
                raise refusal(response.status_code, response.text)
            for line in read_lines(response.iter_bytes()):
                if line.startswith(b"data:"):
                    yield json.loads(line.removeprefix(b"data:"))

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, int | str] | None = None,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        patience_s: float | None = None,
    ) -> Any:  # noqa: ANN401
        until = time.monotonic() + (self.patience_s if patience_s is None else patience_s)
        timeout_s = REQUEST_TIMEOUT_S if patience_s is None else patience_s
        while True:
            try:
                response = self._http.request(method, path, params=query, json=body, headers=headers, timeout=timeout_s)
            except httpx.TransportError as error:
                if time.monotonic() > until:
                    raise TinsmithError(f"no connection to {self.base_url}: {error}{HINT}") from None
            else:
                if not response.is_error:
                    return response.json()
                if response.status_code not in BUSY or time.monotonic() > until:
                    raise refusal(response.status_code, response.text)
            time.sleep(PAUSE_S)
