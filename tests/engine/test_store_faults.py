"""The state store fails while the engine leases, settles and dead-letters."""

import asyncio
from pathlib import Path

import pytest

from popgate.domain.errors import StateUnavailable
from popgate.domain.message import Message
from popgate.domain.topics import Policy, RetryPolicy
from popgate.engine.queue.channel_opener import OPEN_RETRY_SECONDS_MAX
from popgate.engine.settle.orders import Verb
from popgate.ports.journal import EventKind
from popgate.runtime.clocks import ManualClock
from support.engines import PATIENCE_SECONDS, World, bodies, crash, eventually, open_world, start_world, stop_world


def away() -> StateUnavailable:
    return StateUnavailable("away, says the test", retry_after_seconds=0.001)


async def test_a_pop_whose_grant_fails_leaves_its_messages_to_the_next_one(world: World) -> None:
    await world.publish("t", "a", "b")
    world.faults.fail("leases.grant", away())
    with pytest.raises(StateUnavailable):
        await world.pop("t", count=2)
    leased = await world.pop("t", count=2)
    assert bodies(leased) == ["a", "b"]
    assert [one.delivery_count for one in leased] == [1, 1]


async def test_a_lease_that_was_written_but_never_answered_is_taken_back_by_the_next_pop(world: World) -> None:
    await world.publish("t", "a", "b")
    world.faults.fail("leases.grant", away(), after=True)
    with pytest.raises(StateUnavailable):
        await world.pop("t", count=2, invisibility=30)
    leased = await world.pop("t", count=2, wait=PATIENCE_SECONDS)
    assert bodies(leased) == ["a", "b"]
    assert [one.delivery_count for one in leased] == [1, 1], "nobody was told of the first"
    assert await world.settle(Verb.ACK, "t", leased) == ["acked", "acked"]


async def test_a_lease_of_a_cancelled_pop_that_can_not_be_ended_is_taken_back_by_the_next_pop(world: World) -> None:
    await world.publish("t", "a")
    gate = world.faults.stop("leases.grant", after=True)
    popping = asyncio.ensure_future(world.pop("t"))
    await gate.reached()
    world.faults.fail("leases.settle.withdraw", away())
    popping.cancel()
    await world.settle_down()
    (leased,) = await world.pop("t", wait=PATIENCE_SECONDS)
    assert leased.delivery_count == 1


async def test_messages_of_a_key_are_taken_back_together_so_that_a_later_owner_knows_their_order(folder: Path) -> None:
    clock = ManualClock()
    world = await start_world(folder / "data", clock=clock)
    await world.create("t")
    await world.publish("t", "a", "b", "c", ordering_key="k")
    world.faults.fail("leases.grant", away(), after=True)
    with pytest.raises(StateUnavailable):
        await world.pop("t", count=3, invisibility=30)
    gate = world.faults.stop("leases.settle.withdraw", after=True)
    popping = asyncio.ensure_future(world.pop("t"))  # it meets the first of them
    await gate.reached()
    popping.cancel()
    await crash(world, folder / "data", folder / "copy")
    async with open_world(folder / "copy", clock=clock) as risen:
        risen.broker.says_returned = True
        await risen.let_pass(30)
        assert bodies(await risen.pop("t", count=3, wait=PATIENCE_SECONDS)) == ["a", "b", "c"]


async def test_a_lease_that_was_never_answered_stands_where_its_attempt_may_be_repeated(world: World) -> None:
    await world.publish("t", "a")
    world.faults.fail("leases.grant", away(), after=True)
    with pytest.raises(StateUnavailable):
        await world.pop("t", invisibility=30, attempt="one")
    assert await world.pop("t") == []
    (leased,) = await world.pop("t", attempt="one")
    assert leased.delivery_count == 1


async def test_a_settlement_that_fails_settles_nothing(world: World) -> None:
    await world.publish("t", "a")
    leased = await world.pop("t")
    for verb in (Verb.ACK, Verb.RELEASE, Verb.EXTEND, Verb.REJECT):
        call = "move" if verb is Verb.REJECT else verb.value
        world.faults.fail(f"leases.settle.{call}", away())
        with pytest.raises(StateUnavailable):
            await world.settle(verb, "t", leased, seconds=10)
    assert await world.settle(Verb.ACK, "t", leased) == ["acked"]


async def test_a_repeated_ack_finishes_one_that_was_written_but_never_answered(world: World) -> None:
    await world.publish("t", "a")
    leased = await world.pop("t", invisibility=40_000)
    world.faults.fail("leases.settle.ack", away(), after=True)
    with pytest.raises(StateUnavailable):
        await world.settle(Verb.ACK, "t", leased)
    assert world.journal.count(EventKind.ACKED) == 0
    assert await world.settle(Verb.ACK, "t", leased) == ["already_acked"]
    assert (world.journal.count(EventKind.ACKED), world.journal.details(EventKind.FOUND_SETTLED)) == (0, ["acked"])
    await world.settle_down()
    status = await world.engine.status("t", "default")
    assert (status.ready, status.in_flight) == (0, 0)
    await world.broker.lose(world.queue("t"))
    await world.let_pass(OPEN_RETRY_SECONDS_MAX)  # before that the queue is not opened again
    popping = asyncio.ensure_future(world.pop("t"))
    await eventually(lambda: world.served("t").hosts[0].channel is not None)
    await world.let_pass(OPEN_RETRY_SECONDS_MAX)
    assert await popping == [], "the message was still at the broker"
    await world.settle_down()
    assert (await world.broker.depth([world.queue("t")]))[0].ready == 0


async def test_an_ack_that_was_never_answered_nor_repeated_is_journaled_when_its_lease_has_ended(world: World) -> None:
    await world.publish("t", "a", "b")
    leased = await world.pop("t", count=2, invisibility=30)
    world.faults.fail("leases.settle.ack", away(), after=True)
    with pytest.raises(StateUnavailable):
        await world.settle(Verb.ACK, "t", leased[:1])
    assert await world.settle(Verb.ACK, "t", leased[1:]) == ["acked"]
    await world.let_pass(30)
    assert await world.pop("t") == []
    (found,) = [event for event in world.journal.events if event.kind is EventKind.FOUND_SETTLED]
    assert (found.message_id, found.delivery_count, found.detail) == (leased[0].message_id, 1, "acked")
    assert world.journal.count(EventKind.ACKED) == 1


async def test_a_repeated_release_finishes_one_that_was_written_but_never_answered(world: World) -> None:
    await world.publish("t", "a")
    leased = await world.pop("t", invisibility=40_000)
    world.faults.fail("leases.settle.release", away(), after=True)
    with pytest.raises(StateUnavailable):
        await world.settle(Verb.RELEASE, "t", leased, seconds=0)
    for _ in range(2):
        assert await world.settle(Verb.RELEASE, "t", leased, seconds=0) == ["released"]
        assert world.journal.count(EventKind.RELEASED) == 1
    (again,) = await world.pop("t")
    assert again.delivery_count == 2
    assert await world.settle(Verb.RELEASE, "t", leased, seconds=0) == ["expired"]


async def test_an_exhausted_message_that_was_acked_without_an_answer_is_journaled_and_no_dead_letter(
    world: World,
) -> None:
    await world.engine.changes.put_group("t", "default", Policy(max_deliveries=1))
    await world.publish("t", "a")
    leased = await world.pop("t", invisibility=5)
    world.faults.fail("leases.settle.ack", away(), after=True)
    with pytest.raises(StateUnavailable):
        await world.settle(Verb.ACK, "t", leased)
    await world.let_pass(5)
    await eventually(lambda: world.journal.details(EventKind.FOUND_SETTLED) == ["acked"])
    assert await world.dead_letters("t") == []


async def test_a_retry_delay_that_can_not_be_written_is_written_later(world: World) -> None:
    retry = RetryPolicy(initial_seconds=10)
    await world.engine.changes.put_group("t", "default", Policy(retry=retry))
    await world.publish("t", "a")
    leased = await world.pop("t", invisibility=5)
    world.faults.fail("leases.settle.expire", away(), times=3)
    await world.let_pass(5)
    await eventually(lambda: world.faults.calls.count("leases.settle.expire") == 4)
    await world.settle_down()
    assert await world.pop("t") == []
    await world.let_pass(10)
    again = await world.pop("t")
    assert bodies(again) == ["a"]
    assert await world.settle(Verb.ACK, "t", leased) == ["expired"]


async def test_an_extension_that_meets_its_own_expiry_wins_or_loses_but_never_both(world: World) -> None:
    await world.publish("t", "a")
    leased = await world.pop("t", invisibility=10)
    gate = world.faults.stop("leases.settle.extend", after=True)
    extending = asyncio.ensure_future(world.settle(Verb.EXTEND, "t", leased, seconds=60))
    await gate.reached()
    await world.let_pass(10)  # the deadline in the engine passes; in the store it moved before
    gate.open()
    assert await extending == ["extended"]
    assert await world.pop("t") == []
    await world.let_pass(49)
    assert await world.settle(Verb.EXTEND, "t", leased, seconds=20) == ["extended"]
    await world.let_pass(20)
    assert bodies(await world.pop("t")) == ["a"]
    assert world.journal.count(EventKind.EXPIRED) == 1 or world.journal.count(EventKind.EXPIRED) == 2


async def test_an_extension_that_is_answered_just_after_the_former_end_is_no_expiry(world: World) -> None:
    await world.publish("t", "a")
    leased = await world.pop("t", invisibility=10)
    gate = world.faults.stop("leases.settle.extend", after=True)
    extending = asyncio.ensure_future(world.settle(Verb.EXTEND, "t", leased, seconds=60))
    await gate.reached()
    assert isinstance(world.clock, ManualClock)
    world.clock.advance(10)
    gate.open()
    world.context.deadlines.tick()  # the engine handles the end, and then the answer
    assert await extending == ["extended"]
    await world.settle_down()
    assert world.journal.count(EventKind.EXPIRED) == 0
    status = await world.engine.status("t", "default")
    assert (status.ready, status.in_flight) == (0, 1)


@pytest.mark.parametrize("call", ["leases.settle.exhaust", "leases.settle.moved"])
@pytest.mark.parametrize("after", [False, True])
async def test_a_dead_lettering_goes_on_when_the_store_is_back(world: World, call: str, after: bool) -> None:
    await world.engine.changes.put_group("t", "default", Policy(max_deliveries=1))
    await world.publish("t", "a")
    await world.pop("t", invisibility=5)
    world.faults.fail(call, away(), times=3, after=after)
    await world.let_pass(5)
    await dead_letters(world, 1)
    assert await world.pop("t") == []
    # More than one attempt may have published it; never as another copy.
    assert len({letter.copy_id for letter in await world.dead_letters("t")}) == 1


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("leases.settle.move", True),
        ("broker.publish", False),
        ("broker.publish", True),
        ("leases.settle.moved", False),
        ("leases.settle.moved", True),
    ],
)
async def test_a_move_that_a_crash_cuts_in_two_is_finished_at_the_next_start(
    folder: Path, call: str, after: bool
) -> None:
    clock = ManualClock()
    world = await start_world(folder / "data", clock=clock)
    await world.create("t")
    await world.publish("t", "a")
    leased = await world.pop("t")
    gate = world.faults.stop(call, after=after)
    rejecting = asyncio.ensure_future(world.settle(Verb.REJECT, "t", leased, reason="bad"))
    await gate.reached()
    rejecting.cancel()
    await crash(world, folder / "data", folder / "copy")
    async with open_world(folder / "copy", clock=clock) as risen:
        letters = await dead_letters(risen, 1)  # it is finished even without a pop
        assert [letter.body for letter in letters] == [b"a"]
        assert letters[0].headers["x-popgate-dead-reason"] == "bad"
        assert letters[0].headers["x-popgate-delivery-count"] == 1
        assert await risen.settle(Verb.REJECT, "t", leased) == ["rejected"]
        assert await risen.pop("t") == []


async def test_a_rejection_that_is_cancelled_half_way_is_finished_in_the_background(world: World) -> None:
    await world.publish("t", "a")
    leased = await world.pop("t")
    gate = world.faults.stop("broker.publish")
    rejecting = asyncio.ensure_future(world.settle(Verb.REJECT, "t", leased))
    await gate.reached()
    rejecting.cancel()
    await asyncio.wait([rejecting])
    gate.open()
    await dead_letters(world, 1)
    assert await world.settle(Verb.REJECT, "t", leased) == ["rejected"]


async def test_two_rejections_of_one_lease_at_once_make_one_dead_letter(world: World) -> None:
    await world.publish("t", "a")
    leased = await world.pop("t")
    results = await asyncio.gather(*(world.settle(Verb.REJECT, "t", leased) for _ in range(4)))
    assert ["rejected"] in results
    assert {status for (status,) in results} <= {"rejected", "unavailable"}
    assert len(await dead_letters(world, 1)) == 1
    assert await world.settle(Verb.REJECT, "t", leased) == ["rejected"]


async def test_a_rejection_that_meets_the_next_hand_out_is_expired(world: World) -> None:
    await world.publish("t", "a")
    first = await world.pop("t", invisibility=5)
    await world.let_pass(5)
    gate = world.faults.stop("leases.settle.move")
    rejecting = asyncio.ensure_future(world.settle(Verb.REJECT, "t", first))
    await gate.reached()
    second = await world.pop("t")
    gate.open()
    assert await rejecting == ["expired"]
    assert await world.settle(Verb.ACK, "t", second) == ["acked"]
    assert await world.dead_letters("t") == []


@pytest.mark.parametrize("grant_first", [False, True])
async def test_an_ack_that_meets_a_grant_of_the_same_message_wins_or_loses(world: World, grant_first: bool) -> None:
    await world.publish("t", "a")
    first = await world.pop("t", invisibility=5)
    await world.let_pass(5)
    gate = world.faults.stop("leases.grant", after=grant_first)
    popping = asyncio.ensure_future(world.pop("t"))
    await gate.reached()
    acked = await world.settle(Verb.ACK, "t", first)
    gate.open()
    popped = await popping
    if grant_first:
        assert (acked, bodies(popped)) == (["expired"], ["a"])
    else:
        assert (acked, popped) == (["acked"], [])
        await world.settle_down()
        assert (await world.broker.depth([world.queue("t")]))[0].ready == 0


async def test_another_claim_on_the_queue_makes_the_engine_claim_again_and_lose_nothing(world: World) -> None:
    await world.publish("t", "a", "b", "c")
    (first,) = await world.pop("t")
    await world.leases.wrapped.claim(world.queue("t"))  # as a second proxy would
    popping = asyncio.ensure_future(world.pop("t", count=3, wait=20))
    for _ in range(30):
        await world.let_pass(0.5)
        if popping.done():
            break
    popped = await popping
    assert bodies(popped) == ["b", "c"], "a is leased, whoever owns the queue"
    assert world.faults.calls.count("leases.grant") < 10, "an overtaken owner does not insist"
    assert await world.settle(Verb.ACK, "t", [first, *popped]) == ["acked"] * 3


async def test_a_stopped_engine_stops_while_the_store_is_away(folder: Path) -> None:
    world = await start_world(folder / "data", clock=ManualClock())
    await world.create("t")
    await world.engine.changes.put_group("t", "default", Policy(retry=RetryPolicy(initial_seconds=1)))
    await world.publish("t", "a")
    await world.pop("t", invisibility=5)
    world.faults.fail("leases.settle.expire", StateUnavailable("away", retry_after_seconds=3600), times=9)
    await world.let_pass(5)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await stop_world(world)


async def dead_letters(world: World, count: int) -> list[Message]:
    """Wait until that many are in the dead-letter queue."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (ready := (await world.broker.depth([world.served("t").layout.dead]))[0].ready) != count:
            assert ready is not None
            assert ready <= count
            await asyncio.sleep(0.001)
    await world.settle_down()
    return await world.dead_letters("t")
