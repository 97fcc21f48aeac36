"""The ranges of pyproject.toml are those that were tested, and `tinsmith doctor` names a release outside of them."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tinsmith import __version__
from tinsmith.cli import doctor
from tinsmith.plan import versions
from tinsmith.plan.versions import TORCH, TRANSFORMERS, VersionRange
from tinsmith.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
REQUIREMENTS = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["engine"]
(UVICORN,) = (package_range for package_range in doctor.TESTED_OF_SERVER if package_range.package == "uvicorn")


@pytest.mark.parametrize(
    "package_range", [TORCH, TRANSFORMERS, UVICORN], ids=lambda package_range: package_range.package
)
def test_a_library_whose_private_parts_are_used_is_bounded_at_what_was_tested(package_range: VersionRange) -> None:
    assert package_range.requirement in REQUIREMENTS
    assert package_range.includes(PINNED[package_range.package])


def test_an_extra_is_part_of_all_unless_its_releases_are_its_own() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    assert everything.extras == extras.keys() - {"all", "vllm"}


def test_the_pinned_releases_are_tested_ones() -> None:
    for package_range in (TORCH, TRANSFORMERS, *doctor.TESTED_OF_SERVER):
        assert package_range.includes(PINNED[package_range.package]), package_range


def test_doctor_names_a_release_that_was_not_tested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    releases = {
        "torch": "2.13.0",
        "transformers": "5.99.0",
        "uvicorn": "0.40.0",
        "starlette": "1.0",
        "tinker": "0.38.0",
    }
    monkeypatch.setattr(versions, "version", releases.__getitem__)
    findings = doctor.examine(Settings(data_dir=tmp_path, port=0))
    details = {finding.subject: finding.detail for finding in findings}
    assert details["not tested"] == f"transformers 5.99.0; tested are {TRANSFORMERS}"
    assert details["tested releases"] == "torch 2.13.0, uvicorn 0.40.0, starlette 1.0, tinker 0.38.0"


def test_doctor_finds_nothing_untested_here(tmp_path: Path) -> None:
    findings = doctor.examine(Settings(data_dir=tmp_path, port=0))
    assert "not tested" not in {finding.subject for finding in findings}


def test_relative_links_of_the_readme_become_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("builders.hooks.plugin.interface", "metadata.plugin.interface"):
        module = types.ModuleType(f"hatchling.{name}")
        module.BuildHookInterface = module.MetadataHookInterface = object  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    make_links_absolute = runpy.run_path(str(ROOT / "hatch_build.py"))["make_links_absolute"]
    text = "[a](docs/a.md#b) ![p](docs/p.png) [c](https://c.example/d) [e](#f) `[g]`(h)"
    assert make_links_absolute(text, "https://example.org/t", "v1.2") == (
        "[a](https://example.org/t/blob/v1.2/docs/a.md#b) ![p](https://example.org/t/raw/v1.2/docs/p.png) "
        "[c](https://c.example/d) [e](#f) `[g]`(h)"
    )
    absolute = make_links_absolute((ROOT / "README.md").read_text(), "https://example.org/t", "v1.2")
    assert not re.search(r"\]\((?!https://)", absolute)


def test_the_version_has_the_commit_of_the_checkout() -> None:
    version = [sys.executable, "-m", "tinsmith.cli", "--version"]
    completed = subprocess.run(version, capture_output=True, text=True, check=True)
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout[:12]
    assert completed.stdout == f"tinsmith {__version__}{f' ({commit})' if commit else ''}\n"
