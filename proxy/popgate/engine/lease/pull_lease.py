"""What one pull client has of one queue, and what comes next (design: section 3, "Pull fallback").

In pull mode a queue is one line (``lines``). In front stands what its client was given and has not committed, then what
it may be given next. Nothing is given that stands in front of what the client has: a commit would settle it unseen.
Such is what a client that popped gave back with a delay; it is given once all behind it is committed. Or it is settled,
and the broker has not heard of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING

from popgate.domain.names import ClientId, CopyId, LeaseId
from popgate.engine.queue.buffered import UNSEEN, BufferedMessage, MessageState

if TYPE_CHECKING:
    from popgate.engine.queue.host import QueueHost

_PASSED_OVER = (MessageState.DELAYED, MessageState.MOVING, MessageState.DISCARDING)


class PullLease:
    """Of the queue of ``host``: all that is leased under ``lease_id``, which is one client's while it has the queue."""

    def __init__(self, host: QueueHost, lease_id: LeaseId, client_id: ClientId) -> None:
        self.host = host
        self.client_id = client_id
        self.lease_id = lease_id

    def is_mine(self, held: BufferedMessage) -> bool:
        return held.state is MessageState.LEASED and held.lease_id == self.lease_id

    def is_lined_up(self) -> bool:
        """Whether all that the client has stands in the line: after a channel has ended it has to come again first."""
        return all(held.key is not None for held in self.host.messages() if self.is_mine(held))

    def uncommitted(self, after: CopyId | None) -> Iterator[BufferedMessage]:
        """What the client has, in order: behind one of them, or all where that one is not its own any more."""
        last = None if after is None else self.host.find(after)
        held, left = self._first(), self._leased_count()
        if last is not None and self.is_mine(last):
            held = last.next_of_key()
        while held is not None and left:
            if self.is_mine(held):
                left -= 1
                yield held
            held = held.next_of_key()

    def unsure(self) -> list[BufferedMessage]:
        """What is ready and stands in front of what the client has."""
        found: list[BufferedMessage] = []
        held, left = self._first(), self._leased_count()
        while held is not None and left:
            left -= self.is_mine(held)
            if held.state is MessageState.READY:
                found.append(held)
            held = held.next_of_key()
        return found

    def through(self, end: BufferedMessage) -> list[BufferedMessage]:
        """What the client has up to ``end``, which stands in the line."""
        found: list[BufferedMessage] = []
        held = self._first()
        while held is not None:
            if self.is_mine(held):
                found.append(held)
            if held is end:
                break
            held = held.next_of_key()
        return found

    def candidates(self) -> Iterator[BufferedMessage]:
        """What the client may be given next, in order: up to where a body is not here."""
        return takewhile(lambda held: held.message is not None, self.following())

    def following(self) -> Iterator[BufferedMessage]:
        """What comes behind what the client has, in order. Some bodies may have been forgotten while they waited for
        their places, and some of those are on their way back."""
        held, left = self._first(), self._leased_count()
        while held is not None and (self.is_mine(held) or held.state in _PASSED_OVER):
            left -= self.is_mine(held)
            held = held.next_of_key()
        while held is not None and not left:
            if held.state in UNSEEN:
                yield held
            elif held.state not in _PASSED_OVER:
                return
            held = held.next_of_key()

    def _leased_count(self) -> int:
        """What others have had is given back, so it is as many as the client has."""
        return self.host.state.counts.all(MessageState.LEASED)

    def _first(self) -> BufferedMessage | None:
        """The first of the line. What was delivered first stands first among all that is known, as a rule."""
        return next((held for held in self.host.messages() if held.is_head and held.key is not None), None)
