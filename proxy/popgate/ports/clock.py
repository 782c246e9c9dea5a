"""Defines the clock port. Deadlines use ``monotonic``. ``wall`` is only for times that leave the process."""

from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Return seconds that never decrease. They are meaningless in another process."""
        ...

    def wall(self) -> float:
        """Unix seconds; may jump."""
        ...
