"""`Rollout`: conversations of a model with an environment, as trajectories that a trainer can use.

Each of a row's `num_rollouts` begins with the messages of a column. Before every answer they are rendered with the
base's chat template, so answer t of rollout r is what any client samples for that prompt with `row_seed(seed, i, r,
t)`. `ended` says why a rollout ended: `done` (the environment sent no message), `turns` (after `max_turns` answers),
`length` (an answer was cut at `max_tokens`), `context` (the next prompt leaves no room for an answer).

A trajectory is `{turns, datums, reward, ended}`:
- `turns`: for each answer `{prompt_tokens, tokens, logprobs, text, stop_reason, reward}`. The tokens are those sampled;
  the next prompt may tokenize the same text differently;
- `datums`: the same as training data, `{model_input, loss_fn_inputs: {target_tokens, logprobs, mask}}`, shifted by one.
  mask is 1 on the model's tokens; logprobs are 0 elsewhere. Answers share a datum as long as each prompt begins with
  all tokens before it; where the template removes something (the reasoning, say), the next datum begins;
- `reward`: the sum of the answers' rewards, None if there are none. `grade` adds the score of the last answer.

Environments are declared, not programmed: `Turns` sends the texts of a column, `Retry` asks again until an answer
passes. An environment that needs code belongs into a function that runs on workers.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple

from tinsmith.batch.formats.registry import build_dataclass
from tinsmith.batch.operations import OPERATION_REGISTRY
from tinsmith.batch.operations.base import (
    MaxTokens,
    NonEmpty,
    RowOperation,
    RowService,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    check_template,
    check_text,
    column_of,
    integer_between,
    render,
    seed_for,
)
from tinsmith.batch.operations.grade import Grade
from tinsmith.batch.operations.sample import messages_of, sampling_request
from tinsmith.batch.types import Row
from tinsmith.errors import NotSupportedError, UserError


class RewardReply(NamedTuple):
    """`message` None ends the conversation."""

    reward: float | None
    message: str | None


@dataclass(frozen=True)
class Environment(ABC):
    @abstractmethod
    def check(self) -> None:
        """Check the environment's fields. Raises UserError."""

    @abstractmethod
    async def reply(self, answer: str, turn: int, row: Row, service: RowService, key: str) -> RewardReply:
        """The reply to answer number `turn`, from 0. `key` is unique among the row's answers."""


@dataclass(frozen=True)
class Turns(Environment):
    """The user's turns after the first answer are the texts in a column, in order."""

    column: str
    kind: str = "turns"

    def check(self) -> None:
        check_text("environment.column", self.column)

    async def reply(self, answer: str, turn: int, row: Row, service: RowService, key: str) -> RewardReply:
        turns = column_of(row, self.column)
        if not isinstance(turns, list) or not all(isinstance(text, str) for text in turns):
            raise ValueError(f"column {self.column!r} must hold a list of strings")
        return RewardReply(None, turns[turn] if turn < len(turns) else None)


@dataclass(frozen=True)
class Retry(Environment):
    """Each answer is graded: the score is its reward, and one that does not pass is answered with `feedback`, a
    template of the row's columns, the answer (as the grade's `output`) and its score."""

    grade: Grade
    feedback: str = "That is not right. Try again."
    kind: str = "retry"

    def __post_init__(self) -> None:
        if isinstance(self.grade, Mapping):  # read from a payload
            object.__setattr__(self, "grade", build_dataclass(Grade, self.grade, "environment.grade"))

    def check(self) -> None:
        check_grade("environment.grade", self.grade)
        check_template("environment.feedback", self.feedback)

    async def reply(self, answer: str, turn: int, row: Row, service: RowService, key: str) -> RewardReply:
        score = await self.grade.score_of(answer, row, service, key)
        if score >= self.grade.passing:
            return RewardReply(score, None)
        return RewardReply(score, render(self.feedback, {**row, self.grade.output: answer, self.grade.score: score}))


KINDS: dict[str, type[Environment]] = {"turns": Turns, "retry": Retry}


def environment_of(environment: object) -> Environment:
    """Build an environment from its payload. Raises UserError, and NotSupportedError for an object that is code."""
    if isinstance(environment, Environment):
        return environment
    if isinstance(environment, Mapping):
        cls = KINDS.get(str(environment.get("kind")))
        if cls is None:
            raise UserError(f"environment.kind is {environment.get('kind')!r}; it must be one of {sorted(KINDS)}")
        return build_dataclass(cls, environment, "environment")
    raise NotSupportedError(
        f"environment is a {type(environment).__name__}; the service runs Turns and Retry only. Run your own in a "
        "function on workers (Dataset.map(function, ...)), and sample there with the SDK"
    )


def check_grade(name: str, grade: object) -> None:
    if not isinstance(grade, Grade):
        raise UserError(f"{name} is {grade!r}; it must be a Grade")
    grade.check()


MAX_ROLLOUTS = 1024
MAX_TURNS = 1000


@dataclass
class _Trajectory:
    turns: list[Row] = field(default_factory=list)
    end_reason: str = "turns"

    @property
    def reward(self) -> float | None:
        rewards = [turn["reward"] for turn in self.turns if turn["reward"] is not None]
        return sum(rewards) if rewards else None

    def to_dict(self) -> Row:
        return {"turns": self.turns, "datums": datums_of(self.turns), "reward": self.reward, "ended": self.end_reason}


def datums_of(turns: list[Row]) -> list[Row]:
    """The training data of a conversation: one datum for each run of answers whose prompts continue all tokens
    before."""
    datums: list[tuple[list[int], list[float], list[float]]] = []
    for turn in turns:
        prompt, tokens = turn["prompt_tokens"], turn["tokens"]
        before = datums[-1][0] if datums else None
        if before is None or prompt[: len(before)] != before:
            datums.append(([], [], []))
        all_tokens, logprobs, mask = datums[-1]
        new = prompt[len(all_tokens) :] + tokens
        all_tokens += new
        logprobs += [0.0] * (len(new) - len(tokens)) + turn["logprobs"]
        mask += [0.0] * (len(new) - len(tokens)) + [1.0] * len(tokens)
    return [
        {
            "model_input": tokens[:-1],
            "loss_fn_inputs": {"target_tokens": tokens[1:], "logprobs": logprobs[1:], "mask": mask[1:]},
        }
        for tokens, logprobs, mask in datums
    ]


@OPERATION_REGISTRY.type_register(name="rollout")
@dataclass(frozen=True)
class Rollout(RowOperation):
    """`environment` is `Turns(...)` or `Retry(...)`."""

    name: ClassVar[str] = "rollout"

    model: NonEmpty
    messages: NonEmpty
    environment: Environment
    grade: Grade | None = None
    num_rollouts: Annotated[int, integer_between(1, MAX_ROLLOUTS)] = 1
    max_turns: Annotated[int, integer_between(1, MAX_TURNS)] = 8
    max_tokens: MaxTokens = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1
    stop: Stop = None
    seed: Seed = 0
    into: NonEmpty = "rollouts"

    def __post_init__(self) -> None:
        object.__setattr__(self, "environment", environment_of(self.environment))
        if isinstance(self.grade, Mapping):  # read from a payload
            object.__setattr__(self, "grade", build_dataclass(Grade, self.grade, "grade"))

    def check(self) -> None:
        super().check()
        self.environment.check()
        if self.grade is not None:
            check_grade("grade", self.grade)

    async def answer(self, row: Row, service: RowService) -> Row:
        trajectories = await asyncio.gather(*(self._rollout(row, service, index) for index in range(self.num_rollouts)))
        return {**row, self.into: [trajectory.to_dict() for trajectory in trajectories]}

    async def _rollout(self, row: Row, service: RowService, index: int) -> _Trajectory:
        text, context = await service.text(self.model), await service.context(self.model)
        messages: list[dict[str, Any]] = list(messages_of(column_of(row, self.messages), self.messages))
        trajectory = _Trajectory()
        for turn in range(self.max_turns):
            prompt = text.chat(messages)
            if turn and len(prompt) + (self.max_tokens or 1) > context:
                trajectory.end_reason = "context"
                break
            seed = seed_for(self.seed, service.row_idx, index, turn)
            request = sampling_request(
                prompt, self.max_tokens, self.temperature, self.top_p, self.top_k, self.stop, seed
            )
            key = f"{index}.{turn}"
            (answer,) = (await service.sample(self.model, request, key)).sequences
            answer_text = text.decode(answer.tokens)
            reward, message = await self.environment.reply(answer_text, turn, row, service, f"{key}.g")
            sampled = {
                "prompt_tokens": prompt,
                "tokens": answer.tokens,
                "logprobs": answer.logprobs,
                "text": answer_text,
            }
            trajectory.turns.append({**sampled, "stop_reason": answer.stop_reason, "reward": reward})
            if message is None or answer.stop_reason == "length":
                trajectory.end_reason = "done" if message is None else "length"
                break
            messages += [{"role": "assistant", "content": answer_text}, {"role": "user", "content": message}]
        if self.grade is not None:
            last = trajectory.turns[-1]
            score = await self.grade.score_of(last["text"], row, service, f"{index}.end")
            last["reward"] = score + (last["reward"] or 0.0)
        return trajectory
