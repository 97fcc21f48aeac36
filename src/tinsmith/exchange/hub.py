"""Base models and checkpoints as repositories of a Hugging Face hub, which this server emulates.

A base model's repository has the name under which it is served; that of the checkpoint
`tinker://{session}:train:{n}/{kind}/{name}` is `{session}/{n}.{kind}.{name}`, since an id has one slash and no colon. A
repository has one revision, `main`, also known by its commit, a digest of its files. Paths named by clients are never
opened: files are looked up in a listing. Knows no HTTP and no tenants.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from pathlib import Path
from typing import IO

from tinsmith.errors import NotFoundError
from tinsmith.storage.directories import Directories
from tinsmith.store.checkpoints import KINDS, CheckpointRef
from tinsmith.types import ModelShape
from tinsmith.wire.adapter_files import TRAINING_FILES

REVISION = "main"
TEMPLATES = "additional_chat_templates"

WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")
SERVED_PATTERNS = (
    *("config.json", "generation_config.json", "*processor_config.json", "tokenizer*", "vocab*", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken", "chat_template*"),
    *(f"{TEMPLATES}/*.jinja", "LICENSE*"),
)
"""Files of a base model's directory that are served; others are not."""

FULL_HASH_BYTES = 64 << 20
"""Files up to this size are hashed completely; larger ones by samples."""

SAMPLES, SAMPLE_BYTES = 64, 64 << 10

_REPOSITORY = re.compile(rf"([^/:]+)/([0-9]{{1,10}})\.({'|'.join(KINDS)})\.([^/]+)")


class MissingError(NotFoundError):
    """The repository does not exist; `code` is the hub's name of the error."""

    code = "RepoNotFound"


class MissingRevisionError(MissingError):
    """The revision does not exist."""

    code = "RevisionNotFound"


class MissingEntryError(MissingError):
    """The file does not exist."""

    code = "EntryNotFound"

    def __init__(self, message: str, commit: str) -> None:
        super().__init__(message)
        self.commit = commit


@dataclass(frozen=True, slots=True)
class HubFile:
    """`etag` identifies the content; with `is_full_hash` it is the SHA-256. `path` is None for a file in a bucket."""

    path: Path | None
    size_bytes: int
    etag: str
    is_full_hash: bool
    open: Callable[[], IO[bytes]]


@dataclass(frozen=True, slots=True)
class Repository:
    repo_id: str
    files: Mapping[str, HubFile]
    modified_at: float
    library: str
    hidden: frozenset[str] = frozenset()
    """Files that exist and are not served."""

    @property
    def commit(self) -> str:
        """40 hexadecimal digits that change with any file."""
        lines = "".join(f"{name}\n{file.etag}\n" for name, file in sorted(self.files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()[:40]

    def check_revision(self, revision: str) -> None:
        if revision not in (REVISION, self.commit):
            raise MissingRevisionError(
                f"revision {revision[:80]!a} of {self.repo_id!r} does not exist; there is one, {REVISION!r}"
            )

    def file(self, name: str) -> HubFile:
        if name not in self.files:
            raise MissingEntryError(f"{self.repo_id!r} has no file {name[:200]!a}", self.commit)
        return self.files[name]


def checkpoint_of(repo_id: str) -> CheckpointRef | None:
    """The checkpoint named by a repository's id, if the id has that form."""
    match = _REPOSITORY.fullmatch(repo_id)
    return CheckpointRef(f"{match[1]}:train:{match[2]}", match[3], match[4]) if match else None


def base_repository(shape: ModelShape, *, weights: bool) -> Repository:
    """The repository of a base model, including its weights only with `weights`."""
    directory = Path(shape.path)
    paths = {path.name: path for path in directory.glob("*") if path.is_file()}
    paths |= {f"{TEMPLATES}/{path.name}": path for path in (directory / TEMPLATES).glob("*") if path.is_file()}
    heavy = {name for name in paths if any(fnmatchcase(name, pattern) for pattern in WEIGHT_PATTERNS)}
    light = {name for name in paths if any(fnmatchcase(name, pattern) for pattern in SERVED_PATTERNS)} - heavy
    hidden = frozenset() if weights else frozenset(heavy)
    files = {name: _hub_file(paths[name]) for name in sorted((light | heavy) - hidden)}
    modified_at = max((paths[name].stat().st_mtime for name in files), default=0.0)
    return Repository(shape.name, files, modified_at, "transformers", hidden)


def checkpoint_repository(repo_id: str, directories: Directories, directory: str, created_at: float) -> Repository:
    """The repository of a checkpoint without its optimizer state and gradient. Raises CorruptFilesError."""
    directories.check_sizes(directory)
    files = {
        name: HubFile(
            directories.file_path(directory, name), size_bytes, sha256, True, partial(directories.open, directory, name)
        )
        for name, (size_bytes, sha256) in directories.digests(directory).items()
        if name not in TRAINING_FILES
    }
    return Repository(repo_id, files, created_at, "peft")


def _hub_file(path: Path) -> HubFile:
    stat = path.stat()
    etag = _digest(path, stat.st_size, stat.st_mtime_ns)
    return HubFile(path, stat.st_size, etag, stat.st_size <= FULL_HASH_BYTES, lambda: path.open("rb"))


@lru_cache(maxsize=4096)
def _digest(path: Path, size_bytes: int, _mtime_ns: int) -> str:
    """A digest of the content, the same on every server and after every restart, cached while the file is unchanged.
    Large files are sampled, since clients wait only ten seconds for the response.
    """
    with path.open("rb") as file:
        if size_bytes <= FULL_HASH_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(str(size_bytes).encode())
        for sample in range(SAMPLES):
            file.seek((size_bytes - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
        return digest.hexdigest()[:32]
