"""Lease groups in the engine, with the clock, the memory and the faults under the test's control."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.lease_groups import INVISIBILITY, STREAM, TOPIC, ack, numbered, put, read, texts
from popgate.domain.errors import LeaseGroupExpired, LeaseGroupNotFound, RetryLater, StateUnavailable, TooManyInFlight
from popgate.domain.lease_group import GroupKey
from popgate.domain.names import InstanceId, StreamName, Subscription
from popgate.domain.topics import Policy, RetryPolicy
from popgate.engine.settle.orders import Verb
from popgate.ports.journal import EventKind
from popgate.ports.lease_groups import SettlementStep
from popgate.ports.peers import Fetch, LearnedRecord
from popgate.runtime.clocks import ManualClock
from support.engines import bodies, crash, eventually, open_world


async def test_a_group_is_formed_of_what_is_ready_read_in_slices_and_acked(tmp_path: Path) -> None:
    async with open_world(tmp_path, queues=3) as world:
        await world.publish(TOPIC, *numbered(10))
        assert await put(world, count=7, slices=3) == (7, 3, 0, False)
        slices = [texts(await read(world, number=number)) for number in range(3)]
        assert [len(one) for one in slices] == [2, 2, 3]
        others = bodies(await world.pop(TOPIC, count=10))
        assert sorted([*slices[0], *slices[1], *slices[2], *others]) == numbered(10)
        assert await put(world, count=1, slices=1) == (7, 3, 0, True)
        assert await ack(world) == (7, 0, 0)
        assert await ack(world) == (0, 7, 0)
        assert world.journal.count(EventKind.ACKED) == 7
        await world.settle_down()
        assert (await world.engine.status(TOPIC, "default")).in_flight == 3


async def test_an_empty_group_is_not_kept_and_its_epoch_can_be_tried_again(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.create(TOPIC)
        assert await put(world) == (0, 1, 0, False)
        with pytest.raises(LeaseGroupNotFound):
            await read(world)
        await world.publish(TOPIC, "a")
        assert await put(world) == (1, 1, 0, False)
        assert texts(await read(world)) == ["a"]


async def test_what_ran_out_is_leased_again_and_what_a_rival_took_is_lost(tmp_path: Path) -> None:
    async with open_world(tmp_path, clock=ManualClock()) as world:
        await world.publish(TOPIC, *numbered(6))
        await put(world)
        first = await read(world)
        await world.let_pass(INVISIBILITY + 1)
        with pytest.raises(LeaseGroupExpired):
            await read(world)
        rivals = await world.pop(TOPIC, count=2)
        assert bodies(rivals) == numbered(6)[:2]
        assert await put(world) == (4, 1, 2, True)
        assert await read(world) == first[2:]
        assert await world.pop(TOPIC, count=10) == []
        assert await ack(world) == (4, 0, 2)
        assert await world.settle(Verb.ACK, TOPIC, rivals) == ["acked"] * 2


async def test_what_a_rival_gave_back_is_leased_again_and_reads_the_same(tmp_path: Path) -> None:
    async with open_world(tmp_path, clock=ManualClock()) as world:
        await world.publish(TOPIC, *numbered(3))
        await put(world)
        first = await read(world)
        await world.let_pass(INVISIBILITY + 1)
        await world.settle(Verb.RELEASE, TOPIC, await world.pop(TOPIC, count=2))
        assert await put(world) == (3, 1, 0, True)
        assert await read(world) == first
        assert await world.pop(TOPIC, count=10) == []


async def test_a_retry_delay_does_not_keep_a_group_from_its_messages(tmp_path: Path) -> None:
    async with open_world(tmp_path, clock=ManualClock()) as world:
        await world.create(TOPIC, policy=Policy(retry=RetryPolicy(initial_seconds=600)))
        await world.publish(TOPIC, *numbered(3))
        await put(world)
        await world.let_pass(INVISIBILITY + 1)
        assert await put(world) == (3, 1, 0, True)
        assert texts(await read(world)) == numbered(3)


async def test_a_late_ack_counts_where_nobody_took_the_message(tmp_path: Path) -> None:
    async with open_world(tmp_path, clock=ManualClock()) as world:
        await world.publish(TOPIC, *numbered(4))
        await put(world)
        await world.let_pass(INVISIBILITY + 1)
        (rival,) = await world.pop(TOPIC)
        assert await ack(world) == (3, 0, 1)
        assert await world.settle(Verb.RELEASE, TOPIC, [rival]) == ["released"]
        assert bodies(await world.pop(TOPIC, count=10)) == ["m0000"]


async def test_extensions_hold_a_group_until_it_has_its_age(tmp_path: Path) -> None:
    async with open_world(tmp_path, clock=ManualClock(), idle_return_seconds=1e6) as world:
        await world.publish(TOPIC, "a", "b")
        await put(world, 1, count=1, seconds=20_000)
        await put(world, 2, count=1, seconds=30)
        await world.let_pass(15_000)
        extended = await world.engine.lease_groups.extend(TOPIC, "default", STREAM, 40_000)
        assert [(one.group.epoch, one.is_held) for one in extended] == [(1, True), (2, False)]
        assert extended[0].group.remaining_seconds == pytest.approx(43_200 - 15_000, abs=1)
        await world.let_pass(43_200 - 15_000 - 1)
        assert texts(await read(world, 1)) == ["a"]
        await world.engine.lease_groups.extend(TOPIC, "default", STREAM, 40_000)
        await world.let_pass(2)
        assert bodies(await world.pop(TOPIC, count=2)) == ["a", "b"]


async def test_a_release_gives_later_epochs_back_for_good(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.publish(TOPIC, *numbered(6))
        for epoch in (1, 2, 3):
            await put(world, epoch, count=2)
        assert await world.engine.lease_groups.release(TOPIC, "default", STREAM, 1) == 4
        assert bodies(await world.pop(TOPIC, count=10)) == numbered(6)[2:]
        assert texts(await read(world, 1)) == numbered(6)[:2]
        assert [one.epoch for one in await world.engine.lease_groups.groups(TOPIC, "default", None)] == [1]


async def test_a_put_that_failed_half_way_goes_on_where_it_was(tmp_path: Path) -> None:
    """Even if the store has granted the leases but its answer was lost."""
    for after in (False, True):
        folder = tmp_path / str(after)
        folder.mkdir()
        async with open_world(folder) as world:
            await world.publish(TOPIC, *numbered(200))
            await world.publish(TOPIC, *numbered(400)[200:])
            await world.pop(TOPIC, count=1)
            world.faults.fail("leases.grant", StateUnavailable("a test"), after=after)
            with pytest.raises(RetryLater):
                await put(world, count=300)
            assert await put(world, count=300) == (300, 1, 0, False)
            assert texts(await read(world)) == numbered(301)[1:]
            others: list[str] = []
            while len(others) < 99:
                others += bodies(await world.pop(TOPIC, count=256))
            assert others == numbered(400)[301:]


async def test_a_crash_loses_no_group(tmp_path: Path) -> None:
    async with open_world(tmp_path / "before") as world:
        await world.publish(TOPIC, *numbered(250))
        await put(world, 1, count=100, slices=2)
        await put(world, 2, count=100)
        first = [await read(world, 1, number) for number in range(2)]
        await crash(world, tmp_path / "before", tmp_path / "after")
    async with open_world(tmp_path / "after") as world:
        assert [await read(world, 1, number) for number in range(2)] == first
        assert await put(world, 1) == (100, 2, 0, True)
        assert bodies(await world.pop(TOPIC, count=100)) == numbered(250)[200:]
        assert await ack(world, 1) == (100, 0, 0)
        assert texts(await read(world, 2)) == numbered(250)[100:200]


async def test_an_ack_that_was_cut_short_is_finished_by_the_next_start(tmp_path: Path) -> None:
    async with open_world(tmp_path / "before") as world:
        await world.publish(TOPIC, *numbered(100))
        await put(world)
        await world.context.lease_groups.begin_ack(world.served(TOPIC).name, STREAM, 1)
        await crash(world, tmp_path / "before", tmp_path / "after")
    async with open_world(tmp_path / "after") as world:
        await eventually(lambda: world.journal.count(EventKind.ACKED) == 100)
        assert await ack(world) == (0, 100, 0)
        assert await world.pop(TOPIC, count=10) == []


async def test_an_ack_whose_answer_was_lost_is_journaled_when_the_leases_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_world(tmp_path, clock=ManualClock()) as world:
        await world.publish(TOPIC, *numbered(100))
        await put(world)
        settle_next = world.context.lease_groups.settle_next

        async def unanswered(*arguments: Any) -> SettlementStep:
            await settle_next(*arguments)
            monkeypatch.undo()
            raise StateUnavailable("away, says the test")

        monkeypatch.setattr(world.context.lease_groups, "settle_next", unanswered)
        with pytest.raises(StateUnavailable):
            await ack(world)
        assert await ack(world) == (0, 100, 0)
        assert world.journal.count(EventKind.ACKED) == 0
        await world.let_pass(INVISIBILITY)
        assert await world.pop(TOPIC, count=100) == []
        assert world.journal.details(EventKind.FOUND_SETTLED) == ["acked"] * 100


async def test_bodies_that_memory_has_no_room_for_are_read_again(tmp_path: Path) -> None:
    """Twenty times as much as the budget, after a restart with less memory, in slices read at the same time."""
    async with open_world(tmp_path, queues=2) as world:
        for number in range(20):
            await world.publish(TOPIC, *(f"{number:03}-{place:03}" + "x" * 50_000 for place in range(20)))
        formed = await put(world, count=400, slices=4)
        assert formed.message_count == 400
    async with open_world(tmp_path, buffer_bytes_max=1024 * 1024, queues=2) as world:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, sum(host.state.flow.held_bytes for host in world.served(TOPIC).hosts))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        rounds = [await asyncio.gather(*(read(world, number=number) for number in range(4))) for _ in range(2)]
        watching.cancel()
        assert rounds[0] == rounds[1]
        found = sorted(text[:7] for part in rounds[0] for text in texts(part))
        assert found == [f"{number:03}-{place:03}" for number in range(20) for place in range(20)]
        assert most < 8 * 1024 * 1024
        assert await ack(world) == (400, 0, 0)


async def test_a_slice_is_read_in_small_parts_also_if_large_messages_follow_small_ones(tmp_path: Path) -> None:
    sizes = [2 * 1024 * 1024] * 4 + [1] * 40 + [2 * 1024 * 1024] * 4
    async with open_world(tmp_path, queues=1) as world:
        for number, size in enumerate(sizes):
            await world.publish(TOPIC, f"{number:03}" + "x" * size)
        assert (await put(world)).message_count == len(sizes)
        found = await world.engine.lease_groups.read(TOPIC, "default", STREAM, 1, 0)
        parts = [part async for part in found.parts]
        assert [text[:3] for part in parts for text in texts(part)] == [f"{number:03}" for number in range(len(sizes))]
        assert max(sum(len(one.message.body) for one in part) for part in parts) < 3 * 1024 * 1024 + 10_000
        assert max(map(len, parts)) > 2


async def test_a_peer_gets_few_large_messages_at_once(tmp_path: Path) -> None:
    async with open_world(tmp_path, queues=1) as world:
        await world.publish(TOPIC, *("x" * 700_000 for _ in range(4)))
        assert (await put(world)).message_count == 4
        (host,) = world.served(TOPIC).hosts
        key = GroupKey(world.served(TOPIC).name, STREAM, 1)
        leases = [
            LearnedRecord(host.broker_queue, one.copy_id, one.record, one.remaining_seconds)
            for one in await world.context.lease_groups.members(key, 0, 4)
            if one.record is not None
        ]
        fetch = Fetch(subscription=world.served(TOPIC).name, leases=tuple(leases))
        messages = await world.engine.peering.answer(InstanceId("b"), fetch)
        assert len(messages) == 2


async def test_a_group_takes_as_much_as_memory_can_keep_and_the_next_one_goes_on(tmp_path: Path) -> None:
    async with open_world(tmp_path, buffer_bytes_max=1024 * 1024, queues=2) as world:
        await world.publish(TOPIC, *(f"{number:03}" + "x" * 50_000 for number in range(60)))
        found: list[str] = []
        for epoch in range(1, 61):
            formed = await put(world, epoch, count=100)
            if not formed.message_count:
                break
            assert formed.message_count <= 10
            assert sum(host.state.flow.held_bytes for host in world.served(TOPIC).hosts) <= 2 * 1024 * 1024
            found += texts(await read(world, epoch))
            await ack(world, epoch)
        assert sorted(text[:3] for text in found) == [f"{number:03}" for number in range(60)]


async def test_the_memory_that_one_topic_takes_does_not_reduce_the_groups_of_another(tmp_path: Path) -> None:
    async with open_world(tmp_path, buffer_bytes_max=8 * 1024 * 1024, queues=1) as world:
        for topic, count, size in (("large", 60, 100_000), (TOPIC, 100, 10)):
            await world.publish(topic, *(f"{number:03}" + "x" * size for number in range(count)))
        taken = await world.engine.lease_groups.put(
            "large", "default", STREAM, 1, max_messages=100, slices=1, invisibility_seconds=INVISIBILITY
        )
        assert 0 < taken.message_count < 60
        await world.pop(TOPIC)  # the size of its messages is known now
        assert (await put(world)).message_count == 99
        assert len(await read(world)) == 99


async def test_other_pollers_have_their_turn_while_a_group_is_formed(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.create(TOPIC)
        forming = asyncio.create_task(put(world, count=1_000))
        rival = asyncio.create_task(world.pop(TOPIC, wait=5.0))
        await world.settle_down()
        assert await forming == (0, 1, 0, False)
        await world.publish(TOPIC, *numbered(1_000)[:500])
        assert len(await rival) == 1
        assert (await put(world, count=1_000)).message_count == 499


async def test_a_deleted_group_leaves_no_lease_group_behind(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.publish(TOPIC, "a")
        await put(world)
        await world.engine.deletions.delete_group(TOPIC, "default")
        await world.create(TOPIC)
        await world.publish(TOPIC, "b")
        with pytest.raises(LeaseGroupNotFound):
            await read(world)
        assert await put(world) == (1, 1, 0, False)
        assert texts(await read(world)) == ["b"]


async def test_more_slices_than_messages(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.publish(TOPIC, "a")
        await put(world, slices=2)
        assert [texts(await read(world, number=number)) for number in range(2)] == [[], ["a"]]


async def test_messages_of_one_ordering_key_follow_each_other_into_the_group(tmp_path: Path) -> None:
    """Including those that a later pop for the same group takes; and no message overtakes a leased one."""
    async with open_world(tmp_path) as world:
        await world.publish(TOPIC, *numbered(700), ordering_key="k")
        assert (await put(world, 1, count=600)).message_count == 600
        assert texts(await read(world)) == numbered(700)[:600]
        assert await world.pop(TOPIC, count=10) == []
        assert (await put(world, 2)).message_count == 0
        await ack(world)
        assert (await put(world, 2)).message_count == 100
        assert texts(await read(world, 2)) == numbered(700)[600:]


async def test_a_group_has_as_many_messages_as_may_be_in_flight(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.create(TOPIC, policy=Policy(max_in_flight=300))
        await world.publish(TOPIC, *numbered(500))
        assert (await put(world, 1, count=400)).message_count == 300
        with pytest.raises(TooManyInFlight):
            await put(world, 2)


async def test_acks_of_one_group_at_once_both_count_every_message(tmp_path: Path) -> None:
    """As if the collector finishes, after a restart, an ack that a client repeats, too."""
    async with open_world(tmp_path) as world:
        for start in range(0, 2_500, 250):
            await world.publish(TOPIC, *numbered(2_500)[start : start + 250])
        assert (await put(world, count=2_500)).message_count == 2_500
        for acked, already_acked, lost in await asyncio.gather(ack(world), ack(world)):
            assert (acked + already_acked, lost) == (2_500, 0)


async def test_a_release_counts_all_it_gave_back_while_the_collector_works(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.publish(TOPIC, *numbered(600))
        for epoch in range(3):
            assert await put(world, epoch=epoch, count=200) == (200, 1, 0, False)
        groups = world.engine.lease_groups

        async def collect() -> None:
            for _ in range(20):
                await groups.tend()

        released, _ = await asyncio.gather(groups.release(TOPIC, "default", STREAM, -1), collect())
        assert released == 600
        assert await groups.groups(TOPIC, "default", STREAM) == []


async def test_a_stream_that_can_not_be_settled_does_not_keep_others_from_being_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_world(tmp_path) as world:
        groups, store = world.engine.lease_groups, world.context.lease_groups
        for topic in ("bad", "good"):
            await world.publish(topic, "a")
            await groups.put(topic, "default", STREAM, 1, max_messages=1, slices=1, invisibility_seconds=INVISIBILITY)
            await store.begin_ack(world.served(topic).name, STREAM, 1)
        settle_next = store.settle_next

        async def refuses_one(subscription: Subscription, stream: StreamName) -> SettlementStep:
            if subscription.topic == "bad":
                raise ValueError("can't be read")
            return await settle_next(subscription, stream)

        monkeypatch.setattr(store, "settle_next", refuses_one)
        with pytest.raises(ValueError, match="can't be read"):
            await groups.tend()
        assert await store.half_settled(world.served("good").name) == []
        assert await store.half_settled(world.served("bad").name) == [STREAM]
