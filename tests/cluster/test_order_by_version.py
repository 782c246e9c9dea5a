"""Order per key and per queue on every version of RabbitMQ, over all events that return messages to their queue.

Messages return by a nack (a release, or a delivery that is held too long), by the end of a channel, by a hand-over to
another proxy, and with a killed proxy; meanwhile leases run out. A seed draws the order of these events, and the load.
The audit judges the order of each key. The order of the queue itself is read at the end.
"""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.conftest import assert_kept, assert_no_traceback, report
from support.audit import Audit, Verb
from support.audit_client import Client, RoamingClient, message_body
from support.audit_load import Habits, Load
from support.proxy_cluster import ProxyCluster
from support.rabbitmq import RabbitCluster, RabbitNode, RabbitSettings
from support.rabbitmq_releases import RabbitRelease
from support.redis import RedisServer

CONSUMER_TIMEOUT_SECONDS = 2.0
"""Consumer timeout in seconds, so short that held messages are requeued repeatedly, on brokers that don't let the
consumer choose it.
"""
SETTINGS = RabbitSettings(consumer_timeout_seconds=CONSUMER_TIMEOUT_SECONDS, channel_tick_interval_seconds=0.2)
EVENTS = ("close channels", "hand over", "kill", "rest")
ROUNDS_FULL = 60
"""Number of random events; a short run has each kind once, in an order that the seed draws."""
REQUEST_TIMEOUT_SECONDS = 9.0
HABITS = Habits(
    publishers=2,
    consumers=4,
    batch_max=16,
    open_max=200,
    lease_seconds_min=1.0,
    lease_seconds=4.0,
    hold_share=0.0,
    expire_share=0.15,
    mixed_share=0.3,
    keyed_share=0.8,
)
LINE = 60
LONG_SECONDS = 120.0

pytestmark = [pytest.mark.crash, pytest.mark.rabbitmq_versions]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, rabbitmq_release: RabbitRelease) -> Iterator[RabbitNode]:
    with RabbitCluster(tmp_path_factory.mktemp("order"), release=rabbitmq_release, settings=SETTINGS) as cluster:
        yield cluster.nodes[0]


@pytest.fixture
def proxies(node: RabbitNode, redis_server: RedisServer, tmp_path: Path) -> Iterator[ProxyCluster]:
    flags = ("--consumer-timeout-seconds", str(CONSUMER_TIMEOUT_SECONDS))
    with ProxyCluster(tmp_path, *flags, nodes=(node,), redis=redis_server, size=2) as cluster:
        yield cluster


@pytest.fixture
def calm_proxies(rabbitmq: RabbitNode, redis_server: RedisServer, tmp_path: Path) -> Iterator[ProxyCluster]:
    """Proxies that requeue nothing early: messages of other keys, or of none, would overtake one on its way back."""
    with ProxyCluster(tmp_path, nodes=(rabbitmq,), redis=redis_server, size=2) as cluster:
        yield cluster


async def disturb(proxies: ProxyCluster, event: str, chance: random.Random) -> None:
    """Trigger one of the events that return messages to their queue."""
    proxy = chance.choice(proxies.proxies)
    match event:
        case "close channels":
            await asyncio.to_thread(proxies.nodes[0].close_connections, proxies.vhost)
        case "hand over":
            await asyncio.to_thread(proxy.restart)
        case "kill":
            await asyncio.to_thread(proxy.kill)
            await asyncio.to_thread(proxy.start)
        case _:
            await asyncio.sleep(CONSUMER_TIMEOUT_SECONDS)


async def test_the_order_of_keys_is_kept_whatever_returns_messages(
    proxies: ProxyCluster, seed: int, full_run: bool
) -> None:
    audit, chance = Audit(), random.Random(f"order {seed}")
    urls = [proxy.url for proxy in proxies.proxies]
    events = chance.choices(EVENTS, k=ROUNDS_FULL) if full_run else chance.sample(EVENTS, len(EVENTS))
    async with RoamingClient(urls, audit, chance, timeout_seconds=REQUEST_TIMEOUT_SECONDS) as client:
        await client.create(queues=3)
        async with Load(client, f"{seed}", HABITS) as load:
            for event in events:
                await asyncio.sleep(chance.uniform(0.2, 1.5))
                audit.mark(event)
                await disturb(proxies, event, chance)
            await load.drain()
    report(", ".join(events), audit)
    for proxy in proxies.proxies:
        assert_no_traceback(proxy)
    assert_kept(audit, drained=True)


async def test_a_queue_keeps_its_order_whatever_returns_its_messages(
    calm_proxies: ProxyCluster, seed: int, full_run: bool
) -> None:
    """Messages that were leased and returned precede those that were not, and both are in the order of the queue.
    Messages with ordering keys are ordered only within their key.
    """
    chance = random.Random(f"line {seed}")
    for number in range(ROUNDS_FULL // 10 if full_run else 2):
        audit = Audit()
        async with Client(calm_proxies.proxies[number % 2].url, audit, topic=f"line{number}") as client:
            await client.create(queues=1)
            names = [f"{number:03}" for number in range(LINE)]
            await client.publish([(name, message_body(name, 20)) for name in names])
            leased = await client.pop("one", max_messages=LINE // 2, wait_seconds=2.0, seconds=LONG_SECONDS)
            assert leased
            for event in chance.sample(EVENTS[:3], 3):
                await disturb(calm_proxies, event, chance)
            back = chance.sample(leased, len(leased) // 2)
            await client.settle_surely(Verb.RELEASE, back)
            settled = [lease for lease in leased if lease not in back]
            await client.settle_surely(Verb.ACK, settled)
            left = [name for name in names if name not in {lease.message_id for lease in settled}]
            await all_ready(client, len(left))
            got: list[str] = []
            await until_all(client, len(left), got)
            assert got == left
        assert_kept(audit, drained=True)


async def all_ready(client: Client, count: int) -> None:
    """Return when that many messages can be popped: a dropped body is fetched from the broker first."""
    async with asyncio.timeout(60):
        while (state := await client.state())["ready"] < count:  # noqa: ASYNC110 - a state can't be waited for
            await asyncio.sleep(0.1)
        assert state["ready"] == count


async def until_all(client: Client, count: int, got: list[str]) -> None:
    """Pop and ack messages one after the other."""

    async def one() -> None:
        leases = await client.pop("two", max_messages=1, wait_seconds=1.0, seconds=LONG_SECONDS)
        if leases:
            got.extend(lease.message_id for lease in leases)
            await client.settle_surely(Verb.ACK, leases)

    async with asyncio.timeout(60):
        while len(got) < count:
            await one()
