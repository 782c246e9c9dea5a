"""The broker port: where messages are kept.

Theory of operation. A broker holds queues of messages. ``consume`` opens one channel on one queue; the broker then
pushes deliveries to the listener, in queue order, as long as fewer than ``prefetch`` of them are unsettled. What is
delivered and not acked stays with the broker and comes back, ahead of newer messages, when the channel ends for
whatever reason; in the original order, unless that channel had not seen all of what came back before. A delivery is
named by (channel, tag); tags mean nothing on another channel, so settling goes through the ``Channel`` object that
delivered, and a channel that has ended ignores it.

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
    """Real differences between brokers, declared. ``name`` is shown to users."""

    name: str
    adopts_queues: bool
    """Can stand on queues that somebody else declared and fills."""
    delay_resolution_seconds: float = 0.0
    """Delays are rounded up to multiples of it."""
    vhost: str | None = None
    """RabbitMQ's virtual host, where a queue can have replicas; None: this broker has none of either."""


class Delivery:
    """One message as the broker pushed it on one channel.

    ``identified``: ``message.copy_id`` names this copy for ever (popgate minted it, or the admin declared the
    publisher's message_id unique). Otherwise ``message.copy_id`` is empty and the engine gives it a transient one.
    ``earlier_deliveries`` is how often the broker has delivered it before, as far as it counts: 0 where it doesn't.
    ``returned``: it was delivered before, or may have overtaken one that was; all such come ahead of the others, but
    maybe not in the queue's order.
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
    """Who is told about a channel. Both calls are synchronous, on the event loop, and must not raise."""

    def on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        """Take the next deliveries, in queue order. Never called after ``on_channel_lost``."""
        ...

    def on_channel_lost(self, reason: str, *, queue_gone: bool) -> None:
        """The channel ended without ``close``: everything unsettled on it goes back to the queue.

        Called at most once. ``queue_gone``: the queue itself was deleted.
        """
        ...


class Channel(Protocol):
    """One consumption of one queue. All but ``settled_evidence`` ends with the channel: later calls do nothing."""

    @property
    def unsettled_seconds_max(self) -> float | None:
        """The broker ends the channel when a delivery stays unsettled for longer; None: never."""
        ...

    def ack(self, tags: Sequence[int]) -> None:
        """Settle deliveries for good, in any order, without waiting: writes are coalesced. Unknown tags are ignored."""
        ...

    def requeue(self, tags: Sequence[int]) -> None:
        """Give single deliveries back to the queue; they are delivered again, at the front where the broker can."""
        ...

    async def flush(self) -> None:
        """Return when all acks so far have left this process (RabbitMQ) or are durable (embedded).

        Where the channel ends meanwhile they may be lost: its listener is told, as ever.
        """
        ...

    async def resize(self, prefetch: int) -> None:
        """From now on at most ``prefetch`` (0..65535) further deliveries are unsettled; 0 pauses.

        What is held stays held; the same prefetch again opens a fresh window too. Deliveries that were
        under way may still arrive after a smaller prefetch.
        Raises: BrokerUnavailable (the channel is lost then).
        """
        ...

    async def backlog(self) -> int:
        """Messages that are ready at the broker and not delivered here. All earlier deliveries have arrived by then.

        0 means that the broker has counted. While it can't count, the number is larger than any queue; with a prefetch
        of 0 it may be 0.
        Raises: BrokerUnavailable.
        """
        ...

    def settled_evidence(self) -> int:
        """How many of the acks given to this channel, in their order, the broker has proved to have applied.

        RabbitMQ proves by later deliveries: with prefetch W, the delivery number d proves d - W acks (design: section
        2). The embedded broker proves by its commits.
        """
        ...

    async def close(self) -> None:
        """End the consumption: everything unsettled goes back in order, acks given before still count. Idempotent."""
        ...


class PublishStatus(StrEnum):
    PUBLISHED = "published"
    UNROUTED = "unrouted"
    """No queue took it: the topic has no group, or the queue does not exist."""
    REFUSED = "refused"
    """The broker did not take it, or can't: publishing it again as it is will not help before something changes."""
    FAILED = "failed"
    """Nobody knows: it may or may not be stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOutcome:
    """``unfit``: it was refused because this broker can't carry a message with such headers to any queue."""

    status: PublishStatus
    detail: str = ""
    unfit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message and where it goes: to queue ``index`` of every group of ``topic``, or to one ``queue`` by name.

    ``once``: it may be a repeat with the same copy id, as a move's may be; a broker that can stores it once. What goes
    to a queue by name always may be one.
    ``delay_seconds`` (0..``DELAY_SECONDS_MAX``), only to a topic: the message becomes visible that much later, never
    earlier, in queue ``index`` of every group that exists then. PUBLISHED says that it is stored until then; whether
    there is a group now is not looked at, and where there is none then, the message is discarded. Where by then there
    are fewer queues, the embedded broker takes queue ``index`` modulo their number; RabbitMQ discards it. A delayed
    message to an adopted topic names both topic and index, and its ``queue``.
    """

    message: Message
    topic: TopicName | None = None
    index: int = 0
    queue: BrokerQueue | None = None
    once: bool = False
    delay_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepth:
    """``ready``: messages that wait at the broker and are delivered to nobody; None where the queue does not exist.

    ``delayed``: delayed publishes on their way to this queue, as far as the broker can tell them apart.
    """

    ready: int | None
    consumers: int = 0
    delayed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """What can be learned of a queue that is to be adopted.

    ``kind`` is "classic", "quorum", "stream" or "unknown" (it can't be read over AMQP without the management API).
    ``warnings`` are sentences for the admin, such as a missing delivery limit.
    """

    exists: bool
    kind: str = "unknown"
    ready: int = 0
    consumers: int = 0
    warnings: Sequence[str] = ()


class Broker(Protocol):
    """Everything popgate asks of a broker. All methods raise BrokerUnavailable while the broker can't be reached."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def start(self) -> None:
        """Connect. Raises: StartupError with one clear line, when it can't be reached or refuses."""
        ...

    async def stop(self) -> None:
        """Disconnect; every channel ends. Idempotent, and safe before ``start``."""
        ...

    def unavailable_reason(self) -> str | None:
        """Why nothing can be done right now, or None: for /readyz.

        A broker that only takes no messages for a while is not unavailable: pops are what helps it.
        """
        ...

    async def declare_topic(self, topic: TopicName) -> None:
        """Make the topic publishable. Idempotent."""
        ...

    async def delete_topic(self, topic: TopicName) -> None: ...

    async def declare_group(self, layout: Layout) -> None:
        """Make the subscription's queues and its dead-letter queue, bound to the topic. Idempotent; adopted queues
        are left as they are. Raises: Conflict when a queue exists with arguments that can't serve."""
        ...

    async def delete_group(self, layout: Layout) -> None:
        """Delete the queues of ``layout`` with what is in them; if adopted, only the dead-letter queue. Idempotent."""
        ...

    async def inspect(self, queue: BrokerQueue) -> QueueFacts:
        """Look at a queue without changing or consuming it."""
        ...

    async def publish(self, messages: Sequence[Outgoing]) -> list[PublishOutcome]:
        """Store messages durably; the outcomes are in the order of ``messages``. PUBLISHED means on stable storage."""
        ...

    async def consume(self, queue: BrokerQueue, layout: Layout, prefetch: int, listener: Listener) -> Channel:
        """Open a channel on one of ``layout``'s queues; the listener hears nothing before this returned.

        Where several proxies share the broker it waits until the one that has consumed the queue has let go of it, or
        its connection has ended: what that one holds comes first. Raises: QueueGone; Conflict when somebody else
        consumes it; BrokerUnavailable, also where this one lets go of it meanwhile.
        """
        ...

    async def let_go(self, queue: BrokerQueue) -> None:
        """The queue is another proxy's to consume from now on; its channel is closed. Idempotent."""
        ...

    async def depth(self, queues: Sequence[BrokerQueue]) -> list[QueueDepth]:
        """The depth of each queue, in order."""
        ...
