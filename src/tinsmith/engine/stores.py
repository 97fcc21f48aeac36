"""The stores of an engine or a dedicated sampler, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinsmith.cluster.ownership import Ownership
from tinsmith.cluster.profiles import Profiles
from tinsmith.engine.telemetry import Records
from tinsmith.engine.transfer import VersionTransfer
from tinsmith.storage.directories import Directories
from tinsmith.store.checkpoints import Checkpoints
from tinsmith.store.custom_losses import CustomLosses
from tinsmith.store.futures import Futures
from tinsmith.store.models import Models
from tinsmith.store.sampling_sessions import SamplingSessions
from tinsmith.telemetry.tracing import Tracing


@dataclass(frozen=True, slots=True)
class Stores:
    futures: Futures
    models: Models
    samplers: SamplingSessions
    checkpoints: Checkpoints
    versions: Directories
    snapshots: Directories
    custom_losses: CustomLosses
    ownership: Ownership
    records: Records | None = None
    profiles: Profiles | None = None
    tracing: Tracing = field(default_factory=Tracing)
    transfer: VersionTransfer | None = None
