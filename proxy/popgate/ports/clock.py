"""The clock port: two readings of time. Deadlines use ``monotonic``; ``wall`` is only for what leaves the process."""

from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds that never go back; meaningless in another process."""
        ...

    def wall(self) -> float:
        """Unix seconds; may jump."""
        ...
