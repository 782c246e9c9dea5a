"""Waits until all redelivered messages of a channel have arrived, so that they can be put in order.

This module only waits: it asks the broker how many messages are not delivered yet. ``queue_order`` then puts the
messages in order. During the wait, the redelivered messages are not handed out. The wait also ends when the broker
delivers a message for the first time, because all redelivered messages have arrived before it.
"""

import asyncio
import logging
from collections.abc import Callable

from popgate.domain.errors import PopgateError
from popgate.domain.names import BrokerQueue
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.queue.effects import Effects
from popgate.engine.queue.prefetch_control import PrefetchControl
from popgate.engine.queue.state import QueueState
from popgate.ports.broker import Channel

_log = logging.getLogger(__name__)

ORDER_LOOK_SECONDS, ORDER_LOOK_SECONDS_MAX = 0.02, 0.3
"""First and longest pause in seconds between two checks whether all redelivered messages have arrived."""


class RedeliveryOrder:
    """The wait for the redelivered messages of one queue on its present channel."""

    def __init__(
        self,
        context: EngineContext,
        queue: BrokerQueue,
        state: QueueState,
        prefetch: PrefetchControl,
        carry_out: Callable[[Effects], None],
    ) -> None:
        self._context = context
        self._queue = queue
        self._state = state
        self._prefetch = prefetch
        self._carry_out = carry_out
        self._channel: Channel | None = None
        self._awaited: Channel | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether redelivered messages are not handed out yet, because some of them have not arrived."""
        return self._awaited is not None

    def began(self, channel: Channel) -> None:
        """Use ``channel``, which has just been opened. Deliveries may have arrived while it was being opened."""
        self._channel = channel
        self.arrived()

    def ended(self) -> None:
        """End the wait, because the channel has ended."""
        self._channel = self._awaited = None

    def arrived(self) -> None:
        """Start to wait if redelivered messages have arrived that are not in order yet."""
        channel = self._channel
        if channel is not None and not self._state.order.is_ordered and channel is not self._awaited:
            self._awaited = channel
            self._context.background.spawn(self._wait(channel), name=f"order {self._queue}")

    async def _wait(self, channel: Channel) -> None:
        pause = ORDER_LOOK_SECONDS
        try:
            while not self._state.order.is_ordered and self._awaited is channel:
                backlog = await channel.backlog()
                if self._awaited is not channel:
                    return
                effects = self._state.order_redelivered(backlog)
                if effects is not None:
                    self._carry_out(effects)
                    return
                self._prefetch.widen()
                await asyncio.sleep(pause)
                pause = min(2 * pause, ORDER_LOOK_SECONDS_MAX)
        except PopgateError as error:  # the channel is lost in this case; the next one delivers all messages again
            _log.info("redelivered messages could not be ordered", extra={"error": error.detail})
        finally:
            if self._awaited is channel:
                self._awaited = None
