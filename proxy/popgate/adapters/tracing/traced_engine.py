"""Makes spans of what the engine does with messages: ``send``, ``receive``, and the settlements.

Theory of operation. A publish is a ``send`` span. Its context becomes that of each message without one. A pop that gets
messages is a ``receive`` span with a link to the creation of each message; one that gets none is no span, because
clients poll all the time. Both contexts of a lease are remembered with its receipt handle, so that the span of its
settlement links to both.

In a cluster, the proxy that a client asks makes the spans, also of a pop that another proxy answers.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from time import time_ns
from typing import Any, TypeVar, cast

from msgspec import DecodeError, Struct, json, msgpack
from opentelemetry.trace import Link, Span, SpanKind, Tracer

from popgate.adapters.tracing.attributes import MESSAGE_ID, attributes_of, note_error, note_failure
from popgate.adapters.tracing.contexts import LeaseContexts, RememberedLeases, context_in, headers_of
from popgate.domain.errors import PopgateError
from popgate.domain.permissions import Permit, permit_all
from popgate.engine.cluster.remote_pops import Forward
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.engine import Engine
from popgate.engine.lease.pop_request import Leased, PopRequest, Presence
from popgate.engine.publish.publishing import NewMessage, Published
from popgate.engine.settle.orders import SettleOrder, SettleResult, Verb
from popgate.ports.peers import ForwardedAnswer

AnswerT = TypeVar("AnswerT")

ADDED_HEADERS = 2
"""Number of headers that a message gets."""
_DONE = frozenset({"acked", "already_acked", "released", "rejected", "extended"})
_OK = 200


class _Popped(Struct):
    """The fields of a message that another proxy has leased."""

    receipt_handle: str
    queue: int
    message_id: str = ""
    headers: dict[str, Any] = {}


class _Answer(Struct):
    messages: list[_Popped]


_in_json, _packed = json.Decoder(_Answer).decode, msgpack.Decoder(_Answer).decode


class TracedEngine(Engine):
    """An engine whose work on messages is traced."""

    def __init__(self, context: EngineContext, tracer: Tracer) -> None:
        super().__init__(context)
        self._tracer = tracer
        self._leases = RememberedLeases()

    async def publish(self, topic: str, messages: Sequence[NewMessage], permit: Permit = permit_all) -> list[Published]:
        own = [context_in(message.headers) for message in messages]
        links = [
            Link(created, {MESSAGE_ID: message.message_id} if message.message_id else None)
            for message, created in zip(messages, own, strict=True)
            if created is not None
        ]
        attributes = attributes_of("send", "send", topic, count=len(messages))
        if len(messages) == 1:
            attributes["messaging.message.body.size"] = len(messages[0].body)
        kind = SpanKind.PRODUCER if len(links) < len(messages) else SpanKind.CLIENT
        with self._span(f"send {topic}", kind, attributes, links) as span:
            results = await super().publish(topic, self._created(messages, span), permit)
            if len(results) == 1:
                span.set_attribute(MESSAGE_ID, results[0].message_id)
            failed = next((one for one in results if one.status == "failed"), None)
            if failed is not None:
                note_failure(span, failed.error_code, failed.error_detail)
            return results

    def _created(self, messages: Sequence[NewMessage], span: Span) -> Sequence[NewMessage]:
        """Return the messages with a context in their headers, as far as the limit of headers permits it."""
        added = headers_of(span)
        room = self.quotas.headers_max - ADDED_HEADERS
        return [
            message
            if "traceparent" in message.headers or len(message.headers) > room
            else message._replace(headers={**message.headers, **added})
            for message in messages
        ]

    async def pop(
        self, topic: str, group: str, request: PopRequest, presence: Presence, permit: Permit = permit_all
    ) -> list[Leased]:
        if self._context.router.cluster is not None:  # the proxy that has forwarded this pop makes the span
            return await super().pop(topic, group, request, presence, permit)
        began = time_ns()
        try:
            leased = await super().pop(topic, group, request, presence, permit)
        except PopgateError as error:
            self._refused(topic, group, began, error)
            raise
        self._received(topic, group, began, _popped_here(leased))
        return leased

    async def pop_anywhere(
        self,
        topic: str,
        group: str,
        request: PopRequest,
        presence: Presence,
        forward: Forward[AnswerT],
        permit: Permit = permit_all,
    ) -> list[Leased] | AnswerT:
        began = time_ns()
        try:
            found = await super().pop_anywhere(topic, group, request, presence, forward, permit)
        except PopgateError as error:
            self._refused(topic, group, began, error)
            raise
        self._received(topic, group, began, _popped_in(found))
        return found

    def _refused(self, topic: str, group: str, began: int, error: PopgateError) -> None:
        attributes = attributes_of("receive", "receive", topic, group, count=0)
        span = self._tracer.start_span(
            f"receive {topic}", kind=SpanKind.CLIENT, attributes=attributes, start_time=began
        )
        note_error(span, error)
        span.end()

    def _received(self, topic: str, group: str, began: int, popped: Sequence[_Popped]) -> None:
        """Make the span of a pop that got messages, and remember its leases."""
        if not popped:
            return
        created = [context_in(one.headers) for one in popped]
        links = [
            Link(context, {MESSAGE_ID: one.message_id} if one.message_id else None)
            for one, context in zip(popped, created, strict=True)
            if context is not None
        ]
        attributes = attributes_of("receive", "receive", topic, group, message_ids=[one.message_id for one in popped])
        queues = {one.queue for one in popped}
        if len(queues) == 1:
            attributes["messaging.destination.partition.id"] = str(*queues)
        span = self._tracer.start_span(
            f"receive {topic}", kind=SpanKind.CLIENT, attributes=attributes, links=links, start_time=began
        )
        leased = span.get_span_context()
        for one, context in zip(popped, created, strict=True):
            self._leases.remember(one.receipt_handle, LeaseContexts(one.message_id, context, leased))
        span.end()

    async def settle(self, topic: str, group: str, verb: Verb, orders: Sequence[SettleOrder]) -> list[SettleResult]:
        known = [self._leases.get(order.receipt_handle) for order in orders]
        links = [link for one in known if one is not None for link in _links_to(one)]
        ids = [one.message_id if one is not None else "" for one in known]
        kind = None if verb is Verb.EXTEND else "settle"
        attributes = attributes_of(verb.value, kind, topic, group, message_ids=ids)
        with self._span(f"{verb.value} {topic}", SpanKind.CLIENT, attributes, links) as span:
            results = await super().settle(topic, group, verb, orders)
            failed = next((one.status for one in results if one.status not in _DONE), None)
            if failed is not None:
                note_failure(span, failed)
            for order, result in zip(orders, results, strict=True):
                if verb is not Verb.EXTEND and result.status in _DONE:
                    self._leases.forget(order.receipt_handle)
            return results

    @contextmanager
    def _span(self, name: str, kind: SpanKind, attributes: Any, links: Sequence[Link]) -> Generator[Span]:
        """Make a span of what happens within the context."""
        with self._tracer.start_as_current_span(
            name, kind=kind, attributes=attributes, links=links, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except BaseException as error:
                note_error(span, error)
                raise


def _popped_in(found: object) -> list[_Popped]:
    """Return the messages that this proxy or another one has leased."""
    if isinstance(found, ForwardedAnswer):
        return _popped_there(found)
    return _popped_here(cast("Sequence[Leased]", found))


def _popped_here(leased: Sequence[Leased]) -> list[_Popped]:
    return [_Popped(one.receipt_handle, one.queue, one.message_id, dict(one.message.headers)) for one in leased]


def _popped_there(answer: ForwardedAnswer) -> list[_Popped]:
    """Return the messages in another proxy's answer."""
    if answer.status != _OK:
        return []
    is_packed = any(name == b"content-type" and b"msgpack" in value for name, value in answer.headers)
    try:
        return (_packed if is_packed else _in_json)(answer.body).messages
    except (DecodeError, UnicodeDecodeError):
        return []


def _links_to(lease: LeaseContexts) -> list[Link]:
    attributes = {MESSAGE_ID: lease.message_id} if lease.message_id else None
    return [Link(one, attributes) for one in (lease.created, lease.leased) if one is not None]
