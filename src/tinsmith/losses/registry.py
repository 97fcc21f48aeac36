"""The registry of losses: those of the wire, and plug-ins of installed distributions.

A distribution adds a loss with an entry point of the group `tinsmith.losses`, whose name clients send as `loss_fn` and
whose value is a `Loss`. Every process reads the entry points of its own installation once; a server, its engines and
the ranks of an engine need the same ones. A plug-in that cannot be loaded, or contradicts itself, raises SettingsError,
which ends the start of a process. Uses no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from tinsmith.errors import SettingsError
from tinsmith.losses import formulas
from tinsmith.losses.formulas import SEQUENCE_COUNT, Formula

GROUP = "tinsmith.losses"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

CLIP_LOW = "clip_low_threshold"
CLIP_HIGH = "clip_high_threshold"
DUAL_CLIP = "dual_clip_threshold"
RATIO_MASK = "sequence_ratio_mask"
ROLLOUT_LOGPROBS, ROLLOUT_MAX = "rollout_logprobs", "rollout_ratio_max"
"""Extensions of the wire's losses that Tinker does not have."""

COLUMN_INPUTS = ("target_tokens", "logprobs", CLIP_LOW, CLIP_HIGH, RATIO_MASK, ROLLOUT_LOGPROBS)
"""Inputs with a meaning of their own, which a formula does not read from `Columns.inputs`."""


@dataclass(frozen=True, slots=True)
class Loss:
    """`required` and `optional` inputs are per position; `config` maps each key to its default.

    `weight` is the input that is 0 where a position adds nothing; None: every position counts. `defaults` has the value
    of each optional input of a plug-in where a datum lacks it. `ranges` bounds the keys of `config` that may be
    negative, or are bounded above; the others are at least 0.
    """

    formula: Formula
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    config: Mapping[str, float] = field(default_factory=dict)
    weight: str | None = "advantages"
    defaults: Mapping[str, float] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    many_targets: bool = False  # target_tokens may be [N, K]
    elementwise: bool = False  # the result has each pair's loss (`elementwise_cross_entropy`)
    sequence_ratio: bool = False  # the formula reads the mean log ratio of the whole sequence
    recorded_sequences: bool = False  # data must consist of sequences sampled in the session
    custom: bool = False  # a client's graph computes the loss; the formula differentiates its result
    constant_metrics: Mapping[str, float] = field(default_factory=dict)
    name: str = ""  # of a plug-in, and the distribution that it is from; the registry sets both
    distribution: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)

    @property
    def extra_inputs(self) -> tuple[str, ...]:
        """The inputs that the formula reads from `Columns.inputs`."""
        return tuple(name for name in self.inputs if name not in (*COLUMN_INPUTS, self.weight))

    @property
    def is_policy(self) -> bool:
        """Whether its weights are advantages, and metrics show how far the policy has moved."""
        return {"advantages", "logprobs"} <= set(self.required)


_POLICY = ("target_tokens", "logprobs", "advantages")
_CLIPS = (CLIP_LOW, CLIP_HIGH)
_ROLLOUT = {ROLLOUT_MAX: 2.0}

LOSSES: Mapping[str, Loss] = {
    # Without weights every target counts once.
    "cross_entropy": Loss(
        formulas.cross_entropy,
        ("target_tokens",),
        ("weights",),
        weight="weights",
        many_targets=True,
        elementwise=True,
    ),
    "importance_sampling": Loss(formulas.importance_sampling, _POLICY, (ROLLOUT_LOGPROBS,), _ROLLOUT),
    # Bounds of the ratio, not distances from 1 (tinker's documentation of ppo and cispo).
    "ppo": Loss(
        formulas.ppo, _POLICY, (*_CLIPS, ROLLOUT_LOGPROBS), {CLIP_LOW: 0.8, CLIP_HIGH: 1.2, DUAL_CLIP: 0.0, **_ROLLOUT}
    ),
    "cispo": Loss(formulas.cispo, _POLICY, (*_CLIPS, ROLLOUT_LOGPROBS), {CLIP_LOW: 0.0, CLIP_HIGH: 4.0, **_ROLLOUT}),
    # The value of the documentation's example, the only published one.
    "dro": Loss(formulas.dro, _POLICY, (), {"beta": 0.05}),
    # arXiv 2507.18071, section 5.1: left 3e-4, right 4e-4.
    "gspo": Loss(
        formulas.gspo,
        _POLICY,
        (RATIO_MASK, *_CLIPS, ROLLOUT_LOGPROBS),
        {CLIP_LOW: 1 - 3e-4, CLIP_HIGH: 1 + 4e-4, **_ROLLOUT},
        sequence_ratio=True,
    ),
    # Its formula is not published; docs/losses.md describes the approximation.
    "stable_reinforce": Loss(
        formulas.stable_reinforce,
        _POLICY,
        (),
        {"kl_coeff": 0.0},
        recorded_sequences=True,
        constant_metrics={"stable_reinforce_approximation:max": 1.0},
    ),
    # The client defines further inputs. The negative gradient replaces the weights.
    "custom": Loss(formulas.cross_entropy, ("target_tokens",), weight=None, many_targets=True, custom=True),
}
"""The losses of the wire."""


@cache
def loss_registry() -> Mapping[str, Loss]:
    """Return every loss of this installation by name. Raises SettingsError for a plug-in that cannot be used."""
    registry = dict(LOSSES)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, _describe_distribution(entry))):
        distribution = _describe_distribution(entry)
        if entry.name in LOSSES:
            raise SettingsError(
                f"{distribution} has a loss {entry.name!r}, which is the name of a built-in one; rename its entry point"
            )
        if entry.name in registry:
            raise SettingsError(
                f"{registry[entry.name].distribution} and {distribution} both have a loss {entry.name!r}; "
                "uninstall one of them"
            )
        registry[entry.name] = _load(entry, distribution)
    return registry


def list_plugins() -> list[Loss]:
    """Return the plug-ins of this installation. Raises SettingsError for one that cannot be used."""
    return [loss for loss in loss_registry().values() if loss.distribution]


def _describe_distribution(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"


def _load(entry: EntryPoint, distribution: str) -> Loss:
    origin = f"the loss {entry.name!r} ({entry.value}) of {distribution}"
    try:
        loss = entry.load()
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise SettingsError(
            f"{origin} cannot be loaded: {type(error).__name__}: {first_line}; repair or uninstall it"
        ) from error
    if not isinstance(loss, Loss):
        raise SettingsError(f"{origin} is a {type(loss).__name__}; it must be a tinsmith.losses.Loss")
    if not NAME.fullmatch(entry.name):
        raise SettingsError(f"{origin}: its name may have up to 64 letters, digits, '_', '-' and '.'")
    for holds, problem in _problems(loss):
        if holds:
            raise SettingsError(f"{origin}: {problem}")
    return replace(loss, name=entry.name, distribution=distribution)


def _problems(loss: Loss) -> list[tuple[bool, str]]:
    """What must not hold of a plug-in, and how to repair it."""
    inputs, clips = loss.inputs, {CLIP_LOW, CLIP_HIGH}
    without_default = sorted({*loss.optional} - {*COLUMN_INPUTS, loss.weight} - loss.defaults.keys())
    outside = [key for key, value in loss.config.items() if not _is_within(value, loss.ranges.get(key, (0, math.inf)))]
    return [
        (not callable(loss.formula), "formula must be a function of Columns and a configuration"),
        (loss.required[:1] != ("target_tokens",), "the first of required must be 'target_tokens'"),
        (len(set(inputs)) < len(inputs), "an input is named twice"),
        (SEQUENCE_COUNT in inputs, f"no input may have the name {SEQUENCE_COUNT!r}"),
        (
            loss.weight is not None and loss.weight not in inputs[1:],
            f"weight is {loss.weight!r}, which is none of its inputs; name one, or None if every position counts",
        ),
        (bool(without_default), f"defaults has no value for {', '.join(without_default)}"),
        (not all(map(math.isfinite, loss.defaults.values())), "each of defaults must be finite"),
        (bool(outside), f"the default of {', '.join(outside)} is not in its range, which is 0 and more without ranges"),
        (bool(loss.ranges.keys() - loss.config.keys()), "ranges has a key that config does not have"),
        (
            len(clips & loss.config.keys()) == 1 or (bool(clips & {*inputs}) and not clips <= loss.config.keys()),
            f"config needs both {CLIP_LOW} and {CLIP_HIGH}",
        ),
        (ROLLOUT_LOGPROBS in inputs and ROLLOUT_MAX not in loss.config, f"config needs {ROLLOUT_MAX}"),
        (ROLLOUT_LOGPROBS in inputs and not loss.is_policy, f"{ROLLOUT_LOGPROBS} needs logprobs and advantages"),
        (RATIO_MASK in inputs and not loss.sequence_ratio, f"{RATIO_MASK} needs sequence_ratio"),
        (
            loss.custom or loss.elementwise or loss.recorded_sequences,
            "custom, elementwise and recorded_sequences are for built-in losses",
        ),
        (any(name.count(":") != 1 for name in loss.constant_metrics), "constant metrics need a suffix such as ':max'"),
    ]


def _is_within(value: float, bounds: tuple[float, float]) -> bool:
    return math.isfinite(value) and bounds[0] <= value <= bounds[1]
