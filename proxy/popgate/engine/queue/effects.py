"""Defines the effects of a decision on a queue. The host carries them out."""

from popgate.domain.names import CopyId
from popgate.engine.queue.buffered import BufferedMessage


class Effects:
    """The effects of a decision.

    For the broker: ``acks`` and ``requeues`` are tags of the present channel. For the store: ``forget`` are the copy
    ids of transient messages whose records are deleted.

    The rest is for the subscription. ``ready`` messages can be handed out. ``moves`` are being moved to the dead-letter
    queue, and the broker has delivered them. The leases of ``expired`` have expired. ``leased`` are leased according to
    their records. ``redelivered`` have leases or delays that continue. ``failed`` are messages that popgate failed to
    process, with the error. ``has_fewer_out``: a lease was settled, or its message is delayed. ``has_news``: parked
    pops check again, because messages arrived, or may arrive.
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
