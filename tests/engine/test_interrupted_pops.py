"""Pops are cancelled at any await, and repeated by their attempts."""

import asyncio
from itertools import count

import pytest

from engine.patience import (
    LEASE_SECONDS,
    drained,
    handles,
    left,
    parked,
    patient_pop,
    patiently,
)
from popgate.engine.lease.pop_request import Leased
from popgate.engine.settle.orders import Verb
from popgate.ports.journal import EventKind
from support.engines import (
    World,
    bodies,
)
from support.faulty import Interrupted

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
        if kind == "repeat":  # from an answered pop; the bodies return with the next channel
            await world.pop(topic, count=2, attempt=attempt, invisibility=5)
            await world.broker.lose(world.queue(topic))
        work = Interrupted(world.pop(topic, count=2, wait=wait, attempt=attempt, invisibility=5), at, answered=answered)
        popping = asyncio.ensure_future(work.run())
        await world.settle_down()
        if kind in ("creating", "parked"):
            await world.publish(topic, *names)
        await patiently(world, asyncio.ensure_future(asyncio.wait([popping])))
        assert work.happened is popping.cancelled()
        await world.settle_down()  # its submitted write happens even so
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
        leased = await second  # the clock does not advance
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


async def test_a_repeated_attempt_gets_its_lease_that_was_extended_long_after_it_ran_out(world: World) -> None:
    await world.publish("t", "a", "b")
    first = await world.pop("t", attempt="once")
    await world.let_pass(61)  # record keeping has run
    assert await world.settle(Verb.EXTEND, "t", first, seconds=20) == ["extended"]
    again = await world.pop("t", attempt="once")
    assert (bodies(again), handles(again)) == (["a"], handles(first))
    assert bodies(await world.pop("t", count=2)) == ["b"]
