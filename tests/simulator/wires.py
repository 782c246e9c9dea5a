"""The network between processes: delays, and connections that keep their messages in order and may lose them.

This module owns when a message arrives. If its target process is paused, it waits there: it arrives in the context of
that process (``loop``). Until then it belongs to no process.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context

NOBODYS = Context()
"""The context that belongs to no process: for the servers, and for messages on their way."""
FAST_SECONDS, SLOW_SECONDS = (0.0002, 0.002), (0.01, 0.06)
SLOW_SHARE = 0.03
"""Share of messages that are slow even in good conditions."""


class Weather:
    """The latency of everything. ``factor`` above 1: the network is slow."""

    def __init__(self, chance: random.Random) -> None:
        self._draw = chance.random
        self.factor = 1.0

    def seconds(self) -> float:
        """Return the delay of the next message."""
        draw = self._draw()
        least, most = SLOW_SECONDS if draw < SLOW_SHARE else FAST_SECONDS
        return (least + (most - least) * (draw / SLOW_SHARE if draw < SLOW_SHARE else draw)) * self.factor


class Pipe:
    """One direction of a connection: everything arrives in order, until it is cut."""

    def __init__(self, weather: Weather, context: Context = NOBODYS) -> None:
        self._loop = asyncio.get_running_loop()
        self._weather = weather
        self._context = context
        self._under_way: deque[list[Callable[[], object]]] = deque()
        """Messages sent at one moment travel and arrive together."""
        self._sent_at = -1.0
        self._latest = 0.0
        self._is_cut = False

    def send(self, arrive: Callable[[], object]) -> None:
        """Call ``arrive`` at the other end, later."""
        if self._is_cut:
            return
        now = self._loop.time()
        if now == self._sent_at and self._under_way:
            self._under_way[-1].append(arrive)
            return
        self._sent_at = now
        self._latest = max(self._latest, now + self._weather.seconds())
        self._under_way.append([arrive])
        self._loop.call_at(self._latest, self._arrived, context=self._context)

    def cut(self, *, loses: int | None = None, then: Callable[[], object] | None = None) -> None:
        """Stop sending. The messages under way are lost: all of them, or the ``loses`` latest. The other end learns
        of the cut (``then``) after the messages that arrive.
        """
        self._is_cut = True
        for _ in range(len(self) if loses is None else min(loses, len(self))):
            self._under_way[-1].pop()
            if not self._under_way[-1]:
                self._under_way.pop()
        if then is not None and self._under_way:
            self._under_way.append([then])
            self._loop.call_at(self._latest, self._arrived, context=self._context)
        elif then is not None:
            then()

    def __len__(self) -> int:
        return sum(map(len, self._under_way))

    def _arrived(self) -> None:
        if self._under_way:
            for arrive in self._under_way.popleft():
                arrive()
