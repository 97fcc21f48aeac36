"""Addresses of the dashboard's pages, for notebooks and logs.

The SDK's `get_console_url()` names the hosted console.
"""

from __future__ import annotations

import html
from urllib.parse import quote

from tinsmith.errors import UserError
from tinsmith.settings.environment import client_address

SCHEME = "tinker://"


class ConsoleUrl(str):
    """An address, which a notebook shows as a link."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        address = html.escape(self)
        return f'<a href="{address}" target="_blank" rel="noopener">{address}</a>'


def run_url(base_url: str, run_id: str) -> ConsoleUrl:
    """The page of a training run."""
    return ConsoleUrl(f"{base_url.rstrip('/')}/#/runs/{quote(run_id, safe='')}")


def console_url(run: object, base_url: str = "") -> ConsoleUrl:
    """The page of a training run: of a training client of the SDK, a run's id, or the path of one of its checkpoints.

    The server is `base_url`, or the client's, or TINKER_BASE_URL, or one on this machine. Raises UserError for anything
    else, and for a training client whose model the server has not created.
    """
    return run_url(*locate_run(run, base_url))


def locate_run(run: object, base_url: str = "") -> tuple[str, str]:
    """The server and the id of a run that is named as `console_url` takes it."""
    server = (base_url or _server_of(run) or client_address()[0]).rstrip("/")
    if isinstance(run, str):
        run_id = run.removeprefix(SCHEME).partition("/")[0]
    else:
        get_info = getattr(run, "get_info", None)
        if get_info is None:
            raise UserError(
                f"console_url takes a training client, a run's id or a checkpoint's path, not a {type(run).__name__}"
            )
        run_id = str(get_info().model_id)
    if not run_id:
        raise UserError("console_url got an empty id of a run")
    return server, run_id


def _server_of(client: object) -> str:
    """The server of an SDK's client; empty if this release of the SDK does not say."""
    return str(getattr(getattr(client, "holder", None), "_base_url", "") or "")
