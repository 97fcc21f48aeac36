"""The number of examples of property tests: in `make test` half of what a property names, the same in each run, so that
results are reproducible; in `make test-fuzz` FUZZ_EXAMPLES times what it names, new ones in each run.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("FUZZ_EXAMPLES", "0"))


def examples(count: int) -> settings:
    """Decorator of a property that names this many examples."""
    return settings(max_examples=count * TIMES or (count + 1) // 2)


def load_profile() -> None:
    """Load the profile before any property is defined, since properties extend it."""
    # No deadline, because machines may be busy.
    settings.register_profile(
        "any machine",
        examples(100),
        deadline=None,
        derandomize=not TIMES,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("any machine")
