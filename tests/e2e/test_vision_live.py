"""A model that takes images through a running server: the SDK, OpenAI's and Anthropic's clients, and a bulk job."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import anthropic
import numpy as np
import openai
import pytest
import tinker
import torch
from tinker import types

from support import vision_models
from support.live import API_KEY, LiveServer, serving
from support.vision_models import picture, tokenizer
from tinsmith import batch
from tinsmith.batch.client.http import Client
from tinsmith.batch.client.job import Job
from tinsmith.exchange.trajectories import Trajectories, session_key
from tinsmith.types import Datum
from unit.test_vision import corrupt_image, load_reference_model, logits, text

torch.set_num_threads(1)

NAME = "tiny/qwen3_vl"
WIDE, TALL = picture(61, 22, 1), picture(20, 75, 2, "jpeg")
GREEDY = types.SamplingParams(max_tokens=6, temperature=0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(vision_models.make(tmp_path_factory.mktemp("vision")).path)


@pytest.fixture(scope="module")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("server") / "data", "--model", f"{NAME}={base}") as running:
        yield running


@pytest.fixture(scope="module")
def service(server: LiveServer) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as client:
        yield client


def image(data: bytes, expected_tokens: int | None = None) -> types.ImageChunk:
    form = "png" if data.startswith(b"\x89") else "jpeg"
    return types.ImageChunk(data=data, format=form, expected_tokens=expected_tokens)


def words(length: int, seed: int) -> types.EncodedTextChunk:
    return types.EncodedTextChunk(tokens=text(length, seed))


def datum(*chunks: types.ModelInputChunk, seed: int = 0) -> types.Datum:
    model_input = types.ModelInput(chunks=list(chunks))
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, 256, model_input.length)
    return types.Datum(model_input, {"target_tokens": targets, "weights": np.ones(model_input.length, np.float32)})


def data() -> list[types.Datum]:
    return [
        datum(words(5, 1), image(WIDE, 24), words(7, 2)),
        datum(words(12, 3)),
        datum(image(TALL, 18), words(4, 4), image(WIDE, 24), words(9, 5)),
    ]


def test_a_model_is_trained_and_sampled_with_images(
    service: tinker.ServiceClient, base: Path, server: LiveServer
) -> None:
    model = service.create_lora_training_client(NAME, rank=3, seed=1).result()
    losses = []
    for _ in range(3):
        passed = model.forward_backward(data(), "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=2e-2)).result()
        losses.append(passed.result().metrics["loss:sum"])
    assert losses[2] < losses[0]
    model.save_state("done").result()
    sampler = model.save_weights_and_get_sampling_client().result()
    (adapter,) = (path.parent for path in server.data_dir.glob("checkpoints/**/adapter_config.json"))
    reference = load_reference_model(base, adapter)

    prompt = types.ModelInput(chunks=[words(5, 1), image(WIDE), words(7, 2)])
    answer = sampler.sample(prompt, 2, GREEDY, include_prompt_logprobs=True).result()
    tokens, images = vision_models.model_input(text(5, 1), WIDE, text(7, 2))
    for sequence in answer.sequences:
        all_tokens = np.concatenate([tokens, sequence.tokens])
        with torch.no_grad():
            expected = torch.log_softmax(logits(reference, Datum(all_tokens, {}, images)).double(), -1)
        rows = torch.arange(len(tokens) - 1, len(all_tokens) - 1)
        np.testing.assert_allclose(sequence.logprobs, expected[rows].max(-1).values, atol=1e-4)
        assert sequence.tokens == expected[rows].argmax(-1).tolist()
    assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == 36
    assert [at for at, logprob in enumerate(answer.prompt_logprobs) if logprob is None] == [0]
    # Training computes the logprobs with which the answer was sampled.
    first = answer.sequences[0]
    scored = model.forward(
        [
            types.Datum(
                types.ModelInput(
                    chunks=[*data()[0].model_input.chunks, types.EncodedTextChunk(tokens=first.tokens[:-1])]
                ),
                {
                    "target_tokens": np.append(np.append(tokens[1:], first.tokens[0]), first.tokens[1:]),
                    "weights": np.ones(36 + len(first.tokens) - 1, np.float32),
                },
            )
        ],
        "cross_entropy",
    ).result()
    training_logprobs = np.array(scored.loss_fn_outputs[0]["logprobs"].data)[35:]
    assert first.logprobs is not None
    np.testing.assert_allclose(training_logprobs, first.logprobs, atol=1e-4)


def test_unsupported_images_are_refused_by_name(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=NAME).result()
    model = service.create_lora_training_client(NAME, rank=2).result()
    for chunk, said in (
        (image(WIDE, 23), "expected_tokens is 23, but this model makes 24 tokens"),
        (types.ImageChunk(data=WIDE, format="jpeg", expected_tokens=24), "format is 'jpeg', but data is png"),
        (image(corrupt_image("cut"), 25), "not a valid jpeg image"),
        (image(corrupt_image("chunk"), 25), "not a valid png image"),
    ):
        with pytest.raises(tinker.RequestFailedError) as refused:
            sampler.sample(types.ModelInput(chunks=[words(3, 1), chunk]), 1, GREEDY).result()
        assert refused.value.category is types.RequestErrorCategory.User
        assert said in str(refused.value) and "prompt.chunks[1]." in str(refused.value)
        with pytest.raises(tinker.RequestFailedError) as refused:
            model.forward_backward([data()[1], datum(words(3, 1), chunk, words(2, 2))], "cross_entropy").result()
        assert refused.value.category is types.RequestErrorCategory.User
        assert said in str(refused.value) and "data[1].model_input.chunks[1]." in str(refused.value)
    pointer = types.ImageAssetPointerChunk(location="http://127.0.0.1:1/x.png", format="png", expected_tokens=4)
    with pytest.raises(tinker.RequestFailedError, match="this server fetches no assets"):
        sampler.sample(types.ModelInput(chunks=[pointer]), 1, GREEDY).result()
    # The model remains usable.
    assert np.isfinite(model.forward_backward(data(), "cross_entropy").result().metrics["loss:sum"])


def test_openai_and_anthropic_clients_send_images(server: LiveServer) -> None:
    url = f"data:image/png;base64,{base64.b64encode(WIDE).decode()}"
    content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0) as client:
        ask = client.chat.completions.create
        said = ask(model=NAME, messages=[{"role": "user", "content": content}], max_tokens=5, temperature=0)  # type: ignore[list-item, misc]
        assert said.usage is not None and said.usage.prompt_tokens > 24
        content[1] = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
        with pytest.raises(openai.BadRequestError, match="this server fetches nothing"):
            ask(model=NAME, messages=[{"role": "user", "content": content}], max_tokens=5)  # type: ignore[list-item, misc]
        broken = f"data:image/jpeg;base64,{base64.b64encode(corrupt_image('cut')).decode()}"
        content[1] = {"type": "image_url", "image_url": {"url": broken}}
        with pytest.raises(openai.BadRequestError, match="not a valid jpeg image"):
            ask(model=NAME, messages=[{"role": "user", "content": content}], max_tokens=5)  # type: ignore[list-item, misc]
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(WIDE).decode()}
    blocks = [{"type": "text", "text": "What is it?"}, {"type": "image", "source": source}]
    with anthropic.Anthropic(base_url=server.url, api_key=API_KEY, max_retries=0) as client:
        message = client.messages.create(
            model=NAME,
            max_tokens=5,
            extra_body={"temperature": 0},
            messages=[{"role": "user", "content": blocks}],  # type: ignore[typeddict-item]
        )
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == said.usage.prompt_tokens
        assert message.content[0].text == said.choices[0].message.content  # type: ignore[union-attr]


def test_a_captured_chat_with_an_image_trains_with_the_logprobs_that_it_had(
    server: LiveServer, service: tinker.ServiceClient
) -> None:
    url = f"data:image/png;base64,{base64.b64encode(WIDE).decode()}"
    content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    key = session_key(API_KEY, "with an image")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": content}],  # type: ignore[misc, list-item]
            max_tokens=5,
            temperature=0,
        )
    with Trajectories(server.url, API_KEY) as captured:
        (trajectory,) = captured.of("with an image")
    datum = trajectory.datum(1.0)
    assert [type(chunk) for chunk in datum.model_input.chunks].count(types.ImageChunk) == 1
    assert datum.model_input.length == len(trajectory.tokens) - 1
    model = service.create_lora_training_client(NAME, rank=3, seed=1).result()
    output = model.forward_backward([datum], "importance_sampling").result()
    trained = output.loss_fn_outputs[0]["logprobs"].to_numpy()
    sampled = np.array(trajectory.sampled[1:])
    assert sampled.sum() == 5
    np.testing.assert_allclose(trained[sampled], np.array(trajectory.logprobs[1:])[sampled], atol=1e-4)


def test_a_bulk_job_samples_over_a_column_of_images(server: LiveServer, tmp_path: Path) -> None:
    client = Client(server.url, API_KEY)
    out = tmp_path / "out.jsonl"
    rows = [
        {"question": "What is it?", "picture": base64.b64encode(picture(61, 22, seed)).decode()} for seed in range(4)
    ]
    sample = batch.Sample(NAME, messages="question", image="picture", max_tokens=5, tokens=True, temperature=0)
    job = batch.Dataset(rows).map(sample, output=batch.JsonWriter(str(out)), stream=False, client=client)
    assert isinstance(job, Job)
    job.wait()
    client.close()
    output_tokens = [json.loads(line)["output_tokens"] for line in out.read_text().splitlines()]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY) as other:
        for row, tokens in zip(rows, output_tokens, strict=True):
            url = f"data:image/png;base64,{row['picture']}"
            content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": row["question"]}]
            said = other.chat.completions.create(
                model=NAME, max_tokens=5, temperature=0, logprobs=True,
                messages=[{"role": "user", "content": content}],  # type: ignore[list-item, misc]
            )  # fmt: skip
            assert said.usage is not None and said.usage.completion_tokens == len(tokens)
            assert said.choices[0].message.content == tokenizer().decode(tokens, skip_special_tokens=True)
    assert len({tuple(tokens) for tokens in output_tokens}) > 1


def test_gemma_3_is_trained_and_sampled_with_images(tmp_path: Path) -> None:
    """From the model's files to sampling with the trained weights; image tokens attend bidirectionally."""
    shape = vision_models.make_gemma3(tmp_path / "gemma3")
    begin, end = (types.EncodedTextChunk(tokens=[mark]) for mark in (vision_models.START, vision_models.END))
    prompt = types.ModelInput(chunks=[words(5, 1), begin, image(WIDE, 9), end, words(7, 2)])
    with (
        serving(tmp_path / "data", "--model", f"{shape.name}={shape.path}") as running,
        tinker.ServiceClient(base_url=running.url, api_key=API_KEY) as client,
    ):
        model = client.create_lora_training_client(shape.name, rank=3, seed=1).result()
        losses = []
        for _ in range(3):
            passed = model.forward_backward([datum(*prompt.chunks)], "cross_entropy")
            model.optim_step(types.AdamParams(learning_rate=2e-2)).result()
            losses.append(passed.result().metrics["loss:sum"])
        assert losses[2] < losses[0]
        sampler = model.save_weights_and_get_sampling_client().result()
        answer = sampler.sample(prompt, 1, GREEDY).result().sequences[0]
        full_input = types.ModelInput(chunks=[*prompt.chunks, types.EncodedTextChunk(tokens=answer.tokens[:-1])])
        targets = np.array([0] * (prompt.length - 1) + answer.tokens)
        loss_inputs = {"target_tokens": targets, "weights": np.ones(len(targets), np.float32)}
        scored = model.forward([types.Datum(full_input, loss_inputs)], "cross_entropy").result()
    assert answer.logprobs is not None
    training_logprobs = np.array(scored.loss_fn_outputs[0]["logprobs"].data)[prompt.length - 1 :]
    np.testing.assert_allclose(training_logprobs, answer.logprobs, atol=1e-4)
