"""Directories are complete or absent; a claim ends with its process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tinsmith.errors import CorruptFilesError
from tinsmith.storage.directories import Directories, claim


def fill(directory: Path) -> None:
    (directory / "a").write_bytes(b"one")
    (directory / "b").write_bytes(b"two and three")


def test_a_written_directory_holds_its_files_and_their_digests(tmp_path: Path) -> None:
    directories = Directories(tmp_path / "root")
    name, size_bytes = directories.write(fill)
    path = directories.path(name)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["files"]["b"] == {"bytes": 13, "sha256": hashlib.sha256(b"two and three").hexdigest()}
    assert sorted(manifest["files"]) == ["a", "b"]
    assert size_bytes == sum(file.stat().st_size for file in path.iterdir())


def test_nothing_is_left_of_a_directory_whose_writing_failed(tmp_path: Path) -> None:
    directories = Directories(tmp_path)

    def fail(directory: Path) -> None:
        fill(directory)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        directories.write(fail)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_not_there_under_its_name_while_it_is_written(tmp_path: Path) -> None:
    directories = Directories(tmp_path)
    during: list[str] = []

    def look(directory: Path) -> None:
        fill(directory)
        during.extend(path.name for path in tmp_path.iterdir())

    name, _ = directories.write(look)
    assert during == [f".{name}"]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_discarding_removes_one_directory_and_forgives_a_missing_one(tmp_path: Path) -> None:
    directories = Directories(tmp_path)
    (discarded, _), (remaining, _) = directories.write(fill), directories.write(fill)
    directories.discard(discarded)
    directories.discard(discarded)
    directories.discard(None)
    assert [path.name for path in tmp_path.iterdir()] == [remaining]


HOLD = """
import sys, pathlib
from tinsmith.storage.directories import claim
held = claim(pathlib.Path(sys.argv[1]), wait=False)
sys.stdout.write("no" if held is None else "held")
sys.stdout.flush()
sys.stdin.read()
"""


def test_a_claim_excludes_other_processes_until_its_own_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.lock"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.read(4) == b"held"
        assert claim(path, wait=False) is None
        holder.kill()
        holder.wait()
        lock = claim(path, wait=True)  # the kernel released it
        assert lock is not None
        late = subprocess.run(command, input=b"", stdout=subprocess.PIPE, check=True)
        assert late.stdout == b"no"
        lock.close()
    with claim(path, wait=False) as again:  # type: ignore[union-attr]
        assert again is not None


# Copies.


def test_a_copy_outlives_its_source_and_the_source_its_copy(tmp_path: Path) -> None:
    directories = Directories(tmp_path)
    source, size_bytes = directories.write(fill)
    first, first_bytes = directories.copy(source)
    second, _ = directories.copy(source)
    assert first_bytes == size_bytes
    directories.discard(first)
    directories.check(source)
    directories.discard(source)
    directories.check(second)
    assert (directories.path(second) / "b").read_bytes() == b"two and three"


def test_a_copy_is_made_where_files_cannot_be_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directories = Directories(tmp_path)
    source, _ = directories.write(fill)

    def link(_source: Path, _target: Path) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", link)
    copy, _ = directories.copy(source)
    directories.check(copy)
    (directories.path(source) / "a").write_bytes(b"two")
    directories.check(copy)


def test_a_source_that_goes_away_while_it_is_copied_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = Directories(tmp_path)
    source, _ = directories.write(fill)
    link = os.link

    def discard_first(source_path: Path, target_path: Path) -> None:
        directories.discard(source)
        link(source_path, target_path)

    monkeypatch.setattr("os.link", discard_first)
    with pytest.raises(CorruptFilesError, match=r"^a disappeared"):
        directories.copy(source)
    assert list(tmp_path.iterdir()) == []


def test_a_copy_of_damaged_files_is_still_known_to_be_damaged(tmp_path: Path) -> None:
    directories = Directories(tmp_path)
    source, _ = directories.write(fill)
    (directories.path(source) / "a").write_bytes(b"eno")
    copy, _ = directories.copy(source)
    with pytest.raises(CorruptFilesError, match="a does not hold the bytes"):
        directories.check(copy)


# Damage.


@pytest.mark.parametrize(
    ("damage", "message", "by_size"),
    [
        (lambda path: (path / "b").unlink(), "b is missing", True),
        (lambda path: (path / "b").write_bytes(b"two"), "b is missing or was cut short: 13 bytes", True),
        (lambda path: (path / "b").write_bytes(b"two and thrEe"), "SHA-256 differs", False),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json cannot be read", True),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json cannot be read", True),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json cannot be read", True),
    ],
)
def test_damage_is_found(tmp_path: Path, damage: Callable[[Path], object], message: str, by_size: bool) -> None:
    directories = Directories(tmp_path)
    name, _ = directories.write(fill)
    directories.check(name)
    damage(directories.path(name))
    with pytest.raises(CorruptFilesError, match=message):
        directories.check(name)
    if by_size:
        with pytest.raises(CorruptFilesError, match=message):
            directories.check_sizes(name)
    else:
        directories.check_sizes(name)


# Sweeping.


def test_only_directories_without_recent_writes_are_old(tmp_path: Path) -> None:
    directories = Directories(tmp_path / "root")
    assert directories.old(0) == []
    old, _ = directories.write(fill)
    unfinished = directories.path(".unfinished")
    unfinished.mkdir()
    being_written = directories.path(".written")
    being_written.mkdir()
    (being_written / "large").write_bytes(b"...")
    copy, _ = directories.copy(old)  # its files are old, it is not
    for path in (directories.path(old), *directories.path(old).iterdir(), unfinished, being_written):
        os.utime(path, (0, 0))
    assert sorted(directories.old(60)) == sorted([old, unfinished.name])
    assert directories.discard_all(directories.old(60), but={old}) == [unfinished.name]
    directories.check(old)
    directories.check(copy)
