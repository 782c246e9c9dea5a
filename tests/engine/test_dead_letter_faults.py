"""The broker refuses dead letters, or withholds their bodies."""

import asyncio
from pathlib import Path

import pytest

from contract.recorder import message
from engine.patience import (
    LEASE_SECONDS,
    away,
    dead_once,
    delete_dead_letter_queue,
    drained,
    left,
    patient_pop,
)
from popgate.domain.errors import BrokerUnavailable, Conflict
from popgate.domain.letter_filter import LetterFilter
from popgate.domain.topics import Policy
from popgate.engine.dead_letters import dead_pages, dead_walk
from popgate.engine.dead_letters.dead_pages import PageRequest
from popgate.engine.dead_letters.dead_walk import DeadWalk, Letter
from popgate.engine.lease import body_retrieval as retrieval
from popgate.engine.settle.orders import SettleOrder, Verb
from popgate.ports.broker import Outgoing, PublishStatus
from popgate.ports.journal import EventKind
from popgate.runtime.clocks import ManualClock
from support.engines import (
    World,
    bodies,
    body_of,
    crash,
    eventually,
    open_world,
)

# ---------------------------------------------------------------- dead-lettering that the broker refuses

_FAULTS = ["unavailable", "half_done", "failed", "failed_but_stored", "refused", "unrouted", "queue_deleted"]


async def break_dead_letters(world: World, fault: str) -> None:
    """Make the next three publishes fail, or the next one find no queue."""
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


async def test_a_rejection_whose_queue_changes_hands_is_not_told_expired(world: World) -> None:
    """The move is recorded, and the queue's next owner finishes it."""
    await world.publish("t", "a")
    leased = await patient_pop(world)
    gate = world.faults.stop("leases.settle.move", after=True)
    rejecting = asyncio.create_task(world.settle(Verb.REJECT, "t", leased))
    await gate.reached()
    host = world.served("t").hosts[0]
    host.step_down(host.epoch)
    gate.open()
    assert await rejecting == ["unavailable"]
    await dead_once(world, "a")
    assert await world.settle(Verb.REJECT, "t", leased) == ["rejected"]


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_receipt_that_stands_twice_in_a_rejection_is_published_once(world: World, stopped: bool) -> None:
    """Even if the broker accepts it only later: only popgate can tell two copies of a dead letter apart."""
    await world.publish("t", "a", "b")
    a, b = await patient_pop(world, count=2)
    before = len(world.broker.published)
    if stopped:
        world.broker.refuse(PublishStatus.FAILED)
    assert await world.settle(Verb.REJECT, "t", [a, a, b, a]) == ["unavailable" if stopped else "rejected"] * 4
    if not stopped:
        assert [body_of(one.message) for one in world.broker.published[before:]] == ["a", "b"]
    await eventually(lambda: world.journal.count(EventKind.DEAD_LETTERED) == 2)
    assert world.journal.count(EventKind.REJECTED) == (0 if stopped else 2)
    assert sorted(map(body_of, await world.dead_letters("t"))) == ["a", "b"]


async def test_a_receipt_that_stands_twice_in_a_rejection_keeps_its_first_reason(world: World) -> None:
    await world.publish("t", "a")
    (leased,) = await patient_pop(world)
    orders = [SettleOrder(leased.receipt_handle, reason=reason) for reason in ("first", "second")]
    results = await world.engine.settle("t", "default", Verb.REJECT, orders)
    assert [result.status for result in results] == ["rejected"] * 2
    (letter,) = await dead_once(world, "a")
    assert letter.headers["x-popgate-dead-reason"] == "first"
    assert world.journal.details(EventKind.REJECTED) == ["first"]


async def test_a_message_that_is_moved_twice_at_once_is_published_once(world: World) -> None:
    await world.publish("t", "a")
    await patient_pop(world)
    served = world.served("t")
    (held,) = served.hosts[0].messages()
    before = len(world.broker.published)
    assert await served.mover.reject([held, held], ["once", "twice"]) == [True, True]
    assert len(world.broker.published) == before + 1
    await dead_once(world, "a")


@pytest.mark.parametrize("channel_lost", [False, True])
@pytest.mark.parametrize("fault", _FAULTS)
async def test_an_exhausted_message_that_the_broker_refuses_is_dead_lettered_later(
    world: World, fault: str, channel_lost: bool
) -> None:
    await world.engine.changes.put_group("t", "default", Policy(max_deliveries=1))
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


async def test_what_was_taken_along_with_an_exhausted_message_of_its_key_has_not_been_delivered(folder: Path) -> None:
    """It must wait until that one has gone, so its lease is taken back; only a client's lease would count."""
    clock = ManualClock()
    async with open_world(folder / "before", clock=clock) as world:
        await world.create("t", policy=Policy(max_deliveries=1))
        await world.publish("t", "a", "b", ordering_key="k")
        gate = world.faults.stop("leases.settle.exhaust")
        await world.settle(Verb.RELEASE, "t", await world.pop("t"))
        await gate.reached()
        await crash(world, folder / "before", folder / "after")
    async with open_world(folder / "after", clock=clock) as world:
        (b,) = await patient_pop(world, count=2, wait=10.0)
        assert (body_of(b.message), b.delivery_count) == ("b", 1)
        assert [body_of(one) for one in await world.dead_letters("t")] == ["a"]


async def test_a_dead_letter_queue_that_can_not_be_declared_again_stops_nothing(world: World) -> None:
    await world.engine.changes.put_group("t", "default", Policy(max_deliveries=1))
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


# ---------------------------------------------------------------- dead letters that several clients read


async def test_a_letter_is_found_while_a_list_that_has_passed_it_is_open(world: World) -> None:
    names = ["a", "b", "c"]
    await world.publish("t", *names)
    assert await world.settle(Verb.REJECT, "t", await patient_pop(world, count=3)) == ["rejected"] * 3
    desk = world.served("t").dead_letters
    page = await desk.page(PageRequest(max_messages=1))
    assert desk.held_count > 0, "the list is open, and goes on behind its page"
    (listed,) = page.letters
    assert body_of((await desk.find(listed.letter.copy_id)).message) == "a"
    page = await desk.page(PageRequest(max_messages=3, after=page.next))
    assert [body_of(shown.letter.message) for shown in page.letters] == ["b", "c"]


async def test_a_search_ends_a_page_in_time_and_goes_on_behind_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_pages, "READ_COUNT", 2)
    monkeypatch.setattr(dead_pages, "SEARCH_SECONDS", -1.0)
    layout = world.served("t").layout
    for body in (b"a", b"b", b"c", b"d", b"last"):
        await world.broker.publish([Outgoing(message=message(body), queue=layout.dead)])
    desk, wanted = world.served("t").dead_letters, LetterFilter(text="LAST")
    page = await desk.page(PageRequest(max_messages=9, filter=wanted))
    assert (page.letters, page.dead) == ([], 5)
    assert page.searched in (1, 2)
    await desk.page(PageRequest(max_messages=1))  # the search loses its place, and finds it again
    pages = [page]
    while pages[-1].next is not None:
        pages.append(await desk.page(PageRequest(max_messages=9, after=pages[-1].next, filter=wanted)))
    assert sum(one.searched for one in pages) == 5
    assert [body_of(shown.letter.message) for shown in pages[-1].letters] == ["last"]
    monkeypatch.setattr(dead_pages, "SEARCH_SECONDS", 60.0)
    counted = await desk.page(PageRequest(max_messages=0, filter=wanted))
    assert (counted.matching, counted.searched, counted.letters) == (1, 5, [])


async def test_a_list_that_stopped_at_small_letters_takes_few_of_the_large_ones_behind_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = 1024 * 1024
    monkeypatch.setattr(dead_walk, "SHARE_BYTES", 4 * mib)
    layout = world.served("t").layout
    sizes = [1] * 30 + [mib] * 60
    for size in sizes:
        await world.broker.publish([Outgoing(message=message(bytes(size)), queue=layout.dead)])
    walk = DeadWalk(world.context, layout, epoch=1)
    await walk.open()
    for _ in range(25):
        await walk.read(1)
    # Four grants of credit for 1, 4, 16 and 64 letters. Then the last one is taken back.
    await eventually(lambda: world.faults.calls.count("channel.resize") == 5)
    await world.settle_down(50)
    assert walk.held_count < 60
    assert [len(letter.message.body) for letter in await read_all(walk)] == sizes[25:]
    await walk.close()


async def test_a_letter_that_another_program_has_packed_is_not_unpacked(folder: Path) -> None:
    """To read megabytes of forged headers would hold up all clients."""
    async with open_world(folder / "data", clock=ManualClock(), anonymous=True) as world:
        await world.create("t")
        forged = message(b'{"a":1}body', headers={"x-popgate-dead-headers-bytes": 7})
        await world.broker.publish([Outgoing(message=forged, queue=world.served("t").layout.dead)])
        (shown,) = (await world.served("t").dead_letters.page(PageRequest(max_messages=1))).letters
        assert shown.letter.message.body == forged.body


async def test_a_list_takes_few_letters_ahead_of_its_reader(world: World) -> None:
    layout = world.served("t").layout
    await world.broker.publish([Outgoing(message=message(b"a"), queue=layout.dead) for _ in range(300)])
    walk = DeadWalk(world.context, layout, epoch=1)
    await walk.open()
    ahead: list[int] = []
    for number in range(1, 250):
        await walk.read(1)
        ahead.append(walk.held_count - number)
    assert max(ahead) == 64 - 1
    await walk.close()


async def read_all(walk: DeadWalk) -> list[Letter]:
    letters: list[Letter] = []
    while some := await walk.read(dead_walk.READ_COUNT):
        letters += some
    return letters
