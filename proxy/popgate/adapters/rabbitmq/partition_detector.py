"""Detects that the node of a connection is cut off from the other nodes of RabbitMQ.

If RabbitMQ stores its metadata in Khepri (always from 4.3 on), a node on the smaller side of a partition stays up. It
keeps its clients' connections, but silently delivers and confirms nothing. So popgate regularly publishes a message to
a quorum queue. The queue confirms the message only if most of its nodes can be reached. If no confirm arrives, popgate
publishes through the other nodes, one after another, until one of them confirms. Then it publishes once more through
the node of the connection. This node is considered cut off only if it still does not confirm. If no other node
confirms, all of RabbitMQ hangs, and the connection would gain nothing from another node.

This module only checks the node. ``Connection`` leaves the node if it is cut off.
"""

import logging
from collections.abc import Sequence

from aiormq import spec
from aiormq.abc import AbstractChannel
from aiormq.exceptions import DeliveryError, PublishError
from pamqp.common import FieldValue
from yarl import URL

from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.adapters.rabbitmq.session import ChannelRefusedError, Session
from popgate.adapters.rabbitmq.versions import stays_up_alone
from popgate.domain.errors import BrokerUnavailable

_log = logging.getLogger(__name__)

QUEUE = "popgate:pulse"
ARGUMENTS: dict[str, FieldValue] = {"x-queue-type": "quorum", "x-max-length": 1, "x-overflow": "drop-head"}
CHECK_SECONDS = 0.5
"""Seconds between two checks of a connection's node."""
PATIENCE_SECONDS = 1.0
"""Seconds that a node may take to confirm before it is compared with other nodes."""


class PartitionDetector:
    """Checks the node of one connection. A connection may have several sessions, one after another."""

    def __init__(self, options: RabbitOptions) -> None:
        self._options = options
        self._session: Session | None = None
        self._channel: AbstractChannel | None = None
        self._is_refused = False

    async def is_cut_off(self, session: Session, others: Sequence[URL]) -> bool:
        """Return whether the node of ``session`` confirms nothing, and one of the ``others`` does."""
        if self._is_refused or session.blocked is not None or not stays_up_alone(session.server_version):
            return False
        if await self._confirms(session):
            return False
        for url in others:
            if session.interceptor.ended is not None or session.blocked is not None:
                return False
            if await self._confirms_at(url):
                # If the queue had no leader for a moment, a new channel gets confirms earlier than an old one.
                self._channel = None
                return not await self._confirms(session)
        return False

    async def _confirms_at(self, url: URL) -> bool:
        try:
            trial = await Session.connect(self._options, url, "pulse", connect_seconds=PATIENCE_SECONDS)
        except Exception:  # aiormq raises errors of five unrelated kinds here
            return False
        try:
            return await PartitionDetector(self._options)._confirms(trial)
        finally:
            await trial.close()

    async def _confirms(self, session: Session) -> bool:
        """Publish a message, and return whether RabbitMQ confirmed it in time.

        Also return True if RabbitMQ does not permit the check, or if the session has ended.
        """
        try:
            channel = await self._channel_on(session)
            try:
                await self._publish(session, channel)
            except PublishError:
                declare = channel.queue_declare(QUEUE, durable=True, arguments=ARGUMENTS)
                await session.call(declare, timeout=PATIENCE_SECONDS)
                await self._publish(session, channel)
        except ChannelRefusedError as error:
            self._is_refused = True
            _log.warning("RabbitMQ does not let popgate see whether a node is cut off", extra={"why": str(error)})
        except DeliveryError:
            return False
        except BrokerUnavailable:
            return session.interceptor.ended is not None
        return True

    async def _publish(self, session: Session, channel: AbstractChannel) -> None:
        await session.call(
            channel.basic_publish(
                b"", routing_key=QUEUE, mandatory=True, properties=spec.Basic.Properties(delivery_mode=2)
            ),
            timeout=PATIENCE_SECONDS,
        )

    async def _channel_on(self, session: Session) -> AbstractChannel:
        if self._session is not session or self._channel is None or self._channel.is_closed:
            self._channel = await session.open_channel(confirms=True)
            self._session = session
        return self._channel
