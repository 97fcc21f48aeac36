"""Kept samples: some recent samples of each tenant, with prompts and answers, for the tenant to look at.

Rows are added by the transaction that settles a sample, and the oldest beyond a number are deleted with it; whatever is
left is deleted after KEPT_S. Nothing reads them but their tenant: no request is answered from them. A turn of a
conversation follows another if its prompt begins with the other's prompt and one of its answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import orjson
import sqlalchemy as sa
import zstandard

from tinsmith.db.database import Database, now
from tinsmith.db.schema import KEPT_SAMPLES
from tinsmith.db.statements import Bound, Prepared
from tinsmith.errors import NotFoundError

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
_ADD = Prepared(KEPT_SAMPLES.insert())
_THIN = Prepared(
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
        with self._db.read() as connection:
            rows = connection.execute(query.limit(limit).offset(offset)).all()
            total = connection.scalar(sa.select(sa.func.count()).select_from(KEPT_SAMPLES).where(mine)) or 0
        return [(KeptSample(*facts), _read(packed)) for *facts, packed in rows], total

    def get(self, tenant_id: str, request_id: str) -> tuple[KeptSample, SampleContent]:
        mine = (KEPT_SAMPLES.c.tenant_id == tenant_id) & (KEPT_SAMPLES.c.request_id == request_id)
        query = sa.select(*_COLUMNS, KEPT_SAMPLES.c.content).where(mine)
        with self._db.read() as connection:
            row = connection.execute(query.order_by(KEPT_SAMPLES.c.position.desc())).first()
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
        with self._db.read() as connection:
            rows = connection.execute(query.order_by(KEPT_SAMPLES.c.prompt_tokens)).all()
        prompt = list(content.prompt)
        return [row.request_id for row in rows if _leads_to(_read(row.content), prompt)]

    def sweep(self, before: float) -> int:
        """Forget what is older; returns how many that was."""
        with self._db.write() as connection:
            return connection.execute(KEPT_SAMPLES.delete().where(KEPT_SAMPLES.c.created_at < before)).rowcount


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
