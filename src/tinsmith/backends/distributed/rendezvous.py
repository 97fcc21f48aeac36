"""Ranks of other machines connect to rank 0 by TCP. Both sides first prove that they know the fleet's key.

The engine sends a greeting and a nonce; the rank answers with its own nonce and an HMAC-SHA256 over both; the engine
answers with another. Every message until then has a fixed length and is decoded by neither side, and a handshake has
HANDSHAKE_S in all. Afterwards both speak the messages of `processes`. The key authenticates and does not encrypt, and
the collectives of torch do neither: ranks need a private network. Knows no torch.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import structlog

from tinsmith import __version__
from tinsmith.backends.distributed.processes import Link, decode, encode
from tinsmith.errors import SettingsError
from tinsmith.losses import list_plugins

GREETING = b"tinsmith rank 01"
NONCE_BYTES = PROOF_BYTES = 32
DENIED = bytes(PROOF_BYTES)
"""Sent instead of a proof to a peer whose proof is wrong."""

HANDSHAKE_S = 10.0
MAX_HANDSHAKES = 64
"""Further connections are closed at once, so that strangers cannot use up threads."""

RETRY_S = 0.5
NOTICE_S = 30.0
"""Interval of the log lines of an engine that waits for ranks."""

KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""The loss of a machine is noticed within half a minute, or a minute while a message is sent."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Machines:
    """An engine's ranks are on `count` machines, equally many on each. Ranks of other machines join rank 0 at
    host:port; `announce` is called with the address when rank 0 accepts them, and with "" when it stops.
    """

    count: int
    host: str
    port: int
    key: bytes = field(repr=False)
    announce: Callable[[str], None] = lambda _address: None


@dataclass(frozen=True, slots=True)
class Introduction:
    """How a rank introduces itself: rank `index` of `num_ranks` on `machine`, a name for this start; `gpus` is the
    number of visible GPUs. `version` names the versions of Tinsmith, torch and plug-ins of losses.
    """

    machine: str
    host: str
    index: int
    num_ranks: int
    gpus: int
    version: str


def describe_version(torch_version: str) -> str:
    plugins = "".join(f" and {loss.name} of {loss.distribution}" for loss in list_plugins())
    return f"{__version__} with torch {torch_version}{plugins}"


class Listener:
    """Accepts ranks on rank 0's machine. Use `gather`, then `close`. Raises SettingsError if it cannot listen."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._key = key
        self._joined: queue.Queue[tuple[Introduction, Link]] = queue.Queue()
        self._slots = threading.BoundedSemaphore(MAX_HANDSHAKES)
        try:
            self._server = open_server_socket(host, port)
        except OSError as error:
            raise SettingsError(
                f"ranks of other machines cannot join at {host}:{port} ({error.strerror or error}); set "
                "TINSMITH_PEER_HOST to an address of this machine and TINSMITH_RANK_PORT to a free port, or 0"
            ) from None
        self.address = format_address(host, self._server.getsockname()[1])
        threading.Thread(target=self._accept, name="joining", daemon=True).start()

    def gather(self, machines: int, ranks: int, version: str, *, cuda: bool) -> list[list[Link]]:
        """Wait until `machines` other machines have `ranks` ranks each; returns their links by machine and index.
        Refuses ranks that cannot work with this engine, with the reason.
        """
        links_by_machine: dict[str, dict[int, Link]] = {}
        logged_at = 0.0
        while len(complete := [links for links in links_by_machine.values() if len(links) == ranks]) < machines:
            if time.monotonic() - logged_at > NOTICE_S:
                logged_at = time.monotonic()
                log.info(
                    "waiting for ranks of other machines", join=self.address, joined=len(complete), wanted=machines
                )
            with contextlib.suppress(queue.Empty):
                introduction, link = self._joined.get(timeout=RETRY_S)
                if problem := _find_problem(introduction, ranks, version, cuda=cuda):
                    log.warning("a rank was refused", host=introduction.host, reason=problem)
                    _refuse(link, problem)
                else:
                    links_by_machine.setdefault(introduction.machine, {})[introduction.index] = link
            for machine, links in list(links_by_machine.items()):
                if any(link.closed for link in links.values()):
                    log.warning("ranks left before the engine started", machine=machine)
                    _close_links(links_by_machine.pop(machine).values())
        for links in links_by_machine.values():
            if links not in complete[:machines]:
                _close_links(links.values())
        return [[links[index] for index in range(ranks)] for links in complete[:machines]]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._server.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._joined.get_nowait()[1].close()  # machines that the engine did not need

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._server.accept()
            except OSError:
                return
            if not self._slots.acquire(blocking=False):
                stream.close()
                continue
            threading.Thread(target=self._shake_hands, args=(stream,), name="handshake", daemon=True).start()

    def _shake_hands(self, stream: socket.socket) -> None:
        try:
            deadline = time.monotonic() + HANDSHAKE_S
            challenge(stream, self._key, deadline)
            link = open_link(stream)
            fields = decode(link.receive(max(0.1, deadline - time.monotonic())))
            if not isinstance(fields, list):
                raise ValueError("it did not introduce itself")
            self._joined.put((Introduction(*cast("list[Any]", fields)), link))
        except (OSError, EOFError, ValueError, TypeError) as error:
            log.warning("a connection was refused where ranks join", reason=str(error) or type(error).__name__)
            stream.close()
        finally:
            self._slots.release()


def challenge(stream: socket.socket, key: bytes, deadline: float) -> None:
    """Authenticate a rank, on the engine's side. Raises ConnectionError if the peer does not know the key, OSError if
    it is silent or has closed the connection.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    _send_all(stream, GREETING + nonce, deadline)
    response = _receive_exactly(stream, len(GREETING) + NONCE_BYTES + PROOF_BYTES, deadline)
    greeting, peer_nonce = response[: len(GREETING)], response[len(GREETING) : -PROOF_BYTES]
    expected = _proof(key, b"rank", nonce, peer_nonce)
    if greeting != GREETING or not hmac.compare_digest(response[-PROOF_BYTES:], expected):
        with contextlib.suppress(OSError):
            _send_all(stream, DENIED, deadline)
        raise ConnectionError("it does not know the signing secret of this engine")
    _send_all(stream, _proof(key, b"engine", peer_nonce, nonce), deadline)


def respond(stream: socket.socket, key: bytes, deadline: float) -> None:
    """Authenticate to the engine, on the rank's side. Raises SettingsError if the other end is no engine with this key,
    OSError if it has closed the connection.
    """
    greeting = _receive_exactly(stream, len(GREETING) + NONCE_BYTES, deadline)
    peer_nonce = greeting[len(GREETING) :]
    if not greeting.startswith(GREETING):
        raise SettingsError("the other end is no engine of this version")
    nonce = secrets.token_bytes(NONCE_BYTES)
    _send_all(stream, GREETING + nonce + _proof(key, b"rank", peer_nonce, nonce), deadline)
    proof = _receive_exactly(stream, PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(key, b"engine", nonce, peer_nonce)):
        raise SettingsError("the engine has another signing secret; set the same TINSMITH_SIGNING_SECRET for both")


def join(address: str, key: bytes, introduction: Introduction, patience_s: float) -> Link:
    """Connect to rank 0, trying again for `patience_s` while nothing accepts ranks there. Raises SettingsError if the
    engine refuses, TimeoutError if there is none.
    """
    host, port = parse_address(address)
    give_up = time.monotonic() + patience_s
    while True:
        try:
            stream = socket.create_connection((host, port), HANDSHAKE_S)
            try:
                respond(stream, key, time.monotonic() + HANDSHAKE_S)
            except BaseException:
                stream.close()
                raise
            link = open_link(stream)
            link.send(encode([getattr(introduction, name) for name in Introduction.__slots__]))
            return link
        except (OSError, EOFError) as error:
            if time.monotonic() > give_up:
                raise TimeoutError(f"no engine accepts ranks at {address}: {error}") from None
            time.sleep(RETRY_S)


def parse_address(address: str) -> tuple[str, int]:
    """Parse HOST:PORT. Raises SettingsError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError(f"--join is {address!r}; it must be HOST:PORT, where the engine's log says that it waits")
    return host.strip("[]"), int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_server_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=MAX_HANDSHAKES)


def open_link(stream: socket.socket) -> Link:
    """A link with TCP keep-alive, so that the loss of the other machine is noticed."""
    stream.settimeout(None)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_NODELAY": 1, **KEEP_ALIVE}.items():
        if (option := getattr(socket, name, None)) is not None:
            stream.setsockopt(socket.IPPROTO_TCP, option, value)
    return Link(stream)


def read_rank_spec(message: bytes) -> Mapping[str, object]:
    """Decode the engine's first message to a rank. Raises SettingsError if it is a refusal."""
    spec = cast("dict[str, object]", decode(message))
    if reason := spec.get("refused"):
        raise SettingsError(str(reason))
    return spec


def _find_problem(introduction: Introduction, ranks: int, version: str, *, cuda: bool) -> str:
    """Why the engine cannot use this rank; empty if it can."""
    if introduction.version != version:
        return (
            f"this rank runs Tinsmith {introduction.version}, but the engine runs {version}; install the same on both"
        )
    if introduction.num_ranks != ranks or not 0 <= introduction.index < ranks:
        return (
            f"--ranks is {introduction.num_ranks}, but this engine has {ranks} ranks on each machine; "
            f"pass --ranks {ranks}"
        )
    if cuda and introduction.gpus < ranks:
        return f"this machine shows {introduction.gpus} GPUs, but this engine has {ranks} ranks on each machine"
    return ""


def _refuse(link: Link, reason: str) -> None:
    with contextlib.suppress(OSError):
        link.send(encode({"refused": reason}))
    link.close()


def _close_links(links: Iterable[Link]) -> None:
    for link in links:
        link.close()


def _proof(key: bytes, role: bytes, prover_nonce: bytes, verifier_nonce: bytes) -> bytes:
    return hmac.digest(key, GREETING + role + prover_nonce + verifier_nonce, "sha256")


def _send_all(stream: socket.socket, content: bytes, deadline: float) -> None:
    stream.settimeout(max(0.001, deadline - time.monotonic()))
    stream.sendall(content)


def _receive_exactly(stream: socket.socket, length: int, deadline: float) -> bytes:
    """Raises TimeoutError at the deadline, even if single bytes keep arriving."""
    content = b""
    while len(content) < length:
        stream.settimeout(max(0.001, deadline - time.monotonic()))
        part = stream.recv(length - len(content))
        if not part:
            raise ConnectionError("the other end closed the connection in the handshake")
        content += part
    return content
