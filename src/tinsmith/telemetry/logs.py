"""Structured logs: one line per event to standard error, with secrets masked.

Code that works on a request binds its ids as structlog context variables (tenant_id, model_id, request_id, base_model),
so that every line logged meanwhile has them. The format of a line (logfmt, json, console) is a setting.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping

import orjson
import structlog

SECRET_NAMES = frozenset({"api_key", "x-api-key", "authorization", "jwt", "password", "token", "database_url"})


def mask_secrets(_logger: object, _method: str, event: MutableMapping[str, object]) -> MutableMapping[str, object]:
    """A structlog processor that masks the values of fields with secret names."""
    for name in event:
        if name.lower() in SECRET_NAMES:
            event[name] = "***"
    return event


def configure_logs(level: str, form: str = "logfmt") -> None:
    """Set up structlog for this process; `form` is logfmt, json or console."""
    renderers: dict[str, structlog.typing.Processor] = {
        "logfmt": structlog.processors.LogfmtRenderer(key_order=("timestamp", "level", "event")),
        "json": structlog.processors.JSONRenderer(
            serializer=lambda event, **_: orjson.dumps(event, default=str).decode()
        ),
        "console": structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
    }
    traceback = [] if form == "console" else [structlog.processors.format_exc_info]  # `console` formats its own
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            mask_secrets,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *traceback,
            renderers[form],
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
