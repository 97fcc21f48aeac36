"""The environment variables that processes of Tinsmith get, and those of others that it reads."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tinsmith.settings.groups import PREFIX

SECRET_WORDS = frozenset(("KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS", "JWT"))
"""An environment variable is secret if its name contains one of these words."""

RAY_ACTOR_VARIABLES = frozenset(("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE", "RAY_LD_PRELOAD_ON_WORKERS"))
"""Environment variables of Ray's processes that child processes must not inherit."""

MALLOC_TUNABLES = f"glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold={1 << 28}:glibc.malloc.mmap_threshold={1 << 25}"
"""glibc's tunables for engines: freed blocks of up to 32 MiB, the maximum, are kept."""

SIOCGIFADDR = 0x8915
"""Linux's request for the address of a network interface."""

DEVICE_SETTINGS = frozenset(f"{PREFIX}{name}" for name in ("DEVICE", "DTYPE", "LOG_LEVEL"))
"""The settings in the environment that the demo's server takes."""

CACHED_MATMULS = 128
"""Most compiled matrix products in an engine's caches."""


def engine_environment(
    metrics_dir: Path | None = None,
    *,
    bucket: bool = False,
    peer: str = "",
    computes_alone: bool = False,
    gpus: Sequence[int] = (),
) -> dict[str, str]:
    """Return the environment of an engine process: the user's, without secrets except PGPASSWORD and, with a `bucket`,
    the bucket's credentials. An engine reads its settings from a pipe. prometheus-client reads `metrics_dir` only from
    the environment, at import. Ranks exchange tensors on loopback, or, with ranks on other machines, at this machine's
    address `peer`. With `gpus`, counted among those that this process sees, it sees only these. The other
    variables are chosen by measurement:

    - OpenMP threads of an engine that computes alone spin for a millisecond before they sleep, since they would
      otherwise sleep between the kernels of a step. Beside other processes that compute, they would take the cores from
      each other.
    - oneDNN and torch cache compiled products for fewer shapes than by default, since data of varying length rarely
      repeat a shape.
    - glibc keeps freed blocks, in huge pages, to avoid page faults in every step.
    """
    inherited = {name: value for name, value in os.environ.items() if not _is_secret(name)}
    cache_limits = dict.fromkeys(("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), str(CACHED_MATMULS))
    metrics = {"PROMETHEUS_MULTIPROC_DIR": str(metrics_dir)} if metrics_dir else {}
    threading = {
        "TOKENIZERS_PARALLELISM": "false",
        "GLIBC_TUNABLES": MALLOC_TUNABLES,
        "GOMP_SPINCOUNT": "20000" if computes_alone else "2000",
    }
    interface = network_interface(peer) if peer else "lo" if sys.platform == "linux" else ""
    if interface:  # ranks must not listen elsewhere
        threading |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
    cloud = ("AWS_", "GOOGLE_", "AZURE_") if bucket else ()
    credentials = {name: value for name, value in os.environ.items() if name.startswith(cloud)}
    mask = device_mask()
    names = mask.split(",") if mask else None
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] if names else str(gpu) for gpu in gpus)} if gpus else {}
    return {**threading, **cache_limits, **inherited, **metrics, **credentials, **visible}


def network_interface(host: str) -> str:
    """Return the name of this machine's interface with the address `host`; empty if none has it, for IPv6, or where
    Linux is not there to ask.
    """
    if sys.platform != "linux":
        return ""
    import fcntl
    import socket
    import struct

    try:
        address = socket.inet_aton(socket.gethostbyname(host))
    except OSError:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if reply[20:24] == address:
                    return name
    return ""


def worker_environment() -> dict[str, str]:
    """Return the environment of a bulk job's processes, without secrets except bucket credentials."""
    return {name: value for name, value in engine_environment(bucket=True).items() if name not in RAY_ACTOR_VARIABLES}


def hub_environment() -> dict[str, str]:
    """Return the environment of a process that merges checkpoints and uploads them: without secrets, since it reads the
    hub's token from a pipe and must not find another. HF_ENDPOINT and the variables of proxies are kept. It computes on
    one core and leaves the others to engines.
    """
    hub = ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_TELEMETRY")
    inherited = {name: value for name, value in os.environ.items() if not _is_secret(name)}
    return {**inherited, **dict.fromkeys(hub, "1"), "OMP_NUM_THREADS": "1"}


def hub_token() -> str:
    """Return the operator's token for the hub, from HF_TOKEN; empty without one."""
    return os.environ.get("HF_TOKEN", "").strip()


def role_environment() -> dict[str, str]:
    """Return the environment of a process that may connect to Ray and reads its settings from a pipe."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(PREFIX) and name not in RAY_ACTOR_VARIABLES
    }


def demo_environment() -> dict[str, str]:
    """Return the environment of the demo's own server. The settings in this one are another server's, whose address,
    database and models a demo must not use (in a container, all interfaces); only those of the device are kept.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX) or name in DEVICE_SETTINGS}


def ray_variables(token_path: Path | None = None) -> dict[str, str]:
    """Return the environment variables to set before Ray is imported. They turn off usage reports and, for a local
    cluster, set a token file and the loopback interface (a variable named after systems that use loopback by default).
    """
    quiet = {"RAY_USAGE_STATS_ENABLED": "0"}
    if token_path is None:
        return quiet
    authentication = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path)}
    return {**quiet, **authentication, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def prepare_ray(token_path: Path | None = None) -> None:
    os.environ.update(ray_variables(token_path))


def ray_root() -> str:
    """Return the directory of Ray's sessions: RAY_TMPDIR or /tmp, since the paths of Ray's sockets must be short."""
    return os.environ.get("RAY_TMPDIR", "/tmp")


def _is_secret(name: str) -> bool:
    return name.startswith(PREFIX) or not SECRET_WORDS.isdisjoint(name.upper().split("_"))


def storage_endpoints() -> dict[str, str]:
    """Return the custom endpoints of object stores by scheme, from the standard variables. The client libraries read
    keys and regions themselves.
    """
    urls = {
        "s3": os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", ""),
        "gs": os.environ.get("STORAGE_EMULATOR_HOST", ""),
    }
    return {
        scheme: url if url.startswith(("http://", "https://")) else f"http://{url}"
        for scheme, url in urls.items()
        if url
    }


def device_mask() -> str | None:
    """Return the GPUs that the operator left visible to this process, by CUDA's names; None for all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def client_address() -> tuple[str, str]:
    """The server URL and API key for a client: from the SDK's variables, else a server on this machine."""
    return (
        os.environ.get("TINKER_BASE_URL") or "http://127.0.0.1:8000",
        os.environ.get("TINKER_API_KEY") or "tml-local",
    )
