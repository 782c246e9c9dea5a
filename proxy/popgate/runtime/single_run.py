"""Runs a piece of work on request: one run at a time, for a limited time, with the latest result kept."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from popgate.domain.errors import Conflict, RetryLater
from popgate.ports.clock import Clock

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Generic[T]):
    """A run that has ended with a result. ``at``: its end in Unix seconds."""

    result: T
    at: float
    seconds: float


class SingleRun(Generic[T]):
    """Runs ``work``, but never twice at the same time. ``name``: what the work is called in errors.

    ``latest``: the latest run that has ended with a result, or None. ``is_running``: whether a run is in progress.
    """

    def __init__(self, name: str, work: Callable[[], Awaitable[T]], clock: Clock, *, seconds_max: float) -> None:
        self.latest: Finished[T] | None = None
        self.is_running = False
        self._name = name
        self._work = work
        self._clock = clock
        self._seconds_max = seconds_max

    async def run(self) -> Finished[T]:
        """Do the work and return its result. A cancelled run is as if it had not begun.

        Raises: Conflict while another run is in progress; RetryLater if the work takes too long; and its own errors.
        """
        if self.is_running:
            raise Conflict(f"{self._name} is running already; wait for its end")
        self.is_running = True
        began = self._clock.monotonic()
        try:
            async with asyncio.timeout(self._seconds_max):
                result = await self._work()
        except TimeoutError as error:
            raise RetryLater(
                f"{self._name} did not end within {self._seconds_max:g} s", retry_after_seconds=self._seconds_max
            ) from error
        finally:
            self.is_running = False
        self.latest = Finished(result=result, at=self._clock.wall(), seconds=self._clock.monotonic() - began)
        return self.latest
