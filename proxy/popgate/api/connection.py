"""Whether a client got its answer: leases that nobody received are given back at once.

Theory of operation. A connection that ends while a pop is parked ends the pop: its ``Presence`` leaves. A pop's answer
that was handed to the kernel is *unproved* until a later request on the connection proves that it was read. If the peer
ends the connection before that (FIN, RST), the kernel knows how many of the bytes the peer has not acknowledged
(TCP_INFO): an answer that ends among those, or never reached the kernel whole, is undelivered. Its leases are undone.

    request --> PARKED --> WRITING --> UNPROVED --> (the next request, or a FIN with all bytes acknowledged: delivered)
                  | FIN/RST  | FIN/RST    | FIN/RST with its last byte unacknowledged, or a prompt RST
                  v          v            v
                 gone       undone       undone

What the peer's kernel has acknowledged its program need not have read. A program that ends, or closes its socket, over
unread bytes makes its kernel send RST instead of FIN; so an RST within ``UNREAD_SECONDS`` of an acknowledged answer
counts as unread. A later one does not: idle connections are reset by machines in between, while their clients work.
A half-open connection proves nothing: its leases run to their deadlines. Where the server itself ends the connection,
nothing is undone. Off Linux, and under TLS, only what is still in this process counts as unacknowledged.
"""

import time
from collections import deque
from collections.abc import Callable

from popgate.api.watched_transport import WatchedTransport
from popgate.engine.lease.pop_request import Presence

EXTENSION = "popgate.connection"
"""The key in ``scope["extensions"]`` under which a handler finds its ``Connection``."""
UNPROVED_MAX = 64
"""Answers of one pipelining client that wait for their proof; beyond it the oldest count as delivered."""

UNREAD_SECONDS = 1.0
"""How soon after an answer an RST means that it was not read."""

_NOT_WRITTEN = 1 << 62


class _Answer:
    """A pop's answer: where its last byte stands in the connection's bytes, and how its leases are undone."""

    __slots__ = ("end", "leases_end_at", "undo", "written_at")

    def __init__(self, undo: Callable[[], None], leases_end_at: float) -> None:
        self.undo = undo
        self.leases_end_at = leases_end_at
        self.end = _NOT_WRITTEN
        self.written_at = 0.0


class Connection:
    """One client's connection, as a handler sees it. ``presence`` is that of the pop which is served now.

    ``on_shutdown`` is called when the server begins to leave; only requests that would hold it up have need of it.
    """

    __slots__ = ("_transport", "_unproved", "gone", "on_shutdown", "presence")

    def __init__(self, transport: WatchedTransport) -> None:
        self.gone = False
        self.presence: Presence | None = None
        self.on_shutdown: Callable[[], None] | None = None
        self._transport = transport
        self._unproved: deque[_Answer] = deque()

    # -- what a handler says --------------------------------------------------------------------------------------

    def answering(self, undo: Callable[[], None], leases_end_at: float) -> None:
        """A pop's answer is about to be written; ``undo`` is called, once, should it not be delivered.

        ``leases_end_at`` (Unix seconds) is when nothing will be left to undo.
        """
        if self.gone:
            undo()
            return
        if len(self._unproved) >= UNPROVED_MAX:
            self._unproved.popleft()
        self._unproved.append(_Answer(undo, leases_end_at))
        self._transport.linger = True

    def cork(self) -> None:
        """The head of an answer comes next, and its body right after."""
        self._transport.corked = True

    def answered(self) -> None:
        """The answer has been written, whatever it was."""
        self._transport.uncork()
        if self._unproved and self._unproved[-1].end == _NOT_WRITTEN and not self._transport.broken():
            newest = self._unproved[-1]
            newest.end = self._transport.written
            newest.written_at = time.monotonic()

    # -- what the protocol says -----------------------------------------------------------------------------------

    def request_began(self) -> None:
        """The client sent another request: it has read what was answered before, unless it sends ahead."""
        if self._unproved and not self._transport.unacknowledged():
            self._unproved.clear()
            self._transport.linger = False

    def ended(self, *, by_peer: bool, abruptly: bool = False, is_cut: bool = False) -> None:
        """The connection has ended. Undoes what was not delivered, where the peer ended it. Idempotent.

        ``abruptly``: by RST. Only the newest answer is then judged by it: earlier ones were read, or nothing is known.
        ``is_cut``: the server ends it without sending the rest, which is undone.
        """
        if self.gone:
            return
        self.gone = True
        if self.presence is not None:
            self.presence.leave()
        if (by_peer or is_cut) and self._unproved:
            transport = self._transport
            acknowledged = transport.acknowledged() if by_peer else transport.written - transport.unsent()
            newest = self._unproved[-1]
            unread = abruptly and time.monotonic() - newest.written_at < UNREAD_SECONDS
            for answer in self._unproved:
                if answer.end > acknowledged or (unread and answer is newest):
                    answer.undo()
        self._unproved.clear()

    def has_unread_leases(self) -> bool:
        """Whether an answer whose leases still live has not reached the peer."""
        now = time.time()  # the leases' ends are Unix seconds
        return any(answer.leases_end_at > now for answer in self._unproved) and self._transport.unacknowledged() > 0
