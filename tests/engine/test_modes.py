"""Switching the consume mode: its effects on pops, leases and their messages."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from engine.pull_clients import into_pull_mode, passes, registered
from popgate.domain.errors import StateUnavailable, WrongMode
from popgate.domain.lease import SettleAction, SettleStatus
from popgate.domain.modes import drained, switched
from popgate.domain.topics import ConsumeMode, GroupSpec
from popgate.engine.settle.orders import Verb
from popgate.ports.journal import EventKind
from popgate.ports.leases import SettleEntry
from popgate.runtime.clocks import ManualClock
from support.engines import World, bodies, crash, eventually, open_world

LONG = 1_000.0


async def switch(world: World, mode: ConsumeMode, seconds: float | None = None) -> GroupSpec:
    return (await world.engine.changes.switch("t", "default", mode, seconds)).spec


async def become(world: World, before: GroupSpec, after: GroupSpec) -> None:
    """Change the catalog to ``after``, as another proxy would."""
    assert await world.context.catalog.change_group(before, after)


def mode(world: World) -> ConsumeMode:
    return world.served("t").spec.mode


async def test_while_a_group_drains_leases_can_be_settled_and_nothing_new_is_given(world: World) -> None:
    await world.create("t")
    await world.publish("t", *"abcde")
    a, b, c, d = await world.pop("t", count=4)
    assert (await switch(world, ConsumeMode.PULL, LONG)).mode is ConsumeMode.DRAINING
    with pytest.raises(WrongMode, match="changing to pull"):
        await world.pop("t")
    assert await world.settle(Verb.ACK, "t", [a]) == ["acked"]
    assert await world.settle(Verb.RELEASE, "t", [b]) == ["released"]
    assert await world.settle(Verb.EXTEND, "t", [c], seconds=90) == ["extended"]
    assert await world.settle(Verb.REJECT, "t", [d]) == ["rejected"]
    with pytest.raises(WrongMode) as refused:
        await world.pop("t")
    assert refused.value.mode == "draining"


async def test_a_pop_that_waits_is_answered_as_soon_as_the_group_drains(world: World) -> None:
    await world.create("t")
    waiting = asyncio.create_task(world.pop("t", wait=30))
    await world.settle_down()
    await switch(world, ConsumeMode.PULL)
    with pytest.raises(WrongMode):
        await waiting


async def test_a_repeated_attempt_gets_its_leases_also_while_the_group_drains(world: World) -> None:
    await world.create("t")
    await world.publish("t", "a")
    (first,) = await world.pop("t", attempt="try")
    await switch(world, ConsumeMode.PULL, LONG)
    (again,) = await world.pop("t", attempt="try")
    assert again.receipt_handle == first.receipt_handle
    with pytest.raises(WrongMode):
        await world.pop("t", attempt="another")


async def test_half_way_back_pops_go_on_and_leases_are_good(world: World) -> None:
    await world.create("t")
    await world.publish("t", "a", "b")
    (a,) = await world.pop("t")
    await switch(world, ConsumeMode.PULL, LONG)
    assert (await switch(world, ConsumeMode.POP)).mode is ConsumeMode.POP
    assert bodies(await world.pop("t", count=10)) == ["b"]
    assert await world.settle(Verb.ACK, "t", [a]) == ["acked"]


async def test_a_drain_ends_with_the_last_lease(world: World) -> None:
    await world.create("t", queues=3)
    await world.publish("t", *"abcdef")
    leased = await world.pop("t", count=6)
    await switch(world, ConsumeMode.PULL, LONG)
    for one in leased:
        await world.let_pass(1)
        assert mode(world) is ConsumeMode.DRAINING
        assert await world.settle(Verb.ACK, "t", [one]) == ["acked"]
    await world.let_pass(1)
    assert (world.served("t").spec.mode, world.served("t").spec.mode_generation) == (ConsumeMode.PULL, 3)


async def test_a_drain_of_a_group_without_leases_ends_at_once(world: World) -> None:
    await world.create("t")
    await world.publish("t", "a")
    await switch(world, ConsumeMode.PULL, LONG)
    await world.let_pass(0)
    assert mode(world) is ConsumeMode.PULL


async def test_a_drain_ends_when_leases_run_out_and_extensions_prolong_it(world: World) -> None:
    await world.create("t")
    await world.publish("t", "a")
    leased = await world.pop("t", invisibility=30)
    await switch(world, ConsumeMode.PULL, LONG)
    await world.let_pass(20)
    assert await world.settle(Verb.EXTEND, "t", leased, seconds=30) == ["extended"]
    await world.let_pass(20)
    assert mode(world) is ConsumeMode.DRAINING
    await world.let_pass(12)
    await world.let_pass(1)
    assert mode(world) is ConsumeMode.PULL


async def test_a_drain_has_its_time_and_leases_that_it_cuts_off_are_told_so(world: World) -> None:
    await world.create("t")
    await world.publish("t", "a")
    leased = await world.pop("t", invisibility=600)
    await switch(world, ConsumeMode.PULL, 60)
    await world.let_pass(58)
    assert mode(world) is ConsumeMode.DRAINING
    await switch(world, ConsumeMode.PULL, 60)
    await world.let_pass(58)
    assert mode(world) is ConsumeMode.DRAINING
    await world.let_pass(3)
    assert mode(world) is ConsumeMode.PULL
    assert await world.settle(Verb.ACK, "t", leased) == ["expired"]


async def test_a_drain_does_not_wait_for_leases_that_ran_out_and_none_of_them_is_revived(world: World) -> None:
    await world.create("t")
    await world.publish("t", "a", "b")
    (a,) = await world.pop("t", invisibility=5)
    (b,) = await world.pop("t", invisibility=600)
    await switch(world, ConsumeMode.PULL, LONG)
    await world.let_pass(6)
    extended = await world.settle(Verb.EXTEND, "t", [a, b], seconds=600)
    assert extended == ["expired", "extended"]
    assert await world.settle(Verb.ACK, "t", [b, a]) == ["acked", "acked"], "nobody else had it"
    await world.let_pass(1)
    assert mode(world) is ConsumeMode.PULL


async def test_back_in_pop_mode_a_lease_that_ran_out_may_be_extended_again(world: World) -> None:
    await world.create("t")
    await world.publish("t", "a")
    leased = await world.pop("t", invisibility=5)
    await switch(world, ConsumeMode.PULL, LONG)
    await switch(world, ConsumeMode.POP)
    await world.let_pass(6)
    assert await world.settle(Verb.EXTEND, "t", leased, seconds=600) == ["extended"]


async def test_who_has_not_heard_of_a_later_mode_gives_back_no_lease_that_is_good_in_it(world: World) -> None:
    await world.create("t")
    await world.publish("t", "a")
    leased = await world.pop("t", invisibility=600)
    served = world.served("t")
    pop = served.spec
    pull = drained(switched(pop, ConsumeMode.PULL, now=0.0))
    later = switched(pull, ConsumeMode.POP, now=0.0)
    await world.leases.allow_mode(served.name, later.mode_generation)
    await served.change_mode(pull)
    await eventually(lambda: "leases.settle.release" in world.faults.calls)
    await world.settle_down()
    assert await world.settle(Verb.EXTEND, "t", leased, seconds=900) == ["extended"]
    await served.change_mode(later)
    await served.stale_leases.given_back()
    assert world.journal.count(EventKind.RELEASED) == 0
    assert await world.settle(Verb.ACK, "t", leased) == ["acked"]


async def test_a_lease_that_another_proxy_settles_while_it_is_cut_off_is_not_released(world: World) -> None:
    await world.create("t")
    await world.publish("t", "a")
    (leased,) = await world.pop("t", invisibility=LONG)
    (held,) = world.served("t").hosts[0].messages()
    gate = world.faults.stop("leases.settle.release")
    await switch(world, ConsumeMode.PULL, 0.0)
    await gate.reached()
    queue = world.queue("t")
    (answer,) = await world.leases.settle([SettleEntry(queue, held.copy_id, held.lease_id, SettleAction.ACK)])
    assert answer.status is SettleStatus.DONE
    gate.open()
    await world.settle_down()
    assert world.journal.count(EventKind.RELEASED) == 0
    assert await world.settle(Verb.ACK, "t", [leased]) == ["already_acked"]


async def test_a_drain_waits_for_a_lease_that_only_the_store_knows_of(world: World) -> None:
    await world.create("t")
    await world.publish("t", "a")
    (leased,) = await world.pop("t", invisibility=600)
    served = world.served("t")
    served.hosts[0].state.drop_all()
    await switch(world, ConsumeMode.PULL, LONG)
    await world.let_pass(5)
    assert mode(world) is ConsumeMode.DRAINING
    assert await world.settle(Verb.ACK, "t", [leased]) == ["acked"]
    await world.let_pass(5)
    assert mode(world) is ConsumeMode.PULL


async def test_a_drain_goes_on_when_the_store_is_back(world: World) -> None:
    await world.publish("t", "a")
    leased = await world.pop("t", invisibility=600)
    await switch(world, ConsumeMode.PULL, LONG)
    assert await world.settle(Verb.ACK, "t", leased) == ["acked"]
    world.faults.fail("leases.load", StateUnavailable("away"), times=3)
    for _ in range(5):
        await world.let_pass(1)
    assert world.faults.calls.count("leases.load") >= 4
    assert mode(world) is ConsumeMode.PULL


async def test_a_drain_goes_on_after_a_crash_and_its_time_with_it(tmp_path: Path) -> None:
    clock = ManualClock()
    async with open_world(tmp_path / "before", clock=clock) as world:
        await world.create("t")
        await world.publish("t", "a", "b")
        a, b = await world.pop("t", count=2, invisibility=600)
        await switch(world, ConsumeMode.PULL, 60)
        await world.let_pass(30)
        await crash(world, tmp_path / "before", tmp_path / "after")
    async with open_world(tmp_path / "after", clock=clock) as world:
        await world.let_pass(20)
        assert mode(world) is ConsumeMode.DRAINING
        with pytest.raises(WrongMode):
            await world.pop("t")
        assert await world.settle(Verb.ACK, "t", [a]) == ["acked"]
        await world.let_pass(11)
        assert mode(world) is ConsumeMode.PULL
        assert await world.settle(Verb.ACK, "t", [a, b]) == ["already_acked", "expired"]


@pytest.mark.parametrize("wrote", ["draining", "pull", "pop"])
async def test_a_crash_right_after_a_step_was_written_loses_nothing(tmp_path: Path, wrote: str) -> None:
    clock = ManualClock()
    async with open_world(tmp_path / "before", clock=clock) as world:
        await world.create("t")
        await world.publish("t", "a", "b", "c")
        a, b = await world.pop("t", count=2, invisibility=600)
        assert await world.settle(Verb.ACK, "t", [a]) == ["acked"]
        pop = world.served("t").spec
        draining = switched(pop, ConsumeMode.PULL, now=await world.context.catalog.now(), drain_seconds=5)
        pull = drained(draining)
        steps = [pop, draining, pull, switched(pull, ConsumeMode.POP, now=0.0)]
        last = next(step for step in reversed(steps) if step.mode == wrote)
        for before, after in pairwise(steps[: steps.index(last) + 1]):
            await become(world, before, after)
        await crash(world, tmp_path / "before", tmp_path / "after")
    async with open_world(tmp_path / "after", clock=clock) as world:
        await world.let_pass(6)
        await world.let_pass(1)
        if wrote != "pop":
            assert world.served("t").spec == pull
            assert await world.settle(Verb.ACK, "t", [b]) == ["expired"]
            await switch(world, ConsumeMode.POP)
        assert sorted(bodies(await world.pop("t", count=10))) == (["b", "c"] if wrote != "pop" else ["c"])


async def test_leases_that_a_switch_cuts_off_are_told_so_and_their_messages_return_in_order(world: World) -> None:
    await world.create("t")
    await world.publish("t", *"abcd")
    leased = await world.pop("t", count=3)
    assert await world.settle(Verb.ACK, "t", leased[:1]) == ["acked"]
    pull = drained(await switch(world, ConsumeMode.PULL, 0))
    await world.let_pass(1)
    assert await world.settle(Verb.ACK, "t", leased) == ["already_acked", "expired", "expired"]
    with pytest.raises(WrongMode) as refused:
        await world.pop("t")
    assert refused.value.mode == "pull"
    assert await switch(world, ConsumeMode.POP) == switched(pull, ConsumeMode.POP, now=0.0)
    assert bodies(await world.pop("t", count=10)) == ["b", "c", "d"]


async def test_a_lease_that_was_written_when_its_mode_ended_is_given_to_nobody(world: World) -> None:
    await world.publish("t", "a")
    gate = world.faults.stop("leases.grant", after=True)
    popping = asyncio.create_task(world.pop("t", invisibility=600))
    await gate.reached()
    await switch(world, ConsumeMode.PULL, 0)
    await world.let_pass(1)
    assert mode(world) is ConsumeMode.PULL
    gate.open()
    with pytest.raises(WrongMode):
        await popping
    await world.settle_down()
    await switch(world, ConsumeMode.POP)
    assert bodies(await world.pop("t", count=10)) == ["a"]


async def test_leases_of_unidentified_messages_drain_and_are_cut_off_as_well(nameless: World) -> None:
    await nameless.publish("t", "a", "b", "c")
    a, b = await nameless.pop("t", count=2, invisibility=600)
    await switch(nameless, ConsumeMode.PULL, 60)
    assert await nameless.settle(Verb.ACK, "t", [a]) == ["acked"]
    await nameless.let_pass(1)
    assert mode(nameless) is ConsumeMode.DRAINING
    await nameless.let_pass(60)
    assert mode(nameless) is ConsumeMode.PULL
    assert await nameless.settle(Verb.ACK, "t", [b]) == ["expired"]
    await switch(nameless, ConsumeMode.POP)
    assert bodies(await nameless.pop("t", count=10)) == ["b", "c"]


async def test_a_mode_that_was_not_heard_of_is_met_at_the_next_pop_and_costs_no_queue(world: World) -> None:
    await world.create("t")
    await world.publish("t", "a", "b")
    (a,) = await world.pop("t")
    served = world.served("t")
    epoch = served.hosts[0].epoch
    draining = switched(served.spec, ConsumeMode.PULL, now=0.0, drain_seconds=LONG)
    await become(world, served.spec, draining)
    await world.context.leases.allow_mode(served.name, draining.mode_generation)
    with pytest.raises(WrongMode):
        await world.pop("t")
    assert served.spec == draining
    assert served.hosts[0].epoch == epoch
    assert await world.settle(Verb.ACK, "t", [a]) == ["acked"]
    back = switched(draining, ConsumeMode.POP, now=0.0)
    await become(world, draining, back)
    await world.engine.topics.follow()
    assert bodies(await world.pop("t", count=10)) == ["b"]


async def test_a_policy_and_a_mode_that_are_changed_at_once_are_both_changed(world: World) -> None:
    await world.create("t")
    before = world.served("t").spec
    await become(world, before, switched(before, ConsumeMode.PULL, now=0.0, drain_seconds=LONG))
    policy = replace(before.policy, max_in_flight=7)
    served, _ = await world.engine.changes.put_group("t", "default", policy)
    assert (served.spec.mode, served.spec.policy) == (ConsumeMode.DRAINING, policy)


async def test_a_group_that_is_created_anew_is_popped_whatever_the_former_one_was(world: World) -> None:
    await world.create("t")
    for mode in (ConsumeMode.PULL, ConsumeMode.POP, ConsumeMode.PULL):
        await switch(world, mode)
    await world.engine.deletions.delete_group("t", "default")
    await world.create("t")
    await world.publish("t", "a")
    assert bodies(await world.pop("t", count=10)) == ["a"]


# ---------------------------------------------------------------- pull clients


async def test_pulls_drain_where_it_is_asked_for_and_what_is_committed_comes_no_more(world: World) -> None:
    await into_pull_mode(world)
    (client,) = await registered(world, "a")
    await world.publish("p", *"abcde")
    had = await client.pull_all(4)
    await world.engine.changes.switch("p", "default", ConsumeMode.POP, 60.0)
    await passes(world, 2)
    assert world.served("p").spec.mode is ConsumeMode.DRAINING
    assert await client.commit(had[1]) == 2
    await passes(world, 2)
    assert world.served("p").spec.mode is ConsumeMode.DRAINING
    assert await client.commit(had[3]) == 2
    await passes(world, 1)
    assert world.served("p").spec.mode is ConsumeMode.POP
    (last,) = await world.pop("p", count=10)
    assert (last.message.body, last.delivery_count) == (b"e", 1)


async def test_what_is_not_committed_when_a_drain_of_pulls_ends_comes_again(world: World) -> None:
    await into_pull_mode(world)
    (client,) = await registered(world, "a")
    await world.publish("p", *"abc")
    had = await client.pull_all(3)
    assert await client.commit(had[0]) == 1
    await world.engine.changes.switch("p", "default", ConsumeMode.POP, 5.0)
    await passes(world, 6)
    with pytest.raises(WrongMode):
        await client.commit(had[2])
    again = await world.pop("p", count=10)
    assert [(one.message.body, one.delivery_count) for one in again] == [(b"b", 2), (b"c", 2)]


async def test_half_way_back_a_pull_client_goes_on_with_what_it_has(world: World) -> None:
    await into_pull_mode(world)
    (client,) = await registered(world, "a")
    await world.publish("p", *"abc")
    had = await client.pull_all(2)
    await world.engine.changes.switch("p", "default", ConsumeMode.POP, 60.0)
    await world.engine.changes.switch("p", "default", ConsumeMode.PULL, None)
    await client.asks()
    assert [one.receipt_handle for one in await client.pull(2)] == [one.receipt_handle for one in had]
    assert await client.commit(had[1]) == 2
