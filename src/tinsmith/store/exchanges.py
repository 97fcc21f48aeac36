"""Captured exchanges: the tokens of an agent's requests and their answers, merged into trajectories.

An exchange is one prompt and one sampled answer, with the answer's logprobs, the name of the weights that sampled it
(`SampleResult.weight_version`) and the prompt's images. It belongs to a capture session, which the client names, and is
deleted `RETENTION_S` after it was recorded. An image is stored once for a session, however many of its prompts have it.

`merge_exchanges` merges the exchanges of a session, in their order, into trajectories. An exchange whose prompt begins
with all tokens and images of a trajectory continues the longest such one; any other begins a new one. So forks are
separate trajectories, and each sampled token is marked as sampled in exactly one. A trajectory has the id and the
reward of its first exchange.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import orjson
import sqlalchemy as sa
import zstandard

from tinsmith.db.database import Database, chunks, now
from tinsmith.db.schema import EXCHANGE_IMAGES, EXCHANGES
from tinsmith.errors import NotFoundError, UserError
from tinsmith.types import F32, I32, Image, SampleResult

RETENTION_S = 7 * 86400.0
_PREFIX = "traj-"
MAX_EXCHANGES = 10_000
"""Most exchanges of one session that can be merged."""
MAX_TOKENS = 1_000_000
"""Most tokens of the merged trajectories of one session, and of a page beyond its first session."""
MAX_IMAGE_BYTES = 256 << 20
"""Most bytes of the images in one session's trajectories."""
_ROWS = 100
"""Exchanges that are read at a time."""


@dataclass(frozen=True, slots=True)
class CapturedImage:
    """An image of a prompt: the positions `start` to `stop` that it occupies, its file's digest, and the file, which
    is empty until it is read.
    """

    start: int
    num_tokens: int
    format: str
    digest: str
    data: bytes = b""

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The tokens `start` to `stop` of a trajectory, sampled by the weights of this name."""

    version: str
    start: int
    stop: int


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
    images: tuple[CapturedImage, ...] = ()


@dataclass(slots=True)
class Trajectory:
    """`sampled` and `logprobs` (0 where not sampled) are per token. `spans` are the sampled answers with their weights,
    in their order.
    """

    trajectory_id: str
    session: str
    reward: float | None
    created_at: float
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    images: list[CapturedImage] = field(default_factory=list)
    num_exchanges: int = 0
    stop_reason: str = ""

    @property
    def versions(self) -> list[str]:
        """The weights that sampled, in the order of their first answers."""
        return list(dict.fromkeys(span.version for span in self.spans))

    @property
    def digest(self) -> bytes:
        return _digest(np.array(self.tokens, "<i4"), self.images)

    def add(self, exchange: Exchange) -> None:
        """Add an exchange whose prompt begins with all tokens so far."""
        new, answer = exchange.prompt_T[len(self.tokens) :].tolist(), exchange.tokens_T.tolist()
        self.images += [image for image in exchange.images if image.start >= len(self.tokens)]
        self.tokens += [*new, *answer]
        self.spans.append(VersionSpan(exchange.version, len(self.tokens) - len(answer), len(self.tokens)))
        self.sampled += [False] * len(new) + [True] * len(answer)
        self.logprobs += [0.0] * len(new) + exchange.logprobs_T.tolist()
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
        begins = (
            _digest(prompt[:length], exchange.images)
            for length in sorted(lengths, reverse=True)
            if length <= len(prompt)
        )
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
        ends.setdefault(trajectory.digest, []).append(trajectory)
        lengths[len(trajectory.tokens)] += 1
    return trajectories


def _digest(tokens_T: I32, images: Iterable[CapturedImage]) -> bytes:
    """The digest of tokens, and of the images that begin inside: images of one size have the same tokens."""
    digest = hashlib.sha256(tokens_T.tobytes())
    for image in images:
        if image.start < len(tokens_T):
            digest.update(f"{image.start} {image.digest};".encode())
    return digest.digest()


class Exchanges:
    def __init__(self, db: Database) -> None:
        self._db = db

    def record(
        self,
        tenant_id: str,
        session: str,
        prompts: Sequence[Sequence[int]],
        results: Sequence[SampleResult],
        digests: Sequence[str] | None = None,
        images: Sequence[Image] = (),
    ) -> None:
        """Record each sequence of one request's results as an exchange. `digests` identify the chats that they end;
        `images` are those of its one prompt.
        """
        numbered = count()
        positions = [
            {name: getattr(image, name) for name in ("start", "num_tokens", "format")} | {"digest": image.digest.hex()}
            for image in images
        ]
        rows = [
            {
                "tenant_id": tenant_id,
                "session": session,
                "version": result.weight_version,
                "prompt": _pack(np.array(prompt, "<i4")),
                "tokens": _pack(sequence.tokens_T.astype("<i4")),
                "logprobs": _pack(sequence.logprobs_T.astype("<f4")),
                "stop_reason": sequence.stop_reason,
                "digest": None if digests is None else digests[next(numbered)],
                "images": orjson.dumps(positions).decode() if positions else None,
                "created_at": now(),
            }
            for prompt, result in zip(prompts, results, strict=True)
            for sequence in result.sequences
        ]
        files = {
            image.digest: {
                "tenant_id": tenant_id, "session": session, "digest": image.digest.hex(), "data": image.data
            }
            for image in images
        }  # fmt: skip
        with self._db.write() as connection:
            connection.execute(EXCHANGES.insert(), rows)
            for row in files.values():
                connection.execute(self._db.insert_once(EXCHANGE_IMAGES), row)

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
        """The merged trajectories. Raises UserError if the session is larger than MAX_EXCHANGES, MAX_TOKENS or
        MAX_IMAGE_BYTES.
        """
        trajectories = merge_exchanges(self._exchanges(tenant_id, session))
        digests = [image.digest for trajectory in trajectories for image in trajectory.images]
        files = self._read_images(tenant_id, session, digests) if digests else {}
        for trajectory in trajectories:
            trajectory.images = [replace(image, data=files[image.digest]) for image in trajectory.images]
        return trajectories

    def _read_images(self, tenant_id: str, session: str, digests: Sequence[str]) -> dict[str, bytes]:
        of_session = (EXCHANGE_IMAGES.c.tenant_id == tenant_id) & (EXCHANGE_IMAGES.c.session == session)
        digest, data = EXCHANGE_IMAGES.c.digest, EXCHANGE_IMAGES.c.data
        sizes = {row[0]: row[1] for row in self._db.rows(sa.select(digest, sa.func.length(data)).where(of_session))}
        if sum(sizes[name] for name in digests) > MAX_IMAGE_BYTES:
            raise too_large_error(session, f"{MAX_IMAGE_BYTES >> 20} MiB of images")
        query = sa.select(digest, data).where(of_session)
        parts = (self._db.rows(query.where(digest.in_(chunk))) for chunk in chunks(sorted(set(digests))))
        return {row[0]: row[1] for rows in parts for row in rows}

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
        """The trajectories of up to `limit` sessions, fewer if those have many tokens or large images, and the last
        session's name if there are more.
        """
        names, has_more = self.sessions(tenant_id, limit, after)
        trajectories: list[Trajectory] = []
        num_tokens = num_bytes = 0
        for index, name in enumerate(names):
            of_session = self.trajectories(tenant_id, name)
            num_tokens += sum(len(trajectory.tokens) for trajectory in of_session)
            num_bytes += sum(len(image.data) for trajectory in of_session for image in trajectory.images)
            if index and (num_tokens > MAX_TOKENS or num_bytes > MAX_IMAGE_BYTES):
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
        """Delete the exchanges of a session and their images; returns the number of exchanges."""
        with self._db.write() as connection:
            num_exchanges, _ = (
                connection.execute(
                    table.delete().where((table.c.tenant_id == tenant_id) & (table.c.session == session))
                ).rowcount
                for table in (EXCHANGES, EXCHANGE_IMAGES)
            )
        return num_exchanges

    def sweep(self) -> int:
        """Delete old exchanges, and the images of sessions without any; returns the number of exchanges."""
        of_image = (EXCHANGES.c.tenant_id == EXCHANGE_IMAGES.c.tenant_id) & (
            EXCHANGES.c.session == EXCHANGE_IMAGES.c.session
        )
        with self._db.write() as connection:
            num_exchanges = connection.execute(
                EXCHANGES.delete().where(EXCHANGES.c.created_at < now() - RETENTION_S)
            ).rowcount
            if num_exchanges:
                connection.execute(EXCHANGE_IMAGES.delete().where(~sa.exists().where(of_image)))
        return num_exchanges


def too_large_error(session: str, limit: str) -> UserError:
    return UserError(
        f"session {session[:80]!a} has more than {limit}, too many to merge; use a separate session for each "
        "conversation. A list of all sessions continues behind it with the query's after"
    )


_COLUMNS = (
    "exchange_id", "session", "version", "prompt", "tokens", "logprobs", "stop_reason", "reward", "created_at", "images"
)  # fmt: skip


def _exchange(row: Sequence[Any]) -> Exchange:
    exchange_id, session, version, prompt, tokens, logprobs, *fields, images = row
    arrays = np.frombuffer(_unpack(prompt), "<i4"), np.frombuffer(_unpack(tokens), "<i4")
    logprobs_T = np.frombuffer(_unpack(logprobs), "<f4")
    positions = tuple(CapturedImage(**position) for position in orjson.loads(images or "[]"))
    return Exchange(exchange_id, session, version, *arrays, logprobs_T, *fields, images=positions)


def _pack(array: I32 | F32) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(array.tobytes())


def _unpack(packed: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(packed)
