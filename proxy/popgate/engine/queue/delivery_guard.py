"""Takes deliveries so that a message on which popgate fails stops no other one.

If popgate fails on a batch, the broker delivers it again, and each message is taken alone. A message that fails twice
alone is set aside, to be dead-lettered, and the others flow. If many fail in a row, they are not to blame: they stay
with the broker.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

from popgate.domain.names import BrokerQueue
from popgate.ports.broker import Delivery
from popgate.runtime.faults import Faults

_log = logging.getLogger(__name__)

ALONE_COUNT = 65_536
"""Number of deliveries that are taken alone after a failure: more than one channel can hold."""
SET_ASIDE_MAX = 16
"""Maximum number of messages that are set aside in a row."""


class TakesDeliveries(Protocol):
    """A queue that is consumed."""

    def take_deliveries(self, deliveries: Sequence[Delivery]) -> None: ...

    def forget_delivery(self, delivery: Delivery) -> None:
        """Forget a delivery that was taken in part only."""
        ...

    def set_aside(self, delivery: Delivery, error: Exception, *, to_move: bool) -> None:
        """Dead-letter a message on which popgate fails, or leave it with the broker if it is not ``to_move``."""
        ...


class DeliveryGuard:
    """Guards one queue."""

    def __init__(self, faults: Faults, queue: BrokerQueue) -> None:
        self._faults = faults
        self._queue = queue
        self._alone_left = 0
        self._failed_in_a_row = 0

    def take(self, deliveries: Sequence[Delivery], taker: TakesDeliveries) -> bool:
        """Let ``taker`` take them. Return False if the broker has to deliver them again."""
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
