"""`tinsmith keys`: create, list and revoke API keys in the database, with or without a running server.

The database must exist (`tinsmith migrate`). A running server applies changes within two seconds. A key is printed
once, when it is created, and is not stored.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from tinsmith.cli.database import DataDir, format_data_dir, server_database
from tinsmith.cli.remote import AsJson, notes, output, print_rows
from tinsmith.settings import load

if TYPE_CHECKING:
    from tinsmith.auth.keys import Key

app = typer.Typer(
    help="Create, list and revoke API keys. Once a key exists, the server rejects all others.", no_args_is_help=True
)


@app.command()
def create(
    tenant: Annotated[str, typer.Argument(help="The key's tenant; created if new.")],
    name: Annotated[str, typer.Option(help="A note about the key's purpose.")] = "",
    quota: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A limit of the tenant; 0 means no limit. Repeat it.")
    ] = None,
    as_json: AsJson = False,
    data_dir: DataDir = None,
) -> None:
    """Create a key and print it once."""
    from tinsmith.auth import LOCAL_TENANT
    from tinsmith.auth.keys import Keys
    from tinsmith.auth.quotas import read_quotas

    with server_database(data_dir) as database:
        keys = Keys(database)
        is_first = not keys.any()
        key, secret = keys.create(tenant, name, read_quotas(quota or []), load({}).key_prefixes[0])
    typer.echo(json.dumps(_as_json(key) | {"key": secret}) if as_json else secret)
    notes.print(f"key {key.key_id} of tenant {tenant!r}; it is not stored, so keep it: export TINKER_API_KEY=...")
    if is_first and tenant != LOCAL_TENANT:
        notes.print(
            "This is the first key: from now on the server rejects requests without one. Earlier work belongs to "
            f"tenant {LOCAL_TENANT!r}; `tinsmith keys create {LOCAL_TENANT}{format_data_dir(data_dir)}` creates a key "
            "for it."
        )


@app.command("list")
def list_keys(as_json: AsJson = False, data_dir: DataDir = None) -> None:
    """List the keys without their secrets."""
    from tinsmith.auth.keys import Keys

    with server_database(data_dir) as database:
        keys = [_as_json(key) for key in Keys(database).list_all()]
    columns = "id", "tenant", "name", "created", "revoked"
    print_rows(as_json, keys, columns, lambda key: ("" if value is None else value for value in key.values()))


@app.command()
def revoke(
    key_id: Annotated[int, typer.Argument(help="The key's id from `tinsmith keys list`.")],
    as_json: AsJson = False,
    data_dir: DataDir = None,
) -> None:
    """Revoke a key and its tokens."""
    from tinsmith.auth.keys import Keys

    with server_database(data_dir) as database:
        key = Keys(database).revoke(key_id)
    if as_json:
        typer.echo(json.dumps(_as_json(key)))
    else:
        output.print(f"key {key.key_id} of tenant {key.tenant_id!r} is revoked")


def _as_json(key: Key) -> dict[str, object]:
    return {
        "key_id": key.key_id,
        "tenant": key.tenant_id,
        "name": key.name,
        "created_at": _iso(key.created_at),
        "revoked_at": _iso(key.revoked_at),
    }


def _iso(moment_s: float | None) -> str | None:
    return None if moment_s is None else datetime.fromtimestamp(moment_s, UTC).isoformat(timespec="seconds")
