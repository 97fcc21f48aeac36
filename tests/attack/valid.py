"""A valid request for every route of the OpenAPI document, with objects that exist on a live server."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from urllib.parse import quote, urlencode, urlsplit

import httpx

from attack.sending import Request
from support import http_harness, raw_client
from support.batch_files import REQUEST_LINE
from support.every_route import BODIES, QUERIES, RouteObjects, openai_batch
from tinsmith.api.request import ANTHROPIC, HUB, OPENAI, PREFIX

MODEL = raw_client.BASE
BOUNDARY = "attack-boundary"
JSON, PROTO = b"application/json", b"application/x-protobuf"
FORM = "multipart/form-data"
PASSES = ("/forward", "/forward_backward")
ENDS = re.compile(
    r"DELETE .*(?<!publish)$"
    r"|/(unload_model|delete_model|finish|cancel|cancel_future|cleanup_futures|pause_sampling)$"
)
"""Routes that delete objects which other routes need, or hold them."""
_BARE_ID = "/api/v1/training_runs/{run_id}/checkpoints/{checkpoint_id}"
NEVER_200 = {
    *(f"POST {prefix}/{path}" for prefix in OPENAI for path in ("embeddings", "batches/{batch_id}/cancel")),
    f"GET {_BARE_ID}/archive",
    "POST /api/v1/external_weights_upload_finish",
    "PUT /api/v1/external_weights_uploads/{number}/{file}",
    f"DELETE {_BARE_ID}",
    *(f"DELETE {prefix}/messages/batches/{{message_batch_id}}" for prefix in ANTHROPIC),
    "POST /api/v1/trajectories/rewards",
    "DELETE /api/v1/trajectories",
    "GET /api/v1/operator/samplers/{sampler}",
    *(f"GET /api/v1/batch/jobs/{{job_id}}/{path}" for path in ("preview", "download")),
    "GET /api/v1/checkpoint_jobs/{checkpoint_job_id}/links",
    "GET /api/v1/merged/{checkpoint_job_id}/archive",
    "GET /api/v1/merged/{checkpoint_job_id}/files/{file}",
    *(f"POST /api/v1/operator/samplers/{{sampler}}/{action}" for action in ("drain", "sleep", "wake")),
}
"""Routes that refuse valid requests: embeddings are not supported, the batch has failed, the one of messages has not
ended, the bulk job has no output yet, and there is no signed upload, captured session, dedicated sampler or merged
model.
"""
ROLLED_OUT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ASKED = {"model": MODEL, "input": "hi", "max_output_tokens": 4}
MESSAGE_BATCH = {"requests": [{"custom_id": "a", "params": {"model": MODEL, **ROLLED_OUT}}]}
QUERY: Mapping[str, str] = {
    "/audit": "?event_type=all&event_date=2020-01-01",
    "/dashboard/samples": "?limit=5",
    "/dashboard/checkpoints": "?search=a&limit=5&offset=0",
    "/sessions": "?limit=5&offset=0",
    "/billing/usage/events": "?starting_on=2026-01-01T00:00:00Z&ending_before=2026-01-02T00:00:00Z",
    "/training_runs": "?limit=5&offset=0",
    "/batch/jobs": "?limit=5",
}
PLAIN_BODIES: Mapping[str, object] = {
    "/batch/jobs/{job_id}/resume": {},
    "/training_runs/{run_id}/checkpoints/{kind}/{name}/merge": {"dtype": "auto"},
    "/checkpoint_jobs/{checkpoint_job_id}/restart": {},
    "/client/config": {"sdk_version": "0.38.0"},
    "/client/dynamic_config": {},
    "/operator/stop_profile": {"base_model": MODEL},
    "/auth/token": {},
    "/telemetry": {"events": [], "platform": "x", "sdk_version": "0.38.0", "session_id": "x", "process_uuid": "x"},
    "/create_session": {"tags": ["a"], "sdk_version": "0.38.0", "user_metadata": {"a": "b"}},
    "/sessions/search": {"limit": 5, "owner": {"type": "own"}, "statuses": [{"type": "active"}]},
    "/checkpoints/search": {"limit": 5, "owner": {"type": "own"}, "checkpoint_type": "training"},
    "/dashboard/samples/rewards": {"rewards": [{"digest": "0" * 32, "reward": 0.5}]},
    "/external_weights_upload_start": {"base_model": MODEL, "lora_config": {"rank": 4}},
    "/external_weights_uploads/{number}/{file}": {},  # any bytes
    "/cleanup_futures": {"max_age_hours": 1000.0},
    "/batch/pools/{name}": {"workers": 2},
    **{prefix + "/embeddings": {"model": MODEL, "input": "hi"} for prefix in OPENAI},
    **{prefix + "/chat/completions": {"model": MODEL, "seed": 1, **ROLLED_OUT} for prefix in OPENAI},
    **{prefix + "/completions": {"model": MODEL, "prompt": "hi", "max_tokens": 4, "n": 1} for prefix in OPENAI},
    **{prefix + "/messages": {"model": MODEL, **ROLLED_OUT} for prefix in ANTHROPIC},
    **{prefix + "/messages/batches": MESSAGE_BATCH for prefix in ANTHROPIC},
    "/inference/v1/generate": {"model": MODEL, "token_ids": [1, 2], "sampling_params": {"max_tokens": 4}},
}
SEARCHED = {
    "lora_config": {"rank": 4, "seed": 1, "train_mlp": True},
    "optimizer_config": {"type": "adamw"},
    "user_metadata": {"a": "b"},
}
MORE: Mapping[str, dict[str, object]] = {
    "/create_model": SEARCHED,
    "/asample": {"sampling_params": {"max_tokens": 3, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "stop": ["x"]}},
    "/sample": {"sampling_params": {"max_tokens": 3}, "num_samples": 1},
    "/optim_step": {"adam_params": {"learning_rate": 1e-3, "beta1": 0.9, "eps": 1e-8, "grad_clip_norm": 1.0}},
    "/save_weights": {"ttl_seconds": 3600},
}
"""Optional fields of routes, so that mutations can break them too."""


@dataclass(frozen=True, slots=True)
class World:
    """A tenant's objects, and the numbers of its next requests."""

    objects: RouteObjects
    other_file_id: str
    other_job_id: str  # only for purging, which prevents a resume
    key: str
    links: Mapping[str, str]  # path and query, by the route without a key
    new_key: Callable[[], str]
    new_response: Callable[[], str]
    new_message_batch: Callable[[], str]
    new_checkpoint_job: Callable[[], str]
    files: Mapping[str, bytes]  # an adapter's
    sample_id: str  # a sample recorded for the dashboard
    metrics_token: str
    seq_ids: Iterator[int] = field(default_factory=lambda: itertools.count(3))


def new_world(url: str, key: str, new_key: Callable[[], str], metrics_token: str) -> World:
    http = httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=120)
    raw = raw_client.RawClient(http)
    with http:
        session_id = raw.session()
        model_id = raw.model(session_id)
        sampler_id = raw.sampler(session_id)
        saved = [("save_weights", 1), ("save_weights_external", 2)]
        saves = [raw.ok(path, {"model_id": model_id, "seq_id": seq_id, "path": "one"}) for path, seq_id in saved]
        sampled = raw.ok("asample", http_harness.sample_request(sampler_id, 0))
        weights, export = (raw.result(save["request_id"]).json()["path"] for save in saves)
        raw.result(sampled["request_id"])
        job_id, other_job_id = (raw.ok("batch/jobs", failing_job(f"{session_id}-{n}"))["job_id"] for n in range(2))
        form = {"files": {"file": ("in.jsonl", REQUEST_LINE)}, "data": {"purpose": "batch"}}
        file_ids = [http.post(f"{url}/v1/files", **form).json()["id"] for _ in OPENAI]  # type: ignore[arg-type]
        batch_id = http.post(f"{url}/v1/batches", json=openai_batch(file_ids[0])).json()["id"]
        new_response = partial(create, f"{url}/v1/responses", key, {**ASKED, "background": True})
        new_message_batch = partial(create, f"{url}/v1/messages/batches", key, MESSAGE_BATCH)
        new_checkpoint_job = partial(cancelled_merge, url, key, str(export))
        for unfinished_id in (job_id, other_job_id):
            wait_for_end(http, str(unfinished_id))
        objects = RouteObjects(
            session_id, model_id, sampler_id, weights, export, str(job_id), file_ids[0], batch_id,
            response_id=new_response(), message_batch_id=new_message_batch(),
            checkpoint_job_id=new_checkpoint_job(),
        )  # fmt: skip
        links, files = links_of(http, objects)
        sample_id = sampled["request_id"]
        return World(
            objects, file_ids[1], str(other_job_id), key, links, new_key, new_response, new_message_batch,
            new_checkpoint_job, files, sample_id, metrics_token,
        )  # fmt: skip


def create(url: str, key: str, body: object) -> str:
    """The id of a new object."""
    return httpx.post(url, json=body, headers={"X-API-Key": key}, timeout=120).json()["id"]


def cancelled_merge(url: str, key: str, path: str) -> str:
    """The id of a new checkpoint job that was cancelled, so that it can be started again and deleted."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    with httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=120) as http:
        started = http.post(f"training_runs/{run}/checkpoints/{kind}/{name}/merge", json={})
        assert started.status_code == 200, started.text
        job_id = started.json()["job_id"]
        while http.post(f"checkpoint_jobs/{job_id}/cancel").json()["ended_at"] is None:
            time.sleep(0.1)
    return job_id


def wait_for_end(http: httpx.Client, job_id: str) -> None:
    """Until a bulk job that fails has failed: before, it cannot be resumed or purged."""
    while http.get(f"batch/jobs/{job_id}").json()["status"] in ("PENDING", "RUNNING"):
        time.sleep(0.1)


def failing_job(name: str) -> dict[str, object]:
    """A bulk job whose input does not exist."""
    rows = {"format": "json", "path": "/nowhere/in.jsonl"}
    output = {"format": "json", "path": f"/nowhere/{name}.jsonl"}
    function = {"batch_serialized_fn": "", "batch_input_format": rows, "batch_output_formats": [output]}
    return {**function, "batch_size": 1, "name": name}


def links_of(http: httpx.Client, objects: RouteObjects) -> tuple[dict[str, str], dict[str, bytes]]:
    """Signed links, and the paths of an adapter's files."""

    def fill_path(path: str) -> str:
        return objects.fill(path)

    def strip_prefix(url: str) -> str:
        parts = urlsplit(url)
        return f"{parts.path}?{parts.query}"

    checkpoint = "training_runs/{run_id}/checkpoints/{kind}/{name}"
    files = http.get(fill_path(f"{checkpoint}/external_weights_urls")).json()["urls"]
    archive = http.get(fill_path(f"{checkpoint}/archive_link")).json()["url"]
    trace = http.get(fill_path("sessions/{session_id}/trace_export")).json()["url"]
    first = strip_prefix(next(iter(files.values())))
    links = {"/files/{file}": first, "/archive": strip_prefix(archive), "/trace": strip_prefix(trace)}
    return links, {name: http.get(http.base_url.join(strip_prefix(link))).content for name, link in files.items()}


def has_body(path: str) -> bool:
    """Whether a valid JSON body of this path is known."""
    known = {*PLAIN_BODIES, *PASSES, *BODIES, "/load_weights", "/batch/jobs"}
    return path in known


def request_of(label: str, content_types: list[str], world: World) -> Request:
    """A request that the route answers without an error while the objects of the world exist."""
    method, _, path = label.partition(" ")
    short = path.removeprefix(PREFIX)
    objects = replace(world.objects, job_id=world.other_job_id) if short.endswith("/purge") else world.objects
    if ENDS.search(label) and "{response_id}" in short:
        objects = replace(objects, response_id=world.new_response())
    if ENDS.search(label) and "{message_batch_id}" in short:
        objects = replace(objects, message_batch_id=world.new_message_batch())
    if "{checkpoint_job_id}" in short and (ENDS.search(label) or short.endswith("/restart")):
        objects = replace(objects, checkpoint_job_id=world.new_checkpoint_job())
    key = world.new_key() if label.startswith("DELETE /api/v1/auth") else world.key
    headers = ((b"Host", b"127.0.0.1"), (b"Connection", b"close"), (b"X-API-Key", key.encode()))
    if short.startswith("/downloads/") or short == "/sessions/{session_id}/trace":
        link = next(world.links[end] for end in world.links if short.endswith(end))
        parts = urlsplit(link)
        return Request(label, method, f"{parts.path}?{parts.query}", headers)
    if path.startswith(f"{OPENAI[1]}/"):
        objects = replace(objects, file_id=world.other_file_id)
    filled = quote_path(path.replace("samples/{request_id}", f"samples/{world.sample_id}"), objects)
    request = Request(label, method, filled + objects.fill(QUERIES.get(short, QUERY.get(short, ""))), headers)
    if short == "/metrics":
        token = f"Bearer {world.metrics_token}".encode()
        return replace(request, headers=request.with_header(b"Authorization", token))
    if FORM in content_types:
        content_type, body = form_of(short, world)
        return replace(request, headers=request.with_header(b"Content-Type", content_type), body=body)
    if not content_types:
        return request
    if short in PASSES and PROTO.decode() in content_types and (seq_id := next(world.seq_ids)) % 2:
        body = http_harness.pass_bytes(objects.model_id, seq_id)
        return replace(request, headers=request.with_header(b"Content-Type", PROTO), body=body)
    body = json.dumps(json_of(short, world)).encode()
    return replace(request, headers=request.with_header(b"Content-Type", JSON), body=body)


def quote_path(path: str, objects: RouteObjects) -> str:
    """A path with its parameters filled in; names of repositories and files may contain slashes."""
    filled = path.replace("{name}", "local") if path.startswith(f"{PREFIX}/batch/pools") else path
    return quote(objects.fill(filled), safe="/:" if path.startswith(HUB) else "/")


def json_of(path: str, world: World) -> object:
    if path in PLAIN_BODIES:
        return PLAIN_BODIES[path]
    if path in PASSES:
        return json_pass(world)
    if path == "/load_weights":  # into a fresh model: a load must be a model's first operation
        objects = world.objects
        seq_id = next(world.seq_ids)
        return {"session_id": objects.session_id, "model_seq_id": seq_id, "path": objects.weights, "optimizer": False}
    if path == "/batch/jobs":
        return failing_job(f"job-{next(world.seq_ids)}")
    body = BODIES[path](world.objects)
    assert isinstance(body, dict), path
    text = json.dumps({**body, **MORE.get(path, {})}).replace(http_harness.BASE, MODEL)
    numbered = json.loads(text)
    for name in ("seq_id", "model_seq_id", "sampling_session_seq_id", "custom_loss_seq_id"):
        if name in numbered:
            numbered[name] = next(world.seq_ids)
    if path.startswith("/save_weights"):
        numbered["path"] = f"saved-{numbered['seq_id']}"
    return numbered


def json_pass(world: World) -> object:
    chunks = [{"type": "encoded_text", "tokens": [1, 2, 3]}]
    targets = {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}
    weights = {"data": [1.0, 1.0, 1.0], "dtype": "float32", "shape": [3]}
    datum = {"model_input": {"chunks": chunks}, "loss_fn_inputs": {"target_tokens": targets, "weights": weights}}
    pass_input = {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": {}}
    return {"model_id": world.objects.model_id, "seq_id": next(world.seq_ids), "forward_backward_input": pass_input}


def form_of(path: str, world: World) -> tuple[bytes, bytes]:
    if path == "/upload_weights":
        parts = {"base_model": MODEL.encode(), "name": b"uploaded", **world.files}
    else:
        parts = {"purpose": b"batch", "in.jsonl": REQUEST_LINE}
    form_parts = []
    for name, content in parts.items():
        head = f'name="{name}"' if name != "in.jsonl" else 'name="file"'
        head += f'; filename="{name}"' if "." in name else ""
        form_parts.append(
            f"--{BOUNDARY}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + content + b"\r\n"
        )
    return f"{FORM}; boundary={BOUNDARY}".encode(), b"".join([*form_parts, f"--{BOUNDARY}--\r\n".encode()])


def with_query(target: str, name: str, value: str) -> str:
    return f"{target}{'&' if '?' in target else '?'}{urlencode({name: value})}"
