"""The order of one queue's messages: their ranks among all that is ready, and the chains of their ordering keys.

A redelivered message gets its place when all redelivered messages have arrived, because the broker may deliver them in
another order (``ordering_keys``). A message that was never delivered before proves that, and so does a queue that has
nothing else to deliver.
"""

from collections.abc import Iterable, Iterator

from popgate.engine.queue.buffered import BufferedMessage
from popgate.engine.queue.ordering_keys import OrderingKeys
from popgate.ports.broker import Delivery

_MICROSECONDS = 1_000_000
_SEQUENCE_BITS = 36
_ONE_KEY = ""
"""The key of every message while the whole queue is one chain."""


class QueueOrder:
    """``sequence`` tells messages of one moment apart, over all queues of a subscription.

    ``is_one_chain``: all messages of the queue are in one chain, for any ordering key (pull mode).
    """

    def __init__(self, *, adopted: bool, sequence: Iterator[int]) -> None:
        self.is_one_chain = False
        self._adopted = adopted
        self._sequence = sequence
        self._keys = OrderingKeys()
        self._last_rank = 0

    @property
    def is_ordered(self) -> bool:
        """Whether every message has its place."""
        return self._keys.is_ordered

    def begin(self) -> None:
        """A channel is about to be opened."""
        self._last_rank = 0

    def place(
        self, message: BufferedMessage, delivery: Delivery, wall: float, known: Iterable[BufferedMessage]
    ) -> list[BufferedMessage]:
        """Give a message that was delivered for the first time on this channel its rank, and its place if it has one.
        ``known`` are all messages of the queue.

        Return the redelivered messages that become heads by that.
        """
        delivered = delivery.message
        message.rank = self._rank(delivered.waiting_since, wall)
        key = _ONE_KEY if self.is_one_chain else delivered.ordering_key
        if delivery.returned and delivery.identified and not self._adopted:
            if key is not None:
                self._keys.defer(message, key, delivered)
            return []
        # It was never delivered before, so all redelivered messages have arrived.
        heads = [] if self._keys.is_ordered else self._keys.order_deferred(known)
        if key is not None:
            self._keys.append(message, key)
        return heads

    def order_redelivered(self, known: Iterable[BufferedMessage]) -> list[BufferedMessage]:
        """All redelivered messages have arrived: give them their places. Return those that become heads."""
        return self._keys.order_deferred(known)

    def remove(self, message: BufferedMessage) -> BufferedMessage | None:
        """Take out a dropped message. Return the message that becomes a head by that."""
        return self._keys.remove(message)

    def dissolve(self, messages: Iterable[BufferedMessage]) -> None:
        """The channel has ended, and the queue delivers every message again: until then each is a head."""
        if self._keys.clear():
            for message in messages:
                message.key = message.next = None
                message.is_head = True

    def _rank(self, waiting_since: float, wall: float) -> int:
        """Return a rank in queue order within this queue, and oldest first across queues.

        Only popgate's own time stamps count, and never a future one, so that no clock starves a queue.
        """
        moment = wall if self._adopted else min(wall, waiting_since)
        self._last_rank = max(self._last_rank, int(moment * _MICROSECONDS))
        return (self._last_rank << _SEQUENCE_BITS) + next(self._sequence)
