"""Checks whether the number of a topic's queues can be changed without the loss of a message.

A change has two steps. First the topic gets the new number, if its queues are drained. Then all proxies follow. Only
after that, no proxy publishes to the surplus queues or consumes them, and they are deleted if they are empty. Otherwise
another proxy has published to them before it has followed, and the topic gets the former number again.
"""

import asyncio
from collections.abc import Sequence

from popgate.domain.errors import Conflict, PopgateError
from popgate.domain.names import QUEUES_MAX, BrokerQueue, GroupName, Subscription, own_layout
from popgate.domain.topics import TopicSpec
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.subscription.counting import owner_counts
from popgate.engine.subscription.subscription import ServedSubscription

UNUSED_SECONDS_MAX = 5.0
"""Maximum number of seconds that the broker has to remove the consumers of surplus queues."""
LOOKS, LOOK_SECONDS = 3, 0.2
"""Number of looks in which a surplus queue must be empty, and seconds between them. A channel returns its messages a
moment after its end, and RabbitMQ counts 0 messages in a queue whose leader does not answer in time."""


async def check_drained(context: EngineContext, one: ServedSubscription) -> None:
    """Check that the group's queues have no messages. Raises: Conflict, also if another proxy can't tell."""
    depths = await context.broker.depth(one.layout.queues)
    counts = await owner_counts(context, one.group)
    if counts is None and context.router.cluster is not None:
        raise Conflict(
            f"a queue of group {one.name.group!r} has no owner that answers, so its leased and delayed messages can't "
            "be counted; try again"
        )
    if (
        any(host.messages() for host in one.hosts)
        or any(count.ready or count.in_flight or count.waiting for count in counts or ())
        or any(depth.ready or depth.delayed for depth in depths)
    ):
        raise Conflict(
            f"the queues of group {one.name.group!r} are not drained, delayed messages included; "
            "another number of queues would move ordering keys"
        )


async def declared_count(context: EngineContext, spec: TopicSpec, groups: Sequence[GroupName]) -> int:
    """Return the number of queues that the topic's groups have at the broker.

    They are more than in ``spec`` if an earlier change to a lower number was interrupted.
    """
    count = spec.queue_count
    while groups and count < QUEUES_MAX:
        layouts = [own_layout(Subscription(spec.topic, group), count + 1) for group in groups]
        if all(depth.ready is None for depth in await context.broker.depth([one.queues[count] for one in layouts])):
            break
        count += 1
    return count


async def are_unused(context: EngineContext, queues: Sequence[BrokerQueue]) -> bool:
    """Return whether the queues are empty, and have no consumers, also of other proxies."""
    looks = 0
    try:
        async with asyncio.timeout(UNUSED_SECONDS_MAX):
            while True:
                depths = await context.broker.depth(queues)
                if any(depth.ready for depth in depths):
                    return False
                looks = 0 if any(depth.consumers for depth in depths) else looks + 1
                if looks == LOOKS or (looks and context.router.cluster is None):
                    return True
                await asyncio.sleep(LOOK_SECONDS)
    except (TimeoutError, PopgateError):
        return False
