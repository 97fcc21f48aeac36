"""Captured exchanges: merging, tenants, and conversion to the SDK's datums."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from tinker.types._pydantic_types.datum import Datum

from support.http_harness import ALICE, BASE, BOB, Harness
from tinsmith.api.openai.generation import Prepared, record
from tinsmith.api.openai.weights import ServedWeights
from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.store import exchanges as exchanges_module
from tinsmith.store.exchanges import RETENTION_S, Exchange, merge_exchanges
from tinsmith.types import Image, SampledSequence, SampleResult, SamplingParams

_TOKENS = st.integers(0, 2)
TURNS = st.lists(
    st.tuples(st.lists(_TOKENS, min_size=1, max_size=6), st.lists(_TOKENS, min_size=1, max_size=2)), max_size=12
)


def exchange(exchange_id: int, prompt: list[int], answer: list[int], version: str = "v") -> Exchange:
    logprobs = -np.arange(1, len(answer) + 1, dtype=np.float32)
    return Exchange(
        exchange_id, "s", version, np.array(prompt, np.int32), np.array(answer, np.int32), logprobs, "stop", None, 0
    )


def test_turns_are_one_trajectory_and_forks_are_kept_apart() -> None:
    turns = [
        exchange(1, [1, 2], [3], "a"),
        exchange(2, [1, 2, 3, 4], [5, 6], "b"),  # goes on
        exchange(3, [9], [8]),  # another conversation
        exchange(4, [1, 2, 3, 7], [5]),  # forks from the first turn
        exchange(5, [1, 2, 3, 4, 5, 6, 4], [1], "b"),  # goes on after the fork
    ]
    first, other, fork = merge_exchanges(turns)
    assert first.tokens == [1, 2, 3, 4, 5, 6, 4, 1] and first.trajectory_id == "traj-1" and first.num_exchanges == 3
    assert first.sampled == [False, False, True, False, True, True, False, True]
    assert first.logprobs == [0, 0, -1, 0, -1, -2, 0, -1] and first.versions == ["a", "b"]
    assert (other.tokens, other.trajectory_id) == ([9, 8], "traj-3")
    assert fork.tokens == [1, 2, 3, 7, 5] and fork.sampled == [False] * 4 + [True] and fork.trajectory_id == "traj-4"


@given(TURNS)
def test_every_sampled_token_is_in_one_trajectory_and_nothing_is_invented(
    turns: list[tuple[list[int], list[int]]],
) -> None:
    exchanges = [exchange(index, prompt, answer) for index, (prompt, answer) in enumerate(turns)]
    trajectories = merge_exchanges(exchanges)
    assert sum(sum(trajectory.sampled) for trajectory in trajectories) == sum(len(answer) for _, answer in turns)
    assert sum(trajectory.num_exchanges for trajectory in trajectories) == len(turns)
    # The definition: each exchange continues the longest trajectory that is a prefix of its prompt, or starts a new
    # one.
    plain: list[list[int]] = []
    for prompt, answer in turns:
        fits = [index for index, tokens in enumerate(plain) if prompt[: len(tokens)] == tokens]
        if fits:
            plain[max(fits, key=lambda index: len(plain[index]))] = [*prompt, *answer]
        else:
            plain.append([*prompt, *answer])
    assert sorted(trajectory.tokens for trajectory in trajectories) == sorted(plain)


def store_exchanges(
    harness: Harness, session: str, turns: list[Exchange], tenant_id: str = "alice"
) -> list[dict[str, Any]]:
    for turn in turns:
        sequence = SampledSequence(turn.tokens_T, turn.logprobs_T, "stop")
        result = SampleResult("r", (sequence,), weight_version=turn.version)
        harness.services.exchanges.record(tenant_id, session, [turn.prompt_T.tolist()], [result])
    return harness.get(f"trajectories?session={session}").json()["trajectories"]


def picture_in_prompt(start: int, num_tokens: int, content: bytes) -> Image:
    digest = hashlib.blake2b(content, digest_size=16).digest()
    return Image("messages[0]", content, "png", 8, 8, start, num_tokens, digest)


def test_images_are_stored_once_and_tell_prompts_of_equal_tokens_apart(harness: Harness) -> None:
    exchanges = harness.services.exchanges
    prompt, answers = [1, 9, 9, 2], [[3], [4]]
    for picture in (b"cat" * 50, b"dog" * 50):
        images = [picture_in_prompt(1, 2, picture)]
        for turn in range(2):
            tokens = [*prompt, *answers[0], 5][: len(prompt) + 2 * turn]
            sequence = SampledSequence(np.array(answers[turn], np.int32), np.array([-1.0], np.float32), "stop")
            exchanges.record("alice", "s", [tokens], [SampleResult("r", (sequence,), weight_version="v")], None, images)
    with exchanges._db.read() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM exchange_images")) == 2
    trajectories = harness.get("trajectories?session=s").json()["trajectories"]
    assert [trajectory["tokens"] for trajectory in trajectories] == [[1, 9, 9, 2, 3, 5, 4]] * 2
    for trajectory, picture in zip(trajectories, (b"cat" * 50, b"dog" * 50), strict=True):
        chunks = trajectory["datum"]["model_input"]["chunks"]
        assert [chunk["type"] for chunk in chunks] == ["encoded_text", "image", "encoded_text"]
        assert base64.b64decode(chunks[1]["data"]) == picture and chunks[1]["expected_tokens"] == 2
        assert (chunks[0]["tokens"], chunks[2]["tokens"]) == ([1], [2, 3, 5])
        Datum.model_validate(trajectory["datum"])
    assert exchanges.delete("alice", "s") == 4
    with exchanges._db.read() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM exchange_images")) == 0


def test_images_leave_with_the_last_exchange_and_have_a_limit(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanges = harness.services.exchanges
    sequence = SampledSequence(np.array([3], np.int32), np.array([-1.0], np.float32), "stop")
    result = SampleResult("r", (sequence,), weight_version="v")
    for session in ("a", "b"):
        exchanges.record("alice", session, [[9, 9]], [result], None, [picture_in_prompt(0, 2, b"x" * 100)])
    monkeypatch.setattr(exchanges_module, "MAX_IMAGE_BYTES", 99)
    assert "MiB of images" in harness.get("trajectories?session=a").json()["detail"]
    monkeypatch.setattr(exchanges_module, "MAX_IMAGE_BYTES", 100)
    page = harness.get("trajectories").json()
    assert [trajectory["session"] for trajectory in page["trajectories"]] == ["a"] and page["has_more"]
    later = exchanges_module.now() + RETENTION_S + 1
    monkeypatch.setattr(exchanges_module, "now", lambda: later)
    assert exchanges.sweep() == 2
    with exchanges._db.read() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM exchange_images")) == 0


def test_a_trajectory_is_a_datum_of_the_sdk_and_takes_a_reward(harness: Harness) -> None:
    (trajectory,) = store_exchanges(harness, "s", [exchange(0, [1, 2], [3]), exchange(0, [1, 2, 3, 4], [5, 6])])
    assert harness.ok(
        "trajectories/rewards", {"rewards": [{"trajectory_id": trajectory["trajectory_id"], "reward": 0.5}]}
    )
    (trajectory,) = harness.get("trajectories?session=s").json()["trajectories"]
    datum = Datum.model_validate(trajectory["datum"])
    assert [token for chunk in datum.model_input.chunks for token in chunk.tokens] == [1, 2, 3, 4, 5]  # type: ignore[union-attr]
    inputs = {name: list(tensor.data) for name, tensor in datum.loss_fn_inputs.items()}
    assert {name: tensor.dtype for name, tensor in datum.loss_fn_inputs.items()}["target_tokens"] == "int64"
    assert inputs["target_tokens"] == [2, 3, 4, 5, 6]
    assert inputs["logprobs"] == [0, -1, 0, -1, -2] and inputs["advantages"] == [0, 0.5, 0, 0.5, 0.5]
    assert trajectory["reward"] == 0.5 and trajectory["exchanges"] == 2


def test_sessions_are_read_in_pages_and_deleted(harness: Harness) -> None:
    for session in ("c", "a", "b"):
        store_exchanges(harness, session, [exchange(0, [1], [2]), exchange(0, [7], [8])])
    store_exchanges(harness, "a", [exchange(0, [5], [6])], "bob")
    page = harness.get("trajectories?limit=2").json()
    assert [trajectory["session"] for trajectory in page["trajectories"]] == ["a", "a", "b", "b"] and page[
        "next_after"
    ] == "b"
    next_page = harness.get("trajectories?limit=2&after=b").json()
    assert [trajectory["session"] for trajectory in next_page["trajectories"]] == ["c", "c"] and not next_page[
        "has_more"
    ]
    assert harness.send("DELETE", "trajectories?session=a").json() == {"deleted": 2}
    assert harness.get("trajectories?session=a").json()["trajectories"] == []
    (theirs,) = harness.get("trajectories", BOB).json()["trajectories"]
    assert theirs["tokens"] == [5, 6]
    wrong = {"rewards": [{"trajectory_id": theirs["trajectory_id"], "reward": 1.0}]}
    assert harness.post("trajectories/rewards", wrong).status_code == 404
    for path in ("trajectories?limit=0", "trajectories?session=a&after=b"):
        assert harness.get(path, ALICE).status_code == 400
    assert harness.send("DELETE", "trajectories").status_code == 400
    strange = {"rewards": [{"trajectory_id": "traj-x", "reward": 1.0}]}
    assert harness.post("trajectories/rewards", strange).status_code == 404
    twice = {"rewards": wrong["rewards"] * 2}
    assert "twice" in harness.post("trajectories/rewards", twice, BOB).json()["detail"]


def test_a_session_that_is_too_long_to_merge_is_refused_by_name(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinsmith.store import exchanges

    store_exchanges(harness, "long", [exchange(0, [1], [2])] * 3)
    monkeypatch.setattr(exchanges, "MAX_EXCHANGES", 3)
    assert harness.get("trajectories?session=long").status_code == 200
    monkeypatch.setattr(exchanges, "MAX_EXCHANGES", 2)
    refused = harness.get("trajectories?session=long")
    assert refused.status_code == 400 and "session 'long' has more than 2 exchanges" in refused.json()["detail"]


def test_old_exchanges_are_swept(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    store_exchanges(harness, "s", [exchange(0, [1], [2])])
    assert harness.services.exchanges.sweep() == 0
    from tinsmith.store import exchanges

    later = exchanges.now() + RETENTION_S + 1
    monkeypatch.setattr(exchanges, "now", lambda: later)
    assert harness.services.exchanges.sweep() == 1


def test_an_answer_is_recorded_with_its_weight_version(harness: Harness) -> None:
    plan = GenerationPlan("m", ([1, 2],), 2, SamplingParams())
    sequences = tuple(SampledSequence(np.array([t], np.int32), np.array([-1.0], np.float32), "stop") for t in (3, 4))
    weights = ServedWeights(harness.services.bases.get(BASE), "tinker://a/weights/b")
    prepared = Prepared(harness.services, "alice", weights, None, plan, "s")  # type: ignore[arg-type]
    result = SampleResult("r", sequences, weight_version="tinker://a/weights/b")
    asyncio.run(record(prepared, [result]))
    for other in (replace(prepared, capture=None), replace(prepared, plan=replace(plan, echo_only=True))):
        asyncio.run(record(other, [result]))
    trajectories = harness.get("trajectories?session=s").json()["trajectories"]
    assert [trajectory["tokens"] for trajectory in trajectories] == [[1, 2, 3], [1, 2, 4]]
    assert all(trajectory["versions"] == ["tinker://a/weights/b"] for trajectory in trajectories)


def capture(harness: Harness, session: str, prompts: list[list[int]]) -> None:
    answer = SampledSequence(np.array([3], np.int32), np.array([-1.0], np.float32), "stop")
    results = [SampleResult("r", (answer,), weight_version=BASE) for _ in prompts]
    harness.services.exchanges.record("alice", session, prompts, results)


def test_a_page_ends_before_a_session_that_would_make_it_too_large(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges_module, "MAX_TOKENS", 10)
    for session, length in (("a", 3), ("b", 4), ("c", 8), ("d", 1)):  # and a sampled token each
        capture(harness, session, [[1] * length])
    pages, after = [], ""
    while True:
        page = harness.get(f"trajectories?limit=3{after}").json()
        pages.append([trajectory["session"] for trajectory in page["trajectories"]])
        if not page["has_more"]:
            break
        after = f"&after={page['next_after']}"
    assert pages == [["a", "b"], ["c"], ["d"]]


def test_a_session_that_is_too_large_is_refused_and_the_list_continues_behind_it(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges_module, "MAX_TOKENS", 10)
    capture(harness, "a", [[1, 2]])
    capture(harness, "b", [[7] * 6, [8] * 6])
    capture(harness, "c", [[1, 2]])
    refused = harness.get("trajectories")
    assert refused.status_code == 400 and "'b' has more than 10 tokens" in refused.json()["detail"]
    assert "after" in refused.json()["detail"]
    assert [trajectory["session"] for trajectory in harness.get("trajectories?after=b").json()["trajectories"]] == ["c"]
    monkeypatch.setattr(exchanges_module, "MAX_TOKENS", 100)
    monkeypatch.setattr(exchanges_module, "MAX_EXCHANGES", 1)
    assert "'b' has more than 1 exchanges" in harness.get("trajectories?session=b").json()["detail"]


def test_exchanges_are_read_piece_by_piece(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges_module, "_ROWS", 3)
    prompts = [[index, index + 1] for index in range(10)]
    capture(harness, "a", prompts)
    database, sizes = harness.services.exchanges._db, list[int]()
    rows = database.rows

    def counting(query: sa.Select) -> Sequence[Any]:
        answer = rows(query)
        sizes.append(len(answer))
        return answer

    monkeypatch.setattr(database, "rows", counting)
    assert [trajectory.tokens[:2] for trajectory in harness.services.exchanges.trajectories("alice", "a")] == prompts
    assert sizes == [3, 3, 3, 1, 0]
