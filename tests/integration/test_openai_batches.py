"""OpenAI's batches through the real `openai` client: every status, both files, refusals, and kills."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import openai
import pytest

from support.batch_files import REQUEST_LINE
from support.databases import database_url
from support.http_harness import ALICE, BOB, Harness
from support.live import LiveServer, free_port, serving
from tinsmith.auth.keys import Keys
from tinsmith.batch.openai import requests, rows
from tinsmith.batch.openai.reconciler import Reconciler, round_robin
from tinsmith.batch.openai.requests import RequestsCheck, check_file
from tinsmith.batch.openai.rows import Batch
from tinsmith.db.factory import open_database
from tinsmith.db.schema import OPENAI_BATCHES

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL = "tinsmith/nano"
ENDED = ("completed", "failed", "expired", "cancelled")
WAIT_S = 30.0
LINE_BYTES = 1 << 20


@pytest.fixture
def client(fake_server: LiveServer) -> Iterator[openai.OpenAI]:
    with client_of(fake_server.url) as openai_client:
        yield openai_client


def client_of(url: str, key: str = "tml-test") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=2)


def chat(name: str, **body: object) -> dict[str, object]:
    message = {"role": "user", "content": f"hello {name}"}
    request = {"model": MODEL, "messages": [message], "max_tokens": 4, "temperature": 0, "seed": 7, **body}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": request}


def completion(name: str, **body: object) -> dict[str, object]:
    request = {"model": MODEL, "prompt": f"hello {name}", "max_tokens": 4, "temperature": 0, "seed": 7, **body}
    return {"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": request}


def as_lines(requests: Sequence[object]) -> bytes:
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


def submit(
    client: openai.OpenAI, requests: Sequence[object], endpoint: str = CHAT, **options: object
) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", as_lines(requests)), purpose="batch")
    arguments = {"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h", **options}
    return client.batches.create(**arguments)  # type: ignore[arg-type]


def wait(client: openai.OpenAI, batch_id: str, until: Sequence[str] = ENDED) -> openai.types.Batch:
    deadline = time.monotonic() + WAIT_S
    while (batch := client.batches.retrieve(batch_id)).status not in until:
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
    return batch


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_answers_every_request_as_its_endpoint_does(client: openai.OpenAI) -> None:
    names = [f"request {index}" for index in range(20)]
    batch = submit(client, [chat(name) for name in names], metadata={"team": "blue"})
    assert (batch.status, batch.object, batch.completion_window) == ("validating", "batch", "24h")
    assert (batch.request_counts.total, batch.usage, batch.errors) == (0, None, None)  # type: ignore[union-attr]
    assert batch.expires_at == batch.created_at + 86400
    final = wait(client, batch.id)
    assert (final.status, final.model, final.metadata) == ("completed", MODEL, {"team": "blue"})
    counts = final.request_counts
    assert counts and (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    assert final.error_file_id is None and final.errors is None
    moments = [final.created_at, final.in_progress_at, final.finalizing_at, final.completed_at]
    assert moments == sorted(moments), "each status has its moment"  # type: ignore[type-var]
    assert not (final.failed_at or final.expired_at or final.cancelled_at or final.cancelling_at)
    answers = {line["custom_id"]: line for line in lines_of(client, final.output_file_id)}
    assert list(answers) == names
    for name, line in answers.items():
        assert line["error"] is None and line["id"].startswith("batch_req_")
        assert line["response"]["status_code"] == 200 and line["response"]["request_id"].startswith("req_")
        direct = client.chat.completions.create(**chat(name)["body"])  # type: ignore[call-overload]
        assert line["response"]["body"]["choices"] == direct.to_dict()["choices"]
    usages = [line["response"]["body"]["usage"] for line in answers.values()]
    assert final.usage is not None
    assert final.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages) > 0
    assert final.usage.output_tokens == sum(usage["completion_tokens"] for usage in usages) > 0
    assert final.usage.total_tokens == final.usage.input_tokens + final.usage.output_tokens
    output = client.files.retrieve(final.output_file_id or "")
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert output.expires_at == output.created_at + 30 * 86400


def test_refused_requests_are_in_the_error_file_and_the_rest_runs(
    client: openai.OpenAI, fake_server: LiveServer
) -> None:
    requests = [completion("good"), completion("long", max_tokens=10**9), completion("odd", temperature="hot")]
    expiry = {"anchor": "created_at", "seconds": 7200}
    batch = wait(client, submit(client, requests, COMPLETIONS, output_expires_after=expiry).id)
    counts = batch.request_counts
    assert batch.status == "completed" and counts and (counts.completed, counts.failed) == (1, 2)
    assert [line["custom_id"] for line in lines_of(client, batch.output_file_id)] == ["good"]
    errors = lines_of(client, batch.error_file_id)
    assert [line["custom_id"] for line in errors] == ["long", "odd"]
    for line in errors:
        assert line["error"] is None and line["response"]["status_code"] == 400
        assert line["response"]["body"]["error"]["message"]
    for file_id in (batch.output_file_id, batch.error_file_id):
        file = client.files.retrieve(file_id or "")
        assert file.expires_at == file.created_at + 7200
    assert list((fake_server.data_dir / "openai_batches").iterdir()) == [], "nothing is left behind"


def test_no_two_results_have_the_same_id(client: openai.OpenAI) -> None:
    batches = [submit(client, [chat("a"), chat("b", model=MODEL, temperature="hot")]) for _ in range(2)]
    cancelled = [submit(client, [chat(str(index)) for index in range(1000)]) for _ in range(2)]
    for batch in cancelled:
        client.batches.cancel(batch.id)
    ended = [wait(client, batch.id) for batch in [*batches, *cancelled]]
    results = [lines_of(client, file_id) for batch in ended for file_id in (batch.output_file_id, batch.error_file_id)]
    ids = [line["id"] for lines in results for line in lines]
    assert len(ids) > 2 * 2 and len(set(ids)) == len(ids)


def test_a_batch_of_failures_only_has_no_output_file(client: openai.OpenAI) -> None:
    batch = wait(client, submit(client, [chat("a", model="no/such")]).id)
    assert (batch.status, batch.output_file_id) == ("completed", None)
    (line,) = lines_of(client, batch.error_file_id)
    assert (line["response"]["status_code"], line["response"]["body"]["error"]["code"]) == (404, "model_not_found")


def test_the_input_may_be_deleted_once_the_batch_is_under_way(client: openai.OpenAI) -> None:
    batch = submit(client, [chat(str(index)) for index in range(40)])
    wait(client, batch.id, ("in_progress", *ENDED))
    client.files.delete(batch.input_file_id)
    final = wait(client, batch.id)
    assert final.request_counts and final.request_counts.completed == 40


def test_a_file_for_another_endpoint_fails_its_batch_with_the_numbers_of_its_lines(client: openai.OpenAI) -> None:
    batch = submit(client, [chat("a"), chat("b")], COMPLETIONS)
    failed = wait(client, batch.id)
    assert failed.status == "failed" and failed.failed_at and failed.output_file_id is None
    assert failed.errors and failed.errors.data
    assert [(problem.line, problem.code, problem.param) for problem in failed.errors.data] == [
        (1, "url_mismatch", "url"),
        (2, "url_mismatch", "url"),
    ]
    assert all(problem.message for problem in failed.errors.data)


@pytest.mark.extended
def test_a_cancelled_batch_keeps_its_results_and_names_the_rest(client: openai.OpenAI) -> None:
    batch = submit(client, [chat(str(index)) for index in range(3000)])
    running = wait_for_some(client, batch.id)
    assert running.status == "in_progress" and running.usage is None
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status == "cancelling" and cancelled.cancelling_at
    final = wait(client, batch.id)
    assert (final.status, client.batches.cancel(batch.id).status) == ("cancelled", "cancelled")
    assert final.cancelled_at and final.completed_at is None
    assert_whole(client, final, 3000, "batch_cancelled")
    assert {line["response"]["status_code"] for line in lines_of(client, final.output_file_id)} == {200}


def test_a_batch_can_be_cancelled_at_once_and_not_when_it_has_ended(client: openai.OpenAI) -> None:
    batch = submit(client, [chat("x")])
    client.batches.cancel(batch.id)
    assert wait(client, batch.id).status == "cancelled"
    final = wait(client, submit(client, [chat("x")]).id)
    with pytest.raises(openai.BadRequestError, match="completed"):
        client.batches.cancel(final.id)


def wait_for_some(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    deadline = time.monotonic() + WAIT_S
    while not ((batch := client.batches.retrieve(batch_id)).request_counts and batch.request_counts.completed):
        assert time.monotonic() < deadline and batch.status in ("validating", "in_progress"), batch
        time.sleep(0.05)
    return batch


def assert_whole(client: openai.OpenAI, batch: openai.types.Batch, total: int, code: str) -> None:
    """Every request of a partly completed batch has exactly one line, in one of the two files."""
    answers, errors = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert answers and errors
    names = Counter(line["custom_id"] for line in [*answers, *errors])
    assert len(names) == total and set(names.values()) == {1}
    assert {line["error"]["code"] for line in errors} == {code}
    assert all(line["response"] is None for line in errors)
    counts = batch.request_counts
    assert counts and (counts.total, counts.completed, counts.failed) == (total, len(answers), len(errors))


@pytest.mark.extended
def test_any_tenant_has_batches_and_expired_ones_keep_their_results(tmp_path: Path) -> None:
    """On a server with keys, whose tenants may not run code."""
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    database = open_database(database_url(data_dir) or f"sqlite:///{data_dir / 'tinsmith.db'}")
    database.migrate()
    alice, bob = (Keys(database).create(name)[1] for name in ("alice", "bob"))
    settings = {"OPENAI_BATCH_WINDOW_S": "600"}
    with contextlib.closing(database), serving(data_dir, "--backend", "fake", settings=settings) as server:
        with client_of(server.url, alice) as client, client_of(server.url, bob) as other:
            batch = submit(client, [chat(str(index)) for index in range(5000)])
            assert batch.expires_at == batch.created_at + 600
            with pytest.raises(openai.NotFoundError):
                other.batches.cancel(batch.id)
            wait_for_some(client, batch.id)
            with database.write() as connection:  # the window ends now
                connection.execute(OPENAI_BATCHES.update().values(expires_at=int(time.time())))
            final = wait(client, batch.id)
            assert (final.status, final.cancelled_at) == ("expired", None)
            assert final.expired_at and final.expires_at and final.expired_at >= final.expires_at
            assert_whole(client, final, 5000, "batch_expired")
            with pytest.raises(openai.NotFoundError):
                other.files.content(final.output_file_id or "")
            assert other.batches.list().data == other.files.list().data == []


@pytest.mark.extended
@pytest.mark.parametrize("point", ["openai.submitted", "batch.committed", "openai.written"])
def test_a_killed_servers_batch_continues_without_repeated_requests(tmp_path: Path, point: str) -> None:
    port, settings = free_port(), {"FAILPOINTS": point}
    names = [f"request {index}" for index in range(60)]
    with serving(tmp_path / "data", "--backend", "fake", port=port, settings=settings) as first:
        with client_of(first.url) as client:
            batch = submit(client, [chat(name) for name in names])
        assert first.process.wait(WAIT_S) == -signal.SIGKILL
    with serving(tmp_path / "data", "--backend", "fake", port=port, settings=settings) as second:
        with client_of(second.url) as client:
            final = wait(client, batch.id)
            assert final.status == "completed"
            assert [line["custom_id"] for line in lines_of(client, final.output_file_id)] == names
            assert [file.purpose for file in client.files.list()] == ["batch_output", "batch"]
        assert second.count("batch_job") == 1
        assert list((second.data_dir / "openai_batches").iterdir()) == []


@pytest.mark.extended
def test_an_adapter_answers_by_its_path(nano_server: LiveServer) -> None:
    import tinker

    with tinker.ServiceClient(base_url=nano_server.url, api_key="tml-test") as service:
        model = service.create_lora_training_client(MODEL, rank=4).result()
        path = model.save_weights_for_sampler("batch").result().path
    with client_of(nano_server.url) as client:
        requests = [chat("a", model=path, seed=3, temperature=1), chat("b", model=path)]
        batch = wait(client, submit(client, requests).id)
        assert (batch.status, batch.model) == ("completed", path)
        for request, line in zip(requests, lines_of(client, batch.output_file_id), strict=True):
            direct = client.chat.completions.create(**request["body"])  # type: ignore[call-overload]
            assert line["response"]["body"]["choices"] == direct.to_dict()["choices"]


def test_lists_come_in_pages_newest_first(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", REQUEST_LINE), purpose="batch")
    batch_ids = [
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id for _ in range(4)
    ]
    first = client.batches.list(limit=3)
    assert [listed_batch.id for listed_batch in first.data] == batch_ids[:0:-1]
    assert first.has_more
    assert [listed_batch.id for listed_batch in client.batches.list(limit=1)][:4] == batch_ids[::-1], (
        "the client goes on by itself"
    )
    for batch_id in batch_ids:
        wait(client, batch_id)


def ask(harness: Harness, body: dict[str, object], key: str = ALICE) -> tuple[int, dict]:
    answer = harness.client.post("/v1/batches", json=body, headers={"X-API-Key": key})
    return answer.status_code, answer.json()


def upload(harness: Harness, content: bytes, key: str = ALICE) -> str:
    files = {"file": ("in.jsonl", content)}
    answer = harness.client.post("/v1/files", headers={"X-API-Key": key}, files=files, data={"purpose": "batch"})
    return answer.json()["id"]


@pytest.mark.parametrize(
    ("changes", "param", "status"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint", 400),
        ({"endpoint": None}, "endpoint", 400),
        ({"completion_window": "48h"}, "completion_window", 400),
        ({"input_file_id": None}, "input_file_id", 400),
        ({"input_file_id": "file-nothing"}, None, 404),
        ({"metadata": {str(index): "x" for index in range(17)}}, "metadata", 400),
        ({"metadata": {"k" * 65: "x"}}, "metadata", 400),
        ({"metadata": {"k": "x" * 513}}, "metadata.k", 400),
        ({"metadata": {"k": "a\x00b"}}, "metadata.k", 400),
        ({"metadata": {"k": 5}}, "metadata.k", 400),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after.seconds", 400),
        ({"output_expires_after": {"anchor": "then", "seconds": 7200}}, "output_expires_after.anchor", 400),
    ],
)
def test_invalid_batches_are_refused_by_name(
    harness: Harness, changes: dict[str, object], param: str | None, status: int
) -> None:
    body = {"input_file_id": upload(harness, REQUEST_LINE), "endpoint": CHAT, "completion_window": "24h"}
    assert ask(harness, body)[0] == 200
    answered, error = ask(harness, body | changes)
    assert (answered, error["error"]["param"]) == (status, param), error
    listed = harness.client.get("/v1/batches", headers={"X-API-Key": ALICE}).json()
    assert len(listed["data"]) == 1, "nothing was made of it"


def test_a_file_of_results_is_no_input(harness: Harness) -> None:
    files = harness.services.files
    file = files.add("alice", files.store("file-out", [b"{}\n"]), "out.jsonl", "batch_output", None)
    status, error = ask(harness, {"input_file_id": file.file_id, "endpoint": CHAT, "completion_window": "24h"})
    assert (status, error["error"]["param"]) == (400, "input_file_id")


@pytest.mark.parametrize(
    ("content", "problems"),
    [
        (b"", [("empty_file", None, None)]),
        (b"\n \r\n\t\n", [("empty_file", None, None)]),
        (b"\n\n{}\n", [("missing_required_parameter", 3, "custom_id")]),
        (b"[" + as_lines([chat("a")]).strip() + b"]", [("invalid_json_line", 1, None)]),
        (as_lines([chat("a", model=None)]), [("missing_required_parameter", 1, "body.model")]),
        (as_lines([chat("a", model="a\x00b")]), [("invalid_model", 1, "body.model")]),
        (as_lines([chat("a"), chat("b", model="other")]), [("model_mismatch", 2, "body.model")]),
        (as_lines([{**chat("a"), "body": [1]}]), [("invalid_body", 1, "body")]),
        (as_lines([{**chat("a"), "custom_id": 5}]), [("invalid_custom_id", 1, "custom_id")]),
        (as_lines([chat("a", x="y" * LINE_BYTES), chat("b")]), [("request_too_large", 1, None)]),
        (as_lines([chat("b")]) + b'{"custom_id": "\xff"}', [("invalid_json_line", 2, None)]),
        (b"[" * 500 + b"]" * 500, [("invalid_json_line", 1, None)]),
        (as_lines([chat("a", x=json.loads("[" * 80 + "]" * 80))]), [("invalid_json_line", 1, None)]),
        (b"\xef\xbb\xbf" + as_lines([chat("a")]) + b"\r\n" + as_lines([chat("b")]).strip(), []),
    ],
)
def test_invalid_input_files_are_refused(
    tmp_path: Path, content: bytes, problems: list[tuple[str, int | None, str | None]]
) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    checked = check(tmp_path / "in.jsonl")
    assert [(problem.code, problem.line, problem.param) for problem in checked.problems] == problems
    assert problems or (checked.total, checked.model) == (2, MODEL)


def check(path: Path) -> RequestsCheck:
    with path.open("rb") as file:
        return check_file(file, path.stat().st_size, LINE_BYTES, (CHAT,))


def test_a_file_has_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(as_lines([chat(str(index)) for index in range(5)]))
    monkeypatch.setattr(requests, "MAX_REQUESTS", 4)
    assert [problem.code for problem in check(path).problems] == ["too_many_tasks"]
    monkeypatch.setattr(requests, "MAX_INPUT_BYTES", 100)
    assert [problem.code for problem in check(path).problems] == ["file_too_large"]
    path.write_bytes(b"5\n" * 1000)
    monkeypatch.undo()
    assert len(check(path).problems) == requests.MAX_SHOWN


def test_a_batch_whose_input_is_gone_before_it_is_read_has_failed(harness: Harness) -> None:
    file_id = upload(harness, REQUEST_LINE)
    _, created = ask(harness, {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"})
    harness.client.delete(f"/v1/files/{file_id}", headers={"X-API-Key": ALICE})
    harness.services.batch_reconciler.reconcile()
    batch = harness.client.get(f"/v1/batches/{created['id']}", headers={"X-API-Key": ALICE}).json()
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "file_not_found")


def test_a_bulk_job_that_fails_makes_its_batch_failed_and_names_what_was_not_done(harness: Harness) -> None:
    file_id = upload(harness, as_lines([chat("a"), chat("b")]))
    _, created = ask(harness, {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"})
    services, reconciler = harness.services, harness.services.batch_reconciler
    reconciler.reconcile()
    (job_id,) = services.batch_jobs.acquirable_jobs("here")
    assert services.batch_jobs.acquire_batch_coordinator(job_id, "token", "here", 60)
    services.batch_jobs.set_status(job_id, "token", "FAILED", "no worker started")
    reconciler.reconcile()
    batch = harness.client.get(f"/v1/batches/{created['id']}", headers={"X-API-Key": ALICE}).json()
    assert (batch["status"], batch["errors"]["data"][0]["message"]) == ("failed", "no worker started")
    assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
    text = harness.client.get(f"/v1/files/{batch['error_file_id']}/content", headers={"X-API-Key": ALICE}).text
    assert [json.loads(line)["error"]["code"] for line in text.splitlines()] == ["batch_failed"] * 2


def test_a_status_moves_only_from_where_it_was_seen(harness: Harness) -> None:
    _, created = ask(
        harness, {"input_file_id": upload(harness, REQUEST_LINE), "endpoint": CHAT, "completion_window": "24h"}
    )
    batches = harness.services.openai_batches
    batch = batches.find("alice", created["id"])
    assert batches.cancel("alice", batch.batch_id).status == "cancelling"
    assert not batches.move(batch, ("validating",), status="in_progress")
    assert not batches.end(batch, [], status="failed")
    assert batches.end(batches.find("alice", batch.batch_id), [], status="cancelled")
    assert not batches.move(batch, rows.CANCELLABLE + rows.ENDED, status="completed")
    assert batches.active() == []


def test_tenants_take_turns(harness: Harness) -> None:
    def create_batch(key: str) -> Batch:
        body = {"input_file_id": upload(harness, REQUEST_LINE, key), "endpoint": CHAT, "completion_window": "24h"}
        _, created = ask(harness, body, key)
        return harness.services.openai_batches.find(key.removeprefix("tml-"), created["id"])

    alice_batches = [create_batch(ALICE) for _ in range(3)]
    bob_batch = create_batch(BOB)
    assert list(round_robin([*alice_batches, bob_batch])) == [
        alice_batches[0],
        bob_batch,
        alice_batches[1],
        alice_batches[2],
    ]


def test_a_directory_of_a_batch_that_ended_is_swept(harness: Harness) -> None:
    reconciler: Reconciler = harness.services.batch_reconciler
    directory = harness.services.settings.data_dir / "openai_batches" / "batch_gone"
    directory.mkdir(parents=True)
    (directory / "input.jsonl").write_bytes(b"x")
    reconciler.reconcile()
    assert not directory.exists()
