"""Failpoints: their specification, counting, single use, and that the code hits each of them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinsmith.errors import SettingsError
from tinsmith.runtime import failpoints

SOURCE = Path(failpoints.__file__).parents[1]


@pytest.fixture(autouse=True)
def disarm_failpoints() -> Iterator[None]:
    yield
    failpoints.arm("", "server", Path(), lambda: ())


def dies(data_dir: Path, setting: str, times: int) -> bool:
    """Whether a process that hits a failpoint this often ends by SIGKILL."""
    script = (
        "import sys; from pathlib import Path; from tinsmith.runtime import failpoints as c; "
        f"c.arm({setting!r}, 'engine', Path({str(data_dir)!r}), lambda: ()); "
        f"[c.hit('engine.ran') for _ in range({times})]"
    )
    status = subprocess.run([sys.executable, "-c", script]).returncode
    assert status in (0, -signal.SIGKILL)
    return status != 0


def test_a_process_dies_at_the_nth_time_and_once(tmp_path: Path) -> None:
    assert not dies(tmp_path, "engine.ran:3", 2)
    assert dies(tmp_path, "engine.ran:3", 3)
    assert not dies(tmp_path, "engine.ran:3", 9), "the marker outlives the process"
    (tmp_path / "crashed.engine.ran").unlink()
    assert dies(tmp_path, "settle.committed, engine.ran", 1)
    assert not dies(tmp_path, "", 9)


def test_the_other_process_dies_if_it_is_the_victim(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as other:
        failpoints.arm("engine.ran@server", "engine", tmp_path, lambda: [other.pid])
        failpoints.hit("engine.planned")
        assert other.poll() is None
        failpoints.hit("engine.ran")
        assert other.wait(10) == -signal.SIGKILL


def test_an_error_is_raised_at_the_nth_time_and_once(tmp_path: Path) -> None:
    failpoints.arm("engine.computing:2!device", "engine", tmp_path, lambda: ())
    failpoints.hit("engine.computing", ["a:1"])
    with pytest.raises(RuntimeError, match="CUDA error: an illegal memory access"):
        failpoints.hit("engine.computing", ["a:1"])
    failpoints.hit("engine.computing", ["a:1"])
    failpoints.arm("engine.computing:1!device", "engine", tmp_path, lambda: ())
    failpoints.hit("engine.computing", ["a:1"])


def test_an_error_is_raised_whenever_a_request_is_reached(tmp_path: Path) -> None:
    failpoints.arm("engine.computing!bug/train:2:3|sample:1:4", "engine", tmp_path, lambda: ())
    failpoints.hit("engine.computing", ["s:train:2:33", "s:train:2:4", "sample:1:4:0"])
    failpoints.hit("engine.computing")
    for request_id in ("s:train:2:3", "t:sample:1:4") * 2:
        with pytest.raises(AssertionError):
            failpoints.hit("engine.computing", ["other", request_id])


WRONG_SETTINGS = [
    "nowhere",
    "engine.ran:0",
    "engine.ran@client",
    "engine.ran:2:3",
    "engine.ran;",
    "engine.ran!panic",
    "engine.ran:2!bug/a",
    "engine.ran@engine!bug",
    "engine.ran/a",
]


@pytest.mark.parametrize("setting", WRONG_SETTINGS)
def test_an_unknown_failpoint_is_refused(tmp_path: Path, setting: str) -> None:
    with pytest.raises(SettingsError, match=r"failpoints has .*engine\.ran"):
        failpoints.arm(setting, "server", tmp_path, lambda: ())


def test_every_point_lies_somewhere_and_has_a_row() -> None:
    text = "".join(path.read_text() for path in SOURCE.rglob("*.py") if path.name != "failpoints.py")
    hit_points = set(re.findall(r'\bhit\("([a-z.]+)"', text))
    # On a disk each once; writes to a bucket have two more.
    assert len(re.findall(r'\bhit\(f"\{self\._root\.name\}\.', text)) == 3 + 2
    of_directories = {f"{root}.{phase}" for root in failpoints.DIRECTORIES for phase in ("writing", "sealed", "placed")}
    assert hit_points | of_directories == set(failpoints.POINTS)
