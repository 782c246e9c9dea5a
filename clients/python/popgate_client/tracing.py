"""Traces messages with OpenTelemetry: `Client(..., tracing=Tracing())`, and the same for `AsyncClient`, `Consumer` and
`AmqpConsumer`.

A publish is a `send` span, whose context goes along with each message. A consumer handles each message in a `process`
span, which belongs to the trace of the message, also in another program. Without a proxy, which would make the span of
the settlement, the consumer makes it itself. The spans go to the tracer provider of this program, or to the one that is
given. This module needs the extra `popgate[tracing]`, and is imported only by programs that use it.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

from opentelemetry import context, trace
from opentelemetry.trace import Link, SpanKind, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from popgate_client.calling import Handler, is_async
from popgate_client.errors import PopgateError
from popgate_client.handling import Reject, Retry
from popgate_client.message import Message, OutgoingMessage, PublishResult

UNSETTLED_MAX = 10_000
"""Maximum number of processed messages whose contexts are remembered until they are settled on RabbitMQ."""
_HEADERS = ("traceparent", "tracestate")
_propagator = TraceContextTextMapPropagator()


class Tracing:
    """Makes the spans of one program. `provider` None: the global one of OpenTelemetry."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("popgate_client", tracer_provider=provider)
        self._unsettled: OrderedDict[str, trace.SpanContext] = OrderedDict()
        """The latest `process` span of each message without a proxy, by its receipt handle."""

    def headers(self) -> Mapping[str, str]:
        """Return the headers with which the server's spans belong to the present one."""
        carrier: dict[str, str] = {}
        _propagator.inject(carrier)
        return carrier

    @contextmanager
    def sending(
        self, topic: str, messages: Sequence[OutgoingMessage | str | bytes]
    ) -> Generator[tuple[Sequence[OutgoingMessage | str | bytes], Callable[[Sequence[PublishResult]], None]]]:
        """Make the span of a publish. Return the messages with its context, and a function that takes the results.

        A message with a context of its own keeps it.
        """
        own = [_context_in(_headers_of(message)) for message in messages]
        links = [Link(one) for one in own if one is not None]
        attributes = _attributes("send", topic)
        if len(messages) != 1:
            attributes["messaging.batch.message_count"] = len(messages)
        kind = SpanKind.PRODUCER if len(links) < len(messages) else SpanKind.CLIENT
        with self._tracer.start_as_current_span(
            f"send {topic}", kind=kind, attributes=attributes, links=links, record_exception=False
        ) as span:

            def took(results: Sequence[PublishResult]) -> None:
                if len(results) == 1 and results[0].message_id:
                    span.set_attribute("messaging.message.id", results[0].message_id)
                failed = next((one.error for one in results if one.error is not None), None)
                if failed is not None:
                    span.set_attribute("error.type", failed.get("code", "failed"))
                    span.set_status(StatusCode.ERROR, failed.get("detail"))

            added = self.headers()
            try:
                yield [_with_headers(message, added) for message in messages], took
            except PopgateError as error:
                span.set_attribute("error.type", error.code)
                raise

    def processed(self, handler: Handler) -> Handler:
        """Return the handler, called in the span of its message."""
        if is_async(handler):

            @wraps(handler)
            async def handle_async(message: Message) -> object:
                with self.processing(message):
                    result: Any = handler(message)
                    return await result

            return handle_async

        @wraps(handler)
        def handle(message: Message) -> object:
            with self.processing(message):
                return handler(message)

        return handle

    @contextmanager
    def processing(self, message: Message) -> Generator[None]:
        """Within the context, the message is processed: for programs that pop without a `Consumer`."""
        created = _context_in(message.headers)
        attributes = _attributes_of(message, "process", "process")
        attributes["popgate.delivery_count"] = message.delivery_count
        with self._tracer.start_as_current_span(
            f"process {message.topic}",
            context=_parent(created),
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=[] if created is None else [Link(created)],
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            if not _has_proxy(message):
                self._unsettled[message.receipt_handle] = span.get_span_context()
                while len(self._unsettled) > UNSETTLED_MAX:
                    self._unsettled.popitem(last=False)
            try:
                yield
            except BaseException as error:
                span.set_attribute("error.type", type(error).__name__)
                if not isinstance(error, Retry | Reject):  # the text may contain parts of the body
                    span.set_status(StatusCode.ERROR)
                raise

    @contextmanager
    def settling(self, message: Message, verb: str) -> Generator[None]:
        """Make the span of the settlement of a processed message, for an `AmqpConsumer`: no proxy makes it."""
        created, processed = _context_in(message.headers), self._unsettled.pop(message.receipt_handle, None)
        with self._tracer.start_as_current_span(
            f"{verb} {message.topic}",
            context=_parent(created),
            kind=SpanKind.CLIENT,
            attributes=_attributes_of(message, verb, "settle"),
            links=[Link(one) for one in (created, processed) if one is not None],
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield
                if message.lease_lost:  # the settlement has come too late
                    span.set_attribute("error.type", "lease_lost")
                    span.set_status(StatusCode.ERROR)
            except BaseException as error:
                span.set_attribute(
                    "error.type", error.code if isinstance(error, PopgateError) else type(error).__name__
                )
                span.set_status(StatusCode.ERROR)
                raise


def _has_proxy(message: Message) -> bool:
    return not message.receipt_handle.startswith("amqp:")


def _parent(created: trace.SpanContext | None) -> context.Context | None:
    return None if created is None else trace.set_span_in_context(trace.NonRecordingSpan(created))


def _attributes_of(message: Message, operation: str, kind: str) -> dict[str, Any]:
    """Return the attributes of a span about one message."""
    attributes = _attributes(operation, message.topic)
    attributes["messaging.operation.type"] = kind
    if not _has_proxy(message):
        attributes["messaging.system"] = "rabbitmq"
    attributes["messaging.consumer.group.name"] = message.group
    attributes["messaging.destination.partition.id"] = str(message.queue)
    if message.message_id is not None:
        attributes["messaging.message.id"] = message.message_id
    return attributes


def _attributes(operation: str, topic: str) -> dict[str, Any]:
    return {
        "messaging.system": "popgate",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
    }


def _headers_of(message: OutgoingMessage | str | bytes) -> Mapping[str, Any]:
    return (message.headers or {}) if isinstance(message, OutgoingMessage) else {}


def _with_headers(message: OutgoingMessage | str | bytes, added: Mapping[str, str]) -> OutgoingMessage:
    whole = message if isinstance(message, OutgoingMessage) else OutgoingMessage(body=message)
    given = whole.headers or {}
    return whole if "traceparent" in given else replace(whole, headers={**given, **added})


def _context_in(headers: Mapping[str, Any]) -> trace.SpanContext | None:
    """Return the context in the headers of a message, or None if there is none, or if it is not valid."""
    carrier = {name: value for name in _HEADERS if isinstance(value := headers.get(name), str)}
    found = trace.get_current_span(_propagator.extract(carrier, context.Context())).get_span_context()
    return found if found.is_valid else None
