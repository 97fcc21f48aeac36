"""Profiles on demand: their states, one at a time for each base model, over an engine's death."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from tinsmith.backends import Backend
from tinsmith.cluster.profiles import Profiles
from tinsmith.db.database import Database, now
from tinsmith.db.schema import ENGINES
from tinsmith.engine.profiling import OperatorProfiles
from tinsmith.errors import NotFoundError, UserError

BASE = "owner/base"


@dataclass
class Tracer:
    """The part of a backend that profiles use, and its profile."""

    refusal: str = ""
    failure: str = ""
    is_full: bool = False
    directories: list[Path] = field(default_factory=list)

    def start_profile(self, directory: Path) -> Tracer:
        if self.refusal:
            raise UserError(self.refusal)
        self.directories.append(directory)
        return self

    def stop(self) -> Sequence[Path]:
        if self.failure:
            raise UserError(self.failure)
        return [self.directories[-1] / "training-1-0.json.gz"]


@pytest.fixture
def profiles(db: Database) -> Profiles:
    return Profiles(db)


def engine(profiles: Profiles, tracer: Tracer, directory: Path, engine_id: str = "engine-0") -> OperatorProfiles:
    return OperatorProfiles(profiles, cast("Backend", tracer), BASE, engine_id, directory)


def add_engine(db: Database, engine_id: str, lease_s: float) -> None:
    row = {
        "engine_id": engine_id, "base_model": BASE, "kind": "engine", "pid": 1, "state": "ready", "started_at": now(),
        "lease_expires_at": now() + lease_s,
    }  # fmt: skip
    db.execute(ENGINES.insert(), [row])


@pytest.mark.parametrize("ending", ["full", "stopped", "late"])
def test_a_profile_ends_when_it_is_full_stopped_or_late(
    profiles: Profiles, tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer = Tracer()
    operator = engine(profiles, tracer, tmp_path)
    operator.poll()
    assert profiles.request(BASE, 20.0).state == "requested"
    for _ in range(2):
        operator.poll()
        assert profiles.find(BASE).state == "tracing" and profiles.find(BASE).host
    with pytest.raises(UserError, match="is not finished; stop it"):
        profiles.request(BASE, 1.0)
    if ending == "full":
        tracer.is_full = True
    elif ending == "stopped":
        assert profiles.stop(BASE).state == "stopping"
    else:
        later = time.monotonic() + 21.0
        monkeypatch.setattr(time, "monotonic", lambda: later)
    operator.poll()
    finished = profiles.find(BASE)
    (directory,) = tracer.directories
    assert finished.state == "finished" and finished.files == [str(directory / "training-1-0.json.gz")]
    assert directory.parent == tmp_path and directory.name.startswith("owner--base-")
    assert profiles.stop(BASE) == finished, "a finished profile stays as it is"
    assert profiles.request(BASE, 1.0).state == "requested" and [row.files for row in profiles.all()] == [[]]


def test_a_refusal_a_cancelled_request_and_a_dead_engine_say_why(profiles: Profiles, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no profile of"):
        profiles.find(BASE)
    profiles.request(BASE, 1.0)
    assert profiles.stop(BASE).reason == "it was stopped before its engine began"
    profiles.request(BASE, 1.0)
    engine(profiles, Tracer(refusal="several devices"), tmp_path).poll()
    assert (profiles.find(BASE).state, profiles.find(BASE).reason) == ("failed", "several devices")
    profiles.request(BASE, 60.0)
    engine(profiles, Tracer(), tmp_path).poll()
    engine(profiles, Tracer(), tmp_path).poll()  # of the next process
    assert (profiles.find(BASE).state, profiles.find(BASE).reason) == (
        "failed",
        "its engine ended; ask for another one",
    )


def test_one_of_several_engines_makes_a_profile(db: Database, profiles: Profiles, tmp_path: Path) -> None:
    tracers = [Tracer(), Tracer()]
    engines = [engine(profiles, tracer, tmp_path, f"engine-{index}") for index, tracer in enumerate(tracers)]
    add_engine(db, "engine-0", lease_s=60.0)
    assert profiles.base_models_with_engines() == [BASE]
    profiles.request(BASE, 60.0)
    for _ in range(3):
        for operator in engines:
            operator.poll()
    assert [len(tracer.directories) for tracer in tracers] == [1, 0]
    assert (profiles.find(BASE).state, profiles.find(BASE).engine_id) == ("tracing", "engine-0")
    tracers[0].is_full = True
    for operator in reversed(engines):
        operator.poll()
    assert profiles.find(BASE).state == "finished"
    profiles.request(BASE, 60.0)
    engines[0].poll()
    with db.write() as connection:
        connection.execute(ENGINES.update().values(lease_expires_at=0.0))  # it has died
    engines[1].poll()
    assert profiles.find(BASE).reason == "its engine ended; ask for another one"


def test_a_trace_that_cannot_be_made_fails_the_profile(profiles: Profiles, tmp_path: Path) -> None:
    tracer = Tracer(failure="a trace could not be made: OSError: No space left on device")
    operator = engine(profiles, tracer, tmp_path)
    profiles.request(BASE, 60.0)
    operator.poll()
    tracer.is_full = True
    operator.poll()
    assert (profiles.find(BASE).state, profiles.find(BASE).reason) == ("failed", tracer.failure)
    profiles.request(BASE, 60.0)
    operator.poll()
    assert profiles.find(BASE).state == "tracing"
