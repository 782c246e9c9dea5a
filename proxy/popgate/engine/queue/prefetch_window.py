"""How much of a queue to hold: the prefetch window, bounded in messages and bytes.

Pure. The broker pushes while fewer than ``prefetch`` deliveries are unsettled, and a lease keeps its message unsettled;
so many live leases need a wide window, and large bodies a narrow one. The window starts narrow (sizes are unknown),
grows in powers of two only when pops starve behind it, and is cut when bodies turn out larger than the budget.

``share_bytes`` is the queue's part of the proxy's ``buffer_bytes_max`` at that moment.
"""

from popgate.domain.message import MESSAGE_BYTES_MAX

PREFETCH_MAX = 32_768
"""Below AMQP's 65,535 a consumer, and a power of two."""
PREFETCH_START_MAX = 256
GROWTH = 4
_SMOOTHING = 0.05


class PrefetchWindow:
    """The prefetch of one queue."""

    def __init__(self) -> None:
        self._mean_bytes: float | None = None
        self.prefetch = 1

    def restart(self, share_bytes: int) -> int:
        """The prefetch for a new channel: what is known to be safe, and no wider than a fresh start needs."""
        self.prefetch = _power_of_two(min(self._limit(share_bytes), PREFETCH_START_MAX))
        return self.prefetch

    def observe(self, size: int) -> None:
        """Take note of a delivered message that costs ``size`` bytes; large ones count at once, small ones slowly."""
        mean = self._mean_bytes
        self._mean_bytes = float(size) if mean is None or size > mean else mean + (size - mean) * _SMOOTHING

    def grown(self, share_bytes: int) -> int:
        """A prefetch for pops that starve though all deliveries of the present one are unsettled.

        The same prefetch again is a gain too: a resized channel gets fresh credit beside what it holds.
        """
        limit = min(self._limit(share_bytes), PREFETCH_MAX)
        self.prefetch = max(self.prefetch, _power_of_two(min(limit, GROWTH * self.prefetch)))
        return self.prefetch

    def shrunk(self, share_bytes: int) -> int:
        """The prefetch after the budget was passed."""
        self.prefetch = _power_of_two(max(1, min(self._limit(share_bytes), self.prefetch // 2)))
        return self.prefetch

    @property
    def mean_bytes(self) -> float | None:
        """What a message costs; None before the first one."""
        return self._mean_bytes

    def _limit(self, share_bytes: int) -> int:
        mean = MESSAGE_BYTES_MAX if self._mean_bytes is None else self._mean_bytes
        return max(1, int(share_bytes / mean))


def _power_of_two(value: int) -> int:
    return 1 << (max(1, value).bit_length() - 1)
