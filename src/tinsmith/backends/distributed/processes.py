"""The processes of the other ranks, the streams that carry rank 0's commands, and their encoding.

Rank 0 owns `RankProcesses`: a child process for each other rank of its machine, and a link to each of them and to the
ranks that joined from other machines (`rendezvous`). When a rank dies, a watching thread calls `on_lost` with the
reason; when rank 0 dies, the other ranks exit. Messages are length-prefixed bytes. Knows no torch.

Commands and results are MessagePack with extensions for arrays and the values of `tinsmith.types`. Decoding calls no
code from the message: it only constructs the classes listed here from their fields.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import msgpack
import numpy as np

from tinsmith import errors, types
from tinsmith.errors import RanksLostError
from tinsmith.plan.degrees import Degrees
from tinsmith.samplers import CacheUse

TUPLE, ARRAY, VALUE, ERROR, ELLIPSIS, INTEGER = range(1, 7)

VALUES = {
    **{name: member for name, member in inspect.getmembers(types, inspect.isclass) if dataclasses.is_dataclass(member)},
    "CacheUse": CacheUse,
    "Degrees": Degrees,
}

ERRORS = {
    name: member
    for name, member in inspect.getmembers(errors, inspect.isclass)
    if issubclass(member, errors.TinsmithError)
}


def encode(value: object) -> bytes:
    """Raises TypeError for values that cannot be encoded."""
    return cast(bytes, msgpack.packb(value, default=_encode_extension, strict_types=True))


def decode(data: bytes) -> object:
    return msgpack.unpackb(data, ext_hook=_decode_extension, strict_map_key=False)


def _encode_extension(value: object) -> object:
    if isinstance(value, tuple):
        return msgpack.ExtType(TUPLE, encode(list(value)))
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(ARRAY, encode([value.dtype.str, list(value.shape), value.tobytes()]))
    if VALUES.get(type(value).__name__) is type(value):
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]  # pyright: ignore[reportArgumentType]
        return msgpack.ExtType(VALUE, encode([type(value).__name__, fields]))
    if ERRORS.get(type(value).__name__) is type(value):
        return msgpack.ExtType(ERROR, encode([type(value).__name__, str(value)]))
    if isinstance(value, Mapping):
        return dict(value)
    if value is ...:
        return msgpack.ExtType(ELLIPSIS, b"")
    if isinstance(value, int):  # of more than 64 bits
        return msgpack.ExtType(INTEGER, str(value).encode())
    raise TypeError(f"a {type(value).__name__} cannot be sent between ranks")


def _decode_extension(code: int, data: bytes) -> object:
    if code == ELLIPSIS:
        return ...
    if code == INTEGER:
        return int(data)
    parts = decode(data)
    assert isinstance(parts, list)
    if code == TUPLE:
        return tuple(parts)
    if code == ARRAY:
        dtype, shape, content = parts
        return np.frombuffer(content, dtype).reshape(shape)
    if code == VALUE:
        name, fields = parts
        return VALUES[name](*fields)
    if code == ERROR:
        name, text = parts
        return ERRORS[name](text)
    raise ValueError(f"extension {code} is unknown")


LENGTH = struct.Struct("<Q")

EXIT_TIMEOUT_S = 10.0
"""How long a rank may take to exit."""


class Link:
    """One end of a message stream."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def peer(self) -> str:
        """The address of the other end; empty for a process of this machine."""
        return str(self._stream.getpeername()[0]) if self._stream.family != socket.AF_UNIX else ""

    @property
    def closed(self) -> bool:
        """Whether the other end has closed the stream."""
        poll = select.poll()
        poll.register(self._stream, select.POLLRDHUP)
        return bool(poll.poll(0))

    def send(self, message: bytes) -> None:
        self._stream.sendall(LENGTH.pack(len(message)))
        self._stream.sendall(message)

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Raises EOFError if the other end is closed, TimeoutError if nothing arrived."""
        self._stream.settimeout(timeout_s)
        try:
            (length,) = LENGTH.unpack(self._receive_exactly(LENGTH.size))
            return bytes(self._receive_exactly(length))
        finally:
            self._stream.settimeout(None)

    def _receive_exactly(self, length: int) -> bytearray:
        content = bytearray(length)
        view = memoryview(content)
        while view:
            num_bytes = self._stream.recv_into(view)
            if not num_bytes:
                raise EOFError("the other end is gone")
            view = view[num_bytes:]
        return content

    def close(self) -> None:
        self._stream.close()


class RankProcesses:
    """The processes of ranks 1 and up. Use `start`, and `close` at the end."""

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost
        self._links: dict[int, Link] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._hosts: dict[int, str] = {}  # of ranks on other machines
        self._closing = False
        self._wake_sender, self._wake_receiver = socket.socketpair()

    @classmethod
    def start(
        cls, specs: Sequence[Mapping[str, object]], on_lost: Callable[[str], None], remote_links: Mapping[int, Link]
    ) -> RankProcesses:
        """`specs` are of ranks 0 and up; ranks without a link in `remote_links` become child processes."""
        processes = cls(on_lost)
        for rank, spec in enumerate(specs[1:], 1):
            processes._add(rank, spec, remote_links.get(rank))
        threading.Thread(target=processes._watch, name="ranks", daemon=True).start()
        return processes

    @property
    def pids(self) -> Mapping[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def send(self, ranks: Sequence[int], message: bytes) -> None:
        for rank in ranks:
            try:
                self._links[rank].send(message)
            except OSError as error:
                raise RanksLostError(f"rank {rank} does not accept commands: {error}") from error

    def receive(self, rank: int, timeout_s: float | None) -> bytes:
        try:
            return self._links[rank].receive(timeout_s)
        except TimeoutError:
            raise RanksLostError(f"rank {rank} has not answered for {timeout_s:g} s (rank_timeout_s)") from None
        except (EOFError, OSError) as error:
            raise RanksLostError(self._exit_reason(rank)) from error

    def close(self) -> None:
        """End the other ranks."""
        self._closing = True
        self._wake_sender.send(b"x")
        for link in self._links.values():
            link.close()
        for process in self._processes.values():
            try:
                process.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _add(self, rank: int, spec: Mapping[str, object], link: Link | None) -> None:
        if link is None:
            parent_end, child_end = socket.socketpair()
            with child_end:
                child_fd = child_end.fileno()
                command = [sys.executable, "-m", "tinsmith.backends.distributed", str(child_fd)]
                self._processes[rank] = subprocess.Popen(command, pass_fds=[child_fd], stdin=subprocess.DEVNULL)
            link = Link(parent_end)
        else:
            self._hosts[rank] = link.peer
        self._links[rank] = link
        self.send([rank], encode(spec))

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wake_receiver, select.POLLIN)
        ranks = {link.fileno(): rank for rank, link in self._links.items()}
        for fd in ranks:
            poll.register(fd, select.POLLRDHUP)
        events = poll.poll()
        if not self._closing:
            self._on_lost(self._exit_reason(next(ranks[fd] for fd, _ in events if fd in ranks)))

    def _exit_reason(self, rank: int) -> str:
        if (process := self._processes.get(rank)) is None:
            return f"the connection to rank {rank} (on {self._hosts[rank]}) has ended"
        try:
            status = process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"rank {rank} (process {process.pid}) has closed its stream"
        end = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"rank {rank} (process {process.pid}) {end}"


def exit_when_closed(link: Link) -> None:
    """Exit this process as soon as the other end of the link is closed."""

    def watch() -> None:
        poll = select.poll()
        poll.register(link.fileno(), select.POLLRDHUP)
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
