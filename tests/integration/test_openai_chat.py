"""Prompts match transformers', text matches the tokenizer's, and tool calls are parsed as models write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from support import tiny_models
from support.chat_models import make_plain_model, make_tool_model
from support.properties import examples
from tinsmith.base_models import nano, read_shape
from tinsmith.chat.chats import ChatRequest, CompletionRequest
from tinsmith.chat.choices import Choice
from tinsmith.chat.detokenizer import TextDecoder
from tinsmith.chat.dialects import choose_dialect
from tinsmith.chat.generation_request import GenerationPlan, ModelTarget
from tinsmith.chat.messages import MessageRequest
from tinsmith.chat.tokenizer import ModelTokenizer, ReasoningTags, find_reasoning_tags
from tinsmith.chat.tools import Tool, ToolUse
from tinsmith.errors import NotSupportedError, RequestError
from tinsmith.types import ModelShape, SamplingParams
from tinsmith.wire.fields import validate
from tinsmith.wire.sampling import SampleRequest, read_sample, sample_body, sample_of

SHAPE = read_shape(nano.MODEL_NAME, nano.path())
TEXT = ModelTokenizer(SHAPE)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Say hello."}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "  a\tb  "}],
    [
        {"role": "user", "content": "1 < 2 && \"x\" 'y' \u00e9\U0001f600"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
        {"role": "user", "content": "<|im_end|> again"},
    ],
]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "description": "<&> \u00fc", "parameters": {"type": "object"}}}
]
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "\u00fc"}}}]},
    {"role": "tool", "content": "done", "tool_call_id": "c"},
]


def message(body: dict[str, Any], text: ModelTokenizer = TEXT) -> GenerationPlan:
    return validate(MessageRequest, body).plan(text)


def completion(body: dict[str, Any]) -> GenerationPlan:
    return validate(CompletionRequest, body).plan(TEXT)


def shape_of(directory: Path) -> ModelShape:
    return read_shape("local/x", directory)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
def test_a_chat_becomes_the_prompt_of_transformers(chat: list[dict[str, Any]], variables: dict[str, object]) -> None:
    theirs = AutoTokenizer.from_pretrained(str(nano.path()))
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, **variables)["input_ids"]
    assert TEXT.chat(chat, None, variables) == expected


@pytest.mark.parametrize("chat", [*CHATS, CALLED])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_tools_become_the_prompt_of_transformers(
    tmp_path: Path, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    directory = make_tool_model(tmp_path / "m")
    theirs = AutoTokenizer.from_pretrained(str(directory))
    expected = theirs.apply_chat_template(chat, tools=tools, add_generation_prompt=True)["input_ids"]
    assert ModelTokenizer(shape_of(directory)).chat(chat, tools) == expected


def test_templates_know_the_special_tokens_and_refuse_with_their_own_words(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    tiny_models.make(directory)
    source = "{{ eos_token }}{% for m in messages %}{{ m.content | trim }}{% break %}{% endfor %}"
    theirs = tiny_models.tokenizer()
    (directory / "chat_template.jinja").write_text(source)
    text = ModelTokenizer(shape_of(directory))
    expected = theirs.apply_chat_template(CHATS[0], chat_template=source, add_generation_prompt=True)["input_ids"]
    assert text.chat(CHATS[0]) == expected
    assert text.encode("abc \u00e9", special=True) == theirs("abc \u00e9")["input_ids"]
    for bad in ("{{ raise_exception('no such turn') }}", "{{ messages[7].content }}", "{{ ''.__class__.__mro__ }}"):
        (directory / "chat_template.jinja").write_text(bad)
        with pytest.raises(RequestError, match="chat template"):
            ModelTokenizer(shape_of(directory)).chat(CHATS[0])


def test_a_model_without_a_template_or_a_tokenizer_says_so(tmp_path: Path) -> None:
    plain = ModelTokenizer(shape_of(make_plain_model(tmp_path / "plain")))
    with pytest.raises(NotSupportedError, match="no chat template; send the prompt to /completions"):
        plain.chat(CHATS[0])
    with pytest.raises(NotSupportedError, match=r"no tokenizer\.json"):
        ModelTokenizer(replace(SHAPE, path=str(tmp_path))).encode("x", special=True)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A SentencePiece-like tokenizer: pieces with a space mark, and byte fallback."""
    vocabulary = [
        "<s>",
        "</s>",
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "a",
        "b",
        "\u2581a",
        "ab",
    ]
    inner = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(vocabulary)},
            merges=[("\u2581", "a"), ("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def pieces_text(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    directory = tmp_path_factory.mktemp("pieces")
    tiny_models.make(directory)
    sentencepiece_like().save_pretrained(directory)
    return ModelTokenizer(shape_of(directory))


@examples(60)
@given(st.text(st.sampled_from("ab \u00e9\U0001f600\u4e2dx\n"), max_size=30))
def test_text_that_comes_token_by_token_is_the_whole_text(pieces_text: ModelTokenizer, written: str) -> None:
    for text in (TEXT, pieces_text):
        ids = text.encode(written, special=False)
        decoder = TextDecoder(text)
        assert "".join([decoder.push(token) for token in ids]) + decoder.flush() == text.decode(ids)
        if ids:
            spelled = b"".join(text.token_bytes(token) for token in ids)
            assert spelled.decode(errors="replace").lstrip() == text.decode(ids).lstrip()


# Choices.


def plan_of(*stops: str, tools: ToolUse | None = None) -> GenerationPlan:
    return GenerationPlan("m", ([1],), 1, SamplingParams(stop_strings=stops), tools=tools)


def pieces_of(plan: GenerationPlan, written: str, *, at_once: bool) -> tuple[str, list[str], Choice]:
    choice = Choice(plan, TEXT, 0)
    texts, calls = "", []
    for token in TEXT.encode(written, special=False):
        choice.push(token, -0.5)
        if not at_once:
            delta = choice.take_delta()
            texts += delta.text
            calls += [f"{call.name}({call.arguments})" for call in delta.calls]
    choice.finish()
    delta = choice.take_delta()
    calls += [f"{call.name}({call.arguments})" for call in delta.calls]
    return texts + delta.text, calls, choice


@examples(60)
@given(
    st.text(st.sampled_from("abst<op> "), max_size=40), st.lists(st.text("abst", min_size=1, max_size=4), max_size=3)
)
def test_a_stream_cuts_at_the_same_stop_as_the_whole(written: str, stops: list[str]) -> None:
    plan = plan_of(*stops)
    streamed, _, choice = pieces_of(plan, written, at_once=False)
    assert streamed == pieces_of(plan, written, at_once=True)[0]
    first = min((at for stop in stops if (at := written.find(stop)) >= 0), default=None)
    if first is None:
        assert streamed == written and choice.stopped_by is None
    else:
        # A token may complete two stops at once: the text is cut at the first of them.
        assert written.startswith(streamed) and len(streamed) <= first + max(map(len, stops))
        assert not any(stop in streamed for stop in stops)


HERMES = ToolUse((Tool("f", {}, {}),), "auto", False, True, choose_dialect("hermes", ""))
LLAMA = replace(HERMES, dialect=choose_dialect("llama", ""))
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("use", "written", "content", "calls"),
    [
        (HERMES, f"I look.\n\n{CALL}\n{CALL}", "I look.", ['f({"a": 1})'] * 2),
        (HERMES, "no <tool for me", "no <tool for me", []),
        (HERMES, "<tool_call>\n{broken\n</tool_call>", "<tool_call>\n{broken\n</tool_call>", []),
        (HERMES, CALL.replace('"f"', '"g"'), CALL.replace('"f"', '"g"'), []),
        (HERMES, CALL.removesuffix("</tool_call>"), CALL.removesuffix("</tool_call>"), []),
        (HERMES, '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
        (LLAMA, '{"name": "f", "parameters": {"b": "x"}}', "", ['f({"b": "x"})']),
        (LLAMA, '{"name": "f"}', "", ["f({})"]),
        (LLAMA, '{"name": "f", "size": 1}', '{"name": "f", "size": 1}', []),
        (LLAMA, "plain words {", "plain words {", []),
    ],
)
def test_calls_are_found_and_other_text_stays_text(
    use: ToolUse, written: str, content: str, calls: list[str], at_once: bool
) -> None:
    assert pieces_of(plan_of(tools=use), written, at_once=at_once)[:2] == (content, calls)


def test_text_ends_at_the_end_token() -> None:
    choice = Choice(plan_of(), TEXT, 0)
    ids = TEXT.encode("hi<|im_end|>more", special=False)
    for token in ids:
        choice.push(token, 0.0)
    choice.finish()
    delta = choice.take_delta()
    assert delta.text == "hi" and len(choice.token_ids) == len(ids)
    assert TEXT.end_token_ids == {0, 2}


# Thinking.

MARKS = ("<think>", "</think>")
THINKING = ReasoningTags(*(TEXT.encode(mark, special=False)[0] for mark in MARKS))
Said = tuple[str, str, list[str], str | None]


def said(plan: GenerationPlan, written: str, *, at_once: bool) -> Said:
    """An answer's reasoning, text, tool calls and stop reason."""
    choice = Choice(plan, TEXT, 0)
    thought = text = ""
    calls: list[str] = []
    for token in TEXT.encode(written, special=False):
        choice.push(token, -0.5)
        if not at_once:
            delta = choice.take_delta()
            assert not (delta.reasoning and (text or calls)), "a thought comes first"
            thought, text = thought + delta.reasoning, text + delta.text
            calls += [f"{call.name}({call.arguments})" for call in delta.calls]
    choice.finish()
    delta = choice.take_delta()
    assert len(choice.token_ids) == len(TEXT.encode(written, special=False))
    calls += [f"{call.name}({call.arguments})" for call in delta.calls]
    return thought + delta.reasoning, text + delta.text, calls, choice.stopped_by


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("written", "thought", "text"),
    [
        ("<think>\nhm, so\nso\n</think>\n\nyes.\n", "hm, so\nso", "yes.\n"),
        (" \n<think>hm</think>yes", "hm", "yes"),
        ("<think>\n\n</think>\n\nyes", "", "yes"),
        ("<think>hm, I am cut off ", "hm, I am cut off", ""),
        ("<think>hm\n\n", "hm", ""),
        ("<think>hm</think>", "hm", ""),
        ("<think>hm</think>\n\n", "hm", ""),
        ("<think>hm <think> hm</think>yes </think> no <think>", "hm <think> hm", "yes </think> no <think>"),
        ("yes <think>hm</think>", "", "yes <think>hm</think>"),
        ("yes</think>no", "", "yes</think>no"),
        ("  yes", "", "  yes"),
        ("\n", "", "\n"),
        ("", "", ""),
    ],
)
def test_a_thought_comes_apart_from_the_answer(written: str, thought: str, text: str, at_once: bool) -> None:
    assert said(replace(plan_of(), reasoning_tags=THINKING), written, at_once=at_once) == (thought, text, [], None)
    assert said(plan_of(), written, at_once=at_once)[:2] == ("", written), "as it is, where nothing is marked"


@pytest.mark.parametrize("at_once", [True, False])
def test_a_thought_that_the_prompt_began(at_once: bool) -> None:
    opened = replace(plan_of(), reasoning_tags=replace(THINKING, in_reasoning=True))
    assert said(opened, "hm\n</think>\n\nyes", at_once=at_once)[:2] == ("hm", "yes")
    assert said(opened, "hm, I am cut off", at_once=at_once)[:2] == ("hm, I am cut off", "")


def test_a_character_that_the_mark_cuts_off_is_of_the_thought() -> None:
    face = TEXT.encode("\U0001f600", special=False)
    choice = Choice(replace(plan_of(), reasoning_tags=THINKING), TEXT, 0)
    for token in (THINKING.open_id, face[0], THINKING.close_id, *face):
        choice.push(token, -0.5)
    choice.finish()
    delta = choice.take_delta()
    assert (len(face) > 1, delta.reasoning, delta.text) == (True, "\ufffd", "\U0001f600")


@pytest.mark.parametrize("at_once", [True, False])
def test_stops_and_calls_beside_a_thought(at_once: bool) -> None:
    stopped = replace(plan_of("st", "ab"), reasoning_tags=THINKING)
    assert said(stopped, "<think>hm st hm</think>yes", at_once=at_once) == ("hm", "", [], "st")
    assert said(stopped, "<think>a</think>bc st", at_once=at_once) == ("a", "bc ", [], "st"), (
        "none lies across the mark"
    )
    use = replace(plan_of(tools=HERMES), reasoning_tags=THINKING)
    for thought in ("hm", f"hm\n{CALL}"):
        answer = said(use, f"<think>\n{thought}\n</think>\n\nI look.\n{CALL}", at_once=at_once)
        assert answer == (thought, "I look.", ['f({"a": 1})'], None), "what it thinks of calling it does not call"
    assert said(use, f"<think>hm {CALL}", at_once=at_once) == ("hm", "", ['f({"a": 1})'], None)


@examples(150)
@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "a", "st", " ", "\n", "<tool_call>", "<to", "\u00e9"]), max_size=14
    ),
    st.lists(st.text("ast ", min_size=1, max_size=3), max_size=2),
    st.booleans(),
)
def test_a_stream_has_the_reasoning_and_text_of_the_whole_answer(
    written: list[str], stops: list[str], opened: bool
) -> None:
    plan = replace(plan_of(*stops, tools=HERMES), reasoning_tags=replace(THINKING, in_reasoning=opened))
    text = "".join(written)
    assert said(plan, text, at_once=False) == said(plan, text, at_once=True)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("<think>\nhm, so\nso\n</think>\n\nyes.\n", "yes.\n"),
        ("<think>hm, I am cut off ", ""),
        ("<think>", ""),
        ("yes <think>hm</think> no", "yes  no"),
        ("<think>hm</think>yes <think>hm, I am cut off", "yes "),
        ("yes</think>no", "yesno"),
        ("</think>\n\nyes", "yes"),
        ("  yes", "  yes"),
        ("", ""),
    ],
)
def test_a_thought_that_is_not_asked_for_is_left_out(written: str, text: str, at_once: bool) -> None:
    assert said(replace(plan_of(), hidden_tags=THINKING), written, at_once=at_once) == ("", text, [], None)


@pytest.mark.parametrize("at_once", [True, False])
def test_stops_and_calls_beside_a_thought_that_is_left_out(at_once: bool) -> None:
    opened = replace(plan_of(), hidden_tags=replace(THINKING, in_reasoning=True))
    assert said(opened, "hm\n</think>\n\nyes", at_once=at_once)[:2] == ("", "yes")
    assert said(opened, "hm, I am cut off", at_once=at_once)[:2] == ("", "")
    stopped = replace(plan_of("st"), hidden_tags=THINKING)
    assert said(stopped, "<think>hm st hm</think>yes", at_once=at_once) == ("", "", [], "st")
    use = replace(plan_of(tools=HERMES), hidden_tags=THINKING)
    assert said(use, f"<think>{CALL}</think>I look.\n{CALL}", at_once=at_once) == ("", "I look.", ['f({"a": 1})'], None)


@examples(100)
@given(
    st.lists(st.sampled_from([*MARKS, "a", "st", " ", "\n", "<tool_call>", "\u00e9"]), max_size=14),
    st.lists(st.text("ast ", min_size=1, max_size=3), max_size=2),
    st.booleans(),
)
def test_markers_never_leak_into_text(written: list[str], stops: list[str], opened: bool) -> None:
    plan = replace(plan_of(*stops, tools=HERMES), hidden_tags=replace(THINKING, in_reasoning=opened))
    answer = said(plan, "".join(written), at_once=False)
    assert answer == said(plan, "".join(written), at_once=True)
    assert "think>" not in answer[1]


def test_a_message_hides_thoughts_unless_they_are_asked_for(tmp_path: Path) -> None:
    def read(**fields: object) -> GenerationPlan:
        return message({"model": "m", "max_tokens": 2000, "messages": CHATS[0], **fields})

    plain = read()
    assert (plain.reasoning_tags, plain.hidden_tags) == (None, THINKING)
    off = read(thinking={"type": "disabled"})
    assert off.reasoning_tags is None and off.hidden_tags is not None
    with_thinking = read(thinking={"type": "enabled", "budget_tokens": 1024})
    assert with_thinking.reasoning_tags is not None and with_thinking.hidden_tags is None
    schema = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert read(output_config=schema).hidden_tags == THINKING, "it may think first"
    off = read(output_config=schema, thinking={"type": "disabled"})
    assert off.hidden_tags is None, "it cannot think"
    text = ModelTokenizer(shape_of(make_tool_model(tmp_path / "plain")))
    unmarked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    assert message(unmarked, text).hidden_tags is not None, "whatever the template says, the marks are tokens"


RANGES: list[tuple[dict[str, object], str, str]] = [
    ({"temperature": 2.5}, "temperature", "temperature is 2.5; it must lie between 0 and 2"),
    ({"temperature": -0.1}, "temperature", "temperature is -0.1; it must lie between 0 and 2"),
    ({"top_p": 1.1}, "top_p", "top_p is 1.1; it must lie between 0 and 1"),
    ({"presence_penalty": 2.1}, "presence_penalty", "presence_penalty is 2.1; it must lie between -2 and 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "frequency_penalty is -3; it must lie between -2 and 2"),
    ({"n": 129}, "n", "n is 129; it must lie between 1 and 128"),
    ({"n": 0}, "n", "n is 0; it must lie between 1 and 128"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21; it must lie between 0 and 20"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must lie between 1 and 2147483647"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens is -1; it must lie between 1 and"),
]


@pytest.mark.parametrize(("fields", "param", "words"), RANGES)
def test_a_parameter_out_of_its_range_is_refused_with_the_range(
    fields: dict[str, object], param: str, words: str
) -> None:
    with pytest.raises(RequestError) as refused:
        chat(**fields)
    assert refused.value.param == param and words in str(refused.value)


def test_completions_and_messages_have_ranges_of_their_own() -> None:
    body = {"model": "m", "prompt": "one"}
    for fields, words in (
        ({"max_tokens": 0}, "max_tokens is 0; it must lie between 1"),
        ({"logprobs": 21}, "logprobs is 21; it must lie between 0 and 20"),
        ({"temperature": 3}, "temperature is 3; it must lie between 0 and 2"),
    ):
        with pytest.raises(RequestError, match=words):
            completion(body | fields)
    assert completion(body | {"max_tokens": 0, "echo": True}).echo_only
    for fields, words in (
        ({"temperature": 1.5}, "temperature is 1.5; it must lie between 0 and 1"),
        ({"top_p": -1}, "top_p is -1; it must lie between 0 and 1"),
        ({"max_tokens": 0}, "max_tokens is 0; it must lie between 1"),
    ):
        with pytest.raises(RequestError, match=words):
            message({"model": "m", "max_tokens": 9, "messages": CHATS[0]} | fields)


def test_models_with_separate_reasoning(tmp_path: Path) -> None:
    grammar = {"type": "json_object"}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert chat().reasoning_tags == THINKING and chat(**off).reasoning_tags == replace(THINKING, is_over=True)
    assert chat(response_format=grammar).reasoning_tags == THINKING
    assert chat(response_format=grammar, **off).reasoning_tags is None, "it cannot think"
    assert chat(structured_outputs={"regex": "a"}, **off).reasoning_tags is None
    assert chat(separate_reasoning=False).reasoning_tags is None
    plain = ModelTokenizer(shape_of(make_tool_model(tmp_path / "plain")))
    assert plain.has_token("<think>") and find_reasoning_tags(plain) is None, "its template knows nothing of it"
    begins = make_tool_model(tmp_path / "begins")
    (begins / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if x %}</think>{% endif %}{{ '<think>\\n' if not y }}"
    )
    text = ModelTokenizer(shape_of(begins))
    for variables, expected in (({}, True), ({"y": True}, False), ({"x": True, "y": True}, False)):
        body = {"model": "m", "messages": [{"role": "user", "content": "<think> is a mark"}]}
        plan = validate(ChatRequest, {**body, "chat_template_kwargs": variables}).plan(text)
        assert plan.reasoning_tags is not None and plan.reasoning_tags.in_reasoning == expected


# Requests.


def chat(**fields: object) -> GenerationPlan:
    return validate(ChatRequest, {"model": "m", "messages": CHATS[0], **fields}).plan(TEXT)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}},
        {"guided_json": {"type": "integer"}},
        {"min_tokens": 3, "allowed_token_ids": [5, 6], "bad_words": ["no", " never"]},
    ],
)
def test_a_plan_survives_its_way_to_the_engine(fields: dict[str, Any]) -> None:
    plan = chat(
        stop=["a", "b"], stop_token_ids=[7], ignore_eos=True, seed=4, temperature=0.5, top_k=0, top_p=0.5, min_p=0.1,
        repetition_penalty=1.5, presence_penalty=1, frequency_penalty=-1, logit_bias={"3": 4, "5": -6}, max_tokens=9,
        **fields,
    )  # fmt: skip
    assert plan.params.adjustments is not None
    body = sample_body(plan.prompts[0], 3, plan.params, {"topk_sample_logprobs": 2}, stream=True)
    sample = read_sample(orjson.dumps(body), "r", None)
    assert sample.params == plan.params and sample.params.top_k == -1
    assert sample.prompt_T.tolist() == list(plan.prompts[0]) and sample.num_samples == 3 and sample.stream
    with pytest.raises(Exception, match="beyond is not supported"):
        sample_of(validate(SampleRequest, body), "r", None)  # as an asample


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "1 to"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"messages": [{"role": "user"}]}, "has no content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"messages": [{"role": "user", "content": "x", "audio": {"id": "1"}}]}, "audio"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "send one"),
        ({"logit_bias": {"x": 1}}, "token ids"),
        ({"logit_bias": {"1": 101}}, "between -100 and 100"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"min_p": 1.5}, "min_p"),
        ({"stream_options": {"include_usage": True}}, "stream=true"),
        ({"stream": True, "stream_options": {"what": 1}}, "what"),
        ({"tool_choice": "required"}, "tools is missing"),
        ({"response_format": {"type": "yaml"}}, "yaml"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "cannot be combined with"),
        ({"structured_outputs": {"ebnf": "x"}}, "exactly one"),
        ({"chat_template": "{{ messages }}"}, "chat_template is not supported by this server: the model's own"),
        ({"reasoning_effort": "much"}, "must be one of none, minimal"),
        ({"continue_final_message": True}, "needs an assistant's message at the end; its role is 'user'"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "cannot be combined with add"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5; max_tokens is 4"),
        (
            {"min_tokens": 5, "response_format": {"type": "json_object"}},
            "min_tokens is not supported by this server: together with",
        ),
        ({"bad_words": [" "]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex cannot be combined with guided_json"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex cannot be combined with"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        (
            {"prompt_logprobs": 0, "stream": True},
            "prompt_logprobs is not supported by this server: together with stream",
        ),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 40_000]}}}},
            "characters",
        ),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_a_request_that_cannot_be_honoured_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(Exception, match=words):
        chat(**fields)


@pytest.mark.parametrize(
    "empty", [{"functions": None}, {"tools": []}, {"user": "x", "metadata": {"a": "b"}}, {"stop": None}]
)
def test_fields_without_effect_are_accepted(empty: dict[str, object]) -> None:
    assert chat(**empty).params == chat().params


def test_prompts_come_as_text_or_ids_one_or_many() -> None:
    def prompts(prompt: object) -> list[Sequence[int]]:
        return list(completion({"model": "m", "prompt": prompt}).prompts)

    ids = TEXT.encode("one", special=True)
    assert prompts("one") == prompts(ids) == prompts(["one"]) == prompts([ids]) == [ids]
    assert prompts(["one", ids]) == [ids, ids]
    for wrong in ("", [], [""], [[]], [1.5], [[1], 2], [True], None, {"a": 1}):
        with pytest.raises(RequestError, match="prompt"):
            prompts(wrong)


def test_a_model_is_a_base_a_path_a_run_or_two_of_them() -> None:
    path = "tinker://r:train:0/sampler_weights/x"
    names = ("a/b", path, f"a/b;{path}", "tinker://r:train:0", "a/b;tinker://r", "tinker://")
    targets = [ModelTarget.of(name) for name in names]
    assert [(target.base_model, target.model_path, target.training_run_id) for target in targets] == [
        ("a/b", None, None),
        (None, path, None),
        ("a/b", path, None),
        (None, None, "r:train:0"),
        ("a/b", None, "r"),
        (None, "tinker://", None),
    ]
