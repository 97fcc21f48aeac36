"""The JSON requests that create, save, load and unload models, as typed bodies.

The server validates a body before it stores it; the engine parses the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.json_schema import SkipJsonSchema

from tinsmith.errors import NotSupportedError, UserError
from tinsmith.types import LORA_ALPHA, OPTIMIZERS, LoraSpec
from tinsmith.wire.adapter_files import MAX_ALPHA, MAX_RANK
from tinsmith.wire.fields import (
    MAX_TEXT,
    ClosedBody,
    Ignored,
    Integer,
    Metadata,
    OneOf,
    Position,
    SequenceNumber,
    Text,
    TextMetadata,
    read_object,
    refuse,
    support_error,
    validate,
    validation_error,
)

DEFAULT_RANK = 32  # the SDK's
MAX_RECIPIENTS = 10  # the SDK's
TOKEN = "weights_access_token"
GRANTED_BY = "granted_by"
"""The server writes this field into a stored body in place of TOKEN, and ignores a client's value."""

MIN_RANK = 1
MAX_DEGREE = 4096  # of parallelism
MIN_TTL_S, MAX_TTL_S = 3600, 10 * 365 * 86400

Ttl = Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S, description="seconds; without it, the checkpoint never expires")]
Degree = Annotated[int, Field(ge=1, le=MAX_DEGREE)] | None
Recipients = Annotated[list[Text], Field(max_length=MAX_RECIPIENTS, fail_fast=True)]


def _refuse_enabled(reason: str) -> AfterValidator:
    """Marks an object that asks for something where its `enabled` is true; that is refused."""

    def check(value: object) -> None:
        if value and (not isinstance(value, dict) or value.get("enabled")):
            raise support_error(reason)

    return AfterValidator(check)


class OptimizerConfigBody(ClosedBody):
    type: Annotated[str, OneOf(tuple(OPTIMIZERS))] = "adamw"
    version: Integer | None = None

    @model_validator(mode="after")
    def _check_version(self) -> OptimizerConfigBody:
        only = OPTIMIZERS[self.type].version
        if only is None and self.version:
            raise UserError("optimizer_config.version is not supported by this server; leave it out (known here: type)")
        if only is not None and self.version not in (None, only):
            raise NotSupportedError(f"optimizer_config.version is {self.version}; this server knows {self.type} {only}")
        return self


class LoraConfigBody(ClosedBody):
    rank: Annotated[int, Field(ge=MIN_RANK, le=MAX_RANK)] = DEFAULT_RANK
    alpha: (
        Annotated[float, Field(gt=0, lt=MAX_ALPHA, description="the delta is (alpha / rank) * B @ A; default 32")]
        | None
    ) = None
    dropout: SkipJsonSchema[Annotated[Any, refuse("adapters are trained without dropout")]] = None
    seed: Integer | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @model_validator(mode="after")
    def _check_trained(self) -> LoraConfigBody:
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise validation_error(
                "trains nothing; at least one of train_attn, train_mlp and train_unembed must be true"
            )
        return self

    def spec(self, alpha: float = LORA_ALPHA) -> LoraSpec:
        """The adapter; `alpha` is for a body without one."""
        values = self.model_dump(exclude={"dropout"})
        return LoraSpec(**{**values, "alpha": alpha if self.alpha is None else self.alpha})


class ParallelismBody(ClosedBody):
    """How to divide the base model. An engine that is started for the request follows it; a running one refuses what it
    has not.
    """

    tensor_parallel_size: Degree = None
    pipeline_parallel_size: Degree = None
    context_parallel_size: Degree = None
    expert_parallel_size: Degree = None
    data_parallel_size: Degree = None
    num_gpus: Degree = None

    @property
    def degrees(self) -> dict[str, int]:
        """The requested degrees by the names of the engine's settings; empty without a request.

        Raises UserError if num_gpus is not a multiple of the other degrees.
        """
        names = ("tensor", "pipeline", "context", "expert", "data")
        sizes = {name: getattr(self, f"{name}_parallel_size") for name in names}
        degrees = {f"{name}_parallel": size for name, size in sizes.items() if size is not None}
        if self.num_gpus is None:
            return degrees
        group = math.prod(size for name, size in degrees.items() if name not in ("expert_parallel", "data_parallel"))
        data, remainder = divmod(self.num_gpus, group)
        if remainder or degrees.get("data_parallel", data) != data:
            raise UserError(
                f"parallelism_config.num_gpus is {self.num_gpus}, which the other degrees do not divide: {degrees}; "
                "give their product, or leave num_gpus out"
            )
        return degrees | {"data_parallel": data}

    def check(self, running: Mapping[str, int]) -> None:
        """Raises UserError if the running engine's degrees, by the names of its settings, are others."""
        for name, degree in self.degrees.items():
            if degree != running[name]:
                values = ", ".join(f"{setting} {value}" for setting, value in running.items())
                raise UserError(
                    f"parallelism_config asks for {name} {degree}, but the engine of this base model runs with "
                    f"{values}; leave it out, or ask when no engine of the base model runs"
                )


class CreateModel(ClosedBody):
    """The fields after `type` are those of tinkercloud's clients."""

    session_id: Text
    model_seq_id: Position
    base_model: Text
    user_metadata: Metadata | None = None
    lora_config: LoraConfigBody = LoraConfigBody()
    optimizer_config: OptimizerConfigBody = OptimizerConfigBody()
    type: Ignored = None
    max_batch_size: Ignored = None
    max_seq_len: Ignored = None
    parallelism_config: SkipJsonSchema[ParallelismBody | None] = None
    debug_train_only: Ignored = None
    checkpoint_path: SkipJsonSchema[Annotated[Any, refuse("send its tinker:// path to load_weights")]] = None
    rlve_config: SkipJsonSchema[Annotated[Any, _refuse_enabled("environments run in the client")]] = None
    wandb_config: SkipJsonSchema[Annotated[Any, _refuse_enabled("log from the client")]] = None

    @model_validator(mode="after")
    def _check_parallelism(self) -> CreateModel:
        if self.parallelism_config is not None:
            _ = self.parallelism_config.degrees
        return self

    @property
    def lora(self) -> LoraSpec:
        return self.lora_config.spec()


class LoadWeights(ClosedBody):
    """Creation by a load has `session_id` and `model_seq_id`; a load into an existing model has `model_id`.

    Without `optimizer_config` the optimizer is that of the checkpoint or, without its state, the default.
    `granted_by` is the tenant whose access token came with the request; the token is never stored.
    """

    path: Text
    model_id: Text | None = None
    seq_id: SequenceNumber | None = None
    session_id: Text | None = None
    model_seq_id: Position | None = None
    base_model: Text | None = None
    user_metadata: Metadata | None = None
    optimizer: bool = False
    optimizer_config: OptimizerConfigBody | None = None
    weights_access_token: Annotated[Any, WithJsonSchema({"type": "string", "maxLength": MAX_TEXT})] = None
    granted_by: SkipJsonSchema[Text | None] = None
    type: Ignored = None

    @property
    def optimizer_type(self) -> str | None:
        return None if self.optimizer_config is None else self.optimizer_config.type


class SaveRequest(ClosedBody):
    """A save in any of its three forms. A save without a `path` creates a sampling session and no checkpoint."""

    model_id: Text
    path: Text | None = None
    seq_id: SequenceNumber | None = None
    ttl_seconds: Ttl | None = None
    keep_last: (
        Annotated[int, Field(ge=1, le=2**31 - 1, description="older ones of this run and kind expire")] | None
    ) = None
    overwrite: SkipJsonSchema[bool] = False
    user_metadata: SkipJsonSchema[TextMetadata | None] = None
    sampling_session_seq_id: SkipJsonSchema[Position | None] = None
    kind: SkipJsonSchema[Annotated[str, OneOf(("snapshot", "inflight"))]] = "snapshot"
    age_encryption_recipients: SkipJsonSchema[Recipients] = Field(default_factory=list)
    type: Ignored = None

    @model_validator(mode="after")
    def _check_path(self) -> SaveRequest:
        if self.path is not None and (self.sampling_session_seq_id is not None or self.kind == "inflight"):
            raise UserError("path names a checkpoint; sampling_session_seq_id and kind 'inflight' take no path")
        if self.path is None and self.keep_last is not None:
            raise UserError(f"keep_last is {self.keep_last}; it needs a path, which names a checkpoint")
        return self


# The documented fields of each form. A field of another form is refused if it would have an effect.
class SaveWeights(SaveRequest):
    overwrite: bool = False
    user_metadata: TextMetadata | None = None


class SaveWeightsForSampler(SaveRequest):
    user_metadata: TextMetadata | None = None
    sampling_session_seq_id: Position | None = None
    kind: Annotated[str, OneOf(("snapshot", "inflight"))] = "snapshot"


class SaveWeightsExternal(SaveRequest):
    model_config = ConfigDict(json_schema_extra={"required": ["model_id", "path"]})

    age_encryption_recipients: Recipients = Field(default_factory=list)


def read_save(body: bytes) -> SaveRequest:
    return validate(SaveRequest, read_object(body))


def read_parallelism(body: bytes) -> ParallelismBody:
    """How a stored creation asks to divide the base model; without any degree if it does not."""
    return validate(ParallelismBody, read_object(body).get("parallelism_config") or {})


def read_load(body: bytes) -> LoadWeights:
    return validate(LoadWeights, read_object(body))


def optimizer_config(optimizer_type: str) -> dict[str, object]:
    """The optimizer's configuration in answers."""
    version = OPTIMIZERS[optimizer_type].version
    return {"type": optimizer_type, **({} if version is None else {"version": version})}
