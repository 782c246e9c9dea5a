"""Publishing with a dedup_id while stores, brokers and processes fail: published once despite all repeats."""

import asyncio
from pathlib import Path

import pytest

from engine.patience import LEASE_SECONDS, away, drained, left, patient_pop
from popgate.domain.errors import BrokerUnavailable, StateUnavailable
from popgate.engine.engine import COLLECT_SECONDS
from popgate.engine.publish import deduplication
from popgate.engine.publish.publishing import NewMessage, Published
from popgate.engine.queue.record_upkeep import SETTLED_KEPT_SECONDS
from popgate.engine.settle.orders import Verb
from popgate.ports.broker import PublishStatus
from popgate.ports.journal import EventKind
from popgate.runtime.clocks import ManualClock
from support.engines import World, bodies, crash, open_world

WINDOW = 300.0


def no_state() -> StateUnavailable:
    return StateUnavailable("the state store is away, says the test", retry_after_seconds=0.001)


def new(body: str, dedup_id: str | None = None, *, message_id: str | None = None) -> NewMessage:
    return NewMessage(body.encode(), {}, message_id=message_id, dedup_id=dedup_id)


def statuses(results: list[Published]) -> list[str]:
    return [result.status for result in results]


async def stored_twice(world: World) -> bool:
    """Tell whether the broker has two copies of what is one message to consumers."""
    copies = [outgoing.message.copy_id for outgoing in world.broker.published]
    return len(copies) == 2 and len(set(copies)) == 1


# ---------------------------------------------------------------- without faults


async def test_a_repeat_is_a_duplicate_with_the_first_id_until_the_window_ends(world: World) -> None:
    (first,) = await world.engine.publish("t", [new("a", "d", message_id="order 17")])
    assert first == Published("published", "order 17")
    await world.let_pass(WINDOW - 1)
    (again,) = await world.engine.publish("t", [new("a", "d", message_id="another")])
    assert again == Published("duplicate", "order 17")
    await world.let_pass(1)
    later = await world.publish_once("t", "a", "d")
    assert later.status == "published"
    assert later.message_id != "order 17"
    assert await drained(world) == ["a", "a"]
    assert world.journal.count(EventKind.PUBLISHED) == 2
    assert world.journal.count(EventKind.DUPLICATE) == 1


async def test_of_equal_ids_in_one_call_the_first_is_published(world: World) -> None:
    messages = [new("a", "d"), new("plain"), new("b", "e"), new("c", "d"), new("plain")]
    results = await world.engine.publish("t", messages)
    assert statuses(results) == ["published", "published", "published", "duplicate", "published"]
    assert results[3].message_id == results[0].message_id
    assert await drained(world) == ["a", "plain", "b", "plain"]


async def test_topics_have_ids_of_their_own_and_a_deleted_one_begins_anew(world: World) -> None:
    await world.create("u")
    assert [(await world.publish_once(topic, "a")).status for topic in ("t", "u", "t", "u")] == [
        "published",
        "published",
        "duplicate",
        "duplicate",
    ]
    await world.engine.deletions.delete_topic("t")
    await world.create("t")
    assert (await world.publish_once("t", "a")).status == "published"
    assert (await world.publish_once("u", "a")).status == "duplicate"


async def test_ended_entries_are_dropped_by_the_collector(world: World) -> None:
    async def count() -> int:
        (rows,) = await world.database.read(lambda c: c.execute("SELECT count(*) FROM dedup").fetchone())
        return int(rows)

    await world.publish_once("t", "a")
    assert await count() == 1
    await world.let_pass(WINDOW - 1)
    assert await count() == 1
    await world.let_pass(COLLECT_SECONDS)
    assert await count() == 0


# ---------------------------------------------------------------- at the same time


async def test_a_second_publish_waits_for_the_first_and_is_its_duplicate(world: World) -> None:
    gate = world.faults.stop("broker.publish")
    first = asyncio.ensure_future(world.publish_once("t", "a"))
    await gate.reached()
    second = asyncio.ensure_future(world.publish_once("t", "a"))
    await world.settle_down()
    assert not second.done()
    gate.open()
    assert await second == Published("duplicate", (await first).message_id)
    assert await drained(world) == ["a"]
    assert len(world.broker.published) == 1


async def test_a_second_publish_waits_for_the_confirm_too(world: World) -> None:
    gate = world.faults.stop("dedup.confirm")
    first = asyncio.ensure_future(world.publish_once("t", "a"))
    await gate.reached()
    second = asyncio.ensure_future(world.publish_once("t", "a"))
    await world.settle_down()
    assert not second.done()
    gate.open()
    assert (await first).status == "published"
    assert (await second).status == "duplicate"


async def test_a_second_publish_takes_over_where_the_first_was_refused(world: World) -> None:
    world.broker.refuse(PublishStatus.UNROUTED)
    gate = world.faults.stop("broker.publish")
    first = asyncio.ensure_future(world.publish_once("t", "a"))
    await gate.reached()
    others = [asyncio.ensure_future(world.publish_once("t", "a")) for _ in range(5)]
    await world.settle_down()
    gate.open()
    assert (await first).error_code == "no_subscribers"
    assert sorted([(await other).status for other in others]) == ["duplicate"] * 4 + ["published"]
    assert await drained(world) == ["a"]


async def test_a_publish_that_stays_under_way_holds_up_others_for_a_time_only(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deduplication, "WAIT_SECONDS_MAX", 0.01)
    gate = world.faults.stop("broker.publish")
    first = asyncio.ensure_future(world.publish_once("t", "a"))
    await gate.reached()
    results = await world.engine.publish("t", [new("a", "a"), new("b", "b"), new("c")])
    assert statuses(results) == ["failed", "published", "published"]
    assert results[0].error_code == "not_confirmed"
    gate.open()
    assert (await first).status == "published"
    assert (await world.publish_once("t", "a")).status == "duplicate"
    assert sorted(await drained(world)) == ["a", "b", "c"]


async def test_calls_with_the_same_ids_in_another_order_do_not_wait_for_each_other(world: World) -> None:
    gate = world.faults.stop("broker.publish")
    holding = asyncio.ensure_future(world.publish_once("t", "b"))
    await gate.reached()
    calls = [["a", "b"], ["b", "a"], ["c", "b", "a"], ["a", "c"]]
    publishing = [asyncio.ensure_future(world.engine.publish("t", [new(one, one) for one in ids])) for ids in calls]
    await world.settle_down()
    gate.open()
    async with asyncio.timeout(10):
        results = [result.status for call in publishing for result in await call]
    assert (await holding).status == "published"
    assert results.count("published") == 2
    assert sorted(await drained(world)) == ["a", "b", "c"]


# ---------------------------------------------------------------- when it is not known what was stored


async def test_a_repeat_of_what_may_be_stored_is_the_same_copy_and_comes_once(world: World) -> None:
    world.broker.refuse(PublishStatus.FAILED, stored=True)
    first = await world.publish_once("t", "a")
    assert (first.status, first.error_code) == ("failed", "not_confirmed")
    assert await world.publish_once("t", "a") == Published("published", first.message_id)
    assert await stored_twice(world)
    assert (await world.publish_once("t", "a")).status == "duplicate"
    assert await drained(world) == ["a"]


async def test_a_repeat_of_what_was_not_stored_after_all_is_published(world: World) -> None:
    world.broker.refuse(PublishStatus.FAILED)
    first = await world.publish_once("t", "a")
    assert await world.publish_once("t", "a") == Published("published", first.message_id)
    assert await drained(world) == ["a"]


@pytest.mark.parametrize("known", [True, False])
async def test_a_repeat_after_the_broker_was_away_is_published_once(world: World, known: bool) -> None:
    error = BrokerUnavailable("away, says the test", outcome_unknown=not known)
    world.faults.fail("broker.publish", error, after=not known)
    with pytest.raises(BrokerUnavailable):
        await world.publish_once("t", "a")
    assert (await world.publish_once("t", "a")).status == "published"
    assert await stored_twice(world) is not known
    assert await drained(world) == ["a"]


async def test_a_refusal_may_have_been_one_queues_only_so_a_repeat_is_the_same_copy(world: World) -> None:
    world.broker.refuse(PublishStatus.REFUSED, stored=True)
    assert (await world.publish_once("t", "a")).error_code == "refused"
    assert (await world.publish_once("t", "a")).status == "published"
    assert await drained(world) == ["a"]


async def test_what_surely_was_not_stored_is_given_up(world: World) -> None:
    world.broker.refuse(PublishStatus.UNROUTED)
    (first,) = await world.engine.publish("t", [new("a", "d", message_id="first")])
    assert first.error_code == "no_subscribers"
    assert await world.engine.publish("t", [new("a", "d", message_id="second")]) == [Published("published", "second")]
    assert await drained(world) == ["a"]


async def test_a_repeat_that_surely_was_not_stored_does_not_give_up_what_may_be_stored(world: World) -> None:
    world.broker.refuse(PublishStatus.FAILED, stored=True)
    first = await world.publish_once("t", "a")
    world.broker.refuse(PublishStatus.UNROUTED)
    assert (await world.publish_once("t", "a")).error_code == "no_subscribers"
    world.faults.fail("broker.publish", BrokerUnavailable("away, says the test", outcome_unknown=False))
    with pytest.raises(BrokerUnavailable):
        await world.publish_once("t", "a")
    assert await world.publish_once("t", "a") == Published("published", first.message_id)
    assert await drained(world) == ["a"]


async def test_a_publish_that_is_cancelled_on_its_way_may_be_repeated(world: World) -> None:
    gate = world.faults.stop("broker.publish", after=True)
    publishing = asyncio.ensure_future(world.publish_once("t", "a"))
    await gate.reached()
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    assert (await world.publish_once("t", "a")).status == "published"
    assert await stored_twice(world)
    assert await drained(world) == ["a"]


# ---------------------------------------------------------------- the second copy, and its consumers


async def twice_at_the_broker(world: World) -> None:
    """Store two copies of one message, the second one last."""
    world.broker.refuse(PublishStatus.FAILED, stored=True)
    await world.publish_once("t", "a")
    await world.publish("t", "b")
    assert (await world.publish_once("t", "a")).status == "published"


async def test_the_second_copy_comes_while_the_first_is_leased(world: World) -> None:
    await twice_at_the_broker(world)
    leased = await patient_pop(world, count=3, invisibility=LEASE_SECONDS)
    assert bodies(leased) == ["a", "b"]
    assert await patient_pop(world) == []
    assert await world.settle(Verb.ACK, "t", leased) == ["acked", "acked"]
    assert await left(world) == 0


async def test_the_second_copy_comes_after_the_first_expired(world: World) -> None:
    await twice_at_the_broker(world)
    await patient_pop(world, invisibility=5)
    await world.let_pass(5)
    (again,) = await patient_pop(world)
    assert (bodies([again]), again.delivery_count) == (["a"], 2)
    assert await world.settle(Verb.ACK, "t", [again]) == ["acked"]
    assert await drained(world) == ["b"]


async def test_the_second_copy_comes_when_the_first_was_acked_long_ago(world: World) -> None:
    world.broker.refuse(PublishStatus.FAILED, stored=True)
    await world.publish_once("t", "a")
    await world.publish("t", "b")
    assert await drained(world) == ["a", "b"]
    await world.let_pass(WINDOW / 2)
    assert (await world.publish_once("t", "a")).status == "published"
    await world.let_pass(SETTLED_KEPT_SECONDS)
    trimmed = await world.leases.trim(
        world.queue("t"), settled_before=float("inf"), older_than_seconds=SETTLED_KEPT_SECONDS
    )
    assert trimmed == 1, "that of b"
    assert await patient_pop(world) == []
    assert await left(world) == 0


async def test_the_second_copy_comes_after_the_first_was_dead_lettered(world: World) -> None:
    await twice_at_the_broker(world)
    await world.settle(Verb.REJECT, "t", await patient_pop(world))
    assert await drained(world) == ["b"]
    assert len(await world.dead_letters("t")) == 1


# ---------------------------------------------------------------- processes that die


@pytest.mark.parametrize("consumed", [False, True])
@pytest.mark.parametrize("step", ["dedup.reserve", "broker.publish", "dedup.confirm"])
@pytest.mark.parametrize("after", [False, True])
async def test_a_kill_at_any_step_leaves_what_a_repeat_makes_one_message(
    folder: Path, step: str, after: bool, consumed: bool
) -> None:
    here, there = folder / "data", folder / "after the kill"
    clock = ManualClock()
    await _die(here, there, clock, step, after=after)
    is_stored = step == "dedup.confirm" or (step == "broker.publish" and after)
    async with open_world(there, clock=clock) as world:
        if consumed and is_stored:
            assert await drained(world) == ["a"]
        result = await world.publish_once("t", "a")
        assert result.status == ("duplicate" if step == "dedup.confirm" and after else "published")
        assert (await world.publish_once("t", "a")) == Published("duplicate", result.message_id)
        assert await drained(world) == ([] if consumed and is_stored else ["a"])


async def _die(here: Path, there: Path, clock: ManualClock, step: str, *, after: bool) -> None:
    """Leave in `there` what a SIGKILL leaves before or after this step of a publish."""
    async with open_world(here, clock=clock) as world:
        await world.create("t")
        gate = world.faults.stop(step, after=after)
        publishing = asyncio.ensure_future(world.publish_once("t", "a"))
        await gate.reached()
        await crash(world, here, there)
        publishing.cancel()
        await asyncio.wait({publishing})


# ---------------------------------------------------------------- the state store is away


async def test_without_the_state_store_only_messages_without_an_id_are_published(world: World) -> None:
    world.faults.fail("dedup.reserve", no_state())
    results = await world.engine.publish("t", [new("a", "d"), new("plain"), new("a", "d")])
    assert [(one.status, one.error_code) for one in results] == [
        ("failed", "state_unavailable"),
        ("published", ""),
        ("failed", "state_unavailable"),
    ]
    assert (await world.publish_once("t", "a", "d")).status == "published"
    assert await drained(world) == ["plain", "a"]


async def test_without_the_state_store_a_publish_with_ids_alone_is_refused_as_a_whole(world: World) -> None:
    world.faults.fail("dedup.reserve", no_state())
    with pytest.raises(StateUnavailable):
        await world.engine.publish("t", [new("a", "d"), new("b", "e")])
    assert world.broker.published == []
    assert (await world.publish_once("t", "a", "d")).status == "published"


async def test_a_confirm_that_fails_is_no_failure_of_the_publish(world: World) -> None:
    world.faults.fail("dedup.confirm", no_state())
    first = await world.publish_once("t", "a")
    assert first.status == "published"
    assert await world.publish_once("t", "a") == first, "pending: published again as the same copy"
    assert await world.publish_once("t", "a") == Published("duplicate", first.message_id)
    assert await drained(world) == ["a"]


async def test_a_cancel_that_fails_leaves_an_id_that_can_be_published(world: World) -> None:
    world.faults.fail("dedup.cancel", no_state())
    world.faults.fail("broker.publish", away())
    with pytest.raises(BrokerUnavailable):
        await world.publish_once("t", "a")
    assert (await world.publish_once("t", "a")).status == "published"
    assert await drained(world) == ["a"]


# ---------------------------------------------------------------- with a delay


async def test_a_delayed_message_is_published_once_and_comes_once(world: World) -> None:
    delayed = NewMessage(b"a", {}, dedup_id="d", delay_seconds=5)
    (first,) = await world.engine.publish("t", [delayed])
    (again,) = await world.engine.publish("t", [delayed])
    assert (first.status, again) == ("published", Published("duplicate", first.message_id))
    await world.let_pass(6)
    assert await drained(world) == ["a"]


async def test_a_delayed_message_that_may_be_stored_is_the_same_copy_when_it_is_repeated(world: World) -> None:
    delayed = NewMessage(b"a", {}, dedup_id="d", delay_seconds=5)
    world.broker.refuse(PublishStatus.FAILED, stored=True)
    (first,) = await world.engine.publish("t", [delayed])
    await world.let_pass(6)
    assert await drained(world) == ["a"]
    (again,) = await world.engine.publish("t", [delayed])
    assert (first.status, again) == ("failed", Published("published", first.message_id))
    await world.let_pass(6)
    assert await patient_pop(world) == []
    assert await left(world) == 0
