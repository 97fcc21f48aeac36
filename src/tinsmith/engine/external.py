"""The backend of a process, with the sampler that the settings choose: its own, or another engine's.

A process that trains has a device of its own; where another engine samples, one that only samples holds nothing but
files (`VersionFiles`), and loads no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tinsmith import backends
from tinsmith.backends import Backend
from tinsmith.base_models import eos_token_ids
from tinsmith.errors import SettingsError
from tinsmith.settings import Settings
from tinsmith.types import ModelShape


def open_backend(
    settings: Settings, shape: ModelShape, place: str, options: Mapping[str, str], *, trains: bool = True
) -> Backend:
    """`place` names this process among others of the data directory, `options` are the backend's.

    Raises SettingsError if they cannot be had together.
    """
    if settings.backend == "full":
        for name, usual in (("sampler", "local"), ("data_parallel", 1), ("tensor_parallel", 1), ("shard_base", False)):
            if (value := getattr(settings, name)) != usual:
                raise SettingsError(f"{name} is {value!r}, which backend 'full' does not support; leave it out")
    if settings.sampler == "local":
        return backends.load(settings.resolved_backend, shape, **options)
    if settings.sampler_url and len(settings.models) > 1:
        raise SettingsError("sampler_url is one engine, and an engine has one base model; serve one model with it")
    from tinsmith.backends.with_remote_sampler import VersionFiles, options_of, sample_elsewhere
    from tinsmith.samplers.remote.client import Engine

    root = settings.resolved_data_dir
    logs = root / "logs"
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    engine = Engine(
        directory=(settings.sampler_adapters or root / "sampler").expanduser().resolve() / place,
        log_path=logs / f"sampler-{place}.log",
        url=settings.sampler_url.rstrip("/"),
        python=settings.sampler_python or sys.executable,
        options=options_of(settings.sampler_options),
        shares_device=settings.sampler_shares_device,
        most_adapters=settings.sampler_loaded_adapters,
    )
    held = (
        backends.load(settings.resolved_backend, shape, **options)
        if trains
        else VersionFiles(root / "sampler" / f"{place}-versions")
    )
    return sample_elsewhere(held, settings.sampler, engine, shape, eos_token_ids(shape))
