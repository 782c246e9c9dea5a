"""Counts how often clients have had the messages of one queue, where no record in the store has the count.

The broker's own count includes deliveries into buffers, so it is used only for a message without a stable id. The
returns of unseen messages are subtracted from it, so that a message that no client has seen is not dead-lettered.
"""

from popgate.domain.names import CopyId
from popgate.engine.queue.buffered import BufferedMessage
from popgate.ports.broker import Delivery


class DeliveryCounts:
    """The counts of one queue, over all its channels."""

    def __init__(self) -> None:
        self.remembered: dict[CopyId, int] = {}
        """The counts of dropped messages that clients have had, for their next delivery by the broker."""
        self._unseen_returns = 0
        """Number of returns of unseen messages to the broker. One return contains a message at most once."""

    def remember(self, message: BufferedMessage) -> None:
        """Note that a message is dropped, and that the broker delivers it again."""
        if message.delivery_count:
            self.remembered[message.copy_id] = message.delivery_count

    def returns_unseen(self) -> None:
        """Note that unseen messages are about to be returned to the broker."""
        self._unseen_returns += 1

    def of_unidentified(self, delivery: Delivery) -> int:
        """Return how often clients may have had a message without a stable id, before this delivery."""
        return max(0, delivery.earlier_deliveries - self._unseen_returns)
