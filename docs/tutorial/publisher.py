"""Fills two queues of RabbitMQ with orders, as a program does that has never heard of popgate.

    python publisher.py --messages 20000

Half of the messages go to the classic queue `orders-classic`, half to the quorum queue `orders-quorum`. Sizes are
mixed, from no byte at all to 16 MiB, and so are content types and headers; nothing has a message_id. The SHA-256 of
every body is written to published.txt, one a line, for whoever wants to count afterwards.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pika

QUEUES = {"orders-classic": {"x-queue-type": "classic"}, "orders-quorum": {"x-queue-type": "quorum"}}
LARGE_BYTES = (1 << 20, 3 << 20, 16 << 20)
CONTENT_TYPES = (None, "application/json", "text/plain; charset=utf-8", "application/octet-stream", "x/unheard-of")
HEADERS: dict[str, Any] = {
    "tenant": "açaí & co",
    "retries": 3,
    "big": 2**60,
    "urgent": True,
    "note": None,
    "price": Decimal("12.50"),
    "placed": datetime(2024, 2, 29, 12, 0, tzinfo=UTC),
    "tags": ["new", 7, False],
    "address": {"city": "Łódź", "geo": {"zone": "north", "grid": [4, 2]}},
    "signature": b"\x00\xfe\xff",
}


def bodies(count: int, chance: random.Random) -> Iterator[bytes]:
    """That many bodies: text, JSON and bytes, mostly small, with two of each large size among them."""
    large = dict(zip(chance.sample(range(count), min(count, 6)), LARGE_BYTES * 2, strict=False))
    for number in range(count):
        kind, size = chance.choice("tjb"), chance.choice((0, 1, 80, 400, 400, 1_500, 12_000))
        size = large.get(number, chance.randint(size // 2, size))
        if kind == "t":
            text = f'No. {number}:\t"two ☕", 50 % off\\unsold\r\n\x00\x1f\x7f'
            yield (text * (size // 32 + 1)).encode()[:size].decode(errors="ignore").encode()
        elif kind == "j" and size >= 80:
            yield json.dumps({"order": number, "lines": "x" * (size - 80)}).encode()
        else:
            yield chance.randbytes(size)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill two queues of RabbitMQ.")
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--amqp-url", default="amqp://guest:guest@127.0.0.1:5672/")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    connection = pika.BlockingConnection(pika.URLParameters(options.amqp_url))
    channel = connection.channel()
    channel.confirm_delivery()
    for queue, arguments in QUEUES.items():
        channel.queue_declare(queue, durable=True, arguments=arguments)
    with Path("published.txt").open("a") as published:
        for number, body in enumerate(bodies(options.messages, chance)):
            channel.basic_publish(
                exchange="",
                routing_key=list(QUEUES)[number % len(QUEUES)],
                body=body,
                properties=pika.BasicProperties(
                    delivery_mode=2,
                    content_type=chance.choice(CONTENT_TYPES),
                    headers=dict(chance.sample(list(HEADERS.items()), chance.randint(0, 4))),
                ),
                mandatory=True,
            )
            published.write(hashlib.sha256(body).hexdigest() + "\n")
    connection.close()
    print(f"published {options.messages} messages to {' and '.join(QUEUES)}")


if __name__ == "__main__":
    main()
