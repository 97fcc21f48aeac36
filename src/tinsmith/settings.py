"""One frozen tree of settings, resolved once and passed down; the only reader of the environment.

Sources, strongest first: the command line (`cli` passes what was given), `TINSMITH_*` variables, defaults.
Unknown keys are refused. Every field's docstring is its documentation (`docs/settings.md` is made from them).
"""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ByteSize, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tinsmith.errors import SettingsError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MEBIBYTE = 1024 * 1024
PREFIX = "TINSMITH_"
SECRET_WORDS = frozenset(("KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS", "JWT"))
"""A variable of the environment is secret if its name has one of these words."""

BUCKET_SCHEMES = ("s3", "gs")

RAY_OF_ACTORS = frozenset(("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE", "RAY_LD_PRELOAD_ON_WORKERS"))
"""Variables of Ray's own processes, which their children must not inherit."""

HEAP = f"glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold={1 << 28}:glibc.malloc.mmap_threshold={1 << 25}"
"""glibc's settings for engines: it keeps freed blocks of up to 32 MiB, its maximum."""

KEPT_PRODUCTS = 128
"""How many compiled matrix products an engine keeps."""


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Address to listen on. Without API keys, only loopback addresses are accepted."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""

    public_url: str = Field(default="", pattern=r"^(https?://[^/?#]+[^?#]*)?$")
    """Address in links, `https://HOST/PREFIX`, for proxies that strip a path prefix; empty means the one that the
    client used."""

    trust_forwarded_headers: bool = False
    """Whether to believe X-Forwarded-Host, -Proto and -Prefix; only behind a proxy."""

    data_dir: Path = Path("~/.tinsmith")
    """Directory of the database, checkpoints and logs."""

    database_url: str = ""
    """`postgresql://USER:PASSWORD@HOST/NAME` or `sqlite:///FILE`; empty means SQLite in the data directory."""

    storage_dir: str = ""
    """Place of checkpoints, snapshots, versions and uploads: a directory, `s3://BUCKET/PREFIX` or
    `gs://BUCKET/PREFIX`; empty means the data directory."""

    storage_cache_bytes: int = Field(default=16 * 1024 * MEBIBYTE, gt=0)
    """Size of the local cache of a bucket."""

    engine_lease_s: float = Field(default=15.0, gt=0)
    """An engine silent for this long loses its runs to others."""

    rebalance_idle_s: float = Field(default=10.0, ge=0)
    """A run idle for this long moves to an engine that has two runs fewer; 0 turns it off."""

    role: Literal["all", "server", "engine", "sampler", "batch-worker"] = "all"
    """`server` answers clients, `engine` trains and samples, `sampler` only samples, `batch-worker` runs bulk jobs,
    `all` does everything."""

    health_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of `/healthz` and `/metrics` in roles that answer no clients."""

    engines: int = Field(default=1, ge=0, le=64)
    """Engines for each base model, in the roles `all` and `engine`."""

    samplers: int | None = Field(default=None, ge=0, le=64)
    """Dedicated samplers for each base model; empty means one in the role `sampler`, else none."""

    sampler_version_bytes: int = Field(default=0, ge=0)
    """Adapter versions that a dedicated sampler keeps in memory. 0 means a quarter of the default of
    resident_model_bytes."""

    peer_host: str = "127.0.0.1"
    """Address at which dedicated samplers reach this machine's engines. Not encrypted: use a private network."""

    models: tuple[str, ...] = ()
    """Base models, each `NAME=DIRECTORY_OR_HUB_ID` or the latter alone, as a JSON list; empty means
    tinsmith/nano."""

    backend: str = "torch"
    """`torch`, `fake` (instant, for tests of clients), `full` (trains all weights) or `sharded` (several devices;
    chosen by itself)."""

    vision: bool = True
    """Whether images are taken by models that know them."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""

    dtype: str = "auto"
    """Format of the frozen base model: `auto`, `float32` or `bfloat16`."""

    deterministic: bool = False
    """Whether every bit of a result depends on its request alone; slow, for CPUs (docs/numerics.md)."""

    quantize: str = "off"
    """Base model's linears: `off`, `int8` or `nf4`, which need `tinsmith[quantize]`."""

    data_parallel: int = Field(default=1, ge=1)
    """Devices that share the sequences of a step (docs/howto/several-devices.md)."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Devices that share each layer."""

    shard_base: bool = False
    """Whether each data-parallel device keeps a part of every layer only."""

    rank_timeout_s: float = Field(default=600.0, gt=0)
    """How long an engine's ranks wait for each other before a restart; longer than a micro-batch."""

    sampler: Literal["local", "vllm", "sglang"] = "local"
    """`local` (the engine), `vllm` or `sglang` (docs/howto/vllm.md)."""

    sampler_url: str = Field(default="", pattern=r"^(https?://[^?#]+)?$")
    """Address of a running vLLM or SGLang; empty means that each engine starts one."""

    sampler_python: str = ""
    """Python that has vLLM or SGLang; empty means this one."""

    sampler_options: str = ""
    """More command line options for it."""

    sampler_adapters: Path | None = None
    """Directory through which adapters reach it, under the same path on both machines; empty means one in the data
    directory."""

    sampler_loaded_adapters: int = Field(default=32, ge=1)
    """Adapters that it has loaded at a time."""

    sampler_shares_device: bool = False
    """Whether it is on the device that trains, and sleeps during a step."""

    engine_threads: int = Field(default=0, ge=0)
    """Compute threads of an engine; 0 leaves the choice to torch."""

    resident_model_bytes: int = Field(default=0, ge=0)
    """Adapters in training, with gradients and optimizer state, that stay in device memory; others go to disk. 0
    means two fifths of what is free."""

    memory_budget: ByteSize = Field(default=ByteSize(0), ge=0)
    """Device memory of one engine, such as `6GiB` (docs/howto/memory.md). 0 means a bound for each holder."""

    max_body_bytes: int = Field(default=64 * MEBIBYTE, gt=0)
    """Largest request body, after decompression."""

    max_file_bytes: int = Field(default=512 * MEBIBYTE, gt=0)
    """Largest upload to /v1/files."""

    max_upload_bytes: int = Field(default=4096 * MEBIBYTE, gt=0)
    """Largest adapter, with optimizer state, that can be uploaded."""

    handler_threads: int = Field(default=16, ge=1, le=256)
    """Threads that work on requests other than transfers."""

    transfer_threads: int = Field(default=4, ge=1, le=64)
    """Uploads and downloads at a time; others wait."""

    hub_base_weights: bool = False
    """Whether /hub gives away the weights of base models."""

    step_token_budget: int = Field(default=65536, gt=0)
    """Most tokens of training requests that share one step."""

    step_seconds: float = Field(default=1.0, ge=0)
    """About how long a step lasts while several tenants have work; five times that for one tenant. 0: only
    step_token_budget bounds it."""

    hold_s: float = Field(default=30.0, gt=0, le=30)
    """How long a poll is held before it is answered with 408."""

    session_polls: bool = False
    """Whether clients follow a sampling session with one poll: fewer connections for thousands of samples, slower
    single samples."""

    tunnelled: bool = False
    """Whether clients may reach loopback through a tunnel that sets no proxy header; they are then asked to
    compress bodies."""

    session_timeout_s: float = 300.0
    """A session silent for this long expires and its models are unloaded; negative turns it off."""

    absent_after_s: float = Field(default=45.0, ge=0)
    """A session without heartbeat or poll for this long yields its places in the sampler to others until it
    returns; 0 turns it off."""

    session_sweep_s: float = 30.0
    """How often sessions are checked for expiry; negative turns it off."""

    result_grace_s: float = Field(default=3600.0, ge=0)
    """How long results outlive their session."""

    seq_gap_s: float = Field(default=330.0, gt=0)
    """How long a request waits for a missing earlier seq_id."""

    signing_secret: SecretStr = SecretStr("")
    """32 or more bytes that sign tokens and links, the same for servers that share a database; empty means one made
    in the data directory."""

    kept_samples: int = Field(default=200, ge=0, le=10_000)
    """Recent samples of each tenant kept for a day for the dashboard; 0 keeps none."""

    keep_checkpoints: int = Field(default=0, ge=0)
    """Checkpoints of each kind that a run keeps, besides published ones; 0 keeps all. `keep_last` of a save sets it."""

    audit_retention_days: float = Field(default=90.0, gt=0)
    """How long entries of the audit log are kept."""

    quota_queued_requests: int = Field(default=20_000, ge=0)
    """Most requests that a tenant may have waiting. For all quotas, 0 is no limit, more gets 429, and `tinsmith
    keys create --quota` overrides."""

    quota_queued_bytes: int = Field(default=4096 * MEBIBYTE, ge=0)
    """Most bytes of bodies that a tenant may have waiting."""

    quota_models: int = Field(default=0, ge=0)
    """Most models that a tenant may have loaded."""

    quota_checkpoint_bytes: int = Field(default=0, ge=0)
    """A tenant with this many bytes of checkpoints can save no more."""

    quota_file_bytes: int = Field(default=64 * 1024 * MEBIBYTE, ge=0)
    """A tenant with this many bytes of files can upload no more."""

    quota_tokens_per_minute: int = Field(default=0, ge=0)
    """Most tokens of training and sampling that a tenant may add in a minute, for each server."""

    batch_workers: int = Field(default=2, ge=0, le=1024)
    """Workers of the pool `local`."""

    batch_pools: tuple[str, ...] = ()
    """Further pools, each `NAME=FILE.yaml` with SkyPilot's keys."""

    ray_address: str = ""
    """`HOST:PORT` of the Ray cluster for the pool `ray` and pools with `infra: ray`. Needs `tinsmith[ray]`."""

    ray_workers: int = Field(default=8, ge=0, le=1024)
    """Most workers of the pool `ray`."""

    batch_tenants: tuple[str, ...] = ()
    """Tenants whose bulk jobs may run code, as the server's user. Without keys, everyone may."""

    batch_user_code: bool = True
    """Whether bulk jobs may run code at all."""

    batch_roots: tuple[str, ...] = ()
    """Where other tenants' bulk jobs may read and write besides `batch/TENANT` in the data directory: paths or
    URLs; `{tenant}` stands for the tenant."""

    batch_retention_days: float = Field(default=7.0, gt=0)
    """How long parts of failed and cancelled bulk jobs are kept."""

    openai_batch_window_s: float = Field(default=86400.0, gt=0)
    """How long an OpenAI batch has; its clients call it 24h."""

    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""

    log_format: Literal["logfmt", "json", "console"] = "logfmt"
    """`logfmt` (key=value), `json`, or `console` (aligned)."""

    metrics_token: SecretStr = SecretStr("")
    """Bearer token for `/metrics`. Without one, a server with keys refuses, and one without keys answers its
    machine."""

    metrics_tenants: int = Field(default=50, ge=0, le=10_000)
    """Tenants with labels of their own in `/metrics`; later ones are `other`."""

    otlp_endpoint: str = Field(default="", pattern=r"^(https?://[^?#]+)?$")
    """OpenTelemetry collector, such as `http://127.0.0.1:4318` (needs `tinsmith[otel]`); empty means no traces."""

    failpoints: str = ""
    """For tests: where a process kills itself, `NAME[:N][@server|engine|both]`, separated by commas."""

    @property
    def resolved_backend(self) -> str:
        """The backend: with several devices, torch becomes sharded."""
        several = self.data_parallel > 1 or self.tensor_parallel > 1 or self.shard_base
        return "sharded" if self.backend == "torch" and several else self.backend

    @property
    def resolved_data_dir(self) -> Path:
        return self.data_dir.expanduser().resolve()

    @field_validator("storage_dir")
    @classmethod
    def _is_location(cls, value: str) -> str:
        scheme, separator, rest = value.partition("://")
        if separator and (scheme not in ("file", *BUCKET_SCHEMES) or not rest.strip("/")):
            raise ValueError("it must be a directory, file:///DIRECTORY, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX")
        return value

    @property
    def has_bucket(self) -> bool:
        """Whether files are in an object store rather than on a disk."""
        return self.storage_dir.startswith(tuple(f"{scheme}://" for scheme in BUCKET_SCHEMES))

    def storage_location(self, kind: str) -> str:
        """Where the files of one kind are: a path or a URL."""
        if "://" in self.storage_dir:
            return f"{self.storage_dir.rstrip('/')}/{kind}"
        root = Path(self.storage_dir).expanduser().resolve() if self.storage_dir else self.resolved_data_dir
        return str(root / kind)

    @property
    def cache_dir(self) -> Path:
        """The local cache of a bucket's files."""
        return self.resolved_data_dir / "cache"

    @property
    def answers_clients(self) -> bool:
        return self.role in ("all", "server")

    @property
    def runs_bulk_jobs(self) -> bool:
        return self.role in ("all", "batch-worker")

    @property
    def listening_port(self) -> int | None:
        """None if this process listens nowhere."""
        return self.port if self.answers_clients else self.health_port

    @property
    def num_engines(self) -> int:
        """For each base model, in this process's role."""
        return self.engines if self.role in ("all", "engine") else 0

    @property
    def num_samplers(self) -> int:
        """For each base model, in this process's role."""
        if self.role not in ("all", "sampler"):
            return 0
        return int(self.role == "sampler") if self.samplers is None else self.samplers

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.resolved_data_dir / 'tinsmith.db'}"


def load(given: dict[str, object]) -> Settings:
    """The settings of this process: `given` over the environment over the defaults. Raises SettingsError."""
    known = sorted(name.upper() for name in Settings.model_fields)
    found = sorted(name.removeprefix(PREFIX) for name in os.environ if name.startswith(PREFIX))
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(name, known)
            those = ", ".join(PREFIX + each for each in near or known)
            says = "the nearest" if near else "known"
            raise SettingsError(f"the environment sets {PREFIX}{name}, which is no setting; {says}: {those}")
    try:
        return Settings.model_validate({**Settings().model_dump(), **given})
    except ValidationError as error:
        raise SettingsError(_in_words(error)) from None


def engine_environment(metrics_dir: Path | None = None, *, bucket: bool = False) -> dict[str, str]:
    """The environment of an engine process: the user's, without secrets except PGPASSWORD and, with a `bucket`, the
    bucket's credentials. Its settings come by pipe. `metrics_dir` is for its meters, since prometheus-client reads this
    variable alone, at its import. The rest was measured:

    - OpenMP threads spin for microseconds before they sleep. Its default of milliseconds takes cores from other
      processes (a 32-token step beside another engine on two cores: 1,200 ms against 29); no spinning makes large steps
      a fifth slower.
    - oneDNN and torch cache compiled products for fewer shapes than their default of 1,024, at 0.3 to 1 MiB each, since
      data of all lengths rarely repeat a shape.
    - glibc keeps freed blocks, in huge pages: otherwise a step of 8 x 32 tokens with m50 has 25,000 page faults, a
      fifth of its time.
    """
    needed = {name: value for name, value in os.environ.items() if not _is_secret(name)}
    kept = dict.fromkeys(("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), str(KEPT_PRODUCTS))
    metered = {"PROMETHEUS_MULTIPROC_DIR": str(metrics_dir)} if metrics_dir else {}
    own = {"GOMP_SPINCOUNT": "2000", "TOKENIZERS_PARALLELISM": "false", "GLIBC_TUNABLES": HEAP}
    # The ranks of an engine are on one machine and must not listen elsewhere.
    own |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo") if sys.platform == "linux" else {}
    cloud = ("AWS_", "GOOGLE_", "AZURE_") if bucket else ()
    credentials = {name: value for name, value in os.environ.items() if name.startswith(cloud)}
    return {**own, **kept, **needed, **metered, **credentials}


def worker_environment() -> dict[str, str]:
    """The environment of a worker of bulk jobs: without secrets except the credentials of buckets."""
    return {name: value for name, value in engine_environment(bucket=True).items() if name not in RAY_OF_ACTORS}


def role_environment() -> dict[str, str]:
    """The environment of a process that may connect to Ray and reads its settings from a pipe."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(PREFIX) and name not in RAY_OF_ACTORS
    }


def ray_variables(token_path: Path | None = None) -> dict[str, str]:
    """Ray's environment before its import: no usage reports. For a cluster of this machine alone, also a token from a
    file and the loopback interface (by a variable that is named after other systems, where it is the default).
    """
    quiet = {"RAY_USAGE_STATS_ENABLED": "0"}
    if token_path is None:
        return quiet
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path)}
    return {**quiet, **own, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def prepare_ray(token_path: Path | None = None) -> None:
    os.environ.update(ray_variables(token_path))


def ray_root() -> str:
    """The directory in which Ray keeps its sessions: RAY_TMPDIR, else /tmp. The paths of its sockets must be short, so
    TMPDIR, which is long on some systems, is not used.
    """
    return os.environ.get("RAY_TMPDIR", "/tmp")


def portable(settings: Settings) -> dict[str, object]:
    """The settings for a process on another machine, as JSON with secrets; shared locations are absolute."""
    values: dict[str, object] = settings.model_dump(mode="json")
    for name, value in settings:
        if isinstance(value, SecretStr):
            values[name] = value.get_secret_value()
    storage = settings.storage_dir
    if "://" not in storage:
        storage = str(Path(settings.storage_location("any")).parent)
    return values | {"database_url": settings.resolved_database_url, "storage_dir": storage}


def _is_secret(name: str) -> bool:
    return name.startswith(PREFIX) or not SECRET_WORDS.isdisjoint(name.upper().split("_"))


def storage_endpoints() -> dict[str, str]:
    """The custom endpoints of object stores, scheme -> URL, from the usual variables. The libraries themselves read
    keys and regions.
    """
    found = {
        "s3": os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", ""),
        "gs": os.environ.get("STORAGE_EMULATOR_HOST", ""),
    }
    return {
        scheme: url if url.startswith(("http://", "https://")) else f"http://{url}"
        for scheme, url in found.items()
        if url
    }


def client_address() -> tuple[str, str]:
    """A client's server address and key: the SDK's variables, or a server on this machine."""
    return (
        os.environ.get("TINKER_BASE_URL") or "http://127.0.0.1:8000",
        os.environ.get("TINKER_API_KEY") or "tml-local",
    )


def _in_words(error: ValidationError) -> str:
    def fix(problem: ErrorDetails) -> str:
        if problem["type"].startswith("byte_size"):
            return "it must be a number of bytes, or one with a unit, such as 6GiB"
        return problem["msg"].removeprefix("Value error, ")

    return "; ".join(f"{'.'.join(map(str, one['loc']))} is {one['input']!r}: {fix(one)}" for one in error.errors())
