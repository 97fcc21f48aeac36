"""Answers that think first: where a grammar begins, and the budget of the reasoning. With nano, whose template writes
reasoning between two tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from support.local_sampling import make_sample, run
from tinsmith.backends.torch.model import BaseModel
from tinsmith.base_models import nano, read_shape
from tinsmith.chat.chats import ChatRequest
from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.chat.harmony import new_choice
from tinsmith.chat.messages import MessageRequest
from tinsmith.chat.responses import ResponseRequest
from tinsmith.chat.tokenizer import ChatTemplate, ModelTokenizer
from tinsmith.errors import RequestError
from tinsmith.samplers.local.engine import LocalSampler
from tinsmith.samplers.local.grammar import GrammarCache
from tinsmith.samplers.local.reasoning import MAX_SPACE
from tinsmith.types import Adjustments, Grammar, ReasoningSpan, Sample
from tinsmith.wire.fields import validate

SHAPE = read_shape(nano.MODEL_NAME, nano.path())
TEXT = ModelTokenizer(SHAPE)
OPEN, CLOSE, END, NEWLINE = (
    TEXT.encode(text, special=False)[0] for text in ("<think>", "</think>", "<|im_end|>", "\n")
)
YES = Grammar("regex", "yes")
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
          "required": ["sum"], "additionalProperties": False}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return BaseModel.load(SHAPE, device="cpu", dtype="float32")


class Walk:
    """An answer of chosen tokens."""

    def __init__(self, base: BaseModel, reasoning: ReasoningSpan, grammar: Grammar | None = YES) -> None:
        cache = GrammarCache(base.tokenizer, base.vocab_size, frozenset([END]))
        constraint = cache.constraint(Adjustments(grammar=grammar, reasoning=reasoning))
        assert constraint is not None
        self.constraint = constraint

    def allows(self, *token_ids: int) -> bool:
        mask_V = self.constraint.token_mask()
        return all(mask_V[token_id] for token_id in token_ids)

    def push(self, *token_ids: int) -> Walk:
        for token_id in token_ids:
            assert self.allows(token_id), token_id
            self.constraint.push(token_id)
        return self


LETTERS = TEXT.encode("yes", special=False)


def test_a_grammar_holds_after_the_reasoning_and_white_space(base: BaseModel) -> None:
    walk = Walk(base, ReasoningSpan(OPEN, CLOSE, is_open=True))
    walk.push(*TEXT.encode('no "1', special=False))
    assert walk.allows(CLOSE, NEWLINE) and not walk.allows(END), "an answer follows"
    walk.push(CLOSE)
    assert walk.allows(LETTERS[0], NEWLINE) and not walk.allows(CLOSE) and not walk.allows(END)
    walk.push(*[NEWLINE] * MAX_SPACE)
    assert not walk.allows(NEWLINE)
    walk.push(*LETTERS)
    assert walk.constraint.is_finished or np.flatnonzero(walk.constraint.token_mask()).tolist() == [END]


def test_an_answer_may_open_its_reasoning_only_at_its_beginning(base: BaseModel) -> None:
    walk = Walk(base, ReasoningSpan(OPEN, CLOSE))
    assert walk.allows(OPEN, LETTERS[0]) and not walk.allows(NEWLINE)
    assert not Walk(base, ReasoningSpan(OPEN, CLOSE)).push(LETTERS[0]).allows(OPEN)
    walk.push(OPEN, NEWLINE, CLOSE)
    assert not walk.allows(OPEN)


def test_white_space_that_a_grammar_begins_with_belongs_to_its_text(base: BaseModel) -> None:
    walk = Walk(base, ReasoningSpan(OPEN, CLOSE, is_open=True), Grammar("regex", "[\n ]{3}yes"))
    walk.push(CLOSE, NEWLINE, NEWLINE, NEWLINE, *LETTERS)


@pytest.mark.parametrize("grammar", [YES, None])
@pytest.mark.parametrize("budget", [0, 1, 3])
def test_at_its_budget_the_reasoning_is_closed(base: BaseModel, budget: int, grammar: Grammar | None) -> None:
    walk = Walk(base, ReasoningSpan(OPEN, CLOSE, max_tokens=budget), grammar).push(OPEN)
    for _ in range(budget):
        assert walk.allows(LETTERS[0], CLOSE)
        walk.push(NEWLINE)
    assert np.flatnonzero(walk.constraint.token_mask()).tolist() == [CLOSE]
    walk.push(CLOSE)
    assert walk.allows(END) == (grammar is None)


# Through requests.


def opening_tokenizer(directory: Path, switch: str = "enable_thinking") -> ModelTokenizer:
    """Nano's, with a template that opens the reasoning if the variable `switch` is true."""
    for file in nano.path().iterdir():
        (directory / file.name).symlink_to(file)
    template = (
        TEXT.template.source.replace("enable_thinking", switch)
        + f"{{%- if add_generation_prompt and {switch} -%}}{{{{ '<think>\\n' }}}}{{%- endif -%}}"
    )
    (directory / "chat_template.jinja").write_text(template)
    config = directory / "tokenizer_config.json"
    fields = json.loads(config.read_text())
    config.unlink()
    config.write_text(json.dumps({name: value for name, value in fields.items() if name != "chat_template"}))
    return ModelTokenizer(read_shape(nano.MODEL_NAME, directory))


def reasoning_of(plan: GenerationPlan) -> ReasoningSpan | None:
    return plan.params.adjustments.reasoning if plan.params.adjustments else None


def plan_chat(tokenizer: ModelTokenizer, **fields: object) -> GenerationPlan:
    body = {"model": "m", "messages": MESSAGES, "response_format": FORMAT, "max_tokens": 60, **fields}
    return validate(ChatRequest, body).plan(tokenizer)


def test_a_request_knows_whether_its_prompt_has_opened_or_closed_the_reasoning(tmp_path: Path) -> None:
    opening = opening_tokenizer(tmp_path)
    assert reasoning_of(plan_chat(opening)) == ReasoningSpan(OPEN, CLOSE)
    assert reasoning_of(plan_chat(opening, enable_thinking=True)) == ReasoningSpan(OPEN, CLOSE, is_open=True)
    plan = plan_chat(opening, chat_template_kwargs={"enable_thinking": True}, thinking_token_budget=7)
    assert reasoning_of(plan) == ReasoningSpan(OPEN, CLOSE, is_open=True, max_tokens=7)
    assert plan.reasoning_tags is not None and plan.counted_tags is not None
    answer = [*MESSAGES, {"role": "assistant", "content": '{"sum": '}]
    assert reasoning_of(plan_chat(opening, messages=answer, continue_final_message=True)) is None
    closed = [*MESSAGES, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n"}]
    assert reasoning_of(plan_chat(opening, messages=closed, continue_final_message=True)) is None
    assert reasoning_of(plan_chat(opening, response_format=None)) is None, "nothing to hold"
    assert reasoning_of(plan_chat(opening, response_format=None, thinking_token_budget=0)) is not None


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_every_protocol_turns_reasoning_on_by_the_variable_of_the_template(tmp_path: Path, switch: str) -> None:
    tokenizer = opening_tokenizer(tmp_path, switch)
    assert tokenizer.template.thinking_switch == switch
    body: dict[str, Any] = {"model": "m", "messages": MESSAGES, "max_tokens": 2000}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    plans = [
        plan_chat(tokenizer, enable_thinking=True),
        validate(MessageRequest, {**body, "thinking": thinking}).plan(tokenizer),
        validate(MessageRequest, {**body, "thinking": {"type": "adaptive"}}).plan(tokenizer),
    ]
    for plan in plans:
        assert plan.counted_tags is not None and plan.counted_tags.in_reasoning
        assert not plan.ignored
    off = plan_chat(tokenizer, reasoning_effort="none")
    assert off.counted_tags is None or not off.counted_tags.in_reasoning
    assert not off.ignored


@pytest.mark.parametrize("template", ["{{ messages[0].thinking }}", "{% set thinking = 1 %}{{ thinking }}", "</think>"])
def test_reasoning_of_messages_is_no_switch(template: str) -> None:
    assert ChatTemplate(template, {}).thinking_switch is None


def test_every_protocol_has_a_budget_or_a_schema_after_reasoning(tmp_path: Path) -> None:
    opening = opening_tokenizer(tmp_path)
    body: dict[str, Any] = {"model": "m", "messages": MESSAGES, "max_tokens": 2000}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    plan = validate(
        MessageRequest,
        {**body, "thinking": thinking, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ).plan(opening)
    assert reasoning_of(plan) == ReasoningSpan(OPEN, CLOSE, is_open=True, max_tokens=1024, is_advisory=True)
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    response = validate(ResponseRequest, {"model": "m", "input": "What is 3 + 4?", "text": text}).plan(opening)
    assert reasoning_of(response) == ReasoningSpan(OPEN, CLOSE) and response.reasoning_tags is not None


def test_a_budget_without_tags_of_reasoning_is_refused(tmp_path: Path) -> None:
    for file in nano.path().iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    with pytest.raises(RequestError, match="thinking_token_budget"):
        plan_chat(ModelTokenizer(read_shape(nano.MODEL_NAME, tmp_path)), thinking_token_budget=3)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("temperature", [1.0, *(pytest.param(x, marks=pytest.mark.extended) for x in (0.0, 2.0))])
@pytest.mark.parametrize("budget", [None, 6])
@pytest.mark.parametrize("tool", [False, True])
def test_an_answer_of_a_schema_or_a_call_follows_the_reasoning(
    base: BaseModel, tmp_path: Path, temperature: float, budget: int | None, tool: bool
) -> None:
    function = {"type": "function", "function": {"name": "answer", "parameters": SCHEMA}}
    fields: dict[str, Any] = {}
    if tool:  # one call, so that the end does not depend on how many more the model begins
        fields = {"response_format": None, "tools": [function], "tool_choice": "required", "parallel_tool_calls": False}
    limits = {} if budget is None else {"thinking_token_budget": budget}
    tokenizer = opening_tokenizer(tmp_path)
    for is_open in (False, True):
        plan = plan_chat(
            tokenizer, enable_thinking=is_open, max_tokens=400, temperature=temperature, **fields, **limits
        )
        samples = [_sample(plan, seed) for seed in range(3)]
        for result in run(LocalSampler(base, {}), *samples).values():
            (sampled,) = result.sequences
            choice = new_choice(plan, tokenizer, 0)
            for token_id in sampled.tokens_T.tolist():
                choice.push(token_id, -1.0)
            choice.finish()
            delta = choice.take_delta()
            if budget is not None:
                assert choice.reasoning_tokens <= budget + 2
            if sampled.stop_reason == "length":
                assert budget is None and choice.reasoning_tokens > 300, "it thought for long"
                continue
            answer = delta.calls[0].arguments if tool else delta.text
            jsonschema.validate(json.loads(answer), SCHEMA)


def _sample(plan: GenerationPlan, seed: int) -> Sample:
    prompt = np.array(plan.prompts[0], np.int32)
    return make_sample(str(seed), prompt, plan.params)
