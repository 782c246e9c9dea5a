"""Remembers since when messages of one queue wait at the broker. RabbitMQ does not tell it.

While a channel is open, the first messages of the queue are in memory, with their publish times. When the channel ends,
the oldest time among the messages that return to the broker is remembered. A message that arrives while there is no
channel has waited at least since its queue was first seen with messages. So the remembered time is never too early: the
age of the oldest message may be more than it says, but not less.
"""

from collections.abc import Iterable

from popgate.engine.queue.buffered import UNSEEN, BufferedMessage, MessageState

_RETURNED = frozenset({*UNSEEN, MessageState.GRANTING})


class WaitingSince:
    """Since when the oldest of the messages waits that only the broker has. ``at`` is None if there is none, or if no
    time is known (Unix seconds)."""

    def __init__(self) -> None:
        self.at: float | None = None

    def returned(self, messages: Iterable[BufferedMessage]) -> None:
        """Remember the oldest of the messages that return to the broker because the channel ends.

        If none returns, the messages at the broker are younger than all that were delivered.
        """
        oldest, newest = float("inf"), 0.0
        for buffered in messages:
            since = 0.0 if buffered.message is None else buffered.message.waiting_since
            if since and buffered.state in _RETURNED:
                oldest = min(oldest, since)
            newest = max(newest, since)
        found = min(oldest, newest)
        self.at = found or None

    def counted(self, at_broker: int, now: float, oldest_at: float | None = None) -> None:
        """Note that the broker has ``at_broker`` messages at ``now`` that are not in memory, while no channel is open.

        ``oldest_at``: since when the first of them waits, if the broker tells it.
        """
        if not at_broker:
            self.at = None
        elif self.at is None or oldest_at is not None:
            self.at = oldest_at or now
