"""Implements the clock port twice: with the real clock, and with a clock that is advanced by tests."""

import time

from popgate.ports.clock import Clock


class SystemClock:
    """The real clock, which reads the monotonic clock and the wall clock of the machine."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock for tests and simulations. Its times change only when ``advance`` or ``jump_wall`` is called."""

    def __init__(self, *, monotonic: float = 1_000.0, wall: float = 1_700_000_000.0) -> None:
        self._monotonic = monotonic
        self._wall = wall

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self._wall

    def advance(self, seconds: float) -> None:
        """Advance both clocks by ``seconds``."""
        self._monotonic += seconds
        self._wall += seconds

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward by ``seconds``, or back if negative, as an administrator or NTP would."""
        self._wall += seconds


_conforms: tuple[type[Clock], type[Clock]] = (SystemClock, ManualClock)
