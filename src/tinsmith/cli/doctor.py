"""`tinsmith doctor`: checks the machine and the settings without starting a server or loading a model. With
`--measure`, it starts the ranks of a plan, without the model, and measures them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tinsmith import base_models
from tinsmith.cli.rank import rank_key
from tinsmith.errors import SettingsError
from tinsmith.plan.degrees import Plan
from tinsmith.plan.speed import Rates
from tinsmith.plan.versions import (
    INSTALL_ENGINE,
    TESTED,
    VersionRange,
    list_installed_versions,
    list_untested_versions,
)
from tinsmith.runtime.host_memory import read_host_memory
from tinsmith.runtime.sizes import GIBIBYTE, format_bytes
from tinsmith.settings import Settings
from tinsmith.settings.environment import engine_environment

SMALLEST_DISK_BYTES = GIBIBYTE

TESTED_OF_SERVER = (
    VersionRange("uvicorn", "0.34", "0.54"),
    VersionRange("starlette", "0.46", "1.10"),
    VersionRange("tinker", "0.7", "0.38"),
)
"""Releases with which the server's tests pass: uvicorn's and Starlette's private parts, and the SDKs of clients."""


@dataclass(frozen=True, slots=True)
class Finding:
    good: bool
    subject: str
    detail: str


def examine(settings: Settings) -> list[Finding]:
    """Return the checks before `tinsmith serve`, in the order in which it would fail."""
    return [
        _python(),
        _torch(settings),
        _tinker(),
        *_releases(),
        *_losses(),
        _memory(),
        _disk(settings.resolved_data_dir),
        _port(settings),
        *_models(settings),
    ]


def _python() -> Finding:
    return Finding(sys.version_info >= (3, 11), "python", f"{platform.python_version()} on {platform.system()}")


def _torch(settings: Settings) -> Finding:
    try:
        import torch
    except ModuleNotFoundError as error:
        if not settings.num_torch_processes:
            return Finding(True, "torch", "not installed here (engines need it; this role does not)")
        return Finding(False, "torch", f"cannot be imported: {error}; {INSTALL_ENGINE}")
    except ImportError as error:
        return Finding(False, "torch", f"cannot be imported: {error}")
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        return Finding(True, "torch", f"{torch.__version__}, {torch.cuda.device_count()} x {', '.join(names)}")
    return Finding(True, "torch", f"{torch.__version__}, CPU only, {torch.get_num_threads()} threads")


def _tinker() -> Finding:
    try:
        version = importlib.metadata.version("tinker")
    except importlib.metadata.PackageNotFoundError:
        return Finding(True, "tinker SDK", "not installed here (clients need it; the server does not)")
    return Finding(True, "tinker SDK", version)


def _releases() -> Iterator[Finding]:
    """Name the installed releases, and each one outside of its tested range; that alone is not a problem."""
    installed = list_installed_versions((*TESTED, *TESTED_OF_SERVER))
    tested = ", ".join(str(release) for release in installed if release.is_tested)
    yield Finding(True, "tested releases", tested or "none of those installed")
    for release in list_untested_versions((*TESTED, *TESTED_OF_SERVER)):
        yield Finding(True, "not tested", f"{release}; tested are {release.tested}")


def _losses() -> Iterator[Finding]:
    """Name each plug-in with its distribution, or the one that cannot be used."""
    from tinsmith.losses import list_plugins

    try:
        plugins = list_plugins()
    except SettingsError as error:
        yield Finding(False, "loss plug-ins", str(error))
        return
    if plugins:
        yield Finding(True, "loss plug-ins", ", ".join(f"{loss.name} ({loss.distribution})" for loss in plugins))


def _memory() -> Finding:
    _, total = read_host_memory()
    return Finding(total > 2 * GIBIBYTE, "memory", f"{format_bytes(total)}, {os.cpu_count()} cores")


def _disk(data_dir: Path) -> Finding:
    existing = next(path for path in (data_dir, *data_dir.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    writable = os.access(existing, os.W_OK)
    detail = f"{data_dir}: {format_bytes(free)} free{'' if writable else ', but not writable'}"
    return Finding(writable and free > SMALLEST_DISK_BYTES, "data directory", detail)


def _port(settings: Settings) -> Finding:
    with socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            return Finding(False, "address", f"{settings.host}:{settings.port}: {error.strerror}")
    return Finding(True, "address", f"{settings.host}:{settings.port} is free")


def _models(settings: Settings) -> Iterator[Finding]:
    try:
        served = base_models.resolve(settings.models, vision=settings.vision)
    except SettingsError as error:
        yield Finding(False, "model", str(error))
        return
    for shape in served:
        size = sum(path.stat().st_size for path in Path(shape.path).glob("*.safetensors"))
        yield Finding(
            size > 0,
            "model",
            f"{shape.name}: {shape.arch}, {format_bytes(size)} of weights, vocabulary {shape.vocab_size}, "
            f"context {shape.max_context_length}",
        )


def measure_rates(settings: Settings, plan: Plan) -> Rates:
    """Start the plan's ranks in a process of their own, and measure them. Ranks of other machines are awaited. Raises
    SettingsError if they cannot run.
    """
    workload, model = plan.workload, plan.model
    settings = settings.model_copy(update={"machines": workload.num_machines})
    options = {"machines": str(settings.machines), "rank_address": f"{settings.peer_host}:{settings.rank_port}"}
    if settings.machines > 1:
        options["rank_key"] = rank_key(settings).hex()
    spec = {
        "degrees": asdict(plan.degrees),
        "device": "cuda" if workload.cuda else "cpu",
        "dtype": workload.dtype,
        "hidden": model.hidden,
        "num_weights": model.num_active,
        "timeout_s": settings.rank_timeout_s,
        "options": options,
    }
    command = [sys.executable, "-m", "tinsmith.backends.distributed", "measure"]
    completed = subprocess.run(
        command,
        input=json.dumps(spec) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        env=engine_environment(peer=settings.rank_peer),
        check=False,
    )
    if completed.returncode:
        raise SettingsError("--measure: the ranks of the plan cannot run here; the lines above have the reason")
    return Rates.read(json.loads(completed.stdout.rstrip("\n").rpartition("\n")[2]))
