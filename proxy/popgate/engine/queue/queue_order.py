"""Orders the messages of one queue: their ranks among all ready messages, and the chains of their ordering keys.

A redelivered message is inserted into its chain when all redelivered messages have arrived, because the broker may
deliver them in a different order (``ordering_keys``). All of them have arrived when the broker delivers a message for
the first time, or when the queue has no more messages to deliver.
"""

from collections.abc import Iterable, Iterator

from popgate.engine.queue.buffered import BufferedMessage
from popgate.engine.queue.ordering_keys import OrderingKeys
from popgate.ports.broker import Delivery

_MICROSECONDS = 1_000_000
_SEQUENCE_BITS = 36
_ONE_KEY = ""
"""The key of every message while the whole queue is one chain."""


def arrived_at(rank: int) -> float:
    """Return a time at which a message with this rank had arrived, in Unix seconds; 0.0 if it has no rank."""
    return (rank >> _SEQUENCE_BITS) / _MICROSECONDS


class QueueOrder:
    """The order of the messages of one queue.

    ``sequence`` makes the ranks of messages with the same time different, also across queues. ``is_one_chain``: all
    messages of the queue are in one chain, whatever their ordering keys (pull mode).
    """

    def __init__(self, *, adopted: bool, sequence: Iterator[int]) -> None:
        self.is_one_chain = False
        self._adopted = adopted
        self._sequence = sequence
        self._keys = OrderingKeys()
        self._last_rank = 0

    @property
    def is_ordered(self) -> bool:
        """Whether every message has its place in its chain."""
        return self._keys.is_ordered

    def begin(self) -> None:
        """Restart the ranks, because a channel is about to be opened."""
        self._last_rank = 0

    def place(
        self, message: BufferedMessage, delivery: Delivery, wall: float, known: Iterable[BufferedMessage]
    ) -> list[BufferedMessage]:
        """Assign a rank to a message at its first delivery on this channel.

        If it is not redelivered, append it to its chain. ``known``: all messages of the queue. Return the redelivered
        messages that become heads of their chains.
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
        """Insert the redelivered messages into their chains, because all of them have arrived.

        Return the messages that become heads of their chains.
        """
        return self._keys.order_deferred(known)

    def remove(self, message: BufferedMessage) -> BufferedMessage | None:
        """Remove a dropped message from its chain. If this makes another message the head, return that message."""
        return self._keys.remove(message)

    def dissolve(self, messages: Iterable[BufferedMessage]) -> None:
        """Dissolve all chains at the end of a channel. Each message is a head until it is delivered again."""
        if self._keys.clear():
            for message in messages:
                message.key = message.next = None
                message.is_head = True

    def _rank(self, waiting_since: float, wall: float) -> int:
        """Return the rank of a message that has waited since ``waiting_since``.

        Ranks follow the queue order within this queue, and are lower for older messages across queues. Only times that
        popgate has set are used, and none in the future, so that a wrong clock does not starve a queue.
        """
        moment = wall if self._adopted else min(wall, waiting_since)
        self._last_rank = max(self._last_rank, int(moment * _MICROSECONDS))
        return (self._last_rank << _SEQUENCE_BITS) + next(self._sequence)
