"""Finds the oldest waiting message and the oldest lease of one queue, for the metrics. Pure.

A proxy may buffer 100,000 messages, and is asked every few seconds. Therefore a question must not visit all messages,
and a message that is popped and acked must not pay for it. The work is done by the questions, once for each message
that lives long enough to be seen by one:

- A new message is the last entry of ``QueueState.messages``. A question visits the entries that were added after the
  former question, and puts them into a heap.
- A leased message that reaches the top of the heap is set aside until it waits again (``returned``).
- A lease that was granted after another one is younger. So the leases that one look has found are older than all later
  leases, and the next look is due when all of these have ended.
"""

from heapq import heapify, heappop, heappush

from popgate.domain.names import CopyId, LeaseId
from popgate.engine.queue.buffered import BufferedMessage, Counts, MessageState
from popgate.engine.queue.lease_deadlines import LeaseDeadlines
from popgate.engine.queue.queue_order import arrived_at

_STALE_MIN = 100
"""Entries of dropped messages are removed only if there are more of them than this."""
_LEAVING = frozenset({MessageState.LEASED, MessageState.MOVING})


class WaitingMessages:
    """The messages of a queue that wait: for a pop, for a retry, or behind another one of their ordering key.

    ``messages``: all messages of the queue, the last one added last.
    """

    def __init__(self, messages: dict[CopyId, BufferedMessage]) -> None:
        self._messages = messages
        self._heap: list[tuple[float, BufferedMessage]] = []
        """The messages that may wait, by the time since when they have waited."""
        self._set_aside: dict[BufferedMessage, float] = {}
        """Messages that did not wait when they reached the top of the heap, with the same times."""

    def oldest_at(self) -> float | None:
        """Return since when the oldest waiting message has waited, or None if no message waits whose time is known."""
        self._add_new()
        heap = self._heap
        while heap:
            since, message = heap[0]
            if message.state is not MessageState.DROPPED and message.state not in _LEAVING:
                return since
            heappop(heap)
            if message.state is not MessageState.DROPPED:
                self._set_aside[message] = since
        return None

    def returned(self, message: BufferedMessage) -> None:
        """Note that a message that was leased waits again. Does nothing if the message was not set aside."""
        since = self._set_aside.pop(message, None)
        if since is not None:
            heappush(self._heap, (since, message))

    def clear(self) -> None:
        """Forget all messages, because they were dropped."""
        self._heap.clear()
        self._set_aside.clear()

    def _add_new(self) -> None:
        for message in reversed(self._messages.values()):
            if hasattr(message, "is_counted"):
                break
            message.is_counted = True
            since = waits_since(message)
            if since:
                heappush(self._heap, (since, message))
        if len(self._heap) + len(self._set_aside) > 2 * len(self._messages) + _STALE_MIN:
            dropped = MessageState.DROPPED
            self._heap = [entry for entry in self._heap if entry[1].state is not dropped]
            heapify(self._heap)
            self._set_aside = {one: since for one, since in self._set_aside.items() if one.state is not dropped}


class OldestLease:
    """Since when the longest lease of a queue lasts. An extension does not make a lease younger."""

    def __init__(self, counts: Counts, deadlines: LeaseDeadlines) -> None:
        self._counts = counts
        self._deadlines = deadlines
        self._found: list[tuple[float, BufferedMessage, LeaseId]] = []
        """The leases that the latest look has found, the oldest one last."""

    def leased_at(self) -> float | None:
        """Return since when the oldest lease lasts (Unix seconds of the store), or None if no message is leased."""
        return self._first() or (self._look() if self._counts.all(MessageState.LEASED) else None)

    def _first(self) -> float | None:
        while self._found:
            leased_at, message, lease_id = self._found[-1]
            if message.state is MessageState.LEASED and message.lease_id == lease_id:
                return leased_at
            self._found.pop()
        return None

    def _look(self) -> float | None:
        """Visit the messages that have a deadline: the leased and the delayed ones, but none that is ready."""
        leased = [one for one in self._deadlines if one.state is MessageState.LEASED]
        self._found = sorted((one.leased_at, one, one.lease_id) for one in leased)
        self._found.reverse()
        return self._first()


def waits_since(message: BufferedMessage) -> float:
    """Return since when a message has waited at the latest, in Unix seconds; 0.0 if this is not known.

    It is the time at which the message became visible. If its publisher has not set a time, or if its content is not in
    memory, it is the first delivery that is known.
    """
    content = message.message
    if content is not None and content.waiting_since:
        return content.waiting_since
    return message.first_delivered_at or arrived_at(message.rank)
