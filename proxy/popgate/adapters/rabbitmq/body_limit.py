"""Finds out the largest body that RabbitMQ accepts: its setting `max_message_size`, which can't be read over AMQP.

If a larger body is published, RabbitMQ closes the channel, and the other messages in flight on this channel fail, too.
So if a body is larger than all bodies accepted so far, a trial body of at least this size is first published on a
separate channel, to a queue that does not exist. RabbitMQ either accepts the trial body, or closes the separate channel
and reports its limit.
"""

import re

from aiormq.exceptions import DeliveryError

from popgate.adapters.rabbitmq.session import PRECONDITION_FAILED, ChannelRefusedError, Session
from popgate.domain.errors import BrokerUnavailable
from popgate.domain.message import MESSAGE_BYTES_MAX

SURE_BYTES = 64 * 1024
"""Maximum number of bytes in a body that is published without a trial."""
NO_QUEUE = "popgate:no-such-queue"
_LIMIT = re.compile(r"larger than configured max size (\d+)")


class BodyLimit:
    """The body limit of the node to which one session is connected, as far as it is known.

    Another session may be connected to another node, with another limit.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._taken = SURE_BYTES
        self._max: int | None = None

    async def learn(self, size: int) -> None:
        """Find out whether RabbitMQ accepts a body of `size` bytes, unless this is already known.

        Raises: BrokerUnavailable.
        """
        if self._max is not None or size <= self._taken:
            return
        # The trial's size is a power of two, so that bodies that grow byte by byte are seldom tried.
        tried = max(size, min(1 << size.bit_length(), MESSAGE_BYTES_MAX))
        channel = await self.session.open_channel(confirms=True)
        try:
            await self.session.call(channel.basic_publish(bytes(tried), routing_key=NO_QUEUE))
        except ChannelRefusedError as error:
            if error.reason.code == PRECONDITION_FAILED:
                limit = _LIMIT.search(error.reason.text)
                self._max = self._taken if limit is None else int(limit[1])
                return
            # popgate's user may not write to the default exchange, so the limit stays unknown
        except DeliveryError as error:
            raise BrokerUnavailable("RabbitMQ takes no messages") from error
        finally:
            await self.session.close_channel(channel)
        self._taken = tried

    def check(self, size: int) -> None:
        """Raise ValueError if RabbitMQ would close the channel because of a body of `size` bytes."""
        if self._max is not None and size > self._max:
            raise ValueError(
                f"the body has {size} bytes, and RabbitMQ takes {self._max}: send less, or raise its max_message_size"
            )
