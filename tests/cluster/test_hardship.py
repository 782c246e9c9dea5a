"""Effects of machines and operators on a proxy: pauses, an orderly stop, a full disk, a wall clock that jumps."""

import asyncio
import resource
import signal
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.conftest import ack_those_alive, assert_kept, assert_no_traceback, come_again, limit_file_size, report
from support.audit import Audit, now
from support.audit_client import Client, until
from support.audit_load import Habits, Load
from support.proxy import ProxyProcess
from support.wall_clock import WallClock

GROW_COUNT = 150
HELD_MIN = 16
LONG_SECONDS = 120.0
"""Seconds; longer than any test, so a lease of that length is live to its end."""
PAUSED_LEASE_SECONDS, PAUSE_SECONDS, PAUSE_SECONDS_FULL = 2.0, 3.0, 30.0
"""Seconds; the long pause exceeds RabbitMQ's heartbeat timeout."""
EXIT_SECONDS = 2.0
EXIT_SLACK_SECONDS = 1.0
"""Extra seconds for a busy machine."""
JUMP_LEASE_SECONDS = 2.0
CLOCK_JUMP_SECONDS = 3_600.0

pytestmark = pytest.mark.crash


@asynccontextmanager
async def client_of(proxy: ProxyProcess, audit: Audit) -> AsyncGenerator[Client]:
    with proxy:
        async with Client(proxy.url, audit) as client:
            await client.create()
            yield client
        assert_no_traceback(proxy)


async def hold(load: Load) -> None:
    await load.grow(GROW_COUNT)
    await until(lambda: len(load.held) >= HELD_MIN, timeout_seconds=30, what="leases to be held")


# ---------------------------------------------------------------- pauses and stops


async def test_a_proxy_that_was_paused_for_longer_than_its_leases_breaks_no_promise(
    broker_flags: Sequence[str], tmp_path: Path, seed: int, full_run: bool
) -> None:
    """SIGSTOP and SIGCONT: leases end late, never early, and messages of ended leases come again."""
    audit = Audit()
    proxy = ProxyProcess(tmp_path / "proxy", *broker_flags)
    habits = Habits(held_seconds=PAUSED_LEASE_SECONDS, lease_seconds=PAUSED_LEASE_SECONDS)
    async with client_of(proxy, audit) as client:
        async with Load(client, f"{seed}", habits) as load:
            for seconds in (PAUSE_SECONDS_FULL, *[PAUSE_SECONDS] * 9) if full_run else (PAUSE_SECONDS,):
                await hold(load)
                held = load.take_held()
                audit.mark("pause")
                proxy.pause()
                await asyncio.sleep(seconds)  # the pause is the test
                proxy.resume()
                audit.mark("resume")
                await come_again(audit, held)
                await load.grow(GROW_COUNT)
                assert_kept(audit)
            await load.drain()
        report(f"seed {seed}", audit, refusals=client.refusals)
    assert_kept(audit, drained=True)


async def test_a_stop_in_order_answers_the_parked_pops_and_keeps_the_leases(
    broker_flags: Sequence[str], tmp_path: Path, seed: int, full_run: bool
) -> None:
    """SIGTERM under load: exit within two seconds; the next start finds everything, and no message waits for an old
    lease.
    """
    audit = Audit()
    proxy = ProxyProcess(tmp_path / "proxy", *broker_flags)
    exits: list[float] = []
    async with client_of(proxy, audit) as client, Client(proxy.url, audit, topic="quiet") as quiet:
        await quiet.create()
        async with Load(client, f"{seed}", Habits(held_seconds=LONG_SECONDS, lease_seconds=LONG_SECONDS)) as load:
            for _ in range(10 if full_run else 1):
                await hold(load)
                held = load.take_held()
                parked = [asyncio.create_task(quiet.pop(f"parked {number}", wait_seconds=25)) for number in range(4)]
                await parked_count(client, 4)
                terminated = audit.mark("SIGTERM")
                proxy.signal(signal.SIGTERM)
                assert await asyncio.gather(*parked) == [[], [], [], []]
                assert await asyncio.to_thread(proxy.wait, 10) == 0
                exits.append(audit.mark("ended") - terminated)
                await asyncio.to_thread(proxy.start)
                audit.mark("up again")
                await load.grow(GROW_COUNT)
                assert await ack_those_alive(client, held) == len(held)
                assert_kept(audit)
            await load.drain()
        report(f"seed {seed}", audit, refusals=client.refusals, longest_exit=f"{max(exits):.2f} s")
    assert_kept(audit, drained=True)
    assert max(exits) <= EXIT_SECONDS + EXIT_SLACK_SECONDS


async def parked_count(client: Client, count: int) -> None:
    """Return when that many pops of the topic `quiet` are parked."""
    line = 'popgate_parked_pops{group="default",topic="quiet"}'
    deadline = now() + 10
    while True:
        metrics = (await client.http.get("/metrics")).text
        if any(row.split() == [line, f"{count}.0"] for row in metrics.splitlines()):
            return
        assert now() < deadline, metrics
        await asyncio.sleep(0.02)


# ---------------------------------------------------------------- a full disk


async def test_a_full_disk_refuses_clearly_and_loses_nothing(
    broker_flags: Sequence[str], tmp_path: Path, seed: int
) -> None:
    """503 until there is room, then full service; also if the proxy is killed while the disk is full."""
    audit = Audit()
    proxy = ProxyProcess(tmp_path / "proxy", *broker_flags)
    async with client_of(proxy, audit) as client:
        async with Load(client, f"{seed}", Habits(held_seconds=LONG_SECONDS)) as load:
            for ends_by in ("room", "kill"):
                await hold(load)
                held = load.take_held()
                client.refusals.clear()
                audit.mark("disk full")
                limit_file_size(proxy, 1)
                await until(
                    lambda: client.refusals.get("state_unavailable", 0) >= 10,
                    timeout_seconds=30,
                    what="pops and settlements to get 503",
                )
                await publishing_meanwhile(client, embedded=not broker_flags)
                audit.mark(ends_by)
                if ends_by == "room":
                    limit_file_size(proxy, resource.RLIM_INFINITY)
                else:
                    await asyncio.to_thread(proxy.kill)
                    await asyncio.to_thread(proxy.start)
                await load.grow(GROW_COUNT)
                assert await ack_those_alive(client, held) == len(held)
                assert_kept(audit)
            await load.drain()
        report(f"seed {seed}", audit, refusals=client.refusals)
    assert_kept(audit, drained=True)


async def publishing_meanwhile(client: Client, *, embedded: bool) -> None:
    """On the embedded broker, messages go to the full disk; on RabbitMQ, they go to RabbitMQ, which has room."""
    message_id = f"on a full disk {now()}"
    refusals = client.refusals.get("broker_unavailable", 0)
    (publish,) = await client.publish([(message_id, f"{message_id} ")])
    assert publish.is_promised is not embedded
    assert (client.refusals.get("broker_unavailable", 0) > refusals) is embedded


# ---------------------------------------------------------------- the wall clock


async def published_time_of(client: Client) -> float:
    """Return the publish time that a message published now gets."""
    answer = await client.http.post("/v1/topics/clock/messages", json={"messages": [{"body": ""}]})
    popped = await client.http.post("/v1/topics/clock/groups/default/pop", json={"wait_seconds": 10})
    message = popped.json()["messages"][0]
    handles = {"receipt_handles": [message["receipt_handle"]]}
    settled = await client.http.post("/v1/topics/clock/groups/default/ack", json=handles)
    assert answer.is_success
    assert settled.is_success
    published_at: float = message["published_at"]
    return published_at


async def test_the_wall_clock_may_jump(broker_flags: Sequence[str], tmp_path: Path, seed: int, full_run: bool) -> None:
    """An hour forward and back under a living proxy, and back while it is down: leases keep their promised length."""
    if broker_flags and not full_run:
        pytest.skip("the records, and so the deadlines, are in the embedded state in both cases")
    audit = Audit()
    clock = WallClock(tmp_path / "clock")
    proxy = ProxyProcess(tmp_path / "proxy", *broker_flags, environment=clock.environment)
    async with client_of(proxy, audit) as client:
        async with Client(proxy.url, audit, topic="clock") as other:
            await other.create()
        async with Load(client, f"{seed}", Habits(held_seconds=JUMP_LEASE_SECONDS)) as load:
            for seconds, restarts in ((CLOCK_JUMP_SECONDS, False), (-CLOCK_JUMP_SECONDS, False), (-7_200.0, True)):
                await hold(load)
                held = load.take_held()
                if restarts:
                    await asyncio.to_thread(proxy.kill)
                clock.set(seconds)
                audit.mark(f"the wall clock is off by {seconds:g} s")
                if restarts:
                    await asyncio.to_thread(proxy.start)
                await load.grow(GROW_COUNT)
                assert abs(await asyncio.to_thread(clock.shown) - time.time() - seconds) < CLOCK_JUMP_SECONDS / 2
                assert abs(await published_time_of(client) - time.time()) < CLOCK_JUMP_SECONDS / 2
                await ack_those_alive(client, held[::2])
                await come_again(audit, held[1::2])
                assert_kept(audit)
            await load.drain()
        report(f"seed {seed}", audit)
    assert_kept(audit, drained=True)
