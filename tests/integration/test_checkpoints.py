"""Checkpoints as rows and directories: names, overwriting, expiry, copies, sweeps and damage."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.databases import fresh_url
from tinsmith.db.database import now
from tinsmith.db.factory import open_database
from tinsmith.db.schema import CHECKPOINTS
from tinsmith.errors import CheckpointExistsError, CorruptFilesError, NotFoundError
from tinsmith.storage.directories import Directories
from tinsmith.store.checkpoints import Checkpoint, CheckpointRef, Checkpoints, NewCheckpoint, completion, failure
from tinsmith.store.models import Models, NewModel, copy_insertion
from tinsmith.types import LoraSpec

ALICE, BOB, CAROL = "alice", "bob", "carol"
REF = CheckpointRef("s:train:0", "weights", "one")


class Bench:
    def __init__(self, directory: Path) -> None:
        self.db = open_database(fresh_url(directory))
        self.files = Directories(directory / "checkpoints")
        self.checkpoints = Checkpoints(self.db, self.files)

    def save(self, ref: CheckpointRef = REF, *, overwrite: bool = False, content: bytes = b"weights", **fields) -> str:
        """Save as the engine does; return the directory."""
        new = NewCheckpoint(ref, fields.pop("tenant_id", ALICE), "base", LoraSpec(4), **fields)
        replaced = self.checkpoints.begin(new, overwrite=overwrite)
        directory, size_bytes = self.files.write(lambda path: (path / "adapter").write_bytes(content) and None)
        self.run(*completion(new, directory, size_bytes))
        self.files.discard(replaced)
        return directory

    def run(self, *statements) -> None:
        with self.db.write() as connection:
            for statement in statements:
                connection.execute(statement)

    def expire(self, ref: CheckpointRef = REF) -> None:
        self.run(CHECKPOINTS.update().where(CHECKPOINTS.c.name == ref.name).values(expires_at=now() - 1))

    def get(self, tenant_id: str = ALICE, ref: CheckpointRef = REF) -> Checkpoint:
        return self.checkpoints.get(tenant_id, ref)

    def on_disk(self) -> set[str]:
        return {path.name for path in self.files.path("").iterdir()}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    new_bench = Bench(tmp_path)
    yield new_bench
    new_bench.db.close()


# Reading.


def test_a_checkpoint_is_read_by_its_owner_by_everyone_if_public_and_by_whom_it_is_granted(bench: Bench) -> None:
    bench.save()
    assert bench.get().tenant_id == ALICE
    for tenant_id, granted_by in ((BOB, None), (BOB, CAROL)):
        with pytest.raises(NotFoundError, match="does not exist"):
            bench.checkpoints.get(tenant_id, REF, granted_by=granted_by)
    assert bench.checkpoints.get(BOB, REF, granted_by=ALICE) == bench.get()
    bench.checkpoints.set_public(ALICE, REF, True)
    assert bench.checkpoints.get(BOB, REF) == bench.get()


# Overwriting.


def test_a_name_is_taken_until_it_is_overwritten_on_purpose_or_expires(bench: Bench) -> None:
    first = bench.save(ttl_s=3600, user_metadata={"step": "1"})
    bench.checkpoints.set_public(ALICE, REF, True)
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        bench.save()
    second = bench.save(overwrite=True, content=b"other", user_metadata={"step": "2"})
    checkpoint = bench.get()
    assert (checkpoint.directory, checkpoint.user_metadata, checkpoint.expires_at, checkpoint.public) == (
        second,
        {"step": "2"},
        None,
        False,
    )
    assert bench.on_disk() == {second} != {first}
    bench.expire()
    third = bench.save()
    assert bench.on_disk() == {third}


def test_an_overwrite_that_fails_leaves_the_old_one(bench: Bench) -> None:
    first = bench.save(ttl_s=3600, user_metadata={"step": "1"})
    before = bench.get()
    new = NewCheckpoint(REF, ALICE, "base", LoraSpec(4))
    assert bench.checkpoints.begin(new, overwrite=True) == first
    assert bench.get() == before  # also if it died here
    bench.run(failure(REF, "the disk is full"))
    assert bench.get() == before
    bench.checkpoints.recover("base", "engine-0")
    assert bench.get() == before


def test_a_failed_save_leaves_its_name_free(bench: Bench) -> None:
    bench.checkpoints.begin(NewCheckpoint(REF, ALICE, "base", LoraSpec(4)), overwrite=False)
    with pytest.raises(NotFoundError):
        bench.get()
    bench.run(failure(REF, "the disk is full"))
    directory = bench.save()
    assert bench.get().directory == directory


# Deletion and expiry.


def test_expiry_hides_at_once_and_the_sweep_deletes(bench: Bench) -> None:
    bench.save()
    bench.expire()
    with pytest.raises(NotFoundError):
        bench.get()
    assert bench.checkpoints.page(ALICE, 10, 0) == ([], 0)
    for change in (
        lambda: bench.checkpoints.delete(ALICE, REF),
        lambda: bench.checkpoints.set_ttl(ALICE, REF, None),
        lambda: bench.checkpoints.set_public(ALICE, REF, True),
    ):
        with pytest.raises(NotFoundError):
            change()
    assert len(bench.on_disk()) == 1
    assert [checkpoint.ref for checkpoint in bench.checkpoints.sweep_expired()] == [REF]
    assert bench.on_disk() == set()


def test_a_sweep_spares_what_replaced_an_expired_checkpoint_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.save()
    bench.expire()
    write = bench.db.write
    saved: list[str] = []

    def overwrite_first():
        monkeypatch.setattr(bench.db, "write", write)
        saved.append(bench.save(overwrite=True))
        return write()

    monkeypatch.setattr(bench.db, "write", overwrite_first)
    assert bench.checkpoints.sweep_expired() == []
    assert bench.get().directory == saved[0]
    assert bench.on_disk() == set(saved)


def test_deleting_takes_the_files_of_the_row_that_is_deleted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.save()
    write = bench.db.write

    def overwrite_first():
        monkeypatch.setattr(bench.db, "write", write)
        bench.save(overwrite=True)
        return write()

    monkeypatch.setattr(bench.db, "write", overwrite_first)
    bench.checkpoints.delete(ALICE, REF)
    assert bench.on_disk() == set()


def test_only_old_directories_that_no_row_names_are_swept(bench: Bench) -> None:
    named_directory = bench.save()
    fresh, _ = bench.files.write(lambda path: (path / "a").write_bytes(b"a") and None)
    orphan, _ = bench.files.write(lambda path: (path / "a").write_bytes(b"a") and None)
    hidden = bench.files.path(".cut-short")
    hidden.mkdir()
    for directory in (bench.files.path(named_directory), bench.files.path(orphan), hidden):
        for path in (*directory.iterdir(), directory):
            os.utime(path, (time.time() - 7200,) * 2)
    assert sorted(bench.checkpoints.sweep_directories(3600)) == sorted([orphan, ".cut-short"])
    assert bench.on_disk() == {named_directory, fresh}


# Copies.


def copy_of(bench: Bench, source: Checkpoint, run_id: str = "c:train:0") -> bool:
    ref = CheckpointRef(run_id, source.kind, source.name)
    new = NewCheckpoint(ref, BOB, source.base_model, source.lora)
    run = NewModel(run_id, run_id.split(":")[0], BOB, source.base_model, source.lora)
    return bench.checkpoints.copy(source, new, copy_insertion(run, "project", f"copied from {source.ref.path}"))


def test_a_copy_has_files_and_a_run_of_its_own(bench: Bench) -> None:
    bench.save(ttl_s=3600)
    source = bench.get()
    assert copy_of(bench, source)
    copy = bench.get(BOB, replace(REF, training_run_id="c:train:0"))
    assert copy.directory != source.directory
    assert (copy.expires_at, copy.size_bytes) == (None, source.size_bytes)
    run = Models(bench.db).get(BOB, "c:train:0")
    assert (run.state, run.project_id, run.reason) == ("copied", "project", f"copied from {REF.path}")
    bench.checkpoints.delete(ALICE, REF)
    with bench.checkpoints.reading(copy) as directory:
        assert (directory / "adapter").read_bytes() == b"weights"


def test_the_second_of_two_copies_into_one_run_changes_nothing(bench: Bench) -> None:
    bench.save()
    source = bench.get()
    assert copy_of(bench, source)
    before = bench.on_disk()
    assert not copy_of(bench, source)
    assert bench.on_disk() == before


def test_a_source_that_goes_away_meanwhile_is_not_found(bench: Bench) -> None:
    bench.save()
    source = bench.get()
    bench.checkpoints.delete(ALICE, REF)
    with pytest.raises(NotFoundError, match="was deleted or overwritten meanwhile"):
        copy_of(bench, source)
    with pytest.raises(NotFoundError, match="was deleted or overwritten meanwhile"):
        with bench.checkpoints.reading(source):
            pass
    assert bench.on_disk() == set()
    assert Models(bench.db).find("c:train:0") is None


def test_damaged_files_are_named_with_their_checkpoint(bench: Bench) -> None:
    directory = bench.files.path(bench.save())
    with bench.checkpoints.reading(bench.get()) as path:
        assert path == directory
    (directory / "adapter").write_bytes(b"weighty")
    with pytest.raises(CorruptFilesError, match=r"tinker://s:train:0/weights/one' is damaged: adapter .*SHA-256"):
        with bench.checkpoints.reading(bench.get()):
            pass
    (directory / "adapter").write_bytes(b"w")
    with pytest.raises(CorruptFilesError, match="is damaged: adapter is missing or was cut short"):
        copy_of(bench, bench.get())
