"""An engine process that starts before its server is ready: it is configured later, or ends."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith.cluster import engine_process
from tinsmith.cluster.engine_process import EngineProcess
from tinsmith.settings import Settings

ENGINE = """
import json, os, sys
line = sys.stdin.readline()
if line:
    spec = json.loads(line)
    open(spec["out"], "w").write(" ".join(sys.argv[1:]) + " " + os.environ["PROMETHEUS_MULTIPROC_DIR"])
    sys.stdin.read()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the engine, which takes seconds to start."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {tmp_path / "engine.py"} "$@"\n')
    path.chmod(0o700)
    (tmp_path / "engine.py").write_text(ENGINE)
    monkeypatch.setattr(engine_process.sys, "executable", str(path))
    return path


@pytest.mark.usefixtures("script")
def test_a_prestarted_engine_is_configured_once_and_can_be_ended(tmp_path: Path) -> None:
    prestarted = EngineProcess.prestart(Settings(data_dir=tmp_path))
    assert prestarted is not None
    out = tmp_path / "out"

    async def serve() -> int:
        assert prestarted.configure(json.dumps({"out": str(out)}).encode() + b"\n") and prestarted.pid > 0
        assert not prestarted.configure(b"{}\n")  # it has one seat
        while not out.exists() or not out.read_text():
            await asyncio.sleep(0.01)
        prestarted.discard()  # the server ends; a configured process belongs to the supervisor
        prestarted.kill()
        return await prestarted.wait()

    assert asyncio.run(serve()) == -9
    assert out.read_text() == f"--prestarted {tmp_path / 'metrics'}"


@pytest.mark.usefixtures("script")
def test_an_ended_prestarted_engine_is_not_configured(tmp_path: Path) -> None:
    prestarted = EngineProcess.prestart(Settings(data_dir=tmp_path))
    assert prestarted is not None
    prestarted._process.kill()
    prestarted._process.wait()
    assert prestarted._process.stdin is not None
    prestarted._process.stdin.close()
    assert not prestarted.configure(b"{}\n")


@pytest.mark.usefixtures("script")
def test_an_unused_prestarted_engine_ends_with_its_server(tmp_path: Path) -> None:
    prestarted = EngineProcess.prestart(Settings(data_dir=tmp_path))
    assert prestarted is not None
    process = prestarted._process
    prestarted.discard()
    assert process.returncode is not None
    prestarted.discard()


@pytest.mark.parametrize("options", [{"backend": "fake"}, {"role": "server"}, {"role": "batch-worker"}])
def test_only_who_will_have_an_engine_that_loads_for_long_begins_one(tmp_path: Path, options: dict[str, str]) -> None:
    assert EngineProcess.prestart(Settings.model_validate({"data_dir": tmp_path, **options})) is None


def test_without_a_server_it_ends_in_good_order() -> None:
    command = [sys.executable, "-m", "tinsmith.engine"]
    process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    assert process.returncode == 0 and not process.stderr
