"""The files of deploy/ read as a cluster reads them: rendered manifests, an image's environment, services of Compose.

A key that is not interpreted is an error, so that a manifest cannot say what its test does not run.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

KUSTOMIZATION = {"apiVersion", "kind", "namespace", "labels", "resources", "patches", "images"}
SERVICE = {"image", "restart", "init", "stop_grace_period", "depends_on", "command", "environment", "volumes"}
SERVICE |= {"ports", "profiles"}


def documents(path: Path) -> list[Object]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def merge(value: object, patch: object) -> object:
    """As Kustomize does it, as far as it is used here: lists of containers go by their names."""
    if isinstance(value, dict) and isinstance(patch, dict):
        return {key: merge(value.get(key, patch.get(key)), patch.get(key)) for key in {**value, **patch}}
    if isinstance(value, list) and isinstance(patch, list):
        by_name = {element["name"]: element for element in patch}
        assert by_name.keys() <= {element["name"] for element in value}
        return [merge(element, by_name.get(element["name"], {})) for element in value]
    return value if patch is None else patch


def render_kustomization(directory: Path) -> list[Object]:
    """What `kubectl kustomize DIRECTORY` makes, up to the order of keys."""
    (kustomization,) = documents(directory / "kustomization.yaml")
    assert set(kustomization) <= KUSTOMIZATION, kustomization
    objects: list[Object] = []
    for resource in kustomization["resources"]:
        path = directory / resource
        objects += render_kustomization(path) if path.is_dir() else documents(path)
    for patch in kustomization.get("patches", ()):
        (change,) = documents(directory / patch["path"])
        (index,) = [at for at, manifest in enumerate(objects) if _key(manifest) == _key(change)]
        objects[index] = merge(objects[index], change)  # type: ignore[assignment]
    for manifest in objects:
        if "namespace" in kustomization and manifest["kind"] != "Namespace":
            manifest["metadata"]["namespace"] = kustomization["namespace"]
        for label in kustomization.get("labels", ()):
            manifest["metadata"].setdefault("labels", {}).update(label["pairs"])
        for container in containers(manifest):
            for image in kustomization.get("images", ()):
                if container["image"].partition(":")[0] == image["name"]:
                    container["image"] = f"{image['newName']}:{image['newTag']}"
    return objects


def _key(manifest: Object) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def containers(manifest: Object) -> list[Object]:
    return manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])


@dataclass(frozen=True, slots=True)
class Image:
    """What a container has of its image: the last stage of a Dockerfile."""

    env: Mapping[str, str]
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    home: str
    """Of the user that it runs as."""
    user: str
    volume: str
    stop_signal: str
    health: Object
    """Its health check, as a probe."""


def image(dockerfile: Path) -> Image:
    text = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.M))
    stage = re.split(r"^FROM .*$", text, flags=re.M)[-1]
    said = dict(re.findall(r"^([A-Z]+) (.*)$", stage, re.M))
    env = dict(word.split("=", 1) for word in shlex.split(said["ENV"]))
    ((user, home),) = re.findall(r"useradd --uid (\d+) --create-home --home-dir (\S+)", said["RUN"])
    assert user == said["USER"]
    options, _, check = said["HEALTHCHECK"].partition("CMD ")
    options_by_name = {name: int(value) for name, value in re.findall(r"--(\S+)=(\d+)", options)}
    health: Object = {"exec": {"command": json.loads(check)}, "failureThreshold": options_by_name["retries"]}
    health |= {"periodSeconds": options_by_name["interval"], "timeoutSeconds": options_by_name["timeout"]}
    entrypoint, command = (tuple(json.loads(said[name])) for name in ("ENTRYPOINT", "CMD"))
    return Image(env, entrypoint, command, home, user, said["VOLUME"], said["STOPSIGNAL"], health)


def interpolate(text: str, env: Mapping[str, str]) -> str:
    """`${NAME}`, `${NAME:-default}`, `${NAME:?error}` and `$$`, as Compose reads them."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        setting = env.get(match["name"], "")
        assert setting or match["kind"] != ":?", f"{match['name']}: {match['rest']}"
        return setting or (match["rest"] if match["kind"] == ":-" else "")

    return re.sub(r"\$\$|\$\{(?P<name>[A-Z_]+)(?:(?P<kind>:[-?])(?P<rest>[^}]*))?\}", value, text)


def workloads_of_compose(path: Path, env: Mapping[str, str], health: Object) -> list[Object]:
    """Workloads that do what the services of our image do. Their volumes outlive containers, as those of a StatefulSet
    do. `health` is the probe of the image."""
    (compose,) = documents(path)
    workloads: list[Object] = []
    for name, service in compose["services"].items():
        image = interpolate(service["image"], env)
        if not image.startswith("tinsmith:"):
            continue
        assert set(service) <= SERVICE, service
        (volume,) = service["volumes"]
        volume_name, _, mount = volume.partition(":")
        variables = {key: interpolate(str(value), env) for key, value in service["environment"].items()}
        container = {
            "name": name,
            "image": image,
            "args": service["command"],
            "env": [{"name": key, "value": value} for key, value in variables.items()],
            "readinessProbe": health,
            "volumeMounts": [{"name": volume_name, "mountPath": mount}],
        }
        grace_s = int(service["stop_grace_period"].removesuffix("s"))
        pod = {"containers": [container], "terminationGracePeriodSeconds": grace_s, "enableServiceLinks": False}
        template = {"metadata": {"labels": {"service": name}}, "spec": pod}
        spec = {"replicas": 1, "template": template, "volumeClaimTemplates": [{"metadata": {"name": volume_name}}]}
        workloads.append({"kind": "StatefulSet", "metadata": {"name": name}, "spec": spec})
    return workloads


def pod_of(workload: Object) -> Object:
    """A pod as the controller of a workload makes it, without the volumes that it claims."""
    template, name = workload["spec"]["template"], workload["metadata"]["name"]
    metadata = {
        **template.get("metadata", {}),
        "generateName": f"{name}-",
        "namespace": workload["metadata"]["namespace"],
    }
    claimed = [claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())]
    volumes = [{"name": volume, "persistentVolumeClaim": {"claimName": f"{volume}-{name}-0"}} for volume in claimed]
    spec = {**template["spec"], "volumes": [*template["spec"].get("volumes", ()), *volumes]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
