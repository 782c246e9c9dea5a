"""One of four consumers hangs: it takes messages and settles none, and its connection stays open. Measures the effect
on the queues with pop clients, pull clients and plain AMQP consumers, with the same publisher and the same number of
unsettled messages a consumer.

A consumer handles one message after the other, and holds a limited number unsettled. The hanging one holds the maximum.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import aio_pika

from bench import load
from bench.fates import HUNG, Fates, Summary, as_json
from bench.modes import switch
from bench.report import Report, Row
from bench.taking import PopTaker, PullSession, PullTaker, Taker, assigned
from support.proxy import ProxyProcess

CONSUMERS = 4
QUEUES = 4
BODY_BYTES = 256
WAIT_SECONDS = 5.0
PAUSE_SECONDS = 0.05
"""Seconds between two publishes."""
BATCH_MAX = 256
ELSEWHERE_SECONDS_MAX = 1.0
LATE_SECONDS_MAX = 1.0
ELSEWHERE, WITH_IT = "longest wait elsewhere", "longest wait with it"
POP, PULL, PULL_SILENT, PLAIN = "pop", "pull", "pull, silent", "plain AMQP"
WAYS = (POP, PULL, PULL_SILENT, PLAIN)
"""A hanging pull client either continues its heartbeats, as one with a hung handler does, or is silent altogether."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    seconds: float = 60.0
    hangs_at: float = 10.0
    rate: int = 100
    """Messages a second."""
    in_hand_max: int = 48
    work_seconds: float = 0.005
    """Seconds of work on one message."""
    invisibility_seconds: float = 10.0
    """Lease length in seconds; the same as a pull client's session."""


def scaled(scale: float) -> Plan:
    """Return a shorter plan, which shows that the benchmark works."""
    plan = Plan()
    return Plan(
        seconds=plan.seconds * scale,
        hangs_at=plan.hangs_at * scale,
        invisibility_seconds=max(1.0, plan.invisibility_seconds * scale),
    )


class Run:
    """One run of one way, from its first message to its last. The clock starts with the first."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.fates = Fates()
        self._started = float("inf")

    def now(self) -> float:
        return time.perf_counter() - self._started

    @property
    def end(self) -> float:
        return self.plan.seconds

    def summary(self) -> Summary:
        return self.fates.summary(hangs_at=self.plan.hangs_at, end=self.end)

    async def publish(self, publish: Callable[[Sequence[str]], Awaitable[object]]) -> None:
        """Publish at a steady rate, until the end."""
        self._started = time.perf_counter()
        number = 0
        while (now := self.now()) < self.end:
            bodies: list[str] = []
            while number < (now + PAUSE_SECONDS) * self.plan.rate and len(bodies) < BATCH_MAX:
                self.fates.published(number, now)
                bodies.append(f"{number} ".ljust(BODY_BYTES, "x"))
                number += 1
            if bodies:
                await publish(bodies)
            await asyncio.sleep(max(0.0, number / self.plan.rate - self.now()))


class Hands:
    """The unsettled messages of one consumer."""

    def __init__(self, run: Run, consumer: int) -> None:
        self._run = run
        self._consumer = consumer
        self._held = 0
        self._one_by_one = asyncio.Lock()

    @property
    def hangs(self) -> bool:
        return self._consumer == HUNG and self._run.now() >= self._run.plan.hangs_at

    @property
    def room(self) -> int:
        return self._run.plan.in_hand_max - self._held

    async def handle(self, bodies: Sequence[str], settle: Callable[[], Awaitable[bool]]) -> None:
        """Work on a new message, and settle it, unless the consumer hangs."""
        takings = self._run.fates.taken([int(body.split()[0]) for body in bodies], self._consumer, self._run.now())
        self._held += len(takings)
        async with self._one_by_one:
            for _ in takings:
                if self.hangs:
                    return
                await asyncio.sleep(self._run.plan.work_seconds)
            if await settle():
                for taking in takings:
                    taking.settled = self._run.now()
        self._held -= len(takings)

    async def consume(self, taker: Taker) -> None:
        """Take and handle messages; at the limit, take no more."""
        while room := self.room:
            messages = await taker.take(room, WAIT_SECONDS)
            if messages:
                await self.handle([message["body"] for message in messages], partial(taker.settle, messages))


# -- the ways ------------------------------------------------------------------------------------------------------


async def measure(way: str, plan: Plan, proxy: ProxyProcess, amqp_url: str) -> Run:
    """Measure one run, in a separate topic or separate queues."""
    run = Run(plan)
    async with AsyncExitStack() as stack:
        if way == PLAIN:
            publish, consumers = await _plain(run, amqp_url, stack)
        else:
            path = await asyncio.to_thread(_make_topic, proxy, way)
            publish, consumers = await _through_popgate(run, way, proxy.port, path, stack)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(consume()) for consume in consumers]
            await group.create_task(run.publish(publish))
            for task in tasks:
                task.cancel()
    return run


Consumers = Sequence[Callable[[], Any]]
Publish = Callable[[Sequence[str]], Awaitable[object]]


def _make_topic(proxy: ProxyProcess, way: str) -> str:
    """Create the topic; return its path."""
    name = "hanging-" + way.replace(", ", "-")
    admin = f"/v1/admin/topics/{name}"
    proxy.client.put(admin, json={"queues": QUEUES}).raise_for_status()
    proxy.client.put(f"{admin}/groups/default", json={"max_deliveries": None}).raise_for_status()
    switch(proxy, "pop" if way == POP else "pull", name)
    return f"/v1/topics/{name}"


async def _through_popgate(
    run: Run, way: str, port: int, topic_path: str, stack: AsyncExitStack
) -> tuple[Publish, Consumers]:
    path = f"{topic_path}/groups/default"

    async def connect() -> load.Connection:
        return stack.enter_context(closing(await load.connect(port)))

    publisher = await connect()

    async def publish(bodies: Sequence[str]) -> None:
        await publisher.post(f"{topic_path}/messages", {"messages": [{"body": body} for body in bodies]})

    hands = [Hands(run, number) for number in range(CONSUMERS)]
    if way == POP:
        poppers = [PopTaker(await connect(), path, run.plan.invisibility_seconds) for _ in hands]
        return publish, [partial(one.consume, popper) for one, popper in zip(hands, poppers, strict=True)]
    sessions = [PullSession(await connect(), path, f"client-{number}") for number in range(CONSUMERS)]
    await assigned(sessions, QUEUES)
    is_silent = way == PULL_SILENT
    return publish, [
        partial(_pull, one, session, path, connect, is_silent) for one, session in zip(hands, sessions, strict=True)
    ]


async def _pull(
    hands: Hands,
    session: PullSession,
    path: str,
    connect: Callable[[], Awaitable[load.Connection]],
    is_silent: bool,
) -> None:
    """Run one pull client. It has one connection for each of its queues, and reads a queue while it is assigned."""
    following: dict[int, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as group:
        while not (is_silent and hands.hangs):
            pause_seconds = await session.ask()
            for queue in session.queues:
                if queue not in following or following[queue].done():
                    following[queue] = group.create_task(_follow(hands, session, path, queue, await connect()))
            await asyncio.sleep(pause_seconds)
            for queue in following.keys() - {*session.queues}:
                await following.pop(queue)


async def _follow(hands: Hands, session: PullSession, path: str, queue: int, connection: load.Connection) -> None:
    taker = PullTaker(connection, path, session, queue)
    while not taker.is_lost and queue in session.queues and (room := hands.room):
        messages = await taker.take(room, WAIT_SECONDS)
        if messages:
            await hands.handle([message["body"] for message in messages], partial(taker.settle, messages))


async def _plain(run: Run, amqp_url: str, stack: AsyncExitStack) -> tuple[Publish, Consumers]:
    """Run consumers on plain quorum queues, each on all of them; a consumer's limit is its prefetch, spread over the
    queues.
    """
    names = [f"plain-{number}" for number in range(QUEUES)]

    async def connect() -> aio_pika.abc.AbstractChannel:
        connection = await stack.enter_async_context(await aio_pika.connect(amqp_url))
        return await connection.channel()

    publisher = await connect()
    for name in names:
        await publisher.declare_queue(name, durable=True, arguments={"x-queue-type": "quorum"})
    turn = 0

    async def publish(bodies: Sequence[str]) -> None:
        nonlocal turn
        messages = [aio_pika.Message(body.encode(), delivery_mode=2) for body in bodies]
        turn += len(messages)
        exchange = publisher.default_exchange
        await asyncio.gather(
            *(exchange.publish(one, names[(turn + number) % QUEUES]) for number, one in enumerate(messages))
        )

    channels = [await connect() for _ in range(CONSUMERS)]
    return publish, [partial(_consume, Hands(run, number), one, names) for number, one in enumerate(channels)]


async def _consume(hands: Hands, channel: aio_pika.abc.AbstractChannel, names: Sequence[str]) -> None:
    await channel.set_qos(prefetch_count=hands.room // len(names))  # of each queue

    async def on_message(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        async def ack() -> bool:
            await message.ack()
            return True

        await hands.handle([message.body.decode()], ack)

    for name in names:
        await (await channel.get_queue(name, ensure=False)).consume(on_message)
    await asyncio.Event().wait()


# -- the figures ---------------------------------------------------------------------------------------------------


def rows(report: Report, proxy: ProxyProcess, amqp_url: str, plan: Plan) -> dict[str, Any]:
    """Return the table's rows and the plot's data."""
    figures: dict[str, Any] = {}
    for way in WAYS:
        print(f"one of {CONSUMERS} consumers hangs: {way}, {plan.seconds:g} s", flush=True)
        run = asyncio.run(measure(way, plan, proxy, amqp_url))
        summary = run.summary()
        _rows(report, way, summary, plan)
        figures[way] = as_json(summary, run.fates.samples(run.end, 0.5))
    return {"hangs_at": plan.hangs_at, "seconds": plan.seconds, "ways": figures}


def _rows(report: Report, way: str, summary: Summary, plan: Plan) -> None:
    targets = targets_of(plan) if way == POP else dict[str, float]()
    for what, value, unit in (
        (ELSEWHERE, summary.other_wait_seconds_max, "s"),
        (WITH_IT, summary.held_wait_seconds_max, "s"),
        ("maximum age of the oldest message", summary.oldest_seconds_max, "s"),
        ("oldest message at the end", summary.oldest_seconds_at_end, "s"),
        ("maximum backlog", summary.backlog_max, "messages"),
        ("backlog at the end", summary.backlog_at_end, "messages"),
    ):
        limit = targets.get(what)
        report.add(
            Row(
                name=f"one of four hangs, {way}: {what}",
                value=value,
                unit=unit,
                target="" if limit is None else f"<= {limit:g} s",
                reached=None if limit is None else value <= limit,
            )
        )


def targets_of(plan: Plan) -> Mapping[str, float]:
    return {
        ELSEWHERE: ELSEWHERE_SECONDS_MAX,
        WITH_IT: plan.invisibility_seconds + LATE_SECONDS_MAX,
    }
