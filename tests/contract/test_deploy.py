"""The files of deploy/: each is valid for the tool that reads it, and names only things that exist in this version."""

from __future__ import annotations

import http.server
import itertools
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from contract.test_docs import FLAGS, ROOT
from support.live import free_port
from support.manifests import documents, image, merge
from tinsmith.settings import Settings
from tinsmith.settings.groups import PREFIX

DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
KUBERNETES = "1.33"
KUBE_FILES = sorted(path for path in (DEPLOY / "kubernetes").rglob("*.yaml"))
PAGES = {"container": "howto/containers.md", "grafana": "metrics.md"}
"""The pages of folders of deploy/ that have another name than the folder."""

RAY_CLUSTER: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["headGroupSpec"],
            "properties": {
                "rayVersion": {"type": "string"},
                "enableInTreeAutoscaling": {"type": "boolean"},
                "autoscalerOptions": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "idleTimeoutSeconds": {"type": "integer"},
                        "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
                    },
                },
                "headGroupSpec": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["template"],
                    "properties": {"rayStartParams": {"$ref": "#/$defs/params"}, "template": {"type": "object"}},
                },
                "workerGroupSpecs": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["groupName", "maxReplicas", "minReplicas", "template"],
                        "properties": {
                            "groupName": {"type": "string"},
                            "replicas": {"type": "integer"},
                            "minReplicas": {"type": "integer"},
                            "maxReplicas": {"type": "integer"},
                            "rayStartParams": {"$ref": "#/$defs/params"},
                            "template": {"type": "object"},
                        },
                    },
                },
            },
        },
    },
    "$defs": {"params": {"type": "object", "additionalProperties": {"type": "string"}}},
}
"""The fields of KubeRay's RayCluster that are used here; its pods are Kubernetes' own."""


def run(*command: str) -> str:
    """Run a tool that prints nothing on success."""
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout + process.stderr


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_container_file_is_one(kind: str) -> None:
    run(str(BIN / "hadolint"), "--no-color", str(DEPLOY / f"container/Dockerfile.{kind}"))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_container_has_its_files_and_an_unprivileged_user(kind: str) -> None:
    text = (DEPLOY / f"container/Dockerfile.{kind}").read_text()
    included = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for line in re.findall(r"^COPY (?!--from)(?:--\S+ )?(.*)$", text, re.M):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists() and source in included, source
    assert len(re.findall("^FROM ", text, re.M)) == 2
    assert "\nUSER 10001\n" in text and "\nHEALTHCHECK " in text and 'ENTRYPOINT ["tinsmith"]' in text
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (image_extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.M)
    assert set(image_extras.split(",")) <= set(extras)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_container_starts_commands_that_it_holds_on_bases_of_one_version(kind: str) -> None:
    path = DEPLOY / f"container/Dockerfile.{kind}"
    container = image(path)
    assert container.entrypoint[0] in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    ((source, name),) = re.findall(r"^COPY --chmod=0755 (\S+) /usr/local/bin/(\S+)$", path.read_text(), re.M)
    assert container.health["exec"]["command"] == [name] and container.env["PATH"] == "/opt/tinsmith/bin:$PATH"
    assert (ROOT / source).read_text().startswith("#!/opt/tinsmith/bin/python\n")
    assert {container.home, container.env["HF_HOME"].rpartition("/")[0]} == {container.volume}
    text = path.read_text()
    build_args = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.M))
    for base in re.findall(r"^FROM (\S+)", text, re.M):
        assert re.search(r":\d+\.\d+", build_args.get(base.removeprefix("$"), base)), base


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_container_is_built_of_what_is_sent_with_pinned_versions(kind: str) -> None:
    text = (DEPLOY / f"container/Dockerfile.{kind}").read_text().partition("\nFROM ")[2].partition("\nFROM ")[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {Path(word) for line in re.findall(r"^COPY (.*)$", text, re.M) for word in line.split()[:-1]}
    build = project["tool"]["hatch"]
    build_inputs = ["README.md", *project["project"]["license-files"], build["version"]["path"]]
    build_inputs += [build["metadata"]["hooks"]["custom"]["path"], build["build"]["hooks"]["custom"]["path"]]
    build_inputs += [*build["build"]["targets"]["wheel"]["packages"], "pyproject.toml", "constraints.txt"]
    for name in build_inputs:
        assert any(part in copied for part in (Path(name), *Path(name).parents)), name
    installs = re.findall(r"pip install (.*?);?(?: \\)?$", text, re.M)
    assert len(installs) == 2 and all(line.startswith("--constraint constraints.txt ") for line in installs)
    pinned = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.M)
    requirements = [*project["project"]["dependencies"], "torch"]
    for extra in extras.split(","):
        requirements += project["project"]["optional-dependencies"][extra]
    assert "engine" in extras.split(",")
    for requirement in map(Requirement, requirements):
        if requirement.name == "tinsmith":  # an extra that includes another
            assert requirement.extras <= set(extras.split(","))
            continue
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), (requirement, version)


def test_no_recipe_names_a_package_index() -> None:
    """The builder's own are used; another is a build argument without a default."""
    for path in (DEPLOY / "container").glob("Dockerfile.*"):
        text = path.read_text()
        assert 'ARG TORCH_INDEX_URL=""' in text and not re.search(r"https?://|--(extra-)?index-url", text), path


def test_the_cuda_image_has_what_triton_compiles_with() -> None:
    stages = (DEPLOY / "container/Dockerfile.cuda").read_text().split("\nFROM ")
    assert {"gcc", "libc6-dev", "python3.12-dev"} <= set(stages[-1].split())
    assert "gcc" not in stages[1].split()


def test_the_entry_point_of_the_containers_runs() -> None:
    process = subprocess.run(
        [BIN / "tinsmith", *image(DEPLOY / "container/Dockerfile.cuda").command, "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert process.returncode == 0 and "--device" in process.stdout


def test_the_health_check_says_whether_anything_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            pass

    def status(port: int) -> int:
        monkeypatch.setenv("TINSMITH_HEALTH_PORT", str(port))
        return subprocess.run([sys.executable, DEPLOY / "container/alive"], capture_output=True, check=False).returncode

    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert status(server.server_port) == 0
        server.shutdown()
    assert status(free_port()) == 1


def test_the_compose_file_is_one() -> None:
    path = DEPLOY / "compose/compose.yaml"
    run(str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(path))
    (compose,) = documents(path)
    used = {name for service in compose["services"].values() for name in volumes_of(service)}
    assert used == set(compose["volumes"])
    for service in compose["services"].values():
        assert set(service.get("depends_on", ())) <= set(compose["services"])


def volumes_of(service: dict[str, Any]) -> list[str]:
    return [volume.partition(":")[0] for volume in service.get("volumes", ())]


def test_the_example_environment_has_all_variables_of_the_compose_file() -> None:
    used_variables = set(re.findall(r"(?<!\$)\$\{([A-Z_]+)", (DEPLOY / "compose/compose.yaml").read_text()))
    set_variables = set(re.findall(r"^([A-Z_]+)=", (DEPLOY / "compose/env.example").read_text(), re.M))
    assert used_variables == set_variables


@pytest.mark.parametrize(
    "path",
    [path for path in KUBE_FILES if path.parent.name != "gpu"],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_a_manifest_is_one(path: Path) -> None:
    for document in documents(path):
        if document["kind"] != "Kustomization":
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", ["base", "gpu"])
def test_a_kustomization_names_all_that_lies_beside_it(name: str) -> None:
    directory = DEPLOY / "kubernetes" / name
    (document,) = documents(directory / "kustomization.yaml")
    allowed_keys = {"apiVersion", "kind", "namespace", "labels", "resources", "patches", "images"}
    assert set(document) <= allowed_keys
    listed = {*document["resources"], *(patch["path"] for patch in document.get("patches", ()))}
    assert all((directory / resource).exists() for resource in listed)
    neighbours = {path.name for path in directory.glob("*.yaml")} - {"kustomization.yaml", "secret.example.yaml"}
    assert neighbours == listed - {"../base"}
    base = [resource for path in (DEPLOY / "kubernetes/base").glob("*.yaml") for resource in documents(path)]
    base_resources = {(resource["kind"], resource["metadata"]["name"]) for resource in base if "metadata" in resource}
    for patch in document.get("patches", ()):
        (patched,) = documents(directory / patch["path"])
        assert (patched["kind"], patched["metadata"]["name"]) in base_resources


@pytest.mark.parametrize("name", ["engine", "sampler"])
def test_a_patch_makes_a_manifest_of_the_one_that_it_patches(name: str) -> None:
    (manifest,) = documents(DEPLOY / f"kubernetes/base/{name}.yaml")
    (patch,) = documents(DEPLOY / f"kubernetes/gpu/{name}.yaml")
    assert patch["metadata"].pop("namespace") == "tinsmith"
    patched = merge(manifest, patch)
    assert isinstance(patched, dict) and patched != manifest
    kubernetes_validate.validate(patched, KUBERNETES, strict=True)


def test_the_pods_meet_the_restricted_standard() -> None:
    pods = [
        (path.name, document["spec"]["template"]["spec"])
        for path in KUBE_FILES
        for document in documents(path)
        if document["kind"] in ("Deployment", "StatefulSet", "Job") and path.parent.name != "gpu"
    ]
    assert len(pods) == 5
    for name, pod in pods:
        assert pod["enableServiceLinks"] is False, "variables of a Service are no settings"
        context = pod["securityContext"]
        assert context["runAsNonRoot"] and context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in pod["containers"]:
            inside = container["securityContext"]
            assert inside["allowPrivilegeEscalation"] is False and inside["capabilities"] == {"drop": ["ALL"]}, name


def test_the_ray_cluster_is_one() -> None:
    (document,) = documents(DEPLOY / "kuberay/raycluster.yaml")
    jsonschema.validate(document, RAY_CLUSTER)
    for group in (document["spec"]["headGroupSpec"], *document["spec"]["workerGroupSpecs"]):
        assert group["template"]["spec"]["enableServiceLinks"] is False
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": group["template"]}
        kubernetes_validate.validate(template, KUBERNETES, strict=True)


def test_the_task_is_one() -> None:
    """`make lint-deploy` validates it with SkyPilot itself."""
    (task,) = documents(DEPLOY / "skypilot/tinsmith.yaml")
    assert set(task) <= {"name", "resources", "workdir", "envs", "secrets", "setup", "run"}
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


# Names in the files.


def texts() -> Iterator[tuple[Path, str]]:
    for path in sorted(DEPLOY.rglob("*")):
        if path.is_file() and path.parent.name != "grafana":
            yield path, path.read_text()


def test_every_setting_that_is_named_exists() -> None:
    setting_variables = {PREFIX + name.upper() for name in Settings.model_fields}
    mentions = {(name, path.name) for path, text in texts() for name in re.findall(rf"\b{PREFIX}[A-Z_]+", text)}
    assert len(mentions) > 20
    assert not {(name, file_name) for name, file_name in mentions if name not in setting_variables}


def test_every_value_of_a_setting_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (config,) = documents(DEPLOY / "kubernetes/base/settings.yaml")
    unit = dict(re.findall(r"^(TINSMITH_\w+)=(.*)$", (DEPLOY / "systemd/tinsmith.env").read_text(), re.M))
    for values in (config["data"], unit):
        with monkeypatch.context() as environment:
            for name, value in values.items():
                environment.setenv(name, value)
            Settings()


def test_every_command_that_is_named_exists() -> None:
    called = list(commands())
    assert {command[0] for command in called} == {"serve", "keys", "migrate", "rank"}
    for command in called:
        flags = {word for word in command if word.startswith("-")}
        if command[0] in FLAGS:
            assert flags <= FLAGS[command[0]], command
            roles = [after for word, after in itertools.pairwise(command) if word == "--role"]
            assert set(roles) <= {"server", "engine", "sampler", "batch-worker"}
        else:
            run(sys.executable, "-m", "tinsmith.cli", *itertools.takewhile(str.isalpha, command[:2]), "--help")


def commands() -> Iterator[Sequence[str]]:
    """The arguments of `tinsmith` in scripts, and those of containers whose entry point it is."""
    for path, text in texts():
        yield from (shlex.split(line, comments=True) for line in re.findall(r"/bin/tinsmith ([a-z].*)$", text, re.M))
        if path.suffix == ".yaml":
            for document in documents(path):
                yield from (
                    words for words in lists(document) if words and words[0] in ("serve", "keys", "migrate", "up")
                )


def lists(value: object) -> Iterator[list[str]]:
    if isinstance(value, dict):
        for element in value.values():
            yield from lists(element)
    elif isinstance(value, list):
        if all(isinstance(element, str) for element in value):
            yield value
        for element in value:
            yield from lists(element)


def test_every_folder_has_a_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    for folder in sorted(path.name for path in DEPLOY.iterdir()):
        page = PAGES.get(folder, f"howto/{folder}.md")
        assert page in nav
        assert f"deploy/{folder}" in (ROOT / "docs" / page).read_text(), page
