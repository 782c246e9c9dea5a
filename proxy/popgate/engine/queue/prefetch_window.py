"""The prefetch window of a queue, bounded in messages and bytes.

Pure. The broker pushes while fewer than ``prefetch`` deliveries are unsettled, and a lease keeps its message unsettled.
Therefore many live leases need a wide window, and large bodies a narrow one. The window starts narrow because sizes
are unknown. It grows in powers of two only when pops starve behind it, and shrinks when bodies exceed the budget.

``share_bytes`` is the queue's part of the proxy's ``buffer_bytes_max`` at that moment.
"""

from popgate.domain.message import MESSAGE_BYTES_MAX

PREFETCH_MAX = 32_768
"""Maximum prefetch: a power of two below AMQP's maximum of 65,535 for a consumer."""
PREFETCH_START_MAX = 256
GROWTH = 4
_SMOOTHING = 0.05


class PrefetchWindow:
    """Chooses the prefetch of one queue."""

    def __init__(self) -> None:
        self._mean_bytes: float | None = None
        self.prefetch = 1

    def restart(self, share_bytes: int) -> int:
        """Return the prefetch for a new channel: within the budget, and at most ``PREFETCH_START_MAX``."""
        self.prefetch = _power_of_two(min(self._limit(share_bytes), PREFETCH_START_MAX))
        return self.prefetch

    def observe(self, size: int) -> None:
        """Note a delivered message that takes ``size`` bytes. A large one counts at once, small ones count slowly."""
        mean = self._mean_bytes
        self._mean_bytes = float(size) if mean is None or size > mean else mean + (size - mean) * _SMOOTHING

    def grown(self, share_bytes: int) -> int:
        """Return a wider prefetch for pops that starve while the present one is used up.

        The same prefetch again helps, too: a resized channel gets new credit in addition to what it holds.
        """
        limit = min(self._limit(share_bytes), PREFETCH_MAX)
        self.prefetch = max(self.prefetch, _power_of_two(min(limit, GROWTH * self.prefetch)))
        return self.prefetch

    def shrunk(self, share_bytes: int) -> int:
        """Return the prefetch after the budget was exceeded."""
        self.prefetch = _power_of_two(max(1, min(self._limit(share_bytes), self.prefetch // 2)))
        return self.prefetch

    @property
    def mean_bytes(self) -> float | None:
        """The memory that a message takes, in bytes; None before the first one."""
        return self._mean_bytes

    def _limit(self, share_bytes: int) -> int:
        mean = MESSAGE_BYTES_MAX if self._mean_bytes is None else self._mean_bytes
        return max(1, int(share_bytes / mean))


def _power_of_two(value: int) -> int:
    return 1 << (max(1, value).bit_length() - 1)
