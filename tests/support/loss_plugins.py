"""Distributions with losses, installed into a directory as pip would: a module, and metadata with entry points."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "losses" / "example_losses.py"


def install(
    directory: Path, name: str, entries: Mapping[str, str], code: str | Path = EXAMPLE, version: str = "0.1"
) -> None:
    """`entries` maps names of losses to attributes of the module, which is `code`, or a copy of that file."""
    module = code.stem if isinstance(code, Path) else name.replace("-", "_")
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(code, Path):
        shutil.copy(code, directory)
    else:
        (directory / f"{module}.py").write_text(code)
    metadata = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{loss} = {module}:{attribute}" for loss, attribute in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[tinsmith.losses]", *lines, ""]))
