"""One seed of a cluster: several proxies over a RabbitMQ and a Redis in memory."""

import asyncio
import random
from contextlib import ExitStack

from popgate.domain.names import GroupName, Subscription, TopicName, own_layout
from simulator.broker_server import BrokerServer
from simulator.cluster import SimulatedCluster
from simulator.course import GROUP, SECONDS, TOPIC, Ground, Outcome, run_course
from simulator.loop import VirtualLoop
from simulator.nemesis import Nemesis
from simulator.proxy import WALL, Servers
from simulator.redis_line import RedisServer
from simulator.switches import Switches
from support.audit_redrives import REDRIVEN_TOPIC

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
    ground = Ground(seed, chance)
    audit, network = ground.audit, ground.network
    broker = BrokerServer(unsettled_seconds_max=chance.choice((None, UNSETTLED_SECONDS)))
    redis = RedisServer(lambda: loop.time() + WALL, chance)
    servers = Servers(
        loop=loop, chance=chance, network=network, broker=broker, redis=redis, addresses={}, failures=ground.failures
    )
    cluster = SimulatedCluster(servers, chance.choice(PROXIES))
    cleanup.callback(cluster.bury)
    for slot in range(len(cluster.slots)):
        await cluster.start(slot)
    queue_count = chance.choice(QUEUES)
    in_flight_max = chance.choice((None, None, IN_FLIGHT_MAX))
    first = cluster.up()[0]
    await ground.create_topics(first, queues=queue_count, redriven_queues=REDRIVEN_QUEUES, in_flight_max=in_flight_max)
    nemesis = Nemesis(cluster, broker, redis, network, audit, random.Random(f"nemesis {seed}"))
    switches = Switches(TOPIC, GROUP, cluster.up, network, audit, random.Random(f"switches {seed}"))

    async def disturb() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(switches.disturb(SECONDS), name="switches")
            await nemesis.disturb(SECONDS)
        await switches.end()

    async def is_empty() -> bool:
        return all(queue.endswith(":dead") for queue in broker.left())

    await ground.go_through(outcome, cluster.up, proxies=cluster.proxies, disturb=disturb, is_empty=is_empty)
    layouts = (
        own_layout(Subscription(TopicName(topic), GroupName(GROUP)), count)
        for topic, count in ((TOPIC, queue_count), (REDRIVEN_TOPIC, REDRIVEN_QUEUES))
    )
    if unowned := cluster.unowned([queue for one in layouts for queue in one.queues]):
        ground.failures.append(unowned)
    ground.blame_processes(outcome)
    faults = {str(fault): number for fault, number in nemesis.faults.items()}
    outcome.faults = {**faults, "switches of the consume mode": switches.count}
