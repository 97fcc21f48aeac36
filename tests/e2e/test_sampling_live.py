"""Optional results of sampling through the real SDK and the embedded model."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from support.live import API_KEY, LiveServer

pytestmark = pytest.mark.smoke

NANO = "tinsmith/nano"
CONTEXT = 2048
PROMPT = list(range(100, 125))


@pytest.fixture(scope="module")
def service(nano_server: LiveServer) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=nano_server.url, api_key=API_KEY) as client:
        yield client


@pytest.fixture(scope="module")
def trained_model(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """An adapter that has moved the model away from its base."""
    client = service.create_lora_training_client(NANO, rank=8, seed=2).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(PROMPT[:-1]),
        loss_fn_inputs={"target_tokens": np.array(PROMPT[1:]), "weights": np.ones(len(PROMPT) - 1, np.float32)},
    )
    for _ in range(2):
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return client


@pytest.fixture(scope="module")
def sampler(trained_model: tinker.TrainingClient) -> tinker.SamplingClient:
    return trained_model.save_weights_and_get_sampling_client().result()


@pytest.fixture(scope="module")
def base(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=NANO).result()


def ask(
    client: tinker.SamplingClient, prompt: list[int] = PROMPT, num_samples: int = 1, **options: object
) -> types.SampleResponse:
    names = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
    params = {name: options.pop(name) for name in names if name in options}
    return client.sample(
        types.ModelInput.from_ints(prompt),
        num_samples,
        types.SamplingParams(**{"max_tokens": 1, **params}),  # pyright: ignore[reportArgumentType]
        **options,  # pyright: ignore[reportArgumentType]
    ).result()


def targets(num_rows: int, ids: list[int]) -> types.TensorData:
    return types.TensorData.from_numpy(np.tile(np.array(ids), (num_rows, 1)))


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.3, 2.0])
def test_logprobs_at_a_temperature_differ_by_those_at_one_over_it(
    sampler: tinker.SamplingClient, temperature: float
) -> None:
    """log p_tau(i) - log p_tau(j) = (log p_1(i) - log p_1(j)) / tau for tokens i, j sampled after one prompt."""
    response = ask(sampler, num_samples=64, temperature=temperature, seed=1, stop=[])
    at_tau = {sequence.tokens[0]: sequence.logprobs[0] for sequence in response.sequences}
    tokens = sorted(at_tau)
    assert len(tokens) > 5
    scored = ask(sampler, [*PROMPT, 0], target_prompt_logprobs=targets(len(PROMPT), tokens)).target_prompt_logprobs
    assert scored is not None
    at_one = scored.to_numpy()[-1]
    tau_row = np.array([at_tau[token] for token in tokens])
    np.testing.assert_allclose(tau_row - tau_row[0], (at_one - at_one[0]) / temperature, atol=1e-4)


@pytest.mark.covers("SamplingClient.compute_logprobs")
def test_sampling_training_and_scoring_agree_at_temperature_one(
    trained_model: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    for sequence in ask(sampler, num_samples=4, max_tokens=24, stop=[]).sequences:
        tokens = PROMPT + list(sequence.tokens)
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)},
        )
        output = trained_model.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens), prompt_logprobs_last_n=24).result()
        assert scored[: len(PROMPT)] == [None] * len(PROMPT)
        np.testing.assert_allclose(np.array(scored[-24:], np.float32), output[-24:], atol=1e-4)
        np.testing.assert_allclose(sequence.logprobs, output[-24:], atol=1e-4)


def test_the_end_of_a_long_prompt_is_scored_behind_a_cached_prefix(sampler: tinker.SamplingClient) -> None:
    context, endings = [(7 * i) % 400 for i in range(200)], ([1, 2, 3], [4, 5, 6])
    for index, ending in enumerate(endings):
        prompt = [*context, *ending]
        end = ask(sampler, prompt, include_prompt_logprobs=True, prompt_logprobs_last_n=3)
        full_answer = ask(sampler, prompt, include_prompt_logprobs=True)
        assert end.prompt_cache_hit_tokens == (192 if index else 0)
        assert full_answer.prompt_cache_hit_tokens == 0
        assert end.prompt_logprobs is not None and full_answer.prompt_logprobs is not None
        assert end.prompt_logprobs[:-3] == [None] * 200
        np.testing.assert_allclose(end.prompt_logprobs[-3:], full_answer.prompt_logprobs[-3:], atol=1e-4)


@pytest.mark.covers("SamplingClient.sample")
def test_dense_and_sparse_targets_come_back_as_they_went(base: tinker.SamplingClient) -> None:
    ids = torch.full((len(PROMPT) - 1, 8), -1)
    ids[3, 0], ids[3, 5], ids[-1, 2] = PROMPT[4], 0, PROMPT[-1]
    dense = ask(base, target_prompt_logprobs=types.TensorData.from_torch(ids), include_prompt_logprobs=True)
    tensor = types.TensorData.from_torch_sparse(ids, pad_value=-1)
    sparse = ask(base, target_prompt_logprobs=tensor)
    assert dense.target_prompt_logprobs is not None and sparse.target_prompt_logprobs is not None
    assert dense.target_prompt_logprobs.sparse_crow_indices is None
    assert sparse.target_prompt_logprobs.sparse_crow_indices == tensor.sparse_crow_indices
    dense_logprobs = dense.target_prompt_logprobs.to_numpy()
    np.testing.assert_allclose(sparse.target_prompt_logprobs.to_numpy(), dense_logprobs, atol=1e-4)
    assert np.flatnonzero(dense_logprobs).tolist() == np.flatnonzero(ids.numpy() >= 0).tolist()
    assert dense.prompt_logprobs is not None
    assert dense_logprobs[3, 0] == pytest.approx(dense.prompt_logprobs[4], abs=1e-4)
    assert dense_logprobs[-1, 2] == pytest.approx(dense.prompt_logprobs[-1], abs=1e-4)


def test_alternatives_are_drawn_from_what_the_model_expects(base: tinker.SamplingClient) -> None:
    drawn = ask(base, prompt_alt_tokens_k=64, seed=3).prompt_alt_tokens
    assert drawn is not None
    tokens, logprobs = drawn.tokens.to_numpy(), drawn.logprobs.to_numpy()
    assert tokens.shape == logprobs.shape == (len(PROMPT) - 1, 64)
    assert (drawn.tokens.dtype, drawn.logprobs.dtype) == ("int64", "float32")
    scored = ask(base, target_prompt_logprobs=types.TensorData.from_numpy(tokens)).target_prompt_logprobs
    assert scored is not None
    np.testing.assert_allclose(scored.to_numpy(), logprobs, atol=1e-4)
    again = ask(base, prompt_alt_tokens_k=64, seed=3, num_samples=2, max_tokens=3).prompt_alt_tokens
    assert again is not None and again.tokens.to_numpy().tolist() == tokens.tolist()
    other = ask(base, prompt_alt_tokens_k=64).prompt_alt_tokens
    assert other is not None and other.tokens.to_numpy().tolist() != tokens.tolist()


def test_a_seed_gives_the_same_tokens_in_any_batch_and_none_varies(base: tinker.SamplingClient) -> None:
    def answers(response: types.SampleResponse) -> list[list[int]]:
        return [list(sequence.tokens) for sequence in response.sequences]

    alone_answers = answers(ask(base, num_samples=3, max_tokens=20, seed=11, stop=[]))
    assert len({tuple(row) for row in alone_answers}) == 3
    params = types.SamplingParams(max_tokens=20, seed=11, stop=[])
    prompt = types.ModelInput.from_ints(PROMPT)
    crowd = [
        base.sample(types.ModelInput.from_ints(PROMPT[: 5 + i]), 2, types.SamplingParams(max_tokens=10 + i))
        for i in range(12)
    ]
    packed = base.sample(prompt, 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=2)
    fewer = base.sample(prompt, 1, params)
    assert answers(packed.result()) == alone_answers
    assert answers(fewer.result()) == alone_answers[:1]
    for future in crowd:
        future.result()
    free = [answers(ask(base, max_tokens=20, stop=[])) for _ in range(2)]
    assert free[0] != free[1]


def test_logprobs_of_truncated_and_greedy_samples_are_untruncated(base: tinker.SamplingClient) -> None:
    """The token is drawn from the truncated distribution; its logprob is that of the full distribution."""
    likeliest = ask(base, temperature=0, topk_sample_logprobs=3).sequences[0]
    assert likeliest.topk_logprobs is not None
    assert likeliest.tokens[0] == likeliest.topk_logprobs[0][0][0]
    assert likeliest.logprobs[0] == pytest.approx(likeliest.topk_logprobs[0][0][1], abs=1e-4)
    for options in ({"top_k": 1}, {"top_p": 1e-9}):
        cut = ask(base, **options).sequences[0]
        assert cut.tokens[0] == likeliest.tokens[0]
        assert cut.logprobs[0] == pytest.approx(likeliest.logprobs[0], abs=1e-4)
        hot = ask(base, temperature=2.0, topk_sample_logprobs=2, **options).sequences[0]
        assert hot.tokens[0] == likeliest.tokens[0]
        assert hot.logprobs[0] < likeliest.logprobs[0]
    untruncated = ask(base, temperature=1.0, top_k=10**6, top_p=1.0, max_tokens=8, seed=5).sequences[0]
    assert list(untruncated.tokens) == list(ask(base, max_tokens=8, seed=5).sequences[0].tokens)


def test_the_end_of_the_context_is_where_an_answer_ends(base: tinker.SamplingClient) -> None:
    long = [3] * (CONTEXT - 4)
    answer = ask(base, long, max_tokens=None, stop=[]).sequences[0]
    assert (len(answer.tokens), answer.stop_reason) == (4, "length")
    last = ask(base, [3] * (CONTEXT - 1), max_tokens=1, stop=[]).sequences[0]
    assert (len(last.tokens), last.stop_reason) == (1, "length")


def test_a_stop_string_may_span_tokens(base: tinker.SamplingClient, trained_model: tinker.TrainingClient) -> None:
    tokenizer = trained_model.get_tokenizer()
    free = list(ask(base, max_tokens=40, temperature=1.0, seed=2, stop=[]).sequences[0].tokens)
    texts = [tokenizer.decode([token]) for token in free]
    at = next(
        i for i in range(2, 39) if all(token_text.isascii() and token_text.strip() for token_text in texts[i : i + 2])
    )
    stop = texts[at][-1] + texts[at + 1][0]
    stopped = ask(base, max_tokens=40, temperature=1.0, seed=2, stop=[stop]).sequences[0]
    text = tokenizer.decode(stopped.tokens)
    assert stopped.stop_reason == "stop"
    assert list(stopped.tokens) == free[: len(stopped.tokens)]
    assert stop in text
    assert stop not in tokenizer.decode(stopped.tokens[:-1])


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "prompt is empty"),
        (PROMPT, {"max_tokens": 0}, "max_tokens is 0"),
        ([3] * CONTEXT, {"max_tokens": None}, "exceed the context of 2048"),
        (PROMPT, {"max_tokens": CONTEXT}, "exceed the context of 2048"),
        (PROMPT, {"prompt_alt_tokens_k": 5000}, "prompt_alt_tokens_k is 5000; it must lie between 0 and 1024"),
        (
            PROMPT,
            {"include_prompt_logprobs": True, "prompt_logprobs_last_n": len(PROMPT)},
            "prompt_logprobs_last_n is 25; it must lie between 1 and 24",
        ),
        (PROMPT, {"target_prompt_logprobs": targets(3, [1])}, "needs 24 rows"),
        (PROMPT, {"target_prompt_logprobs": targets(24, [512])}, "holds the id 512"),
        (PROMPT, {"target_prompt_logprobs": targets(24, [-1])}, "names no token"),
    ],
)
def test_an_invalid_sample_fails_with_the_reason(
    base: tinker.SamplingClient, prompt: list[int], options: dict[str, object], words: str
) -> None:
    with pytest.raises(tinker.TinkerError, match=words):
        ask(base, prompt, **options)


def test_an_image_is_refused_by_name_and_its_address_never_fetched(base: tinker.SamplingClient) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/image.png"
        pointer = types.ImageAssetPointerChunk(location=address, format="png", expected_tokens=4)
        image = types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=4)
        for chunk, name in ((pointer, "image_asset_pointer"), (image, "image")):
            prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1, 2]), chunk])
            with pytest.raises(tinker.TinkerError, match=f"prompt.chunks.1. is of type '{name}'"):
                base.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
        with pytest.raises(BlockingIOError):
            listener.accept()
