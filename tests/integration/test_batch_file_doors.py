"""A file of requests is refused with the same sentence wherever it comes in: at its upload, as the input of a batch, as
the input of a bulk job, and as a message batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.batch_files import REQUEST
from support.http_harness import ALICE, Harness, close, make_harness
from tinsmith import batch
from tinsmith.batch.openai import ENDPOINTS, MESSAGES
from tinsmith.errors import UserError
from tinsmith.store.files import BATCH, new_id

HEADERS = {"X-API-Key": ALICE}
CHAT = ENDPOINTS[0]


def request(**changes: Any) -> bytes:  # noqa: ANN401
    values = {name: value for name, value in {**REQUEST, **changes}.items() if value is not ...}
    return json.dumps(values).encode()


BODY: dict[str, Any] = dict(REQUEST["body"])  # type: ignore[call-overload]
FIRST = request(custom_id="first")
NAME = "/v1/embeddings"
# The lines of a file -> the sentence about the last one.
BAD: dict[str, tuple[list[bytes], str]] = {
    "no JSON": ([FIRST, b"{"], "the line is not valid JSON"),
    "a number": ([FIRST, b"5"], "the line must be a JSON object, not 5"),
    "bytes that are no text": ([FIRST, b'{"custom_id": "\xff"}'], "the line is not valid JSON"),
    "too deep": ([FIRST, request(body={**BODY, "x": json.loads("[" * 80 + "]" * 80)})], "nested more than 64 levels"),
    "an array of requests": ([b"[" + FIRST + b"]"], "the line must be a JSON object, not [{"),
    **{f"no {name}": ([FIRST, request(**{name: ...})], f"{name} is missing") for name in REQUEST},
    "a name that is a number": ([FIRST, request(custom_id=5)], "custom_id is 5; it must be a text that is not empty"),
    "a name twice": ([FIRST, FIRST], "custom_id 'first' is used by an earlier request"),
    "another method": ([FIRST, request(method="GET")], "method is 'GET'; it must be 'POST'"),
    "an unknown endpoint": ([request(url=NAME)], f"url is '{NAME}'; it must be"),
    "another endpoint": ([FIRST, request(url="/v1/completions")], f"url is '/v1/completions'; it must be '{CHAT}'"),
    "a body that is a list": ([FIRST, request(body=[1])], "body is [1]; it must be an object"),
    "no model": ([FIRST, request(body={**BODY, "model": ""})], "body.model is missing"),
    "a model that is a number": ([FIRST, request(body={**BODY, "model": 5})], "body.model is 5; it must be a string"),
    "another model": ([FIRST, request(body={**BODY, "model": "b"})], "body.model is 'b', but earlier requests use"),
    "nothing": ([b"", b" "], "the file holds no request"),
}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path_factory.mktemp("doors"))
    yield new_harness
    close(new_harness)


def refuse_upload(harness: Harness, content: bytes) -> str:
    form = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch"}}
    answer = harness.client.post("/v1/files", headers=HEADERS, **form)  # type: ignore[arg-type]
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


def refuse_batch(harness: Harness, content: bytes) -> str:
    """What a batch says of a file that was stored by an earlier release."""
    files = harness.services.files
    file = files.add("alice", files.store(new_id(), [content]), "in.jsonl", BATCH, None)
    body = {"input_file_id": file.file_id, "endpoint": CHAT, "completion_window": "24h"}
    created = harness.client.post("/v1/batches", headers=HEADERS, json=body).json()
    harness.services.batch_reconciler.reconcile()
    ended = harness.client.get(f"/v1/batches/{created['id']}", headers=HEADERS).json()
    assert ended["status"] == "failed"
    [problem] = ended["errors"]["data"]
    return problem["message"] if problem["line"] is None else f"line {problem['line']}: {problem['message']}"


def refuse_job(content: bytes, path: Path) -> str:
    path.write_bytes(content)
    with pytest.raises(UserError) as refusal:
        len(batch.OpenAIBatchReader(str(path)))
    return str(refusal.value)


@pytest.mark.parametrize("name", BAD)
def test_every_door_refuses_a_bad_line_with_the_same_sentence(name: str, harness: Harness, tmp_path: Path) -> None:
    lines, words = BAD[name]
    content = b"\n".join(lines) + b"\n"
    expected = refuse_batch(harness, content)
    assert words in expected
    if words != "the file holds no request":
        assert expected.startswith(f"line {len(lines)}: ")
    refusals = [refuse_upload(harness, content), refuse_job(content, tmp_path / "in.jsonl")]
    if name == "an unknown endpoint":  # a batch names one, an upload all that a batch may name, a job messages, too
        expected = f"line 1: {words} "
        assert str(list(ENDPOINTS)) in refusals[0] and str([*ENDPOINTS, MESSAGES]) in refusals[1]
    assert [refusal for refusal in refusals if expected not in refusal] == []


def test_a_message_batch_is_refused_with_that_sentence_too(harness: Harness) -> None:
    twice = {"custom_id": "first", "params": {"model": "m", "max_tokens": 1, "messages": []}}
    answer = harness.client.post("/v1/messages/batches", headers=HEADERS, json={"requests": [twice, twice]})
    assert answer.status_code == 400
    assert "requests[1]: custom_id 'first' is used by an earlier request" in answer.text


def test_a_file_that_every_door_takes(harness: Harness, tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf\n" + FIRST + b"\r\n \n" + request(custom_id="last")
    form = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch"}}
    assert harness.client.post("/v1/files", headers=HEADERS, **form).status_code == 200  # type: ignore[arg-type]
    (tmp_path / "in.jsonl").write_bytes(content)
    assert len(batch.OpenAIBatchReader(str(tmp_path / "in.jsonl"))) == 2
