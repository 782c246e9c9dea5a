"""Makes the spans of what this proxy does with messages, and remembers the contexts of its leases for later links.

A pop or a pull that gets messages is a ``receive`` span with a link to the creation of each message; one that gets none
is no span, because clients poll all the time. Both contexts of a lease are remembered with its receipt handle, so that
the span of its settlement links to both.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Tracer

from popgate.adapters.tracing.attributes import MESSAGE_ID, PARTITION, Attributes, attributes_of, note_error
from popgate.adapters.tracing.contexts import LeaseContexts, RememberedLeases, context_in
from popgate.engine.lease.pop_request import Leased


class Received(NamedTuple):
    """What a ``receive`` span needs to know of a message."""

    receipt_handle: str
    queue: int
    message_id: str
    created: SpanContext | None
    """The context of the message's creation, which its headers contain."""


class Spans:
    """The spans of one proxy, and the contexts of its leases (``leases``)."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.leases = RememberedLeases()

    @contextmanager
    def span(
        self, name: str, kind: SpanKind, attributes: Attributes, links: Sequence[Link], *, ends: bool = True
    ) -> Generator[Span]:
        """Make a span of what happens within the context. ``ends`` False: the caller ends it."""
        with self.tracer.start_as_current_span(
            name,
            kind=kind,
            attributes=attributes,
            links=links,
            record_exception=False,
            set_status_on_exception=False,
            end_on_exit=ends,
        ) as span:
            try:
                yield span
            except BaseException as error:
                note_error(span, error)
                raise

    def record(
        self,
        name: str,
        attributes: Attributes,
        began: int,
        *,
        links: Sequence[Link] = (),
        error: BaseException | None = None,
        kind: SpanKind = SpanKind.CLIENT,
    ) -> SpanContext:
        """Make a span of what has just ended. ``began``: when it began, in nanoseconds since the Unix epoch."""
        span = self.tracer.start_span(name, kind=kind, attributes=attributes, links=links, start_time=began)
        if error is not None:
            note_error(span, error)
        span.end()
        return span.get_span_context()

    def receive(self, topic: str, began: int) -> Span:
        """Return the span of a request for messages that is in progress. If it is never ended, it is dropped."""
        return self.tracer.start_span(f"receive {topic}", kind=SpanKind.CLIENT, start_time=began)

    def refused(self, topic: str, group: str, began: int, error: BaseException) -> None:
        """Make the span of a request for messages that failed."""
        self.record(f"receive {topic}", attributes_of("receive", "receive", topic, group, count=0), began, error=error)

    def received(
        self,
        topic: str,
        group: str,
        began: int,
        messages: Sequence[Received],
        *,
        span: Span | None = None,
        after: str | None = None,
    ) -> None:
        """Make the span of a request that got messages, or complete ``span``, and remember the leases.

        ``after``: in pull mode, the receipt handle of the message before the first one.
        """
        if not messages:
            return
        links = [created_link(one.created, one.message_id) for one in messages if one.created is not None]
        attributes = attributes_of("receive", "receive", topic, group, message_ids=[one.message_id for one in messages])
        queues = {one.queue for one in messages}
        if len(queues) == 1:
            attributes[PARTITION] = str(*queues)
        if span is None:
            leased = self.record(f"receive {topic}", attributes, began, links=links)
        else:
            leased = span.get_span_context()
            span.set_attributes(attributes)
            add_links(span, links)
            span.end()
        self.remember(messages, leased, after=after)

    def remember(self, messages: Iterable[Received], leased: SpanContext, *, after: str | None = None) -> None:
        """Remember the contexts of leases. See ``received``."""
        for one in messages:
            self.leases.remember(one.receipt_handle, LeaseContexts(one.message_id, one.created, leased, after))
            if after is not None:
                after = one.receipt_handle


def created_link(created: SpanContext, message_id: str | None) -> Link:
    """Return the link to the creation of a message."""
    return Link(created, _about(message_id))


def links_to(leases: Iterable[LeaseContexts]) -> list[Link]:
    """Return the links to the creation of each message, and then one to each span that leased some of them."""
    created: list[Link] = []
    leased: dict[tuple[int, int], Link] = {}
    for one in leases:
        if one.created is not None:
            created.append(created_link(one.created, one.message_id))
        name = one.leased.trace_id, one.leased.span_id
        leased[name] = Link(one.leased, None if name in leased else _about(one.message_id))
    return [*created, *leased.values()]


def add_links(span: Span, links: Iterable[Link]) -> None:
    """Add links to a span that has begun."""
    for link in links:
        span.add_link(link.context, link.attributes)


def received_here(messages: Sequence[Leased]) -> list[Received]:
    """Return what is needed of messages that this proxy has leased."""
    return [
        Received(one.receipt_handle, one.queue, one.message_id, context_in(one.message.headers)) for one in messages
    ]


def _about(message_id: str | None) -> Attributes | None:
    return {MESSAGE_ID: message_id} if message_id else None
