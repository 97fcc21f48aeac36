"""History for the dashboard: metric curves of runs, recent samples, and the last steps of engines.

Curves: a point belongs to a model, a source and a step. The transaction that settles an optimizer step writes the
server's point with the number of that step. A client logs points at its own steps; metrics of the same step are merged.
A run has at most MAX_POINTS points per source. Beyond that, KEPT_POINTS of them, evenly spaced, are kept unaveraged.

Kept samples: prompts and answers of recent samples of each tenant. The transaction that settles a sample adds it and
deletes the oldest beyond a limit; all are deleted after RETENTION_S. Only the dashboard reads them. A sample continues
a conversation if its prompt begins with an earlier prompt and one of its answers. Each kept answer has its own row,
found by the digest of all its tokens, which records training on it and the client's reward.

Recent steps: the last KEPT_STEPS steps of a base model with the tokens of each tenant. An engine writes them about once
a second, best effort: up to 1 s may be lost in a crash.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import orjson
import sqlalchemy as sa
import zstandard

from tinsmith.db.database import Database, now
from tinsmith.db.schema import CURVE_POINTS, FUTURES, KEPT_ANSWERS, KEPT_SAMPLES, RECENT_STEPS
from tinsmith.db.statements import Bound, Effect, Statement
from tinsmith.errors import NotFoundError, UserError
from tinsmith.types import F32

MAX_POINTS = 2048
KEPT_POINTS = 1024
MAX_NAMES = 128
"""Most metrics of one point."""

OVERLAP_S = 5.0
"""A point may be committed up to this long after its recorded time, so each read goes back this far."""

SERVER, CLIENT = "server", "client"


@dataclass(frozen=True, slots=True)
class Point:
    source: str
    step: int
    metrics: Mapping[str, float | None]
    recorded_at: float


@dataclass(frozen=True, slots=True)
class Outline:
    """A few values of one metric of a run."""

    name: str
    values: Sequence[float]


class Curves:
    def __init__(self, db: Database) -> None:
        self._db = db
        self._add = Statement(db.insert_once(CURVE_POINTS))

    # Methods for the engine.

    def count_steps_and_points(self, model_id: str) -> tuple[int, int]:
        """Count a model's completed optimizer steps and its points from the server."""
        steps = sa.select(sa.func.count()).where(
            FUTURES.c.model_id == model_id, FUTURES.c.kind == "optim_step", FUTURES.c.state == "done"
        )
        return self._db.scalar(steps) or 0, self._db.scalar(_count(model_id, SERVER)) or 0

    def step_statement(self, model_id: str, step: int, metrics: Mapping[str, float]) -> Bound:
        """A statement for the transaction that settles an optimizer step."""
        return Bound(self._add, _row(model_id, SERVER, step, metrics))

    # Methods for the server.

    def log(self, model_id: str, step: int | None, metrics: Mapping[str, float]) -> int:
        """Record a client's metrics at one step, as `log_points` does. Returns the step."""
        return self.log_points(model_id, [(step, metrics)])

    def log_points(self, model_id: str, points: Sequence[tuple[int | None, Mapping[str, float]]]) -> int:
        """Record a client's metrics by step; None is the run's newest optimizer step. Returns the last point's step.

        Atomic and idempotent. Raises UserError if a step would have too many metrics.
        """
        with self._db.write() as connection:
            newest = sa.select(sa.func.max(CURVE_POINTS.c.step)).where(_of(model_id, SERVER))
            default = int(connection.scalar(newest) or 0) if any(step is None for step, _ in points) else 0
            merged: dict[int, dict[str, float]] = {}
            for given_step, metrics in points:
                merged.setdefault(default if given_step is None else given_step, {}).update(metrics)
            for step, metrics in sorted(merged.items()):
                _merge(connection, self._add, model_id, step, metrics)
            if (connection.scalar(_count(model_id, CLIENT)) or 0) > MAX_POINTS:
                ends = sa.select(sa.func.min(CURVE_POINTS.c.step), sa.func.max(CURVE_POINTS.c.step))
                low, high = connection.execute(ends.where(_of(model_id, CLIENT))).one()
                connection.execute(thin_points(model_id, CLIENT, low, high))
        last = points[-1][0]
        return default if last is None else last

    def points(self, model_id: str, after: float = 0.0) -> list[Point]:
        """A run's points in the order of steps: those recorded after `after`, and up to OVERLAP_S before it."""
        columns = [CURVE_POINTS.c[name] for name in Point.__dataclass_fields__]
        query = sa.select(*columns).where(CURVE_POINTS.c.model_id == model_id)
        query = query.where(CURVE_POINTS.c.recorded_at >= after - OVERLAP_S)
        return [Point(*row) for row in self._db.rows(query.order_by(CURVE_POINTS.c.source, CURVE_POINTS.c.step))]

    def newest(self, model_ids: Sequence[str]) -> dict[str, Point]:
        """The server's last point of each run that has points."""
        newest = (
            sa.select(CURVE_POINTS.c.model_id, sa.func.max(CURVE_POINTS.c.step).label("step"))
            .where(CURVE_POINTS.c.model_id.in_(model_ids), CURVE_POINTS.c.source == SERVER)
            .group_by(CURVE_POINTS.c.model_id)
            .subquery()
        )
        is_newest = (CURVE_POINTS.c.model_id == newest.c.model_id) & (CURVE_POINTS.c.step == newest.c.step)
        query = sa.select(CURVE_POINTS).join(newest, is_newest).where(CURVE_POINTS.c.source == SERVER)
        return {row.model_id: Point(row.source, row.step, row.metrics, row.recorded_at) for row in self._db.rows(query)}

    def outlines(self, model_ids: Sequence[str], names: Sequence[str], max_points: int) -> dict[str, Outline]:
        """For each run, the first of `names` that it has, at up to `max_points` evenly spaced steps with the last."""
        outline_of: dict[str, Outline] = {}
        with self._db.read() as connection:
            for model_id in model_ids:
                for source in (CLIENT, SERVER):
                    of_source = _of(model_id, source)
                    steps = list(connection.scalars(sa.select(CURVE_POINTS.c.step).where(of_source).order_by("step")))
                    width = max(1, -(-len(steps) // max_points))
                    at_steps = of_source & CURVE_POINTS.c.step.in_(steps[::-1][::width])
                    points = sa.select(CURVE_POINTS.c.step, CURVE_POINTS.c.metrics).where(at_steps).order_by("step")
                    rows = connection.execute(points).all() if steps else ()
                    name = next((name for name in names if any(name in row.metrics for row in rows)), None)
                    if name is not None:
                        values = [row.metrics[name] for row in rows if row.metrics.get(name) is not None]
                        outline_of[model_id] = Outline(name, values)
                        break
        return outline_of


def _merge(connection: sa.Connection, add: Statement, model_id: str, step: int, metrics: Mapping[str, float]) -> None:
    at_step = _of(model_id, CLIENT) & (CURVE_POINTS.c.step == step)
    add.count(connection, _row(model_id, CLIENT, step, {}))
    stored = connection.scalar(sa.select(CURVE_POINTS.c.metrics).where(at_step).with_for_update())
    merged = {**(stored or {}), **metrics}
    if len(merged) > MAX_NAMES:
        raise UserError(f"step {step} would have {len(merged)} metrics; at most {MAX_NAMES} are kept")
    connection.execute(CURVE_POINTS.update().where(at_step).values(metrics=merged, recorded_at=now()))


def thin_points(model_id: str, source: str, low: int, high: int) -> sa.Executable:
    """A statement that keeps about KEPT_POINTS of a run's points, the last of each interval of steps."""
    width = max(1, math.ceil((high - low + 1) / KEPT_POINTS))
    all_points = CURVE_POINTS.alias("all_points")
    of_source = (all_points.c.model_id == model_id) & (all_points.c.source == source)
    interval = (all_points.c.step - low) // sa.literal(width, sa.BigInteger)
    last_of_intervals = sa.select(sa.func.max(all_points.c.step)).where(of_source).group_by(interval)
    return CURVE_POINTS.delete().where(_of(model_id, source), CURVE_POINTS.c.step.not_in(last_of_intervals))


def _of(model_id: str, source: str) -> sa.ColumnElement[bool]:
    return (CURVE_POINTS.c.model_id == model_id) & (CURVE_POINTS.c.source == source)


def _count(model_id: str, source: str) -> sa.Select:
    return sa.select(sa.func.count()).select_from(CURVE_POINTS).where(_of(model_id, source))


def _row(model_id: str, source: str, step: int, metrics: Mapping[str, float]) -> dict[str, object]:
    # JSON has no infinity or NaN: such values are stored as null.
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return {"model_id": model_id, "source": source, "step": step, "metrics": json.dumps(finite), "recorded_at": now()}


RETENTION_S = 86400.0
MAX_PROMPT_TOKENS = 8192
"""Only the end of a longer prompt is kept."""

MAX_SEQUENCES = 8
MAX_SEQUENCE_TOKENS = 2048
MAX_IMAGES_BYTES = 1 << 20
"""Most bytes of all images of a sample; further images are kept without their content."""


@dataclass(frozen=True, slots=True)
class KeptSequence:
    """`digest` covers the whole prompt and the whole answer, of which `num_tokens` were sampled."""

    tokens: Sequence[int]
    logprobs: Sequence[float | None]
    stop_reason: str
    digest: str = ""
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TrainedAnswer:
    """Training on an answer; `logprobs` are the policy's at the last trained positions, before the step."""

    tenant_id: str
    digest: str
    model_id: str
    step: int
    advantage: float
    logprobs: F32


@dataclass(frozen=True, slots=True)
class AnswerNotes:
    """The reward and training of a kept answer. None: not reported, or not trained on."""

    request_id: str
    number: int
    reward: float | None
    model_id: str | None
    step: int | None
    advantage: float | None
    logprobs: Sequence[float | None] | None


@dataclass(frozen=True, slots=True)
class KeptImage:
    """An image of the kept prompt, at the positions from `start` on. `data` is base64, and empty if the image was too
    large to be kept.
    """

    start: int
    num_tokens: int
    format: str
    width: int
    height: int
    data: str


@dataclass(frozen=True, slots=True)
class SampleContent:
    """`prompt_cut` is the number of tokens cut from the beginning of the prompt."""

    prompt: Sequence[int]
    prompt_cut: int
    params: Mapping[str, object]
    sequences: Sequence[KeptSequence]
    images: Sequence[KeptImage] = ()


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


def _nth_newest(
    table: sa.FromClause, name: str, condition: sa.ColumnElement[bool], newer: object
) -> sa.ScalarSelect[Any]:
    """A column of the row that has `newer` newer ones among those of `condition`."""
    column = sa.select(table.c[name]).where(condition).order_by(table.c.position.desc())
    return column.offset(newer).limit(1).scalar_subquery()  # type: ignore[arg-type]


_OTHERS = KEPT_SAMPLES.alias("others")
_OF_TENANT = _OTHERS.c.tenant_id == sa.bindparam("tenant_id"), sa.bindparam("newer", type_=sa.Integer)
_ADD = Statement(KEPT_SAMPLES.insert())
_THIN = Statement(
    KEPT_SAMPLES.delete().where(
        KEPT_SAMPLES.c.tenant_id == sa.bindparam("tenant_id"),
        KEPT_SAMPLES.c.position < _nth_newest(_OTHERS, "position", *_OF_TENANT),
    )
)
_THIN_ANSWERS = Statement(
    KEPT_ANSWERS.delete().where(
        KEPT_ANSWERS.c.tenant_id == sa.bindparam("tenant_id"),
        KEPT_ANSWERS.c.created_at < _nth_newest(_OTHERS, "created_at", *_OF_TENANT),
    )
)
_NOT_TRAINED = KEPT_ANSWERS.c.model_id.is_(None)
_ANSWER = KEPT_ANSWERS.update().where(
    KEPT_ANSWERS.c.tenant_id == sa.bindparam("of_tenant"), KEPT_ANSWERS.c.digest == sa.bindparam("of_digest")
)
_TRAINED = {name: sa.bindparam(name) for name in ("model_id", "step", "advantage", "logprobs")}
_TRAIN = Statement(_ANSWER.where(_NOT_TRAINED).values(_TRAINED))
_REWARD = Statement(
    _ANSWER.where(sa.or_(KEPT_ANSWERS.c.reward.is_(None), _NOT_TRAINED)).values(reward=sa.bindparam("reward"))
)
_COLUMNS = [KEPT_SAMPLES.c[name] for name in KeptSample.__dataclass_fields__]


class KeptSamples:
    def __init__(self, db: Database) -> None:
        self._db = db

    def page(
        self, tenant_id: str, limit: int, offset: int, search: str = ""
    ) -> tuple[list[tuple[KeptSample, SampleContent]], int]:
        """A page of the tenant's kept samples, newest first, and their total; `search` is part of an id or a name."""
        condition = KEPT_SAMPLES.c.tenant_id == tenant_id
        if search:
            name = sa.func.coalesce(KEPT_SAMPLES.c.weights, KEPT_SAMPLES.c.base_model)
            condition &= name.contains(search, autoescape=True) | KEPT_SAMPLES.c.request_id.contains(
                search, autoescape=True
            )
        query = sa.select(*_COLUMNS, KEPT_SAMPLES.c.content).where(condition).order_by(KEPT_SAMPLES.c.position.desc())
        rows, total = self._db.page(query, limit, offset)
        return [(KeptSample(*fields), _read(packed)) for *fields, packed in rows], total

    def get(self, tenant_id: str, request_id: str) -> tuple[KeptSample, SampleContent]:
        of_request = (KEPT_SAMPLES.c.tenant_id == tenant_id) & (KEPT_SAMPLES.c.request_id == request_id)
        query = sa.select(*_COLUMNS, KEPT_SAMPLES.c.content).where(of_request)
        row = self._db.first(query.order_by(KEPT_SAMPLES.c.position.desc()))
        if row is None:
            raise NotFoundError(f"sample {request_id!r} is not kept; only recent samples are")
        *fields, packed = row
        return KeptSample(*fields), _read(packed)

    def list_earlier_turns(self, sample: KeptSample, content: SampleContent) -> list[str]:
        """The earlier turns of the sample's conversation among the kept samples of its session, oldest first."""
        of_session = (KEPT_SAMPLES.c.tenant_id == sample.tenant_id) & (KEPT_SAMPLES.c.session_id == sample.session_id)
        shorter = KEPT_SAMPLES.c.prompt_tokens < sample.prompt_tokens
        query = sa.select(KEPT_SAMPLES.c.request_id, KEPT_SAMPLES.c.content).where(of_session, shorter)
        if content.prompt_cut:
            return []
        rows = self._db.rows(query.order_by(KEPT_SAMPLES.c.prompt_tokens))
        prompt = list(content.prompt)
        return [row.request_id for row in rows if _leads_to(_read(row.content), prompt)]

    def sweep(self, before: float) -> int:
        """Delete what was created before `before`; returns the number of samples."""
        self._db.execute(KEPT_ANSWERS.delete().where(KEPT_ANSWERS.c.created_at < before))
        return self._db.execute(KEPT_SAMPLES.delete().where(KEPT_SAMPLES.c.created_at < before))

    # Rewards of answers, and training on them.

    def note_training(self, trained: Sequence[TrainedAnswer]) -> None:
        """Record training on answers. Only the first training step of an answer is recorded."""
        with self._db.write() as connection:
            for answer in trained:
                packed = zstandard.ZstdCompressor(level=1).compress(answer.logprobs.astype("<f4").tobytes())
                values = {
                    "model_id": answer.model_id,
                    "step": answer.step,
                    "advantage": answer.advantage,
                    "logprobs": packed,
                }
                _TRAIN.count(connection, values | {"of_tenant": answer.tenant_id, "of_digest": answer.digest})

    def set_rewards(self, tenant_id: str, rewards: Mapping[str, float]) -> int:
        """Set rewards of kept answers by digest; returns how many changed. After training, a reward is final."""
        with self._db.write() as connection:
            return sum(
                _REWARD.count(connection, {"of_tenant": tenant_id, "of_digest": digest, "reward": reward})
                for digest, reward in rewards.items()
            )

    def notes(self, tenant_id: str, request_ids: Sequence[str]) -> dict[tuple[str, int], AnswerNotes]:
        """The notes on kept answers, by request_id and number of the sequence."""
        columns = [KEPT_ANSWERS.c[name] for name in AnswerNotes.__dataclass_fields__]
        of_requests = (KEPT_ANSWERS.c.tenant_id == tenant_id) & KEPT_ANSWERS.c.request_id.in_(request_ids)
        rows = self._db.rows(sa.select(*columns).where(of_requests).order_by(KEPT_ANSWERS.c.position))
        return {
            (request_id, index): AnswerNotes(request_id, index, reward, run, step, advantage, _numbers(packed))
            for request_id, index, reward, run, step, advantage, packed in rows
        }


def keep_sample(sample: KeptSample, content: SampleContent, max_samples: int) -> list[Effect]:
    """Statements for the transaction that settles the sample; they keep at most `max_samples` samples of the tenant."""
    packed = zstandard.ZstdCompressor(level=1).compress(orjson.dumps(content))
    answers = [
        {
            "tenant_id": sample.tenant_id,
            "request_id": sample.request_id,
            "number": index,
            "digest": sequence.digest,
            "num_tokens": sequence.num_tokens,
            "created_at": sample.created_at,
        }
        for index, sequence in enumerate(content.sequences)
        if sequence.digest
    ]
    oldest = {"tenant_id": sample.tenant_id, "newer": max_samples - 1}
    return [
        Bound(_ADD, {**asdict(sample), "content": packed}),
        Bound(_THIN, oldest),
        *([KEPT_ANSWERS.insert().values(answers)] if answers else []),
        Bound(_THIN_ANSWERS, oldest),
    ]


def _numbers(packed: bytes | None) -> list[float | None] | None:
    if packed is None:
        return None
    values = np.frombuffer(zstandard.ZstdDecompressor().decompress(packed), "<f4")
    return [round(float(value), 6) if np.isfinite(value) else None for value in values]


def new_sample(request_id: str, tenant_id: str, session_id: str, base_model: str, weights: str | None) -> KeptSample:
    """A sample that has not been settled."""
    return KeptSample(request_id, tenant_id, session_id, base_model, weights, 0, 0, 0, now())


def _read(content: bytes) -> SampleContent:
    fields = orjson.loads(zstandard.ZstdDecompressor().decompress(content))
    sequences = [KeptSequence(**entry) for entry in fields["sequences"]]
    images = tuple(KeptImage(**entry) for entry in fields.get("images", ()))
    return SampleContent(fields["prompt"], fields["prompt_cut"], fields["params"], sequences, images)


def _leads_to(earlier: SampleContent, prompt: Sequence[int]) -> bool:
    if earlier.prompt_cut:
        return False
    for sequence in earlier.sequences:
        transcript = [*earlier.prompt, *sequence.tokens]
        if len(transcript) < len(prompt) and list(prompt[: len(transcript)]) == transcript:
            return True
        # The next prompt may encode the end of the answer differently.
        if len(sequence.tokens) > 1 and list(prompt[: len(transcript) - 1]) == transcript[:-1]:
            return True
    return False


KEPT_STEPS = 200

Shares = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class RecentStep:
    """`shares` are the tokens of its passes: tenant_id -> model_id -> tokens. An entry without passes, optimizer steps
    and singles is a snapshot that was written in the background: its shares name the run, with 0 tokens.
    """

    ended_at: float
    duration_s: float
    num_passes: int
    num_optim_steps: int
    num_singles: int
    num_tokens: int
    shares: Shares


_STEP_COLUMNS = [RECENT_STEPS.c[name] for name in RecentStep.__dataclass_fields__]


def _values(step: RecentStep) -> dict[str, object]:
    return {name: getattr(step, name) for name in RecentStep.__dataclass_fields__}  # asdict makes deep copies


class RecentSteps:
    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, base_model: str, steps: Sequence[RecentStep]) -> None:
        of_base = RECENT_STEPS.c.base_model == base_model
        all_steps = RECENT_STEPS.alias("others")
        oldest_kept = _nth_newest(all_steps, "position", all_steps.c.base_model == base_model, KEPT_STEPS - 1)
        with self._db.write() as connection:
            connection.execute(RECENT_STEPS.insert(), [{"base_model": base_model, **_values(step)} for step in steps])
            connection.execute(RECENT_STEPS.delete().where(of_base, RECENT_STEPS.c.position < oldest_kept))

    def newest(
        self, base_model: str, limit: int = KEPT_STEPS, *, snapshots: bool = False
    ) -> list[tuple[int, RecentStep]]:
        """The newest steps, or snapshots, of a base model with their positions, newest first."""
        num_operations = RECENT_STEPS.c.num_passes + RECENT_STEPS.c.num_optim_steps + RECENT_STEPS.c.num_singles
        condition = (RECENT_STEPS.c.base_model == base_model) & (
            num_operations == 0 if snapshots else num_operations > 0
        )
        query = sa.select(RECENT_STEPS.c.position, *_STEP_COLUMNS).where(condition)
        query = query.order_by(RECENT_STEPS.c.position.desc()).limit(limit)
        return [(position, RecentStep(*values)) for position, *values in self._db.rows(query)]
