"""A running proxy and an entry of the catalog that it can't read, such as one of a newer popgate: it keeps serving."""

from dataclasses import replace
from pathlib import Path

import pytest

from popgate.domain.errors import Conflict
from popgate.domain.names import GroupName, Subscription, TopicName
from popgate.runtime.clocks import ManualClock
from support.engines import World, bodies, open_world, start_world, stop_world

UNREADABLE = '{"queue_count":1000000,"policy":{"max_deliveries":0}}'


async def spoil(world: World, table: str, name: str) -> None:
    """Replace an entry by one that this popgate can't read."""
    await world.database.write(
        lambda connection: connection.execute(f"UPDATE {table} SET spec = ? WHERE name = ?", (UNREADABLE, name))
    )


async def stored(world: World, table: str) -> list[str]:
    return await world.database.read(lambda c: [text for (text,) in c.execute(f"SELECT spec FROM {table}")])


async def test_what_is_served_already_is_served_on(tmp_path: Path) -> None:
    async with open_world(tmp_path, clock=ManualClock()) as world:
        await world.create("t", queues=2)
        await world.publish("t", "a")
        await spoil(world, "topic", "t")
        await world.engine.topics.follow()
        await world.publish("t", "b")
        assert sorted(bodies(await world.pop("t", count=2, wait=5))) == ["a", "b"]
        assert len(world.served("t").layout.queues) == 2
        assert await stored(world, "topic") == [UNREADABLE]


async def test_a_group_that_can_not_be_served_does_not_keep_others_from_being_served(tmp_path: Path) -> None:
    async with open_world(tmp_path, clock=ManualClock()) as world:
        await world.create("t")
        spec = world.served("t").spec
        for group in ("a", "b"):
            new = replace(spec, subscription=Subscription(TopicName("t"), GroupName(group)))
            await world.context.catalog.change_group(None, new)
        world.faults.fail("leases.allow_mode", ValueError("can't be read"))
        with pytest.raises(ValueError, match="can't be read"):
            await world.engine.topics.follow()
        assert {*world.engine.topics.group_names(TopicName("t"))} == {"default", "b"}
        await world.engine.topics.follow()
        assert {*world.engine.topics.group_names(TopicName("t"))} == {"default", "a", "b"}


async def test_it_is_not_created_again_by_use_or_by_an_administrator(tmp_path: Path) -> None:
    world = await start_world(tmp_path, clock=ManualClock())
    await world.create("t", queues=2)
    await world.create("u")
    await world.publish("t", "a")
    await spoil(world, "topic", "t")
    await spoil(world, "topic_group", "default")
    await stop_world(world)
    async with open_world(tmp_path, clock=ManualClock()) as world:
        for topic in ("t", "u"):
            with pytest.raises(Conflict, match="can't be read"):
                await world.pop(topic)
        with pytest.raises(Conflict, match="repair it in the store"):
            await world.publish("t", "b")
        with pytest.raises(Conflict, match="can't be read"):
            await world.engine.changes.put_topic("t", queues=1, adopt=None)
        assert UNREADABLE in await stored(world, "topic")
        assert await stored(world, "topic_group") == [UNREADABLE] * 2


async def test_a_topic_is_not_deleted_while_a_group_can_not_be_read_whose_queues_would_stay(tmp_path: Path) -> None:
    world = await start_world(tmp_path, clock=ManualClock())
    await world.create("t", group="g")
    await world.publish("t", "a")
    await spoil(world, "topic_group", "g")
    await stop_world(world)
    async with open_world(tmp_path, clock=ManualClock()) as world:
        with pytest.raises(Conflict, match="'g' of topic 't' can't be read"):
            await world.engine.deletions.delete_topic("t")
        await world.database.write(lambda connection: connection.execute("DELETE FROM topic_group"))
        await world.engine.deletions.delete_topic("t")
        assert await stored(world, "topic") == []


async def test_a_group_is_served_on_and_not_deleted_while_its_entry_can_not_be_read(tmp_path: Path) -> None:
    async with open_world(tmp_path, clock=ManualClock()) as world:
        await world.create("t", group="g")
        await world.publish("t", "a")
        await spoil(world, "topic_group", "g")
        for delete in (world.engine.deletions.delete_topic("t"), world.engine.deletions.delete_group("t", "g")):
            with pytest.raises(Conflict, match="'g' of topic 't' can't be read"):
                await delete
        assert bodies(await world.pop("t", "g", wait=5)) == ["a"]
