"""Decides whether a pop should wait a short time for more messages, if fewer messages are ready than it may take.

The decision depends on the pace of arrivals, which this module measures. ``serving`` manages the timer and the pops.

Theory of operation. If several messages are published together, RabbitMQ commits the first message alone, and the
others with its next disk write. Measured on 4.3: of ten messages, one arrives first, and nine arrive 0.7 to 6 ms later.
A message does not show whether more will follow, so the recent arrivals decide. ``Pace`` counts arrivals in windows of
``COLLECT_SECONDS``. The first arrival after a window opens the next window. More messages are expected

- after a quiet time, unless each of the last ``LONE_MAX`` messages that arrived after a quiet time was alone;
- otherwise in a dense stream: enough messages arrived in the last window, or have arrived in the present one.

So pops do not wait during a steady stream of single messages, whether it is slow or has 500 messages a second.
"""

COLLECT_SECONDS = 0.005
"""Maximum seconds that a pop waits for more messages after it could have been answered."""
QUIET_SECONDS = 0.02
"""Minimum seconds without an arrival after which a message may begin a burst."""
BURST_MIN = 2
"""Minimum number of messages that follow the first one of a burst within ``COLLECT_SECONDS``."""
LONE_MAX = 3
"""No burst is expected after this many messages in succession that could have begun a burst, but did not."""
FORGET_SECONDS = 10.0
"""Minimum seconds without an arrival after which a burst is always expected again."""
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
        """Record that ``count`` messages became ready together at ``now`` (monotonic seconds)."""
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
