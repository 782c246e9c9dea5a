"""The store keeps records for 15 minutes, or for 30 days (decision 5)."""

from pathlib import Path

import pytest

from engine.patience import host_of, patient_pop
from popgate.engine.queue import settlement_evidence
from popgate.engine.settle.orders import Verb
from popgate.runtime.clocks import ManualClock
from support.engines import World, open_world

MINUTE, DAY = 60.0, 86_400.0


async def collected(world: World) -> None:
    """Let the collector run once."""
    await world.let_pass(61.0)
    await world.settle_down()


@pytest.mark.parametrize(("dedup_seconds", "kept_minutes"), [(300.0, 15), (1_800.0, 30), (3_600.0, 60)])
async def test_an_ack_is_remembered_for_15_minutes_or_as_long_as_a_publish_may_be_repeated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dedup_seconds: float, kept_minutes: int
) -> None:
    monkeypatch.setattr(settlement_evidence, "RETURNED_MAX_AFTER_RESTART", 0)
    async with open_world(folder / "data", clock=ManualClock(), dedup_seconds=dedup_seconds) as world:
        await world.create("t")
        await world.publish("t", "a", "later")
        leased, later = [await patient_pop(world) for _ in range(2)]
        assert await world.settle(Verb.ACK, "t", leased) == ["acked"]
        await world.let_pass(1.0)
        assert await world.settle(Verb.ACK, "t", later) == ["acked"]  # later records prove a record
        channel = host_of(world).channel
        assert channel is not None
        await channel.flush()
        await world.let_pass((kept_minutes - 2) * MINUTE)
        await collected(world)
        assert await world.settle(Verb.ACK, "t", leased) == ["already_acked"]
        await world.let_pass(2 * MINUTE)
        await collected(world)
        assert await world.settle(Verb.ACK, "t", leased) == ["expired"]


async def test_a_record_that_is_never_settled_is_kept_for_30_days_and_no_longer(folder: Path) -> None:
    async with open_world(folder / "data", clock=ManualClock()) as world:
        await world.create("t")
        await world.publish("t", "a")
        await patient_pop(world, invisibility=MINUTE)
        queue, store = world.queue("t"), world.leases.wrapped
        await world.let_pass(29.9 * DAY)
        await collected(world)
        assert len(await store.load(queue)) == 1
        await world.let_pass(0.2 * DAY)
        await collected(world)
        assert await store.load(queue) == []
