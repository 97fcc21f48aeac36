"""What a package knows beside pyproject.toml: the commit that it is built from, and the address of the project.

- The file `COMMIT`, which `tinsmith --version` prints, holds `BUILD_COMMIT`, or the commit of the checkout, or the
  one in a source archive. Without any, and in editable installations, the file is left out.
- With `PROJECT_URL`, where the repository is shown, the package has that URL, and links and images of the README that
  are relative to the repository become absolute: of the tag `v` VERSION.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

COMMIT_FILES = {"wheel": "tinsmith/COMMIT", "sdist": "COMMIT"}
RELATIVE_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^]]*)\]\((?![a-z]+:|#)(?P<path>[^)]+)\)")


class CommitHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        commit = _read_commit(Path(self.root))
        if not commit or version != "standard":
            return
        path = self._path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit + "\n")
        build_data["force_include"][str(path)] = COMMIT_FILES[self.target_name]

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return Path(self.directory) / f".commit-{self.target_name}"


class AddressHook(MetadataHookInterface):
    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if url := os.environ.get("PROJECT_URL", "").rstrip("/"):
            text = make_links_absolute(text, url, f"v{metadata['version']}")
            metadata["urls"] = {"Homepage": url, "Changelog": f"{url}/blob/v{metadata['version']}/CHANGELOG.md"}
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def make_links_absolute(text: str, url: str, tag: str) -> str:
    """Replace links and images that are relative to the repository by those of a tag of the repository at `url`."""

    def replace(match: re.Match[str]) -> str:
        kind = "raw" if match["image"] else "blob"
        return f"{match['image']}[{match['text']}]({url}/{kind}/{tag}/{match['path']})"

    return RELATIVE_LINK.sub(replace, text)


def _read_commit(root: Path) -> str:
    if commit := os.environ.get("BUILD_COMMIT", ""):
        return commit
    if (archived := root / "COMMIT").exists():
        return archived.read_text().strip()
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
