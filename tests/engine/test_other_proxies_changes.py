"""Two proxies that change topics and groups before they have followed each other.

The second proxy is another ``Topics`` on the same catalog and broker.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from popgate.domain.errors import BrokerUnavailable, Conflict, Forbidden
from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, CopyId, Layout, Subscription, TopicName, group_name
from popgate.domain.permissions import Action, Resource
from popgate.domain.receipt import ReceiptSigner
from popgate.domain.topics import GroupSpec, TopicSpec
from popgate.engine.catalog.changes import Changes
from popgate.engine.catalog.deletion import Deletions
from popgate.engine.catalog.topics import Topics
from popgate.engine.settle.orders import Verb
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.broker import Outgoing, QueueDepth
from popgate.runtime.clocks import ManualClock
from support.engines import World, bodies, open_world

T = TopicName("t")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(tmp_path, clock=ManualClock(), queues=2) as world:
        yield world


@pytest.fixture
async def other(world: World) -> AsyncIterator[Topics]:
    """The topics of a proxy that knows the changes of ``world`` only when it has followed them."""
    topics = Topics(world.context, ReceiptSigner(world.context.options.secrets))
    await topics.start()
    yield topics
    await topics.stop()


def creates_only(action: Action, resource: Resource) -> None:
    if action is not Action.CREATE:
        raise Forbidden(f"{action} of {resource}", action=action)


async def delete(deletions: Deletions, kind: str) -> None:
    """Delete the topic, or its only group."""
    await (deletions.delete_topic(T) if kind == "topic" else deletions.delete_group(T, "default"))


async def stored(world: World) -> tuple[list[TopicSpec], list[GroupSpec]]:
    return await world.context.catalog.topics(), await world.context.catalog.groups()


async def test_a_topic_that_another_proxy_has_just_created_is_not_replaced_without_the_right_to(
    world: World, other: Topics
) -> None:
    await Changes(world.context, other).put_topic(T, queues=4, adopt=None)
    await Changes(world.context, other).put_group(T, "default", None)
    with pytest.raises(Forbidden, match="admin"):
        await world.engine.changes.put_topic(T, queues=1, adopt=None, permit=creates_only)
    assert await world.engine.changes.put_topic(T, queues=4, adopt=None, permit=creates_only) == (
        TopicSpec(topic=T, queue_count=4),
        False,
        [],
    )
    assert [spec.queue_count for spec in (await stored(world))[0]] == [4]


async def test_the_first_publish_does_not_replace_a_topic_that_another_proxy_has_just_created(
    world: World, other: Topics
) -> None:
    await Changes(world.context, other).put_topic(T, queues=4, adopt=None)
    await Changes(world.context, other).put_group(T, "g", None)
    assert await world.publish(T, "a") == ["published"]
    topics, groups = await stored(world)
    assert [spec.queue_count for spec in topics] == [4]
    assert [spec.subscription for spec in groups] == [Subscription(T, group_name("g"))]
    assert bodies(await world.pop(T, "g", wait=5)) == ["a"]


async def test_a_group_gets_the_number_of_queues_that_its_topic_has_now(world: World, other: Topics) -> None:
    await world.engine.changes.put_topic(T, queues=1, adopt=None)
    await Changes(world.context, other).put_topic(T, queues=4, adopt=None)
    await world.engine.changes.put_group(T, "g", None)
    assert len(world.served(T, "g").layout.queues) == 4


async def test_adopted_queues_get_one_group_only(world: World, other: Topics, monkeypatch: pytest.MonkeyPatch) -> None:
    async def declare_group(layout: Layout) -> None:
        assert layout.adopted  # the embedded broker has no such queues

    monkeypatch.setattr(world.broker, "declare_group", declare_group)
    await world.context.catalog.put_topic(TopicSpec(topic=T, queue_count=1, adopted=(BrokerQueue("billing"),)))
    await world.engine.topics.follow()
    await other.follow()
    await Changes(world.context, other).put_group(T, "g", None)
    with pytest.raises(Conflict, match="already has a group"):
        await world.engine.changes.put_group(T, "mine", None, creates_only)
    assert [spec.subscription.group for spec in (await stored(world))[1]] == ["g"]


async def test_what_another_proxy_publishes_before_it_has_followed_a_lower_number_of_queues_is_delivered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.create(T, queues=4)
    announce = world.context.router.announce

    async def publish_late(queues: Callable[[], Sequence[BrokerQueue]]) -> bool:
        late = Message(
            copy_id=CopyId("late"),
            message_id="late",
            body=b"late",
            headers={},
            ordering_key=None,
            published_at=world.context.clock.wall(),
        )
        monkeypatch.setattr(world.context.router, "announce", announce)
        await world.broker.publish([Outgoing(message=late, topic=T, index=3)])
        return await announce(queues)

    monkeypatch.setattr(world.context.router, "announce", publish_late)
    with pytest.raises(Conflict, match="a message came in"):
        await world.engine.changes.put_topic(T, queues=1, adopt=None)
    leased = await world.pop(T, wait=5)
    assert bodies(leased) == ["late"]
    await world.settle(Verb.ACK, T, leased)
    assert (await world.engine.changes.put_topic(T, queues=1, adopt=None))[0].queue_count == 1
    assert (
        await world.broker.depth([BrokerQueue(f"popgate:t:default:{number}") for number in (1, 2, 3)])
        == [QueueDepth(ready=None)] * 3
    )


async def test_queues_stay_while_a_proxy_has_not_followed_and_an_interrupted_change_is_completed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.create(T, queues=4)

    async def unheard(_: Callable[[], Sequence[BrokerQueue]]) -> bool:
        return False

    with monkeypatch.context() as silent:
        silent.setattr(world.context.router, "announce", unheard)
        with pytest.raises(Conflict, match="can't be reached"):
            await world.engine.changes.put_topic(T, queues=2, adopt=None)
    assert len(world.served(T).layout.queues) == 4
    world.faults.fail("broker.delete_group", BrokerUnavailable("down"))
    with pytest.raises(BrokerUnavailable):
        await world.engine.changes.put_topic(T, queues=2, adopt=None)
    assert (await world.broker.depth([BrokerQueue("popgate:t:default:3")]))[0].ready == 0
    await world.engine.changes.put_topic(T, queues=2, adopt=None)
    assert (await world.broker.depth([BrokerQueue("popgate:t:default:3")]))[0].ready is None
    assert len(world.served(T).layout.queues) == 2


async def test_queues_are_deleted_after_the_publishes_that_are_under_way(world: World) -> None:
    """RabbitMQ before 4.3 ends the connection of a publish to a queue that is being deleted."""
    await world.create(T)
    queue = world.queue(T)
    gate = world.faults.stop("broker.publish")
    publishing = asyncio.create_task(world.publish(T, "a"))
    await gate.reached()
    deleting = asyncio.create_task(world.engine.deletions.delete_topic(T))
    await world.settle_down()
    assert (await world.broker.depth([queue]))[0].ready == 0
    gate.open()
    assert await publishing == ["published"]
    await deleting
    assert (await world.broker.depth([queue]))[0].ready is None


@pytest.mark.parametrize("kind", ["topic", "group"])
async def test_queues_are_deleted_when_no_proxy_serves_them_any_more(
    world: World, other: Topics, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """RabbitMQ ends the connection of a proxy that publishes or begins to consume while it deletes."""

    async def create_again(topics: Topics) -> bool:
        changes = Changes(world.context, topics)
        if kind == "topic":
            return (await changes.put_topic(T, queues=2, adopt=None))[1]
        return (await changes.put_group(T, "default", None))[1]

    async def announce(_: Callable[[], Sequence[BrokerQueue]]) -> bool:
        await other.follow()
        return True

    await world.create(T, queues=2)
    await other.follow()
    queue, name = world.queue(T), Subscription(T, group_name("default"))
    assert name in other.served
    monkeypatch.setattr(world.context.router, "announce", announce)
    world.faults.fail("broker.delete_group", BrokerUnavailable("down"))
    with pytest.raises(BrokerUnavailable):
        await delete(world.engine.deletions, kind)
    assert (await world.broker.depth([queue]))[0].ready == 0
    assert name not in other.served
    with pytest.raises(Conflict, match="DELETE /v1/admin/topics/t"):
        await create_again(other)
    restarted = Topics(world.context, ReceiptSigner(world.context.options.secrets))
    await restarted.start()
    assert restarted.served == {}
    await delete(Deletions(world.context, restarted), kind)
    assert (await world.broker.depth([queue]))[0].ready is None
    assert await create_again(other)
    await restarted.stop()


@pytest.mark.parametrize("kind", ["topic", "group"])
async def test_what_was_created_again_after_a_deletion_is_not_deleted_by_a_proxy_that_was_paused_in_between(
    world: World, other: Topics, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    async def complete_and_create_again(_: Callable[[], Sequence[BrokerQueue]]) -> bool:
        monkeypatch.undo()
        await other.follow()
        await delete(Deletions(world.context, other), kind)
        await Changes(world.context, other).put_topic(T, queues=2, adopt=None)
        await Changes(world.context, other).put_group(T, "default", None)
        return True

    await world.create(T, queues=2)
    monkeypatch.setattr(world.context.router, "announce", complete_and_create_again)
    await delete(world.engine.deletions, kind)
    assert [(spec.deleted, group.deleted) for spec, group in zip(*await stored(world), strict=True)] == [(False, False)]
    assert await world.publish(T, "a") == ["published"]
    assert bodies(await world.pop(T, wait=5)) == ["a"]


@pytest.mark.parametrize("kind", ["topic", "group"])
async def test_a_deletion_takes_the_queues_that_an_interrupted_change_has_left(world: World, kind: str) -> None:
    await world.create(T, queues=4)
    world.faults.fail("broker.delete_group", BrokerUnavailable("down"))
    with pytest.raises(BrokerUnavailable):
        await world.engine.changes.put_topic(T, queues=2, adopt=None)
    queues = [BrokerQueue(f"popgate:t:default:{number}") for number in range(4)]
    assert all(depth.ready == 0 for depth in await world.broker.depth(queues))
    deletions = world.engine.deletions
    await (deletions.delete_topic(T) if kind == "topic" else deletions.delete_group(T, "default"))
    assert await world.broker.depth(queues) == [QueueDepth(ready=None)] * 4


async def test_a_group_is_there_while_its_proxy_follows_another_number_of_queues(
    world: World, other: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.create(T, queues=2)
    await other.follow()
    await world.engine.changes.put_topic(T, queues=4, adopt=None)
    stop = ServedSubscription.stop

    async def stop_what_is_served(served: ServedSubscription) -> None:
        assert other.subscription(*served.name) is served
        await stop(served)

    with monkeypatch.context() as watched:
        watched.setattr(ServedSubscription, "stop", stop_what_is_served)
        await other.follow()
    assert len(other.subscription(T, "default").layout.queues) == 4
