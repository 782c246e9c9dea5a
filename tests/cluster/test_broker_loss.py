"""Faults of RabbitMQ under a living proxy and under load: no promise is broken, and no restart is needed."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.conftest import (
    OWN_VHOST,
    ack_those_alive,
    assert_kept,
    assert_no_traceback,
    report,
)
from support.audit import Audit, Lease, Verb
from support.audit_client import Client, until
from support.audit_load import Habits, Load
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode

GROW_COUNT = 150
HELD_MIN = 16
LONG_SECONDS = 120.0
"""Seconds; longer than any test, so a lease of that length is live to its end."""
CUTS, CUTS_FULL, ABSENCES_FULL = 2, 30, 5
CONSUMER_TIMEOUT_SECONDS = 2
WATERMARK_NORMAL, WATERMARK_ALARM = ("absolute", "1GB"), ("0.000001",)

pytestmark = pytest.mark.crash


@asynccontextmanager
async def proxy_on(node: RabbitNode, folder: Path, audit: Audit) -> AsyncGenerator[Client]:
    """Yield a client of a proxy on the node, with its topic. Afterwards every promise must have been kept."""
    with ProxyProcess(folder / "proxy", "--amqp-url", node.amqp_url(OWN_VHOST)) as proxy:
        async with Client(proxy.url, audit) as client:
            await client.create()
            await asyncio.to_thread(node.sync)  # otherwise a killed node does not know the queues
            yield client
        assert proxy.is_running()
        assert_no_traceback(proxy)


async def hold(load: Load) -> None:
    await until(lambda: len(load.held) >= HELD_MIN, timeout_seconds=30, what="leases to be held")


async def refused(client: Client, count: int) -> None:
    """Return when that many publishes were answered "try again later"."""
    await until(
        lambda: client.refusals.get("broker_unavailable", 0) >= count, timeout_seconds=30, what="publishes to get 503"
    )


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_promises_outlive_a_broker_that_goes_away_and_comes_back(
    own_node: RabbitNode, tmp_path: Path, seed: int, full_run: bool, how: str
) -> None:
    """Settlements continue without the broker; afterwards leases still exclude others, and their receipts are valid."""
    audit = Audit()
    habits = Habits(held_seconds=LONG_SECONDS, lease_seconds=LONG_SECONDS / 4)
    async with proxy_on(own_node, tmp_path, audit) as client:
        async with Load(client, f"{seed}", habits) as load:
            for _ in range(ABSENCES_FULL if full_run else 1):
                await load.grow(GROW_COUNT)
                await hold(load)
                client.refusals.clear()
                audit.mark(f"{how} the broker")
                await asyncio.to_thread(own_node.stop if how == "stop" else own_node.kill)
                audit.mark("the broker is down")
                held = load.take_held()
                assert await ack_those_alive(client, held[::2]) == len(held[::2])
                await refused(client, 1)
                await asyncio.to_thread(own_node.start)
                audit.mark("the broker is up")
                await load.grow(GROW_COUNT)
                assert await ack_those_alive(client, held[1::2]) == len(held[1::2])
                assert_kept(audit)
            await load.drain()
        report(f"{how}, seed {seed}", audit, refusals=client.refusals)
    assert_kept(audit, drained=True)


async def test_promises_outlive_cut_connections(
    own_node: RabbitNode, tmp_path: Path, seed: int, full_run: bool
) -> None:
    audit = Audit()
    async with proxy_on(own_node, tmp_path, audit) as client:
        async with Load(client, f"{seed}", Habits(held_seconds=LONG_SECONDS)) as load:
            for number in range(CUTS_FULL if full_run else CUTS):
                await load.grow(GROW_COUNT)
                await hold(load)
                held = load.take_held()
                audit.mark(f"cut {number + 1}")
                await asyncio.to_thread(own_node.close_connections, OWN_VHOST)
                await load.grow(GROW_COUNT)
                assert await ack_those_alive(client, held) == len(held)
                assert_kept(audit)
            await load.drain()
        report(f"seed {seed}", audit, refusals=client.refusals)
    assert_kept(audit, drained=True)


@pytest.mark.rabbitmq_versions
async def test_promises_outlive_channels_that_the_broker_closes_for_slow_consumers(
    own_node: RabbitNode, tmp_path: Path, seed: int
) -> None:
    """`consumer_timeout` repeatedly closes a channel during a lease that lasts longer; not on 4.3, where popgate
    requests a longer timeout.
    """
    closes = own_node.release.version < (4, 3)
    audit = Audit()
    set_consumer_timeout(own_node, f"{CONSUMER_TIMEOUT_SECONDS * 1000}", tick="500")
    try:
        async with proxy_on(own_node, tmp_path, audit) as client:
            log = tmp_path / "proxy" / "output.log"
            async with Load(client, f"{seed}", Habits(held_seconds=LONG_SECONDS)) as load:
                await load.grow(GROW_COUNT)
                await hold(load)
                held = load.take_held()
                if closes:
                    await until(
                        lambda: log.read_text().count("a channel was lost") >= 2 * 3,
                        timeout_seconds=60,
                        what="channels to be closed",
                    )
                else:
                    await asyncio.sleep(3 * CONSUMER_TIMEOUT_SECONDS)
                audit.mark("channels were closed")
                await load.grow(GROW_COUNT)
                assert await ack_those_alive(client, held) == len(held)
                await load.drain()
            closed = log.read_text().count("a channel was lost")
            report(f"seed {seed}", audit, closed=closed)
            assert (closed > 0) == closes
    finally:
        set_consumer_timeout(own_node, "1800000", tick="60000")
    assert_kept(audit, drained=True)


def set_consumer_timeout(node: RabbitNode, milliseconds: str, *, tick: str) -> None:
    """Set the timeout for channels that are opened from now on."""
    node.ctl(
        "eval",
        f"application:set_env(rabbit, consumer_timeout, {milliseconds}), "
        f"application:set_env(rabbit, channel_tick_interval, {tick}).",
    )


async def test_a_deleted_queue_is_404_until_the_group_is_put_again(own_node: RabbitNode, tmp_path: Path) -> None:
    audit = Audit()
    async with proxy_on(own_node, tmp_path, audit) as client:
        await client.create(queues=3)
        await client.publish([(f"m{number}", f"m{number} ") for number in range(30)])
        leases: list[Lease] = []
        while len(leases) < 30:
            leases += await client.pop("c", max_messages=30, wait_seconds=10) or []
        group = "/v1/topics/audit/groups/default"
        parked = asyncio.create_task(client.http.post(f"{group}/pop", json={"wait_seconds": 25}))
        other = await client.http.post(f"{group}/pop", json={"wait_seconds": 0})
        assert other.is_success
        for number in range(3):
            await asyncio.to_thread(own_node.api, "DELETE", "queues", OWN_VHOST, f"popgate:audit:default:{number}")
        async with asyncio.timeout(10):
            assert (await parked).status_code == 404
        for path in ("pop", "pop"):
            answer = await client.http.post(f"{group}/{path}", json={"wait_seconds": 1})
            assert (answer.status_code, answer.json()["code"]) == (404, "topic_not_found")
        refused = await client.http.post("/v1/topics/audit/messages", json={"messages": [{"body": "nobody"}]})
        assert [result["status"] for result in refused.json()["results"]] == ["failed"]
        assert (await client.http.get("/healthz")).is_success
        await client.declare_again()
        again = asyncio.create_task(client.pop("c", wait_seconds=20))
        await client.publish([("after", "after ")])
        popped = await again
        assert popped is not None
        assert [lease.message_id for lease in popped] == ["after"]
        assert await client.settle(Verb.ACK, popped) == ["acked"]
        handles = [lease.receipt_handle for lease in leases]
        late = await client.http.post(f"{group}/ack", json={"receipt_handles": handles})
        statuses = {result["status"] for result in late.json()["results"]}
        assert statuses == {"expired"}, "a queue takes its messages' leases along"
    assert_kept(audit)


async def test_a_memory_alarm_stops_publishing_and_nothing_else(
    own_node: RabbitNode, tmp_path: Path, seed: int
) -> None:
    audit = Audit()
    async with proxy_on(own_node, tmp_path, audit) as client:
        async with Load(client, f"{seed}", Habits(consumers=0, open_max=2_500), name="early "):
            await until(lambda: audit.open_count >= 2_500, timeout_seconds=60, what="a backlog")
        try:
            own_node.ctl("set_vm_memory_high_watermark", *WATERMARK_ALARM)
            audit.mark("memory alarm")
            async with Load(client, f"{seed}", Habits(open_max=6_000)) as load:
                await refused(client, 3)
                published, few = audit.published_count, audit.open_count - 1_000
                await until(lambda: audit.open_count <= few, timeout_seconds=60, what="pops and acks to go on")
                assert audit.published_count == published
                answer = await client.http.post("/v1/topics/audit/messages", json={"messages": [{"body": ""}]})
                assert (answer.status_code, answer.json()["code"]) == (503, "broker_unavailable")
                assert int(answer.headers["retry-after"]) >= 1
                own_node.ctl("set_vm_memory_high_watermark", *WATERMARK_NORMAL)
                audit.mark("alarm over")
                await load.grow(GROW_COUNT)
                await load.drain()
        finally:
            own_node.ctl("set_vm_memory_high_watermark", *WATERMARK_NORMAL)
        report(f"seed {seed}", audit, refusals=client.refusals)
    assert_kept(audit, drained=True)
