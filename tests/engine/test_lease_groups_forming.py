"""Lease groups whose forming outlasts their leases, or is interrupted."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.lease_groups import INVISIBILITY, TOPIC, ack, numbered, put, read, texts
from popgate.domain.errors import RetryLater, StateUnavailable
from popgate.domain.topics import Policy
from popgate.engine.settle.orders import Verb
from popgate.ports.journal import EventKind
from popgate.ports.lease_groups import RenewalStep
from popgate.runtime.clocks import ManualClock
from support.engines import bodies, crash, eventually, open_world


async def test_forming_that_outlasts_the_leases_takes_every_message_once(tmp_path: Path) -> None:
    async with open_world(tmp_path, clock=ManualClock(), idle_return_seconds=1e6) as world:
        await world.create(TOPIC)
        for start in range(0, 1_000, 250):
            await world.publish(TOPIC, *numbered(1_000)[start : start + 250])
        forming = asyncio.create_task(put(world, count=1_000))
        for _ in range(3):
            gate = world.faults.stop("leases.grant")
            await gate.reached()
            await world.let_pass(INVISIBILITY + 1)
            gate.open()
        assert await forming == (1_000, 1, 0, False)
        found = await read(world)
        assert texts(found) == numbered(1_000)
        assert {one.delivery_count for one in found} == {1}
        assert await ack(world) == (1_000, 0, 0)
        assert world.journal.count(EventKind.DELIVERED) == 1_000


async def test_leases_are_renewed_before_they_end_while_a_group_is_formed(tmp_path: Path) -> None:
    async with open_world(tmp_path, clock=ManualClock(), idle_return_seconds=1e6) as world:
        await world.create(TOPIC, policy=Policy(max_deliveries=1))
        for start in range(0, 1_000, 250):
            await world.publish(TOPIC, *numbered(1_000)[start : start + 250])
        forming = asyncio.create_task(put(world, count=1_000))
        for _ in range(4):
            gate = world.faults.stop("leases.grant")
            await gate.reached()
            await world.let_pass(INVISIBILITY * 0.6)
            gate.open()
        assert await forming == (1_000, 1, 0, False)
        assert world.journal.count(EventKind.EXPIRED) == 0
        assert texts(await read(world)) == numbered(1_000)


async def test_a_group_does_not_wait_for_its_own_members_to_come_again(tmp_path: Path) -> None:
    """Its leases end while the last pop checks whether the queue has more: it finds its own members again."""
    async with open_world(tmp_path, clock=ManualClock(), idle_return_seconds=1e6) as world:
        await world.publish(TOPIC, *numbered(10))
        granted = world.faults.stop("leases.grant", after=True)
        forming = asyncio.create_task(put(world))
        await granted.reached()
        gate = world.faults.stop("channel.backlog")
        granted.open()
        await gate.reached()
        await world.let_pass(INVISIBILITY + 1)
        gate.open()
        assert await forming == (10, 1, 0, False)
        found = await read(world)
        assert (texts(found), {one.delivery_count for one in found}) == (numbered(10), {1})
        assert world.journal.count(EventKind.DELIVERED) == 10
        assert await world.pop(TOPIC, count=20) == []


async def test_what_died_or_went_elsewhere_while_a_group_is_formed_is_no_member(tmp_path: Path) -> None:
    async with open_world(tmp_path, clock=ManualClock(), idle_return_seconds=1e6) as world:
        await world.create(TOPIC, policy=Policy(max_deliveries=2))
        await world.publish(TOPIC, *numbered(3))
        await world.settle(Verb.RELEASE, TOPIC, await world.pop(TOPIC))  # m0000 has one delivery left
        await world.publish(TOPIC, *numbered(503)[3:])
        granted = world.faults.stop("leases.grant", after=True)
        forming = asyncio.create_task(put(world, count=503))
        await granted.reached()
        gate = world.faults.stop("leases.grant")
        granted.open()
        await gate.reached()
        await world.let_pass(INVISIBILITY + 1)
        await eventually(lambda: world.journal.count(EventKind.DEAD_LETTERED) == 1)
        (rival,) = await world.pop(TOPIC)
        gate.open()
        assert (bodies([rival]), await world.settle(Verb.ACK, TOPIC, [rival])) == (["m0001"], ["acked"])
        assert await forming == (501, 1, 0, False)
        assert texts(await read(world)) == numbered(503)[2:]
        assert [one.body for one in await world.dead_letters(TOPIC)] == [b"m0000"]
        assert await ack(world) == (501, 0, 0)


async def test_a_put_after_a_crash_takes_up_what_was_being_formed(tmp_path: Path) -> None:
    """After its leases have ended; a message that a rival leased meanwhile and released is a member like any other."""
    clock = ManualClock()
    async with open_world(tmp_path / "before", clock=clock) as world:
        await world.publish(TOPIC, *numbered(250))
        await world.publish(TOPIC, *numbered(500)[250:])
        world.faults.fail("leases.grant", StateUnavailable("a test"), after=True)
        with pytest.raises(RetryLater):
            await put(world, count=500)
        await crash(world, tmp_path / "before", tmp_path / "after")
    async with open_world(tmp_path / "after", clock=clock, idle_return_seconds=1e6) as world:
        await world.let_pass(INVISIBILITY + 1)
        rivals = await world.pop(TOPIC, count=2)
        assert await world.settle(Verb.ACK, TOPIC, rivals[:1]) == ["acked"]
        assert await world.settle(Verb.RELEASE, TOPIC, rivals[1:]) == ["released"]
        assert await put(world, count=500) == (499, 1, 0, False)
        assert sorted(texts(await read(world))) == numbered(500)[1:]
        assert await put(world, count=500) == (499, 1, 0, True)
        assert await ack(world) == (499, 0, 0)


async def test_a_group_is_no_larger_than_its_leases_can_be_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If renewing all members took as long as their leases, more members would only be lost."""
    clock = ManualClock()
    async with open_world(tmp_path, clock=clock, idle_return_seconds=1e6) as world:
        await world.create(TOPIC)
        for start in range(0, 1_000, 250):
            await world.publish(TOPIC, *numbered(1_000)[start : start + 250])
        renew = world.context.lease_groups.renew

        async def slow(*arguments: Any) -> RenewalStep:
            step = await renew(*arguments)
            clock.advance(INVISIBILITY * 0.6)
            return step

        monkeypatch.setattr(world.context.lease_groups, "renew", slow)
        granted = world.faults.stop("leases.grant", after=True)
        forming = asyncio.create_task(put(world, count=1_000))
        await granted.reached()
        gate = world.faults.stop("leases.grant")
        granted.open()
        await gate.reached()
        clock.advance(INVISIBILITY * 0.6)
        gate.open()
        count = (await forming).message_count
        assert 0 < count < 1_000
        monkeypatch.undo()
        assert (await put(world, 2, count=1_000)).message_count == 1_000 - count
        assert texts(await read(world, 1)) + texts(await read(world, 2)) == numbered(1_000)
