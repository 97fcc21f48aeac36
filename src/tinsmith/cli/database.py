"""`tinsmith migrate`, and the database of the commands that read and write it beside a server.

Only `tinsmith serve` and `tinsmith migrate` create a database or change its schema. All other commands open the
database that exists, and refuse a missing one, or one of another version, with the command that mends it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tinsmith.cli.remote import AsJson, output, print_json
from tinsmith.errors import SettingsError, UserError
from tinsmith.settings import Settings, load
from tinsmith.settings.groups import StorageSettings

if TYPE_CHECKING:
    from tinsmith.db.database import Database

DataDir = Annotated[Path | None, typer.Option(help="The server's data directory. Default: ~/.tinsmith.")]


def migrate(as_json: AsJson = False, data_dir: DataDir = None) -> None:
    """Create the database, or migrate it to this version."""
    from tinsmith.storage.stores import make_private

    settings = _settings(data_dir)
    if not settings.database_url:
        make_private(settings.resolved_data_dir)
    database = _open(settings, exists=False)
    try:
        database.migrate()
        version = database.schema_version()
    finally:
        database.close()
    if as_json:
        print_json({"schema_version": version})
    else:
        output.print(f"the database has schema version {version}")


def format_data_dir(data_dir: Path | None) -> str:
    """The option of a data directory, for a command that is shown; with a space before it, or empty."""
    return "" if data_dir is None else f" --data-dir {shlex.quote(str(data_dir))}"


@contextmanager
def server_database(data_dir: Path | None) -> Iterator[Database]:
    """Open the server's database: TINSMITH_DATABASE_URL, or the one in the data directory. Raises SettingsError."""
    from tinsmith.db.database import DatabaseMovedError

    fix = f"run `tinsmith migrate{format_data_dir(data_dir)}`, or start the server"
    settings = _settings(data_dir)
    try:
        database = _open(settings, exists=True)
    except DatabaseMovedError:
        raise SettingsError(f"there is no database in {settings.resolved_data_dir}: {fix}") from None
    try:
        database.require_schema(fix)
        yield database
    except UserError as error:
        raise SettingsError(str(error)) from None
    finally:
        database.close()


def _settings(data_dir: Path | None) -> Settings:
    return load({} if data_dir is None else {"data_dir": data_dir})


def _open(settings: StorageSettings, *, exists: bool) -> Database:
    from tinsmith.db.factory import open_database
    from tinsmith.db.postgres import PostgresTimeouts

    timeouts = PostgresTimeouts(*settings.database_timeouts)
    return open_database(settings.resolved_database_url, exists=exists, timeouts=timeouts)
