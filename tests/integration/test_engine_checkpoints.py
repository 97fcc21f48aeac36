"""The engine and its checkpoints: exports, damage, crashes between a save's files and its row, samplers of deleted
checkpoints. With a real database and the fake backend.
"""

from __future__ import annotations

import pyrage
import pytest

from support.engine_bench import BASE, Bench
from tinsmith.db.schema import CHECKPOINTS
from tinsmith.engine.versions import LOADED_VERSIONS
from tinsmith.errors import NotFoundError
from tinsmith.store.checkpoints import Checkpoint, parse_path
from tinsmith.store.models import NewModel
from tinsmith.store.sampling_sessions import NewSamplingSession
from tinsmith.types import LoraSpec

STATE = "fake_adapter.json"


def save(bench: Bench, seq_id: int, kind: str = "save_weights", *, model: str = "s:train:0", **body: object) -> str:
    request_id = bench.submit(model, seq_id, kind, {"path": "one"} | body)
    bench.run_until_idle()
    return request_id


def saved_checkpoint(bench: Bench, request_id: str) -> Checkpoint:
    return bench.checkpoints.get("alice", parse_path(str(bench.result(request_id)["path"])))


def files_of(bench: Bench, checkpoint: Checkpoint) -> dict[str, bytes]:
    with bench.checkpoints.reading(checkpoint) as directory:
        return {name: (directory / name).read_bytes() for name in bench.checkpoints.files.files(directory.name)}


def sampler_of(bench: Bench, path: str, sampler_seq_id: int = 0, tenant: str = "alice") -> str:
    new = NewSamplingSession(f"s:sample:{sampler_seq_id}", "s", tenant, BASE, model_path=path, version_id=path)
    return bench.samplers.create(new)


def train_model(bench: Bench) -> str:
    model = bench.model()
    bench.train(model, 1)
    bench.step(model, 2)
    bench.run_until_idle()
    return model


# Exports.


def test_an_export_holds_the_adapter_and_tells_its_size(bench: Bench) -> None:
    train_model(bench)
    full = saved_checkpoint(bench, save(bench, 3))
    request_id = save(bench, 4, "save_weights_external", ttl_seconds=3600)
    export = saved_checkpoint(bench, request_id)
    assert bench.result(request_id) == {
        "path": "tinker://s:train:0/external_weights/one",
        "size_bytes": export.size_bytes,
        "type": "save_weights_external",
    }
    assert export.expires_at is not None
    assert b'"step": null' in files_of(bench, export)[STATE]  # no optimizer state
    assert b'"step": 1' in files_of(bench, full)[STATE]
    assert "exists already" in bench.error(save(bench, 5, "save_weights_external"))


def test_an_encrypted_export_can_be_read_by_its_recipients_alone(bench: Bench) -> None:
    train_model(bench)
    identities = [pyrage.x25519.Identity.generate() for _ in range(3)]
    recipients = [str(identity.to_public()) for identity in identities[:2]]
    plain = files_of(bench, saved_checkpoint(bench, save(bench, 3, "save_weights_external")))
    request_id = save(bench, 4, "save_weights_external", path="two", age_encryption_recipients=recipients)
    files = files_of(bench, saved_checkpoint(bench, request_id))
    assert files.keys() == {f"{name}.age" for name in plain}
    for identity in identities[:2]:
        assert pyrage.decrypt(files[f"{STATE}.age"], [identity]) == plain[STATE]
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(files[f"{STATE}.age"], [identities[2]])


def test_a_key_that_cannot_be_read_leaves_nothing_behind(bench: Bench) -> None:
    train_model(bench)
    request_id = save(bench, 3, "save_weights_external", age_encryption_recipients=["age1nothing"])
    assert "age_encryption_recipients[0] cannot be read" in bench.error(request_id)
    assert list(bench.checkpoints.files.path("").iterdir()) == []
    saved_checkpoint(bench, save(bench, 4, "save_weights_external"))


# Between the files and the row.


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_crash_before_the_row_leaves_the_old_checkpoint_or_none(
    bench: Bench, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_model(bench)
    if overwrite:
        old = saved_checkpoint(bench, save(bench, 3, user_metadata={"step": "1"}, ttl_seconds=3600))
    bench.train("s:train:0", 4 if overwrite else 3)
    bench.step("s:train:0", 5 if overwrite else 4)
    bench.run_until_idle()

    class Killed(BaseException):
        pass

    def die(*_arguments: object) -> None:
        raise Killed

    body = {"path": "one", "overwrite": True, "user_metadata": {"step": "2"}}
    request_id = bench.submit("s:train:0", 6 if overwrite else 5, "save_weights", body)
    with monkeypatch.context() as patched:
        patched.setattr(bench.futures, "settle", die)
        with pytest.raises(Killed):
            bench.run_until_idle()
    ref = parse_path("tinker://s:train:0/weights/one")
    if overwrite:
        assert bench.checkpoints.get("alice", ref) == old
        assert b'"step": 1' in files_of(bench, old)[STATE]
    else:
        with pytest.raises(NotFoundError):
            bench.checkpoints.get("alice", ref)
    bench.restart()
    bench.run_until_idle()
    new = saved_checkpoint(bench, request_id)
    assert (new.user_metadata, new.expires_at) == ({"step": "2"}, None)
    assert b'"step": 2' in files_of(bench, new)[STATE]
    assert len(bench.checkpoints.sweep_directories(-1)) == 1  # files of the first attempt
    files_of(bench, new)


# Damage.


def damage(bench: Bench, checkpoint: Checkpoint) -> None:
    path = bench.checkpoints.files.path(checkpoint.directory or "") / STATE
    path.write_bytes(path.read_bytes().replace(b"weight", b"wEight"))


def test_damaged_weights_are_not_loaded(bench: Bench) -> None:
    train_model(bench)
    checkpoint = saved_checkpoint(bench, save(bench, 3))
    damage(bench, checkpoint)
    path = checkpoint.ref.path
    bench.models.create(NewModel("s:train:1", "s", "alice", BASE, LoraSpec(4)))
    load = bench.submit("s:train:1", 0, "load_model", {"path": path, "optimizer": True})
    sample = bench.sample(sampler_of(bench, path))
    bench.run_until_idle()
    for request_id in (load, sample):
        outcome = bench.outcome(request_id)
        assert outcome is not None and outcome.category == "server"
        assert f"checkpoint '{path}' is damaged: {STATE} does not hold the bytes" in str(outcome.error)
    assert not bench.backend.has_model("s:train:1")
    assert not bench.backend.has_version(path)


# Samplers of deleted checkpoints.


def disappear(bench: Bench, checkpoint: Checkpoint, how: str) -> None:
    if how == "unpublished":
        bench.checkpoints.set_public("alice", checkpoint.ref, False)
    elif how == "deleted":
        bench.checkpoints.delete("alice", checkpoint.ref)
    else:
        bench.checkpoints.set_ttl("alice", checkpoint.ref, -1.0)
        bench.checkpoints.sweep_expired()


@pytest.mark.parametrize("how", ["unpublished", "deleted", "expired"])
def test_loaded_weights_go_on_being_sampled_and_new_loads_are_refused(bench: Bench, how: str) -> None:
    train_model(bench)
    checkpoint = saved_checkpoint(bench, save(bench, 3, "save_weights_for_sampler"))
    bench.checkpoints.set_public("alice", checkpoint.ref, True)
    sampler = sampler_of(bench, checkpoint.ref.path, tenant="bob")

    def sample(seq_id: int) -> str | None:
        request_id = bench.sample(sampler, seq_id, tenant="bob")
        bench.run_until_idle()
        outcome = bench.outcome(request_id, "bob")
        assert outcome is not None
        assert outcome.category in (None, "user")
        return outcome.error

    assert sample(0) is None
    disappear(bench, checkpoint, how)
    assert sample(1) is None
    bench.restart()
    assert "does not exist" in str(sample(2))


def test_an_evicted_version_is_reloaded_only_while_permitted(bench: Bench) -> None:
    train_model(bench)
    checkpoint = saved_checkpoint(bench, save(bench, 3, "save_weights_for_sampler", path="first"))
    sampler = sampler_of(bench, checkpoint.ref.path)
    bench.sample(sampler, 0)
    bench.run_until_idle()
    bench.checkpoints.delete("alice", checkpoint.ref)
    for index in range(1, LOADED_VERSIONS + 1):
        path = saved_checkpoint(bench, save(bench, 3 + index, "save_weights_for_sampler", path=f"n{index}")).ref.path
        bench.sample(sampler_of(bench, path, index), 0)
        bench.run_until_idle()
    request_id = bench.sample(sampler, 1)
    bench.run_until_idle()
    assert "does not exist" in bench.error(request_id)


def test_an_overwritten_sampler_checkpoint_is_sampled_with_its_new_weights(bench: Bench) -> None:
    model = train_model(bench)
    path = saved_checkpoint(bench, save(bench, 3, "save_weights_for_sampler")).ref.path
    first, second = sampler_of(bench, path), sampler_of(bench, path, 1)
    bench.sample(first, 0)
    bench.run_until_idle()
    before = bench.backend._versions[path]
    bench.train(model, 4)
    bench.step(model, 5)
    save(bench, 6, "save_weights_for_sampler", overwrite=True)
    bench.sample(second, 0)
    bench.run_until_idle()
    assert bench.backend._versions[path] == bench.weight() != before


# Tenants.


def test_the_engine_reads_a_granted_checkpoint_as_the_tenant_who_granted_it(bench: Bench) -> None:
    train_model(bench)
    path = saved_checkpoint(bench, save(bench, 3)).ref.path
    for index, granted_by in ((1, None), (2, "carol"), (3, "alice")):
        model_id = f"b:train:{index}"
        bench.models.create(NewModel(model_id, "b", "bob", BASE, LoraSpec(4)))
        body = {"path": path, "optimizer": True, "granted_by": granted_by}
        request_id = bench.submit(model_id, 0, "load_model", body, tenant="bob")
        bench.run_until_idle()
        outcome = bench.outcome(request_id, "bob")
        assert outcome is not None
        assert (outcome.error is None) == (granted_by == "alice")
    assert bench.weight("b:train:3") == bench.weight()


def test_a_checkpoint_is_loaded_under_another_name_of_its_base_only_if_that_was_asked_for(bench: Bench) -> None:
    train_model(bench)
    checkpoint = saved_checkpoint(bench, save(bench, 3))
    with bench.db.write() as connection:
        connection.execute(CHECKPOINTS.update().values(base_model="local/same"))
    for index, base_model in ((1, None), (2, "local/same"), (3, BASE)):
        model_id = f"s:train:{index}"
        bench.models.create(NewModel(model_id, "s", "alice", BASE, LoraSpec(4)))
        body = {"path": checkpoint.ref.path, "optimizer": True, "base_model": base_model}
        request_id = bench.submit(model_id, 0, "load_model", body)
        bench.run_until_idle()
        outcome = bench.outcome(request_id)
        assert outcome is not None
        assert (outcome.error is None) == (base_model == BASE), outcome


def test_a_run_keeps_its_newest_checkpoints_of_a_kind(bench: Bench) -> None:
    """Published checkpoints remain, and other kinds and runs are not affected."""
    train_model(bench)
    seq_id = 2

    def saves(kind: str, *names: str, **options: object) -> None:
        nonlocal seq_id
        for name in names:
            seq_id += 1
            saved_checkpoint(bench, save(bench, seq_id, kind, path=name, **options))

    def names_of_kind(kind: str) -> set[str]:
        return {checkpoint.name for checkpoint in checkpoints.of_run("alice", "s:train:0") if checkpoint.kind == kind}

    checkpoints = bench.checkpoints
    saves("save_weights", "a", "b", "c")
    saves("save_weights_for_sampler", "a", "b")
    checkpoints.set_public("alice", parse_path("tinker://s:train:0/weights/a"), True)
    saves("save_weights", "d", keep_last=2)
    assert names_of_kind("weights") == {"a", "c", "d"} and names_of_kind("sampler_weights") == {"a", "b"}
    assert [checkpoint.name for checkpoint in checkpoints.sweep_expired()] == ["b"]
    checkpoints.keep_last = 1
    saves("save_weights_for_sampler", "c")
    assert names_of_kind("sampler_weights") == {"c"}
    saves("save_weights_for_sampler", "d", keep_last=5)
    assert names_of_kind("sampler_weights") == {"c", "d"}
