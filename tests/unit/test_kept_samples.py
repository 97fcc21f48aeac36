"""Kept samples: pages, limits, retention, and the turns of a conversation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tinsmith.db.database import Database
from tinsmith.db.statements import execute
from tinsmith.errors import NotFoundError
from tinsmith.store.kept_samples import KeptSamples, KeptSequence, SampleContent, keep_sample, new_sample


def keep(
    db: Database, index: int, tenant: str = "alice", limit: int = 3, *, prompt: list[int], answer: list[int]
) -> str:
    content = SampleContent(prompt, 0, {"temperature": 1.0}, [KeptSequence(answer, [-0.5, None], "stop")])
    sample = replace(new_sample(f"{tenant}:sample:0:{index}", tenant, "s", "base", None), prompt_tokens=len(prompt))
    with db.write() as connection:
        for statement in keep_sample(sample, content, limit):
            execute(connection, statement)
    return sample.request_id


def test_a_tenant_has_so_many_samples_and_no_more(db: Database) -> None:
    samples = KeptSamples(db)
    keep(db, 0, "bob", prompt=[1], answer=[2])
    ids = [keep(db, index, prompt=[1], answer=[2, 3]) for index in range(5)]
    page, total = samples.page("alice", 10, 0)
    assert [kept_sample.request_id for kept_sample, _ in page] == ids[:1:-1] and total == 3
    assert samples.page("alice", 1, 1)[0][0][0].request_id == ids[3]
    assert samples.page("bob", 10, 0)[1] == 1
    assert samples.page("alice", 10, 0, "sample:0:4")[1] == 1
    assert samples.page("alice", 10, 0, "100%")[1] == 0
    with pytest.raises(NotFoundError):
        samples.get("bob", ids[4])
    with pytest.raises(NotFoundError):
        samples.get("alice", ids[0])
    sample, content = samples.get("alice", ids[4])
    assert sample.base_model == "base"
    assert content == SampleContent([1], 0, {"temperature": 1.0}, [KeptSequence([2, 3], [-0.5, None], "stop")])


def test_samples_are_forgotten_after_a_time(db: Database) -> None:
    samples = KeptSamples(db)
    request_id = keep(db, 0, prompt=[1], answer=[2])
    created_at = samples.get("alice", request_id)[0].created_at
    assert samples.sweep(created_at - 1) == 0
    assert samples.sweep(created_at + 1) == 1
    assert samples.page("alice", 10, 0) == ([], 0)


def test_a_turn_follows_those_whose_prompt_and_answer_it_begins_with(db: Database) -> None:
    samples = KeptSamples(db)
    first = keep(db, 1, limit=9, prompt=[1, 2], answer=[3, 4])
    second = keep(db, 2, limit=9, prompt=[1, 2, 3, 4, 5], answer=[6, 7])
    other = keep(db, 3, limit=9, prompt=[1, 2, 9], answer=[9])
    # The third prompt tokenizes the end of the second answer differently.
    third = keep(db, 4, limit=9, prompt=[1, 2, 3, 4, 5, 6, 8, 8], answer=[9])
    keep(db, 5, "bob", limit=9, prompt=[1, 2], answer=[3, 4])

    def before(request_id: str) -> list[str]:
        return samples.list_earlier_turns(*samples.get("alice", request_id))

    assert before(first) == before(other) == []
    assert before(second) == [first]
    assert before(third) == [first, second]
