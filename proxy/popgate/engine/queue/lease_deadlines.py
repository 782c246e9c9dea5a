"""Stores the deadlines of the leases and delays of one queue, and yields the messages whose deadline has passed.

The code is synchronous and reads no clock. If a lease is extended, its entry in the heap is not changed, so that an
extension costs nothing. When the entry is due, it is scheduled again for the new deadline. A message may therefore be
checked before its deadline, but is never checked too late.
"""

from collections.abc import Iterator

from popgate.engine.queue.buffered import RECOVERABLE, BufferedMessage
from popgate.runtime.deadlines import DUE_BATCH_MAX, DeadlineHeap


class LeaseDeadlines:
    """The deadlines of the LEASED and DELAYED messages of a queue. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._heap: DeadlineHeap[BufferedMessage] = DeadlineHeap()

    @property
    def next_at(self) -> float:
        """The time at which ``due`` must be called next, or NEVER."""
        return self._heap.next_at

    def hold_until(self, message: BufferedMessage, deadline: float) -> None:
        """Set the deadline of a message's lease or delay. It replaces the message's former deadline."""
        message.deadline = deadline
        if deadline < message.timer:
            self._heap.schedule(deadline, message)

    def __iter__(self) -> Iterator[BufferedMessage]:
        """Iterate over the messages that have a deadline."""
        return iter(self._heap)

    def cancel(self, message: BufferedMessage) -> None:
        """Remove the deadline of a message. Do nothing if it has none."""
        self._heap.cancel(message)

    def due(self, now: float) -> Iterator[BufferedMessage]:
        """Yield the messages whose lease or delay is over. One call checks at most ``DUE_BATCH_MAX`` entries."""
        for _ in range(DUE_BATCH_MAX):
            message = self._heap.pop_due(now)
            if message is None:
                return
            if message.state not in RECOVERABLE:
                continue
            if message.deadline > now:
                self._heap.schedule(message.deadline, message)
            else:
                yield message
