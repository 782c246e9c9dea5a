"""A process dies after the broker has stored a message and before the state store records it, on real brokers.

A repeat of such a publish is the same copy, and consumers get it once: while the first one waits, is leased, or was
acked.
"""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import pytest

from popgate.engine.lease.pop_request import Leased
from popgate.engine.settle.orders import Verb
from support.engines import World, bodies, crash, open_world


class Open(Protocol):
    def __call__(self, folder: Path) -> AbstractAsyncContextManager[World]: ...


@pytest.fixture(params=["embedded", "rabbitmq"])
def opening(request: pytest.FixtureRequest) -> Open:
    """Opens a world on one broker, the same one every time."""
    amqp_url = None if request.param == "embedded" else request.getfixturevalue("amqp_url")
    return lambda folder: open_world(folder, amqp_url=amqp_url)


async def published_and_killed(opening: Open, folder: Path, *, at: str, after: bool) -> Path:
    """Publish "a" and die at this step; return the dead process's data folder."""
    left = folder / "left by the kill"
    async with opening(folder / "data") as world:
        await world.create("t")
        gate = world.faults.stop(at, after=after)
        publishing = asyncio.ensure_future(world.publish_once("t", "a"))
        await gate.reached()
        await crash(world, folder / "data", left)
        publishing.cancel()
        await asyncio.wait({publishing})
    return left


async def popped(world: World, count: int, *, wait: float = 10.0) -> list[Leased]:
    """Pop until `count` messages have come."""
    leased: list[Leased] = []
    while len(leased) < count:
        more = await world.pop("t", count=count - len(leased), wait=wait, invisibility=600)
        assert more, f"{len(leased)} messages came, not {count}"
        leased += more
    return leased


async def copies_at_the_broker(world: World) -> int:
    """Return how many physical messages are in the queue, all of them returned to it."""
    await world.engine.drain()
    layout = world.served("t").layout
    (depth,) = await world.broker.depth([layout.queues[0]])
    return depth.ready or 0


@pytest.mark.parametrize("consumed", ["not yet", "leased", "acked"])
async def test_what_was_stored_and_not_confirmed_is_published_again_and_consumed_once(
    opening: Open, tmp_path: Path, consumed: str
) -> None:
    folder = await published_and_killed(opening, tmp_path, at="dedup.confirm", after=False)
    async with opening(folder) as world:
        leased = await popped(world, 1) if consumed != "not yet" else []
        if consumed == "acked":
            assert await world.settle(Verb.ACK, "t", leased) == ["acked"]
        result = await world.publish_once("t", "a")
        assert result.status == "published", "it is not known to be stored"
        assert (await world.publish_once("t", "a")).status == "duplicate"
        assert await world.publish("t", "b") == ["published"]
        rest = await popped(world, 1 if consumed != "not yet" else 2)
        assert bodies(rest) == (["b"] if consumed != "not yet" else ["a", "b"])
        assert await world.pop("t", wait=1) == []
        leased = rest if consumed == "acked" else [*leased, *rest]
        assert await world.settle(Verb.ACK, "t", leased) == ["acked"] * len(leased)
        assert await copies_at_the_broker(world) == 0, "the second copy was acked with the first"


async def test_the_broker_really_holds_two_copies_of_it_then(opening: Open, tmp_path: Path) -> None:
    folder = await published_and_killed(opening, tmp_path, at="dedup.confirm", after=False)
    async with opening(folder) as world:
        await world.publish_once("t", "a")
        assert await copies_at_the_broker(world) == 2, "else the tests above test nothing"


@pytest.mark.parametrize(("at", "after"), [("dedup.reserve", True), ("broker.publish", False)])
async def test_what_was_reserved_and_not_stored_is_published_by_the_repeat(
    opening: Open, tmp_path: Path, at: str, after: bool
) -> None:
    folder = await published_and_killed(opening, tmp_path, at=at, after=after)
    async with opening(folder) as world:
        assert (await world.publish_once("t", "a")).status == "published"
        assert (await world.publish_once("t", "a")).status == "duplicate"
        leased = await popped(world, 1)
        assert bodies(leased) == ["a"]
        assert await world.settle(Verb.ACK, "t", leased) == ["acked"]
        assert await world.pop("t", wait=1) == []


async def test_what_was_confirmed_is_a_duplicate(opening: Open, tmp_path: Path) -> None:
    folder = await published_and_killed(opening, tmp_path, at="dedup.confirm", after=True)
    async with opening(folder) as world:
        assert (await world.publish_once("t", "a")).status == "duplicate"
        assert bodies(await popped(world, 1)) == ["a"]
        assert await world.pop("t", wait=1) == []
