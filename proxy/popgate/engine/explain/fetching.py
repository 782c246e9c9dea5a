"""Reads messages from the broker for a peek, as a pop would, but without leasing any of them.

The messages stay in memory for ``idle_return_seconds`` after that, as after a pop, and then return to the broker in
order. RabbitMQ counts such a return as a delivery; popgate does not.
"""

from popgate.domain.topics import ConsumeMode
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.pop_request import PopRequest, Waiter
from popgate.engine.lease.selection import Basket, Ready, Selection
from popgate.engine.subscription.subscription import ServedSubscription

FETCH_SECONDS = 1.0
"""Maximum seconds for which a peek waits for messages from the broker."""


class NothingSelection(Selection):
    """Selects no message. Its pop only makes the proxy read messages, also while the group is paused or full."""

    mode = None
    is_limited = False
    is_choosy = True

    def has(self, ready: Ready) -> bool:
        return False

    def take(self, ready: Ready, basket: Basket) -> None:
        pass


_NOTHING = PopRequest(selection=NothingSelection())


async def fetch(context: EngineContext, served: ServedSubscription, count_max: int) -> None:
    """Read messages from the broker until about ``count_max`` are in memory, or for at most ``FETCH_SECONDS``.

    Do nothing while the group changes its consume mode. Raises: BrokerUnavailable.
    """
    clock, serving = context.clock, served.serving
    owned = [host for host in served.hosts if host.is_owned]
    until = clock.monotonic() + FETCH_SECONDS
    served.ask()
    while served.spec.mode is not ConsumeMode.DRAINING and not served.is_closed and clock.monotonic() < until:
        if sum(len(host.messages()) for host in owned) >= count_max or not await _has_more(context, served):
            break
        waiter = Waiter(_NOTHING, short=True, changes=serving.changes)
        serving.park(waiter, first=False)
        context.deadlines.schedule(until, waiter)
        try:
            await waiter.future
        finally:
            serving.leave(waiter)
            context.deadlines.cancel(waiter)
    served.note_demand()


async def _has_more(context: EngineContext, served: ServedSubscription) -> bool:
    depths = await context.broker.depth([host.broker_queue for host in served.hosts if host.is_owned])
    return any(depth.ready for depth in depths)
