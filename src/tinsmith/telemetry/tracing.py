"""OpenTelemetry traces, from a client's request to the settlement of its future, across server and engines.

A server starts a span for each request, as a child of the client's span if the client sent a `traceparent`. The future
stores the span's traceparent (`CURRENT`), and the engine adds child spans. Spans are exported by OTLP over HTTP.
Without `otlp_endpoint`, OpenTelemetry is not imported and no traceparent is stored; hot paths check `on`. Spans contain
kinds and ids, never contents of requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING

from tinsmith.errors import SettingsError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

CURRENT: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""The current span as a W3C traceparent."""

EXPORT_S = 5.0
"""How long an unresponsive collector may delay the end of a process."""

Attributes = Mapping[str, str | int | float]


class Tracing:
    """Tracing that is off. `open_tracing` returns a subclass that exports spans."""

    on = False

    def span(self, name: str, parent: str | None, attributes: Attributes) -> AbstractContextManager[None]:
        """A span for the duration of the block, as a child of `parent`; within the block it is CURRENT."""
        return nullcontext()

    def record(self, name: str, parent: str, start_s: float, end_s: float, attributes: Attributes) -> str:
        """Record a finished span; times are seconds since the epoch. Returns its traceparent."""
        return parent

    def close(self) -> None:
        """Export the remaining spans."""


def open_tracing(endpoint: str, process: str, attributes: Attributes) -> Tracing:
    """The tracing of this process (`server` or `engine`); off without an endpoint. Raises SettingsError."""
    if not endpoint:
        return Tracing()
    try:
        return _ExportedTracing(endpoint, process, attributes)
    except ModuleNotFoundError:
        raise SettingsError("otlp_endpoint is set: pip install 'tinsmith[otel]'") from None


class _ExportedTracing(Tracing):
    on = True

    def __init__(self, endpoint: str, process: str, attributes: Attributes) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource({"service.name": f"tinsmith-{process}", **attributes})
        self._provider = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("tinsmith")
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def span(self, name: str, parent: str | None, attributes: Attributes) -> Iterator[None]:
        span = self._tracer.start_span(name, self._context(parent), attributes=attributes)
        token = CURRENT.set(self._name(span))
        try:
            yield
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)
            raise
        finally:
            CURRENT.reset(token)
            span.end()

    def record(self, name: str, parent: str, start_s: float, end_s: float, attributes: Attributes) -> str:
        context, start_ns = self._context(parent), round(start_s * 1e9)
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=start_ns)
        span.end(max(start_ns, round(end_s * 1e9)))
        return self._name(span) or parent

    def close(self) -> None:
        self._provider.shutdown()

    def _context(self, parent: str | None) -> Context:
        """The context of a parent; a malformed traceparent from a client is ignored."""
        from opentelemetry.context import Context

        return self._propagator.extract({} if parent is None else {"traceparent": parent}, Context())

    def _name(self, span: Span) -> str | None:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span, Context()))
        return carrier.get("traceparent")
