"""Measures how late the event loop runs its timers, which delays every request of the process by as much."""

import asyncio

from popgate.runtime.histogram import Histogram

LOOK_SECONDS = 0.5


class LoopLag:
    """Measures the delay of a timer ``1 / LOOK_SECONDS`` times a second, in ``seconds``."""

    def __init__(self) -> None:
        self.seconds = Histogram()

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LOOK_SECONDS
            await asyncio.sleep(LOOK_SECONDS)
            self.seconds.add(loop.time() - due)
