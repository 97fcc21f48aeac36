"""Captured exchanges: the tokens of an agent's requests and their answers, merged into trajectories.

An exchange is one prompt and one sampled answer, with the answer's logprobs and the weight version that sampled it: the
path of a checkpoint, or the base model. It belongs to a capture session, which the client names, and is deleted
`RETENTION_S` after it was recorded.

`merge_exchanges` merges the exchanges of a session, in their order, into trajectories. An exchange whose prompt begins
with all tokens of a trajectory continues the longest such trajectory; any other exchange begins a new one. So forks are
separate trajectories, and each sampled token is marked as sampled in exactly one. A trajectory has the id and the
reward of its first exchange.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import sqlalchemy as sa
import zstandard

from tinsmith.db.database import Database, now
from tinsmith.db.schema import EXCHANGES
from tinsmith.errors import NotFoundError, UserError
from tinsmith.types import F32, I32, SampleResult

RETENTION_S = 7 * 86400.0
_PREFIX = "traj-"
MAX_EXCHANGES = 10_000
"""Most exchanges of one session that can be merged."""
MAX_TOKENS = 1_000_000
"""Most tokens of the merged trajectories of one session, and of a page beyond its first session."""
_ROWS = 100
"""Exchanges that are read at a time."""


@dataclass(frozen=True, slots=True)
class Exchange:
    exchange_id: int
    session: str
    version: str
    prompt_T: I32
    tokens_T: I32
    logprobs_T: F32
    stop_reason: str
    reward: float | None
    created_at: float


@dataclass(slots=True)
class Trajectory:
    """`sampled` and `logprobs` (0 where not sampled) are per token; `versions` are the weight versions that sampled, in
    their order.
    """

    trajectory_id: str
    session: str
    reward: float | None
    created_at: float
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    num_exchanges: int = 0
    stop_reason: str = ""

    def add(self, exchange: Exchange) -> None:
        """Add an exchange whose prompt begins with all tokens so far."""
        new, answer = exchange.prompt_T[len(self.tokens) :].tolist(), exchange.tokens_T.tolist()
        self.tokens += [*new, *answer]
        self.sampled += [False] * len(new) + [True] * len(answer)
        self.logprobs += [0.0] * len(new) + exchange.logprobs_T.tolist()
        self.versions += [] if exchange.version in self.versions else [exchange.version]
        self.num_exchanges += 1
        self.stop_reason = exchange.stop_reason


def merge_exchanges(exchanges: Iterable[Exchange]) -> list[Trajectory]:
    """Merge the exchanges of a session into trajectories, in the order of their first exchanges."""
    trajectories: list[Trajectory] = []
    ends: dict[bytes, list[Trajectory]] = {}  # by the digest of all tokens so far
    lengths: Counter[int] = Counter()  # of the trajectories in `ends`
    num_tokens = 0
    for exchange in exchanges:
        prompt = exchange.prompt_T
        begins = (_digest(prompt[:length]) for length in sorted(lengths, reverse=True) if length <= len(prompt))
        key = next((digest for digest in begins if digest in ends), None)
        if key is not None:
            trajectory = ends[key].pop()
            lengths[len(trajectory.tokens)] -= 1
            lengths += Counter()  # drops lengths without trajectories
            if not ends[key]:
                del ends[key]
        else:
            trajectory = Trajectory(
                f"{_PREFIX}{exchange.exchange_id}", exchange.session, exchange.reward, exchange.created_at
            )
            trajectories.append(trajectory)
        before = len(trajectory.tokens)
        trajectory.add(exchange)
        num_tokens += len(trajectory.tokens) - before
        if num_tokens > MAX_TOKENS:
            raise too_large_error(exchange.session, f"{MAX_TOKENS} tokens")
        ends.setdefault(_digest(np.array(trajectory.tokens, "<i4")), []).append(trajectory)
        lengths[len(trajectory.tokens)] += 1
    return trajectories


def _digest(tokens_T: I32) -> bytes:
    return hashlib.sha256(tokens_T.tobytes()).digest()


class Exchanges:
    def __init__(self, db: Database) -> None:
        self._db = db

    def record(
        self,
        tenant_id: str,
        session: str,
        version: str,
        prompts: Sequence[Sequence[int]],
        results: Sequence[SampleResult],
        digests: Sequence[str] | None = None,
    ) -> None:
        """Record each sequence of one request's results as an exchange. `digests` identify the chats that they end."""
        numbered = count()
        rows = [
            {
                "tenant_id": tenant_id,
                "session": session,
                "version": version,
                "prompt": _pack(np.array(prompt, "<i4")),
                "tokens": _pack(sequence.tokens_T.astype("<i4")),
                "logprobs": _pack(sequence.logprobs_T.astype("<f4")),
                "stop_reason": sequence.stop_reason,
                "digest": None if digests is None else digests[next(numbered)],
                "created_at": now(),
            }
            for prompt, result in zip(prompts, results, strict=True)
            for sequence in result.sequences
        ]
        with self._db.write() as connection:
            connection.execute(EXCHANGES.insert(), rows)

    def find_answered(self, tenant_id: str, session: str, digests: Sequence[str]) -> tuple[int, I32, I32] | None:
        """Find the first digest of a recorded chat; returns its index, the chat's prompt and its newest answer."""
        of_session = (EXCHANGES.c.tenant_id == tenant_id) & (EXCHANGES.c.session == session)
        digest, exchange_id = EXCHANGES.c.digest, EXCHANGES.c.exchange_id
        newest = sa.select(digest, sa.func.max(exchange_id)).where(of_session, digest.in_(digests)).group_by(digest)
        id_by_digest = {row[0]: row[1] for row in self._db.rows(newest)}
        index = next((index for index, digest in enumerate(digests) if digest in id_by_digest), None)
        if index is None:
            return None
        query = sa.select(EXCHANGES.c.prompt, EXCHANGES.c.tokens)
        row = self._db.first(query.where(EXCHANGES.c.exchange_id == id_by_digest[digests[index]]))
        if row is None:
            return None
        prompt_T, tokens_T = (np.frombuffer(_unpack(packed), "<i4") for packed in row)
        return index, prompt_T, tokens_T

    def trajectories(self, tenant_id: str, session: str) -> list[Trajectory]:
        """The merged trajectories. Raises UserError if the session is larger than MAX_EXCHANGES or MAX_TOKENS."""
        return merge_exchanges(self._exchanges(tenant_id, session))

    def _exchanges(self, tenant_id: str, session: str) -> Iterator[Exchange]:
        """The exchanges of a session in their order, read in pages, since their prompts repeat each other."""
        columns = [EXCHANGES.c[name] for name in _COLUMNS]
        of_session = (EXCHANGES.c.tenant_id == tenant_id) & (EXCHANGES.c.session == session)
        query = sa.select(*columns).where(of_session).order_by(EXCHANGES.c.exchange_id).limit(_ROWS)
        last, num_exchanges = 0, 0
        while rows := self._db.rows(query.where(EXCHANGES.c.exchange_id > last)):
            for row in rows:
                num_exchanges += 1
                if num_exchanges > MAX_EXCHANGES:
                    raise too_large_error(session, f"{MAX_EXCHANGES} exchanges")
                yield _exchange(tuple(row))
            last = rows[-1].exchange_id

    def page(self, tenant_id: str, limit: int, after: str) -> tuple[list[Trajectory], str | None]:
        """The trajectories of up to `limit` sessions, fewer if those have many tokens, and the last session's name if
        there are more.
        """
        names, has_more = self.sessions(tenant_id, limit, after)
        trajectories: list[Trajectory] = []
        num_tokens = 0
        for index, name in enumerate(names):
            of_session = self.trajectories(tenant_id, name)
            num_tokens += sum(len(trajectory.tokens) for trajectory in of_session)
            if index and num_tokens > MAX_TOKENS:
                return trajectories, names[index - 1]
            trajectories += of_session
        return trajectories, names[-1] if has_more else None

    def sessions(self, tenant_id: str, limit: int, after: str) -> tuple[list[str], bool]:
        """A page of session names in their order, and whether there are more."""
        condition = (EXCHANGES.c.tenant_id == tenant_id) & (EXCHANGES.c.session > after)
        query = (
            sa.select(EXCHANGES.c.session).where(condition).distinct().order_by(EXCHANGES.c.session).limit(limit + 1)
        )
        names = self._db.scalars(query)
        return names[:limit], len(names) > limit

    def set_rewards(self, tenant_id: str, rewards: Mapping[str, float]) -> None:
        """Set the rewards of trajectories by id. Raises NotFoundError, and changes nothing, if one does not exist."""
        with self._db.write() as connection:
            for trajectory_id, reward in rewards.items():
                exchange_id = trajectory_id.removeprefix(_PREFIX)
                if not (exchange_id.isascii() and exchange_id.isdigit() and len(exchange_id) < 19):
                    raise NotFoundError(f"trajectory {trajectory_id[:80]!a} does not exist")
                of_exchange = (EXCHANGES.c.tenant_id == tenant_id) & (EXCHANGES.c.exchange_id == int(exchange_id))
                if connection.execute(EXCHANGES.update().where(of_exchange).values(reward=reward)).rowcount != 1:
                    raise NotFoundError(f"trajectory {trajectory_id!a} does not exist")

    def delete(self, tenant_id: str, session: str) -> int:
        of_session = (EXCHANGES.c.tenant_id == tenant_id) & (EXCHANGES.c.session == session)
        return self._db.execute(EXCHANGES.delete().where(of_session))

    def sweep(self) -> int:
        return self._db.execute(EXCHANGES.delete().where(EXCHANGES.c.created_at < now() - RETENTION_S))


def too_large_error(session: str, limit: str) -> UserError:
    return UserError(
        f"session {session[:80]!a} has more than {limit}, too many to merge; use a separate session for each "
        "conversation. A list of all sessions continues behind it with the query's after"
    )


_COLUMNS = (
    "exchange_id", "session", "version", "prompt", "tokens", "logprobs", "stop_reason", "reward", "created_at"
)  # fmt: skip


def _exchange(row: Sequence[Any]) -> Exchange:
    exchange_id, session, version, prompt, tokens, logprobs, *fields = row
    arrays = np.frombuffer(_unpack(prompt), "<i4"), np.frombuffer(_unpack(tokens), "<i4")
    return Exchange(exchange_id, session, version, *arrays, np.frombuffer(_unpack(logprobs), "<f4"), *fields)


def _pack(array: I32 | F32) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(array.tobytes())


def _unpack(packed: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(packed)
