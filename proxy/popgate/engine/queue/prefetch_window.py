"""Chooses the prefetch of a queue, within limits for the number and the bytes of messages. Pure.

The broker pushes messages while fewer than ``prefetch`` deliveries are unsettled. A leased message stays unsettled.
Therefore many leases need a high prefetch, and large bodies need a low one. The prefetch starts low, because the sizes
of the messages are unknown. It grows only when pops lack messages, and shrinks when the bodies exceed the memory
budget. It is always a power of two.

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
        """Update the mean size of the queue's messages.

        A message that is larger than the mean raises it at once to its own size. Smaller messages lower the mean
        slowly.
        """
        mean = self._mean_bytes
        self._mean_bytes = float(size) if mean is None or size > mean else mean + (size - mean) * _SMOOTHING

    def grown(self, share_bytes: int) -> int:
        """Return a higher prefetch for pops that lack messages, because the current prefetch is used up.

        If the prefetch can't grow, return the current one. To set it again also helps, because the channel then gets
        fresh credit in addition to its unsettled deliveries.
        """
        limit = min(self._limit(share_bytes), PREFETCH_MAX)
        self.prefetch = max(self.prefetch, _power_of_two(min(limit, GROWTH * self.prefetch)))
        return self.prefetch

    def shrunk(self, share_bytes: int) -> int:
        """Return a lower prefetch, because the memory budget was exceeded."""
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
