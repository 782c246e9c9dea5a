"""Exchanges the contexts of leases between proxies, for the links of settlements at another proxy than the pop's.

Theory of operation. A proxy that settles a lease which it does not remember asks the owner of the queue, which has
granted it. The client has its answer by then: only the span is ended later. If the owner does not answer in time, or
remembers nothing, the span has no links. Proxies without tracing neither ask nor answer.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence

from msgspec import DecodeError, msgpack
from opentelemetry.trace import Span

from popgate.adapters.tracing.attributes import MESSAGE_ID
from popgate.adapters.tracing.contexts import TRACEPARENT, LeaseContexts, RememberedLeases, as_header, context_in
from popgate.adapters.tracing.spans import add_links, links_to
from popgate.domain.errors import PopgateError
from popgate.domain.names import GroupName, InstanceId, Subscription, TopicName
from popgate.domain.receipt import ReceiptSigner
from popgate.engine.catalog.topics import Topics
from popgate.engine.context.engine_context import EngineContext
from popgate.ports.peers import ForwardedRequest
from popgate.wire.admission import CONTENT_TYPE, TRACES_PATH

ASK_SECONDS = 1.0
"""Maximum seconds to wait for the contexts of leases. After that, a span is sent without its links."""
ASKING_MAX = 1_000
"""Maximum number of spans that wait for the contexts of leases. Further spans are sent without these links."""
ASKED_MAX = 256
"""Maximum number of leases in one request to another proxy."""
_OK = 200
_Sent = tuple[str, str, str]
"""A lease on the wire: the message id, and the contexts of the creation and of the lease."""
_read_keys = msgpack.Decoder(list[str]).decode
_read_leases = msgpack.Decoder(list[_Sent | None]).decode


class OtherLeases:
    """Asks the other proxies for the contexts of their ``leases``, and answers what they ask about those of this
    one."""

    def __init__(self, context: EngineContext, leases: RememberedLeases, topics: Topics) -> None:
        self._context = context
        self._leases = leases
        self._topics = topics
        self._signer = ReceiptSigner(context.options.secrets)
        self._asking = 0

    def answer(self, body: bytes) -> bytes:
        """Return the contexts of leases that another proxy asks for. Raises: ValueError for another body."""
        try:
            keys = _read_keys(body)
        except (DecodeError, UnicodeDecodeError) as error:
            raise ValueError(str(error)) from error
        return msgpack.encode([_sent(self._leases.get(key)) for key in keys[:ASKED_MAX]])

    def end(self, span: Span, topic: str, group: str, handles: Sequence[str], *, is_single: bool) -> None:
        """End the span of a settlement, after links to the leases of ``handles`` were added, which this proxy does not
        remember. ``is_single``: the settlement is of one message."""
        self._end_later(span, self._by_owner(topic, group, handles) if span.is_recording() else {}, is_single=is_single)

    def end_after_asking_all(self, span: Span, keys: Sequence[str]) -> None:
        """End a span after links to the leases with these ``keys`` were added, which any other proxy may remember."""
        others = self._context.router.other_members() if keys and span.is_recording() else []
        self._end_later(span, dict.fromkeys(others, keys), is_single=False)

    def _end_later(self, span: Span, asked: Mapping[InstanceId, Sequence[str]], *, is_single: bool) -> None:
        """End a span after links to leases were added. ``asked``: the keys of the leases, by the proxy to ask."""
        if not asked or self._asking >= ASKING_MAX:
            span.end()
            return
        self._asking += 1
        self._context.background.spawn(self._end(span, asked, time.time_ns(), is_single), name="link a settlement")

    async def _end(self, span: Span, asked: Mapping[InstanceId, Sequence[str]], ended_at: int, is_single: bool) -> None:
        found: list[LeaseContexts] = []
        try:
            async with asyncio.timeout(ASK_SECONDS):
                for proxy, keys in asked.items():
                    found += await self._ask(proxy, keys)
        except (PopgateError, TimeoutError, DecodeError, UnicodeDecodeError):
            pass  # it is about to leave, or does not trace
        finally:
            self._asking -= 1
            add_links(span, links_to(found))
            if is_single and found and found[0].message_id:
                span.set_attribute(MESSAGE_ID, found[0].message_id)
            span.end(ended_at)

    async def _ask(self, proxy: InstanceId, keys: Sequence[str]) -> list[LeaseContexts]:
        cluster = self._context.router.cluster
        if cluster is None:
            return []
        body = msgpack.encode([*keys[:ASKED_MAX]])
        request = ForwardedRequest("POST", TRACES_PATH, b"", [(b"content-type", CONTENT_TYPE)], body)
        answer = await cluster.peers.forward(proxy, request, wait_seconds=0.0)
        if answer.status != _OK:
            return []
        return [lease for one in _read_leases(answer.body) if one is not None and (lease := _lease(one)) is not None]

    def _by_owner(self, topic: str, group: str, handles: Sequence[str]) -> dict[InstanceId, list[str]]:
        """Return the handles by the other proxy that owns the queue of the lease."""
        served = self._topics.served.get(Subscription(TopicName(topic), GroupName(group)))
        found: dict[InstanceId, list[str]] = {}
        if served is None or self._context.router.cluster is None:
            return found
        for handle in handles:
            receipt = self._signer.verify(handle)
            if receipt is None or receipt.queue.number >= len(served.hosts):
                continue
            owner = self._context.router.owner(served.hosts[receipt.queue.number].broker_queue)
            if owner is not None:
                found.setdefault(owner, []).append(handle)
        return found


def _sent(lease: LeaseContexts | None) -> _Sent | None:
    return None if lease is None else (lease.message_id, as_header(lease.created), as_header(lease.leased))


def _lease(sent: _Sent) -> LeaseContexts | None:
    message_id, created, leased_header = sent
    leased = context_in({TRACEPARENT: leased_header})
    return None if leased is None else LeaseContexts(message_id, context_in({TRACEPARENT: created}), leased)
