"""History for people to look at: metric curves of runs, some recent samples, and the engines' last steps.

Curves: a point belongs to a model, a source and a step. The server's points are written by the transaction that settles
an optimizer step, with the number of that step; a client logs points at steps of its own, and numbers for the same step
are merged. A run has at most MOST_POINTS points of a source; beyond that KEPT_POINTS remain, evenly over the steps, as
measured and never averaged.

Kept samples: prompts and answers of some recent samples of each tenant. The transaction that settles a sample adds it
and deletes the oldest beyond a limit; the rest is deleted after KEPT_S. Only the dashboard reads them. A sample
continues a conversation if its prompt begins with an earlier prompt and one of its answers.

Recent steps: the last KEPT_STEPS steps of a base model with the tokens of each tenant. An engine writes them about once
a second, best effort: up to 1 s may be lost in a crash.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import orjson
import sqlalchemy as sa
import zstandard

from tinsmith.db.database import Database, now
from tinsmith.db.schema import CURVE_POINTS, FUTURES, KEPT_SAMPLES, RECENT_STEPS
from tinsmith.db.statements import Bound, Statement
from tinsmith.errors import NotFoundError, UserError

MOST_POINTS = 2048
KEPT_POINTS = 1024
MOST_NAMES = 64
"""Metrics of one point."""

OVERLAP_S = 5.0
"""What was recorded so much earlier than the last look may have been committed after it."""

SERVER, CLIENT = "server", "client"


@dataclass(frozen=True, slots=True)
class Point:
    source: str
    step: int
    metrics: Mapping[str, float | None]
    recorded_at: float


class Curves:
    def __init__(self, db: Database) -> None:
        self._db = db
        self._add = Statement(db.insert_once(CURVE_POINTS))

    # The engine's side.

    def known(self, model_id: str) -> tuple[int, int]:
        """How many optimizer steps of a model were done, and how many points the server has of it."""
        steps = sa.select(sa.func.count()).where(
            FUTURES.c.model_id == model_id, FUTURES.c.kind == "optim_step", FUTURES.c.state == "done"
        )
        return self._db.scalar(steps) or 0, self._db.scalar(_count(model_id, SERVER)) or 0

    def recording(self, model_id: str, step: int, metrics: Mapping[str, float]) -> Bound:
        """A statement for the transaction that settles an optimizer step."""
        return Bound(self._add, _row(model_id, SERVER, step, metrics))

    # The server's side.

    def log(self, model_id: str, step: int | None, metrics: Mapping[str, float]) -> int:
        """Record a client's metrics at a step; None is the run's newest optimizer step. Returns the step.

        Raises UserError if the step would have too many metrics.
        """
        with self._db.write() as connection:
            newest = sa.select(sa.func.max(CURVE_POINTS.c.step)).where(_of(model_id, SERVER))
            step = int(connection.scalar(newest) or 0) if step is None else step
            mine = _of(model_id, CLIENT) & (CURVE_POINTS.c.step == step)
            self._add.count(connection, _row(model_id, CLIENT, step, {}))
            found = connection.scalar(sa.select(CURVE_POINTS.c.metrics).where(mine).with_for_update())
            merged = {**(found or {}), **metrics}
            if len(merged) > MOST_NAMES:
                raise UserError(f"step {step} would have {len(merged)} metrics; at most {MOST_NAMES} are kept")
            connection.execute(CURVE_POINTS.update().where(mine).values(metrics=merged, recorded_at=now()))
            if (connection.scalar(_count(model_id, CLIENT)) or 0) > MOST_POINTS:
                ends = sa.select(sa.func.min(CURVE_POINTS.c.step), sa.func.max(CURVE_POINTS.c.step))
                low, high = connection.execute(ends.where(_of(model_id, CLIENT))).one()
                connection.execute(thinning(model_id, CLIENT, low, high))
        return step

    def points(self, model_id: str, after: float = 0.0) -> list[Point]:
        """A run's points in the order of steps; only those recorded after a moment, and some from just before it."""
        columns = [CURVE_POINTS.c[name] for name in Point.__dataclass_fields__]
        query = sa.select(*columns).where(CURVE_POINTS.c.model_id == model_id)
        query = query.where(CURVE_POINTS.c.recorded_at >= after - OVERLAP_S)
        return [Point(*row) for row in self._db.rows(query.order_by(CURVE_POINTS.c.source, CURVE_POINTS.c.step))]

    def newest(self, model_ids: Sequence[str]) -> dict[str, Point]:
        """The server's last point of each of these runs that has one."""
        newest = (
            sa.select(CURVE_POINTS.c.model_id, sa.func.max(CURVE_POINTS.c.step).label("step"))
            .where(CURVE_POINTS.c.model_id.in_(model_ids), CURVE_POINTS.c.source == SERVER)
            .group_by(CURVE_POINTS.c.model_id)
            .subquery()
        )
        same = (CURVE_POINTS.c.model_id == newest.c.model_id) & (CURVE_POINTS.c.step == newest.c.step)
        query = sa.select(CURVE_POINTS).join(newest, same).where(CURVE_POINTS.c.source == SERVER)
        return {row.model_id: Point(row.source, row.step, row.metrics, row.recorded_at) for row in self._db.rows(query)}


def thinning(model_id: str, source: str, low: int, high: int) -> sa.Executable:
    """A statement that leaves about KEPT_POINTS of a run's points, the last of each stretch of steps."""
    width = max(1, math.ceil((high - low + 1) / KEPT_POINTS))
    all_points = CURVE_POINTS.alias("all_points")
    mine = (all_points.c.model_id == model_id) & (all_points.c.source == source)
    stretch = (all_points.c.step - low) // sa.literal(width, sa.BigInteger)
    kept = sa.select(sa.func.max(all_points.c.step)).where(mine).group_by(stretch)
    return CURVE_POINTS.delete().where(_of(model_id, source), CURVE_POINTS.c.step.not_in(kept))


def _of(model_id: str, source: str) -> sa.ColumnElement[bool]:
    return (CURVE_POINTS.c.model_id == model_id) & (CURVE_POINTS.c.source == source)


def _count(model_id: str, source: str) -> sa.Select:
    return sa.select(sa.func.count()).select_from(CURVE_POINTS).where(_of(model_id, source))


def _row(model_id: str, source: str, step: int, metrics: Mapping[str, float]) -> dict[str, object]:
    # JSON has no infinity: what is not finite is there, and is null.
    shown = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return {"model_id": model_id, "source": source, "step": step, "metrics": json.dumps(shown), "recorded_at": now()}


KEPT_S = 86400.0
MOST_PROMPT_TOKENS = 8192
"""Of a longer prompt the end is kept."""

MOST_SEQUENCES = 8
MOST_SEQUENCE_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class KeptSequence:
    tokens: Sequence[int]
    logprobs: Sequence[float | None]
    stop_reason: str


@dataclass(frozen=True, slots=True)
class SampleContent:
    """`prompt_cut` tokens at the beginning of the prompt were not kept."""

    prompt: Sequence[int]
    prompt_cut: int
    params: Mapping[str, object]
    sequences: Sequence[KeptSequence]


@dataclass(frozen=True, slots=True)
class KeptSample:
    """A sample without its content."""

    request_id: str
    tenant_id: str
    session_id: str
    base_model: str
    weights: str | None
    prompt_tokens: int
    sampled_tokens: int
    num_sequences: int
    created_at: float


_OTHERS = KEPT_SAMPLES.alias("others")
_OLDEST_KEPT = (
    sa.select(_OTHERS.c.position)
    .where(_OTHERS.c.tenant_id == sa.bindparam("tenant_id"))
    .order_by(_OTHERS.c.position.desc())
    .offset(sa.bindparam("newer", type_=sa.Integer))
    .limit(1)
)
_ADD = Statement(KEPT_SAMPLES.insert())
_THIN = Statement(
    KEPT_SAMPLES.delete().where(
        KEPT_SAMPLES.c.tenant_id == sa.bindparam("tenant_id"),
        KEPT_SAMPLES.c.position < _OLDEST_KEPT.scalar_subquery(),
    )
)
_COLUMNS = [KEPT_SAMPLES.c[name] for name in KeptSample.__dataclass_fields__]


class KeptSamples:
    def __init__(self, db: Database) -> None:
        self._db = db

    def page(
        self, tenant_id: str, limit: int, offset: int, search: str = ""
    ) -> tuple[list[tuple[KeptSample, SampleContent]], int]:
        """The tenant's kept samples, newest first, and how many there are; `search` is a part of an id or a name."""
        mine = KEPT_SAMPLES.c.tenant_id == tenant_id
        if search:
            named = sa.func.coalesce(KEPT_SAMPLES.c.weights, KEPT_SAMPLES.c.base_model)
            mine &= named.contains(search, autoescape=True) | KEPT_SAMPLES.c.request_id.contains(
                search, autoescape=True
            )
        query = sa.select(*_COLUMNS, KEPT_SAMPLES.c.content).where(mine).order_by(KEPT_SAMPLES.c.position.desc())
        rows, total = self._db.page(query, limit, offset)
        return [(KeptSample(*facts), _read(packed)) for *facts, packed in rows], total

    def get(self, tenant_id: str, request_id: str) -> tuple[KeptSample, SampleContent]:
        mine = (KEPT_SAMPLES.c.tenant_id == tenant_id) & (KEPT_SAMPLES.c.request_id == request_id)
        query = sa.select(*_COLUMNS, KEPT_SAMPLES.c.content).where(mine)
        row = self._db.first(query.order_by(KEPT_SAMPLES.c.position.desc()))
        if row is None:
            raise NotFoundError(f"no sample {request_id!r} is kept; only some recent ones are")
        *facts, packed = row
        return KeptSample(*facts), _read(packed)

    def turns_before(self, sample: KeptSample, content: SampleContent) -> list[str]:
        """The kept samples of the same session that came before this one in a conversation, oldest first."""
        mine = (KEPT_SAMPLES.c.tenant_id == sample.tenant_id) & (KEPT_SAMPLES.c.session_id == sample.session_id)
        shorter = KEPT_SAMPLES.c.prompt_tokens < sample.prompt_tokens
        query = sa.select(KEPT_SAMPLES.c.request_id, KEPT_SAMPLES.c.content).where(mine, shorter)
        if content.prompt_cut:
            return []
        rows = self._db.rows(query.order_by(KEPT_SAMPLES.c.prompt_tokens))
        prompt = list(content.prompt)
        return [row.request_id for row in rows if _leads_to(_read(row.content), prompt)]

    def sweep(self, before: float) -> int:
        """Forget what is older; returns how many that was."""
        return self._db.execute(KEPT_SAMPLES.delete().where(KEPT_SAMPLES.c.created_at < before))


def keeping(sample: KeptSample, content: SampleContent, most: int) -> list[Bound]:
    """Statements for the transaction that settles the sample; the tenant has at most `most` afterwards."""
    packed = zstandard.ZstdCompressor(level=1).compress(orjson.dumps(content))
    return [
        Bound(_ADD, {**asdict(sample), "content": packed}),
        Bound(_THIN, {"tenant_id": sample.tenant_id, "newer": most - 1}),
    ]


def new_sample(request_id: str, tenant_id: str, session_id: str, base_model: str, weights: str | None) -> KeptSample:
    """A sample that has begun."""
    return KeptSample(request_id, tenant_id, session_id, base_model, weights, 0, 0, 0, now())


def _read(content: bytes) -> SampleContent:
    found = orjson.loads(zstandard.ZstdDecompressor().decompress(content))
    sequences = [KeptSequence(**one) for one in found["sequences"]]
    return SampleContent(found["prompt"], found["prompt_cut"], found["params"], sequences)


def _leads_to(earlier: SampleContent, prompt: Sequence[int]) -> bool:
    if earlier.prompt_cut:
        return False
    for sequence in earlier.sequences:
        whole = [*earlier.prompt, *sequence.tokens]
        if len(whole) < len(prompt) and list(prompt[: len(whole)]) == whole:
            return True
        # The token that ended an answer may be written in another way in the next prompt.
        if len(sequence.tokens) > 1 and list(prompt[: len(whole) - 1]) == whole[:-1]:
            return True
    return False


KEPT_STEPS = 200

Shares = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class RecentStep:
    """`shares` are the tokens of its passes: tenant_id -> model_id -> tokens."""

    ended_at: float
    duration_s: float
    num_passes: int
    num_optim_steps: int
    num_singles: int
    num_tokens: int
    shares: Shares


_STEP_COLUMNS = [RECENT_STEPS.c[name] for name in RecentStep.__dataclass_fields__]


def _values(step: RecentStep) -> dict[str, object]:
    return {name: getattr(step, name) for name in RecentStep.__dataclass_fields__}  # asdict copies all that is in it


class RecentSteps:
    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, base_model: str, steps: Sequence[RecentStep]) -> None:
        mine = RECENT_STEPS.c.base_model == base_model
        others = RECENT_STEPS.alias("others")
        oldest_kept = (
            sa.select(others.c.position)
            .where(others.c.base_model == base_model)
            .order_by(others.c.position.desc())
            .offset(KEPT_STEPS - 1)
            .limit(1)
        ).scalar_subquery()
        with self._db.write() as connection:
            connection.execute(RECENT_STEPS.insert(), [{"base_model": base_model, **_values(step)} for step in steps])
            connection.execute(RECENT_STEPS.delete().where(mine, RECENT_STEPS.c.position < oldest_kept))

    def newest(self, base_model: str, limit: int = KEPT_STEPS) -> list[tuple[int, RecentStep]]:
        """The newest steps of a base model with their positions, newest first."""
        query = sa.select(RECENT_STEPS.c.position, *_STEP_COLUMNS).where(RECENT_STEPS.c.base_model == base_model)
        query = query.order_by(RECENT_STEPS.c.position.desc()).limit(limit)
        return [(position, RecentStep(*values)) for position, *values in self._db.rows(query)]
