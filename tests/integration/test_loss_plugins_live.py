"""A server whose installation has a loss more: trained with the unmodified SDK; and one that cannot load it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from support.live import environment, free_port, serving
from support.loss_plugins import install


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that processes of the server have on their path."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return tmp_path / "site"


def datum(tokens: list[int]) -> types.Datum:
    n = len(tokens) - 1
    arrays = {
        "target_tokens": np.array(tokens[1:], np.int64),
        "logprobs": np.full(n, -3.0, np.float32),
        "advantages": np.ones(n, np.float32),
    }
    inputs = {name: types.TensorData.from_numpy(array) for name, array in arrays.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


@pytest.mark.extended
def test_the_sdk_trains_with_a_plugin_by_its_name(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "example-losses", {"dapo": "DAPO", "orpo": "ORPO"})
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    data = [datum(list(range(5, 5 + length))) for length in (9, 14)]
    with serving(tmp_path / "data", "--device", "cpu") as server:
        client = tinker.ServiceClient(base_url=server.url)
        training = client.create_lora_training_client("tinsmith/nano", rank=4).result()
        losses = []
        for _ in range(3):
            # The SDK's type lists Tinker's names; it sends any text.
            passed = training.forward_backward(data, "dapo", {"num_tokens": 21.0})  # pyright: ignore[reportArgumentType]
            training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            losses.append(passed.result().metrics["loss:sum"])
        assert losses[0] > losses[1] > losses[2]
        outputs = training.forward(data, "dapo").result()  # pyright: ignore[reportArgumentType]
        ratios = [np.exp(output["logprobs"].to_numpy() + 3.0) for output in outputs.loss_fn_outputs]
        expected = -sum(np.minimum(ratio, 1.28).sum() for ratio in ratios)
        assert outputs.metrics["loss:sum"] == pytest.approx(float(expected), rel=1e-5)
        with pytest.raises(tinker.RequestFailedError, match=r"loss_fn is 'dopa'; it must be one of .*, dapo, orpo"):
            training.forward(data, "dopa").result()  # pyright: ignore[reportArgumentType]
        with pytest.raises(tinker.RequestFailedError, match=r"has no 'sequence_ratio_mask'; orpo needs target_tokens"):
            training.forward(data, "orpo").result()  # pyright: ignore[reportArgumentType]
        assert "example-losses 0.1" in (tmp_path / "data" / "server.log").read_text()


@pytest.mark.extended
def test_a_server_does_not_start_with_a_plugin_that_cannot_be_imported(site: Path, tmp_path: Path) -> None:
    install(site, "bad-loss", {"x": "LOSS"}, "import no_such_module\n")
    command = [
        sys.executable,
        "-m",
        "tinsmith.cli",
        "serve",
        "--port",
        str(free_port()),
        "--data-dir",
        str(tmp_path / "d"),
    ]
    (tmp_path / "d").mkdir()
    ended = subprocess.run(command, env=environment(tmp_path / "d"), capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    lines = [line for line in ended.stderr.splitlines() if "bad-loss 0.1" in line]
    assert len(lines) == 1 and "cannot be loaded: ModuleNotFoundError" in lines[0] and "Traceback" not in ended.stderr
