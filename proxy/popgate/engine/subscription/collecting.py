"""Decides whether a pop should wait a moment for more messages when it may take more than are ready.

Owns the pace of arrivals, on which that depends. ``serving`` owns the timer and the pops.

Theory of operation. RabbitMQ commits the first of several messages that are published together alone, and the others
with its next disk write. Measured on 4.3: of ten messages one arrives first, and nine arrive 0.7 to 6 ms later. Nothing
in a message says whether more will follow, so the recent past decides. ``Pace`` counts arrivals in windows of
``COLLECT_SECONDS``; an arrival opens a window. More messages are expected

- after a quiet time, unless each of the last ``LONE_MAX`` messages that came after a quiet time was alone;
- otherwise in a dense stream: enough messages came in the last window, or in this one already.

A steady stream of single messages, be it slow or 500 messages a second, therefore does not wait.
"""

COLLECT_SECONDS = 0.005
"""Maximum time, in seconds, that a pop waits for more messages after it could be answered."""
QUIET_SECONDS = 0.02
"""Minimum time, in seconds, without an arrival before a message that may begin a burst."""
BURST_MIN = 2
"""Minimum number of messages that follow the first one of a burst within ``COLLECT_SECONDS``."""
LONE_MAX = 3
"""Number of messages in succession that may begin a burst and do not, after which no burst is expected."""
FORGET_SECONDS = 10.0
"""Minimum time, in seconds, without an arrival before a burst is expected again in any case."""
STREAM_MIN = 8
"""Minimum number of messages that follow the first one of a window in a dense stream. At a steady 500 messages a second
two or three follow; if RabbitMQ's disk is slow, up to twice as many."""


class Pace:
    """Measures how densely messages arrive. At first a burst is expected."""

    __slots__ = ("_followers", "_is_after_quiet", "_is_stream", "_last_at", "_lone_count", "_opened_at")

    def __init__(self) -> None:
        self._opened_at = self._last_at = float("-inf")
        self._followers = 0
        self._is_after_quiet = self._is_stream = False
        self._lone_count = 0

    def arrived(self, count: int, now: float) -> None:
        """Note ``count`` messages that became ready together at ``now`` (monotonic seconds)."""
        silence, self._last_at = now - self._last_at, now
        if now - self._opened_at < COLLECT_SECONDS:
            self._followers += count
            return
        if self._is_after_quiet:
            self._lone_count = 0 if self._followers >= BURST_MIN else self._lone_count + 1
        if silence >= FORGET_SECONDS:
            self._lone_count = 0
        self._is_after_quiet = silence >= QUIET_SECONDS
        self._is_stream = self._followers >= STREAM_MIN
        self._opened_at, self._followers = now, 0

    def expects_more(self, now: float) -> bool:
        """Whether messages are arriving, and more of them will probably follow within ``COLLECT_SECONDS``."""
        if now - self._last_at >= COLLECT_SECONDS:
            return False
        is_likely = self._lone_count < LONE_MAX if self._is_after_quiet else self._is_stream
        return is_likely or self._followers >= STREAM_MIN
