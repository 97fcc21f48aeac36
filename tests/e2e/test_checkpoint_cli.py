"""The checkpoint and run commands of the `tinker` CLI against a live server.

One runs as a separate process, as a user runs it; the others run in this process, which saves the import of the SDK.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from click.testing import CliRunner
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from tinker import types
from tinker.cli.__main__ import main_cli
from tinker.cli.exceptions import TinkerCliError

from support.live import API_KEY, LiveServer
from tinsmith.base_models import nano

TINKER = Path(sys.executable).with_name("tinker")
TOKENS = list(range(40, 60))


@dataclass(frozen=True, slots=True)
class Trained:
    """A run with checkpoints, and its model's logprobs."""

    server: LiveServer
    run_id: str
    training: str
    sampler: str
    export: str
    logprobs: np.ndarray

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "TINKER_BASE_URL": self.server.url, "TINKER_API_KEY": API_KEY}

    def process(self, *arguments: str) -> str:
        """Run a command as a process; return its output."""
        command = [TINKER, *arguments]
        completed = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=120)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        return completed.stdout

    def cli(self, *arguments: str, status: int = 0) -> str:
        """Run a command; return its output."""
        completed = CliRunner().invoke(main_cli, arguments, env=self.environment)
        assert completed.exit_code == status, completed.output
        error = completed.exception  # which the command's entry point would print
        return completed.output + (f"{error.message}: {error.details}" if isinstance(error, TinkerCliError) else "")

    def json(self, *arguments: str) -> dict:
        text = self.cli("--format", "json", *arguments)
        return json.loads(text)

    def checkpoints(self) -> dict[str, dict]:
        rows = self.json("checkpoint", "list", "--run-id", self.run_id)["checkpoints"]
        return {checkpoint["tinker_path"]: checkpoint for checkpoint in rows}


@pytest.fixture(scope="module")
def trained_run(nano_server: LiveServer) -> Iterator[Trained]:
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": np.array(TOKENS[1:]), "weights": np.ones(len(TOKENS) - 1, np.float32)},
    )
    with tinker.ServiceClient(base_url=nano_server.url, api_key=API_KEY) as service:
        client = service.create_lora_training_client(nano.MODEL_NAME, rank=8, user_metadata={"recipe": "x"}).result()
        for _ in range(3):
            client.forward_backward([datum], "cross_entropy").result()
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        scored = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
        yield Trained(
            server=nano_server,
            run_id=client.model_id,
            training=client.save_state("state", user_metadata={"step": "3"}).result().path,
            sampler=client.save_weights_for_sampler("sampler").result().path,
            export=client.save_weights_external("export", ttl_seconds=7200).result().path,
            logprobs=np.asarray(scored.to_numpy(), np.float32),
        )


def use_the_name_that_peft_reads(directory: Path) -> None:
    """Rename the unembedding of a tied model: exports have the name that tinker-cookbook reads."""
    weights, config = directory / "adapter_model.safetensors", directory / "adapter_config.json"
    tensors = load_file(weights)
    assert [name for name in tensors if ".unembed_tokens." in name] and not [
        name for name in tensors if "lm_head" in name
    ]
    save_file({name.replace("model.unembed_tokens", "lm_head"): tensor for name, tensor in tensors.items()}, weights)
    config.write_text(config.read_text().replace("unembed_tokens", "lm_head"))


def peft_logprobs(directory: Path) -> np.ndarray:
    """The logprobs that PEFT computes with the adapter in a directory."""
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(nano.path(), dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(base, directory)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS[:-1]]), use_cache=False).logits[0].double()
    return logits.log_softmax(-1)[range(len(TOKENS) - 1), TOKENS[1:]].numpy()


@pytest.mark.covers("tinker checkpoint download", "POST /save_weights_external")
def test_a_downloaded_checkpoint_is_the_model_that_was_trained(trained_run: Trained, tmp_path: Path) -> None:
    for path in (trained_run.training, trained_run.export):
        run = trained_run.process if path == trained_run.training else trained_run.cli
        output = run("checkpoint", "download", path, "--output", str(tmp_path))
        assert "Total Size" in output
        directory = tmp_path / path.removeprefix("tinker://").replace("/", "_")
        assert sorted(file.name for file in directory.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        use_the_name_that_peft_reads(directory)
        # The server computes in its own number format; an untrained adapter is off by 0.1 and more.
        np.testing.assert_allclose(peft_logprobs(directory), trained_run.logprobs, rtol=2e-3, atol=2e-3)
    assert trained_run.checkpoints().keys() == {trained_run.training, trained_run.sampler, trained_run.export}
    # The temporary export of a training checkpoint is deleted after the download; the run remains.
    everything = trained_run.json("checkpoint", "list", "--limit", "0")["checkpoints"]
    assert not [checkpoint for checkpoint in everything if checkpoint["checkpoint_id"] == "external_weights/download"]
    assert "cannot be downloaded" in trained_run.cli("checkpoint", "download", trained_run.sampler, status=1)


@pytest.mark.covers("tinker checkpoint push-hf")
def test_what_is_pushed_to_the_hub_is_an_adapter_that_names_its_base(
    trained_run: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: dict[str, str] = {}

    def keep(_: HfApi, *, folder_path: str, repo_id: str, **__: object) -> None:
        pushed.update({path.name: repo_id for path in Path(folder_path).iterdir()})
        pushed["card"] = (Path(folder_path) / "README.md").read_text()

    for method in ("whoami", "create_repo"):
        monkeypatch.setattr(HfApi, method, lambda *_, **__: None)
    monkeypatch.setattr(HfApi, "upload_folder", keep)
    trained_run.cli("checkpoint", "push-hf", trained_run.training, "--repo", "someone/adapter")
    assert pushed["adapter_model.safetensors"] == pushed["adapter_config.json"] == "someone/adapter"
    assert f"Base model: {nano.MODEL_NAME}" in pushed["card"] and "LoRA rank: 8" in pushed["card"]


@pytest.mark.covers("tinker checkpoint info", "tinker checkpoint list")
def test_info_and_list_show_what_a_checkpoint_is(trained_run: Trained) -> None:
    info = trained_run.json("checkpoint", "info", trained_run.training)
    assert (info["checkpoint_id"], info["checkpoint_type"]) == ("weights/state", "training")
    assert (info["lora_rank"], info["is_lora"], info["public"]) == (8, True, False)
    assert (info["user_metadata"], info["expires_at"]) == ({"step": "3"}, None)
    files = trained_run.server.data_dir / "checkpoints"
    sizes = {sum(file.stat().st_size for file in directory.iterdir()) for directory in files.iterdir()}
    assert info["size_bytes"] in sizes
    table = trained_run.cli("checkpoint", "list", "--run-id", trained_run.run_id)
    assert "3 checkpoints for run" in table
    listed = trained_run.checkpoints()
    assert listed[trained_run.export]["checkpoint_type"] == "external"
    assert listed[trained_run.export]["expires_at"] is not None
    assert listed[trained_run.sampler]["size_bytes"] < info["size_bytes"]  # no optimizer state


@pytest.mark.covers("tinker checkpoint publish", "tinker checkpoint unpublish")
def test_publish_and_unpublish_twice_each(trained_run: Trained) -> None:
    for command, public in (("publish", True), ("publish", True), ("unpublish", False), ("unpublish", False)):
        trained_run.cli("checkpoint", command, trained_run.sampler)
        assert trained_run.checkpoints()[trained_run.sampler]["public"] is public


@pytest.mark.covers("tinker checkpoint set-ttl")
def test_a_ttl_is_set_refused_and_removed(trained_run: Trained) -> None:
    trained_run.cli("checkpoint", "set-ttl", trained_run.sampler, "--ttl", "3600")
    assert trained_run.checkpoints()[trained_run.sampler]["expires_at"] is not None
    refused = trained_run.cli("checkpoint", "set-ttl", trained_run.sampler, "--ttl", "3599", status=1)
    assert "ttl_seconds is 3599" in refused
    trained_run.cli("checkpoint", "set-ttl", trained_run.sampler, "--remove")
    assert trained_run.checkpoints()[trained_run.sampler]["expires_at"] is None


@pytest.mark.covers("tinker run list", "tinker run info")
def test_runs_are_listed_and_shown(trained_run: Trained) -> None:
    runs = trained_run.json("run", "list")["runs"]
    assert trained_run.run_id in [run["training_run_id"] for run in runs]
    info = trained_run.json("run", "info", trained_run.run_id)
    assert (info["base_model"], info["lora_rank"]) == (nano.MODEL_NAME, 8)
    assert trained_run.run_id in trained_run.cli("run", "info", trained_run.run_id)


@pytest.mark.covers("tinker checkpoint delete")
def test_delete_takes_checkpoints_of_a_kind_and_names_what_it_cannot(trained_run: Trained) -> None:
    trained_run.cli("checkpoint", "delete", "--run-id", trained_run.run_id, "--type", "external_weights", "--yes")
    assert trained_run.checkpoints().keys() == {trained_run.training, trained_run.sampler}
    output = trained_run.cli("checkpoint", "delete", trained_run.export, trained_run.sampler, "--yes")
    assert "Deleted 1 checkpoint(s)" in output
    assert "Failed to delete 1" in output and "does not exist" in output
    assert trained_run.checkpoints().keys() == {trained_run.training}
