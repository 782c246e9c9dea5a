"""Chooses the prefetch window of a queue, bounded in messages and bytes.

Pure. The broker pushes while fewer than ``prefetch`` deliveries are unsettled. A leased message stays unsettled.
Therefore many live leases need a wide window, and large bodies a narrow one. The window starts narrow because sizes
are unknown. It grows only when pops starve, and shrinks when bodies exceed the budget. It is always a power of two.

``share_bytes`` is the queue's share of the proxy's ``buffer_bytes_max`` at the time of the call.
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
        """Return the prefetch for a new channel, within the budget and at most ``PREFETCH_START_MAX``."""
        self.prefetch = _power_of_two(min(self._limit(share_bytes), PREFETCH_START_MAX))
        return self.prefetch

    def observe(self, size: int) -> None:
        """Update the mean size. A message above the mean raises it at once; smaller ones lower it slowly."""
        mean = self._mean_bytes
        self._mean_bytes = float(size) if mean is None or size > mean else mean + (size - mean) * _SMOOTHING

    def grown(self, share_bytes: int) -> int:
        """Return the prefetch for pops that starve while the present prefetch is used up.

        Even an unchanged prefetch helps: a resized channel gets new credit in addition to the messages that it holds.
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
        """The mean memory of a message, in bytes; None before the first message."""
        return self._mean_bytes

    def _limit(self, share_bytes: int) -> int:
        mean = MESSAGE_BYTES_MAX if self._mean_bytes is None else self._mean_bytes
        return max(1, int(share_bytes / mean))


def _power_of_two(value: int) -> int:
    return 1 << (max(1, value).bit_length() - 1)
