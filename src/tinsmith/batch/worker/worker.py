"""A worker: a small HTTP service that runs the batches of one job in a child, and outlives that child.

`python -m tinsmith.batch.worker.worker` reads one line of JSON from standard input (token, where to listen, log, a
directory for what it receives, one that is deleted at its end) and writes one (its address). It ends, with its
children, when standard input closes, which is when the process that started it ends.

`POST /configure` once, then `POST /feed_batch` with the `assignments` of a group. Its answer is lines: a heartbeat a
second while nothing ends, what attempts came to, and the questions of operations, whose answers are POSTed to
`/answer`. The same attempt fed twice runs once, and both callers are told. Two groups are in flight at a time, and few
attempts of them with the mapper; when none has ended for a second, those that have not begun are given back. Every
request carries the token of one coordinator of one job; another's is refused with 409, so that a coordinator that was
superseded can no longer use the worker. The token is looked for before anything else of a request is read: a caller
without it gets neither memory nor time (`HEAD_S`, `MAX_STRANGERS`). A worker on another machine than its coordinator is
sent the files that it is to read (`/receive`), and asked for what it printed (`/printed`).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import resource
import shutil
import socket
import socketserver
import sys
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from tinsmith.batch.worker.children import Attempt, ChildError, Events, Mapper, Message, Utility, lost

HEARTBEAT_S = 1.0
MAX_IN_FLIGHT = 2
"""Groups."""
MAX_GROUP = 32
GATHER_S = 0.02
"""How long an attempt's end waits for that of others of its group, to be told in one line."""
REMEMBERED = 128
"""Attempts whose result is kept for a caller that asks again."""
PIECE_BYTES = 1 << 20
HEAD_S = 10.0
"""How long a connection may take to bring its first token."""
READ_S = 60.0
"""How long the next bytes of a body may take."""
MAX_STRANGERS = 32
"""Connections that brought no token yet. The oldest one makes room for a new one."""
MAX_CONNECTIONS = 128
MAX_BODY_BYTES = 1 << 30
"""Of a request in JSON, such as the answers to a batch of operations."""
OPERATIONS = ("plan", "publish", "delete", "give_up")


ASSIGNMENT = ("batch_idx", "start_idx", "end_idx", "attempt_id", "part_bases", "schemas")


class RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Worker:
    """What the HTTP service does, without HTTP."""

    def __init__(self, log_path: Path, directory: Path | None = None) -> None:
        self._log_path = log_path
        self._directory = directory
        self._lock = threading.Lock()
        self._attempts: OrderedDict[tuple[int, int], Attempt] = OrderedDict()
        self._started = time.monotonic()
        self._rows = self._tokens = self._batches = 0
        self.job_id: int | None = None
        self._mapper: Mapper | None = None
        self._utility: Utility | None = None
        self.draining = False

    def configure(self, request: Message) -> Message:
        with self._lock:
            if self.job_id is not None:
                raise RefusedError(409, f"this worker is configured for job {self.job_id}")
            self.job_id = int(request["job_id"])
            self._mapper = Mapper(request["spec"], self._log_path, self._count)
            self._utility = Utility(request["spec"], self.job_id, self._log_path)
        threading.Thread(target=self._watch, daemon=True).start()
        if request.get("start_mapper"):
            self._mapper.start()
        return {}

    def _watch(self) -> None:
        while not self.draining:
            time.sleep(0.2)
            if self._mapper:
                self._mapper.watch()

    def feed(self, request: Message) -> Iterator[Message]:
        """What the attempts of a group come to, those together that end at about the same time; or a heartbeat."""
        mapper = self._configured(request)[0]
        events: Events = queue.SimpleQueue()
        given = [
            Attempt({name: each[name] for name in ASSIGNMENT if name in each}, events)
            for each in request["assignments"]
        ]
        if not 0 < len(given) <= MAX_GROUP:
            raise RefusedError(400, f"assignments has {len(given)}; it must have from 1 to {MAX_GROUP}")
        with self._lock:
            new = [attempt for attempt in given if attempt.key not in self._attempts]
            groups = {id(other.group) for other in self._attempts.values() if not other.settled.is_set()}
            if new and len(groups) >= MAX_IN_FLIGHT:
                raise RefusedError(429, f"{MAX_IN_FLIGHT} groups of batches are in flight")
            known = [self._attempts[attempt.key] for attempt in given if attempt.key in self._attempts]
            self._attempts.update({attempt.key: attempt for attempt in new})
            self._forget()
        for attempt in known:
            attempt.follow(events)
        mapper.feed(new)
        return self._follow(mapper, known + new, events)

    def _follow(self, mapper: Mapper, attempts: list[Attempt], events: Events) -> Iterator[Message]:
        left = len(attempts)
        while left:
            got = _next_events(events, left)
            settled = [each for each in got if isinstance(each, Attempt)]
            asks = [ask for each in got if isinstance(each, list) for ask in each]
            left -= len(settled)
            if not got:
                mapper.take_back(attempts)
                yield {"alive": True}
            if asks:
                yield {"asks": asks}
            if settled:
                yield {"settled": [{"key": attempt.key, **attempt.result} for attempt in settled], "last": not left}

    def _forget(self) -> None:
        for key, attempt in list(self._attempts.items())[: len(self._attempts) - REMEMBERED]:
            if attempt.settled.is_set():
                del self._attempts[key]

    def operate(self, request: Message) -> Iterator[Message]:
        """An operation of the utility child, with heartbeats while nothing else is to be told."""
        utility = self._configured(request)[1]
        if request.get("op") not in OPERATIONS:
            raise RefusedError(400, f"op is {request.get('op')!r}; it must be one of {list(OPERATIONS)}")
        return with_heartbeats(_operation(utility, request))

    def _configured(self, request: Message) -> tuple[Mapper, Utility]:
        if self.draining:
            raise RefusedError(409, "this worker is shutting down")
        if self._mapper is None or self._utility is None:
            raise RefusedError(409, "this worker is not configured")
        if request.get("job_id") != self.job_id:
            raise RefusedError(409, f"this worker is configured for job {self.job_id}")
        return self._mapper, self._utility

    def _count(self, attempt: Attempt) -> None:
        outcome = attempt.result.get("outcome")
        if outcome:
            self._batches += 1
            self._rows += outcome["rows_ok"] + outcome["rows_failed"]
            self._tokens += outcome["tokens_in"] + outcome["tokens_out"]

    def answer(self, request: Message) -> Message:
        self._configured(request)[0].answer(request["answers"])
        return {}

    def receive(self, source: BufferedIOBase, size: int) -> Message:
        """A file of the coordinator's, for a worker that cannot see it."""
        if self._directory is None:
            raise RefusedError(404, "this worker sees its coordinator's files")
        if size > (free := shutil.disk_usage(self._directory).free):
            raise RefusedError(413, f"the file has {size} bytes, and the disk has room for {free}")
        path = self._directory / uuid.uuid4().hex
        with path.open("wb") as file:
            while size:
                piece = source.read(min(size, PIECE_BYTES))
                if not piece:
                    raise RefusedError(400, "the file ended before its length")
                file.write(piece)
                size -= len(piece)
        return {"path": str(path)}

    def printed(self, request: Message) -> Message:
        """The whole lines of the log after so many bytes."""
        with self._log_path.open("rb") as log:
            log.seek(request["after"])
            page = log.read(PIECE_BYTES)
        end = page.rfind(b"\n") + 1
        if not end and len(page) == PIECE_BYTES:
            end = len(page)  # a line that no page can hold comes in pieces
        return {"text": page[:end].decode(errors="replace"), "end": request["after"] + end}

    def abort(self, request: Message) -> Message:
        self._configured(request)[0].abort((request["batch_idx"], request["attempt_id"]))
        return {}

    def shutdown(self, grace_s: float) -> None:
        self.draining = True
        if self._mapper:
            self._mapper.close(grace_s)
        if self._utility:
            self._utility.close()

    def health(self) -> Message:
        if self.draining:
            return {"state": "draining"}
        if self._mapper is not None and self._mapper.start_error:
            return {"state": "failed", "traceback": self._mapper.start_error}
        return {"state": "ready" if self._mapper is not None and self._mapper.ready else "starting"}

    def metrics(self) -> Message:
        elapsed_s = time.monotonic() - self._started
        waiting = sum(not attempt.settled.is_set() for attempt in self._attempts.values())
        return {
            "batches": self._batches,
            "rows": self._rows,
            "rows_per_s": self._rows / elapsed_s,
            "tokens_per_s": self._tokens / elapsed_s,
            "queue": waiting,
            "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "children_rss_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        }


def _next_events(events: Events, attempts_left: int) -> list[Attempt | list[Message]]:
    """Nothing within a heartbeat; or what has come, after a moment in which more ends of attempts may come."""
    got: list[Attempt | list[Message]] = []
    wait_s = HEARTBEAT_S
    gathered_at = time.monotonic() + HEARTBEAT_S + GATHER_S
    with contextlib.suppress(queue.Empty):
        while len(got) < attempts_left:
            got.append(events.get(timeout=wait_s))
            if len(got) == 1:
                gathered_at = time.monotonic() + GATHER_S
            if not isinstance(got[-1], Attempt):
                break
            wait_s = max(0.0, gathered_at - time.monotonic())
    return got


def _operation(utility: Utility, request: Message) -> Iterator[Message]:
    try:
        yield from utility.run(request)
    except (ChildError, OSError) as error:
        yield lost("ChildError", str(error), infra=True)


def with_heartbeats(messages: Iterator[Message]) -> Iterator[Message]:
    """Runs the iterator on a thread of its own, so that its silence can be filled."""
    ready = threading.Condition()
    arrived: list[Message] = []
    ended = False

    def run() -> None:
        nonlocal ended
        try:
            for message in messages:
                with ready:
                    arrived.append(message)
                    ready.notify()
        finally:
            with ready:
                ended = True
                ready.notify()

    threading.Thread(target=run, daemon=True).start()
    while True:
        with ready:
            ready.wait_for(lambda: arrived or ended, HEARTBEAT_S)
            batch, over = list(arrived), ended
            arrived.clear()
        yield from batch
        if over:
            return
        if not batch:
            yield {"alive": True}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one write for each line of an answer, not one for each piece of it
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle_expect_100(self) -> bool:
        """Who waits for a word before it sends a body sends it unasked after a while: the token is looked at first."""
        return True

    def do_GET(self) -> None:
        worker = self.server.worker
        self._answer({"/health": lambda _: worker.health(), "/metrics": lambda _: worker.metrics()})

    def do_POST(self) -> None:
        worker = self.server.worker
        self._answer(
            {
                "/receive": lambda size: self._reading(lambda: worker.receive(self.rfile, size)),
                "/configure": self._with_body(worker.configure),
                "/feed_batch": self._with_body(worker.feed),
                "/operate": self._with_body(worker.operate),
                "/answer": self._with_body(worker.answer),
                "/abort": self._with_body(worker.abort),
                "/printed": self._with_body(worker.printed),
                "/shutdown": self._with_body(lambda request: self.server.stop(float(request.get("grace_s", 0)))),
            }
        )

    def _with_body(self, call: Callable[[Message], Any]) -> Callable[[int], Any]:
        """The call with the JSON object of so many bytes that follows."""

        def read_and_call(size: int) -> Any:  # noqa: ANN401
            if size > MAX_BODY_BYTES:
                raise RefusedError(413, f"the body has {size} bytes; it may have {MAX_BODY_BYTES}")
            body = self._reading(lambda: self.rfile.read(size))
            if len(body) < size:
                raise RefusedError(400, "the body ended before its length")
            self._body_read = True
            return call(json.loads(body or b"{}"))

        return read_and_call

    def _reading(self, read: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Raises TimeoutError, which ends the connection, if a body does not go on."""
        self.connection.settimeout(READ_S)
        try:
            return read()
        finally:
            self.connection.settimeout(None)

    def _answer(self, calls: dict[str, Callable[[int], Any]]) -> None:
        self._body_read = False
        try:
            given = self.headers.get("authorization") or ""
            if not hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
                raise RefusedError(409, "the token is not that of this worker's coordinator")
            self.server.known(self.connection)
            if self.path not in calls:
                raise RefusedError(404, f"there is no {self.path}; there are {sorted(calls)}")
            size = self._body_size()
            answer = calls[self.path](size)
        except RefusedError as error:
            self._refuse(error.status, str(error))
            return
        except (KeyError, TypeError, ValueError) as error:
            self._refuse(400, f"the request is not as it must be: {error!r}")
            return
        if isinstance(answer, dict):
            self._whole(503 if answer.get("state") == "failed" else 200, answer)
        else:
            self._streamed(answer)

    def _body_size(self) -> int:
        """Raises RefusedError for a body whose length is not said, or cannot be."""
        if self.headers.get("transfer-encoding"):
            raise RefusedError(411, "a body must have a Content-Length; transfer-encoding is not read")
        lengths = self.headers.get_all("content-length") or ["0"]
        if len(lengths) > 1 or not (lengths[0].isascii() and lengths[0].isdigit()) or len(lengths[0]) > 18:
            raise RefusedError(400, f"Content-Length is {', '.join(lengths)!r}; it must be one whole number of bytes")
        size = int(lengths[0])
        if size and self.command == "GET":
            raise RefusedError(400, "a GET has no body")
        return size

    def _refuse(self, status: int, why: str) -> None:
        """A body that was not read would be taken for the next request: then the connection ends here."""
        self.close_connection = self.close_connection or not self._body_read
        self._whole(status, {"error": why})

    def _whole(self, status: int, answer: Message) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def _streamed(self, messages: Iterable[Message]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for message in messages:
            line = json.dumps(message).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            if not message.get("last"):  # the end is sent with it
                self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        """The worker's log is for what mappers print."""

    def address_string(self) -> str:
        return "coordinator"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int] | str, worker: Worker, token: str) -> None:
        self.worker = worker
        self.token = token
        self._lock = threading.Lock()
        self._strangers: OrderedDict[socket.socket, float] = OrderedDict()
        self._open = 0
        super().__init__(address, _Handler)  # pyright: ignore[reportArgumentType]  a Unix socket's is a path

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        request, address = self.socket.accept()
        if self.address_family != socket.AF_UNIX:
            request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request.settimeout(READ_S)
        self._admit(request)
        return request, address or ("coordinator", 0)

    def _admit(self, request: socket.socket) -> None:
        """A new connection has a while to bring a token, and takes the place of the oldest that has brought none."""
        with self._lock:
            self._strangers[request] = time.monotonic() + HEAD_S
            self._open += 1
            excess = max(len(self._strangers) - MAX_STRANGERS, 1 if self._open > MAX_CONNECTIONS else 0)
            dropped = list(self._strangers)[:excess]
        for each in dropped:
            _end_connection(each)

    def known(self, request: socket.socket) -> None:
        """It brought the token. From now on it may be silent between requests: a coordinator keeps its connections."""
        request.settimeout(None)
        with self._lock:
            self._strangers.pop(request, None)

    def service_actions(self) -> None:
        """Several times a second: ends the connections that took too long."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, until in self._strangers.items() if until < now]
        for request in late:
            _end_connection(request)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401
        with self._lock:
            self._strangers.pop(request, None)
            self._open -= 1
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A caller that went away is told nothing, and nobody else needs to know."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]

    def stop(self, grace_s: float) -> Message:
        """Answers at once; the process ends when the mapper has, or the grace is over."""
        threading.Thread(target=self._end, args=(grace_s,), daemon=True).start()
        return {}

    def _end(self, grace_s: float) -> None:
        self.worker.shutdown(grace_s)
        self.shutdown()


class _SocketServer(_Server):
    """The same on a Unix-domain socket."""

    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "worker", 0


def _end_connection(request: socket.socket) -> None:
    """The thread that reads it sees its end, and closes it."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


def main() -> None:
    given = json.loads(sys.stdin.readline())
    directory = given.get("directory")
    worker = Worker(Path(given["log_path"]), Path(directory) if directory else None)
    if given.get("socket"):
        server: _Server = _SocketServer(given["socket"], worker, given["token"])
        os.chmod(given["socket"], 0o600)
        address = given["socket"]
    else:
        host = given.get("host", "127.0.0.1")
        server = _Server((host, int(given.get("port", 0))), worker, given["token"])
        address = f"http://{host}:{server.server_port}"
    threading.Thread(target=_end_with_input, args=(server, given.get("scratch")), daemon=True).start()
    sys.stdout.write(json.dumps({"address": address}) + "\n")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever(poll_interval=0.1)
    worker.shutdown(0)


def _end_with_input(server: _Server, scratch: str | None) -> None:
    sys.stdin.read()
    server.worker.shutdown(0)
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
