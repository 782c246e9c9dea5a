"""The broker fails and loses channels, at every moment of a message's life, while the engine serves pops."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from engine.patience import (
    LEASE_SECONDS,
    away,
    come_back,
    dead_once,
    drained,
    host_of,
    left,
    overtake,
    parked,
    patient_pop,
    patiently,
)
from popgate.domain.errors import BrokerUnavailable, StateUnavailable
from popgate.engine.queue import settlement_evidence
from popgate.engine.queue.buffered import MessageState
from popgate.engine.queue.channel_opener import OPEN_RETRY_SECONDS_MAX, OPEN_RETRY_SECONDS_MIN, PARKED_GRACE_SECONDS
from popgate.engine.queue.record_upkeep import SETTLED_KEPT_SECONDS
from popgate.engine.settle.orders import Verb
from popgate.runtime.clocks import ManualClock
from support.engines import (
    World,
    bodies,
    body_of,
    eventually,
    open_world,
)

# ---------------------------------------------------------------- the broker is away


async def test_a_pop_that_comes_while_the_broker_is_away_is_told_so_at_once(world: World) -> None:
    await world.publish("t", "a")
    world.faults.fail("broker.consume", away(), times=1000)
    for wait in (0, 20):
        with pytest.raises(BrokerUnavailable):
            await world.pop("t", wait=wait)  # the clock does not advance
    world.faults.heal()
    await come_back(world)
    assert await drained(world) == ["a"]


async def test_a_parked_pop_outlives_a_short_absence_of_the_broker(world: World) -> None:
    popping = await parked(world)
    failures = int(PARKED_GRACE_SECONDS / OPEN_RETRY_SECONDS_MAX) - 1
    world.faults.fail("broker.consume", away(), times=failures)
    await world.broker.lose(world.queue("t"))
    await world.publish("t", "a")
    for _ in range(failures):
        await world.let_pass(OPEN_RETRY_SECONDS_MAX)
        assert not popping.done()
    assert world.faults.calls.count("broker.consume") == 1 + failures
    assert bodies(await patiently(world, popping)) == ["a"]


async def test_a_queue_is_opened_again_at_once_and_then_less_and_less_often(world: World) -> None:
    popping = await parked(world)
    await world.let_pass(2 * OPEN_RETRY_SECONDS_MAX)
    world.faults.fail("broker.consume", away(), times=1000)
    await world.broker.lose(world.queue("t"))
    pause, attempts = OPEN_RETRY_SECONDS_MIN, 2
    for _ in range(8):
        await world.let_pass(pause)
        pause, attempts = min(2 * pause, OPEN_RETRY_SECONDS_MAX), attempts + 1
        assert world.faults.calls.count("broker.consume") == attempts
    world.faults.heal()
    await world.let_pass(OPEN_RETRY_SECONDS_MAX)
    world.faults.fail("broker.consume", away(), times=1)
    await world.let_pass(2 * OPEN_RETRY_SECONDS_MAX)
    await world.broker.lose(world.queue("t"))
    await world.publish("t", "a")
    await world.let_pass(OPEN_RETRY_SECONDS_MIN)
    assert bodies(await patiently(world, popping)) == ["a"], "it was open for long enough to be opened again at once"


async def test_a_parked_pop_is_told_in_the_end_that_the_broker_stays_away(world: World) -> None:
    popping = await parked(world)
    world.faults.fail("broker.consume", away(), times=1000)
    await world.broker.lose(world.queue("t"))
    began = world.clock.monotonic()
    with pytest.raises(BrokerUnavailable):
        await patiently(world, popping)
    assert PARKED_GRACE_SECONDS <= world.clock.monotonic() - began <= PARKED_GRACE_SECONDS + 2 * OPEN_RETRY_SECONDS_MAX


async def test_a_pop_whose_wait_ends_while_the_broker_is_away_is_not_told_that_nothing_is_there(world: World) -> None:
    popping = await parked(world, wait=2)
    world.faults.fail("broker.consume", away(), times=1000)
    await world.broker.lose(world.queue("t"))
    with pytest.raises(BrokerUnavailable):
        await patiently(world, popping)


async def test_an_opening_that_hangs_holds_up_neither_a_pop_beyond_its_wait_nor_the_other_queues(world: World) -> None:
    await world.create("u", queues=2)
    await world.publish("u", "a", "b")
    gate = world.faults.stop("broker.consume")
    assert bodies(await patient_pop(world, "u", count=5)) == ["b"]
    assert await patient_pop(world, "u", wait=2) == []
    gate.open()
    assert bodies(await patient_pop(world, "u", count=5)) == ["a"]


@pytest.mark.parametrize("call", ["broker.consume", "leases.claim", "leases.load"])
async def test_a_queue_that_can_not_be_opened_at_once_is_opened_later(world: World, call: str) -> None:
    await world.publish("t", "a", "b")
    (a,) = await patient_pop(world)
    await overtake(world)  # so that it has to be claimed again, too
    error = away() if call == "broker.consume" else StateUnavailable("away, says the test")
    world.faults.fail(call, error, times=3)
    assert bodies(await patient_pop(world, wait=10)) == ["b"]
    assert world.faults.calls.count(call) >= 4
    assert await world.settle(Verb.ACK, "t", [a]) == ["acked"]


async def test_a_channel_that_is_lost_while_it_is_being_opened_is_opened_again(world: World) -> None:
    await world.publish("t", "a", "b")
    gate = world.faults.stop("broker.consume", after=True)
    popping = asyncio.ensure_future(world.pop("t", wait=20))
    await gate.reached()
    await world.broker.lose(world.queue("t"))
    gate.open()
    leased = await patiently(world, popping)
    assert bodies(leased) == ["a"]
    assert await world.settle(Verb.ACK, "t", leased) == ["acked"]
    assert await drained(world) == ["b"]


async def test_a_delivery_on_a_channel_that_is_being_closed_settles_no_message_of_the_next_one(world: World) -> None:
    """The tag of the late delivery of `b` belongs to `c` on the next channel."""
    await world.publish("t", "a")
    assert await world.settle(Verb.ACK, "t", await patient_pop(world)) == ["acked"]
    world.broker.delays_count = 1
    await world.publish("t", "b", "c")
    await world.settle_down()
    channel = world.broker.channels[world.queue("t")]
    host_of(world).deliver_again()
    channel.deliver_late()
    world.served("t").ask()
    await come_back(world)
    leased = await patient_pop(world)
    assert bodies(leased) == ["b"]
    assert await world.settle(Verb.ACK, "t", leased) == ["acked"]
    await world.broker.lose(world.queue("t"))
    assert await drained(world) == ["c"], "it was never acked"


# ---------------------------------------------------------------- a channel is lost around a grant and an ack


@pytest.mark.parametrize("back_first", [False, True])
@pytest.mark.parametrize("after", [False, True])
async def test_a_lease_that_is_written_while_the_channel_is_lost_holds(
    world: World, after: bool, back_first: bool
) -> None:
    await world.publish("t", "a")
    gate = world.faults.stop("leases.grant", after=after)
    popping = asyncio.ensure_future(world.pop("t", invisibility=LEASE_SECONDS))
    await gate.reached()
    await world.broker.lose(world.queue("t"))
    if back_first:
        await come_back(world)
    gate.open()
    leased = await popping
    assert bodies(leased) == ["a"]
    if not back_first:
        await come_back(world)
    (held,) = host_of(world).messages()
    assert (held.state, held.tag is None) == (MessageState.LEASED, False), "attached on the next channel"
    assert await patient_pop(world) == [], "nobody else gets it"
    assert await world.settle(Verb.ACK, "t", leased) == ["acked"]
    assert await left(world) == 0


async def test_a_grant_that_fails_after_its_channel_was_lost_leaves_the_message_to_the_next_pop(world: World) -> None:
    await world.publish("t", "a", "b")
    for back_first in (False, True):
        gate = world.faults.stop("leases.grant")
        popping = asyncio.ensure_future(world.pop("t"))
        await gate.reached()
        await world.broker.lose(world.queue("t"))
        if back_first:
            await come_back(world)
        gate.fail(StateUnavailable("away, says the test"))
        with pytest.raises(StateUnavailable):
            await popping
        await come_back(world)
    assert await drained(world) == ["a", "b"]


async def test_a_message_whose_ack_the_broker_never_saw_comes_back_and_is_never_handed_out(world: World) -> None:
    await world.publish("t", "a", "b", "c")
    a, b, c = await patient_pop(world, count=3)
    world.broker.channels[world.queue("t")].drops_acks = True
    assert await world.settle(Verb.ACK, "t", [a, b]) == ["acked"] * 2
    await world.broker.lose(world.queue("t"))
    assert (await world.broker.depth([world.queue("t")]))[0].ready == 3, "the broker has them all again"
    await come_back(world)
    assert await patient_pop(world, count=5) == []
    assert await world.settle(Verb.ACK, "t", [a, b, c]) == ["already_acked", "already_acked", "acked"]
    assert await left(world) == 0


@pytest.mark.parametrize("back_first", [False, True])
async def test_a_channel_that_is_lost_while_an_ack_is_written_undoes_nothing(world: World, back_first: bool) -> None:
    await world.publish("t", "a", "b")
    leased = await patient_pop(world)
    gate = world.faults.stop("leases.settle.ack", after=True)
    acking = asyncio.ensure_future(world.settle(Verb.ACK, "t", leased))
    await gate.reached()
    await world.broker.lose(world.queue("t"))
    if back_first:
        await come_back(world)
    gate.open()
    assert await acking == ["acked"]
    assert await drained(world) == ["b"]


async def test_the_record_of_an_ack_that_was_lost_is_kept_until_its_message_was_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settlement_evidence, "RETURNED_MAX_AFTER_RESTART", 0)
    async with open_world(folder / "data", clock=ManualClock()) as world:
        await world.create("t")
        await world.publish("t", "a", "b")
        a, b = await patient_pop(world, count=2, invisibility=LEASE_SECONDS)
        world.broker.channels[world.queue("t")].drops_acks = True
        assert await world.settle(Verb.ACK, "t", [a]) == ["acked"]
        await world.broker.lose(world.queue("t"))
        await come_back(world)
        assert await world.settle(Verb.ACK, "t", [b]) == ["acked"]
        channel = host_of(world).channel
        assert channel is not None
        await channel.flush()
        await world.let_pass(2 * SETTLED_KEPT_SECONDS)
        await world.served("t").trim()
        assert await patient_pop(world) == []
        assert await left(world) == 0


# ---------------------------------------------------------------- a channel is lost with messages in every state


async def test_ready_messages_keep_their_order_however_often_their_channel_is_lost(world: World) -> None:
    names = [f"m{number}" for number in range(12)]
    await world.publish("t", *names[:8])
    handed_out: list[str] = []
    for number in range(4):
        handed_out += bodies(await patient_pop(world, invisibility=LEASE_SECONDS))
        await world.broker.lose(world.queue("t"))
        await world.publish("t", names[8 + number])
    assert handed_out == names[:4]
    handed_out += bodies(await patient_pop(world, count=16, invisibility=LEASE_SECONDS))
    assert handed_out == names
    await world.let_pass(LEASE_SECONDS)
    assert sorted(await drained(world)) == sorted(names)


@pytest.mark.parametrize("mixed", range(4))
async def test_keyed_messages_keep_their_order_though_a_lost_channel_gives_them_back_in_another(
    world: World, mixed: int
) -> None:
    """Messages that clients had before, and messages that no client has had yet."""
    names = [f"m{number}" for number in range(9)]
    for name in names:
        await world.publish("t", name, ordering_key="kl"[int(name[1:]) % 2])
        await world.let_pass(0.01)
    leased = await patient_pop(world, count=4, invisibility=LEASE_SECONDS)
    assert bodies(leased) == names[:4]
    world.broker.says_returned, world.broker.mixing = True, Random(mixed)
    await world.broker.lose(world.queue("t"))
    await come_back(world)
    assert await patient_pop(world, wait=0) == [], "the first of both keys are leased"
    given_back = await world.settle(Verb.RELEASE, "t", [leased[2], leased[1]])
    assert given_back == ["released", "released"]
    assert await world.settle(Verb.ACK, "t", [leased[0], leased[3]]) == ["acked", "acked"]
    one_by_one: list[str] = []
    while next_ones := await patient_pop(world, invisibility=LEASE_SECONDS):
        assert await world.settle(Verb.ACK, "t", next_ones) == ["acked"]
        one_by_one += bodies(next_ones)
    assert one_by_one == [names[1], names[2], *names[4:]]


async def test_what_came_back_is_not_handed_out_before_all_of_it_is_here(world: World) -> None:
    for name in ("a", "b", "c", "d"):
        await world.publish("t", name, ordering_key="k")
        await world.let_pass(0.01)
    assert await world.settle(Verb.RELEASE, "t", await patient_pop(world)) == ["released"]
    world.broker.says_returned, world.broker.delays_count = True, 2
    await world.broker.lose(world.queue("t"))
    await come_back(world)
    assert await patient_pop(world, wait=0) == [], "a and b stand in front, and are not here yet"
    world.broker.channels[world.queue("t")].deliver_late()
    await eventually(lambda: not host_of(world).is_ordering)
    in_order: list[str] = []
    while next_ones := await patient_pop(world, invisibility=LEASE_SECONDS):
        assert await world.settle(Verb.ACK, "t", next_ones) == ["acked"]
        in_order += bodies(next_ones)
    assert in_order == ["a", "b", "c", "d"]


@pytest.mark.parametrize("ends_first", [False, True])
async def test_a_delay_survives_its_channel(world: World, ends_first: bool) -> None:
    await world.publish("t", "a", "b")
    a = await patient_pop(world)
    assert await world.settle(Verb.RELEASE, "t", a, seconds=60) == ["released"]
    await world.broker.lose(world.queue("t"))
    if ends_first:
        world.faults.fail("broker.consume", away(), times=1000)
        await world.let_pass(60)
        world.faults.heal()
    else:
        await come_back(world)
        (b,) = await patient_pop(world, count=5, invisibility=LEASE_SECONDS)
        assert body_of(b.message) == "b"
        assert await patient_pop(world) == []
        assert await world.settle(Verb.ACK, "t", [b]) == ["acked"]
        await world.let_pass(60)
    again = await patient_pop(world, count=5, invisibility=LEASE_SECONDS)
    assert [(body_of(one.message), one.delivery_count) for one in again] == [("a", 2), ("b", 1)][: 1 + ends_first]
    assert await world.settle(Verb.ACK, "t", again) == ["acked"] * len(again)
    assert await left(world) == 0


@pytest.mark.parametrize("back_first", [False, True])
@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("leases.settle.move", False),
        ("leases.settle.move", True),
        ("broker.publish", False),
        ("broker.publish", True),
        ("leases.settle.moved", False),
        ("leases.settle.moved", True),
    ],
)
async def test_a_rejection_survives_its_channel_at_every_step(
    world: World, call: str, after: bool, back_first: bool
) -> None:
    await world.publish("t", "a", "b")
    leased = await patient_pop(world, invisibility=LEASE_SECONDS)
    gate = world.faults.stop(call, after=after)
    rejecting = asyncio.ensure_future(world.settle(Verb.REJECT, "t", leased))
    await gate.reached()
    await world.broker.lose(world.queue("t"))
    if back_first:
        await come_back(world)
        assert bodies(await patient_pop(world, count=5, invisibility=1)) == ["b"]
    gate.open()
    (status,) = await rejecting
    if status == "rejected":
        assert list(map(body_of, await world.dead_letters("t"))) == ["a"]
    else:
        assert status == "unavailable"
        assert call == "leases.settle.move", "its body had gone, and is not waited for"
    await dead_once(world, "a")
    assert await world.settle(Verb.REJECT, "t", leased) == ["rejected"]
    await world.let_pass(1)
    assert await drained(world) == ["b"]


async def test_a_rejection_whose_body_went_with_its_channel_fetches_it_again(world: World) -> None:
    await world.publish("t", "a")
    leased = await patient_pop(world)
    await world.broker.lose(world.queue("t"))
    rejecting = asyncio.ensure_future(world.settle(Verb.REJECT, "t", leased))
    await world.let_pass(OPEN_RETRY_SECONDS_MAX)
    assert await rejecting == ["rejected"]
    await dead_once(world, "a")
    assert await left(world) == 0
