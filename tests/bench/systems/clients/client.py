"""What a client module gives to the benchmark: how to fill its queue, and how to take and settle what is in it.

A client module imports its library only when it is used, because the library may be missing.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bench.systems.metering import Job, Meter

BODY_BYTES = 1024
BODY = b"x" * BODY_BYTES
WAIT_SECONDS = 0.5
"""Seconds that a client waits for a message. The last ones, when everything is taken, wait in vain."""
LEASE_SECONDS = 600
PATIENCE_SECONDS = 60.0
"""Maximum seconds until a server has stored what was published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """``fill`` empties the queue and publishes ``job.total`` messages; ``drain`` takes and settles all of them."""

    fill: Callable[[Job], Coroutine[None, None, None]]
    drain: Callable[[Job, Meter], Coroutine[None, None, None]]


async def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work`` in ``count`` threads, for libraries that block, and give each thread its number."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(count) as threads:
        await asyncio.gather(*(loop.run_in_executor(threads, work, number) for number in range(count)))
