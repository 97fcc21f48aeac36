"""Stored samples: prompts and answers of each run and tenant, for the dashboard.

The transaction that settles a sample adds it. Some of these transactions also delete what exceeds the limits: of a run,
its newest samples stay, and of the older ones as many of each weight version, those whose prompts have the smallest
digests, so that the same prompts stay at every step. Beyond the tenant's limit its oldest samples go. The janitor
deletes by age. Samples of weights without a run (base models) count as those of one run with an empty model_id.

A sample continues a conversation if its prompt begins with an earlier prompt and one of its answers.

Each stored answer has its own row, found by the digest of all its tokens, which records training on it and the client's
reward: the engine notes the first training step, and a reward is final after it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import orjson
import sqlalchemy as sa
import zstandard

from tinsmith.db.database import Database, chunks, now
from tinsmith.db.schema import CHECKPOINTS, CURVE_POINTS, SAMPLERS, STORED_ANSWERS, STORED_SAMPLES
from tinsmith.db.statements import Bound, Effect, Statement
from tinsmith.errors import NotFoundError
from tinsmith.store.checkpoints import CheckpointRef
from tinsmith.store.curves import SERVER
from tinsmith.types import F32, I32, tokens_digest

MAX_PROMPT_TOKENS = 8192
"""Only the end of a longer prompt is kept."""

MAX_SEQUENCES = 16
MAX_SEQUENCE_TOKENS = 2048
SAMPLES_OF_READ = 50
"""Samples whose content is in memory at once while many are read."""

PATH_PREFIX = "tinker://"
"""Of the names of weights that are checkpoints."""

SAME_LOGPROB = 1e-4
"""Logprobs of one sample that were rounded on their way differ by less, and those of other weights by more."""

MAX_IMAGES_BYTES = 1 << 20
"""Most bytes of all images of a sample; further images are kept without their content."""


@dataclass(frozen=True, slots=True)
class StoredSequence:
    """`digest` covers the whole prompt and the whole answer, of which `num_tokens` were sampled (0: those stored)."""

    tokens: Sequence[int]
    logprobs: Sequence[float | None]
    stop_reason: str
    digest: str = ""
    num_tokens: int = 0

    @property
    def num_sampled(self) -> int:
        """The tokens of the answer, of which the first are stored."""
        return self.num_tokens or len(self.tokens)


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Sampling logprobs that a client trained with, at positions that are counted from the end of the answer (1: its
    last token).
    """

    from_end: I32
    logprobs: F32

    def fit(self, sequence: StoredSequence) -> bool:
        """Whether they are those of a stored sequence, at the positions that it has; False if it has none."""
        at = sequence.num_sampled - self.from_end
        is_stored = (at >= 0) & (at < len(sequence.logprobs))
        stored = np.array(sequence.logprobs, np.float32)[at[is_stored]]  # None becomes NaN
        differences = np.abs(stored - self.logprobs[is_stored])
        return bool(np.isfinite(stored).any()) and not (differences > SAME_LOGPROB).any()


@dataclass(frozen=True, slots=True)
class TrainedAnswer:
    """Training on an answer; `logprobs` are the policy's at the last trained positions, before the step, and
    `advantages` those of the same positions. Samples that began after `trained_at` are others with the same tokens.
    With `sampled`, so are samples whose logprobs differ from it: other weights gave the tokens.
    """

    tenant_id: str
    digest: str
    model_id: str
    step: int
    advantage: float
    logprobs: F32
    advantages: F32 | None = None
    trained_at: float = math.inf
    sampled: SampledLogprobs | None = None


@dataclass(frozen=True, slots=True)
class AnswerNotes:
    """The reward and training of a stored answer. None: not reported, or not trained on. `advantage` is the mean over
    the trained positions; `logprobs` and `advantages` are of the last of these.
    """

    request_id: str
    number: int
    reward: float | None
    model_id: str | None
    step: int | None
    advantage: float | None
    logprobs: F32 | None
    advantages: F32 | None


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image of the stored prompt, at the positions from `start` on. `data` is base64, and empty if the image was too
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
    sequences: Sequence[StoredSequence]
    images: Sequence[StoredImage] = ()


@dataclass(frozen=True, slots=True)
class StoredSample:
    """A sample without its content. `model_id` is the run of its weights, or empty; `prompt_digest` covers all tokens
    and images of its prompt.
    """

    request_id: str
    tenant_id: str
    session_id: str
    base_model: str
    weights: str | None
    prompt_tokens: int
    sampled_tokens: int
    num_sequences: int
    created_at: float
    model_id: str = ""
    prompt_digest: str = ""


@dataclass(frozen=True, slots=True)
class SampleLimits:
    """Most samples that are kept of a run, and of a tenant; 0 of a tenant keeps none."""

    of_run: int
    of_tenant: int


_ALL_SAMPLES = STORED_SAMPLES.alias("others")


_OF_TENANT = _ALL_SAMPLES.c.tenant_id == sa.bindparam("tenant_id")
_OF_RUN = _OF_TENANT & (_ALL_SAMPLES.c.model_id == sa.bindparam("model_id"))


def _nth_newest(condition: sa.ColumnElement[bool], name: str) -> sa.ScalarSelect[Any]:
    """The position of the sample that has `name` newer ones among those of the condition; null if there are fewer."""
    positions = sa.select(_ALL_SAMPLES.c.position).where(condition).order_by(_ALL_SAMPLES.c.position.desc())
    return positions.offset(sa.bindparam(name, type_=sa.Integer)).limit(1).scalar_subquery()


def _exceeding_of_run() -> sa.ColumnElement[bool]:
    """The condition of a run's samples that exceed its limit."""
    oldest_of_newest = _nth_newest(_OF_RUN, "newer")
    ranked = sa.select(
        _ALL_SAMPLES.c.position,
        sa.func.row_number()
        .over(
            partition_by=_ALL_SAMPLES.c.weights,
            order_by=[_ALL_SAMPLES.c.prompt_digest, _ALL_SAMPLES.c.position],
        )
        .label("place"),
    )
    ranked = ranked.where(_OF_RUN, _ALL_SAMPLES.c.position <= oldest_of_newest).subquery("ranked")
    staying = sa.select(ranked.c.position).order_by(ranked.c.place, ranked.c.position.desc())
    staying = staying.limit(sa.bindparam("older", type_=sa.Integer))
    return (
        (STORED_SAMPLES.c.tenant_id == sa.bindparam("tenant_id"))
        & (STORED_SAMPLES.c.model_id == sa.bindparam("model_id"))
        & (STORED_SAMPLES.c.position <= oldest_of_newest)
        & STORED_SAMPLES.c.position.not_in(staying)
    )


def _deletions(exceeding: sa.ColumnElement[bool]) -> list[Statement]:
    """Statements that delete the samples of a condition and their answers."""
    of_answer = STORED_ANSWERS.c.tenant_id == sa.bindparam("tenant_id")
    request_ids = sa.select(STORED_SAMPLES.c.request_id).where(exceeding)
    return [
        Statement(STORED_ANSWERS.delete().where(of_answer, STORED_ANSWERS.c.request_id.in_(request_ids))),
        Statement(STORED_SAMPLES.delete().where(exceeding)),
    ]


_ADD = Statement(STORED_SAMPLES.insert())
_ADD_ANSWER = Statement(STORED_ANSWERS.insert())
_THIN_RUN = _deletions(_exceeding_of_run())
_THIN_TENANT = _deletions(
    (STORED_SAMPLES.c.tenant_id == sa.bindparam("tenant_id"))
    & (STORED_SAMPLES.c.position <= _nth_newest(_OF_TENANT, "limit"))
)
_NOT_TRAINED = STORED_ANSWERS.c.model_id.is_(None)
_ANSWER = STORED_ANSWERS.update().where(
    STORED_ANSWERS.c.tenant_id == sa.bindparam("of_tenant"), STORED_ANSWERS.c.digest == sa.bindparam("of_digest")
)
_TRAINED = {name: sa.bindparam(name) for name in ("model_id", "step", "advantage", "logprobs", "advantages")}


def _of_newest_weights(before: sa.ColumnElement[float] | None = None) -> sa.ColumnElement[bool]:
    """Whether an answer came from the weights that gave its tokens last (`before` a time).

    Earlier weights may have given the same tokens in an earlier step, which is not what is trained or graded now.
    """
    answers, samples = STORED_ANSWERS.alias("same_answers"), STORED_SAMPLES.alias("same_samples")
    in_sample = (samples.c.tenant_id == answers.c.tenant_id) & (samples.c.request_id == answers.c.request_id)
    newest_weights = (
        sa.select(sa.func.coalesce(samples.c.weights, ""))
        .select_from(answers.join(samples, in_sample))
        .where(answers.c.tenant_id == sa.bindparam("of_tenant"), answers.c.digest == sa.bindparam("of_digest"))
        .where(sa.true() if before is None else answers.c.created_at <= before)
        .order_by(answers.c.created_at.desc(), answers.c.position.desc())
        .limit(1)
        .scalar_subquery()
    )
    return sa.exists().where(
        STORED_SAMPLES.c.tenant_id == STORED_ANSWERS.c.tenant_id,
        STORED_SAMPLES.c.request_id == STORED_ANSWERS.c.request_id,
        sa.func.coalesce(STORED_SAMPLES.c.weights, "") == newest_weights,
    )


_TRAINED_AT: sa.ColumnElement[float] = sa.bindparam("trained_at", type_=sa.Float())
_TRAIN = Statement(
    _ANSWER.where(_NOT_TRAINED, STORED_ANSWERS.c.created_at <= _TRAINED_AT, _of_newest_weights(_TRAINED_AT)).values(
        _TRAINED
    )
)
_REWARD = Statement(
    _ANSWER.where(sa.or_(STORED_ANSWERS.c.reward.is_(None), _NOT_TRAINED), _of_newest_weights()).values(
        reward=sa.bindparam("reward")
    )
)
_COLUMNS = [STORED_SAMPLES.c[name] for name in StoredSample.__dataclass_fields__]


class StoredSamples:
    def __init__(self, db: Database) -> None:
        self._db = db

    def page(
        self, tenant_id: str, limit: int, offset: int, search: str = ""
    ) -> tuple[list[tuple[StoredSample, SampleContent]], int]:
        """A page of the tenant's stored samples, newest first, and their total; `search` is part of an id or a name."""
        condition = STORED_SAMPLES.c.tenant_id == tenant_id
        if search:
            name = sa.func.coalesce(STORED_SAMPLES.c.weights, STORED_SAMPLES.c.base_model)
            condition &= name.contains(search, autoescape=True) | STORED_SAMPLES.c.request_id.contains(
                search, autoescape=True
            )
        query = (
            sa.select(*_COLUMNS, STORED_SAMPLES.c.content).where(condition).order_by(STORED_SAMPLES.c.position.desc())
        )
        rows, total = self._db.page(query, limit, offset)
        return [_unpack(row) for row in rows], total

    def list_positions(self, tenant_id: str, limit: int, model_id: str = "") -> list[int]:
        """The positions of the tenant's newest samples, oldest first: all, or those of a run, which are sampled from
        its weights, or in a group (the same prompt and weights) with an answer that it trained on.
        """
        of_tenant = STORED_SAMPLES.c.tenant_id == tenant_id
        newest_first = STORED_SAMPLES.c.position.desc()
        positions = sa.select(STORED_SAMPLES.c.position).order_by(newest_first).limit(limit)
        if not model_id:
            return self._db.scalars(positions.where(of_tenant))[::-1]
        is_of_run = (STORED_ANSWERS.c.tenant_id == tenant_id) & (STORED_ANSWERS.c.model_id == model_id)
        groups = sa.select(sa.func.coalesce(_ALL_SAMPLES.c.weights, ""), _ALL_SAMPLES.c.prompt_digest)
        trained = groups.where(
            _ALL_SAMPLES.c.tenant_id == tenant_id,
            _ALL_SAMPLES.c.request_id.in_(sa.select(STORED_ANSWERS.c.request_id).where(is_of_run)),
        )
        group = sa.tuple_(sa.func.coalesce(STORED_SAMPLES.c.weights, ""), STORED_SAMPLES.c.prompt_digest)
        sampled = self._db.scalars(positions.where(of_tenant, STORED_SAMPLES.c.model_id == model_id))
        trained_on = self._db.scalars(positions.where(of_tenant, group.in_(trained)))
        return sorted({*sampled, *trained_on})[-limit:]

    def read(self, tenant_id: str, positions: Sequence[int]) -> Iterator[tuple[StoredSample, SampleContent]]:
        """Read the samples at these positions, in their order, a few at a time."""
        for start in range(0, len(positions), SAMPLES_OF_READ):
            chunk = positions[start : start + SAMPLES_OF_READ]
            is_chosen = (STORED_SAMPLES.c.tenant_id == tenant_id) & STORED_SAMPLES.c.position.in_(chunk)
            query = sa.select(*_COLUMNS, STORED_SAMPLES.c.content).where(is_chosen).order_by(STORED_SAMPLES.c.position)
            yield from map(_unpack, self._db.rows(query))

    def get(self, tenant_id: str, request_id: str) -> tuple[StoredSample, SampleContent]:
        of_request = (STORED_SAMPLES.c.tenant_id == tenant_id) & (STORED_SAMPLES.c.request_id == request_id)
        query = sa.select(*_COLUMNS, STORED_SAMPLES.c.content).where(of_request)
        row = self._db.first(query.order_by(STORED_SAMPLES.c.position.desc()))
        if row is None:
            raise NotFoundError(f"sample {request_id!r} is not kept; only recent samples are")
        return _unpack(row)

    def list_earlier_turns(self, sample: StoredSample, content: SampleContent) -> list[str]:
        """The earlier turns of the sample's conversation among the stored samples of its session, oldest first."""
        if content.prompt_cut:
            return []
        of_session = (STORED_SAMPLES.c.tenant_id == sample.tenant_id) & (
            STORED_SAMPLES.c.session_id == sample.session_id
        )
        shorter = STORED_SAMPLES.c.prompt_tokens < sample.prompt_tokens
        query = sa.select(STORED_SAMPLES.c.request_id, STORED_SAMPLES.c.content).where(of_session, shorter)
        rows = self._db.rows(query.order_by(STORED_SAMPLES.c.prompt_tokens))
        prompt = list(content.prompt)
        return [row.request_id for row in rows if _leads_to(_unpack_content(row.content), prompt)]

    def sweep(self, before: float) -> int:
        """Delete what was created before `before`; returns the number of samples."""
        self._db.execute(STORED_ANSWERS.delete().where(STORED_ANSWERS.c.created_at < before))
        return self._db.execute(STORED_SAMPLES.delete().where(STORED_SAMPLES.c.created_at < before))

    # Rewards of answers, and training on them.

    def note_training(self, trained: Sequence[TrainedAnswer]) -> None:
        """Record training on answers. Only the first training step of an answer is recorded."""
        fitting = [(answer, self._list_fitting(answer)) for answer in self._select_stored(trained)]
        if not fitting:
            return
        with self._db.write() as connection:
            for answer, positions in fitting:
                values = {
                    "model_id": answer.model_id,
                    "step": answer.step,
                    "advantage": answer.advantage,
                    "logprobs": _pack_floats(answer.logprobs),
                    "advantages": None if answer.advantages is None else _pack_floats(answer.advantages),
                }
                if positions is None:
                    of_answer = {"of_tenant": answer.tenant_id, "of_digest": answer.digest}
                    _TRAIN.count(connection, values | of_answer | {"trained_at": answer.trained_at})
                elif positions:
                    is_fitting = STORED_ANSWERS.c.position.in_(positions) & _NOT_TRAINED
                    connection.execute(STORED_ANSWERS.update().where(is_fitting).values(**values))

    def _select_stored(self, trained: Sequence[TrainedAnswer]) -> list[TrainedAnswer]:
        """The answers that are kept and not yet trained on, since most of a large batch are not kept."""
        digests_by_tenant: dict[str, list[str]] = {}
        for answer in trained:
            digests_by_tenant.setdefault(answer.tenant_id, []).append(answer.digest)
        stored: set[tuple[str, str]] = set()
        for tenant_id, digests in digests_by_tenant.items():
            for chunk in chunks(digests):
                is_chosen = (STORED_ANSWERS.c.tenant_id == tenant_id) & STORED_ANSWERS.c.digest.in_(chunk)
                query = sa.select(STORED_ANSWERS.c.digest).where(is_chosen, _NOT_TRAINED)
                stored |= {(tenant_id, digest) for digest in self._db.scalars(query)}
        return [answer for answer in trained if (answer.tenant_id, answer.digest) in stored]

    def _list_fitting(self, answer: TrainedAnswer) -> list[int] | None:
        """The positions of the stored answers that were trained on, by their logprobs; None without logprobs."""
        if answer.sampled is None:
            return None
        in_sample = (STORED_SAMPLES.c.tenant_id == STORED_ANSWERS.c.tenant_id) & (
            STORED_SAMPLES.c.request_id == STORED_ANSWERS.c.request_id
        )
        of_answer = (STORED_ANSWERS.c.tenant_id == answer.tenant_id) & (STORED_ANSWERS.c.digest == answer.digest)
        query = sa.select(STORED_ANSWERS.c.position, STORED_ANSWERS.c.number, STORED_SAMPLES.c.content).select_from(
            STORED_ANSWERS.join(STORED_SAMPLES, in_sample)
        )
        rows = self._db.rows(query.where(of_answer, _NOT_TRAINED, STORED_ANSWERS.c.created_at <= answer.trained_at))
        sequences = ((row.position, _unpack_content(row.content).sequences[row.number]) for row in rows)
        return [position for position, sequence in sequences if answer.sampled.fit(sequence)]

    def set_rewards(self, tenant_id: str, rewards: Mapping[str, float]) -> int:
        """Set rewards of stored answers by digest; returns how many changed. After training, a reward is final."""
        with self._db.write() as connection:
            return sum(
                _REWARD.count(connection, {"of_tenant": tenant_id, "of_digest": digest, "reward": reward})
                for digest, reward in rewards.items()
            )

    def notes(self, tenant_id: str, request_ids: Sequence[str]) -> dict[tuple[str, int], AnswerNotes]:
        """The notes on stored answers, by request_id and number of the sequence."""
        columns = [STORED_ANSWERS.c[name] for name in AnswerNotes.__dataclass_fields__]
        query = sa.select(*columns).where(STORED_ANSWERS.c.tenant_id == tenant_id).order_by(STORED_ANSWERS.c.position)
        parts = (self._db.rows(query.where(STORED_ANSWERS.c.request_id.in_(ids))) for ids in chunks(request_ids))
        return {(row.request_id, row.number): _unpack_notes(row) for rows in parts for row in rows}

    # Steps of weights.

    def weights_steps(self, tenant_id: str, samples: Sequence[StoredSample]) -> dict[str, int]:
        """The optimizer steps that the weights of samples had had, by the name of the weights: those before the publish
        or save of the weights. Weights without a run, and those of other tenants, are left out.

        Steps are those of the run's points, so that a run of more than curves.MAX_POINTS steps has some steps only.
        """
        run_of = {sample.weights: sample.model_id for sample in samples if sample.weights and sample.model_id}
        created_at = self._list_creation_times(tenant_id, list(run_of))
        points: dict[str, list[tuple[float, int]]] = {}
        with self._db.read() as connection:
            for model_id in {run_of[weights] for weights in created_at}:
                columns = CURVE_POINTS.c.recorded_at, CURVE_POINTS.c.step
                of_run = (CURVE_POINTS.c.model_id == model_id) & (CURVE_POINTS.c.source == SERVER)
                query = sa.select(*columns).where(of_run).order_by(CURVE_POINTS.c.step)
                points[model_id] = [(row.recorded_at, row.step) for row in connection.execute(query)]
        steps: dict[str, int] = {}
        for weights, at in created_at.items():
            of_run_points = points[run_of[weights]]
            index = bisect_right(of_run_points, at, key=lambda point: point[0])
            steps[weights] = of_run_points[index - 1][1] if index else 0
        return steps

    def _list_creation_times(self, tenant_id: str, weights: Sequence[str]) -> dict[str, float]:
        """When weights were published, or saved: those of the tenant that still have a row."""
        times: dict[str, float] = {}
        for chunk in chunks([name for name in weights if not name.startswith(PATH_PREFIX)]):
            is_chosen = (SAMPLERS.c.tenant_id == tenant_id) & SAMPLERS.c.sampling_session_id.in_(chunk)
            query = sa.select(SAMPLERS.c.sampling_session_id, SAMPLERS.c.created_at).where(is_chosen)
            times |= {row.sampling_session_id: row.created_at for row in self._db.rows(query)}
        paths = {name for name in weights if name.startswith(PATH_PREFIX)}
        for run_ids in chunks(sorted({run_of_weights(None, path) for path in paths})):
            is_chosen = (CHECKPOINTS.c.tenant_id == tenant_id) & CHECKPOINTS.c.training_run_id.in_(run_ids)
            columns = (CHECKPOINTS.c[name] for name in ("training_run_id", "kind", "name", "created_at"))
            for row in self._db.rows(sa.select(*columns).where(is_chosen)):
                path = CheckpointRef(row.training_run_id, row.kind, row.name).path
                if path in paths:
                    times[path] = row.created_at
        return times


def keep_sample(sample: StoredSample, content: SampleContent) -> list[Effect]:
    """Statements for the transaction that settles the sample. The content has the sample's digest of the prompt, unless
    the prompt was cut.
    """
    packed = zstandard.ZstdCompressor(level=1).compress(orjson.dumps(content))
    if not sample.prompt_digest:
        sample = replace(sample, prompt_digest=tokens_digest(content.prompt))
    return [
        Bound(_ADD, {**asdict(sample), "content": packed}),
        *(
            Bound(
                _ADD_ANSWER,
                {
                    "tenant_id": sample.tenant_id,
                    "request_id": sample.request_id,
                    "number": index,
                    "digest": sequence.digest,
                    "num_tokens": sequence.num_tokens,
                    "created_at": sample.created_at,
                },
            )
            for index, sequence in enumerate(content.sequences)
            if sequence.digest
        ),
    ]


def thin_samples(tenant_id: str, model_id: str, limits: SampleLimits) -> list[Effect]:
    """Statements that delete what exceeds the limits of a run and of its tenant."""
    newest = -(-limits.of_run // 2)
    of_run = {"tenant_id": tenant_id, "model_id": model_id, "newer": newest, "older": limits.of_run - newest}
    of_tenant = {"tenant_id": tenant_id, "limit": limits.of_tenant}
    return [
        *(Bound(statement, of_run) for statement in _THIN_RUN),
        *(Bound(statement, of_tenant) for statement in _THIN_TENANT),
    ]


def run_of_weights(model_id: str | None, model_path: str | None) -> str:
    """The run of weights: that of their publish or of the path of their checkpoint; empty without a run."""
    if model_id:
        return model_id
    if model_path is None or not model_path.startswith(PATH_PREFIX):
        return ""
    return model_path.removeprefix(PATH_PREFIX).partition("/")[0]


def _unpack_notes(row: Any) -> AnswerNotes:  # noqa: ANN401  a row of the columns
    arrays = {name: _unpack_floats(getattr(row, name)) for name in ("logprobs", "advantages")}
    return AnswerNotes(**{**row._mapping, **arrays})


def _pack_floats(values: F32) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(values.astype("<f4").tobytes())


def _unpack_floats(packed: bytes | None) -> F32 | None:
    return None if packed is None else np.frombuffer(zstandard.ZstdDecompressor().decompress(packed), "<f4")


def new_sample(
    request_id: str, tenant_id: str, session_id: str, base_model: str, weights: str | None, model_id: str = ""
) -> StoredSample:
    """A sample that has not been settled."""
    return StoredSample(request_id, tenant_id, session_id, base_model, weights, 0, 0, 0, now(), model_id)


def _unpack(row: Sequence[Any]) -> tuple[StoredSample, SampleContent]:
    *fields, packed = row
    sample, content = StoredSample(*fields), _unpack_content(packed)
    if not sample.prompt_digest:  # stored before there was one
        sample = replace(sample, prompt_digest=tokens_digest(content.prompt))
    return sample, content


def _unpack_content(packed: bytes) -> SampleContent:
    fields = orjson.loads(zstandard.ZstdDecompressor().decompress(packed))
    sequences = [StoredSequence(**entry) for entry in fields["sequences"]]
    images = tuple(StoredImage(**entry) for entry in fields.get("images", ()))
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
