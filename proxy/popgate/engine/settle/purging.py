"""Purges a subscription: deletes the visible messages, but not the leased messages.

A purge leases and acks messages in batches, as a client does. So the same checks apply, and deleted messages are not
delivered again. If a purge is killed half-way, the remaining messages stay in their queues.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.pop_request import PopRequest, Presence
from popgate.engine.lease.selection import AdminSelection
from popgate.engine.settle.orders import SettleOrder, Verb
from popgate.engine.settle.settling import Settler
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.journal import EventKind

BATCH_COUNT_MAX = 256
LEASE_SECONDS = 30.0
"""Seconds for which a purge leases each batch. If the purge dies before it acks the batch, the messages then become
visible again."""
PURGE_SECONDS, PURGE_AT_OWNER_SECONDS = 20.0, 5.0
"""Maximum seconds that a purge runs on the proxy that received the request, and on each other proxy. The remaining
messages need another request."""


class PurgedGroup(NamedTuple):
    """The result of a purge: the number of deleted messages.

    If ``complete`` is False, visible messages may be left. Repeat the purge to delete them.
    """

    purged: int
    complete: bool


async def purge(
    context: EngineContext,
    settler: Settler,
    served: ServedSubscription,
    count_max: int,
    count_visible: Callable[[], Awaitable[int]],
    *,
    seconds: float = PURGE_SECONDS,
) -> PurgedGroup:
    """Delete the visible messages in the queues of this proxy, at most ``count_max``.

    ``count_max`` is the number of messages before the purge, so that the purge ends even if new messages arrive.
    ``count_visible`` counts the visible messages, including those that a pop can't get now. Raises: BrokerUnavailable,
    StateUnavailable, QueueGone.
    """
    deadline = context.clock.monotonic() + seconds
    purged = taken = 0
    while taken < count_max:
        if context.clock.monotonic() > deadline:
            return PurgedGroup(purged, complete=False)
        request = PopRequest(
            max_messages=min(BATCH_COUNT_MAX, count_max - taken),
            invisibility_seconds=LEASE_SECONDS,
            selection=AdminSelection(),
        )
        leased = await served.pops.pop(request, Presence())
        if not leased:
            return PurgedGroup(purged, complete=not await count_visible())
        taken += len(leased)
        orders = [SettleOrder(one.receipt_handle) for one in leased]
        results = await settler.settle(served, Verb.ACK, orders, noted_as=EventKind.PURGED)
        purged += sum(result.status == "acked" for result in results)
    return PurgedGroup(purged, complete=True)
