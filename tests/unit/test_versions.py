"""Tested releases of torch and transformers, and how the installed ones compare."""

from __future__ import annotations

import pytest

from tinsmith.plan import versions
from tinsmith.plan.versions import VersionRange


@pytest.mark.parametrize(
    ("release", "is_tested"),
    [
        ("2.12.9", False),
        ("2.13.0", True),
        ("2.13.0+cpu", True),
        ("2.15.2", True),
        ("2.16.0.dev20261101", False),
        ("3.0.0", False),
    ],
)
def test_a_release_is_tested_if_its_minor_release_is_in_the_range(release: str, is_tested: bool) -> None:
    assert VersionRange("torch", "2.13", "2.15").includes(release) is is_tested


def test_the_install_command_includes_the_newest_tested_minor_release() -> None:
    ranges = (VersionRange("torch", "2.13", "2.15"), VersionRange("transformers", "5.9", "5.9"))
    assert versions.install_command(ranges) == "pip install 'torch>=2.13,<2.16' 'transformers>=5.9,<5.10'"


def test_an_installed_release_outside_of_its_range_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    releases = {"torch": "2.14.1", "transformers": "5.99.0"}
    monkeypatch.setattr(versions, "version", releases.__getitem__)
    assert [str(installed) for installed in versions.list_untested_versions()] == ["transformers 5.99.0"]


def test_a_package_that_is_not_installed_is_left_out() -> None:
    assert versions.list_installed_versions((VersionRange("no-such-package", "1.0", "1.1"),)) == []
