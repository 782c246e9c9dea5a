"""The maximum age of a lease, and what is known of its age."""

from pathlib import Path

import pytest

from engine.lease_groups import put
from popgate.domain.topics import Policy
from popgate.engine.settle.orders import Verb
from popgate.runtime.clocks import ManualClock
from support.engines import World, bodies, crash, open_world

TWELVE_HOURS = 43_200.0
TOPIC = "t"


def oldest_age(world: World) -> float:
    (gauges,) = world.engine.gauges()
    return gauges.oldest_lease_age_seconds


async def test_no_lease_outlasts_twelve_hours_however_often_it_is_extended(world: World) -> None:
    await world.publish(TOPIC, "a")
    (leased,) = await world.pop(TOPIC)
    for _ in range(47):
        await world.let_pass(900)
        (result,) = await world.settle_handles(
            Verb.EXTEND, TOPIC, "default", [leased.receipt_handle], seconds=TWELVE_HOURS
        )
        assert result.status == "extended"
        assert result.invisible_until == pytest.approx(leased.invisible_until - 30 + TWELVE_HOURS)
    assert await world.pop(TOPIC) == []
    await world.let_pass(900)
    assert bodies(await world.pop(TOPIC)) == ["a"]
    assert await world.settle(Verb.EXTEND, TOPIC, [leased], seconds=30) == ["expired"]


async def test_the_policy_of_the_moment_bounds_an_extension(world: World) -> None:
    await world.engine.changes.put_group(TOPIC, "default", Policy(max_lease_seconds=100))
    await world.publish(TOPIC, "a")
    leased = await world.pop(TOPIC, invisibility=1_000)
    await world.let_pass(99)
    assert await world.settle(Verb.EXTEND, TOPIC, leased, seconds=60) == ["extended"]
    await world.engine.changes.put_group(TOPIC, "default", Policy(max_lease_seconds=200))
    assert await world.settle(Verb.EXTEND, TOPIC, leased, seconds=60) == ["extended"]
    await world.let_pass(59)
    assert await world.pop(TOPIC) == []
    await world.let_pass(2)
    assert bodies(await world.pop(TOPIC)) == ["a"]


async def test_the_age_of_a_lease_counts_from_its_pop_over_extensions_and_crashes(tmp_path: Path) -> None:
    clock = ManualClock()
    async with open_world(tmp_path / "before", clock=clock) as world:
        await world.create(TOPIC)
        assert oldest_age(world) == 0.0
        await world.publish(TOPIC, "a", "b")
        (old,) = await world.pop(TOPIC, invisibility=600)
        await world.let_pass(50)
        await world.settle(Verb.EXTEND, TOPIC, [old], seconds=600)
        (young,) = await world.pop(TOPIC, invisibility=600)
        assert oldest_age(world) == pytest.approx(50)
        await crash(world, tmp_path / "before", tmp_path / "after")
    async with open_world(tmp_path / "after", clock=clock) as world:
        await world.let_pass(10)
        assert oldest_age(world) == pytest.approx(60)
        await world.settle(Verb.ACK, TOPIC, [old])
        assert oldest_age(world) == pytest.approx(10)
        await world.settle(Verb.RELEASE, TOPIC, [young], seconds=5)
        assert oldest_age(world) == 0.0, "what waits is not leased"


async def test_a_lease_group_may_be_held_longer_than_a_lease(tmp_path: Path) -> None:
    async with open_world(tmp_path, clock=ManualClock(), idle_return_seconds=1e6) as world:
        await world.create(TOPIC, policy=Policy(max_lease_seconds=30))
        await world.publish(TOPIC, "a")
        await put(world, seconds=60)
        for _ in range(3):
            await world.let_pass(59)
            await put(world, seconds=60)
            assert await world.pop(TOPIC) == []
        assert oldest_age(world) == pytest.approx(3 * 59)
