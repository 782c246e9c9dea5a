"""Publishes at a steady rate, in a separate process. Each body begins with its time, by `time.monotonic`.

python publishing.py amqp URL RATE TOTAL QUEUES [EXCHANGE]
    one message at a time to the topic's exchange, or to another one, unconfirmed
python publishing.py http PORT RATE TOTAL
    through the proxy; a request has all that is due when it starts
"""

import asyncio
import sys
import time
import uuid
from collections.abc import Generator

import pika
from pika.spec import BasicProperties

from bench import load
from popgate.adapters.rabbitmq.usual_properties import COPY_ID_HEADER, IDENTITY_HEADER
from popgate.domain.identity import IdentityKeys
from popgate.domain.names import TopicName, bound_queue

SECRET = "the secret of this benchmark"
"""Secret of the consuming proxies, so that messages published here count as popgate's own."""
BODY_BYTES = 256
BATCH_MAX = 256
EXCHANGE = "popgate:bench"
"""The exchange of the topic."""


def body() -> str:
    return f"{time.monotonic()!r} ".ljust(BODY_BYTES, "x")


def due(rate: float, total: int) -> Generator[tuple[int, float]]:
    """Return how many messages must be published now, and how many seconds are left until the next one."""
    started, published = time.monotonic(), 0
    while published < total:
        elapsed = time.monotonic() - started
        count = min(total, int(elapsed * rate) + 1) - published
        published += count
        yield count, started + published / rate - time.monotonic()


def publish_by_amqp(amqp_url: str, rate: float, total: int, queues: int, exchange: str = EXCHANGE) -> None:
    parameters = pika.URLParameters(amqp_url)
    parameters.heartbeat = 0  # nothing is read
    keys = IdentityKeys([SECRET.encode()])
    signers = [keys.signer(bound_queue(TopicName("bench"), queue)) for queue in range(queues)]
    number = 0
    with pika.BlockingConnection(parameters) as connection:
        channel = connection.channel()
        for count, left in due(rate, total):
            for _ in range(count):
                copy_id = uuid.uuid4().hex
                headers = {COPY_ID_HEADER: copy_id, IDENTITY_HEADER: signers[number % queues](copy_id)}
                properties = BasicProperties(delivery_mode=2, headers=headers)
                channel.basic_publish(exchange, str(number % queues), body().encode(), properties)
                number += 1
            time.sleep(max(0.0, left))


async def publish_by_http(port: int, rate: float, total: int) -> None:
    connection = await load.connect(port)
    for count, left in due(rate, total):
        for start in range(0, count, BATCH_MAX):
            messages = [{"body": body()} for _ in range(min(BATCH_MAX, count - start))]
            await connection.post("/v1/topics/bench/messages", {"messages": messages})
        await asyncio.sleep(max(0.0, left))
    connection.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["amqp", url, rate, total, queues, *exchange]:
            publish_by_amqp(url, float(rate), int(total), int(queues), *exchange)
        case ["http", port, rate, total]:
            asyncio.run(publish_by_http(int(port), float(rate), int(total)))
        case _:
            sys.exit(__doc__)
