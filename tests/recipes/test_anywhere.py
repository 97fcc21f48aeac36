"""A recipe in an empty directory: it loads its tokenizer from the server's mirror of the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.checks import checkpoints, logs, on_policy
from recipes.runner import run
from recipes.table import ARITHMETIC, REWARD
from support.live import API_KEY, LiveServer

pytestmark = [pytest.mark.recipes, pytest.mark.timeout(1500, func_only=True)]


def test_a_recipe_runs_from_an_empty_directory(
    recipe_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("-m", "tinker_cookbook.recipes.math_rl.train", *ARITHMETIC.split(), "log_path=log")
    monkeypatch.setenv("HF_TOKEN", API_KEY)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("HF_ENDPOINT", f"{recipe_server.url}/hub")
    outcome = run(recipe_server, tmp_path, command, "log")
    for check in (logs(REWARD, 2), on_policy, checkpoints("final")):
        check(outcome)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hugging_face", "log"]
    assert (tmp_path / "hugging_face" / "hub" / "models--local--tiny").is_dir()
