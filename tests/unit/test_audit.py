"""Audit entries exist exactly if their change does: both are one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.databases import fresh_url
from support.faulty_database import FaultyDatabase
from tinsmith.auth.keys import Keys
from tinsmith.db.database import now
from tinsmith.db.statements import execute
from tinsmith.storage.directories import Directories
from tinsmith.store.audit import Audit
from tinsmith.store.checkpoints import CheckpointRef, Checkpoints, NewCheckpoint, completion
from tinsmith.store.sessions import NewSession, Sessions
from tinsmith.types import LoraSpec

TENANT = "alice"
REF = CheckpointRef("m:train:0", "weights", "one")
OLD = CheckpointRef("m:train:0", "weights", "old")


class FaultyStores:
    """Stores on one database with injected faults, with one session and two checkpoints."""

    def __init__(self, db: FaultyDatabase, directory: Path) -> None:
        self.db = db
        self.audit = Audit(db)
        self.sessions = Sessions(db)
        self.checkpoints = Checkpoints(db, Directories(directory))
        self.keys = Keys(db)
        self.key_id = self.keys.create(TENANT)[0].key_id
        self.session_id = self.sessions.open(TENANT, NewSession()).session_id
        with db.write() as connection:
            for ref, ttl_s in ((REF, None), (OLD, -1.0)):
                new = NewCheckpoint(ref, TENANT, "base", LoraSpec(4), ttl_s=ttl_s)
                for statement in completion(new, ref.name, 7):
                    execute(connection, statement)

    def events(self) -> list[str]:
        return [entry.event for entry in self.audit.entries(TENANT, "all", 0.0, now() + 60)]


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[FaultyStores]:
    db = FaultyDatabase(fresh_url(tmp_path))
    yield FaultyStores(db, tmp_path / "checkpoints")
    db.close()


CHANGES: dict[str, Callable[[FaultyStores], object]] = {
    "key_created": lambda stores: stores.keys.create(TENANT),
    "key_revoked": lambda stores: stores.keys.revoke(stores.key_id),
    "session_opened": lambda stores: stores.sessions.open(TENANT, NewSession()),
    "session_finished": lambda stores: stores.sessions.finish(TENANT, stores.session_id, "success"),
    "session_expired": lambda stores: stores.sessions.close(stores.session_id, "no heartbeat"),
    "project_session_assigned": lambda stores: stores.sessions.set_project(TENANT, stores.session_id, "p"),
    "checkpoint_deleted": lambda stores: stores.checkpoints.delete(TENANT, REF),
    "checkpoint_published": lambda stores: stores.checkpoints.set_public(TENANT, REF, True),
    "checkpoint_ttl_set": lambda stores: stores.checkpoints.set_ttl(TENANT, REF, 60.0),
    "checkpoint_expired": lambda stores: stores.checkpoints.sweep_expired(),
}


@pytest.mark.parametrize("event", CHANGES)
def test_a_change_and_its_entry_are_committed_together_or_not_at_all(stores: FaultyStores, event: str) -> None:
    before = stores.events()
    stores.db.fail_once("uncommitted", error=RuntimeError("the process ends before the commit"))
    with pytest.raises(RuntimeError):
        CHANGES[event](stores)
    assert stores.events() == before
    stores.db.fail_once("begin", nth=1, error=RuntimeError("the process ends after the first commit"))
    CHANGES[event](stores)
    assert sorted(stores.events()) == sorted([*before, event]), "the change needed one transaction only"


def test_a_repeated_change_leaves_no_second_entry(stores: FaultyStores) -> None:
    before = stores.events()
    for _ in range(2):
        stores.sessions.finish(TENANT, stores.session_id, "success")
        stores.checkpoints.set_public(TENANT, REF, True)
        stores.checkpoints.set_public(TENANT, REF, False)
    later = stores.events()[len(before) :]
    assert later.count("session_finished") == 1
    assert later.count("checkpoint_published") == later.count("checkpoint_unpublished") == 2
