"""What follows from a decision on a queue: the host carries it out."""

from popgate.domain.names import CopyId
from popgate.engine.queue.buffered import BufferedMessage


class Effects:
    """``acks`` and ``requeues`` are tags of the present channel, ``forget`` are records of transient messages.

    The rest is for the subscription: ``ready`` messages can be handed out, those in ``moves`` are on their way to the
    dead letters and their bodies are here, the leases of ``expired`` have run out, the store says of ``leased`` that
    they are leased, ``redelivered`` have leases or delays that go on, and ``failed`` could not be delivered because
    popgate failed on them. ``has_fewer_out``: a lease was settled, or its message is delayed now. ``has_news``: parked
    pops look again, because something came, or may come now.
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
