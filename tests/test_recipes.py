"""Unmodified recipes of tinker-cookbook against a live server with the embedded model."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from live import API_KEY, LiveServer
from tinsmith import nano

pytestmark = pytest.mark.recipes

MODEL = ("model_name=tinsmith/nano", "renderer_name=role_colon")
ARITHMETIC = ("env=arithmetic", *MODEL, "groups_per_batch=4", "group_size=2", "max_tokens=5", "max_steps=2")
TIMEOUT_S = 280


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory where the client finds the tokenizer and the data sets, as it would on a machine without internet."""
    directory = tmp_path_factory.mktemp("recipes")
    tokenizer = directory / "tinsmith" / "nano"
    tokenizer.mkdir(parents=True)
    for path in nano.path().glob("*.json"):
        shutil.copy(path, tokenizer)
    cookbook = find_spec("tinker_cookbook")
    assert cookbook is not None and cookbook.origin is not None
    shutil.copy(Path(cookbook.origin).parent / "example_data" / "conversations.jsonl", directory / "conv.jsonl")
    _write_preferences(directory / "Anthropic" / "hh-rlhf")
    return directory


def _write_preferences(directory: Path) -> None:
    directory.mkdir(parents=True)
    rng = random.Random(0)
    for split, count in (("train", 40), ("test", 16)):
        rows = []
        for _ in range(count):
            a, b = rng.randint(0, 99), rng.randint(0, 99)
            prompt = f"\n\nHuman: What is {a} + {b}?\n\nAssistant:"
            rows.append({"chosen": f"{prompt} {a + b}", "rejected": f"{prompt} I do not know."})
        (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(server: LiveServer, workplace: Path, recipe: str, *arguments: str) -> list[dict[str, object]]:
    """Run a recipe to its end; returns the metrics that it logged, step by step."""
    environment = {
        **os.environ,
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": API_KEY,
        # Telemetry stays on: the server has to take it.
        "TINKER_TELEMETRY": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", *arguments],
        cwd=workplace,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    log_path = next(argument.removeprefix("log_path=") for argument in arguments if argument.startswith("log_path="))
    metrics = workplace / log_path / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def fresh(name: str) -> tuple[str, str]:
    return "behavior_if_log_dir_exists=delete", f"log_path={name}"


def test_chat_sl_trains_and_then_resumes_where_it_stopped(nano_server: LiveServer, workplace: Path) -> None:
    shared = (*MODEL, "dataset=conv.jsonl", "batch_size=4", "save_every=1")
    first = run(nano_server, workplace, "chat_sl.train", *shared, "max_steps=2", *fresh("sl"))
    assert len(first) == 2
    # As if the first run had died after its first checkpoint: its last one says that there is nothing left to do.
    log = workplace / "sl" / "checkpoints.jsonl"
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    both = run(
        nano_server,
        workplace,
        "chat_sl.train",
        *shared,
        "max_steps=4",
        "behavior_if_log_dir_exists=resume",
        "log_path=sl",
    )
    assert len(both) == len(first) + 3, "the batches after the first, up to the fourth"


def test_chat_sl_keeps_rolling_checkpoints(nano_server: LiveServer, workplace: Path) -> None:
    rolling = ("save_every=2", "rolling_save_every=1", "rolling_ttl_seconds=3600")
    run(
        nano_server,
        workplace,
        "chat_sl.train",
        *MODEL,
        "dataset=conv.jsonl",
        "batch_size=4",
        "max_steps=2",
        *rolling,
        *fresh("rolling"),
    )


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("default", ()),
        ("is", ("loss_fn=importance_sampling", "compute_post_kl=True")),
        ("async", ("max_steps_off_policy=2", "loss_fn=ppo")),
        (
            "stream",
            (
                "loss_fn=cispo",
                "stream_minibatch_config.groups_per_batch=4",
                "stream_minibatch_config.num_minibatches=2",
            ),
        ),
    ],
    ids=["default_loss", "importance_sampling", "asynchronous_ppo", "streaming_cispo"],
)
def test_math_rl_finishes(nano_server: LiveServer, workplace: Path, name: str, extra: tuple[str, ...]) -> None:
    metrics = run(nano_server, workplace, "math_rl.train", *ARITHMETIC, *extra, *fresh(f"rl-{name}"))
    assert metrics


def test_guess_number_finishes(nano_server: LiveServer, workplace: Path) -> None:
    sizes = ("batch_size=4", "group_size=2", "max_tokens=8", "max_steps=2", "eval_every=0")
    assert run(nano_server, workplace, "multiplayer_rl.guess_number.train", *MODEL, *sizes, *fresh("guess"))


def test_dpo_finishes(nano_server: LiveServer, workplace: Path) -> None:
    sizes = ("dataset=hhh", "batch_size=4", "max_steps=2")
    assert run(nano_server, workplace, "preference.dpo.train", *MODEL, *sizes, *fresh("dpo"))
