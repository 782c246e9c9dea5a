"""Reports what this proxy knows of a group: its queues, the waiting pops, and what keeps messages back.

Everything is computed on request from the state of the queues. ``api.explain`` adds the reports of the other proxies.
"""

from collections.abc import Sequence

from popgate.domain.errors import BrokerUnavailable
from popgate.domain.filters import HeaderFilter
from popgate.domain.modes import is_pulled
from popgate.domain.names import InstanceId
from popgate.domain.standing import (
    BlockingMessage,
    GroupStanding,
    ProxyStanding,
    QueueStanding,
    UnownedQueue,
    UnreachableProxy,
)
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.explain.slices import slices
from popgate.engine.queue.buffered import BufferedMessage, MessageState
from popgate.engine.queue.host import QueueHost
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.broker import QueueDepth
from popgate.runtime.deadlines import NEVER

BLOCKING_MAX = 5
"""Maximum number of blocking messages that are reported for each queue."""
FILTERS_MAX = 5
COMPARED_MAX = 1_000
"""Maximum number of ready messages that are compared with at most ``FILTERS_MAX`` filters of waiting pops."""

STATE_NAMES = {
    MessageState.READY: "ready",
    MessageState.GRANTING: "ready",
    MessageState.REQUEUED: "ready",
    MessageState.LEASED: "leased",
    MessageState.DELAYED: "delayed",
    MessageState.MOVING: "moving",
    MessageState.DISCARDING: "expired",
}
"""The names of the states in answers to clients."""
_ENDS = (MessageState.LEASED, MessageState.DELAYED)
_BLOCKS = (MessageState.LEASED, MessageState.DELAYED, MessageState.MOVING, MessageState.GRANTING)


class _Seen:
    """What a walk through the messages of one proxy's queues has found."""

    def __init__(self, filters: Sequence[HeaderFilter]) -> None:
        self._filters = filters
        self._compared = 0
        self.filters_pass: bool | None = None
        self.next_at = NEVER
        self.blocking: list[BufferedMessage] = []
        self.undelivered = 0
        """Number of messages that have no delivery on the present channel, so that the broker counts them as well."""

    def begin(self) -> None:
        """Begin with the next queue."""
        self.next_at, self.blocking, self.undelivered = NEVER, [], 0

    def look_at(self, message: BufferedMessage) -> None:
        self.undelivered += message.tag is None
        if message.state in _ENDS and message.deadline < self.next_at and not _is_open(message):
            self.next_at = message.deadline
        if message.key is not None and message.next is not None and message.is_head and message.state in _BLOCKS:
            self._block(message)
        if self._filters and message.state is MessageState.READY and message.is_head:
            self._compare(message)

    def _block(self, message: BufferedMessage) -> None:
        if message.next_of_key() is not None:
            self.blocking.append(message)
            if len(self.blocking) > BLOCKING_MAX:
                self.blocking.sort(key=lambda one: one.deadline)
                self.blocking.pop()

    def _compare(self, message: BufferedMessage) -> None:
        if self._compared < COMPARED_MAX and not self.filters_pass and message.message is not None:
            self._compared += 1
            headers = message.message.headers
            self.filters_pass = any(passes(headers) for passes in self._filters)


async def proxy_standing(
    context: EngineContext, served: ServedSubscription, *, is_stopping: bool, with_contents: bool
) -> ProxyStanding:
    """Return what this proxy knows of a group. ``with_contents``: whether the caller may read the group's messages."""
    parked = served.serving.parked
    filters = parked.filters(FILTERS_MAX)
    broker_trouble = context.broker.unavailable_reason()
    owned = [host for host in served.hosts if host.is_owned]
    depths: Sequence[QueueDepth | None] = [None] * len(owned)
    if broker_trouble is None:
        try:
            depths = await context.broker.depth([host.broker_queue for host in owned])
        except BrokerUnavailable as error:
            broker_trouble = error.detail
    seen = _Seen(filters)
    queues = [
        await _queue_standing(context, served, host, depth, seen, with_contents=with_contents)
        for host, depth in zip(owned, depths, strict=True)
    ]
    return ProxyStanding(
        proxy=context.instance,
        parked_pops=len(parked),
        filtered_pops=parked.filtered_count(),
        filters=[_shown(one) for one in filters] if with_contents else [],
        filters_pass=seen.filters_pass,
        is_stopping=is_stopping,
        broker_trouble=broker_trouble,
        store_trouble=context.leases.unavailable_reason(),
        queues=queues,
    )


async def group_standing(
    context: EngineContext,
    served: ServedSubscription,
    proxies: Sequence[ProxyStanding],
    unreachable: Sequence[UnreachableProxy],
) -> GroupStanding:
    """Return the standing of a group, from the reports of the proxies that have answered."""
    layout, spec = served.layout, served.spec
    without_owner = unowned(context, served)
    dead: int | None = None
    try:
        depths = await context.broker.depth([layout.dead, *(one.broker_queue for one in without_owner)])
        dead = depths[0].ready
        ready = [depth.ready for depth in depths[1:]]
    except BrokerUnavailable:
        ready = [None] * len(without_owner)
    return GroupStanding(
        topic=spec.subscription.topic,
        group=spec.subscription.group,
        mode=spec.mode.value,
        paused=spec.policy.paused,
        max_in_flight=spec.policy.max_in_flight,
        dead=dead,
        proxies=proxies,
        unowned=[
            UnownedQueue(queue=host.queue.number, broker_queue=host.broker_queue, ready=count)
            for host, count in zip(without_owner, ready, strict=True)
        ],
        unreachable=unreachable,
    )


def queues_of(context: EngineContext, served: ServedSubscription, owner: InstanceId) -> list[int]:
    """Return the numbers of the group's queues that another proxy owns."""
    return [host.queue.number for host in served.hosts if context.router.owner(host.broker_queue) == owner]


def not_shown(host: QueueHost, depth: QueueDepth, undelivered: int) -> int | None:
    """Count the messages of a queue that wait at the broker and that this proxy has not read.

    ``undelivered``: the number of messages that this proxy knows, but that have no delivery on the present channel.
    Return None if the queue does not exist.
    """
    return None if depth.ready is None else max(0, depth.ready - undelivered - len(host.state.evidence.detached))


def unowned(context: EngineContext, served: ServedSubscription) -> list[QueueHost]:
    """Return the hosts of the group's queues that no proxy owns now."""
    cluster = context.router.cluster
    if cluster is None:
        return []
    owners = cluster.ownership.view.owners
    return [host for host in served.hosts if host.broker_queue not in owners]


async def _queue_standing(
    context: EngineContext,
    served: ServedSubscription,
    host: QueueHost,
    depth: QueueDepth | None,
    seen: _Seen,
    *,
    with_contents: bool,
) -> QueueStanding:
    seen.begin()
    async for messages in slices(host):
        for message in messages:
            seen.look_at(message)
    counts, wall_from = host.state.counts, context.clock.wall() - context.clock.monotonic()
    visible = (MessageState.READY, MessageState.GRANTING, MessageState.REQUEUED)
    ready, heads = sum(map(counts.all, visible)), sum(map(counts.heads, visible))
    is_pulled = served.group.is_pulled  # the client of a queue gets all its messages in order
    blocking = [] if is_pulled else seen.blocking
    return QueueStanding(
        queue=host.queue.number,
        broker_queue=host.broker_queue,
        ready=ready if is_pulled else heads,
        blocked=0 if is_pulled else ready - heads,
        leased=counts.all(MessageState.LEASED),
        delayed=counts.all(MessageState.DELAYED),
        moving=counts.all(MessageState.MOVING),
        set_aside=len(host.state.stuck),
        not_shown=None if depth is None else not_shown(host, depth, seen.undelivered),
        delayed_at_broker=0 if depth is None else depth.delayed,
        exists=not host.queue_gone and (depth is None or depth.ready is not None),
        is_open=host.channel is not None,
        is_paused=host.state.flow.is_paused,
        is_sorting=host.is_ordering,
        is_claimed=bool(host.epoch) and not host.claim.is_lost,
        trouble=None if host.channel is not None else served.trouble_of(host),
        next_at=until(seen.next_at, wall_from),
        blocking=[_blocking(one, wall_from, with_contents=with_contents) for one in blocking],
    )


def until(deadline: float, wall_from: float) -> float | None:
    """Return a monotonic deadline as Unix seconds, or None if there is no deadline."""
    return None if deadline >= NEVER else deadline + wall_from


def end_of(message: BufferedMessage, wall_from: float) -> float | None:
    """Return when a message's lease or delay ends (Unix seconds). The lease of a pull client ends with its session."""
    return None if _is_open(message) else until(message.deadline, wall_from)


def _is_open(message: BufferedMessage) -> bool:
    return message.state is MessageState.LEASED and is_pulled(message.lease_id)


def _blocking(message: BufferedMessage, wall_from: float, *, with_contents: bool) -> BlockingMessage:
    is_timed = message.state in _ENDS
    return BlockingMessage(
        id=message.copy_id,
        message_id=None if message.message is None else message.message.message_id or None,
        state=STATE_NAMES[message.state],
        ordering_key=message.key if with_contents else None,
        client=message.client if message.state is MessageState.LEASED else None,
        until=end_of(message, wall_from) if is_timed else None,
    )


def _shown(one: HeaderFilter) -> dict[str, list[object]]:
    return {name: [value for _, value in sorted(values, key=repr)] for name, values in one.wanted}
