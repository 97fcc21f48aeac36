"""The dashboard: a page, its style and its modules, as they are sent to browsers. There is no build step.

Knows no request: `files` are all that there is to send, and nothing that a client names becomes a path.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import PurePath

MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    media_type: str
    etag: str


@cache
def files() -> dict[str, File]:
    """Everything by name."""
    found: dict[str, File] = {}
    for one in resources.files("tinsmith.api.dashboard").joinpath("static").iterdir():
        media_type = MEDIA_TYPES.get(PurePath(one.name).suffix)
        if media_type:
            content = one.read_bytes()
            found[one.name] = File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found
