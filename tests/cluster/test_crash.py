"""Kill -9 of the proxy at random moments under load: every promise it had given survives.

On both brokers; on RabbitMQ the lease records are in the embedded state, beside the proxy, or on Redis, which notices a
killed proxy only by its missing heartbeats. `make crash` runs 20 rounds.
"""

import asyncio
import random
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.conftest import ack_those_alive, assert_kept, assert_no_traceback, come_again, report
from support.audit import Audit, Settlement, Verb, now
from support.audit_client import Client, until
from support.audit_load import Habits, Load
from support.proxy import ProxyProcess
from support.redis import RedisServer

ROUNDS, ROUNDS_ON_REDIS, ROUNDS_FULL = 2, 1, 20
MOMENTS = ("messages", "ack", "nothing", "pop", "release", "reject", "extend", "nothing")
"""A promise takes effect when its answer arrives, so these are the moments to kill. The short run uses the first
four: two for each broker.
"""
GROW_COUNT = 150
"""Minimum number of messages published and popped between a start and the next kill."""
HELD_MIN = 16
HELD_SECONDS, HELD_SECONDS_FULL = 6.0, 8.0
"""Seconds; longer than a kill and a restart take."""
GONE_SECONDS = 6.0
"""Extra seconds on Redis: the restarted proxy treats the killed one as alive until its heartbeats have been missing
that long.
"""


@pytest.fixture(params=["embedded", "rabbitmq", "redis"])
def state_flags(request: pytest.FixtureRequest) -> Sequence[str]:
    """Return the flags of `popgate serve` that choose the broker and the state. `redis`: on RabbitMQ."""
    if request.param == "embedded":
        return []
    flags = ["--amqp-url", str(request.getfixturevalue("amqp_url"))]
    if request.param == "rabbitmq":
        return flags
    redis: RedisServer = request.getfixturevalue("redis_server")
    return [*flags, "--redis-url", redis.url(), "--redis-namespace", f"crash-{secrets.token_hex(4)}"]


@pytest.mark.crash
@pytest.mark.parametrize("memory", ["roomy", "tight"])
@pytest.mark.parametrize("features", ["plain", "all"])
async def test_promises_outlive_a_killed_proxy(
    state_flags: Sequence[str], tmp_path: Path, seed: int, full_run: bool, features: str, memory: str
) -> None:
    """Leases exclude others and can be acked, acked messages stay away, and all others come again.

    With little memory, bodies are dropped and fetched again all the time. With all features, messages have ordering
    keys, delays, dedup_ids and times to live, and some pops have filters.
    """
    if not full_run and (memory == "tight" or features == "plain"):
        pytest.skip("the short run has memory enough, and all features")
    roomy, on_redis = memory == "roomy", "--redis-url" in state_flags
    habits = (Habits.with_everything if features == "all" else Habits)(
        reject_share=0.1,
        held_seconds=(HELD_SECONDS_FULL if full_run else HELD_SECONDS) + (GONE_SECONDS if on_redis else 0.0),
        body_bytes_max=2_000 if roomy else 60_000,
        batch_max=48 if roomy else 16,
    )
    flags = [*state_flags, "--buffer-bytes-max", "256MiB" if roomy else "1MiB"]
    chance = random.Random(seed)
    audit = Audit()
    rounds = ROUNDS_FULL if full_run else ROUNDS_ON_REDIS if on_redis else ROUNDS
    moments = MOMENTS if full_run or on_redis or not state_flags else (*MOMENTS[ROUNDS:], *MOMENTS[:ROUNDS])
    outlived = acked_after = 0
    began = now()
    with ProxyProcess(tmp_path / "proxy", *flags) as proxy:
        async with Client(proxy.url, audit) as client:
            await client.create()
            async with Load(client, f"{seed}", habits) as load:
                for number in range(rounds):
                    await load.grow(GROW_COUNT)
                    await until(lambda: len(load.held) >= HELD_MIN, timeout_seconds=30, what="leases to be held")
                    await asyncio.sleep(chance.uniform(0.0, 1.0))
                    held = load.take_held()
                    moment = moments[number % len(moments)]
                    await kill_at(proxy, client, moment)
                    audit.mark(f"kill {number + 1}, at an answered {moment}")
                    await asyncio.to_thread(proxy.start)
                    up = audit.mark("up again")
                    to_ack, to_leave = held[::2], held[1::2]
                    acked_after += await ack_those_alive(client, to_ack)
                    outlived += sum(lease.ends_at > up for lease in to_leave)
                    await come_again(audit, to_leave)
                    assert_kept(audit)
                await load.drain()
            state = await client.state()
        assert_no_traceback(proxy)
    assert_kept(audit, drained=True)
    assert outlived
    assert acked_after
    assert_dead_letters(audit, state["dead"])
    report(
        f"seed {seed}",
        audit,
        kills=rounds,
        dead=state["dead"],
        leases_that_outlived_a_kill=outlived,
        acked_after_a_kill=acked_after,
        seconds=round(now() - began),
        violations=0,
    )


def assert_dead_letters(audit: Audit, dead: int) -> None:
    """Assert that as many messages are dead as were rejected; some without an answer may be, too."""
    rejected = [settlement for settlement in settlements_of(audit) if settlement.verb is Verb.REJECT]
    unsure = sum(settlement.status == "" for settlement in rejected)
    sure = audit.figures()["rejected"]
    assert sure <= dead <= sure + unsure


async def kill_at(proxy: ProxyProcess, client: Client, moment: str) -> None:
    """Kill the proxy as soon as it has answered such a request, or immediately."""
    if moment != "nothing":
        killed = asyncio.get_running_loop().create_future()

        def kill(path: str) -> None:
            if path.endswith(moment) and not killed.done():
                proxy.signal(signal.SIGKILL)
                killed.set_result(None)

        client.on_success = kill
        async with asyncio.timeout(30):
            await killed
        client.on_success = None
    await asyncio.to_thread(proxy.kill)


def settlements_of(audit: Audit) -> list[Settlement]:
    return [
        settlement
        for history in audit.histories.values()
        for lease in history.leases
        for settlement in lease.settlements
    ]
