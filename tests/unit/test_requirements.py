"""The ranges of pyproject.toml are those that were tested, and `tinsmith doctor` names a release outside of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tinsmith.cli import doctor
from tinsmith.plan import versions
from tinsmith.plan.versions import TORCH, TRANSFORMERS, VersionRange
from tinsmith.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
(UVICORN,) = (package_range for package_range in doctor.TESTED_OF_SERVER if package_range.package == "uvicorn")


@pytest.mark.parametrize(
    "package_range", [TORCH, TRANSFORMERS, UVICORN], ids=lambda package_range: package_range.package
)
def test_a_library_whose_private_parts_are_used_is_bounded_at_what_was_tested(package_range: VersionRange) -> None:
    assert package_range.requirement in PROJECT["dependencies"]
    assert package_range.includes(PINNED[package_range.package])


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
    details = {finding.what: finding.detail for finding in findings}
    assert details["not tested"] == f"transformers 5.99.0; tested are {TRANSFORMERS}"
    assert details["tested releases"] == "torch 2.13.0, uvicorn 0.40.0, starlette 1.0, tinker 0.38.0"


def test_doctor_finds_nothing_untested_here(tmp_path: Path) -> None:
    findings = doctor.examine(Settings(data_dir=tmp_path, port=0))
    assert "not tested" not in {finding.what for finding in findings}
