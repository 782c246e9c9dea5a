"""Consumes a Redis stream through a consumer group, with redis-py's asyncio client."""

import asyncio
from typing import Any

from redis.asyncio import Redis

from bench.systems.clients.client import BODY, WAIT_SECONDS, Client
from bench.systems.metering import Job, Meter

STREAM, GROUP = "bench", "workers"
PIPELINED = 500


def _connected(job: Job) -> Any:
    """Return a client with one connection. The library is only partly typed."""
    return Redis(host="127.0.0.1", port=job.port, single_connection_client=True, protocol=2)


async def _fill(job: Job) -> None:
    async with _connected(job) as redis:
        await redis.delete(STREAM)
        await redis.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        for first in range(0, job.total, PIPELINED):
            pipeline = redis.pipeline(transaction=False)
            for _ in range(min(PIPELINED, job.total - first)):
                pipeline.xadd(STREAM, {b"body": BODY})
            await pipeline.execute()


async def _drain(job: Job, meter: Meter) -> None:
    async def work(name: str, redis: Any) -> None:
        while not meter.is_done:
            answer: Any = await redis.xreadgroup(
                GROUP, name, {STREAM: ">"}, count=job.batch, block=int(1000 * WAIT_SECONDS)
            )
            if answer:
                [[_, entries]] = answer
                settled = await redis.xack(STREAM, GROUP, *(entry[0] for entry in entries))
                meter.settled(settled)

    clients = [await _connected(job).initialize() for _ in range(job.clients)]
    meter.start()
    await asyncio.gather(*(work(f"client-{number}", one) for number, one in enumerate(clients)))
    for one in clients:
        await one.aclose()


STREAMS = Client(fill=_fill, drain=_drain)
