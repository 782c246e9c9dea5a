"""Fills plain quorum queues, without popgate."""

import time

import pika
from pika.spec import BasicProperties

from bench.systems.clients.client import BODY, PATIENCE_SECONDS
from bench.systems.metering import Job

QUEUES = tuple(f"plain-{number}" for number in range(4))
"""As many as the topic of popgate has."""
PREFETCH = 500


def amqp_url(job: Job) -> str:
    return f"amqp://guest:guest@127.0.0.1:{job.port}/"


async def fill(job: Job) -> None:
    """Publish to the queues in turn, and return when they have all messages. Raises: TimeoutError."""
    parameters = pika.URLParameters(amqp_url(job))
    with pika.BlockingConnection(parameters) as connection:
        channel = connection.channel()
        for name in QUEUES:
            channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
            channel.queue_purge(name)
        properties = BasicProperties(delivery_mode=2)
        for number in range(job.total):
            channel.basic_publish("", QUEUES[number % len(QUEUES)], BODY, properties)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while sum(channel.queue_declare(name, passive=True).method.message_count or 0 for name in QUEUES) < job.total:
            if time.monotonic() > deadline:
                raise TimeoutError("the queues don't have all messages")
            connection.sleep(0.05)
