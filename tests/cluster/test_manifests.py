"""The manifests of deploy/kubernetes and the services of deploy/compose, run as processes with a real Postgres and an
S3 API between them. `support.kubelet` says what of a cluster is there and what is not.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from support.buckets import Bucket, bucket
from support.databases import POSTGRES, bare_url
from support.kubelet import Cluster, Pod, running
from support.manifests import Object, documents, image, render_kustomization, workloads_of_compose
from tinsmith import batch

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
NANO = "tinsmith/nano"
ADAM = types.AdamParams(learning_rate=1e-3)
PROMPT = types.ModelInput.from_ints([1, 2, 3, 4])
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3, 4]),
    loss_fn_inputs={"target_tokens": np.array([2, 3, 4, 5]), "weights": np.ones(4, np.float32)},
)
METRICS_TOKEN = "metrics-token"

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="pods have addresses of their own on loopback"),
]


def fill_in(objects: list[Object], values: Mapping[str, str]) -> list[Object]:
    """With what docs/howto/kubernetes.md tells its reader to set."""
    for manifest in objects:
        if manifest["kind"] in ("ConfigMap", "Secret"):
            data = manifest["stringData" if manifest["kind"] == "Secret" else "data"]
            data |= {name: value for name, value in values.items() if name in data}
    assert "CHANGE-ME" not in json.dumps(objects)
    return objects


@pytest.fixture(scope="module")
def bucket_() -> Iterator[Bucket]:
    with bucket() as new_bucket:
        yield new_bucket


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, bucket_: Bucket) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("manifests")
    values = {
        "TINSMITH_DATABASE_URL": bare_url(directory, POSTGRES),
        "TINSMITH_STORAGE_DIR": f"{bucket_.url}/tinsmith",
        "TINSMITH_SIGNING_SECRET": "0123456789abcdef0123456789abcdef",
        "TINSMITH_METRICS_TOKEN": METRICS_TOKEN,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    added = {"AWS_ENDPOINT_URL": bucket_.client.meta.endpoint_url, "TINSMITH_BATCH_TENANTS": '["research"]'}
    with running(directory, image(DEPLOY / "container/Dockerfile.cpu"), extra=added) as new_cluster:
        new_cluster.apply(fill_in(documents(KUBERNETES / "base/secret.example.yaml"), values))
        new_cluster.apply(fill_in(render_kustomization(KUBERNETES / "base"), values))
        yield new_cluster


@pytest.fixture(scope="module")
def key(cluster: Cluster) -> str:
    """The first key, once everything is ready: the order is that of docs/howto/kubernetes.md."""
    servers = cluster.workloads["server"].pods
    cluster.wait(lambda: all(pod.exits for pod in servers), "servers without a key do not listen")
    assert all("create a key" in pod.log and not pod.ready for pod in servers)
    job_pod = cluster.job(documents(KUBERNETES / "first-key.yaml"))
    assert job_pod.exits == [0], job_pod.log
    cluster.await_ready(*cluster.workloads)
    (api_key,) = re.findall(r"^tml-\S+$", job_pod.log, re.M)
    return api_key


@pytest.fixture
def service(cluster: Cluster, key: str) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=cluster.services["tinsmith"].url, api_key=key) as client:
        yield client


def metric(pod: Pod, port: str, name: str, kind: str) -> float:
    url = f"http://{pod.address}:{pod.port(port)}/metrics"
    text = httpx.get(url, headers={"Authorization": f"Bearer {METRICS_TOKEN}"}).raise_for_status().text
    return sum(float(value) for value in re.findall(rf'^{name}\{{.*kind="{kind}".*\}} (\S+)$', text, re.M))


def test_the_sdk_trains_and_samples_through_the_service(cluster: Cluster, service: tinker.ServiceClient) -> None:
    model = service.create_lora_training_client(NANO, rank=4).result()
    losses = []
    for _ in range(4):
        passed = model.forward_backward([DATUM], "cross_entropy")
        model.optim_step(ADAM).result()
        losses.append(passed.result().metrics["loss:sum"])
    assert losses[-1] < losses[0]
    sampler = model.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=6, temperature=1.0, stop=[])
    sequences = sampler.sample(PROMPT, 2, params).result().sequences
    assert [len(sequence.tokens) for sequence in sequences] == [6, 6]
    assert len([name for name, count in cluster.services["tinsmith"].connection_counts.items() if count]) == 2
    (dedicated,) = cluster.workloads["sampler"].pods
    assert metric(dedicated, "health", "tinsmith_engine_tokens_total", kind="sampled") >= 12, (
        "the dedicated sampler drew them"
    )


def slowly(row: dict, mark: str) -> dict:
    import time

    time.sleep(0.2)
    return {"loud": row["text"].upper() + mark}


def test_a_rolling_restart_of_everything_loses_nothing(
    cluster: Cluster, service: tinker.ServiceClient, key: str, bucket_: Bucket
) -> None:
    service_url = cluster.services["tinsmith"].url
    before = [pod for workload in cluster.workloads.values() for pod in workload.current]
    model = service.create_lora_training_client(NANO, rank=4).result()
    sampler = model.save_weights_and_get_sampling_client().result()
    rows = [{"text": f"row {index}"} for index in range(200)]
    job = batch.from_items(rows).map(
        slowly,
        fn_kwargs={"mark": "!"},
        batch_size=2,
        output=batch.JsonWriter(f"{bucket_.url}/loud.jsonl"),
        client=batch.Client(service_url, key),
        stream=False,
    )
    over = threading.Event()

    def trains() -> int:
        num_done = 0
        while not over.is_set():
            model.forward_backward([DATUM], "cross_entropy").result()
            num_done += 1
            assert model.optim_step(ADAM).result().metrics["step"] == num_done
        return num_done

    def samples() -> int:
        num_done = 0
        while not over.is_set():
            params = types.SamplingParams(max_tokens=4, stop=[])
            num_done += len(sampler.sample(PROMPT, 1, params).result().sequences)
        return num_done

    def asks() -> int:
        """New connections without a second try, as of a client that has no retries."""
        num_done = 0
        while not over.is_set():
            assert httpx.get(f"{service_url}/healthz", timeout=10).status_code == 200
            num_done += 1
            time.sleep(0.02)
        return num_done

    with ThreadPoolExecutor() as threads:
        working = [threads.submit(task) for task in (trains, samples, asks)]
        try:
            for name in ("engine", "sampler", "batch-worker", "server"):
                cluster.restart(name)
        finally:
            over.set()
        counts = [future.result() for future in working]
    assert min(counts) > 3, counts
    assert cluster.services["tinsmith"].refused == []
    for pod in before:
        assert pod.exits[-1] == 0 and not pod.killed and not pod.alive, f"{pod.name} {pod.exits}\n{pod.log[-2000:]}"
    assert job.wait()["status"] == "SUCCEEDED"
    outputs = [json.loads(line)["loud"] for line in bucket_.get("loud.jsonl").splitlines()]
    assert outputs == [f"ROW {index}!" for index in range(200)]


def test_the_services_of_compose_train_and_go_on_after_a_restart(tmp_path: Path, bucket_: Bucket) -> None:
    built = image(DEPLOY / "container/Dockerfile.cpu")
    variables = dict(
        line.split("=", 1) for line in (DEPLOY / "compose/env.example").read_text().splitlines() if "=" in line
    )
    variables |= {
        "POSTGRES_PASSWORD": "word",
        "STORE_PASSWORD": "password",
        "TINSMITH_SIGNING_SECRET": "0123456789abcdef" * 2,
    }
    hosts = {
        "postgresql://tinsmith:word@database/tinsmith": bare_url(tmp_path, POSTGRES),
        "http://store:9000": bucket_.client.meta.endpoint_url,
    }
    bucket_.client.create_bucket(Bucket="tinsmith")  # as the service `bucket` does
    workloads = workloads_of_compose(DEPLOY / "compose/compose.yaml", variables, built.health)
    (server,) = (workload for workload in workloads if workload["metadata"]["name"] == "server")
    first = copy.deepcopy(server) | {"kind": "Job", "metadata": {"name": "run"}}
    pod = first["spec"]["template"]["spec"]
    pod["restartPolicy"] = "Never"
    pod["containers"][0]["args"] = ["keys", "create", "me", "--name", "first"]
    tables = copy.deepcopy(first)
    tables["spec"]["template"]["spec"]["containers"][0]["args"] = ["migrate"]
    published = {"selector": {"service": "server"}, "ports": [{"name": "http", "port": 8000, "targetPort": 8000}]}
    with running(tmp_path, built, hosts=hosts) as cluster:
        assert cluster.job([tables]).exits == [0]
        (key,) = re.findall(r"^tml-\S+$", cluster.job([first]).log, re.M)
        cluster.apply([*workloads, {"kind": "Service", "metadata": {"name": "server"}, "spec": published}])
        before = cluster.pods()
        cluster.await_ready(*cluster.workloads)
        with tinker.ServiceClient(base_url=cluster.services["server"].url, api_key=key) as service:
            model = service.create_lora_training_client(NANO, rank=4).result()
            assert model.optim_step(ADAM).result().metrics["step"] == 1
            for name in cluster.workloads:
                cluster.restart(name)
            assert model.optim_step(ADAM).result().metrics["step"] == 2
            sampler = model.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=4, stop=[])
            assert len(sampler.sample(PROMPT, 1, params).result().sequences) == 1
        for pod in before:
            assert pod.exits == [0] and not pod.killed, f"{pod.name} {pod.exits}\n{pod.log[-2000:]}"
