"""Rollouts with a scripted service: the course and end of conversations, and their datums."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from tinsmith import batch
from tinsmith.batch.operations import payload_of, steps_of
from tinsmith.batch.operations.base import Answer, Sampled
from tinsmith.batch.operations.rollout import datums_of
from tinsmith.errors import UserError


class Letters:
    """A tokenizer with one token per character, and a chat template with one token per role."""

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        marks = {"user": 1, "assistant": 2}
        spoken = [token for message in messages for token in (marks[message["role"]], *map(ord, message["content"]), 3)]
        return [*spoken, 2]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(token) for token in tokens if token > 3)


class Scripted:
    """Answers in the order of rollouts and turns; records the requests."""

    row_idx = 4

    def __init__(self, answers: Mapping[str, str], context: int = 1000) -> None:
        self.answers = answers
        self.requests: dict[str, dict[str, Any]] = {}
        self._context = context

    async def text(self, model: str) -> Letters:
        return Letters()

    async def context(self, model: str) -> int:
        return self._context

    async def sample(self, model: str, request: dict[str, Any], key: str = "") -> Sampled:
        assert key not in self.requests, "a question of its own for everything"
        self.requests[key] = request
        said = self.answers[key]
        cut = said.endswith("~")
        tokens = [*map(ord, said.removesuffix("~")), *([] if cut else [3])]
        return Sampled([Answer(tokens, [-0.5] * len(tokens), "length" if cut else "stop")])


def run_rollout(service: Scripted, row: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    rollout = batch.Rollout("m", messages="q", **fields)
    (rollout,) = steps_of(payload_of([rollout])) or []
    anything: Any = service
    return asyncio.run(rollout.answer(row, anything))["rollouts"]


def test_turns_of_a_column_follow_one_another() -> None:
    service = Scripted({"0.0": "a", "0.1": "b", "1.0": "c", "1.1": "d"})
    first, second = run_rollout(
        service, {"q": "x", "rest": ["y"]}, environment=batch.Turns("rest"), num_rollouts=2, seed=9
    )
    assert [turn["text"] for turn in first["turns"]] == ["a", "b"]
    assert [turn["text"] for turn in second["turns"]] == ["c", "d"]
    assert (first["ended"], first["reward"]) == ("done", None)
    assert service.requests["1.1"]["sampling_params"]["seed"] == batch.row_seed(9, 4, 1, 1)
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "y"}]
    assert service.requests["1.1"]["prompt"]["chunks"][0]["tokens"] == Letters().chat(said)


def test_another_try_until_it_passes() -> None:
    grade = batch.Grade(by="exact", reference="right", output="answer")
    retry = batch.Retry(grade, feedback="{answer} scores {score}, not {right}")
    service = Scripted({"0.0": "no", "0.1": "yes"})
    (rollout,) = run_rollout(service, {"q": "x", "right": "yes"}, environment=retry)
    assert [turn["reward"] for turn in rollout["turns"]] == [0.0, 1.0]
    assert (rollout["reward"], rollout["ended"]) == (1.0, "done")
    assert Letters().decode(rollout["turns"][1]["prompt_tokens"]) == "xnono scores 0.0, not yes"


def test_how_a_conversation_ends() -> None:
    turns = batch.Turns("rest")
    row = {"q": "x", "rest": ["y"] * 9}
    answers = {f"0.{turn}": "abc" for turn in range(9)}
    (rollout,) = run_rollout(Scripted(answers), row, environment=turns, max_turns=3)
    assert (len(rollout["turns"]), rollout["ended"]) == (3, "turns")
    (rollout,) = run_rollout(Scripted({**answers, "0.1": "ab~"}), row, environment=turns)
    assert (len(rollout["turns"]), rollout["ended"]) == (2, "length")
    (rollout,) = run_rollout(Scripted(answers, context=20), row, environment=turns, max_tokens=5)
    assert (len(rollout["turns"]), rollout["ended"]) == (2, "context")
    end = batch.Grade(by="contains", reference="q")
    (rollout,) = run_rollout(Scripted({"0.0": "max"}), {"q": "x", "rest": []}, environment=turns, grade=end)
    assert (rollout["reward"], rollout["turns"][-1]["reward"]) == (1.0, 1.0)


def test_a_model_grade_has_its_own_requests() -> None:
    grade = batch.Grade(by="model", model="m", template="{output}?", scores={"good": 1, "bad": 0})
    answers = {"0.0": "a", "0.0.g": "so BAD", "0.1": "a", "0.1.g": "good, not bad? good", "0.end": "good"}
    service = Scripted(answers)
    (rollout,) = run_rollout(service, {"q": "x"}, environment=batch.Retry(grade), grade=grade)
    assert [turn["reward"] for turn in rollout["turns"]] == [0.0, 2.0]
    seeds = [request["sampling_params"]["seed"] for request in service.requests.values()]
    assert len(set(seeds)) == 5


def test_datums_hold_every_sampled_token_once() -> None:
    turns = [
        {"prompt_tokens": [1, 2], "tokens": [3, 4], "logprobs": [-0.1, -0.2]},
        {"prompt_tokens": [1, 2, 3, 4, 5], "tokens": [6], "logprobs": [-0.3]},
        {"prompt_tokens": [1, 2, 9], "tokens": [7, 8], "logprobs": [-0.4, -0.5]},  # something was taken out
    ]
    first, second = datums_of(turns)
    assert first["model_input"] == [1, 2, 3, 4, 5]
    inputs = first["loss_fn_inputs"]
    assert inputs["target_tokens"] == [2, 3, 4, 5, 6]
    assert inputs["mask"] == [0, 1, 1, 0, 1]
    assert inputs["logprobs"] == [0, -0.1, -0.2, 0, -0.3]
    assert second["model_input"] == [1, 2, 9, 7]
    assert second["loss_fn_inputs"] == {
        "target_tokens": [2, 9, 7, 8], "logprobs": [0, 0, -0.4, -0.5], "mask": [0, 0, 1, 1],
    }  # fmt: skip


def test_seeds_do_not_change_between_versions() -> None:
    """Recorded results stay reproducible by their seeds."""
    assert batch.row_seed(0, 0) == 8000154919901005727
    assert batch.row_seed(1, 2, 3, 4) == 2930429999423258495
    drawn = {
        batch.row_seed(seed, row, rollout, turn)
        for seed in (0, 1)
        for row in range(9)
        for rollout in range(9)
        for turn in range(3)
    }
    assert len(drawn) == 2 * 9 * 9 * 3
    assert all(0 <= seed < 2**63 for seed in drawn)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"environment": {"kind": "chess"}}, "environment.kind is 'chess'"),
        ({"environment": {"kind": "turns", "row": "a"}}, "environment has no field ['row']"),
        ({"environment": {"kind": "retry", "grade": {"by": "exact"}}}, "needs 'reference'"),
        ({"environment": {"kind": "retry", "grade": 3}}, "environment.grade is 3"),
        ({"environment": batch.Turns(""), "num_rollouts": 1}, "environment.column is ''"),
        ({"environment": batch.Turns("c"), "num_rollouts": 0}, "num_rollouts is 0"),
        ({"environment": batch.Turns("c"), "max_turns": 1.5}, "max_turns is 1.5"),
    ],
)
def test_a_rollout_that_cannot_be_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        payload_of([batch.Rollout("m", messages="q", **fields)])
    assert message in str(caught.value)
