"""A request to every route, with objects of one tenant: the cases are those of the declarations."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from httpx import Response

from support.batch_files import REQUEST_LINE
from support.fake_hub import repository_of
from support.http_harness import ALICE, BASE, Harness, pass_bytes
from tinsmith.api.app import OPERATIONS
from tinsmith.api.declaration import Operation
from tinsmith.api.request import ANTHROPIC, HUB, OPENAI_PATHS, PREFIX
from tinsmith.db.statements import execute
from tinsmith.store.checkpoint_jobs import MERGE, NewCheckpointJob
from tinsmith.store.checkpoints import parse_path
from tinsmith.store.stored_samples import SampleContent, StoredSequence, keep_sample, new_sample
from tinsmith.types import SampledSequence, SampleResult
from tinsmith.wire.bodies import PROTO_TYPE

UNPREFIXED_PATHS = (*OPENAI_PATHS, *(f"{prefix}/" for prefix in (*ANTHROPIC, HUB)))
"""Routes of other services' clients, whose paths have no prefix."""


@dataclass(frozen=True, slots=True)
class RouteObjects:
    """One object of every kind, owned by alice."""

    session_id: str
    model_id: str
    sampler_id: str
    weights: str  # a path
    export: str
    job_id: str  # of a bulk job that failed
    file_id: str = ""
    batch_id: str = ""  # of OpenAI's
    upload_id: str = ""  # of an adapter
    response_id: str = ""
    trajectory_id: str = ""
    capture: str = ""  # the session of the trajectory
    message_batch_id: str = ""  # of Anthropic's
    checkpoint_job_id: str = ""  # a merge

    def fill(self, path: str) -> str:
        return path.replace(":path", "").format(
            model=self.weights,
            model_id=self.model_id,
            tinker_path=self.weights,
            base_model=BASE,
            session_id=self.session_id,
            run_id=self.model_id,
            kind="external_weights" if path.endswith("external_weights_urls") else "weights",
            name="one",
            sampling_session_id=self.sampler_id,
            request_id=f"{self.model_id}:0",
            job_id=self.job_id,
            checkpoint_id="one",
            file_id=self.file_id,
            batch_id=self.batch_id,
            message_batch_id=self.message_batch_id,
            upload_id=self.upload_id,
            response_id=self.response_id,
            trajectory_id=self.trajectory_id,
            capture=self.capture,
            checkpoint_job_id=self.checkpoint_job_id,
            number="0" * 32,
            repo=repository_of(parse_path(self.weights))
            if "{repo" in path and self.weights.startswith("tinker://")
            else "weights",
            revision="main",
            file="adapter_config.json",
            directory="",
            sampler="none",
        )


def bulk_job(name: str, resume_from: object = None) -> dict[str, object]:
    rows = {"format": "json", "path": "/nowhere/in.jsonl"}
    output = {"format": "json", "path": f"/nowhere/{name}.jsonl"}
    spec = {"batch_serialized_fn": "", "batch_input_format": rows, "batch_output_formats": [output], "batch_size": 1}
    return spec | {"name": name, "resume_from": resume_from}


def fill_ids(value: object, objects: RouteObjects) -> object:
    """An example of a declaration, with the ids of these objects."""
    if isinstance(value, dict):
        return {name: fill_ids(member, objects) for name, member in value.items()}
    if isinstance(value, list):
        return [fill_ids(member, objects) for member in value]
    if value == "{job_id}" and objects.job_id.isdecimal():
        return int(objects.job_id)
    return objects.fill(value) if isinstance(value, str) else value


def body_of(operation: Operation) -> Callable[[RouteObjects], dict[str, object] | bytes]:
    def body(objects: RouteObjects) -> dict[str, object] | bytes:
        if PROTO_TYPE in operation.takes:
            return pass_bytes(objects.model_id, 5)
        return fill_ids(operation.example, objects)  # type: ignore[return-value]

    return body


def openai_batch(file_id: str) -> dict[str, object]:
    return {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}


# The bodies and queries of routes that take ids there; routes with ids in their path may need neither.
BODIES = {operation.path: body_of(operation) for operation in OPERATIONS if isinstance(operation.example, dict)}
QUERIES = {operation.path: operation.example for operation in OPERATIONS if isinstance(operation.example, str)}
LISTING_QUERIES = {"/audit": "?event_type=all&event_date=2020-01-01"}
# Ids that a listing takes as a filter or a cursor: (path, query or body).
FILTERS = [(operation.path, example) for operation in OPERATIONS for example in operation.filters]


def create_objects(harness: Harness, key: str = ALICE) -> RouteObjects:
    session_id = harness.session(key)
    model_id = harness.model(session_id, key=key)
    store_sample(harness, key.removeprefix("tml-"), session_id, f"{model_id}:0")
    weights = harness.save_checkpoint(model_id)
    return RouteObjects(
        session_id,
        model_id,
        harness.sampler(session_id, key=key),
        weights,
        harness.save_checkpoint(model_id, "external_weights"),
        create_failed_job(harness, session_id, key),
        *store_file_and_batch(harness, key),
        harness.ok("external_weights_upload_start", {"base_model": BASE, "lora_config": {}}, key)["upload_id"],
        store_response(harness, key.removeprefix("tml-")),
        *store_trajectory(harness, key.removeprefix("tml-")),
        message_batch(harness, key),
        start_merge(harness, key.removeprefix("tml-"), weights),
    )


def start_merge(harness: Harness, tenant_id: str, path: str) -> str:
    """Queue a merge, which nothing runs."""
    return harness.services.checkpoint_jobs.add(NewCheckpointJob(tenant_id, path, BASE, MERGE)).job_id


def store_sample(harness: Harness, tenant_id: str, session_id: str, request_id: str) -> None:
    """Store a sample as the engine does."""
    content = SampleContent([1, 2], 0, {}, [StoredSequence([3], [-0.5], "stop")])
    with harness.services.models._db.write() as connection:
        for statement in keep_sample(new_sample(request_id, tenant_id, session_id, BASE, None), content):
            execute(connection, statement)


def store_response(harness: Harness, tenant_id: str) -> str:
    response_id = f"resp_{uuid.uuid4().hex}"
    request = {"model": BASE, "input": "hi"}
    harness.services.responses.add(tenant_id, response_id, request, [], [])
    answered = {"id": response_id, "status": "completed", "model": BASE, "output": []}
    harness.services.responses.end(tenant_id, response_id, answered)
    return response_id


def store_trajectory(harness: Harness, tenant_id: str) -> tuple[str, str]:
    """Store a trajectory; return it and its session."""
    session = uuid.uuid4().hex
    answer = SampledSequence(np.array([3], np.int32), np.array([-1.0], np.float32), "stop")
    harness.services.exchanges.record(tenant_id, session, [[1, 2]], [SampleResult("r", (answer,), weight_version=BASE)])
    (trajectory,) = harness.services.exchanges.trajectories(tenant_id, session)
    return trajectory.trajectory_id, session


def store_file_and_batch(harness: Harness, key: str) -> tuple[str, str]:
    """Store a file and a batch of it."""
    headers, file = {"X-API-Key": key}, {"file": ("in.jsonl", REQUEST_LINE)}
    file_object = harness.client.post("/v1/files", headers=headers, files=file, data={"purpose": "batch"}).json()
    batch = harness.client.post("/v1/batches", headers=headers, json=openai_batch(file_object["id"])).json()
    return file_object["id"], batch["id"]


def message_batch(harness: Harness, key: str) -> str:
    params = {"model": BASE, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    body = {"requests": [{"custom_id": "one", "params": params}]}
    return harness.client.post("/v1/messages/batches", headers={"X-API-Key": key}, json=body).json()["id"]


def create_failed_job(harness: Harness, name: str, key: str = ALICE) -> str:
    """A bulk job that can be read and resumed."""
    job_id = harness.ok("batch/jobs", bulk_job(name), key)["job_id"]
    jobs = harness.services.batch_jobs
    assert jobs.acquire_batch_coordinator(job_id, "token", "here", 60)
    assert jobs.set_status(job_id, "token", "FAILED", "for a test")
    return str(job_id)


def url_of(path: str) -> str:
    return path if path.startswith(UNPREFIXED_PATHS) else PREFIX + path


def ask(harness: Harness, method: str, path: str, objects: RouteObjects, key: str) -> Response:
    body = BODIES.get(path, lambda _objects: {})(objects)
    headers = {"X-API-Key": key}
    url = url_of(objects.fill(path + QUERIES.get(path, "")))
    if isinstance(body, bytes):
        return harness.client.request(method, url, content=body, headers=headers | {"Content-Type": PROTO_TYPE})  # type: ignore[return-value]
    return harness.client.request(method, url, json=body, headers=headers, follow_redirects=False)  # type: ignore[return-value]
