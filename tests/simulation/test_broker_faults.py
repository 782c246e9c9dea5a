"""The broker goes away, loses channels and queues, and refuses dead letters while the engine serves pops."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TypeVar

import pytest

from popgate.domain.errors import BrokerUnavailable, Conflict, QueueGone, RetryLater, StateUnavailable
from popgate.domain.message import Message
from popgate.domain.topics import Policy
from popgate.engine import evidence, moves, retrieval
from popgate.engine.held import HeldState
from popgate.engine.opening import OPEN_RETRY_SECONDS, PARKED_GRACE_SECONDS
from popgate.engine.popping import Leased
from popgate.engine.queue_host import SETTLED_KEPT_SECONDS, QueueHost
from popgate.engine.settling import Verb
from popgate.ports.broker import PublishStatus
from popgate.ports.journal import EventKind
from popgate.runtime.clocks import ManualClock
from support.engines import (
    PATIENCE_SECONDS,
    World,
    bodies,
    body_of,
    eventually,
    open_world,
    start_world,
    stop_world,
)
from support.faulty import Interrupted

T = TypeVar("T")

STEP_SECONDS = 0.5
ROUNDS_MAX = 100
"""So often the clock is turned before a test gives up."""
LEASE_SECONDS = 600
"""Longer than any test's clock is turned, unless it waits for that."""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead-lettering pauses by the machine's clock."""
    monkeypatch.setattr(moves, "RETRY_SECONDS", 0.001)


@pytest.fixture
async def nameless(folder: Path) -> AsyncIterator[World]:
    """A world whose messages can't be identified."""
    async with open_world(folder / "data", clock=ManualClock(), anonymous=True) as opened:
        await opened.create("t")
        yield opened


# ---------------------------------------------------------------- the broker is away


async def test_a_pop_that_comes_while_the_broker_is_away_is_told_so_at_once(world: World) -> None:
    await world.publish("t", "a")
    world.faults.fail("broker.consume", away(), times=1000)
    for wait in (0, 20):
        with pytest.raises(BrokerUnavailable):
            await world.pop("t", wait=wait)  # no clock is turned
    world.faults.heal()
    await come_back(world)
    assert await drained(world) == ["a"]


async def test_a_parked_pop_outlives_a_short_absence_of_the_broker(world: World) -> None:
    popping = await parked(world)
    failures = int(PARKED_GRACE_SECONDS / OPEN_RETRY_SECONDS) - 1
    world.faults.fail("broker.consume", away(), times=failures)
    await world.broker.lose(world.queue("t"))
    await world.publish("t", "a")
    for _ in range(failures):
        await world.let_pass(OPEN_RETRY_SECONDS)
        assert not popping.done()
    assert world.faults.calls.count("broker.consume") == 1 + failures
    assert bodies(await patiently(world, popping)) == ["a"]


async def test_a_parked_pop_is_told_in_the_end_that_the_broker_stays_away(world: World) -> None:
    popping = await parked(world)
    world.faults.fail("broker.consume", away(), times=1000)
    await world.broker.lose(world.queue("t"))
    began = world.clock.monotonic()
    with pytest.raises(BrokerUnavailable):
        await patiently(world, popping)
    assert PARKED_GRACE_SECONDS <= world.clock.monotonic() - began <= PARKED_GRACE_SECONDS + 2 * OPEN_RETRY_SECONDS


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
    (held,) = host_of(world).held.values()
    assert (held.state, held.tag is None) == (HeldState.LEASED, False), "attached on the next channel"
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
    monkeypatch.setattr(evidence, "RETURNED_MAX_AFTER_RESTART", 0)
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
    await world.let_pass(OPEN_RETRY_SECONDS)
    assert await rejecting == ["rejected"]
    await dead_once(world, "a")
    assert await left(world) == 0


# ---------------------------------------------------------------- dead-lettering that the broker refuses

_FAULTS = ["unavailable", "half_done", "failed", "failed_but_stored", "refused", "unrouted", "queue_deleted"]


async def break_dead_letters(world: World, fault: str) -> None:
    """Let the next three publishes go wrong, or the next one find no queue."""
    if fault in ("unavailable", "half_done"):
        world.faults.fail("broker.publish", away(), times=3, after=fault == "half_done")
    elif fault == "queue_deleted":
        await delete_dead_letter_queue(world)
    else:
        status = PublishStatus(fault.removesuffix("_but_stored"))
        world.broker.refuse(status, times=3, stored=fault.endswith("_but_stored"))


@pytest.mark.parametrize("fault", _FAULTS)
async def test_a_rejection_that_the_broker_refuses_is_finished_later(world: World, fault: str) -> None:
    await world.publish("t", "a")
    leased = await patient_pop(world)
    await break_dead_letters(world, fault)
    try:
        statuses = await world.settle(Verb.REJECT, "t", leased)
    except BrokerUnavailable:
        statuses = ["unavailable"]
    assert statuses == ["unavailable"]
    await dead_once(world, "a")
    assert await world.settle(Verb.REJECT, "t", leased) == ["rejected"], "the repeat learns of it"
    assert await patient_pop(world) == []
    assert await left(world) == 0


@pytest.mark.parametrize("channel_lost", [False, True])
@pytest.mark.parametrize("fault", _FAULTS)
async def test_an_exhausted_message_that_the_broker_refuses_is_dead_lettered_later(
    world: World, fault: str, channel_lost: bool
) -> None:
    await world.engine.topics.put_group("t", "default", Policy(max_deliveries=1))
    await world.publish("t", "a")
    leased = await patient_pop(world, invisibility=5)
    await break_dead_letters(world, fault)
    if channel_lost:
        await world.broker.lose(world.queue("t"))
    await world.let_pass(5)
    assert await patient_pop(world) == []
    (letter,) = await dead_once(world, "a")
    assert letter.headers["x-popgate-dead-cause"] == "max_deliveries"
    assert await world.settle(Verb.ACK, "t", leased) == ["expired"]
    assert await left(world) == 0


async def test_a_dead_letter_queue_that_can_not_be_declared_again_stops_nothing(world: World) -> None:
    await world.engine.topics.put_group("t", "default", Policy(max_deliveries=1))
    await world.publish("t", "a", "b")
    await patient_pop(world, invisibility=5)
    await delete_dead_letter_queue(world)
    world.faults.fail("broker.declare_group", Conflict("somebody has declared it otherwise, says the test"))
    await world.let_pass(5)
    await world.settle_down()
    assert world.failures == [], "a conflict is the world's doing, and no reason to end the process"
    assert bodies(await patient_pop(world)) == ["b"]
    await dead_once(world, "a")


async def test_a_rejection_of_a_message_that_stays_away_says_unavailable_and_its_lease_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "WAIT_SECONDS_MAX", 0.01)
    await world.publish("t", "a")
    leased = await patient_pop(world, invisibility=60)
    world.faults.fail("broker.consume", away(), times=1000)
    await world.broker.lose(world.queue("t"))
    assert await world.settle(Verb.REJECT, "t", leased) == ["unavailable"]
    world.faults.heal()
    await world.let_pass(60)
    assert await drained(world) == ["a"]
    assert await world.dead_letters("t") == []


async def test_a_rejection_that_waits_for_others_does_not_settle_another_consumers_lease(world: World) -> None:
    await world.publish("t", "a", "b")
    (stale,) = await patient_pop(world, invisibility=5)
    await world.let_pass(5)
    a, b = await patient_pop(world, count=2, invisibility=5)
    gate = world.faults.stop("leases.settle.move")
    rejecting = asyncio.ensure_future(world.settle(Verb.REJECT, "t", [stale, b]))
    await gate.reached()
    await world.let_pass(5)
    again = await patient_pop(world, count=2, invisibility=LEASE_SECONDS)
    assert bodies(again) == ["a", "b"]
    gate.open()
    assert await rejecting == ["expired", "expired"], "somebody else has both of them"
    assert await world.settle(Verb.ACK, "t", again) == ["acked"] * 2
    assert await world.dead_letters("t") == []
    assert await world.settle(Verb.ACK, "t", [a]) == ["expired"]


# ---------------------------------------------------------------- a queue is deleted


async def test_a_deleted_queue_is_missed_until_its_group_is_declared_again(world: World) -> None:
    await world.publish("t", "a", "b")
    old = await patient_pop(world, count=2, invisibility=LEASE_SECONDS)
    popping = await parked(world)
    await delete_queues(world)
    began = world.clock.monotonic()
    with pytest.raises(QueueGone):
        await patiently(world, popping)
    assert world.clock.monotonic() - began <= 2 * OPEN_RETRY_SECONDS, "what is gone is not waited for"
    for wait in (0, 20):
        with pytest.raises(QueueGone):
            await world.pop("t", wait=wait)
        await world.let_pass(OPEN_RETRY_SECONDS)
    assert await world.publish("t", "lost") == ["failed"]

    await world.engine.topics.put_group("t", "default", None)
    await world.publish("t", "d", "e")
    (d,) = await patient_pop(world, invisibility=LEASE_SECONDS)
    assert set(await world.settle(Verb.ACK, "t", old[:1])) <= {"acked", "expired"}
    assert "rejected" not in await world.settle(Verb.REJECT, "t", old[1:])
    assert bodies(await patient_pop(world, count=5, invisibility=1)) == ["e"]
    assert await world.settle(Verb.ACK, "t", [d]) == ["acked"]
    await world.let_pass(1)
    assert await drained(world) == ["e"], "old receipts touch nothing new"
    assert await world.dead_letters("t") == []


async def test_a_group_that_is_created_again_takes_messages_though_its_queue_was_missing(world: World) -> None:
    await world.publish("t", "a")
    await patient_pop(world)
    await delete_queues(world)
    assert await world.publish("t", "lost") == ["failed"]
    await world.engine.topics.delete_group("t", "default")
    await world.engine.topics.put_group("t", "default", None)
    assert await world.publish("t", "b") == ["published"]
    assert await drained(world) == ["b"]


async def test_receipts_of_a_deleted_queue_do_not_distort_what_is_said_of_the_new_one(world: World) -> None:
    await world.publish("t", "a", "b")
    old = await patient_pop(world, count=2, invisibility=LEASE_SECONDS)
    await delete_queues(world)
    await world.engine.topics.put_group("t", "default", None)
    await world.settle(Verb.ACK, "t", old[:1])
    await world.settle(Verb.EXTEND, "t", old[1:], seconds=60)
    await world.let_pass(60)
    await world.let_pass(60)
    await world.publish("t", "c")  # stays with the broker: nobody asks
    status = await world.engine.status("t", "default")
    assert (status.ready, status.in_flight, status.delayed) == (1, 0, 0)


async def test_a_grant_that_meets_the_deletion_of_its_queue_harms_nothing_new(world: World) -> None:
    await world.publish("t", "a")
    gate = world.faults.stop("leases.grant", after=True)
    popping = asyncio.ensure_future(world.pop("t"))
    await gate.reached()
    await delete_queues(world)
    await world.engine.topics.put_group("t", "default", None)
    await world.publish("t", "b")
    gate.open()
    popped = await popping
    assert bodies(popped) == ["a"], "it was here, and its lease is written"
    await world.settle(Verb.ACK, "t", popped)
    assert await drained(world) == ["b"]


async def test_a_queue_that_is_only_said_to_be_gone_keeps_its_leases_and_settlements(world: World) -> None:
    await world.publish("t", "a", "b", "c")
    a, b = await patient_pop(world, count=2, invisibility=LEASE_SECONDS)
    world.broker.channels[world.queue("t")].drops_acks = True
    assert await world.settle(Verb.ACK, "t", [a]) == ["acked"]
    await world.broker.lose(world.queue("t"), queue_gone=True)
    with pytest.raises(QueueGone):
        await world.pop("t")
    await come_back(world)  # what has elected another leader may say so too
    assert bodies(await patient_pop(world, count=5, invisibility=1)) == ["c"]
    assert await world.settle(Verb.ACK, "t", [b]) == ["acked"]
    await world.let_pass(1)
    assert await drained(world) == ["c"]


# ---------------------------------------------------------------- messages that can't be identified


async def test_an_unidentified_lease_ends_with_its_channel_and_is_never_said_to_settle(nameless: World) -> None:
    await nameless.publish("t", "a", "b", "c", "d")
    leased = await patient_pop(nameless, count=4, invisibility=LEASE_SECONDS)
    await nameless.broker.lose(nameless.queue("t"))
    for verb, one in zip(Verb, leased, strict=True):
        assert await nameless.settle(verb, "t", [one], seconds=0) == ["expired"]
    assert await drained(nameless) == ["a", "b", "c", "d"]
    assert await nameless.dead_letters("t") == []


async def test_an_unidentified_lease_has_ended_even_if_the_store_can_not_forget_it(
    nameless: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "WAIT_SECONDS_MAX", 0.01)
    await nameless.publish("t", "a", "b", "c", "d")
    leased = await patient_pop(nameless, count=4, invisibility=LEASE_SECONDS)
    nameless.faults.fail("leases.forget", StateUnavailable("away, says the test"))
    await nameless.broker.lose(nameless.queue("t"))
    await nameless.settle_down()
    await come_back(nameless)
    for _ in range(2):
        statuses = [await nameless.settle(verb, "t", [one]) for verb, one in zip(Verb, leased, strict=True)]
        assert statuses == [["expired"]] * 4
    assert await drained(nameless) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("after", [False, True])
async def test_an_unidentified_ack_that_is_too_late_for_its_channel_is_expired(nameless: World, after: bool) -> None:
    await nameless.publish("t", "a")
    leased = await patient_pop(nameless)
    gate = nameless.faults.stop("leases.settle.ack", after=after)
    acking = asyncio.ensure_future(nameless.settle(Verb.ACK, "t", leased))
    await gate.reached()
    await nameless.broker.lose(nameless.queue("t"))
    await come_back(nameless)
    gate.open()
    assert await acking == ["expired"]
    assert await drained(nameless) == ["a"]


@pytest.mark.parametrize("after", [False, True])
async def test_an_unidentified_ack_that_was_lost_on_its_way_is_never_said_to_have_arrived(
    nameless: World, after: bool
) -> None:
    await nameless.publish("t", "a")
    leased = await patient_pop(nameless)
    nameless.broker.channels[nameless.queue("t")].drops_acks = True
    gate = nameless.faults.stop("channel.flush", after=after)
    acking = asyncio.ensure_future(nameless.settle(Verb.ACK, "t", leased))
    await gate.reached()
    await nameless.broker.lose(nameless.queue("t"))
    gate.open()
    assert await acking == ["expired"]
    assert await drained(nameless) == ["a"]


@pytest.mark.parametrize("ending", ["cancelled", "failed"])
async def test_a_repeated_unidentified_ack_does_not_say_that_a_lost_one_has_arrived(
    nameless: World, ending: str
) -> None:
    await nameless.publish("t", "a")
    leased = await patient_pop(nameless)
    nameless.broker.channels[nameless.queue("t")].drops_acks = True
    gate = nameless.faults.stop("channel.flush")
    acking = asyncio.ensure_future(nameless.settle(Verb.ACK, "t", leased))
    await gate.reached()
    if ending == "cancelled":
        acking.cancel()
    else:
        gate.fail(away())
    await asyncio.gather(acking, return_exceptions=True)
    await nameless.broker.lose(nameless.queue("t"))
    await come_back(nameless)
    assert await nameless.settle(Verb.ACK, "t", leased) == ["expired"]
    assert await drained(nameless) == ["a"]


@pytest.mark.parametrize("after", [False, True])
async def test_an_unidentified_message_whose_channel_is_lost_during_its_grant_is_leased_once(
    nameless: World, after: bool
) -> None:
    await nameless.publish("t", "a", "b")
    gate = nameless.faults.stop("leases.grant", after=after)
    popping = asyncio.ensure_future(nameless.pop("t", wait=20, count=2, invisibility=LEASE_SECONDS))
    await gate.reached()
    await nameless.broker.lose(nameless.queue("t"))
    gate.open()
    leased = await patiently(nameless, popping)
    assert bodies(leased) == ["a", "b"]
    assert await patient_pop(nameless) == []
    assert await nameless.settle(Verb.ACK, "t", leased) == ["acked"] * 2
    assert await left(nameless) == 0


# ---------------------------------------------------------------- pops are cancelled


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize(
    ("kind", "awaits"), [("short", 3), ("long", 2), ("parked", 2), ("attempt", 3), ("repeat", 2), ("creating", 8)]
)
async def test_a_pop_that_is_cancelled_at_any_await_takes_no_message_with_it(
    world: World, kind: str, awaits: int, answered: bool
) -> None:
    names, at = ["a", "b", "c"], 0
    for at in count(1):
        topic = f"{kind}-{at}"
        if kind != "creating":  # by use, otherwise
            await world.create(topic)
        if kind not in ("creating", "parked"):
            await world.publish(topic, *names)
        wait, attempt = 0.0 if kind == "short" else 2.0, "once" if kind in ("attempt", "repeat") else None
        if kind == "repeat":  # of a pop that was answered; the bodies come back with the next channel
            await world.pop(topic, count=2, attempt=attempt, invisibility=5)
            await world.broker.lose(world.queue(topic))
        work = Interrupted(world.pop(topic, count=2, wait=wait, attempt=attempt, invisibility=5), at, answered=answered)
        popping = asyncio.ensure_future(work.run())
        await world.settle_down()
        if kind in ("creating", "parked"):
            await world.publish(topic, *names)
        await patiently(world, asyncio.ensure_future(asyncio.wait([popping])))
        assert work.happened is popping.cancelled()
        await world.settle_down()  # what it has handed in is written even so
        await world.let_pass(5)
        assert sorted(await drained(world, topic)) == names, f"cancelled at {at}"
        if not work.happened:
            break
    assert at > awaits, "there are more"


@pytest.mark.parametrize("answered", [False, True])
async def test_a_parked_pop_that_is_cancelled_passes_its_messages_on_to_the_next(world: World, answered: bool) -> None:
    at = 0
    second: asyncio.Future[list[Leased]] | None = None
    for at in count(1):
        work = Interrupted(world.pop("t", wait=20, invisibility=LEASE_SECONDS), at, answered=answered)
        first = asyncio.ensure_future(work.run())
        await world.settle_down()
        assert world.served("t").parked_pops == (not first.done())
        second = await parked(world)
        await world.publish("t", f"m{at}")
        await world.settle_down()
        if not work.happened:
            assert bodies(await first) == [f"m{at}"]
            break
        leased = await second  # no clock is turned
        assert first.cancelled()
        assert bodies(leased) == [f"m{at}"]
        assert await world.settle(Verb.ACK, "t", leased) == ["acked"]
    assert at > 2
    assert second is not None
    second.cancel()


@pytest.mark.parametrize("after", [False, True])
async def test_a_pop_that_is_cancelled_while_its_leases_are_written_gives_them_back_at_once(
    world: World, after: bool
) -> None:
    await world.publish("t", "a", "b")
    gate = world.faults.stop("leases.grant", after=after)
    popping = asyncio.ensure_future(world.pop("t", count=2))
    await gate.reached()
    popping.cancel()
    await asyncio.wait([popping])
    await world.settle_down()
    assert await drained(world) == ["a", "b"]


@pytest.mark.parametrize("after", [False, True])
async def test_a_cancelled_attempt_keeps_its_leases_for_the_repeat(world: World, after: bool) -> None:
    await world.publish("t", "a", "b")
    gate = world.faults.stop("leases.grant", after=after)
    popping = asyncio.ensure_future(world.pop("t", count=2, attempt="once", invisibility=LEASE_SECONDS))
    await gate.reached()
    popping.cancel()
    await asyncio.wait([popping])
    if after:
        assert await patient_pop(world, count=2) == []
    leased = await world.pop("t", count=2, attempt="once", invisibility=LEASE_SECONDS)
    assert bodies(leased) == ["a", "b"]
    assert [one.delivery_count for one in leased] == [1, 1]
    assert await world.settle(Verb.ACK, "t", leased) == ["acked"] * 2


# ---------------------------------------------------------------- attempts


@pytest.mark.parametrize("call", ["leases.find_attempt", "leases.grant"])
@pytest.mark.parametrize("after", [False, True])
async def test_pops_with_the_same_attempt_id_at_once_get_the_same_leases(world: World, call: str, after: bool) -> None:
    await world.publish("t", "a", "b", "c")
    gate = world.faults.stop(call, after=after)
    popping = [asyncio.ensure_future(world.pop("t", count=2, attempt="once", wait=20)) for _ in range(3)]
    await gate.reached()
    await world.settle_down()
    gate.open()
    answers = [await one for one in popping]
    assert bodies(answers[0]) == ["a", "b"]
    assert handles(answers[1]) == handles(answers[2]) == handles(answers[0])
    assert world.journal.count(EventKind.DELIVERED) == 2
    assert bodies(await patient_pop(world, count=5)) == ["c"]


async def test_a_repeated_attempt_takes_over_from_one_that_is_parked(world: World) -> None:
    popping = [await parked(world, attempt="once") for _ in range(3)]
    assert [one.done() for one in popping] == [True, True, False]
    await world.publish("t", "a", "b")
    answers = [await one for one in popping]
    assert [bodies(answer) for answer in answers] == [[], [], ["a"]]
    assert await world.settle(Verb.ACK, "t", answers[2]) == ["acked"]
    assert await drained(world) == ["b"]


async def test_a_repeated_attempt_is_answered_the_same_after_its_channel_was_lost(world: World) -> None:
    await world.publish("t", "a", "b")
    first = await world.pop("t", count=2, attempt="once", invisibility=LEASE_SECONDS)
    await world.broker.lose(world.queue("t"))
    repeats = [asyncio.ensure_future(world.pop("t", count=2, attempt="once")) for _ in range(2)]
    for repeat in repeats:
        again = await patiently(world, repeat)
        assert (bodies(again), handles(again)) == (["a", "b"], handles(first))
    assert await world.settle(Verb.ACK, "t", first) == ["acked"] * 2
    assert await left(world) == 0


# ---------------------------------------------------------------- the engine is stopped


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("broker.consume", False),
        ("broker.consume", True),
        ("leases.claim", False),
        ("leases.load", True),
        ("leases.grant", False),
        ("leases.grant", True),
        ("channel.resize", False),
        ("channel.resize", True),
    ],
)
async def test_an_engine_stops_in_time_while_a_call_hangs_and_loses_nothing(
    folder: Path, call: str, after: bool
) -> None:
    clock = ManualClock()
    world = await start_world(folder / "data", clock=clock)
    await world.create("t")
    names = [f"m{number}" for number in range(8)]  # more than the first window, so that it is made wider
    await world.publish("t", *names)
    if call in ("leases.claim", "leases.load"):
        await overtake(world)
    gate = world.faults.stop(call, after=after)
    popping = asyncio.ensure_future(world.pop("t", count=16, wait=20, invisibility=LEASE_SECONDS))
    await patiently(world, asyncio.ensure_future(gate.reached()))
    async with asyncio.timeout(PATIENCE_SECONDS / 4):
        await stop_world(world)
    assert asyncio.all_tasks() <= {asyncio.current_task(), popping}, "nothing of the engine's goes on"
    gate.open()
    (outcome,) = await asyncio.gather(popping, return_exceptions=True)
    assert not world.failures
    async with open_world(folder / "data", clock=clock) as risen:
        got: list[str] = []
        if isinstance(outcome, list):
            got = bodies(outcome)
            assert await risen.settle(Verb.ACK, "t", outcome) == ["acked"] * len(outcome)
        else:
            assert isinstance(outcome, RetryLater)
        assert sorted(got + await drained(risen)) == names


async def test_parked_pops_are_answered_when_the_engine_stops_and_new_ones_are_refused(folder: Path) -> None:
    clock = ManualClock()
    world = await start_world(folder / "data", clock=clock)
    await world.create("t")
    popping = [await parked(world, attempt=attempt) for attempt in (None, None, "once")]
    async with asyncio.timeout(PATIENCE_SECONDS / 4):
        await world.engine.drain()
        assert [await one for one in popping] == [[], [], []]
    with pytest.raises(RetryLater):
        await world.pop("t")
    assert await world.publish("t", "a") == ["published"]
    await stop_world(world)
    await world.engine.stop()
    assert not world.failures
    async with open_world(folder / "data", clock=clock) as risen:
        assert await drained(risen) == ["a"]


async def test_a_channel_that_opens_when_the_engine_has_been_drained_is_closed_again(world: World) -> None:
    await world.publish("t", "a")
    gate = world.faults.stop("broker.consume", after=True)
    popping = asyncio.ensure_future(world.pop("t", wait=20))
    await gate.reached()
    await world.engine.drain()
    assert await popping == []
    gate.open()
    await world.settle_down()
    (depth,) = await world.broker.depth([world.queue("t")])
    assert (depth.ready, depth.consumers) == (1, 0)


async def test_a_dead_lettering_that_hangs_when_the_engine_stops_is_finished_after_the_restart(folder: Path) -> None:
    clock = ManualClock()
    world = await start_world(folder / "data", clock=clock)
    await world.create("t", policy=Policy(max_deliveries=1))
    await world.publish("t", "a")
    await patient_pop(world, invisibility=5)
    gate = world.faults.stop("broker.publish", after=True)
    await world.let_pass(5)
    await gate.reached()
    async with asyncio.timeout(PATIENCE_SECONDS / 4):
        await stop_world(world)
    assert not world.failures
    async with open_world(folder / "data", clock=clock) as risen:
        await dead_once(risen, "a")
        assert await left(risen) == 0


# ---------------------------------------------------------------- the claim is overtaken


async def test_an_engine_whose_claim_is_overtaken_amid_deliveries_loses_nothing(world: World) -> None:
    names = [f"m{number:02}" for number in range(30)]
    await world.publish("t", *names[:10])
    acked: list[str] = []
    for number in range(10, 30, 2):
        leased = await patient_pop(world, count=2, invisibility=LEASE_SECONDS)
        popping = [asyncio.ensure_future(world.pop("t", count=4, wait=2, invisibility=LEASE_SECONDS)) for _ in "12"]
        for _ in range(number // 2):
            await asyncio.sleep(0)
        await overtake(world)
        await world.publish("t", *names[number : number + 2])
        for one in popping:
            leased += await patiently(world, one)
        assert await world.settle(Verb.ACK, "t", leased) == ["acked"] * len(leased)
        acked += bodies(leased)
    acked += await drained(world)
    assert sorted(acked) == names, "each exactly once"
    assert host_of(world).epoch > 10


@pytest.mark.parametrize("after", [False, True])
async def test_a_grant_that_is_overtaken_half_way_takes_nothing_with_it(world: World, after: bool) -> None:
    await world.publish("t", "a", "b", "c")
    gate = world.faults.stop("leases.grant", after=after)
    first = asyncio.ensure_future(world.pop("t", wait=20, invisibility=LEASE_SECONDS))
    await gate.reached()
    await overtake(world)
    second = asyncio.ensure_future(world.pop("t", wait=20, invisibility=LEASE_SECONDS))
    leased = await patiently(world, second)  # it was fenced, and the queue is claimed and consumed again
    epoch = host_of(world).epoch
    gate.open()
    leased += await patiently(world, first)
    assert host_of(world).epoch == epoch, "an answer to the old claim does not end the new one"
    assert sorted(bodies(leased)) == ["a", "b"]
    assert bodies(await patient_pop(world, count=3, invisibility=1)) == ["c"]
    assert await world.settle(Verb.ACK, "t", leased) == ["acked"] * 2
    await world.let_pass(1)
    assert await drained(world) == ["c"]


@pytest.mark.parametrize("after", [False, True])
async def test_a_dead_lettering_that_is_overtaken_half_way_makes_one_dead_letter(world: World, after: bool) -> None:
    await world.publish("t", "a", "b", "c")
    (a,) = await patient_pop(world, invisibility=LEASE_SECONDS)
    (b,) = await patient_pop(world, invisibility=LEASE_SECONDS)
    assert await world.settle(Verb.RELEASE, "t", [b], seconds=60) == ["released"]
    gate = world.faults.stop("broker.publish", after=after)
    rejecting = asyncio.ensure_future(world.settle(Verb.REJECT, "t", [a]))
    await gate.reached()
    await overtake(world)
    assert bodies(await patient_pop(world, count=5, wait=10, invisibility=1)) == ["c"]
    gate.open()
    assert await rejecting == ["rejected"]
    await dead_once(world, "a")
    await world.let_pass(60)
    assert await drained(world) == ["b", "c"]
    dead = [one for one in world.broker.published if one.queue == world.served("t").layout.dead]
    assert len(dead) == 1, "RabbitMQ would keep both"


# ---------------------------------------------------------------- how


def away() -> BrokerUnavailable:
    return BrokerUnavailable("away, says the test", retry_after_seconds=0.001)


def host_of(world: World, topic: str = "t") -> QueueHost:
    return world.served(topic).hosts[0]


def handles(leased: Sequence[Leased]) -> list[str]:
    return [one.receipt_handle for one in leased]


async def patiently(world: World, work: asyncio.Task[T]) -> T:
    """Turn the clock until `work` is done."""
    for _ in range(ROUNDS_MAX):
        await world.settle_down()
        if work.done():
            break
        await world.let_pass(STEP_SECONDS)
    return await work


async def patient_pop(
    world: World, topic: str = "t", *, count: int = 1, wait: float = 2.0, invisibility: float | None = None
) -> list[Leased]:
    """Pop, turning the clock only while nothing comes."""
    popping = world.pop(topic, count=count, wait=wait, invisibility=invisibility)
    return await patiently(world, asyncio.ensure_future(popping))


async def parked(
    world: World, *, count: int = 1, wait: float = 20.0, attempt: str | None = None
) -> asyncio.Task[list[Leased]]:
    """A pop that waits for messages of an empty queue."""
    popping = asyncio.ensure_future(world.pop("t", count=count, wait=wait, attempt=attempt))
    await world.settle_down()
    assert host_of(world).channel is not None
    assert not popping.done()
    return popping


async def come_back(world: World) -> None:
    """Let the engine consume its queue again, and take what the broker still has."""
    await world.let_pass(OPEN_RETRY_SECONDS)
    await eventually(lambda: host_of(world).channel is not None)
    await world.settle_down()


async def left(world: World, topic: str = "t") -> int:
    """How many messages the broker keeps; those that are held here go back to it first."""
    await world.settle_down()
    queue = world.queue(topic)
    gate = world.faults.stop("broker.consume")
    if queue in world.broker.channels:
        await world.broker.lose(queue)
    (depth,) = await world.broker.wrapped.depth([queue])
    gate.open()
    assert depth.ready is not None
    return depth.ready


async def drained(world: World, topic: str = "t") -> list[str]:
    """Pop and ack all that comes, in its order; nothing is left then."""
    handed_out: list[str] = []
    while leased := await patient_pop(world, topic, count=16, invisibility=LEASE_SECONDS):
        assert await world.settle(Verb.ACK, topic, leased) == ["acked"] * len(leased)
        handed_out += bodies(leased)
    assert await left(world, topic) == 0
    assert host_of(world, topic).held_bytes == 0
    return handed_out


async def dead_once(world: World, body: str) -> list[Message]:
    """Wait until all dead-lettering is done; `body` stands there then, once."""
    for _ in range(ROUNDS_MAX):
        letters = await world.dead_letters("t")
        if letters and all(held.state is not HeldState.MOVING for held in host_of(world).held.values()):
            break
        await asyncio.sleep(moves.RETRY_SECONDS)
        await world.let_pass(STEP_SECONDS)
    letters = await world.dead_letters("t")
    assert [body_of(letter) for letter in letters] == [body]
    return letters


async def delete_queues(world: World) -> None:
    """What an administrator may do to the broker behind the engine's back."""
    await world.broker.wrapped.delete_group(world.served("t").layout)
    await world.settle_down()


async def delete_dead_letter_queue(world: World) -> None:
    await world.broker.wrapped.delete_group(replace(world.served("t").layout, queues=()))


async def overtake(world: World) -> None:
    """Claim the queue, as a second proxy would."""
    await world.leases.wrapped.claim(world.queue("t"))
