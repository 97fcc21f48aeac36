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
"""What the name of a secret in the environment has among its words."""

BUCKET_SCHEMES = ("s3", "gs")

RAY_OF_ACTORS = frozenset(("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE", "RAY_LD_PRELOAD_ON_WORKERS"))
"""What Ray tells its own processes, and nobody that they start."""

HEAP = f"glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold={1 << 28}:glibc.malloc.mmap_threshold={1 << 25}"
"""How an engine's C library keeps memory: blocks of up to 32 MiB, which is the most, come from what it keeps."""

KEPT_PRODUCTS = 128
"""How many compiled matrix products an engine keeps."""


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Address to listen on. Anything but a loopback address is refused as long as there are no API keys."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""

    public_url: str = Field(default="", pattern=r"^(https?://[^/?#]+[^?#]*)?$")
    """Address in front of the links that clients are given, `https://HOST/PREFIX`; empty means the one that the client
    used. Behind a proxy that strips a path prefix, set this."""

    trust_forwarded_headers: bool = False
    """Whether X-Forwarded-Host, -Proto and -Prefix say where the client found this server; only behind a proxy that
    sets them."""

    data_dir: Path = Path("~/.tinsmith")
    """Directory of the database, the checkpoints and the logs of the engines."""

    database_url: str = ""
    """Where the database is: `postgresql://USER:PASSWORD@HOST/NAME`, or `sqlite:///FILE`; empty means a SQLite file in
    the data directory. Several servers may share a Postgres."""

    storage_dir: str = ""
    """Where checkpoints, snapshots, sampler versions and uploaded files are: a directory, or a bucket,
    `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`; empty means the data directory. Processes that share a database must
    share it."""

    storage_cache_bytes: int = Field(default=16 * 1024 * MEBIBYTE, gt=0)
    """Bytes of what is in a bucket that are kept on this machine's disk, below `cache` in the data directory."""

    engine_lease_s: float = Field(default=15.0, gt=0)
    """After this long without a sign of life, what an engine worked on goes to other engines."""

    rebalance_idle_s: float = Field(default=10.0, ge=0)
    """A run that was idle for this long goes to another engine of its base model, if that has been there for as long
    and has at least two runs fewer; 0: a run stays with its engine as long as that lives."""

    role: Literal["all", "server", "engine", "sampler", "batch-worker"] = "all"
    """What this process does: `server` answers clients, `engine` trains and samples, `sampler` only samples,
    `batch-worker` runs bulk jobs, and `all` is everything at once. Processes of all roles meet in the database and the
    storage, any number of each."""

    health_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of `/healthz` and `/metrics` in the roles that answer no clients; empty means none."""

    engines: int = Field(default=1, ge=0, le=64)
    """Engine processes for each base model, in the roles `all` and `engine`."""

    samplers: int | None = Field(default=None, ge=0, le=64)
    """Dedicated samplers for each base model; empty means one in the role `sampler`, and none in the role `all`."""

    sampler_version_bytes: int = Field(default=0, ge=0)
    """Bytes of adapter versions that a dedicated sampler keeps in memory, as they are on disk; beyond it those that
    were not sampled for longest go, and are fetched again when they are wanted. 0 means a quarter of what
    resident_model_bytes would be."""

    peer_host: str = "127.0.0.1"
    """Address of this machine at which the dedicated samplers of others reach its engines, to fetch new versions before
    they are in the storage; only for a private network, since nothing is encrypted. What is reached at no address is
    fetched from the storage."""

    models: tuple[str, ...] = ()
    """Base models to serve, each `NAME=DIRECTORY_OR_HUB_ID` or only the latter; empty means tinsmith/nano."""

    backend: str = "torch"
    """What computes: `torch`, `fake` (deterministic and instant, for tests of clients), `full` (every weight is
    trained, not an adapter: docs/howto/full.md), or `sharded`, which is torch on several devices and what `torch` means
    as soon as data_parallel or tensor_parallel is more than 1."""

    device: str = "auto"
    """Device of the torch backend: `auto`, `cpu`, `cuda` or `cuda:N`."""

    dtype: str = "auto"
    """Number format of the frozen base model: `auto`, `float32` or `bfloat16`."""

    deterministic: bool = False
    """Whether every bit of a result is to depend on its request alone, and not on what is computed beside it. It costs
    much of the speed (docs/numerics.md says how much), and is for CPUs."""

    quantize: str = "off"
    """What the frozen base model's linears are kept in: `off` (their own format), `int8` or `nf4`, which need
    `tinsmith[quantize]`. Adapters are not quantised."""

    cuda_graphs: bool = True
    """Whether decode steps on a GPU are captured, once for each size of batch and of context, and launched whole;
    without, each step starts its kernels one by one. For `cuda` only, and for models whose layers are written out
    (docs/howto/gpu.md)."""

    data_parallel: int = Field(default=1, ge=1)
    """Over how many devices the sequences of a step, and the samples, are spread. With tensor_parallel, an engine has
    data_parallel x tensor_parallel devices, and a process for each (docs/howto/several-devices.md)."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Among how many devices each layer of the base model is divided: its heads, and the width of its MLP."""

    shard_base: bool = False
    """Whether each of the data_parallel devices keeps a part of every layer only, and is given the others' when the
    layer runs: less memory, more traffic."""

    rank_timeout_s: float = Field(default=600.0, gt=0)
    """How long the processes of an engine on several devices wait for each other, before it is taken for dead and
    started again. It must be longer than a micro-batch takes."""

    sampler: Literal["local", "vllm", "sglang"] = "local"
    """What samples: `local`, the engine itself, or a `vllm` or `sglang` that it starts beside itself or finds at
    sampler_url (docs/howto/vllm.md)."""

    sampler_url: str = Field(default="", pattern=r"^(https?://[^?#]+)?$")
    """Address of a vLLM or SGLang that runs already; empty means that each engine starts one of its own."""

    sampler_python: str = ""
    """Python that has vLLM or SGLang; empty means this one."""

    sampler_options: str = ""
    """More options for the vLLM or SGLang that is started, as on a command line."""

    sampler_adapters: Path | None = None
    """Directory through which adapters reach vLLM or SGLang; empty means one in the data directory. An engine on
    another machine must see it under the same path."""

    sampler_loaded_adapters: int = Field(default=32, ge=1)
    """Adapters that vLLM or SGLang has at a time; beyond it the least recently used is unloaded."""

    sampler_shares_device: bool = False
    """Whether vLLM or SGLang is on the device that trains: it sleeps during a step, and wakes when there is something
    to sample."""

    engine_threads: int = Field(default=0, ge=0)
    """Compute threads of an engine; 0 leaves the choice to torch."""

    resident_model_bytes: int = Field(default=0, ge=0)
    """Bytes of adapters in training, with their gradients and optimizer state, that an engine keeps in its device's
    memory. Beyond it the least recently used are on disk until their next request. 0 means two fifths of what is free
    once the base model is loaded."""

    memory_budget: ByteSize = Field(default=ByteSize(0), ge=0)
    """What one engine may have of its device's memory, such as `6GiB`: base model, adapters in training, versions,
    activations, and keys and values together, which then make room for each other (docs/howto/memory.md). 0 means
    that each has a bound of its own."""

    max_body_bytes: int = Field(default=64 * MEBIBYTE, gt=0)
    """Largest request body, counted after decompression."""

    max_file_bytes: int = Field(default=512 * MEBIBYTE, gt=0)
    """Largest file that can be uploaded to /v1/files."""

    max_upload_bytes: int = Field(default=4096 * MEBIBYTE, gt=0)
    """Largest adapter, with its optimizer's state, that can be uploaded as a checkpoint."""

    handler_threads: int = Field(default=16, ge=1, le=256)
    """Threads that work on requests, beside those of transfers."""

    transfer_threads: int = Field(default=4, ge=1, le=64)
    """Uploads and downloads that are worked on at once; others wait for their turn, and hold up no other request."""

    hub_base_weights: bool = False
    """Whether the mirror at /hub gives away the weights of base models, and not their tokenizers and configurations
    only."""

    step_token_budget: int = Field(default=65536, gt=0)
    """Most tokens of training requests that share one step."""

    step_seconds: float = Field(default=1.0, ge=0)
    """About how long an engine trains and decodes before it looks for other work, in seconds, as long as more than one
    tenant had work in the last minute. It predicts from its last steps how many tokens fit. A single request is never
    divided. A tenant that is alone has steps five times as long. 0: only step_token_budget bounds a step."""

    hold_s: float = Field(default=30.0, gt=0, le=30)
    """How long a poll for an unfinished result is held before it is answered with 408."""

    session_polls: bool = False
    """Whether clients follow a sampling session with one poll, rather than poll for each sample. Fewer connections
    where thousands of samples wait at once; a single sample takes longer."""

    tunnelled: bool = False
    """Whether clients may come to a loopback address from elsewhere, through a tunnel or a proxy that does not say so
    (`X-Forwarded-For`, `Forwarded`, `Via`). They are asked to compress what they send, as all from elsewhere are; those
    on this machine are not, since that takes longer than the bytes would."""

    session_timeout_s: float = 300.0
    """A session without a heartbeat for this long expires and its models are unloaded; negative turns it off."""

    absent_after_s: float = Field(default=45.0, ge=0)
    """A session that sent no heartbeat and no poll for this long (the SDK sends a heartbeat every 10 s) gives its
    samples' places in the sampler to samples of other sessions that wait. They go back into the queue, begin again once
    it is heard of or nothing else is to be sampled, and fail when it expires. 0: they keep their places until then."""

    session_sweep_s: float = 30.0
    """How often sessions are checked for expiry; negative turns it off."""

    result_grace_s: float = Field(default=3600.0, ge=0)
    """How long results are kept after the end of their session."""

    seq_gap_s: float = Field(default=330.0, gt=0)
    """How long a request waits for a missing earlier seq_id (the SDK gives up re-sending one after 300 s)."""

    signing_secret: SecretStr = SecretStr("")
    """Secret of 32 or more bytes that signs tokens and download addresses; empty means one that is made in the data
    directory. Servers that share a database must share it."""

    kept_samples: int = Field(default=200, ge=0, le=10_000)
    """How many recent samples of each tenant are kept for a day, with prompts and answers, for the tenant to read in
    the dashboard; 0 keeps none."""

    audit_retention_days: float = Field(default=90.0, gt=0)
    """How long entries of the audit log are kept."""

    quota_queued_requests: int = Field(default=20_000, ge=0)
    """Most requests that one tenant may have waiting; 0 is no limit. As for all quotas, more are answered with 429 and
    sent again by the client, and a tenant's own limit (`tinsmith keys create --quota`) comes first."""

    quota_queued_bytes: int = Field(default=4096 * MEBIBYTE, ge=0)
    """Most bytes of request bodies that one tenant may have waiting; 0 is no limit."""

    quota_models: int = Field(default=0, ge=0)
    """Most models that one tenant may have loaded at a time; 0 is no limit."""

    quota_checkpoint_bytes: int = Field(default=0, ge=0)
    """A tenant whose checkpoints take this many bytes can save no more; 0 is no limit."""

    quota_file_bytes: int = Field(default=64 * 1024 * MEBIBYTE, ge=0)
    """A tenant whose uploaded and produced files take this many bytes can upload no more; 0 is no limit."""

    quota_tokens_per_minute: int = Field(default=0, ge=0)
    """Most tokens of training and sampling, as admitted, that one tenant may add in a minute; 0 is no limit. Each
    server counts for itself."""

    failpoints: str = ""
    """An aid for tests: where a process is to kill itself, `NAME[:N][@server|engine|both]`, several with commas
    (`failpoints.py` has the names); empty for nowhere."""

    batch_workers: int = Field(default=2, ge=0, le=1024)
    """Workers of the pool `local`: how many batches of bulk jobs run at a time."""

    batch_pools: tuple[str, ...] = ()
    """Further pools for bulk jobs on this machine, each `NAME=FILE.yaml` with SkyPilot's keys."""

    ray_address: str = ""
    """Ray cluster that runs the workers of bulk jobs in the pool `ray`, and in others with `infra: ray`: `HOST:PORT` of
    its head, from one of its nodes. Needs `tinsmith[ray]`."""

    ray_workers: int = Field(default=8, ge=0, le=1024)
    """Most workers of the pool `ray`, which is there once there is a ray_address."""

    batch_tenants: tuple[str, ...] = ()
    """Tenants whose bulk jobs may run code of theirs: functions and formats of their own. It runs as the user that this
    server runs as, so once there are keys nobody may who is not named here; without keys, everyone may."""

    batch_user_code: bool = True
    """Whether bulk jobs may run code of anybody's at all, with keys or without; if not, there are operations."""

    batch_roots: tuple[str, ...] = ()
    """Where bulk jobs of tenants that are not in batch_tenants may read and write besides the tenant's own directory,
    `batch/TENANT` in the data directory: paths, or URLs such as `s3://BUCKET/PREFIX`, which are opened as the server's
    user. `{tenant}` in one stands for the tenant; without it, what is there is shared."""

    batch_retention_days: float = Field(default=7.0, gt=0)
    """How long the parts of a bulk job that failed or was cancelled are kept, so that it can be resumed."""

    openai_batch_window_s: float = Field(default=86400.0, gt=0)
    """How long an OpenAI batch has; what is not done by then is named in its error file. Its clients call it 24h,
    whatever it is."""

    log_level: str = "INFO"
    """Level of the logs: DEBUG, INFO, WARNING or ERROR."""

    log_format: Literal["logfmt", "json", "console"] = "logfmt"
    """Form of a line of the logs: `logfmt` (key=value), `json`, or `console` (aligned, for reading)."""

    metrics_token: SecretStr = SecretStr("")
    """Bearer token that opens `/metrics`. Without one, a server that has keys shows its figures to nobody, and one
    without keys to everyone on its machine."""

    metrics_tenants: int = Field(default=50, ge=0, le=10_000)
    """How many tenants have figures of their own in `/metrics`: the first that come. All others are `other`."""

    otlp_endpoint: str = Field(default="", pattern=r"^(https?://[^?#]+)?$")
    """Collector of OpenTelemetry traces, such as `http://127.0.0.1:4318`, spoken to by OTLP over HTTP (needs
    `tinsmith[otel]`); empty means no traces."""

    @property
    def resolved_backend(self) -> str:
        """What computes: several devices are the sharded backend's affair."""
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
        """Where what was read from a bucket is kept."""
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
    """The environment of an engine process; what the user has set stays, but for secrets. `metrics_dir` is where its
    meters are written (prometheus-client reads this variable when it is imported, and nothing else).

    An engine's settings come by pipe, and it asks nobody for anything. A Postgres password (PGPASSWORD) is the one
    secret that it may need, and what opens the bucket where its files are in a `bucket`.

    OpenMP's waiting threads spin for a few microseconds and then sleep. Spinning for milliseconds, its default, takes
    the cores that the server, the client and other engines need (a 32-token step beside another engine on two cores:
    1,200 ms, against 29); sleeping at once makes large steps a fifth slower.

    oneDNN, and torch's layer above it, keep a compiled product for each of the last 1,024 shapes, at 0.3 to 1 MiB. Data
    of all lengths fill that, and hardly any of it is used again.

    Large blocks come and go at each step, and their pages with them: 25,000 faults in a step of 8 x 32 tokens with m50,
    a fifth of its time. In huge pages, for which glibc has to be told to ask, it is 50; where it keeps up to 256 MiB
    that nobody has just now, 2.
    """
    needed = {name: value for name, value in os.environ.items() if not _is_secret(name)}
    kept = dict.fromkeys(("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), str(KEPT_PRODUCTS))
    metered = {"PROMETHEUS_MULTIPROC_DIR": str(metrics_dir)} if metrics_dir else {}
    own = {"GOMP_SPINCOUNT": "2000", "TOKENIZERS_PARALLELISM": "false", "GLIBC_TUNABLES": HEAP}
    # The ranks of an engine are on one machine, and what they tell each other is for nobody else.
    own |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo") if sys.platform == "linux" else {}
    opening = _bucket_variables() if bucket else {}
    return {**own, **kept, **needed, **metered, **opening}


def worker_environment() -> dict[str, str]:
    """The environment of a worker of bulk jobs: without secrets, but for those that open its inputs and outputs."""
    return {name: value for name, value in engine_environment(bucket=True).items() if name not in RAY_OF_ACTORS}


def _bucket_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))}


def role_environment() -> dict[str, str]:
    """The environment of a process whose settings come by pipe, and which may speak to Ray on its own account."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(PREFIX) and name not in RAY_OF_ACTORS
    }


def ray_variables(token_path: Path | None = None) -> dict[str, str]:
    """What Ray must find in its environment before it is imported: that it reports its use to nobody; and, for a
    cluster of this machine alone, whose token is in a file, that it asks for it and stays on the loopback interface
    (the variable for that is named after the systems on which it is the default)."""
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
    """For another process on any machine, as JSON: with secrets, and with the places that are the same for all."""
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
    """Where object stores are, other than their providers' own addresses: scheme -> URL, in the variables that every
    tool for them reads. (Keys and regions are read by the libraries themselves.)"""
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
    """Where a client finds its server, and with which key: the SDK's own variables, or a server on this machine."""
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
