"""`make simulate`: seeds, one after the other, each a cluster under load and under a nemesis, then the audit.

A seed says everything: two runs of it do the same, callback by callback (``trace``). Who is interested in one runs it
with ``--first SEED --seeds 1 --verbose``.
"""

import argparse
import asyncio
import logging
import multiprocessing
import os
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from popgate.domain.names import GroupName, Subscription, TopicName, own_layout
from popgate.domain.topics import Policy
from simulator.broker_server import BrokerServer
from simulator.client import SimulatedClient
from simulator.cluster import SimulatedCluster
from simulator.face import Face
from simulator.loop import DeadlockError, VirtualLoop
from simulator.nemesis import Nemesis
from simulator.network import Network
from simulator.proxy import WALL, Servers
from simulator.redis_line import RedisServer
from simulator.switches import Switches
from simulator.wires import Weather
from support.audit import Audit
from support.audit_load import Habits, Load
from support.audit_rest import note_counts
from support.audit_rules import Kind, explain, judge

SEED_MAX = 2**32
TOPIC, GROUP = "audit", "default"
PROXIES = 3, 3, 3, 4
QUEUES = 6, 6, 8
MAX_DELIVERIES = 3
IN_FLIGHT_MAX = 20
"""In some runs."""
SECONDS = 45.0
"""How long parts are disturbed, in virtual time."""
DRAIN_SECONDS_MAX = 90.0
"""From the end of the faults on; nothing is published any more."""
GIVE_UP_SECONDS, MISSING_SECONDS, POLL_SECONDS = 120.0, 20.0, 1.0
RUN_OUT_SECONDS = 12.0
"""Longer than any lease of the load."""
LOOKS_MAX, LOOK_SECONDS = 40, 1.0
TOLD_EVERY = 100
UNSETTLED_SECONDS = 20.0
"""RabbitMQ's consumer_timeout, in some runs."""
HABITS = Habits.with_everything(
    publishers=2,
    consumers=2,
    batch_max=24,
    body_bytes_max=200,
    open_max=200,
    rest_seconds_max=8.0,
    lease_seconds_min=2.0,
    lease_seconds=6.0,
    wait_seconds=6.0,
    wait_seconds_max=8.0,
    hold_share=0.0,
    expire_share=0.06,
    extend_share=0.08,
    attempt_share=0.25,
    mixed_share=0.2,
    reject_share=0.1,
)


@dataclass(kw_only=True)
class Outcome:
    """What became of one seed. ``complaint`` is empty where every promise was kept."""

    seed: int
    trace: int = 0
    steps: int = 0
    virtual_seconds: float = 0.0
    figures: dict[str, int] = field(default_factory=dict[str, int])
    faults: dict[str, int] = field(default_factory=dict[str, int])
    kinds: set[Kind] = field(default_factory=set[Kind])
    """The rules that were broken."""
    complaint: str = ""

    def __str__(self) -> str:
        return f"seed {self.seed} FAILED (make simulate ARGS='--first {self.seed} --seeds 1'):\n{self.complaint}"


def simulate(seed: int) -> Outcome:
    """Run one seed."""
    outcome = Outcome(seed=seed)
    loop = VirtualLoop()
    cleanup: list[SimulatedCluster] = []
    with _all_chance_from(seed):
        try:
            loop.run(_Run(seed, loop, outcome, cleanup).run())
        except DeadlockError as error:
            outcome.complaint = f"stuck: {error}"
        except TimeoutError as error:
            outcome.complaint = f"stuck: {error}"
        finally:
            for cluster in cleanup:
                cluster.bury()
            loop.close()
    outcome.trace, outcome.steps, outcome.virtual_seconds = loop.trace, loop.steps, loop.time()
    if loop.errors and not outcome.complaint:
        outcome.complaint = "; ".join(loop.errors[:3])
    return outcome


@contextmanager
def _all_chance_from(seed: int) -> Generator[None]:
    """Whatever popgate draws, it draws from the seed."""
    chance = random.Random(f"secrets {seed}")
    random.seed(f"popgate {seed}")
    with (
        patch.object(secrets, "token_hex", lambda size=32: chance.randbytes(size).hex()),
        patch.object(secrets, "token_bytes", lambda size=32: chance.randbytes(size)),
    ):
        yield


@contextmanager
def quietly() -> Generator[None]:
    """Without popgate's log: it says much of what is done to it here."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


class _Run:
    def __init__(self, seed: int, loop: VirtualLoop, outcome: Outcome, cleanup: list[SimulatedCluster]) -> None:
        self._seed = seed
        self._loop = loop
        self._outcome = outcome
        self._cleanup = cleanup
        self._chance = random.Random(f"simulation {seed}")
        self._failures: list[str] = []

    async def run(self) -> None:
        chance = self._chance
        audit = Audit()
        audit.max_deliveries = MAX_DELIVERIES
        network = Network(random.Random(f"network {self._seed}"), Weather(chance), self._failures)
        broker = BrokerServer(unsettled_seconds_max=chance.choice((None, UNSETTLED_SECONDS)))
        redis = RedisServer(lambda: self._loop.time() + WALL, chance)
        servers = Servers(
            loop=self._loop,
            chance=chance,
            network=network,
            broker=broker,
            redis=redis,
            addresses={},
            failures=self._failures,
        )
        cluster = SimulatedCluster(servers, chance.choice(PROXIES))
        self._cleanup.append(cluster)
        for slot in range(len(cluster.slots)):
            await cluster.start(slot)
        queue_count = chance.choice(QUEUES)
        await self._create(cluster, queue_count)
        face = Face(TOPIC, GROUP, audit, network, cluster.proxies)
        client = SimulatedClient(audit, face, network, cluster.up, chance)
        nemesis = Nemesis(cluster, broker, redis, network, audit, random.Random(f"nemesis {self._seed}"))
        switches = Switches(TOPIC, GROUP, cluster.up, network, audit, random.Random(f"switches {self._seed}"))
        stuck = ""
        try:
            async with Load(client, f"{self._seed}", HABITS) as load:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(switches.disturb(SECONDS), name="switches")
                    await nemesis.disturb(SECONDS)
                await switches.end()
                audit.heal(DRAIN_SECONDS_MAX)
                await note_counts(load, run_out_seconds=RUN_OUT_SECONDS, looks_max=LOOKS_MAX, look_seconds=LOOK_SECONDS)
                await load.drain(
                    timeout_seconds=GIVE_UP_SECONDS, missing_seconds=MISSING_SECONDS, poll_seconds=POLL_SECONDS
                )
                audit.drained()
                await _until_empty(broker)
                await client.note_dead_letters(looks_max=LOOKS_MAX, look_seconds=LOOK_SECONDS)
                await client.pop("who asks last")  # long polls were sent long ago: what expired since may be gone
        except* TimeoutError as error:
            stuck = f"stuck: {error.exceptions[0]}\n"
        violations = judge(audit, drained=not stuck)
        layout = own_layout(Subscription(TopicName(TOPIC), GroupName(GROUP)), queue_count)
        told = [f"{one}\n" for one in (*self._failures, cluster.unowned(list(layout.queues))) if one]
        self._outcome.figures = audit.figures()
        faults = {str(fault): number for fault, number in nemesis.faults.items()}
        self._outcome.faults = {**faults, "switches of the consume mode": switches.count}
        self._outcome.kinds = {violation.kind for violation in violations}
        self._outcome.complaint = stuck + "".join(told) + (explain(violations) if violations else "")

    async def _create(self, cluster: SimulatedCluster, queue_count: int) -> None:
        created = self._loop.create_future()
        proxy = cluster.up()[0]
        in_flight_max = self._chance.choice((None, None, IN_FLIGHT_MAX))

        async def create() -> None:
            await proxy.engine.topics.put_topic(TOPIC, queues=queue_count, adopt=None)
            policy = Policy(max_deliveries=MAX_DELIVERIES, max_in_flight=in_flight_max)
            await proxy.engine.topics.put_group(TOPIC, GROUP, policy)
            created.set_result(None)

        proxy.process.spawn(create(), "create")
        await created


async def _until_empty(broker: BrokerServer) -> None:
    """Return when RabbitMQ has nothing left but dead letters, or after a while."""
    for _ in range(LOOKS_MAX):
        if all(queue.endswith(":dead") for queue in broker.left()):
            return
        await asyncio.sleep(LOOK_SECONDS)


def _simulated(seeds: range, worker_count: int) -> Iterator[Outcome]:
    """The outcomes, in order."""
    if worker_count < 2:
        yield from map(simulate, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(worker_count, initializer=logging.disable) as workers:
        yield from workers.imap(simulate, seeds, chunksize=4)


def main(flags: Sequence[str]) -> int:
    """0 where every promise was kept in every run."""
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="how many")
    parser.add_argument("--first", type=int, default=None, help="the first of them")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that share the seeds")
    parser.add_argument("--verbose", action="store_true", help="say more of each")
    arguments = parser.parse_args(flags)
    first = secrets.randbelow(SEED_MAX) if arguments.first is None else arguments.first
    print(f"simulation: {arguments.seeds} seeds from {first}", flush=True)
    begun = time.monotonic()
    failed = 0
    total: Counter[str] = Counter()
    for outcome in _simulated(range(first, first + arguments.seeds), min(arguments.workers, arguments.seeds)):
        seed = outcome.seed
        total.update(outcome.figures)
        total.update(outcome.faults)
        if arguments.verbose:
            print(f"seed {seed}: trace {outcome.trace:08x}, {outcome.steps} steps, {outcome.virtual_seconds:.1f} s")
            print(outcome.figures, outcome.faults)
        if outcome.complaint:
            failed += 1
            print(outcome, flush=True)
        if (seed - first) % TOLD_EVERY == TOLD_EVERY - 1:
            print(f"{seed - first + 1} seeds in {time.monotonic() - begun:.0f} s, {failed} failed", flush=True)
    seconds = time.monotonic() - begun
    print(f"{arguments.seeds} seeds in {seconds:.1f} s, {arguments.seeds * 60 / seconds:.0f} a minute, {failed} failed")
    print(dict(total))
    return 1 if failed else 0


if __name__ == "__main__":
    with quietly():
        sys.exit(main(sys.argv[1:]))
