"""The work of one request must not grow with the number of queues, topics, waiting pops or leases.

The tests count the bytecodes that popgate executes on the event loop, which do not depend on the speed or the load of
the machine. `make bench-growth` measures the same with real clients, and larger numbers.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest

from popgate.domain.message import Message
from popgate.domain.names import QUEUES_MAX
from popgate.engine.lease.pop_request import PopRequest, Presence
from popgate.engine.settle.orders import Verb
from popgate.engine.subscription.subscription import ServedSubscription
from support.engines import World, eventually, open_world

ROUNDS = 5
FEW = 10
MANY_QUEUES, MANY_POPS, MANY_LEASES, MANY_TOPICS = QUEUES_MAX, 250, 2_500, 30
GROWTH_MAX = 1.1
"""Allowed ratio of the bytecodes with many and with few. Structures with a logarithm, such as heaps, grow a little."""
HOUR = 3_600.0

Request = Callable[[World], Coroutine[None, None, None]]
Grow = Callable[[World, int, int], Awaitable[None]]


class Counter:
    """Counts the bytecodes of popgate that this thread executes while it is active."""

    def __init__(self) -> None:
        self.bytecodes = 0

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "call":
            if "/popgate/" not in frame.f_code.co_filename:
                return None
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        elif event == "opcode":
            self.bytecodes += 1
        return self._trace

    def __enter__(self) -> Self:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


async def waiting_pop(world: World) -> None:
    """Pop, publish to the waiting pop, and ack."""
    before = world.served("t").parked_pops
    popping = asyncio.ensure_future(world.pop("t", wait=10.0))
    await eventually(lambda: world.served("t").parked_pops > before)
    await world.publish("t", "m")
    await world.settle(Verb.ACK, "t", await popping)


async def pop_of_two(world: World) -> None:
    """Publish one message and pop up to two."""
    await world.publish("t", "m")
    await world.settle(Verb.ACK, "t", await world.pop("t", count=2))


async def ready_pop(world: World) -> None:
    """Publish, pop what is ready, extend the lease, release it, pop again, and ack."""
    await world.publish("t", "m")
    leased = await world.pop("t", wait=10.0)
    await world.settle(Verb.EXTEND, "t", leased, seconds=60.0)
    await world.settle(Verb.RELEASE, "t", leased)
    await world.settle(Verb.ACK, "t", await world.pop("t", wait=10.0))


REQUESTS: tuple[Request, ...] = (waiting_pop, pop_of_two, ready_pop)


async def least(world: World, *requests: Request) -> dict[str, int]:
    """Return the bytecodes of the cheapest round of each request, because some work happens only in some rounds."""
    found: dict[str, int] = {}
    for request in requests:
        counts: list[int] = []
        for _ in range(ROUNDS):
            await world.settle_down()
            with Counter() as counter:
                await request(world)
            counts.append(counter.bytecodes)
        found[request.__name__] = min(counts)
    return found


def assert_flat(few: Mapping[str, int], many: Mapping[str, int]) -> None:
    for request, bytecodes in many.items():
        assert bytecodes < GROWTH_MAX * few[request], f"{request}: {bytecodes} bytecodes, but {few[request]} with few"


@asynccontextmanager
async def opened(folder: Path, queues: int = 1) -> AsyncGenerator[World]:
    """Open a world with a topic whose queues are all consumed, and warm."""
    async with open_world(folder) as world:
        await world.create("t", queues=queues)
        for _ in range(2):
            await waiting_pop(world)
        await eventually(lambda: all(host.channel is not None for host in world.served("t").hosts))
        yield world


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("request_of", REQUESTS)
async def test_a_request_does_not_look_at_every_queue(tmp_path: Path, request_of: Request) -> None:
    """Each request has new queues, because the first messages of a queue raise its prefetch."""
    async with opened(made(tmp_path / "few"), FEW) as world:
        few = await least(world, request_of)
    async with opened(made(tmp_path / "many"), MANY_QUEUES) as world:
        assert_flat(few, await least(world, request_of))


async def _wait_in_vain(world: World, topic: str, only: Mapping[str, Sequence[str]] | None) -> None:
    assert await world.pop(topic, wait=30.0, only=only) == []


async def other_pops(world: World, first: int, end: int) -> None:
    """Park pops that accept only messages that do not come."""
    for number in range(first, end):
        world.context.background.spawn(_wait_in_vain(world, "t", {"for": [f"x{number % FEW}"]}), name="another pop")
    await eventually(lambda: world.served("t").parked_pops == end)


async def leases(world: World, first: int, end: int) -> None:
    """Lease messages for long."""
    for start in range(first, end, 250):
        count = min(250, end - start)
        await world.publish("t", *(f"l{start + number}" for number in range(count)))
        taken = 0
        while taken < count:
            taken += len(await world.pop("t", count=count - taken, wait=10.0, invisibility=HOUR))


async def topics(world: World, first: int, end: int) -> None:
    """Serve other topics, with waiting pops."""
    for number in range(first, end):
        await world.create(f"t{number}")
        world.context.background.spawn(_wait_in_vain(world, f"t{number}", None), name="another topic's pop")
        served = world.served(f"t{number}")
        await eventually(partial(_waits, served))


def _waits(served: ServedSubscription) -> bool:
    return served.parked_pops > 0


@pytest.mark.parametrize(("grow", "end"), [(other_pops, MANY_POPS), (leases, MANY_LEASES), (topics, MANY_TOPICS)])
async def test_a_request_does_not_look_at_what_others_do(tmp_path: Path, grow: Grow, end: int) -> None:
    async with opened(tmp_path) as world:
        await grow(world, 0, FEW)
        few = await least(world, *REQUESTS)
        await grow(world, FEW, end)
        assert_flat(few, await least(world, *REQUESTS))


async def test_a_pop_of_one_message_does_not_measure_it(tmp_path: Path) -> None:
    measured: list[Message] = []

    def answer_bytes(message: Message) -> int:
        measured.append(message)
        return len(message.body)

    async with opened(tmp_path) as world:
        await world.publish("t", "a", "b", "c")
        for count, expected in ((1, 0), (2, 2)):
            request = PopRequest(max_messages=count, wait_seconds=10.0, answer_bytes=answer_bytes)
            assert len(await world.engine.pop("t", "default", request, Presence())) == count
            assert len(measured) == expected
