"""One seed of a machine with an embedded proxy: its power is cut, its disk fills up, and its process is killed."""

import asyncio
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from popgate.domain.names import GroupName, Subscription, TopicName, own_layout
from simulator.course import GROUP, SECONDS, TOPIC, Ground, Outcome, run_course
from simulator.disk import Disk
from simulator.embedded import EmbeddedProxy
from simulator.loop import VirtualLoop
from simulator.network import Network
from support.audit import Audit


class Fault(StrEnum):
    POWER = "a power cut"
    KILL = "SIGKILL"
    RESTART = "SIGTERM and a start"
    PAUSE = "SIGSTOP"
    CLOCK = "the clock is an hour off"
    FULL = "a full disk"
    LOSS = "lost requests and answers"


WEIGHTS = {
    Fault.POWER: 10,
    Fault.KILL: 2,
    Fault.RESTART: 2,
    Fault.PAUSE: 1,
    Fault.CLOCK: 1,
    Fault.FULL: 2,
    Fault.LOSS: 1,
}
SECONDS_OF = {
    Fault.POWER: (0.0, 2.0),
    Fault.KILL: (0.0, 2.0),
    Fault.RESTART: (0.0, 1.0),
    Fault.PAUSE: (0.5, 12.0),
    Fault.CLOCK: (0.5, 10.0),
    Fault.FULL: (0.1, 4.0),
    Fault.LOSS: (0.5, 4.0),
}
QUEUES = 1, 2, 4
PAUSE_SECONDS = 0.2, 5.0
OPERATIONS = 1, 80
"""The power is cut before one of this many writes and syncs..."""
OPERATIONS_SECONDS = 3.0
"""...or after this many seconds, if there are fewer."""
CLOCK_SECONDS = 3_600.0
LOSS = 0.3


def simulate_embedded(seed: int) -> Outcome:
    """Run one seed."""
    return run_course("embedded", seed, _course)


async def _course(loop: VirtualLoop, outcome: Outcome, cleanup: ExitStack) -> None:
    seed = outcome.seed
    chance = random.Random(f"embedded {seed}")
    ground = Ground(seed, chance)
    network, failures = ground.network, ground.failures
    disk = cleanup.enter_context(Disk())
    folder = Path(cleanup.enter_context(TemporaryDirectory(prefix="popgate-simulation-")))
    machine = Machine(folder, disk, loop, random.Random(f"machine {seed}"), network, failures)
    cleanup.callback(machine.bury)
    await machine.start()
    queue_count = chance.choice(QUEUES)
    await ground.create_topics(machine.proxy, queues=queue_count, redriven_queues=1)
    nemesis = Nemesis(machine, disk, network, ground.audit, random.Random(f"nemesis {seed}"))
    is_empty = partial(machine.is_empty, queue_count)
    await ground.go_through(outcome, machine.up, proxies={}, disturb=nemesis.disturb, is_empty=is_empty)
    failures += [f"what the disk was to do failed: {error!r}" for error in disk.failures]
    ground.blame_processes(outcome)
    outcome.faults = {str(fault): number for fault, number in nemesis.faults.items()}


class Machine:
    """Runs one proxy at a time; the next one finds what the previous one left on the disk."""

    def __init__(
        self,
        folder: Path,
        disk: Disk,
        loop: VirtualLoop,
        chance: random.Random,
        network: Network,
        failures: list[str],
    ) -> None:
        self._folder = folder
        self._disk = disk
        self._loop = loop
        self._chance = chance
        self._network = network
        self._failures = failures
        self._numbers = count(1)
        self._lives: list[EmbeddedProxy] = []

    @property
    def proxy(self) -> EmbeddedProxy:
        """Return the latest proxy."""
        return self._lives[-1]

    def up(self) -> Sequence[EmbeddedProxy]:
        """Return the proxy if it listens."""
        return [self.proxy] if self.proxy.is_up else []

    async def start(self) -> None:
        """Return when a proxy is up. Raises: PopgateError, if it refuses to start."""
        if self._lives:
            self.proxy.bury()
        proxy = EmbeddedProxy(
            f"e{len(self._lives) + 1}",
            self._folder / f"{len(self._lives) + 1}",
            loop=self._loop,
            chance=self._chance,
            network=self._network,
            failures=self._failures,
        )
        self._lives.append(proxy)
        proxy.process.spawn(proxy.start(), "start")
        while not proxy.is_up and not proxy.process.is_dead:  # noqa: ASYNC110  # it is another process
            await asyncio.sleep(0.01)
        if proxy.refusal is not None:
            raise proxy.refusal

    async def stop(self) -> None:
        """Stop the proxy in order."""
        proxy = self.proxy
        if not proxy.process.is_dead:
            proxy.process.spawn(proxy.leave(), "leave")
            while not proxy.process.is_dead:  # noqa: ASYNC110  # it is another process
                await asyncio.sleep(0.01)
        shutil.copytree(proxy.folder, self._next_folder)

    def kill(self) -> None:
        """Kill only the process: the machine keeps what was written."""
        if not self.proxy.process.is_dead:
            self.proxy.kill()
            shutil.copytree(self.proxy.folder, self._next_folder)

    def cut_power(self) -> None:
        if not self.proxy.process.is_dead:
            self.proxy.kill()
            self._disk.cut_power(self.proxy.folder, self._next_folder, self._chance)

    @property
    def _next_folder(self) -> Path:
        return self._folder / f"{len(self._lives) + 1}"

    def bury(self) -> None:
        for proxy in self._lives:
            proxy.bury()

    async def is_empty(self, queue_count: int) -> bool:
        """Return whether the store has nothing left but dead letters."""
        layout = own_layout(Subscription(TopicName(TOPIC), GroupName(GROUP)), queue_count)
        return not any(depth.ready for depth in await self.proxy.broker.depth(layout.queues))


class Nemesis:
    """Injects one fault at a time. ``faults``: how often each was injected."""

    def __init__(self, machine: Machine, disk: Disk, network: Network, audit: Audit, chance: random.Random) -> None:
        self.faults: Counter[Fault] = Counter()
        self._machine = machine
        self._disk = disk
        self._network = network
        self._audit = audit
        self._chance = chance

    async def disturb(self) -> None:
        """Inject faults for that long; return when everything works again."""
        loop, chance = asyncio.get_running_loop(), self._chance
        ends_at = loop.time() + SECONDS
        while loop.time() < ends_at:
            await asyncio.sleep(chance.uniform(*PAUSE_SECONDS))
            (fault,) = chance.choices([*WEIGHTS], [*WEIGHTS.values()])
            seconds = chance.uniform(*SECONDS_OF[fault])
            self._audit.mark(f"{fault} for {seconds:.1f} s")
            self.faults[fault] += 1
            await self._do(fault, seconds)
            self._audit.mark(f"{fault} is over")

    async def _do(self, fault: Fault, seconds: float) -> None:
        machine, proxy = self._machine, self._machine.proxy
        match fault:
            case Fault.POWER:
                await self._cut_power()
            case Fault.KILL:
                machine.kill()
            case Fault.RESTART:
                await machine.stop()
            case Fault.PAUSE:
                proxy.process.pause()
            case Fault.CLOCK:
                proxy.clock.jump_wall(CLOCK_SECONDS if seconds > 5.0 else -CLOCK_SECONDS)
            case Fault.FULL:
                self._disk.is_full = True
            case Fault.LOSS:
                self._network.loss = LOSS
        await asyncio.sleep(seconds)
        proxy.process.resume()
        self._disk.is_full = False
        self._network.loss = 0.0
        if proxy.process.is_dead:
            await machine.start()

    async def _cut_power(self) -> None:
        """Cut the power in the middle of SQLite's work."""
        self._disk.at(self._chance.randint(*OPERATIONS), self._machine.cut_power)
        ends_at = asyncio.get_running_loop().time() + OPERATIONS_SECONDS
        process = self._machine.proxy.process
        while not process.is_dead and asyncio.get_running_loop().time() < ends_at:  # noqa: ASYNC110  # it is a disk
            await asyncio.sleep(0.001)
        self._disk.not_any_more()
        self._machine.cut_power()
