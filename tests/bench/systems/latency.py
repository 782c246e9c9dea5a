"""The time from publish to a waiting client at a steady rate, through RabbitMQ: popgate, and a plain aio-pika consumer.

In both cases, the same publisher, a separate process, publishes by AMQP. The clients run in another process:

python latency.py popgate PORT TOTAL         prints "ready", and then the percentiles in milliseconds as JSON
python latency.py aio-pika AMQP_URL TOTAL
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack, closing
from pathlib import Path
from typing import Any

import aio_pika
from aio_pika.abc import AbstractIncomingMessage

from bench import load
from bench.systems.clients.amqp_fill import PREFETCH

RATE = 1_000
SECONDS = 8.0
CLIENTS, QUEUES, BATCH = 8, 4, 32
WARM_COUNT = 500
"""Number of first messages that don't count: connections and caches warm up."""
PLAIN, POPGATE = "aio-pika", "popgate"
EXCHANGES = {PLAIN: "latency", POPGATE: "popgate:bench"}
PERCENTILES = (50, 99)
TIMEOUT_SECONDS = 120
PUBLISHING = Path(__file__).parents[1] / "publishing.py"


def measure(way: str, where: str, amqp_url: str, seconds: float, environment: Mapping[str, str]) -> dict[str, float]:
    """Measure one round of one way. Return its percentiles in milliseconds. ``where``: what the clients connect to."""
    total = WARM_COUNT + int(seconds * RATE)
    command = [sys.executable, __file__, way, where, str(total)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as client:
        try:
            assert client.stdout is not None
            if client.stdout.readline().strip() != "ready":
                raise RuntimeError(f"the clients of {way} have failed")
            publish = ("amqp", amqp_url, str(RATE), str(total), str(QUEUES), EXCHANGES[way])
            subprocess.run([sys.executable, str(PUBLISHING), *publish], check=True, env=environment)
            output, _ = client.communicate(timeout=TIMEOUT_SECONDS)
        finally:
            client.kill()
    percentiles: dict[str, float] = json.loads(output)
    return percentiles


class Latencies:
    """Milliseconds from the publish of each message, whose body begins with its time, until a client has it."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._milliseconds: list[float] = []

    def note(self, body: str | bytes) -> None:
        self._milliseconds.append((time.monotonic() - float(body.split(maxsplit=1)[0])) * 1000)

    @property
    def is_complete(self) -> bool:
        return len(self._milliseconds) >= self._total

    def percentiles(self) -> dict[str, float]:
        """Return p50 and p99 of all but the first messages."""
        counted = sorted(self._milliseconds[WARM_COUNT:])
        return {f"p{percent}": counted[len(counted) * percent // 100] for percent in PERCENTILES}


async def _pop(port: int, latencies: Latencies) -> None:
    """Pop with clients that wait; each acks the messages of a pop with the next one."""

    async def work(connection: load.Connection) -> None:
        handles: list[str] = []
        while handles or not latencies.is_complete:
            body: dict[str, Any] = {"max_messages": BATCH, "wait_seconds": 0 if latencies.is_complete else 1}
            if handles:
                body["ack"] = handles
            messages = (await connection.post(f"{load.SUBSCRIPTION}/pop", body))["messages"]
            for message in messages:
                latencies.note(message["body"])
            handles = [message["receipt_handle"] for message in messages]

    with ExitStack() as stack:
        connections = [stack.enter_context(closing(await load.connect(port))) for _ in range(CLIENTS)]
        print("ready", flush=True)
        await asyncio.gather(*(work(connection) for connection in connections))


async def _consume(amqp_url: str, latencies: Latencies) -> None:
    """Consume new quorum queues with a callback and one ack a message."""
    done = asyncio.Event()

    async def on_message(message: AbstractIncomingMessage) -> None:
        latencies.note(message.body)
        await message.ack()
        if latencies.is_complete:
            done.set()

    async with AsyncExitStack() as stack:
        for number in range(CLIENTS):
            connection = await stack.enter_async_context(await aio_pika.connect(amqp_url))
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=PREFETCH)
            exchange = await channel.declare_exchange(EXCHANGES[PLAIN], durable=True)
            for index in range(QUEUES):
                queue = await channel.declare_queue(
                    f"latency-{index}", durable=True, arguments={"x-queue-type": "quorum"}
                )
                if number == 0:
                    await queue.bind(exchange, str(index))
                await queue.consume(on_message)
        print("ready", flush=True)
        await done.wait()


def main() -> None:
    way, where, total = sys.argv[1:]
    latencies = Latencies(int(total))
    if way == POPGATE:
        asyncio.run(_pop(int(where), latencies))
    else:
        asyncio.run(_consume(where, latencies))
    print(json.dumps(latencies.percentiles()))


if __name__ == "__main__":
    main()
