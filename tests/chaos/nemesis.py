"""Faults of the servers, on a schedule that follows from the seed alone.

This module owns which fault happens to which part, when and for how long; the servers module carries it out. Two
RabbitMQ nodes are never away at a time, and RabbitMQ has no other fault while one is away: a queue on three nodes is
promised to survive the loss of one.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from enum import StrEnum
from typing import NamedTuple

from chaos.servers import NODES, PROXIES, ChaosServers
from support.audit import now


class Fault(StrEnum):
    PROXY_KILL = "proxy SIGKILL"
    PROXY_PAUSE = "proxy SIGSTOP"
    PROXY_RESTART = "proxy SIGTERM"
    CLOCK_AHEAD = "proxy clock an hour ahead"
    CLOCK_BEHIND = "proxy clock an hour behind"
    NODE_KILL = "RabbitMQ node SIGKILL"
    NODE_PAUSE = "RabbitMQ node SIGSTOP"
    AMQP_CUT = "AMQP connections cut"
    POLICY = "RabbitMQ policy that is harmless set or removed"
    POLICY_DROPS = "RabbitMQ policy that drops messages"
    REDIS_KILL = "Redis SIGKILL"
    REDIS_POWER = "Redis power cut"
    REDIS_PAUSE = "Redis SIGSTOP"
    REDIS_RESTART = "Redis SIGTERM"
    REDIS_CUT = "Redis connections cut"


WEIGHTS = {
    Fault.PROXY_KILL: 5,
    Fault.PROXY_PAUSE: 5,
    Fault.PROXY_RESTART: 3,
    Fault.CLOCK_AHEAD: 1,
    Fault.CLOCK_BEHIND: 1,
    Fault.NODE_KILL: 4,
    Fault.NODE_PAUSE: 3,
    Fault.AMQP_CUT: 2,
    Fault.POLICY: 2,
    Fault.POLICY_DROPS: 1,
    Fault.REDIS_KILL: 1,
    Fault.REDIS_POWER: 2,
    Fault.REDIS_PAUSE: 2,
    Fault.REDIS_RESTART: 1,
    Fault.REDIS_CUT: 3,
}
SECONDS = {
    Fault.PROXY_KILL: (0.0, 3.0),
    Fault.PROXY_PAUSE: (1.0, 12.0),
    Fault.CLOCK_AHEAD: (1.0, 12.0),
    Fault.CLOCK_BEHIND: (1.0, 12.0),
    Fault.NODE_KILL: (0.0, 3.0),
    Fault.NODE_PAUSE: (1.0, 10.0),
    Fault.POLICY_DROPS: (4.0, 8.0),
    Fault.REDIS_KILL: (0.0, 2.0),
    Fault.REDIS_POWER: (0.0, 2.0),
    Fault.REDIS_PAUSE: (0.5, 5.0),
}
CUTS_FROM_STORE = {
    Fault.PROXY_PAUSE,
    Fault.PROXY_RESTART,
    *(fault for fault in Fault if fault.startswith("Redis")),
}
"""Faults by which a proxy may lose the store's answer to a hand-out, and take the hand-out back."""
HOUR_SECONDS = 3_600.0
PAUSE_SECONDS = 0.3, 4.0
PROXIES_AWAY_MAX = 2
"""Maximum number of proxies away at a time, so that some proxy can serve requests."""
NODE_SECONDS = 15.0
"""Seconds before the end in which no node is killed: it would take longer to come back."""


class Step(NamedTuple):
    """After `pause_seconds`, `fault` happens to `part`, and lasts for `seconds` if it has a duration."""

    pause_seconds: float
    fault: Fault
    number: int
    seconds: float

    @property
    def part(self) -> str:
        """The part that has one fault at a time."""
        if self.fault.startswith("proxy"):
            return f"proxy {self.number}"
        return "Redis" if self.fault.startswith("Redis") else "RabbitMQ"


def schedule(seed: int) -> Iterator[Step]:
    """Yield an endless schedule, which is the same for the same seed."""
    chance = random.Random(f"nemesis {seed}")
    while True:
        (fault,) = chance.choices([*WEIGHTS], [*WEIGHTS.values()])
        number = chance.randrange(PROXIES if fault.startswith("proxy") else NODES)
        seconds = chance.uniform(*SECONDS.get(fault, (0.0, 0.0)))
        yield Step(round(chance.uniform(*PAUSE_SECONDS), 2), fault, number, round(seconds, 2))


class Nemesis:
    """Carries out the schedule. `faults`: how often each happened. Steps whose part is still away, and the faults in
    `without`, are skipped.
    """

    def __init__(self, servers: ChaosServers, seed: int, *, without: Collection[Fault] = ()) -> None:
        self.faults: Counter[Fault] = Counter()
        self._servers = servers
        self._seed = seed
        self._without = without
        self._away: set[str] = set()

    async def disturb(self, seconds: float) -> None:
        """Inject faults for that long; return when everything works again. Raises: ServerFailedError, TimeoutError."""
        ends_at = now() + seconds
        watching = asyncio.create_task(self._servers.watch(self._is_busy), name="watch the proxies")
        try:
            async with asyncio.TaskGroup() as tasks:
                for step in schedule(self._seed):
                    left = ends_at - now()
                    await asyncio.sleep(min(step.pause_seconds, max(0.0, left)))
                    if step.pause_seconds >= left:
                        break
                    if self._may(step, left):
                        self._away.add(step.part)
                        self.faults[step.fault] += 1
                        tasks.create_task(self._do(step), name=f"{step.fault} {step.number}")
        finally:
            watching.cancel()
            await asyncio.wait({watching})
        if not watching.cancelled():
            watching.result()

    def _is_busy(self, number: int) -> bool:
        return f"proxy {number}" in self._away

    def _may(self, step: Step, left: float) -> bool:
        proxies_away = sum(part.startswith("proxy") for part in self._away)
        too_many = step.part.startswith("proxy") and proxies_away >= PROXIES_AWAY_MAX
        too_late = step.fault is Fault.NODE_KILL and left < NODE_SECONDS
        return not (step.part in self._away or too_many or too_late or step.fault in self._without)

    async def _do(self, step: Step) -> None:
        try:
            with self._servers.audit.is_away() if step.fault in CUTS_FROM_STORE else nullcontext():
                await self._do_to_part(step)
        finally:
            self._away.discard(step.part)

    async def _do_to_part(self, step: Step) -> None:
        servers, number, seconds = self._servers, step.number, step.seconds
        match step.fault:
            case Fault.PROXY_KILL:
                await servers.kill_proxy(number, seconds)
            case Fault.PROXY_PAUSE:
                await servers.pause_proxy(number, seconds)
            case Fault.PROXY_RESTART:
                await servers.restart_proxy(number)
            case Fault.CLOCK_AHEAD:
                await servers.set_clock(number, HOUR_SECONDS, seconds)
            case Fault.CLOCK_BEHIND:
                await servers.set_clock(number, -HOUR_SECONDS, seconds)
            case Fault.NODE_KILL:
                await servers.kill_node(number, seconds)
            case Fault.NODE_PAUSE:
                await servers.pause_node(number, seconds)
            case Fault.AMQP_CUT:
                await servers.cut_amqp(number)
            case Fault.POLICY:
                await servers.operator.change()
            case Fault.POLICY_DROPS:
                await servers.operator.drop(seconds)
            case Fault.REDIS_KILL:
                await servers.kill_redis(seconds)
            case Fault.REDIS_POWER:
                await servers.kill_redis(seconds, power=True)
            case Fault.REDIS_PAUSE:
                await servers.pause_redis(seconds)
            case Fault.REDIS_RESTART:
                await servers.restart_redis()
            case Fault.REDIS_CUT:
                await servers.cut_redis()
