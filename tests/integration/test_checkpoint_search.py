"""The search of checkpoints (SDK 0.39): filters, pages and tenants."""

from __future__ import annotations

from typing import Any

import pytest

from support.http_harness import ALICE, BASE, BOB, Harness
from tinsmith.api.routes.checkpoints import SEARCH


def search(harness: Harness, key: str = ALICE, **body: object) -> dict[str, Any]:
    return harness.ok(SEARCH.removeprefix("/"), body, key)


def names(page: dict[str, Any]) -> list[str]:
    return [row["checkpoint_id"].partition("/")[2] for row in page["checkpoints"]]


def test_every_filter_narrows_the_search(harness: Harness) -> None:
    session_id = harness.session()
    model_id, other = harness.model(session_id, 0), harness.model(harness.session(), 0)
    assert harness.send("PUT", f"sessions/{session_id}/project", {"project_id": "p"}).status_code == 200
    harness.checkpoint(model_id, name="one", user_metadata={"a": "1", "b": "2"})
    harness.checkpoint(model_id, "sampler_weights", "two", user_metadata={"a": "1"})
    harness.checkpoint(other, name="three", base_model="local/other")
    harness.checkpoint(harness.model(key=BOB), name="theirs")
    assert names(search(harness)) == ["three", "two", "one"]
    assert [row["base_model"] for row in search(harness)["checkpoints"]] == ["local/other", BASE, BASE]
    for body, expected in (
        ({"project_ids": ["p"]}, ["two", "one"]),
        ({"project_ids": []}, []),
        ({"base_models": [BASE]}, ["two", "one"]),
        ({"base_models": []}, []),
        ({"checkpoint_type": "sampler"}, ["two"]),
        ({"user_metadata": {"a": "1"}}, ["two", "one"]),
        ({"user_metadata": {"a": "1", "b": "2"}}, ["one"]),
        ({"owner": {"type": "user", "owner_urns": ["tml:organization_user:bob"]}}, []),
        (
            {"owner": {"type": "user", "owner_urns": ["tml:organization_user:alice"]}, "base_models": [BASE]},
            ["two", "one"],
        ),
    ):
        page = search(harness, **body)
        assert names(page) == expected and page["next_cursor"] is None, body
    assert names(search(harness, BOB)) == ["theirs"]


def test_pages_go_on_where_the_last_one_ended(harness: Harness) -> None:
    model_id = harness.model()
    all_names = [f"c{index}" for index in range(7)]
    for index, name in enumerate(all_names):
        harness.checkpoint(model_id, name=name, user_metadata={"odd": str(index % 2)})
    for filters, expected in (({}, all_names[::-1]), ({"user_metadata": {"odd": "1"}}, ["c5", "c3", "c1"])):
        names_read: list[str] = []
        cursor = None
        while True:
            page = search(harness, limit=2, cursor=cursor, **filters)
            assert len(page["checkpoints"]) <= 2
            names_read += names(page)
            if (cursor := page["next_cursor"]) is None:
                break
        assert names_read == expected


def test_pages_are_whole_where_many_were_made_at_one_moment(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.store.checkpoints.now", lambda: 1_700_000_000.25)
    monkeypatch.setattr("tinsmith.store.checkpoints._SCAN_ROWS", 3)
    model_id = harness.model()
    all_names = {f"c{index}" for index in range(8)}
    for name in all_names:
        harness.checkpoint(model_id, name=name)
    first = search(harness, limit=5)
    second = search(harness, limit=5, cursor=first["next_cursor"])
    assert (
        len(names(first)) == 5 and set(names(first)) | set(names(second)) == all_names and second["next_cursor"] is None
    )


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"project_ids": ["unlisted"]}, 404, "project_ids has 'unlisted', which is not one of your projects"),
        ({"limit": 0}, 400, "limit is 0; it must lie between 1 and 200"),
        ({"limit": 201}, 400, "limit is 201"),
        ({"checkpoint_type": "all"}, 400, "checkpoint_type is 'all'; it must be one of training, sampler, external"),
        ({"owner": {"type": "user"}}, 400, "owner.owner_urns is empty"),
        ({"cursor": {"last_created_at": "2026-01-01T00:00:00Z"}}, 400, "cursor.last_checkpoint_uuid is missing"),
        ({"cursor": {"last_created_at": "x", "last_checkpoint_uuid": "x"}}, 400, "cursor.last_created_at"),
        (
            {"cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_checkpoint_uuid": "x"}},
            400,
            "cursor.last_checkpoint_uuid is 'x'",
        ),
        ({"names": ["one"]}, 400, "names is not supported"),
    ],
)
def test_a_wrong_search_is_refused_by_name(harness: Harness, body: dict[str, object], status: int, words: str) -> None:
    answer = harness.post(SEARCH.removeprefix("/"), body)
    assert answer.status_code == status and words in answer.json()["detail"]
