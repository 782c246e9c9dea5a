"""Changes the prefetch of one queue's channel as ``flow`` decides, and lets the broker push more or less.

Owns the resizing. At most one resize is in progress. A decision that is made meanwhile is carried out after it.
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
    """Controls the present channel. ``events`` tells whether clients ask for messages."""

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
        """Note that ``channel`` is open."""
        self._channel = channel

    def ended(self) -> None:
        """Note that the channel has ended."""
        self._channel = None

    def widen(self) -> None:
        """Let the broker push more if memory allows, because pops want more messages than are ready."""
        if self._channel is not None:
            self._state.memory.widen(has_demand=self._events.has_demand())
            self.regulate()

    def pause(self) -> None:
        """Let the broker push nothing, and return the ready messages to it."""
        self._state.flow.pause()
        self.regulate()

    def spare_bodies(self, messages: Iterable[BufferedMessage]) -> None:
        """Forget the bodies of leased messages while more than half of the budget is used."""
        if self._state.flow.is_half_full:
            self._state.memory.spare(messages)
            self.regulate()

    def regulate(self) -> None:
        """Resume a paused channel if enough memory was freed, and resize the channel if ``flow`` has decided to."""
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
        except PopgateError as error:  # the channel is lost then, and the listener is notified
            _log.warning("a channel could not be resized", extra={"queue": self._queue, "error": error.detail})
            if self._channel is not channel:
                return
            flow.resize_failed()
        effects = self._state.shed(has_demand=self._events.has_demand()) if flow.is_paused else Effects()
        effects.has_news = True  # messages that the new size brought may have been taken before this
        self._carry_out(effects)
