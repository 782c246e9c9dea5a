"""Keeps the ends of the leases and delays of one queue, and returns those that are over. Synchronous, without a clock.

A lease that is extended keeps its earlier entry in the heap, so that an extension costs nothing. When that entry is
due, it moves to the new deadline. So a check may come early, but never late.
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
        """The time at which to call ``due`` next, or NEVER."""
        return self._heap.next_at

    def hold_until(self, message: BufferedMessage, deadline: float) -> None:
        """Set the end of a lease or a delay. This replaces the message's former deadline."""
        message.deadline = deadline
        if deadline < message.timer:
            self._heap.schedule(deadline, message)

    def cancel(self, message: BufferedMessage) -> None:
        """Forget a message. Does nothing if it has no deadline."""
        self._heap.cancel(message)

    def due(self, now: float) -> Iterator[BufferedMessage]:
        """Yield the messages whose lease or delay is over. At most ``DUE_BATCH_MAX`` entries are checked at once."""
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
