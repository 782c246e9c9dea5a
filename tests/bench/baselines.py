"""The baselines of the benchmarks, each in a separate process: a no-op ASGI endpoint, and a plain aio-pika consumer
and publisher.

python baselines.py noop PORT
python baselines.py consume AMQP_URL TOTAL QUEUE...             prints messages a second
python baselines.py publish AMQP_URL TOTAL EXCHANGE KEY...      prints messages a second, processor microseconds of each
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aio_pika
import uvicorn

PREFETCH = 500
GATHERED, GATHERS = 256, 4
"""Number of publishes in one `asyncio.gather`, and number of these that run at a time."""
BODY_BYTES = 1024
ANSWER = b'{"messages":[]}'


async def noop(
    scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
) -> None:
    """Read the request and answer a constant."""
    while (await receive()).get("more_body"):
        pass
    length = (b"content-length", str(len(ANSWER)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": ANSWER})


async def consume(amqp_url: str, total: int, queues: list[str]) -> float:
    """Consume as in the tutorial: a callback, prefetch 500, one ack a message."""
    connection = await aio_pika.connect(amqp_url)
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=PREFETCH)
    done = asyncio.Event()
    seen = 0
    for name in queues:  # until popgate has stopped consuming: a single active consumer keeps all others waiting
        while (await channel.declare_queue(name, passive=True)).declaration_result.consumer_count:  # noqa: ASYNC110  # no signal
            await asyncio.sleep(0.1)
    started = time.perf_counter()

    async def on_message(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        nonlocal seen
        await message.ack()
        seen += 1
        if seen == total:
            done.set()

    for name in queues:
        queue = await channel.get_queue(name, ensure=False)
        await queue.consume(on_message)
    await done.wait()
    seconds = time.perf_counter() - started
    await connection.close()
    return total / seconds


async def publish(amqp_url: str, total: int, exchange_name: str, keys: list[str]) -> tuple[float, float]:
    """Publish persistent messages, each with its confirm, as `asyncio.gather` does it best: several at a time."""
    connection = await aio_pika.connect(amqp_url)
    channel = await connection.channel(publisher_confirms=True)
    exchange = await channel.get_exchange(exchange_name, ensure=False)
    body = b"x" * BODY_BYTES
    left = total

    async def work() -> None:
        nonlocal left
        while left > 0:
            count = min(GATHERED, left)
            left -= count
            messages = [aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT) for _ in range(count)]
            await asyncio.gather(
                *(exchange.publish(one, keys[number % len(keys)]) for number, one in enumerate(messages))
            )

    started, started_processor = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(GATHERS)))
    seconds, processor_seconds = time.perf_counter() - started, time.process_time() - started_processor
    await connection.close()
    return total / seconds, processor_seconds / total * 1e6


def main() -> None:
    match sys.argv[1:]:
        case ["noop", port]:
            uvicorn.run(noop, host="127.0.0.1", port=int(port), loop="asyncio", http="httptools", log_level="warning")
        case ["consume", amqp_url, total, *queues]:
            print(asyncio.run(consume(amqp_url, int(total), queues)))
        case ["publish", amqp_url, total, exchange, *keys]:
            print(*asyncio.run(publish(amqp_url, int(total), exchange, keys)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
