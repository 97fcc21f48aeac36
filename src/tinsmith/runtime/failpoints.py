"""Failpoints: named places in the code at which a test can kill a process, or raise an exception.

A failpoint is one line, `hit(NAME)`, and an entry of POINTS. The setting `failpoints` is a list of `NAME[:N][@VICTIM]`:
when a process reaches the point for the Nth time, the victim gets SIGKILL, so that no handler cleans up. The victim is
`server`, `engine`, `both`, or by default the process that reached the point. A marker file in the data directory
ensures that it happens once, also after restarts. Armed failpoints are global to the process. Without the setting, a
point costs one lookup in an empty dictionary.

`NAME[:N]!ERROR` raises one of ERRORS instead. `NAME!ERROR/SUFFIX` raises it whenever the point is reached for a request
whose id ends with SUFFIX (or with another one, after a `|`), also after restarts: a request that cannot be computed.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tinsmith.errors import SettingsError

DIRECTORIES = ("checkpoints", "snapshots", "versions")

POINTS = {
    # The server.
    "migration.uncommitted": "the schema is changed, but not committed",
    "submit.before": "a request is checked, but not stored",
    "submit.stored": "a request is stored, but the engine is not woken and the client not answered",
    "poll.answering": "a result is read, but not sent",
    # The engine.
    "engine.fetched": "new requests are read",
    "engine.claimed": "unowned runs are claimed, but their requests are not read",
    "engine.planned": "a step is chosen",
    "engine.running": "requests are recorded as running, but not begun",
    "engine.computing": "requests are about to run, in the code whose exceptions may be their answers",
    "engine.ran": "requests have run, but are not settled",
    "settle.uncommitted": "a settlement is written, but not committed",
    "settle.committed": "a settlement is committed, but no process is woken",
    "model.created": "a model is created in memory",
    "model.loading": "a checkpoint is about to be loaded",
    "model.loaded": "a checkpoint is loaded into a model",
    "model.replaying": "an operation is about to be replayed",
    "model.published": "a version is published in memory",
    "model.unloading": "a model is about to be unloaded",
    "model.unloaded": "a model is removed from memory, but its unloading is not settled",
    "sample.admitted": "a sample is in the sampler",
    "run.parked": "an idle run is saved in files, but not handed over",
    "run.moved": "an idle run belongs to another engine, but is still in memory here",
    # The coordinator of bulk jobs.
    "batch.claimed": "a batch is claimed, but no worker has it",
    "batch.reported": "a batch's parts are written, but not committed",
    "batch.committed": "a batch is committed",
    "batch.winding": "all batches are committed, but no output is published",
    "batch.fenced": "the fencing token for an output is issued, but the output is not published",
    "batch.published": "the outputs are published, but the job has not succeeded",
    "batch.recorded": "the job has succeeded, but its parts are not deleted",
    "batch.cleaned": "the parts are deleted, but the deletion is not recorded",
    # The reconciler of OpenAI's batches.
    "openai.validated": "a batch's file is read, but no bulk job exists",
    "openai.submitted": "a bulk job exists, but the batch's row does not name it",
    "openai.written": "the files of a batch are written, but no row names them",
    "openai.ended": "a batch has ended, but its directory is not deleted",
    # Directories of files, by their root.
    **{f"{root}.writing": "the files are written, but not durable" for root in DIRECTORIES},
    **{f"{root}.sealed": "the files are durable under their hidden name" for root in DIRECTORIES},
    **{f"{root}.placed": "the directory has its final name, but no row names it" for root in DIRECTORIES},
    "snapshots.recorded": "a snapshot is recorded, but its predecessor is not deleted",
}

VICTIMS = ("server", "engine", "both")

ERRORS: dict[str, Callable[[], Exception]] = {
    "bug": lambda: AssertionError("a failpoint"),
    "device": lambda: RuntimeError("CUDA error: an illegal memory access was encountered (a failpoint)"),
    "disk": lambda: OSError(errno.ENOSPC, "no space left on device (a failpoint)"),
    "memory": lambda: MemoryError("no memory (a failpoint)"),
}

_SPEC = re.compile(
    r"(?P<point>[a-z.]+)(:(?P<nth>[1-9][0-9]*))?((@(?P<victim>[a-z]+))|(!(?P<error>[a-z]+)(/(?P<suffixes>[\w:|-]+))?))?"
)


@dataclass(slots=True)
class _Crash:
    nth: int
    victims: frozenset[str]
    marker: Path
    error: str = ""
    suffixes: tuple[str, ...] = ()
    reached: count[int] = field(default_factory=lambda: count(1))


@dataclass(frozen=True, slots=True)
class _Process:
    """The role of this process, and the pids of the other processes."""

    role: str
    other_pids: Callable[[], Iterable[int]]


_armed: dict[str, _Crash] = {}
_process: _Process | None = None


def arm(setting: str, role: str, data_dir: Path, other_pids: Callable[[], Iterable[int]]) -> None:
    """Arm the failpoints of `setting` in this process, whose role is `server` or `engine`; `other_pids` returns the
    pids of the processes of the other role. Raises SettingsError if the setting is malformed or names an unknown point.
    """
    global _process
    _armed.clear()
    _process = _Process(role, other_pids)
    for spec in filter(None, (part.strip() for part in setting.split(","))):
        match = _SPEC.fullmatch(spec)
        if match is None or not _names_exist(match):
            raise SettingsError(
                f"failpoints has {spec!r}; the form is NAME[:N][@server|engine|both], NAME[:N]!ERROR or "
                f"NAME!ERROR/SUFFIX, ERROR being one of {list(ERRORS)} and NAME one of {list(POINTS)}"
            )
        victim = match["victim"] or role
        victims = frozenset(VICTIMS[:2] if victim == "both" else (victim,))
        marker = data_dir / f"crashed.{match['point']}"
        if not marker.exists():
            suffixes = tuple(match["suffixes"].split("|")) if match["suffixes"] else ()
            _armed[match["point"]] = _Crash(int(match["nth"] or 1), victims, marker, match["error"] or "", suffixes)


def _names_exist(match: re.Match[str]) -> bool:
    victims, errors = (None, *VICTIMS), (None, *ERRORS)
    is_once = match["nth"] is None or match["suffixes"] is None
    return match["point"] in POINTS and match["victim"] in victims and match["error"] in errors and is_once


def hit(point: str, request_ids: Sequence[str] = ()) -> None:
    """Kill the victims, or raise an exception, if `point` is armed and its count or one of its requests is reached."""
    if point in _armed:
        _fail(_armed[point], request_ids)


def _fail(crash: _Crash, request_ids: Sequence[str]) -> None:
    assert _process is not None
    if crash.suffixes:
        if any(request_id.endswith(crash.suffixes) for request_id in request_ids):
            raise ERRORS[crash.error]()
        return
    if next(crash.reached) != crash.nth:
        return
    try:
        crash.marker.touch(exist_ok=False)
    except FileExistsError:  # another process was first
        return
    if crash.error:
        raise ERRORS[crash.error]()
    if crash.victims - {_process.role}:
        for pid in _process.other_pids():
            os.kill(pid, signal.SIGKILL)
    if _process.role in crash.victims:
        os.kill(os.getpid(), signal.SIGKILL)
