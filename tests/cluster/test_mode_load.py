"""A group is switched between modes under load from both kinds of client: nothing is lost, and nothing comes twice.

The exceptions are leases that a switch cuts off because its clients were given too little time.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from cluster.conftest import assert_no_traceback
from cluster.mode_load import DONE, GROUP, REFUSED, ModeLoad, Record
from support.proxy_cluster import ProxyCluster
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

SIZE, QUEUES = 3, 4
POP_SECONDS, PULL_SECONDS = 0.4, 1.0
"""Seconds that each mode lasts. Pull clients first need an assignment of queues."""
CONVERGED_SECONDS = 40.0
SETTLED_SECONDS = 60.0


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, rabbitmq: RabbitNode, redis_server: RedisServer
) -> Iterator[ProxyCluster]:
    folder: Path = tmp_path_factory.mktemp("mode-load")
    with ProxyCluster(folder, nodes=(rabbitmq,), redis=redis_server, size=SIZE) as cluster:
        yield cluster
        for proxy in cluster.proxies:
            assert_no_traceback(proxy)


class Switch:
    """An admin that sends each request to the next proxy."""

    def __init__(self, cluster: ProxyCluster, topic: str) -> None:
        self._urls = [proxy.url for proxy in cluster.proxies]
        self._path = f"/v1/admin/topics/{topic}"
        self._mode_path = f"{self._path}/groups/{GROUP}/consume-mode"
        self._turn = 0
        self.seconds: list[float] = []
        """Duration of each switch in seconds."""

    async def create(self) -> None:
        async with self._client() as client:
            assert (await client.put(self._path, json={"queues": QUEUES})).is_success
            assert (await client.put(f"{self._path}/groups/{GROUP}", json={"max_deliveries": None})).is_success

    async def to(self, mode: str, drain_seconds: float) -> None:
        """Switch to a mode; return when all proxies serve it."""
        began = time.monotonic()
        async with self._client() as client:
            body = {"mode": mode, "drain_timeout_seconds": drain_seconds}
            answer = await client.put(self._mode_path, json=body)
            assert answer.is_success, answer.text
        while True:
            async with self._client() as client:
                found = (await client.get(self._mode_path)).json()
            if found["mode"] == mode and found["converged"]:
                break
            assert time.monotonic() - began < CONVERGED_SECONDS, found
            await asyncio.sleep(0.05)
        self.seconds.append(time.monotonic() - began)

    @asynccontextmanager
    async def _client(self) -> AsyncGenerator[httpx.AsyncClient]:
        self._turn += 1
        url = self._urls[self._turn % len(self._urls)]
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False, verify=False) as client:
            yield client


async def switched_under_load(
    cluster: ProxyCluster, topic: str, seed: int, rounds: int, drain_seconds: Callable[[], float], work_seconds: float
) -> tuple[Record, Switch]:
    """Switch between the modes ``rounds`` times each way."""
    switch = Switch(cluster, topic)
    await switch.create()
    load = ModeLoad(
        [proxy.url for proxy in cluster.proxies], topic, random.Random(f"{seed} {topic}"), work_seconds=work_seconds
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run())
        for _ in range(rounds):
            await asyncio.sleep(POP_SECONDS)
            await switch.to("pull", drain_seconds())
            await asyncio.sleep(PULL_SECONDS)
            await switch.to("pop", drain_seconds())
        await load.finish(SETTLED_SECONDS)
    return load.record, switch


def told(what: str, record: Record, switch: Switch) -> str:
    seconds = sorted(switch.seconds)
    return (
        f"{what}: {len(seconds)} switches, {len(record.promised)} messages ({record.done_by('popper')} popped, "
        f"{record.done_by('puller')} pulled), {len(record.repeated())} more than once; a switch took "
        f"{seconds[len(seconds) // 2]:.2f} s, at most {seconds[-1]:.2f} s"
    )


async def test_no_message_is_lost_or_comes_twice_where_switches_drain(
    cluster: ProxyCluster, seed: int, full_run: bool, record_property: Callable[[str, object], None]
) -> None:
    rounds = 20 if full_run else 3
    record, switch = await switched_under_load(cluster, "drained", seed, rounds, lambda: 30.0, 0.2)
    record_property("told", told("switches that drain", record, switch))
    assert record.unsettled() == set(), "nothing is lost"
    assert record.settled_twice() == []
    assert record.repeated() == {}, "nothing comes twice"
    for kind in ("popper", "puller"):
        assert record.done_by(kind) > len(record.promised) / 20, f"the {kind}s did their part"


async def test_only_what_a_switch_cuts_off_comes_twice_and_who_had_it_is_told(
    cluster: ProxyCluster, seed: int, full_run: bool, record_property: Callable[[str, object], None]
) -> None:
    rounds = 20 if full_run else 2
    chance = random.Random(seed)
    times = (0.0, 0.0, 0.05, 0.2)
    record, switch = await switched_under_load(cluster, "cut", seed, rounds, lambda: chance.choice(times), 0.5)
    record_property("told", told("switches that cut off", record, switch))
    assert record.unsettled() == set(), "nothing is lost"
    assert record.settled_twice() == []
    repeated = record.repeated()
    assert repeated, "else nothing was cut off"
    for body, hand_outs in repeated.items():
        for one in hand_outs[:-1]:
            assert one.answers, f"{body}: {hand_outs}"
            assert set(one.answers) <= REFUSED, f"{body}: {hand_outs}"
        assert set(hand_outs[-1].answers) <= DONE, f"{body}: {hand_outs}"
