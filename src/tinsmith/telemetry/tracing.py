"""Traces for OpenTelemetry, from a client's request to the settlement of its future, across server and engines.

A server begins a span for each request, below the client's own if that sent a `traceparent`; what it stores remembers
which (`CURRENT`), and the engine adds what became of it. Spans leave by OTLP over HTTP. Where no `otlp_endpoint` is
set, nothing of OpenTelemetry is loaded, nothing is stored, and `on` is what a hot path asks. Spans tell names of kinds
and ids, and nothing of what a request holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from tinsmith.errors import SettingsError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

CURRENT: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""The span in which the present code runs, in the words of W3C's traceparent."""

EXPORT_S = 5.0
"""How long a collector that does not answer may hold up the end of a process."""

Attributes = Mapping[str, str | int | float]


class Tracing(Protocol):
    @property
    def on(self) -> bool: ...

    def span(self, name: str, parent: str | None, attributes: Attributes) -> AbstractContextManager[None]:
        """What the block does, below `parent`; within it, CURRENT names the span."""
        ...

    def record(self, name: str, parent: str, start_s: float, end_s: float, attributes: Attributes) -> str:
        """Something that is over, with its times since the epoch. Returns its name as a parent."""
        ...

    def close(self) -> None:
        """Send what has not been sent yet."""
        ...


class NoTracing:
    on = False

    def span(self, name: str, parent: str | None, attributes: Attributes) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, name: str, parent: str, start_s: float, end_s: float, attributes: Attributes) -> str:
        return parent

    def close(self) -> None:
        pass


def open_tracing(endpoint: str, process: str, attributes: Attributes) -> Tracing:
    """Traces of this process (`server` or `engine`) to a collector; none without an endpoint. Raises SettingsError."""
    if not endpoint:
        return NoTracing()
    try:
        return _Sent(endpoint, process, attributes)
    except ModuleNotFoundError:
        raise SettingsError("otlp_endpoint is set: pip install 'tinsmith[otel]'") from None


class _Sent:
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
        """A parent that nobody can read is none: a client may send anything."""
        from opentelemetry.context import Context

        return self._propagator.extract({} if parent is None else {"traceparent": parent}, Context())

    def _name(self, span: Span) -> str | None:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span, Context()))
        return carrier.get("traceparent")
