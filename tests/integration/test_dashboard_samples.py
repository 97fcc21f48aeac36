"""The dashboard's samples: groups of answers, their questions and divergence, rewards, files, and one sample."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from support.http_harness import ALICE, BASE, BOB, Harness
from tinsmith.db.statements import execute
from tinsmith.store.stored_samples import SampleContent, StoredSequence, TrainedAnswer, keep_sample, new_sample
from tinsmith.types import tokens_digest


def test_a_sample_without_a_tokenizer_is_shown_as_ids(harness: Harness) -> None:
    content = SampleContent([1, 2], 0, {"temperature": 0.5}, [StoredSequence([3], [-0.25], "stop")])
    with harness.services.models._db.write() as connection:
        for statement in keep_sample(new_sample("s:sample:0:0", "alice", "s", BASE, None), content):
            execute(connection, statement)
    (listed,) = harness.get("dashboard/samples").json()["samples"]
    assert listed["request_id"] == "s:sample:0:0" and listed["answer_begins"] is None
    sample_detail = harness.get("dashboard/samples/s:sample:0:0").json()
    assert sample_detail["prompt"] == {"tokens": [1, 2], "pieces": None, "text": None}
    sequence = {"tokens": [3], "pieces": None, "text": None, "logprobs": [-0.25], "stop_reason": "stop"}
    unknown = dict.fromkeys(("reward", "run", "step", "advantage", "training_logprobs", "advantages"))
    assert sample_detail["sequences"] == [sequence | unknown]
    assert sample_detail["params"] == {"temperature": 0.5} and sample_detail["turns_before"] == []
    assert harness.get("dashboard/samples?search=" + "x" * 201).status_code == 400


def keep_group(
    harness: Harness,
    request_id: str,
    prompt: list[int],
    answers: list[list[int]],
    *,
    session: str = "s",
    weights: str | None = "s:train:0/sampler/1",
    run: str = "s:train:0",
    stop_reason: str = "stop",
) -> list[str]:
    """Store a sample with these answers; return their digests."""
    digests = [tokens_digest(prompt, answer) for answer in answers]
    sequences = [
        StoredSequence(answer, [-0.5] * len(answer), stop_reason, digest, len(answer))
        for answer, digest in zip(answers, digests, strict=True)
    ]
    sample = new_sample(request_id, "alice", session, BASE, weights, run)
    sample = replace(sample, prompt_tokens=len(prompt), num_sequences=len(answers))
    with harness.services.models._db.write() as connection:
        for statement in keep_sample(sample, SampleContent(prompt, 0, {}, sequences)):
            execute(connection, statement)
    return digests


def read_groups(harness: Harness, query: str = "", key: str = ALICE) -> list[list[str]]:
    answer = harness.get(f"dashboard/groups{query}", key)
    assert answer.status_code == 200, answer.text
    return [
        [f"{group_answer['request_id']}/{group_answer['number']}" for group_answer in group["answers"]]
        for group in answer.json()["groups"]
    ]


def test_answers_to_one_prompt_are_a_group_with_what_became_of_them(harness: Harness) -> None:
    first, second = keep_group(harness, "a", [1, 2], [[3], [4, 5]])
    (third,) = keep_group(harness, "b", [1, 2], [[6]])
    (other,) = keep_group(harness, "c", [9], [[3]])
    rewards = {first: 0.0, second: 1.0, third: 0.5, other: 3.0, "0" * 32: 9.0}
    body = {"rewards": [{"digest": digest, "reward": reward} for digest, reward in rewards.items()]}
    assert harness.ok("dashboard/samples/rewards", body, BOB) == {"updated": 0}
    for _ in range(2):
        assert harness.ok("dashboard/samples/rewards", body) == {"updated": 4}
    logprobs = np.array([-0.25, -0.75], np.float32)
    harness.services.stored_samples.note_training([TrainedAnswer("alice", second, "r:train:0", 7, 0.5, logprobs)])
    harness.services.stored_samples.note_training([TrainedAnswer("alice", second, "r:train:0", 8, 0.1, logprobs)])
    assert read_groups(harness) == [["c/0"], ["a/0", "a/1", "b/0"]]
    assert read_groups(harness, "?sort=spread") == [["a/0", "a/1", "b/0"], ["c/0"]]
    assert read_groups(harness, "?sort=reward&order=asc&limit=1") == [["a/0", "a/1", "b/0"]]
    assert read_groups(harness, "?least=2") == [["c/0"]] and read_groups(harness, "?most=-1") == []
    assert read_groups(harness, "?run=r:train:0") == read_groups(harness, "?step=7") == [["a/0", "a/1", "b/0"]]
    assert read_groups(harness, "?run=s:train:0&step=8") == [] and read_groups(harness, "?run=s:train") == []
    assert read_groups(harness, "?text=4+5") != []
    assert read_groups(harness, key=BOB) == []
    row = harness.get("dashboard/groups?step=7").json()["groups"][0]["answers"][1]
    assert (row["reward"], row["advantage"], row["run"], row["tokens"]) == (1.0, 0.5, "r:train:0", 2)
    sequence = harness.get("dashboard/samples/a").json()["sequences"][1]
    assert (sequence["reward"], sequence["step"], sequence["training_logprobs"]) == (1.0, 7, [-0.25, -0.75])


@pytest.mark.parametrize("query", ["sort=none", "order=up", "least=x", "step=nan", "text=" + "x" * 201])
def test_groups_that_cannot_be_asked_for_are_refused(harness: Harness, query: str) -> None:
    keep_group(harness, "a", [1, 2], [[3]])
    assert harness.get(f"dashboard/groups?{query}").status_code == 400


@pytest.mark.parametrize("body", [{}, {"rewards": []}, {"rewards": [{"digest": "x" * 32, "reward": 1}]}])
def test_rewards_that_are_none_are_refused(harness: Harness, body: object) -> None:
    assert harness.post("dashboard/samples/rewards", body).status_code == 400


def test_old_samples_are_deleted_with_the_notes_of_their_answers(harness: Harness) -> None:
    stored_samples = harness.services.stored_samples
    keep_group(harness, "new1", [1], [[3]])
    assert len(stored_samples.notes("alice", ["new1"])) == 1
    stored_samples.sweep(1e12)
    assert stored_samples.notes("alice", ["new1"]) == {}


def read_first_group(harness: Harness, query: str) -> dict[str, Any]:
    return harness.get(f"dashboard/groups?{query}").json()["groups"][0]


def test_answers_asked_one_by_one_are_one_group_also_across_sessions(harness: Harness) -> None:
    for index in range(3):
        keep_group(harness, f"one{index}", [1, 2], [[3 + index]], session=f"s{index}", stop_reason="length")
    keep_group(harness, "later", [1, 2], [[9]], weights="s:train:0/sampler/2")
    assert read_groups(harness, "?run=s:train:0") == [["later/0"], ["one0/0", "one1/0", "one2/0"]]
    group = read_first_group(harness, "run=s:train:0&sort=newest&order=asc")
    assert (group["num_sampled"], group["prompt_tokens"], group["weights"]) == (3, 2, "s:train:0/sampler/1")
    assert {answer["stop_reason"] for answer in group["answers"]} == {"length"}
    both = harness.get(f"dashboard/groups?run=s:train:0&prompt={group['prompt_id']}").json()
    assert both["cursor"]["total_count"] == 2, "one prompt over the weights"
    assert harness.get(f"dashboard/groups?prompt={'0' * 32}").json()["groups"] == []


def test_a_question_is_what_differs_between_the_prompts_of_a_run(harness: Harness) -> None:
    keep_group(harness, "a", [1, 2, 30, 8, 9], [[3]])
    assert read_first_group(harness, "run=s:train:0")["question"] == "1 2 30 8 9", "nothing to compare with"
    keep_group(harness, "b", [1, 2, 40, 41, 8, 9], [[3]])
    keep_group(harness, "c", [5, 5], [[3]], run="other:train:0")
    groups = harness.get("dashboard/groups?sort=newest&order=asc").json()["groups"]
    assert [group["question"] for group in groups] == ["30", "40 41", "5 5"]
    assert [group["is_whole_prompt"] for group in groups] == [False, False, True]
    keep_group(harness, "d", [1, 2, 8, 9], [[3]])
    assert read_first_group(harness, "run=s:train:0")["question"] == "1 2 8 9", "nothing differs in it"


def test_divergence_is_that_of_plain_numbers(harness: Harness) -> None:
    digests = keep_group(harness, "a", [1], [[3, 4, 5], [6, 7], [8]])
    training = [np.array([-0.25, -0.75, -0.5], np.float32), np.array([-9, -0.125], np.float32)]
    advantages = np.array([1, 0, 3], np.float32)
    store = harness.services.stored_samples
    store.note_training([TrainedAnswer("alice", digests[0], "s:train:0", 3, 0.5, training[0], advantages)])
    store.note_training([TrainedAnswer("alice", digests[1], "s:train:0", 4, -0.5, training[1][1:])])

    def expect(d_T: list[float]) -> tuple[float, float]:
        ratios = [math.exp(d) for d in d_T]
        k3 = sum(ratio - 1 - d for ratio, d in zip(ratios, d_T, strict=True)) / len(d_T)
        return k3, sum(ratios) ** 2 / len(d_T) / sum(ratio**2 for ratio in ratios)

    listed = harness.get("dashboard/groups?run=s:train:0").json()
    first, second = [0.25, -0.25, 0.0], [0.375]
    for summary, d_T in (
        (listed["selection"], first + second),
        (listed["groups"][0], first + second),
        (listed["steps"][0], first),
        (listed["steps"][1], second),
    ):
        k3, share = expect(d_T)
        assert summary["kl"] == pytest.approx(k3, rel=1e-12) and summary["trained_tokens"] == len(d_T)
        assert summary["effective_share"] == pytest.approx(share, rel=1e-12)
    answers = listed["groups"][0]["answers"]
    assert [step["step"] for step in listed["steps"]] == [3, 4] and answers[2]["kl"] is None
    assert answers[1]["kl"] == pytest.approx(expect(second)[0], rel=1e-12)
    sequence = harness.get("dashboard/samples/a").json()["sequences"][1]
    assert sequence["training_logprobs"] == [None, -0.125], "only the last token was trained on"
    assert harness.get("dashboard/samples/a").json()["sequences"][0]["advantages"] == [1.0, 0.0, 3.0]


def test_samples_of_a_run_are_exported_as_json_lines_and_as_parquet(harness: Harness) -> None:
    model_id = harness.model()
    digests = keep_group(harness, "a", [1, 2], [[3, 4], [5]], run=model_id)
    keep_group(harness, "b", [1, 2], [[6]], run=model_id)
    keep_group(harness, "c", [1, 2], [[6]], run="other", weights="other/sampler/1")
    store = harness.services.stored_samples
    store.set_rewards("alice", {digests[0]: 0.25})
    advantages = np.array([0.5, 1.5], np.float32)
    store.note_training([TrainedAnswer("alice", digests[0], model_id, 7, 1.0, -advantages, advantages)])
    answer = harness.get(f"dashboard/runs/{model_id}/samples")
    assert f"samples-{model_id.replace(':', '-')}.jsonl" in answer.headers["content-disposition"]
    rows = [json.loads(line) for line in answer.text.splitlines()]
    assert [(row["request_id"], row["number"]) for row in rows] == [("a", 0), ("a", 1), ("b", 0)]
    assert len({row["group"] for row in rows}) == 1
    first = rows[0]
    assert (first["prompt"], first["answer"], first["prompt_tokens"], first["answer_tokens"]) == (
        "1 2",
        "3 4",
        [1, 2],
        [3, 4],
    )
    assert (first["reward"], first["step"], first["advantage"], first["trained_in"]) == (0.25, 7, 1.0, model_id)
    assert first["advantages"] == [0.5, 1.5] and first["training_logprobs"] == [-0.5, -1.5]
    assert rows[1]["reward"] is None and rows[1]["logprobs"] == [-0.5] and rows[1]["stop_reason"] == "stop"
    table = pyarrow.parquet.read_table(
        io.BytesIO(harness.get(f"dashboard/runs/{model_id}/samples?format=parquet").content)
    )
    assert table.to_pylist() == rows
    assert harness.get(f"dashboard/runs/{model_id}/samples?format=csv").status_code == 400
    assert harness.get(f"dashboard/runs/{model_id}/samples", BOB).status_code == 404


def test_a_run_without_samples_is_an_empty_file(harness: Harness) -> None:
    path = f"dashboard/runs/{harness.model()}/samples"
    assert harness.get(path).content == b""
    assert pyarrow.parquet.read_table(io.BytesIO(harness.get(f"{path}?format=parquet").content)).num_rows == 0


def test_parquet_without_pyarrow_is_refused_with_what_to_install(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    answer = harness.get(f"dashboard/runs/{harness.model()}/samples?format=parquet")
    assert answer.status_code == 501 and "tinsmith[batch]" in answer.json()["detail"]
