"""Renews deliveries before they have been unsettled for so long that the broker closes their channel.

RabbitMQ closes a channel whose oldest delivery is unsettled for longer than ``consumer_timeout``. All deliveries of the
channel then become void. The channel object contains this timeout. When a delivery has been unsettled for half of the
timeout, popgate requeues it, and the broker delivers the message again at once. The state of the message does not
change: its lease continues, and it has the same place in its ordering key. Deliveries are renewed one at a time,
because the broker could deliver several requeued messages in a different order (decision 15).

Only the lease of a transient message ends: it has no stable id, so popgate can't recognize it in the new delivery.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from popgate.domain.names import BrokerQueue
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.queue.buffered import BufferedMessage, MessageState
from popgate.engine.queue.effects import Effects
from popgate.engine.queue.state import QueueState
from popgate.ports.broker import Channel
from popgate.runtime.deadlines import NEVER

CHECKS = 20
"""Number of checks of the deliveries' age within half of the broker's timeout."""
REDELIVERY_SECONDS_MAX = 1.0
"""Maximum seconds to wait for a redelivery before the next renewal. The broker may deliver other messages first."""


class _Mark(NamedTuple):
    """The last delivery ``tag`` that arrived during one interval.

    ``at`` is the start of the interval, in monotonic seconds.
    """

    at: float
    tag: int


class DeliveryRenewal:
    """Renews the deliveries of one queue. ``carry_out`` carries out the resulting effects."""

    def __init__(
        self, context: EngineContext, queue: BrokerQueue, state: QueueState, carry_out: Callable[[Effects], None]
    ) -> None:
        self.timer = NEVER
        self._context = context
        self._queue = queue
        self._state = state
        self._carry_out = carry_out
        self._limit = self._interval = NEVER
        self._marks: deque[_Mark] = deque()
        self._overdue_tag = 0
        self._channel: Channel | None = None
        self._arrival = asyncio.Event()
        self._is_working = False

    def began(self, channel: Channel) -> None:
        """Start to check the age of the deliveries of ``channel``, which has just been opened.

        Some deliveries may already have arrived.
        """
        self._channel = channel
        timeout = channel.unsettled_seconds_max
        self._limit = NEVER if timeout is None else timeout / 2
        self._interval = self._limit / CHECKS
        if self._limit < NEVER:
            self._context.deadlines.schedule(self._context.clock.monotonic() + self._interval, self)
            self.arrived()

    def arrived(self) -> None:
        """Record the arrival of deliveries."""
        self._arrival.set()
        if self._limit == NEVER:
            return
        now, last_tag = self._context.clock.monotonic(), self._state.flow.last_tag
        if self._marks and now - self._marks[-1].at < self._interval:
            self._marks[-1] = _Mark(self._marks[-1].at, last_tag)
        else:
            self._marks.append(_Mark(now, last_tag))

    def ended(self) -> None:
        """Stop checking, because the channel and all its deliveries have ended."""
        self._channel = None
        self._marks.clear()
        self._overdue_tag = 0
        self._arrival.set()
        self._context.deadlines.cancel(self)

    def due(self, now: float) -> float | None:
        while self._marks and self._marks[0].at <= now - self._limit:
            self._overdue_tag = self._marks.popleft().tag
        if self._overdue_tag and not self._is_working and self._channel is not None:
            overdue = [message for message in self._state.messages.values() if self._is_overdue(message)]
            if overdue:
                self._is_working = True
                self._state.deliveries.returns_unseen()
                self._context.background.spawn(self._renew(overdue, self._channel), name=f"renew {self._queue}")
        return now + self._interval

    def _is_overdue(self, message: BufferedMessage) -> bool:
        """Whether the delivery of ``message`` must be renewed now.

        If a request to the store about the message is in progress, a later check decides.
        """
        return message.tag is not None and message.tag <= self._overdue_tag and not message.is_undecided

    async def _renew(self, overdue: Sequence[BufferedMessage], channel: Channel) -> None:
        try:
            for message in overdue:
                if self._channel is not channel:
                    return
                if self._is_overdue(message):
                    self._carry_out(self._state.renew_delivery(message))
                    await self._redelivery_of(message, channel)
        finally:
            self._is_working = False

    async def _redelivery_of(self, message: BufferedMessage, channel: Channel) -> None:
        try:
            async with asyncio.timeout(REDELIVERY_SECONDS_MAX):
                while message.tag is None and message.state is not MessageState.DROPPED and self._channel is channel:
                    self._arrival.clear()
                    await self._arrival.wait()
        except TimeoutError:
            return
