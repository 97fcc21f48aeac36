"""Releases of torch and transformers that the tests pass with, and how the installed ones compare.

`tinsmith doctor` reports a release outside of these ranges, and an engine then checks every model at start as it checks
models with a state (`backends.torch.start_check`). Reads the metadata of installed packages and imports none of them.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class VersionRange(NamedTuple):
    """Minor releases of a package, from the oldest to the newest tested one, both included."""

    package: str
    oldest: str
    newest: str

    def includes(self, release: str) -> bool:
        return _minor(self.oldest) <= _minor(release) <= _minor(self.newest)

    @property
    def requirement(self) -> str:
        """A requirement with which pip installs a tested release."""
        major, minor = _minor(self.newest)
        return f"{self.package}>={self.oldest},<{major}.{minor + 1}"

    def __str__(self) -> str:
        return f"{self.package} {self.oldest} to {self.newest}"


TORCH = VersionRange("torch", "2.13", "2.15")

TRANSFORMERS = VersionRange("transformers", "5.22", "5.24")
"""Some families need a later one (docs/models.md); an older one refuses them."""

TESTED = (TORCH, TRANSFORMERS)

MIXER_LIBRARIES = ("fla", "mamba_ssm", "causal_conv1d")
"""Libraries that transformers uses for layers with a state, if installed."""

INSTALL_ENGINE = "pip install 'tinsmith[engine]'"
"""The command that installs them."""


class InstalledVersion(NamedTuple):
    """A release in this environment, and the tested ones."""

    release: str
    tested: VersionRange

    @property
    def is_tested(self) -> bool:
        return self.tested.includes(self.release)

    def __str__(self) -> str:
        return f"{self.tested.package} {self.release}"


def list_installed_versions(tested: tuple[VersionRange, ...] = TESTED) -> list[InstalledVersion]:
    """The installed release of each package; without those that are not installed."""
    versions = []
    for package_range in tested:
        try:
            versions.append(InstalledVersion(version(package_range.package), package_range))
        except PackageNotFoundError:
            continue
    return versions


def list_missing_packages() -> list[str]:
    """The packages of the extra `engine` that are not installed."""
    installed = {release.tested.package for release in list_installed_versions()}
    return [package_range.package for package_range in TESTED if package_range.package not in installed]


def list_mixer_libraries() -> list[str]:
    """The installed ones of MIXER_LIBRARIES."""
    return [name for name in MIXER_LIBRARIES if find_spec(name)]


def find_cuda_obstacle() -> str:
    """Why no process of this machine can have a GPU, without importing torch; "" if nothing is known against it."""
    with suppress(PackageNotFoundError):
        if (release := version("torch")).endswith("+cpu"):
            return f"PyTorch {release} is a build for CPUs"
    nodes = ("nvidia[0-9]*", "dxg", "kfd")  # NVIDIA's, WSL's and AMD's
    if sys.platform == "linux" and not any(next(Path("/dev").glob(node), None) for node in nodes):
        return "this machine has no GPU, or does not show it to this process"
    return ""


def list_untested_versions(tested: tuple[VersionRange, ...] = TESTED) -> list[InstalledVersion]:
    """The installed releases outside of the tested ranges."""
    return [installed for installed in list_installed_versions(tested) if not installed.is_tested]


def install_command(tested: tuple[VersionRange, ...] = TESTED) -> str:
    """A shell command that installs tested releases."""
    return " ".join(["pip install", *(f"'{package_range.requirement}'" for package_range in tested)])


def _minor(release: str) -> tuple[int, int]:
    """Major and minor number; a local or pre-release part does not count."""
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        raise ValueError(f"{release!r} is not a version number")
    return int(match[1]), int(match[2])
