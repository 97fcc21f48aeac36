"""Sampling sessions and samples."""

from __future__ import annotations

import pytest
from tinker.types import CreateSamplingSessionResponse, GetSamplerResponse, UntypedAPIFuture

from support.http_harness import BASE, BOB, Harness, json_bytes, sample_request
from tinsmith.wire.sampling import read_sample


def opening(session_id: str, **changes: object) -> dict[str, object]:
    return {"session_id": session_id, "sampling_session_seq_id": 0, **changes}


def test_a_session_over_a_base_model_names_no_version(harness: Harness) -> None:
    session_id = harness.session()
    body = opening(session_id, base_model=BASE)
    opened = CreateSamplingSessionResponse.model_validate(harness.ok("create_sampling_session", body))
    assert opened.sampling_session_id == f"{session_id}:sample:0"
    assert harness.ok("create_sampling_session", body)["sampling_session_id"] == opened.sampling_session_id
    sampler = GetSamplerResponse.model_validate(harness.get(f"samplers/{opened.sampling_session_id}").json())
    assert (sampler.sampler_id, sampler.base_model, sampler.model_path) == (opened.sampling_session_id, BASE, None)
    assert harness.services.sampling_sessions.get("alice", opened.sampling_session_id).version_id is None


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
def test_a_session_over_a_checkpoint_names_it_as_its_version(harness: Harness, kind: str) -> None:
    session_id = harness.session()
    path = harness.checkpoint(harness.model(session_id), kind)
    opened = harness.ok("create_sampling_session", opening(session_id, model_path=path))
    session = harness.services.sampling_sessions.get("alice", opened["sampling_session_id"])
    assert (session.model_path, session.version_id, session.base_model) == (path, path, BASE)
    assert harness.get(f"samplers/{opened['sampling_session_id']}").json()["model_path"] == path


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, 400, "both missing"),
        ({"base_model": "no/such"}, 404, "'no/such' is not served here"),
        ({"model_path": "no/such"}, 400, "not a checkpoint path"),
        ({"model_path": "tinker://a:train:0/sampler_weights/x"}, 404, "does not exist"),
        ({"base_model": BASE, "sampling_session_seq_id": -1}, 400, "sampling_session_seq_id is -1"),
        ({"base_model": BASE, "session_id": "no"}, 404, "session_id 'no' is unknown"),
    ],
)
def test_a_wrong_session_is_an_http_error(
    harness: Harness, changes: dict[str, object], status: int, words: str
) -> None:
    answer = harness.post("create_sampling_session", opening(harness.session()) | changes)
    assert answer.status_code == status
    assert words in answer.json()["detail"]


def test_a_checkpoint_of_another_base_model_is_refused(harness: Harness) -> None:
    session_id = harness.session()
    path = harness.checkpoint(harness.model(session_id))
    answer = harness.post("create_sampling_session", opening(session_id, model_path=path, base_model="local/other"))
    assert answer.status_code == 400
    assert "was trained on 'local/tiny'" in answer.json()["detail"]


def test_another_tenants_checkpoint_and_sampler_are_unknown(harness: Harness) -> None:
    path = harness.checkpoint(harness.model())
    sampler_id = harness.sampler()
    theirs = opening(harness.session(BOB), model_path=path)
    assert harness.post("create_sampling_session", theirs, BOB).status_code == 404
    assert harness.get(f"samplers/{sampler_id}", BOB).status_code == 404
    assert harness.post("asample", sample_request(sampler_id), BOB).status_code == 404
    assert harness.pending() == []


def test_a_sample_is_stored_with_an_id_for_each_sequence(harness: Harness) -> None:
    sampler_id = harness.sampler()
    body = sample_request(sampler_id, 5)
    future = harness.ok("asample", body)
    UntypedAPIFuture.model_validate(future)
    assert future["request_id"] == f"{sampler_id}:5"
    assert future["sample_sequence_ids"] == [f"{sampler_id}:5:0", f"{sampler_id}:5:1"]
    (row,) = harness.pending()
    assert (row.kind, row.seq_id, row.sampling_session_id) == ("sample", 5, sampler_id)
    assert row.num_tokens == 2 + 2 * 3
    stored = harness.read_request_body(row.request_id)
    assert stored == json_bytes(body)
    assert read_sample(stored, row.request_id, None).prompt_T.tolist() == [1, 2]
    assert harness.woken[-1] == BASE


def test_a_sample_without_max_tokens_counts_to_the_end_of_the_context(harness: Harness) -> None:
    harness.ok("asample", sample_request(harness.sampler(), sampling_params={}))
    assert harness.pending()[0].num_tokens == 2 + 2 * (16 - 2)


def test_numbers_of_samples_start_at_zero_in_any_order(harness: Harness) -> None:
    sampler_id = harness.sampler()
    for seq_id in (3_000_000_007, 0, 2, 0):
        harness.ok("asample", sample_request(sampler_id, seq_id))
    assert [row.seq_id for row in harness.pending()] == [3_000_000_007, 0, 2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_samples": 0}, "num_samples is 0"),
        ({"num_samples": 10**9}, "num_samples is 1000000000"),
        ({"prompt": {"chunks": []}}, "prompt is empty"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [50]}]}}, "prompt token 0 is 50"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "'image'"),
        ({"prompt": None}, "prompt is missing"),
        ({"sampling_params": {"max_tokens": 15}}, "2 tokens and max_tokens 15 exceed the context of 16"),
        ({"sampling_params": {"temperature": -1}}, "temperature is -1"),
        ({"sampling_params": {"stop": {}}}, "sampling_params.stop"),
        ({"topk_prompt_logprobs": 51}, "topk_prompt_logprobs is 51"),
        ({"prompt_alt_tokens_k": 1025}, "prompt_alt_tokens_k is 1025"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs is not set"),
        ({"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]}}, "needs 1 rows"),
    ],
)
def test_an_invalid_sample_is_a_refused_future(harness: Harness, changes: dict[str, object], words: str) -> None:
    future = harness.ok("asample", sample_request(harness.sampler(), **changes))
    result = harness.result(future["request_id"])
    assert result["category"] == "user"
    assert words in result["error"]
    assert len(future["sample_sequence_ids"]) <= 2


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"sampling_session_id": None}, 400, "sampling_session_id is missing"),
        ({"sampling_session_id": "no:sample:0"}, 404, "no:sample:0"),
        ({"sampling_session_id": None, "base_model": "no/such"}, 404, "'no/such' is not served here"),
        ({"sampling_session_id": None, "model_path": "tinker://a/b/c/d"}, 400, "not a checkpoint path"),
        ({"sampling_session_id": None, "model_path": "tinker://a/b"}, 404, "tinker://a/sampler_weights/b"),
        ({"seq_id": None}, 400, "seq_id is missing"),
        ({"seq_id": -1}, 400, "seq_id is -1"),
    ],
)
def test_a_sample_that_belongs_nowhere_is_an_http_error(
    harness: Harness, changes: dict[str, object], status: int, words: str
) -> None:
    answer = harness.post("asample", sample_request(harness.sampler()) | changes)
    assert answer.status_code == status
    assert words in answer.json()["detail"]
    assert harness.pending() == []


def sessionless(**weights: object) -> dict[str, object]:
    body = sample_request("", **weights)
    return {name: value for name, value in body.items() if name not in ("sampling_session_id", "seq_id")}


def test_a_sample_without_a_session_names_its_weights(harness: Harness) -> None:
    """All samples of a tenant's weights share one sampling session, which other tenants do not see."""
    path = harness.checkpoint(harness.model(), "sampler_weights")
    run_id, name = path.removeprefix("tinker://").split("/")[::2]
    bodies = [
        sessionless(base_model=BASE),
        sessionless(base_model=BASE, seq_id=7),  # the number means nothing without a session
        sessionless(model_path=path),
        sessionless(model_path=f"tinker://{run_id}/{name}", base_model=BASE),  # as SkyRL names it
    ]
    futures = [harness.ok("asample", body) for body in bodies]
    theirs = harness.ok("asample", sessionless(base_model=BASE), BOB)
    for future in futures:
        UntypedAPIFuture.model_validate(future)
        assert future["sample_sequence_ids"] == [f"{future['request_id']}:{index}" for index in range(2)]
    sampler_ids = [future["request_id"].rpartition(":")[0] for future in (*futures, theirs)]
    assert sampler_ids[0] == sampler_ids[1] != sampler_ids[2] == sampler_ids[3]
    assert sampler_ids[4] not in sampler_ids[:4] and harness.get(f"samplers/{sampler_ids[4]}").status_code == 404
    assert harness.get(f"samplers/{sampler_ids[3]}").json()["model_path"] == path
    assert [row.seq_id for row in harness.pending()] == [0, 1, 0, 1, 0]
    stored = harness.read_request_body(futures[3]["request_id"])
    assert read_sample(stored, "r", path).prompt_T.tolist() == [1, 2]


def test_a_sample_has_weights_or_a_session(harness: Harness) -> None:
    future = harness.ok("asample", sample_request(harness.sampler(), base_model=BASE))
    assert "sampling_session_id has weights of its own" in harness.result(future["request_id"])["error"]
    theirs = harness.checkpoint(harness.model(key=BOB), "sampler_weights")
    assert harness.post("asample", sessionless(model_path=theirs)).status_code == 404


def test_a_sampling_session_takes_a_short_path(harness: Harness) -> None:
    model_id = harness.model()
    path = harness.checkpoint(model_id, "sampler_weights", name="short")
    sampler_id = harness.ok(
        "create_sampling_session", opening(harness.session(), model_path=f"tinker://{model_id}/short")
    )["sampling_session_id"]
    assert harness.get(f"samplers/{sampler_id}").json()["model_path"] == path


def test_a_sample_in_a_closed_session_is_410(harness: Harness) -> None:
    session_id = harness.session()
    sampler_id = harness.sampler(session_id)
    harness.services.sessions.close(session_id, "gone")
    assert harness.post("asample", sample_request(sampler_id)).status_code == 410
