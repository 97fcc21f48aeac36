"""The groups of settings, each with its fields, their defaults and what follows from them.

The docstring of a class is its heading in docs/settings.md, and that of a field its description. A function that needs
the settings of one subject takes the group; `Settings` has them all.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tinsmith.runtime.sizes import MEBIBYTE

PREFIX = "TINSMITH_"
BUCKET_SCHEMES = ("s3", "gs")

DEGREES = ("data_parallel", "tensor_parallel", "context_parallel", "expert_parallel", "pipeline_parallel")
"""Settings of how an engine divides its base model; `shard_base` is apart."""

KeyPrefix = Annotated[str, Field(min_length=1, max_length=32, pattern=r"^[!-~]+$")]


class SettingsGroup(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", use_attribute_docstrings=True)


class AddressSettings(SettingsGroup):
    """Addresses."""

    host: str = "127.0.0.1"
    """Address to listen on. Without API keys, only loopback addresses are accepted."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""

    key_prefixes: tuple[KeyPrefix, ...] = Field(default=("tml-",), min_length=1)
    """Accepted prefixes of API keys. New keys have the first; the SDK sends only keys with `tml-`."""

    public_url: str = Field(default="", pattern=r"^(https?://[^/?#]+[^?#]*)?$")
    """Base URL of links, `https://HOST/PREFIX`, for proxies that strip a path prefix; empty means the URL that the
    client used."""

    trust_forwarded_headers: bool = False
    """Whether to trust X-Forwarded-Host, -Proto and -Prefix; only behind a proxy."""


class StorageSettings(SettingsGroup):
    """Storage."""

    data_dir: Path = Path("~/.tinsmith")
    """Directory of the database, checkpoints and logs."""

    database_url: str = ""
    """`postgresql://USER:PASSWORD@HOST/NAME` or `sqlite:///FILE`; empty means SQLite in the data directory."""

    database_connect_timeout_s: int = Field(default=3, ge=2, le=60)
    """How long an attempt to connect to a host of Postgres may take."""

    database_timeout_s: float = Field(default=5.0, ge=1, le=600)
    """How long a statement on Postgres may take, and a request may wait for a connection. Migrations have no limit,
    and the janitor's statements one of ten minutes."""

    storage_dir: str = ""
    """Storage of checkpoints, snapshots, versions and uploads: a directory, `s3://BUCKET/PREFIX` or
    `gs://BUCKET/PREFIX`; empty means the data directory."""

    storage_cache_bytes: int = Field(default=16 * 1024 * MEBIBYTE, gt=0)
    """Size of the local cache of bucket files."""

    @property
    def resolved_data_dir(self) -> Path:
        return self.data_dir.expanduser().resolve()

    def create_key_command(self, directory: str = "") -> str:
        """The command that makes a key for this server. `directory` replaces the data directory's path, which a client
        without a key must not learn.
        """
        command = "tinsmith keys create TENANT"
        if self.database_url:
            return f"TINSMITH_DATABASE_URL=... {command}"
        if self.data_dir == type(self).model_fields["data_dir"].default:
            return command
        return f"{command} --data-dir {directory or shlex.quote(str(self.resolved_data_dir))}"

    @field_validator("data_dir", mode="before")
    @classmethod
    def _check_data_dir(cls, value: object) -> object:
        if value == "":
            raise ValueError("it must be a directory; is a variable of the shell not set?")
        return value

    @field_validator("storage_dir")
    @classmethod
    def _is_location(cls, value: str) -> str:
        scheme, separator, path = value.partition("://")
        if separator and (scheme not in ("file", *BUCKET_SCHEMES) or not path.strip("/")):
            raise ValueError("it must be a directory, file:///DIRECTORY, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX")
        return value

    @property
    def has_bucket(self) -> bool:
        """Whether files are in an object store."""
        return self.storage_dir.startswith(tuple(f"{scheme}://" for scheme in BUCKET_SCHEMES))

    def storage_location(self, kind: str) -> str:
        """The path or URL of the files of one kind."""
        if "://" in self.storage_dir:
            return f"{self.storage_dir.rstrip('/')}/{kind}"
        root = Path(self.storage_dir).expanduser().resolve() if self.storage_dir else self.resolved_data_dir
        return str(root / kind)

    @property
    def merged_directory(self) -> Path:
        """The directory of merged models, always on a disk: that of this server if files are in an object store."""
        return self.resolved_data_dir / "merged" if self.has_bucket else Path(self.storage_location("merged"))

    @property
    def cache_dir(self) -> Path:
        """The local cache of a bucket's files."""
        return self.resolved_data_dir / "cache"

    @property
    def database_timeouts(self) -> tuple[int, float]:
        """The limits of connecting to Postgres and of a statement, in seconds."""
        return self.database_connect_timeout_s, self.database_timeout_s

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.resolved_data_dir / 'tinsmith.db'}"


class ProcessSettings(SettingsGroup):
    """Processes."""

    engine_lease_s: float = Field(default=15.0, gt=0)
    """An engine that is silent for this long loses its runs to other engines."""

    rebalance_idle_s: float = Field(default=10.0, ge=0)
    """A run that is idle for this long moves to an engine with at least two runs fewer; 0 turns this off."""

    role: Literal["all", "server", "engine", "sampler", "batch-worker"] = "all"
    """`server` serves clients, `engine` trains and samples, `sampler` only samples, `batch-worker` runs bulk jobs,
    `all` does everything."""

    health_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of `/healthz`, `/readyz` (engines are ready) and `/metrics` in roles that serve no clients."""

    engines: int = Field(default=1, ge=0, le=64)
    """Engines for each base model, in the roles `all` and `engine`."""

    samplers: int | None = Field(default=None, ge=0, le=64)
    """Dedicated samplers for each base model; empty means one in the role `sampler`, else none."""

    sampler_version_bytes: int = Field(default=0, ge=0)
    """Adapter versions that a dedicated sampler keeps in memory. 0 means a quarter of the default of
    resident_model_bytes."""

    peer_host: str = "127.0.0.1"
    """Address at which dedicated samplers and other ranks reach this machine's engines. Not encrypted: use a private
    network."""

    @property
    def answers_clients(self) -> bool:
        return self.role in ("all", "server")

    @property
    def runs_bulk_jobs(self) -> bool:
        return self.role in ("all", "batch-worker")

    @property
    def num_engines(self) -> int:
        """Engines of each base model in this process's role."""
        return self.engines if self.role in ("all", "engine") else 0

    @property
    def num_samplers(self) -> int:
        """Dedicated samplers of each base model in this process's role."""
        if self.role not in ("all", "sampler"):
            return 0
        return int(self.role == "sampler") if self.samplers is None else self.samplers


class ModelSettings(SettingsGroup):
    """Base models and devices."""

    models: tuple[str, ...] = ()
    """Base models: a JSON list of `NAME=DIRECTORY_OR_HUB_ID` or `DIRECTORY_OR_HUB_ID`; empty means tinsmith/nano."""

    models_from: tuple[Path, ...] = ()
    """Directories with base models `NAME` or `ORG/NAME` to load on demand, a JSON list (docs/howto/on-demand.md)."""

    allow_models: tuple[str, ...] = ()
    """Further base models to load on demand, as in `models`."""

    idle_minutes: float = Field(default=30.0, gt=0)
    """Minutes without requests after which an engine on demand ends."""

    on_demand_bytes: ByteSize = Field(default=ByteSize(0), ge=0)
    """Memory of the host, or of each GPU, for engines on demand, such as `64GiB`; 0 means what is free."""

    backend: str = "torch"
    """`torch`, `fake` (instant, for tests of clients), `full` (trains all weights) or `sharded` (several devices;
    selected automatically)."""

    vision: bool = True
    """Whether vision models accept images."""

    tool_parser: str = "auto"
    """Form of the models' tool calls: `auto` (the chat template decides) or a name of docs/openai.md, for all models or
    as `MODEL=NAME,MODEL=NAME`."""

    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|(cuda|xpu)(:\d+)?)$")
    """`auto` (`cuda` or `cpu`), `cpu`, `cuda`, `cuda:N`, or, not tested, `mps` (Apple), `xpu` or `xpu:N` (Intel)."""

    dtype: str = "auto"
    """Dtype of the frozen base model: `auto`, `float32` or `bfloat16`. `auto` is bfloat16 on CUDA, and on a CPU with
    bfloat16 instructions if the checkpoint is stored in it; else float32."""

    deterministic: bool = False
    """Whether results are bitwise reproducible and independent of other requests; slow, for CPUs (docs/numerics.md)."""

    quantize: str = "off"
    """Quantization of the base model's linear layers and experts: `off`, `fp8`, or `int8` or `nf4`, which need
    `tinsmith[quantize]`."""

    profile: Path | None = None
    """Directory for traces of an engine's first steps (docs/howto/gpu.md)."""

    data_parallel: int = Field(default=0, ge=0)
    """Devices that split the sequences of a step. Without this and the next four, an engine alone on several GPUs
    chooses by their free memory (docs/howto/several-devices.md)."""

    tensor_parallel: int = Field(default=0, ge=0)
    """Devices that split each layer."""

    context_parallel: int = Field(default=0, ge=0)
    """Devices that split the tokens of each training sequence."""

    expert_parallel: int = Field(default=0, ge=0)
    """Devices, among these, that split the routed experts."""

    pipeline_parallel: int = Field(default=0, ge=0)
    """Devices that split the layers, as stages of a pipeline."""

    shard_base: bool = False
    """Whether to shard the base weights across data- and context-parallel devices (as FSDP does)."""

    machines: int = Field(default=1, ge=1)
    """Machines of one engine; all but the first run `tinsmith rank` (docs/howto/several-devices.md)."""

    rank_port: int = Field(default=29500, ge=0, le=65535)
    """Port of peer_host at which ranks of other machines join; 0 takes a free one."""

    rank_timeout_s: float = Field(default=600.0, gt=0)
    """How long an engine's ranks wait for each other before a restart; must exceed the time of a micro-batch."""

    @property
    def loads_on_demand(self) -> bool:
        """Whether some base models are loaded at their first request."""
        return bool(self.models_from or self.allow_models)

    @property
    def num_resident_models(self) -> int:
        """Base models that are loaded at start: tinsmith/nano if no other is named."""
        return len(self.models) or int(not self.loads_on_demand)

    @property
    def resolved_backend(self) -> str:
        """The backend: with several devices, torch becomes sharded."""
        has_several_devices = self.num_ranks > 1 or self.expert_parallel > 1 or self.shard_base or self.machines > 1
        return "sharded" if self.backend == "torch" and has_several_devices else self.backend

    @property
    def num_ranks(self) -> int:
        """The product of the given degrees."""
        return math.prod(max(1, getattr(self, name)) for name in DEGREES if name != "expert_parallel")


class RemoteSamplerSettings(SettingsGroup):
    """vLLM and SGLang."""

    sampler: Literal["auto", "local", "vllm", "sglang"] = "auto"
    """`vllm` or `sglang` (docs/howto/vllm.md); `auto` and `local` are the engine."""

    sampler_url: str = Field(default="", pattern=r"^(https?://[^?#]+)?$")
    """Address of a running vLLM or SGLang; empty means that each engine starts one."""

    sampler_api_key: SecretStr = SecretStr("")
    """Bearer key for a running vLLM or SGLang."""

    sampler_headers: Mapping[str, str] = Field(default_factory=dict, repr=False)
    """Further headers for a running vLLM or SGLang, as a JSON object."""

    sampler_verify: str = "true"
    """How to verify the TLS certificate of a running vLLM or SGLang: `true`, `false`, or a file of certificates."""

    sampler_timeout_s: float = Field(default=0.0, ge=0)
    """Read timeout of a request to vLLM or SGLang, in seconds; 0 means no limit."""

    sampler_adapters_url: str = Field(default="", pattern=r"^(https?://[^?#/]+/?)?$")
    """Address at which vLLM or SGLang pulls adapters from the engine (its HF_ENDPOINT); empty means shared files."""

    sampler_python: str = ""
    """Python interpreter that has vLLM or SGLang; empty means the server's own."""

    sampler_options: str = ""
    """Further command-line options for vLLM or SGLang."""

    sampler_adapters: Path | None = None
    """Directory through which vLLM or SGLang receives adapters, under the same path on both machines; empty means
    /dev/shm, or the data directory if that is full or vLLM was started elsewhere."""

    sampler_loaded_adapters: int = Field(default=32, ge=1)
    """Most adapters loaded by vLLM or SGLang at the same time."""

    sampler_shares_device: bool = False
    """Whether vLLM or SGLang runs with its sleep mode: it leaves the device to training steps, and operators can put a
    dedicated sampler to sleep."""

    @property
    def samples_elsewhere(self) -> bool:
        """Whether vLLM or SGLang samples."""
        return self.sampler in ("vllm", "sglang")


class LimitSettings(SettingsGroup):
    """Memory and limits."""

    engine_threads: int = Field(default=0, ge=0)
    """The most compute threads of an engine; it uses fewer while other processes are busy. 0 leaves the choice to
    torch."""

    resident_model_bytes: int = Field(default=0, ge=0)
    """Device memory for adapters in training with their gradients and optimizer state; other adapters are stored on
    disk. 0 means two fifths of the free memory, and less beside a KV cache on a GPU."""

    memory_budget: ByteSize = Field(default=ByteSize(0), ge=0)
    """Device memory of one engine, such as `6GiB` (docs/howto/memory.md). 0 means a bound for each holder."""

    kv_cache_bytes: ByteSize = Field(default=ByteSize(0), ge=0)
    """KV cache of an engine's own sampler, such as `8GiB`. 0 means up to 512 MiB or one context, and a quarter of
    memory at most; on a GPU what training leaves (docs/howto/memory.md), allocated once."""

    sampler_sequences: int = Field(default=0, ge=0)
    """Most sequences that an engine samples at the same time; others wait. 0 means 256, on a GPU 512."""

    sampler_step_tokens: int = Field(default=0, ge=0)
    """Most prompt and sampled tokens in one decode step. 0 means 2048, for larger models on a CPU 512."""

    max_body_bytes: int = Field(default=64 * MEBIBYTE, gt=0)
    """Largest request body, after decompression."""

    max_file_bytes: int = Field(default=512 * MEBIBYTE, gt=0)
    """Largest upload to /v1/files."""

    max_upload_bytes: int = Field(default=4096 * MEBIBYTE, gt=0)
    """Largest upload of an adapter with its optimizer state."""

    handler_threads: int = Field(default=16, ge=1, le=256)
    """Threads for requests other than transfers."""

    transfer_threads: int = Field(default=4, ge=1, le=64)
    """Concurrent uploads and downloads; others wait."""

    hub_base_weights: bool = False
    """Whether /hub serves the weights of base models."""

    step_token_budget: int = Field(default=65536, gt=0)
    """Most tokens of training requests that share one step."""

    step_seconds: float = Field(default=1.0, ge=0)
    """Approximate duration of a step while several tenants have work; five times that for one tenant. 0: only
    step_token_budget limits a step."""


class SessionSettings(SettingsGroup):
    """Clients and sessions."""

    hold_s: float = Field(default=30.0, gt=0, le=30)
    """How long a long poll is held before it returns 408."""

    strict_fields: bool = False
    """Refuse the fields of OpenAI's and Anthropic's clients that would otherwise be ignored and named in the response
    header `tinsmith-ignored-fields`."""

    refuse_late_loads: bool = False
    """Refuse a load into a model that has had other requests, as the hosted service does."""

    session_polls: bool = False
    """Whether clients poll once for a whole sampling session: fewer connections for thousands of samples, but slower
    single samples."""

    tunnelled: bool = False
    """Whether clients may reach loopback through a tunnel that sets no proxy header; they then compress bodies."""

    session_timeout_s: float = 300.0
    """A session that is silent for this long expires, and its models are unloaded; a negative value turns this off."""

    absent_after_s: float = Field(default=45.0, ge=0)
    """A session without a heartbeat or poll for this long releases its slots in the sampler until it returns; 0 turns
    this off."""

    session_sweep_s: float = 30.0
    """Interval of the checks for expired sessions, checkpoints and files; a negative value turns off the first."""

    result_grace_s: float = Field(default=3600.0, ge=0)
    """How long results are kept after their session has ended."""

    seq_gap_s: float = Field(default=330.0, gt=0)
    """How long a request waits for a missing earlier seq_id."""


class TenantSettings(SettingsGroup):
    """Secrets, records and quotas."""

    signing_secret: SecretStr = SecretStr("")
    """Secret of 32 or more bytes that signs tokens and links, the same for servers that share a database; empty means
    one generated in the data directory."""

    stored_samples: int = Field(default=5000, ge=0, le=100_000)
    """Samples of each tenant kept for the dashboard; 0 keeps none."""

    stored_samples_of_run: int = Field(default=500, ge=1, le=2000)
    """Samples kept of each run, and of weights without a run."""

    stored_samples_days: float = Field(default=7.0, gt=0)
    """How long samples are kept."""

    warnings_url: SecretStr = SecretStr("")
    """Address (http or https) that gets each warning of the dashboard once, as a POST of JSON; empty posts none."""

    @field_validator("warnings_url")
    @classmethod
    def _is_address(cls, value: SecretStr) -> SecretStr:
        address = value.get_secret_value()
        if address and not re.fullmatch(r"https?://[^/?#\s@]+([/?][^#\s]*)?", address):
            raise ValueError("it must be http://HOST/PATH or https://HOST/PATH, without a user, spaces or a fragment")
        return value

    keep_checkpoints: int = Field(default=0, ge=0)
    """Checkpoints of each kind that a run keeps besides published ones; 0 keeps all. A save's `keep_last` overrides."""

    audit_retention_days: float = Field(default=90.0, gt=0)
    """How long entries of the audit log are kept."""

    operator_tenants: tuple[str, ...] = ()
    """Tenants that may list and change dedicated samplers over HTTP. Without keys, everyone may."""

    quota_queued_requests: int = Field(default=20_000, ge=0)
    """Most queued requests of a tenant. For all quotas, 0 means no limit, a request beyond the limit gets 429, and
    `tinsmith keys create --quota` overrides."""

    quota_queued_bytes: int = Field(default=4096 * MEBIBYTE, ge=0)
    """Most bytes of a tenant's queued request bodies."""

    quota_models: int = Field(default=0, ge=0)
    """Most loaded models of a tenant."""

    quota_checkpoint_bytes: int = Field(default=0, ge=0)
    """A tenant with this many bytes of checkpoints cannot save more, nor upload or copy beyond it."""

    quota_file_bytes: int = Field(default=64 * 1024 * MEBIBYTE, ge=0)
    """A tenant with this many bytes of files cannot upload more."""

    quota_response_bytes: int = Field(default=1024 * MEBIBYTE, ge=0)
    """A tenant with this many bytes of stored responses cannot store more."""

    quota_tokens_per_minute: int = Field(default=0, ge=0)
    """Most tokens of training and sampling that a tenant may submit per minute and server."""


class BatchSettings(SettingsGroup):
    """Bulk jobs."""

    batch_workers: int = Field(default=2, ge=0, le=1024)
    """Workers of the pool `local`."""

    batch_pools: tuple[str, ...] = ()
    """Further worker pools, each `NAME=FILE.yaml` with SkyPilot's keys."""

    batch_job: int = Field(default=0, ge=0)
    """Run only this bulk job and end with it; managed pools set this on their machines."""

    ray_address: str = ""
    """`HOST:PORT` of the Ray cluster for the pool `ray` and pools with `infra: ray`. Needs `tinsmith[ray]`."""

    ray_workers: int = Field(default=8, ge=0, le=1024)
    """Most workers of the pool `ray`."""

    batch_tenants: tuple[str, ...] = ()
    """Tenants whose bulk jobs may run code, as the server's user. Without keys, everyone may."""

    batch_user_code: bool = True
    """Whether bulk jobs may run code at all."""

    batch_secrets_dir: Path | None = None
    """Directory of the secrets that bulk jobs may name: a file `NAME` for all tenants that may run code, or
    `TENANT/NAME` for one. Read whenever a worker starts."""

    batch_roots: tuple[str, ...] = ()
    """Paths or URLs that bulk jobs of tenants outside `batch_tenants` may read and write, in addition to `batch/TENANT`
    in the data directory. `{tenant}` is replaced by the tenant's id."""

    batch_retention_days: float = Field(default=7.0, gt=0)
    """How long parts of failed and cancelled bulk jobs are kept."""

    openai_batch_window_s: float = Field(default=86400.0, gt=0)
    """Time limit of an OpenAI batch; OpenAI's clients call it 24h."""


class TelemetrySettings(SettingsGroup):
    """Logs, metrics, traces and tests."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""

    @field_validator("log_level", mode="before")
    @classmethod
    def _in_capitals(cls, value: object) -> object:
        return value.upper() if isinstance(value, str) else value

    log_format: Literal["logfmt", "json", "console"] = "logfmt"
    """`logfmt` (key=value), `json`, or `console` (aligned)."""

    metrics_token: SecretStr = SecretStr("")
    """Bearer token for `/metrics`. Without one, a server with API keys refuses `/metrics`, and a server without keys
    answers only its own machine."""

    metrics_tenants: int = Field(default=50, ge=0, le=10_000)
    """Most tenants with separate labels in `/metrics`; later ones share `other`."""

    otlp_endpoint: str = Field(default="", pattern=r"^(https?://[^?#]+)?$")
    """OpenTelemetry collector, such as `http://127.0.0.1:4318` (needs `tinsmith[otel]`); empty means no traces."""

    failpoints: str = ""
    """For tests: failpoints at which a process kills itself, `NAME[:N][@server|engine|both]`, or raises an exception,
    `NAME[:N]!ERROR` or `NAME!ERROR/SUFFIX`, comma-separated."""


GROUPS: tuple[type[SettingsGroup], ...] = (
    AddressSettings,
    StorageSettings,
    ProcessSettings,
    ModelSettings,
    RemoteSamplerSettings,
    LimitSettings,
    SessionSettings,
    TenantSettings,
    BatchSettings,
    TelemetrySettings,
)
"""In the order of docs/settings.md."""
