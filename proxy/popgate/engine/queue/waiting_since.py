"""Remembers since when messages of one queue wait at the broker. RabbitMQ does not tell it.

While a channel is open, the first messages of the queue are in memory, with their publish times. When the channel ends,
the oldest time among the messages that return to the broker is remembered. A message that arrives while there is no
channel has waited at least since its queue was first seen with messages. So the remembered time is never too early: the
age of the oldest message may be more than it says, but not less.

A proxy that has just become the owner of a queue finds messages of an unknown age. Only a consumer can learn it
(``is_guessed``).
"""

from collections.abc import Iterable

from popgate.engine.queue.buffered import UNSEEN, BufferedMessage, MessageState
from popgate.engine.queue.waiting_messages import waits_since

GUESSED_SECONDS = 10.0
"""Seconds after which an age that is only guessed is to be learned. Until then, the clients of a proxy that has just
started may ask."""
RETURN_SECONDS = 10.0
"""Seconds that the broker may need until it counts messages again that have returned to it."""
_RETURNED = frozenset({*UNSEEN, MessageState.GRANTING})


class WaitingSince:
    """Since when the oldest of the messages waits that only the broker has. ``at`` is None if there is none, or if no
    time is known (Unix seconds)."""

    def __init__(self) -> None:
        self.at: float | None = None
        self._is_watched = False
        """Whether this proxy has seen the queue empty, or has consumed it."""
        self._is_returning = False
        """Whether messages have returned to the broker, and the broker has not counted them yet."""
        self._missed_since: float | None = None

    def is_guessed(self, now: float) -> bool:
        """Whether messages that were there when this proxy first looked are still there, and may be much older."""
        return self.at is not None and not self._is_watched and now - self.at >= GUESSED_SECONDS

    def returned(self, messages: Iterable[BufferedMessage]) -> None:
        """Remember the oldest of the messages that return to the broker because the channel ends.

        If none returns, a message at the broker is younger than all that were delivered: it counts as new.
        """
        times = (waits_since(one) for one in messages if one.state in _RETURNED)
        self.at = min((since for since in times if since), default=None)
        self._is_watched = True
        self._is_returning, self._missed_since = self.at is not None, None

    def counted(self, at_broker: int, now: float, oldest_at: float | None = None) -> None:
        """Note that the broker has ``at_broker`` messages at ``now`` that are not in memory, while no channel is open.

        ``oldest_at``: since when the first of them waits, if the broker tells it.
        """
        if not at_broker:
            self._is_watched = True
            if self._is_returning and self._missed_since is None:
                self._missed_since = now
            if self._missed_since is None or now - self._missed_since >= RETURN_SECONDS:
                self.at, self._is_returning, self._missed_since = None, False, None
            return
        self._is_returning, self._missed_since = False, None
        if oldest_at is not None:
            self.at = oldest_at
            self._is_watched = True
        elif self.at is None:
            self.at = now
