"""Messages without stable ids: their leases end with their channel, and nothing wrong is reported of them."""

import asyncio

import pytest

from engine.patience import (
    LEASE_SECONDS,
    away,
    come_back,
    drained,
    left,
    patient_pop,
    patiently,
)
from popgate.domain.errors import StateUnavailable
from popgate.domain.topics import Policy
from popgate.engine.lease import body_retrieval as retrieval
from popgate.engine.settle.orders import Verb
from support.engines import (
    World,
    bodies,
    body_of,
)

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


@pytest.mark.parametrize("beside_a_lease", [False, True])
async def test_a_return_of_unidentified_messages_that_no_client_has_seen_does_not_count_as_a_delivery(
    nameless: World, beside_a_lease: bool
) -> None:
    """The broker counts it. Without a lease, popgate closes the channel; beside a lease, it returns each message."""
    await nameless.engine.changes.put_group("t", "default", Policy(max_deliveries=2))
    await nameless.publish("t", "a", "b")
    leased = await patient_pop(nameless, invisibility=LEASE_SECONDS)
    if not beside_a_lease:
        assert await nameless.settle(Verb.ACK, "t", leased) == ["acked"]
    nameless.broker.says_returned = True
    await nameless.let_pass(nameless.context.options.idle_return_seconds)
    (depth,) = await nameless.broker.depth([nameless.queue("t")])
    assert (depth.ready, depth.consumers) == (1, int(beside_a_lease)), "b is back at the broker"
    first = await patient_pop(nameless, count=2)
    assert await nameless.settle(Verb.RELEASE, "t", first) == ["released"]
    second = await patient_pop(nameless, count=2)
    assert [(body_of(one.message), one.delivery_count) for one in [*first, *second]] == [("b", 1), ("b", 2)]
    assert await nameless.dead_letters("t") == []
