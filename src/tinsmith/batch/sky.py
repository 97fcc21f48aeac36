"""Runs code written for `sky.batch` after one changed import: `from tinsmith.batch import sky` for `import sky`.

The names are those of `tinsmith.batch`; docs/batch.md lists the differences. Unless SkyPilot is installed, importing
this module registers it as `sky` in this process, so that a function which imports `sky.batch` itself runs unchanged;
its payload tells workers to do the same (`functions.py`). An installed SkyPilot is never hidden.
"""

from __future__ import annotations

import importlib.util
import sys

from tinsmith import batch
from tinsmith.batch import load, remote_function, save_results

__all__ = ["batch", "load", "remote_function", "save_results"]


if "sky" not in sys.modules and importlib.util.find_spec("sky") is None:
    sys.modules["sky"] = sys.modules[__name__]
    sys.modules["sky.batch"] = batch
