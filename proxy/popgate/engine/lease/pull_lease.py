"""The messages of one queue that one pull client has, and those that it gets next (design: section 3, "Pull fallback").

In pull mode a queue is one chain (``queue_order``). First come the messages that the client has and has not committed,
then those that it may get next. A message in front of the client's messages is not handed out, because a commit would
settle it unseen. There are two kinds of such messages. One that a pop client gave back with a delay is handed out when
all messages behind it are committed. The other kind is settled already, but its ack has not reached the broker.
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
    """All messages of the queue of ``host`` that are leased under ``lease_id``: one client's while it has the queue."""

    def __init__(self, host: QueueHost, lease_id: LeaseId, client_id: ClientId) -> None:
        self.host = host
        self.client_id = client_id
        self.lease_id = lease_id

    def is_mine(self, held: BufferedMessage) -> bool:
        return held.state is MessageState.LEASED and held.lease_id == self.lease_id

    def is_lined_up(self) -> bool:
        """Whether all messages of the client are in the chain: after a channel has ended they must be delivered
        again."""
        return all(held.key is not None for held in self.host.messages() if self.is_mine(held))

    def uncommitted(self, after: CopyId | None) -> Iterator[BufferedMessage]:
        """Return the client's messages in order: those behind ``after``, or all if ``after`` is not the client's any
        more."""
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
        """Return the ready messages that stand in front of one that the client has."""
        found: list[BufferedMessage] = []
        held, left = self._first(), self._leased_count()
        while held is not None and left:
            left -= self.is_mine(held)
            if held.state is MessageState.READY:
                found.append(held)
            held = held.next_of_key()
        return found

    def through(self, end: BufferedMessage) -> list[BufferedMessage]:
        """Return the client's messages up to ``end``, which is in the chain."""
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
        """Return the messages that the client may get next, in order, up to the first whose body is not here."""
        return takewhile(lambda held: held.message is not None, self.following())

    def following(self) -> Iterator[BufferedMessage]:
        """Return the messages behind those that the client has, in order. Some bodies may have been forgotten while
        their messages waited for their places, and may be on their way back."""
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
        """Count the client's messages. Leases of other clients have been given back, so all leases count."""
        return self.host.state.counts.all(MessageState.LEASED)

    def _first(self) -> BufferedMessage | None:
        """Return the head of the chain. It is usually among the first messages, because they were delivered first."""
        return next((held for held in self.host.messages() if held.is_head and held.key is not None), None)
