"""The parameters of an attack from the environment: duration, amount and seed."""

from __future__ import annotations

import os
import time

SECONDS = float(os.environ.get("ATTACK_SECONDS", "60"))
"""Duration of the kills."""
REQUESTS = int(os.environ.get("ATTACK_REQUESTS", "3000"))
"""Number of broken requests."""
SEED = int(os.environ.get("ATTACK_SEED") or time.time())
"""Seed of all random choices of an attack."""
