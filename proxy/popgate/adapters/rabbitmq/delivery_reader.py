"""Converts raw AMQP deliveries of one queue into the broker port's ``Delivery`` objects."""

import logging
from collections.abc import Sequence

from popgate.adapters.rabbitmq.channel_parser import RawDelivery
from popgate.adapters.rabbitmq.consumption import Consumption
from popgate.adapters.rabbitmq.properties import decode
from popgate.adapters.rabbitmq.versions import Version, count_header
from popgate.ports.broker import Delivery

_log = logging.getLogger(__name__)


class DeliveryReader:
    """Converts the raw deliveries of the queue that `what` describes.

    It logs a warning the first time that it ignores metadata of a message.
    """

    def __init__(self, what: Consumption, server_version: Version) -> None:
        self._what = what
        self._counts_in = count_header(server_version).encode()
        self._warned = False

    def read(self, deliveries: Sequence[RawDelivery]) -> list[Delivery]:
        """Return one ``Delivery`` for each raw delivery, in the same order. Metadata that can't be read is ignored."""
        foreign, unique_message_ids, check_tag = self._what.foreign, self._what.unique_message_ids, self._what.check_tag
        counted, notes = self._what.quorum, self._what.notes
        counts_in = self._counts_in
        taken: list[Delivery] = []
        for _, tag, redelivered, routing, properties, body in deliveries:
            message, identified, delivery_count, problem = decode(
                properties,
                body,
                routing if foreign else None,
                check_tag=check_tag,
                unique_message_ids=unique_message_ids,
                notes=notes,
                count_header=counts_in,
            )
            if problem:
                self._warn(problem)
            # A count in the headers of a first delivery comes from another queue: a publisher has published a message
            # of that queue again, with the message's headers.
            earlier = delivery_count or 0 if counted and redelivered else 0
            taken.append(
                Delivery(
                    tag=tag,
                    message=message,
                    identified=identified,
                    earlier_deliveries=earlier,
                    returned=bool(redelivered),
                )
            )
        return taken

    def _warn(self, problem: str) -> None:
        if not self._warned:  # a publisher that sends such metadata usually sends it with every message
            self._warned = True
            _log.warning(
                "messages with metadata that popgate ignores", extra={"queue": self._what.queue, "problem": problem}
            )
