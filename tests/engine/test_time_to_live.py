"""Messages with a ttl, and delayed ones, under a clock that tests advance."""

import asyncio

from popgate.domain.errors import StateUnavailable
from popgate.domain.topics import Policy
from popgate.engine.settle.orders import Verb
from popgate.ports.journal import EventKind
from support.engines import World, bodies, eventually

TTL = 10.0


async def stored(world: World, topic: str = "t") -> int:
    """Return what the broker still has in the topic's queues."""
    await world.settle_down()
    depths = await world.broker.depth(world.served(topic).layout.queues)
    return sum(depth.ready or 0 for depth in depths) + sum(
        held.tag is not None for host in world.served(topic).hosts for held in host.messages()
    )


async def records(world: World, topic: str = "t") -> int:
    return sum([len(await world.leases.load(queue)) for queue in world.served(topic).layout.queues])


async def discarded(world: World, *message_ids: str) -> None:
    """Assert that these were discarded, once each, and nothing is left of them."""
    await world.settle_down()
    found = [event.message_id for event in world.journal.events if event.kind is EventKind.DISCARDED]
    assert sorted(found) == sorted(message_ids)


async def test_an_expired_message_is_never_handed_out(world: World) -> None:
    await world.publish("t", "short", ttl=TTL)
    await world.publish("t", "long", ttl=3 * TTL)
    await world.publish("t", "for ever")
    await world.let_pass(TTL)
    leased = await world.pop("t", count=10)
    assert bodies(leased) == ["long", "for ever"]
    await world.settle(Verb.ACK, "t", leased)
    await discarded(world, "short")
    assert await world.pop("t", count=10) == []


async def test_a_message_lives_until_its_time_is_over(world: World) -> None:
    await world.publish("t", "a", ttl=TTL)
    await world.let_pass(TTL - 0.01)
    assert bodies(await world.pop("t")) == ["a"]
    await discarded(world)


async def test_a_thousand_expired_ones_hide_nobody(world: World) -> None:
    await world.create("t")
    for start in range(0, 1_000, 200):
        await world.publish("t", *(f"old {number}" for number in range(start, start + 200)), ttl=TTL)
    await world.let_pass(TTL)
    await world.publish("t", "new")
    assert bodies(await world.pop("t", wait=5.0)) == ["new"]
    await eventually(lambda: world.journal.count(EventKind.DISCARDED) == 1_000)


async def test_a_leased_message_does_not_expire(world: World) -> None:
    await world.publish("t", "a", ttl=TTL)
    leased = await world.pop("t", invisibility=5 * TTL)
    await world.let_pass(3 * TTL)
    assert await world.settle(Verb.EXTEND, "t", leased, seconds=5 * TTL) == ["extended"]
    await world.let_pass(4 * TTL)
    assert await world.settle(Verb.ACK, "t", leased) == ["acked"]
    await discarded(world)


async def test_a_lease_that_ends_after_the_time_to_live_ends_the_message(world: World) -> None:
    await world.publish("t", "a", ttl=TTL)
    leased = await world.pop("t", invisibility=2 * TTL)
    await world.let_pass(2 * TTL)
    assert await world.pop("t") == []
    await discarded(world, "a")
    assert await world.settle(Verb.ACK, "t", leased) == ["expired"], "nobody must think that it was counted"
    assert await records(world) == 0, "its record is settled"


async def test_an_ack_before_the_next_look_still_counts(world: World) -> None:
    await world.publish("t", "a", ttl=TTL)
    leased = await world.pop("t", invisibility=2 * TTL)
    await world.let_pass(2 * TTL)
    assert await world.settle(Verb.ACK, "t", leased) == ["acked"]
    await discarded(world)


async def test_a_message_that_is_released_after_its_time_is_not_handed_out_again(world: World) -> None:
    await world.publish("t", "a", "b", ttl=TTL)
    leased = await world.pop("t", count=2, invisibility=5 * TTL)
    await world.let_pass(2 * TTL)
    assert await world.settle(Verb.RELEASE, "t", leased[:1]) == ["released"]
    assert await world.settle(Verb.RELEASE, "t", leased[1:], seconds=TTL) == ["released"]
    assert await world.pop("t", count=2) == []
    await world.let_pass(TTL)
    assert await world.pop("t", count=2) == []
    await discarded(world, "a", "b")
    assert await records(world) == 0


async def test_a_dead_letter_has_no_time_to_live(world: World) -> None:
    await world.engine.changes.put_group("t", "default", Policy(max_deliveries=1))
    await world.publish("t", "rejected", "exhausted", ttl=TTL)
    leased = await world.pop("t", count=2, invisibility=2 * TTL)
    assert await world.settle(Verb.REJECT, "t", leased[:1]) == ["rejected"]
    await world.let_pass(2 * TTL)
    await world.pop("t")
    await world.settle_down()
    dead = await world.dead_letters("t")
    assert sorted(message.message_id for message in dead) == ["exhausted", "rejected"]
    assert [message.expires_at for message in dead] == [None, None]
    await discarded(world)


async def test_a_store_that_is_away_only_puts_off_the_discard(world: World) -> None:
    await world.publish("t", "a", ttl=TTL)
    await world.let_pass(TTL)
    world.faults.fail("leases.settle.discard", StateUnavailable("away", retry_after_seconds=0.01), times=3)
    assert await world.pop("t") == []
    await eventually(lambda: world.journal.count(EventKind.DISCARDED) == 1)
    assert await stored(world) == 0


async def test_a_discard_whose_answer_was_lost_is_journaled_as_found(world: World) -> None:
    await world.publish("t", "a", ttl=TTL)
    await world.pop("t", invisibility=2 * TTL)
    world.faults.fail("leases.settle.discard", StateUnavailable("away", retry_after_seconds=0.01), after=True)
    await world.let_pass(2 * TTL)
    assert await world.pop("t") == []
    await eventually(lambda: world.journal.details(EventKind.FOUND_SETTLED) == ["discarded"])
    assert world.journal.count(EventKind.DISCARDED) == 0
    assert await stored(world) == 0


async def test_a_discard_is_journaled_whose_queue_is_taken_over_while_it_is_written(world: World) -> None:
    await world.publish("t", "a", ttl=TTL)
    await world.pop("t", invisibility=2 * TTL)
    gate = world.faults.stop("leases.settle.discard", after=True)
    await world.let_pass(2 * TTL)
    popping = asyncio.ensure_future(world.pop("t"))
    await gate.reached()
    (host,) = world.served("t").hosts
    host.step_down(host.epoch)
    gate.open()
    await world.let_pass(TTL)
    assert await popping == []
    assert await world.pop("t") == []
    await world.settle_down()
    assert world.journal.count(EventKind.DISCARDED) == 1
    assert await stored(world) == 0


async def test_time_to_live_begins_when_a_delayed_message_becomes_visible(world: World) -> None:
    await world.publish("t", "a", "b", delay=100.0, ttl=TTL)
    await world.let_pass(99.0)
    assert await world.pop("t", count=2) == []
    await world.let_pass(1.0 + TTL / 2)
    (leased,) = await world.pop("t")
    assert leased.message.published_at == world.clock.wall() - 100.0 - TTL / 2
    await world.let_pass(TTL / 2)
    assert await world.pop("t") == []
    await discarded(world, "b")


async def test_a_delayed_message_does_not_jump_ahead_of_those_that_waited_longer(world: World) -> None:
    await world.create("two", queues=2)
    await world.publish("two", "late", delay=100.0)
    await world.let_pass(50.0)
    await world.publish("two", "waiting")
    await world.let_pass(51.0)
    popped: list[str] = []
    while leased := await world.pop("two"):
        popped += bodies(leased)
    assert popped.index("waiting") < popped.index("late"), popped


async def test_a_delayed_message_needs_a_group_when_it_is_published(world: World) -> None:
    await world.engine.changes.put_topic("none", queues=1, adopt=None)
    assert await world.publish("none", "a", delay=1.0) == ["failed"]
    await world.create("none")
    assert await world.publish("none", "a", delay=1.0) == ["published"]
    status = await world.engine.status("none", "default")
    assert (status.ready, status.delayed) == (0, 1)
    await world.let_pass(1.0)
    status = await world.engine.status("none", "default")
    assert (status.ready, status.delayed) == (1, 0)


async def test_an_expired_message_does_not_hold_up_those_behind_it_in_line(world: World) -> None:
    await world.publish("t", "a", ordering_key="k")
    await world.publish("t", "b", ordering_key="k", ttl=TTL)
    await world.publish("t", "c", ordering_key="k")
    await world.publish("t", "d", ordering_key="other", ttl=TTL)
    await world.let_pass(TTL)
    (leased,) = await world.pop("t")
    assert bodies([leased]) == ["a"]
    await world.settle(Verb.ACK, "t", [leased])
    popped: list[str] = []
    for _ in range(5):
        popped += bodies(await world.pop("t", count=10))
        await world.settle_down()
    assert popped == ["c"]
    await discarded(world, "b", "d")


async def test_whoever_asks_once_in_a_while_gets_who_stands_behind_an_expired_one(world: World) -> None:
    await world.publish("t", "a", ordering_key="k", ttl=TTL)
    assert bodies(await world.pop("t", invisibility=TTL)) == ["a"]
    await world.publish("t", "b", ordering_key="k")
    await world.let_pass(10 * world.context.options.idle_return_seconds)  # the buffer was returned
    assert bodies(await world.pop("t")) == ["b"]
    await discarded(world, "a")
