"""Collects the numbers that /metrics shows about this proxy: its queues, and whether it reaches broker and store."""

from typing import NamedTuple

from popgate.engine.catalog.topics import Topics
from popgate.engine.context.engine_context import EngineContext


class ProxyGauges(NamedTuple):
    """The state of one proxy.

    ``owned``: the number of queues that this proxy owns. ``unowned``: the number of queues without an owner, which only
    one proxy of the cluster reports, so that the sum over all proxies is right. ``missing``: the number of queues of
    this proxy that were deleted on the broker. ``has_broker`` and ``has_store``: whether they can be used now.
    """

    owned: int
    unowned: int
    missing: int
    has_broker: bool
    has_store: bool


def proxy_gauges(context: EngineContext, topics: Topics) -> ProxyGauges:
    """Return the state of this proxy, as it knows it without asking the broker or the store."""
    owned, unowned = 0, 0
    cluster = context.router.cluster
    owners = None if cluster is None or not context.router.collects() else cluster.ownership.view.owners
    for served in topics.served.values():
        for host in served.hosts:
            owned += host.is_owned
            unowned += owners is not None and host.broker_queue not in owners
    return ProxyGauges(
        owned=owned,
        unowned=unowned,
        missing=len(context.missing_queues),
        has_broker=context.broker.unavailable_reason() is None,
        has_store=context.leases.unavailable_reason() is None,
    )
