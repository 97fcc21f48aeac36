"""Notes of what an engine is working on, and whom they make suspects when it dies (`engine.suspects` says what for).

A note is one line of JSON in a file of the engine's data directory, which outlives the process, though not the machine.
What it says after a death goes on to whoever works on the same requests next: into the engine's row, by its supervisor
or by the next engine on its seat. Knows no SQL and no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson

SMALLER = 8
"""What ran together when an engine died runs in an eighth of the company."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """How many requests may share its work, and how many engines ended while it was alone."""

    company: int
    deaths: int


@dataclass(frozen=True, slots=True)
class Note:
    """What is being worked on, and who is suspected since earlier deaths."""

    running: list[str]
    suspects: dict[str, Suspect]

    def text(self) -> bytes:
        suspects = {request_id: (one.company, one.deaths) for request_id, one in self.suspects.items()}
        return orjson.dumps({"running": self.running, "suspects": suspects})

    @classmethod
    def parse(cls, text: bytes | str) -> Note:
        """A note, or an empty one if it cannot be read: a death may have cut it short."""
        try:
            note = orjson.loads(text)
            suspects = {str(name): Suspect(int(one[0]), int(one[1])) for name, one in note["suspects"].items()}
            return cls([str(name) for name in note["running"]], suspects)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return cls([], {})


def note_path(data_dir: Path, engine_id: str) -> Path:
    """Where the engine on a seat notes what it is working on."""
    return data_dir / f"{engine_id}.running"


def after_death(path: Path) -> dict[str, Suspect]:
    """Whom the death of the engine that left this note makes suspects."""
    try:
        note = Note.parse(path.read_bytes().partition(b"\n")[0])
    except OSError:
        return {}
    suspects = dict(note.suspects)
    company = max(1, len(note.running) // SMALLER)
    for request_id in note.running:
        before = suspects.get(request_id, Suspect(company, 0))
        deaths = before.deaths + (len(note.running) == 1)
        suspects[request_id] = Suspect(min(company, before.company), deaths)
    return suspects


def left_behind(path: Path) -> str | None:
    """The same as a note for others; None if nobody is suspected."""
    suspects = after_death(path)
    return Note([], suspects).text().decode() if suspects else None
