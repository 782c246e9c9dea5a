"""Declares popgate's own exchanges and queues, and reports facts about queues of other applications.

A topic is a durable direct exchange. A group's queues are quorum queues with a single active consumer, bound by their
index. The dead-letter queue is reached through the default exchange (decision 13). Delayed messages arrive through
another exchange, to which queues are bound by topic and index: ``delay_levels`` describes the rest of their route.
The arguments of a queue can't be changed later. So an existing queue is accepted if it can serve popgate, even if this
version of popgate would choose other arguments.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Self
from weakref import WeakValueDictionary

from aiormq.abc import AbstractChannel

from popgate.adapters.rabbitmq.delay_key import place_pattern
from popgate.adapters.rabbitmq.delay_levels import DELIVER_EXCHANGE, declare_delivery, relay_name
from popgate.adapters.rabbitmq.queue_shape import (
    DELIVERY_LIMIT,
    QUEUE_TYPE,
    SINGLE_ACTIVE,
    Argument,
    QueueShape,
    is_gone,
    queue_refused,
    queue_shape,
)
from popgate.adapters.rabbitmq.session import NOT_FOUND, PRECONDITION_FAILED, ChannelRefusedError, Session
from popgate.adapters.rabbitmq.versions import (
    DISCONNECTED_MILLISECONDS,
    DISCONNECTED_TIMEOUT,
    Version,
    counts_only_lost_channels,
    has_default_delivery_limit,
    returns_unlimited_to_back,
    waits_for_lost_nodes,
)
from popgate.domain.errors import Conflict
from popgate.domain.names import BrokerQueue, Layout, TopicName, exchange_name
from popgate.ports.broker import QueueDepth, QueueFacts

DELIVERY_LIMIT_UNREACHABLE = 2_000_000_000
"""The delivery limit of popgate's queues. Without a limit, or with -1, some versions of RabbitMQ put returned messages
at the end of the queue. With this limit, all versions put them at the front (decision 13)."""
DELIVERY_LIMIT_LOW = 1_000_000
"""Lowest delivery limit that popgate accepts. With a lower limit, RabbitMQ would drop a message that popgate returns to
the queue many times."""
DELIVERY_LIMIT_DEFAULT = 20
ROUTED_SECONDS = 0.3
"""Seconds until a message that was routed to a queue before the queue's binding was deleted has reached the queue."""

_log = logging.getLogger(__name__)


class Topology:
    """Declares, deletes and inspects exchanges and queues.

    `session` returns the live session. `session` and all methods that call RabbitMQ raise BrokerUnavailable.
    """

    def __init__(self, session: Callable[[], Session]) -> None:
        self._session = session
        self._shapes: dict[BrokerQueue, QueueShape] = {}
        self._turns: WeakValueDictionary[BrokerQueue, asyncio.Lock] = WeakValueDictionary()

    async def declare_exchange(self, topic: TopicName) -> None:
        """Declare the exchange of a topic. Idempotent. Raises: Conflict if it exists with another type."""
        name = exchange_name(topic)
        async with _Channel(self._session()) as channel:
            try:
                await channel.call(channel.amqp.exchange_declare(name, exchange_type="direct", durable=True))
            except ChannelRefusedError as error:
                raise Conflict(f"RabbitMQ refuses the exchange {name!r}: {error}") from error

    async def leave_mark(self, mark: str) -> None:
        """Mark this virtual host with an exchange that `has_mark` recognizes. Every node can see an exchange."""
        async with _Channel(self._session()) as channel:
            try:
                await channel.call(channel.amqp.exchange_declare(_mark(mark), exchange_type="fanout", durable=True))
            except ChannelRefusedError as error:
                raise Conflict(f"RabbitMQ refuses the exchange {_mark(mark)!r}: {error}") from error

    async def has_mark(self, mark: str) -> bool:
        async with _Channel(self._session()) as channel:
            try:
                await channel.call(channel.amqp.exchange_declare(_mark(mark), passive=True))
            except ChannelRefusedError as error:
                if error.reason.code == NOT_FOUND:
                    return False
                raise Conflict(f"RabbitMQ does not show the exchange {_mark(mark)!r}: {error}") from error
        return True

    async def delete_exchange(self, topic: TopicName) -> None:
        """Delete the exchange of a topic. Idempotent."""
        async with _Channel(self._session()) as channel:
            try:
                await channel.call(channel.amqp.exchange_delete(exchange_name(topic)))
            except ChannelRefusedError as error:
                raise Conflict(f"RabbitMQ does not delete the exchange {exchange_name(topic)!r}: {error}") from error

    async def declare_group(self, layout: Layout) -> None:
        """Declare and bind the queues of `layout` that are popgate's own. Idempotent. Raises: Conflict."""
        await self._declare_own(layout.dead, single_active=False)  # operators may read it with basic.get
        if layout.adopted:
            return
        await self._declare_delivery()
        for index, queue in enumerate(layout.queues):
            await self._declare_own(queue, single_active=True)
            await self._bind(queue, layout.subscription.topic, index)

    async def delete_group(self, layout: Layout) -> None:
        """Delete the queues of `layout` that are popgate's own. Idempotent.

        If a queue is deleted while a message is published to it, RabbitMQ before 4.3 ends the publisher's connection,
        which may be that of another proxy. So the queues get no more messages before they are deleted.
        """
        topic = layout.subscription.topic
        relays = [relay_name(topic, index) for index in range(len(layout.queues))]
        async with _Channel(self._session()) as channel:
            for index, bound in enumerate([] if layout.adopted else layout.queues):
                await channel.call(channel.amqp.queue_unbind(bound, exchange_name(topic), str(index)))
                await channel.call(channel.amqp.queue_unbind(bound, DELIVER_EXCHANGE, place_pattern(topic, index)))
            await asyncio.sleep(ROUTED_SECONDS)
            for queue in [*relays, layout.dead] if layout.adopted else [*layout.queues, layout.dead]:
                try:
                    await channel.call(channel.amqp.queue_delete(queue))
                except ChannelRefusedError as error:
                    raise Conflict(f"RabbitMQ does not delete queue {queue!r}: {error}") from error

    async def inspect(self, queue: BrokerQueue) -> QueueFacts:
        """Inspect a queue of another application. Raises: Conflict if RabbitMQ does not even let popgate inspect it."""
        session = self._session()
        depth = (await self.depth([queue]))[0]
        shape = None if depth.ready is None else await queue_shape(session, queue)
        if depth.ready is None or shape is None:
            return QueueFacts(exists=False)
        self._shapes[queue] = shape
        return QueueFacts(
            exists=True,
            kind=shape.kind,
            ready=depth.ready,
            consumers=depth.consumers,
            warnings=_warnings(shape, session.server_version),
        )

    async def shape(self, queue: BrokerQueue) -> QueueShape | None:
        """Return the shape of an adopted queue. The result is remembered until `forget` is called."""
        known = self._shapes.get(queue)
        if known is None:
            known = await queue_shape(self._session(), queue)
            if known is not None:
                self._shapes[queue] = known
        return known

    def turn(self, queue: BrokerQueue) -> asyncio.Lock:
        """Return the lock of `queue`. A caller must hold it while it declares the queue or starts to consume it.

        If a consumer starts before the Raft server of a quorum queue runs, RabbitMQ (3.10 to 4.3) ends the whole
        connection with INTERNAL_ERROR ("failed consuming from quorum queue: noproc").
        """
        return self._turns.setdefault(queue, asyncio.Lock())

    def forget(self, queue: BrokerQueue) -> None:
        """Forget the shape of `queue`, because the queue may have been deleted and declared again."""
        self._shapes.pop(queue, None)

    async def depth(self, queues: Sequence[BrokerQueue]) -> list[QueueDepth]:
        """Return the depth of each queue.

        The depth of a quorum queue is 0 if the queue's leader does not answer RabbitMQ within 0.25 s.
        """
        session = self._session()
        depths: list[QueueDepth] = []
        while len(depths) < len(queues):
            async with _Channel(session) as channel:
                try:
                    for queue in queues[len(depths) :]:
                        answer = await channel.call(channel.amqp.queue_declare(queue, passive=True))
                        depths.append(QueueDepth(ready=answer.message_count or 0, consumers=answer.consumer_count or 0))
                except ChannelRefusedError as error:
                    queue = queues[len(depths)]
                    if not is_gone(error.reason):
                        raise queue_refused(queue, error) from error
                    depths.append(QueueDepth(ready=None))  # RabbitMQ has closed the channel: continue with a new one
        return depths

    async def _declare_own(self, queue: BrokerQueue, *, single_active: bool) -> None:
        session = self._session()
        version = session.server_version
        arguments: dict[str, Argument] = {QUEUE_TYPE: "quorum", DELIVERY_LIMIT: DELIVERY_LIMIT_UNREACHABLE}
        if waits_for_lost_nodes(version):
            arguments[DISCONNECTED_TIMEOUT] = DISCONNECTED_MILLISECONDS
        if single_active:
            arguments[SINGLE_ACTIVE] = True
        async with self.turn(queue), _Channel(session) as channel:
            try:
                await channel.call(channel.amqp.queue_declare(queue, durable=True, arguments=dict(arguments)))
            except ChannelRefusedError as error:
                if error.reason.code != PRECONDITION_FAILED:
                    raise queue_refused(queue, error) from error
                # The queue may have been declared under an earlier version of RabbitMQ, with other arguments.
                shape = await queue_shape(session, queue)
                if shape is None or not _serves(shape, version, single_active=single_active):
                    single = " with a single active consumer" if single_active else ""
                    raise Conflict(
                        f"queue {queue!r} can't serve popgate, which needs a quorum queue{single} and a high delivery "
                        f"limit; delete it, or choose another name ({error})"
                    ) from error
                problems = _quorum_warnings(shape, version)
                for problem in problems:
                    _log.warning("an existing queue needs a policy", extra={"queue": queue, "problem": problem})
                if not problems:
                    _log.info("queue exists with other arguments, which serve as well", extra={"queue": queue})

    async def _declare_delivery(self) -> None:
        """Declare the exchanges and the queue at the end of the route of delayed messages."""
        session = self._session()
        async with _Channel(session) as channel:
            try:
                await declare_delivery(session, channel.amqp)
            except ChannelRefusedError as error:
                raise Conflict(f"RabbitMQ refuses an exchange or queue for delayed messages: {error}") from error

    async def _bind(self, queue: BrokerQueue, topic: TopicName, index: int) -> None:
        async with _Channel(self._session()) as channel:
            try:
                await channel.call(channel.amqp.queue_bind(queue, exchange_name(topic), str(index)))
                await channel.call(channel.amqp.queue_bind(queue, DELIVER_EXCHANGE, place_pattern(topic, index)))
            except ChannelRefusedError as error:
                raise Conflict(f"RabbitMQ does not bind queue {queue!r} to topic {topic!r}: {error}") from error


class _Channel:
    """A channel for a few calls. The broker closes it at the first error, which does not affect other channels."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.call = session.call

    async def __aenter__(self) -> Self:
        self.amqp: AbstractChannel = await self._session.open_channel()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close_channel(self.amqp)


def _serves(shape: QueueShape, version: Version, *, single_active: bool) -> bool:
    if shape.kind != "quorum" or shape.delivery_limit is None:
        return False
    if single_active and not shape.single_active:
        return False
    return _is_high(shape.delivery_limit, version)


def _is_high(limit: int, version: Version) -> bool:
    # Before RabbitMQ 4, -1 is a limit like any other: the first return drops the message.
    return limit >= DELIVERY_LIMIT_LOW or (limit < 0 and has_default_delivery_limit(version))


def _warnings(shape: QueueShape, version: Version) -> list[str]:
    warnings: list[str] = []
    if shape.kind == "stream":
        warnings.append("this is a stream: its messages can't be settled one by one, so it can't be adopted")
    if shape.kind == "unknown":
        warnings.append("RabbitMQ did not report what kind of queue this is")
    if not shape.durable:
        warnings.append("the queue is not durable: it is lost when RabbitMQ restarts")
    if shape.auto_delete:
        warnings.append("the queue is deleted, with its messages, whenever popgate stops consuming it: auto_delete")
    if shape.expires:
        warnings.append("the queue is deleted when it has not been consumed for some time: x-expires")
    if shape.kind == "quorum":
        warnings += _quorum_warnings(shape, version)
    return warnings


def _quorum_warnings(shape: QueueShape, version: Version) -> list[str]:
    """Return warnings about how a quorum queue handles returned messages, and the policy that fixes this.

    RabbitMQ applies only one policy to a queue, so one policy must contain all settings.
    """
    warnings: list[str] = []
    reasons: list[str] = []
    settings: list[str] = []
    limit = shape.delivery_limit
    if limit is None and has_default_delivery_limit(version):
        event = "whose channel ended" if counts_only_lost_channels(version) else "that came back"
        reasons.append(f"RabbitMQ 4 drops a message {event} {DELIVERY_LIMIT_DEFAULT} times, even if no client saw it")
    elif limit is None or (limit < 0 and returns_unlimited_to_back(version)):
        setting = "without a delivery limit" if limit is None else f"with a delivery limit of {limit}"
        reasons.append(f"{setting}, RabbitMQ puts returned messages at the end of the queue")
    elif not _is_high(limit, version):
        warnings.append(
            f"RabbitMQ drops or dead-letters a message that came back {limit} times (x-delivery-limit), also when no "
            "client saw it; popgate's max_deliveries is meant for this, and no policy can raise the argument"
        )
    if reasons:
        settings.append(f"delivery-limit {DELIVERY_LIMIT_UNREACHABLE}")
    if waits_for_lost_nodes(version) and (shape.disconnected_milliseconds or sys.maxsize) > DISCONNECTED_MILLISECONDS:
        reasons.append("RabbitMQ waits a minute before it gives up a consumer whose node is lost")
        settings.append(f"consumer-disconnected-timeout {DISCONNECTED_MILLISECONDS}")
    if reasons:
        warnings.append(f"{'; '.join(reasons)}: set a policy with {' and '.join(settings)} for this queue")
    return warnings


def _mark(mark: str) -> str:
    return f"popgate:data:{mark}"
