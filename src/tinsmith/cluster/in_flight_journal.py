"""The in-flight journal: the requests that an engine is running, so that a request that kills engines can be found.

A note is one line of JSON in a file of the data directory, written before each step without fsync: it survives the
process, but not the machine. After a crash the supervisor, or the next engine on the seat, derives the suspects from it
and stores them in the engine's row, for the engine that runs the same requests next (`engine.quarantine`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson

SMALLER = 8
"""After a crash, the requests that ran together run in batches smaller by this factor."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """The largest batch that a suspect may run in, and the number of engines that died while it ran alone."""

    batch_size: int
    deaths: int


@dataclass(frozen=True, slots=True)
class Note:
    """The running requests, and the suspects of earlier crashes."""

    running: list[str]
    suspects: dict[str, Suspect]

    def text(self) -> bytes:
        suspects = {request_id: (suspect.batch_size, suspect.deaths) for request_id, suspect in self.suspects.items()}
        return orjson.dumps({"running": self.running, "suspects": suspects})

    @classmethod
    def parse(cls, text: bytes | str) -> Note:
        """Parse a note. An unreadable note, which a crash may have truncated, is empty."""
        try:
            note = orjson.loads(text)
            suspects = {str(name): Suspect(int(entry[0]), int(entry[1])) for name, entry in note["suspects"].items()}
            return cls([str(name) for name in note["running"]], suspects)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return cls([], {})


def journal_path(data_dir: Path, engine_id: str) -> Path:
    """The path of an engine's in-flight note."""
    return data_dir / f"{engine_id}.running"


def after_death(path: Path) -> dict[str, Suspect]:
    """The suspects after the crash of the engine that left this note."""
    try:
        note = Note.parse(path.read_bytes().partition(b"\n")[0])
    except OSError:
        return {}
    suspects = dict(note.suspects)
    batch_size = max(1, len(note.running) // SMALLER)
    for request_id in note.running:
        before = suspects.get(request_id, Suspect(batch_size, 0))
        deaths = before.deaths + (len(note.running) == 1)
        suspects[request_id] = Suspect(min(batch_size, before.batch_size), deaths)
    return suspects


def read_journal(path: Path) -> str | None:
    """The suspects of `after_death` as the text of a note; None without suspects."""
    suspects = after_death(path)
    return Note([], suspects).text().decode() if suspects else None
