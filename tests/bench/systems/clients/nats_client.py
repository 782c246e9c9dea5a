"""Pulls from a NATS JetStream stream through one durable consumer, with nats-py."""

import asyncio
from contextlib import suppress
from importlib import import_module
from typing import Any

from bench.systems.clients.client import BODY, LEASE_SECONDS, PATIENCE_SECONDS, WAIT_SECONDS, Client
from bench.systems.metering import Job, Meter

STREAM, SUBJECT, DURABLE = "bench", "bench.jobs", "workers"
WINDOW = 2_000
"""Number of messages published between two looks at the stream; the server drops what exceeds its own window."""


async def _connected(job: Job) -> Any:
    return await import_module("nats").connect(f"nats://127.0.0.1:{job.port}")


async def _fill(job: Job) -> None:
    """Make a new work queue, in which an ack deletes the message. Raises: TimeoutError."""
    errors = import_module("nats.js.errors")
    api = import_module("nats.js.api")
    connection = await _connected(job)
    stream = connection.jetstream()
    with suppress(errors.NotFoundError):  # in the first round
        await stream.delete_stream(STREAM)
    retention, storage = api.RetentionPolicy.WORK_QUEUE, api.StorageType.FILE
    await stream.add_stream(name=STREAM, subjects=[SUBJECT], retention=retention, storage=storage)
    config = api.ConsumerConfig(
        durable_name=DURABLE, ack_policy=api.AckPolicy.EXPLICIT, ack_wait=LEASE_SECONDS, filter_subject=SUBJECT
    )
    await stream.add_consumer(STREAM, config)
    for first in range(0, job.total, WINDOW):
        last = min(job.total, first + WINDOW)
        for _ in range(last - first):
            await connection.publish(SUBJECT, BODY)
        await connection.flush()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await stream.stream_info(STREAM)).state.messages < last:  # noqa: ASYNC110  # no signal
                await asyncio.sleep(0.01)
    await connection.close()


async def _drain(job: Job, meter: Meter) -> None:
    async def work(subscription: Any) -> None:
        while not meter.is_done:
            try:
                messages = await subscription.fetch(job.batch, timeout=WAIT_SECONDS)
            except TimeoutError:
                continue
            for message in messages:
                await message.ack()
            meter.settled(len(messages))

    connections = [await _connected(job) for _ in range(job.clients)]
    subscriptions = [await one.jetstream().pull_subscribe_bind(DURABLE, STREAM) for one in connections]
    meter.start()
    await asyncio.gather(*(work(one) for one in subscriptions))
    for one in connections:
        await one.close()


PULL = Client(fill=_fill, drain=_drain)
