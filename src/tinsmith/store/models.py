"""Models in training: one row for each adapter, from creation to unloading.

States: creating -> ready | failed; ready -> unloaded. A run in state copied is never trained and only holds a copied
checkpoint (`reason` names the source). A model_id is `{session_id}:train:{model_seq_id}`, so a repeated creation finds
the first one. Every seq_id up to `applied_seq_id` has taken effect or was refused.

A model is restored from its newest snapshot, or from the previous one if the newest is damaged, by replaying the later
request bodies. So a body is freed once both snapshots cover it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from tinsmith.db.database import Database, now
from tinsmith.db.schema import BODIES, FUTURES, MODELS, SESSIONS
from tinsmith.db.statements import Statement
from tinsmith.errors import GoneError, NotFoundError, UserError
from tinsmith.store.futures import NewFuture
from tinsmith.types import LoraSpec


@dataclass(frozen=True, slots=True)
class NewModel:
    model_id: str
    session_id: str
    tenant_id: str
    base_model: str
    lora: LoraSpec
    optimizer_type: str = "adamw"
    user_metadata: Mapping[str, str] | None = None
    engine_id: str | None = None


@dataclass(frozen=True, slots=True)
class Model:
    model_id: str
    session_id: str
    tenant_id: str
    base_model: str
    state: str
    reason: str | None
    lora_rank: int
    lora_seed: int | None
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    lora_alpha: float
    optimizer_type: str
    user_metadata: Mapping[str, str] | None
    created_at: float
    last_request_at: float
    applied_seq_id: int = -1
    snapshot_seq_id: int | None = None
    snapshot_directory: str | None = None
    previous_snapshot_seq_id: int | None = None
    previous_snapshot_directory: str | None = None
    project_id: str | None = None
    engine_id: str | None = None

    @property
    def lora(self) -> LoraSpec:
        trains = self.train_attn, self.train_mlp, self.train_unembed
        return LoraSpec(self.lora_rank, self.lora_seed, *trains, self.lora_alpha)

    def require_usable(self) -> None:
        """Raise UserError or GoneError, with the reason, if the model accepts no more requests."""
        if self.state == "failed":
            raise UserError(f"model {self.model_id!r} could not be created: {self.reason}")
        if self.state == "unloaded":
            raise GoneError(f"model {self.model_id!r} was unloaded: {self.reason}")


LOADED = ("creating", "ready")
"""The states of a model that is in an engine's memory, or will be."""

_COLUMNS = [MODELS.c[name] for name in Model.__dataclass_fields__]
_BY_ID = Statement(sa.select(*_COLUMNS).where(MODELS.c.model_id == sa.bindparam("model_id")))
_SESSION_ENDED = sa.case((SESSIONS.c.closed_at.is_not(None), sa.func.coalesce(SESSIONS.c.reason, ""))).label("ended")
_WITH_SESSION = Statement(
    sa.select(*_COLUMNS, _SESSION_ENDED)
    .select_from(MODELS.outerjoin(SESSIONS, SESSIONS.c.session_id == MODELS.c.session_id))
    .where(MODELS.c.model_id == sa.bindparam("model_id"), MODELS.c.tenant_id == sa.bindparam("tenant_id"))
)


class Models:
    def __init__(self, db: Database) -> None:
        self._db = db

    def create(self, new: NewModel, admit: Callable[[int], None] | None = None) -> Model:
        """Add a model in state `creating`, or return the existing model of this id. `admit` is called with the number
        of the tenant's other loaded models, and raises if that is too many. The tenant's creations are serialized, so
        the number is exact with any number of servers.
        """
        with self._db.write() as connection:
            if admit:
                self._db.lock(connection, f"models of {new.tenant_id}")
            model = _model(new, "creating")
            if connection.execute(self._db.insert_once(MODELS), asdict(model)).rowcount == 0:
                row = connection.execute(sa.select(MODELS).where(MODELS.c.model_id == new.model_id)).one()
                return Model(**row._mapping)
            if admit:
                loaded = (MODELS.c.tenant_id == new.tenant_id) & MODELS.c.state.in_(LOADED)
                admit((connection.scalar(sa.select(sa.func.count()).where(loaded)) or 1) - 1)
        return model

    def get(self, tenant_id: str, model_id: str) -> Model:
        model = self.find(model_id)
        if model is None or model.tenant_id != tenant_id:
            raise NotFoundError(f"model_id {model_id!r} is unknown")
        return model

    def get_with_session(self, tenant_id: str, model_id: str) -> tuple[Model, str | None]:
        """The model, and the reason why its session has ended, or None. Raises NotFoundError."""
        row = self._db.first(_WITH_SESSION, {"model_id": model_id, "tenant_id": tenant_id})
        if row is None:
            raise NotFoundError(f"model_id {model_id!r} is unknown")
        *columns, session_ended = row
        return Model(*columns), session_ended

    def find(self, model_id: str) -> Model | None:
        """A model of any tenant; for the engine."""
        row = self._db.first(_BY_ID, {"model_id": model_id})
        return None if row is None else Model(*row)

    def of_session(self, session_id: str) -> list[Model]:
        query = sa.select(MODELS).where(MODELS.c.session_id == session_id).order_by(MODELS.c.created_at)
        return [Model(**row._mapping) for row in self._db.rows(query)]

    def list_orphaned(self) -> list[tuple[Model, str]]:
        """The loaded models of closed sessions, with the reason why the session ended."""
        query = (
            sa.select(*_COLUMNS, SESSIONS.c.reason)
            .join(SESSIONS, SESSIONS.c.session_id == MODELS.c.session_id)
            .where(SESSIONS.c.closed_at.is_not(None), MODELS.c.state.in_(LOADED))
        )
        return [(Model(*columns), str(reason)) for *columns, reason in self._db.rows(query)]

    def count_loaded(self, base_model: str) -> int:
        """The loaded models of a base model, of all tenants."""
        loaded = (MODELS.c.base_model == base_model) & MODELS.c.state.in_(LOADED)
        return self._db.scalar(sa.select(sa.func.count()).where(loaded)) or 0

    def record_snapshot(self, model_id: str, seq_id: int, directory: str) -> str | None:
        """Record a snapshot that covers the model up to `seq_id`; the newest so far becomes the previous one.

        Frees the bodies that both cover. Returns the directory that is no longer needed: the third newest, or
        `directory` if the model is unloaded or has a newer snapshot.
        """
        of_model = MODELS.c.model_id == model_id
        with self._db.write() as connection:
            row = connection.execute(sa.select(MODELS).where(of_model).with_for_update()).one_or_none()
            if row is None or row.state == "unloaded":
                return directory
            if row.snapshot_seq_id is not None and row.snapshot_seq_id >= seq_id:
                return directory
            values = {
                "snapshot_seq_id": seq_id,
                "snapshot_directory": directory,
                "previous_snapshot_seq_id": row.snapshot_seq_id,
                "previous_snapshot_directory": row.snapshot_directory,
            }
            connection.execute(MODELS.update().where(of_model).values(**values))
            if row.snapshot_seq_id is not None:
                # The bodies below were freed when an earlier snapshot was recorded.
                freed_up_to = -1 if row.previous_snapshot_seq_id is None else row.previous_snapshot_seq_id
                between = (FUTURES.c.seq_id > freed_up_to) & (FUTURES.c.seq_id <= row.snapshot_seq_id)
                ids = sa.select(FUTURES.c.request_id).where(FUTURES.c.model_id == model_id, between)
                connection.execute(BODIES.delete().where(BODIES.c.request_id.in_(ids)))
            return row.previous_snapshot_directory

    def forget_snapshot(self, model_id: str, directory: str) -> None:
        """Drop the newest snapshot, in `directory`, because it is damaged; the previous one becomes the newest."""
        of_snapshot = (MODELS.c.model_id == model_id) & (MODELS.c.snapshot_directory == directory)
        values = {
            "snapshot_seq_id": MODELS.c.previous_snapshot_seq_id,
            "snapshot_directory": MODELS.c.previous_snapshot_directory,
            "previous_snapshot_seq_id": None,
            "previous_snapshot_directory": None,
        }
        self._db.execute(MODELS.update().where(of_snapshot).values(values))

    def snapshot_directories(self) -> set[str]:
        """The directories of all recorded snapshots."""
        columns = MODELS.c.snapshot_directory, MODELS.c.previous_snapshot_directory
        rows = self._db.rows(sa.select(*columns).where(MODELS.c.snapshot_directory.is_not(None)))
        return {name for row in rows for name in row if name is not None}

    def page(self, tenant_id: str, limit: int, offset: int, project_id: str | None = None) -> tuple[list[Model], int]:
        """A page of the tenant's models (of one project), newest first, and their total."""
        of_tenant = MODELS.c.tenant_id == tenant_id
        if project_id is not None:
            of_tenant = of_tenant & MODELS.c.model_id.in_(ids_of_project(project_id))
        query = sa.select(MODELS).where(of_tenant).order_by(MODELS.c.created_at.desc(), MODELS.c.model_id.desc())
        rows, total = self._db.page(query, limit, offset)
        return [Model(**row._mapping) for row in rows], total


def copy_insertion(new: NewModel, project_id: str | None, reason: str) -> sa.Executable:
    """A statement for the transaction that adds the copied checkpoint; it fails if the run exists."""
    return MODELS.insert().values(**asdict(_model(new, "copied", reason, project_id)))


def _model(new: NewModel, state: str, reason: str | None = None, project_id: str | None = None) -> Model:
    created_at = now()
    names = ("model_id", "session_id", "tenant_id", "base_model", "optimizer_type", "user_metadata", "engine_id")
    values: dict[str, Any] = {name: getattr(new, name) for name in names} | lora_columns(new.lora)
    values |= {"created_at": created_at, "last_request_at": created_at}
    return Model(**values, lora_seed=new.lora.seed, state=state, reason=reason, project_id=project_id)


def lora_columns(spec: LoraSpec) -> dict[str, object]:
    """The columns of an adapter's shape, without its seed."""
    groups = {name: getattr(spec, name) for name in ("train_attn", "train_mlp", "train_unembed")}
    return {"lora_rank": spec.rank, "lora_alpha": spec.alpha, **groups}


def ids_of_project(project_id: str) -> sa.Select[tuple[str]]:
    """The models of a project. A copy has its own project, any other model the project of its session."""
    project = sa.func.coalesce(MODELS.c.project_id, SESSIONS.c.project_id)
    of_session = MODELS.outerjoin(SESSIONS, SESSIONS.c.session_id == MODELS.c.session_id)
    return sa.select(MODELS.c.model_id).select_from(of_session).where(project == project_id)


def unload_request(model: Model, body: bytes) -> NewFuture:
    """The request that unloads a model; a repetition has the same request_id and changes nothing."""
    return NewFuture(
        request_id=f"{model.model_id}:unload",
        tenant_id=model.tenant_id,
        session_id=model.session_id,
        base_model=model.base_model,
        kind="unload_model",
        body=body,
        model_id=model.model_id,
        engine_id=model.engine_id,
    )


def unload_statement(model_id: str, reason: str) -> sa.Executable:
    """A statement for the transaction that settles the unloading, which is final."""
    snapshots = ("snapshot_seq_id", "snapshot_directory", "previous_snapshot_seq_id", "previous_snapshot_directory")
    cleared = dict.fromkeys((*snapshots, "engine_id"))
    return MODELS.update().where(MODELS.c.model_id == model_id).values(state="unloaded", reason=reason, **cleared)


def set_alpha(model_id: str, alpha: float) -> sa.Executable:
    """A statement for the transaction that settles a load: the model continues with the checkpoint's alpha."""
    return MODELS.update().where(MODELS.c.model_id == model_id).values(lora_alpha=alpha)


def log_deletion(model_id: str) -> sa.Executable:
    """A statement for the transaction that settles the unloading: deletes the bodies kept for replays."""
    ids = sa.select(FUTURES.c.request_id).where(FUTURES.c.model_id == model_id, FUTURES.c.state != "pending")
    return BODIES.delete().where(BODIES.c.request_id.in_(ids))


def set_state(model_id: str, state: str, reason: str | None = None) -> sa.Executable:
    """A statement for the transaction that settles the operation on the model."""
    return MODELS.update().where(MODELS.c.model_id == model_id).values(state=state, reason=reason)
