"""Kept samples: prompts and answers of the recent samples of each tenant, for the dashboard.

The transaction that settles a sample adds it and deletes the tenant's oldest beyond a limit; all are deleted after
RETENTION_S. A sample continues a conversation if its prompt begins with an earlier prompt and one of its answers.

Each kept answer has its own row, found by the digest of all its tokens, which records training on it and the client's
reward: the engine notes the first training step, and a reward is final after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import orjson
import sqlalchemy as sa
import zstandard

from tinsmith.db.database import Database, now
from tinsmith.db.schema import KEPT_ANSWERS, KEPT_SAMPLES
from tinsmith.db.statements import Bound, Effect, Statement
from tinsmith.errors import NotFoundError
from tinsmith.types import F32

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


_ALL_SAMPLES = KEPT_SAMPLES.alias("others")


def _of_nth_newest(name: str) -> sa.ScalarSelect[Any]:
    """A column of the tenant's sample that has `newer` newer ones."""
    column = sa.select(_ALL_SAMPLES.c[name]).where(_ALL_SAMPLES.c.tenant_id == sa.bindparam("tenant_id"))
    column = column.order_by(_ALL_SAMPLES.c.position.desc())
    return column.offset(sa.bindparam("newer", type_=sa.Integer)).limit(1).scalar_subquery()


_ADD = Statement(KEPT_SAMPLES.insert())
_THIN = Statement(
    KEPT_SAMPLES.delete().where(
        KEPT_SAMPLES.c.tenant_id == sa.bindparam("tenant_id"),
        KEPT_SAMPLES.c.position < _of_nth_newest("position"),
    )
)
_THIN_ANSWERS = Statement(
    KEPT_ANSWERS.delete().where(
        KEPT_ANSWERS.c.tenant_id == sa.bindparam("tenant_id"),
        KEPT_ANSWERS.c.created_at < _of_nth_newest("created_at"),
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
        return [(KeptSample(*fields), _unpack_content(packed)) for *fields, packed in rows], total

    def get(self, tenant_id: str, request_id: str) -> tuple[KeptSample, SampleContent]:
        of_request = (KEPT_SAMPLES.c.tenant_id == tenant_id) & (KEPT_SAMPLES.c.request_id == request_id)
        query = sa.select(*_COLUMNS, KEPT_SAMPLES.c.content).where(of_request)
        row = self._db.first(query.order_by(KEPT_SAMPLES.c.position.desc()))
        if row is None:
            raise NotFoundError(f"sample {request_id!r} is not kept; only recent samples are")
        *fields, packed = row
        return KeptSample(*fields), _unpack_content(packed)

    def list_earlier_turns(self, sample: KeptSample, content: SampleContent) -> list[str]:
        """The earlier turns of the sample's conversation among the kept samples of its session, oldest first."""
        if content.prompt_cut:
            return []
        of_session = (KEPT_SAMPLES.c.tenant_id == sample.tenant_id) & (KEPT_SAMPLES.c.session_id == sample.session_id)
        shorter = KEPT_SAMPLES.c.prompt_tokens < sample.prompt_tokens
        query = sa.select(KEPT_SAMPLES.c.request_id, KEPT_SAMPLES.c.content).where(of_session, shorter)
        rows = self._db.rows(query.order_by(KEPT_SAMPLES.c.prompt_tokens))
        prompt = list(content.prompt)
        return [row.request_id for row in rows if _leads_to(_unpack_content(row.content), prompt)]

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
            (request_id, index): AnswerNotes(request_id, index, reward, run, step, advantage, _unpack_logprobs(packed))
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


def _unpack_logprobs(packed: bytes | None) -> list[float | None] | None:
    if packed is None:
        return None
    values = np.frombuffer(zstandard.ZstdDecompressor().decompress(packed), "<f4")
    return [round(float(value), 6) if np.isfinite(value) else None for value in values]


def new_sample(request_id: str, tenant_id: str, session_id: str, base_model: str, weights: str | None) -> KeptSample:
    """A sample that has not been settled."""
    return KeptSample(request_id, tenant_id, session_id, base_model, weights, 0, 0, 0, now())


def _unpack_content(packed: bytes) -> SampleContent:
    fields = orjson.loads(zstandard.ZstdDecompressor().decompress(packed))
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
