"""The JSON requests that make, save, load and unload models, as frozen values.

The server reads them to check and to answer; the engine reads the same stored bytes to act. A save whose
`name` is None is ephemeral: it makes a sampling session and no checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tinsmith.errors import NotSupportedError, UserError
from tinsmith.types import LoraSpec
from tinsmith.wire.fields import Fields, read_object, show

DEFAULT_RANK = 32  # the SDK's
MAX_RECIPIENTS = 10  # the SDK's
TOKEN = "weights_access_token"
GRANTED_BY = "granted_by"
"""What the server writes into a stored body in place of TOKEN; from a client it is worth nothing."""

OPTIMIZERS: Mapping[str, Mapping[str, int]] = {"adamw": {}, "dimuon": {"version": 1}}
"""The optimizer families, each with the one version of it that there is."""

LORA_FIELDS = frozenset(("rank", "seed", "train_unembed", "train_mlp", "train_attn"))

_NEW_MODEL_FIELDS = ("session_id", "model_seq_id", "base_model", "user_metadata", "optimizer_config", "type")
CREATE_FIELDS = frozenset((*_NEW_MODEL_FIELDS, "lora_config"))
LOAD_FIELDS = frozenset((*_NEW_MODEL_FIELDS, "model_id", "seq_id", "path", "optimizer", GRANTED_BY))
SAVE_FIELDS = frozenset(
    (
        "model_id",
        "seq_id",
        "path",
        "ttl_seconds",
        "overwrite",
        "user_metadata",
        "sampling_session_seq_id",
        "kind",
        "age_encryption_recipients",
        "type",
    )
)
"""Of whole requests. Held to where a request is admitted, and not where a stored one is read again."""


@dataclass(frozen=True, slots=True)
class CreateModel:
    session_id: str
    model_seq_id: int
    base_model: str
    lora: LoraSpec
    optimizer_type: str
    user_metadata: Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class SaveWeights:
    """save_weights, save_weights_for_sampler, save_weights_external. `sampler_kind` is 'snapshot' or 'inflight'."""

    model_id: str
    name: str | None
    ttl_s: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] | None = None
    sampling_session_seq_id: int | None = None
    sampler_kind: str = "snapshot"
    recipients: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Create-via-load has `session_id` and `model_seq_id`; a load into an existing model has `model_id`.

    `optimizer_type` None leaves the choice to the checkpoint or, without its state, to the default.

    `granted_by` is the tenant whose access token came with the request; the token itself is never stored.
    """

    path: str
    optimizer: bool
    model_id: str | None
    session_id: str | None
    model_seq_id: int | None
    base_model: str | None
    optimizer_type: str | None
    user_metadata: Mapping[str, object] | None
    granted_by: str | None


def create_model_of(fields: Fields) -> CreateModel:
    lora = fields.fields_or("lora_config", Fields({}))
    lora.refuse_unknown(LORA_FIELDS)
    return CreateModel(
        session_id=fields.text("session_id"),
        model_seq_id=fields.integer("model_seq_id"),
        base_model=fields.text("base_model"),
        lora=LoraSpec(
            rank=lora.integer_or("rank", DEFAULT_RANK),
            seed=lora.integer_or("seed", None),
            train_attn=lora.flag_or("train_attn", True),
            train_mlp=lora.flag_or("train_mlp", True),
            train_unembed=lora.flag_or("train_unembed", True),
        ),
        optimizer_type=_optimizer_type(fields) or "adamw",
        user_metadata=fields.metadata_or_none("user_metadata"),
    )


def read_save(body: bytes) -> SaveWeights:
    return save_of(read_object(body))


def save_of(fields: Fields) -> SaveWeights:
    kind = fields.text_or("kind", "snapshot")
    if kind not in ("snapshot", "inflight"):
        raise UserError(f"kind is {show(kind)}; it must be 'snapshot' or 'inflight'")
    name = fields.text_or("path", None)
    session_seq_id = fields.integer_or("sampling_session_seq_id", None)
    if name is not None and (session_seq_id is not None or kind == "inflight"):
        raise UserError("path names a checkpoint; sampling_session_seq_id and kind 'inflight' go without it")
    return SaveWeights(
        model_id=fields.text("model_id"),
        name=name,
        ttl_s=fields.integer_or("ttl_seconds", None),
        overwrite=fields.flag_or("overwrite", False),
        user_metadata=fields.text_metadata_or_none("user_metadata"),
        sampling_session_seq_id=session_seq_id,
        sampler_kind=kind,
        recipients=tuple(fields.texts_or_empty("age_encryption_recipients", max_items=MAX_RECIPIENTS)),
    )


def read_load(body: bytes) -> LoadWeights:
    return load_of(read_object(body))


def load_of(fields: Fields) -> LoadWeights:
    return LoadWeights(
        path=fields.text("path"),
        optimizer=fields.flag_or("optimizer", False),
        model_id=fields.text_or("model_id", None),
        session_id=fields.text_or("session_id", None),
        model_seq_id=fields.integer_or("model_seq_id", None),
        base_model=fields.text_or("base_model", None),
        optimizer_type=_optimizer_type(fields),
        user_metadata=fields.metadata_or_none("user_metadata"),
        granted_by=fields.text_or(GRANTED_BY, None),
    )


def optimizer_config(optimizer_type: str) -> dict[str, object]:
    """As answers name it."""
    return {"type": optimizer_type, **OPTIMIZERS[optimizer_type]}


def _optimizer_type(fields: Fields) -> str | None:
    config = fields.fields_or("optimizer_config", None)
    if config is None:
        return None
    kind = config.text_or("type", "adamw")
    if kind not in OPTIMIZERS:
        raise UserError(f"{config.path('type')} is {show(kind)}; it must be one of {', '.join(OPTIMIZERS)}")
    config.refuse_unknown(frozenset(("type", *OPTIMIZERS[kind])))
    for name, only in OPTIMIZERS[kind].items():
        if config.integer_or(name, only) != only:
            raise NotSupportedError(f"{config.path(name)} is {config.integer(name)}; this server knows {kind} {only}")
    return kind
