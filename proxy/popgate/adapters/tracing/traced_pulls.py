"""Traces pull mode: a pull that gets messages is a ``receive`` span, and a commit is a ``commit`` span.

The owner of the queue makes these spans, because the proxies forward all pulls and commits of a queue to its owner. A
commit links to all messages that it settles. Their receipt handles are known from the pulls: each remembered lease
names the one before it.
"""

from time import time_ns

from popgate.adapters.tracing.attributes import PARTITION, Attributes, attributes_of
from popgate.adapters.tracing.spans import Spans, links_to, received_here
from popgate.domain.errors import PeerUnavailable, PopgateError
from popgate.domain.names import ClientId
from popgate.domain.receipt import ReceiptSigner
from popgate.engine.catalog.topics import Topics
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.pop_request import Leased, Presence
from popgate.engine.pull.pulling import Puller, PullOrder
from popgate.engine.settle.settling import Settler


class TracedPuller(Puller):
    """A puller whose pulls and commits are traced."""

    def __init__(
        self, spans: Spans, context: EngineContext, topics: Topics, settler: Settler, signer: ReceiptSigner
    ) -> None:
        super().__init__(context, topics, settler, signer)
        self._spans = spans

    async def pull(self, topic: str, group: str, number: int, order: PullOrder, presence: Presence) -> list[Leased]:
        began = time_ns()
        try:
            leased = await super().pull(topic, group, number, order, presence)
        except PeerUnavailable:  # the interface repeats the request while the queue changes its owner
            raise
        except PopgateError as error:
            self._spans.refused(topic, group, began, error)
            raise
        self._spans.received(topic, group, began, received_here(leased), after=order.after or "")
        return leased

    async def commit(
        self, topic: str, group: str, number: int, client_id: ClientId, generation: int, receipt_handle: str
    ) -> int:
        began, known = time_ns(), self._spans.leases.through(receipt_handle)
        links = links_to(reversed(known.values()))
        try:
            committed = await super().commit(topic, group, number, client_id, generation, receipt_handle)
        except PeerUnavailable:
            raise
        except PopgateError as error:
            attributes = _attributes(topic, group, number, 0)
            self._spans.record(f"commit {topic}", attributes, began, links=links, error=error)
            raise
        ids = [one.message_id for one in known.values()]
        self._spans.record(f"commit {topic}", _attributes(topic, group, number, committed, *ids), began, links=links)
        for handle in known:
            self._spans.leases.forget(handle)
        return committed


def _attributes(topic: str, group: str, number: int, count: int, *message_ids: str) -> Attributes:
    attributes = attributes_of("commit", "settle", topic, group, message_ids=message_ids, count=count)
    return {**attributes, PARTITION: str(number)}
