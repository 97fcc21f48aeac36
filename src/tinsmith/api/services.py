"""The services that routes use: stores, the state of engines, bulk jobs, threads and metrics.

One `Services` belongs to one application, which keeps it in `app.state.services`. There are no globals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tinsmith.api.ignored_fields import IgnoredFieldReports
from tinsmith.auth.quotas import Quotas
from tinsmith.auth.signing import Signer
from tinsmith.auth.tenants import StoredTenants
from tinsmith.base_models import Bases
from tinsmith.batch.coordinator.coordinator import Coordinator
from tinsmith.batch.coordinator.model_gateway import ModelGateway
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.openai.reconciler import Reconciler
from tinsmith.batch.openai.rows import OpenAIBatches
from tinsmith.chat.tokenizer import ModelTokenizers
from tinsmith.cluster.engines import EngineFailure
from tinsmith.cluster.executors import DedicatedSamplers
from tinsmith.cluster.profiles import Profiles
from tinsmith.cluster.sample_admission import SampleAdmission
from tinsmith.db.wakeups import Waiters
from tinsmith.runtime.threads import ThreadPools
from tinsmith.settings import Settings
from tinsmith.store.audit import Audit
from tinsmith.store.checkpoint_jobs import CheckpointJobs
from tinsmith.store.checkpoints import Checkpoints
from tinsmith.store.curves import Curves
from tinsmith.store.custom_losses import CustomLosses
from tinsmith.store.exchanges import Exchanges
from tinsmith.store.files import Files
from tinsmith.store.futures import Futures
from tinsmith.store.machine_history import MachineHistory
from tinsmith.store.models import Models
from tinsmith.store.overview import Overview
from tinsmith.store.recent_steps import RecentSteps
from tinsmith.store.recorded_sequences import Sequences
from tinsmith.store.responses import Responses
from tinsmith.store.sampling_sessions import SamplingSessions
from tinsmith.store.server_sessions import ImplicitSessions
from tinsmith.store.sessions import Sessions
from tinsmith.store.stored_samples import StoredSamples
from tinsmith.store.usage import Usage
from tinsmith.telemetry.metrics import ServerMeters
from tinsmith.telemetry.timeline import Traces
from tinsmith.telemetry.tracing import Tracing
from tinsmith.wire.token_stream import Partials

MAX_LARGE_RESULTS = 4
"""Most large results in memory at the same time."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What is known of the engines. The arguments are names of base models."""

    queue_state: Callable[[str], tuple[str, str | None]]
    """The state of a base model's queue, and why it is not moving."""
    engine_for_run: Callable[[str], str | None]
    """The engine of a new training run; None before an engine has started."""
    cannot_start: Callable[[str], str | None] = lambda _base_model: None
    """Why a base model's queue will never move."""
    failing: Callable[[], str] = str
    """Why a process is failing, or ""; without details, since everyone may read it."""
    loading: Callable[[], str] = str
    """Which engines are not ready, or ""; without details."""
    is_unloaded: Callable[[str], bool] = lambda _base_model: False
    """Whether a base model on demand has no engine, and none that starts."""
    failures: Callable[[], Sequence[EngineFailure]] = tuple
    """The last error of each engine that keeps dying, for operators."""


@dataclass(frozen=True, slots=True)
class Services:
    """`reads_wait` is True for a remote database, which must not be read on the event loop."""

    settings: Settings
    bases: Bases
    sessions: Sessions
    models: Models
    sampling_sessions: SamplingSessions
    checkpoints: Checkpoints
    checkpoint_jobs: CheckpointJobs
    futures: Futures
    usage: Usage
    audit: Audit
    traces: Traces
    waiters: Waiters
    signer: Signer
    tenants: StoredTenants
    quotas: Quotas
    custom_losses: CustomLosses
    sequences: Sequences
    batch_jobs: BatchJobs
    coordinator: Coordinator
    model_gateway: ModelGateway
    files: Files
    openai_batches: OpenAIBatches
    batch_reconciler: Reconciler
    tokenizers: ModelTokenizers
    partials: Partials
    implicit_sessions: ImplicitSessions
    curves: Curves
    recent_steps: RecentSteps
    machine_history: MachineHistory
    responses: Responses
    exchanges: Exchanges
    stored_samples: StoredSamples
    overview: Overview
    engines: EngineStatus
    sample_admission: SampleAdmission
    dedicated_samplers: DedicatedSamplers
    profiles: Profiles
    meters: ServerMeters
    tracing: Tracing
    threads: ThreadPools
    reads_wait: bool = True
    ignored_fields: IgnoredFieldReports = field(default_factory=IgnoredFieldReports)
    large_results: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LARGE_RESULTS))
