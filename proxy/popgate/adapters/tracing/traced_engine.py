"""Makes spans of what the engine does with messages: ``send``, ``receive``, and the settlements.

Theory of operation. A publish is a ``send`` span. Its context becomes that of each message without one. ``spans`` has
the rules for ``receive`` spans.

In a cluster, the proxy that a client asks makes the spans, also of a pop that another proxy answers. Both proxies
remember the lease: a forwarded pop carries the context of its ``receive`` span. A settlement at a third proxy gets the
context from the owner of the queue (``other_leases``).
"""

from collections.abc import Sequence
from functools import partial
from time import time_ns
from typing import Any, TypeVar, cast

from msgspec import DecodeError, Struct, json, msgpack
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Tracer

from popgate.adapters.tracing.attributes import MESSAGE_ID, attributes_of, note_failure
from popgate.adapters.tracing.contexts import context_in, headers_of
from popgate.adapters.tracing.other_leases import OtherLeases
from popgate.adapters.tracing.spans import Received, Spans, created_link, links_to, received_here
from popgate.adapters.tracing.traced_lease_groups import TracedLeaseGroups
from popgate.adapters.tracing.traced_pulls import TracedPuller
from popgate.domain.errors import PopgateError
from popgate.domain.names import InstanceId
from popgate.domain.permissions import Permit, permit_all
from popgate.engine.catalog.topics import Topics
from popgate.engine.cluster.remote_pops import Forward, PeerPop
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
        self.spans = Spans(tracer)
        super().__init__(context, puller=partial(TracedPuller, self.spans), lease_groups=self._traced_lease_groups)

    def _traced_lease_groups(self, context: EngineContext, topics: Topics) -> TracedLeaseGroups:
        self.other_leases = OtherLeases(context, self.spans.leases, topics)
        return TracedLeaseGroups(self.spans, self.other_leases, context, topics)

    async def publish(self, topic: str, messages: Sequence[NewMessage], permit: Permit = permit_all) -> list[Published]:
        own = [context_in(message.headers) for message in messages]
        links = [
            created_link(created, message.message_id)
            for message, created in zip(messages, own, strict=True)
            if created is not None
        ]
        attributes = attributes_of("send", "send", topic, count=len(messages))
        if len(messages) == 1:
            attributes["messaging.message.body.size"] = len(messages[0].body)
        kind = SpanKind.PRODUCER if len(links) < len(messages) else SpanKind.CLIENT
        with self.spans.span(f"send {topic}", kind, attributes, links) as span:
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
            leased = await super().pop(topic, group, request, presence, permit)
            receiving = trace.get_current_span().get_span_context()
            if receiving.is_valid:
                self.spans.remember(received_here(leased), receiving)
            return leased
        began = time_ns()
        try:
            leased = await super().pop(topic, group, request, presence, permit)
        except PopgateError as error:
            self.spans.refused(topic, group, began, error)
            raise
        self.spans.received(topic, group, began, received_here(leased))
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
        span: Span | None = None

        async def forward_within_span(to: InstanceId) -> PeerPop[AnswerT]:
            nonlocal span
            span = span or self.spans.receive(topic, began)
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                return await forward(to)

        try:
            found = await super().pop_anywhere(topic, group, request, presence, forward_within_span, permit)
        except PopgateError as error:
            self.spans.refused(topic, group, began, error)
            raise
        self.spans.received(topic, group, began, _received_in(found), span=span)
        return found

    async def settle(self, topic: str, group: str, verb: Verb, orders: Sequence[SettleOrder]) -> list[SettleResult]:
        leases = self.spans.leases
        known = {order.receipt_handle: leases.get(order.receipt_handle) for order in orders}
        found = [one for one in known.values() if one is not None]
        ids = ["" if one is None else one.message_id for one in known.values()]
        kind = None if verb is Verb.EXTEND else "settle"
        attributes = attributes_of(verb.value, kind, topic, group, message_ids=ids, count=len(orders))
        with self.spans.span(f"{verb.value} {topic}", SpanKind.CLIENT, attributes, links_to(found), ends=False) as span:
            try:
                results = await super().settle(topic, group, verb, orders)
                failed = next((one.status for one in results if one.status not in _DONE), None)
                if failed is not None:
                    note_failure(span, failed)
            finally:
                missing = [handle for handle, one in known.items() if one is None]
                self.other_leases.end(span, topic, group, missing, is_single=len(orders) == 1)
        for order, result in zip(orders, results, strict=True):
            if verb is not Verb.EXTEND and result.status in _DONE:
                leases.forget(order.receipt_handle)
        return results


def _received_in(found: object) -> list[Received]:
    """Return the messages that this proxy or another one has leased."""
    if isinstance(found, ForwardedAnswer):
        return [
            Received(one.receipt_handle, one.queue, one.message_id, context_in(one.headers))
            for one in _popped_there(found)
        ]
    return received_here(cast("Sequence[Leased]", found))


def _popped_there(answer: ForwardedAnswer) -> list[_Popped]:
    """Return the messages in another proxy's answer."""
    if answer.status != _OK:
        return []
    is_packed = any(name == b"content-type" and b"msgpack" in value for name, value in answer.headers)
    try:
        return (_packed if is_packed else _in_json)(answer.body).messages
    except (DecodeError, UnicodeDecodeError):
        return []
