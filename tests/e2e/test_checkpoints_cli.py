"""`tinsmith checkpoints` against a live server: exported and imported adapters compute the same numbers. Round trips
are compared with transformers and PEFT in this process, and with the service.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types
from typer.testing import CliRunner

from support import peft_adapters
from support.live import API_KEY, LiveServer
from tinsmith.base_models import nano
from tinsmith.cli.main import app
from tinsmith.errors import TinsmithError, UserError
from tinsmith.exchange import transfer

TOKENS = list(range(40, 60))
GUIDE = Path(__file__).parents[2] / "docs" / "export.md"
PULLED = ["adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"]


@dataclass(frozen=True, slots=True)
class Trained:
    server: LiveServer
    service: tinker.ServiceClient
    state: str
    sampler: str
    scored: np.ndarray
    next_loss: float

    def cli(self, *arguments: object, status: int = 0) -> str:
        """Run a command; return its output."""
        environment = {"TINKER_BASE_URL": self.server.url, "TINKER_API_KEY": API_KEY, "COLUMNS": "300"}
        words = ["checkpoints", *map(str, arguments)]
        completed = CliRunner().invoke(app, words, env=environment)
        assert completed.exit_code == status, completed.output + repr(completed.exception)
        return completed.output

    def json(self, *arguments: object) -> dict:
        return json.loads(self.cli(*arguments, "--json"))


def datum() -> types.Datum:
    weights = np.ones(len(TOKENS) - 1, np.float32)
    inputs = {"target_tokens": np.array(TOKENS[1:]), "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)


def train(client: tinker.TrainingClient, steps: int) -> float:
    """The loss before the last step."""
    for _ in range(steps):
        passed = client.forward_backward([datum()], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return passed.result().metrics["loss:sum"]


def logprobs(client: tinker.TrainingClient) -> np.ndarray:
    """Return the service's logprobs."""
    (output,) = client.forward([datum()], "cross_entropy").result().loss_fn_outputs
    return np.asarray(output["logprobs"].to_numpy(), np.float32)


def peft_logprobs(base: Path, adapter: Path | None = None) -> np.ndarray:
    """Return the logprobs of transformers with PEFT."""
    logits = peft_adapters.logits(base, adapter, torch.tensor([TOKENS[:-1]])).double()
    return logits.log_softmax(-1)[range(len(TOKENS) - 1), TOKENS[1:]].numpy()


def close(actual: np.ndarray, desired: np.ndarray) -> None:
    np.testing.assert_allclose(actual, desired, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def trained_run(nano_server: LiveServer) -> Iterator[Trained]:
    with tinker.ServiceClient(base_url=nano_server.url, api_key=API_KEY) as service:
        client = service.create_lora_training_client(nano.MODEL_NAME, rank=4).result()
        train(client, 2)
        state = client.save_state("state").result().path
        sampler = client.save_weights_for_sampler("sampler").result().path
        scored = logprobs(client)
        yield Trained(nano_server, service, state, sampler, scored, train(client, 1))


def test_a_pulled_checkpoint_is_the_model_that_was_trained(trained_run: Trained, tmp_path: Path) -> None:
    pulled = trained_run.json("pull", trained_run.state, tmp_path / "state")
    assert sorted(pulled["files"]) == PULLED and pulled["tinker_path"] == trained_run.state
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == PULLED
    close(peft_logprobs(nano.path(), tmp_path / "state"), trained_run.scored)
    assert "2 files" in trained_run.cli("pull", trained_run.sampler, tmp_path / "deep" / "sampler")
    close(peft_logprobs(nano.path(), tmp_path / "deep" / "sampler"), trained_run.scored)
    assert "exists already" in trained_run.cli("pull", trained_run.state, tmp_path / "state", status=2)
    assert "does not exist" in trained_run.cli("pull", trained_run.state + "x", tmp_path / "none", status=2)
    assert "is not a checkpoint path" in trained_run.cli("pull", "here", tmp_path / "none", status=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "state"]


def test_a_merged_model_computes_the_same_alone(trained_run: Trained, tmp_path: Path) -> None:
    merged = trained_run.json("merge", trained_run.state, tmp_path / "merged", "--dtype", "float32")
    assert (merged["dtype"], merged["shards"]) == ("float32", 1)
    close(peft_logprobs(tmp_path / "merged"), trained_run.scored)
    trained_run.cli("pull", trained_run.state, tmp_path / "pulled")
    arguments = ("merge", tmp_path / "pulled", tmp_path / "sharded", "--base", nano.path(), "--max-shard-gb", "0.003")
    assert trained_run.json(*arguments, "--dtype", "float32")["shards"] > 2
    close(peft_logprobs(tmp_path / "sharded"), trained_run.scored)


def test_a_pushed_checkpoint_resumes_training(trained_run: Trained, tmp_path: Path) -> None:
    trained_run.cli("pull", trained_run.state, tmp_path / "state")
    pushed = trained_run.json("push", tmp_path / "state", "--name", "again", "--ttl", 3600)
    assert pushed["tinker_path"].endswith("/weights/again") and pushed["lora_rank"] == 4
    client = trained_run.service.create_training_client_from_state_with_optimizer(pushed["tinker_path"]).result()
    np.testing.assert_array_equal(logprobs(client), trained_run.scored)
    assert train(client, 1) == trained_run.next_loss
    sampler = trained_run.service.create_sampling_client(model_path=pushed["tinker_path"]).result()
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    np.testing.assert_allclose(np.array(scores[1:], float), trained_run.scored, rtol=1e-3, atol=1e-3)


def test_an_adapter_from_elsewhere_is_imported_and_trained(trained_run: Trained, tmp_path: Path) -> None:
    """It adapts two linears of seven, with different alpha, ranks and scaling."""
    settings = {"r": 6, "lora_alpha": 10, "use_rslora": True, "rank_pattern": {"v_proj": 3}}
    adapter = peft_adapters.make(nano.path(), tmp_path / "adapter", **settings)
    refused = trained_run.cli("push", adapter, "--base", nano.MODEL_NAME, status=2)
    assert "rank_pattern" in refused and "tinsmith checkpoints import" in refused
    imported = trained_run.json("import", adapter, "--base", nano.MODEL_NAME)
    assert (imported["lora_rank"], imported["base_model"]) == (6, nano.MODEL_NAME)
    client = trained_run.service.create_training_client_from_state(imported["tinker_path"]).result()
    logprobs_of_peft = peft_logprobs(nano.path(), adapter)
    close(logprobs(client), logprobs_of_peft)
    assert np.abs(logprobs_of_peft - peft_logprobs(nano.path())).max() > 0.1
    losses = [train(client, 1) for _ in range(3)]
    assert losses[-1] < losses[0]
    saved = client.save_state("after").result().path
    trained_run.cli("pull", saved, tmp_path / "after")
    close(peft_logprobs(nano.path(), tmp_path / "after"), logprobs(client))
    again = trained_run.service.create_training_client_from_state_with_optimizer(saved).result()
    np.testing.assert_array_equal(logprobs(again), logprobs(client))


def test_the_commands_of_the_guide_run_as_they_stand(
    trained_run: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    for line in block.replace("$CHECKPOINT", trained_run.state).splitlines():
        program, group, *words = shlex.split(line)
        assert (program, group) == ("tinsmith", "checkpoints")
        said = trained_run.cli(*words)
    assert "/weights/rewritten" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "merged"]


def test_an_archive_of_adapter_files_goes_in_and_out(trained_run: Trained, tmp_path: Path) -> None:
    """In SkyRL's format of sampler checkpoints: gzip without compression, two files and a hidden one."""
    adapter = peft_adapters.make(nano.path(), tmp_path / "adapter", r=6, lora_alpha=10)
    theirs = tmp_path / "ckpt.tar.gz"
    with tarfile.open(theirs, "w:gz", compresslevel=0) as tar:
        for name in (*PULLED[:2], ".probe"):
            content = b"" if name == ".probe" else (adapter / name).read_bytes()
            tar.addfile(member_of(name, len(content)), io.BytesIO(content))
    for command in ("import", "push"):
        stored = trained_run.json(command, theirs, "--base", nano.MODEL_NAME)
        client = trained_run.service.create_training_client_from_state(stored["tinker_path"]).result()
        close(logprobs(client), peft_logprobs(nano.path(), adapter))
    trained_run.cli("pull", trained_run.state, tmp_path / "out" / "state.tar.gz")
    with tarfile.open(tmp_path / "out" / "state.tar.gz", "r:gz") as tar:
        assert tar.getnames() == PULLED
    assert "exists already" in trained_run.cli("pull", trained_run.state, tmp_path / "out" / "state.tar.gz", status=2)
    again = trained_run.json("push", tmp_path / "out" / "state.tar.gz")
    client = trained_run.service.create_training_client_from_state_with_optimizer(again["tinker_path"]).result()
    np.testing.assert_array_equal(logprobs(client), trained_run.scored)
    assert train(client, 1) == trained_run.next_loss
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["state.tar.gz"]


@pytest.mark.parametrize("name", ["from-skyrl", "from-hosted-tinker"])
def test_the_commands_of_a_page_on_moving_run_as_they_stand(trained_run: Trained, tmp_path: Path, name: str) -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", (GUIDE.parent / "howto" / f"{name}.md").read_text(), re.DOTALL)
    adapter = peft_adapters.make(nano.path(), tmp_path / "adapter", r=6, lora_alpha=10)
    transfer.pack(adapter, tmp_path / "theirs.tar.gz")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TINKER_BASE_URL": trained_run.server.url,
        "TINKER_API_KEY": API_KEY,
        "ARCHIVE": str(tmp_path / "theirs.tar.gz"),
        "CHECKPOINT": trained_run.state,
    }
    completed = subprocess.run(
        ["bash", "-e", "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (path,) = set(re.findall(r"tinker://\S+/weights/(?:from-skyrl|imported)", completed.stdout))
    client = trained_run.service.create_training_client_from_state(path).result()
    if name == "from-skyrl":
        close(logprobs(client), peft_logprobs(nano.path(), adapter))
        with tarfile.open(tmp_path / "back.tar.gz", "r:gz") as tar:
            assert tar.getnames() == PULLED
    else:
        close(logprobs(client), trained_run.scored)


def test_an_invalid_push_is_refused_in_one_line(trained_run: Trained, tmp_path: Path) -> None:
    adapter = peft_adapters.make(nano.path(), tmp_path / "adapter", use_dora=True)
    said = trained_run.cli("import", adapter, "--base", nano.MODEL_NAME, status=2)
    assert "sets 'use_dora'" in said and len(said.splitlines()) == 1
    plain = peft_adapters.make(nano.path(), tmp_path / "plain")
    assert "served: 'tinsmith/nano'" in trained_run.cli("push", plain, "--base", "x/y", status=2)
    assert "there is no adapter_config.json" in trained_run.cli("push", tmp_path, "--base", nano.MODEL_NAME, status=2)
    config = json.loads((plain / "adapter_config.json").read_text())
    (plain / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    assert "--base NAME" in trained_run.cli("push", plain, status=2)
    assert "--base DIR_OR_ID" in trained_run.cli("merge", plain, tmp_path / "out", status=2)


def test_a_server_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    environment = {"TINKER_BASE_URL": "http://127.0.0.1:9", "TINKER_API_KEY": API_KEY, "COLUMNS": "300"}
    words = ["checkpoints", "pull", "tinker://a/weights/b", str(tmp_path / "x")]
    completed = CliRunner().invoke(app, words, env=environment)
    assert completed.exit_code == 2 and "is `tinsmith serve` running?" in completed.output


CONVERTER = """
import sys
model, _, target = sys.argv[1:]
assert __import__("pathlib").Path(model, "config.json").is_file()
if "broken" in target:
    sys.exit("no such architecture")
open(target, "wb").write(b"GGUF")
"""


def test_gguf_is_left_to_llama_cpp(trained_run: Trained, tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    merging = ("merge", trained_run.state, tmp_path / "merged", "--gguf", target)
    said = trained_run.cli(*merging, status=2)
    assert "llama.cpp's convert_hf_to_gguf.py" in said and not (tmp_path / "merged").exists()
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "convert_hf_to_gguf.py").write_text(CONVERTER)
    report = trained_run.json(*merging, "--llama-cpp", tmp_path / "llama.cpp")
    assert (report["gguf"], target.read_bytes()) == (str(target), b"GGUF")
    broken = ("merge", trained_run.state, tmp_path / "other", "--gguf", tmp_path / "broken.gguf")
    said = trained_run.cli(*broken, "--llama-cpp", tmp_path / "llama.cpp", status=2)
    assert "no such architecture" in said and (tmp_path / "other").is_dir()


# Archives of untrusted servers.


def member_of(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def archive(files: Mapping[str, bytes], *, link: str = "") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            member = member_of(name, len(content))
            if link:
                member.type, member.linkname, member.size = tarfile.SYMTYPE, link, 0
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def pull_of(content: bytes, directory: Path, requests: list[httpx.Request]) -> dict[str, int]:
    """Pull from a server that sends this archive from another host."""

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        if request.url.host == "files":
            return httpx.Response(200, content=content, headers={"content-length": str(len(content))})
        return httpx.Response(302, headers={"location": "http://files/archive"})

    server = transfer.TinkerServer("http://api", "tml-secret")
    transport = httpx.MockTransport(answer)
    server._http = httpx.Client(base_url="http://api/api/v1/", headers={"X-API-Key": "tml-secret"}, transport=transport)
    server._keyless = httpx.Client(transport=transport)
    try:
        return server.pull("tinker://r/weights/n", directory, lambda _num_done, _total: None)
    finally:
        server.close()


def test_the_key_goes_to_the_server_and_not_where_it_points(tmp_path: Path) -> None:
    requests: list[httpx.Request] = []
    pulled = pull_of(archive({"./a": b"x" * 3_000_000, "b": b""}), tmp_path / "out", requests)
    assert pulled == {"a": 3_000_000, "b": 0}
    assert ["tml-secret" in str(request.headers) for request in requests] == [True, False]


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/b", "..", "a/../b"])
def test_an_archive_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="which is not a plain file of the directory"):
        pull_of(archive({"good": b"x", name: b"x"}), tmp_path / "out", [])
    assert list(tmp_path.iterdir()) == []


def test_links_and_doubles_in_an_archive_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="which is not a plain file of the directory"):
        pull_of(archive({"a": b""}, link="/etc/passwd"), tmp_path / "out", [])
    with pytest.raises(UserError, match="holds no files"):
        pull_of(archive({}), tmp_path / "out", [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("packed", [gzip.compress, bytes], ids=["gzip", "plain"])
def test_a_hostile_archive_of_ones_own_disk_is_refused_and_leaves_nothing(
    tmp_path: Path, packed: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MAX_UNPACKED_BYTES", 5000)
    monkeypatch.setattr(transfer, "MAX_MEMBERS", 4)
    device = tarfile.TarInfo("a")
    device.type = tarfile.CHRTYPE
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 1 << 40
    packed_archive = archive({"a": b"x" * 3000})
    for content, words in (
        (archive({"../a": b"x"}), "not a plain file"),
        (archive({"/a": b"x"}), "not a plain file"),
        (archive({"a": b""}, link="/etc/passwd"), "not a plain file"),
        (device.tobuf() + bytes(1024), "not a plain file"),
        (archive({"a": b"x" * 3000, ".b": b"x" * 3000}), "over 4 members or over 5000 bytes"),
        (archive({f".{index}": b"" for index in range(5)}), "over 4 members or over 5000 bytes"),
        (header.tobuf(tarfile.GNU_FORMAT) + bytes(1024), "a header of 1099511627776 bytes"),
        (archive({".hidden": b"x"}), "holds no files"),
        (packed_archive[:1000], "is not a whole archive"),
        (b"", "is not a whole archive"),
        (b"PK", "is not a whole archive"),
    ):
        (tmp_path / "it.tar.gz").write_bytes(packed(content))
        with pytest.raises(UserError, match=words):
            transfer.unpack(tmp_path / "it.tar.gz", tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["it.tar.gz"]
    (tmp_path / "it.tar.gz").write_bytes(packed(packed_archive)[: len(packed(packed_archive)) // 4])
    with pytest.raises(UserError, match="is not a whole archive"):
        transfer.unpack(tmp_path / "it.tar.gz", tmp_path / "out")


def test_a_download_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    content = archive({"a": b"x" * 5000})
    for cut in (content[:700], content[:511], b""):
        with pytest.raises(TinsmithError, match=r"download failed|holds no files"):
            pull_of(cut, tmp_path / "out", [])
    assert list(tmp_path.iterdir()) == []


def test_the_commands_load_nothing_heavy_before_they_run() -> None:
    script = "import tinsmith.cli.checkpoints, sys; print('torch' in sys.modules, 'httpx' in sys.modules)"
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert completed.stdout.split() == ["False", "False"]
