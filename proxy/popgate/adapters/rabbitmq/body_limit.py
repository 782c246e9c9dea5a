"""The largest body that RabbitMQ takes: its setting `max_message_size`, which can't be read over AMQP.

A larger body closes the channel that it is published on, together with what others have under way there. So before a
body that is larger than every body that was taken so far, as many bytes are published on a channel of their own, to a
queue that does not exist. RabbitMQ takes them, or it closes that channel and says its limit.
"""

import re

from aiormq.exceptions import DeliveryError

from popgate.adapters.rabbitmq.session import PRECONDITION_FAILED, ChannelRefusedError, Session
from popgate.domain.errors import BrokerUnavailable
from popgate.domain.message import MESSAGE_BYTES_MAX

SURE_BYTES = 64 * 1024
"""Bodies of this size are published without a trial."""
NO_QUEUE = "popgate:no-such-queue"
_LIMIT = re.compile(r"larger than configured max size (\d+)")


class BodyLimit:
    """What is known about the node of one session; another session may lead to another node."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._taken = SURE_BYTES
        self._max: int | None = None

    async def learn(self, size: int) -> None:
        """Find out whether RabbitMQ takes a body of `size` bytes. Costs nothing for sizes that were taken before.

        Raises: BrokerUnavailable.
        """
        if self._max is not None or size <= self._taken:
            return
        # A power of two: bodies that grow byte by byte are tried seldom.
        tried = max(size, min(1 << size.bit_length(), MESSAGE_BYTES_MAX))
        channel = await self.session.open_channel(confirms=True)
        try:
            await self.session.call(channel.basic_publish(bytes(tried), routing_key=NO_QUEUE))
        except ChannelRefusedError as error:
            if error.reason.code == PRECONDITION_FAILED:
                limit = _LIMIT.search(error.reason.text)
                self._max = self._taken if limit is None else int(limit[1])
                return
            # popgate's user may not write to the default exchange: the limit stays unknown
        except DeliveryError as error:
            raise BrokerUnavailable("RabbitMQ takes no messages") from error
        finally:
            await self.session.close_channel(channel)
        self._taken = tried

    def check(self, size: int) -> None:
        """Raises: ValueError where RabbitMQ would close the channel because of a body of `size` bytes."""
        if self._max is not None and size > self._max:
            raise ValueError(
                f"the body has {size} bytes, and RabbitMQ takes {self._max}: send less, or raise its max_message_size"
            )
