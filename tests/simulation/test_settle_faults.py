"""An exception at any step of settling: nothing is answered that the store does not say, and nothing is lost."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from popgate.adapters.sqlite import group_commit, lease_decisions, lease_records, leases
from popgate.domain.errors import PopgateError
from popgate.engine import group_settling, moves, queue_host, settling, subjects
from popgate.engine.settling import Verb
from popgate.runtime.clocks import ManualClock
from simulation.patience import LEASE_SECONDS, drained, patient_pop
from support.engines import World, body_of, crash, open_world, start_world
from support.injected import FaultAtLine, InjectedError

pytestmark = pytest.mark.slow

ANSWER_SECONDS = 10
ENGINE = (settling, group_settling, subjects, moves, queue_host)
STORE = (group_commit, lease_decisions, lease_records, leases)
BODIES = ["a", "b", "c"]
DONE = {Verb.ACK: "acked", Verb.RELEASE: "released", Verb.REJECT: "rejected"}


async def settled_before_a_crash(world: World, verb: Verb, fault: FaultAtLine) -> set[str]:
    """The bodies of the messages that were answered as settled while the fault happened."""
    await world.create("t")
    await world.publish("t", *BODIES)
    leased = await patient_pop(world, count=3, invisibility=LEASE_SECONDS)
    assert [body_of(one.message) for one in leased] == BODIES
    try:
        with fault:
            async with asyncio.timeout(ANSWER_SECONDS):
                statuses = await world.settle(verb, "t", leased)
    except TimeoutError:
        pytest.fail(f"no answer after a fault at {fault.happened_in}")
    except (InjectedError, PopgateError):
        return set()
    assert set(statuses) <= {DONE[verb], "unavailable"}, (fault.happened_in, statuses)
    return {body for body, status in zip(BODIES, statuses, strict=True) if status == DONE[verb]}


@pytest.mark.parametrize(("modules", "lines_min"), [(ENGINE, 40), (STORE, 20)], ids=["engine", "store"])
@pytest.mark.parametrize("verb", DONE)
async def test_a_fault_at_any_line_of_settling_makes_no_false_success(
    tmp_path: Path, verb: Verb, modules: Sequence[ModuleType], lines_min: int
) -> None:
    tried: set[str] = set()
    while True:
        before, after = tmp_path / f"before-{len(tried)}", tmp_path / f"after-{len(tried)}"
        fault = FaultAtLine(modules, tried, repetition=1)
        with fault.watched():
            world = await start_world(before, clock=ManualClock())
        answered = await settled_before_a_crash(world, verb, fault)
        await crash(world, before, after)
        async with open_world(after, clock=ManualClock()) as world:
            await world.let_pass(LEASE_SECONDS + 1)
            came = set(await drained(world))
            dead = {body_of(message) for message in await world.dead_letters("t")}
        if verb is Verb.ACK:
            assert not came & answered, fault.happened_in
        elif verb is Verb.RELEASE:
            assert came == set(BODIES), fault.happened_in
        else:
            assert answered <= dead, fault.happened_in
            assert came | dead == set(BODIES), fault.happened_in
            assert not came & dead, fault.happened_in
        if not fault.happened_in:
            break
        tried.add(fault.happened_in)
    assert answered == set(BODIES)
    assert len(tried) > lines_min
