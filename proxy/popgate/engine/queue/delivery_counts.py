"""Counts how often the messages of one queue were delivered to clients, if no record in the store contains the count.

The broker's count of deliveries includes deliveries that popgate has only buffered. It is therefore used only for a
message without a stable id. From it, this module subtracts the number of times that popgate returned buffered messages,
so that a message that no client has received is not dead-lettered.
"""

from popgate.domain.names import CopyId
from popgate.engine.queue.buffered import BufferedMessage
from popgate.ports.broker import Delivery


class DeliveryCounts:
    """The delivery counts of one queue's messages. They remain valid when the queue's channel ends."""

    def __init__(self) -> None:
        self.remembered: dict[CopyId, int] = {}
        """The delivery counts of dropped messages, to be used when the broker delivers these messages again."""
        self._unseen_returns = 0
        """How often messages that no client had received were returned to the broker. A return of many counts once."""

    def remember(self, message: BufferedMessage) -> None:
        """Save the delivery count of a message that is dropped, and that the broker will deliver again."""
        if message.delivery_count:
            self.remembered[message.copy_id] = message.delivery_count

    def returns_unseen(self) -> None:
        """Record that messages that no client has received are about to be returned to the broker."""
        self._unseen_returns += 1

    def of_unidentified(self, delivery: Delivery) -> int:
        """Return how often a message without a stable id may have been delivered to clients before this delivery."""
        return max(0, delivery.earlier_deliveries - self._unseen_returns)
