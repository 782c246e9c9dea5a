"""Counts the messages of a subscription by state, both at the owners of its queues and at the broker."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from popgate.domain.errors import PopgateError
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.dead_letters.dead_letters import DeadLetters
from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.queue.buffered import Counts, MessageState
from popgate.engine.queue.host import QueueHost
from popgate.ports.broker import QueueDepth
from popgate.ports.peers import CountMessages, QueueCounts

_READY = (MessageState.READY, MessageState.GRANTING, MessageState.REQUEUED)


class QueueStatus(NamedTuple):
    """Message counts of one queue. ``ready`` is None if the queue does not exist on the broker.

    ``owned``: whether a proxy consumes the queue.
    """

    queue: int
    broker_queue: str
    ready: int | None
    in_flight: int
    delayed: int
    blocked: int
    owned: bool


class Backlog(NamedTuple):
    """Counts the messages in the queues of one subscription that this proxy owns. ``ready`` includes ``blocked``.

    ``delayed``: the delayed messages that only the broker has. ``oldest_at``: since when the oldest message is known to
    wait, in Unix seconds. ``is_guessed``: whether it may have waited for much longer (``WaitingSince.is_guessed``).
    """

    ready: int
    delayed: int
    blocked: int
    dead: int
    oldest_at: float | None
    is_guessed: bool


class SubscriptionStatus(NamedTuple):
    """Message counts of one subscription. ``ready`` includes ``blocked``.

    ``oldest_age_seconds`` is None if the owners of the queues know no waiting message and its publish time.
    """

    mode: str
    ready: int
    in_flight: int
    delayed: int
    blocked: int
    dead: int
    oldest_age_seconds: float | None
    queues: list[QueueStatus]


async def subscription_status(context: EngineContext, group: ServedGroup, dead_held: int) -> SubscriptionStatus:
    """Count the messages of all queues of a subscription.

    If the owner of a queue does not answer, its own counts are missing from the result. ``dead_held``: the number of
    dead letters that this proxy has read and not settled. Raises: BrokerUnavailable.
    """
    layout = group.layout
    depths = await context.broker.depth([*layout.queues, layout.dead])
    counts = {one.number: one for one in queue_counts(group, dead_held)}
    for owner in context.router.others(layout):
        try:
            counts.update(
                (one.number, one) for one in await context.router.ask(owner, CountMessages(subscription=group.name))
            )
        except PopgateError:
            continue
    queues = _queues(group, counts, depths)
    if group.is_pulled:  # no message is blocked: the client of a queue gets all of them in order
        queues = [queue._replace(blocked=0) for queue in queues]
    oldest = min((one.oldest_at for one in counts.values() if one.oldest_at is not None), default=None)
    return SubscriptionStatus(
        mode=group.spec.mode,
        ready=sum(queue.ready or 0 for queue in queues),
        in_flight=sum(queue.in_flight for queue in queues),
        delayed=sum(queue.delayed for queue in queues),
        blocked=sum(queue.blocked for queue in queues),
        dead=(depths[-1].ready or 0) + sum(one.dead_held for one in counts.values()),
        oldest_age_seconds=None if oldest is None else max(0.0, context.clock.wall() - oldest),
        queues=queues,
    )


async def leases_left(context: EngineContext, group: ServedGroup) -> int | None:
    """Count the leased messages in all queues of a subscription. Return None where ``owner_counts`` does."""
    counts = await owner_counts(context, group)
    return None if counts is None else sum(one.in_flight for one in counts)


async def owner_counts(context: EngineContext, group: ServedGroup) -> list[QueueCounts] | None:
    """Return the owner's counts of each queue of a subscription.

    Return None if the owner of a queue does not answer, or if a queue has no owner that has loaded the queue's records.
    """
    found = {one.number: one for one in queue_counts(group)}
    for owner in context.router.others(group.layout):
        try:
            counts = await context.router.ask(owner, CountMessages(subscription=group.name))
        except PopgateError:
            return None
        found.update((one.number, one) for one in counts)
    return list(found.values()) if len(found) == len(group.hosts) else None


async def ready_here(context: EngineContext, group: ServedGroup) -> tuple[int, int]:
    """Count the ready messages in the queues that this proxy owns.

    Return the number of all ready messages, and the number of those that are not blocked. Raises: BrokerUnavailable.
    """
    depths = await context.broker.depth([*group.layout.queues, group.layout.dead])
    counts = {one.number: one for one in queue_counts(group)}
    owned = [one for one in _queues(group, counts, depths) if one.queue in counts]
    ready = sum(one.ready or 0 for one in owned)
    return ready, ready - sum(one.blocked for one in owned)


async def backlog_here(context: EngineContext, group: ServedGroup, dead_letters: DeadLetters) -> Backlog | None:
    """Count the messages in the queues that this proxy owns. Return None if it owns none.

    Only the owner of the first queue counts the dead letters, so that the sum over all proxies is right. Raises:
    BrokerUnavailable.
    """
    hosts = [host for host in group.hosts if is_counted(host)]
    if not hosts:
        return None
    has_dead = hosts[0].queue.number == 0
    queues = [host.broker_queue for host in hosts]
    oldest = {
        host.broker_queue: await context.broker.oldest_at(host.broker_queue) for host in hosts if host.channel is None
    }
    depths = await context.broker.depth([*queues, group.layout.dead] if has_dead else queues)
    now, ready, delayed, blocked, oldest_at, is_guessed = context.clock.wall(), 0, 0, 0, inf, False
    for host, depth in zip(hosts, depths, strict=False):
        if not is_counted(host):
            continue  # it was handed over in the meantime
        known = _counts(host, 0)
        if host.channel is None:
            unseen = max(0, (depth.ready or 0) - known.at_broker)
            host.waiting_since.counted(unseen, now, oldest.get(host.broker_queue))
            known = known._replace(oldest_at=_oldest_at(host))
            is_guessed |= host.waiting_since.is_guessed(now)
        status = _status(host, known, depth)
        ready += status.ready or 0
        delayed += depth.delayed
        blocked += 0 if group.is_pulled else status.blocked
        oldest_at = min(oldest_at, known.oldest_at or inf)
    dead = (depths[-1].ready or 0) + dead_letters.held_count if has_dead else 0
    return Backlog(ready, delayed, blocked, dead, None if oldest_at == inf else oldest_at, is_guessed)


def is_counted(host: QueueHost) -> bool:
    """Whether this proxy owns the queue, and its records are loaded."""
    return host.is_owned and bool(host.epoch or host.claim.is_lost)


def queue_counts(group: ServedGroup, dead_held: int = 0) -> list[QueueCounts]:
    """Count the messages of each queue that this proxy owns and whose records are loaded.

    Visits no message, except to find the oldest one (``WaitingMessages``).
    """
    return [_counts(host, dead_held) for host in group.hosts if is_counted(host)]


def ready_and_blocked(counts: Counts) -> tuple[int, int]:
    """Return the number of ready messages, and how many of them are behind others of their ordering key."""
    ready = sum(counts.all(state) for state in _READY)
    return ready, ready - sum(counts.heads(state) for state in _READY)


def _counts(host: QueueHost, dead_held: int) -> QueueCounts:
    ready, blocked = ready_and_blocked(host.state.counts)
    return QueueCounts(
        number=host.queue.number,
        ready=ready,
        in_flight=host.state.counts.all(MessageState.LEASED),
        waiting=host.state.counts.all(MessageState.DELAYED),
        blocked=blocked,
        at_broker=host.state.count_at_broker,
        dead_held=dead_held if host.queue.number == 0 else 0,
        is_paused=host.state.flow.is_paused,
        is_open=host.channel is not None,
        oldest_at=_oldest_at(host),
    )


def _oldest_at(host: QueueHost) -> float | None:
    """Return since when the oldest message of a queue waits, as far as it is known."""
    here = host.state.waiting.oldest_at()
    at_broker = host.waiting_since.at if host.channel is None else None
    return min((since for since in (here, at_broker) if since is not None), default=None)


def _queues(group: ServedGroup, counts: Mapping[int, QueueCounts], depths: Sequence[QueueDepth]) -> list[QueueStatus]:
    queues: list[QueueStatus] = []
    for host, depth in zip(group.hosts, depths[:-1], strict=True):
        number = host.queue.number
        known = counts.get(number)
        if known is None:
            queues.append(QueueStatus(number, host.broker_queue, depth.ready, 0, depth.delayed, 0, owned=False))
            continue
        queues.append(_status(host, known, depth))
    return queues


def _status(host: QueueHost, known: QueueCounts, depth: QueueDepth) -> QueueStatus:
    """Combine the owner's counts of a queue with the broker's."""
    unseen = 0 if depth.ready is None else max(0, depth.ready - known.at_broker)
    blocked = known.blocked
    if blocked and blocked == known.ready and known.is_paused:
        blocked += unseen  # the broker pushes nothing before one of the messages in front ends
    total = None if depth.ready is None else unseen + known.ready
    delayed = known.waiting + depth.delayed
    return QueueStatus(known.number, host.broker_queue, total, known.in_flight, delayed, blocked, owned=known.is_open)
