"""Purges a subscription: drops the visible messages; leased messages stay with their clients.

Owns the loop only. A purge pops and acks messages like any other consumer. So it passes the same fences, and dropped
messages don't come back. If a purge is killed half-way, the messages that are left stay in their queues.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.pop_request import PopRequest, Presence
from popgate.engine.lease.selection import AdminSelection
from popgate.engine.settle.settling import SettleOrder, Settler, Verb
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.journal import EventKind

BATCH_COUNT_MAX = 256
LEASE_SECONDS = 30.0
"""Seconds after which messages are visible again if the purge dies between a pop and its acks."""
PURGE_SECONDS, PURGE_AT_OWNER_SECONDS = 20.0, 5.0
"""Maximum seconds until a purge answers, here and at another proxy. The rest needs another request."""


class PurgedGroup(NamedTuple):
    """The number of purged messages. Not ``complete``: the purge took too long. Repeat it for the rest."""

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
    """Drop the visible messages of this proxy's queues, at most ``count_max``, so that messages that come meanwhile
    stay.

    ``count_visible``: the number of visible messages, also of those that a pop did not get.
    Raises: BrokerUnavailable, StateUnavailable, QueueGone.
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
