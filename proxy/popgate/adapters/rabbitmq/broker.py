"""Implements popgate's broker port on RabbitMQ: combines connections, topology, publishing and consumption."""

import asyncio
import random
import secrets
from collections.abc import Sequence
from dataclasses import replace

from popgate.adapters.rabbitmq.channel import RETURNED_SECONDS, RabbitChannel
from popgate.adapters.rabbitmq.connection import Connection
from popgate.adapters.rabbitmq.consumption import Consumption
from popgate.adapters.rabbitmq.guard import take_guard
from popgate.adapters.rabbitmq.holds import Holds
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.adapters.rabbitmq.publisher import Publisher
from popgate.adapters.rabbitmq.session import Session
from popgate.adapters.rabbitmq.topology import Topology
from popgate.domain.errors import Conflict, QueueGone
from popgate.domain.identity import IdentityKeys
from popgate.domain.names import BrokerQueue, Layout, TopicName, bound_queue
from popgate.ports.broker import (
    Broker,
    Capabilities,
    Channel,
    Listener,
    Outgoing,
    PublishOutcome,
    QueueDepth,
    QueueFacts,
)
from popgate.runtime.histogram import Histogram


class RabbitBroker:
    """Implements the port `Broker` on RabbitMQ.

    `keys` sign the ids of published copies, and check the ids of delivered copies. `chance` is the source of random
    numbers that spread reconnects in time. Tests pass a seeded one.
    """

    def __init__(self, options: RabbitOptions, keys: IdentityKeys, *, chance: random.Random | None = None) -> None:
        self.capabilities = Capabilities(
            name="rabbitmq",
            adopts_queues=True,
            delay_resolution_seconds=1.0,
            vhost=options.vhost,
        )
        self._options = options
        self._keys = keys
        self._chance = chance or random.Random()
        # The name stays the same when a connection is lost. So an old connection that RabbitMQ has not ended yet does
        # not prevent this process from taking the guard again.
        self._guard_holder = options.cluster or f"alone:{secrets.token_hex(8)}"
        self._consume = Connection(options, "consume", prepare=self._prepare, chance=self._chance)
        self._publish = Connection(
            options, "publish", on_blocked=self._on_blocked, on_cut_off=self._consume.leave, chance=self._chance
        )
        self._topology = Topology(self._consume.session)
        self._holds = Holds(self._consume.session, self._publish.session, chance=self._chance)
        self._publisher = Publisher(self._publish.session, options, keys)

    @property
    def confirm_seconds(self) -> Histogram:
        """How long batches took from the publish until RabbitMQ had confirmed them."""
        return self._publisher.confirm_seconds

    @property
    def call_seconds(self) -> Histogram:
        """How long the other calls of RabbitMQ took on the connection that consumes."""
        return self._consume.call_seconds

    async def start(self) -> None:
        try:
            await self._consume.start()
            await self._publish.start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        await asyncio.gather(self._publish.stop(), self._consume.stop())

    def unavailable_reason(self) -> str | None:
        return self._consume.unavailable_reason() or self._publish.unavailable_reason()

    async def leave_mark(self, mark: str) -> None:
        """Mark this virtual host with `mark`, so that `has_mark` recognizes it.

        The mark exists as long as the virtual host. Raises: Conflict.
        """
        await self._topology.leave_mark(mark)

    async def has_mark(self, mark: str) -> bool:
        """Return whether `leave_mark` has marked this virtual host with `mark`. Raises: Conflict."""
        return await self._topology.has_mark(mark)

    async def declare_topic(self, topic: TopicName) -> None:
        await self._topology.declare_exchange(topic)

    async def delete_topic(self, topic: TopicName) -> None:
        self._publisher.forget_exchange(topic)
        await self._topology.delete_exchange(topic)
        self._publisher.forget_exchange(topic)  # a publish may have checked for the exchange while it was being deleted

    async def declare_group(self, layout: Layout) -> None:
        await self._topology.declare_group(layout)

    async def delete_group(self, layout: Layout) -> None:
        await self._topology.delete_group(layout)
        if layout.adopted:
            self._publisher.forget_delays()

    async def inspect(self, queue: BrokerQueue) -> QueueFacts:
        return await self._topology.inspect(queue)

    async def publish(self, messages: Sequence[Outgoing]) -> list[PublishOutcome]:
        return await self._publisher.publish(messages)

    async def consume(self, queue: BrokerQueue, layout: Layout, prefetch: int, listener: Listener) -> Channel:
        what = Consumption(
            queue=queue,
            consumer_timeout_seconds=self._options.consumer_timeout_seconds,
            asked_timeout_seconds=self._options.asked_timeout_seconds,
            check_tag=self._keys.checker(*_targets(queue, layout)),
            notes=queue == layout.dead,
        )
        if layout.adopted and queue != layout.dead:
            what = await self._adopted(what, layout)
        # Even a proxy that runs alone needs a hold, because programs may consume the same queue without a proxy.
        if queue == layout.dead:
            session = self._consume.session()
        else:
            hold = await self._holds.take(queue)
            session = hold.session
            if asyncio.get_running_loop().time() < hold.taken_at + 2 * RETURNED_SECONDS:
                what = replace(what, lost_node_at=hold.lost_at)
        try:
            async with self._topology.turn(queue):
                return await RabbitChannel.open(session, what, prefetch, listener)
        except (QueueGone, Conflict):
            self._topology.forget(queue)
            raise

    async def let_go(self, queue: BrokerQueue) -> None:
        await self._holds.let_go(queue)

    async def depth(self, queues: Sequence[BrokerQueue]) -> list[QueueDepth]:
        return await self._topology.depth(queues)

    async def oldest_at(self, queue: BrokerQueue) -> float | None:
        return None  # RabbitMQ shows a message only to a consumer

    async def _adopted(self, what: Consumption, layout: Layout) -> Consumption:
        """Return ``what`` with the properties of its queue, which another application declared.

        Raises: QueueGone; Conflict if the queue is a stream.
        """
        queue = what.queue
        shape = await self._topology.shape(queue)
        if shape is None:
            raise QueueGone(f"queue {queue!r} does not exist on RabbitMQ")
        if shape.kind == "stream":
            raise Conflict(f"queue {queue!r} is a stream: its messages can't be settled one by one")
        return replace(
            what,
            exclusive=shape.kind == "classic" and not shape.single_active,
            quorum=shape.kind == "quorum",
            foreign=True,
            unique_message_ids=layout.unique_message_ids,
        )

    async def _prepare(self, session: Session) -> None:
        wait_seconds = self._options.guard_wait_seconds
        await take_guard(session, self._guard_holder, wait_seconds=wait_seconds, chance=self._chance)

    def _on_blocked(self, reason: str | None) -> None:
        self._publisher.on_blocked(reason)


def _targets(queue: BrokerQueue, layout: Layout) -> list[BrokerQueue]:
    """Return the targets to which copies that `queue` delivers may have been published.

    One target is the name of the queue. If the queue is popgate's own and not a dead-letter queue, the other target is
    its topic with its index.
    """
    if layout.adopted or queue == layout.dead:
        return [queue]
    return [bound_queue(layout.subscription.topic, layout.queues.index(queue)), queue]


_conforms: type[Broker] = RabbitBroker
