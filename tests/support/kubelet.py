"""Manifests run as processes of this machine: a kubelet, the controllers of workloads, and the Service before them.

What a cluster does with the manifests is done here: image, command, environment (also the variables of Services),
probes, restarts with a back-off, rolling updates, preStop hooks, grace periods, and endpoints that lag behind a pod's
end. What containers are for is not: a pod has an address of its own on loopback, which replaces 0.0.0.0, and paths
below its mounts are directories of its own; users, capabilities and limits of resources are not enforced.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.balancer import pump
from support.manifests import Image, Object

ROOT = Path(__file__).parents[2]
PATIENCE_S = 180.0
TICK_S = 0.05
BACKOFF_S = 1.0
"""A kubelet's first pause before a container starts again is 10 s."""
ENDPOINTS_LAG_S = 2.0
"""How long a Service still sends connections to a pod that is being ended."""

POD = {"serviceAccountName", "automountServiceAccountToken", "enableServiceLinks", "terminationGracePeriodSeconds"}
POD |= {"securityContext", "containers", "volumes", "restartPolicy"}
CONTAINER = {"name", "image", "args", "envFrom", "env", "ports", "resources", "securityContext", "volumeMounts"}
CONTAINER |= {"startupProbe", "readinessProbe", "livenessProbe", "lifecycle"}
ADDRESSES = itertools.count(1)
KINDS = {"Namespace", "ServiceAccount", "ConfigMap", "Secret", "Service", "PodDisruptionBudget"}


@dataclass(slots=True)
class _Probe:
    declared: Object
    check: Callable[[], bool]
    due: float
    failures: int = 0

    @property
    def failed(self) -> bool:
        return self.failures >= self.declared.get("failureThreshold", 3)

    def run(self) -> bool | None:
        """Whether it succeeded; None before it is due."""
        if time.monotonic() < self.due:
            return None
        self.due = time.monotonic() + self.declared.get("periodSeconds", 10)
        passed = self.check()
        self.failures = 0 if passed else self.failures + 1
        return passed


class Pod:
    """One container with its volumes. `ready` is what the Service goes by."""

    def __init__(
        self, cluster: Cluster, name: str, labels: Mapping[str, str], spec: Object, claims: Path | None
    ) -> None:
        assert set(spec) <= POD, set(spec) - POD
        (self.container,) = spec["containers"]
        assert set(self.container) <= CONTAINER, set(self.container) - CONTAINER
        self.name, self.labels, self.spec = name, labels, spec
        self.address = cluster.new_address()
        self.ready, self.killed, self.ended_since = False, False, math.inf
        self.exits: list[int] = []
        self._cluster = cluster
        self._deleted = threading.Event()
        self.directory = cluster.directory / "pods" / f"{name}@{self.address}"
        self.directory.mkdir(parents=True)
        self._temporary = Path(tempfile.mkdtemp(prefix="tn-pod-"))  # a socket's path must be short
        self.paths = self._mounts(claims)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text() if path.exists() else ""

    def delete(self) -> None:
        self.ended_since = min(self.ended_since, time.monotonic())
        self._deleted.set()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self.alive, self.name

    def _mounts(self, claims: Path | None) -> dict[str, Path]:
        """What is where: paths in the container -> directories here."""
        image = self._cluster.image
        mounted = {image.volume: "image-volume"}
        mounted |= {mount["mountPath"]: mount["name"] for mount in self.container.get("volumeMounts", ())}
        empty = {mount["name"] for mount in self.spec.get("volumes", ()) if "emptyDir" in mount}
        paths = {"/tmp": self._temporary}
        mounted.pop("/tmp", None)
        for path, volume in mounted.items():
            claimed = volume not in empty and volume != "image-volume"
            assert not claimed or claims is not None, f"{self.name}: there is no volume {volume}"
            paths[path] = (claims if claimed and claims else self.directory) / volume
            paths[path].mkdir(parents=True, exist_ok=True)
        return paths

    def _here(self, text: str) -> str:
        for path, directory in self.paths.items():
            if text == path or text.startswith(path + "/"):
                return str(directory) + text.removeprefix(path)
        if text == "0.0.0.0":
            # In a spelling with three numbers a server does not take it for loopback, where it would need no keys.
            first, second, third, fourth = self.address.split(".")
            return f"{first}.{second}.{int(third) * 256 + int(fourth)}"
        return self._cluster.hosts.get(text, text)

    def environment(self) -> dict[str, str]:
        image = self._cluster.image
        variables = {"HOSTNAME": self.name, "HOME": image.home, "TMPDIR": "/tmp", **image.env}
        if self.spec.get("enableServiceLinks", True):
            variables |= self._cluster.service_links()
        for source in self.container.get("envFrom", ()):
            ((kind, reference),) = source.items()
            stored = self._cluster.object({"configMapRef": "ConfigMap", "secretRef": "Secret"}[kind], reference["name"])
            variables |= stored.get("stringData") or stored["data"]
        for variable in self.container.get("env", ()):
            if "value" in variable:
                variables[variable["name"]] = variable["value"]
            else:
                assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}, variable
                variables[variable["name"]] = self.address
        variables = {name: self._here(value) for name, value in variables.items()}
        return variables | {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", **self._cluster.extra}

    def _spawn(self) -> subprocess.Popen[bytes]:
        image = self._cluster.image
        words = [*image.entrypoint, *(self.container.get("args") or image.command)]
        with (self.directory / "log").open("ab") as log:
            return subprocess.Popen(
                self._command(words), stdout=log, stderr=log, env=self.environment(), cwd=self.paths[image.home],
                start_new_session=True,
            )  # fmt: skip

    def _command(self, words: Sequence[str]) -> list[str]:
        if words[0] == "tinsmith":  # this source tree's, whatever is installed
            return [sys.executable, "-m", "tinsmith.cli", *words[1:]]
        if words == ["alive"]:
            return [sys.executable, str(ROOT / "deploy/container/alive")]
        return list(words)

    def _run(self) -> None:
        pause = BACKOFF_S
        policy = self.spec.get("restartPolicy", "Always")
        while not self._deleted.is_set():
            process = self._spawn()
            try:
                self._watch(process)
            finally:
                self.ready = False
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                self.exits.append(process.wait())
            if self._deleted.is_set() or policy == "Never" or (policy == "OnFailure" and self.exits[-1] == 0):
                return
            self._deleted.wait(pause)
            pause = min(2 * pause, 300.0)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Until the process has ended, by itself, by a probe or because the pod was deleted."""
        started = time.monotonic()
        probes = {
            kind: _Probe(declared, self._check(declared), started + declared.get("initialDelaySeconds", 0))
            for kind in ("startupProbe", "livenessProbe", "readinessProbe")
            if (declared := self.container.get(kind))
        }
        self.ready = not probes
        while process.poll() is None:
            if self._deleted.wait(TICK_S):
                self._terminate(process)
                return
            if startup := probes.get("startupProbe"):
                if startup.run():
                    del probes["startupProbe"]
                elif startup.failed:
                    self._terminate(process)
                continue
            if (readiness := probes.get("readinessProbe")) and (passed := readiness.run()) is not None:
                self.ready = passed or (self.ready and not readiness.failed)
            if (liveness := probes.get("livenessProbe")) and liveness.run() is False and liveness.failed:
                self._terminate(process)

    def _check(self, declared: Object) -> Callable[[], bool]:
        timeout = declared.get("timeoutSeconds", 1)
        if "exec" in declared:
            words = self._command(declared["exec"]["command"])

            def runs() -> bool:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    environment = self.environment()
                    completed = subprocess.run(
                        words, env=environment, capture_output=True, timeout=timeout, check=False
                    )
                    return completed.returncode == 0
                return False

            return runs
        get = declared["httpGet"]
        url = f"http://{self.address}:{self.port(get['port'])}{get['path']}"

        def answers() -> bool:
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=timeout) as answer:
                return 200 <= answer.status < 400
            return False

        return answers

    def port(self, name: str | int) -> int:
        ports = {port_spec["name"]: port_spec["containerPort"] for port_spec in self.container.get("ports", ())}
        return ports[name] if isinstance(name, str) else name

    def _terminate(self, process: subprocess.Popen[bytes]) -> None:
        """The preStop hook and SIGTERM share the grace period; then SIGKILL."""
        until = time.monotonic() + self.spec.get("terminationGracePeriodSeconds", 30)
        if hook := self.container.get("lifecycle", {}).get("preStop"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(hook["exec"]["command"], env=self.environment(), timeout=until - time.monotonic())
        process.send_signal(signal.Signals[self._cluster.image.stop_signal])
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.killed = True
            process.kill()


@dataclass(slots=True)
class Workload:
    """A Deployment or a StatefulSet, with the pods that it has had."""

    declared: Object
    pods: list[Pod] = field(default_factory=list)
    num_created: int = 0

    @property
    def current(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.ended_since == math.inf]


class Service:
    """One address for the ready pods that its selector names; each connection goes to the next of them."""

    def __init__(self, cluster: Cluster, declared: Object) -> None:
        (self.port,) = declared["spec"]["ports"]
        self.selector: Mapping[str, str] = declared["spec"]["selector"]
        self.refused: list[str] = []
        self.connection_counts: dict[str, int] = {}
        self._cluster = cluster
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _endpoints(self) -> list[Pod]:
        now = time.monotonic()
        return [
            pod
            for pod in self._cluster.pods()
            if self.selector.items() <= pod.labels.items()
            and (pod.ready if pod.ended_since == math.inf else now < pod.ended_since + ENDPOINTS_LAG_S)
        ]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if not (endpoints := self._endpoints()):
                    client.close()
                    continue
                pod = endpoints[sum(self.connection_counts.values()) % len(endpoints)]
                try:
                    server = socket.create_connection((pod.address, pod.port(self.port["targetPort"])), timeout=5)
                except OSError as error:
                    self.refused.append(f"{pod.name}: {error}")
                    self.connection_counts[pod.name] = self.connection_counts.get(pod.name, 0) + 1
                    client.close()
                    continue
                server.settimeout(None)
                self.connection_counts[pod.name] = self.connection_counts.get(pod.name, 0) + 1
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=pump, args=(source, target), daemon=True).start()


class Cluster:
    """`hosts` are values of variables that name other machines, and what they are here; `extra` are variables of every
    process that no manifest has."""

    def __init__(
        self,
        directory: Path,
        image: Image,
        hosts: Mapping[str, str] | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        self.directory, self.image, self.hosts = directory, image, hosts or {}
        self.extra = {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1", **(extra or {})}
        self.workloads: dict[str, Workload] = {}
        self.services: dict[str, Service] = {}
        self._objects: dict[tuple[str, str], Object] = {}
        self._jobs: list[Pod] = []

    def new_address(self) -> str:
        return f"127.{20 + os.getpid() % 200}.{os.getpid() // 200 % 250}.{next(ADDRESSES)}"

    def object(self, kind: str, name: str) -> Object:
        return self._objects[kind, name]

    def pods(self) -> list[Pod]:
        return [pod for workload in self.workloads.values() for pod in workload.pods if pod.alive]

    def service_links(self) -> dict[str, str]:
        """The variables that a kubelet sets for each Service that has an address, unless a pod declines them."""
        variables: dict[str, str] = {}
        for (kind, name), declared in self._objects.items():
            if kind == "Service" and declared["spec"].get("clusterIP") != "None":
                prefix = name.upper().replace("-", "_")
                (port,) = declared["spec"]["ports"]
                variables[f"{prefix}_SERVICE_HOST"] = "10.96.0.10"
                variables[f"{prefix}_SERVICE_PORT"] = variables[f"{prefix}_SERVICE_PORT_{port['name'].upper()}"] = str(
                    port["port"]
                )
                link = f"{prefix}_PORT_{port['port']}_TCP"
                variables[f"{prefix}_PORT"] = variables[link] = f"tcp://10.96.0.10:{port['port']}"
                variables |= {f"{link}_PROTO": "tcp", f"{link}_PORT": str(port["port"]), f"{link}_ADDR": "10.96.0.10"}
        return variables

    def apply(self, objects: Sequence[Object]) -> None:
        """`kubectl apply`: everything that has no pods first."""
        for manifest in objects:
            name = manifest["metadata"]["name"]
            if manifest["kind"] in KINDS:
                self._objects[manifest["kind"], name] = manifest
            if manifest["kind"] == "Service" and manifest["spec"].get("clusterIP") != "None":
                self.services[name] = Service(self, manifest)
        for manifest in objects:
            if manifest["kind"] == "Job":
                self._jobs.append(self._pod(manifest, f"{manifest['metadata']['name']}-1"))
            elif manifest["kind"] not in KINDS:
                assert manifest["kind"] in ("Deployment", "StatefulSet"), manifest["kind"]
                workload = self.workloads[manifest["metadata"]["name"]] = Workload(manifest)
                for _ in range(manifest["spec"]["replicas"]):
                    self._grow(workload)

    def job(self, objects: Sequence[Object]) -> Pod:
        """Apply a Job, and its pod once it has ended."""
        self.apply(objects)
        pod = self._jobs[-1]
        pod.join()
        return pod

    def _pod(self, declared: Object, name: str) -> Pod:
        template = declared["spec"]["template"]
        spec = copy.deepcopy(template["spec"])
        labels = template.get("metadata", {}).get("labels", {})
        claimed = declared["spec"].get("volumeClaimTemplates")
        account = spec.get("serviceAccountName")
        assert account is None or ("ServiceAccount", account) in self._objects
        return Pod(self, name, labels, spec, self.directory / "claims" / name if claimed else None)

    def _grow(self, workload: Workload, ordinal: int | None = None) -> Pod:
        name = workload.declared["metadata"]["name"]
        pod_index = ordinal if ordinal is not None else workload.num_created
        workload.num_created += 1
        workload.pods.append(self._pod(workload.declared, f"{name}-{pod_index}"))
        return workload.pods[-1]

    def await_ready(self, *names: str) -> None:
        self.wait(lambda: all(pod.ready for name in names for pod in self.workloads[name].current), f"{names} ready")

    def wait(self, reached: Callable[[], object], description: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            if time.monotonic() > deadline:
                logs = "".join(f"\n== {pod.name} {pod.exits}\n{pod.log[-3000:]}" for pod in self.pods())
                raise AssertionError(f"not reached: {description}{logs}")
            time.sleep(TICK_S)

    def restart(self, name: str) -> None:
        """`kubectl rollout restart` and `rollout status`, by the workload's strategy."""
        workload = self.workloads[name]
        spec, old = workload.declared["spec"], workload.current
        if workload.declared["kind"] == "StatefulSet":
            for pod in reversed(old):
                pod.delete()
                pod.join()
                self._grow(workload, int(pod.name.rpartition("-")[2]))
                self.await_ready(name)
            return
        rolling = spec.get("strategy", {}).get("rollingUpdate", {})
        surge = _of(rolling.get("maxSurge", "25%"), spec["replicas"], math.ceil)
        missing = _of(rolling.get("maxUnavailable", "25%"), spec["replicas"], math.floor)
        fresh: list[Pod] = []
        while old or len(fresh) < spec["replicas"] or not all(pod.ready for pod in fresh):
            remaining = len(workload.current)
            if len(fresh) < spec["replicas"] and remaining < spec["replicas"] + surge:
                fresh.append(self._grow(workload))
            elif old and sum(pod.ready for pod in workload.current) > spec["replicas"] - missing:
                old.pop(0).delete()
            else:
                self.wait(lambda: all(pod.ready for pod in fresh), f"{name} rolled out")
        self.wait(
            lambda: not any(pod.alive for pod in workload.pods if pod not in workload.current), f"old {name} gone"
        )

    def close(self) -> None:
        pods = [*(pod for workload in self.workloads.values() for pod in workload.pods), *self._jobs]
        for pod in pods:
            pod.delete()
        for pod in pods:
            pod.join()
            shutil.rmtree(pod.paths["/tmp"], ignore_errors=True)
        for service in self.services.values():
            service.close()
        shutil.rmtree(self.directory / "pods", ignore_errors=True)


def _of(bound: int | str, replicas: int, rounded: Callable[[float], int]) -> int:
    """A number of pods, or a share of them."""
    return bound if isinstance(bound, int) else rounded(replicas * int(bound.removesuffix("%")) / 100)


@contextlib.contextmanager
def running(
    directory: Path, image: Image, hosts: Mapping[str, str] | None = None, extra: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    cluster = Cluster(directory, image, hosts, extra)
    try:
        yield cluster
    finally:
        cluster.close()
