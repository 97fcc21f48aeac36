"""The JSON requests that make, save, load and unload models, as typed bodies.

The server validates a body to answer it, and the engine reads the same stored bytes.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.json_schema import SkipJsonSchema

from tinsmith.errors import NotSupportedError, UserError
from tinsmith.types import OPTIMIZERS, LoraSpec
from tinsmith.wire.fields import (
    MAX_TEXT,
    ClosedBody,
    Integer,
    Metadata,
    OneOf,
    Position,
    SequenceNumber,
    Text,
    TextMetadata,
    Unread,
    read_object,
    validate,
    wrong,
)

DEFAULT_RANK = 32  # the SDK's
MAX_RECIPIENTS = 10  # the SDK's
TOKEN = "weights_access_token"
GRANTED_BY = "granted_by"
"""The server writes it into a stored body in place of TOKEN, and ignores a client's value."""

MIN_RANK, MAX_RANK = 1, 256
MIN_TTL_S, MAX_TTL_S = 3600, 10 * 365 * 86400

Ttl = Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S, description="seconds; without it, the checkpoint never expires")]
Recipients = Annotated[list[Text], Field(max_length=MAX_RECIPIENTS, fail_fast=True)]


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
    seed: Integer | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @model_validator(mode="after")
    def _check_trained(self) -> LoraConfigBody:
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise wrong("trains nothing; at least one of train_attn, train_mlp and train_unembed must be true")
        return self


class CreateModel(ClosedBody):
    session_id: Text
    model_seq_id: Position
    base_model: Text
    user_metadata: Metadata | None = None
    lora_config: LoraConfigBody = LoraConfigBody()
    optimizer_config: OptimizerConfigBody = OptimizerConfigBody()
    type: Unread = None

    @property
    def lora(self) -> LoraSpec:
        return LoraSpec(**self.lora_config.model_dump())


class LoadWeights(ClosedBody):
    """Create-via-load has `session_id` and `model_seq_id`; a load into an existing model has `model_id`.

    Without `optimizer_config` the checkpoint chooses the optimizer or, without its state, the default.
    `granted_by` is the tenant whose access token came with the request; the token itself is never stored.
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
    type: Unread = None

    @property
    def optimizer_type(self) -> str | None:
        return None if self.optimizer_config is None else self.optimizer_config.type


class SaveRequest(ClosedBody):
    """A save in any of its three forms. One without a `path` makes a sampling session and no checkpoint."""

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
    type: Unread = None

    @model_validator(mode="after")
    def _check_path(self) -> SaveRequest:
        if self.path is not None and (self.sampling_session_seq_id is not None or self.kind == "inflight"):
            raise UserError("path names a checkpoint; sampling_session_seq_id and kind 'inflight' go without it")
        if self.path is None and self.keep_last is not None:
            raise UserError(f"keep_last is {self.keep_last}; it goes with a path, which names a checkpoint")
        return self


# The documented fields of each form. A field of another form is refused if it has an effect there.
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


def read_load(body: bytes) -> LoadWeights:
    return validate(LoadWeights, read_object(body))


def optimizer_config(optimizer_type: str) -> dict[str, object]:
    """For answers."""
    version = OPTIMIZERS[optimizer_type].version
    return {"type": optimizer_type, **({} if version is None else {"version": version})}
