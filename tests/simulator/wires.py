"""What lies between processes: delays, and connections on which messages keep their order and may be lost.

Owns when something arrives. What arrives in a process waits there while it is paused: the context in which it arrives
is the process's (``loop``). In between nothing belongs to anybody.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context

NOBODYS = Context()
"""Of what belongs to no process: the servers, and what is on its way."""
FAST_SECONDS, SLOW_SECONDS = (0.0002, 0.002), (0.01, 0.06)
SLOW_SHARE = 0.03
"""So many messages take long, at the best of times."""


class Weather:
    """How long everything takes. ``factor`` above 1: the network is slow."""

    def __init__(self, chance: random.Random) -> None:
        self._draw = chance.random
        self.factor = 1.0

    def seconds(self) -> float:
        """The delay of the next message."""
        draw = self._draw()
        least, most = SLOW_SECONDS if draw < SLOW_SHARE else FAST_SECONDS
        return (least + (most - least) * (draw / SLOW_SHARE if draw < SLOW_SHARE else draw)) * self.factor


class Pipe:
    """One direction of a connection: everything arrives in its order, until it is cut."""

    def __init__(self, weather: Weather, context: Context = NOBODYS) -> None:
        self._loop = asyncio.get_running_loop()
        self._weather = weather
        self._context = context
        self._under_way: deque[list[Callable[[], object]]] = deque()
        """What was sent in one moment travels, and arrives, together."""
        self._sent_at = -1.0
        self._latest = 0.0
        self._is_cut = False

    def send(self, arrive: Callable[[], object]) -> None:
        """``arrive`` is called at the other end, later."""
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
        """Nothing more is sent. What is under way is lost: all of it, or the ``loses`` latest messages. The other end
        learns of it (``then``) behind what arrives."""
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
