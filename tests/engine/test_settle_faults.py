"""An exception at any step of settling: every answer is backed by the store's, and nothing is lost."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from engine.patience import LEASE_SECONDS, drained, patient_pop
from popgate.adapters.redis import connection, records
from popgate.adapters.redis import leases as redis_leases
from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.leases import RedisLeaseStore
from popgate.adapters.sqlite import group_commit, lease_decisions, lease_records, leases
from popgate.domain.errors import PopgateError
from popgate.domain.lease import RecordState
from popgate.domain.names import CopyId
from popgate.engine.lease import journal_subjects as subjects
from popgate.engine.lease import moves
from popgate.engine.lease_groups import group_settling
from popgate.engine.queue import host, state
from popgate.engine.settle import settling
from popgate.engine.settle.orders import Verb
from popgate.runtime.clocks import ManualClock
from support.engines import World, body_of, crash, open_world, start_world, stop_world
from support.injected import FaultAtLine, InjectedError, Tried
from support.redis import RedisServer

pytestmark = pytest.mark.slow

REDIS = (connection, redis_leases, records)
REDIS_DATABASE = 9
ANSWER_SECONDS = 10
ENGINE = (settling, group_settling, subjects, moves, host, state)
STORE = (group_commit, lease_decisions, lease_records, leases)
BODIES = ["a", "b", "c"]
DONE = {Verb.ACK: "acked", Verb.RELEASE: "released", Verb.REJECT: "rejected"}


async def settled_before_a_crash(world: World, verb: Verb, fault: FaultAtLine) -> dict[str, CopyId]:
    """Return the bodies and the copy ids of the messages that were answered as settled while the fault happened."""
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
        return {}
    assert set(statuses) <= {DONE[verb], "unavailable"}, (fault.happened_in, statuses)
    settled = [one.message for one, status in zip(leased, statuses, strict=True) if status == DONE[verb]]
    return {body_of(message): message.copy_id for message in settled}


@pytest.mark.parametrize(("modules", "lines_min"), [(ENGINE, 7), (STORE, 2)], ids=["engine", "store"])
@pytest.mark.parametrize("verb", DONE)
async def test_a_fault_at_any_line_of_settling_makes_no_false_success(
    tmp_path: Path, verb: Verb, modules: Sequence[ModuleType], lines_min: int, seed: int, *, full_run: bool
) -> None:
    tried = Tried(seed, all_lines=full_run)
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
            assert not came & answered.keys(), fault.happened_in
        elif verb is Verb.RELEASE:
            assert came == set(BODIES), fault.happened_in
        else:
            assert answered.keys() <= dead, fault.happened_in
            assert came | dead == set(BODIES), fault.happened_in
            assert not came & dead, fault.happened_in
        if not fault.happened_in:
            break
        tried.add(fault.happened_in)
    assert answered.keys() == set(BODIES)
    assert len(tried) > lines_min


@pytest.mark.parametrize(
    ("verb", "state"),
    [(Verb.ACK, RecordState.ACKED), (Verb.RELEASE, RecordState.RELEASED), (Verb.REJECT, RecordState.DEAD)],
)
async def test_a_fault_at_any_line_of_settling_on_redis_makes_no_false_success(
    tmp_path: Path, redis_server: RedisServer, verb: Verb, state: RecordState, seed: int, *, full_run: bool
) -> None:
    """Answered settlements are in Redis, for another process to read."""
    address = parse_address(redis_server.url(REDIS_DATABASE))
    tried = Tried(seed, all_lines=full_run)
    while True:
        mine, another = (RedisConnection(address, f"faults-{len(tried)}") for _ in range(2))
        fault = FaultAtLine(REDIS, tried, repetition=1)
        world = await start_world(tmp_path / f"{len(tried)}", clock=ManualClock(), store=RedisLeaseStore(mine))
        answered = await settled_before_a_crash(world, verb, fault)
        queue = world.served("t").layout.queues[0]
        records = await RedisLeaseStore(another).peek(queue, list(answered.values()))
        assert {record.state for record in records.values()} <= {state}, fault.happened_in
        assert len(records) == len(answered), fault.happened_in
        dead = {body_of(message) for message in await world.dead_letters("t")}
        assert dead >= (answered.keys() if verb is Verb.REJECT else set()), fault.happened_in
        await stop_world(world)
        await mine.close()
        await another.close()
        if not fault.happened_in:
            break
        tried.add(fault.happened_in)
    assert answered.keys() == set(BODIES)
    assert len(tried) > 2
