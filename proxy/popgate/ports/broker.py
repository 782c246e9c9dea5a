"""Defines the broker port: the store of messages.

Theory of operation. A broker holds queues of messages. ``consume`` opens one channel on one queue; the broker then
pushes deliveries to the listener, in queue order, as long as fewer than ``prefetch`` of them are unsettled. The broker
keeps messages that were delivered and not acked. It redelivers them, ahead of newer messages, when the channel ends for
any reason. They are redelivered in the original order, unless the channel ended before it had received all messages
that an earlier channel returned. (channel, tag) names a delivery. Tags are meaningless on other channels, so a delivery
is settled through the ``Channel`` object that delivered it. A channel that has ended ignores settlements.

Leases, delivery counts and everything else that pop adds live in the state port, not here.
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

    ``identified``: ``message.copy_id`` is this copy's permanent id (popgate minted it, or the admin declared the
    publisher's message_id unique). Otherwise ``message.copy_id`` is empty and the engine gives it a transient one.
    ``earlier_deliveries`` is the number of earlier deliveries by the broker, or 0 if the broker does not count them.
    ``returned``: the message was delivered before, or may have overtaken a message that was delivered before. All
    returned messages arrive ahead of the others, but perhaps not in the queue's order.
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
        """Handle the end of the channel without ``close``. Its unsettled messages return to the queue.

        Called at most once. ``queue_gone``: the queue itself was deleted.
        """
        ...


class Channel(Protocol):
    """One consumer on one queue. When the channel has ended, calls other than ``settled_evidence`` do nothing."""

    @property
    def unsettled_seconds_max(self) -> float | None:
        """Seconds that a delivery may stay unsettled before the broker ends the channel; None: unlimited."""
        ...

    def ack(self, tags: Sequence[int]) -> None:
        """Acknowledge deliveries, in any order, without waiting: writes are coalesced. Unknown tags are ignored."""
        ...

    def requeue(self, tags: Sequence[int]) -> None:
        """Return single deliveries to the queue, at the front if the broker supports this. They are redelivered."""
        ...

    async def flush(self) -> None:
        """Return when all acks so far have left this process (RabbitMQ) or are durable (embedded).

        If the channel ends during the call, acks may be lost. The listener is notified as usual.
        """
        ...

    async def resize(self, prefetch: int) -> None:
        """Allow at most ``prefetch`` (0..65535) further unsettled deliveries; 0 pauses.

        Messages that were already delivered stay with the channel and do not count. A call with the same prefetch also
        opens a new window. Deliveries that were under way may still arrive after a smaller prefetch.
        Raises: BrokerUnavailable (the channel is lost then).
        """
        ...

    async def backlog(self) -> int:
        """Return the number of messages that are ready at the broker and not delivered here.

        All earlier deliveries have arrived when the call returns. While the broker can't count, the number is larger
        than any queue, or 0 if the prefetch is 0. With any other prefetch, 0 is a real count.
        Raises: BrokerUnavailable.
        """
        ...

    def settled_evidence(self) -> int:
        """Return how many of this channel's acks, in their order, the broker has provably applied.

        With RabbitMQ, later deliveries are the proof: with prefetch W, delivery number d proves d - W acks
        (decision 5). With the embedded broker, its commits are the proof.
        """
        ...

    async def close(self) -> None:
        """End the consumer. Unsettled messages return in order, and earlier acks remain valid. Idempotent."""
        ...


class PublishStatus(StrEnum):
    PUBLISHED = "published"
    UNROUTED = "unrouted"
    """No queue received it: the topic has no group, or the queue does not exist."""
    REFUSED = "refused"
    """The broker did not accept the message. The same publish will fail again unless the broker's state changes."""
    FAILED = "failed"
    """The outcome is unknown: the message may or may not be stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOutcome:
    """The result of publishing one message. ``unfit``: the message was refused because this broker can't carry its
    headers to any queue."""

    status: PublishStatus
    detail: str = ""
    unfit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message and its target: queue ``index`` of every group of ``topic``, or one ``queue`` by name.

    ``once``: this may repeat an earlier publish with the same copy id, for example the publish of a move. A broker that
    supports it stores the message only once. Messages to a queue by name are always treated in this way.
    ``delay_seconds`` (0..``DELAY_SECONDS_MAX``), only for a topic: the message becomes visible that much later, never
    earlier, in queue ``index`` of every group that exists then. PUBLISHED means that the message is stored until that
    time, even if no group exists now. If no group exists at that time, the message is discarded. If there are fewer
    queues at that time, the embedded broker uses queue ``index`` modulo their number, and RabbitMQ discards the
    message. A delayed message to an adopted topic names topic and index as well as its ``queue``.
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
    """The properties of a queue that should be adopted.

    ``kind`` is "classic", "quorum", "stream" or "unknown" (it can't be read over AMQP without the management API).
    ``warnings`` are sentences for the admin, for example about a missing delivery limit.
    """

    exists: bool
    kind: str = "unknown"
    ready: int = 0
    consumers: int = 0
    warnings: Sequence[str] = ()


class Broker(Protocol):
    """All that popgate needs from a broker. All methods raise BrokerUnavailable while the broker can't be reached."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def start(self) -> None:
        """Connect. Raises: StartupError, with one clear line, if the broker can't be reached or refuses."""
        ...

    async def stop(self) -> None:
        """Disconnect; every channel ends. Idempotent, and safe before ``start``."""
        ...

    def unavailable_reason(self) -> str | None:
        """Return why the broker can do nothing right now, or None; for /readyz.

        A broker that only refuses publishes for a while is available: pops reduce its load.
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
        """Store messages durably; the outcomes are in the order of ``messages``. PUBLISHED means on stable storage."""
        ...

    async def consume(self, queue: BrokerQueue, layout: Layout, prefetch: int, listener: Listener) -> Channel:
        """Open a channel on one of ``layout``'s queues. The listener is not called before this method returns.

        If several proxies share the broker, the method waits until the former consumer has released the queue or its
        connection has ended, so that the messages of that consumer arrive first. Raises: QueueGone; Conflict if another
        program consumes the queue; BrokerUnavailable, also if this proxy releases the queue during the wait.
        """
        ...

    async def let_go(self, queue: BrokerQueue) -> None:
        """Release the queue, whose channel is closed, so that another proxy can consume it. Idempotent."""
        ...

    async def depth(self, queues: Sequence[BrokerQueue]) -> list[QueueDepth]:
        """Return the depth of each queue, in order."""
        ...
