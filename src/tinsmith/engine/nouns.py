"""The durable parts that an engine or a dedicated sampler works with, as one thing to hand around."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinsmith.checkpoints import Checkpoints
from tinsmith.custom_losses import CustomLosses
from tinsmith.engine.handing import Handing
from tinsmith.engine.recording import Records
from tinsmith.fleet.ownership import Ownership
from tinsmith.futures import Futures
from tinsmith.models import Models
from tinsmith.observing.tracing import NoTracing, Tracing
from tinsmith.sampling_sessions import SamplingSessions
from tinsmith.storage import Directories


@dataclass(frozen=True, slots=True)
class Nouns:
    futures: Futures
    models: Models
    samplers: SamplingSessions
    checkpoints: Checkpoints
    versions: Directories
    snapshots: Directories
    custom_losses: CustomLosses
    ownership: Ownership
    records: Records | None = None
    tracing: Tracing = field(default_factory=NoTracing)
    handing: Handing | None = None
