"""Finds out whether a client got its answer: leases that were not delivered are returned at once.

Theory of operation. A connection that ends while a pop is parked ends the pop: its ``Presence`` leaves. A pop's answer
that was handed to the kernel is *unproved* until a later request on the connection proves that it was read. If the peer
ends the connection before that (FIN, RST), the kernel knows how many of the bytes the peer has not acknowledged
(TCP_INFO). An answer whose last byte is among these, or was never handed to the kernel, is undelivered, and its leases
are undone.

    request --> PARKED --> WRITING --> UNPROVED --> (the next request, or a FIN with all bytes acknowledged: delivered)
                 | FIN/RST  | FIN/RST    | FIN/RST with its last byte unacknowledged, or a prompt RST
                 v          v            v
                gone       undone       undone

The peer's kernel may acknowledge bytes that its program has not read. A program that ends, or closes its socket, with
unread bytes makes its kernel send RST instead of FIN. So an RST within ``UNREAD_SECONDS`` of an acknowledged answer
counts as unread. A later RST does not: machines in between reset idle connections while their clients work.

A half-open connection proves nothing: its leases run to their deadlines. If the server itself closes the connection in
order, nothing is undone. Without Linux, and under TLS, only bytes that are still in this process count as
unacknowledged.
"""

import time
from collections import deque
from collections.abc import Callable

from popgate.api.watched_transport import WatchedTransport
from popgate.engine.lease.pop_request import Presence

EXTENSION = "popgate.connection"
"""The key in ``scope["extensions"]`` under which a handler finds its ``Connection``."""
UNPROVED_MAX = 64
"""Maximum number of unproved answers of one pipelining client; beyond it the oldest counts as delivered."""

UNREAD_SECONDS = 1.0
"""Seconds after an answer within which an RST means that it was not read."""

_NOT_WRITTEN = 1 << 62


class _Answer:
    """A pop's answer: the position of its last byte in the connection's bytes, and how to undo its leases."""

    __slots__ = ("end", "leases_end_at", "undo", "written_at")

    def __init__(self, undo: Callable[[], None], leases_end_at: float) -> None:
        self.undo = undo
        self.leases_end_at = leases_end_at
        self.end = _NOT_WRITTEN
        self.written_at = 0.0


class Connection:
    """One client's connection, as a handler sees it. ``presence`` belongs to the pop that is being served.

    ``on_shutdown`` is called when the server begins to stop; only requests that would delay it need it.
    """

    __slots__ = ("_transport", "_unproved", "gone", "on_shutdown", "presence")

    def __init__(self, transport: WatchedTransport) -> None:
        self.gone = False
        self.presence: Presence | None = None
        self.on_shutdown: Callable[[], None] | None = None
        self._transport = transport
        self._unproved: deque[_Answer] = deque()

    # -- called by handlers ---------------------------------------------------------------------------------------

    def answering(self, undo: Callable[[], None], leases_end_at: float) -> None:
        """A pop's answer is about to be written; ``undo`` is called, once, if it is not delivered.

        After ``leases_end_at`` (Unix seconds) there is nothing to undo.
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
        """An answer has been written, of any kind."""
        self._transport.uncork()
        if self._unproved and self._unproved[-1].end == _NOT_WRITTEN and not self._transport.broken():
            newest = self._unproved[-1]
            newest.end = self._transport.written
            newest.written_at = time.monotonic()

    # -- called by the protocol -----------------------------------------------------------------------------------

    def request_began(self) -> None:
        """The client has sent another request. It has read the earlier answers, unless it pipelines."""
        if self._unproved and not self._transport.unacknowledged():
            self._unproved.clear()
            self._transport.linger = False

    def ended(self, *, by_peer: bool, abruptly: bool = False, is_cut: bool = False) -> None:
        """The connection has ended. Undo what was not delivered, if the peer ended it. Idempotent.

        ``abruptly``: by RST, which applies to the newest answer only: earlier ones were read, or nothing is known about
        them. ``is_cut``: the server ends the connection without sending the rest, which is undone.
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
        """Return whether an answer with live leases has not reached the peer."""
        now = time.time()  # the leases' ends are Unix seconds
        return any(answer.leases_end_at > now for answer in self._unproved) and self._transport.unacknowledged() > 0
