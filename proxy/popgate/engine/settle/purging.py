"""Purging a subscription: whatever is visible is dropped, and what is leased stays with its clients.

Owns the loop only. A purge is a consumer like any other, and acks what it is given: so it passes the same fences,
nothing that it drops comes back, and of a purge that is killed half-way the rest is there.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.pop_request import PopRequest, Presence
from popgate.engine.settle.settling import SettleOrder, Settler, Verb
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.journal import EventKind

BATCH_COUNT_MAX = 256
LEASE_SECONDS = 30.0
"""Should the purge die between a pop and its acks, these messages are visible again after that long."""
PURGE_SECONDS, PURGE_AT_OWNER_SECONDS = 20.0, 5.0
"""It answers after that long at the latest, another proxy sooner; the rest takes another request."""


class PurgedGroup(NamedTuple):
    """Not ``complete``: it took too long; ask again for the rest."""

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
    """Drop what is visible in this proxy's queues, ``count_max`` messages at most: those that come meanwhile are none
    of its business.

    ``count_visible`` tells whether what a pop could not get is there all the same.
    Raises: BrokerUnavailable, StateUnavailable, QueueGone.
    """
    deadline = context.clock.monotonic() + seconds
    purged = taken = 0
    while taken < count_max:
        if context.clock.monotonic() > deadline:
            return PurgedGroup(purged, complete=False)
        request = PopRequest(
            max_messages=min(BATCH_COUNT_MAX, count_max - taken), invisibility_seconds=LEASE_SECONDS, by_admin=True
        )
        leased = await served.pop(request, Presence())
        if not leased:
            return PurgedGroup(purged, complete=not await count_visible())
        taken += len(leased)
        orders = [SettleOrder(one.receipt_handle) for one in leased]
        results = await settler.settle(served, Verb.ACK, orders, noted_as=EventKind.PURGED)
        purged += sum(result.status == "acked" for result in results)
    return PurgedGroup(purged, complete=True)
