"""Injects faults into the clients of a lock, its slots and the broker's nodes. The seed determines the schedule.

This module decides when a fault happens, and which worker it affects. It never disturbs more than half of the workers
at the same time, so that the other workers can show whether the lock still excludes.
"""

import asyncio
import random
import time
from enum import StrEnum

from popgate.domain.lock_operations import AWAY, TAKEN
from popgate.domain.locks import LockKind
from popgate.prover.crew import Crew
from popgate.prover.nodes import Nodes, Taking


class Fault(StrEnum):
    KILL = "kill"
    """A worker is killed with SIGKILL."""
    STOP = "stop"
    """A worker is paused (SIGSTOP), in most cases for so long that the broker closes its connection because of missing
    heartbeats."""
    CUT = "cut"
    """A worker's connection to the broker or proxy is aborted."""
    ADMIN = "admin"
    """Slots of the lock are removed and added again."""
    NODE = "node"
    """A node of the broker is killed and restarted. Nodes that can (``Taking``) also take tokens from holders."""


PAUSE_SECONDS = 0.2, 1.2
ADMIN_PAUSE_SECONDS = 0.05, 1.5
FEWER_SECONDS = 0.02, 0.4
ADMIN_SECONDS_MAX = 30.0
HOLDER_SHARE = 0.7
"""Probability that a victim is chosen only among the workers that hold the lock, if any. Otherwise it is chosen among
all workers."""
STALLS = 3.2
"""Minimum duration of a long stop of a worker, in heartbeat intervals or, over HTTP, in ``STALL_SECONDS``. Over HTTP,
the stop is then longer than the lock's time to live."""
LONG_STOP_SHARE = 0.7
SHORT_STOP_SECONDS = 0.1, 1.0
NODE_LOST = "node killed"
NODE_LOST_SECONDS = 3.0
"""Maximum seconds until the other nodes of the cluster have noticed that a node was killed."""
NODE_DOWN_SECONDS = 1.0, 5.0
NODE_BACK_SECONDS = 5.0
TAKE_PAUSE_SECONDS = 0.5, 3.0
"""Seconds between two times at which tokens are taken. They excuse so much that only every other round has them."""
TAKEN_SECONDS = 7.0
"""Maximum seconds until a holder knows that its token was taken: it renews the lock within half a second, and waits 5 s
for the broker's answer."""
SETTLED_SECONDS = 1.0
"""Seconds to wait before a node is killed, and after it was restarted. RabbitMQ 3.10 permanently loses a quorum queue
if its node is killed within half a second of its declaration."""
WEIGHTS = {Fault.KILL: 3, Fault.STOP: 2, Fault.CUT: 4}


class Nemesis:
    def __init__(
        self,
        crew: Crew,
        *,
        kind: LockKind,
        slots: int,
        faults: frozenset[Fault],
        stall_seconds: float,
        nodes: Nodes | None,
        chance: random.Random,
    ) -> None:
        self._crew = crew
        self._kind = kind
        self._slots = slots
        self._faults = faults
        self._stall_seconds = stall_seconds
        self._nodes = nodes
        self._chance = chance
        self._administering = asyncio.Lock()
        self._takes = False

    async def disturb(self, seconds: float, stopping: asyncio.Event) -> None:
        """Inject faults for ``seconds``, or until ``stopping`` is set. Return when all workers and nodes work again.

        Raises: ProverFailed.
        """
        ending = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._disturb_workers(ending, tasks), name="disturb workers")
            if Fault.ADMIN in self._faults and self._kind is not LockKind.MUTEX:
                tasks.create_task(self._change_slots(ending), name="change slots")
            if Fault.NODE in self._faults and self._nodes is not None:
                tasks.create_task(self._lose_node(self._nodes, seconds, ending), name="lose a node")
            self._takes = not self._takes
            nodes: object = self._nodes
            if self._takes and Fault.NODE in self._faults and isinstance(nodes, Taking):
                tasks.create_task(self._take_tokens(nodes, ending), name="take tokens")
            await _wait(stopping, seconds)
            ending.set()

    async def _disturb_workers(self, ending: asyncio.Event, tasks: asyncio.TaskGroup) -> None:
        faults = [fault for fault in WEIGHTS if fault in self._faults]
        while faults and not await _wait(ending, self._chance.uniform(*PAUSE_SECONDS)):
            place = self._victim()
            if place is None:
                continue
            (fault,) = self._chance.choices(faults, [WEIGHTS[fault] for fault in faults])
            self._crew.busy.add(place)
            tasks.create_task(self._disturb(place, fault), name=f"{fault} at {place}")

    def _victim(self) -> int | None:
        """Return the place of a worker that is not being disturbed, preferably of one that holds the lock. Return None
        while half of the workers are being disturbed."""
        crew = self._crew
        if len(crew.busy) >= max(1, len(crew.workers) // 2):
            return None
        free = [place for place in range(len(crew.workers)) if place not in crew.busy]
        holders = [place for place in free if crew.workers[place].name in crew.record.holders]
        return self._chance.choice(holders if holders and self._chance.random() < HOLDER_SHARE else free)

    async def _disturb(self, place: int, fault: Fault) -> None:
        crew = self._crew
        try:
            match fault:
                case Fault.KILL:
                    await crew.replace(place)
                    crew.workers[place].tell("work")
                case Fault.STOP:
                    await crew.stop(place, self._stop_seconds())
                case _:
                    crew.cut(place)
        finally:
            crew.busy.discard(place)

    def _stop_seconds(self) -> float:
        if self._chance.random() < LONG_STOP_SHARE:
            return STALLS * self._stall_seconds + self._chance.uniform(0, 1)
        return self._chance.uniform(*SHORT_STOP_SECONDS)

    async def _change_slots(self, ending: asyncio.Event) -> None:
        """Change the number of slots repeatedly, at random. Keep fewer slots only briefly, because without slots no
        worker would hold a lock."""
        most = self._slots + 1 if self._kind is LockKind.SEMAPHORE else 1
        pause, number = ADMIN_PAUSE_SECONDS, self._slots
        while not await _wait(ending, self._chance.uniform(*pause)):
            number = self._chance.randint(0, most) if number >= self._slots else self._slots
            pause = ADMIN_PAUSE_SECONDS if number >= self._slots else FEWER_SECONDS
            async with self._administering:
                try:
                    await self._crew.administer("set_slots", ADMIN_SECONDS_MAX, number=number)
                except TimeoutError:  # in the history, this change has no answer
                    return
            self._crew.record.faults["slots changed"] += 1

    async def _lose_node(self, nodes: Nodes, seconds: float, ending: asyncio.Event) -> None:
        record = self._crew.record
        if await _wait(ending, self._chance.uniform(0.1, 0.4) * seconds):
            return
        node = self._chance.randrange(nodes.count)
        async with self._administering:
            await asyncio.sleep(SETTLED_SECONDS)
            at = time.monotonic()
            await nodes.kill(node)
            record.disturb("", NODE_LOST, at, time.monotonic() + NODE_LOST_SECONDS)
        try:
            await _wait(ending, self._chance.uniform(*NODE_DOWN_SECONDS))
        finally:
            await asyncio.shield(nodes.start(node))
        record.disturb("", AWAY, at, time.monotonic() + NODE_BACK_SECONDS)
        await asyncio.sleep(SETTLED_SECONDS)

    async def _take_tokens(self, nodes: Taking, ending: asyncio.Event) -> None:
        while not await _wait(ending, self._chance.uniform(*TAKE_PAUSE_SECONDS)):
            at = time.monotonic()
            await nodes.take_tokens()
            self._crew.record.disturb("", TAKEN, at, time.monotonic() + TAKEN_SECONDS)


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Return whether the event is set before ``seconds`` have passed."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
