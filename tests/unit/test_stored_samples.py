"""Stored samples: pages, limits of a run and a tenant, retention, steps of weights, and turns of a conversation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tinsmith.db.database import Database
from tinsmith.db.schema import CHECKPOINTS, CURVE_POINTS, SAMPLERS
from tinsmith.db.statements import execute
from tinsmith.errors import NotFoundError
from tinsmith.store.stored_samples import (
    SampleContent,
    SampledLogprobs,
    SampleLimits,
    StoredSamples,
    StoredSequence,
    TrainedAnswer,
    keep_sample,
    new_sample,
    run_of_weights,
    thin_samples,
)
from tinsmith.types import tokens_digest

MANY = SampleLimits(1000, 1000)


def keep(
    db: Database,
    index: int,
    tenant: str = "alice",
    limits: SampleLimits = MANY,
    *,
    prompt: list[int],
    answer: list[int],
    run: str = "",
    weights: str | None = None,
) -> str:
    digest = tokens_digest(prompt, answer) if weights else ""
    content = SampleContent(prompt, 0, {"temperature": 1.0}, [StoredSequence(answer, [-0.5, None], "stop", digest)])
    sample = new_sample(f"{tenant}:sample:0:{index}", tenant, "s", "base", weights, run)
    sample = replace(sample, prompt_tokens=len(prompt))
    with db.write() as connection:
        for statement in [*keep_sample(sample, content), *thin_samples(tenant, run, limits)]:
            execute(connection, statement)
    return sample.request_id


def read_ids(db: Database, run: str = "") -> list[str]:
    samples = StoredSamples(db)
    stored = samples.read("alice", samples.list_positions("alice", 1000, run))
    return [sample.request_id for sample, _ in stored]


def test_a_tenant_has_so_many_samples_and_no_more(db: Database) -> None:
    samples, limits = StoredSamples(db), SampleLimits(1000, 3)
    keep(db, 0, "bob", limits, prompt=[1], answer=[2])
    ids = [keep(db, index, "alice", limits, prompt=[1], answer=[2, 3]) for index in range(5)]
    page, total = samples.page("alice", 10, 0)
    assert [stored_sample.request_id for stored_sample, _ in page] == ids[:1:-1] and total == 3
    assert samples.page("alice", 1, 1)[0][0][0].request_id == ids[3]
    assert samples.page("bob", 10, 0)[1] == 1
    assert samples.page("alice", 10, 0, "sample:0:4")[1] == 1
    assert samples.page("alice", 10, 0, "100%")[1] == 0
    with pytest.raises(NotFoundError):
        samples.get("bob", ids[4])
    with pytest.raises(NotFoundError):
        samples.get("alice", ids[0])
    sample, content = samples.get("alice", ids[4])
    assert sample.base_model == "base" and sample.prompt_digest == tokens_digest([1])
    assert content == SampleContent([1], 0, {"temperature": 1.0}, [StoredSequence([2, 3], [-0.5, None], "stop")])


def test_a_run_does_not_drive_out_the_samples_of_another(db: Database) -> None:
    limits = SampleLimits(4, 100)
    first = [keep(db, index, "alice", limits, prompt=[index], answer=[2], run="a") for index in range(3)]
    for index in range(20):
        keep(db, 100 + index, "alice", limits, prompt=[index], answer=[2], run="b", weights=f"w{index}")
    assert read_ids(db, "a") == first
    assert len(read_ids(db, "b")) == 4
    digests = [tokens_digest([index], [2]) for index in range(20)]
    assert StoredSamples(db).set_rewards("alice", dict.fromkeys(digests, 1.0)) == 4, "answers go with their samples"


def test_of_a_long_run_the_newest_samples_stay_and_the_same_prompts_of_all_steps(db: Database) -> None:
    limits = SampleLimits(16, 100)
    for step in range(8):
        for prompt in range(6):
            keep(db, 10 * step + prompt, "alice", limits, prompt=[prompt], answer=[step], run="r", weights=f"w{step}")
    samples = StoredSamples(db)
    stored = list(samples.read("alice", samples.list_positions("alice", 100, "r")))
    assert len(stored) == 16
    assert [sample.request_id.rpartition(":")[2] for sample, _ in stored[-8:]] == [
        *("64", "65"),
        *(str(70 + prompt) for prompt in range(6)),
    ]
    steps_of_prompts: dict[int, list[str | None]] = {}
    for sample, content in stored[:-8]:
        steps_of_prompts.setdefault(content.prompt[0], []).append(sample.weights)
    assert {weights for _, weights in [(0, sample.weights) for sample, _ in stored]} == {
        f"w{step}" for step in range(8)
    }
    by_digest = sorted(range(6), key=lambda prompt: tokens_digest([prompt]))
    assert steps_of_prompts[by_digest[0]] == [f"w{step}" for step in range(7)], "the same prompt at every step"


def test_samples_of_a_run_are_those_of_its_weights_and_those_it_trained_on(db: Database) -> None:
    own = keep(db, 0, prompt=[1], answer=[2], run="a", weights="w")
    other = keep(db, 1, prompt=[1], answer=[3], run="b", weights="x")
    untrained = keep(db, 2, prompt=[1], answer=[4], run="b", weights="x")
    keep(db, 3, prompt=[9], answer=[4], run="b", weights="x")
    keep(db, 4, prompt=[1], answer=[4], run="b", weights="y")
    digest = tokens_digest([1], [3])
    unknown = TrainedAnswer("alice", "0" * 32, "a", 4, 0.5, np.zeros(1, np.float32))
    trained = TrainedAnswer("alice", digest, "a", 4, 0.5, np.array([-1], np.float32), np.array([2], np.float32))
    StoredSamples(db).note_training([unknown, trained, replace(trained, tenant_id="bob", step=9)])
    assert read_ids(db, "a") == [own, other, untrained], "whole groups"
    note = StoredSamples(db).notes("alice", [other])[other, 0]
    assert (note.step, note.advantage) == (4, 0.5)
    assert note.logprobs is not None and note.logprobs.tolist() == [-1.0]
    assert note.advantages is not None and note.advantages.tolist() == [2.0]
    samples = StoredSamples(db)
    assert list(samples.read("bob", samples.list_positions("alice", 9))) == [], "positions of another tenant"


def test_training_on_an_answer_is_not_that_on_a_later_one_with_the_same_tokens(db: Database) -> None:
    request_id = keep(db, 0, prompt=[1], answer=[2], run="a", weights="w")
    created_at = StoredSamples(db).get("alice", request_id)[0].created_at
    early = TrainedAnswer("alice", tokens_digest([1], [2]), "a", 1, 0.5, np.zeros(1, np.float32))
    for trained_at, step in ((created_at - 1, None), (created_at + 1, 1)):
        StoredSamples(db).note_training([replace(early, trained_at=trained_at)])
        assert StoredSamples(db).notes("alice", [request_id])[request_id, 0].step == step


def test_training_and_rewards_are_of_the_newest_weights_that_gave_the_tokens(db: Database) -> None:
    """Those of an earlier step had no training (all rewards equal), and must not get that of a later one."""
    old, *new = (
        keep(db, index, prompt=[1], answer=[2], run="a", weights=weights)
        for index, weights in enumerate(("w1", "w2", "w2"))
    )
    samples, digest = StoredSamples(db), tokens_digest([1], [2])
    assert samples.set_rewards("alice", {digest: 1.0}) == 2
    trained_at = samples.get("alice", new[1])[0].created_at + 1
    trained = TrainedAnswer("alice", digest, "a", 2, 0.5, np.zeros(1, np.float32))
    samples.note_training([replace(trained, trained_at=trained_at)])
    notes = samples.notes("alice", [old, *new])
    assert [(notes[request_id, 0].reward, notes[request_id, 0].step) for request_id in (old, *new)] == [
        (None, None),
        (1.0, 2),
        (1.0, 2),
    ]


def test_an_answer_that_is_not_stored_lends_its_training_to_no_stored_one(db: Database) -> None:
    """Later weights gave the tokens of a stored answer again, in a sample that is not stored but trained on."""
    request_id = keep(db, 0, prompt=[1], answer=[2, 3], run="a", weights="w1")
    samples, digest = StoredSamples(db), tokens_digest([1], [2, 3])
    trained_at = samples.get("alice", request_id)[0].created_at + 1
    trained = TrainedAnswer("alice", digest, "a", 2, 0.5, np.zeros(2, np.float32), trained_at=trained_at)

    def note(step: int, from_end: int, logprob: float) -> int | None:
        sampled = SampledLogprobs(np.array([from_end], np.int32), np.array([logprob], np.float32))
        samples.note_training([replace(trained, step=step, sampled=sampled)])
        return samples.notes("alice", [request_id])[request_id, 0].step

    assert note(2, 2, -0.48) is None, "another logprob of the first token"
    assert note(3, 1, -0.5) is None, "the second token has no stored logprob"
    assert note(4, 3, -0.5) is None, "a token of the prompt"
    assert note(5, 2, -0.50001) == 5
    assert note(6, 2, -0.5) == 5, "the first training stays"


def test_weights_have_the_steps_before_their_publish_or_save(db: Database) -> None:
    path = "tinker://run/sampler_weights/a"
    point = {"model_id": "run", "source": "server", "metrics": {}}
    sampler = {"session_id": "s", "tenant_id": "alice", "base_model": "base"}
    checkpoint = {
        "training_run_id": "run", "kind": "sampler_weights", "name": "a", "tenant_id": "alice", "state": "completed",
        "base_model": "base", "lora_rank": 1, "train_attn": True, "train_mlp": True, "train_unembed": True,
        "lora_alpha": 1.0, "optimizer_type": "adamw", "public": False,
    }  # fmt: skip
    with db.write() as connection:
        connection.execute(CURVE_POINTS.insert(), [point | {"step": n, "recorded_at": 10.0 * n} for n in (1, 2, 3)])
        for name, at, tenant in (("w0", 5.0, "alice"), ("w2", 29.0, "alice"), ("w3", 99.0, "bob")):
            row = sampler | {"sampling_session_id": name, "created_at": at, "tenant_id": tenant}
            connection.execute(SAMPLERS.insert().values(row))
        connection.execute(CHECKPOINTS.insert().values(checkpoint | {"created_at": 30.5}))
    rows = [(weights, run_of_weights("run", None)) for weights in ("w0", "w2", "w3", "gone")]
    rows += [(path, run_of_weights(None, path)), (None, run_of_weights(None, None)), ("w2x", "")]
    samples = [new_sample("r", "alice", "s", "base", weights, run) for weights, run in rows]
    assert StoredSamples(db).weights_steps("alice", samples) == {"w0": 0, "w2": 2, path: 3}


def test_samples_are_forgotten_after_a_time(db: Database) -> None:
    samples = StoredSamples(db)
    request_id = keep(db, 0, prompt=[1], answer=[2])
    created_at = samples.get("alice", request_id)[0].created_at
    assert samples.sweep(created_at - 1) == 0
    assert samples.sweep(created_at + 1) == 1
    assert samples.page("alice", 10, 0) == ([], 0)


def test_a_turn_follows_those_whose_prompt_and_answer_it_begins_with(db: Database) -> None:
    samples = StoredSamples(db)
    first = keep(db, 1, prompt=[1, 2], answer=[3, 4])
    second = keep(db, 2, prompt=[1, 2, 3, 4, 5], answer=[6, 7])
    other = keep(db, 3, prompt=[1, 2, 9], answer=[9])
    # The third prompt tokenizes the end of the second answer differently.
    third = keep(db, 4, prompt=[1, 2, 3, 4, 5, 6, 8, 8], answer=[9])
    keep(db, 5, "bob", prompt=[1, 2], answer=[3, 4])

    def before(request_id: str) -> list[str]:
        return samples.list_earlier_turns(*samples.get("alice", request_id))

    assert before(first) == before(other) == []
    assert before(second) == [first]
    assert before(third) == [first, second]
