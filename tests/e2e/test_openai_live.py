"""OpenAI's and Anthropic's own clients against a live server return the SDK's answers, whole and streamed."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
import tinker
from rich.console import Console
from tinker import types
from transformers import AutoTokenizer

from support.chat_models import make_tool_model
from support.live import API_KEY, LiveServer, serving
from tinsmith.base_models import nano
from tinsmith.cli.demo import show_call

pytestmark = pytest.mark.smoke

TOKENIZER = AutoTokenizer.from_pretrained(str(nano.path()))
NANO, TOOLS = "tinsmith/nano", "local/tools"
SAY: Any = [{"role": "user", "content": "Say hello."}]
PROMPT = "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"
ROW = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "additionalProperties": False}},
}


@dataclass(frozen=True)
class LiveClients:
    server: LiveServer
    client: openai.OpenAI
    claude: anthropic.Anthropic
    sampler: tinker.SamplingClient
    path: str  # of a checkpoint that was just trained


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveClients]:
    directory = tmp_path_factory.mktemp("openai")
    tools = make_tool_model(directory / "tools")
    models = ("--model", NANO, "--model", f"{TOOLS}={tools}")
    with serving(directory / "data", *models, settings={"RESULT_GRACE_S": "3600"}) as server:
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            model = service.create_lora_training_client(NANO, rank=4).result()
            tokens = TOKENIZER.encode(PROMPT + "goodbye<|im_end|>")
            datum = types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)},
            )
            for _ in range(3):
                model.forward_backward([datum], "cross_entropy").result()
                model.optim_step(types.AdamParams(learning_rate=3e-3)).result()
            path = model.save_weights_for_sampler("chat").result().path
            sampler = service.create_sampling_client(model_path=path).result()
            with (
                openai.OpenAI(base_url=f"{server.url}/oai/api/v1", api_key=API_KEY, max_retries=0) as client,
                anthropic.Anthropic(base_url=f"{server.url}/anthropic/api", api_key=API_KEY, max_retries=0) as claude,
            ):
                yield LiveClients(server, client, claude, sampler, path)


def ask(clients: LiveClients, model: str = NANO, **fields: Any) -> Any:  # noqa: ANN401  the client's own types are overloads
    return clients.client.chat.completions.create(
        **({"model": model, "messages": SAY, "max_tokens": 12, "seed": 3} | fields)
    )


@pytest.mark.extended
def test_an_adapter_answers_as_it_does_through_the_sdk(clients: LiveClients) -> None:
    tokenizer = TOKENIZER
    prompt = types.ModelInput.from_ints(tokenizer.encode(PROMPT))
    params = types.SamplingParams(max_tokens=12, seed=3, temperature=0.8, top_p=0.95)
    theirs = clients.sampler.sample(prompt, num_samples=2, sampling_params=params, topk_sample_logprobs=2).result()
    as_it_is = {"separate_reasoning": False}
    ours = ask(
        clients, clients.path, n=2, temperature=0.8, top_p=0.95, logprobs=True, top_logprobs=2, extra_body=as_it_is
    )
    raw = clients.client.completions.create(
        model=f"{NANO};{clients.path}", prompt=tokenizer.encode(PROMPT), max_tokens=12, seed=3, n=2, temperature=0.8,
        top_p=0.95, logprobs=2,
    )  # fmt: skip
    base = ask(clients, n=2, temperature=0.8, top_p=0.95, extra_body=as_it_is)
    for index, sequence in enumerate(theirs.sequences):
        has_ended = sequence.stop_reason == "stop"
        tokens = sequence.tokens[:-1] if has_ended else sequence.tokens
        choice, text = ours.choices[index], raw.choices[index]
        assert choice.message.content == text.text == tokenizer.decode(tokens)
        assert choice.finish_reason == text.finish_reason == sequence.stop_reason
        token_logprobs = choice.logprobs.content
        assert [token.logprob for token in token_logprobs] == pytest.approx(sequence.logprobs[: len(tokens)], abs=1e-4)
        assert text.logprobs.token_logprobs == pytest.approx(sequence.logprobs[: len(tokens)], abs=1e-4)
        assert b"".join(bytes(token.bytes) for token in token_logprobs) == choice.message.content.encode()
        assert all(len(token.top_logprobs) == 2 for token in token_logprobs)
    assert ours.usage.completion_tokens == sum(len(sequence.tokens) for sequence in theirs.sequences)
    assert ours.usage.prompt_tokens == len(tokenizer.encode(PROMPT))
    assert [c.message.content for c in base.choices] != [c.message.content for c in ours.choices]


@pytest.mark.parametrize("fields", [{"n": 2, "logprobs": True, "top_logprobs": 1}, {"stop": ["ll"]}, {"max_tokens": 3}])
def test_the_pieces_of_a_stream_are_the_whole_answer(clients: LiveClients, fields: dict[str, Any]) -> None:
    answer = ask(clients, temperature=1.0, **fields)
    chunks = list(ask(clients, temperature=1.0, stream=True, stream_options={"include_usage": True}, **fields))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    for choice in answer.choices:
        choice_deltas = [delta for chunk in chunks for delta in chunk.choices if delta.index == choice.index]
        assert choice_deltas[0].delta.role == "assistant"
        assert "".join(delta.delta.content or "" for delta in choice_deltas) == choice.message.content
        assert [delta.finish_reason for delta in choice_deltas if delta.finish_reason] == [choice.finish_reason]
        if "logprobs" in fields:
            streamed_logprobs = [token for delta in choice_deltas if delta.logprobs for token in delta.logprobs.content]
            assert [t.token for t in streamed_logprobs] == [t.token for t in choice.logprobs.content]
            assert [t.logprob for t in streamed_logprobs] == pytest.approx(
                [t.logprob for t in choice.logprobs.content], abs=1e-4
            )


@pytest.mark.extended
def test_tokens_come_while_the_rest_is_drawn(clients: LiveClients) -> None:
    chunks = iter(ask(clients, max_tokens=1500, n=8, extra_body={"ignore_eos": True}, stream=True))
    next(chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content)
    assert clients.server.count("futures WHERE state = 'pending'") == 1, "the first came when all were drawn"
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) > 20


def test_a_stop_string_is_not_part_of_the_answer(clients: LiveClients) -> None:
    uncut = ask(clients, temperature=0)
    content = uncut.choices[0].message.content
    stop = content[-3:-1]
    cut = ask(clients, temperature=0, stop=[stop, "never there"])
    assert cut.choices[0].message.content == content[: content.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_a_completion_echoes_its_prompt_with_logprobs(clients: LiveClients) -> None:
    scored = clients.client.completions.create(
        model=NANO, prompt=["Say hello.", "one"], max_tokens=0, echo=True, logprobs=1
    )
    tokens = TOKENIZER.encode("Say hello.")
    first = scored.choices[0]
    assert first.text == "Say hello." and "".join(first.logprobs.tokens) == "Say hello."
    assert first.logprobs.token_logprobs[0] is None and len(first.logprobs.token_logprobs) == len(tokens)
    assert first.logprobs.text_offset[1] == len(first.logprobs.tokens[0])
    assert scored.usage.completion_tokens == 0 and len(scored.choices) == 2


def test_penalties_and_bias_reach_the_sampler(clients: LiveClients) -> None:
    plain = ask(clients, temperature=0).choices[0].message.content
    token = TOKENIZER.encode(plain)[0]
    assert (
        not ask(clients, temperature=0, logit_bias={str(token): -100}).choices[0].message.content.startswith("<think>")
    )
    changed = ask(clients, temperature=0, max_tokens=40, extra_body={"repetition_penalty": 3.0, "ignore_eos": True})
    assert changed.choices[0].message.content != plain


@pytest.mark.parametrize("kind", ["json_schema", "json_object", "structured_outputs"])
def test_an_answer_fits_the_schema(clients: LiveClients, kind: str) -> None:
    formats: dict[str, dict[str, Any]] = {
        "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "row", "schema": ROW}}},
        "json_object": {"response_format": {"type": "json_object"}},
        "structured_outputs": {"extra_body": {"structured_outputs": {"choice": ["red", "green"]}}},
    }
    for seed in range(3):
        choice = ask(clients, max_tokens=150, seed=seed, **formats[kind]).choices[0]
        if kind == "structured_outputs":
            assert choice.message.content in ("red", "green")
        elif choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
            assert kind == "json_object" or set(json.loads(choice.message.content)) == {"ok", "n"}
        else:
            assert kind == "json_object"  # an object may be longer than there is room for


@pytest.mark.parametrize("model", [TOOLS, NANO])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_when_it_must_be(clients: LiveClients, stream: bool, model: str) -> None:
    options = {"tools": [WEATHER, CLOCK], "max_tokens": 200, "parallel_tool_calls": False, "stream": stream}
    forced_choice = {"type": "function", "function": {"name": "weather"}}
    for choice, names, reason in (
        ("required", {"weather", "clock"}, "tool_calls"),
        (forced_choice, {"weather"}, "stop"),
    ):
        answered = ask(clients, model, tool_choice=choice, **options)
        if stream:
            chunks = [chunk.choices[0] for chunk in answered]
            assert not "".join(chunk.delta.content or "" for chunk in chunks)
            (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
            finish = chunks[-1].finish_reason
        else:
            assert answered.choices[0].message.content is None
            (call,) = answered.choices[0].message.tool_calls
            finish = answered.choices[0].finish_reason
        assert call.function.name in names and finish == reason
        assert set(json.loads(call.function.arguments)) == ({"city"} if call.function.name == "weather" else set())


def test_the_demo_shows_a_call_of_a_tool(clients: LiveClients) -> None:
    text = io.StringIO()
    call = show_call(Console(file=text, width=100), clients.server.url)
    assert call["name"] == "add" and set(call["arguments"]) == {"a", "b"}  # type: ignore[call-overload]
    assert "What is 3 + 4?  ->  add({" in text.getvalue()


def test_what_a_tool_said_goes_into_the_next_prompt(clients: LiveClients) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turns: Any = [
        *SAY,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    longer = ask(clients, TOOLS, messages=turns, tools=[WEATHER], max_tokens=1)
    assert longer.usage.prompt_tokens > ask(clients, TOOLS, tools=[WEATHER], max_tokens=1).usage.prompt_tokens + 10


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"functions": []}, None, None),
        ({"functions": [{"name": "f"}]}, "functions", "send tools"),
        ({"extra_body": {"length_penalty": 2}}, "length_penalty", "without beam search"),
        ({"modalities": ["text", "audio"]}, "modalities", "only text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            None,
            "image_url",
        ),
        ({"temperature": -1}, None, "temperature"),
        ({"presence_penalty": 3}, "presence_penalty", "between -2 and 2"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "9999"),
        ({"max_tokens": 100_000}, "messages", "context"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs is not true"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search", "not supported"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/no"}}}},
            None,
            "response_format cannot be enforced",
        ),
    ],
)
def test_unsupported_fields_are_refused_by_name(
    clients: LiveClients, fields: dict[str, Any], param: str | None, words: str | None
) -> None:
    if words is None:
        assert ask(clients, **fields).choices
        return
    with pytest.raises(openai.BadRequestError) as refused:
        ask(clients, **fields)
    assert words in str(refused.value)
    assert param is None or refused.value.param == param


def test_errors_have_openais_form(clients: LiveClients) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(clients, "tinker://no:train:0/sampler_weights/x")
    assert unknown.value.code == "model_not_found"
    stranger = openai.OpenAI(base_url=f"{clients.server.url}/v1", api_key="sk-nobody", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key provided"):
        stranger.models.list()
    with pytest.raises(openai.BadRequestError, match="embed"):
        clients.client.embeddings.create(model=NANO, input="x")
    stranger.close()


def test_models_are_the_bases_and_the_tenants_checkpoints(clients: LiveClients) -> None:
    names = [model.id for model in clients.client.models.list()]
    assert names[:2] == [NANO, TOOLS] and clients.path in names
    assert clients.client.models.retrieve(clients.path).id == clients.path
    assert clients.client.models.retrieve(NANO).id == NANO
    plain = openai.OpenAI(base_url=f"{clients.server.url}/v1", api_key=API_KEY, max_retries=0)
    assert [model.id for model in plain.models.list()] == names
    plain.close()


def test_one_address_serves_both_kinds_of_clients(clients: LiveClients) -> None:
    for base in (clients.server.url, f"{clients.server.url}/oai/api"):
        with anthropic.Anthropic(base_url=base, api_key=API_KEY, max_retries=0) as claude:
            message = claude.messages.create(model=NANO, max_tokens=2, messages=SAY)
            assert message.type == "message" and message.usage.output_tokens >= 1
            assert claude.messages.count_tokens(model=NANO, messages=SAY).input_tokens > 1
            listed = list(claude.models.list(limit=1))
            assert [model.id for model in listed][:2] == [NANO, TOOLS] and listed[0].lifecycle == "active"
            assert claude.models.retrieve(NANO).max_input_tokens == 2048
            with pytest.raises(anthropic.NotFoundError, match="not served here"):
                claude.models.retrieve("nobody")
        with openai.OpenAI(base_url=f"{base}/v1", api_key=API_KEY, max_retries=0) as client:
            assert client.models.retrieve(NANO).object == "model"
            assert client.chat.completions.create(model=NANO, messages=SAY, max_tokens=2).choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_sample(clients: LiveClients, stream: bool) -> None:
    body = {"model": NANO, "messages": SAY, "ignore_eos": True, "stream": stream, "max_tokens": 1900, "n": 8}
    url, headers = f"{clients.server.url}/v1/chat/completions", {"Authorization": f"Bearer {API_KEY}"}
    before = clients.server.count("futures WHERE error LIKE '%client disconnected%'")
    if stream:
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, headers=headers, timeout=1.0)
    deadline = time.monotonic() + 20
    while clients.server.count("futures WHERE error LIKE '%client disconnected%'") == before:
        assert time.monotonic() < deadline, "the sample runs on"
        time.sleep(0.1)
    assert clients.server.count("futures WHERE state = 'pending'") == 0


# Thinking.

THOUGHT, ANSWER = "a greeting,\nso be it", "hello"


@pytest.fixture(scope="module")
def thinker(clients: LiveClients) -> str:
    """A checkpoint that was trained to think before it answers."""
    tokens = TOKENIZER.encode(f"{PROMPT}<think>\n{THOUGHT}\n</think>\n\n{ANSWER}<|im_end|>")
    weights = np.zeros(len(tokens) - 1, np.float32)
    weights[len(TOKENIZER.encode(PROMPT)) - 1 :] = 1.0
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": weights},
    )
    with tinker.ServiceClient(base_url=clients.server.url, api_key=API_KEY) as service:
        model = service.create_lora_training_client(NANO, rank=16).result()
        for _ in range(150):
            if model.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"] < 0.1:
                break  # every token of it has a probability near 1
            model.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        else:
            raise AssertionError("it does not learn to think")
        return model.save_weights_for_sampler("thinker").result().path


def test_openais_client_gets_thoughts_apart(clients: LiveClients, thinker: str) -> None:
    options = {"temperature": 0, "max_tokens": 60, "logprobs": True}
    answer = ask(clients, thinker, **options)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHT, ANSWER)
    chunks = list(ask(clients, thinker, stream=True, stream_options={"include_usage": True}, **options))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    thought = [reasoning for delta in deltas if (reasoning := getattr(delta, "reasoning_content", None))]
    assert "".join(thought) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    together = ask(clients, thinker, extra_body={"separate_reasoning": False}, **options)
    assert together.choices[0].message.content == f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
    assert not hasattr(together.choices[0].message, "reasoning_content")
    spelled = [token.token for token in together.choices[0].logprobs.content]
    assert [token.token for token in answer.choices[0].logprobs.content] == spelled, "tokens are what they were"
    streamed_tokens = [
        token.token for c in chunks for choice in c.choices if choice.logprobs for token in choice.logprobs.content
    ]
    assert streamed_tokens == spelled and "<think>" in spelled
    assert answer.usage == together.usage == chunks[-1].usage
    thought = spelled[spelled.index("<think>") : spelled.index("</think>") + 1]
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(thought) > 2
    cut = ask(clients, thinker, temperature=0, max_tokens=4).choices[0]
    assert THOUGHT.startswith(cut.message.reasoning_content) and (cut.message.content, cut.finish_reason) == (
        "",
        "length",
    )
    turns = [*SAY, {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}, *SAY]
    assert ask(clients, thinker, messages=turns, max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize("fields", [{}, {"thinking_token_budget": 4}])
def test_an_answer_fits_the_schema_after_its_thoughts(
    clients: LiveClients, thinker: str, fields: dict[str, Any]
) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "row", "schema": ROW}}
    options = {"temperature": 0, "max_tokens": 150, "response_format": schema, "extra_body": fields}
    answer = ask(clients, thinker, **options)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "stop" and json.loads(message.content)["n"] in (1, 2)
    assert THOUGHT.startswith(message.reasoning_content)
    assert (message.reasoning_content == THOUGHT) is not bool(fields)
    if fields:
        assert answer.usage.completion_tokens_details.reasoning_tokens == 6, "with both tags"
    chunks = list(ask(clients, thinker, stream=True, **options))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == message.content
    off = {"response_format": {"type": "json_object"}, "extra_body": {"enable_thinking": False}, "max_tokens": 40}
    strict = ask(clients, thinker, **off).choices[0].message
    assert strict.content.startswith("{") and not hasattr(strict, "reasoning_content")


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_client_gets_thoughts_if_it_asks(clients: LiveClients, thinker: str, stream: bool) -> None:
    def said(thinking: dict[str, object] | None, **fields: object) -> list[dict[str, object]]:
        arguments: Any = {
            "model": thinker,
            "max_tokens": 1100,
            "messages": SAY,
            "extra_body": {"temperature": 0},
        } | fields
        if thinking:
            arguments["thinking"] = thinking
        if not stream:
            return [
                block.model_dump(exclude_none=True) for block in clients.claude.messages.create(**arguments).content
            ]
        with clients.claude.messages.stream(**arguments) as events:
            return [block.model_dump(exclude_none=True) for block in events.get_final_message().content]

    expected_blocks = [{"type": "thinking", "thinking": THOUGHT, "signature": ""}, {"type": "text", "text": ANSWER}]
    enabled: dict[str, object] = {"type": "enabled", "budget_tokens": 1024}
    blocks = said(enabled)
    assert [
        {name: block[name] for name in expected_block}
        for block, expected_block in zip(blocks, expected_blocks, strict=True)
    ] == expected_blocks
    assert [block["type"] for block in said({"type": "adaptive"})] == ["thinking", "text"]
    counted = clients.claude.messages.create(model=thinker, max_tokens=60, messages=SAY, extra_body={"temperature": 0})
    assert counted.usage.output_tokens_details and counted.usage.output_tokens_details.thinking_tokens > 2
    (text,) = said(None)
    assert text["text"] == ANSWER, "nobody asked for the thought"
    assert said(None, max_tokens=4) == [], "it was still thinking"
    off = said({"type": "disabled"}, max_tokens=8)
    assert not any("think>" in str(block) or block["type"] != "text" for block in off)
    row = {"output_config": {"format": {"type": "json_schema", "schema": ROW}}}
    thought, row_text = said(enabled, **row)
    assert thought["thinking"] == THOUGHT and json.loads(str(row_text["text"]))["n"] in (1, 2)
    turns = [*SAY, {"role": "assistant", "content": blocks}, *SAY]
    said({"type": "adaptive"}, messages=turns, max_tokens=4)  # a thought may be sent back
    if not stream:
        with pytest.raises(anthropic.BadRequestError, match="thinking has budget_tokens 10; it must be at least 1024"):
            said(enabled | {"budget_tokens": 10})
        with pytest.raises(anthropic.BadRequestError, match="'sometimes'; use enabled"):
            said({"type": "sometimes"})


# Anthropic's.


def test_a_message_is_the_chat_in_other_words(clients: LiveClients) -> None:
    expected = ask(clients, clients.path, temperature=0)  # whose content is without the thought
    arguments: Any = {"model": clients.path, "max_tokens": 12, "messages": SAY, "extra_body": {"temperature": 0}}
    message = clients.claude.messages.create(**arguments)
    assert message.content[0].text == expected.choices[0].message.content
    assert message.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[expected.choices[0].finish_reason]
    assert message.usage.output_tokens == expected.usage.completion_tokens
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == expected.usage.prompt_tokens
    counted = clients.claude.messages.count_tokens(model=clients.path, messages=SAY)
    assert counted.input_tokens == expected.usage.prompt_tokens
    with clients.claude.messages.stream(**arguments) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == final.content[0].text == message.content[0].text
    spell: Any = [{"role": "user", "content": "Spell the word strawberry."}]  # the answer has a dozen tokens
    with clients.claude.messages.stream(**arguments | {"model": NANO, "max_tokens": 40, "messages": spell}) as stream:
        assert len(list(stream.text_stream)) > 1
    assert final.stop_reason == message.stop_reason and final.usage.output_tokens == message.usage.output_tokens


def test_a_message_says_which_stop_sequence_ended_it(clients: LiveClients) -> None:
    message = clients.claude.messages.create(
        model=NANO,
        max_tokens=20,
        messages=SAY,
        stop_sequences=["ll"],
        system="Be brief.",
        extra_body={"temperature": 0},
    )
    if "ll" not in ask(clients, temperature=0).choices[0].message.content:
        assert message.stop_reason in ("end_turn", "max_tokens")
    else:
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "ll")
        assert "ll" not in message.content[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_calls_tools(clients: LiveClients, stream: bool) -> None:
    function: Any = WEATHER["function"]
    arguments: Any = {
        "model": TOOLS,
        "max_tokens": 200,
        "messages": SAY,
        "tools": [{"name": "weather", "description": "of a city", "input_schema": function["parameters"]}],
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    if stream:
        with clients.claude.messages.stream(**arguments) as events:
            message = events.get_final_message()
    else:
        message = clients.claude.messages.create(**arguments)
    (block,) = message.content
    assert block.type == "tool_use" and block.name == "weather" and block.input["city"] in ("Rome", "Oslo")
    assert message.stop_reason == "tool_use"
    turns = [*SAY, {"role": "assistant", "content": [block.model_dump(include={"type", "id", "name", "input"})]}]
    turns.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}]})
    again = clients.claude.messages.create(
        **(arguments | {"messages": turns, "tool_choice": {"type": "none"}, "max_tokens": 2})
    )
    assert again.usage.output_tokens >= 1


def test_errors_have_anthropics_form(clients: LiveClients) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        clients.claude.messages.create(model="nobody", max_tokens=2, messages=SAY)
    with pytest.raises(anthropic.BadRequestError, match="no tags for reasoning"):
        clients.claude.messages.create(
            model=TOOLS, max_tokens=2000, messages=SAY, thinking={"type": "enabled", "budget_tokens": 1024}
        )
    with pytest.raises(anthropic.BadRequestError, match="a prefilled completion"):
        turns: Any = [*SAY, {"role": "assistant", "content": "he"}]
        clients.claude.messages.create(model=NANO, max_tokens=2, messages=turns)
