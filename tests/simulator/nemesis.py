"""Faults of the proxies, the servers and the network, as the seed determines.

This module owns which fault happens to which part, when and for how long. A part has one fault at a time.
"""

import asyncio
import random
from collections import Counter
from contextlib import nullcontext
from enum import StrEnum
from typing import NamedTuple

from simulator.broker_server import BrokerServer
from simulator.cluster import SimulatedCluster
from simulator.network import Network
from simulator.proxy import Proxy
from simulator.redis_line import RedisServer
from support.audit import Audit


class Fault(StrEnum):
    KILL = "SIGKILL"
    PAUSE = "SIGSTOP"
    RESTART = "SIGTERM and a start"
    LEAVE = "one proxy less for a while"
    AMQP_CUT = "AMQP connections cut"
    CHANNEL_CLOSE = "channels closed by RabbitMQ"
    REDIS_DOWN = "Redis down"
    REDIS_HANG = "Redis hangs"
    REDIS_CUT = "Redis connections cut"
    SLOW = "a slow network"
    LOSS = "lost requests and answers"
    APART = "two proxies don't reach each other"
    CLOCK = "a clock is an hour off"


WEIGHTS = {
    Fault.KILL: 6,
    Fault.PAUSE: 6,
    Fault.RESTART: 3,
    Fault.LEAVE: 2,
    Fault.AMQP_CUT: 3,
    Fault.CHANNEL_CLOSE: 2,
    Fault.REDIS_DOWN: 2,
    Fault.REDIS_HANG: 2,
    Fault.REDIS_CUT: 3,
    Fault.SLOW: 2,
    Fault.LOSS: 2,
    Fault.APART: 2,
    Fault.CLOCK: 3,
}
SECONDS = {
    Fault.KILL: (0.0, 4.0),
    Fault.PAUSE: (0.5, 20.0),
    Fault.LEAVE: (1.0, 15.0),
    Fault.REDIS_DOWN: (0.2, 5.0),
    Fault.REDIS_HANG: (0.2, 5.0),
    Fault.SLOW: (1.0, 8.0),
    Fault.LOSS: (1.0, 8.0),
    Fault.APART: (1.0, 8.0),
    Fault.CLOCK: (1.0, 20.0),
}
OF_PROXIES = frozenset(
    {Fault.KILL, Fault.PAUSE, Fault.RESTART, Fault.LEAVE, Fault.AMQP_CUT, Fault.REDIS_CUT, Fault.CLOCK}
)
CUTS_FROM_STORE = frozenset(
    {Fault.PAUSE, Fault.RESTART, Fault.LEAVE, Fault.REDIS_DOWN, Fault.REDIS_HANG, Fault.REDIS_CUT, Fault.SLOW}
)
"""Faults by which a proxy may lose the store's answer to a hand-out, and take the hand-out back."""
CLOCK_SECONDS = 3_600.0
FAULTS = 5, 10
AWAY_MAX = 2
"""Maximum number of proxies paused or gone at a time."""
HEARTBEAT_SECONDS = 7.5, 15.0
"""Seconds after which RabbitMQ closes the connections of a hanging process."""


class Step(NamedTuple):
    at: float
    fault: Fault
    slot: int
    seconds: float
    draw: float
    """The remaining random properties of a run."""


def schedule(chance: random.Random, slot_count: int, seconds: float) -> list[Step]:
    """Return the faults within ``seconds``, in order."""
    steps: list[Step] = []
    for _ in range(chance.randint(*FAULTS)):
        (fault,) = chance.choices([*WEIGHTS], [*WEIGHTS.values()])
        lasts = chance.uniform(*SECONDS.get(fault, (0.0, 0.0)))
        at = chance.uniform(0.0, seconds)
        steps.append(Step(at, fault, chance.randrange(slot_count), lasts, chance.random()))
    return sorted(steps)


class Nemesis:
    """Carries out a schedule. ``faults``: how often each happened; a step is skipped if its part is busy."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        broker: BrokerServer,
        redis: RedisServer,
        network: Network,
        audit: Audit,
        chance: random.Random,
    ) -> None:
        self.faults: Counter[Fault] = Counter()
        self._cluster = cluster
        self._broker = broker
        self._redis = redis
        self._network = network
        self._audit = audit
        self._chance = chance
        self._busy: set[str] = set()

    async def disturb(self, seconds: float) -> None:
        """Inject faults for that long; return when everything works again."""
        begun = asyncio.get_running_loop().time()
        steps = schedule(self._chance, len(self._cluster.slots), seconds)
        async with asyncio.TaskGroup() as tasks:
            for step in steps:
                await asyncio.sleep(begun + step.at - asyncio.get_running_loop().time())
                part = self._part(step)
                if part not in self._busy and self._may(step):
                    self._busy.add(part)
                    self.faults[step.fault] += 1
                    tasks.create_task(self._do(step, part), name=step.fault)
            await asyncio.sleep(begun + seconds - asyncio.get_running_loop().time())

    def _part(self, step: Step) -> str:
        if step.fault in OF_PROXIES:
            return f"proxy {step.slot}"
        return {Fault.REDIS_DOWN: "Redis", Fault.REDIS_HANG: "Redis"}.get(step.fault, step.fault)

    def _may(self, step: Step) -> bool:
        away = sum(part.startswith("proxy") for part in self._busy)
        return step.fault not in OF_PROXIES or away < AWAY_MAX

    async def _do(self, step: Step, part: str) -> None:
        proxy = self._cluster.slots[step.slot]
        who = "" if proxy is None or step.fault not in OF_PROXIES else f" of {proxy.me}"
        self._audit.mark(f"{step.fault}{who} for {step.seconds:.1f} s")
        try:
            with self._audit.is_away() if step.fault in CUTS_FROM_STORE else nullcontext():
                if step.fault in OF_PROXIES:
                    if proxy is not None:
                        await self._to_proxy(step, proxy)
                else:
                    await self._to_all(step)
        finally:
            self._busy.discard(part)
            if step.seconds:
                self._audit.mark(f"{step.fault}{who} is over")

    async def _to_proxy(self, step: Step, proxy: Proxy) -> None:
        match step.fault:
            case Fault.KILL:
                proxy.kill(loses=_losing(step.draw))
                await self._start(step)
            case Fault.PAUSE:
                await self._pause(proxy, step.seconds)
            case Fault.RESTART | Fault.LEAVE:
                left = asyncio.get_running_loop().create_future()
                proxy.process.at_death(lambda: left.set_result(None))
                if proxy.process.is_dead:
                    return
                proxy.process.spawn(proxy.leave(), "leave")
                await left
                await self._start(step)
            case Fault.AMQP_CUT:
                proxy.cut_broker(loses=_losing(step.draw))
            case Fault.CLOCK:
                jump = CLOCK_SECONDS if step.draw < 0.5 else -CLOCK_SECONDS
                proxy.clock.jump_wall(jump)
                await asyncio.sleep(step.seconds)
                proxy.clock.jump_wall(-jump)
            case _:
                self._redis.cut(proxy.process)

    async def _start(self, step: Step) -> None:
        self._cluster.slots[step.slot] = None
        await asyncio.sleep(step.seconds)
        await self._cluster.start(step.slot)

    async def _pause(self, proxy: Proxy, seconds: float) -> None:
        """Pause a proxy. RabbitMQ considers a hanging one dead after a while; what it had sent by then has arrived."""
        limit = self._chance.uniform(*HEARTBEAT_SECONDS)
        proxy.process.pause()
        await asyncio.sleep(min(seconds, limit))
        if seconds > limit:
            proxy.cut_broker(loses=0)
            await asyncio.sleep(seconds - limit)
        proxy.process.resume()

    async def _to_all(self, step: Step) -> None:
        network, redis = self._network, self._redis
        match step.fault:
            case Fault.CHANNEL_CLOSE:
                channels = self._broker.open_channels()
                for channel in channels[:: 1 + int(step.draw * 4)]:
                    channel.close("closed by the nemesis", tells=True)
            case Fault.REDIS_DOWN:
                redis.stop()
                await asyncio.sleep(step.seconds)
                redis.start()
            case Fault.REDIS_HANG:
                redis.hang()
                await asyncio.sleep(step.seconds)
                redis.go_on()
            case Fault.SLOW:
                weathers = [network.weather, *(proxy.weather for proxy in self._cluster.proxies.values())]
                for weather in weathers:
                    weather.factor = 1.0 + 30.0 * step.draw
                await asyncio.sleep(step.seconds)
                for weather in weathers:
                    weather.factor = 1.0
            case Fault.LOSS:
                network.loss = 0.05 + 0.4 * step.draw
                await asyncio.sleep(step.seconds)
                network.loss = 0.0
            case _:
                up = self._cluster.up()
                if len(up) > 1:
                    pair = frozenset(proxy.process.name for proxy in self._chance.sample(up, 2))
                    network.apart.add(pair)
                    await asyncio.sleep(step.seconds)
                    network.apart.discard(pair)


def _losing(draw: float) -> int | None:
    """Draw how many of the messages under way are lost: none, all, or some."""
    return 0 if draw < 0.4 else None if draw < 0.7 else 1 + int(draw * 10) % 4
