"""The load of the growth benchmark: pops and acks of single messages, and the processor time that they cost a proxy.

Two loads. *Ready*: all messages are published before, and clients pop and ack them as fast as they can. *Waiting*: the
clients' pops wait, and single messages are published at a steady rate. The second one shows the latency, and the cost
of pops that wait.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil

from bench import load

FILL_BATCH_MAX = 256
FILL_BYTES_MAX = 4 * 1024 * 1024
FILL_CLIENTS = 4
LEASE_SECONDS = 3_600
WAIT_SECONDS = 20
LEASED_BYTES = 100
"""Size of the bodies of messages that stay in flight."""
SETTLE_SECONDS = 0.3
"""Seconds between two loads, in which the proxy writes what it writes behind, such as deletions."""
IDLE_SHARE, IDLE_LOOKS_MAX = 0.3, 100
"""A process is idle when it uses less than this share of a core; looked at this often at most."""


class StalledError(Exception):
    """A message that was published did not reach a pop in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A proxy with its topics, and the clients that use them. ``broker_pid``: its RabbitMQ node, if any."""

    port: int
    pid: int
    broker_pid: int | None
    topics: Sequence[str]
    clients: int
    body_bytes: int

    def processor_seconds(self) -> float:
        return _processor_seconds(self.pid)

    def broker_seconds(self) -> float:
        """Return the processor time of the RabbitMQ node; 0.0 on the embedded store, which is part of the proxy."""
        return 0.0 if self.broker_pid is None else _processor_seconds(self.broker_pid)

    def memory_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measurement. The times of the processor are microseconds of the proxy's process a message."""

    rate: float
    """Messages a second, popped and acked by clients that find ready messages."""
    ready_us: float
    waiting_us: float
    """The same while pops wait; it includes the publish of the message."""
    broker_us: float
    """The processor time of RabbitMQ while ready messages are popped and acked, and until it has applied the acks."""
    latencies: Sequence[float]
    """Seconds from before a publish until the message that a waiting pop got is acked."""


def _processor_seconds(pid: int) -> float:
    """Return the processor time of all threads. ``psutil`` has it only in hundredths of a second."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def _group(topic: str) -> str:
    return f"/v1/topics/{topic}/groups/default"


async def _take(connection: load.Connection, topic: str, count: int, wait_seconds: int = WAIT_SECONDS) -> list[Any]:
    """Pop up to ``count`` messages. Raises: StalledError if there is none."""
    body = {"max_messages": count, "wait_seconds": wait_seconds, "invisibility_seconds": LEASE_SECONDS}
    messages: list[Any] = (await connection.post(f"{_group(topic)}/pop", body))["messages"]
    if not messages:
        raise StalledError(f"a pop of {topic} got no message within {WAIT_SECONDS} s")
    return messages


async def _ack(connection: load.Connection, topic: str, messages: Sequence[Any]) -> None:
    handles = [message["receipt_handle"] for message in messages]
    answer = await connection.post(f"{_group(topic)}/ack", {"receipt_handles": handles})
    if any(entry["status"] != "acked" for entry in answer["results"]):
        raise RuntimeError(f"ack: {answer}")


async def fill(target: Target, total: int) -> None:
    """Publish ``total`` messages, evenly to all topics."""
    batch = max(1, min(FILL_BATCH_MAX, FILL_BYTES_MAX // target.body_bytes))
    message = {"body": "x" * target.body_bytes}
    counts = [total // len(target.topics)] * len(target.topics)
    for number in range(total % len(target.topics)):
        counts[number] += 1
    batches = [
        (topic, min(batch, count - start))
        for topic, count in zip(target.topics, counts, strict=True)
        for start in range(0, count, batch)
    ]

    async def work(connection: load.Connection) -> None:
        while batches:
            topic, count = batches.pop()
            answer = await connection.post(f"/v1/topics/{topic}/messages", {"messages": [message] * count})
            if any(entry["status"] != "published" for entry in answer["results"]):
                raise RuntimeError(f"publish: {answer}")

    connections = [await load.connect(target.port) for _ in range(FILL_CLIENTS)]
    await asyncio.gather(*(work(connection) for connection in connections))
    for connection in connections:
        connection.close()


async def lease(target: Target, total: int) -> None:
    """Publish messages and lease them; they stay in flight. There must be no other ready message."""
    (topic,) = target.topics
    left = total

    async def work(connection: load.Connection) -> None:
        nonlocal left
        while left > 0:
            count = min(FILL_BATCH_MAX, left)
            left -= count
            taken = 0
            while taken < count:
                taken += len(await _take(connection, topic, count - taken))

    step = 20_000
    for start in range(0, total, step):
        left = min(step, total - start)
        await fill(replace(target, body_bytes=LEASED_BYTES), left)
        connections = [await load.connect(target.port) for _ in range(FILL_CLIENTS)]
        await asyncio.gather(*(work(connection) for connection in connections))
        for connection in connections:
            connection.close()


async def pop_and_ack(target: Target, total: int) -> float:
    """Pop and ack ``total`` ready messages one by one. Return the seconds that it took."""
    # Each pop must find a message: the topics are filled in turn, and popped in turn.
    topics, left = cycle(target.topics), total

    async def work(connection: load.Connection) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            topic = next(topics)
            await _ack(connection, topic, await _take(connection, topic, 1))

    connections = [await load.connect(target.port) for _ in range(target.clients)]
    started = time.perf_counter()
    await asyncio.gather(*(work(connection) for connection in connections))
    seconds = time.perf_counter() - started
    for connection in connections:
        connection.close()
    return seconds


async def publish_to_waiting(target: Target, total: int, rate: float) -> tuple[list[float], float]:
    """Publish ``total`` messages at ``rate`` a second to clients that wait. Return the latencies in seconds.

    The second value is the processor time of the proxy from the first publish to the last ack: the pops that begin to
    wait before are not counted. Raises: StalledError.
    """
    sent: dict[str, float] = {}
    latencies: list[float] = []
    served = [target.topics[number * len(target.topics) // target.clients] for number in range(target.clients)]
    all_acked = asyncio.Event()

    async def work(topic: str) -> None:
        connection = await load.connect(target.port)
        try:
            while True:
                messages = await _take(connection, topic, 1)
                await _ack(connection, topic, messages)
                latencies.append(time.perf_counter() - sent[messages[0]["message_id"]])
                if len(latencies) == total:
                    all_acked.set()
        finally:
            connection.close()

    async def publish() -> float:
        connection = await load.connect(target.port)
        before = target.processor_seconds()
        started = time.perf_counter()
        for number in range(total):
            await asyncio.sleep(max(0.0, started + number / rate - time.perf_counter()))
            message_id = f"m{number}"
            sent[message_id] = time.perf_counter()
            message = {"body": "x" * target.body_bytes, "message_id": message_id}
            topic = served[number % len(served)]
            await connection.post(f"/v1/topics/{topic}/messages", {"messages": [message]})
        await all_acked.wait()
        seconds = target.processor_seconds() - before
        connection.close()
        return seconds

    try:
        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(work(topic)) for topic in served]
            await _idle(target.processor_seconds)  # until all of them wait
            processor_seconds = await publish()
            for worker in workers:
                worker.cancel()
    except ExceptionGroup as errors:
        stalled = errors.subgroup(StalledError)
        if stalled is None:
            raise
        raise StalledError(str(stalled.exceptions[0])) from errors
    return latencies, processor_seconds


async def measure(target: Target, *, ready: int, waiting: int, rate: float) -> Measured:
    """Measure both loads, with so many messages, and with ``rate`` publishes a second to waiting pops."""
    await fill(target, ready)
    await asyncio.sleep(SETTLE_SECONDS)
    before, broker_before = target.processor_seconds(), target.broker_seconds()
    seconds = await pop_and_ack(target, ready)
    ready_us = (target.processor_seconds() - before) * 1e6 / ready
    await _idle(target.broker_seconds)  # it has applied the acks
    broker_us = (target.broker_seconds() - broker_before) * 1e6 / ready
    latencies, processor_seconds = await publish_to_waiting(target, waiting, rate)
    waiting_us = processor_seconds * 1e6 / waiting
    await asyncio.sleep(SETTLE_SECONDS)
    return Measured(
        rate=ready / seconds, ready_us=ready_us, waiting_us=waiting_us, broker_us=broker_us, latencies=latencies
    )


async def _idle(processor_seconds: Callable[[], float]) -> None:
    """Wait until a process uses little of a core, so that what it still works on does not disturb the next load."""
    for _ in range(IDLE_LOOKS_MAX):
        before = processor_seconds()
        await asyncio.sleep(SETTLE_SECONDS)
        if processor_seconds() - before < IDLE_SHARE * SETTLE_SECONDS:
            return
