"""How much the clients of one process may take of it: connections, time, and memory for bodies that are under way.

Theory of operation. A connection stands in at most one of these lists. What is too late is found at their fronts, so
that looking for it costs nothing; only the bodies, which are few, are looked at one by one.

    silent --a part--> heads --a whole head--> (is served) --answered--> idle --a part of a head--> heads
       | idle_seconds    | head_seconds            |                       | idle_seconds
       v                 v                         |                       v
     closed             408                        +--in several reads--> bodies --too slow--> 408

Beside them, a connection whose client does not take its answer is ``unread``, until that is written or, without any
progress, aborted. A head that comes in one read, with its body, costs one entry in ``idle``, and no timer.

Where there are more connections than allowed, one makes room that waits for its client: that which has begun a request,
or said nothing at all, for longest; else that which is idle for longest; else a body that is too slow, which has its
grace only as long as no other needs its place; else the oldest that never had an answer. Where all are being served, or
were a moment ago, the newcomer is answered 503; and where many more come, there is no ``room`` for any.

Where bodies take too much memory, the one gives way (503) that has held most of it for longest: what sends at a good
rate is done soon.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from popgate.api.problems import Overloaded, RequestTimeout
from popgate.domain.errors import PopgateError

_log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
"""Longer than the 60 s for which common proxies and clients reuse an idle connection."""
SWEEP_SECONDS = 0.5
"""How late a time limit may be kept."""
REFUSED_MAX = 64
"""Connections beyond the limit that are told so at one time; an eighth of the limit, where that is less."""
NEW_SECONDS = 0.5
"""How long a connection that waits for its client is new: most clients send their next request sooner."""
WARN_SECONDS = 60.0
"""At most one warning in that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What clients may take of one process."""

    connections_max: int = 20_000
    connection_idle_seconds: float = KEEP_ALIVE_SECONDS
    """Without a request, or without taking anything of an answer."""
    head_bytes_max: int = 32 << 10
    head_fields_max: int = 100
    path_bytes_max: int = 8 << 10
    """With the query."""
    head_seconds: float = 10.0
    """From the first byte of a request to the end of its head."""
    body_bytes_per_second_min: int = 1 << 10
    """On average, after its first ``head_seconds``."""
    bodies_bytes_max: int = 256 << 20
    """Of all bodies that came in several reads and are not answered."""


class Guest(Protocol):
    """A connection, as the crowd knows it."""

    body: "Body | None"

    @property
    def reads(self) -> bool:
        """Whether it takes what its client sends; it does not while the application has enough to do."""
        ...

    def refuse(self, error: PopgateError) -> None:
        """Answer with ``error``, and end."""
        ...

    def retire(self) -> bool:
        """End because it is idle; False where it still has to wait for its client."""
        ...

    def is_stuck(self) -> bool:
        """Whether its client has taken nothing of its answer since the last look."""
        ...

    def abort(self) -> None:
        """End, and throw away what was not sent."""
        ...


class Body:
    """A body that took more than one read. ``held``: its bytes in memory, as far as they are counted."""

    __slots__ = ("began", "held", "received")

    def __init__(self, now: float) -> None:
        self.began = now
        self.held = self.received = 0


class Crowd:
    """The connections of one process, or of its peers. ``count`` is told the status of each refusal."""

    def __init__(self, limits: HttpLimits, count: Callable[[int], None] = lambda _: None) -> None:
        self.limits = limits
        self._on_room: list[Callable[[], None]] = []
        self.count_refused = count
        self._loop = asyncio.get_running_loop()
        self._present = 0
        self._full_at = limits.connections_max + min(REFUSED_MAX, limits.connections_max // 8)
        self._silent: OrderedDict[Guest, float] = OrderedDict()
        self._heads: OrderedDict[Guest, float] = OrderedDict()
        self._idle: OrderedDict[Guest, float] = OrderedDict()
        self._unread: OrderedDict[Guest, float] = OrderedDict()
        self._bodies: dict[Guest, Body] = {}
        self._bodies_bytes = 0
        self._is_sweeping = False
        self._warn_at = 0.0

    @property
    def present(self) -> int:
        """How many connections there are."""
        return self._present

    @property
    def room(self) -> int:
        """How many more should be accepted."""
        return self._full_at - self._present

    def await_room(self, call: Callable[[], None]) -> None:
        """``call``, once, when there is some again."""
        self._on_room.append(call)

    def tell_room(self) -> None:
        if self._on_room and self.room > 0:
            waiting, self._on_room = self._on_room, []
            for call in waiting:
                call()

    # -- what connections say ---------------------------------------------------------------------------------------

    def arrived(self, guest: Guest) -> None:
        self._present += 1
        if not self._is_sweeping:
            self._is_sweeping = True
            self._loop.call_later(SWEEP_SECONDS, self._sweep)
        if self._present > self.limits.connections_max and not self._make_room():
            guest.refuse(Overloaded("all connections that this proxy may have are busy; try again later"))
            return
        self._silent[guest] = self._loop.time()

    def left(self, guest: Guest) -> None:
        self._present -= 1
        self.is_served(guest)
        self._unread.pop(guest, None)
        self._forget_body(guest)
        self.tell_room()

    def began_head(self, guest: Guest) -> None:
        """A part of a head has come, and nothing of an earlier request is left to do."""
        if guest not in self._heads:
            self.is_served(guest)
            self._heads[guest] = self._loop.time()

    def is_served(self, guest: Guest) -> None:
        """Its head is whole."""
        if self._idle.pop(guest, None) is None and self._silent.pop(guest, None) is None:
            self._heads.pop(guest, None)

    def is_idle(self, guest: Guest) -> None:
        """It has its answer."""
        self._idle[guest] = self._loop.time()

    def must_wait(self, guest: Guest) -> None:
        """Its client does not take what was written."""
        self._unread[guest] = self._loop.time()

    def was_read(self, guest: Guest) -> None:
        """All that was written is on its way."""
        self._unread.pop(guest, None)

    def body_grew(self, guest: Guest, size: int, *, is_kept: bool) -> None:
        """``size`` bytes have come of a body that is not whole; unless ``is_kept``, they were thrown away."""
        body = guest.body
        if body is None:
            guest.body = body = self._bodies[guest] = Body(self._loop.time())
        body.received += size
        if is_kept:
            body.held += size
            self._bodies_bytes += size
            while self._bodies_bytes > self.limits.bodies_bytes_max and self._shed():
                pass

    def body_ended(self, guest: Guest) -> None:
        """It is whole, and still counts: what is done with it takes as much memory."""
        self._bodies.pop(guest, None)

    def body_answered(self, guest: Guest) -> None:
        """Nothing of it is in memory any more; what may still come of it is watched."""
        if guest.body is not None:
            self._bodies_bytes -= guest.body.held
            guest.body.held = 0
            if guest not in self._bodies:
                guest.body = None

    # -- room -------------------------------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        """Whether one could go."""
        self._warn("there are as many connections as allowed: those that wait for their clients are closed")
        before = self._loop.time() - NEW_SECONDS
        unproven = [next(iter(waiting.items())) for waiting in (self._heads, self._silent) if waiting]
        unproven.sort(key=lambda one: one[1])
        waiting = [*unproven, *([next(iter(self._idle.items()))] if self._idle else [])]
        guest = next(
            chain(
                (one for one, since in waiting if since < before),
                (one for one, body in self._bodies.items() if self._is_slow(body)),
                (one for one, _ in unproven),
            ),
            None,
        )
        if guest is None:
            return False
        self.is_served(guest)
        guest.abort()
        return True

    def _shed(self) -> bool:
        """Refuse the unfinished body that has held most for longest; whether there was one."""
        now = self._loop.time()
        held = [(body.held * (now - body.began), guest) for guest, body in self._bodies.items() if body.held]
        if not held:
            return False
        _, guest = max(held, key=lambda one: one[0])
        self._warn("unfinished requests take as much memory as allowed: the slowest are refused")
        self._forget_body(guest)
        guest.refuse(Overloaded("too many large requests are under way; send less at a time, or try again later"))
        return True

    def _forget_body(self, guest: Guest) -> None:
        self._bodies.pop(guest, None)
        self.body_answered(guest)

    # -- time -------------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        if not self._present:
            self._is_sweeping = False
            return
        self._loop.call_later(SWEEP_SECONDS, self._sweep)
        now, limits = self._loop.time(), self.limits
        for guest in _due(self._heads, now - limits.head_seconds):
            guest.refuse(RequestTimeout(f"the head of the request did not come within {limits.head_seconds:g} seconds"))
        for waiting in (self._silent, self._idle):
            for guest in _due(waiting, now - limits.connection_idle_seconds):
                if not guest.retire():
                    waiting[guest] = now
        for guest in _due(self._unread, now - limits.connection_idle_seconds):
            if guest.is_stuck():
                guest.abort()
            else:
                self._unread[guest] = now
        for guest, body in [*self._bodies.items()]:
            if not guest.reads:
                body.began += SWEEP_SECONDS
            elif self._is_slow(body, grace_seconds=limits.head_seconds):
                self._forget_body(guest)
                guest.refuse(
                    RequestTimeout(f"the body came at less than {limits.body_bytes_per_second_min} bytes a second")
                )

    def _is_slow(self, body: Body, grace_seconds: float = 0.0) -> bool:
        seconds = self._loop.time() - body.began - grace_seconds
        return seconds * self.limits.body_bytes_per_second_min > body.received

    def _warn(self, what: str) -> None:
        now = self._loop.time()
        if now >= self._warn_at:
            self._warn_at = now + WARN_SECONDS
            _log.warning(what)


def _due(waiting: OrderedDict[Guest, float], before: float) -> list[Guest]:
    """Take out all that have waited since then, or longer."""
    due: list[Guest] = []
    while waiting:
        guest, since = next(iter(waiting.items()))
        if since > before:
            break
        del waiting[guest]
        due.append(guest)
    return due
