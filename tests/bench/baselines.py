"""The baselines of the benchmarks, each in a separate process: a no-op ASGI endpoint, and a plain aio-pika consumer.

python baselines.py noop PORT
python baselines.py consume AMQP_URL TOTAL QUEUE...      prints messages a second
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aio_pika
import uvicorn

PREFETCH = 500
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


def main() -> None:
    match sys.argv[1:]:
        case ["noop", port]:
            uvicorn.run(noop, host="127.0.0.1", port=int(port), loop="asyncio", http="httptools", log_level="warning")
        case ["consume", amqp_url, total, *queues]:
            print(asyncio.run(consume(amqp_url, int(total), queues)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
