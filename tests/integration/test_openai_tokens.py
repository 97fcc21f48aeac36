"""Token ids in OpenAI's endpoints: prompts and answers as ids, whole and streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from support.chat_models import make_tool_model
from tinsmith.base_models import nano, read_shape
from tinsmith.chat.chats import ChatRequest, CompletionRequest
from tinsmith.chat.choices import Choice
from tinsmith.chat.generation_request import GenerationPlan
from tinsmith.chat.messages import MessageRequest
from tinsmith.chat.results import ChatAnswer, CompletionAnswer
from tinsmith.chat.texts import Text, thinking_of
from tinsmith.chat.tokens import TokenizeRequest
from tinsmith.types import SampledSequence, SampleResult, TopK
from tinsmith.wire.fields import validate

SHAPE = read_shape(nano.MODEL_NAME, nano.path())
TEXT = Text(SHAPE)
THEIRS = AutoTokenizer.from_pretrained(str(nano.path()))
SAY: list[dict[str, Any]] = [{"role": "user", "content": "Say hello."}]


def chat(messages: list[dict[str, Any]] = SAY, text: Text = TEXT, **fields: object) -> GenerationPlan:
    return validate(ChatRequest, {"model": "m", "messages": messages, **fields}).plan(text)


def completion(**fields: object) -> GenerationPlan:
    return validate(CompletionRequest, {"model": "m", "prompt": "a", **fields}).plan(TEXT)


def ids(written: str) -> list[int]:
    return THEIRS.encode(written, add_special_tokens=False)


def result(plan: GenerationPlan, written: str, num_prompt_top: int = 0) -> SampleResult:
    """An answer with increasing logprobs, and top tokens of the prompt."""
    tokens = np.array(ids(written), np.int32)
    prompt = len(plan.prompts[0])
    return SampleResult(
        "r",
        (SampledSequence(tokens, -np.arange(1, len(tokens) + 1, dtype=np.float32), "stop"),),
        prompt_logprobs_T=np.array([np.nan, *(-1.0 - np.arange(prompt - 1))], np.float32),
        topk_prompt=TopK(
            np.tile(np.arange(num_prompt_top, dtype=np.int32), (prompt, 1)),
            np.tile(-np.arange(num_prompt_top, dtype=np.float32) / 8, (prompt, 1)),
        ),
    )


ENDED = "yes no<|im_end|>"


@pytest.mark.parametrize("stop", [None, "no"])
def test_a_chat_has_every_token_that_was_sampled_and_a_logprob_of_each(stop: str | None) -> None:
    """These include the end token and the tokens of a stop string, which are not in the text."""
    plan = chat(return_token_ids=True, logprobs=True, stop=stop)
    answer: Any = ChatAnswer(plan, TEXT).whole([result(plan, ENDED)])
    assert (
        answer["prompt_token_ids"]
        == list(plan.prompts[0])
        == THEIRS.apply_chat_template(SAY, add_generation_prompt=True)["input_ids"]
    )
    choice = answer["choices"][0]
    assert choice["token_ids"] == ids(ENDED)
    assert choice["message"]["content"] == ("yes no" if stop is None else "yes ")
    assert [token_logprob["logprob"] for token_logprob in choice["logprobs"]["content"]] == [
        -1.0 - i for i in range(len(ids(ENDED)))
    ]
    plain: Any = ChatAnswer(chat(), TEXT).whole([result(plan, ENDED)])
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


def test_tokens_are_named_by_their_ids() -> None:
    plan = chat(return_tokens_as_token_ids=True, logprobs=True)
    choice: Any = ChatAnswer(plan, TEXT).whole([result(plan, ENDED)])["choices"]
    names = [f"token_id:{token}" for token in ids(ENDED)]
    assert [token_logprob["token"] for token_logprob in choice[0]["logprobs"]["content"]] == names
    plan = completion(return_tokens_as_token_ids=True, logprobs=True)
    choice = CompletionAnswer(plan, TEXT).whole([result(plan, ENDED)])["choices"]
    assert choice[0]["logprobs"]["tokens"] == names
    assert len(choice[0]["logprobs"]["token_logprobs"]) == len(choice[0]["logprobs"]["text_offset"]) == len(names)


@pytest.mark.parametrize("chats", [True, False])
def test_a_stream_has_the_ids_and_logprobs_of_the_whole(chats: bool) -> None:
    options: dict[str, Any] = {"return_token_ids": True, "stop": ["ll nev"]}
    plan = chat(logprobs=True, **options) if chats else completion(logprobs=1, **options)
    answer, written = (ChatAnswer if chats else CompletionAnswer), "one \u4f60 <think> it shall never be"
    expected: Any = answer(plan, TEXT).whole([result(plan, written)])["choices"]
    streamed = answer(plan, TEXT)
    ((_, first),) = list[Any](streamed.begun())
    assert (first if chats else first["choices"][0])["prompt_token_ids"] == list(plan.prompts[0])
    choice = Choice(plan, TEXT, 0)
    chunks: list[Any] = [first]
    for position, token in enumerate(ids(written)):
        choice.push(token, -1.0 - position)
        chunks += [chunk for _, chunk in streamed.added(choice, choice.piece(), None)]
    choice.finish()
    chunks += [chunk for _, chunk in streamed.added(choice, choice.piece(), "stop")]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    choices_of_chunks = [chunk["choices"][0] for chunk in chunks]
    token_ids = [token for chunk_choice in choices_of_chunks for token in chunk_choice.get("token_ids", [])]
    assert token_ids == expected[0]["token_ids"] == ids(written)
    name = "content" if chats else "token_logprobs"
    logprobs = [
        token_logprob
        for chunk_choice in choices_of_chunks
        for token_logprob in (chunk_choice["logprobs"] or {name: []})[name]
    ]
    assert logprobs == expected[0]["logprobs"][name] and len(logprobs) == len(token_ids)


def test_a_prompt_comes_as_ids_and_goes_with_its_logprobs() -> None:
    prompt = ids("any prompt")
    plan = chat(prompt_token_ids=prompt, prompt_logprobs=2)
    answer: Any = ChatAnswer(plan, TEXT).whole([result(plan, "x", 3)])
    assert list(plan.prompts[0]) == prompt and "token_ids" not in answer["choices"][0]
    first, *rows = answer["prompt_logprobs"]
    assert first is None and len(rows) == len(prompt) - 1
    for position, (token, row) in enumerate(zip(prompt[1:], rows, strict=True)):
        expected_entry = {"logprob": -1.0 - position, "rank": None, "decoded_token": THEIRS.decode([token])}
        assert row.pop(str(token)) == expected_entry
        assert {
            int(token_id): (logprob_entry["logprob"], logprob_entry["rank"]) for token_id, logprob_entry in row.items()
        } == {0: (0, 1), 1: (-0.125, 2)}
    plan = completion(prompt_token_ids=prompt, prompt_logprobs=0, return_token_ids=True)
    choice: Any = CompletionAnswer(plan, TEXT).whole([result(plan, "x")])["choices"]
    assert choice[0]["prompt_token_ids"] == prompt
    assert [list(row) for row in choice[0]["prompt_logprobs"][1:]] == [[str(token)] for token in prompt[1:]]


def test_the_last_tokens_of_a_prompt_are_kept() -> None:
    assert list(chat(truncate_prompt_tokens=3).prompts[0]) == list(chat().prompts[0])[-3:]
    assert [list(prompt) for prompt in completion(prompt=[[1, 2, 3], [4]], truncate_prompt_tokens=2).prompts] == [
        [2, 3],
        [4],
    ]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "yes "),
        ({"include_stop_str_in_output": True}, "yes no"),
        ({"min_tokens": 4}, "yes no "),
        ({"min_tokens": 9}, "yes no no"),
        ({"stop": None, "include_stop_str_in_output": True}, "yes no no"),
        ({"stop": None, "include_stop_str_in_output": True, "skip_special_tokens": False}, "yes no no<|im_end|>"),
        ({"stop": None, "skip_special_tokens": False}, "yes no no"),
    ],
)
def test_end_and_special_tokens_of_an_answer(fields: dict[str, Any], text: str) -> None:
    choice = Choice(completion(**({"stop": ["no"]} | fields)), TEXT, 0)
    for token in ids("yes no no<|im_end|>"):
        choice.push(token, -1.0)
    choice.finish()
    assert choice.piece().text == text


def test_a_stop_token_is_shown_if_stops_are() -> None:
    (token_id,) = ids("!")
    for shows in (False, True):
        plan = completion(stop_token_ids=[token_id], include_stop_str_in_output=shows)
        choice = Choice(plan, TEXT, 0)
        for token in (*ids("go"), token_id):
            choice.push(token, -1.0)
        choice.finish()
        assert choice.piece().text == ("go!" if shows else "go")


CONTINUED = [*SAY, {"role": "assistant", "content": "Hello, "}]


@pytest.mark.parametrize("source", ["", "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}.{% endfor %}"])
@pytest.mark.parametrize("content", ["Hello,", " Hello,  ", "a [user] b"])
def test_an_answer_continues_the_last_message_as_transformers_has_it(tmp_path: Path, source: str, content: str) -> None:
    directory = make_tool_model(tmp_path / "m")
    if source:
        (directory / "chat_template.jinja").write_text(source)
    messages = [*SAY, {"role": "assistant", "content": content}]
    theirs = AutoTokenizer.from_pretrained(str(directory))
    expected = theirs.apply_chat_template(messages, continue_final_message=True)["input_ids"]
    text = Text(read_shape("local/x", directory))
    assert list(chat(messages, text, continue_final_message=True).prompts[0]) == expected
    token_ids = validate(TokenizeRequest, {"messages": messages, "continue_final_message": True}).token_ids(text)
    assert list(token_ids) == expected


def test_a_chat_may_come_without_the_beginning_of_an_answer() -> None:
    expected = THEIRS.apply_chat_template(SAY, add_generation_prompt=False)["input_ids"]
    assert list(chat(add_generation_prompt=False).prompts[0]) == expected


LEVELS = "{{ messages[0].content }}|{{ reasoning_effort or 'usual' }}"


def test_an_effort_becomes_the_templates_variable(tmp_path: Path) -> None:
    directory = make_tool_model(tmp_path / "m")
    (directory / "chat_template.jinja").write_text(LEVELS)
    text = Text(read_shape("local/x", directory))
    assert text.decode(chat(text=text, reasoning_effort="low").prompts[0]).endswith("|low")
    assert text.decode(chat(text=text).prompts[0]).endswith("|usual")
    body = {"model": "m", "messages": SAY, "max_tokens": 4, "output_config": {"effort": "medium"}}
    assert text.decode(validate(MessageRequest, body).plan(text).prompts[0]).endswith("|medium")
    for level, model in (("max", text), ("low", TEXT), ("high", TEXT)):
        ignored = validate(MessageRequest, body | {"output_config": {"effort": level}}).plan(model).ignored
        assert f"'{level}'" in ignored["output_config.effort"]
    for usual in ("medium", None):
        assert chat(reasoning_effort=usual).prompts == chat().prompts
    (directory / "chat_template.jinja").write_text("{{ 'off' if enable_thinking is false else 'on' }}")
    text = Text(read_shape("local/y", directory))
    assert [text.decode(chat(text=text, reasoning_effort=effort).prompts[0]) for effort in ("none", None)] == [
        "off",
        "on",
    ]


@pytest.mark.parametrize(
    ("marks", "template"), [(("[THINK]", "[/THINK]"), "{{ '[/THINK]' }}"), (("<seed:think>", "</seed:think>"), "")]
)
def test_thoughts_are_found_by_the_marks_of_the_template(tmp_path: Path, marks: tuple[str, str], template: str) -> None:
    directory = make_tool_model(tmp_path / "m")
    theirs = AutoTokenizer.from_pretrained(str(directory))
    theirs.add_special_tokens({"additional_special_tokens": list(marks)})
    theirs.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}" + template)
    text = Text(read_shape("local/x", directory))
    thinking = thinking_of(text)
    if not template:
        assert thinking is None
        return
    assert thinking is not None and [thinking.open_id, thinking.close_id] == theirs.convert_tokens_to_ids(list(marks))


def test_words_are_spelled_alone_and_after_a_space() -> None:
    spelled = completion(bad_words=["hello", " hello"]).params.adjustments
    assert spelled is not None and set(spelled.bad_words) == {tuple(ids("hello")), tuple(ids(" hello"))}
