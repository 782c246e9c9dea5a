"""Finds the messages of one queue that are leased to a pull client, and the messages that it may get next.

In pull mode (decision 11), all messages of a queue form one chain (``queue_order``). The chain starts with the client's
uncommitted messages. The messages that the client may get next follow. A message in front of the client's messages is
not handed out, because a commit would settle it although the client has not seen it. There are two kinds of such
messages. A message that a pop client released with a delay is handed out when all messages of the client behind it are
committed. A message of the other kind is already settled, but its ack has not reached the broker.
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
    """The lease of one pull client for messages in the queue of ``host``.

    All messages that the client pulls have the same lease id, for as long as the queue is assigned to the client.
    """

    def __init__(self, host: QueueHost, lease_id: LeaseId, client_id: ClientId) -> None:
        self.host = host
        self.client_id = client_id
        self.lease_id = lease_id

    def is_mine(self, buffered: BufferedMessage) -> bool:
        return buffered.state is MessageState.LEASED and buffered.lease_id == self.lease_id

    def is_lined_up(self) -> bool:
        """Whether all messages of the client are in the chain of the queue.

        After a channel has ended, a message is in the chain again only when it has been delivered again.
        """
        return all(buffered.key is not None for buffered in self.host.messages() if self.is_mine(buffered))

    def uncommitted(self, after: CopyId | None) -> Iterator[BufferedMessage]:
        """Return the client's uncommitted messages behind ``after``, in order.

        If ``after`` is None or no longer leased to the client, return all of the client's messages.
        """
        last = None if after is None else self.host.find(after)
        buffered, left = self._first(), self._leased_count()
        if last is not None and self.is_mine(last):
            buffered = last.next_of_key()
        while buffered is not None and left:
            if self.is_mine(buffered):
                left -= 1
                yield buffered
            buffered = buffered.next_of_key()

    def unsure(self) -> list[BufferedMessage]:
        """Return the ready messages that are in front of a message of the client."""
        found: list[BufferedMessage] = []
        buffered, left = self._first(), self._leased_count()
        while buffered is not None and left:
            left -= self.is_mine(buffered)
            if buffered.state is MessageState.READY:
                found.append(buffered)
            buffered = buffered.next_of_key()
        return found

    def through(self, end: BufferedMessage) -> list[BufferedMessage]:
        """Return the client's messages up to and including ``end``, which must be in the chain."""
        found: list[BufferedMessage] = []
        buffered = self._first()
        while buffered is not None:
            if self.is_mine(buffered):
                found.append(buffered)
            if buffered is end:
                break
            buffered = buffered.next_of_key()
        return found

    def candidates(self) -> Iterator[BufferedMessage]:
        """Return the messages that the client may get next, in order.

        Stop before the first message without a body in memory.
        """
        return takewhile(lambda buffered: buffered.message is not None, self.following())

    def following(self) -> Iterator[BufferedMessage]:
        """Return the messages that the client may get after its present messages, in order.

        Some of them may have no body in memory: it was dropped while the message waited for its place in the chain.
        """
        buffered, left = self._first(), self._leased_count()
        while buffered is not None and (self.is_mine(buffered) or buffered.state in _PASSED_OVER):
            left -= self.is_mine(buffered)
            buffered = buffered.next_of_key()
        while buffered is not None and not left:
            if buffered.state in UNSEEN:
                yield buffered
            elif buffered.state not in _PASSED_OVER:
                return
            buffered = buffered.next_of_key()

    def _leased_count(self) -> int:
        """Return the number of the client's messages.

        All leased messages of the queue are counted, because other clients' leases have been released.
        """
        return self.host.state.counts.all(MessageState.LEASED)

    def _first(self) -> BufferedMessage | None:
        """Return the head of the chain. It is usually found early, because the first messages were delivered first."""
        return next(
            (buffered for buffered in self.host.messages() if buffered.is_head and buffered.key is not None), None
        )
