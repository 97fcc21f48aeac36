"""Directories are complete or absent; a claim ends with its process."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith.storage import Directories, claim


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
    (gone, _), (kept, _) = directories.write(fill), directories.write(fill)
    directories.discard(gone)
    directories.discard(gone)
    directories.discard(None)
    assert [path.name for path in tmp_path.iterdir()] == [kept]


HOLD = """
import sys, pathlib
from tinsmith.storage import claim
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
        mine = claim(path, wait=True)  # the kernel let go of it
        assert mine is not None
        late = subprocess.run(command, input=b"", stdout=subprocess.PIPE, check=True)
        assert late.stdout == b"no"
        mine.close()
    with claim(path, wait=False) as again:  # type: ignore[union-attr]
        assert again is not None
