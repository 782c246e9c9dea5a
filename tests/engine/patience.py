"""Helpers for tests that advance the clock until something has happened, and their actions on a broker."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from popgate.domain.errors import BrokerUnavailable, QueueGone
from popgate.domain.message import Message
from popgate.engine.lease import moves
from popgate.engine.lease.pop_request import Leased
from popgate.engine.queue.buffered import MessageState
from popgate.engine.queue.channel_opener import OPEN_RETRY_SECONDS_MAX
from popgate.engine.queue.host import QueueHost
from popgate.engine.settle.orders import Verb
from support.engines import (
    World,
    bodies,
    body_of,
    eventually,
)

T = TypeVar("T")

STEP_SECONDS = 0.5
ROUNDS_MAX = 100
"""Maximum number of clock steps before a test gives up."""
LEASE_SECONDS = 600
"""Seconds; longer than any test's clock runs, unless the test waits for it."""


def away() -> BrokerUnavailable:
    return BrokerUnavailable("away, says the test", retry_after_seconds=0.001)


def host_of(world: World, topic: str = "t") -> QueueHost:
    return world.served(topic).hosts[0]


def handles(leased: Sequence[Leased]) -> list[str]:
    return [one.receipt_handle for one in leased]


async def patiently(world: World, work: asyncio.Task[T]) -> T:
    """Advance the clock until `work` is done."""
    for _ in range(ROUNDS_MAX):
        await world.settle_down()
        if work.done():
            break
        await world.let_pass(STEP_SECONDS)
    return await work


async def patient_pop(
    world: World, topic: str = "t", *, count: int = 1, wait: float = 2.0, invisibility: float | None = None
) -> list[Leased]:
    """Pop, advancing the clock only while nothing comes."""
    popping = world.pop(topic, count=count, wait=wait, invisibility=invisibility)
    return await patiently(world, asyncio.ensure_future(popping))


async def parked(
    world: World, *, count: int = 1, wait: float = 20.0, attempt: str | None = None
) -> asyncio.Task[list[Leased]]:
    """Start a pop that waits for messages of an empty queue."""
    popping = asyncio.ensure_future(world.pop("t", count=count, wait=wait, attempt=attempt))
    await world.settle_down()
    assert host_of(world).channel is not None
    assert not popping.done()
    return popping


async def come_back(world: World) -> None:
    """Let the engine consume its queue again, and take what the broker still has."""
    await world.let_pass(OPEN_RETRY_SECONDS_MAX)
    await eventually(lambda: host_of(world).channel is not None)
    await world.settle_down()


async def left(world: World, topic: str = "t") -> int:
    """Return how many messages the broker keeps; those held here are returned to it first."""
    await world.settle_down()
    queue = world.queue(topic)
    gate = world.faults.stop("broker.consume")
    if queue in world.broker.channels:
        await world.broker.lose(queue)
    (depth,) = await world.broker.wrapped.depth([queue])
    gate.open()
    assert depth.ready is not None
    return depth.ready


async def drained(world: World, topic: str = "t") -> list[str]:
    """Pop and ack everything, in order; nothing is left then."""
    handed_out: list[str] = []
    while leased := await patient_pop(world, topic, count=16, invisibility=LEASE_SECONDS):
        assert await world.settle(Verb.ACK, topic, leased) == ["acked"] * len(leased)
        handed_out += bodies(leased)
    assert await left(world, topic) == 0
    assert host_of(world, topic).state.flow.held_bytes == 0
    return handed_out


async def dead_once(world: World, body: str) -> list[Message]:
    """Wait until all dead-lettering is done; then `body` must be there once."""
    for _ in range(ROUNDS_MAX):
        letters: list[Message] = []
        with contextlib.suppress(QueueGone):  # it must be declared again
            letters = await world.dead_letters("t")
        if letters and all(held.state is not MessageState.MOVING for held in host_of(world).messages()):
            break
        await asyncio.sleep(moves.RETRY_SECONDS)
        await world.let_pass(STEP_SECONDS)
    letters = await world.dead_letters("t")
    assert [body_of(letter) for letter in letters] == [body]
    return letters


async def delete_queues(world: World) -> None:
    """Delete queues as an administrator may do, without the engine's knowledge."""
    await world.broker.wrapped.delete_group(world.served("t").layout)
    await world.settle_down()


async def delete_dead_letter_queue(world: World) -> None:
    await world.broker.wrapped.delete_group(replace(world.served("t").layout, queues=()))


async def overtake(world: World) -> None:
    """Claim the queue, as a second proxy would."""
    await world.leases.wrapped.claim(world.queue("t"))
