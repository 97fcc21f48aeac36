"""The number of examples of property tests: in `make test` a few, the same in each run, so that results are
reproducible; in `make test-fuzz` FUZZ_EXAMPLES times as many, new ones in each run.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("FUZZ_EXAMPLES", "0"))


def examples(count: int) -> settings:
    """Decorator of a property with this many examples in `make test`."""
    return settings(max_examples=count * max(TIMES, 1))


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
