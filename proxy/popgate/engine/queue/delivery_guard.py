"""Processes deliveries so that a message with which popgate fails does not block other messages.

If popgate fails to process a batch, the broker delivers the batch again, and popgate processes each message separately.
A message that then fails twice is dead-lettered, and the other messages continue. If many messages fail in a row, the
messages are probably not the cause. Then further failing messages stay unsettled at the broker.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

from popgate.domain.names import BrokerQueue
from popgate.ports.broker import Delivery
from popgate.runtime.faults import Faults

_log = logging.getLogger(__name__)

ALONE_COUNT = 65_536
"""Number of deliveries that are processed one by one after a failure. It is larger than the number of unsettled
deliveries that a channel can have."""
SET_ASIDE_MAX = 16
"""Maximum number of failing messages in a row that are dead-lettered."""


class TakesDeliveries(Protocol):
    """Processes the deliveries of one queue."""

    def take_deliveries(self, deliveries: Sequence[Delivery]) -> None: ...

    def forget_delivery(self, delivery: Delivery) -> None:
        """Forget a delivery that was only partly processed, because of an error."""
        ...

    def set_aside(self, delivery: Delivery, error: Exception, *, to_move: bool) -> None:
        """Dead-letter a message that popgate fails to process.

        If ``to_move`` is False, leave the message unsettled at the broker instead.
        """
        ...


class DeliveryGuard:
    """Passes the deliveries of one queue to the object that processes them, and handles its errors."""

    def __init__(self, faults: Faults, queue: BrokerQueue) -> None:
        self._faults = faults
        self._queue = queue
        self._alone_left = 0
        self._failed_in_a_row = 0

    def take(self, deliveries: Sequence[Delivery], taker: TakesDeliveries) -> bool:
        """Pass ``deliveries`` to ``taker``. Return False if the broker has to deliver them again."""
        if self._alone_left <= 0:
            try:
                taker.take_deliveries(deliveries)
            except Exception as error:
                self._alone_left = ALONE_COUNT
                place = {"queue": self._queue, "deliveries": len(deliveries)}
                _log.warning("deliveries come again, to be taken one by one", exc_info=error, extra=place)
                return False
            return True
        self._alone_left -= len(deliveries)
        for delivery in deliveries:
            self._take_alone(delivery, taker)
        return True

    def _take_alone(self, delivery: Delivery, taker: TakesDeliveries) -> None:
        copy_id = delivery.message.copy_id or f"tag {delivery.tag}"
        while True:
            try:
                taker.take_deliveries([delivery])
                self._failed_in_a_row = 0
                return
            except Exception as error:
                taker.forget_delivery(delivery)
                if self._faults.message_failed(self._queue, copy_id, error):
                    self._failed_in_a_row += 1
                    taker.set_aside(delivery, error, to_move=self._failed_in_a_row <= SET_ASIDE_MAX)
                    return
