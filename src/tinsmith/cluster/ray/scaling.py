"""The number of processes that each role should have: a pure function of the waiting work, the rules and the time.

A role scales up when more processes were needed throughout the last `up_after_s`, to the minimum needed in that time.
It scales down to the maximum needed in the last `down_after_s`. So a short burst starts no process, and a pause between
steps ends none. A history shorter than its window has no effect.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tinsmith.errors import SettingsError

Depths = Mapping[str, Mapping[str, float]]
"""Waiting work: role -> base model -> tokens or batches. One process serves all base models."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`work_per_process` is the amount that may wait for each process before another process is needed."""

    minimum: int
    maximum: int
    work_per_process: float
    up_after_s: float = 10.0
    down_after_s: float = 300.0

    def __post_init__(self) -> None:
        assert 0 <= self.minimum <= self.maximum and self.work_per_process > 0

    def clamp(self, count: int) -> int:
        return min(max(count, self.minimum), self.maximum)

    def count_for(self, waiting: Mapping[str, float]) -> int:
        """The number of processes for the base model with the most waiting work."""
        return self.clamp(math.ceil(max(waiting.values(), default=0.0) / self.work_per_process))


@dataclass(frozen=True, slots=True)
class Past:
    """The current number of one role's processes, and the (time, needed number) of earlier rounds, oldest first."""

    count: int
    samples: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedCounts:
    counts: Mapping[str, int]
    past: Mapping[str, Past]
    """For the next call of `plan_counts`."""


def plan_counts(depths: Depths, rules: Mapping[str, Rule], past: Mapping[str, Past], now: float) -> PlannedCounts:
    """The wanted numbers. `now` must not decrease. A role without a past starts at its minimum."""
    after = {
        role: _decide(rule, past.get(role, Past(rule.minimum)), rule.count_for(depths.get(role, {})), now)
        for role, rule in rules.items()
    }
    return PlannedCounts({role: decision.count for role, decision in after.items()}, after)


def _decide(rule: Rule, past: Past, target: int, now: float) -> Past:
    samples = (*past.samples, (now, target))
    count = rule.clamp(past.count)
    up_window, down_window = _since(samples, now - rule.up_after_s), _since(samples, now - rule.down_after_s)
    if up_window and min(up_window) > count:
        count = min(up_window)
    elif down_window and max(down_window) < count:
        count = max(down_window)
    return Past(count, _prune(samples, now - max(rule.up_after_s, rule.down_after_s)))


def _since(samples: tuple[tuple[float, int], ...], start: float) -> list[int]:
    """The needed numbers from `start` on; empty if the history begins later."""
    recent = _prune(samples, start)
    return [target for _, target in recent] if recent[0][0] <= start else []


def _prune(samples: tuple[tuple[float, int], ...], start: float) -> tuple[tuple[float, int], ...]:
    """Drop samples before `start`, except the last one, which holds at `start`."""
    first = max((index for index, (at, _) in enumerate(samples) if at <= start), default=0)
    return samples[first:]


ENGINE, SAMPLER, BATCH_WORKER = "engine", "sampler", "batch-worker"
ROLES = (ENGINE, SAMPLER, BATCH_WORKER)
MOST = 1000


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that Ray reserves for one process, on one node, or for an engine's ranks on each of `machines`."""

    cpus: float = 1.0
    gpus: float = 0.0
    custom: Mapping[str, float] = field(default_factory=dict)
    machines: int = 1

    @property
    def bundle(self) -> dict[str, float]:
        return {name: share for name, share in {"CPU": self.cpus, "GPU": self.gpus, **self.custom}.items() if share}


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
    """The key from the data directory, unless the secret is a setting."""

    def with_ray_address(self, ray_address: str) -> Fleet:
        """The fleet with the cluster's address, so that bulk jobs can use it."""
        return replace(self, settings={**self.settings, "ray_address": self.settings.get("ray_address") or ray_address})

    @property
    def fingerprint(self) -> str:
        """A digest of a process's start settings; a process with another one is replaced."""
        text = json.dumps([self.settings, self.signing_key.hex()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def parse_counts(flag: str, text: str) -> tuple[int, int]:
    """Parse `MIN[:MAX]`. Raises SettingsError."""
    lower, colon, upper = text.partition(":")
    if lower.isdecimal() and (upper.isdecimal() or not colon):
        minimum, maximum = int(lower), int(upper or lower)
        if minimum <= maximum <= MOST:
            return minimum, maximum
    raise SettingsError(f"{flag} is {text!r}; it must be MIN or MIN:MAX, integers up to {MOST}, as in 1:4")


def parse_resources(flag: str, texts: list[str]) -> dict[str, float]:
    """Parse `NAME=AMOUNT` texts: custom resources of the cluster's nodes. Raises SettingsError."""
    amounts: dict[str, float] = {}
    for text in texts:
        name, _, amount = text.partition("=")
        try:
            amounts[name] = float(amount)
        except ValueError:
            raise SettingsError(f"{flag} is {text!r}; it must be NAME=AMOUNT, as in big_memory=1") from None
    return amounts
