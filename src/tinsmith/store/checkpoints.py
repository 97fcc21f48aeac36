"""Checkpoints: immutable, named and owned by a tenant. Each has a row, and a directory below the checkpoint root.

A path is `tinker://{training_run_id}/{weights|sampler_weights|external_weights}/{name}`. `storage` generates the
directory names, never from client text. States: pending -> completed | failed; only completed checkpoints are visible,
until they expire. Each change writes its audit entry in its own transaction. Files are durable before the row is
completed. Each directory belongs to one row; a copy has its own. Unreferenced directories are swept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from tinsmith.db.database import Database, now
from tinsmith.db.schema import CHECKPOINTS, CURVE_POINTS, MODELS, PENDING_SAVE
from tinsmith.errors import CheckpointExistsError, CorruptFilesError, NotFoundError, UserError
from tinsmith.storage.directories import Directories
from tinsmith.store.audit import entry
from tinsmith.store.curves import SERVER
from tinsmith.store.models import NewModel, ids_of_project, lora_columns
from tinsmith.types import LoraSpec

KINDS = ("weights", "sampler_weights", "external_weights")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SCAN_ROWS = 500  # of a search with filters outside SQL


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    training_run_id: str
    kind: str
    name: str

    @property
    def path(self) -> str:
        return f"tinker://{self.training_run_id}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class NewCheckpoint:
    """With `keep_last`, its completion expires older private checkpoints of its run and kind beyond that number.
    Without `step`, its step is the run's newest.
    """

    ref: CheckpointRef
    tenant_id: str
    base_model: str
    lora: LoraSpec
    optimizer_type: str = "adamw"
    user_metadata: Mapping[str, str] | None = None
    ttl_s: float | None = None
    keep_last: int = 0
    step: int | None = None

    def run(self, session_id: str) -> NewModel:
        """A run that only holds this checkpoint."""
        columns = self.tenant_id, self.base_model, self.lora, self.optimizer_type, self.user_metadata
        return NewModel(self.ref.training_run_id, session_id, *columns)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    training_run_id: str
    kind: str
    name: str
    tenant_id: str
    state: str
    error: str | None
    directory: str | None
    size_bytes: int | None
    base_model: str
    lora_rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    lora_alpha: float
    optimizer_type: str
    public: bool
    user_metadata: Mapping[str, str] | None
    step: int | None
    created_at: float
    expires_at: float | None

    @property
    def ref(self) -> CheckpointRef:
        return CheckpointRef(self.training_run_id, self.kind, self.name)

    @property
    def lora(self) -> LoraSpec:
        return LoraSpec(self.lora_rank, None, self.train_attn, self.train_mlp, self.train_unembed, self.lora_alpha)


@dataclass(frozen=True, slots=True)
class CheckpointSearch:
    """`after` is the time and the directory of the previous page's last checkpoint; a filter of None is off."""

    kinds: Sequence[str]
    limit: int
    base_models: Sequence[str] | None = None
    project_ids: Sequence[str] | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    after: tuple[float, str] | None = None


def parse_path(text: str, field: str = "path") -> CheckpointRef:
    """Parse a tinker:// path from the named field of a request. Raises UserError."""
    prefix, _, address = text.partition("://")
    parts = address.split("/")
    if prefix != "tinker" or len(parts) != 3 or parts[1] not in KINDS or not all(parts):
        raise UserError(
            f"{field} {text!r} is not a checkpoint path; the form is tinker://TRAINING_RUN_ID/KIND/NAME, "
            f"KIND being {', '.join(KINDS[:-1])} or {KINDS[-1]}"
        )
    return CheckpointRef(parts[0], parts[1], check_name(parts[2]))


def parse_sampler_path(text: str, field: str = "model_path") -> CheckpointRef:
    """Parse a path to sample from: as `parse_path`, or SkyRL's `tinker://RUN/NAME` of a sampler checkpoint."""
    prefix, _, address = text.partition("://")
    run_id, _, name = address.partition("/")
    if prefix == "tinker" and run_id and name and "/" not in name:
        return CheckpointRef(run_id, "sampler_weights", check_name(name))
    return parse_path(text, field)


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise UserError(
            f"checkpoint name {name!r} is not allowed; use 1 to 128 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
        )
    return name


class Checkpoints:
    def __init__(self, db: Database, files: Directories, keep_last: int = 0) -> None:
        """`keep_last` is the default of saves."""
        self._db = db
        self.files = files
        self.keep_last = keep_last

    # Reads by the server and the engine.

    def get(self, tenant_id: str, ref: CheckpointRef, *, granted_by: str | None = None) -> Checkpoint:
        """A completed, unexpired checkpoint that the tenant may read: its own, a published one, or one owned by the
        tenant `granted_by`. Raises NotFoundError.
        """
        checkpoint = self.find(ref)
        if checkpoint is None or not (checkpoint.tenant_id in (tenant_id, granted_by) or checkpoint.public):
            raise NotFoundError(f"checkpoint {ref.path!r} does not exist")
        return checkpoint

    def of_run(self, tenant_id: str, training_run_id: str) -> list[Checkpoint]:
        condition = (CHECKPOINTS.c.tenant_id == tenant_id) & (CHECKPOINTS.c.training_run_id == training_run_id)
        return self._list(_newest_first(condition))

    def newest_for_sampling(self, tenant_id: str, training_run_id: str) -> Checkpoint | None:
        """The newest checkpoint for sampling of a training run of the tenant."""
        of_run = CHECKPOINTS.c.training_run_id == training_run_id, CHECKPOINTS.c.kind == "sampler_weights"
        condition = sa.and_(*of_run, CHECKPOINTS.c.tenant_id == tenant_id)
        return next(iter(self._list(_newest_first(condition).limit(1))), None)

    def page(
        self, tenant_id: str, limit: int, offset: int, project_id: str | None = None
    ) -> tuple[list[Checkpoint], int]:
        """A page of the tenant's checkpoints (of one project), newest first, and their total."""
        of_tenant = CHECKPOINTS.c.tenant_id == tenant_id
        if project_id is not None:
            of_tenant &= CHECKPOINTS.c.training_run_id.in_(ids_of_project(project_id))
        return self._page(of_tenant, limit, offset)

    def page_of_words(
        self, tenant_id: str, words: Sequence[str], run_id: str | None, limit: int, offset: int
    ) -> tuple[list[Checkpoint], int]:
        """A page of the tenant's checkpoints (of one run), newest first, and their total. Each word must be part of the
        path, the base model or the metadata of the run.
        """
        condition = CHECKPOINTS.c.tenant_id == tenant_id
        if run_id is not None:
            condition &= CHECKPOINTS.c.training_run_id == run_id
        matches = (_contains(tenant_id, word) for word in words)
        return self._page(sa.and_(condition, *matches), limit, offset)

    def _page(self, condition: sa.ColumnElement[bool], limit: int, offset: int) -> tuple[list[Checkpoint], int]:
        rows, total = self._db.page(_newest_first(condition), limit, offset)
        return [Checkpoint(**row._mapping) for row in rows], total

    def search(self, tenant_id: str, search: CheckpointSearch) -> tuple[list[Checkpoint], bool]:
        """A page of the tenant's checkpoints that pass all filters, newest first, and whether there are more."""
        matches: list[Checkpoint] = []
        after = search.after
        while len(matches) <= search.limit:
            batch = self._scan(tenant_id, search, after)
            matches += [
                checkpoint
                for checkpoint in batch
                if search.user_metadata.items() <= (checkpoint.user_metadata or {}).items()
            ]
            if len(batch) < _SCAN_ROWS:
                break
            after = (batch[-1].created_at, batch[-1].directory or "")
        return matches[: search.limit], len(matches) > search.limit

    def _scan(self, tenant_id: str, search: CheckpointSearch, after: tuple[float, str] | None) -> list[Checkpoint]:
        """The next checkpoints that pass the filters that SQL evaluates in the same way on every database."""
        created_at, directory = CHECKPOINTS.c.created_at, CHECKPOINTS.c.directory
        condition = (CHECKPOINTS.c.tenant_id == tenant_id) & CHECKPOINTS.c.kind.in_(search.kinds)
        if search.base_models is not None:
            condition &= CHECKPOINTS.c.base_model.in_(search.base_models)
        if search.project_ids is not None:
            of_projects = [
                CHECKPOINTS.c.training_run_id.in_(ids_of_project(project_id)) for project_id in search.project_ids
            ]
            condition &= sa.or_(sa.false(), *of_projects)
        if after is not None:
            condition &= (created_at < after[0]) | ((created_at == after[0]) & (directory < after[1]))
        query = _newest_first(condition).order_by(directory.desc()).limit(_SCAN_ROWS)
        return self._list(query)

    def _list(self, query: sa.Select) -> list[Checkpoint]:
        return [Checkpoint(**row._mapping) for row in self._db.rows(query)]

    def creation_time(self, tenant_id: str, directory: str) -> float | None:
        """The creation time of the tenant's checkpoint with this directory; None if it does not exist."""
        of_directory = (CHECKPOINTS.c.tenant_id == tenant_id) & (CHECKPOINTS.c.directory == directory)
        return self._db.scalar(sa.select(CHECKPOINTS.c.created_at).where(of_directory))

    @contextmanager
    def reading(self, checkpoint: Checkpoint) -> Iterator[Path]:
        """The checkpoint's directory, verified against the manifest and readable until the end of the block. Raises
        CorruptFilesError, and NotFoundError if the checkpoint was deleted or overwritten.
        """
        assert checkpoint.directory is not None
        with ExitStack() as stack:
            try:
                path = stack.enter_context(self.files.reading(checkpoint.directory))
            except CorruptFilesError as error:
                raise self._read_error(checkpoint, error) from error
            yield path

    def _read_error(self, checkpoint: Checkpoint, error: CorruptFilesError) -> NotFoundError | CorruptFilesError:
        current = self.find(checkpoint.ref)
        if current is None or current.directory != checkpoint.directory:
            return NotFoundError(f"checkpoint {checkpoint.ref.path!r} was deleted or overwritten meanwhile")
        return CorruptFilesError(f"checkpoint {checkpoint.ref.path!r} is damaged: {error}")

    def find(self, ref: CheckpointRef) -> Checkpoint | None:
        """A completed, unexpired checkpoint of any tenant."""
        row = self._db.first(sa.select(CHECKPOINTS).where(_is(ref), visible()))
        return None if row is None else Checkpoint(**row._mapping)

    # Changes by the server.

    def delete(self, tenant_id: str, ref: CheckpointRef) -> None:
        """Delete the tenant's own checkpoint with its files."""
        is_deletable = _is(ref) & (CHECKPOINTS.c.tenant_id == tenant_id) & visible()
        with self._db.write() as connection:
            # In the same transaction: an overwrite in between would leave its files behind.
            row = connection.execute(
                sa.select(CHECKPOINTS.c.directory).where(is_deletable).with_for_update()
            ).one_or_none()
            if row is None:
                raise NotFoundError(f"checkpoint {ref.path!r} does not exist")
            connection.execute(CHECKPOINTS.delete().where(is_deletable))
            connection.execute(_audit_entry(tenant_id, "checkpoint_deleted", ref))
        self.files.discard(row.directory)

    def set_ttl(self, tenant_id: str, ref: CheckpointRef, ttl_s: float | None) -> None:
        self._refuse_other_tenant(tenant_id, ref)
        expires_at = None if ttl_s is None else now() + ttl_s
        with self._db.write() as connection:
            connection.execute(CHECKPOINTS.update().where(_is(ref)).values(expires_at=expires_at))
            connection.execute(_audit_entry(tenant_id, "checkpoint_ttl_set", ref, ttl_seconds=ttl_s))

    def set_public(self, tenant_id: str, ref: CheckpointRef, public: bool) -> bool:
        """Publish or unpublish; returns whether the state changed. A repetition is not an error, since the SDK would
        retry a 409 for minutes.
        """
        self._refuse_other_tenant(tenant_id, ref)
        is_changed = _is(ref) & (CHECKPOINTS.c.public == sa.literal(not public))
        with self._db.write() as connection:
            if connection.execute(CHECKPOINTS.update().where(is_changed).values(public=public)).rowcount != 1:
                return False
            event = "checkpoint_published" if public else "checkpoint_unpublished"
            connection.execute(_audit_entry(tenant_id, event, ref))
        return True

    def _refuse_other_tenant(self, tenant_id: str, ref: CheckpointRef) -> None:
        if self.get(tenant_id, ref).tenant_id != tenant_id:
            raise NotFoundError(f"checkpoint {ref.path!r} belongs to another tenant")

    def copy(self, source: Checkpoint, new: NewCheckpoint, run: sa.Executable, *effects: sa.Executable) -> bool:
        """Copy the files and `add` the copy. Raises NotFoundError if the source was deleted or overwritten."""
        assert source.directory is not None
        try:
            directory, size_bytes = self.files.copy(source.directory)
        except CorruptFilesError as error:
            raise self._read_error(source, error) from error
        return self.add(new, directory, size_bytes, run, *effects)

    def add(
        self, new: NewCheckpoint, directory: str, size_bytes: int, run: sa.Executable, *effects: sa.Executable
    ) -> bool:
        """Add a checkpoint whose files are complete, in one transaction with `run`, which inserts its training run, and
        `effects`. If the run exists, discards the files and returns False.
        """
        try:
            with self._db.write() as connection:
                for statement in (run, *completion(new, directory, size_bytes), *effects):
                    connection.execute(statement)
        except BaseException as error:
            self.files.discard(directory)
            if isinstance(error, IntegrityError):
                return False
            raise
        return True

    def sweep_expired(self) -> list[Checkpoint]:
        """Delete expired checkpoints, and return them."""
        expired = CHECKPOINTS.c.expires_at < now()
        swept = []
        for checkpoint in self._list(sa.select(CHECKPOINTS).where(expired)):
            with self._db.write() as connection:
                # The condition is repeated, because the checkpoint may have been overwritten.
                if not connection.execute(CHECKPOINTS.delete().where(_is(checkpoint.ref), expired)).rowcount:
                    continue
                expiry = {"tinker_path": checkpoint.ref.path}
                connection.execute(entry(checkpoint.tenant_id, "checkpoint_expired", expiry))
            self.files.discard(checkpoint.directory)
            swept.append(checkpoint)
        return swept

    def sweep_directories(self, age_s: float) -> list[str]:
        """Delete the unreferenced directories that interrupted saves and deletions left behind: those without writes
        for `age_s` seconds. Returns their names.
        """
        candidates = self.files.old(age_s)  # before the rows are read: rows added later name newer directories
        referenced = set(self._db.scalars(sa.select(CHECKPOINTS.c.directory)))
        return self.files.discard_all(candidates, but=referenced)

    # Saves by the engine.

    def begin(self, new: NewCheckpoint, *, overwrite: bool) -> str | None:
        """Claim the name before the first byte is written. Raises CheckpointExistsError.

        Returns the directory of the checkpoint that the completion will replace, if any.
        """
        columns = CHECKPOINTS.c.state, CHECKPOINTS.c.directory, CHECKPOINTS.c.expires_at
        with self._db.write() as connection:
            row = connection.execute(sa.select(*columns).where(_is(new.ref))).one_or_none()
            if row is not None and row.state == "completed":
                expired = row.expires_at is not None and row.expires_at <= now()
                if not (overwrite or expired):
                    raise CheckpointExistsError(
                        f"checkpoint {new.ref.path!r} exists already; pass overwrite=True or choose another name"
                    )
                return row.directory  # stays visible until its successor is complete
            connection.execute(CHECKPOINTS.delete().where(_is(new.ref)))
            connection.execute(CHECKPOINTS.insert().values(**_row(new), state="pending"))
        return None

    def recover(self, base_model: str, engine_id: str) -> None:
        """After a restart of this engine: fail the interrupted saves of its runs and of unowned runs."""
        has_other_engine = sa.exists().where(
            MODELS.c.model_id == CHECKPOINTS.c.training_run_id, MODELS.c.engine_id != engine_id
        )
        is_orphaned = (
            (CHECKPOINTS.c.base_model == base_model) & sa.text(f"checkpoints.{PENDING_SAVE}") & ~has_other_engine
        )
        self._db.execute(
            CHECKPOINTS.update().where(is_orphaned).values(state="failed", error="the save was interrupted")
        )


def completion(new: NewCheckpoint, directory: str, size_bytes: int) -> Sequence[sa.Executable]:
    """Statements for the transaction that settles the save. They replace the earlier checkpoint of this name, including
    its TTL and metadata; the new one is private.
    """
    values = _row(new) | {"directory": directory, "size_bytes": size_bytes}
    statements: list[sa.Executable] = [
        CHECKPOINTS.delete().where(_is(new.ref)),
        CHECKPOINTS.insert().values(**values, state="completed"),
    ]
    if new.keep_last:
        of_run = (CHECKPOINTS.c.training_run_id == new.ref.training_run_id) & (CHECKPOINTS.c.kind == new.ref.kind)
        newest = sa.select(CHECKPOINTS.c.name).where(of_run, visible()).order_by(CHECKPOINTS.c.created_at.desc())
        newest_names = sa.select(newest.limit(new.keep_last).subquery().c.name)
        older = CHECKPOINTS.update().where(of_run, visible(), CHECKPOINTS.c.name.not_in(newest_names))
        statements.append(older.where(CHECKPOINTS.c.public.is_(False)).values(expires_at=now()))
    return statements


def failure(ref: CheckpointRef, error: str) -> sa.Executable:
    """A statement for the transaction that settles a failed save."""
    return CHECKPOINTS.update().where(_is(ref), CHECKPOINTS.c.state == "pending").values(state="failed", error=error)


def _audit_entry(tenant_id: str, event: str, ref: CheckpointRef, **details: object) -> sa.Executable:
    """The audit entry of a change of a checkpoint."""
    return entry(tenant_id, event, {"model_id": ref.training_run_id, "tinker_path": ref.path} | details)


def _is(ref: CheckpointRef) -> sa.ColumnElement[bool]:
    return (
        (CHECKPOINTS.c.training_run_id == ref.training_run_id)
        & (CHECKPOINTS.c.kind == ref.kind)
        & (CHECKPOINTS.c.name == ref.name)
    )


def _newest_first(condition: sa.ColumnElement[bool]) -> sa.Select:
    return sa.select(CHECKPOINTS).where(condition, visible()).order_by(CHECKPOINTS.c.created_at.desc())


def _contains(tenant_id: str, word: str) -> sa.ColumnElement[bool]:
    """The condition that a word is part of the path of a checkpoint, its base model or its run's metadata."""
    path = "tinker://" + CHECKPOINTS.c.training_run_id + "/" + CHECKPOINTS.c.kind + "/" + CHECKPOINTS.c.name
    metadata = sa.func.lower(sa.cast(MODELS.c.user_metadata, sa.Text))
    of_tenant = MODELS.c.tenant_id == tenant_id
    of_runs = sa.select(MODELS.c.model_id).where(of_tenant, metadata.contains(word.lower(), autoescape=True))
    columns = (sa.func.lower(column) for column in (path, CHECKPOINTS.c.base_model))
    texts = [column.contains(word.lower(), autoescape=True) for column in columns]
    return sa.or_(*texts, CHECKPOINTS.c.training_run_id.in_(of_runs))


def visible() -> sa.ColumnElement[bool]:
    """The condition that a checkpoint is completed and not expired."""
    unexpired = CHECKPOINTS.c.expires_at.is_(None) | (CHECKPOINTS.c.expires_at > now())
    return (CHECKPOINTS.c.state == "completed") & unexpired


def _row(new: NewCheckpoint) -> dict[str, object]:
    created_at = now()
    return {
        **asdict(new.ref),
        "tenant_id": new.tenant_id,
        "base_model": new.base_model,
        **lora_columns(new.lora),
        "optimizer_type": new.optimizer_type,
        "public": False,
        "user_metadata": new.user_metadata,
        "step": _newest_step(new.ref.training_run_id) if new.step is None else new.step,
        "created_at": created_at,
        "expires_at": None if new.ttl_s is None else created_at + new.ttl_s,
    }


def _newest_step(model_id: str) -> sa.ScalarSelect[int]:
    """The number of a run's newest optimizer step. A save runs after the steps before it are settled."""
    points = (CURVE_POINTS.c.model_id == model_id) & (CURVE_POINTS.c.source == SERVER)
    return sa.select(sa.func.max(CURVE_POINTS.c.step)).where(points).scalar_subquery()
