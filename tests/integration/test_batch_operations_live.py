"""Operations and the real SDK return the same tokens and logprobs on the embedded model, however batched and killed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
import tinker
from tinker import types

from support.databases import database_url
from support.live import API_KEY, LiveServer, free_port, serving
from tinsmith import batch
from tinsmith.base_models import nano
from tinsmith.batch.client.http import Client
from tinsmith.batch.client.job import Job
from tinsmith.db.factory import open_database

NANO = "tinsmith/nano"
ROWS = [{"q": f"Say {index} please", "ids": list(range(10 + index, 30 + index))} for index in range(6)]


@pytest.fixture(scope="module")
def nano_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Rows of a job are decoded together, the SDK's requests one by one. Without `--deterministic` rounding would
    differ and sometimes change a token.
    """
    with serving(tmp_path_factory.mktemp("exact") / "data", "--deterministic") as server:
        yield server


@pytest.fixture(scope="module")
def service(nano_server: LiveServer) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=nano_server.url, api_key=API_KEY) as client:
        yield client


@pytest.fixture(scope="module")
def adapter(service: tinker.ServiceClient) -> str:
    """The path of a trained adapter, whose logprobs differ from the base model's."""
    client = service.create_lora_training_client(NANO, rank=8, seed=3).result()
    tokens = list(range(100, 125))
    arrays: Any = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=arrays)
    client.forward_backward([datum], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return client.save_weights_for_sampler("operations").result().path


@pytest.fixture
def client(nano_server: LiveServer) -> Iterator[Client]:
    new_client = Client(nano_server.url, API_KEY)
    yield new_client
    new_client.close()


@pytest.fixture(scope="module")
def tokenizer() -> Any:  # noqa: ANN401  transformers has no one type
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(nano.path())


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(client: Client, rows: list[Any], steps: Any, out: Path, **options: Any) -> list[Any]:  # noqa: ANN401
    job = batch.Dataset(rows).map(steps, output=batch.JsonWriter(str(out)), stream=False, client=client, **options)
    assert isinstance(job, Job)
    job.wait()
    return lines(out)


def sample_by_sdk(
    sampler: tinker.SamplingClient,
    prompt: list[int],
    num_samples: int,
    seed: int,
    **options: Any,  # noqa: ANN401
) -> types.SampleResponse:
    params = types.SamplingParams(seed=seed, **options)
    return sampler.sample(types.ModelInput.from_ints(prompt), num_samples, params).result()


@pytest.mark.extended
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("kind", ["base", "adapter"])
def test_a_sample_equals_the_sdks(
    kind: str, batch_size: int, service: tinker.ServiceClient, client: Client, tmp_path: Path, adapter: str
) -> None:
    path = adapter if kind == "adapter" else None
    sampler = service.create_sampling_client(model_path=path, base_model=None if path else NANO).result()
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "top_p": 0.95}
    sample = batch.Sample(
        path or NANO, tokens_column="ids", num_samples=2, seed=7, tokens=True, logprobs=True, **options
    )
    rows = run(client, ROWS, sample, tmp_path / "out.jsonl", batch_size=batch_size)
    for index, row in enumerate(rows):
        expected = sample_by_sdk(sampler, row["ids"], 2, batch.row_seed(7, index), **options).sequences
        assert row["output_tokens"] == [sequence.tokens for sequence in expected]
        for logprobs_of_row, theirs in zip(row["output_logprobs"], expected, strict=True):
            assert logprobs_of_row == theirs.logprobs
        assert row["output_stop_reason"] == [sequence.stop_reason for sequence in expected]
    assert len({tuple(tokens) for row in rows for tokens in row["output_tokens"]}) > 6, "rows have seeds of their own"


@pytest.mark.extended
def test_prompts_are_those_of_the_tokenizer(
    service: tinker.ServiceClient,
    client: Client,
    tmp_path: Path,
    tokenizer: Any,  # noqa: ANN401
) -> None:
    sampler = service.create_sampling_client(base_model=NANO).result()
    fields: dict[str, Any] = {"max_tokens": 8, "tokens": True, "prompt_logprobs": True, "topk_prompt_logprobs": 2}
    plain = run(client, ROWS, batch.Sample(NANO, prompt="q", **fields), tmp_path / "plain.jsonl")
    chat = run(client, ROWS, batch.Sample(NANO, messages="q", **fields), tmp_path / "chat.jsonl")
    for index, (plain_row, chat_row) in enumerate(zip(plain, chat, strict=True)):
        text = tokenizer.encode(plain_row["q"])
        messages = [{"role": "user", "content": plain_row["q"]}]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for row, prompt in ((plain_row, text), (chat_row, rendered)):
            answer = sample_by_sdk(sampler, prompt, 1, batch.row_seed(0, index), max_tokens=8)
            assert row["output_tokens"] == answer.sequences[0].tokens
            assert row["output"] == tokenizer.decode(answer.sequences[0].tokens, skip_special_tokens=True)
            scored = sampler.sample(
                types.ModelInput.from_ints(prompt), 1, types.SamplingParams(max_tokens=1),
                include_prompt_logprobs=True, topk_prompt_logprobs=2,
            ).result()  # fmt: skip
            assert row["prompt_logprobs"] == scored.prompt_logprobs
            assert scored.topk_prompt_logprobs is not None
            for pairs, theirs in zip(row["topk_prompt_logprobs"], scored.topk_prompt_logprobs, strict=True):
                assert [token for token, _ in pairs] == [token for token, _ in theirs or []]


@pytest.mark.extended
def test_a_pipeline_samples_and_grades(client: Client, tmp_path: Path) -> None:
    sample = batch.Sample(NANO, messages="q", num_samples=3, max_tokens=6)
    steps = [sample, batch.Grade(by="regex", pattern="[aeiou]", pass_at=[1, 3])]
    for row in run(client, ROWS, steps, tmp_path / "out.jsonl"):
        scores = [float(any(letter in "aeiou" for letter in text)) for text in row["output"]]
        assert row["score"] == scores
        assert row["score_mean"] == pytest.approx(sum(scores) / 3)
        assert row["score_pass@1"] == pytest.approx(sum(scores) / 3)
        assert row["score_pass@3"] == float(any(scores))


@pytest.mark.extended
def test_a_model_grades(
    service: tinker.ServiceClient,
    client: Client,
    tmp_path: Path,
    tokenizer: Any,  # noqa: ANN401
) -> None:
    """The embedded model rarely returns a score; rows without a score fail by name."""
    sampler = service.create_sampling_client(base_model=NANO).result()
    rows = [{"output": f"text {index}"} for index in range(3)]
    fields: dict[str, Any] = {"by": "model", "model": NANO, "template": "Is {output} good?", "max_tokens": 6, "seed": 3}
    said = []
    for index, row in enumerate(rows):
        messages = [{"role": "user", "content": f"Is {row['output']} good?"}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer = sample_by_sdk(sampler, prompt, 1, batch.row_seed(3, index), max_tokens=6, temperature=0.0)
        said.append(tokenizer.decode(answer.sequences[0].tokens, skip_special_tokens=True))
    letter = next(letter for letter in said[0] if letter.isalpha()).lower()
    graded = run(client, rows[:1], batch.Grade(scores={letter: 0.25}, **fields), tmp_path / "graded.jsonl")
    assert graded[0]["score"] == 0.25
    errors = batch.JsonWriter(str(tmp_path / "err.jsonl"))
    none = batch.Grade(pattern="(Q{9})", **fields)
    assert run(client, rows, none, tmp_path / "none.jsonl", errors=errors, max_failed_rows=3) == []
    assert [repr(grade) in row["message"] for grade, row in zip(said, lines(tmp_path / "err.jsonl"), strict=True)]
    assert "has no score that matches" in lines(tmp_path / "err.jsonl")[0]["message"]


def by_hand(
    sampler: tinker.SamplingClient,
    tokenizer: Any,  # noqa: ANN401
    messages: list[Any],
    seeds: list[int],
    replies: list[str],
) -> list[dict[str, Any]]:
    """Run a conversation with fixed replies through the SDK."""
    turns = []
    for seed, reply in zip(seeds, [*replies, ""], strict=True):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        sequence = sample_by_sdk(sampler, prompt, 1, seed, max_tokens=40).sequences[0]
        text = tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        turns.append({"prompt_tokens": prompt, "tokens": sequence.tokens, "logprobs": sequence.logprobs, "text": text,
                     "stop_reason": sequence.stop_reason})  # fmt: skip
        if sequence.stop_reason == "length":
            break
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": reply}]
    return turns


@pytest.mark.extended
def test_a_rollout_equals_a_manual_conversation(
    service: tinker.ServiceClient,
    client: Client,
    tmp_path: Path,
    tokenizer: Any,  # noqa: ANN401
) -> None:
    sampler = service.create_sampling_client(base_model=NANO).result()
    rows = [{"start": "Say hello.", "rest": ["And 2 plus 3?", "Say bye."]}, {"start": "1 plus 1?", "rest": ["No."] * 2}]
    rollout = batch.Rollout(
        NANO, messages="start", environment=batch.Turns("rest"), num_rollouts=2, max_tokens=40, seed=5,
        grade=batch.Grade(by="regex", pattern="."),
    )  # fmt: skip
    rows_out = run(client, rows, rollout, tmp_path / "out.jsonl")
    endings = set()
    for index, row in enumerate(rows_out):
        for rollout_index, trajectory in enumerate(row["rollouts"]):
            seeds = [batch.row_seed(5, index, rollout_index, turn) for turn in range(3)]
            start = [{"role": "user", "content": row["start"]}]
            expected = by_hand(sampler, tokenizer, start, seeds, row["rest"])
            turns = trajectory["turns"]
            for turn_of_row, theirs in zip(turns, expected, strict=True):
                assert {name: turn_of_row[name] for name in theirs} == theirs
            endings.add(trajectory["ended"])
            assert trajectory["ended"] == ("length" if turns[-1]["stop_reason"] == "length" else "done")
            assert trajectory["reward"] == float(bool(turns[-1]["text"]))
            check_datums(trajectory)
    assert "done" in endings


def check_datums(trajectory: dict[str, Any]) -> None:
    """Datums contain every sampled token once, in order, after its prompt, with its logprob."""
    sampled = [pair for turn in trajectory["turns"] for pair in zip(turn["tokens"], turn["logprobs"], strict=True)]
    trained_tokens = []
    for datum in trajectory["datums"]:
        inputs = datum["loss_fn_inputs"]
        arrays: Any = {name: np.array(values) for name, values in inputs.items()}
        types.Datum(model_input=types.ModelInput.from_ints(datum["model_input"]), loss_fn_inputs=arrays)
        assert datum["model_input"][1:] == inputs["target_tokens"][:-1]
        rows = zip(inputs["target_tokens"], inputs["logprobs"], inputs["mask"], strict=True)
        trained_tokens += [(token, logprob) for token, logprob, mask in rows if mask]
    assert trained_tokens == sampled


@pytest.mark.extended
def test_a_retry_goes_on_until_it_is_right(client: Client, tmp_path: Path) -> None:
    never = batch.Grade(by="exact", reference="wanted")
    retry = batch.Retry(never, feedback="{output} is not {wanted}: {score}")
    rows = [{"q": "Say hello.", "wanted": "what it never says"}]
    fields: dict[str, Any] = {"messages": "q", "max_tokens": 40, "max_turns": 2, "temperature": 0.0}
    (row,) = run(client, rows, batch.Rollout(NANO, environment=retry, **fields), tmp_path / "never.jsonl")
    (trajectory,) = row["rollouts"]
    first = trajectory["turns"][0]
    assert [turn["reward"] for turn in trajectory["turns"]] == [0.0] * len(trajectory["turns"])
    assert trajectory["ended"] in ("turns", "length")
    rows[0]["wanted"] = first["text"]
    (row,) = run(client, rows, batch.Rollout(NANO, environment=retry, **fields), tmp_path / "at_once.jsonl")
    (trajectory,) = row["rollouts"]
    assert (len(trajectory["turns"]), trajectory["reward"], trajectory["ended"]) == (1, 1.0, "done")


def results(data_dir: Path) -> dict[str, bytes]:
    database = open_database(database_url(data_dir) or f"sqlite:///{data_dir / 'tinsmith.db'}")
    with database.read() as connection:
        rows = connection.execute(sa.text("SELECT request_id, body FROM future_results")).all()
    database.close()
    return {row.request_id: bytes(row.body) for row in rows}


@pytest.mark.extended
def test_what_was_sampled_before_a_crash_is_not_sampled_again(tmp_path: Path) -> None:
    """Without seeds, a row that was sampled twice would differ."""
    from tinsmith.batch.operations.runtime import parse_sample_response

    data_dir, out, port = tmp_path / "data", tmp_path / "out.jsonl", free_port()
    rows = [{"ids": [10 + index] * 5} for index in range(24)]
    sample = batch.Sample(NANO, tokens_column="ids", max_tokens=60, seed=None, tokens=True)
    with serving(data_dir, port=port) as server:
        client = Client(server.url, API_KEY)
        batch.Dataset(rows).map(
            sample, output=batch.JsonWriter(str(out)), stream=False, client=client, batch_size=24
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while len(before := results(data_dir)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        client.close()
    before = results(data_dir)
    assert len(before) < 24, "it was killed in the middle"
    with serving(data_dir, port=port) as server:
        client = Client(server.url, API_KEY)
        Job(1, client).wait()
        client.close()
        assert server.count("futures WHERE kind = 'sample'") == 24
    after = results(data_dir)
    assert {name: after[name] for name in before} == before
    tokens = {int(name.rpartition(":")[2].split("-")[0]): parse_sample_response(body) for name, body in after.items()}
    assert [row["output_tokens"] for row in lines(out)] == [tokens[index].sequences[0].tokens for index in range(24)]
