"""Token ids in prompts and answers, as a training loop needs them, through OpenAI's own client and vLLM's endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import tinker
from tinker import types
from transformers import AutoTokenizer

from support.live import API_KEY, LiveServer, serving
from tinsmith.base_models import nano

TOKENIZER = AutoTokenizer.from_pretrained(str(nano.path()))
NANO = "tinsmith/nano"
SAY: Any = [{"role": "user", "content": "Say hello."}]
PROMPT = TOKENIZER.apply_chat_template(SAY, add_generation_prompt=True)["input_ids"]


@dataclass(frozen=True)
class LiveClients:
    server: LiveServer
    client: openai.OpenAI
    sampler: tinker.SamplingClient

    def root(self, path: str, status: int = 200, **body: object) -> Any:  # noqa: ANN401  JSON
        headers = {"Authorization": f"Bearer {API_KEY}"}
        answer = httpx.post(self.server.url + path, json=body, headers=headers, timeout=60)
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveClients]:
    with serving(tmp_path_factory.mktemp("tokens"), "--model", NANO) as server:
        with (
            tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0) as client,
        ):
            yield LiveClients(server, client, service.create_sampling_client(base_model=NANO).result())


def sdk_sample(clients: LiveClients, prompt: list[int], **params_: Any) -> types.SampledSequence:  # noqa: ANN401
    params = types.SamplingParams(max_tokens=10, seed=3, **params_)
    return clients.sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_the_tokens_and_logprobs_that_the_sdk_gets(clients: LiveClients, stream: bool) -> None:
    expected = sdk_sample(clients, PROMPT)
    body: dict[str, Any] = {"model": NANO, "messages": SAY, "max_tokens": 10, "seed": 3, "logprobs": True}
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    chunks: Any = clients.client.chat.completions.create(**body, extra_body=extra, stream=stream)
    chunks = list(chunks) if stream else [chunks]
    assert [chunk.prompt_token_ids for chunk in chunks if getattr(chunk, "prompt_token_ids", None)] == [PROMPT]
    choices = [chunk.choices[0] for chunk in chunks]
    assert [token for choice in choices for token in getattr(choice, "token_ids", [])] == expected.tokens
    scored = [token_logprob for choice in choices if choice.logprobs for token_logprob in choice.logprobs.content]
    assert [token_logprob.token for token_logprob in scored] == [f"token_id:{token}" for token in expected.tokens]
    assert [token_logprob.logprob for token_logprob in scored] == pytest.approx(expected.logprobs, abs=1e-4)


def test_tokens_go_in_and_the_prompt_is_scored_as_by_the_sdk(clients: LiveClients) -> None:
    scored = clients.sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result()
    answer: Any = clients.client.chat.completions.create(
        model=NANO, messages=[{"role": "user", "content": "not read"}], max_tokens=1, logprobs=False,
        extra_body={"prompt_token_ids": PROMPT, "prompt_logprobs": 2, "return_token_ids": True},
    )  # fmt: skip
    assert answer.prompt_token_ids == PROMPT and answer.usage.prompt_tokens == len(PROMPT)
    assert answer.prompt_logprobs[0] is None
    for token, logprob, row in zip(PROMPT[1:], scored[1:], answer.prompt_logprobs[1:], strict=True):
        assert row[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-4) and len(row) in (2, 3)
        best = [entry_of_token["logprob"] for entry_of_token in row.values() if entry_of_token["rank"] == 1]
        assert best == [max(entry_of_token["logprob"] for entry_of_token in row.values())]


def test_generate_answers_ids_to_ids(clients: LiveClients) -> None:
    (comma,) = TOKENIZER.encode(",", add_special_tokens=False)
    params = {"max_tokens": 10, "seed": 3, "logprobs": 1, "stop_token_ids": [comma], "temperature": 1.0}
    answer = clients.root(
        "/inference/v1/generate", token_ids=PROMPT, sampling_params=params, cache_salt="s", priority=1, request_id="r7"
    )
    expected = sdk_sample(clients, PROMPT)
    tokens = expected.tokens
    cut = tokens[: tokens.index(comma) + 1] if comma in tokens else tokens
    choice = answer["choices"][0]
    assert answer["request_id"] == "r7" and answer["prompt_token_ids"] == PROMPT and choice["token_ids"] == cut
    assert choice["finish_reason"] == ("stop" if comma in tokens else expected.stop_reason)
    content = choice["logprobs"]["content"]
    assert [token_logprob["token"] for token_logprob in content] == [f"token_id:{token}" for token in cut]
    assert [token_logprob["logprob"] for token_logprob in content] == pytest.approx(
        expected.logprobs[: len(cut)], abs=1e-4
    )
    assert answer["usage"]["completion_tokens"] == len(cut)
    bare = clients.root("/inference/v1/generate", token_ids=PROMPT, sampling_params={"max_tokens": 1}, model=NANO)
    assert bare["choices"][0]["logprobs"] is None and bare["request_id"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [10**6]}, "prompt token 0 is 1000000"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 0}}, "sampling_params.n is 0"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"num_beams": 2}},
            "sampling_params.num_beams",
        ),
        ("/inference/v1/generate", {"token_ids": [1], "stream": True}, "stream"),
        ("/inference/v1/generate", {"token_ids": [1], "features": {"a": 1}}, "features is not supported"),
        ("/tokenize", {}, "send either prompt or messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt cannot be combined"),
        ("/detokenize", {"tokens": [10**6]}, "tokens has 1000000"),
        ("/v1/chat/completions", {"model": NANO, "messages": SAY, "allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ],
)
def test_impossible_requests_are_refused_by_name(
    clients: LiveClients, path: str, body: dict[str, Any], words: str
) -> None:
    error = clients.root(path, 400, **body)["error"]
    assert words in error["message"]


def test_texts_and_chats_become_tokens_and_text_again(clients: LiveClients) -> None:
    tokenized = clients.root("/tokenize", prompt="Say hello.", return_token_strs=True)
    ids = TOKENIZER("Say hello.")["input_ids"]
    assert tokenized == {
        "count": len(ids), "tokens": ids, "max_model_len": tokenized["max_model_len"],
        "token_strs": TOKENIZER.convert_ids_to_tokens(ids),
    }  # fmt: skip
    chat = clients.root("/tokenize", model=NANO, messages=SAY)
    assert chat["tokens"] == PROMPT and chat["token_strs"] is None
    assert clients.root("/detokenize", tokens=PROMPT) == {"prompt": TOKENIZER.decode(PROMPT)}
    clients.root("/tokenize", 404, model="unknown", prompt="a")


def test_masks_reach_the_sampler(clients: LiveClients) -> None:
    allowed = TOKENIZER.encode(" no", add_special_tokens=False) + TOKENIZER.encode("yes", add_special_tokens=False)
    extra: dict[str, Any] = {"allowed_token_ids": allowed, "return_token_ids": True}
    body: dict[str, Any] = {"model": NANO, "prompt": "so", "max_tokens": 12, "seed": 1}
    answer: Any = clients.client.completions.create(**body, extra_body=extra)
    assert set(answer.choices[0].token_ids) <= set(allowed)
    said = answer.choices[0].text
    banned = TOKENIZER.decode(answer.choices[0].token_ids[:1])
    other: Any = clients.client.completions.create(**body, extra_body={**extra, "bad_words": [banned]})
    assert answer.choices[0].token_ids[0] not in other.choices[0].token_ids and other.choices[0].text != said
    long: Any = clients.client.chat.completions.create(
        model=NANO, messages=SAY, max_tokens=60, seed=2, extra_body={"min_tokens": 50, "return_token_ids": True}
    )
    assert len(long.choices[0].token_ids) >= 50
