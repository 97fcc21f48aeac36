"""Tinsmith: the Tinker API on your own laptop, GPU or cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinsmith.exchange.console_urls import ConsoleUrl
    from tinsmith.exchange.run_cards import RunCard

__version__ = "0.1.0"


def console_url(run: object, base_url: str = "") -> ConsoleUrl:
    """The dashboard's page of a training run, which a notebook shows as a link: of a training client of the SDK, a
    run's id, or the path of one of its checkpoints. `base_url` is the server, if it is not the client's or
    TINKER_BASE_URL. Raises UserError.
    """
    from tinsmith.exchange import console_urls  # lazy: importing tinsmith stays instant

    return console_urls.console_url(run, base_url)


def show(run: object, base_url: str = "", api_key: str = "") -> RunCard:
    """A run with its base model, status, step, newest metrics and link, which a notebook shows as a card. `run` and
    `base_url` are those of `console_url`; `api_key` is the key, if it is not the client's or TINKER_API_KEY. Raises
    UserError, and NotFoundError for a run that the key does not have.
    """
    from tinsmith.exchange import run_cards  # lazy, as above

    return run_cards.describe_run(run, base_url, api_key)
