"""How many messages a subscription has in which state: what its owners hold, and what the broker has beside that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from popgate.domain.errors import PopgateError
from popgate.engine.held import HeldState, Tally
from popgate.engine.queue_host import QueueHost
from popgate.engine.room import Room
from popgate.ports.broker import QueueDepth
from popgate.ports.peers import CountHeld, HeldCounts

if TYPE_CHECKING:
    from popgate.engine.subscription import ServedSubscription

_READY = (HeldState.READY, HeldState.GRANTING, HeldState.RETURNING)


class QueueStatus(NamedTuple):
    """``ready`` None: the queue does not exist on the broker. ``owned``: some proxy consumes it."""

    queue: int
    broker_queue: str
    ready: int | None
    in_flight: int
    delayed: int
    blocked: int
    owned: bool


class SubscriptionStatus(NamedTuple):
    """Counts of one subscription; ``blocked`` ones are among the ready.

    ``oldest_age_seconds`` None: nothing is known to wait.
    """

    mode: str
    ready: int
    in_flight: int
    delayed: int
    blocked: int
    dead: int
    oldest_age_seconds: float | None
    queues: list[QueueStatus]


async def subscription_status(room: Room, served: ServedSubscription) -> SubscriptionStatus:
    """Of all queues, whoever owns them; an owner that does not answer is left out. Raises: BrokerUnavailable."""
    layout = served.layout
    depths = await room.broker.depth([*layout.queues, layout.dead])
    counts = {one.number: one for one in held_counts(served)}
    for owner in room.router.others(layout):
        try:
            counts.update(
                (one.number, one) for one in await room.router.ask(owner, CountHeld(subscription=served.name))
            )
        except PopgateError:
            continue
    queues = _queues(served, counts, depths)
    if served.serving.is_one_line():  # nobody waits for another one: the client of a queue gets all that is in line
        queues = [queue._replace(blocked=0) for queue in queues]
    oldest = min((one.oldest_at for one in counts.values() if one.oldest_at is not None), default=None)
    return SubscriptionStatus(
        mode=served.spec.mode,
        ready=sum(queue.ready or 0 for queue in queues),
        in_flight=sum(queue.in_flight for queue in queues),
        delayed=sum(queue.delayed for queue in queues),
        blocked=sum(queue.blocked for queue in queues),
        dead=(depths[-1].ready or 0) + sum(one.dead_held for one in counts.values()),
        oldest_age_seconds=None if oldest is None else max(0.0, room.clock.wall() - oldest),
        queues=queues,
    )


async def leases_left(room: Room, served: ServedSubscription) -> int | None:
    """How many messages are leased, over all owners; None where one of them does not answer, or a queue has none that
    knows it."""
    left = {one.number: one.in_flight for one in held_counts(served)}
    for owner in room.router.others(served.layout):
        try:
            counts = await room.router.ask(owner, CountHeld(subscription=served.name))
        except PopgateError:
            return None
        left.update((one.number, one.in_flight) for one in counts)
    return sum(left.values()) if len(left) == len(served.hosts) else None


async def ready_here(room: Room, served: ServedSubscription) -> tuple[int, int]:
    """How many messages wait in the queues that this proxy owns, and how many of them are not blocked. Raises:
    BrokerUnavailable."""
    depths = await room.broker.depth([*served.layout.queues, served.layout.dead])
    counts = {one.number: one for one in held_counts(served)}
    owned = [one for one in _queues(served, counts, depths) if one.queue in counts]
    ready = sum(one.ready or 0 for one in owned)
    return ready, ready - sum(one.blocked for one in owned)


def held_counts(served: ServedSubscription) -> list[HeldCounts]:
    """Of the queues that this proxy owns, and whose records it knows. Walks through all that is held."""
    return [_counts(served, host) for host in served.hosts if host.is_owned and (host.epoch or host.claiming.is_lost)]


def ready_and_blocked(tally: Tally) -> tuple[int, int]:
    """How many messages no client has, and how many of them stand behind others of their key."""
    ready = sum(tally.all(state) for state in _READY)
    return ready, ready - sum(tally.first(state) for state in _READY)


def _counts(served: ServedSubscription, host: QueueHost) -> HeldCounts:
    ready, blocked = ready_and_blocked(host.tally)
    at_broker = sum(held.tag is None for held in host.held.values()) + len(host.evidence.detached)
    waiting_since = (held.message.waiting_since for held in host.held.values() if held.message is not None)
    return HeldCounts(
        number=host.queue.number,
        ready=ready,
        in_flight=host.tally.all(HeldState.LEASED),
        waiting=host.tally.all(HeldState.WAITING),
        blocked=blocked,
        at_broker=at_broker,
        dead_held=served.dead_letters.held if host.queue.number == 0 else 0,
        is_paused=host.supply.is_paused,
        is_open=host.channel is not None,
        oldest_at=min((since for since in waiting_since if since), default=None),  # 0.0: its publisher gave no time
    )


def _queues(
    served: ServedSubscription, counts: Mapping[int, HeldCounts], depths: Sequence[QueueDepth]
) -> list[QueueStatus]:
    queues: list[QueueStatus] = []
    for host, depth in zip(served.hosts, depths[:-1], strict=True):
        number = host.queue.number
        known = counts.get(number)
        if known is None:
            queues.append(QueueStatus(number, host.broker_queue, depth.ready, 0, depth.delayed, 0, owned=False))
            continue
        unseen = 0 if depth.ready is None else max(0, depth.ready - known.at_broker)
        blocked = known.blocked
        if blocked and blocked == known.ready and known.is_paused:
            blocked += unseen  # nothing moves here before one of those in front does
        total = None if depth.ready is None else unseen + known.ready
        delayed = known.waiting + depth.delayed
        queues.append(
            QueueStatus(number, host.broker_queue, total, known.in_flight, delayed, blocked, owned=known.is_open)
        )
    return queues
