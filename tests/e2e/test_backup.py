"""A copy that is made as docs/howto/upgrade.md says, while the server works, is a whole server."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from support.live import API_KEY, serving

NANO = "tinsmith/nano"
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints(list(range(8))),
    loss_fn_inputs={"target_tokens": np.arange(1, 9), "weights": np.ones(8, np.float32)},
)


def train(model: tinker.TrainingClient, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        passed = model.forward_backward([DATUM], "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=0.01)).result()
        losses.append(passed.result().metrics["loss:sum"])
    return losses


def copy_while_it_works(source: Path, target: Path) -> None:
    """The database first, by SQLite's own backup, then the files, which exist before a row names them."""
    target.mkdir(mode=0o700)
    name = "tinsmith.db"
    with closing(sqlite3.connect(source / name)) as database, closing(sqlite3.connect(target / name)) as copy:
        database.backup(copy)
    for path in source.iterdir():
        if path.is_dir():
            shutil.copytree(path, target / path.name, dirs_exist_ok=True)
        elif path.name == "signing.key":
            shutil.copy2(path, target)


@pytest.fixture(autouse=True)
def _on_sqlite(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--database") != "sqlite":
        pytest.skip("the copy of a Postgres is its own tools' work")


def test_a_copy_of_a_working_server_has_its_runs_and_checkpoints(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "data") as server,
        tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        model = service.create_lora_training_client(NANO, rank=4, seed=1).result()
        train(model, 3)
        checkpoint = model.save_state("three").result().path
        later = [model.forward_backward([DATUM], "cross_entropy") for _ in range(20)]
        copy_while_it_works(tmp_path / "data", tmp_path / "copy")
        for future in later:
            future.result()
        model.optim_step(types.AdamParams(learning_rate=0.01)).result()
        again = service.create_training_client_from_state_with_optimizer(checkpoint).result()
        expected = train(again, 3)
    with (
        serving(tmp_path / "copy") as server,
        tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        restored = service.create_training_client_from_state_with_optimizer(checkpoint).result()
        assert train(restored, 3) == expected
        rest = tinker.RestClient(base_url=server.url, api_key=API_KEY)
        runs = rest.list_training_runs().result().training_runs
        assert len(runs) == 2
    assert "Traceback" not in (tmp_path / "copy" / "server.log").read_text()
