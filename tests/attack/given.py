"""The parameters of an attack from the environment: duration, amount and seed."""

from __future__ import annotations

import os
import time

SECONDS = float(os.environ.get("ATTACK_SECONDS", "60"))
"""For how long processes are killed."""
REQUESTS = int(os.environ.get("ATTACK_REQUESTS", "3000"))
"""How many broken requests are sent."""
SEED = int(os.environ.get("ATTACK_SEED") or time.time())
"""Of everything that is random in an attack."""
