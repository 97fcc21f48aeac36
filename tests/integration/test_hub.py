"""The mirror of the Hugging Face hub, through plain requests, the hub's client, transformers and PEFT."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from httpx import Response
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from support import peft_adapters, tiny_models
from support.fake_hub import repository_of
from support.http_harness import ALICE, BOB, FILES, SHAPES, Harness, close, make_harness
from support.live import API_KEY, LiveServer, serving
from tinsmith.base_models import Bases, nano, read_shape
from tinsmith.exchange import hub
from tinsmith.store.checkpoints import CheckpointRef

NANO = nano.MODEL_NAME
PAGE = Path(__file__).parents[2] / "docs" / "hub.md"


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path)
    serve(new_harness)
    yield new_harness
    close(new_harness)


def serve(harness: Harness, **changes: object) -> None:
    """A server of the embedded model and of base models that are only names."""
    settings = harness.services.settings.model_copy(update=changes)
    bases = Bases((read_shape(NANO, nano.path()), *SHAPES))
    harness.app.state.services = replace(harness.services, bases=bases, settings=settings)


def ask(harness: Harness, path: str, key: str = ALICE, method: str = "GET", **headers: str) -> Response:
    all_headers = {"Authorization": f"Bearer {key}", **headers}
    return harness.client.request(method, f"/hub/{path}", headers=all_headers)  # type: ignore[return-value]


def repository(path: str) -> str:
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    return repository_of(CheckpointRef(run_id, kind, name))


def test_a_repository_names_its_checkpoint() -> None:
    ref = CheckpointRef("a-b:train:12", "sampler_weights", "step.10")
    assert repository_of(ref) == "a-b/12.sampler_weights.step.10"
    assert hub.checkpoint_of("a-b/12.sampler_weights.step.10") == ref
    for repo_id in ("a/b", "a/1.weights", "a/1.other.x", "a/b/1.weights.x", "1.weights.x", "a:train:1/1.weights.x"):
        assert hub.checkpoint_of(repo_id) is None, repo_id


def test_a_base_model_gives_its_tokenizer_and_keeps_its_weights(harness: Harness) -> None:
    model_info = ask(harness, f"api/models/{NANO}").json()
    names = {sibling["rfilename"] for sibling in model_info["siblings"]}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not [name for name in names if "safetensors" in name]
    refused = ask(harness, f"{NANO}/resolve/main/model.safetensors")
    assert refused.status_code == 403 and "hub_base_weights" in refused.headers["x-error-message"]
    serve(harness, hub_base_weights=True)
    allowed = ask(harness, f"{NANO}/resolve/main/model.safetensors")
    assert allowed.content == (nano.path() / "model.safetensors").read_bytes()
    assert ask(harness, f"api/models/{NANO}").json()["sha"] != model_info["sha"]


def test_other_files_of_a_model_directory_are_not_served(harness: Harness, tmp_path: Path) -> None:
    tiny_models.make(tmp_path / "base")
    (tmp_path / "base" / "secrets.json").write_text("{}")
    (tmp_path / "secret.txt").write_text("x")
    (tmp_path / "base" / "additional_chat_templates").mkdir()
    (tmp_path / "base" / "additional_chat_templates" / "tools.jinja").write_text("{{ x }}")
    bases = Bases((read_shape("one", tmp_path / "base"),))
    harness.app.state.services = replace(harness.services, bases=bases)
    for name in ("secrets.json", "../secret.txt", "..%2Fsecret.txt", "%2Fetc%2Fpasswd", ".", ""):
        answer = ask(harness, f"one/resolve/main/{name}")
        assert answer.status_code == 404, name
    assert ask(harness, "one/resolve/main/additional_chat_templates/tools.jinja").text == "{{ x }}"
    top = ask(harness, "api/models/one/tree/main").json()
    assert [tree_entry["path"] for tree_entry in top if tree_entry["type"] == "directory"] == [
        "additional_chat_templates"
    ]
    inside = ask(harness, "api/models/one/tree/main/additional_chat_templates").json()
    assert [tree_entry["path"] for tree_entry in inside] == ["additional_chat_templates/tools.jinja"]
    assert ask(harness, "api/models/one/tree/main/elsewhere").headers["x-error-code"] == "EntryNotFound"
    (tmp_path / "base" / "config.json").unlink()
    assert ask(harness, "one/resolve/main/config.json").status_code == 404


def test_a_file_has_a_length_a_digest_and_ranges(harness: Harness) -> None:
    repo = repository(harness.save_checkpoint(harness.model()))
    weights = FILES["adapter_model.safetensors"]
    model_info = ask(harness, f"api/models/{repo}?blobs=true").json()
    head = ask(harness, f"{repo}/resolve/main/adapter_model.safetensors", method="HEAD")
    assert head.headers["etag"] == f'"{hashlib.sha256(weights).hexdigest()}"'
    assert (int(head.headers["content-length"]), head.content) == (len(weights), b"")
    assert head.headers["x-repo-commit"] == model_info["sha"]
    part = ask(harness, f"{repo}/resolve/{model_info['sha']}/adapter_model.safetensors", Range="bytes=10-19")
    assert (part.status_code, part.content) == (206, weights[10:20])
    assert ask(harness, f"{repo}/resolve/main/adapter_model.safetensors").content == weights
    assert {sibling["rfilename"]: sibling["size"] for sibling in model_info["siblings"]} == {
        n: len(c) for n, c in FILES.items()
    }


def test_missing_objects_have_the_hubs_error_codes(harness: Harness) -> None:
    for path, code in (
        ("api/models/x/y", "RepoNotFound"),
        ("x/y/resolve/main/config.json", "RepoNotFound"),
        ("datasets/x/y/resolve/main/README.md", "RepoNotFound"),
        ("api/datasets/x/y", "RepoNotFound"),
        (f"{NANO}/resolve/other/config.json", "RevisionNotFound"),
        (f"api/models/{NANO}/revision/other", "RevisionNotFound"),
        (f"{NANO}/resolve/main/nothing.json", "EntryNotFound"),
    ):
        answer = ask(harness, path)
        assert (answer.status_code, answer.headers["x-error-code"]) == (404, code), path
        assert answer.json()["detail"] and answer.headers["x-error-message"]
    assert "x-repo-commit" in ask(harness, f"{NANO}/resolve/main/nothing.json").headers


def test_a_checkpoint_is_its_tenant_s_until_it_is_published(harness: Harness) -> None:
    path = harness.save_checkpoint(harness.model(), files={**FILES, "optimizer.safetensors": b"x"})
    repo = repository(path)
    for call in (f"api/models/{repo}", f"{repo}/resolve/main/adapter_config.json", f"api/models/{repo}/tree/main"):
        assert ask(harness, call).status_code == 200
        assert ask(harness, call, BOB).headers["x-error-code"] == "RepoNotFound"
    assert ask(harness, f"{repo}/resolve/main/optimizer.safetensors").status_code == 404
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    harness.send("POST", f"training_runs/{run_id}/checkpoints/{kind}/{name}/publish")
    assert ask(harness, f"{repo}/resolve/main/adapter_config.json", BOB).content == FILES["adapter_config.json"]
    harness.send("DELETE", f"training_runs/{run_id}/checkpoints/{kind}/{name}")
    assert ask(harness, f"api/models/{repo}").status_code == 404


def test_a_token_is_needed_once_there_are_keys(harness: Harness, tmp_path: Path) -> None:
    for headers in ({}, {"Authorization": "Bearer hf_x"}, {"Authorization": "Bearer tml-carol"}):
        answer = harness.client.get(f"/hub/{NANO}/resolve/main/config.json", headers=headers)
        assert answer.status_code == 401 and answer.headers["x-error-message"]
    assert ask(harness, "api/whoami-v2").json()["name"] == "alice"
    (tmp_path / "open").mkdir()
    open_to_all = make_harness(tmp_path / "open", local=True)
    try:
        serve(open_to_all)
        for headers in ({}, {"Authorization": "Bearer hf_x"}):
            answer = open_to_all.client.get(f"/hub/{NANO}/resolve/main/config.json", headers=headers)
            assert answer.status_code == 200
        foreign = open_to_all.client.get(f"/hub/{NANO}/resolve/main/config.json", headers={"Origin": "http://evil"})
        assert foreign.status_code == 403
    finally:
        close(open_to_all)


def test_a_large_file_is_known_by_samples_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "FULL_HASH_BYTES", 10)
    monkeypatch.setattr(hub, "SAMPLE_BYTES", 4)
    digests = set()
    for position in (0, 500, 999):
        content = bytearray(1000)
        content[position] = 1
        path = tmp_path / f"{position}.safetensors"
        path.write_bytes(content)
        described = hub._hub_file(path)
        assert not described.is_full_hash and len(described.etag) == 32
        digests.add(described.etag)
    assert len(digests) == 3


# With the real clients.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    settings = {"HUB_BASE_WEIGHTS": "true"}
    with serving(tmp_path_factory.mktemp("hub") / "data", "--backend", "fake", settings=settings) as live:
        yield live


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peft_adapters.make(nano.path(), tmp_path_factory.mktemp("adapter") / "peft")


@pytest.fixture(scope="module")
def uploaded_repository(server: LiveServer, adapter: Path) -> str:
    """The repository of a checkpoint."""
    files = {
        path.name: (path.name, path.read_bytes()) for path in adapter.iterdir() if path.name.startswith("adapter_")
    }
    answer = httpx.post(
        f"{server.url}/api/v1/upload_weights",
        headers={"X-API-Key": API_KEY},
        data={"base_model": NANO, "name": "mine"},
        files=files,
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    return repository(answer.json()["tinker_path"])


def test_the_hub_s_own_client_reads_repositories(
    server: LiveServer, uploaded_repository: str, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    api = HfApi(endpoint=f"{server.url}/hub", token=API_KEY)
    assert api.whoami()["name"] == "local"
    info = api.model_info(uploaded_repository, files_metadata=True)
    assert info.id == uploaded_repository and info.sha and info.library_name == "peft"
    tree = {tree_entry.path: tree_entry for tree_entry in api.list_repo_tree(uploaded_repository, recursive=True)}
    content = (adapter / "adapter_model.safetensors").read_bytes()
    assert tree["adapter_model.safetensors"].lfs.sha256 == hashlib.sha256(content).hexdigest()  # type: ignore[union-attr]
    assert api.list_repo_files(uploaded_repository) == ["adapter_config.json", "adapter_model.safetensors"]
    options = {"endpoint": f"{server.url}/hub", "token": API_KEY, "cache_dir": tmp_path / "cache"}
    snapshot = Path(snapshot_download(uploaded_repository, **options))
    assert (snapshot / "adapter_model.safetensors").read_bytes() == content
    pinned = hf_hub_download(NANO, "config.json", revision=api.model_info(NANO).sha, **options)
    assert json.loads(Path(pinned).read_text())["architectures"]
    with pytest.raises(RepositoryNotFoundError):
        snapshot_download("nobody/nothing", **options)
    with pytest.raises(RevisionNotFoundError):
        hf_hub_download(NANO, "config.json", revision="v2", **options)
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download(NANO, "nothing.json", **options)
    with pytest.raises(HfHubHTTPError, match=r"no path of this API|Repository Not Found"):
        api.dataset_info("x/y")


SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
import peft, torch
from transformers import AutoModelForCausalLM
repo = sys.argv[1]
with torch.no_grad():
    model = AutoModelForCausalLM.from_pretrained("tinsmith/nano", dtype=torch.float32)
    tokens = torch.arange(3, 15)[None]
    alone = model(input_ids=tokens).logits[0]
    adapted = peft.PeftModel.from_pretrained(model, repo)(input_ids=tokens).logits[0]
    at_once = AutoModelForCausalLM.from_pretrained(repo, dtype=torch.float32)(input_ids=tokens).logits[0]
messages = [{"role": "user", "content": "Say hello."}]
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
ids = tokenizer.encode(text)
print(json.dumps({"alone": alone.tolist(), "adapted": adapted.tolist(), "at_once": at_once.tolist(), "ids": ids}))
"""


@pytest.mark.extended
def test_a_machine_without_internet_loads_tokenizer_model_and_adapter(
    server: LiveServer, uploaded_repository: str, adapter: Path, tmp_path: Path
) -> None:
    online = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
    hub_variables = {"HF_ENDPOINT": f"{server.url}/hub", "HF_TOKEN": API_KEY, "HF_HOME": str(tmp_path / "home")}
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    completed = subprocess.run(
        [sys.executable, "-c", example + SCRIPT, uploaded_repository],
        cwd=tmp_path,
        env={**os.environ, **online, **hub_variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    output = json.loads(completed.stdout.splitlines()[-1])
    for name, expected in (
        ("alone", peft_adapters.logits(nano.path())),
        ("adapted", peft_adapters.logits(nano.path(), adapter)),
        ("at_once", peft_adapters.logits(nano.path(), adapter)),
    ):
        torch.testing.assert_close(torch.tensor(output[name]), expected, rtol=1e-4, atol=1e-4)
    assert output["ids"] and completed.stdout.startswith("Say hello.")
    assert {path.name for path in (tmp_path / "home" / "hub").iterdir()} >= {"models--tinsmith--nano"}
