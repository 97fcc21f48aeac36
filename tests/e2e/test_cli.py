"""The `tinsmith` command in a shell: valid JSON, meaningful exit statuses, helpful errors."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import tinker
import typer.main
from rich.console import Console
from typer.testing import CliRunner, Result

from support.live import environment
from tinsmith import base_models
from tinsmith.cli import lines
from tinsmith.cli import main as cli
from tinsmith.cli.doctor import Finding
from tinsmith.cli.lines import report_loading, work_line
from tinsmith.errors import SettingsError
from tinsmith.settings import Settings

ROOT = Path(__file__).parents[2]
NO_SERVER = {"TINKER_BASE_URL": "http://127.0.0.1:9", "TINKER_API_KEY": "tml-test"}


def run(*words: str, **environment: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb", **environment}).invoke(cli.app, words)


@pytest.mark.smoke
def test_every_command_can_print_json() -> None:
    groups: list[Any] = [typer.main.get_command(cli.app)]
    num_commands = 0
    while groups:
        for name, command in groups.pop().commands.items():
            if hasattr(command, "commands"):
                groups.append(command)
                continue
            if name == "rank":  # it runs like a server and prints its log alone
                continue
            assert "--json" in {flag for param in command.params for flag in param.opts}, name
            num_commands += 1
    assert num_commands > 15


@pytest.mark.parametrize(
    ("words", "number"),
    [(("checkpoints", "merge", "", "out"), 3), (("serve", ""), 2), (("runs", "log", "--json", "run", ""), 5)],
)
def test_an_empty_argument_is_named(
    words: tuple[str, ...], number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tinsmith", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2 and f"argument {number} of `tinsmith {words[0]}" in capsys.readouterr().err


def test_serve_takes_base_models_with_and_without_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Settings] = []
    monkeypatch.setattr(cli, "serve_until_signal", lambda settings, **_flags: served.append(settings))
    for words in (("serve", "a", "n=b"), ("serve", "-m", "a", "n=b"), ("serve", "-m", "a", "-m", "n=b")):
        assert run(*words).exit_code == 0
    assert run("serve").exit_code == 0
    assert [settings.models for settings in served] == [("a", "n=b")] * 3 + [()]


@pytest.mark.smoke
def test_keys_are_made_listed_and_ended_as_json(tmp_path: Path) -> None:
    options = ("--json", "--data-dir", str(tmp_path / "data"))
    assert json.loads(run("migrate", *options).stdout)["schema_version"].startswith("schema_")
    new_key = json.loads(run("keys", "create", "alice", "--name", "laptop", *options).stdout)
    assert new_key["tenant"] == "alice" and new_key["name"] == "laptop" and new_key["key"].startswith("tml-")
    revoked_key = json.loads(run("keys", "revoke", str(new_key["key_id"]), *options).stdout)
    assert revoked_key["key_id"] == new_key["key_id"] and revoked_key["revoked_at"]
    assert json.loads(run("keys", "list", *options).stdout) == [revoked_key]
    assert new_key["key"] not in json.dumps(revoked_key)


@pytest.mark.smoke
@pytest.mark.parametrize("good", [True, False])
def test_the_doctor_tells_a_program_what_it_found(good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.cli.doctor.examine", lambda _settings: [Finding(good, "disk", "[full]")])
    outcome = run("doctor", "--json")
    assert json.loads(outcome.stdout) == [{"good": good, "what": "disk", "detail": "[full]"}]
    assert outcome.exit_code == (0 if good else 1)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("srve",), "serve"),
        (("keys", "lst"), "list"),
        (("batch", "shwo"), "show"),
        (("serve", "--prt", "1"), "--port"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_misspelt_word_is_answered_with_the_nearest(words: tuple[str, ...], hint: str) -> None:
    outcome = run(*words)
    assert outcome.exit_code == 2
    assert hint in outcome.output


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("mine=/no/such", "the directory /no/such does not exist"),
        ("./no-such", "the directory no-such does not exist"),
        (
            "no/such",
            "no such local directory, and the hub did not provide it; --model NAME=DIRECTORY",
        ),
        ("=x", "is not NAME=DIRECTORY_OR_HUB_ID"),
    ],
)
def test_a_model_that_is_nowhere_is_refused_in_one_line(entry: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says) as refused:
        base_models.resolve([entry])
    assert repr(entry) in str(refused.value) and "\n" not in str(refused.value)


def test_without_a_server_one_line_says_how_to_start_one() -> None:
    outcome = run("batch", "list", **NO_SERVER)
    assert outcome.exit_code == 2
    assert "http://127.0.0.1:9" in outcome.output and "tinsmith serve" in outcome.output
    assert "TINKER_BASE_URL" in outcome.output and "Traceback" not in outcome.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(shell: str) -> None:
    words = {"COMP_WORDS": "tinsmith k", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "tinsmith k"}
    action = {"_TYPER_COMPLETE_FISH_ACTION": "get-args"} if shell == "fish" else {}
    environment = {**os.environ, **words, **action, "_TINSMITH_COMPLETE": f"complete_{shell}"}
    script = "import sys; sys.argv = ['tinsmith']; from tinsmith.cli.main import main; main()"
    completed = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "keys" in completed.stdout and "serve" not in completed.stdout


@pytest.mark.smoke
def test_a_server_announces_itself_to_a_program(tmp_path: Path) -> None:
    words = ["serve", "--port", "0", "--backend", "fake", "--json", "--data-dir", str(tmp_path / "data")]
    process = subprocess.Popen([sys.executable, "-m", "tinsmith.cli", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", ready["url"]) and ready["models"] == ["tinsmith/nano"]
        assert ready["data_dir"] == str(tmp_path / "data") and ready["takes_any_key"] is True
    finally:
        process.send_signal(signal.SIGTERM)
        later_output, _ = process.communicate(timeout=60)
    assert later_output == "" and process.returncode == 0


def test_a_server_prints_its_work_and_what_it_waits_for(tmp_path: Path) -> None:
    script = "import tinsmith.cli.main as cli; from tinsmith.cli import lines; lines.WORK_LINE_S = 0.5; cli.main()"
    words = ["serve", "--port", "0", "--backend", "fake", "--data-dir", str(tmp_path / "data")]
    for quiet in (False, True):
        command = [sys.executable, "-c", script, *words, *(["--quiet"] if quiet else [])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(tmp_path / "data"))
        try:
            assert process.stdout is not None
            head = process.stdout.readline()
            url = head.split()[-1]
            with tinker.ServiceClient(base_url=url, api_key="tml-local") as service:
                service.create_lora_training_client("tinsmith/nano", rank=4).result()
            time.sleep(2)
        finally:
            process.send_signal(signal.SIGINT)
            later_output, _ = process.communicate(timeout=60)
        assert bool(re.search(r"The base models have loaded after [\d.]+ s\.", later_output)) is not quiet, later_output
        assert "Stopping: " in later_output and "1 engine process(es) to save their runs" in later_output
        assert bool(re.search(r" requests, [\d.,]+ trained and [\d.,]+ sampled tokens/s", later_output)) is not quiet, (
            later_output
        )


def test_loading_is_counted_on_a_terminal_and_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LOADING_POLL_S", 0.0)
    for is_terminal in (False, True):
        states = iter(["engine a is starting", "engine a is loading", ""])
        text = StringIO()
        console = Console(file=text, force_terminal=is_terminal, width=120)
        report_loading(states.__next__, lambda: "no memory", console)
        printed = text.getvalue()
        assert printed.count("does not load: no memory") == 1
        assert ("The base models load: 0 s\r" in printed) is is_terminal
        assert printed.endswith(" s.\n") and printed.count("have loaded after") == 1


def test_a_line_of_work_has_rates_and_an_idle_minute_has_none() -> None:
    counts = {"requests": 1200.0, "trained": 6000.0, "sampled": 30.0}
    assert work_line(counts, 60.0) == "1,200 requests, 100.0 trained and 0.5 sampled tokens/s"
    assert work_line(dict.fromkeys(counts, 0.0), 60.0) == ""


@pytest.mark.parametrize("command", ["up", "status", "down"])
def test_a_cluster_that_is_not_there_is_refused_at_once(tmp_path: Path, command: str) -> None:
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))  # and does not listen
        began = time.monotonic()
        words = [command, "--ray", f"127.0.0.1:{free_socket.getsockname()[1]}", "--data-dir", str(tmp_path)]
        completed = subprocess.run(
            [sys.executable, "-m", "tinsmith.cli", *words], capture_output=True, text=True, timeout=60, check=False
        )
    assert completed.returncode == 2 and "nothing responds" in completed.stderr
    assert time.monotonic() - began < 30, "the import of Ray included"


TOLD_EARLY = """
import os, signal, sys
from tinsmith.server import process as server

def told(*_arguments):
    os.kill(os.getpid(), signal.SIGTERM)

if sys.argv.pop(1) == "ready":
    run = server.Server.run
    server.Server.run = lambda self, on_ready=None: run(self, told)
else:
    server.raise_file_limit = told
from tinsmith.cli.main import main
main()
"""


@pytest.mark.parametrize("role", ["all", "engine"])
@pytest.mark.parametrize("stop_at", ["ready", "starting"])
def test_a_server_that_is_told_to_stop_while_it_starts_stops(tmp_path: Path, stop_at: str, role: str) -> None:
    words = ["serve", "--port", "0", "--backend", "fake", "--role", role, "--data-dir", str(tmp_path / "data")]
    completed = subprocess.run(
        [sys.executable, "-c", TOLD_EARLY, stop_at, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert completed.returncode == 0, completed.stderr


@pytest.mark.smoke
def test_statuses_and_completion_are_documented() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    for status in (0, 1, 2, 130):
        assert f"\n| {status} | " in page
    assert "--install-completion" in page
