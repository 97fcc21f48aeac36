"""Versions of the schema, which the directory `migrations` has as Alembic's revisions.

A database has the version of its last migration. This Tinsmith migrates earlier versions since the first release, and
refuses all others: those of a newer Tinsmith, and those before the first release, of which it knows the last only.
Alembic is imported only where it is used, so that an engine does not load it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tinsmith.errors import SettingsError

if TYPE_CHECKING:
    from alembic.config import Config as AlembicConfig
    from alembic.script import ScriptDirectory

_LAST_BEFORE_RELEASE, _FIRST_RELEASE = "0010", "schema_0001"
"""Two revisions with the same schema: the last before the first release, and that of the first release."""


def read_schema_version(connection: Connection) -> str | None:
    """The version of the schema; None for a database without tables."""
    from alembic.migration import MigrationContext

    return MigrationContext.configure(connection).get_current_revision()


def migrate_schema(connection: Connection) -> None:
    """Migrate the schema to the newest version, without a commit. Raises SettingsError for an unknown version."""
    from alembic import command

    config, scripts = _open_migrations()
    _refuse_unknown_schema(connection, scripts)
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def refuse_other_version(version: str | None, fix: str) -> None:
    """Raise SettingsError, which ends with `fix`, unless `version` is this Tinsmith's."""
    scripts = _open_migrations()[1]
    newest = scripts.get_current_head()
    if version == newest:
        return
    if version is None:
        raise SettingsError(f"the database has no tables of Tinsmith yet: {fix}")
    _refuse_unknown_versions({version} - {_LAST_BEFORE_RELEASE}, scripts)
    raise SettingsError(f"the database has schema version {version}, older than this Tinsmith's {newest}: {fix}")


def _open_migrations() -> tuple[AlembicConfig, ScriptDirectory]:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config, ScriptDirectory.from_config(config)


def _refuse_unknown_schema(connection: Connection, scripts: ScriptDirectory) -> None:
    """Raise SettingsError unless the database is empty or has a known schema version."""
    from alembic.migration import MigrationContext

    versions = set(MigrationContext.configure(connection).get_current_heads())
    if versions == {_LAST_BEFORE_RELEASE}:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = :to"), {"to": _FIRST_RELEASE})
        return
    _refuse_unknown_versions(versions, scripts)


def _refuse_unknown_versions(versions: set[str], scripts: ScriptDirectory) -> None:
    unknown = versions - {script.revision for script in scripts.walk_revisions()}
    if unknown:
        raise SettingsError(
            f"the database has schema version {', '.join(sorted(unknown))}, which this Tinsmith does not know; its own "
            f"is {scripts.get_current_head()}. If a newer Tinsmith created the database, upgrade this one. If it is "
            "older than the first release, choose another database_url or an empty --data-dir"
        )
