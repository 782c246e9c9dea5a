"""Defines the clock port. Deadlines use ``monotonic``. Only times that leave the process use ``wall``."""

from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Return a time in seconds that never decreases. It is meaningless in another process."""
        ...

    def wall(self) -> float:
        """Return the Unix time in seconds. It may jump."""
        ...
