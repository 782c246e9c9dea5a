"""One seed of a cluster: several proxies over a RabbitMQ and a Redis in memory."""

import asyncio
import random
from contextlib import ExitStack
from functools import partial

from popgate.domain.names import GroupName, Subscription, TopicName, own_layout
from popgate.domain.topics import Policy
from simulator.broker_server import BrokerServer
from simulator.client import SimulatedClient
from simulator.cluster import SimulatedCluster
from simulator.course import (
    GROUP,
    LOOK_SECONDS,
    LOOKS_MAX,
    MAX_DELIVERIES,
    SECONDS,
    TOPIC,
    Outcome,
    go_through,
    run_course,
)
from simulator.face import Face
from simulator.loop import VirtualLoop
from simulator.nemesis import Nemesis
from simulator.network import Network
from simulator.proxy import WALL, Servers
from simulator.redis_line import RedisServer
from simulator.switches import Switches
from simulator.wires import Weather
from support.audit import Audit
from support.audit_redrives import REDRIVEN_TOPIC, RedrivenAudit

PROXIES = 3, 3, 3, 4
QUEUES = 6, 6, 8
REDRIVEN_QUEUES = 2
IN_FLIGHT_MAX = 20
"""Maximum messages in flight, in some runs."""
UNSETTLED_SECONDS = 20.0
"""RabbitMQ's consumer_timeout in seconds, in some runs."""


def simulate(seed: int) -> Outcome:
    """Run one seed."""
    return run_course("cluster", seed, _course)


async def _course(loop: VirtualLoop, outcome: Outcome, cleanup: ExitStack) -> None:
    seed = outcome.seed
    chance = random.Random(f"simulation {seed}")
    failures: list[str] = []
    audit = Audit()
    audit.max_deliveries = MAX_DELIVERIES
    network = Network(random.Random(f"network {seed}"), Weather(chance), failures)
    broker = BrokerServer(unsettled_seconds_max=chance.choice((None, UNSETTLED_SECONDS)))
    redis = RedisServer(lambda: loop.time() + WALL, chance)
    servers = Servers(
        loop=loop, chance=chance, network=network, broker=broker, redis=redis, addresses={}, failures=failures
    )
    cluster = SimulatedCluster(servers, chance.choice(PROXIES))
    cleanup.callback(cluster.bury)
    for slot in range(len(cluster.slots)):
        await cluster.start(slot)
    queue_count = chance.choice(QUEUES)
    await _create(loop, cluster, queue_count, in_flight_max=chance.choice((None, None, IN_FLIGHT_MAX)))
    face = Face(TOPIC, GROUP, audit, network, cluster.proxies)
    client = SimulatedClient(audit, face, network, cluster.up, chance)
    nemesis = Nemesis(cluster, broker, redis, network, audit, random.Random(f"nemesis {seed}"))
    switches = Switches(TOPIC, GROUP, cluster.up, network, audit, random.Random(f"switches {seed}"))

    async def disturb() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(switches.disturb(SECONDS), name="switches")
            await nemesis.disturb(SECONDS)
        await switches.end()

    redriven = RedrivenAudit(audit)
    redriven_face = Face(REDRIVEN_TOPIC, GROUP, redriven, network, cluster.proxies)
    taker = SimulatedClient(redriven, redriven_face, network, cluster.up, random.Random(f"redriven {seed}"))
    await go_through(client, taker, outcome, disturb=disturb, empty=partial(_until_empty, broker))
    layouts = (
        own_layout(Subscription(TopicName(topic), GroupName(GROUP)), count)
        for topic, count in ((TOPIC, queue_count), (REDRIVEN_TOPIC, REDRIVEN_QUEUES))
    )
    told = [
        f"{one}\n" for one in (*failures, cluster.unowned([queue for one in layouts for queue in one.queues])) if one
    ]
    outcome.complaint = "".join(told) + outcome.complaint
    faults = {str(fault): number for fault, number in nemesis.faults.items()}
    outcome.faults = {**faults, "switches of the consume mode": switches.count}


async def _create(loop: VirtualLoop, cluster: SimulatedCluster, queue_count: int, *, in_flight_max: int | None) -> None:
    created = loop.create_future()
    proxy = cluster.up()[0]

    async def create() -> None:
        await proxy.engine.topics.put_topic(TOPIC, queues=queue_count, adopt=None)
        policy = Policy(max_deliveries=MAX_DELIVERIES, max_in_flight=in_flight_max)
        await proxy.engine.topics.put_group(TOPIC, GROUP, policy)
        await proxy.engine.topics.put_topic(REDRIVEN_TOPIC, queues=REDRIVEN_QUEUES, adopt=None)
        await proxy.engine.topics.put_group(REDRIVEN_TOPIC, GROUP, Policy(max_deliveries=None))
        created.set_result(None)

    proxy.process.spawn(create(), "create")
    await created


async def _until_empty(broker: BrokerServer) -> None:
    """Return when RabbitMQ has nothing left but dead letters, or after a time limit."""
    for _ in range(LOOKS_MAX):
        if all(queue.endswith(":dead") for queue in broker.left()):
            return
        await asyncio.sleep(LOOK_SECONDS)
