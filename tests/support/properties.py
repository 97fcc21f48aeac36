"""How many examples a property gets, and which: in `make test` a few, the same in each run, so that nothing fails by
the luck of a draw; in `make test-fuzz` FUZZ_EXAMPLES times as many, new ones in each run.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("FUZZ_EXAMPLES", "0"))


def examples(number: int) -> settings:
    """What decorates a property of which `make test` tries this many examples."""
    return settings(max_examples=number * max(TIMES, 1))


def load_profile() -> None:
    """Before any property is defined: what it says of itself is added to this."""
    # A property holds or not, however long a busy machine takes to find out.
    settings.register_profile(
        "any machine",
        examples(100),
        deadline=None,
        derandomize=not TIMES,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("any machine")
