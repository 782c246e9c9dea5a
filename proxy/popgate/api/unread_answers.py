"""Limits the memory for answers that clients don't read, and finds the clients that make no progress.

If these answers take too much memory, connections of the principal that holds most of it are ended. The first ones are
those that have made no progress for long, and hold much. Clients that read at a good rate are spared as long as the
answers take at most twice the memory. If all clients of this principal read at a good rate, no connection is ended: a
principal is not cut off because of the memory that another one holds.
"""

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

ANSWER_BYTES_PER_SECOND_MIN = 64 << 10
"""Average rate from which on a client that reads its answers is spared."""
SLOW_AFTER_SECONDS = 1.0
"""Seconds after which a client can count as slow."""
CHECK_SECONDS = 0.1
"""Minimum seconds between two checks of the memory."""


class AnsweringConnection(Protocol):
    """The methods of a connection that this module calls."""

    @property
    def user(self) -> object | None:
        """Whose connection it is, or None if this is not known."""
        ...

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes of answers that are in memory, because the client does not read them."""
        ...

    def reached(self) -> int:
        """Return the position in the answers up to which the client has received them."""
        ...

    def abort(self) -> None:
        """Close the connection, and discard unsent data."""
        ...


class _Progress:
    """How far a client has come: at the beginning, and at ``moved_at``, when it was last seen to come further."""

    __slots__ = ("began", "began_at", "moved_at", "position")

    def __init__(self, position: int, now: float) -> None:
        self.began = self.position = position
        self.began_at = self.moved_at = now

    def look(self, position: int, now: float) -> None:
        if position > self.position:
            self.position, self.moved_at = position, now

    def is_slow(self, now: float) -> bool:
        seconds = now - self.began_at
        read = self.position - self.began
        return seconds > SLOW_AFTER_SECONDS and read < seconds * ANSWER_BYTES_PER_SECOND_MIN


ConnectionT = TypeVar("ConnectionT", bound=AnsweringConnection)


class UnreadAnswers(Generic[ConnectionT]):
    """The connections of a process whose clients do not read their answers as fast as these are written.

    ``bytes_max`` is the memory that their answers may take. ``warn`` is called before connections are ended for it.
    """

    def __init__(self, bytes_max: int, warn: Callable[[str], None]) -> None:
        self._bytes_max = bytes_max
        self._warn = warn
        self._unread: dict[ConnectionT, _Progress] = {}
        self._checked_at = float("-inf")

    def __contains__(self, connection: ConnectionT) -> bool:
        return connection in self._unread

    def note(self, connection: ConnectionT, now: float) -> None:
        """Record that the kernel does not take all written bytes of the connection."""
        if connection not in self._unread:
            self._unread[connection] = _Progress(connection.reached(), now)
        if now >= self._checked_at + CHECK_SECONDS:
            self.check(now)

    def forget(self, connection: ConnectionT) -> None:
        """Record that the kernel has taken all written bytes, or that the connection has ended. Idempotent."""
        self._unread.pop(connection, None)

    def stuck_since(self, moved_before: float) -> list[ConnectionT]:
        """Return the connections whose clients have made no progress since ``moved_before``."""
        return [one for one, progress in self._unread.items() if progress.moved_at <= moved_before]

    def unproven(self) -> Iterator[ConnectionT]:
        """Return the connections whose clients have not proved who they are, beginning with the oldest entry."""
        return (one for one in self._unread if one.user is None)

    def check(self, now: float) -> None:
        """Note the progress of the clients. If their answers take too much memory, end connections."""
        self._checked_at = now
        sizes: dict[ConnectionT, int] = {}
        for connection, progress in self._unread.items():
            progress.look(connection.reached(), now)
            sizes[connection] = connection.unsent_bytes
        total = sum(sizes.values())
        if total <= self._bytes_max:
            return
        held: dict[object, int] = {}
        ends: dict[object, list[ConnectionT]] = {}
        """The connections of each principal. The last one is ended first."""
        for one in sorted(sizes, key=lambda one: sizes[one] * (now - self._unread[one].moved_at + CHECK_SECONDS)):
            held[one.user] = held.get(one.user, 0) + sizes[one]
            ends.setdefault(one.user, []).append(one)
        while total > self._bytes_max:
            user = max(held, key=lambda user: held[user])
            if not ends[user]:
                return
            worst = ends[user].pop()
            if total <= 2 * self._bytes_max and not self._unread[worst].is_slow(now):
                continue
            total -= sizes[worst]
            held[user] -= sizes[worst]
            self._warn("answers that clients don't read take as much memory as allowed: the slowest are cut off")
            self.forget(worst)
            worst.abort()
