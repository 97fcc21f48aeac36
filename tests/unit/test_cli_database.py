"""Only `serve` and `migrate` create a database or change its schema; every other command refuses with the fix."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from support.databases import bare_url, fresh_url
from tinsmith.cli.database import server_database
from tinsmith.cli.main import app
from tinsmith.db.factory import open_database
from tinsmith.errors import SettingsError

COMMANDS = (
    ("keys", "list"),
    ("keys", "create", "alice"),
    ("keys", "revoke", "1"),
    ("samplers", "list"),
    ("samplers", "show", "x"),
    ("samplers", "drain", "x"),
)


@pytest.fixture(params=["sqlite", "postgres"])
def bare(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a database without tables, which the commands use."""
    url = bare_url(tmp_path, request.param)
    if request.param == "sqlite":
        open_database(url).close()  # an empty file
    monkeypatch.setenv("TINSMITH_DATABASE_URL", url)
    yield url


def refusal(*command: str) -> str:
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, SettingsError), result.output
    return str(result.exception)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_missing_database_is_refused_and_not_created(command: tuple[str, ...], tmp_path: Path) -> None:
    data_dir = tmp_path / "a dir"
    words = refusal(*command, "--data-dir", str(data_dir))
    fix = f"run `tinsmith migrate --data-dir '{data_dir}'`, or start the server"
    assert words == f"there is no database in {data_dir}: {fix}"
    assert not data_dir.exists()


def test_a_database_without_tables_is_refused_and_left_alone(bare: str) -> None:
    assert refusal("keys", "list") == (
        "the database has no tables of Tinsmith yet: run `tinsmith migrate`, or start the server"
    )
    database = open_database(bare)
    assert sa.inspect(database.engine).get_table_names() == []
    database.close()


def test_migrate_creates_what_the_commands_need(bare: str) -> None:
    assert CliRunner().invoke(app, ["migrate"]).exit_code == 0
    with server_database(None) as database:
        version = database.schema_version()
    assert json.loads(CliRunner().invoke(app, ["migrate", "--json"]).stdout) == {"schema_version": version}
    assert CliRunner().invoke(app, ["keys", "create", "alice"]).exit_code == 0


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0010", r"schema version 0010, older than this Tinsmith's schema_\d+: run `tinsmith migrate`"),
        ("schema_9999", r"schema version schema_9999, which this Tinsmith does not know.*upgrade this one"),
    ],
)
def test_another_schema_is_refused_and_left_alone(
    version: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = fresh_url(tmp_path)
    monkeypatch.setenv("TINSMITH_DATABASE_URL", url)
    database = open_database(url)
    with database.write() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = :version"), {"version": version})
    with pytest.raises(SettingsError, match=words), server_database(None):
        pass
    assert database.schema_version() == version
    database.close()
