"""Consumes plain quorum queues with pika's BlockingConnection, one a thread: pushed messages, or ``basic.get``."""

import threading

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.spec import Basic, BasicProperties

from bench.systems.clients.amqp_fill import PREFETCH, QUEUES, amqp_url, fill
from bench.systems.clients.client import Client, in_threads
from bench.systems.metering import Job, Meter

POLL_SECONDS = 0.2


async def _consume(job: Job, meter: Meter) -> None:
    """Consume with a callback, and one ack a message."""
    all_connected = threading.Barrier(job.clients, action=meter.start)

    def on_message(channel: BlockingChannel, method: Basic.Deliver, _: BasicProperties, __: bytes) -> None:
        channel.basic_ack(method.delivery_tag or 0)
        meter.settled(1)

    def work(_: int) -> None:
        with pika.BlockingConnection(pika.URLParameters(amqp_url(job))) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=PREFETCH)
            all_connected.wait()
            for name in QUEUES:
                channel.basic_consume(name, on_message)
            while not meter.is_done:
                connection.process_data_events(POLL_SECONDS)

    await in_threads(job.clients, work)


async def _get(job: Job, meter: Meter) -> None:
    """Ask for one message at a time, in each queue in turn."""
    all_connected = threading.Barrier(job.clients, action=meter.start)

    def work(number: int) -> None:
        turn = number
        with pika.BlockingConnection(pika.URLParameters(amqp_url(job))) as connection:
            channel = connection.channel()
            all_connected.wait()
            while not meter.is_done:
                method, _, _ = channel.basic_get(QUEUES[turn % len(QUEUES)])
                turn += 1
                if method is not None:
                    channel.basic_ack(method.delivery_tag or 0)
                    meter.settled(1)

    await in_threads(job.clients, work)


CONSUME = Client(fill=fill, drain=_consume)
GET = Client(fill=fill, drain=_get)
