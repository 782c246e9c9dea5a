"""A RabbitMQ in memory: quorum queues with a single active consumer, as far as popgate's port sees them.

Theory of operation. A delivered message stays with its channel until it is acked. A message that returns, because of a
nack or because its channel ended, joins the end of the returned messages, which all precede messages never delivered,
and its count grows, as in a quorum queue. The first consumer is the active one; the next becomes active when it has
gone. A channel that ends requeues immediately. The server itself has no latency and loses nothing: ``broker`` models
the way between it and a process.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, Layout, TopicName
from popgate.ports.broker import Outgoing, PublishOutcome, PublishStatus, QueueDepth
from simulator.wires import NOBODYS

LOOK_SECONDS = 1.0
"""Seconds between two checks for deliveries that a channel has held too long."""

PUBLISHED, UNROUTED = PublishOutcome(status=PublishStatus.PUBLISHED), PublishOutcome(status=PublishStatus.UNROUTED)


class Pushed(NamedTuple):
    """An outgoing delivery. ``consumer``: the number of the consumer, counted in its channel, that got it."""

    tag: int
    message: Message
    returns: int
    consumer: int


class _Stored:
    __slots__ = ("message", "returns")

    def __init__(self, message: Message) -> None:
        self.message = message
        self.returns = 0


class ServerChannel:
    """One consumption. ``push`` and ``end`` reach the process with latency; ``end`` says whether the queue is gone."""

    def __init__(
        self, queue: "_Queue", push: Callable[[Sequence[Pushed]], None], end: Callable[[str, bool], None]
    ) -> None:
        self.push = push
        self.is_open = True
        self.consumer = 0
        self.window = 0
        self.unsettled: dict[int, tuple[_Stored, int, float]] = {}
        """By tag: the message, its consumer, and the time of its delivery."""
        self.own_count = 0
        """Number of unsettled messages of the present consumer."""
        self._queue = queue
        self._end = end
        self._tags = 0

    def cancel(self) -> None:
        """Stop consuming; unsettled messages stay with the channel."""
        self._queue.leave(self)

    def consume(self, window: int) -> None:
        """Add a new consumer, if there is no other."""
        self.consumer += 1
        self.window, self.own_count = window, 0
        if window and self.is_open:
            self._queue.join(self)

    def give(self, stored: _Stored, now: float) -> Pushed:
        self._tags += 1
        self.own_count += 1
        self.unsettled[self._tags] = stored, self.consumer, now
        return Pushed(self._tags, stored.message, stored.returns, self.consumer)

    def settle(self, tags: Sequence[int], *, requeue: bool) -> None:
        for tag in tags:
            found = self.unsettled.pop(tag, None)
            if found is None:
                continue
            stored, consumer, _ = found
            self.own_count -= consumer == self.consumer
            if requeue:
                self._queue.take_back(stored)
        self._queue.push_soon()

    def ack_through(self, tag: int) -> None:
        self.settle([one for one in self.unsettled if one <= tag], requeue=False)

    def ready_count(self) -> int:
        return len(self._queue)

    def close(self, reason: str = "", *, queue_gone: bool = False, tells: bool = False) -> None:
        """Requeue the unsettled messages. ``tells``: notify the process."""
        if not self.is_open:
            return
        self.is_open = False
        self._queue.leave(self)
        for tag in sorted(self.unsettled):
            self._queue.take_back(self.unsettled[tag][0])
        self.unsettled.clear()
        self._queue.push_soon()
        if tells:
            self._end(reason, queue_gone)


class _Queue:
    def __init__(self, *, single_active: bool) -> None:
        self._single_active = single_active
        self.returned: deque[_Stored] = deque()
        self.fresh: deque[_Stored] = deque()
        self.channels: list[ServerChannel] = []
        """All open channels."""
        self.consumers: list[ServerChannel] = []
        """With a single active consumer, the first one is active."""
        self.delayed_count = 0
        self._is_pushing = False

    def __len__(self) -> int:
        return len(self.returned) + len(self.fresh)

    def take_back(self, stored: _Stored) -> None:
        stored.returns += 1
        self.returned.append(stored)

    def join(self, channel: ServerChannel) -> None:
        self.consumers.append(channel)
        self.push_soon()

    def leave(self, channel: ServerChannel) -> None:
        if channel in self.consumers:
            self.consumers.remove(channel)
        if not channel.is_open and channel in self.channels:
            self.channels.remove(channel)
        self.push_soon()

    def push_soon(self) -> None:
        if not self._is_pushing:
            self._is_pushing = True
            asyncio.get_running_loop().call_soon(self._push, context=NOBODYS)

    def _push(self) -> None:
        self._is_pushing = False
        now = asyncio.get_running_loop().time()
        for channel in self.consumers[:1] if self._single_active else list(self.consumers):
            pushed: list[Pushed] = []
            while len(self) and channel.own_count < channel.window:
                stored = self.returned.popleft() if self.returned else self.fresh.popleft()
                pushed.append(channel.give(stored, now))
            if pushed:
                channel.push(pushed)


class BrokerServer:
    """All queues of the cluster. ``unsettled_seconds_max``: its ``consumer_timeout``."""

    def __init__(self, *, unsettled_seconds_max: float | None = None) -> None:
        self.unsettled_seconds_max = unsettled_seconds_max
        self._loop = asyncio.get_running_loop()
        self._topics: dict[TopicName, dict[int, list[BrokerQueue]]] = {}
        self._queues: dict[BrokerQueue, _Queue] = {}
        self._holders: dict[BrokerQueue, object] = {}

    def declare_topic(self, topic: TopicName) -> None:
        self._topics.setdefault(topic, {})

    def delete_topic(self, topic: TopicName) -> None:
        self._topics.pop(topic, None)

    def declare_group(self, layout: Layout) -> None:
        bound = self._topics.setdefault(layout.subscription.topic, {})
        self._queues.setdefault(layout.dead, _Queue(single_active=False))
        for queue in layout.queues:
            self._queues.setdefault(queue, _Queue(single_active=True))
        for index, queue in enumerate(layout.queues):
            there = bound.setdefault(index, [])
            if queue not in there:
                there.append(queue)

    def delete_group(self, layout: Layout) -> None:
        for bound in self._topics.get(layout.subscription.topic, {}).values():
            bound[:] = [queue for queue in bound if queue not in layout.queues]
        for name in (*layout.queues, layout.dead):
            queue = self._queues.pop(name, None)
            if queue is not None:
                for channel in list(queue.channels):
                    channel.close("the queue was deleted", queue_gone=True, tells=True)

    def publish(self, one: Outgoing) -> PublishOutcome:
        """Store a message, now or after its delay."""
        if one.delay_seconds:
            self._loop.call_later(one.delay_seconds, partial(self._store, one), context=NOBODYS)
            for queue in self._targets(one):
                queue.delayed_count += 1
            return PUBLISHED
        return self._store(one)

    def open(
        self,
        name: BrokerQueue,
        push: Callable[[Sequence[Pushed]], None],
        end: Callable[[str, bool], None],
    ) -> ServerChannel | None:
        """Open a channel on a queue, without consuming yet; return None if there is no such queue."""
        queue = self._queues.get(name)
        if queue is None:
            return None
        channel = ServerChannel(queue, push, end)
        queue.channels.append(channel)
        if self.unsettled_seconds_max is not None:
            self._loop.call_later(LOOK_SECONDS, self._look, channel, self.unsettled_seconds_max, context=NOBODYS)
        return channel

    def hold(self, name: BrokerQueue, holder: object) -> bool:
        """Tell whether ``holder``, a connection, now holds the queue, as with an exclusive queue beside it."""
        return self._holders.setdefault(name, holder) is holder

    def let_go(self, name: BrokerQueue, holder: object) -> None:
        if self._holders.get(name) is holder:
            del self._holders[name]

    def ended(self, holder: object) -> None:
        """Drop all holds of a connection that has ended."""
        self._holders = {name: one for name, one in self._holders.items() if one is not holder}

    def depth(self, name: BrokerQueue) -> QueueDepth:
        queue = self._queues.get(name)
        if queue is None:
            return QueueDepth(ready=None)
        return QueueDepth(ready=len(queue), consumers=len(queue.consumers), delayed=queue.delayed_count)

    def exists(self, name: BrokerQueue) -> bool:
        return name in self._queues

    def open_channels(self) -> list[ServerChannel]:
        """Return all open channels in a fixed order, for faults."""
        return [channel for queue in self._queues.values() for channel in queue.channels]

    def left(self) -> dict[BrokerQueue, int]:
        """Return how many messages each queue still has, unsettled ones included; empty queues are left out."""
        counts = {
            name: len(queue) + sum(len(channel.unsettled) for channel in queue.channels)
            for name, queue in self._queues.items()
        }
        return {name: count for name, count in counts.items() if count}

    def _targets(self, one: Outgoing) -> list[_Queue]:
        if one.topic is not None:
            names = self._topics.get(one.topic, {}).get(one.index, [])
        else:
            names = [] if one.queue is None else [one.queue]
        return [self._queues[name] for name in names if name in self._queues]

    def _store(self, one: Outgoing) -> PublishOutcome:
        queues = self._targets(one)
        for queue in queues:
            queue.delayed_count -= bool(one.delay_seconds and queue.delayed_count)
            queue.fresh.append(_Stored(one.message))
            queue.push_soon()
        return PUBLISHED if queues else UNROUTED

    def _look(self, channel: ServerChannel, seconds: float) -> None:
        if not channel.is_open:
            return
        oldest = min((since for _, _, since in channel.unsettled.values()), default=float("inf"))
        if self._loop.time() - oldest > seconds:
            channel.close("delivery acknowledgement on channel timed out", tells=True)
        else:
            self._loop.call_later(LOOK_SECONDS, self._look, channel, seconds, context=NOBODYS)
