"""`tinsmith rank`: this machine's ranks of an engine on another machine.

Each rank is a process (`backends.distributed`) that joins rank 0 with a key derived from the signing secret, which it
reads from standard input. When one of them ends, all do: the engine has lost a rank, and its successor needs all of
them. They are then started again, until the command is stopped or the engine refuses them. On a Ray cluster a shell
starts them again (`serve_role`), since the next engine may have another address.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import structlog

from tinsmith import base_models
from tinsmith.auth.signing import RANKS, SECRET_FILE, Signer, load_secret
from tinsmith.errors import SettingsError
from tinsmith.settings import Settings
from tinsmith.settings.environment import engine_environment
from tinsmith.telemetry.logs import configure_logs

COMMAND = (sys.executable, "-m", "tinsmith.backends.distributed")
REFUSED = 2
"""Exit status of a rank that the engine refused."""

RAY_PATIENCE_S = 20.0
WATCH_S, EXIT_TIMEOUT_S, PAUSE_S = 0.1, 10.0, 0.5

log = structlog.get_logger()


def run_ranks(settings: Settings, join: str, ranks: int | None, stopping: threading.Event, *, once: bool) -> int:
    """Run this machine's ranks until `stopping`, or with `once` until they end. Returns an exit status: REFUSED if the
    engine refused them. Raises SettingsError.
    """
    configure_logs(settings.log_level, settings.log_format)
    spec: dict[str, object] = {
        "join": join,
        "key": rank_key(settings).hex(),
        "ranks": ranks or _gpus(),
        "base_models": {shape.name: shape.path for shape in base_models.resolve(settings.models, vision=False)},
        "patience_s": RAY_PATIENCE_S if once else math.inf,
    }
    environment = engine_environment(bucket=settings.has_bucket, peer=_own_address(join))
    while not stopping.is_set():
        with tempfile.TemporaryDirectory(prefix="tinsmith-rank-") as scratch:
            status = _run_once({**spec, "machine": secrets.token_hex(8), "scratch": scratch}, environment, stopping)
        if once or status == REFUSED:
            return status
        stopping.wait(PAUSE_S)
    return 0


def _run_once(spec: dict[str, object], environment: dict[str, str], stopping: threading.Event) -> int:
    """Run the ranks until one of them ends; returns its exit status."""
    ranks = spec["ranks"]
    assert isinstance(ranks, int)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(ranks):
            process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, env=environment, start_new_session=True)
            processes.append(process)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps({**spec, "index": index}).encode() + b"\n")
                process.stdin.flush()
        log.info("ranks started", join=spec["join"], ranks=ranks)
        while not stopping.wait(WATCH_S):
            if exited := [process for process in processes if process.poll() is not None]:
                log.info("a rank has ended", status=exited[0].returncode)
                return REFUSED if any(process.returncode == REFUSED for process in exited) else 1
        return 0
    finally:
        for process in processes:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """A rank exits when its standard input closes."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def rank_key(settings: Settings) -> bytes:
    """The key with which ranks join. Raises SettingsError if this machine has no signing secret."""
    directory: Path = settings.resolved_data_dir
    configured = settings.signing_secret.get_secret_value()
    if not configured and not (directory / SECRET_FILE).exists():
        raise SettingsError(
            f"ranks join their engine with its signing secret, and {directory} has none: set TINSMITH_SIGNING_SECRET "
            "here and for the engine"
        )
    return Signer(load_secret(configured, directory)).key(RANKS)


def _own_address(join: str) -> str:
    """This machine's address towards the engine; the engine's if there is no way to it yet."""
    host, _, port = join.rpartition(":")
    if not host or not port.isdecimal():
        raise SettingsError(f"--join is {join!r}; it must be HOST:PORT, where the engine's log says that it waits")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return host


def _gpus() -> int:
    """The number of GPUs that this machine shows, or 1 without any."""
    import torch

    return max(1, torch.cuda.device_count())
