"""How the processes log: one line of key=value pairs to standard error, secrets masked."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping

import structlog

SECRET_NAMES = frozenset({"api_key", "x-api-key", "authorization", "jwt", "password", "token", "database_url"})


def mask_secrets(_logger: object, _method: str, event: MutableMapping[str, object]) -> MutableMapping[str, object]:
    """A structlog processor: values under a secret's name never reach the log."""
    for name in event:
        if name.lower() in SECRET_NAMES:
            event[name] = "***"
    return event


def configure_logs(level: str) -> None:
    """Set up structlog for this process."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            mask_secrets,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=("timestamp", "level", "event")),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
