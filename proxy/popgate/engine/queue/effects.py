"""Defines the effects of a decision about messages of a queue, and the events that the queue host reports."""

from typing import Protocol

from popgate.domain.names import CopyId
from popgate.engine.queue.buffered import BufferedMessage


class Effects:
    """The effects of one decision.

    For the broker: ``acks`` and ``requeues`` contain delivery tags of the present channel. For the store: ``forget``
    contains the copy ids of transient messages whose records must be deleted.

    The other effects are for the subscription. ``ready``: messages that can be handed out. ``moves``: messages that are
    being moved to the dead-letter queue, and that the broker has delivered. ``expired``: messages whose leases have
    expired. ``leased``: messages that are leased according to their records. ``redelivered``: messages that the broker
    has delivered again, and whose leases or delays continue. ``failed``: messages that popgate failed to process, with
    the errors. ``has_fewer_out``: whether a lease was settled, or its message delayed. ``has_news``: whether parked
    pops should check again, because messages have arrived or may arrive.
    """

    __slots__ = (
        "acks",
        "expired",
        "failed",
        "forget",
        "has_fewer_out",
        "has_news",
        "leased",
        "moves",
        "ready",
        "redelivered",
        "requeues",
    )

    def __init__(self) -> None:
        self.acks: list[int] = []
        self.requeues: list[int] = []
        self.forget: list[CopyId] = []
        self.ready: list[BufferedMessage] = []
        self.moves: list[BufferedMessage] = []
        self.expired: list[BufferedMessage] = []
        self.leased: list[BufferedMessage] = []
        self.redelivered: list[BufferedMessage] = []
        self.failed: list[tuple[BufferedMessage, Exception]] = []
        self.has_fewer_out = False
        self.has_news = False


class QueueEvents(Protocol):
    """The callbacks of a host to its subscription. Synchronous."""

    def happened(self, effects: Effects) -> None:
        """Apply the effects that concern the subscription: messages are ready, moving, expired ... (``Effects``)."""
        ...

    def lost(self, number: int) -> None:
        """Note that this proxy no longer consumes or owns queue ``number``."""
        ...

    def has_demand(self) -> bool:
        """Whether clients ask for messages."""
        ...

    def given_up(self) -> None:
        """End the wait of parked pops, because no queue could be opened for too long."""
        ...
