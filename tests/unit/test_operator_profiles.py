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
from tinsmith.db.database import Database
from tinsmith.engine.profiling import OperatorProfiles
from tinsmith.errors import NotFoundError, UserError

BASE = "owner/base"


@dataclass
class Tracer:
    """The part of a backend that profiles use, and its profile."""

    refusal: str = ""
    is_full: bool = False
    directories: list[Path] = field(default_factory=list)

    def start_profile(self, directory: Path) -> Tracer:
        if self.refusal:
            raise UserError(self.refusal)
        self.directories.append(directory)
        return self

    def stop(self) -> Sequence[Path]:
        return [self.directories[-1] / "training-1-0.json.gz"]


@pytest.fixture
def profiles(db: Database) -> Profiles:
    return Profiles(db)


def engine(profiles: Profiles, tracer: Tracer, directory: Path) -> OperatorProfiles:
    return OperatorProfiles(profiles, cast("Backend", tracer), BASE, directory)


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
