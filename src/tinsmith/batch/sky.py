"""Code that was written for `sky.batch`, by changing one import: `from tinsmith.batch import sky` for `import sky`.

The names are those of `tinsmith.batch`; docs/batch.md says what each one does here. Where SkyPilot is not installed,
importing this module makes it known as `sky` in this process, so that a function which imports `sky.batch` itself runs
as it is; its payload says so to workers (`functions.py`). An installed SkyPilot is never hidden.
"""

from __future__ import annotations

import importlib.util
import sys

from tinsmith import batch
from tinsmith.batch import load, remote_function, save_results

__all__ = ["batch", "load", "remote_function", "save_results"]


def _make_known() -> None:
    if "sky" not in sys.modules and importlib.util.find_spec("sky") is None:
        sys.modules["sky"] = sys.modules[__name__]
        sys.modules["sky.batch"] = batch


_make_known()
