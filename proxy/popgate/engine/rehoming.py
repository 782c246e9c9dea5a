"""Re-homing: no delivery stays unsettled for so long that the broker closes its channel.

RabbitMQ ends a channel whose oldest delivery is unsettled for longer than ``consumer_timeout``, with all that is on it;
each channel knows that time. So at half of it a delivery that is still held is given back, alone, and delivered again
at once as a new one: what is known of its message stays, so a lease holds and an ordering key keeps its place. One at a
time, lest a queue without an order of its own mixes them up (design: section 5).

Only the lease of a message that can't be identified ends with that: when it comes again nothing tells that it is it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from popgate.domain.names import BrokerQueue, CopyId
from popgate.engine.held import Held, HeldState
from popgate.engine.room import Room
from popgate.ports.broker import Channel
from popgate.runtime.deadlines import NEVER

CHECKS = 20
"""How often a delivery is looked at within the time that it may be held."""
RETURN_SECONDS_MAX = 1.0
"""A queue may hand out others first: the next one does not wait longer than this for the one before."""


class _Mark(NamedTuple):
    """Deliveries up to ``tag`` came at ``at`` (monotonic seconds) or later."""

    at: float
    tag: int


class Rehoming:
    """Of one queue's channel. ``give_back`` returns one message to the broker, which delivers it again; ``begins`` is
    called before each round of them."""

    def __init__(
        self,
        room: Room,
        queue: BrokerQueue,
        held: Mapping[CopyId, Held],
        *,
        begins: Callable[[], None],
        give_back: Callable[[Held], None],
    ) -> None:
        self.timer = NEVER
        self._room = room
        self._queue = queue
        self._held = held
        self._begins = begins
        self._give_back = give_back
        self._limit = self._interval = NEVER
        self._marks: deque[_Mark] = deque()
        self._overdue_tag = 0
        self._channel: Channel | None = None
        self._arrival = asyncio.Event()
        self._working = False

    def began(self, channel: Channel) -> None:
        """``channel`` is open; its tags begin anew."""
        self._channel = channel
        timeout = channel.unsettled_seconds_max
        self._limit = NEVER if timeout is None else timeout / 2
        self._interval = self._limit / CHECKS
        if self._limit < NEVER:
            self._room.deadlines.schedule(self._room.clock.monotonic() + self._interval, self)

    def arrived(self, last_tag: int) -> None:
        """Deliveries came, up to this tag."""
        self._arrival.set()
        if self._limit == NEVER:
            return
        now = self._room.clock.monotonic()
        if self._marks and now - self._marks[-1].at < self._interval:
            self._marks[-1] = _Mark(self._marks[-1].at, last_tag)
        else:
            self._marks.append(_Mark(now, last_tag))

    def ended(self) -> None:
        """The channel has ended, and its deliveries with it."""
        self._channel = None
        self._marks.clear()
        self._overdue_tag = 0
        self._arrival.set()
        self._room.deadlines.cancel(self)

    def due(self, now: float) -> float | None:
        while self._marks and self._marks[0].at <= now - self._limit:
            self._overdue_tag = self._marks.popleft().tag
        if self._overdue_tag and not self._working and self._channel is not None:
            overdue = [held for held in self._held.values() if self._is_overdue(held)]
            if overdue:
                self._working = True
                self._begins()
                self._room.background.spawn(self._rehome(overdue, self._channel), name=f"re-home {self._queue}")
        return now + self._interval

    def _is_overdue(self, held: Held) -> bool:
        """A grant under way is left alone: it is decided soon, and looked at again."""
        return held.tag is not None and held.tag <= self._overdue_tag and not held.is_under_way

    async def _rehome(self, overdue: list[Held], channel: Channel) -> None:
        try:
            for held in overdue:
                if self._channel is not channel:
                    return
                if self._is_overdue(held):
                    self._give_back(held)
                    await self._return_of(held, channel)
        finally:
            self._working = False

    async def _return_of(self, held: Held, channel: Channel) -> None:
        try:
            async with asyncio.timeout(RETURN_SECONDS_MAX):
                while held.tag is None and held.state is not HeldState.DROPPED and self._channel is channel:
                    self._arrival.clear()
                    await self._arrival.wait()
        except TimeoutError:
            return
