"""lm-eval evaluates a base model and a checkpoint through the OpenAI endpoint, as docs/evaluation.md says.

`make test-harness` installs what it needs. LM_EVAL_BIN is the bin directory of another environment.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.live import API_KEY, LiveServer

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_harness_finds_what_a_checkpoint_has_learned(nano_server: LiveServer, tmp_path: Path) -> None:
    shell = ""
    for language, block in re.findall(r"```(python|yaml|bash)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        if language == "bash":
            shell = block
        else:
            (tmp_path / block.partition("\n")[0].removeprefix("# ")).write_text(block)
    directories = (os.environ.get("LM_EVAL_BIN"), str(Path(sys.executable).parent), os.environ["PATH"])
    environment = {
        **os.environ,
        "PATH": ":".join(directory_ for directory_ in directories if directory_),
        "TINKER_BASE_URL": nano_server.url,
        "TINKER_API_KEY": API_KEY,
        "HF_HOME": str(tmp_path / "home"),
        **{"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_DATASETS_OFFLINE": "1"},
    }
    completed = subprocess.run(
        ["bash", "-e", "-c", shell],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-5000:]
    results_by_model = {}
    for path in (tmp_path / "results").rglob("results_*.json"):
        results = json.loads(path.read_text())
        results_by_model[results["model_name"]] = results["results"]
    base, checkpoint = results_by_model["tinsmith/nano"], results_by_model[(tmp_path / "checkpoint.txt").read_text()]
    assert base["facts_choice"]["acc,none"] < 0.8 and base["facts_text"]["exact_match,stripped"] < 0.5
    assert checkpoint["facts_choice"]["acc,none"] == checkpoint["facts_text"]["exact_match,stripped"] == 1.0
