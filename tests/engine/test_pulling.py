"""Pull clients: one a queue, in order, until they are silent for too long; time passes only on command."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from engine.pull_clients import (
    QUEUES,
    SESSION_SECONDS,
    Client,
    into_pull_mode,
    meanwhile,
    passes,
    registered,
)
from popgate.domain.errors import Fenced, InvalidRequest, PopgateError, StateUnavailable, TooManyInFlight, WrongMode
from popgate.domain.topics import ConsumeMode, Policy
from popgate.engine.pull import pulling
from popgate.engine.settle.orders import Verb
from popgate.ports.journal import EventKind
from popgate.runtime.clocks import ManualClock
from support.engines import World, bodies, crash, open_world, start_world

pytestmark = pytest.mark.usefixtures("no_company")


@pytest.fixture
async def pulled(world: World) -> World:
    """A world with a topic `p` in pull mode, of one queue."""
    await into_pull_mode(world)
    return world


# ---------------------------------------------------------------- assignments


async def test_queues_are_spread_evenly_and_what_need_not_move_stays(world: World) -> None:
    await into_pull_mode(world, queues=QUEUES)
    a, b = await registered(world, "a", "b")
    assert (a.queues, b.queues) == ([2, 3], [0, 1])
    generation = b.generation
    c = Client(world, "c")
    for _ in range(3):
        for client in (c, a, b):
            await client.asks()
    assert Counter(map(len, (a.queues, b.queues, c.queues))) == {1: 2, 2: 1}
    assert sorted([*a.queues, *b.queues, *c.queues]) == [0, 1, 2, 3]
    assert set(a.queues) <= {2, 3}
    assert set(b.queues) <= {0, 1}
    assert b.queues == [0, 1] or b.generation > generation


async def test_more_clients_than_queues_leave_some_with_none_which_are_told_when_to_ask(pulled: World) -> None:
    a, b, c = await registered(pulled, "a", "b", "c")
    assert (a.queues, b.queues, c.queues) == ([0], [], [])
    assert c.told is not None
    assert c.told.heartbeat_seconds == pytest.approx(SESSION_SECONDS / 3)
    await a.leaves()
    await b.asks()
    assert b.queues == [0]


async def test_in_pop_mode_the_mode_is_told_and_no_queues_and_who_can_only_pull_is_refused(world: World) -> None:
    client = Client(world, topic="t")
    told = await client.asks()
    assert (told.mode, told.queues) == (ConsumeMode.POP, [])
    with pytest.raises(WrongMode) as refused:
        await Client(world, "old", topic="t").asks([ConsumeMode.PULL])
    assert refused.value.mode == "pop"
    with pytest.raises(WrongMode):
        await client.pull()


async def test_a_client_that_cannot_pull_gets_no_queue(pulled: World) -> None:
    client = Client(pulled)
    told = await client.asks([ConsumeMode.POP])
    assert (told.mode, told.queues) == (ConsumeMode.PULL, [])


async def test_a_queue_that_moves_is_let_go_of_first_and_nothing_is_done_twice(world: World) -> None:
    await into_pull_mode(world, queues=2)
    (a,) = await registered(world, "a")
    await world.publish("p", *"abcd")  # one after the other to the two queues
    had = {queue: await a.pull(queue=queue) for queue in (0, 1)}
    b = Client(world, "b")
    await b.asks()
    assert b.queues == []
    assert b.told is not None
    assert b.told.heartbeat_seconds == 1.0, "it will not be long"
    await a.asks()
    (gone,) = {0, 1} - {*a.queues}
    with pytest.raises(Fenced, match="let go"):
        await a.pull(queue=gone)
    assert await a.commit(had[gone][-1]) == 2
    await b.asks()
    assert b.queues == []
    await a.asks()
    await b.asks()
    assert b.queues == [gone]
    assert await b.pull(queue=gone) == []
    assert await a.commit(had[1 - gone][-1]) == 2


async def test_a_client_that_does_not_let_go_loses_the_queue_with_what_it_had(world: World) -> None:
    await into_pull_mode(world, queues=2)
    (a,) = await registered(world, "a")
    await world.publish("p", *"abcd")
    had = {queue: await a.pull(queue=queue) for queue in (0, 1)}
    b = Client(world, "b")
    await b.asks()
    stale = a.told
    for _ in range(12):
        await passes(world, 1.0)
        await b.asks()
        a.told = stale
        await a.asks()  # it shows an old generation all the time
    (gone,) = b.queues
    assert bodies(await b.pull(queue=gone)) == bodies(had[gone])
    with pytest.raises(Fenced):
        await a.commit(had[gone][-1])


# ---------------------------------------------------------------- order, repeats, commits


async def test_messages_of_a_queue_come_in_order_whatever_their_keys_and_a_commit_settles_all_before_it(
    pulled: World,
) -> None:
    (client,) = await registered(pulled, "a")
    for place, body in enumerate("abcdefgh"):
        await pulled.publish("p", body, ordering_key=None if place % 3 else f"key-{place % 2}")
    first = await client.pull(3)
    assert bodies(first) == ["a", "b", "c"]
    more = await client.pull_all(3, after=first[-1])
    assert bodies(more) == ["d", "e", "f"]
    assert await client.commit(more[1]) == 5
    assert await client.commit(more[1]) == 0, "a repeat says the same"
    assert await client.commit(first[0]) == 0, "it was settled with those behind it"
    assert bodies(await client.pull()) == ["f"]
    assert bodies(await client.pull(after=more[2])) == ["g", "h"]
    assert pulled.journal.count(EventKind.ACKED) == 5


async def test_a_pull_that_is_repeated_is_answered_the_same_and_counts_as_one_delivery(pulled: World) -> None:
    (client,) = await registered(pulled, "a")
    await pulled.publish("p", *"abc")
    first = await client.pull(2)
    again = await client.pull(2)
    assert [one.receipt_handle for one in again] == [one.receipt_handle for one in first]
    assert {one.delivery_count for one in again} == {1}
    assert bodies(await client.pull()) == ["a", "b"], "what was not seen, not committed comes first"
    assert bodies(await client.pull(after=again[-1])) == ["c"]


async def test_a_pull_waits_for_a_message(pulled: World) -> None:
    (client,) = await registered(pulled, "a")
    waiting = asyncio.create_task(client.asks_for(wait=30))
    await passes(pulled, 3.0)
    assert not waiting.done()
    await pulled.publish("p", "late")
    await pulled.settle_down()
    assert bodies(await waiting) == ["late"]
    waiting = asyncio.create_task(client.asks_for(wait=2, after=None))
    assert bodies(await waiting) == ["late"], "what it has comes at once"


async def test_a_pull_that_waits_in_vain_ends_empty(pulled: World) -> None:
    (client,) = await registered(pulled, "a")
    waiting = asyncio.create_task(client.asks_for(wait=3))
    await passes(pulled, 2.5)
    assert not waiting.done()
    await passes(pulled, 1.5)
    assert await waiting == []


async def test_a_later_pull_ends_the_one_before_it(pulled: World) -> None:
    (client,) = await registered(pulled, "a")
    earlier = asyncio.create_task(client.asks_for(wait=30))
    await pulled.settle_down()
    later = asyncio.create_task(client.asks_for(wait=30))
    await pulled.settle_down()
    assert await earlier == []
    await pulled.publish("p", "a")
    await pulled.settle_down()
    assert bodies(await later) == ["a"]


async def test_who_has_too_much_that_is_not_committed_is_told_to_commit(
    pulled: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "UNCOMMITTED_MAX", 3)
    (client,) = await registered(pulled, "a")
    await pulled.publish("p", *"abcdef")
    first = await client.pull(2)
    second = await client.pull(2, after=first[-1])
    assert bodies(second) == ["c"]
    with pytest.raises(TooManyInFlight, match="commit"):
        await client.pull(2, after=second[-1])
    await client.commit(first[-1])
    assert bodies(await client.pull_all(2, after=second[-1])) == ["d", "e"]


async def test_max_in_flight_counts_what_is_pulled(world: World) -> None:
    await into_pull_mode(world, policy=Policy(max_in_flight=2))
    (client,) = await registered(world, "a")
    await world.publish("p", *"abcd")
    first = await client.pull()
    assert bodies(first) == ["a", "b"]
    with pytest.raises(TooManyInFlight):
        await client.pull(after=first[-1])
    await client.commit(first[0])
    assert bodies(await client.pull(after=first[-1])) == ["c"]


async def test_a_paused_group_gives_nothing_and_takes_commits(pulled: World) -> None:
    (client,) = await registered(pulled, "a")
    await pulled.publish("p", *"abc")
    first = await client.pull(2)
    await pulled.engine.changes.pause_group("p", "default", paused=True)
    assert await client.pull(after=first[-1]) == []
    assert await client.commit(first[-1]) == 2
    await pulled.engine.changes.pause_group("p", "default", paused=False)
    assert bodies(await client.pull(wait=3)) == ["c"]


async def test_a_message_that_expires_is_passed_over(pulled: World) -> None:
    (client,) = await registered(pulled, "a")
    await pulled.publish("p", "short", ttl=1.0)
    await pulled.publish("p", "long")
    await passes(pulled, 2.0)
    await client.asks()
    assert bodies(await client.pull(wait=1)) == ["long"]


# ---------------------------------------------------------------- sessions and fences


async def test_what_a_silent_client_did_not_commit_returns_in_order_to_the_next(pulled: World) -> None:
    a, b = await registered(pulled, "a", "b")
    await pulled.publish("p", *"abcdef")
    had = await a.pull_all(4)
    await a.commit(had[0])
    for _ in range(12):
        await passes(pulled, 1.0)
        await b.asks()
    assert b.queues == [0]
    again = await b.pull_all(5)
    assert bodies(again) == ["b", "c", "d", "e", "f"]
    assert [one.delivery_count for one in again] == [2, 2, 2, 1, 1]
    with pytest.raises(Fenced):
        await a.commit(had[-1])
    with pytest.raises(Fenced):
        await a.pull()


async def test_a_client_that_asks_in_time_keeps_its_queue_for_good(pulled: World) -> None:
    a, b = await registered(pulled, "a", "b")
    generation = a.generation
    await pulled.publish("p", *"ab")
    had = await a.pull()
    for _ in range(20):
        await passes(pulled, SESSION_SECONDS / 3)
        await a.asks()
        await b.asks()
    assert (a.queues, a.generation) == ([0], generation)
    assert await a.commit(had[-1]) == 2


async def test_a_silent_client_with_nobody_to_follow_leaves_its_messages_ready(pulled: World) -> None:
    (a,) = await registered(pulled, "a")
    await pulled.publish("p", *"abc")
    await a.pull()
    assert (await pulled.engine.status("p", "default")).in_flight == 3
    await passes(pulled, SESSION_SECONDS + 2)
    await pulled.settle_down()
    status = await pulled.engine.status("p", "default")
    assert (status.in_flight, status.ready) == (0, 3)
    await a.asks()
    assert a.queues == [0]
    assert bodies(await a.pull()) == ["a", "b", "c"]


async def test_a_client_that_leaves_gives_back_at_once(pulled: World) -> None:
    a, b = await registered(pulled, "a", "b")
    await pulled.publish("p", *"abc")
    await a.pull(2)
    await a.leaves()
    await a.leaves()
    await b.asks()
    assert bodies(await b.pull()) == ["a", "b", "c"]


async def test_a_client_that_begins_anew_fences_its_earlier_self_and_gets_all_again(pulled: World) -> None:
    (before,) = await registered(pulled, "a")
    await pulled.publish("p", *"abc")
    had = await before.pull(2)
    after = Client(pulled, "a")
    await after.asks()
    again = await after.pull()
    assert bodies(again) == ["a", "b", "c"]
    assert [one.delivery_count for one in again] == [2, 2, 1]
    with pytest.raises(Fenced):
        await before.commit(had[-1])
    assert await after.commit(again[-1]) == 3


async def test_a_receipt_of_an_earlier_session_commits_nothing_in_a_new_one(pulled: World) -> None:
    (before,) = await registered(pulled, "a")
    await pulled.publish("p", *"abc")
    had = await before.pull(2)
    after = Client(pulled, "a")
    await after.asks()
    again = await after.pull()
    with pytest.raises(Fenced):
        await after.commit(had[-1])
    assert await after.commit(again[-1]) == 3, "nothing was settled before"


async def test_a_parked_pull_ends_when_its_client_begins_anew(pulled: World) -> None:
    (before,) = await registered(pulled, "a")
    waiting = asyncio.create_task(before.asks_for(wait=30))
    await pulled.settle_down()
    after = Client(pulled, "a")
    await after.asks()
    await passes(pulled, 1.5)
    with pytest.raises(Fenced):
        await waiting


async def test_a_proxy_that_slept_takes_nobody_for_dead(pulled: World) -> None:
    a, b = await registered(pulled, "a", "b")
    await pulled.publish("p", "a")
    (had,) = await a.pull()
    await pulled.let_pass(60.0)
    await a.asks()
    await b.asks()
    assert (a.queues, b.queues) == ([0], [])
    assert await a.commit(had) == 1


async def test_while_the_store_is_away_no_session_ends(pulled: World) -> None:
    a, b = await registered(pulled, "a", "b")
    await pulled.publish("p", "a")
    (had,) = await a.pull()
    for call in ("assignments.write", "leases.settle.ack"):
        pulled.faults.fail(call, StateUnavailable("gone"), times=1_000)
    for _ in range(15):
        await passes(pulled, 1.0)
        await b.asks()
    with pytest.raises(StateUnavailable):
        await a.commit(had)
    assert b.queues == []
    pulled.faults.heal()
    assert await a.commit(had) == 1


async def test_a_message_that_is_handed_out_too_often_goes_to_the_dead_letters(world: World) -> None:
    await into_pull_mode(world, policy=Policy(max_deliveries=2))
    await world.publish("p", *"ab")
    for _ in range(2):
        client = Client(world, "a")
        await client.asks()
        assert bodies(await client.pull(1)) == ["a"]
        assert bodies(await client.pull(1)) == ["a"], "a repeat is no hand-out"
    client = Client(world, "a")
    await client.asks()
    assert bodies(await client.pull(wait=1)) == ["b"]
    await world.settle_down()
    assert [message.message_id for message in await world.dead_letters("p")] == ["a"]


# ---------------------------------------------------------------- other verbs


async def test_a_pulled_message_can_be_rejected_and_not_be_acked_extended_or_released(pulled: World) -> None:
    (client,) = await registered(pulled, "a")
    await pulled.publish("p", *"abcd")
    had = await client.pull(3)
    for verb, seconds in ((Verb.ACK, None), (Verb.EXTEND, 5.0), (Verb.RELEASE, 0.0)):
        assert await pulled.settle(verb, "p", had[:1], seconds=seconds) == ["invalid"]
    assert await pulled.settle(Verb.REJECT, "p", had[1:2]) == ["rejected"]
    assert bodies(await client.pull()) == ["a", "c"]
    with pytest.raises(InvalidRequest, match="rejected"):
        await client.commit(had[1])
    assert await client.commit(had[2]) == 2
    assert bodies(await client.pull()) == ["d"]
    assert [message.message_id for message in await pulled.dead_letters("p")] == ["b"]


async def test_a_receipt_handle_of_another_queue_is_refused_by_name(world: World) -> None:
    await into_pull_mode(world, queues=2)
    (client,) = await registered(world, "a")
    await world.publish("p", *"ab")
    (one,) = await client.pull(queue=1)
    for bad in ("nonsense", one.receipt_handle):
        with pytest.raises(InvalidRequest) as refused:
            await world.engine.pulls.commit("p", "default", 0, client.name, client.generation, bad)
        assert refused.value.field == "receipt_handle"
    with pytest.raises(InvalidRequest, match="less than 2"):
        await client.pull(queue=2)


async def test_purging_drops_what_nobody_has_pulled_nor_anything_before_it(pulled: World) -> None:
    (client,) = await registered(pulled, "a")
    await pulled.publish("p", *"abcd")
    for _ in range(4):
        await pulled.settle_down()
    assert await meanwhile(pulled, pulled.engine.purge("p", "default")) == (4, True)
    assert await client.pull() == []
    await pulled.publish("p", *"efg")
    had = await client.pull_all(1)
    assert await meanwhile(pulled, pulled.engine.purge("p", "default")) == (0, True)
    assert bodies(await client.pull_all(2, after=had[0])) == ["f", "g"]
    status = await pulled.engine.status("p", "default")
    assert (status.in_flight, status.blocked) == (3, 0)


# ---------------------------------------------------------------- the mode


async def test_pops_are_refused_in_pull_mode_and_pulls_in_pop_mode_and_nothing_is_lost_between(pulled: World) -> None:
    (client,) = await registered(pulled, "a")
    await pulled.publish("p", *"abcd")
    with pytest.raises(WrongMode):
        await pulled.pop("p")
    had = await client.pull(3)
    assert await client.commit(had[0]) == 1
    await pulled.engine.changes.switch("p", "default", ConsumeMode.POP, None)
    with pytest.raises(WrongMode):
        await client.pull()
    with pytest.raises(WrongMode):
        await client.commit(had[-1])
    told = await client.asks()
    assert (told.mode, told.queues) == (ConsumeMode.POP, [])
    assert bodies(await pulled.pop("p", count=10)) == ["b", "c", "d"]


async def test_a_pull_that_waits_ends_when_the_mode_changes(pulled: World) -> None:
    (client,) = await registered(pulled, "a")
    waiting = asyncio.create_task(client.asks_for(wait=30))
    await pulled.settle_down()
    await pulled.engine.changes.switch("p", "default", ConsumeMode.POP, None)
    with pytest.raises(WrongMode):
        await waiting


async def test_while_pulls_drain_commits_go_on(pulled: World) -> None:
    (client,) = await registered(pulled, "a")
    await pulled.publish("p", *"abc")
    had = await client.pull(2)
    await pulled.engine.changes.switch("p", "default", ConsumeMode.POP, 60.0)
    told = await client.asks()
    assert (told.mode, told.queues) == (ConsumeMode.DRAINING, [])
    with pytest.raises(WrongMode) as refused:
        await client.pull()
    assert refused.value.mode == "draining"
    assert await client.commit(had[-1]) == 2
    await pulled.engine.changes.switch("p", "default", ConsumeMode.PULL, None)
    await client.asks()
    assert client.queues == [0]
    assert bodies(await client.pull()) == ["c"]


# ---------------------------------------------------------------- faults


async def test_what_is_not_committed_comes_again_in_order_after_the_channel_was_lost(pulled: World) -> None:
    (client,) = await registered(pulled, "a")
    await pulled.publish("p", *"abcdef")
    had = await client.pull_all(4)
    await client.commit(had[0])
    await pulled.broker.lose(pulled.queue("p"))
    await pulled.settle_down()
    again = await client.pull()
    assert bodies(again) == ["b", "c", "d"]
    assert {one.delivery_count for one in again} == {1}, "its client has them all the same"
    assert bodies(await client.pull_all(2, after=again[-1])) == ["e", "f"]
    assert await client.commit(had[2]) == 2
    assert bodies(await client.pull()) == ["d", "e", "f"]


async def test_a_session_outlives_a_crash_of_the_proxy_with_all_that_was_pulled(folder: Path) -> None:
    clock = ManualClock()
    before = await start_world(folder / "one", clock=clock)
    await into_pull_mode(before)
    a, b = await registered(before, "a", "b")
    await before.publish("p", *"abcde")
    had = await a.pull(3)
    assert await a.commit(had[0]) == 1
    await crash(before, folder / "one", folder / "two")
    async with open_world(folder / "two", clock=clock) as after:
        a.world = b.world = after
        assert await a.commit(had[1]) == 1
        await a.asks()
        assert a.queues == [0]
        assert bodies(await a.pull(wait=3)) == ["c"]
        for _ in range(12):  # and ends when nothing is heard of it
            await passes(after, 1.0)
            await b.asks()
        assert bodies(await b.pull()) == ["c", "d", "e"]


async def test_sessions_of_an_earlier_proxy_end_though_nobody_asks(folder: Path) -> None:
    clock = ManualClock()
    before = await start_world(folder / "one", clock=clock)
    await into_pull_mode(before)
    (a,) = await registered(before, "a")
    await before.publish("p", *"abc")
    await a.pull()
    await crash(before, folder / "one", folder / "two")
    async with open_world(folder / "two", clock=clock) as after:
        assert (await after.engine.status("p", "default")).in_flight == 3
        await passes(after, SESSION_SECONDS + 4)
        await after.settle_down()
        assert (await after.engine.status("p", "default")).in_flight == 0


async def test_messages_that_cannot_be_identified_are_pulled_and_committed_in_order(nameless: World) -> None:
    await into_pull_mode(nameless)
    (client,) = await registered(nameless, "a")
    await nameless.publish("p", *"abcd")
    had = await client.pull(3)
    assert bodies(had) == ["a", "b", "c"]
    assert await client.commit(had[1]) == 2
    assert bodies(await client.pull()) == ["c"]
    assert bodies(await client.pull(after=had[2])) == ["d"]


async def test_a_pull_whose_answer_is_cut_off_loses_nothing(pulled: World) -> None:
    (client,) = await registered(pulled, "a")
    await pulled.publish("p", *"abc")
    gate = pulled.faults.stop("leases.grant")
    cut_off = asyncio.create_task(client.asks_for())
    await gate.reached()
    cut_off.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cut_off
    gate.open()
    await pulled.settle_down()
    again = await client.pull(wait=1)
    assert bodies(again) == ["a", "b", "c"]
    assert await client.commit(again[-1]) == 3


def test_a_fenced_client_is_told_what_to_do() -> None:
    assert issubclass(Fenced, PopgateError)
    assert Fenced.code == "fenced"
