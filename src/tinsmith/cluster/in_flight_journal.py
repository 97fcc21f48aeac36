"""The in-flight journal: the requests that an engine is running, so that a request that kills engines can be found.

A note is one line of JSON in a file of the data directory, written before each step without fsync: it survives the
process, but not the machine. An engine that ends itself adds the reason. After a crash the supervisor, or the next
engine on the seat, derives the suspects from it and stores them in the engine's row, for the engine that runs the same
requests next (`engine.quarantine`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import orjson

BATCH_SHRINK_FACTOR = 8
"""After a crash, the requests that ran together run in batches smaller by this factor."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """The largest batch that a suspect may run in, and the number of engines that died while it ran alone. `bugs` of
    these ended themselves because of a bug; `reason` is that of the last one. `restoring` is the model that was being
    restored for it.
    """

    batch_size: int
    deaths: int
    bugs: int = 0
    reason: str = ""
    restoring: str = ""

    def merge(self, other: Suspect) -> Suspect:
        """Merge two histories of a request: the smaller batch, and the greater numbers of deaths and bugs."""
        return Suspect(
            min(self.batch_size, other.batch_size),
            max(self.deaths, other.deaths),
            max(self.bugs, other.bugs),
            self.reason or other.reason,
            self.restoring or other.restoring,
        )


@dataclass(frozen=True, slots=True)
class JournalNote:
    """The running requests, and the suspects of earlier crashes. `reason` is why the engine ended itself, if it did,
    and `is_bug` whether that was a bug; `restoring` is the model that is being restored for the running request.
    """

    running: list[str]
    suspects: dict[str, Suspect]
    reason: str = ""
    is_bug: bool = False
    restoring: str = ""

    def text(self) -> bytes:
        suspects = {request_id: astuple(suspect) for request_id, suspect in self.suspects.items()}
        note: dict[str, object] = {"running": self.running, "suspects": suspects}
        if self.restoring:
            note["restoring"] = self.restoring
        if self.reason:
            note |= {"reason": self.reason, "is_bug": self.is_bug}
        return orjson.dumps(note)

    @classmethod
    def parse(cls, text: bytes | str) -> JournalNote:
        """Parse a note. An unreadable note, which a crash may have truncated, is empty."""
        try:
            note = orjson.loads(text)
            suspects = {str(name): _suspect(fields) for name, fields in note["suspects"].items()}
            running = [str(name) for name in note["running"]]
            reason, restoring = str(note.get("reason", "")), str(note.get("restoring", ""))
            return cls(running, suspects, reason, note.get("is_bug") is True, restoring)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return cls([], {})


def _suspect(fields: Sequence[object]) -> Suspect:
    """Earlier versions wrote only the first two fields."""
    batch_size, deaths, *newer = fields
    bugs, reason, restoring = [*newer, *(0, "", "")[len(newer) :]][:3]
    return Suspect(int(str(batch_size)), int(str(deaths)), int(str(bugs)), str(reason), str(restoring))


def journal_path(data_dir: Path, engine_id: str) -> Path:
    """The path of an engine's in-flight note."""
    return data_dir / f"{engine_id}.running"


def read_suspects(path: Path) -> dict[str, Suspect]:
    """The suspects after the crash of the engine that left this note."""
    try:
        note = JournalNote.parse(path.read_bytes().partition(b"\n")[0])
    except OSError:
        return {}
    suspects = dict(note.suspects)
    batch_size = max(1, len(note.running) // BATCH_SHRINK_FACTOR)
    for request_id in note.running:
        before = suspects.get(request_id, Suspect(batch_size, 0))
        if len(note.running) > 1:
            suspects[request_id] = replace(before, batch_size=min(batch_size, before.batch_size))
        else:
            bugs = before.bugs + note.is_bug
            suspects[request_id] = Suspect(1, before.deaths + 1, bugs, note.reason, note.restoring)
    return suspects


def read_journal(path: Path) -> str | None:
    """The suspects of `read_suspects` as the text of a note; None without suspects."""
    suspects = read_suspects(path)
    return JournalNote([], suspects).text().decode() if suspects else None
