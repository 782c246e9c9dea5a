"""Consumes plain quorum queues with aio-pika: pushed messages, or ``basic.get``."""

import asyncio
from contextlib import AsyncExitStack

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from bench.systems.clients.amqp_fill import PREFETCH, QUEUES, amqp_url, fill
from bench.systems.clients.client import Client
from bench.systems.metering import Job, Meter


async def _channels(job: Job, stack: AsyncExitStack) -> list[AbstractChannel]:
    """Return a channel of a separate connection for each client."""
    channels: list[AbstractChannel] = []
    for _ in range(job.clients):
        connection = await stack.enter_async_context(await aio_pika.connect(amqp_url(job)))
        channels.append(await connection.channel())
    return channels


async def _consume(job: Job, meter: Meter) -> None:
    """Consume as in the tutorial: a callback, and one ack a message."""
    done = asyncio.Event()

    async def on_message(message: AbstractIncomingMessage) -> None:
        await message.ack()
        meter.settled(1)
        if meter.is_done:
            done.set()

    async with AsyncExitStack() as stack:
        channels = await _channels(job, stack)
        for channel in channels:
            await channel.set_qos(prefetch_count=PREFETCH)
        meter.start()
        for channel in channels:
            for name in QUEUES:
                queue = await channel.get_queue(name, ensure=False)
                await queue.consume(on_message)
        await done.wait()


async def _get(job: Job, meter: Meter) -> None:
    """Ask for one message at a time, in each queue in turn."""

    async def work(number: int, channel: AbstractChannel) -> None:
        queues = [await channel.get_queue(name, ensure=False) for name in QUEUES]
        turn = number
        while not meter.is_done:
            message = await queues[turn % len(queues)].get(fail=False)
            turn += 1
            if message is not None:
                await message.ack()
                meter.settled(1)

    async with AsyncExitStack() as stack:
        channels = await _channels(job, stack)
        meter.start()
        await asyncio.gather(*(work(number, channel) for number, channel in enumerate(channels)))


CONSUME = Client(fill=fill, drain=_consume)
GET = Client(fill=fill, drain=_get)
