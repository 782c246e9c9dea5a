"""Reads and writes the trace context (W3C Trace Context) of requests and messages, and remembers that of leases.

A message carries the context of its creation in its headers ``traceparent`` and ``tracestate``. So it passes through
RabbitMQ, retries and dead letters, and is the same for each consumer. popgate never replaces one that a publisher has
set.
"""

from collections import OrderedDict
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from opentelemetry import context, trace
from opentelemetry.trace import SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
TRACESTATE_LENGTH_MAX = 512
"""Maximum characters of a ``tracestate``: W3C Trace Context demands that at least as many are propagated. A longer one
is ignored, because contexts are remembered and linked, so that publishers could fill the memory."""
LEASES_MAX = 50_000
"""Maximum number of leases whose contexts are remembered. The settlement of an older lease is not linked."""
_HEADERS = (TRACEPARENT.encode(), TRACESTATE.encode())
_propagator = TraceContextTextMapPropagator()


def context_in(headers: Mapping[str, object]) -> SpanContext | None:
    """Return the context in the headers of a message, or None if there is none, or if it is not valid."""
    if TRACEPARENT not in headers:
        return None
    carrier = {name: value for name in (TRACEPARENT, TRACESTATE) if isinstance(value := headers.get(name), str)}
    found = trace.get_current_span(_extracted(carrier, context.Context())).get_span_context()
    return found if found.is_valid else None


def headers_of(span: trace.Span) -> Mapping[str, str]:
    """Return the headers that make the span the creation of a message."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span, context.Context()))
    return carrier


def as_header(context: SpanContext | None) -> str:
    """Return a context as the value of ``traceparent``; empty if there is none."""
    return "" if context is None else headers_of(trace.NonRecordingSpan(context)).get(TRACEPARENT, "")


def with_context(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of a request to another proxy with the present context in place of the one in ``headers``."""
    added = headers_of(trace.get_current_span())
    if not added:
        return list(headers)
    others = [header for header in headers if header[0] not in _HEADERS]
    return [*others, *((name.encode(), value.encode("latin-1")) for name, value in added.items())]


@contextmanager
def within_trace(headers: Iterable[tuple[bytes, bytes]]) -> Generator[None]:
    """Within the context, spans are children of the one that the headers of an HTTP request name."""
    carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in _HEADERS}
    token = context.attach(_extracted(carrier))
    try:
        yield
    finally:
        context.detach(token)


def _extracted(carrier: dict[str, str], base: context.Context | None = None) -> context.Context:
    if len(carrier.get(TRACESTATE, "")) > TRACESTATE_LENGTH_MAX:
        del carrier[TRACESTATE]
    return _propagator.extract(carrier, base)


class LeaseContexts(NamedTuple):
    """The contexts of a message's creation (None if it has none) and of its lease.

    ``after``: in pull mode, the receipt handle of the message before it in its queue, or empty.
    """

    message_id: str
    created: SpanContext | None
    leased: SpanContext
    after: str | None = None


class RememberedLeases:
    """The contexts of the latest leases, by receipt handle."""

    def __init__(self, leases_max: int = LEASES_MAX) -> None:
        self._leases_max = leases_max
        self._leases: OrderedDict[str, LeaseContexts] = OrderedDict()

    def remember(self, receipt_handle: str, contexts: LeaseContexts) -> None:
        self._leases[receipt_handle] = contexts
        while len(self._leases) > self._leases_max:
            self._leases.popitem(last=False)

    def get(self, receipt_handle: str) -> LeaseContexts | None:
        return self._leases.get(receipt_handle)

    def through(self, receipt_handle: str) -> dict[str, LeaseContexts]:
        """Return the leases of a pulled message and of those before it, the last one first, as far as remembered."""
        found: dict[str, LeaseContexts] = {}
        handle: str | None = receipt_handle
        while handle and handle not in found and (lease := self._leases.get(handle)) is not None:
            found[handle] = lease
            handle = lease.after
        return found

    def forget(self, receipt_handle: str) -> None:
        self._leases.pop(receipt_handle, None)
