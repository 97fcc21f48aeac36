"""Quotas: limits of what a tenant has queued, loaded and stored, and of its tokens per minute.

A request over a quota is refused with 429 before it is stored, and the client retries it. Stored requests are never
refused. Limits come from the settings, overridden by the tenant's row; 0 means no limit. Queue counts are read from the
database at most once a second per tenant; in between, this server adds the requests that it admits, and sees those of
other servers up to a second late. Models are counted in the transaction that creates one, so that their limit is exact.
Each server counts tokens in its own memory. Bytes are checked before and while an upload arrives; those of uploads
under way are reserved in the memory of their server.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import islice

import sqlalchemy as sa

from tinsmith.db.database import Database
from tinsmith.db.schema import CHECKPOINTS, FUTURES, MODELS, RESPONSES, TENANTS, UPLOADS
from tinsmith.errors import TooManyRequestsError, UserError
from tinsmith.store.files import EXTERNAL_UPLOAD
from tinsmith.store.futures import NewFuture

COUNT_INTERVAL_S = 1.0
FULL_COUNT_INTERVAL_S = 0.2
LIMITS_REFRESH_S = 5.0
MAX_RETRY_AFTER_S = 30.0  # the SDK ignores a Retry-After above 60
MAX_TENANTS = 10_000
"""Most tenants in memory; exceeded only while more are active."""

IDLE_S = 60.0
"""A tenant without a request for this long has none in progress."""

EVICTION_SCAN = 16
"""Tenants that each access examines for eviction while there are too many."""


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """The limits by name; 0 means no limit."""

    queued_requests: int = 0
    queued_bytes: int = 0
    models: int = 0
    checkpoint_bytes: int = 0
    file_bytes: int = 0
    response_bytes: int = 0
    tokens_per_minute: int = 0


NAMES = tuple(field.name for field in fields(QuotaLimits))


@dataclass(slots=True)
class _Tenant:
    """Counts and limits of one tenant. `level` is the token bucket's, which one request may overdraw."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    limits: QuotaLimits = field(default_factory=QuotaLimits)
    limits_read_at: float = -LIMITS_REFRESH_S
    requests: int = 0
    bytes: int = 0
    counted_at: float = -COUNT_INTERVAL_S
    level: float | None = None
    filled_at: float = 0.0
    used_at: float = 0.0

    def is_idle(self, now_s: float) -> bool:
        """Whether the tenant can be evicted: it has no request in progress, and its token bucket is full."""
        if now_s - self.used_at < IDLE_S:
            return False
        per_s = self.limits.tokens_per_minute / 60
        return self.level is None or self.level + per_s * (now_s - self.filled_at) >= self.limits.tokens_per_minute


_COUNT = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(FUTURES.c.body_bytes), 0)).where(
    FUTURES.c.tenant_id == sa.bindparam("tenant_id"), FUTURES.c.state == "pending"
)
_IS_STORED = sa.select(FUTURES.c.arrival).where(FUTURES.c.request_id == sa.bindparam("request_id"))
# Only operations after applied_seq_id, since a model may have many earlier ones.
_FIRST_WAITING = (
    sa.select(sa.func.min(FUTURES.c.seq_id))
    .join(MODELS, MODELS.c.model_id == FUTURES.c.model_id)
    .where(FUTURES.c.model_id == sa.bindparam("model_id"), FUTURES.c.state == "pending")
    .where(FUTURES.c.seq_id > MODELS.c.applied_seq_id)
)


class ReservedBytes:
    """The bytes of uploads under way on this server, by quota and tenant."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.totals: Counter[tuple[str, str]] = Counter()


class Reservation:
    """The bytes of one upload under way, which count against a quota until the end of a `with` block."""

    def __init__(self, name: str, limit: int, stored: int, reserved: ReservedBytes, tenant_id: str) -> None:
        self._name, self._limit, self._stored = name, limit, stored
        self._reserved, self._key = reserved, (name, tenant_id)
        self._reserved_bytes = 0

    def cover(self, size_bytes: int) -> Reservation:
        """Reserve up to `size_bytes` in total, before they are stored. Raises TooManyRequestsError."""
        with self._reserved.lock:
            total, missing_bytes = self._reserved.totals[self._key], size_bytes - self._reserved_bytes
            if missing_bytes > 0 and self._limit and self._stored + total + missing_bytes > self._limit:
                objects = "files" if self._name == "file_bytes" else "checkpoints"
                used = f"the {objects} take {self._stored} bytes, and uploads under way {total + missing_bytes}"
                raise _quota_error(self._name, used, self._limit, "delete some", 5.0)
            if missing_bytes > 0:
                self._reserved.totals[self._key] += missing_bytes
                self._reserved_bytes += missing_bytes
        return self

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_error: object) -> None:
        with self._reserved.lock:
            self._reserved.totals[self._key] -= self._reserved_bytes
            self._reserved_bytes = 0
            if not self._reserved.totals[self._key]:
                del self._reserved.totals[self._key]


class Quotas:
    def __init__(self, db: Database, defaults: QuotaLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._db = db
        self._defaults = defaults
        self._clock = clock
        self._lock = threading.Lock()
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # the least recently used first
        self._reserved = ReservedBytes()

    def admit(self, new: NewFuture) -> None:
        """Count a request before it is stored. Raises TooManyRequestsError."""
        tenant = self._tenant(new.tenant_id)
        with tenant.lock:
            limits = self._limits(tenant, new.tenant_id)
            if limits.tokens_per_minute and new.num_tokens and self._is_stored(new.request_id):
                return  # a retry: its tokens are already counted
            refusal = self._queue_refusal(tenant, limits, new)
            if refusal and (self._is_stored(new.request_id) or self._is_awaited(new)):
                refusal = None
            refusal = refusal or self._token_refusal(tenant, limits, new.cost_tokens)
            if refusal:
                raise refusal
            tenant.requests += 1
            tenant.bytes += len(new.body)
            if tenant.level is not None:
                tenant.level -= new.cost_tokens

    def admission_of_models(self, tenant_id: str) -> Callable[[int], None] | None:
        """Return the check for the transaction that creates a model, called with the number of loaded models; None
        without a limit. The check raises TooManyRequestsError.
        """
        limit = self.limits(tenant_id).models

        def admit(loaded: int) -> None:
            if loaded >= limit:
                raise _quota_error(
                    "models", f"{loaded} models are loaded", limit, "unload one, or end its session", 5.0
                )

        return admit if limit else None

    def admit_checkpoint(self, tenant_id: str, request_id: str | None = None) -> None:
        """Raise TooManyRequestsError if the tenant's checkpoints have reached the limit. A save that is already stored,
        by its `request_id`, is admitted.
        """
        limit = self.limits(tenant_id).checkpoint_bytes
        if not limit:
            return
        stored = self.checkpoint_bytes(tenant_id)
        if stored >= limit and not (request_id and self._is_stored(request_id)):
            used = f"the checkpoints take {stored} bytes"
            raise _quota_error("checkpoint_bytes", used, limit, "delete some, or give them a ttl", 5.0)

    def reserve_file(self, tenant_id: str, size_bytes: int = 0) -> Reservation:
        """Reserve the bytes of a file while it is uploaded. Raises TooManyRequestsError."""
        return self._reserve("file_bytes", self.file_bytes, tenant_id, size_bytes)

    def admit_response(self, tenant_id: str) -> None:
        """Raise TooManyRequestsError if the tenant's stored responses have reached the limit."""
        limit = self.limits(tenant_id).response_bytes
        if limit and (stored := self._sum_bytes(RESPONSES, tenant_id)) >= limit:
            used = f"the stored responses take {stored} bytes"
            raise _quota_error("response_bytes", used, limit, "delete some, or send store=false", 5.0)

    def reserve_checkpoint(self, tenant_id: str, size_bytes: int = 0) -> Reservation:
        """Reserve the bytes of a checkpoint while its files are uploaded or copied. Raises TooManyRequestsError."""
        return self._reserve("checkpoint_bytes", self.checkpoint_bytes, tenant_id, size_bytes)

    def _reserve(self, name: str, count: Callable[[str], int], tenant_id: str, size_bytes: int) -> Reservation:
        """`count` reads the tenant's stored bytes, unless there is no limit."""
        limit = getattr(self.limits(tenant_id), name)
        stored = count(tenant_id) if limit else 0
        return Reservation(name, limit, stored, self._reserved, tenant_id).cover(size_bytes)

    def checkpoint_bytes(self, tenant_id: str) -> int:
        """Return the bytes of the tenant's checkpoints, and of uploads that will become some."""
        return self._sum_bytes(CHECKPOINTS, tenant_id) + self._sum_bytes(
            UPLOADS, tenant_id, UPLOADS.c.purpose == EXTERNAL_UPLOAD
        )

    def file_bytes(self, tenant_id: str) -> int:
        """Return the bytes of the tenant's files."""
        return self._sum_bytes(UPLOADS, tenant_id, UPLOADS.c.purpose != EXTERNAL_UPLOAD)

    def _sum_bytes(self, table: sa.Table, tenant_id: str, *conditions: sa.ColumnElement[bool]) -> int:
        total = sa.select(sa.func.sum(table.c.size_bytes)).where(table.c.tenant_id == tenant_id, *conditions)
        return int(self._db.scalar(total) or 0)

    def limits(self, tenant_id: str) -> QuotaLimits:
        tenant = self._tenant(tenant_id)
        with tenant.lock:
            return self._limits(tenant, tenant_id)

    def _tenant(self, tenant_id: str) -> _Tenant:
        with self._lock:
            tenant = self._tenants.get(tenant_id)
            if tenant is None:
                tenant = self._tenants[tenant_id] = _Tenant()
            self._tenants.move_to_end(tenant_id)
            tenant.used_at = self._clock()
            for name in list(islice(self._tenants, EVICTION_SCAN)):
                if len(self._tenants) <= MAX_TENANTS:
                    break
                if self._tenants[name].is_idle(tenant.used_at):
                    del self._tenants[name]
            return tenant

    def _limits(self, tenant: _Tenant, tenant_id: str) -> QuotaLimits:
        if self._clock() - tenant.limits_read_at >= LIMITS_REFRESH_S:
            stored_limits = self._db.scalar(sa.select(TENANTS.c.quotas).where(TENANTS.c.tenant_id == tenant_id))
            stored_limits = {name: limit for name, limit in (stored_limits or {}).items() if name in NAMES}
            tenant.limits = replace(self._defaults, **stored_limits)
            tenant.limits_read_at = self._clock()
        return tenant.limits

    def _queue_refusal(self, tenant: _Tenant, limits: QuotaLimits, new: NewFuture) -> TooManyRequestsError | None:
        if not (limits.queued_requests or limits.queued_bytes):
            return None
        self._count(tenant, new.tenant_id, COUNT_INTERVAL_S)
        if _is_full(tenant, limits, new):
            self._count(tenant, new.tenant_id, FULL_COUNT_INTERVAL_S)
        if not _is_full(tenant, limits, new):
            return None
        if limits.queued_requests and tenant.requests >= limits.queued_requests:
            used = f"{tenant.requests} requests are queued"
            return _quota_error("queued_requests", used, limits.queued_requests, "wait for some to finish", 1.0)
        used = f"{tenant.bytes} bytes are queued and this request has {len(new.body)}"
        return _quota_error("queued_bytes", used, limits.queued_bytes, "wait for some to finish", 1.0)

    def _count(self, tenant: _Tenant, tenant_id: str, every_s: float) -> None:
        if self._clock() - tenant.counted_at >= every_s:
            with self._db.read() as connection:
                tenant.requests, tenant.bytes = connection.execute(_COUNT, {"tenant_id": tenant_id}).one()
            tenant.counted_at = self._clock()

    def _token_refusal(self, tenant: _Tenant, limits: QuotaLimits, num_tokens: int) -> TooManyRequestsError | None:
        limit = limits.tokens_per_minute
        if not limit:
            tenant.level = None
            return None
        per_s = limit / 60
        now_s = self._clock()
        level = limit if tenant.level is None else tenant.level + per_s * (now_s - tenant.filled_at)
        tenant.level, tenant.filled_at = min(level, limit), now_s
        if num_tokens == 0 or tenant.level > 0:
            return None
        # A request of any size is admitted while the level is positive, so that small ones cannot starve a large one.
        wait_s = min(max(-tenant.level / per_s, 0.1), MAX_RETRY_AFTER_S)
        used = f"{round(limit - tenant.level)} tokens were admitted within a minute"
        return _quota_error("tokens_per_minute", used, limit, "send fewer, or wait", wait_s)

    def _is_stored(self, request_id: str) -> bool:
        return self._db.scalar(_IS_STORED, {"request_id": request_id}) is not None

    def _is_awaited(self, new: NewFuture) -> bool:
        """Whether the model's queue waits for this operation; refusing it would block the queue for ever."""
        if new.model_id is None or new.seq_id is None:
            return False
        first = self._db.scalar(_FIRST_WAITING, {"model_id": new.model_id})
        return first is not None and new.seq_id < first


def _is_full(tenant: _Tenant, limits: QuotaLimits, new: NewFuture) -> bool:
    if limits.queued_requests and tenant.requests >= limits.queued_requests:
        return True
    # A body larger than the limit is admitted when nothing else is queued, or it never would be.
    return bool(limits.queued_bytes) and tenant.bytes > 0 and tenant.bytes + len(new.body) > limits.queued_bytes


def _quota_error(name: str, used: str, limit: int, fix: str, retry_after_s: float) -> TooManyRequestsError:
    return TooManyRequestsError(f"quota {name}: {used}, the limit is {limit}; {fix}", retry_after_s)


def read_quotas(texts: Iterable[str]) -> Mapping[str, int]:
    """Read `NAME=VALUE` texts as a tenant's own limits. Raises UserError."""
    quotas: dict[str, int] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in NAMES:
            raise UserError(f"unknown quota {name!r}; the quotas are {', '.join(NAMES)}")
        if not (value.isascii() and value.isdigit()) or int(value) >= 2**63:
            raise UserError(f"quota {name} is {value!r}; it must be an integer of 0 (no limit) or more")
        quotas[name] = int(value)
    return quotas
