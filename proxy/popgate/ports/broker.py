"""Defines the broker port, the interface to the store of messages.

Theory of operation. A broker contains queues of messages. ``consume`` opens one channel on one queue. The broker then
pushes deliveries to the listener, in queue order, as long as fewer than ``prefetch`` of them are unsettled. The broker
stores a delivered message until it is acked. When the channel ends for any reason, the broker redelivers the unacked
messages, ahead of newer messages. It redelivers them in the original order, unless the channel ended before it had
received all messages that an earlier channel had returned. A channel and a tag together identify a delivery. Tags are
meaningless on other channels, so a delivery is settled through the ``Channel`` object that delivered it. A channel that
has ended ignores settlements.

Leases, delivery counts and all other data of pops are stored through the state port, not through this port.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, Layout, TopicName


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Declares the real differences between brokers. ``name`` is shown to users."""

    name: str
    adopts_queues: bool
    """Whether a topic can use queues that other programs declared and publish to."""
    delay_resolution_seconds: float = 0.0
    """Delays are rounded up to multiples of this number of seconds."""
    vhost: str | None = None
    """RabbitMQ's virtual host, in which queues can have replicas. None: the broker has no replicas."""


class Delivery:
    """One message as the broker pushed it on one channel.

    ``identified``: ``message.copy_id`` is the permanent id of this copy (popgate minted it, or the admin declared that
    the publisher's message_id is unique). Otherwise ``message.copy_id`` is empty, and the engine assigns a transient
    id. ``earlier_deliveries`` is the number of earlier deliveries by the broker, or 0 if the broker does not count
    them. ``returned``: the message was delivered before, or may have overtaken a message that was delivered before. All
    returned messages arrive ahead of messages that are not returned, but perhaps not in the queue's order.
    """

    __slots__ = ("earlier_deliveries", "identified", "message", "returned", "tag")

    def __init__(
        self, *, tag: int, message: Message, identified: bool, earlier_deliveries: int, returned: bool = False
    ) -> None:
        self.tag = tag
        self.message = message
        self.identified = identified
        self.earlier_deliveries = earlier_deliveries
        self.returned = returned


class Listener(Protocol):
    """Receives the events of a channel. Both calls are synchronous, on the event loop, and must not raise."""

    def on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        """Receive the next deliveries, in queue order. Never called after ``on_channel_lost``."""
        ...

    def on_channel_lost(self, reason: str, *, queue_gone: bool) -> None:
        """Handle that the channel ended without ``close``. The broker returns its unsettled messages to the queue.

        Called at most once. ``queue_gone``: the channel ended because the queue was deleted.
        """
        ...


class Channel(Protocol):
    """One consumer on one queue. When the channel has ended, calls other than ``settled_evidence`` do nothing."""

    @property
    def unsettled_seconds_max(self) -> float | None:
        """Seconds for which a delivery may stay unsettled before the broker ends the channel; None: there is no
        limit."""
        ...

    def ack(self, tags: Sequence[int]) -> None:
        """Acknowledge deliveries, in any order. Unknown tags are ignored. The call does not wait, so acks can share a
        write."""
        ...

    def requeue(self, tags: Sequence[int]) -> None:
        """Return these deliveries to the queue, at the front if the broker supports this. The broker redelivers
        them."""
        ...

    async def flush(self) -> None:
        """Wait until all earlier acks have left this process (RabbitMQ) or are durable (embedded broker).

        If the channel ends during the call, acks may be lost. The listener is notified as usual.
        """
        ...

    async def resize(self, prefetch: int) -> None:
        """Allow at most ``prefetch`` (0..65535) further unsettled deliveries; 0 pauses the channel.

        Messages that were delivered before stay unsettled on the channel, and do not count toward ``prefetch``. So a
        call with an unchanged prefetch also allows further deliveries. After a call with a smaller prefetch, deliveries
        that were under way may still arrive. Raises: BrokerUnavailable; the channel has then ended.
        """
        ...

    async def backlog(self) -> int:
        """Return the number of messages that are ready at the broker and have not been delivered to this channel.

        When the call returns, all earlier deliveries have arrived. If the broker can't count at the moment, the result
        is 0 if the prefetch is 0, and otherwise a number larger than any queue. So with a prefetch above 0, the result
        0 is a real count. Raises: BrokerUnavailable.
        """
        ...

    def settled_evidence(self) -> int:
        """Return the number n for which the broker has provably applied the first n acks of this channel.

        With RabbitMQ, later deliveries are the proof: with prefetch W, delivery number d proves d - W acks (decision
        5). With the embedded broker, its commits are the proof.
        """
        ...

    async def close(self) -> None:
        """End the consumer. The broker returns unsettled messages in order, and earlier acks remain valid.
        Idempotent."""
        ...


class PublishStatus(StrEnum):
    PUBLISHED = "published"
    UNROUTED = "unrouted"
    """No queue received the message: the topic has no group, or the queue does not exist."""
    REFUSED = "refused"
    """The broker did not accept the message. The same publish will fail again unless the broker's state changes."""
    FAILED = "failed"
    """The outcome is unknown: the message may or may not be stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOutcome:
    """The result of publishing one message.

    ``unfit``: the message was refused because this broker can't carry its headers to any queue.
    """

    status: PublishStatus
    detail: str = ""
    unfit: bool = False


@dataclass(slots=True, kw_only=True)  # frozen would double the time of its creation, once for each message
class Outgoing:
    """A message and its target: queue ``index`` of every group of ``topic``, or one ``queue`` by name.

    ``once``: this publish may repeat an earlier one with the same copy id, for example when a move is repeated. A
    broker that can detect this stores the message only once. Messages to a queue by name are always treated in this
    way.

    ``delay_seconds`` (0..``DELAY_SECONDS_MAX``), only for a topic: the message becomes visible this many seconds later,
    never earlier, in queue ``index`` of every group that exists at that time. PUBLISHED means that the message is
    stored until that time, even if no group exists now. If no group exists at that time, the message is discarded. If a
    group has fewer queues at that time, the embedded broker uses queue ``index`` modulo their number, and RabbitMQ
    discards the message. A delayed message to an adopted topic has a topic and an index as well as a ``queue``.
    """

    message: Message
    topic: TopicName | None = None
    index: int = 0
    queue: BrokerQueue | None = None
    once: bool = False
    delay_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepth:
    """The depth of one queue.

    ``ready``: messages that wait at the broker and are not delivered; None if the queue does not exist. ``delayed``:
    delayed messages for this queue, if the broker can tell them apart.
    """

    ready: int | None
    consumers: int = 0
    delayed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """The properties of a queue that an admin wants to adopt.

    ``kind`` is "classic", "quorum", "stream" or "unknown" (AMQP does not show the kind, only the management API does).
    ``warnings`` are sentences for the admin, for example about a missing delivery limit.
    """

    exists: bool
    kind: str = "unknown"
    ready: int = 0
    consumers: int = 0
    warnings: Sequence[str] = ()


class Broker(Protocol):
    """The operations of a broker that popgate needs. All of them raise BrokerUnavailable while it can't be reached."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def start(self) -> None:
        """Connect to the broker. Raises: StartupError, with a detail of one line, if the broker can't be reached or
        refuses."""
        ...

    async def stop(self) -> None:
        """Disconnect from the broker, which ends every channel. Idempotent, and safe before ``start``."""
        ...

    def unavailable_reason(self) -> str | None:
        """Return the reason why the broker can't be used now, or None if it can. /readyz shows this reason.

        A broker that refuses only publishes for a while counts as available, because pops reduce its load.
        """
        ...

    async def declare_topic(self, topic: TopicName) -> None:
        """Prepare the topic for publishes. Idempotent."""
        ...

    async def delete_topic(self, topic: TopicName) -> None: ...

    async def declare_group(self, layout: Layout) -> None:
        """Declare the subscription's queues and its dead-letter queue, and bind the queues to the topic.

        Idempotent; adopted queues are left unchanged. Raises: Conflict if a queue exists with unsuitable arguments.
        """
        ...

    async def delete_group(self, layout: Layout) -> None:
        """Delete the queues of ``layout`` and their messages. Of adopted queues, delete only the dead-letter queue.

        Idempotent.
        """
        ...

    async def inspect(self, queue: BrokerQueue) -> QueueFacts:
        """Return the properties of a queue, without changing or consuming it."""
        ...

    async def publish(self, messages: Sequence[Outgoing]) -> list[PublishOutcome]:
        """Store messages durably, and return the outcomes in the order of ``messages``.

        PUBLISHED means that the message is on stable storage.
        """
        ...

    async def consume(self, queue: BrokerQueue, layout: Layout, prefetch: int, listener: Listener) -> Channel:
        """Open a channel on one of ``layout``'s queues. The listener is not called before this method returns.

        If several proxies share the broker, the method waits until the former consumer has released the queue or its
        connection has ended, so that the messages of that consumer arrive first. Raises: QueueGone; Conflict if another
        program consumes the queue; BrokerUnavailable, also if this proxy releases the queue during the wait.
        """
        ...

    async def let_go(self, queue: BrokerQueue) -> None:
        """Release the queue, so that another proxy can consume it. The queue's channel must be closed. Idempotent."""
        ...

    async def depth(self, queues: Sequence[BrokerQueue]) -> list[QueueDepth]:
        """Return the depth of each queue, in order."""
        ...

    async def oldest_at(self, queue: BrokerQueue) -> float | None:
        """Return since when the first message of a queue is visible, in Unix seconds.

        Return None if the queue is empty or does not exist, or if this broker can't tell.
        """
        ...
