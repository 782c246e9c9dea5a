"""Changes the prefetch of one queue's channel as ``flow`` decides.

At most one resize of the channel is in progress. If ``flow`` decides on another prefetch during a resize, the channel
is resized again afterwards.
"""

import logging
from collections.abc import Callable, Iterable

from popgate.domain.errors import PopgateError
from popgate.domain.names import BrokerQueue
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.queue.buffered import BufferedMessage
from popgate.engine.queue.effects import Effects, QueueEvents
from popgate.engine.queue.state import QueueState
from popgate.ports.broker import Channel

_log = logging.getLogger(__name__)


class PrefetchControl:
    """Controls the prefetch of the present channel. ``events.has_demand`` says whether clients want messages."""

    def __init__(
        self,
        context: EngineContext,
        queue: BrokerQueue,
        state: QueueState,
        events: QueueEvents,
        carry_out: Callable[[Effects], None],
    ) -> None:
        self._context = context
        self._queue = queue
        self._state = state
        self._events = events
        self._carry_out = carry_out
        self._channel: Channel | None = None

    def began(self, channel: Channel) -> None:
        """Control the prefetch of ``channel``, which has just been opened."""
        self._channel = channel

    def ended(self) -> None:
        """Stop controlling the channel, because it has ended."""
        self._channel = None

    def widen(self) -> None:
        """Raise the prefetch or end a pause, if memory allows, because pops want more messages than are ready."""
        if self._channel is not None:
            self._state.memory.widen(has_demand=self._events.has_demand())
            self.regulate()

    def pause(self) -> None:
        """Set the prefetch to 0 so that the broker delivers nothing, then return the ready messages to the broker."""
        self._state.flow.pause()
        self.regulate()

    def spare_bodies(self, messages: Iterable[BufferedMessage]) -> None:
        """Drop the bodies of leased messages from memory until at most half of the queue's memory share is used."""
        if self._state.flow.is_half_full:
            self._state.memory.spare(messages)
            self.regulate()

    def regulate(self) -> None:
        """Resume a paused channel if enough memory was freed. Resize the channel if ``flow`` changed the prefetch."""
        flow = self._state.flow
        if flow.may_resume:
            self._state.memory.resume(has_demand=self._events.has_demand())
        if flow.is_resize_due and self._channel is not None:
            prefetch = flow.next_resize()
            self._context.background.spawn(self._resize(self._channel, prefetch), name=f"resize {self._queue}")

    async def _resize(self, channel: Channel, prefetch: int | None) -> None:
        flow = self._state.flow
        try:
            while prefetch is not None:
                await channel.resize(prefetch)
                if self._channel is not channel:
                    return
                prefetch = flow.next_resize()
        except PopgateError as error:  # the channel is lost in this case, and its listener is notified
            _log.warning("a channel could not be resized", extra={"queue": self._queue, "error": error.detail})
            if self._channel is not channel:
                return
            flow.resize_failed()
        effects = self._state.shed(has_demand=self._events.has_demand()) if flow.is_paused else Effects()
        effects.has_news = True  # messages may have arrived because of the new prefetch before the resize returned
        self._carry_out(effects)
