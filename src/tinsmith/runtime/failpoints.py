"""Failpoints: named places in the code at which a test can kill a process.

A failpoint is one line, `hit(NAME)`, and an entry of POINTS. The setting `failpoints` is a list of `NAME[:N][@VICTIM]`:
when one process reaches the point for the Nth time, the victim gets SIGKILL, so that no handler tidies up. The victim
is `server`, `engine`, `both`, or by default the process that reached the point. A marker file in the data directory
makes it happen once, however often the processes are restarted. The armed failpoints are global to the process, because
a point may lie anywhere. Without the setting, a point costs one look-up in an empty dictionary.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tinsmith.errors import SettingsError

DIRECTORIES = ("checkpoints", "snapshots", "versions")

POINTS = {
    # The server.
    "migration.uncommitted": "the schema is changed, and the transaction is not committed",
    "submit.before": "a request is checked, and not stored",
    "submit.stored": "a request is stored; the engine is not woken, and the client not answered",
    "poll.answering": "a result is read, and not sent",
    # The engine.
    "engine.fetched": "new requests are read",
    "engine.claimed": "unowned runs are claimed, and nothing of them is read",
    "engine.planned": "a step is chosen",
    "engine.running": "requests are noted as running, and not begun",
    "engine.ran": "requests are carried out, and not settled",
    "settle.uncommitted": "everything of a settlement is written, and not committed",
    "settle.committed": "a settlement is committed, and no process is woken",
    "model.created": "a model is made in memory",
    "model.loading": "a checkpoint is about to be loaded",
    "model.loaded": "a checkpoint is loaded into a model",
    "model.replaying": "an operation is about to be replayed",
    "model.published": "a version is published in memory",
    "model.unloading": "a model is about to be unloaded",
    "model.unloaded": "a model is out of memory, and its unloading not settled",
    "sample.admitted": "a sample is in the sampler",
    "run.parked": "everything of an idle run is in files, and it is not handed over",
    "run.moved": "an idle run is another engine's, and still in memory here",
    # The coordinator of bulk jobs.
    "batch.claimed": "a batch is claimed, and no worker has it",
    "batch.reported": "a batch's parts are written, and not committed",
    "batch.committed": "a batch is committed",
    "batch.winding": "all batches are committed, and nothing is published",
    "batch.published": "the outputs are published, and the job has not succeeded",
    "batch.recorded": "the job has succeeded, and its parts are still there",
    "batch.cleaned": "the parts are deleted, and it is not noted",
    # The keeper of OpenAI's batches.
    "openai.validated": "a batch's file is read, and there is no bulk job",
    "openai.submitted": "there is a bulk job, and the batch does not say so",
    "openai.written": "the files of a batch are written, and no row names them",
    "openai.ended": "a batch has ended, and its directory is still there",
    # Directories of files, by their root.
    **{f"{root}.writing": "the files are there, and not durable" for root in DIRECTORIES},
    **{f"{root}.sealed": "the files are durable under their hidden name" for root in DIRECTORIES},
    **{f"{root}.placed": "the directory has its name, and no row names it" for root in DIRECTORIES},
    "snapshots.recorded": "a snapshot is recorded, and what it replaces is still there",
}

VICTIMS = ("server", "engine", "both")

_SPEC = re.compile(r"(?P<point>[a-z.]+)(:(?P<nth>[1-9][0-9]*))?(@(?P<victim>[a-z]+))?")


@dataclass(slots=True)
class _Crash:
    nth: int
    victims: frozenset[str]
    marker: Path
    reached: count[int] = field(default_factory=lambda: count(1))


@dataclass(frozen=True, slots=True)
class _Process:
    """The role of this process, and the pids of the others."""

    role: str
    others: Callable[[], Iterable[int]]


_armed: dict[str, _Crash] = {}
_process: _Process | None = None


def arm(setting: str, role: str, data_dir: Path, others: Callable[[], Iterable[int]]) -> None:
    """Arm the failpoints of `setting` in this process, whose role is `server` or `engine`; `others` returns the pids of
    the processes of the other role. Raises SettingsError if the setting is malformed or names an unknown point.
    """
    global _process
    _armed.clear()
    _process = _Process(role, others)
    for spec in filter(None, (part.strip() for part in setting.split(","))):
        found = _SPEC.fullmatch(spec)
        if found is None or found["point"] not in POINTS or found["victim"] not in (None, *VICTIMS):
            raise SettingsError(
                f"failpoints has {spec!r}; the form is NAME[:N][@server|engine|both], NAME being one of {list(POINTS)}"
            )
        victim = found["victim"] or role
        victims = frozenset(VICTIMS[:2] if victim == "both" else (victim,))
        marker = data_dir / f"crashed.{found['point']}"
        if not marker.exists():
            _armed[found["point"]] = _Crash(int(found["nth"] or 1), victims, marker)


def hit(point: str) -> None:
    """Mark that the process has reached `point`, and kill the armed victims."""
    if point in _armed:
        _die_at(point, _armed[point])


def _die_at(point: str, crash: _Crash) -> None:
    assert _process is not None
    if next(crash.reached) != crash.nth:
        return
    try:
        crash.marker.touch(exist_ok=False)
    except FileExistsError:  # another process was there first
        return
    if crash.victims - {_process.role}:
        for pid in _process.others():
            os.kill(pid, signal.SIGKILL)
    if _process.role in crash.victims:
        os.kill(os.getpid(), signal.SIGKILL)
