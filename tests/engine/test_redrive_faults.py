"""Redrives and purges while broker, store and process fail: nothing is lost, and no message comes twice."""

import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.patience import away, delete_dead_letter_queue, delete_queues, drained, patient_pop
from popgate.domain.errors import BrokerUnavailable, Conflict, DeadLetterNotFound, PopgateError, StateUnavailable
from popgate.domain.names import CopyId, TopicName
from popgate.domain.topics import Policy
from popgate.engine.dead_letters import dead_letters
from popgate.engine.dead_letters.dead_pages import PageRequest
from popgate.engine.dead_letters.redriving import LetterChoice, Redrive, RedriveOrder, RedriveState
from popgate.engine.settle.orders import Verb
from popgate.ports.broker import Delivery, PublishStatus
from popgate.ports.journal import EventKind
from popgate.runtime.clocks import ManualClock
from support.engines import World, body_of, crash, eventually, open_world

pytestmark = pytest.mark.slow

ALL = RedriveOrder(choice=LetterChoice())
LEASE_SECONDS = 600.0


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "RETRY_SECONDS", 0.001)


async def bury(world: World, *bodies: str, topic: str = "t") -> None:
    """Create dead letters with these bodies, in this order."""
    for body in bodies:
        await world.publish(topic, body)
        leased = await patient_pop(world, topic)
        assert await world.settle(Verb.REJECT, topic, leased, reason="bad") == ["rejected"]


async def dead(world: World, topic: str = "t") -> list[str]:
    """Return the listed dead letters."""
    page = await world.served(topic).dead_letters.page(PageRequest(max_messages=256))
    return [body_of(shown.letter.message) for shown in page.letters]


async def ended(redrive: Redrive) -> Redrive:
    await eventually(redrive.ended.is_set)
    return redrive


def _away(call: str) -> PopgateError:
    if call.startswith("leases"):
        return StateUnavailable("away, says the test", retry_after_seconds=0.001)
    return away()


class _Nobody:
    """A consumer that keeps its messages."""

    def on_deliveries(self, deliveries: Sequence[Delivery]) -> None: ...

    def on_channel_lost(self, reason: str, *, queue_gone: bool) -> None: ...


_BODIES = [f"m{number}" for number in range(5)]
_FAULTS = [
    *("broker.publish", "broker.consume", "broker.depth", "channel.resize", "channel.backlog"),
    *("leases.claim", "leases.grant", "leases.peek", "leases.settle.move", "leases.settle.moved"),
]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", _FAULTS)
async def test_a_redrive_outlives_every_fault(world: World, call: str, after: bool) -> None:
    if call == "broker.consume" and after:
        pytest.skip("who is told that there is no channel has none")
    await bury(world, *_BODIES)
    world.faults.fail(call, _away(call), times=3, after=after)
    redrive = await ended(world.engine.redrive("t", "default", ALL))
    world.faults.heal()
    assert (redrive.state, redrive.failed) == (RedriveState.DONE, 0)
    assert await dead(world) == []
    assert sorted(await drained(world)) == _BODIES
    assert await world.dead_letters("t") == []


@pytest.mark.parametrize("stored", [False, True])
async def test_what_nobody_knows_of_is_published_again_as_the_same_copy(world: World, stored: bool) -> None:
    await bury(world, *_BODIES)
    before = len(world.broker.published)
    world.broker.refuse(PublishStatus.FAILED, times=2, stored=stored)
    redrive = await ended(world.engine.redrive("t", "default", ALL))
    assert (redrive.state, redrive.moved, redrive.failed) == (RedriveState.DONE, 5, 0)
    tried = world.broker.published[before:]
    assert len(tried) > len(_BODIES)
    assert len({outgoing.message.copy_id for outgoing in tried}) == len(_BODIES)
    assert sorted(await drained(world)) == _BODIES


@pytest.mark.parametrize("status", [PublishStatus.UNROUTED, PublishStatus.REFUSED])
async def test_what_the_target_does_not_take_is_a_dead_letter_as_before(world: World, status: PublishStatus) -> None:
    await bury(world, *_BODIES)
    world.broker.refuse(status)
    redrive = await ended(world.engine.redrive("t", "default", ALL))
    failed = redrive.failed
    assert failed > 0, "the first batch"
    assert (redrive.state, redrive.moved) == (RedriveState.DONE, 5 - failed)
    assert redrive.trouble == "says the test"
    assert await dead(world) == _BODIES[:failed]
    assert await drained(world) == _BODIES[failed:]
    redrive = await ended(world.engine.redrive("t", "default", ALL))
    assert (redrive.state, redrive.moved) == (RedriveState.DONE, failed)
    assert sorted(await drained(world)) == _BODIES[:failed]


async def test_a_refusal_after_a_doubtful_try_does_not_free_the_letter_for_another_copy(world: World) -> None:
    await bury(world, "a")
    before = len(world.broker.published)
    world.broker.refuse(PublishStatus.FAILED, stored=True)
    world.broker.refuse(PublishStatus.REFUSED)
    redrive = await ended(world.engine.redrive("t", "default", ALL))
    assert (redrive.moved, redrive.failed) == (0, 1)
    redrive = await ended(world.engine.redrive("t", "default", ALL))
    assert redrive.moved == 1
    assert len({outgoing.message.copy_id for outgoing in world.broker.published[before:]}) == 1
    assert await drained(world) == ["a"]


async def test_a_deleted_source_queue_keeps_the_letters_dead_until_it_is_there_again(world: World) -> None:
    await bury(world, *_BODIES)
    layout = world.served("t").layout
    await world.broker.wrapped.delete_group(replace(layout, queues=layout.queues[1:], dead=layout.queues[0]))
    redrive = await ended(world.engine.redrive("t", "default", ALL))
    assert (redrive.moved, redrive.failed) == (0, 5)
    assert layout.queues[0] in redrive.trouble
    await world.engine.changes.put_group("t", "default", None)
    assert (await ended(world.engine.redrive("t", "default", ALL))).moved == 5
    assert sorted(await drained(world)) == _BODIES


async def test_a_deleted_dead_letter_queue_is_said_to_be_gone(world: World) -> None:
    await bury(world, "a")
    await delete_dead_letter_queue(world)
    with pytest.raises(PopgateError, match="does not exist on the broker"):
        await dead(world)
    redrive = await ended(world.engine.redrive("t", "default", ALL))
    assert redrive.state is RedriveState.FAILED
    assert "does not exist on the broker" in redrive.trouble
    await world.engine.changes.put_group("t", "default", None)
    assert await dead(world) == []


async def test_a_dead_letter_queue_that_goes_while_it_is_read_ends_the_redrive(world: World) -> None:
    await bury(world, *_BODIES)
    gate = world.faults.stop("leases.peek")
    redrive = world.engine.redrive("t", "default", ALL)
    await gate.reached()
    await delete_queues(world)
    gate.open()
    assert (await ended(redrive)).ended_at is not None
    assert world.failures == []


async def test_somebody_elses_consumer_is_a_conflict_and_loses_nothing(world: World) -> None:
    await bury(world, "a")
    layout = world.served("t").layout
    reader = _Nobody()
    other = await world.broker.wrapped.consume(layout.dead, layout, 1, reader)
    with pytest.raises(Conflict, match="other consumers"):
        await dead(world)
    redrive = await ended(world.engine.redrive("t", "default", ALL))
    assert (redrive.state, redrive.moved) == (RedriveState.FAILED, 0)
    await other.close()
    assert await dead(world) == ["a"]


async def test_another_proxys_claim_is_taken_back_and_nothing_is_doubled(world: World) -> None:
    await bury(world, *_BODIES)
    assert await dead(world) == _BODIES
    await world.leases.wrapped.claim(world.served("t").layout.dead)
    redrive = await ended(world.engine.redrive("t", "default", ALL))
    assert (redrive.state, redrive.moved) == (RedriveState.DONE, 5)
    assert sorted(await drained(world)) == _BODIES


async def test_nothing_is_redriven_to_a_topic_of_which_a_group_has_lost_its_queue(world: World) -> None:
    """The broker confirms the copy because the other group's queue takes it."""
    await world.create("u")
    await world.engine.changes.put_group("u", "other", None)
    await world.publish("u", "before")
    await patient_pop(world, "u")
    await world.broker.wrapped.delete_group(world.served("u").layout)
    await world.settle_down()
    await bury(world, "a")
    redrive = await ended(world.engine.redrive("t", "default", replace(ALL, target_topic=TopicName("u"))))
    assert (redrive.moved, redrive.failed) == (0, 1)
    assert "does not exist on the broker" in (redrive.trouble or "")
    assert await dead(world) == ["a"]
    assert (await world.engine.status("u", "other")).ready == 1


@pytest.mark.parametrize("to_topic", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", ["leases.settle.move", "broker.publish", "leases.settle.moved"])
async def test_a_crash_in_the_middle_is_finished_at_the_next_start(
    folder: Path, call: str, after: bool, to_topic: bool
) -> None:
    order = RedriveOrder(choice=LetterChoice(), target_topic=TopicName("u")) if to_topic else ALL
    async with open_world(folder / "before", clock=ManualClock()) as world:
        await world.create("t")
        await world.create("u")
        await bury(world, *_BODIES)
        gate = world.faults.stop(call, after=after)
        world.engine.redrive("t", "default", order)
        await gate.reached()
        await world.settle_down()
        await crash(world, folder / "before", folder / "after")
    async with open_world(folder / "after", clock=ManualClock()) as world:
        await eventually(lambda: not world.served("t").dead_letters.is_sweeping)
        left = await dead(world)
        came = sorted(await drained(world, "u" if to_topic else "t"))
        begun = call != "leases.settle.move" or after
        assert came + left == _BODIES
        assert bool(came) == begun
        assert (await ended(world.engine.redrive("t", "default", ALL))).moved == len(left)


async def test_a_start_without_unfinished_redrives_leaves_the_dead_letters_alone(folder: Path) -> None:
    async with open_world(folder / "data", clock=ManualClock()) as world:
        await world.create("t")
        await bury(world, "a", "b")
        assert (await ended(world.engine.redrive("t", "default", replace(ALL, max_messages=1)))).moved == 1
    async with open_world(folder / "data", clock=ManualClock()) as world:
        await world.settle_down()
        assert world.served("t").layout.dead not in world.broker.channels
        assert await dead(world) == ["b"]


async def test_a_stop_ends_a_redrive_between_two_batches(folder: Path) -> None:
    order = replace(ALL, rate_per_second=1.0)
    async with open_world(folder / "data", clock=ManualClock()) as world:
        await world.create("t")
        await bury(world, *_BODIES)
        redrive = world.engine.redrive("t", "default", order)
        await eventually(lambda: redrive.moved == 1)
        await world.engine.drain()
        assert redrive.state is RedriveState.CANCELLED
        with pytest.raises(PopgateError, match="shutting down"):
            await dead(world)
    async with open_world(folder / "data", clock=ManualClock()) as world:
        assert sorted([*await dead(world), *await drained(world)]) == _BODIES


async def test_a_stop_ends_a_redrive_whose_channel_closes_slowly_and_another_one_can_begin(world: World) -> None:
    await bury(world, *_BODIES)
    letters = world.served("t").dead_letters
    redrive = world.engine.redrive("t", "default", replace(ALL, rate_per_second=1.0))
    await eventually(lambda: redrive.moved == 1)
    closing = world.faults.stop("channel.close", after=True)
    await letters.stop()
    await closing.reached()
    assert not redrive.is_running
    await letters.start()
    await eventually(lambda: not letters.is_sweeping)
    assert (await ended(world.engine.redrive("t", "default", ALL))).state is RedriveState.DONE
    assert sorted(await drained(world)) == _BODIES
    assert world.failures == []


async def test_a_stop_while_letters_return_in_order_leaves_no_consumer_behind(world: World) -> None:
    await bury(world, *_BODIES)
    world.broker.says_returned = True
    letters = world.served("t").dead_letters
    redrive = world.engine.redrive("t", "default", replace(ALL, rate_per_second=1.0))
    await eventually(lambda: redrive.moved == 1)
    counting = world.faults.stop("channel.backlog")
    await letters.stop()
    await counting.reached()
    await letters.start()
    await eventually(lambda: not letters.is_sweeping)
    assert sorted([*await dead(world), *await drained(world)]) == _BODIES
    assert world.failures == []


async def test_a_group_can_be_deleted_under_its_redrive(world: World) -> None:
    await bury(world, *_BODIES)
    redrive = world.engine.redrive("t", "default", replace(ALL, rate_per_second=1.0))
    await eventually(lambda: redrive.moved == 1)
    await world.engine.deletions.delete_group("t", "default")
    assert not redrive.is_running
    await world.engine.changes.put_group("t", "default", None)
    assert await dead(world) == []
    await bury(world, "new")
    assert await dead(world) == ["new"]
    assert world.failures == []


async def test_an_idle_list_gives_the_queue_back(world: World) -> None:
    await bury(world, *_BODIES)
    desk = world.served("t").dead_letters
    page = await desk.page(PageRequest(max_messages=2))
    assert page.next is not None
    assert desk.held_count > 0
    assert (await world.engine.status("t", "default")).dead == 5
    await world.let_pass(dead_letters.KEPT_SECONDS)
    await eventually(lambda: desk.held_count == 0)
    assert [body_of(letter) for letter in await world.dead_letters("t")] == _BODIES
    page = await desk.page(PageRequest(max_messages=2, after=page.next))
    assert [body_of(shown.letter.message) for shown in page.letters] == _BODIES[2:4]


async def test_what_somebody_else_put_into_the_queue_is_listed_and_redriven(nameless: World) -> None:
    """Unidentified letters, without a note."""
    await nameless.publish("t", "a")
    leased = await patient_pop(nameless)
    assert await nameless.settle(Verb.REJECT, "t", leased) == ["rejected"]
    assert await dead(nameless) == ["a"]
    redrive = await ended(nameless.engine.redrive("t", "default", ALL))
    assert (redrive.state, redrive.moved) == (RedriveState.DONE, 1)
    assert await dead(nameless) == []
    assert await drained(nameless) == ["a"]


# ---------------------------------------------------------------- purge


@pytest.mark.parametrize("call", ["leases.grant", "leases.settle.ack", "leases.peek", "broker.consume"])
async def test_a_purge_that_fails_half_way_can_be_repeated(world: World, call: str) -> None:
    await bury(world, *_BODIES)
    desk = world.served("t").dead_letters
    for after in (False, True):
        world.faults.fail(call, _away(call), after=after and call != "broker.consume")
        with pytest.raises(PopgateError):
            await desk.purge(LetterChoice())
    left = await dead(world)
    assert left == _BODIES[len(_BODIES) - len(left) :]
    assert (left == _BODIES) == (call != "leases.settle.ack"), "it was written, and the answer lost"
    assert (await desk.purge(LetterChoice())).purged == len(left)
    assert await dead(world) == []
    assert await world.dead_letters("t") == []


async def test_nothing_purged_comes_back_after_a_crash(folder: Path) -> None:
    async with open_world(folder / "before", clock=ManualClock()) as world:
        await world.create("t")
        await bury(world, "x", "y")
        await world.publish("t", "a", "b")
        leased = await patient_pop(world, invisibility=LEASE_SECONDS)
        assert (await world.served("t").dead_letters.purge(LetterChoice())).purged == 2
        assert (await world.engine.purge("t", "default")).purged == 1
        await crash(world, folder / "before", folder / "after")
    async with open_world(folder / "after", clock=ManualClock()) as world:
        assert await dead(world) == []
        assert await patient_pop(world) == []
        assert await world.settle(Verb.ACK, "t", leased) == ["acked"]
        assert world.journal.count(EventKind.PURGED) == 0


async def test_a_purge_of_a_group_leaves_what_came_later_and_what_waits(world: World) -> None:
    await world.engine.changes.put_group("t", "default", Policy())
    await world.publish("t", "a", "b", "c")
    (leased,) = await patient_pop(world, invisibility=LEASE_SECONDS)
    (delayed,) = await patient_pop(world, invisibility=LEASE_SECONDS)
    await world.settle(Verb.RELEASE, "t", [delayed], seconds=30.0)
    assert await world.engine.purge("t", "default") == (1, True)
    await world.publish("t", "later")
    await world.let_pass(30.0)
    rest = await patient_pop(world, count=2)
    assert sorted(body_of(one.message) for one in rest) == ["b", "later"]
    assert await world.settle(Verb.ACK, "t", [leased, *rest]) == ["acked"] * 3
    assert await drained(world) == []
    assert world.journal.count(EventKind.PURGED) == 1


# ---------------------------------------------------------------- everything at once


async def test_lists_redrives_and_purges_with_faults_at_random_lose_and_double_nothing(world: World, seed: int) -> None:
    """Every body is in exactly one place in the end: purged, delivered again, or a dead letter."""
    chance = random.Random(seed)
    bodies = [f"m{number:03}" for number in range(60)]
    await bury(world, *bodies)
    desk = world.served("t").dead_letters
    purged: set[str] = set()
    for _ in range(30):
        if chance.random() < 0.5:
            call = chance.choice(_FAULTS)
            world.faults.fail(call, _away(call), after=chance.random() < 0.5 and call != "broker.consume")
        if chance.random() < 0.2:
            world.broker.refuse(chance.choice([PublishStatus.REFUSED, PublishStatus.FAILED]))
        with contextlib.suppress(BrokerUnavailable, StateUnavailable, Conflict, DeadLetterNotFound):
            purged |= await _one_thing(world, chance)
    world.faults.heal()
    if desk.redrive_now is not None and desk.redrive_now.is_running:
        await ended(desk.redrive_now)
    for _ in range(3):  # moves that a list sees half done are finished; the last refusals are used up
        await dead(world)
        await eventually(lambda: not desk.is_sweeping)
    left = await dead(world)
    assert left == sorted(left), "their order is kept"
    came = await drained(world)
    assert sorted([*left, *came, *purged]) == bodies, f"seed {seed}"
    assert world.failures == []


async def _one_thing(world: World, chance: random.Random) -> set[str]:
    """List, redrive some, or purge one; return the purged bodies."""
    desk = world.served("t").dead_letters
    page = await desk.page(PageRequest(max_messages=chance.randint(1, 40)))
    letters = [shown.letter for shown in page.letters]
    some = chance.sample(letters, min(len(letters), chance.randint(1, 4)))
    ids = frozenset(letter.copy_id for letter in some)
    match chance.randrange(4):
        case 0:
            await ended(world.engine.redrive("t", "default", RedriveOrder(choice=LetterChoice(ids=ids))))
        case 1:
            world.engine.redrive("t", "default", RedriveOrder(choice=LetterChoice(), max_messages=chance.randint(1, 5)))
        case 2 if some:
            before = world.journal.count(EventKind.PURGED)
            try:
                await desk.purge(LetterChoice(ids=frozenset({some[0].copy_id})))
            finally:
                gone = await _is_purged(world, some[0].copy_id)
            if gone or world.journal.count(EventKind.PURGED) > before:
                return {body_of(some[0].message)}
        case _:
            if letters:
                await desk.find(chance.choice(letters).copy_id)
    return set()


async def _is_purged(world: World, copy_id: CopyId) -> bool:
    records = await world.leases.wrapped.peek(world.served("t").layout.dead, [copy_id])
    return copy_id in records and records[copy_id].state == "acked"
