"""What is to run on a cluster: the roles, how many of each, on what, and with which settings. Values only.

Settings hold secrets (a database's password), so they go to processes as values, on a pipe, and never stand in a
command line, an environment or a log; `repr` leaves them out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tinsmith.cluster.ray.scaling import Rule
from tinsmith.errors import SettingsError

ENGINE, SAMPLER, BATCH_WORKER = "engine", "sampler", "batch-worker"
ROLES = (ENGINE, SAMPLER, BATCH_WORKER)
MOST = 1000


@dataclass(frozen=True, slots=True)
class Resources:
    """What Ray reserves for one process, all on one node."""

    cpus: float = 1.0
    gpus: float = 0.0
    others: Mapping[str, float] = field(default_factory=dict)

    @property
    def bundle(self) -> dict[str, float]:
        return {name: share for name, share in {"CPU": self.cpus, "GPU": self.gpus, **self.others}.items() if share}


@dataclass(frozen=True, slots=True)
class Role:
    rule: Rule
    resources: Resources


@dataclass(frozen=True, slots=True)
class Fleet:
    roles: Mapping[str, Role]
    base_models: tuple[str, ...]
    settings: Mapping[str, object] = field(repr=False)
    signing_key: bytes = field(default=b"", repr=False)
    """The file's, where the secret is no setting."""

    def knowing(self, ray_address: str) -> Fleet:
        """With bulk jobs that may use the cluster, too."""
        return replace(self, settings={**self.settings, "ray_address": self.settings.get("ray_address") or ray_address})

    @property
    def fingerprint(self) -> str:
        """Of what a process is started with: one that has another is to be started anew."""
        given = json.dumps([self.settings, self.signing_key.hex()], sort_keys=True)
        return hashlib.sha256(given.encode()).hexdigest()[:16]


def counts_from(flag: str, text: str) -> tuple[int, int]:
    """`MIN[:MAX]`. Raises SettingsError."""
    least, colon, most = text.partition(":")
    if least.isdecimal() and (most.isdecimal() or not colon):
        minimum, maximum = int(least), int(most or least)
        if minimum <= maximum <= MOST:
            return minimum, maximum
    raise SettingsError(f"{flag} is {text!r}; it must be MIN or MIN:MAX, whole numbers up to {MOST}, as in 1:4")


def others_from(flag: str, given: list[str]) -> dict[str, float]:
    """`NAME=AMOUNT`, each a resource that the nodes of the cluster were given. Raises SettingsError."""
    found: dict[str, float] = {}
    for each in given:
        name, _, amount = each.partition("=")
        try:
            found[name] = float(amount)
        except ValueError:
            raise SettingsError(f"{flag} is {each!r}; it must be NAME=AMOUNT, as in big_memory=1") from None
    return found
