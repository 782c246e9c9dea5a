"""Requests of other proxies to follow the catalog: many at once cost two reads, and all get the latest state."""

import asyncio
from pathlib import Path

import pytest

from popgate.domain.errors import StateUnavailable
from popgate.domain.names import InstanceId, TopicName
from popgate.domain.topics import GroupSpec, TopicSpec
from popgate.ports.peers import Follow
from popgate.runtime.clocks import ManualClock
from support.engines import World, eventually, open_world

SENDER = InstanceId("b")
COUNT = 20


class Reads:
    """Counts the reads of the catalog. The first one waits until ``go_on`` is set. The second one may fail."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch, *, second_fails: bool = False) -> None:
        self.count = 0
        self.go_on = asyncio.Event()
        groups = world.context.catalog.groups

        async def read() -> list[GroupSpec]:
            self.count += 1
            found = await groups()
            if self.count == 1:
                await self.go_on.wait()
            elif self.count == 2 and second_fails:
                raise StateUnavailable("away, says the test")
            return found

        monkeypatch.setattr(world.context.catalog, "groups", read)


async def follow(world: World) -> None:
    await world.engine.peering.answer(SENDER, Follow())


async def test_requests_that_come_during_a_follow_share_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_world(tmp_path, clock=ManualClock()) as world:
        reads = Reads(world, monkeypatch)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow(world), name="the first request")
            await eventually(lambda: reads.count == 1)
            await world.context.catalog.put_topic(TopicSpec(topic=TopicName("t"), queue_count=1))
            later = [tasks.create_task(follow(world), name="a later request") for _ in range(COUNT)]
            await asyncio.sleep(0)
            reads.go_on.set()
            await asyncio.wait(later, return_when=asyncio.FIRST_COMPLETED)
            assert "t" in world.engine.topics.specs
        assert reads.count == 2
        await follow(world)
        assert reads.count == 3


async def test_a_follow_that_fails_is_not_taken_for_one_that_was_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_world(tmp_path, clock=ManualClock()) as world:
        reads = Reads(world, monkeypatch, second_fails=True)
        first, one, other = (asyncio.create_task(follow(world), name="a request") for _ in range(3))
        await eventually(lambda: reads.count == 1)
        reads.go_on.set()
        await first
        with pytest.raises(StateUnavailable):
            await one
        await other
        assert reads.count == 3
