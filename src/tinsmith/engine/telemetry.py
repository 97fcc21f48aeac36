"""What an engine tells of its work for people to look at: curves of runs, recent steps, some samples.

What passes say of their losses is gathered in memory until the optimizer step that uses it, and written by the
transaction that settles that step: one row more, and no transaction. So the first point after an engine's death tells
of the passes since then. Samples are kept within a rate for each tenant, so that a burst of them costs next to nothing.
Steps are written about once a second. Whatever fails here fails nothing else.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.db.database import Database, now
from tinsmith.db.statements import Bound, Effect
from tinsmith.engine.scheduler import Step
from tinsmith.losses import token_weight
from tinsmith.store.history import KEPT_POINTS, MOST_NAMES, MOST_POINTS, SERVER, Curves, thinning
from tinsmith.store.kept_samples import (
    MOST_PROMPT_TOKENS,
    MOST_SEQUENCE_TOKENS,
    MOST_SEQUENCES,
    KeptSample,
    KeptSequence,
    SampleContent,
    keeping,
    new_sample,
)
from tinsmith.store.recent_steps import KEPT_STEPS, RecentStep, RecentSteps
from tinsmith.store.sampling_sessions import SamplingSession
from tinsmith.types import OptimStep, Pass, PassResult, Pending, Sample, SampledSequence, SampleResult

MOST_RUNS = 10_000
"""Runs whose gathered metrics are remembered; the least recently used is forgotten first."""

MOST_NAMED_MODELS = 64
"""Models whose share of a step is kept by name; that of the others is their tenant's."""

SAMPLES_PER_S = 2.0
BURST_OF_SAMPLES = 32.0
"""How fast samples of one tenant are kept: so many at once, and then so many a second."""

WHOLE_AFTER_S = BURST_OF_SAMPLES / SAMPLES_PER_S
"""After so long without a sample a tenant has its whole burst again."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Mean:
    total: float = 0.0
    weight: float = 0.0


@dataclass(slots=True)
class _Gathered:
    """The metrics of passes of one kind since the last optimizer step, put together as the SDK does for its chunks.

    Beside them the mean loss: per token, or per datum where a loss is no sum over tokens (losses.token_weight).
    """

    sums: dict[str, float] = field(default_factory=dict)
    means: dict[str, _Mean] = field(default_factory=dict)
    extremes: dict[str, float] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, float], num_data: int, tokens: float | None) -> None:
        """`tokens` is the pass's losses.token_weight."""
        if "loss:sum" in metrics:
            name, weight = ("loss_per_datum", num_data) if tokens is None else ("loss_per_token", tokens)
            loss = self.means.setdefault(name, _Mean())
            loss.total += metrics["loss:sum"]
            loss.weight += weight
        for name, value in metrics.items():
            reduction = name.rpartition(":")[2]
            if reduction == "sum":
                self.sums[name] = self.sums.get(name, 0.0) + value
            elif reduction == "mean":
                mean = self.means.setdefault(name, _Mean())
                mean.total += value * num_data
                mean.weight += num_data
            elif reduction in ("max", "min"):
                choose = max if reduction == "max" else min
                self.extremes[name] = choose(value, self.extremes.get(name, value))

    def metrics(self) -> dict[str, float]:
        found = dict(self.sums)
        found |= {name: mean.total / mean.weight for name, mean in self.means.items() if mean.weight}
        return found | self.extremes


@dataclass(slots=True)
class _Run:
    """`steps` optimizer steps were done, and `points` of them have a row."""

    steps: int
    points: int
    passes: _Gathered = field(default_factory=_Gathered)
    forwards: _Gathered = field(default_factory=_Gathered)
    stepped_at: float | None = None


@dataclass(slots=True)
class _Allowance:
    samples: float
    at: float


@dataclass(frozen=True, slots=True)
class BegunSample:
    """A sample that will be kept when it is done."""

    sample: KeptSample
    asked: Sample


class Records:
    """The durable parts that are written to, and how many samples of each tenant are kept; none if it is 0."""

    def __init__(self, db: Database, kept_samples: int) -> None:
        self.curves = Curves(db)
        self.recent_steps = RecentSteps(db)
        self.kept_samples = kept_samples


class Recorder:
    """Of training. Without records it does nothing."""

    def __init__(self, base_model: str, records: Records | None) -> None:
        self._base_model = base_model
        self._records = records
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._steps: list[RecentStep] = []

    # Curves.

    def passed(self, request: Pending, pass_: Pass, result: PassResult) -> None:
        if (run := self._run(request.model_id)) is not None:
            gathered = run.forwards if request.kind == "forward" else run.passes
            gathered.add(result.metrics, len(result.logprobs), token_weight(pass_))

    def stepped(self, request: Pending, step: OptimStep, metrics: Mapping[str, float]) -> list[Effect]:
        """Statements for the transaction that settles an optimizer step."""
        run = self._run(request.model_id)
        if run is None or request.model_id is None or self._records is None:
            return []
        moment = time.monotonic()
        passed, forward = run.passes.metrics(), run.forwards.metrics()
        point = {"learning_rate": step.params.learning_rate, **passed}
        point |= {name: value for name, value in metrics.items() if name != "step"}
        if run.stepped_at is not None and moment > run.stepped_at:
            point["step_seconds"] = moment - run.stepped_at
            point["tokens_per_second"] = passed.get("tokens:sum", 0.0) / point["step_seconds"]
        point |= {f"forward/{name}": value for name, value in forward.items()}
        run.passes, run.forwards, run.stepped_at = _Gathered(), _Gathered(), moment
        run.steps += 1
        run.points += 1
        point = dict(list(point.items())[:MOST_NAMES])
        statements: list[Effect] = [self._records.curves.recording(request.model_id, run.steps, point)]
        if run.points > MOST_POINTS:
            statements.append(thinning(request.model_id, SERVER, 0, run.steps))
            run.points = KEPT_POINTS
        return statements

    def forget(self, model_id: str) -> None:
        self._runs.pop(model_id, None)

    def _run(self, model_id: str | None) -> _Run | None:
        if model_id is None or self._records is None:
            return None
        run = self._runs.get(model_id)
        if run is None:
            try:
                run = _Run(*self._records.curves.known(model_id))
            except SQLAlchemyError as error:
                log.warning("the curves of a run cannot be read", model_id=model_id, error=repr(error))
                return None
            self._runs[model_id] = run
            if len(self._runs) > MOST_RUNS:
                self._runs.popitem(last=False)
        self._runs.move_to_end(model_id)
        return run

    # Steps.

    def ran(self, step: Step, duration_s: float) -> None:
        shares: dict[str, dict[str, int]] = {}
        named: set[str] = set()
        for request in step.passes:
            model_id = request.model_id or ""
            if model_id not in named and len(named) >= MOST_NAMED_MODELS:
                model_id = ""
            named.add(model_id)
            of_tenant = shares.setdefault(request.tenant_id, {})
            of_tenant[model_id] = of_tenant.get(model_id, 0) + request.num_tokens
        for request in (*step.optim_steps, *step.singles):
            shares.setdefault(request.tenant_id, {})
        num_tokens = sum(request.num_tokens for request in step.passes)
        sizes = len(step.passes), len(step.optim_steps), len(step.singles)
        self._steps.append(RecentStep(now(), duration_s, *sizes, num_tokens, shares))
        del self._steps[:-KEPT_STEPS]

    def flush(self) -> None:
        """Write the steps that were noted."""
        if not self._steps or self._records is None:
            return
        steps, self._steps = self._steps, []
        try:
            self._records.recent_steps.add(self._base_model, steps)
        except SQLAlchemyError as error:
            log.warning("what was run lately could not be recorded", error=repr(error))


class SampleKeeper:
    """Of samples. Without records it keeps none."""

    def __init__(self, records: Records | None) -> None:
        self._most = records.kept_samples if records else 0
        self._allowances: OrderedDict[str, _Allowance] = OrderedDict()  # the least recently used first

    def begin(self, request: Pending, sampler: SamplingSession, asked: Sample) -> BegunSample | None:
        """A sample that is to be kept; None if it is one of too many."""
        if not self._most or not self._allowed(request.tenant_id):
            return None
        weights = sampler.model_path or sampler.version_id
        sample = new_sample(request.request_id, request.tenant_id, request.session_id, sampler.base_model, weights)
        return BegunSample(sample, asked)

    def kept(self, begun: BegunSample, result: SampleResult) -> list[Bound]:
        """Statements for the transaction that settles the sample."""
        asked, sequences = begun.asked, result.sequences
        content = SampleContent(
            prompt=asked.prompt_T[-MOST_PROMPT_TOKENS:].tolist(),
            prompt_cut=max(0, len(asked.prompt_T) - MOST_PROMPT_TOKENS),
            params={
                name: getattr(asked.params, name) for name in ("max_tokens", "seed", "temperature", "top_k", "top_p")
            },
            sequences=[_kept_sequence(sequence) for sequence in sequences[:MOST_SEQUENCES]],
        )
        sample = replace(
            begun.sample,
            prompt_tokens=len(asked.prompt_T),
            sampled_tokens=sum(len(sequence.tokens_T) for sequence in sequences),
            num_sequences=len(sequences),
        )
        return keeping(sample, content, self._most)

    def _allowed(self, tenant_id: str) -> bool:
        moment = time.monotonic()
        allowance = self._allowances.setdefault(tenant_id, _Allowance(BURST_OF_SAMPLES, moment))
        grown = allowance.samples + SAMPLES_PER_S * (moment - allowance.at)
        allowance.samples, allowance.at = min(BURST_OF_SAMPLES, grown), moment
        self._allowances.move_to_end(tenant_id)
        while moment - next(iter(self._allowances.values())).at >= WHOLE_AFTER_S:  # as good as new
            self._allowances.popitem(last=False)
        if allowance.samples < 1:
            return False
        allowance.samples -= 1
        return True


def _kept_sequence(sequence: SampledSequence) -> KeptSequence:
    logprobs = np.round(sequence.logprobs_T[:MOST_SEQUENCE_TOKENS].astype(np.float64), 6)
    shown: Sequence[float | None] = logprobs.tolist()
    if not np.isfinite(logprobs).all():
        shown = [value if math.isfinite(value) else None for value in logprobs.tolist()]
    return KeptSequence(sequence.tokens_T[:MOST_SEQUENCE_TOKENS].tolist(), shown, sequence.stop_reason)
