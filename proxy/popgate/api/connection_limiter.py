"""Limits what the clients of one process may use: connections, time, and memory for bodies in transfer.

Theory of operation. A connection is in at most one of these lists. Expired entries are at the front of a list, so they
are found without a search. Only the bodies, which are few, are checked one by one.

    silent --a part--> heads --a whole head--> (is served) --answered--> idle --a part of a head--> heads
      | idle_seconds    | head_seconds            |                       | idle_seconds
      v                 v                         |                       v
    closed             408                        +--large, or late--> bodies --too slow--> 408
                                                                           |
                                              idle <--rest of the body-- farewells --FAREWELL_SECONDS--> closed

A connection enters ``farewells`` when its request is answered or refused before the whole body has arrived, for example
because the credential is wrong. The rest of the body is discarded. If it arrives soon, the connection stays usable.
Otherwise the connection ends, because an unwanted body may not hold a connection. A connection that is ending
stays in ``farewells`` until it has ended.

A TLS handshake in progress counts as a partial head. When it is complete, the connection is silent.

A connection whose client does not read its answer is also in ``unread``. The connection stays in this list until the
answer is written, or until the connection is aborted because the client makes no progress. A request whose head and
body arrive in one read costs one entry in ``idle``, and no timer.

If there are more connections than allowed, one connection that waits for its client is closed to make room. The first
connection that exists in the following order is closed: (1) the oldest in ``farewells``, even if it is new, (2) the
connection that has waited longest with a partial head or without any request, (3) the connection that has been idle
longest, (4) a connection whose body is too slow, even within its grace period, (5) a connection whose client makes no
progress in reading its answer, (6) the oldest connection of the second kind, even if it is new, (7) of the connections
whose clients have not proved who they are, the one that has been in ``unread`` longest: such clients could keep out all
others by reading slowly. New connections are not considered in (2) and (3). If all connections are being served, or
were served less than ``NEW_SECONDS`` ago, the new connection is answered with 503. If ``room`` becomes 0, no further
connection is accepted until another one has ended.

A body stays in ``bodies`` until its request is answered, and counts as memory. So does what a client sends behind a
request in progress. Small ones that arrive in one read are not counted. If they take too much memory, one connection
of the principal that holds most of it is chosen, by the product of memory and age: a request whose body is incomplete
is refused with 503, and a request that waits is ended with its connection. Requests that are being carried out go on,
because they are answered soon. All clients that have not proved who they are count as one principal.

If answers that clients don't read take as much memory, connections of the principal that holds most of it are ended:
those that have made no progress for long, and hold much. Clients that read at a good rate are spared.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol

from popgate.api.problems import Overloaded, RequestTimeout
from popgate.api.unread_answers import AnsweringConnection, UnreadAnswers
from popgate.domain.errors import PopgateError

_log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
"""Seconds after which an idle connection is closed. This is longer than the 60 s after which common proxies and clients
stop reusing an idle connection."""
SWEEP_SECONDS = 0.5
"""Seconds between two checks of the time limits. A time limit is enforced at most this many seconds late."""
REFUSED_MAX = 64
"""Maximum number of open connections beyond ``connections_max``, which are accepted only to be refused with 503. At
most an eighth of ``connections_max``, but at least one."""
FAREWELL_SECONDS = 3.0
"""Seconds for which the rest of a body may arrive after the answer. Then the connection ends."""
NEW_SECONDS = 0.5
"""Seconds for which a waiting connection counts as new. Most clients send their next request sooner."""
WARN_SECONDS = 60.0
"""Minimum number of seconds between two warnings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits on the resources of one process that clients may use."""

    connections_max: int = 20_000
    connection_idle_seconds: float = KEEP_ALIVE_SECONDS
    """Maximum seconds that an open connection waits for its first or next request, and maximum seconds in which a
    client reads no byte of an answer."""
    head_bytes_max: int = 32 << 10
    head_fields_max: int = 100
    path_bytes_max: int = 8 << 10
    """Maximum length of a path, including the query."""
    head_seconds: float = 10.0
    """Maximum seconds from the first byte of a request to the end of its head."""
    body_bytes_per_second_min: int = 1 << 10
    """Minimum average rate of a body, checked after its first ``head_seconds``."""
    bodies_bytes_max: int = 256 << 20
    """Maximum total size of all large requests that are not answered, and of all answers that clients don't read."""


class LimitedConnection(AnsweringConnection, Protocol):
    """The methods of a connection that the limiter calls."""

    body: "Body | None"

    @property
    def reads(self) -> bool:
        """Whether the connection reads from its client. It does not read while the application is busy with earlier
        data."""
        ...

    @property
    def waits(self) -> bool:
        """Whether the request in progress waits, so that nothing is lost if it ends."""
        ...

    def refuse(self, error: PopgateError) -> None:
        """Answer with ``error``, and close the connection."""
        ...

    def retire(self) -> bool:
        """Close the connection, which is idle or in its farewell. Return False if it must stay open because its client
        is still reading an answer. Without effect if the connection is already ending."""
        ...


class Body:
    """The body of a request that is large, or arrives in more than one read.

    ``received`` counts all of its bytes that have arrived. ``held`` counts the bytes in memory for all requests of the
    connection. ``excused_seconds`` is the time in which popgate did not read, so that the client could not send.
    """

    __slots__ = ("began", "excused_seconds", "held", "is_complete", "received")

    def __init__(self, now: float, *, is_complete: bool, held: int = 0) -> None:
        self.began = now
        self.is_complete = is_complete
        self.held = held
        self.excused_seconds = 0.0
        self.received = 0


class ConnectionLimiter:
    """Tracks the connections of the clients of one process, or of its peers, and enforces ``limits``. ``count`` is
    called with the status of each refusal."""

    def __init__(self, limits: HttpLimits, count: Callable[[int], None] = lambda _: None) -> None:
        self.limits = limits
        self.on_left: Callable[[], None] = lambda: None
        """Called when a connection has ended."""
        self.count_refused = count
        self._loop = asyncio.get_running_loop()
        self._present = 0
        self._full_at = limits.connections_max + max(1, min(REFUSED_MAX, limits.connections_max // 8))
        self._silent: OrderedDict[LimitedConnection, float] = OrderedDict()
        self._heads: OrderedDict[LimitedConnection, float] = OrderedDict()
        self._idle: OrderedDict[LimitedConnection, float] = OrderedDict()
        self._unread: UnreadAnswers[LimitedConnection] = UnreadAnswers(self.limits.bodies_bytes_max, self._warn)
        self._farewells: OrderedDict[LimitedConnection, float] = OrderedDict()
        self._bodies: dict[LimitedConnection, Body] = {}
        self._bodies_bytes = 0
        self._is_sweeping = False
        self._warn_at = 0.0

    @property
    def present(self) -> int:
        """Number of open connections."""
        return self._present

    @property
    def room(self) -> int:
        """Number of further connections that may be accepted."""
        return self._full_at - self._present

    # -- called by connections --------------------------------------------------------------------------------------

    def arrived(self, connection: LimitedConnection) -> None:
        self._present += 1
        if not self._is_sweeping:
            self._is_sweeping = True
            self._loop.call_later(SWEEP_SECONDS, self._sweep)
        if self._present > self.limits.connections_max and not self._make_room():
            connection.refuse(Overloaded("all connections that this proxy may have are busy; try again later"))
            return
        self._silent[connection] = self._loop.time()

    def continues(self, handshake: LimitedConnection, connection: LimitedConnection) -> None:
        """Record that the TLS handshake of ``connection`` is complete. It was tracked as ``handshake``."""
        self.is_served(handshake)
        self._silent[connection] = self._loop.time()

    def left(self, connection: LimitedConnection) -> None:
        self._present -= 1
        self.is_served(connection)
        self._unread.forget(connection)
        self._farewells.pop(connection, None)
        self._forget_body(connection)
        self.on_left()

    def began_head(self, connection: LimitedConnection) -> None:
        """Record that a part of a head has arrived, and no earlier request is in progress."""
        if connection not in self._heads:
            self.is_served(connection)
            self._heads[connection] = self._loop.time()

    def is_served(self, connection: LimitedConnection) -> None:
        """Record that the head is complete."""
        if self._idle.pop(connection, None) is None and self._silent.pop(connection, None) is None:
            self._heads.pop(connection, None)

    def is_idle(self, connection: LimitedConnection) -> None:
        """Record that the answer has been sent."""
        self._idle[connection] = self._loop.time()

    def must_wait(self, connection: LimitedConnection) -> None:
        """Record that the kernel does not accept all written bytes, because the client does not read them."""
        self._unread.note(connection, self._loop.time())

    def was_read(self, connection: LimitedConnection) -> None:
        """Record that all written bytes have been passed to the kernel."""
        self._unread.forget(connection)

    def body_grew(self, connection: LimitedConnection, received: int, held: int) -> None:
        """Record that bytes of an incomplete body have arrived. Its request has not been answered. ``held`` of them are
        in memory: the others only separated the parts of the body."""
        body = connection.body
        if body is None or body.is_complete:
            held_before = 0 if body is None else body.held
            body = Body(self._loop.time(), is_complete=False, held=held_before)
            connection.body = self._bodies[connection] = body
        body.received += received
        self.holds(connection, held)

    def body_ended(self, connection: LimitedConnection) -> None:
        """Record that the body is complete. Its bytes count as memory until ``body_answered``, because processing the
        body takes as much memory."""
        if connection.body is not None:
            connection.body.is_complete = True

    def holds(self, connection: LimitedConnection, size: int) -> None:
        """Record that so many more bytes of requests are in memory until ``body_answered``."""
        if connection.body is None:
            connection.body = self._bodies[connection] = Body(self._loop.time(), is_complete=True)
        connection.body.held += size
        self._bodies_bytes += size
        while self._bodies_bytes > self.limits.bodies_bytes_max and self._shed():
            pass

    def body_answered(self, connection: LimitedConnection) -> None:
        """Record that a request was answered, so its body is no longer in memory. An incomplete body is that of a later
        request, or is reported with ``says_farewell``."""
        body = connection.body
        if body is not None:
            self._bodies_bytes -= body.held
            body.held = 0
            if body.is_complete:
                connection.body = None
                del self._bodies[connection]

    def says_farewell(self, connection: LimitedConnection) -> None:
        """Record that the request was answered or refused, but its body is incomplete. Idempotent."""
        self._forget_body(connection)
        self._farewells.setdefault(connection, self._loop.time())

    def discarded_rest(self, connection: LimitedConnection) -> None:
        """Record that the rest of the body has arrived, so the connection can be used for another request."""
        if self._farewells.pop(connection, None) is not None:
            self.is_idle(connection)

    # -- room -------------------------------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        """Close one connection to make room for a new one. Return False if every connection must stay open."""
        self._warn("there are as many connections as allowed: those that wait for their clients are closed")
        before = self._loop.time() - NEW_SECONDS
        unproven = [next(iter(waiting.items())) for waiting in (self._heads, self._silent) if waiting]
        unproven.sort(key=lambda one: one[1])
        read = ((one, since) for one, since in self._idle.items() if one not in self._unread)
        waiting = [*unproven, *islice(read, 1)]
        connection = next(
            chain(
                self._farewells,
                (one for one, since in waiting if since < before),
                (one for one, body in self._bodies.items() if not body.is_complete and self._is_slow(body)),
                self._unread.stuck_since(before - FAREWELL_SECONDS),
                (one for one, _ in unproven),
                self._unread.unproven(),
            ),
            None,
        )
        if connection is None:
            return False
        self.is_served(connection)
        self._farewells.pop(connection, None)
        self._unread.forget(connection)
        connection.abort()
        return True

    def _shed(self) -> bool:
        """End the request that holds most memory for longest, among those of the principal that holds most. Return
        False if all requests are being carried out."""
        now = self._loop.time()
        held: dict[object, int] = {}
        for connection, body in self._bodies.items():
            held[connection.user] = held.get(connection.user, 0) + body.held
        ends = [one for one, body in self._bodies.items() if body.held and (not body.is_complete or one.waits)]
        if not ends:
            return False
        worst = max(ends, key=lambda one: (held[one.user], self._bodies[one].held * (now - self._bodies[one].began)))
        is_complete = self._bodies[worst].is_complete
        self._warn("unfinished requests take as much memory as allowed: the slowest are refused")
        self._forget_body(worst)
        if is_complete:
            worst.abort()
        else:
            worst.refuse(Overloaded("too many large requests are under way; send less at a time, or try again later"))
        return True

    def _forget_body(self, connection: LimitedConnection) -> None:
        self.body_ended(connection)
        self.body_answered(connection)

    # -- time -------------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        if not self._present:
            self._is_sweeping = False
            return
        self._loop.call_later(SWEEP_SECONDS, self._sweep)
        now, limits = self._loop.time(), self.limits
        for connection in _due(self._heads, now - limits.head_seconds):
            connection.refuse(
                RequestTimeout(f"the head of the request did not come within {limits.head_seconds:g} seconds")
            )
        for waiting in (self._silent, self._idle):
            for connection in _due(waiting, now - limits.connection_idle_seconds):
                if not connection.retire():
                    waiting[connection] = now
        for connection in _due(self._farewells, now - FAREWELL_SECONDS):
            connection.retire()
            self._farewells[connection] = now
        self._unread.check(now)
        for connection in self._unread.stuck_since(now - limits.connection_idle_seconds):
            self._unread.forget(connection)
            connection.abort()
        for connection, body in [*self._bodies.items()]:
            if body.is_complete:
                continue
            if not connection.reads:
                body.excused_seconds += SWEEP_SECONDS
            elif self._is_slow(body, grace_seconds=limits.head_seconds):
                self._forget_body(connection)
                connection.refuse(
                    RequestTimeout(f"the body came at less than {limits.body_bytes_per_second_min} bytes a second")
                )

    def _is_slow(self, body: Body, grace_seconds: float = 0.0) -> bool:
        seconds = self._loop.time() - body.began - body.excused_seconds - grace_seconds
        return seconds * self.limits.body_bytes_per_second_min > body.received

    def _warn(self, what: str) -> None:
        now = self._loop.time()
        if now >= self._warn_at:
            self._warn_at = now + WARN_SECONDS
            _log.warning(what)


def _due(waiting: OrderedDict[LimitedConnection, float], before: float) -> list[LimitedConnection]:
    """Remove and return all entries that have waited since ``before`` or an earlier time."""
    due: list[LimitedConnection] = []
    while waiting:
        connection, since = next(iter(waiting.items()))
        if since > before:
            break
        del waiting[connection]
        due.append(connection)
    return due
